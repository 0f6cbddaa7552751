"""The vLLM adapter: a release agrees with the specification under the release's profile.

Without vLLM, an import fails with a line that says how to install it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from episodes_support import play_episodes
from groups_support import chunks, full, recurrent, window
from vllm_support.installed import (
    PROFILE,
    RELEASE,
    VERSION,
    get_known,
    needs_reference,
    needs_vllm,
    quiet,
)

from blockstep.conformance.engine import ALL_CAPABILITIES, Engine, EngineFault, get_capabilities
from blockstep.conformance.engines.adapters import vllm_releases
from blockstep.conformance.engines.adapters.vllm_block_keys import (
    Digests,
    RequestRecord,
    compute_block_key,
    get_lora_name,
)
from blockstep.conformance.engines.adapters.vllm_groups import find_problem
from blockstep.conformance.engines.adapters.vllm_releases import REFERENCE
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program, Propose
from blockstep.conformance.protocol.registry import EngineNotFoundError, load_engine
from blockstep.conformance.search.episodes import fit_depth
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.suppressions import KnownCause, SuppressionKind, find_causes
from blockstep.conformance.search.verdict_requirements import read_engine_facts
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Profile, Quirk

ADAPTER = "blockstep.conformance.engines.adapters.vllm"
pytestmark = quiet


# Without vLLM.


def test_the_tools_do_not_import_vllm() -> None:
    source = (
        "import sys, blockstep.conformance.command.main\n"
        "import blockstep.conformance.engines.adapters.vllm_block_keys\n"
        "found = {name.partition('.')[0] for name in sys.modules} & {'vllm', 'torch'}\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


@pytest.mark.parametrize("version", [None, REFERENCE, "0.10.2", "0.99.0"])
def test_a_failed_import_of_vllm_names_how_to_install_it(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "0")  # the adapter sets them; undone with the test
    for name in ("torch", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    for name in (ADAPTER, f"{ADAPTER}_build"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(vllm_releases, "get_installed_version", lambda: version)
    with pytest.raises(EngineNotFoundError, match="make vllm") as caught:
        load_engine("vllm")
    wanted = {None: "vLLM is not installed", "0.10.2": "vLLM 0.10.2 is not supported"}
    default = f"vLLM {version} is installed but cannot be imported (import of "
    assert wanted.get(version, default) in str(caught.value)


def test_an_adapter_name_differs_from_an_equal_cache_salt() -> None:
    assert get_lora_name("x", separate_names=False) == "x"
    assert get_lora_name("x", separate_names=True) != "x"


REQUEST = v.Request(
    "A",
    tuple(range(8)),
    adapter="x",
    cache_salt="s",
    items=(v.MultiModalItem("a", 2, 3), v.MultiModalItem("b", 6, 1)),
)


compute_key = partial(compute_block_key, get_known(REFERENCE))


def test_block_keys_of_old_releases_have_items_without_offsets() -> None:
    old = get_known("0.18.1")
    key = compute_block_key(old, REQUEST, None, (0, 1, 2, 3), 0, is_continued=False)
    assert key.items == (("a", 0),)


def test_block_keys_of_new_releases_have_all_items_after_an_output() -> None:
    new = get_known("0.33.0")
    key = compute_block_key(new, REQUEST, None, (4, 5, 6, 7), 4, is_continued=True)
    assert key.items == (("a", -2), ("b", 2))


def test_a_block_key_has_parent_tokens_adapter_salt_and_items() -> None:
    first = compute_block_key(
        get_known(REFERENCE), REQUEST, None, (0, 1, 2, 3), 0, is_continued=False
    )
    second = compute_block_key(
        get_known(REFERENCE), REQUEST, first, (4, 5, 6, 7), 4, is_continued=False
    )
    assert first == v.BlockKey(None, (0, 1, 2, 3), "x", "s", (("a", 2),))
    assert second == v.BlockKey(first, (4, 5, 6, 7), "x", None, (("a", -2), ("b", 2)))


def test_an_item_next_to_a_block_is_not_in_its_key() -> None:
    before = compute_key(REQUEST, None, (0, 1), 0, is_continued=False)
    between = compute_block_key(get_known(REFERENCE), REQUEST, before, (5,), 5, is_continued=False)
    assert before.items == between.items == ()


def test_after_an_output_only_the_last_item_is_in_the_block_key() -> None:
    key = compute_block_key(get_known(REFERENCE), REQUEST, None, (4, 5, 6, 7), 4, is_continued=True)
    assert key.items == (("b", 2),)


@pytest.mark.parametrize(("version", "items"), [("0.18.1", (("b", 0),)), (REFERENCE, ())])
def test_an_item_that_ends_before_an_output_block_is_in_its_old_key(
    version: str, items: tuple[tuple[str, int], ...]
) -> None:
    key = compute_block_key(get_known(version), REQUEST, None, (7,), 7, is_continued=True)
    assert key.items == items


def test_a_first_block_has_every_item_though_an_output_completes_it() -> None:
    digests = Digests(get_known(REFERENCE), 8)
    digests.learn(RequestRecord(REQUEST), 0, [b"digest"], tuple(range(8)), REQUEST.items)
    assert digests.key_of[b"digest"].items == (("a", 2), ("b", 6))


def test_a_digest_keeps_tokens_that_an_update_of_the_session_dropped() -> None:
    digests, session = Digests(get_known(REFERENCE), 2), RequestRecord(v.Request("A", (1, 2, 3)))
    digests.learn(session, 0, [b"first", b"lost"], (1, 2, 3, 9), ())
    session.updates.append(v.Request("A", (5,), items=(v.MultiModalItem("a", 0, 1),)))
    session.follow((1, 2, 3, 5), max_tokens=16)
    digests.learn(session, 2, [b"third"], (1, 2, 3, 5, 6, 7), session.request.items)
    assert [key.token_ids for key in session.keys] == [(1, 2), (3, 9), (6, 7)]
    assert session.request.items == (v.MultiModalItem("a", 3, 1),)
    assert not session.updates


def test_a_digest_has_items_at_the_offsets_that_the_release_hashed() -> None:
    """If a release shifts the items of a session's input wrongly, the adapter must show the wrong
    offsets: a digest stands for what was hashed."""
    digests, session = Digests(get_known(REFERENCE), 2), RequestRecord(v.Request("A", (1, 2)))
    session.updates.append(v.Request("A", (5, 6, 7), items=(v.MultiModalItem("a", 1, 1),)))
    session.follow((1, 2, 5, 6, 7), max_tokens=16)
    assert session.request.items == (v.MultiModalItem("a", 3, 1),)
    elsewhere = (v.MultiModalItem("a", 2, 1),)
    digests.learn(session, 0, [b"first", b"second"], (1, 2, 5, 6, 7), elsewhere)
    assert [key.items for key in session.keys] == [(), (("a", 0),)]


@pytest.mark.parametrize(("version", "embeds"), [("0.11.0", ((), ())), (REFERENCE, ((7, 8), (9,)))])
def test_a_digest_covers_the_embeddings_of_its_prompt_positions(
    version: str, embeds: tuple[tuple[int, ...], ...]
) -> None:
    request = v.Request("A", (0, 0, 0), prompt_embeds=(7, 8, 9))
    first = compute_block_key(get_known(version), request, None, (0, 0), 0, is_continued=False)
    second = compute_block_key(get_known(version), request, first, (0, 5), 2, is_continued=True)
    assert (first.embeds, second.embeds) == embeds


# With vLLM.


def build(config: v.Config) -> Engine:
    return load_engine("vllm")(config)


def plans_of(run: LockStep) -> list[v.Plan]:
    """Return the engine's plans, in order."""
    return [exchange.seen for exchange in run.exchanges if isinstance(exchange.seen, v.Plan)]


def follow(profile: Profile, config: v.Config, *actions: Action) -> tuple[LockStep, str]:
    """Run actions on both sides, with 0 as the only token. Return the kinds of findings, too."""
    program = Program(config, actions, vocabulary_size=1)
    run, findings = run_program(program, build, profile)
    return run, " ".join(sorted({found.kind.value for found in findings}))


@needs_vllm
def test_the_adapter_declares_the_capabilities_that_a_release_lacks() -> None:
    engine = build(v.Config(num_blocks=9))
    assert isinstance(engine, Engine)
    has = {
        "pause": RELEASE.has_pause,
        "drafts": RELEASE.has_drafts,
        "grammar": RELEASE.has_plain_grammar,
        "async": RELEASE.has_async,
    }
    has["sessions"] = RELEASE.has_sessions
    has["masks"] = RELEASE.has_frame_masks
    has["encoder"] = RELEASE.has_offers
    has["cache statistics"] = RELEASE.has_sound_counters or RELEASE.has_countable_attempts
    has["common prefix"] = RELEASE.has_common_prefix
    has["events"] = RELEASE.has_events
    has["transfers"] = RELEASE.follows_store
    has["work"] = RELEASE.shows_work
    always = {"rejection", "statistics", "late drafts", "pins", "forks", "tiers", "cadence"}
    lacks = always | {name for name in has if not has[name]}
    assert ALL_CAPABILITIES - engine.capabilities() == lacks
    assert ("async" in get_capabilities(load_engine("vllm"))) == RELEASE.has_async


@needs_vllm
def test_tokens_for_the_first_pipeline_stage_must_be_the_sampled_ones() -> None:
    config = v.Config(num_blocks=9, max_frames_in_flight=2)
    actions = (v.Submit(v.Request("A", (1, 2), max_tokens=9)), v.Schedule(), Answer())
    engine = importlib.import_module(ADAPTER).VllmEngine(config)
    play_alone(engine, actions)
    scheduler = engine.run.scheduler
    plan = scheduler.schedule()
    assert plan.scheduled_cached_reqs.new_token_ids == [[0]]
    plan.scheduled_cached_reqs.new_token_ids = [[1]]
    scheduler.schedule = lambda: plan
    with pytest.raises(EngineFault, match="'A' is to run \\[1\\] from position 2, not \\[0\\]"):
        engine.apply(v.Schedule())


@needs_vllm
def test_embeddings_are_in_block_keys_and_in_plans() -> None:
    config = v.Config(num_blocks=20, block_size=2, max_model_len=16)
    tokens = (0, 0, 0, 0, 0)
    embeds = {"A": (7, 8, 9, 9, 9), "B": (7, 8, 2**31 - 1, 9, 9), "C": ()}
    actions: list[Action] = [
        v.Submit(v.Request(name, tokens, max_tokens=4, prompt_embeds=numbers))
        for name, numbers in embeds.items()
    ]
    run, wrong = follow(PROFILE, config, *actions, *(v.Schedule(), Answer()) * 3, Drain())
    assert wrong == ""
    if not RELEASE.has_named_embeds:
        reason = "embeddings with prefix caching: the release's front end has one or the other"
        assert run.skipped[reason] == 2
        config = replace(config, enable_prefix_caching=False)
        run, wrong = follow(PROFILE, config, *actions, Drain())
        assert wrong == ""
        assert reason not in run.skipped
    (plan, *_) = plans_of(run)
    planned = {row.request_id: row.request.prompt_embeds for row in plan.new}
    assert planned == embeds
    if RELEASE.has_named_embeds:
        assert [row.num_computed_tokens for row in plan.new] == [0, 2, 0]


GOALS: dict[tuple[str, ...], tuple[str, ...]] = {
    (): ("preempted", "prefix_hit", "reset_forced"),
    ("drafts",): ("drafts_some_accepted", "drafts_all_accepted"),
    ("drafts", "async"): ("draft_placeholders_scheduled", "drafts_some_accepted"),
    ("pipeline",): ("pipeline_waits_for_its_token",),
    ("embeds",): ("same_tokens_other_embeds",),
    ("adapters",): ("adapters_passed_over", "adapters_base_model_goes_past"),
    ("sessions",): ("sessions_stop_rests", "sessions_chunk_ahead", "sessions_end_at_rest"),
    ("masks",): ("masks_of_drafts", "masks_terminated", "masks_draft_cut", "masks_in_reasoning"),
    ("encoder",): ("encoder_item_evicted", "encoder_chunk_stops_before_an_item"),
    ("groups",): ("groups_window_slid", "groups_chunk_left", "groups_hit_in_several"),
    ("states",): ("groups_state_left", "groups_hit_of_a_state"),
    ("events", "groups"): ("events_stored", "events_removed"),
    ("transfers",): (
        *("transfers_load_at_once", "transfers_received", "transfers_released"),
        "transfers_ended_under_way",
    ),
}
"""Features that programs are drawn with, and coverage goals that the reference reaches."""


@needs_vllm
@pytest.mark.parametrize("features", GOALS, ids="+".join)
def test_a_release_agrees_with_the_spec_in_drawn_programs(features: tuple[str, ...]) -> None:
    make = load_engine("vllm")  # with its traits
    drawn = {"seed": 1} if features else {"max_depth": 2 if RELEASE.has_async else 1}
    options = {"with_features": features, "profile": PROFILE.name, **drawn}
    if absent := {*features} & {
        *read_engine_facts(CheckOptions("vllm", profile=PROFILE.name), make).lacking
    }:
        pytest.skip(f"{VERSION} has no {', '.join(absent)}, as a check would say")
    played = play_episodes(make, 1_500, **options)
    assert played.first is None
    if VERSION == REFERENCE:
        assert [name for name in GOALS[features] if not played.witnesses[name]] == []


@needs_vllm
def test_requests_are_aborted_in_the_given_order() -> None:
    engine = build(v.Config(num_blocks=9))
    for name in "ABC":
        engine.apply(v.Submit(v.Request(name, (1, 2))))
    assert engine.apply(v.Abort(("C", "ghost", "A"))) == v.Aborted(("C", "A"))


def get_collisions(monkeypatch: pytest.MonkeyPatch, separate_names: bool) -> list[Any]:
    adapter = importlib.import_module(ADAPTER)
    monkeypatch.setattr(adapter.VllmEngine, "separate_names", separate_names)
    engine = adapter.VllmEngine(v.Config(num_blocks=9, block_size=2))
    engine.apply(v.Submit(v.Request("A", (1, 2, 3), adapter="x")))
    engine.apply(v.Submit(v.Request("B", (1, 2, 3), cache_salt="x")))
    collisions: list[Any] = engine.run.digests.collisions
    return collisions


@needs_reference
def test_an_adapter_and_a_salt_collide_unless_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    ((known, other),) = get_collisions(monkeypatch, separate_names=False)
    assert (known.adapter, other.cache_salt) == ("x", "x")
    assert get_collisions(monkeypatch, separate_names=True) == []


PADDING = v.Config(
    num_blocks=12,
    block_size=1,
    max_model_len=8,
    spec_method=v.SpecMethod.NGRAM,
    num_speculative_tokens=2,
)
"""A config in which a release may pad a new request with drafts that were never proposed."""

HEADED = v.Config(
    num_blocks=60,
    block_size=1,
    max_model_len=16,
    spec_method=v.SpecMethod.EAGLE,
    num_speculative_tokens=1,
)


def once(name: str, num_tokens: int, token: int = 0) -> tuple[Action, ...]:
    """A request with equal prompt tokens arrives, and finishes in its first step."""
    return v.Submit(v.Request(name, (token,) * num_tokens, max_tokens=1)), v.Schedule(), Answer()


TWO_ITEMS = (v.MultiModalItem("c", 0, 2), v.MultiModalItem("d", 3, 2))
CROSS_ATTENTION = v.Config(
    20,
    1,
    max_model_len=8,
    enable_chunked_prefill=False,
    enable_prefix_caching=False,
    encoder_compute_budget=4,
    encoder_cache_size=4,
    disable_chunked_mm_input=True,
    is_encoder_decoder=True,
)

SCENES: dict[Quirk, tuple[v.Config, tuple[Action, ...]]] = {
    Quirk.MIN_TOKENS_MASK_LENGTH: (
        v.Config(num_blocks=9, block_size=1, max_model_len=4, enable_prefix_caching=False),
        (
            v.Submit(v.Request("A", (0, 0, 0), max_tokens=2, min_tokens=2)),
            v.Schedule(), Answer(), v.Schedule(),
        ),
    ),
    Quirk.EQUALS_PREEMPT_THE_FIRST: (
        v.Config(num_blocks=5, block_size=1, max_model_len=5, policy=v.Policy.PRIORITY),
        (
            v.Submit(v.Request("A", (0, 1), max_tokens=3)),
            v.Submit(v.Request("B", (2, 3), max_tokens=3)),
            v.Schedule(), Answer(), v.Schedule(), Answer(),
        ),
    ),
    Quirk.OUTPUT_BLOCK_KEY_HAS_ONLY_THE_LAST_ITEM: (
        v.Config(num_blocks=9, block_size=4, max_model_len=16, max_num_batched_tokens=32),
        (
            v.Submit(v.Request(
                "A", (0,) * 7, max_tokens=3,
                items=(v.MultiModalItem("cat", 4, 1), v.MultiModalItem("dog", 5, 1)),
            )),
            v.Schedule(), Answer(), v.Schedule(),
        ),
    ),
    Quirk.UNWRITTEN_KEYS_STAY: (
        v.Config(
            num_blocks=9, block_size=1, max_model_len=9, max_num_batched_tokens=8,
            long_prefill_token_threshold=2, policy=v.Policy.PRIORITY,
        ),
        (
            v.Submit(v.Request("waiting", (9,), structured_output=True)),
            v.Submit(v.Request("A", (1, 2, 3, 4, 5, 6, 7), max_tokens=1, priority=1)),
            v.Schedule(), Answer(),
            v.Submit(v.Request("B", (7, 8), max_tokens=2)),
            v.Schedule(), Answer(), v.Schedule(), Answer(),
            v.Submit(v.Request("C", (1, 2, 3, 4, 5, 9), max_tokens=1)),
            v.Schedule(),
        ),
    ),
    Quirk.STALE_DRAFT_PLACEHOLDERS: (
        v.Config(
            num_blocks=9, max_num_batched_tokens=2, max_frames_in_flight=2,
            async_scheduling=True,
            spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=1,
        ),
        (
            v.Submit(v.Request("A", (0,), max_tokens=8)),
            v.Submit(v.Request("B", (0,), max_tokens=8)),
            v.Schedule(), v.Schedule(), v.Abort(("A",)), v.Schedule(), Answer(), v.Schedule(),
                Answer(),
        ),
    ),
    Quirk.VICTIM_WITHOUT_A_ROW_SKIPS_A_REQUEST: (
        v.Config(
            num_blocks=8, block_size=1, max_model_len=7, max_frames_in_flight=2,
            async_scheduling=True,
            policy=v.Policy.PRIORITY, enable_prefix_caching=False,
        ),
        (
            v.Submit(v.Request("A", (1, 2), max_tokens=2, priority=9)),
            v.Schedule(), Answer(),
            v.Submit(v.Request("B", (3, 4), max_tokens=4)),
            v.Submit(v.Request("C", (5, 6), max_tokens=4)),
            v.Schedule(), v.Schedule(), Answer(), Answer(),
        ),
    ),
    Quirk.ITEM_OFFSET_NOT_IN_KEY: (
        v.Config(num_blocks=9, block_size=4, max_model_len=16),
        (
            v.Submit(v.Request("A", (1,) * 8, max_tokens=1, items=(v.MultiModalItem("cat", 1,
                1),))),
            v.Schedule(), Answer(),
        ),
    ),
    Quirk.ADJACENT_ITEM_IN_OUTPUT_BLOCK_KEY: (
        v.Config(num_blocks=9, block_size=1, max_model_len=16),
        (
            v.Submit(v.Request("A", (0, 0), max_tokens=1, items=(v.MultiModalItem("cat", 0, 2),))),
            v.Submit(v.Request("B", (0,), max_tokens=3, items=(v.MultiModalItem("cat", 0, 1),))),
            *(v.Schedule(), Answer()) * 3,
        ),
    ),
    Quirk.NO_FULL_ISL_RESERVE: (
        v.Config(num_blocks=7, block_size=1, max_model_len=7, max_num_batched_tokens=3),
        (
            v.Submit(v.Request("A", (1,), max_tokens=6)),
            *(v.Schedule(), Answer()) * 3,
            v.Submit(v.Request("B", (2, 3, 4, 5), max_tokens=1)), v.Schedule(),
        ),
    ),
    Quirk.SKIPPED_REQUESTS_RETURN_REVERSED: (
        v.Config(num_blocks=9),
        (
            v.Submit(v.Request("A", (1,), structured_output=True)),
            v.Submit(v.Request("B", (2,), structured_output=True)), v.Schedule(),
        ),
    ),
    Quirk.SINGLE_WAITING_QUEUE: (
        v.Config(num_blocks=9),
        (v.Submit(v.Request("A", (1,), structured_output=True)), v.Schedule()),
    ),
    Quirk.DRAFTS_OUTLIVE_PREEMPTION: (
        v.Config(
            num_blocks=6, block_size=1, max_num_seqs=2, max_num_batched_tokens=2, max_model_len=8,
            spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=1,
        ),
        (
            v.Submit(v.Request("A", (0,), max_tokens=4)), v.Submit(v.Request("H", (0,),
                max_tokens=2)),
            v.Schedule(), Answer(), Propose(((1, 1),)), v.Schedule(), Answer(), v.Schedule(),
        ),
    ),
    Quirk.CACHED_TOKENS_OF_THE_LATEST_HIT: (
        v.Config(
            num_blocks=8, block_size=1, max_model_len=8, max_num_batched_tokens=3,
            scheduler_reserve_full_isl=False,
        ),
        (
            v.Submit(v.Request("A", (9, 9), max_tokens=4)), v.Schedule(), Answer(),
            v.Submit(v.Request("B", (1, 2, 3, 4, 5, 6), max_tokens=1)),
            *(v.Schedule(), Answer()) * 3, v.Abort(("A",)), v.Schedule(), Answer(),
        ),
    ),
    Quirk.ADMITTED_WITH_LOOKAHEAD: (
        v.Config(
            num_blocks=20, block_size=1, spec_method=v.SpecMethod.EAGLE, num_speculative_tokens=2,
            max_model_len=16,
        ),
        (v.Submit(v.Request("A", (1, 2, 3), max_tokens=4)), v.Schedule()),
    ),
    Quirk.BLOCKS_WITHOUT_KEYS_REUSED_FIRST: (
        v.Config(num_blocks=5, block_size=2, max_model_len=8),
        (v.Submit(v.Request("A", (1, 2, 3), max_tokens=4)), v.Schedule(), v.Abort(("A",))),
    ),
    Quirk.LIFO_REUSE_WITHOUT_CACHING: (
        v.Config(num_blocks=5, block_size=2, max_model_len=8, enable_prefix_caching=False),
        (v.Submit(v.Request("A", (1, 2, 3), max_tokens=4)), v.Schedule(), v.Abort(("A",))),
    ),
    Quirk.RESET_DROPS_TOKENS: (
        v.Config(num_blocks=9, max_frames_in_flight=2, async_scheduling=True),
        (
            v.Submit(v.Request("A", (1, 2))), v.Schedule(), v.Reset(reset_running_requests=True),
            v.Schedule(), Answer(),
        ),
    ),
    Quirk.NEXT_PLAN_NAMES_VICTIMS_OF_A_RESET: (
        v.Config(num_blocks=9),
        (
            v.Submit(v.Request("A", (1, 2))), v.Schedule(), Answer(),
            v.Reset(reset_running_requests=True), v.Schedule(),
        ),
    ),
    Quirk.SINGLE_REQUEST_HAS_NO_THRESHOLD: (
        v.Config(num_blocks=20, long_prefill_token_threshold=2),
        (v.Submit(v.Request("A", (1,) * 6)), v.Schedule()),
    ),
    Quirk.STEP_CONTINUES_AFTER_SELF_PREEMPTION: (
        v.Config(
            num_blocks=5, block_size=2, max_model_len=8, policy=v.Policy.PRIORITY,
            enable_prefix_caching=False,
        ),
        (
            v.Submit(v.Request("A", (1, 2, 3), max_tokens=3, priority=9)), v.Schedule(), Answer(),
            v.Submit(v.Request("B", (4, 5, 6), max_tokens=3)), v.Schedule(), Answer(), v.Schedule(),
        ),
    ),
    Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS: (
        v.Config(num_blocks=9),
        (
            v.Submit(v.Request("A", (1,), max_tokens=9, min_tokens=3, eos_token_id=0)),
            v.Schedule(), Answer(),
        ),
    ),
    Quirk.LENGTH_COMES_BEFORE_STOP: (
        v.Config(num_blocks=9),
        (v.Submit(v.Request("A", (1,), max_tokens=1, eos_token_id=0)), v.Schedule(), Answer()),
    ),
    Quirk.PROMPT_BEYOND_THE_BUDGET_IS_SKIPPED: (
        v.Config(
            num_blocks=9, block_size=1, max_model_len=5, max_num_batched_tokens=5,
            enable_chunked_prefill=False,
        ),
        (
            v.Submit(v.Request("A", (1, 2, 3), max_tokens=1)),
            v.Submit(v.Request("B", (4, 5, 6), max_tokens=1)),
            v.Submit(v.Request("C", (7,), max_tokens=1)), v.Schedule(),
        ),
    ),
    Quirk.CHUNKS_TAKE_DRAFTS: (
        v.Config(
            num_blocks=4, block_size=1, max_model_len=8, max_num_batched_tokens=2,
            spec_method=v.SpecMethod.EAGLE, num_speculative_tokens=1,
        ),
        (
            v.Submit(v.Request("A", (0,), max_tokens=1)),
            v.Submit(v.Request("B", (0, 0), max_tokens=1)), v.Schedule(), Answer(),
            Propose(((1, 0),), for_chunks=True), v.Schedule(), Answer(),
        ),
    ),
    Quirk.PADDING_ON_ADMISSION: (
        PADDING,
        (
            v.Submit(v.Request("A", (0,), max_tokens=4)), v.Schedule(), Answer(),
            v.Submit(v.Request("B", (1,), max_tokens=4)), v.Schedule(), Answer(), v.Schedule(),
                Answer(),
        ),
    ),
    Quirk.PADDING_WAITS_AT_MAX_MODEL_LEN: (
        replace(PADDING, max_model_len=4),
        (
            v.Submit(v.Request("A", (1, 2), max_tokens=2)), v.Schedule(), Answer(),
            v.Submit(v.Request("B", (1, 2, 3), max_tokens=1)), v.Schedule(), Answer(), v.Schedule(),
        ),
    ),
    Quirk.PADDING_ON_HIT_WITHOUT_OTHER_REQUESTS: (
        replace(PADDING, max_num_batched_tokens=2),
        (
            v.Submit(v.Request("A", (1,), max_tokens=1)), v.Schedule(), Answer(),
            v.Submit(v.Request("B", (1, 2), max_tokens=1)), v.Schedule(), v.Schedule(),
        ),
    ),
    Quirk.DRAFTS_PUBLISH_AT_COMMIT: (
        v.Config(
            num_blocks=9, block_size=2, max_model_len=16, spec_method=v.SpecMethod.NGRAM,
            num_speculative_tokens=1,
        ),
        (
            v.Submit(v.Request("A", (1, 2, 3, 4), max_tokens=8)), v.Schedule(), Answer(),
            Propose(((1, 1),)), v.Schedule(), Answer(),
        ),
    ),
    Quirk.DRAFT_HEAD_DROP_PER_GROUP: (
        replace(HEADED, groups=(full(1), window(1, 2))), (*once("A", 7), *once("B", 7)),
    ),
    Quirk.WINDOW_HIT_CUT_WITHOUT_CHECK: (
        replace(HEADED, groups=(full(2), window(1, 2))), (*once("A", 9), *once("B", 9)),
    ),
    Quirk.FIRST_BLOCK_OF_AN_ATTENTION_CHUNK_IS_SKIPPED: (
        v.Config(num_blocks=9, block_size=2, max_model_len=8, groups=(chunks(2, 3),)), once("A", 5),
    ),
    Quirk.WINDOW_OF_ONE_NEEDS_A_CACHED_BLOCK: (
        v.Config(num_blocks=9, block_size=1, max_model_len=6, groups=(window(1, 1), full(1))),
        (*once("A", 4), *once("B", 1, token=1), *once("C", 4)),
    ),
    Quirk.WINDOW_OF_ONE_HOLDS_A_SKIPPED_BLOCK: (
        v.Config(num_blocks=20, block_size=1, max_model_len=6, groups=(full(1), window(1, 1))),
        (*once("A", 4), *once("B", 4)),
    ),
    Quirk.ATTENTION_CHUNK_KEEPS_A_PUBLISHED_BLOCK: (
        v.Config(9, 1, max_model_len=9, groups=(chunks(1, 2),)),
        (v.Submit(v.Request("A", (0, 0), max_tokens=3)), v.Schedule(), Answer(), v.Schedule()),
    ),
    Quirk.ONLY_FIRST_FULL_ATTENTION_GROUP_IS_CUT: (
        v.Config(
            num_blocks=11, block_size=1, max_model_len=6,
            groups=(window(1, 2), full(1), full(2)),
        ),
        (*once("A", 4), *once("B", 2, token=1), *once("C", 4)),
    ),
    Quirk.WINDOW_RESERVES_THE_FULL_REQUEST: (
        v.Config(
            num_blocks=4, block_size=1, max_model_len=6, max_num_batched_tokens=1,
            groups=(window(1, 2),),
        ),
        once("A", 5),
    ),
    Quirk.WINDOW_MOVES_AS_IF_DRAFTS_WERE_ACCEPTED: (
        v.Config(
            num_blocks=12, block_size=1, max_model_len=9, max_frames_in_flight=3,
            async_scheduling=True, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=1,
            groups=(window(1, 2),),
        ),
        (v.Submit(v.Request("A", (0, 0), max_tokens=6)), v.Schedule(), v.Schedule(), v.Schedule()),
    ),
    Quirk.CHUNK_ROUNDS_DOWN_TO_ZERO: (
        v.Config(20, 4, max_num_batched_tokens=2, max_model_len=16, groups=(recurrent(4), full(4))),
        once("A", 9),
    ),
    Quirk.REQUESTS_WAIT_FOR_STATES_OF_THE_SAME_STEP: (
        v.Config(40, 2, max_model_len=16, groups=(recurrent(2), full(2))),
        (
            v.Submit(v.Request("A", (1, 1), max_tokens=2)),
            v.Submit(v.Request("B", (1, 1, 2), max_tokens=2)), v.Schedule(), Answer(), v.Schedule(),
        ),
    ),
    Quirk.ONLY_FULL_ATTENTION_IS_ZEROED: (
        v.Config(40, 2, max_model_len=16, groups=(recurrent(2), window(2, 3))), once("A", 3),
    ),
    Quirk.BLOCKS_OF_WITHDRAWN_ROWS_ARE_ZEROED: (
        v.Config(
            10, 1, max_model_len=8, policy=v.Policy.PRIORITY, enable_prefix_caching=False,
            scheduler_reserve_full_isl=False, groups=(full(1), recurrent(8, v.MambaCacheMode.NONE)),
        ),
        (
            v.Submit(v.Request("A", (0,), max_tokens=6, priority=1)), v.Schedule(), Answer(),
            v.Submit(v.Request("B", (0, 0), max_tokens=6)), *(v.Schedule(), Answer()) * 4,
        ),
    ),
    Quirk.BLOCKS_OF_LOADS_ARE_ZEROED: (
        v.Config(
            20, 2, max_model_len=8, kv_connector=True, enable_prefix_caching=False,
            groups=(full(2), recurrent(8, v.MambaCacheMode.NONE)),
        ),
        (v.Submit(v.Request("A", (1, 2, 3))), v.KVOffer("A", 2, is_async=True), v.Schedule()),
    ),
    Quirk.DRAFT_HEAD_DROPS_THE_LAST_PROMPT_BLOCK: (
        replace(HEADED, groups=(full(1), window(1, 2))), (*once("A", 5), *once("B", 5)),
    ),
    Quirk.NO_COMMON_PREFIX_WHILE_BLOCKS_ARE_SHORT: (
        v.Config(num_blocks=2, block_size=1, max_model_len=4),
        (
            v.Submit(v.Request("A", (0,), max_tokens=1)),
            v.Submit(v.Request("B", (0,), max_tokens=1)), v.Schedule(), Answer(), v.Schedule(),
        ),
    ),
    Quirk.DRAFT_HEAD_CUTS_SHORT_WINDOWS_TWICE: (
        replace(HEADED, groups=(full(4), window(2, 6)), block_size=2),
        (*once("A", 9), *once("B", 9)),
    ),
    Quirk.WINDOW_RESERVES_ONE_STEP: (
        v.Config(3, 1, 1, 1, 6, groups=(window(1, 2),)), once("A", 5),
    ),
    Quirk.WINDOW_RESERVES_STEPS_IN_FLIGHT: (
        v.Config(3, 1, 1, 1, 6, groups=(window(1, 2),)), once("A", 5),
    ),
    Quirk.WINDOW_WAITS_FOR_COMMITS: (
        v.Config(
            9, 1, max_num_batched_tokens=1, max_model_len=9, max_frames_in_flight=2,
            async_scheduling=True, groups=(window(1, 2),),
        ),
        (v.Submit(v.Request("A", (0,) * 5, max_tokens=2)), *(v.Schedule(), v.Schedule(),
            Answer()) * 2),
    ),
    Quirk.CHUNKS_END_AT_CHECKPOINTS: (
        v.Config(20, 1, max_model_len=16, groups=(recurrent(1), full(1))), once("A", 2),
    ),
    Quirk.STATES_ARE_FREED_AT_ONCE: (
        v.Config(
            20, 2, max_model_len=16, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=1,
            groups=(recurrent(2, num_speculative=1), full(2)),
        ),
        (v.Submit(v.Request("A", (1, 2, 3), max_tokens=9)), *(v.Schedule(), Answer()) * 5),
    ),
    Quirk.CHUNK_IS_CUT_FOR_STATES_BEFORE_ITEMS: (
        v.Config(
            40, 2, max_model_len=16, encoder_compute_budget=2, encoder_cache_size=8,
            groups=(recurrent(2), full(2)),
        ),
        (v.Submit(v.Request("A", (1,) * 8, items=TWO_ITEMS)), v.Schedule()),
    ),
    Quirk.ITEMS_HELD_UNTIL_THE_COMMIT: (
        v.Config(9, 1, max_model_len=8, encoder_compute_budget=2, encoder_cache_size=2),
        (v.Submit(v.Request("A", (1,) * 3, items=(v.MultiModalItem("c", 0, 2),))), v.Schedule()),
    ),
    Quirk.DRAFT_HEAD_READS_AN_ITEM_WITHOUT_SPACE: (
        replace(HEADED, encoder_compute_budget=2, encoder_cache_size=8),
        (v.Submit(v.Request("A", (1,) * 5, items=TWO_ITEMS)), v.Schedule()),
    ),
    Quirk.WHOLE_ITEMS_ARE_SPLIT: (
        v.Config(
            20, 1, max_num_batched_tokens=4, max_model_len=8, encoder_compute_budget=2,
            encoder_cache_size=4, disable_chunked_mm_input=True,
        ),
        (
            v.Submit(v.Request("A", (1,) * 3)),
            v.Submit(v.Request("B", (2,) * 3, items=(v.MultiModalItem("c", 0, 2),))), v.Schedule(),
        ),
    ),
    Quirk.REMAINDER_OF_AN_ITEM_IS_SPLIT: (
        v.Config(
            20, 2, max_num_batched_tokens=4, max_model_len=8, encoder_compute_budget=4,
            encoder_cache_size=8, disable_chunked_mm_input=True,
        ),
        (
            v.Submit(v.Request("A", (1,) * 6, max_tokens=1, items=(v.MultiModalItem("c", 1, 4),))),
            *(v.Schedule(), Answer()) * 3, v.Submit(v.Request("O", (2,) * 3, max_tokens=2)),
            v.Submit(v.Request("B", (1, 1, 3, 3, 3, 3), items=(v.MultiModalItem("c", 1, 4),))),
            v.Schedule(),
        ),
    ),
    Quirk.DRAFT_HEAD_STOPS_BEFORE_WHOLE_ITEMS: (
        replace(
            HEADED, max_num_batched_tokens=2, encoder_compute_budget=2, encoder_cache_size=8,
            disable_chunked_mm_input=True,
        ),
        (
            v.Submit(v.Request("A", (1,) * 3, max_tokens=1, items=(v.MultiModalItem("c", 1, 2),))),
            v.Schedule(),
        ),
    ),
    Quirk.REENCODED_CROSS_ATTENTION_ITEMS_ARE_DROPPED: (
        CROSS_ATTENTION,
        (
            v.Submit(v.Request("A", (0,), max_tokens=1, items=TWO_ITEMS[:1])), v.Schedule(),
                Answer(),
            v.Submit(v.Request("B", (0,), max_tokens=1, items=TWO_ITEMS[:1])), v.Schedule(),
        ),
    ),
    Quirk.CROSS_ATTENTION_CACHE_OVERCOUNTS_FREE_SPACE: (
        CROSS_ATTENTION,
        (
            v.Submit(v.Request("A", (0,), max_tokens=3, items=TWO_ITEMS[:1])),
            *(v.Schedule(), Answer()) * 2,
        ),
    ),
    Quirk.REQUEST_WITHOUT_ENCODER_SPACE_IS_SKIPPED: (
        v.Config(
            20, 1, max_model_len=8, encoder_compute_budget=8, encoder_cache_size=3,
            long_prefill_token_threshold=2,
        ),
        (
            v.Submit(v.Request("A", (1,) * 3, items=(v.MultiModalItem("c", 0, 3),))),
            v.Submit(v.Request("B", (2,) * 2, items=(v.MultiModalItem("d", 0, 2),))),
            v.Submit(v.Request("C", (3,))), v.Schedule(),
        ),
    ),
}  # fmt: skip
"""A config and a program for each quirk, which show it in a release that has it."""


@needs_vllm
@pytest.mark.parametrize("quirk", SCENES)
def test_a_known_deviation_is_shown_and_its_quirk_follows_it(quirk: Quirk) -> None:
    if quirk not in PROFILE.quirks:
        pytest.skip(f"vLLM {VERSION} does not have it")
    config, actions = SCENES[quirk]
    if find_problem(RELEASE, config):
        pytest.skip(f"vLLM {VERSION} is not built with such groups")
    if config.encoder_cache_size and not RELEASE.has_encoder:
        pytest.skip(f"no encoder is followed in vLLM {VERSION}")
    run, wrong = follow(PROFILE, config, *actions)
    assert wrong == ""
    if run.skipped:
        pytest.skip(f"the adapter declines events of vLLM {VERSION}: {', '.join(run.skipped)}")
    without = Profile("without", PROFILE.quirks - {quirk})
    _, wrong = follow(without, config, *actions)
    assert FindingKind.DIVERGENCE.value in wrong


@needs_vllm
def test_items_without_an_encoder_cache_are_not_encoded() -> None:
    """The scheduler ignores items without an encoder cache; they are in block keys only."""
    config = v.Config(num_blocks=4, block_size=1, max_model_len=4)
    items = (v.MultiModalItem("x", 0, 1),)
    submitted = v.Submit(v.Request("A", (0, 0), max_tokens=1, items=items))
    _, wrong = follow(PROFILE, config, submitted, v.Schedule(), Answer())
    assert wrong == ""


DECLINED: dict[str, tuple[str, v.Config, tuple[Action, ...], str]] = {
    "reset at the end": (
        REFERENCE,
        v.Config(num_blocks=9, block_size=1, max_model_len=4),
        (
            v.Submit(v.Request("A", (0, 0, 0), max_tokens=4, min_tokens=4)),
            v.Schedule(), Answer(), v.Reset(reset_running_requests=True), v.Schedule(), Answer(),
            v.Schedule(), Answer(),
        ),
        "min_tokens at the model length",
    ),
    "preempted at the end": (
        REFERENCE,
        v.Config(
            num_blocks=9, block_size=1, max_model_len=7, enable_prefix_caching=False,
            scheduler_reserve_full_isl=False,
        ),
        (
            v.Submit(v.Request("B", (1,), max_tokens=6)),
            v.Submit(v.Request("A", (1, 2, 3, 4, 5), max_tokens=8, min_tokens=8)),
            *(v.Schedule(), Answer()) * 9,
        ),
        "min_tokens at the model length",
    ),
    "forced reset": (
        REFERENCE,
        v.Config(
            num_blocks=9, block_size=1, max_model_len=4, max_frames_in_flight=2,
            async_scheduling=True,
        ),
        (
            v.Submit(v.Request("A", (0, 0), max_tokens=9)),
            v.Schedule(), v.Schedule(), v.Reset(reset_running_requests=True), Answer(), Answer(),
        ),
        "forced reset under asynchronous scheduling (#42043)",
    ),
    "resumed too early": (
        REFERENCE,
        v.Config(
            num_blocks=6, block_size=1, max_model_len=6, max_frames_in_flight=2,
            async_scheduling=True,
            enable_prefix_caching=False,
        ),
        (
            v.Submit(v.Request("A", (1, 2, 3), max_tokens=1)),
            v.Submit(v.Request("B", (4, 5), max_tokens=3)),
            v.Schedule(), v.Schedule(), v.Schedule(), Answer(), v.Schedule(), Answer(), Answer(),
        ),
        "resumed before its tokens (#47900)",
    ),
    "behind drafts": (
        REFERENCE,
        v.Config(
            num_blocks=9, block_size=2, max_model_len=16, max_frames_in_flight=2,
            spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2,
        ),
        (
            v.Submit(v.Request("A", (0, 0), max_tokens=9)), v.Schedule(), Answer(), Propose(((2,
                2),)),
            v.Schedule(), v.Schedule(), Answer(), Answer(),
        ),
        "a plan behind drafts in flight: fewer than no tokens",
    ),
    "padded past the threshold": (
        "0.33.0",
        replace(PADDING, long_prefill_token_threshold=2),
        (
            v.Submit(v.Request("A", (0,), max_tokens=4)), v.Schedule(), Answer(),
            v.Submit(v.Request("B", (1,), max_tokens=4)), v.Schedule(),
        ),
        "padding above the long-prefill threshold (#54028)",
    ),
    "padded to the end": (
        "0.27.0",
        replace(PADDING, max_model_len=4, max_frames_in_flight=2, async_scheduling=True),
        (
            v.Submit(v.Request("A", (1,), max_tokens=3)), v.Schedule(), Answer(),
            v.Submit(v.Request("B", (1, 2), max_tokens=2)), v.Schedule(), v.Schedule(), Answer(),
                Answer(),
        ),
        "a plan behind padding to the model length (#53962)",
    ),
}  # fmt: skip
"""Programs in which a release raises an AssertionError, and the adapter's reason to decline."""


@needs_vllm
@pytest.mark.parametrize(
    ("release", "config", "actions", "reason"), DECLINED.values(), ids=DECLINED
)
def test_an_event_on_which_the_release_would_raise_is_declined(
    release: str, config: v.Config, actions: tuple[Action, ...], reason: str
) -> None:
    if release != VERSION:
        pytest.skip(f"a program for vLLM {release} only")
    with pytest.raises(AssertionError):  # if the event were sent
        play_alone(build(config), actions)
    run, wrong = follow(PROFILE, config, *actions, Drain())
    assert wrong == ""
    assert run.skipped.keys() == {reason}


LATE = v.Config(
    num_blocks=9, block_size=2, max_model_len=16, spec_method=v.SpecMethod.NGRAM,
    num_speculative_tokens=2,
)  # fmt: skip
SPARED: dict[str, tuple[str, v.Config, tuple[Action, ...]]] = {
    "an attempt that fails is counted": (
        "spare_counters",
        v.Config(num_blocks=4, block_size=1, max_model_len=64),
        (
            v.Submit(v.Request("A", (0,), max_tokens=2)), v.Submit(v.Request("B", (0,),
                max_tokens=2)),
            v.Submit(v.Request("C", (1, 1), max_tokens=1)), v.Schedule(),
        ),
    ),
    "drafts for a waiting request": (
        "spare_late_drafts",
        LATE,
        (
            v.Submit(v.Request("A", (1, 2, 3), max_tokens=9)), v.Schedule(), Answer(),
            v.Reset(reset_running_requests=True), Propose(((2, 2),)),
        ),
    ),
    "drafts for a request in flight": (
        "spare_late_drafts",
        LATE,
        (
            v.Submit(v.Request("A", (1, 2, 3), max_tokens=9)), v.Schedule(), Answer(),
            v.Schedule(), Propose(((2, 2),)),
        ),
    ),
}  # fmt: skip
"""Programs for what the adapter hides, with the flag that hides it."""


@needs_reference
@pytest.mark.parametrize(("flag", "config", "actions"), SPARED.values(), ids=SPARED)
def test_hunt_names_the_workaround_that_hides_a_defect(
    flag: str, config: v.Config, actions: tuple[Action, ...]
) -> None:
    program = Program(config, actions, vocabulary_size=1)
    cause = KnownCause(SuppressionKind.WORKAROUND, flag)
    assert find_causes(program, load_engine("vllm"), frozenset(), ()) == (cause,)


@needs_vllm
@pytest.mark.parametrize("depth", [1, 2])
def test_draft_counters_of_the_release_equal_those_of_the_spec(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not RELEASE.has_drafts:
        pytest.skip(f"vLLM {VERSION} is given no drafts")
    # Without prefix caching, which has counters of its own.
    config = replace(
        LATE, enable_prefix_caching=False, max_frames_in_flight=depth, async_scheduling=depth > 1
    )
    actions = (
        v.Submit(v.Request("A", (0, 0, 0), max_tokens=9)), Propose(((2, 2),)), v.Schedule(),
            Answer(),
        *(Propose(((2, 1), (2, 0))), v.Schedule(), Answer()) * 2, Drain(),
    )  # fmt: skip
    monkeypatch.setattr(importlib.import_module(ADAPTER).VllmEngine, "spare_counters", False)
    run, wrong = follow(PROFILE, config, *actions)
    assert wrong == ""
    assert run.before is not None
    assert run.before.stats.drafts_scheduled > run.before.stats.drafts_accepted > 0


@needs_reference
def test_late_drafts_are_scheduled_one_position_too_far() -> None:
    engine = build(LATE)
    engine.apply(v.Submit(v.Request("A", (1, 2, 3), max_tokens=9)))
    for sampled in (4, 5):  # the drafts guess what comes after 4
        plan = engine.apply(v.Schedule())
        assert isinstance(plan, v.Plan)
        engine.apply(v.Commit(plan.frame_id, (v.RowTokens("A", (sampled,)),)))
        if sampled == 4:
            engine.apply(v.Reset(reset_running_requests=True))
            engine.apply(v.Drafts((v.RowTokens("A", (5, 6)),)))
    plan = engine.apply(v.Schedule())
    assert isinstance(plan, v.Plan)
    assert plan.cached[0].num_computed_tokens == 4  # of 5: the drafts were proposed after 4
    assert plan.cached[0].draft_token_ids == (5, 6)


@needs_vllm
def test_goals_out_of_reach_are_known_coverage_goals() -> None:
    assert set(WITNESSES) > importlib.import_module(ADAPTER).VllmEngine.traits.out_of_reach


@needs_reference
def test_depth_is_limited_to_the_frames_that_vllm_has_in_flight() -> None:
    assert fit_depth(CheckOptions(engine="vllm"), load_engine("vllm")).max_depth == 2
    shallow = CheckOptions(engine="vllm", max_depth=1)
    assert fit_depth(shallow, load_engine("vllm")) is shallow


def play_alone(engine: Engine, actions: tuple[Action, ...]) -> None:
    """Run actions on the engine alone; every row samples 0."""
    plans: list[v.Plan] = []
    rows: tuple[v.RowTokens, ...] = ()
    for action in actions:
        if isinstance(action, Answer):
            plan = plans.pop(0)
            rows = tuple(v.RowTokens(row.request_id, (0,)) for row in plan.rows)
            engine.apply(v.Commit(plan.frame_id, rows))
        elif isinstance(action, Propose):
            ((num_drafts, _),) = action.counts
            engine.apply(v.Drafts(tuple(replace(row, token_ids=(0,) * num_drafts) for row in rows)))
        else:
            assert isinstance(action, v.Submit | v.Schedule | v.Reset)
            answer = engine.apply(action)
            if isinstance(answer, v.Plan) and answer.rows:
                plans.append(answer)
