"""Equivalences: differences that one allows are no findings, and all others are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episodes_support import play_episodes
from equivalent_engines import (
    NO_BLOCKS,
    PLANS,
    RENAMED,
    Blockless,
    HitOneShort,
    Mute,
    NoneShared,
    OtherIds,
    OtherIdsInReports,
    OtherOrder,
    OtherVictim,
    Restless,
    Silent,
    Simulator,
    Spec,
    Twice,
    held_to,
)
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import (
    BadEngineError,
    Capability,
    EngineTraits,
    Equivalence,
    Renamed,
    Safety,
    SamePlans,
)
from blockstep.conformance.judge.checks import CHECKS_OF, RENAMED_CHECKS
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.museum import EXHIBITS, build
from blockstep.conformance.museum.pool import forward_frees
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program, Report
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.renaming import TablePairs, rename_snapshot
from blockstep.conformance.report.finding_text import render_finding
from blockstep.conformance.search.check import check
from blockstep.conformance.search.episodes import fit_depth
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.conformance.search.shrink import shrink
from blockstep.conformance.search.verdict_requirements import CANARIES, run_canary
from blockstep.spec import Config, Request, Schedule, Submit
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import SPARING, STRICT, Profile

EXACT = EngineTraits()
CLEAN = {
    "renamed": held_to(Spec, RENAMED),
    "renamed, other order": OtherOrder,
    "renamed, other ids": OtherIdsInReports,
    "renamed, no state shown": held_to(Silent, RENAMED),
    "plan": held_to(Spec, PLANS),
    "plan, other order": held_to(OtherOrder, PLANS),
    "plan, no blocks": Simulator,
    "exact, no state shown": Silent,
}
BASES = {"renamed": (OtherOrder, RENAMED), "plan": (OtherIds, PLANS), "sim": (Simulator, NO_BLOCKS)}


@pytest.mark.parametrize("engine", CLEAN.values(), ids=CLEAN)
def test_an_allowed_difference_is_no_finding(engine: Any) -> None:
    played = play_episodes(engine, 800)
    assert played.first is None
    wanted = ("preempted", "prefix_hit", "eviction_of_cached_block", "drafts_some_accepted")
    assert all(played.witnesses[name] for name in wanted), (
        "counted on the side of the spec if the engine shows no state"
    )


WITH_FEATURE = {
    "forks": ("forks_copied_by_who_runs", "forks_copied_by_a_branch"),
    "transfers": ("transfers_failed_at_its_first_block", "transfers_failed_at_once"),
}
"""Goals that are reached in runs which all have a feature."""


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("feature", WITH_FEATURE)
@pytest.mark.parametrize("engine", CLEAN.values(), ids=CLEAN)
def test_an_allowed_difference_is_no_finding_with_forks_and_a_store(
    engine: Any, feature: str
) -> None:
    played = play_episodes(engine, 800, seed=8, with_features=(feature,))
    assert played.first is None
    is_counted = feature == "forks" or engine is not Simulator
    assert all(played.witnesses[name] for name in WITH_FEATURE[feature]) is is_counted


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["tiny", "small", "real"])
@pytest.mark.parametrize("engine", CLEAN.values(), ids=CLEAN)
def test_an_allowed_difference_is_no_finding_in_many_events(engine: Any, preset: str) -> None:
    assert play_episodes(engine, 30_000, preset=preset, seed=7).first is None


@pytest.mark.parametrize("engine", [OtherOrder, held_to(Silent, RENAMED)])
def test_a_block_skipped_by_a_window_may_be_renamed_again(engine: Any) -> None:
    """The specification gives the second request a block that the window of the first skipped."""
    groups = (v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=2),) * 2
    config = Config(
        num_blocks=7, block_size=2, enable_prefix_caching=False, groups=groups,
        long_prefill_token_threshold=3,
    )  # fmt: skip
    first, second = Request("A", (0,) * 5, 3), Request("B", (0, 0), 1)
    actions = (Submit(first), Schedule(), Answer(), Submit(second), Schedule(), Answer())
    run, findings = run_program(Program(config, actions), engine)
    assert (run.num_events, findings) == (6, [])


@pytest.mark.parametrize("engine", [OtherOrder, OtherIdsInReports, held_to(Silent, RENAMED)])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", list(v.KVLoadFailurePolicy))
def test_blocks_that_failed_to_load_are_reported_in_the_ids_of_the_engine(
    engine: Any, is_async: bool, policy: v.KVLoadFailurePolicy
) -> None:
    config = Config(num_blocks=9, block_size=2, kv_connector=True, kv_load_failure_policy=policy)
    failed = Report(invalid=(("A", 1),))
    actions: tuple[Action, ...] = (
        Submit(Request("Z", (3,), 1)),
        Schedule(),
        Answer(),
        Submit(Request("A", (0, 1, 2, 3, 4), 2)),
        v.KVOffer("A", 4, is_async=is_async),
        Schedule(),
        failed if is_async else Answer(failed),
        Drain(),
    )
    run, findings = run_program(Program(config, actions), engine)
    assert findings == []
    is_recomputed = policy is v.KVLoadFailurePolicy.RECOMPUTE
    what = "recomputed" if is_recomputed else "ends"
    assert run.witnesses[f"transfers_failure_{what}"] == 1


class GivesIdleBlocksAway(OtherIds):
    """An engine that gives the blocks of an idle session to the next request."""

    def _called(self, tables: v.BlockTables) -> v.BlockTables:
        called = super()._called(tables)
        rests = [r for r in Spec.snapshot(self).requests if r.request_id == "S"]
        if len(self.state.requests) < 2 or not rests:
            return called
        ((kept,),) = super()._called(rests[0].block_tables)
        return tuple(tuple(kept for _ in table) for table in called)


def test_blocks_of_an_idle_session_in_another_table_are_found() -> None:
    """The engine shows no state, so only the plan shows the defect."""
    engine = held_to(GivesIdleBlocksAway, RENAMED, Mute)
    config = Config(num_blocks=9, block_size=4)
    actions = (
        Submit(Request("S", (1, 2), 1, resumable=True)),
        Schedule(),
        Answer(),
        Submit(Request("B", (3, 4), 1)),
        Schedule(),
    )
    _, findings = run_program(Program(config, actions), engine)
    assert [found.kind for found in findings][-1:] == [FindingKind.DIVERGENCE]


@pytest.mark.parametrize("engine", [held_to(Spec, PLANS), Simulator])
def test_a_token_sampled_after_the_stop_of_a_session_is_not_delivered(engine: Any) -> None:
    """The first token stops the session while its next row is still in flight."""
    config = Config(num_blocks=9, block_size=2, async_scheduling=True, max_frames_in_flight=2)
    session = Request("A", (0, 0, 0), 4, stop_token_ids=(0, 1), resumable=True)
    actions = (Submit(session), Schedule(), Schedule(), Answer(), Answer())
    run, findings = run_program(Program(config, actions, vocabulary_size=2), engine)
    assert findings == []
    assert (run.num_events, run.plans) == (5, [])


@pytest.mark.parametrize(
    ("engine", "stronger"), [(OtherOrder, EXACT), (OtherIds, EXACT), (Simulator, RENAMED)]
)
def test_a_stronger_equivalence_finds_the_difference(engine: Any, stronger: EngineTraits) -> None:
    """The same engines differ where less is allowed."""
    assert play_episodes(held_to(engine, stronger), 400).first is not None


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("defect", [HitOneShort, NoneShared, OtherVictim, Twice])
def test_a_planted_defect_is_found_at_each_equivalence(base: Any, defect: type) -> None:
    first = play_episodes(held_to(*base, defect), 6000).first
    assert first is not None
    assert first.kind in (FindingKind.DIVERGENCE, FindingKind.PROPERTY)


@pytest.mark.parametrize("base", [(OtherOrder, RENAMED), (Simulator, NO_BLOCKS)])
def test_the_shrinker_works_at_each_equivalence(base: Any) -> None:
    engine = held_to(*base, HitOneShort)
    episode: Any = play_episodes(engine, 6000, preset="tiny").last
    shrunk = shrink(episode.program, engine, episode.first)
    assert len(shrunk.program.actions) <= 8
    assert shrunk.equivalence == engine.traits.equivalence.name
    assert {found.kind for found in shrunk.findings} & {episode.first.kind}


def test_a_block_id_means_the_same_from_one_step_to_the_next() -> None:
    """Each state is compared on its own, so only the worker finds it."""
    first = play_episodes(Restless, 800).first
    assert first is not None
    assert first.property_id in {"P3", "P4", "P26"}


def test_a_wrong_order_of_eviction_is_found_when_a_block_is_evicted() -> None:
    """The order of the free queue is not compared, the content of the cache is."""

    class FromTheHead(Spec):
        traits = RENAMED
        change = staticmethod(forward_frees)

    first = play_episodes(FromTheHead, 6000, without_features=("events",)).first
    assert first is not None
    assert first.kind is FindingKind.DIVERGENCE
    assert any("cached" in difference.field for difference in first.differences)


def test_at_renamed_all_checks_run_except_those_of_the_free_queue() -> None:
    left_out = {
        kind.__name__: sorted({one.sentence for one in checks if one not in RENAMED_CHECKS[kind]})
        for kind, checks in CHECKS_OF.items()
    }
    assert {kind: names for kind, names in left_out.items() if names} == {
        "Schedule": [
            "new_blocks_come_from_the_head_of_the_free_queue",
            "preempted_tail_is_evicted_first",
        ],
        **{
            kind: ["freed_tail_is_evicted_first"]
            for kind in ("Commit", "Abort", "GrammarFailed", "Reset", "TransfersReported")
        },
    }


def test_each_canary_is_caught() -> None:
    for name, canary in CANARIES.items():
        assert run_canary(CheckOptions(), canary), name


def test_a_check_whose_canary_is_not_caught_gives_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = CheckOptions(preset="tiny", max_events=1)
    assert check(options).canary_killed_after
    monkeypatch.setitem(CANARIES, "exact", "host")
    result = check(options)
    assert result.canary_killed_after is None
    assert result.exit_code is ExitCode.HARNESS


MUSEUM = {
    "exact": (EXACT, ()),
    "renamed": (RENAMED, ()),
    "plan": (PLANS, ()),
    "plan, no blocks": (NO_BLOCKS, (Blockless,)),
    "safety": (EngineTraits(equivalence=Safety()), ()),
}
PAGE = (Path(__file__).parents[3] / "docs/explanation/equivalences.md").read_text()
PLAIN = [name for name, entry in EXHIBITS.items() if not (entry.takes or entry.takes_groups)]
"""Seeded bugs that need no feature."""
NEEDING_A_FEATURE = {
    name: entry.takes for name, entry in EXHIBITS.items() if entry.takes and not entry.takes_groups
}
"""Seeded bugs that need a feature, and the feature."""


def is_found(name: str, kind: str, num_events: int, *presets: str) -> bool:
    traits, views = MUSEUM[kind]
    taken = EXHIBITS[name].takes
    given = (taken,) if taken else ()
    engine = held_to(build(name), traits, *views)
    played = (play_episodes(engine, num_events, preset=it, with_features=given) for it in presets)
    return any(one.first is not None for one in played)


@pytest.mark.soak
@pytest.mark.parametrize("kind", MUSEUM)
def test_as_many_seeded_bugs_are_found_as_the_page_lists(kind: str) -> None:
    found = sum(is_found(name, kind, 4000, "tiny", "small") for name in PLAIN)
    row = re.search(rf"^\| `?{kind}`? \| (\d+) of {len(PLAIN)} \|", PAGE, re.M)
    assert row is not None, found
    assert abs(int(row[1]) - found) <= 2, "as drawn now; a defect or two are rare"


QUICKLY_FOUND = (
    ("adapters-counted-afterwards", "plan"),
    ("grammar-begins-anew", "renamed"),
    ("drops-told-late", "renamed"),
)


@pytest.mark.parametrize(("name", "kind"), QUICKLY_FOUND)
def test_a_seeded_bug_gets_its_feature_at_each_equivalence(name: str, kind: str) -> None:
    """A run without the feature finds nothing."""
    assert NEEDING_A_FEATURE[name]
    assert is_found(name, kind, 2000, "tiny")


# One step, looked at.

CONFIG = Config(num_blocks=9, block_size=2, max_model_len=16)
A, B = Request("A", (1, 2, 3), max_tokens=4), Request("B", (1, 2, 9), max_tokens=4)
SHARED = Program(CONFIG, (Submit(A), Schedule(), Answer(), Submit(B), Schedule()))


def findings_of(make_engine: Any, program: Program = SHARED) -> list[Finding]:
    return run_program(program, make_engine)[1]


class Copies(SpecEngine):
    """A hit is copied to a block of its own: in plan and state, sharing is gone."""

    traits = RENAMED

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {"snapshot"}

    def snapshot(self) -> Any:
        return None

    def apply(self, event: Any) -> Any:
        answer = super().apply(event)
        if isinstance(answer, v.Plan) and answer.new and answer.new[0].num_computed_tokens:
            row = replace(answer.new[0], block_ids=((8, *answer.new[0].block_ids[0][1:]),))
            return replace(answer, new=(row,))
        return answer


def test_a_plan_that_copies_a_shared_block_is_a_divergence() -> None:
    assert findings_of(SpecEngine) == []
    (diverged,) = (it for it in findings_of(Copies) if it.kind is FindingKind.DIVERGENCE)
    (difference,) = diverged.differences
    assert difference.field == "new B block_ids"
    assert difference.expected.startswith("[[1,"), "the block of A"
    assert not difference.seen.startswith("[[1,")


def test_at_plan_no_blocks_are_shown_unless_the_engine_declares_it() -> None:
    found = findings_of(held_to(Spec, NO_BLOCKS))
    assert [it.sentence for it in found] == ["plan_shows_no_blocks"]
    assert "set shows_blocks" in found[0].message


def test_two_states_are_equal_if_one_renaming_of_blocks_maps_them() -> None:
    run, _ = run_program(SHARED, held_to(OtherOrder, EXACT).__base__)
    mine, theirs = run.spec.snapshot(), run.engine.snapshot()
    assert theirs is not None
    assert mine != theirs
    assert rename_snapshot(mine, theirs) == mine
    lost = replace(theirs, free_queue=theirs.free_queue[1:])
    assert rename_snapshot(mine, lost) != mine
    keyless = replace(theirs, block_keys=(None,) * 9, cached={})
    assert rename_snapshot(mine, keyless) != mine
    smaller = replace(theirs, ref_counts=theirs.ref_counts[:5], block_keys=theirs.block_keys[:5])
    assert rename_snapshot(mine, smaller) != mine


def test_pairs_of_blocks_last_until_a_preemption_frees_them() -> None:
    def plan(*rows: Any, **fields: Any) -> v.Plan:
        new = tuple(row for row in rows if isinstance(row, v.NewRow))
        cached = tuple(row for row in rows if isinstance(row, v.CachedRow))
        return v.Plan(0, new, cached, **fields)

    def runs(name: str, *blocks: int, resumed: bool = False) -> v.CachedRow:
        return v.CachedRow(name, resumed, (blocks,), None, 2, 1, 1)

    pairs = TablePairs()
    first = (plan(v.NewRow(A, ((1, 2),), 0, 3)), plan(v.NewRow(A, ((7, 5),), 0, 3)))
    assert pairs.take(*first) == first[0]
    grown = (plan(runs("A", 3)), plan(runs("A", 6)))
    assert pairs.take(*grown) == grown[0]
    gone = plan(preempted_req_ids=("A",))
    assert pairs.take(gone, gone) == gone
    back = (plan(runs("A", 4, resumed=True)), plan(runs("A", 7, resumed=True)))
    assert pairs.take(*back) == back[0], "7 is free again, and may be another block now"
    held = plan(v.NewRow(B, ((4,),), 2, 1)), plan(v.NewRow(B, ((5,),), 2, 1))
    assert pairs.take(*held) != held[0], "the spec shares block 4, the engine does not"


def test_saved_blocks_are_renamed_as_in_the_step_before() -> None:
    """The same plan may give these blocks to another request than the specification does."""
    pairs = TablePairs()
    first = v.Plan(0, (v.NewRow(A, ((1, 2),), 0, 3),)), v.Plan(0, (v.NewRow(A, ((7, 5),), 0, 3),))
    assert pairs.take(*first) == first[0]
    saved, theirs = v.KVSave("A", ((1, 2),), 2), v.KVSave("A", ((7, 5),), 2)
    new, other = v.NewRow(B, ((2, 1),), 0, 3), v.NewRow(B, ((7, 5),), 0, 3)
    mine = v.Plan(1, (new,), preempted_req_ids=("A",), kv_saves=(saved,))
    seen = v.Plan(1, (other,), preempted_req_ids=("A",), kv_saves=(theirs,))
    assert pairs.take_read(replace(seen, kv_saves=(replace(theirs, block_ids=((5, 7),)),))) != mine
    seen = pairs.take_read(seen)
    assert seen.kv_saves == mine.kv_saves
    assert pairs.take(mine, seen) == mine


@pytest.mark.parametrize("kind", [Renamed, SamePlans, Safety])
def test_an_engine_that_plans_ahead_is_full_before_a_commit(kind: Any) -> None:
    engine = held_to(
        Simulator if kind is SamePlans else Spec,
        EngineTraits(equivalence=kind(plans_ahead=True)),
    )
    config = replace(CONFIG, max_frames_in_flight=2, async_scheduling=True)
    actions = (Submit(A), Schedule(), Answer(), Schedule(), Schedule(), Answer(), Drain())
    run, findings = run_program(Program(config, actions), engine)
    assert findings == []
    given = [type(it.event).__name__ for it in run.exchanges]
    assert given[:5] == ["Submit", "Schedule", "Schedule", "Commit", "SetPause"]
    assert not run.live


def test_an_equivalence_lists_the_checks_that_it_leaves_out() -> None:
    assert SamePlans(shows_blocks=True).not_asked < SamePlans().not_asked
    assert Renamed().not_asked


@pytest.mark.parametrize("equivalence", [None, Renamed(), SamePlans(shows_blocks=True), Safety()])
@pytest.mark.parametrize("profile", [STRICT, SPARING])
def test_a_declined_event_is_left_out_under_a_profile_that_allows_it(
    equivalence: Equivalence | None, profile: Profile
) -> None:
    """All equivalences have the same rule; safety once ignored it."""

    class Declines(SpecEngine):
        traits = EngineTraits(equivalence=equivalence)

        def declines(self, event: v.Event) -> str | None:
            return "a defect that is known" if isinstance(event, v.Schedule) else None

    request = v.Request("A", (1, 2, 3), max_tokens=1)
    program = Program(v.Config(num_blocks=9, block_size=2), (v.Submit(request), v.Schedule()))
    run, findings = run_program(program, Declines, profile)
    assert findings == []
    assert run.skipped.get("a defect that is known", 0) == int(profile.spares)
    assert len(run.plans) == int(not profile.spares)


def test_a_state_without_the_snapshot_capability_is_an_error() -> None:
    class Unannounced(SpecEngine):
        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {Capability.SNAPSHOT}

    with pytest.raises(
        BadEngineError, match=r"Unannounced: returned a state, and capabilities\(\) does not name"
    ):
        LockStep.start(v.Config(num_blocks=9), Unannounced)


@pytest.mark.parametrize(
    "command",
    [("check", "--in-process"), ("hunt", "--in-process"), ("arms",), ("score",)],
    ids=" ".join,
)
def test_every_command_reports_a_state_without_the_capability(command: tuple[str, ...]) -> None:
    named = "--engine=foreign_support.toys:UnannouncedToy"
    result = CliRunner().invoke(app, (*command, named))
    assert result.exit_code == 2
    assert "UnannouncedToy: returned a state, and capabilities() does not name" in result.output


def test_a_fault_names_the_line_that_raised_and_the_calls() -> None:
    class Raises(SpecEngine):
        def apply(self, event: v.Event) -> v.Observation:
            return self.descend(7)

        def descend(self, depth: int) -> v.Observation:
            if depth:
                return self.descend(depth - 1)
            raise KeyError("no such block")

    program = Program(v.Config(num_blocks=9), (v.Schedule(),))
    _, (finding,) = run_program(program, Raises)
    assert len(finding.frames) == 5
    *callers, last = finding.frames
    assert all(each.startswith("descend (test_equivalences.py:") for each in callers)
    assert last.endswith(': raise KeyError("no such block")')
    lines = [line.strip() for line in render_finding(finding)]
    assert lines[2].startswith("raised in descend (test_equivalences.py:")
    assert [line.startswith("called by descend") for line in lines[3:7]] == [True] * 4


def test_the_depth_of_a_check_is_that_of_the_configs_of_the_engine() -> None:
    """A hunt once reported four frames in flight for an engine whose configs have two."""

    def halve(config: v.Config) -> v.Config:
        return replace(config, max_frames_in_flight=min(config.max_frames_in_flight, 2))

    class Shallow(SpecEngine):
        traits = EngineTraits(equivalence=Safety(fit_config=halve))

    assert fit_depth(CheckOptions(max_depth=4), Shallow).max_depth == 2
    assert fit_depth(CheckOptions(max_depth=4), SpecEngine).max_depth == 4
