"""KV cache groups of vLLM: mixes that a release takes, and wrong keys and tables are found."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from vllm_support.installed import (
    PROFILE,
    RELEASE,
    VERSION,
    get_known,
    needs,
    needs_newest,
    needs_reference,
    needs_vllm,
    quiet,
)

from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.draw.presets import SMALL
from blockstep.conformance.draw.swarms import draw_swarm
from blockstep.conformance.engine import EngineFault, EngineTraits
from blockstep.conformance.engines.adapters import vllm_groups
from blockstep.conformance.engines.adapters.vllm_block_keys import (
    DIGEST_SIZE,
    Digests,
    RequestRecord,
)
from blockstep.conformance.engines.adapters.vllm_groups import (
    find_problem,
    fit_groups,
    require_groups,
)
from blockstep.conformance.engines.adapters.vllm_releases import REFERENCE, Release
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.feature_selection import FeatureSelection
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.search.episodes import fit_config
from blockstep.spec import vocabulary as v

ADAPTER = "blockstep.conformance.engines.adapters.vllm"
pytestmark = quiet

FULL = v.KVGroup(v.GroupKind.FULL, 2)
WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=3)
CHUNKS = v.KVGroup(v.GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=4)
STATES = v.KVGroup(v.GroupKind.RECURRENT, 2, mamba_cache_mode=v.MambaCacheMode.ALL)
ALIGNED = replace(STATES, mamba_cache_mode=v.MambaCacheMode.ALIGN)
NARROW = replace(WINDOW, sliding_window=1)
LARGE = replace(FULL, block_size=4)
LARGE_CHUNKS = replace(CHUNKS, block_size=4)
LARGE_ALIGNED = replace(ALIGNED, block_size=4)
LARGE_WINDOW = replace(WINDOW, block_size=4)
EAGLE = {"spec_method": v.SpecMethod.EAGLE, "num_speculative_tokens": 1}


OLDEST, OURS, NEWEST = map(get_known, ("0.11.0", REFERENCE, "0.33.0"))


def build(*groups: v.KVGroup, **fields: Any) -> v.Config:
    return v.Config(num_blocks=30, block_size=2, groups=groups, **fields)


# Without vLLM.


@pytest.mark.parametrize(
    "config",
    [
        build(),
        build(WINDOW),
        build(CHUNKS),
        build(FULL, WINDOW, **EAGLE),
        build(FULL, CHUNKS),
        build(WINDOW, WINDOW, FULL),
        build(FULL, WINDOW, CHUNKS, LARGE, enable_prefix_caching=False, **EAGLE),
        build(FULL, FULL, enable_prefix_caching=False),
        build(FULL, NARROW, enable_prefix_caching=False),
        build(FULL, NARROW, **EAGLE),
    ],
)
@pytest.mark.parametrize("release", [OLDEST, OURS, NEWEST], ids=lambda one: one.version)
def test_every_release_takes_common_mixes_of_groups(release: Release, config: v.Config) -> None:
    assert find_problem(release, config) is None
    assert fit_groups(release, config) == (config, None)
    require_groups(release, config)


@pytest.mark.parametrize(
    ("version", "config", "reason", "fitting"),
    [
        (REFERENCE, build(CHUNKS, **EAGLE), "CHUNKS_WITH_A_HEAD", (CHUNKS,)),
        (REFERENCE, build(LARGE, CHUNKS), "CHUNKS_OF_ANOTHER_SIZE", (LARGE, LARGE_CHUNKS)),
        (REFERENCE, build(WINDOW, WINDOW), "ALL_EQUAL", (WINDOW,)),
        ("0.33.0", build(FULL, WINDOW, CHUNKS, **EAGLE), "CHUNKS_WITH_A_HEAD", None),
        ("0.33.0", build(FULL, STATES), "NO_STATES_OF_ALL", (FULL, ALIGNED)),
        ("0.33.0", build(LARGE, ALIGNED), "PARTS_OF_BLOCKS", (LARGE, LARGE_ALIGNED)),
        ("0.33.0", build(FULL, LARGE_WINDOW), "PARTS_OF_BLOCKS", (LARGE, LARGE_WINDOW)),
        ("0.33.0", build(FULL, NARROW), "NARROW_WINDOWS",
         (FULL, replace(NARROW, sliding_window=2))),
        ("0.11.0", build(LARGE, STATES), "NO_RECURRENT", (FULL,)),
        ("0.11.0", build(ALIGNED), "NO_RECURRENT", ()),
        ("0.11.0", build(FULL, LARGE_WINDOW), "SEVERAL_SIZES", (LARGE, LARGE_WINDOW)),
        ("0.11.0", build(LARGE, FULL), "SEVERAL_SIZES", (LARGE,)),
        ("0.11.0", build(FULL, WINDOW, CHUNKS), "OTHER_MIXES", (FULL, WINDOW)),
        ("0.11.0", build(WINDOW, FULL, WINDOW), "OTHER_MIXES", (WINDOW, WINDOW, FULL)),
        ("0.11.0", build(FULL, WINDOW, FULL), "OTHER_MIXES", (FULL, FULL, WINDOW)),
        ("0.11.0", build(WINDOW, CHUNKS), "OTHER_MIXES", (WINDOW,)),
        ("0.11.0", build(FULL, FULL), "OTHER_MIXES", (FULL,)),
        ("0.12.0", build(FULL, WINDOW, async_scheduling=True), "NULL_BLOCKS", None),
        ("0.12.0", build(CHUNKS, async_scheduling=True), "NULL_BLOCKS", None),
    ],
)  # fmt: skip
def test_an_unsupported_mix_is_replaced_by_the_nearest_one(
    version: str, config: v.Config, reason: str, fitting: tuple[v.KVGroup, ...] | None
) -> None:
    release, problem = get_known(version), getattr(vllm_groups, reason)
    assert find_problem(release, config) == problem
    found, why = fit_groups(release, config)
    assert why == problem
    assert found.groups == (config.groups if fitting is None else fitting)
    assert v.config_problems(found) == ()
    assert find_problem(release, found) is None
    with pytest.raises(v.ConfigError, match=f"no mix for vLLM {version}: {problem.split(':')[0]}"):
        require_groups(release, config)


@pytest.mark.parametrize("release", [OLDEST, OURS, NEWEST], ids=lambda one: one.version)
def test_a_config_that_was_fitted_to_a_release_is_valid(release: Release) -> None:
    """Recurrent states of the mode `align` exclude items that are never split."""
    wish = FeatureSelection(frozenset({"groups", "states", "encoder"}), frozenset())
    for seed in range(400):
        drawn = draw_swarm(SMALL, SeededDraw(str(seed)), wish=wish).config
        fitting, _ = fit_groups(release, drawn)
        assert v.config_problems(fitting) == ()


def test_blocks_of_aligned_states_are_larger_than_the_drafts() -> None:
    states = replace(STATES, num_speculative_blocks=4)
    config = build(FULL, states, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=3)
    assert v.config_problems(config) == ()
    found, _ = fit_groups(NEWEST, config)
    assert found.block_sizes == (5, 5)
    assert v.config_problems(found) == ()


def test_items_may_be_split_in_a_config_fitted_to_aligned_states() -> None:
    """Items that are never split are refused with such states; a hunt once ended with code 2."""
    items = {"encoder_compute_budget": 4, "encoder_cache_size": 4}
    config = build(FULL, STATES, disable_chunked_mm_input=True, **items)
    assert v.config_problems(config) == ()
    found, _ = fit_groups(NEWEST, config)
    assert not found.disable_chunked_mm_input
    assert v.config_problems(found) == ()


def test_the_null_block_is_published_only_under_asynchronous_scheduling() -> None:
    """0.14.0 publishes no null block; without caching, or without a window, none is published."""
    config = build(WINDOW, FULL, async_scheduling=True)
    old, new = get_known("0.12.0"), get_known("0.14.0")
    assert find_problem(old, config) == vllm_groups.NULL_BLOCKS
    assert not fit_groups(old, config)[0].async_scheduling
    assert find_problem(old, replace(config, enable_prefix_caching=False)) is None
    assert find_problem(old, replace(config, groups=(FULL,))) is None
    assert find_problem(new, config) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (build(WINDOW, FULL, replace(WINDOW, sliding_window=5)), [False, True, True]),
        (build(FULL, LARGE_WINDOW), [False, True, False]),
        (build(FULL, FULL), [False, False, True]),
    ],
)
def test_releases_take_mixes_that_others_do_not(config: v.Config, expected: list[bool]) -> None:
    assert [find_problem(one, config) is None for one in (OLDEST, OURS, NEWEST)] == expected


def test_an_engine_is_given_a_config_that_its_adapter_fits() -> None:
    def make(config: v.Config) -> SpecEngine:
        return SpecEngine(config)

    make.traits = EngineTraits(fit_config=partial(fit_groups, OURS))  # type: ignore[attr-defined]
    config = build(CHUNKS, FULL, **EAGLE)
    fitting, missing = fit_config(config, make)
    assert fitting == replace(config, spec_method=v.SpecMethod.NGRAM)
    assert missing == (vllm_groups.CHUNKS_WITH_A_HEAD,)
    assert fit_config(fitting, make) == (fitting, ())


def test_a_block_is_looked_up_by_its_last_digest_or_by_all_digests() -> None:
    digests = Digests(OURS, 2)
    names = [bytes([n]) * DIGEST_SIZE for n in range(3)]
    digests.learn(RequestRecord(v.Request("A", tuple(range(6)))), 0, names, range(6), ())
    keys = [digests.key_of[name] for name in names]
    assert digests.read(names[1], 0) is keys[1]
    assert digests.read(names[1], 2) == keys[1].in_group(2)
    assert digests.read(names[0] + names[1], 1) == keys[1].in_group(1)
    with pytest.raises(EngineFault, match="one block has the digests"):
        digests.read(names[0] + names[2], 1)


# With vLLM.


@needs_vllm
def test_blocks_are_of_equal_bytes_and_equal_groups_have_equal_specs() -> None:
    groups = [FULL, LARGE, LARGE_WINDOW, WINDOW, replace(CHUNKS, block_size=6), LARGE]
    if RELEASE.has_recurrent_groups:
        groups += [STATES, replace(STATES, block_size=12)]
    built = importlib.import_module(f"{ADAPTER}_build").build_groups(build(*groups))
    specs = [one.kv_cache_spec for one in built]
    assert [spec.block_size for spec in specs] == [group.block_size for group in groups]
    assert len({spec.page_size_bytes for spec in specs}) == 1
    assert specs[1] == specs[5]
    assert [specs.count(spec) for spec in specs] == [groups.count(group) for group in groups]
    assert len({name for one in built for name in one.layer_names}) == len(groups)


@needs_reference
def test_a_plan_after_rejected_drafts_with_states_is_declined() -> None:
    states = replace(ALIGNED, block_size=4, num_speculative_blocks=2)
    config = v.Config(
        num_blocks=6, block_size=4, spec_method=v.SpecMethod.EAGLE, num_speculative_tokens=2,
        max_frames_in_flight=2, async_scheduling=True, groups=(states,),
    )  # fmt: skip
    steps = (v.Schedule(), *(v.Schedule(), Answer()) * 4, Answer(), v.Schedule())
    program = Program(config, (v.Submit(v.Request("A", (0,), max_tokens=6)), *steps))
    make, profile = load_engine("vllm"), PROFILE
    run, findings = run_program(program, make, profile)
    assert findings == []
    assert {name: n for name, n in run.skipped.items() if "states" in name} == {
        "a plan behind rejected drafts that had states: fewer blocks than there are": 1
    }
    _, findings = run_program(program, make, replace(profile, spares=False))
    assert "num_required_blocks 4 < len(req_blocks) 5" in findings[0].message


@needs_vllm
def test_an_engine_with_an_unsupported_mix_is_a_config_error() -> None:
    with pytest.raises(v.ConfigError, match=f"no mix for vLLM {VERSION}") as caught:
        importlib.import_module(ADAPTER).VllmEngine(build(CHUNKS, **EAGLE))
    (problem,) = caught.value.problems
    assert "use ngram, or no prefix caching" in str(problem)


# Wrong keys, tables and events of a group.


def rekey(snapshot_key: v.BlockKey) -> v.BlockKey:
    """The key of the same tokens in the other group."""
    return snapshot_key.in_group(1 - snapshot_key.group)


@needs_reference
@pytest.mark.parametrize("lie", ["group", "size"])
def test_a_key_of_another_group_or_of_another_size_is_found(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = importlib.import_module(f"{ADAPTER}_block_keys")
    read = names.Digests.read

    def read_wrongly(self: Any, name: bytes, group: int) -> v.BlockKey:
        key: v.BlockKey = read(self, name, group)
        if lie == "group":
            return rekey(key)
        return key if group == 0 or key.parent is None else key.parent.in_group(group)

    monkeypatch.setattr(names.Digests, "read", read_wrongly)
    engine = importlib.import_module(ADAPTER).VllmEngine(build(FULL, LARGE))
    engine.apply(v.Submit(v.Request("A", tuple(range(9)))))
    engine.apply(v.Schedule())
    with pytest.raises(EngineFault, match="its digest is not of that"):
        engine.snapshot()


@needs_newest
def test_the_key_of_a_partial_block_has_as_many_tokens_as_the_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = importlib.import_module(f"{ADAPTER}_build")
    monkeypatch.setattr(builder, "require_groups", lambda *_: None)
    engine = importlib.import_module(ADAPTER).VllmEngine(build(WINDOW, LARGE, **EAGLE))
    engine.apply(v.Submit(v.Request("A", tuple(range(11)))))
    engine.apply(v.Schedule())
    keys = [key for key in engine.snapshot().block_keys if key is not None and key.group == 1]
    assert [len(key.chain()) for key in keys] == [2, 4, 5]
    longest = next(key for key in keys if len(key.chain()) == 5)
    carried = next(name for name, key in engine.run.key_of.items() if key is longest)
    monkeypatch.setitem(engine.run.key_of, carried, longest.parent.in_group(1))
    with pytest.raises(EngineFault, match="its digest is not of that"):
        engine.snapshot()


@needs_newest
def test_no_block_of_a_narrow_window_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = importlib.import_module(f"{ADAPTER}_build")
    monkeypatch.setattr(builder, "require_groups", lambda *_: None)
    engine = importlib.import_module(ADAPTER).VllmEngine(build(FULL, NARROW))
    for frame_id, name in enumerate("AB"):
        engine.apply(v.Submit(v.Request(name, tuple(range(9)), max_tokens=1)))
        (row,) = engine.apply(v.Schedule()).new
        assert row.num_computed_tokens == 0, "there is no hit, although full attention has blocks"
        engine.apply(v.Commit(frame_id, (v.RowTokens(name, (7,)),)))
    assert {key.group for key in engine.snapshot().block_keys if key is not None} == {0}


@needs_vllm
@pytest.mark.parametrize("lie", ["swapped", "short", "null"])
def test_a_table_of_another_group_in_a_plan_is_found(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = importlib.import_module(ADAPTER)
    read_plan = adapter.read_plan

    def read_a_wrong_table(*arguments: Any) -> v.Plan:
        plan: v.Plan = read_plan(*arguments)
        (row,) = plan.new
        first, second = row.block_ids
        tables = {
            "swapped": (second, first),
            "short": (first, second[:-1]),
            "null": (first, (0, *second[1:])),
        }
        return replace(plan, new=(replace(row, block_ids=tables[lie]),))

    monkeypatch.setattr(adapter, "read_plan", read_a_wrong_table)
    engine = adapter.VllmEngine(build(FULL, WINDOW))
    engine.apply(v.Submit(v.Request("A", tuple(range(7)))))
    with pytest.raises(EngineFault, match="the block table that plans told 'A' is"):
        engine.apply(v.Schedule())


@needs_reference
def test_a_prompt_that_needs_more_state_blocks_than_reserved_is_admitted() -> None:
    """The second chunk reads one state block and writes another, but the pool has one block.

    The request preempts itself and is never admitted again, since it needs two state blocks.
    """
    config = v.Config(2, 2, max_num_batched_tokens=2, max_model_len=8, groups=(ALIGNED,))
    asked = v.Submit(v.Request("A", tuple(range(5)), max_tokens=1))
    assert isinstance(SpecEngine(config).apply(asked), v.Rejected)
    engine = importlib.import_module(ADAPTER).VllmEngine(config)
    engine.apply(asked)
    plans = [engine.apply(v.Schedule())]
    engine.apply(v.Commit(0, (v.RowTokens("A", ()),)))
    plans += [engine.apply(v.Schedule()) for _ in range(9)]
    assert [len(plan.rows) for plan in plans] == [1, *[0] * 9]
    assert plans[1].preempted_req_ids == ("A",)


@needs_vllm
@pytest.mark.parametrize("group", [0, 1])
def test_a_table_of_a_request_that_is_gone_is_found_in_any_group(group: int) -> None:
    engine = importlib.import_module(ADAPTER).VllmEngine(build(FULL, WINDOW))
    engine.snapshot()
    manager = engine.run.managers[group]
    manager.num_cached_block["gone"] = 1
    with pytest.raises(EngineFault, match="num_cached_block names 'gone', which is gone"):
        engine.snapshot()


@needs_reference
@pytest.mark.parametrize("field", ["last_state_block_idx", "_allocated_block_reqs"])
def test_states_of_a_request_that_is_gone_are_found(field: str) -> None:
    engine = importlib.import_module(ADAPTER).VllmEngine(build(FULL, ALIGNED))
    engine.snapshot()
    setattr(engine.run.managers[1], field, {"gone": 0})
    with pytest.raises(EngineFault, match=f"{field} names 'gone', which is gone"):
        engine.snapshot()


needs_events = needs(RELEASE.has_events, "the adapter reads no KV events of the release")
needs_groups_in_events = needs(RELEASE.has_event_groups, "its KV events do not name a group")


@needs_groups_in_events
@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("group_idx", None, "group_idx of a KV event is None, of 2 groups"),
        ("group_idx", 2, "group_idx of a KV event is 2, of 2 groups"),
        ("group_idx", 0, "group 0 is ('sliding_window', 3), not ('full_attention', None)"),
        ("kv_cache_spec_kind", "mamba", "group 1 is ('mamba', 3), not ('sliding_window', 3)"),
        ("kv_cache_spec_sliding_window", 4, "group 1 is ('sliding_window', 4), not"),
    ],
)
def test_an_event_that_names_another_group_is_a_fault(
    field: str, value: Any, complaint: str
) -> None:
    events = importlib.import_module(f"{ADAPTER}_events")
    event = events.BlockStored(
        *([], None, [], 2, None, "GPU", None),
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=3,
    )
    digests = Digests(RELEASE, 2)
    assert isinstance(events._read_event(event, digests, (FULL, WINDOW), {}), v.BlockStored)
    setattr(event, field, value)
    with pytest.raises(EngineFault, match=re.escape(complaint)):
        events._read_event(event, digests, (FULL, WINDOW), {})


@needs_events
def test_extra_keys_of_a_kv_event_must_be_the_hashed_ones() -> None:
    """The key of a block that outputs complete has its last item only in 0.19.1."""
    events = importlib.import_module(f"{ADAPTER}_events")
    cat, dog = ("cat", -2), ("dog", 2)
    event = events.BlockStored([b""], None, [1, 2, 3, 4], 4, 1, "GPU", "z", [("z", cat, dog)])
    key = v.BlockKey(None, (1, 2, 3, 4), adapter="z", items=(dog,))
    hashed = ("z", cat, dog) if RELEASE.has_all_items else ("z", dog)
    events._check_extras(event, (key,), lambda _: hashed)
    for other in (("y", dog), ("z", ("cow", 2)), (dog,)):
        with pytest.raises(EngineFault, match="extra_keys of"):
            events._check_extras(event, (key,), lambda _, other=other: other)
