"""Headlines of wrong decisions by kind: the first line names the cause, not a consequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.lockstep.driver import LockStep, put_causes_first
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.compare import observation_differences
from blockstep.conformance.protocol.findings import (
    MUST_WAIT,
    Difference,
    Finding,
    FindingKind,
    Subjects,
    of_request,
    violated,
)
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.report.headlines import CHARS_MAX, make_headline
from blockstep.conformance.search.check import CheckResult, is_exception, shrink_first
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v
from blockstep.spec.core.prefix_cache import find_hit
from blockstep.spec.core.requests import NO_HIT
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.profiles import STRICT, get_profile

SUBMIT = v.Submit(v.Request("A", (0, 0), max_tokens=2))
ROOMY = v.Config(8, 1)


def play(program: Program, make_engine: Any) -> list[Finding]:
    """Play a program on an engine, and return the findings."""
    return run_program(program, make_engine, STRICT)[1]


def test_the_first_wrong_value_is_in_the_headline() -> None:
    about = of_request("A")
    reason = Difference("finish_reason", "length", "None")
    found = violated("P13", "finish_reason_is_the_one_that_holds", "", reason, subjects=about)
    headline = "OUTPUT: request A has a wrong finish reason, or none: finish_reason None, expected"
    assert make_headline(found) == f"{headline} length"
    long = replace(found, differences=(replace(reason, seen="x" * CHARS_MAX),))
    assert make_headline(long) == "OUTPUT: request A has a wrong finish reason, or none"


def test_an_empty_plan_that_reverses_a_queue_is_named_by_the_queue() -> None:
    changed = violated("P7", "empty_plan_changes_nothing", "")
    order = violated("P16", "queues_keep_their_order", "")
    assert put_causes_first([changed, order]) == [order, changed]


def test_blocks_of_a_preempted_request_are_named_by_its_status() -> None:
    written = violated("P4", "block_still_to_be_written_is_not_published", "")
    held = violated("P12", "only_running_requests_hold_anything", "")
    assert put_causes_first([written, held]) == [held, written]


def test_a_block_that_is_published_too_early_is_named_so() -> None:
    slot = violated("P4", "published_block_was_written", "")
    early = violated("P4", "only_computed_blocks_are_published", "")
    assert put_causes_first([slot, early]) == [early, slot]


def test_a_load_after_a_wrong_hit_is_named_by_the_hit() -> None:
    load = violated("P19", "load_is_what_the_store_offers", "")
    hit = violated("P5", "hit_is_the_longest_possible", "")
    assert put_causes_first([load, hit]) == [hit, load]


def test_a_request_that_runs_before_its_load_is_named_by_its_status() -> None:
    written = violated("P17", "block_in_transfer_is_not_written", "")
    room = violated("P8", "admission_leaves_room_for_the_whole_prompt", "")
    parked = violated("P19", "loading_request_matches_its_load", "")
    assert put_causes_first([written, room, parked]) == [parked, written, room]


class Short(SpecEngine):
    """It cuts prompts to one token."""

    def __init__(self, config: v.Config) -> None:
        super().__init__(replace(config, long_prefill_token_threshold=1))


def test_a_headline_has_the_wrong_decision_and_then_the_property() -> None:
    whole = replace(ROOMY, max_model_len=16, enable_chunked_prefill=False)
    first = play(Program(whole, (SUBMIT, v.Schedule())), Short)[0]
    assert first.sentence == "prompt_is_not_cut_without_chunking"
    assert make_headline(first) == (
        "ADMISSION: request A runs 1 tokens, the spec 2: the prompt of request A is cut although "
        "chunked prefill is off"
    )
    assert first == replace(first, diverged=())


def test_a_headline_names_a_decision_once() -> None:
    row = Difference("new A", "-", "there")
    early = violated("P16", "admissions_follow_the_policy", f"'A' {MUST_WAIT}", subjects="A")
    headline = "ADMISSION: request A is admitted, and must wait"
    assert make_headline(replace(early, diverged=(row,))) == headline


def test_the_first_wrong_row_of_a_plan_is_in_the_headline() -> None:
    hit = Difference("new A num_computed_tokens", "1", "2")
    behind = Difference("new B", "there", "-")
    diverged = replace(violated("P5", "hit_is_the_longest_possible", ""), diverged=(hit, behind))
    headline = "HIT: request A begins at 2 computed tokens, the spec at 1: "
    assert make_headline(diverged).startswith(headline)


def test_plans_with_rows_of_different_requests_differ_in_rows() -> None:
    one, other = (v.Plan(0, new=(v.NewRow(v.Request(name, (0,)), ((1,),), 0, 1),)) for name in "AB")
    expected = (Difference("new A", "there", "-"), Difference("new B", "-", "there"))
    assert observation_differences(one, other) == expected


class Inserting(SpecEngine):
    """It puts admitted requests at the head of the running list."""

    def snapshot(self) -> v.Snapshot:
        shown = super().snapshot()
        return replace(shown, running=shown.running[::-1])


def test_a_wrong_order_of_the_running_list_is_no_wrong_admission() -> None:
    submits = [v.Submit(v.Request(name, (0,), max_tokens=3)) for name in "AB"]
    found = play(Program(ROOMY, (*submits, v.Schedule())), Inserting)
    assert found[0].sentence == "running_list_keeps_its_order"
    assert found[0].subjects == Subjects(("A", "B"))
    assert "admissions_follow_the_policy" not in {it.sentence for it in found}


class Ill(SpecEngine):
    """It ends a request without a reason, and notices that its answer contradicts itself."""

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if isinstance(answer, v.Outputs):
            fault = EngineFault("the counters of this answer are of no row")
            fault.answer = v.Outputs()
            raise fault
        return answer


def test_an_answer_that_contradicts_itself_is_still_judged() -> None:
    first, *others = play(Program(ROOMY, (SUBMIT, v.Schedule(), Answer())), Ill)
    assert first.sentence == "delivered_rows_are_those_that_sampled"
    kinds = [it.kind for it in others if it.kind is not FindingKind.PROPERTY]
    assert kinds == [FindingKind.FAULT, FindingKind.DIVERGENCE]


class Ending(SpecEngine):
    """It ends a session whose next input waits."""

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if isinstance(event, v.Commit):
            super().apply(v.Abort(("A",)))
        return answer


def test_a_session_that_ends_before_its_input_is_named_as_a_session() -> None:
    actions = (
        v.Submit(v.Request("A", (0,), max_tokens=1, resumable=True)),
        v.StreamingUpdate(v.Request("A", (1,), max_tokens=1, resumable=True)),
        v.Schedule(),
        Answer(),
    )
    first, *others = play(Program(ROOMY, actions), Ending)
    assert first.sentence == "session_keeps_all_but_its_last_token"
    assert first.subjects == Subjects(("A",))
    assert "finished_requests_leave_the_state" in {it.sentence for it in others}


class Endless(SpecEngine):
    """It ignores the end of the input of a session that is idle."""

    def apply(self, event: v.Event) -> v.Observation:
        is_end = isinstance(event, v.StreamingUpdate) and not event.request.resumable
        return v.Ack() if is_end else super().apply(event)


def test_a_session_that_does_not_end_with_its_input_is_named_so() -> None:
    actions = (
        v.Submit(v.Request("A", (0,), max_tokens=1, resumable=True)),
        v.Schedule(),
        Answer(),
        v.StreamingUpdate(v.Request("A", (0,), max_tokens=1)),
    )
    found = [it.sentence for it in play(Program(ROOMY, actions), Endless) if it.property_id]
    assert set(found) == {"end_of_input_finishes_an_idle_session"}


class Unmarked(SpecEngine):
    """A preempted request has the status of a new one."""

    def snapshot(self) -> v.Snapshot:
        shown = super().snapshot()
        requests = tuple(
            replace(it, status=v.Status.WAITING) if it.status is v.Status.PREEMPTED else it
            for it in shown.requests
        )
        return replace(shown, requests=requests)


def test_a_request_that_left_the_running_list_counts_as_preempted() -> None:
    submits = [v.Submit(v.Request(name, (0,), max_tokens=3)) for name in "AB"]
    config = v.Config(4, 1, enable_prefix_caching=False)
    program = Program(config, (*submits, v.Schedule(), Answer(), v.Schedule()))
    first, *others = play(program, Unmarked)
    assert first.sentence == "preempted_request_starts_again"
    assert first.differences[0] == Difference("request B status", "preempted", "waiting")
    assert [it.kind for it in others if it.property_id == ""] == [FindingKind.DIVERGENCE]


def test_values_that_only_a_quirk_makes_wrong_are_not_the_cause() -> None:
    profile = get_profile("vllm-0.19.1")
    assert profile is not None
    run = LockStep.start(ROOMY, SpecEngine, profile=profile)
    about, other = of_request("A"), of_request("B")
    differs = Finding(FindingKind.DIVERGENCE, "", "engine_equals_spec", "")

    def cached(seen: str, subjects: Subjects) -> Finding:
        difference = Difference("num_cached_blocks", "(0,)", seen)
        return violated(
            "P3", "computed_full_blocks_are_published", "", difference, subjects=subjects
        )

    found = [cached("(2,)", about), cached("(2,)", other), differs]
    assert run._unexplained(found, [cached("(3,)", about)]) == [differs, cached("(2,)", other)]


class Raising(SpecEngine):
    """It publishes nothing, and raises if a cache is reset."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Reset):
            raise RuntimeError("the cache cannot be reset")
        return super().apply(event)

    def snapshot(self) -> v.Snapshot:
        shown = super().snapshot()
        keys = (None,) * len(shown.block_keys)
        return replace(shown, cached=FrozenMap({}), block_keys=keys)


def test_an_exception_is_named_by_the_property_that_fails_more_often() -> None:
    program = Program(ROOMY, (SUBMIT, v.Reset()))
    (fault,) = play(program, Raising)
    assert is_exception(fault)
    result = CheckResult(CheckOptions(), first=fault, failing_program=program, failed_episode=0)
    shrink_first(result, Raising, lambda _text: None)
    assert result.first is not None
    assert result.first.property_id == "P3"


class Forgetting(SpecEngine):
    """It finds no prefix hits; if the pool has 97 blocks, it finds them and counts none."""

    def __init__(self, config: v.Config) -> None:
        self.counts_only = config.num_blocks == 97
        super().__init__(config)
        if not self.counts_only:
            none = self.state.rules.replacing(find_hit, lambda *_: NO_HIT)
            self.state = replace(self.state, rules=none)

    def snapshot(self) -> v.Snapshot:
        shown = super().snapshot()
        return replace(shown, stats=v.Stats()) if self.counts_only else shown


def test_a_wrong_counter_is_named_by_the_decision_it_counts() -> None:
    program = Program(replace(ROOMY, num_blocks=97), (SUBMIT, v.Schedule()))
    found = play(program, Forgetting)
    assert found[0].sentence == "counters_grow_by_what_happened"
    result = CheckResult(CheckOptions(), first=found[0], failing_program=program, failed_episode=0)
    shrink_first(result, Forgetting, lambda _text: None)
    assert result.first is not None
    assert result.first.property_id not in ("", "P21")


class Early(SpecEngine):
    """It counts a cached block too many for running requests."""

    def snapshot(self) -> v.Snapshot:
        shown = super().snapshot()
        counts = (
            replace(it, num_cached_blocks=(2,)) if it.num_computed_tokens else it
            for it in shown.requests
        )
        return replace(shown, requests=tuple(counts))


def test_blocks_that_are_cached_too_early_are_not_named_as_uncached() -> None:
    program = Program(replace(ROOMY, max_num_batched_tokens=1), (SUBMIT, v.Schedule()))
    found = play(program, Early)
    count = next(it for it in found if it.sentence == "computed_full_blocks_are_published")
    assert make_headline(count) == (
        "CACHE: request A counts more cached blocks than it has filled: num_cached_blocks (2,), "
        "expected (1,)"
    )


class Closed(SpecEngine):
    """It raises at every submit."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Submit):
            raise RuntimeError("closed")
        return super().apply(event)


def test_an_exception_that_most_programs_raise_stays_the_finding() -> None:
    program = Program(ROOMY, (SUBMIT,))
    (fault,) = play(program, Closed)
    result = CheckResult(CheckOptions(), first=fault, failing_program=program, failed_episode=0)
    shrink_first(result, Closed, lambda _text: None)
    assert result.first == fault
