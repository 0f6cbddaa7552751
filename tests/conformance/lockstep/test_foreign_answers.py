"""Answers of foreign engines: remapped block tables, and aborts that take effect later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from episodes_support import play_episodes

from blockstep.conformance.engine import EngineTraits, Safety
from blockstep.conformance.judge.answers import judge_answer
from blockstep.conformance.judge.properties.observed_step import PlannedRow, RowKind, Step
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Answer, Drain, Program, describe_observation
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.recorded.replay import replay
from blockstep.conformance.recorded.traces import read_trace, write_trace
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.metamorphic import compare_pair
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

CONFIG = v.Config(num_blocks=9, block_size=2, max_model_len=16, max_num_batched_tokens=16)
PROMPT = (1, 2, 3, 4)


# A block table that is remapped.


def serve_equal_prompts() -> Worker:
    """Return a worker of two equal prompts in different blocks: A in 1 and 2, B in 3 and 4."""
    worker = Worker(CONFIG, len)
    new = tuple(
        v.NewRow(v.Request(name, PROMPT), (blocks,), 0, 4)
        for name, blocks in (("A", (1, 2)), ("B", (3, 4)))
    )
    plan = v.Plan(0, new=new)
    assert worker.execute(plan) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    return worker


def decode(name: v.RequestId, *blocks: int) -> v.CachedRow:
    return v.CachedRow(name, False, (blocks,), None, 4, 1, 1)


def find_failed_checks(worker: Worker, plan: v.Plan) -> set[str]:
    return {found.sentence for found in worker.execute(plan)}


def test_a_remapped_table_replaces_the_old_one() -> None:
    worker = serve_equal_prompts()
    plan = v.Plan(1, cached=(decode("A", 5), decode("B", 1, 2, 6)), remapped_req_ids=("B",))
    assert worker.execute(plan) == []
    assert worker.views["B"].table == [1, 2, 6]
    assert describe_observation(plan).endswith("; remapped B")


def test_without_remapping_new_blocks_are_appended_to_a_table() -> None:
    plan = v.Plan(1, cached=(decode("A", 5), decode("B", 1, 2, 6)))
    worker = serve_equal_prompts()
    worker.execute(plan)
    assert worker.views["B"].table == [3, 4, 1, 2, 6]


def test_a_remapped_table_must_hold_the_same_prefix() -> None:
    plan = v.Plan(1, cached=(decode("A", 5), decode("B", 2, 1, 6)), remapped_req_ids=("B",))
    assert find_failed_checks(serve_equal_prompts(), plan) == {
        "attended_slot_holds_the_right_prefix"
    }


def test_a_request_is_remapped_only_with_a_row_that_has_the_table() -> None:
    plan = v.Plan(1, cached=(decode("A", 5),), remapped_req_ids=("B",))
    assert find_failed_checks(serve_equal_prompts(), plan) == {"remapped_request_has_a_row"}


def test_a_table_may_be_remapped_before_it_is_in_a_plan() -> None:
    """A state between two plans may show other blocks in a table, but not more or fewer."""
    program = Program(CONFIG, (v.Submit(v.Request("A", PROMPT, 4)), v.Schedule(), Answer()))
    run, _ = run_program(program, SpecEngine)
    state = run.spec.snapshot()
    assert run.worker.check_view(state) == []
    run.worker.views["A"].tables = [[5, 6]]
    assert run.worker.check_view(state)
    assert run.worker.check_view(state, ("A",))
    assert run.worker.check_view(state, ()) == []
    run.worker.views["A"].tables = [[5, 6, 7]]
    assert run.worker.check_view(state, ())


def test_a_remapped_row_is_read_with_its_whole_table() -> None:
    program = Program(CONFIG, (v.Submit(v.Request("A", PROMPT, 4)), v.Schedule(), Answer()))
    run, _ = run_program(program, SpecEngine)
    before = run.spec.snapshot()
    plan = v.Plan(1, cached=(decode("A", 3, 4, 5),), remapped_req_ids=("A",))
    step = Step(CONFIG, 4, v.Schedule(), plan, before, before)
    (row,) = step.rows
    assert row == PlannedRow("A", RowKind.RUNNING, 4, 1, ((5,),), ((3, 4),), is_remapped=True)
    assert step.tables_of(row) == ((3, 4, 5),)
    assert step.all_gained == {5}


# An abort that takes effect with the next plan.


class Later(SpecEngine):
    """An engine whose aborts take effect with its next plan."""

    traits = EngineTraits(equivalence=Safety())

    def __init__(self, config: v.Config) -> None:
        super().__init__(config)
        self.aborts: tuple[v.RequestId, ...] = ()

    def apply(self, event: v.Event) -> v.Observation:
        match event:
            case v.Abort(request_ids=names):
                known = tuple(name for name in dict.fromkeys(names) if name in self.state.requests)
                self.aborts += known
                return v.Aborted(ending_req_ids=known)
            case v.Schedule():
                self.end()
        return super().apply(event)

    def end(self) -> None:
        names, self.aborts = self.aborts, ()
        super().apply(v.Abort(names))

    def snapshot(self) -> Any:
        return None

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {"snapshot"}


class Shown(Later):
    """`Later` with a visible state."""

    def snapshot(self) -> Any:
        return self.oracle_state()

    def oracle_state(self) -> Any:
        return SpecEngine.snapshot(self)

    def capabilities(self) -> frozenset[str]:
        return SpecEngine.capabilities(self)


class Never(Later):
    """An engine that accepts an abort and never ends the request."""

    def end(self) -> None:
        return


@pytest.mark.parametrize("make_engine", [Later, Shown])
def test_an_abort_may_take_effect_with_the_next_plan(make_engine: type[Later]) -> None:
    ended = 0
    for index in range(12):
        run, program, findings = play_episode(
            CheckOptions(preset="tiny", seed=1), index, make_engine
        )
        assert findings == [], (index, findings)
        assert run.live == {}
        ended += sum(isinstance(action, v.Abort) for action in program.actions)
    assert ended > 5


def test_a_commit_before_a_late_abort_delivers_a_token() -> None:
    actions = (v.Submit(v.Request("A", PROMPT, 4)), v.Schedule(), v.Abort(("A",)), Answer())
    run, findings = run_program(Program(CONFIG, actions), Shown)
    assert findings == []
    assert (list(run.live), len(run.delivered["A"])) == (["A"], 1)
    assert run.perform(v.Schedule()) == []
    assert run.live == {}
    assert run.perform(Drain()) == []


class EndsOnlyTheAborted(Shown):
    """An engine that ends the aborted request, and not a later one with its id."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Submit):
            self.aborts = tuple(name for name in self.aborts if name != event.request.request_id)
        return super().apply(event)


def test_an_id_may_be_reused_if_its_request_finished_before_a_late_abort() -> None:
    first = (v.Submit(v.Request("A", PROMPT, 1)), v.Schedule(), v.Abort(("A",)), Answer())
    run, findings = run_program(Program(CONFIG, first), EndsOnlyTheAborted)
    assert (findings, run.live) == ([], {})
    assert run.perform(v.Submit(v.Request("A", PROMPT, 2))) == []
    assert run.perform(Drain()) == []
    assert run.ended == ["A", "A"]
    assert len(run.texts[-1]) == len(PROMPT) + 2


def test_an_aborted_request_that_keeps_running_is_found() -> None:
    actions = (
        v.Submit(v.Request("A", PROMPT, 4)),
        v.Schedule(),
        Answer(),
        v.Abort(("A",)),
        v.Schedule(),
    )
    _, findings = run_program(Program(CONFIG, actions), Never)
    names = [found.sentence for found in findings]
    assert names == ["row_is_of_an_unfinished_request", "plan_names_the_finished"]


@pytest.mark.parametrize(
    ("now", "later", "is_right"),
    [
        (("A", "B"), (), True),
        (("A",), ("B",), True),
        ((), ("B", "A"), True),
        (("A",), (), False),
        (("A", "B"), ("B",), False),
        (("A", "B"), ("C",), False),
    ],
)
def test_each_request_that_an_abort_names_ends_once(
    now: tuple[str, ...], later: tuple[str, ...], is_right: bool
) -> None:
    live = {name: v.Request(name, PROMPT) for name in "ABC"}
    found = judge_answer(CONFIG, live, {}, v.Abort(("B", "A", "nobody")), v.Aborted(now, later))
    assert [one.sentence for one in found] == (
        [] if is_right else ["abort_finishes_exactly_the_named_requests"]
    )


@pytest.mark.parametrize(
    ("now", "later", "ending", "message"),
    [
        (("B",), (), (), "'A' is unfinished and was named, and the answer does not end it"),
        (("B",), (), ("A",), "'A' is left out: its abort is pending, so name it in ending_req_ids"),
        (("A", "B"), ("C",), (), "'C' is ended by the answer, and is finished or was not named"),
        (("A", "B"), ("A",), (), "'A' is both in request_ids and in ending_req_ids"),
    ],
)
def test_each_wrong_answer_to_an_abort_has_its_own_message(
    now: tuple[str, ...], later: tuple[str, ...], ending: tuple[str, ...], message: str
) -> None:
    live = {name: v.Request(name, PROMPT) for name in "ABC"}
    answer = v.Aborted(now, later)
    (found,) = judge_answer(CONFIG, live, {}, v.Abort(("B", "A")), answer, ending=ending)
    assert message in found.message


# Traces and descriptions.


def test_traces_have_both_fields_and_leave_them_out_where_they_are_empty(tmp_path: Path) -> None:
    steps: list[tuple[v.Event, v.Observation]] = [
        (v.Schedule(), v.Plan(0)),
        (v.Schedule(), v.Plan(1, remapped_req_ids=("A",))),
        (v.Abort(("A", "B")), v.Aborted(("A",))),
        (v.Abort(("A", "B")), v.Aborted(("A",), ("B",))),
    ]
    path = tmp_path / "run.jsonl"
    write_trace(path, CONFIG, steps)
    assert [tuple(step) for step in read_trace(path).steps] == steps
    has = ['"remapped' in line or '"ending' in line for line in path.read_text().splitlines()]
    assert has == [False, False, True, False, True, False]


def test_the_answer_to_an_abort_is_described_with_requests_that_end_later() -> None:
    assert describe_observation(v.Aborted(("A",))) == "Aborted(request_ids=('A',))"
    later = describe_observation(v.Aborted(("A",), ("B",)))
    assert later == "Aborted(request_ids=('A',)), with the next plan B"


# A request that is not for an engine.


class Choosy(SpecEngine):
    """An engine that accepts short prompts only, and raises at others."""

    traits = EngineTraits(
        equivalence=Safety(
            fit_request=lambda request, _config: (
                request if len(request.prompt_token_ids) < 4 else None
            )
        )
    )

    def apply(self, event: v.Event) -> v.Observation:
        assert not isinstance(event, v.Submit) or len(event.request.prompt_token_ids) < 4
        return super().apply(event)


def test_a_request_that_is_not_for_an_engine_is_counted_and_not_submitted() -> None:
    played = play_episodes(Choosy, 500)
    assert played.first is None
    assert played.skipped["requests that are not for this engine"] > 5
    assert played.witnesses["admitted"] > 0
    assert compare_pair(CheckOptions("mine"), Choosy, 4).contrast is None


def test_a_replay_counts_a_request_that_is_not_for_an_engine() -> None:
    requests = [v.Request("A", (1, 2), 2), v.Request("B", PROMPT, 2), v.Request("C", (3,), 2)]
    report = replay(requests, CONFIG, Choosy, with_spec=True)
    assert report.finding is None
    assert report.requests_refused == {"bad_request": 1}
    assert report.requests_finished == 2
