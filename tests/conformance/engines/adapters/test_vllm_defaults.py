"""Settings of vLLM: each is known, and each deviation from a release's defaults is listed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_support.installed import VERSION, needs_vllm, quiet
from vllm_support.knobs import WHOLE, get_stored, read_knobs

from blockstep.conformance.engine import EngineFault, EngineTraits, Setting
from blockstep.conformance.engines.adapters.vllm_defaults import (
    DEVIATIONS,
    FOLLOWS,
    LEFT,
    format_table,
    is_known,
    list_settings,
)
from blockstep.conformance.engines.adapters.vllm_releases import TRIED
from blockstep.conformance.engines.adapters.vllm_runner import (
    check_runner,
    note_entering,
    read_resumed_rows,
    split_new_rows,
)
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.report.jsonform import check_to_json
from blockstep.conformance.report.verdict import verdict_text
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.verdict_requirements import read_engine_facts
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, SpecMethod

ADAPTERS = "blockstep.conformance.engines.adapters"
PAGE = Path(__file__).parents[4] / "docs/explanation/vllm-adapter.md"
pytestmark = quiet
STORED = get_stored()


# Without vLLM.


@pytest.mark.parametrize("version", STORED)
def test_every_knob_of_a_release_is_known(version: str) -> None:
    assert len(STORED[version]) > 100
    assert [knob for knob in STORED[version] if not is_known(knob)] == []


def test_a_knob_of_a_new_release_is_unknown() -> None:
    for knob in ("SchedulerConfig.magic", "environment.VLLM_MAGIC", "magic_config.block_size"):
        assert not is_known(knob)


def test_a_knob_is_in_one_table_and_of_some_release() -> None:
    tables = [
        [f"{owner}.{name}" for owner, names in table.items() for name in sorted(names)]
        for table in (FOLLOWS, LEFT)
    ]
    listed = [*tables[0], *tables[1], *(one.knob for one in DEVIATIONS)]
    assert len(set(listed)) == len(listed)
    known = {knob for knobs in STORED.values() for knob in knobs}
    # Three that no config has: a property, a constant of the machine and a variable of Python.
    others = {
        "SpeculativeConfig.max_num_new_slots_for_drafting",
        "vllm.config.vllm.HAS_TRITON",
        "environment.PYTHONHASHSEED",
    }
    assert set(listed) - known == others


def test_stored_releases_are_the_tried_ones() -> None:
    def minor(version: str) -> str:
        return version.rpartition(".")[0]

    assert set(STORED) <= set(TRIED)
    assert {minor(version) for version in STORED} == {minor(version) for version in TRIED}


def test_defaults_are_those_of_the_releases() -> None:
    """Compare the default of each knob that is a config field with the release's source."""
    named = {one.knob: one for one in DEVIATIONS}
    seen = {
        version: knobs["CacheConfig.prefix_cache_retention_interval"]
        for version, knobs in STORED.items()
        if "CacheConfig.prefix_cache_retention_interval" in knobs
    }
    retention = named["KVCacheConfig.prefix_cache_retention_interval"]
    assert {v for v in STORED if retention.get_default(v) is not None} == seen.keys()
    # 0.29.0 alone takes it from a variable that it deprecates, and 0 where that is not set.
    assert set(seen.values()) == {"0", "_get_prefix_cache_retention_interval()"}
    for knob in (
        "SpeculativeConfig.disable_lookahead_block_hashes",
        "StructuredOutputsConfig.backend",
    ):
        for version, knobs in STORED.items():
            default = knobs.get(knob)
            expected = None if default is None else default.strip("'")
            assert named[knob].get_default(version) == expected


def test_settings_of_the_user_are_listed_first() -> None:
    names = [one.name for one in list_settings("0.33.0", {"VLLM_USE_V2_MODEL_RUNNER": "0"})]
    assert names[:2] == ["VLLM_USE_V2_MODEL_RUNNER=0", "retention dense"]
    assert "retention dense" not in [one.name for one in list_settings("0.19.1", {})]


class Elsewhere(SpecEngine):
    """The specification with a setting that is not at its default."""

    traits = EngineTraits(
        settings=(Setting("hats on", "HatConfig.hats", "off", "on", "all configs", "it is cold"),)
    )


def test_a_verdict_names_settings_that_are_not_at_their_defaults() -> None:
    facts = read_engine_facts(CheckOptions(), Elsewhere)
    result = CheckResult(CheckOptions(), settings=facts.settings)
    text = verdict_text(result)
    assert "setting     hats on: HatConfig.hats is on, by default off; it is cold" in text
    assert text.splitlines()[-1] == "run at: hats on"
    result.num_events = result.canary_killed_after = 1
    assert verdict_text(result).splitlines()[-1] == "conforms at: hats on"
    assert check_to_json(result)["settings"] == [
        {
            "name": "hats on",
            "knob": "HatConfig.hats",
            "default": "off",
            "checked": "on",
            "where": "all configs",
            "reason": "it is cold",
        }
    ]


def test_a_verdict_at_default_settings_names_none() -> None:
    text = verdict_text(
        CheckResult(CheckOptions(), settings=read_engine_facts(CheckOptions(), SpecEngine).settings)
    )
    assert " at: " not in text
    assert "setting " not in text


def test_the_page_has_the_table() -> None:
    begin, end = "<!-- defaults: begin -->\n", "<!-- defaults: end -->"
    page = PAGE.read_text()
    assert page.count(begin) == page.count(end) == 1
    assert page.partition(begin)[2].partition(end)[0].strip() == format_table(TRIED)


# Plans of Model Runner V2, without vLLM.


def plan_for_v2(**changes: Any) -> Any:
    """A plan in which B is new, C is resumed after one output, and A runs on."""
    row = {"block_ids": ([1],), "num_computed_tokens": 0, "req_id": "B"}
    fields: dict[str, Any] = {
        "scheduled_new_reqs": [
            SimpleNamespace(**row, prompt_token_ids=[5], prefill_token_ids=[5]),
            SimpleNamespace(
                **row | {"req_id": "C", "block_ids": ([2, 3],)},
                prompt_token_ids=[7],
                prefill_token_ids=[7, 8],
            ),
        ],
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=["A"], resumed_req_ids=set(), all_token_ids={}
        ),
        "num_scheduled_tokens": {"A": 1, "C": 2, "B": 1},
        "scheduled_spec_decode_tokens": {},
        "preempted_req_ids": set(),
        "skip_drafts": False,
    }
    return SimpleNamespace(**fields | changes)


def run_of_v2(**changes: Any) -> Any:
    """A run after that plan was made: A has an output, each request may have nine."""
    counts = {"A": (4, 4, 1), "B": (1, 1, 0), "C": (2, 2, 1)}
    requests = {
        name: SimpleNamespace(
            status=SimpleNamespace(name="PREEMPTED" if name == "C" else "WAITING"),
            num_preemptions=int(name == "C"),
            num_output_placeholders=0,
            num_computed_tokens=num_computed,
            num_tokens=num_tokens,
            num_output_tokens=num_outputs,
            all_token_ids=[3] * num_tokens,
            max_tokens=9,
        )
        for name, (num_computed, num_tokens, num_outputs) in counts.items()
    }
    config = Config(num_blocks=8, spec_method=SpecMethod.EAGLE, num_speculative_tokens=1)
    fields = {"scheduler": SimpleNamespace(requests=requests), "config": config}
    known = {"has_second_runner": True, "planned": ("A",)}
    return SimpleNamespace(**fields | known | changes)


def test_new_rows_of_preempted_requests_are_resumed_rows() -> None:
    run, plan = run_of_v2(), plan_for_v2()
    entering = note_entering(run.scheduler.requests)
    check_runner(run, plan, entering)
    new, resumed = split_new_rows(run, plan, entering)
    assert [row.req_id for row in new] == ["B"]
    (row,) = read_resumed_rows(plan, resumed)
    assert (row.request_id, row.resumed, row.all_token_ids) == ("C", True, (7, 8))
    assert (row.new_block_ids, row.num_output_tokens) == (((2, 3),), 1)
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (0, 2)


def test_a_preempted_request_counts_as_resumed_after_a_load() -> None:
    requests = run_of_v2().scheduler.requests
    for name in ("B", "C"):
        requests[name].status.name = "WAITING_FOR_REMOTE_KVS"
    assert note_entering(requests).resumed == {"C"}


def swap(plan: Any) -> None:
    plan.scheduled_new_reqs.reverse()


def add_to_a_new_prompt(plan: Any) -> None:
    plan.scheduled_new_reqs[0].prefill_token_ids = [5, 6]


def change_a_resumed_prompt(plan: Any) -> None:
    plan.scheduled_new_reqs[1].prefill_token_ids = [6, 8]


def drop_a_resumed_prompt(plan: Any) -> None:
    plan.scheduled_new_reqs[1].prefill_token_ids = None


def resume_a_cached_row(plan: Any) -> None:
    plan.scheduled_cached_reqs.resumed_req_ids = {"A"}


def send_all_tokens_of_a_cached_row(plan: Any) -> None:
    plan.scheduled_cached_reqs.all_token_ids = {"A": [1]}


def skip_drafts(plan: Any) -> None:
    plan.skip_drafts = True


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (swap, "scheduled_new_reqs in this plan"),
        (add_to_a_new_prompt, "prefill_token_ids of new row 'B'"),
        (change_a_resumed_prompt, "prefill_token_ids of resumed row 'C'"),
        (drop_a_resumed_prompt, "prefill_token_ids of resumed row 'C'"),
        (resume_a_cached_row, "scheduled_cached_reqs.resumed_req_ids"),
        (send_all_tokens_of_a_cached_row, "scheduled_cached_reqs.all_token_ids"),
        (skip_drafts, "skip_drafts in this plan is True"),
    ],
)
def test_a_wrong_plan_for_model_runner_v2_is_found(spoil: Any, field: str) -> None:
    run, plan = run_of_v2(), plan_for_v2()
    spoil(plan)
    with pytest.raises(EngineFault, match=re.escape(field)):
        check_runner(run, plan, note_entering(run.scheduler.requests))


def test_a_request_left_out_of_the_last_plan_may_be_sent_its_tokens_again() -> None:
    run, plan = run_of_v2(planned=("B",)), plan_for_v2()
    entering = note_entering(run.scheduler.requests)
    plan.scheduled_cached_reqs.all_token_ids = {"A": [3, 3, 3, 3]}
    check_runner(run, plan, entering)
    plan.scheduled_cached_reqs.all_token_ids = {"A": [3, 3]}
    with pytest.raises(EngineFault, match=re.escape("all_token_ids of 'A' is [3, 3]")):
        check_runner(run, plan, entering)


def test_drafts_are_skipped_where_none_can_be_used() -> None:
    run = run_of_v2()
    run.scheduler.requests["A"].max_tokens = 2  # with the output of this step it has all
    run.scheduler.requests["B"].num_tokens = 3  # a chunk: its tokens are not all planned
    run.scheduler.requests["C"].num_output_placeholders = 1
    run.scheduler.requests["C"].max_tokens = 3  # one in flight, and one of this step
    entering = note_entering(run.scheduler.requests)
    check_runner(run, plan_for_v2(skip_drafts=True), entering)
    with pytest.raises(EngineFault, match="skip_drafts in this plan is False"):
        check_runner(run, plan_for_v2(), entering)
    # A row that was withdrawn from the plan may have needed drafts.
    check_runner(run, plan_for_v2(preempted_req_ids={"D"}), entering)


def test_new_rows_for_the_older_runner_are_of_new_requests_only() -> None:
    run = run_of_v2(has_second_runner=False)
    with pytest.raises(EngineFault, match="scheduled_new_reqs in this plan"):
        check_runner(run, plan_for_v2(), note_entering(run.scheduler.requests))


# With vLLM.


def load(name: str) -> Any:
    return importlib.import_module(f"{ADAPTERS}.{name}")


@needs_vllm
def test_the_installed_release_has_no_unknown_knobs() -> None:
    vllm = importlib.import_module("vllm")
    knobs = read_knobs(Path(str(vllm.__file__)).parent)
    assert [knob for knob in knobs if not is_known(knob)] == []
    if VERSION in STORED:
        assert knobs == STORED[VERSION]


@needs_vllm
@pytest.mark.parametrize("method", list(SpecMethod))
def test_a_release_is_built_from_its_defaults(method: SpecMethod) -> None:
    """Each field has the release's default, unless it follows our config or is a deviation."""
    build = load("vllm_build")
    num_drafts = 0 if method is SpecMethod.NONE else 2
    built = build.build_vllm_config(
        Config(num_blocks=8, spec_method=method, num_speculative_tokens=num_drafts)
    )
    # What a release works out from its defaults when a whole config is built counts as one.
    bare = build.VllmConfig(
        model_config=build.get_model_config(), device_config=build.DeviceConfig("cpu")
    )
    pairs = [
        (built.scheduler_config, bare.scheduler_config),
        (built.cache_config, bare.cache_config),
    ]
    if built.speculative_config is not None:
        fields = build.SpeculativeConfig.__pydantic_fields__.items()
        defaults = {name: one.get_default(call_default_factory=True) for name, one in fields}
        pairs.append((built.speculative_config, SimpleNamespace(**defaults)))
    deviating = {one.knob for one in DEVIATIONS}
    for part, default in pairs:
        owner = next(kind.__name__ for kind in type(part).__mro__ if kind.__name__ in WHOLE)
        names = vars(default).keys() - FOLLOWS[owner]
        names = {name for name in names if f"{owner}.{name}" not in deviating}
        assert len(names) > 5
        seen = {name: getattr(part, name) for name in names}
        assert seen == {name: getattr(default, name) for name in names}


@needs_vllm
def test_retention_is_the_default_where_no_block_is_left_out() -> None:
    build, default = load("vllm_build"), load("vllm_build").CacheConfig(block_size=1)
    if not hasattr(default, "prefix_cache_retention_interval"):
        pytest.skip("the release publishes all blocks")
    window = KVGroup(block_size=1, kind=GroupKind.SLIDING_WINDOW, sliding_window=2)
    for groups, expected in (
        ((), default.prefix_cache_retention_interval),
        ((KVGroup(kind=GroupKind.FULL, block_size=1), window), None),
    ):
        config = Config(num_blocks=8, block_size=1, groups=groups)
        scheduler = build.build_scheduler(config)
        assert scheduler.kv_cache_config.prefix_cache_retention_interval == expected


@needs_vllm
def test_a_release_chooses_its_runner_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source: `VllmConfig.use_v2_model_runner`, and the models and features that it lists."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    number = tuple(map(int, VERSION.split(".")[:2]))
    expected = {
        SpecMethod.NONE: number >= (0, 23),
        SpecMethod.EAGLE: number >= (0, 23),
        SpecMethod.NGRAM: number >= (0, 32),
        SpecMethod.DRAFT_MODEL: number >= (0, 31),
    }
    for method, has_second in expected.items():
        num_drafts = 0 if method is SpecMethod.NONE else 2
        config = Config(num_blocks=8, spec_method=method, num_speculative_tokens=num_drafts)
        assert load("vllm_state").Run(config).has_second_runner is has_second, method
