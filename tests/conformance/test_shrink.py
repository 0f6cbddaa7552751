"""What a program is shrunk to fails for the same reason, and asks for nothing the engine lacks."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.engine import Capability, EngineTraits, Safety
from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.features import PIPELINE
from blockstep.conformance.protocol.program import Action, Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search.shrink import shrink
from blockstep.spec.vocabulary import (
    Config,
    Event,
    Observation,
    OutputRow,
    Outputs,
    Plan,
    Request,
    Schedule,
    Submit,
)

CONFIG = Config(num_blocks=17, block_size=2, max_model_len=16, max_num_batched_tokens=16)
ASYNC = replace(CONFIG, max_frames_in_flight=2, async_scheduling=True)


def submits(count: int) -> tuple[Action, ...]:
    return tuple(Submit(Request("ABC"[index], (1, 2), 4)) for index in range(count))


class TwoSymptoms(SpecEngine):
    """Of one property: alone, a request is not the one submitted; of two, the first runs twice."""

    traits = EngineTraits(equivalence=Safety())

    def apply(self, event: Event) -> Observation:
        answer = super().apply(event)
        if not isinstance(answer, Plan) or not answer.new:
            return answer
        first = answer.new[0]
        if len(answer.new) > 1:
            return replace(answer, new=(*answer.new, first))
        return replace(answer, new=(replace(first, request=replace(first.request, max_tokens=3)),))

    def snapshot(self) -> None:  # type: ignore[override]
        return


def test_the_sentence_that_failed_is_kept() -> None:
    program = Program(CONFIG, (*submits(3), Schedule()))
    _, findings = run_program(program, TwoSymptoms)
    (first,) = [found for found in findings if found.sentence == "request_has_one_row"]
    shrunk = shrink(program, TwoSymptoms, first)
    assert first.sentence in {found.sentence for found in shrunk.findings}
    assert len(shrunk.program.actions) == 3, "two requests and a plan"


class WrongDeeper(SpecEngine):
    """Wrong, and likewise wherever it has several frames in flight as it says that it cannot."""

    def apply(self, event: Event) -> Observation:
        answer = super().apply(event)
        if isinstance(answer, Outputs):
            rows = tuple(OutputRow(row.request_id, (), None) for row in answer.rows)
            return Outputs(rows)
        if isinstance(answer, Plan) and PIPELINE.is_asked_by(self.state.config):
            return replace(answer, preempted_req_ids=("Z",))
        return answer

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.PIPELINE}


def test_no_program_is_tried_that_asks_for_what_the_engine_lacks() -> None:
    program = Program(ASYNC, (*submits(2), Schedule(), Schedule(), Answer(), Answer()))
    tried: list[Config] = []

    class Watched(WrongDeeper):
        def __init__(self, config: Config) -> None:
            tried.append(config)
            super().__init__(config)

    _, findings = run_program(program, Watched)
    shrunk = shrink(program, Watched, findings[0])
    assert len(tried) > 5
    assert not any(map(PIPELINE.is_asked_by, tried))
    assert [type(action).__name__ for action in shrunk.program.actions] == [
        *("Submit", "Schedule", "Answer"),
    ]


def test_nor_are_more_frames_in_flight_than_it_can_have() -> None:
    class Shallow(WrongDeeper):
        traits = EngineTraits(max_depth=2)
        depths: list[int] = []  # noqa: RUF012

        def __init__(self, config: Config) -> None:
            self.depths.append(config.max_frames_in_flight)
            super().__init__(config)

    steps = (Schedule(), Answer()) * 3
    program = Program(CONFIG, (*submits(1), *steps))
    _, findings = run_program(program, Shallow)
    shrink(program, Shallow, findings[0])
    assert max(Shallow.depths) <= 2
