"""Headlines: the first finding of a seeded wrong decision names this decision.

The engine has the quirks of a release, and the specification follows them. What a quirk changes in
the step of the wrong decision is known, and is no finding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from planted_support import Planted, in_spec
from syrupy.assertion import SnapshotAssertion

from blockstep.conformance.engine import (
    Capability,
    EngineFactory,
    EngineFault,
    EngineTraits,
    Safety,
)
from blockstep.conformance.engines.adapters.vllm_releases import (
    REFERENCE,
    get_installed_version,
)
from blockstep.conformance.judge.checks import PROPERTIES
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep.driver import describe_divergence, put_causes_first
from blockstep.conformance.lockstep.exchange import fault_of
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.compare import find_subjects
from blockstep.conformance.protocol.findings import (
    MUST_WAIT,
    Difference,
    Finding,
    FindingKind,
    Subjects,
    blocks_apart,
    requests_apart,
    violated,
)
from blockstep.conformance.protocol.program import Answer, Drain, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.report.check_texts import SENTENCES
from blockstep.conformance.report.explain import explain_name
from blockstep.conformance.report.failure import render_first_failure
from blockstep.conformance.report.headlines import CHARS_MAX, CHECK_HEADLINES, make_headline
from blockstep.conformance.report.jsonform import finding_to_json
from blockstep.conformance.search.check import (
    CheckResult,
    check,
    is_consequence,
    play_program,
    shrink_first,
)
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.conformance.search.shrink import shrink
from blockstep.spec import vocabulary as v
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.profiles import STRICT, get_profile

EPISODES = 600
PROFILE = get_profile(in_spec.PROFILE)
assert PROFILE is not None


def find_first(entry: Planted, make_engine: EngineFactory) -> Finding:
    """Return the first finding of the first tiny episode that shows a wrong decision."""
    options = CheckOptions(
        preset="tiny",
        profile=in_spec.PROFILE,
        with_features=entry.features,
        without_features=("cadence",),  # the episodes by which the names were chosen
    )
    for index in range(EPISODES):
        found = run_episode(options, index, make_engine).first
        if found is not None:
            return found
    raise AssertionError(f"{entry.name} is not found in {EPISODES} tiny episodes")


def describe(finding: Finding) -> str:
    """Return the first lines of a finding in one: name, headline, message and differences."""
    differences: Iterable[Difference] = finding.differences[:2]
    values = [f"{one.field}: expected {one.expected}, seen {one.seen}" for one in differences]
    name = finding.property_id, finding.sentence
    return " ".join([*name, make_headline(finding), finding.message, *values])


@pytest.mark.parametrize("entry", in_spec.PLANTED, ids=lambda entry: entry.name)
def test_the_first_finding_names_the_wrong_decision(entry: Planted) -> None:
    found = find_first(entry, in_spec.build_factory(entry))
    text = describe(found)
    assert entry.is_named_by(text), text
    named = re.match(r"'(\w+)'", found.message)  # a request that is named is a subject
    assert named is None or named[1] in found.subjects.requests


def test_at_least_twenty_wrong_decisions_are_planted() -> None:
    assert len({entry.name for entry in in_spec.PLANTED}) >= 20


needs_release = pytest.mark.skipif(
    get_installed_version() != REFERENCE,
    reason=f"needs vLLM {REFERENCE} (make vllm VLLM={REFERENCE} installs it)",
)


@pytest.mark.soak
@needs_release
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_headlines_name_nineteen_of_twenty_wrong_decisions_in_a_release() -> None:
    from planted_support import held_out_in_vllm, in_vllm

    planted = [*in_vllm.PLANTED, *held_out_in_vllm.PLANTED]
    lines = {entry: in_vllm.make_first_line(entry) for entry in planted}
    lost = {entry.name: line for entry, line in lines.items() if not entry.is_named_by(line)}
    assert len(lost) <= len(planted) // 20, lost


@pytest.mark.soak
@needs_release
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrong_decisions_that_are_not_measured_are_kept_away_from_the_release() -> None:
    from planted_support import held_out_fifth, in_vllm

    for entry in [it for it in held_out_fifth.PLANTED if it.unseen]:
        result = in_vllm.run_check(entry)
        assert result.first is None
        assert result.skipped[entry.unseen] > 0


# Quirks and divergences in the same step.


class Lost(in_spec.Release):
    """A release that forgets aborted requests, with a quirk of its encoder cache."""

    def apply(self, event: v.Event) -> v.Observation:
        before = self.state.finished_req_ids
        answer = super().apply(event)
        if isinstance(event, v.Abort):
            self.state = replace(self.state, finished_req_ids=before)
        return answer


ENCODER_CONFIG = v.Config(
    num_blocks=3,
    block_size=1,
    max_model_len=8,
    enable_prefix_caching=False,
    encoder_compute_budget=1,
    encoder_cache_size=1,
    is_encoder_decoder=True,
    disable_chunked_mm_input=True,
    enable_chunked_prefill=False,
)
ITEM = (v.MultiModalItem("x", 0, 1),)


def play(program: Program, make_engine: EngineFactory, profile: Any = PROFILE) -> list[Finding]:
    """Play a program on an engine under a profile, and return the findings."""
    return run_program(program, make_engine, profile)[1]


def test_a_quirk_that_the_spec_follows_is_no_finding_at_a_divergence() -> None:
    actions = (v.Submit(v.Request("A", (0,), max_tokens=2, items=ITEM)), v.Schedule(), Answer())
    program = Program(ENCODER_CONFIG, (*actions, v.Abort(("A",))))
    assert play(program, in_spec.Release) == []
    assert {it.property_id for it in play(program, in_spec.Release, STRICT)} >= {"P22"}
    found = play(program, Lost)
    assert [it.property_id or it.kind for it in found] == ["P26", FindingKind.DIVERGENCE]
    assert found[1].message.startswith("after abort, finished_req_ids is [], the spec has [A]")


def test_observing_an_answer_in_a_fork_does_not_change_the_worker() -> None:
    config = v.Config(num_blocks=4, block_size=1, max_model_len=8)
    spec = SpecEngine(config)
    worker = Worker(config, lambda _text: 7)
    for event in (v.Submit(v.Request("A", (1, 2), max_tokens=2)), v.Schedule()):
        worker.observe(event, spec.apply(event))
    fork = worker.fork()
    commit = v.Commit(0, worker.answer(0))
    outputs = spec.apply(commit)
    assert fork.observe(commit, outputs) == []
    assert fork.answer(0) != worker.answer(0)
    assert worker.observe(commit, outputs) == []
    assert fork.kv == worker.kv


# Counters that an engine does not have.


class Stubborn(SpecEngine):
    """It admits no request, and has no counters."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Schedule):
            self.state = replace(self.state, pause_state=v.PauseState.PAUSED_NEW)
        answer = super().apply(event)
        self.state = replace(self.state, pause_state=v.PauseState.UNPAUSED)
        return answer

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.STATISTICS, Capability.CACHE_STATISTICS}


def test_missing_counters_are_not_judged() -> None:
    program = Program(
        v.Config(4, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule())
    )
    found = play(program, Stubborn, STRICT)
    assert {it.kind for it in found} == {FindingKind.PROPERTY, FindingKind.DIVERGENCE}
    assert not any("stats" in str(it) for it in found)
    assert "P21" not in {it.property_id for it in found}


# The order of findings, and their words.


def test_a_cause_comes_before_the_order_of_the_free_queue() -> None:
    order = violated("P16", "freed_tail_is_evicted_first", "")
    held = violated("P17", "every_hold_has_an_owner_and_an_end", "")
    budget = violated("P9", "row_stays_within_its_caps", "")
    differs = Finding(FindingKind.DIVERGENCE, "", "engine_equals_spec", "")
    assert put_causes_first([order, held, differs]) == [held, order, differs]
    assert put_causes_first([order, budget]) == [order, budget]
    output = violated("P13", "finish_reason_is_the_one_that_holds", "")
    load = violated("P19", "failed_loads_finish_exactly_their_requests", "")
    assert put_causes_first([output, load, differs]) == [load, output, differs]
    assert put_causes_first([output, budget]) == [output, budget]


def test_a_vague_difference_comes_after_a_specific_one() -> None:
    view = violated("P26", "plans_alone_rebuild_the_request", "")
    other = violated("P18", "event_leaves_other_requests_alone", "")
    sampled = violated("P14", "sampling_leaves_one_token_to_compute", "")
    order = violated("P16", "queues_keep_their_order", "")
    drafts = violated("P24", "attached_drafts_are_the_last_proposed_ones", "")
    assert put_causes_first([view, sampled]) == [sampled, view]
    assert put_causes_first([order, other, drafts]) == [drafts, order, other]
    assert put_causes_first([order, other]) == [order, other]
    early = violated("P16", "admissions_follow_the_policy", f"'A' {MUST_WAIT}")
    assert put_causes_first([sampled, early]) == [early, sampled]


def test_a_divergence_is_named_by_its_first_field() -> None:
    one = Difference("rows A num_scheduled_tokens", "2", "1")
    text = "after schedule, rows A num_scheduled_tokens is 1, the spec has 2"
    assert describe_divergence(v.Schedule(), [one]) == text
    assert describe_divergence(v.Schedule(), [one, one]) == f"{text}, and 1 more field differs"
    assert describe_divergence(v.Schedule(), [one] * 3) == f"{text}, and 2 more fields differ"


class Ahead(SpecEngine):
    """It counts one computed token too many."""

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if isinstance(event, v.Commit):
            requests = self.state.requests
            one = replace(requests["A"], num_computed_tokens=requests["A"].num_known_tokens)
            self.state = replace(self.state, requests=FrozenMap({**requests, "A": one}))
        return answer


class Contradicting(Ahead):
    """It notices that its counters contradict one another when its state is read."""

    def snapshot(self) -> v.Snapshot:
        shown = super().snapshot()
        if any(one.output_token_ids for one in shown.requests):
            fault = EngineFault("3 tokens are counted, 2 are known")
            fault.state = shown
            raise fault
        return shown


def test_a_state_that_contradicts_itself_is_still_judged() -> None:
    program = Program(
        v.Config(8, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule(), Answer())
    )
    first, *others = play(program, Contradicting, STRICT)
    assert first.sentence == "counters_stay_within_what_is_known"
    kinds = [it.kind for it in others if it.kind is not FindingKind.PROPERTY]
    assert kinds == [FindingKind.FAULT, FindingKind.DIVERGENCE]


def test_an_assertion_without_a_text_is_named_by_its_condition() -> None:
    try:
        assert EPISODES < 0
    except AssertionError as error:
        error.args = ()
        finding = fault_of(error)
    assert make_headline(finding) == "the engine raised AssertionError: assert EPISODES < 0"
    assert is_consequence(finding)
    assert not is_consequence(fault_of(ValueError("cannot get 1 free block")))


def test_an_admission_of_an_unready_request_is_in_the_headline() -> None:
    queued = v.Request("A", (0, 0), max_tokens=2, structured_output=True)
    program = Program(v.Config(8, 1), (v.Submit(queued), v.Schedule()))
    found = play(program, Hasty, STRICT)
    order = next(it for it in found if it.sentence == "admissions_follow_the_policy")
    assert make_headline(order) == "ADMISSION: request A is admitted, and must wait"


class Hasty(SpecEngine):
    """It admits requests without waiting for their grammars."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Schedule):
            super().apply(v.GrammarReady("A"))
        return super().apply(event)


def test_a_property_comes_before_a_divergence() -> None:
    program = Program(
        v.Config(8, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule(), Answer())
    )
    differs = next(it for it in play(program, Ahead, STRICT) if not it.property_id)
    assert shrink(program, Ahead, differs).findings[0].kind is FindingKind.PROPERTY


class Zeroes(Ahead):
    """It zeroes a block for no reason, in a pool of one size."""

    def apply(self, event: v.Event) -> v.Observation:
        if self.state.config.num_blocks != 97:
            return super().apply(event)
        answer = SpecEngine.apply(self, event)
        if isinstance(answer, v.Plan):
            return replace(answer, new_block_ids_to_zero=(1,))
        return answer


def test_a_failure_with_a_property_is_preferred_to_a_divergence() -> None:
    actions = (v.Submit(v.Request("A", (0, 0))), v.Schedule())
    program = Program(v.Config(97, 1, max_model_len=64), actions)
    (differs,) = play(program, Zeroes, STRICT)
    assert differs.kind is FindingKind.DIVERGENCE
    result = CheckResult(CheckOptions(), first=differs, failing_program=program, failed_episode=0)
    shrink_first(result, Zeroes, lambda _text: None)
    assert result.first is not None
    assert result.failure is not None
    assert result.options.preset == "tiny"
    assert result.first.property_id == result.failure.findings[0].property_id != ""


def test_a_divergence_of_a_plan_is_named_by_its_first_decision() -> None:
    headlines = {
        Difference("preempted_req_ids", "[B]", "[A]"): "PREEMPTION: the plan preempts [A], the "
        "spec [B]",
        Difference("cached A", "there", "-"): "ORDER: request A gets no token of the plan",
        Difference("cached A num_scheduled_tokens", "2", "1"): "ORDER: request A runs 1 tokens, "
        "the spec 2",
        Difference("new B", "there", "-"): "ADMISSION: request B is not admitted",
        Difference("new B", "-", "there"): "ADMISSION: request B is admitted, and must wait",
        Difference("new C num_computed_tokens", "4", "2"): "HIT: request C begins at 2 computed "
        "tokens, the spec at 4",
        Difference("rows A finish_reason", "None", "length"): "OUTPUT: request A has finish reason "
        "length, the spec has None",
        Difference("rows A", "there", "-"): "OUTPUT: request A gets no output",
        Difference("rows B", "-", "there"): "OUTPUT: request B gets an output too many",
        Difference("rows C new_token_ids", "(1,)", "()"): "OUTPUT: request C gets tokens (), the "
        "spec delivers (1,)",
        Difference("success", "False", "True"): "RESET: the reset returns True, the spec False",
        Difference("free_queue", "[1]", "[]"): "ORDER: as it is",
    }
    differences = tuple(headlines)
    for difference, headline in headlines.items():
        seen = Finding(FindingKind.DIVERGENCE, "", "engine_equals_spec", "as it is", differences)
        assert make_headline(seen) == headline
        differences = tuple(it for it in differences if it != difference)


def test_a_field_that_differs_from_the_plans_is_in_the_headline() -> None:
    field = Difference("num_computed_tokens", "3", "2", "state; worker")
    found = violated("P26", "plans_alone_rebuild_the_request", "", field, subjects=Subjects(("A",)))
    assert make_headline(found).endswith("num_computed_tokens is 3 in the state, 2 in the plans")


def test_impossible_counters_are_named_by_field() -> None:
    program = Program(
        v.Config(8, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule(), Answer())
    )
    found = play(program, Ahead, STRICT)
    counters = next(it for it in found if it.sentence == "counters_stay_within_what_is_known")
    assert Difference("num_computed_tokens", "0 to 2", "3") in counters.differences
    assert not any("Snapshot(" in it.expected + it.seen for one in found for it in one.differences)


# An engine that cannot be built, and a specification that fails.


class Unbuildable(SpecEngine):
    """An engine whose constructor raises for some configs."""

    traits = EngineTraits()

    def __init__(self, config: v.Config, *_: Any) -> None:
        if config.max_num_seqs == 1:
            raise IndexError("no room for one")
        super().__init__(config)


def test_a_constructor_that_raises_is_a_fault_with_a_shrunk_config() -> None:
    options = CheckOptions(engine=f"{__name__}:Unbuildable", preset="tiny", max_events=20_000)
    result = check(options, shrinks=False)
    assert result.exit_code is ExitCode.FAILED
    assert result.first is not None
    assert result.failing_program is not None
    result.failure = shrink(result.failing_program, Unbuildable, result.first)
    assert result.failure.program.actions == ()
    assert result.failure.program.config.max_num_seqs == 1
    (fault,) = result.failure.findings
    assert fault.message == "the engine raised IndexError: no room for one while being built"
    assert fault.frames[-1].startswith("__init__ (test_headlines.py:")
    assert "FAULT at event 0: the engine raised IndexError" in render_first_failure(result)


def test_a_program_with_a_config_that_raises_is_a_fault() -> None:
    program = Program(v.Config(4, 1, max_num_seqs=1), (v.Schedule(),))
    result = play_program(CheckOptions(), program, Unbuildable)
    assert result.exit_code is ExitCode.FAILED


def test_both_answers_are_shown_if_the_specification_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Program(
        v.Config(4, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule())
    )

    class Fine(SpecEngine):
        """A copy of the specification, which does not fail."""

    right = SpecEngine.apply

    def fail(self: SpecEngine, event: v.Event) -> v.Observation:
        if isinstance(event, v.Schedule) and type(self) is SpecEngine:
            raise AssertionError("an amount is negative")
        return right(self, event)

    monkeypatch.setattr(SpecEngine, "apply", fail, raising=False)
    result = play_program(CheckOptions(), program, Fine)
    assert result.exit_code is ExitCode.SPEC
    text = render_first_failure(result)
    assert "the spec is wrong: an amount is negative" in text
    assert "spec's answer to schedule: it failed an assertion" in text
    assert "engine's answer: plan 0: A new" in text


def test_findings_of_the_engine_follow_a_failure_of_the_specification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Program(
        v.Config(8, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule(), Answer())
    )
    right = SpecEngine.apply

    def fail(self: SpecEngine, event: v.Event) -> v.Observation:
        if isinstance(event, v.Commit) and type(self) is SpecEngine:
            raise AssertionError("an amount is negative")
        return right(self, event)

    monkeypatch.setattr(SpecEngine, "apply", fail, raising=False)
    first, *others = play(program, Ahead, STRICT)
    assert first.kind is FindingKind.SPEC
    assert "counters_stay_within_what_is_known" in {it.sentence for it in others}


# Headlines, with the requests and blocks that they are about.


def list_checks() -> dict[str, str]:
    """The property of each check, by the check's name."""
    checks = {check.sentence: entry.id for entry in PROPERTIES for check in entry.checks}
    return checks | {name: number for name, (number, _) in SENTENCES.items() if number}


def test_each_check_of_a_property_has_a_headline() -> None:
    assert list_checks().keys() == CHECK_HEADLINES.keys()


def test_headlines_have_a_class_and_are_short() -> None:
    for text in CHECK_HEADLINES.values():
        assert re.match(r"[A-Z]+: [a-z{]", text), text
        assert len(text) <= CHARS_MAX - 30, text


def test_every_headline_is_as_in_the_snapshot(snapshot: SnapshotAssertion) -> None:
    """The snapshot has each headline with a request and a block, and without."""
    lines = []
    for name, number in sorted(list_checks().items(), key=lambda it: (int(it[1][1:]), it[0])):
        finding = violated(number, name, "", subjects=Subjects(("A",), (3,)))
        lines.append(f"{number} {name}: {make_headline(finding)}")
        lines.append(f"  {make_headline(violated(number, name, ''))}")
    assert "\n".join(lines) == snapshot


def test_subjects_that_the_headline_does_not_name_follow() -> None:
    kept = Subjects(("A", "B"), (1, 2))
    order = violated("P16", "freed_tail_is_evicted_first", "", subjects=Subjects((), (2, 1)))
    assert make_headline(order).endswith("in the free queue (blocks 2, 1)")
    shared = violated("P2", "written_block_is_in_one_place", "", subjects=kept)
    headline = (
        "CORRUPTION: block 1 is written at two places in one step (requests A, B; and block 2)"
    )
    assert make_headline(shared) == headline


def test_the_message_is_the_headline_of_a_fault() -> None:
    seen = Finding(FindingKind.FAULT, "", "engine_raises_nothing", "the engine raised\nKeyError: 1")
    assert make_headline(seen) == "the engine raised KeyError: 1"


class Idle(SpecEngine):
    """It plans nothing once a request has an output."""

    traits = EngineTraits(equivalence=Safety())

    def apply(self, event: v.Event) -> v.Observation:
        is_idle = any(one.output_token_ids for one in self.state.requests.values())
        if isinstance(event, v.Schedule) and is_idle:
            return v.Plan(frame_id=self.state.next_frame_id)
        return super().apply(event)

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.SNAPSHOT}

    def snapshot(self) -> None:  # type: ignore[override]
        return None


def test_liveness_names_the_requests_that_never_finish() -> None:
    submits = [v.Submit(v.Request(name, (0, 0), max_tokens=2)) for name in "AB"]
    found = play(Program(v.Config(8, 1), (*submits, Drain())), Idle, STRICT)
    liveness = next(it for it in found if it.kind is FindingKind.LIVENESS)
    assert liveness.subjects == Subjects(("A", "B"))
    headline = make_headline(liveness)
    assert headline.startswith(
        "LIVENESS: request A never finishes (and request B): a plan is empty"
    )


def test_a_divergence_names_the_request_or_block_of_its_first_field() -> None:
    field = Difference("rows A num_scheduled_tokens", "2", "1")
    assert find_subjects(field, ["A", "B"]) == Subjects(("A",))
    assert find_subjects(Difference("block 3", "free", "held by 1"), ["A"]) == Subjects((), (3,))
    assert find_subjects(Difference("running", "[A]", "[]"), ["A"]) == Subjects()


def test_subjects_of_lists_are_their_differing_entries() -> None:
    assert requests_apart(("A", "B"), ("B", "C")) == Subjects(("A", "C"))
    assert requests_apart(("A", "B"), ("B", "A")) == Subjects(("A", "B"))
    assert blocks_apart((1, 2, 3), (1, 3, 2)) == Subjects((), (2, 3))
    rows = v.OutputRow("A", (1,)), v.OutputRow("A", (2,))
    assert requests_apart(rows[:1], rows[1:]) == Subjects(("A",))


def test_subjects_are_in_json_and_in_explain() -> None:
    finding = violated("P1", "every_block_is_free_or_held", "", subjects=Subjects(("A",), (3,)))
    record = finding_to_json(finding)
    assert record["subjects"] == {"requests": ["A"], "blocks": [3]}
    assert record["headline"] == make_headline(finding)
    shown = explain_name("written_block_is_in_one_place")
    assert "headline: CORRUPTION: block BLOCK is written at two places in one step" in shown


def test_the_cause_comes_first_after_shrinking() -> None:
    program = Program(
        v.Config(8, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule(), Answer())
    )
    view = next(it for it in play(program, Ahead, STRICT) if it.property_id == "P26")
    assert shrink(program, Ahead, view).findings[0].property_id == "P12"
