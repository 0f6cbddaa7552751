"""Hunt: each defect is listed once, apart from others, with its known cause if it has one."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import (
    ALL_CAPABILITIES,
    Capability,
    Deviation,
    Engine,
    EngineFactory,
    EngineTraits,
    Equivalence,
    Safety,
    get_judged,
    get_traits,
)
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.museum import EXHIBITS, build
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.report.hunt import hunt_to_json, render_hunt, render_hunt_page
from blockstep.conformance.search import dedup as distinct
from blockstep.conformance.search.call import call_here
from blockstep.conformance.search.check import InProcess, check
from blockstep.conformance.search.dedup import FailureSignature, Played, Symptoms, mark_of, relax
from blockstep.conformance.search.defects import Defect, HuntResult, group_failures
from blockstep.conformance.search.engine_wrappers import hide_state, unwrapped
from blockstep.conformance.search.hunt import hunt
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.suppressions import (
    KnownCause,
    SuppressingFactory,
    SuppressionKind,
    find_causes,
    find_refuted,
    follow,
    read_cause,
)
from blockstep.impl.host import HostEngine
from blockstep.spec.core.rules import Rules
from blockstep.spec.profiles import Profile, Quirk, get_profile
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    Event,
    GroupKind,
    KVGroup,
    NewRow,
    Observation,
    Outputs,
    Plan,
    Policy,
    RejectCode,
    Rejected,
    Request,
    Reset,
    Schedule,
    StreamingUpdate,
    Submit,
)

RELEASE = "vllm-0.19.1"
FEW = "strict+min_tokens_mask_length+resumed_with_token_in_flight+stale_draft_placeholders"


def follower(name: str) -> Callable[[Config], SpecEngine]:
    """Return engines with the known defects of a profile, and no others."""
    return lambda config: SpecEngine(config, find(name))


def find(name: str) -> Profile:
    profile = get_profile(name)
    assert profile is not None
    return profile


def held_to_safety(make_engine: EngineFactory) -> EngineFactory:
    """Return the same engines, judged by the properties alone."""

    class Held:
        traits = EngineTraits(equivalence=Safety())

        def __new__(cls, config: Config) -> Engine:  # type: ignore[misc]
            return make_engine(config)

    return Held


@pytest.fixture(scope="module")
def few() -> HuntResult:
    """A hunt in an engine with three of the quirks of a release."""
    options = CheckOptions(engine="toy", seed=6, max_events=1_200, profile=RELEASE)
    return hunt(options, call_here(follower(FEW)))


FEATURES = ((), ("groups",), ("encoder",), ("groups", "transfers"), ("groups", "encoder"))
"""Features that a hunt has in every run, because their quirks are not found by chance."""
SELDOM_FOUND = {
    Quirk.ENCODER_BUDGET_OF_WITHDRAWN_ROWS_IS_LOST,
    Quirk.SESSIONS_KEEP_THEIR_GRAMMAR,
    Quirk.REASONING_END_IS_SEARCHED_IN_THE_NEXT_INPUT,
    Quirk.WINDOW_HIT_CUT_WITHOUT_CHECK,
}
"""Quirks that no hunt of this length has found."""


@pytest.mark.soak
def test_nearly_every_quirk_of_a_release_is_found_and_named() -> None:
    found = []
    for features in FEATURES:
        options = CheckOptions(
            engine="toy", max_events=40_000, profile=RELEASE, with_features=features
        )
        found += hunt(options, call_here(follower(RELEASE))).defects
    named = {cause.name for defect in found for cause in defect.causes}
    assert find(RELEASE).quirks - SELDOM_FOUND <= named <= find(RELEASE).quirks
    assert all(defect.length <= 25 for defect in found)


def test_every_quirk_of_an_engine_is_found_and_named(few: HuntResult) -> None:
    assert {defect.causes for defect in few.defects} == {
        (KnownCause(SuppressionKind.QUIRK, quirk),) for quirk in find(FEW).quirks
    }
    assert all(defect.length <= 15 for defect in few.defects)


def test_a_watchpoint_is_shown_although_nothing_is_wrong(few: HuntResult) -> None:
    ((watchpoint, seen),) = few.policies
    assert watchpoint.name == "urgent_waits_for_a_seat"
    assert seen.shrunk is not None
    submits = [action for action in seen.shrunk.program.actions if isinstance(action, Submit)]
    assert seen.shrunk.program.config.policy is Policy.PRIORITY
    assert len({action.request.priority for action in submits}) > 1


def test_a_hunt_is_rendered_as_text_as_a_page_and_as_json(few: HuntResult) -> None:
    text = render_hunt(few)
    page = render_hunt_page(few, "blockstep hunt --engine toy")
    record: dict[str, Any] = hunt_to_json(few)
    assert "#46899" in text
    assert "#46899" in page
    assert len(record["defects"]) == len(few.defects)
    assert record["equivalence"] == "exact"
    assert all(defect["reproduce"] in text for defect in record["defects"])


def test_a_correct_engine_has_no_defect() -> None:
    result = hunt(CheckOptions(max_events=1_500), call_here(load_engine("host")))
    assert result.defects == []
    assert result.num_events >= 3_000


def test_a_correct_engine_that_is_judged_at_safety_has_no_defect() -> None:
    result = hunt(CheckOptions(max_events=2_000), call_here(held_to_safety(load_engine("host"))))
    assert result.defects == []
    assert result.policies == []  # it may take every decision otherwise
    assert result.num_events < 5_000


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_correct_engine_has_no_defect_at_safety_in_many_events(seed: int) -> None:
    options = CheckOptions(max_events=50_000, seed=seed)
    assert hunt(options, call_here(held_to_safety(load_engine("host")))).defects == []


# What nothing known accounts for.


def test_an_unknown_defect_is_listed_once_and_counted() -> None:
    make_engine = load_engine("museum:leak-on-abort")
    result = hunt(CheckOptions(max_events=600), call_here(make_engine), scopes=("tiny",))
    (defect,) = result.defects
    assert defect.causes == ()
    assert defect.num_seen == result.num_again.total() + 1 > 1
    assert "aborts" in defect.symptoms.own.acts


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("exhibit", "name"),
    [
        ("leak-on-abort", "every_block_is_free_or_held"),
        ("reset-keeps-keys", "published_block_was_written_since_the_reset"),
        ("take-before-touch", "written_block_is_in_one_place"),
        ("item-offset-ignored", "published_block_is_of_the_same_adapter_salt_and_items"),
        pytest.param(
            *("sessions-with-input-never-give-way", "every_request_finishes_after_faults_stop"),
            marks=pytest.mark.soak,
        ),
        # a row has a block too few: it raises if it would fill that block, else its table is short
        pytest.param(*("hit-counts-as-free", "engine_raises_nothing"), marks=pytest.mark.soak),
        pytest.param(
            *("told-one-token-more", "attended_slot_holds_the_right_prefix"), marks=pytest.mark.soak
        ),
        pytest.param(
            *("looking-is-told-as-a-reset", "kv_events_rebuild_the_cache"), marks=pytest.mark.soak
        ),
    ],
)
def test_one_defect_is_listed_once_however_it_shows(exhibit: str, name: str) -> None:
    result = hunt(CheckOptions(max_events=800), call_here(held_to_safety(build(exhibit))))
    (defect,) = result.defects
    assert defect.first.sentence == name


@pytest.mark.soak
def test_most_seeded_bugs_are_listed_once() -> None:
    """Not all bugs are: a wrong map of cached blocks may fail any check."""
    counts = [
        len(hunt(CheckOptions(max_events=800), call_here(held_to_safety(build(name)))).defects)
        for name in EXHIBITS
    ]
    assert sum(number == 1 for number in counts) >= 4 * sum(number > 1 for number in counts) > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("exhibit", "events"),
    [
        ("item-offset-ignored", 1_500),
        ("looking-is-told-as-a-reset", 1_500),
        ("sessions-with-input-never-give-way", 1_500),
        ("share-counted-before-hits", 3_000),
        ("hits-credited-twice", 800),
        ("hit-counts-as-free", 3_000),
        ("forward-frees", 2_500),
    ],
)
def test_one_defect_is_listed_once_if_all_is_compared(exhibit: str, events: int) -> None:
    result = hunt(CheckOptions(max_events=events), call_here(build(exhibit)))
    assert len(result.defects) == 1


PAIRS = (
    ("leak-on-abort", "reset-keeps-keys"),
    ("leak-on-abort", "length-off-by-one"),
    ("reset-keeps-keys", "length-off-by-one"),
    ("sticky-full-flag", "leak-on-abort"),
    ("item-offset-ignored", "leak-on-abort"),
)
"""Seeded bugs that are planted together: each alone is one entry."""


def plant_both(first: str, second: str) -> EngineFactory:
    """Engines with two seeded bugs."""

    def change_both(rules: Rules, config: Config) -> Rules:
        return EXHIBITS[second].change(EXHIBITS[first].change(rules, config), config)

    return type("Both", (build(first),), {"change": staticmethod(change_both)})


@pytest.mark.parametrize(
    ("first", "second"),
    [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.soak) for pair in PAIRS[1:])],
)
def test_two_defects_are_listed_as_two(first: str, second: str) -> None:
    options = CheckOptions(max_events=800)
    result = hunt(options, call_here(plant_both(first, second)), scopes=("tiny",))
    assert len(result.defects) == 2


@pytest.mark.parametrize("rare", ["leak-on-abort", "resumed-without-tokens"])
def test_a_defect_of_nearly_every_episode_hides_no_other(rare: str) -> None:
    """Almost every continued or varied program shows it, but that makes no failure a symptom."""
    make_engine = held_to_safety(plant_both("length-off-by-one", rare))
    result = hunt(CheckOptions(max_events=600), call_here(make_engine), scopes=("tiny",))
    assert [defect.first.sentence for defect in result.defects] == [
        "finish_reason_is_the_one_that_holds",
        {
            "leak-on-abort": "every_block_is_free_or_held",
            "resumed-without-tokens": "tokens_are_sent_after_a_gap",
        }[rare],
    ]
    text, listed = render_hunt(result), cast("Any", hunt_to_json(result))["defects"]
    for defect, row in zip(result.defects, listed, strict=True):
        for other, name, line in zip(defect.also, row["also"], row["also_reproduce"], strict=True):
            assert f"  also      {name}\n            {line}\n" in text
            options = replace(other.options, episode=other.episode)
            again = check(options, place=InProcess(lambda asked: show_to(asked, make_engine)))
            assert again.failure is not None
            assert again.failure.findings[0].sentence == other.first.sentence
    assert bool(listed[1]["also"]) == (rare == "leak-on-abort")


def test_a_request_that_only_a_variant_finishes_makes_no_failure_a_symptom() -> None:
    """A request that only the variant finishes meets the other defect where the program raises."""
    base: Any = build("length-off-by-one")

    class RaisesAfterAborts(base):  # type: ignore[misc]
        traits = EngineTraits(equivalence=Safety())

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.rows: dict[int, set[str]] = {}
            self.aborted: set[str] = set()

        def apply(self, event: Event) -> Observation:
            seen: Observation = super().apply(event)
            match event, seen:
                case Submit(request=request), _:
                    self.aborted.discard(request.request_id)
                case Schedule(), Plan() as plan:
                    self.rows[plan.frame_id] = {row.request_id for row in plan.rows}
                case Abort(request_ids=names), _:
                    self.aborted.update(names)
                case Commit(frame_id=frame_id), _ if self.rows[frame_id] & self.aborted:
                    raise RuntimeError("the pages of a request were freed twice")
            return seen

    options = CheckOptions(max_events=600, without_features=NOT_MET)
    result = hunt(options, call_here(RaisesAfterAborts), scopes=("tiny",))
    assert {defect.first.sentence for defect in result.defects} == {
        "finish_reason_is_the_one_that_holds",
        "engine_raises_nothing",
    }


def show_to(options: CheckOptions, make_engine: EngineFactory) -> EngineFactory:
    return hide_state(make_engine) if options.hide_state else make_engine


NOT_MET = (
    *(
        "cadence",
        "forks",
        "tiers",
        "pins",
        "transfers",
        "groups",
        "encoder",
        "events",
        "multimodal",
    ),
    *("adapters", "keys", "embeds", "sessions", "masks", "grammar", "reset", "pause"),
    *("hostile", "drafts"),
)


class HasAQuirkInPart(SpecEngine):
    """An engine that has a quirk of a release except with blocks of one token."""

    def __init__(self, config: Config) -> None:
        quirk = "strict+min_tokens_mask_length" if config.block_size > 1 else "strict"
        super().__init__(config, find(quirk))


def test_a_quirk_that_a_later_failure_refutes_is_withdrawn() -> None:
    """The quirk explains the first failure, and causes another where the engine lacks it."""
    # Plain requests in plain pools: they meet the quirk soon, and then the other block size.
    options = CheckOptions(max_events=1_700, profile=RELEASE, without_features=NOT_MET)
    result = hunt(options, call_here(HasAQuirkInPart), scopes=("tiny",))
    (defect,) = result.defects
    assert defect.causes == ()
    assert defect.forgiven == frozenset()


def test_a_program_that_passes_without_a_quirk_refutes_it() -> None:
    config = Config(num_blocks=8, block_size=1, max_model_len=4)
    alive = Request("A", (0, 0), max_tokens=4, min_tokens=4)
    program = Program(config, (Submit(alive), *(Schedule(), Answer()) * 2))
    cause = KnownCause(SuppressionKind.QUIRK, Quirk.MIN_TOKENS_MASK_LENGTH)
    assert find_refuted(program, HasAQuirkInPart, frozenset({cause})) == (cause,)
    assert find_refuted(program, follower(FEW), frozenset({cause})) == ()


class Two(SpecEngine):
    """An engine that never names a stop token, and raises at an abort of several requests."""

    traits = EngineTraits(equivalence=Safety())

    def apply(self, event: Event) -> Observation:
        seen = super().apply(event)
        if isinstance(event, Abort) and len(event.request_ids) > 1:
            raise KeyError(event.request_ids[-1])
        if isinstance(seen, Outputs):
            rows = [replace(row, stop_token_id=None) for row in seen.rows]
            return replace(seen, rows=tuple(rows))
        return seen


TWO = CheckOptions(max_events=600, seed=2, without_features=("cadence",))


@pytest.fixture(scope="module")
def two() -> HuntResult:
    return hunt(TWO, call_here(Two), scopes=("tiny",))


def test_a_defect_does_not_hide_another(two: HuntResult) -> None:
    assert {defect.first.sentence for defect in two.defects} == {
        "finish_reason_is_the_one_that_holds",
        "engine_raises_nothing",
    }
    assert all(defect.length <= 4 for defect in two.defects)
    (raised_at,) = filter(None, (defect.raised_at for defect in two.defects))
    assert raised_at.startswith("apply (test_hunt.py:")


class Declared(Two):
    """`Two` with an adapter that declares one of the defects."""

    traits = EngineTraits(
        equivalence=Safety(),
        deviations=(
            Deviation(
                name="unnamed_stops",
                summary="no answer names the token that ended a request",
                program=Program(
                    Config(num_blocks=3, block_size=1, max_model_len=2),
                    (Submit(Request("A", (0,), 1, stop_token_ids=(0, 1))), Schedule(), Answer()),
                    vocabulary_size=2,
                ),
                sentences=("finish_reason_is_the_one_that_holds",),
            ),
        ),
    )


def test_a_declared_deviation_is_counted_apart() -> None:
    result = hunt(CheckOptions(max_events=600), call_here(Declared))
    (defect,) = result.defects
    assert defect.first.sentence == "engine_raises_nothing"
    (count,) = result.excused.values()
    line = f"known       unnamed_stops: {count:,} findings that the adapter declares"
    assert line in render_hunt(result)
    assert hunt_to_json(result)["deviations"] == {"unnamed_stops": count}
    assert hunt_to_json(result)["deviations_stale"] == []


class WrongState(SpecEngine):
    """An engine whose free queue lists block 1 once too often, and that names no stop token."""

    traits = EngineTraits(equivalence=Safety())

    def apply(self, event: Event) -> Observation:
        seen = super().apply(event)
        if isinstance(seen, Outputs):
            rows = [replace(row, stop_token_id=None) for row in seen.rows]
            return replace(seen, rows=tuple(rows))
        return seen

    def snapshot(self) -> Any:
        shown = super().snapshot()
        return replace(shown, free_queue=(*shown.free_queue, 1)) if shown.next_frame_id else shown


def test_a_defect_that_a_wrong_state_masks_is_found_with_the_state_hidden() -> None:
    result = hunt(CheckOptions(max_events=400, seed=1), call_here(WrongState))
    first, second = result.defects
    assert first.first.property_id == "P1"
    assert second.first.sentence == "finish_reason_is_the_one_that_holds"
    assert second.behind == "P1 every_block_is_free_or_held"
    assert second.options.hide_state
    assert "--hide-state" in render_hunt(result).splitlines()[-1]


class Lengthens(SpecEngine):
    """An engine that schedules a token too many after a hit, so its plan is malformed."""

    traits = EngineTraits(equivalence=Safety())

    def apply(self, event: Event) -> Observation:
        seen = super().apply(event)
        if not isinstance(seen, Plan):
            return seen
        return replace(seen, new=tuple(self.lengthen(row, seen) for row in seen.new))

    def lengthen(self, row: NewRow, plan: Plan) -> NewRow:
        # A session that goes on is announced again with what it had computed, which is no hit.
        more = 0 if row.request.resumable else min(row.num_computed_tokens, 1)
        return replace(row, num_scheduled_tokens=row.num_scheduled_tokens + more)


class SharesABlock(Lengthens):
    """`Lengthens`, where such a row also writes to the last block of the first row."""

    def lengthen(self, row: NewRow, plan: Plan) -> NewRow:
        longer, first = super().lengthen(row, plan), plan.new[0]
        if longer == row or row is first:
            return longer
        return replace(longer, block_ids=(*row.block_ids[:-1], first.block_ids[-1]))


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        (Lengthens, [("P24", None)]),
        (
            SharesABlock,
            [
                ("P24", None),
                ("P3", "attended_slot_holds_the_right_prefix"),
                ("P2", "written_block_is_in_one_place"),
            ],
        ),
    ],
)
def test_a_defect_that_a_malformed_plan_masks_is_listed_too(
    engine: type[Lengthens], found: list[tuple[str, str | None]]
) -> None:
    """The check of the defect never fails first, so the line to reproduce it names the check."""
    # A loaded request and a branch have computed tokens, too, and that is no hit. Where admission
    # closes few have a hit. Of this seed two write unequal content to the block that they share.
    without = ("transfers", "tiers", "forks")
    options = CheckOptions(max_events=800, seed=8, without_features=without)
    result = hunt(options, call_here(hide_state(engine)), scopes=["tiny"])
    seen = [(defect.first.property_id, defect.options.sentence) for defect in result.defects]
    assert seen == found
    records: Any = hunt_to_json(result)["defects"]
    for defect, line in zip(result.defects, records, strict=True):
        wanted = defect.options.sentence
        assert line["findings"][0]["sentence"] == defect.first.sentence
        assert line["reproduce"].endswith(f"--sentence {wanted}") == (wanted is not None)
        options = replace(defect.options, episode=defect.episode)
        again = check(options, place=InProcess(lambda _options: hide_state(engine)))
        assert again.failure is not None
        assert again.failure.findings[0].sentence == defect.first.sentence


# What is one defect.


@pytest.mark.parametrize("is_hit", [False, True])
def test_a_session_that_continues_has_no_hit(is_hit: bool) -> None:
    """The new row of a session has computed tokens of its own, which another request may hit."""
    turn = (Schedule(), Answer())
    actions = (
        Submit(Request("S", (0, 0, 0), max_tokens=1, resumable=True)),
        *turn,
        StreamingUpdate(Request("S", (1,), max_tokens=1, resumable=True)),
        *turn,
        *((Submit(Request("B", (0, 0, 0), max_tokens=1)), *turn) if is_hit else ()),
    )
    program = Program(Config(num_blocks=9, block_size=2), actions)
    run, findings = run_program(program, SpecEngine)
    assert findings == []
    mark = mark_of(program, run, Finding(FindingKind.PROPERTY, "P1", "a_b", ""))
    assert ("hits" in mark.means) == is_hit


def test_a_reused_id_is_an_act_that_a_failure_may_need() -> None:
    """A request with the id of an ended one has other defects than a request with a new one."""
    one = Submit(Request("A", (0,), max_tokens=1))
    turn = (Schedule(), Answer())
    program = Program(Config(num_blocks=9, block_size=2), (one, *turn, one, *turn))
    found = Finding(FindingKind.PROPERTY, "P1", "a_b", "")

    def play(tried: Program) -> Played:
        run, _ = run_program(tried, SpecEngine)
        return Played(tried, run, [found] if tried == program else [])

    mark = mark_of(program, run_program(program, SpecEngine)[0], found)
    assert mark.acts == {"an id is used again"}
    assert not mark.is_like(FailureSignature(mark.message))
    assert relax(program, mark.message, play) == program
    plainer = relax(program, mark.message, lambda it: replace(play(it), findings=[found]))
    submits = [it for it in plainer.actions if isinstance(it, Submit)]
    assert [it.request.request_id for it in submits] == ["A", "A'"]


def test_failures_are_alike_with_equal_findings_after_equal_acts_by_comparable_means() -> None:
    plain = FailureSignature("property P1 a_b", means=frozenset({"hits"}))
    assert plain.is_like(FailureSignature("property P1 a_b", means=frozenset({"hits", "drafts"})))
    assert FailureSignature("property P1 a_b").is_like(plain)
    assert not plain.is_like(FailureSignature("property P2 a_b", means=frozenset({"hits"})))
    assert not plain.is_like(FailureSignature("property P1 a_b", means=frozenset({"drafts"})))
    assert not plain.is_like(
        FailureSignature("property P1 a_b", frozenset({"aborts"}), frozenset({"hits"}))
    )


def test_rows_of_a_wrong_length_are_alike_if_they_share_a_means() -> None:
    """The other means of their programs only delay a row, or leave it fewer tokens."""
    message = "property P24 drafts_are_the_last_scheduled_tokens"
    grammar = FailureSignature(message, means=frozenset({"hits", "grammar"}))
    drafts = replace(grammar, means=frozenset({"hits", "drafts"}))
    assert grammar.is_like(drafts)
    assert not grammar.is_like(replace(drafts, means=frozenset({"drafts"})))
    assert not grammar.is_like(replace(drafts, acts=frozenset({"aborts"})))
    assert grammar.is_like(replace(drafts, acts=frozenset({distinct.USED_ID})))
    leaks = replace(grammar, message="property P1 a_b")
    assert not leaks.is_like(replace(drafts, message="property P1 a_b"))


@pytest.mark.parametrize("name", distinct.BY_CHANCE)
def test_checks_that_find_one_defect_are_described_alike(name: str) -> None:
    def make(name: str) -> Finding:
        property_id, sentence = name.split()
        return Finding(FindingKind.PROPERTY, property_id, sentence, "")

    assert distinct.describe_failure(make(name)) == distinct.describe_failure(
        make(distinct.BY_CHANCE[name])
    )


def test_checks_that_fail_at_the_same_event_are_one_defect() -> None:
    tail, head = "freed_tail_is_evicted_first", "new_blocks_come_from_the_head_of_the_free_queue"
    freed, taken = (
        FailureSignature(f"property P16 {tail}"),
        FailureSignature(f"property P16 {head}"),
    )
    assert Symptoms(taken, frozenset({freed})).comes_with(Symptoms(freed))
    assert not Symptoms(freed, frozenset({taken})).comes_with(Symptoms(taken))


def test_corruption_with_an_admission_beyond_the_pool_is_one_defect() -> None:
    admission = "admission_leaves_room_for_the_whole_prompt"
    admitted = FailureSignature(f"property P8 {admission}", means=frozenset({"hits", "chunks"}))
    hits = replace(admitted, means=frozenset({"hits"}))
    written = Symptoms(
        FailureSignature("property P2 a_b", means=frozenset({"hits"})), frozenset({hits})
    )
    assert written.comes_with(Symptoms(admitted))
    assert Symptoms(admitted).comes_with(written)
    other = replace(admitted, message="property P8 c_d")
    assert not written.comes_with(Symptoms(other))
    asked = replace(written, own=replace(written.own, message="property P21 a_b"))
    assert not asked.comes_with(Symptoms(admitted))


def test_an_exception_with_blocks_of_one_token_is_among_the_symptoms() -> None:
    make_engine = SuppressingFactory(build("hits-credited-twice"), frozenset())
    first, second = (Submit(Request(name, tokens, 1)) for name, tokens in HIT)
    program = Program(Config(num_blocks=9, block_size=2), (first, second, Schedule()))
    _, (found, *_) = run_program(program, make_engine)
    assert found.sentence == "table_holds_the_scheduled_tokens"
    symptoms = distinct.find_symptoms(program, make_engine, follow(()), found)
    assert any(mark.is_exception for mark in symptoms.near)


@pytest.mark.parametrize(
    ("block_size", "prompts", "other"),
    [
        (1, ((1,), (0,), (1, 0)), "table_holds_the_scheduled_tokens"),
        (2, ((1, 1), (0, 0), (1, 1, 0)), "engine_raises_nothing"),
    ],
)
def test_a_missing_block_is_one_defect_whether_a_row_fills_it_or_not(
    block_size: int, prompts: tuple[tuple[int, ...], ...], other: str
) -> None:
    """The engine raises where it would publish the block; else the table of the row is short."""
    make_engine = SuppressingFactory(build("hit-counts-as-free"), frozenset())
    a, b, c = (Submit(Request(f"{it}", it, max_tokens=1)) for it in prompts)
    config = Config(num_blocks=3, block_size=block_size, max_model_len=64)
    program = Program(config, (a, Schedule(), Answer(), b, c, Schedule()))
    _, (found, *_) = run_program(program, make_engine)
    symptoms = distinct.find_symptoms(program, make_engine, follow(()), found)
    assert any(other in mark.message for mark in symptoms.near)


@pytest.mark.parametrize(("means", "is_one"), [((), False), (("hits", "chunks"), True)])
def test_what_a_variant_shows_with_no_more_means_is_one_with_it(
    means: tuple[str, ...], *, is_one: bool
) -> None:
    cause = FailureSignature("fault  engine_raises_nothing the engine raised KeyError")
    near = FailureSignature("property P26 a_b", means=frozenset({"hits"}))
    seen = Symptoms(replace(near, means=frozenset(means)))
    assert seen.comes_of(Symptoms(cause, near=frozenset({near}))) == is_one


HIT = (("A", (0, 0)), ("B", (0, 0, 0)))
"""Two requests: the second hits the prompt of the first."""


def test_an_engine_that_raises_in_two_places_after_the_same_act_has_one_defect() -> None:
    message = "fault  engine_raises_nothing the engine raised KeyError {}"
    aborts = frozenset({"aborts"})
    here, there = (FailureSignature(message.format(place), aborts) for place in ("free", "lock"))
    assert here.is_like(there)
    assert not here.is_like(replace(there, acts=frozenset({"reset"})))
    assert not replace(here, acts=frozenset()).is_like(replace(there, acts=frozenset()))
    assert not here.is_like(FailureSignature("property P1 a_b", aborts))


def test_a_symptom_follows_from_a_defect_and_does_not_contain_it_by_chance() -> None:
    cause, symptom = (
        FailureSignature("property P1 a_b"),
        FailureSignature("property P3 c_d", means=frozenset({"hits"})),
    )
    more = replace(symptom, means=frozenset({"hits", "preempts"}))
    assert Symptoms(symptom).comes_of(Symptoms(cause, onward=frozenset({more})))
    assert not Symptoms(cause, onward=frozenset({more})).comes_of(Symptoms(symptom))
    assert not Symptoms(symptom).comes_of(Symptoms(cause))


def test_exceptions_after_the_same_act_are_one_defect_in_any_function() -> None:
    aborts, frames = frozenset({"aborts"}), frozenset({"several frames"})
    message = "fault  engine_raises_nothing the engine raised KeyError {}"
    here, there = (
        FailureSignature(message.format(place), aborts, frames) for place in ("free", "lock")
    )
    freed = Symptoms(FailureSignature("property P3 a_b", aborts, frames), onward=frozenset({there}))
    assert freed.comes_of(Symptoms(here))
    assert not freed.comes_of(Symptoms(replace(here, acts=frozenset({"reset"}))))
    assert not freed.comes_of(Symptoms(replace(here, means=frozenset())))


def test_a_symptom_needs_the_means_of_its_defect() -> None:
    """One program shows two defects: a victim's token is lost, and a whole prompt is hit."""
    lost = FailureSignature("property P13 a_b", means=frozenset({"hits", "preempts"}))
    shared = FailureSignature("property P2 c_d", means=frozenset({"hits"}))
    met = replace(shared, means=lost.means)
    assert not Symptoms(shared).comes_of(Symptoms(lost, onward=frozenset({met})))
    assert Symptoms(met).comes_of(Symptoms(lost, onward=frozenset({met})))


def test_failures_at_one_event_are_one_defect_if_neither_occurs_alone() -> None:
    one, other = FailureSignature("property P3 a_b"), FailureSignature("property P24 c_d")
    longer = Symptoms(one, frozenset({other}), length=9)
    assert longer.comes_with(Symptoms(other, frozenset({one}), length=3))
    alone = Symptoms(other, length=3)  # which may be in the longer one by chance
    assert not longer.comes_with(alone)
    assert not alone.comes_with(longer)
    assert not longer.comes_of(alone)
    assert replace(longer, length=3).comes_of(alone)


def test_a_malformed_plan_is_one_defect_whichever_check_fails() -> None:
    """A row has a wrong length: which check fails first depends on the bounds of the config."""
    model, drafts, table = (FailureSignature(f"property {it} a_b") for it in ("P9", "P24", "P26"))
    assert Symptoms(model, frozenset({drafts}), length=9).comes_with(Symptoms(drafts, length=3))
    assert Symptoms(model, frozenset({table})).comes_with(Symptoms(drafts, frozenset({table})))
    assert not Symptoms(model).comes_with(Symptoms(drafts, frozenset({table})))


def test_failures_are_grouped_in_any_order() -> None:
    """The second and the third fail the same check, and the third fails that of the first, too."""
    first, second = FailureSignature("property P24 a_b"), FailureSignature("property P26 c_d")
    with_first = Symptoms(second, frozenset({first}), length=9)
    found = [Symptoms(first, frozenset({second}), length=5), Symptoms(second, length=3), with_first]
    apart = Symptoms(FailureSignature("property P3 e_f"))
    for order in itertools.permutations([*found, apart]):
        groups = group_failures(make_defect(symptoms) for symptoms in order)
        assert sorted(len(group.defects) for group in groups) == [1, 3]


def test_divergence_is_one_with_a_property_where_the_same_fields_differ() -> None:
    fields = FailureSignature("divergence  engine_equals_spec ['kv_events']")
    logged = FailureSignature("property P20 a_b")
    alone, beside = Symptoms(fields, length=3), Symptoms(logged, frozenset({fields}), length=4)
    for order in itertools.permutations([make_defect(alone), make_defect(beside)]):
        assert len(group_failures(order)) == 1
    other = Symptoms(FailureSignature("divergence  engine_equals_spec ['stats']"), length=3)
    assert len(group_failures([make_defect(other), make_defect(beside)])) == 2


def test_divergence_of_rows_is_described_by_the_rows_alone() -> None:
    """Pool, queues and counters differ as a consequence, in other fields for each program."""

    def make(*fields: str) -> Finding:
        differences = tuple(Difference(field, "there", "-") for field in fields)
        return Finding(FindingKind.DIVERGENCE, "", "engine_equals_spec", "", differences)

    described = "divergence  engine_equals_spec ['rows']"
    assert distinct.describe_failure(make("new A", "block 1", "running")) == described
    assert distinct.describe_failure(make("cached B", "waiting")) == described
    assert distinct.describe_failure(make("running", "waiting")) != described


def test_a_failure_with_the_state_hidden_is_grouped_with_the_wrong_state() -> None:
    """The wrong state may be found after a forced reset, but not after another act."""
    leak = FailureSignature("property P1 a_b")
    hidden = Symptoms(FailureSignature("property P2 c_d", frozenset({"aborts"})))
    for acts, count in (("reset", 1), ("aborts", 2)):
        seen = make_defect(hidden, replace(leak, acts=frozenset({acts})))
        assert len(group_failures([make_defect(Symptoms(leak)), seen])) == count


def test_a_failure_with_every_malformed_plan_is_one_defect_with_it() -> None:
    """Only a malformed plan without the failure, by no greater means, separates the two."""
    hits = frozenset({"hits"})
    shape, table = (FailureSignature(f"property {it} a_b", means=hits) for it in ("P24", "P26"))
    shared = FailureSignature("property P2 c_d", means=hits)
    masked = replace(make_defect(Symptoms(shared, frozenset({shape, table}))), is_masked=True)
    with_it = [
        make_defect(Symptoms(shape, frozenset({table, shared}))),
        make_defect(Symptoms(table, frozenset({shape, shared}))),
    ]
    assert len(group_failures([*with_it, masked])) == 1
    greater = FailureSignature("property P24 a_b", means=frozenset({"hits", "preempts"}))
    assert len(group_failures([*with_it, masked, make_defect(Symptoms(greater))])) == 1
    assert len(group_failures([*with_it, masked, make_defect(Symptoms(shape))])) == 2


def test_failures_that_may_follow_from_a_wrong_state_are_not_listed() -> None:
    def make(property_id: str, sentence: str) -> Finding:
        return Finding(FindingKind.PROPERTY, property_id, sentence, "")

    shape, count = make("P24", "a_b"), make("P1", "every_block_is_free_or_held")
    shared = make("P2", "written_block_is_in_one_place")
    assert distinct.list_masked(
        shape, [make("P26", "table_holds_the_scheduled_tokens"), shared]
    ) == [shared]
    assert distinct.list_masked(shape, [shared, count]) == []
    assert distinct.list_masked(count, [shared]) == []
    twice = make("P26", "request_has_one_row")
    assert distinct.list_masked(twice, [shared]) == []
    assert distinct.list_masked(shape, [twice, shared]) == []


def make_defect(symptoms: Symptoms, *follows: FailureSignature) -> Defect:
    _, property_id, sentence = symptoms.own.message.split()
    finding = Finding(FindingKind.PROPERTY, property_id, sentence, "")
    options = CheckOptions()
    return Defect((), finding, options, 0, 0, 0, symptoms, follows=frozenset(follows))


def test_features_that_a_failure_does_not_need_are_no_means_of_it() -> None:
    """The abort only frees blocks, and the pool need not be small."""
    config = Config(num_blocks=5, block_size=1, max_num_batched_tokens=1, max_model_len=4)
    gone, stops = Request("A", (0,), max_tokens=1), (0, 1, 2)
    other = Request("B", (2, 1), max_tokens=2, stop_token_ids=stops)
    start = (Submit(gone), Schedule(), Answer(), Submit(gone), Schedule(), Abort(("A",)), Answer())
    actions = (*start, Submit(other), *(Schedule(), Answer()) * 2)
    program, make_engine = (
        Program(config, actions, vocabulary_size=3),
        SuppressingFactory(Two, frozenset()),
    )
    profile = follow(())
    _, (finding,) = run_program(program, make_engine, profile)
    found = distinct.find_symptoms(program, make_engine, profile, finding)
    assert found.own.acts == frozenset()
    assert found.own.means == {"stops"}


def test_a_settled_exception_is_compared_by_what_its_program_needs() -> None:
    """Another exception comes first if one plan is in flight at a time."""
    one, two = (Request(name, (0,), max_tokens=2, stop_token_ids=(0, 1, 2)) for name in "AB")
    config = Config(num_blocks=5, block_size=1, max_model_len=4, max_frames_in_flight=2)
    start, profile = (Submit(one), Submit(two), Schedule()), follow(())
    program = Program(config, (*start, Abort(("A", "B"))), vocabulary_size=3)
    make_engine = SuppressingFactory(Two, frozenset())
    _, (finding,) = run_program(program, make_engine, profile)
    _, (first, *_) = run_program(replace(program, actions=(*start, Answer())), make_engine)
    settled = [distinct.describe_failure(it) for it in (finding, first)]
    found = distinct.find_symptoms(program, make_engine, profile, finding, settled)
    assert found.own.is_exception
    assert "several frames" not in found.own.means


# Every engine.


def test_a_wrapped_engine_answers_as_the_engine_does() -> None:
    config, forgiven = (
        Config(num_blocks=3),
        frozenset({KnownCause(SuppressionKind.WORKAROUND, "spare_unservable")}),
    )
    forgiving = SuppressingFactory(Spared, forgiven)
    engine = forgiving(config)
    assert get_traits(forgiving) is Spared.traits
    assert get_judged(engine) == frozenset()
    assert get_judged(SuppressingFactory(Spared, frozenset())(config))
    assert engine.capabilities() == ALL_CAPABILITIES - {"rejection"}
    assert isinstance(unwrapped(engine), Spared)
    hidden = hide_state(forgiving)
    assert get_traits(hidden) is Spared.traits
    assert Capability.SNAPSHOT not in hidden(config).capabilities()
    assert hidden(config).snapshot() is None


class Spared(SpecEngine):
    """Accepts what never fits, and raises at a forced reset; its adapter declares both."""

    spare_unservable: bool = True
    traits = EngineTraits(workarounds={"spare_unservable": "what never fits is taken (#1)"})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.taken = 0

    @property
    def judges(self) -> frozenset[RejectCode]:
        return frozenset() if self.spare_unservable else frozenset({RejectCode.NEVER_FITS})

    def capabilities(self) -> frozenset[str]:
        return ALL_CAPABILITIES - {"rejection"}

    def apply(self, event: Event) -> Observation:
        if event == Reset(True):
            raise KeyError("block")
        answer = super().apply(event)
        if isinstance(answer, Rejected) and isinstance(event, Submit):
            return super().apply(Submit(Request(event.request.request_id, (0,), max_tokens=1)))
        return answer

    def declines(self, event: Event) -> str | None:
        return "forced reset (#2)" if event == Reset(True) else None


def test_workarounds_and_declined_events_are_used_only_if_they_explain() -> None:
    result = hunt(CheckOptions(max_events=800), call_here(Spared))
    assert {defect.causes for defect in result.defects} == {
        (KnownCause(SuppressionKind.WORKAROUND, "spare_unservable"),),
        (KnownCause(SuppressionKind.DECLINED, "forced reset (#2)"),),
    }
    first = {defect.causes[0].means: defect.first for defect in result.defects}
    assert first[SuppressionKind.WORKAROUND].property_id == "P11"
    assert first[SuppressionKind.DECLINED].kind is FindingKind.FAULT
    text = render_hunt(result)
    assert "what never fits is taken (#1)" in text
    assert "forced reset (#2)" in text
    # A check would work around the one and decline the other.
    assert text.count("reproduce blockstep hunt ") == 2


def test_a_failure_that_passes_with_one_quirk_is_explained_by_it() -> None:
    config = Config(num_blocks=8, block_size=1, max_model_len=4)
    alive = Request("A", (0, 0), max_tokens=4, min_tokens=4)
    program = Program(config, (Submit(alive), *(Schedule(), Answer()) * 2))
    follows = find(RELEASE).quirks
    cause = KnownCause(SuppressionKind.QUIRK, Quirk.MIN_TOKENS_MASK_LENGTH)
    make_engine = follower(RELEASE)
    assert find_causes(program, make_engine, frozenset(), follows) == (cause,)
    assert find_causes(program, make_engine, frozenset(), follows - {cause.name}) == ()
    assert read_cause(str(cause)) == cause


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("", Quirk.WINDOW_RESERVES_THE_FULL_REQUEST),  # the first that it passes with
        ("strict+window_reserves_steps_in_flight", Quirk.WINDOW_RESERVES_STEPS_IN_FLIGHT),
    ],
)
def test_quirks_of_the_profile_of_an_engine_explain_before_others(
    profile: str, expected: Quirk
) -> None:
    class Known:
        traits = EngineTraits(profile=profile)

        def __new__(cls, config: Config) -> Engine:  # type: ignore[misc]
            return SpecEngine(config, find("strict+window_reserves_steps_in_flight"))

    window = KVGroup(GroupKind.SLIDING_WINDOW, 1, sliding_window=2)
    config = Config(num_blocks=3, block_size=1, max_num_batched_tokens=1, groups=(window,))
    program = Program(config, (Submit(Request("A", (0,) * 5, max_tokens=1)), Schedule()))
    assert find_causes(program, Known, frozenset(), tuple(Quirk)) == (
        KnownCause(SuppressionKind.QUIRK, expected),
    )


# The command.

BROKEN = '''
import os
from dataclasses import replace
from blockstep.conformance.engine import EngineTraits, Safety
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import Abort, Outputs, Reset, SetPause

class Broken(SpecEngine):
    """Three defects: a wrong answer, an exception, and the end of the process."""
    traits = EngineTraits(equivalence=Safety(), version="0.1")

    def apply(self, event):
        seen = super().apply(event)
        if isinstance(event, Reset) and event.reset_running_requests:
            os._exit(3)
        if isinstance(event, Abort) and getattr(seen, "request_ids", ()):
            raise KeyError(event.request_ids[-1])
        if isinstance(seen, Outputs):
            rows = [replace(row, stop_token_id=None) for row in seen.rows]
            return replace(seen, rows=tuple(rows))
        return seen

class Spared(SpecEngine):
    """Breaks at an abort, which its adapter hides, and at a pause."""
    traits = EngineTraits(workarounds={"hides_aborts": "an abort breaks it (#3)"})
    hides_aborts = True

    def apply(self, event):
        if isinstance(event, Abort) and not self.hides_aborts:
            raise KeyError("abort")
        if isinstance(event, SetPause):
            raise ValueError("pause")
        return super().apply(event)
'''


def hunt_and_reproduce(tmp_path: Path, engine: str, *args: str) -> tuple[list[str], str]:
    """Return the checks that fail in a hunt, each reproduced by its own line, and the output."""
    folder, file = tmp_path / "an engine", tmp_path / "found.json"
    folder.mkdir()
    (folder / "broken_in_many_ways.py").write_text(BROKEN)
    given = ["--engine", f"broken_in_many_ways:{engine}", "--path", str(folder), *args]
    run = CliRunner().invoke(app, ["hunt", *given, "--json", str(file)])
    assert run.exit_code == 1, run.output
    defects = json.loads(file.read_text())["defects"]
    sentences = [defect["findings"][0]["sentence"] for defect in defects]
    for defect, sentence in zip(defects, sentences, strict=True):
        assert defect["reproduce"] in run.output
        command, *words = shlex.split(defect["reproduce"])
        assert command == "blockstep"
        again = CliRunner().invoke(app, words)
        assert again.exit_code == 1
        assert sentence in again.output
    return sentences, run.output


def test_each_line_to_reproduce_shows_its_finding(tmp_path: Path) -> None:
    """This includes a crash, after which the hunt continues with another process."""
    saved = tmp_path / "saved"
    drawn = ("--budget", "400", "--seed", "5", "--without", "cadence")
    args = (*drawn, "--preset", "tiny", "--save", str(saved))
    sentences, _ = hunt_and_reproduce(tmp_path, "Broken", *args)
    assert sorted(sentences) == [
        "engine_raises_nothing",
        "engine_returns_from_every_call",
        "finish_reason_is_the_one_that_holds",
    ]
    assert len(list(saved.iterdir())) == 2  # nobody lived to name the third


def test_each_line_to_reproduce_turns_suppressions_off(tmp_path: Path) -> None:
    drawn = ("--budget", "300", "--seed", "6", "--without", "hostile", "--without", "groups")
    args = ("--preset", "tiny", *drawn)
    sentences, text = hunt_and_reproduce(tmp_path, "Spared", *args)
    assert sentences == ["engine_raises_nothing"] * 2
    assert "1. an abort breaks it (#3)" in text
    lines = [line for line in text.splitlines() if line.startswith("  reproduce blockstep hunt")]
    assert len(lines) == 2
    assert "  raised in apply (broken_in_many_ways.py:" in text
    assert any(line.endswith(" --forgive workaround:hides_aborts") for line in lines)


# Side by side, and how deep.


def test_a_hunt_finds_the_same_with_any_number_of_jobs(
    two: HuntResult,
) -> None:
    with ThreadPoolExecutor(3) as pool:
        together = hunt(replace(TWO, jobs=3), call_here(Two), scopes=("tiny",), pool=pool)
    assert two.defects
    assert render_hunt(together) == render_hunt(two)


@pytest.mark.soak
def test_a_hunt_takes_jobs_and_reports_the_same() -> None:
    results = []
    for jobs in ("1", "2"):
        command = ("hunt", "--engine=museum:leak-on-abort", "--budget=300", f"--jobs={jobs}")
        results.append(CliRunner().invoke(app, command))
    assert [result.exit_code for result in results] == [1, 1]
    assert results[0].stdout == results[1].stdout


@pytest.mark.parametrize("equivalence", [None, Safety()])
def test_a_hunt_shows_how_many_plans_an_engine_has_in_flight(
    equivalence: Equivalence | None,
) -> None:
    class HasTwo(HostEngine):
        traits = EngineTraits(equivalence=equivalence, fit_config=fit_two)

    result = hunt(CheckOptions(max_events=50), call_here(HasTwo))
    assert "at most 2 plans in flight" in render_hunt(result)


def fit_two(config: Config) -> tuple[Config, str | None]:
    """Return the config with at most two frames in flight."""
    if config.max_frames_in_flight <= 2:
        return config, None
    return replace(config, max_frames_in_flight=2), "more than two frames in flight"
