"""Shrinking: the shrunk program fails the same check, and asks for nothing the engine lacks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from blockstep.conformance.engine import Capability, EngineTraits, Safety
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.features import PIPELINE
from blockstep.conformance.protocol.program import Action, Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search.shrink import shrink
from blockstep.conformance.search.shrink_candidates import get_request, simpler_contents
from blockstep.spec import vocabulary as v

CONFIG = v.Config(num_blocks=17, block_size=2, max_model_len=16, max_num_batched_tokens=16)
ASYNC = replace(CONFIG, max_frames_in_flight=2, async_scheduling=True)


def submits(count: int) -> tuple[Action, ...]:
    return tuple(v.Submit(v.Request("ABC"[index], (1, 2), 4)) for index in range(count))


class TwoSymptoms(SpecEngine):
    """Two checks of one property fail: a changed request if one is new, a second row if two are."""

    traits = EngineTraits(equivalence=Safety())

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if not isinstance(answer, v.Plan) or not answer.new:
            return answer
        first = answer.new[0]
        if len(answer.new) > 1:
            return replace(answer, new=(*answer.new, first))
        return replace(answer, new=(replace(first, request=replace(first.request, max_tokens=3)),))

    def snapshot(self) -> None:  # type: ignore[override]
        return


def test_the_check_that_failed_is_kept() -> None:
    program = Program(CONFIG, (*submits(3), v.Schedule()))
    _, findings = run_program(program, TwoSymptoms)
    (first,) = [found for found in findings if found.sentence == "request_has_one_row"]
    shrunk = shrink(program, TwoSymptoms, first)
    assert first.sentence in {found.sentence for found in shrunk.findings}
    assert len(shrunk.program.actions) == 3, "two requests and a plan"


class WrongDeeper(SpecEngine):
    """Delivers nothing, and has a second defect with several frames in flight, which it lacks."""

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if isinstance(answer, v.Outputs):
            rows = tuple(v.OutputRow(row.request_id, (), None) for row in answer.rows)
            return v.Outputs(rows)
        if isinstance(answer, v.Plan) and PIPELINE.is_asked_by(self.state.config):
            return replace(answer, preempted_req_ids=("Z",))
        return answer

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.PIPELINE}


def test_no_program_is_tried_that_asks_for_what_the_engine_lacks() -> None:
    program = Program(ASYNC, (*submits(2), v.Schedule(), v.Schedule(), Answer(), Answer()))
    tried: list[v.Config] = []

    class Watched(WrongDeeper):
        def __init__(self, config: v.Config) -> None:
            tried.append(config)
            super().__init__(config)

    _, findings = run_program(program, Watched)
    shrunk = shrink(program, Watched, findings[0])
    assert len(tried) > 5
    assert not any(map(PIPELINE.is_asked_by, tried))
    assert [type(action).__name__ for action in shrunk.program.actions] == [
        *("Submit", "Schedule", "Answer")
    ]


def test_no_program_is_tried_with_more_frames_than_the_engine_allows() -> None:
    class Shallow(WrongDeeper):
        traits = EngineTraits(max_depth=2)
        depths: list[int] = []  # noqa: RUF012

        def __init__(self, config: v.Config) -> None:
            self.depths.append(config.max_frames_in_flight)
            super().__init__(config)

    steps = (v.Schedule(), Answer()) * 3
    program = Program(CONFIG, (*submits(1), *steps))
    _, findings = run_program(program, Shallow)
    shrink(program, Shallow, findings[0])
    assert max(Shallow.depths) <= 2


FULL = v.KVGroup(v.GroupKind.FULL, 4)
CHUNKS = v.KVGroup(v.GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=8)
WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=5)
GROUPED = replace(CONFIG, num_blocks=65, max_num_batched_tokens=4, groups=(FULL, CHUNKS, WINDOW))
LONG = (v.Submit(v.Request("A", tuple(range(12)), 4)), *(v.Schedule(), Answer()) * 5)


class WrongAtNulls(SpecEngine):
    """Wrong as soon as a block is skipped."""

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        tables = [t for r in self.snapshot().requests for t in r.block_tables]
        if isinstance(answer, v.Plan) and any(0 in table for table in tables):
            return replace(answer, preempted_req_ids=("Z",))
        return answer


class WrongInSmaller(WrongAtNulls):
    """Wrong only with full attention in blocks of another size."""

    def apply(self, event: v.Event) -> v.Observation:
        answer, config = super(WrongAtNulls, self).apply(event), self.state.config
        if isinstance(answer, v.Plan) and FULL in config.groups and config.block_size < 4:
            return replace(answer, preempted_req_ids=("Z",))
        return answer


def test_only_groups_that_matter_are_kept() -> None:
    for engine, groups in (
        (WrongAtNulls, (v.KVGroup(v.GroupKind.SLIDING_WINDOW, 1, sliding_window=1),)),
        (WrongInSmaller, (FULL, v.KVGroup(v.GroupKind.FULL, 2))),
    ):
        program = Program(GROUPED, LONG)
        _, findings = run_program(program, engine)
        (first,) = [found for found in findings if found.sentence == "engine_equals_spec"]
        shrunk = shrink(program, engine, first)
        assert shrunk.program.config.groups == groups
        assert len(shrunk.program.actions) <= 4


def test_groups_that_do_not_matter_are_removed() -> None:
    program = Program(replace(GROUPED, async_scheduling=False), LONG)
    _, findings = run_program(program, WrongDeeper)
    assert shrink(program, WrongDeeper, findings[0]).program.config.groups == ()


class WrongAbout(SpecEngine):
    """Wrong at each plan with a new request for which `is_met` holds."""

    def is_met(self, request: v.Request) -> bool:
        raise NotImplementedError

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if isinstance(answer, v.Plan) and any(self.is_met(row.request) for row in answer.new):
            return replace(answer, preempted_req_ids=("Z",))
        return answer


def shrunk_by(engine: type[WrongAbout], program: Program) -> Program:
    _, findings = run_program(program, engine)
    (first,) = [found for found in findings if found.sentence == "engine_equals_spec"]
    return shrink(program, engine, first).program


DOG = v.MultiModalItem("dog", 5, 3, (False, True, True))
CAT = v.MultiModalItem("cat", 1, 2)
ENCODING = replace(
    CONFIG, encoder_compute_budget=6, encoder_cache_size=8, disable_chunked_mm_input=True
)


def test_items_that_matter_are_shortened_and_moved_to_the_front() -> None:
    class Wrong(WrongAbout):
        def is_met(self, request: v.Request) -> bool:
            return bool(request.items)

    asked = (
        v.Request("Q", (1,) * 8, 4, items=(CAT, DOG)),
        v.Request("P", (1,) * 9, 2, items=(DOG,)),
    )
    actions: tuple[Action, ...] = (v.EncoderOffer(("cat", "owl")), *map(v.Submit, asked))
    actions += (v.Schedule(), Answer()) * 4
    left = shrunk_by(Wrong, Program(ENCODING, actions))
    assert left.actions == (
        v.Submit(v.Request("A", (0,), 1, items=(v.MultiModalItem("x", 0, 1),))),
        v.Schedule(),
    )
    assert (left.config.encoder_compute_budget, left.config.encoder_cache_size) == (0, 0)


def test_a_shortened_item_is_equal_in_all_requests() -> None:
    actions = (
        v.Submit(v.Request("A", (1,) * 8, items=(CAT, DOG))),
        v.StreamingUpdate(v.Request("A", (1,) * 8, items=(DOG,), resumable=True)),
        v.Schedule(),
    )
    seen = list(simpler_contents(actions))
    assert len(seen) == 3, "the cat is one long; the dog has no mask, or is two long"
    for variant in seen:
        items = [item for action in variant[:2] for item in get_request(action).items]  # type: ignore[union-attr]
        assert (
            len({(item.length, item.is_embed) for item in items if item.identifier == "dog"}) == 1
        )
        assert all(not item.is_embed or any(item.is_embed) for item in items)


def test_only_grammar_states_and_edges_that_matter_are_kept() -> None:
    class Wrong(WrongAbout):
        def is_met(self, request: v.Request) -> bool:
            edges = request.grammar.edges if request.grammar else ()
            return any(token == 7 for state in edges for token, _ in state)

    grammar = v.Grammar((((1, 1), (4, 2)), ((2, 0), (7, 3), (9, 1)), ((3, 3),), ()))
    asked = v.Request("Q", (1, 2), 4, structured_output=True, grammar=grammar)
    actions = (*submits(1), v.Submit(asked), v.GrammarReady("Q"), *(v.Schedule(), Answer()) * 3)
    left = shrunk_by(Wrong, Program(CONFIG, actions))
    least = v.Request("A", (0,), 1, structured_output=True, grammar=v.Grammar((((7, 0),),)))
    assert left.actions == (v.Submit(least), v.GrammarReady("A"), v.Schedule())


def test_only_inputs_of_a_session_that_matter_are_kept() -> None:
    class Wrong(WrongAbout):
        def is_met(self, request: v.Request) -> bool:
            return len(request.prompt_token_ids) > 2 and request.resumable

    def chunk(count: int, **more: Any) -> v.StreamingUpdate:
        return v.StreamingUpdate(v.Request("Q", (5,) * count, 2, resumable=True, **more))

    first = v.Submit(v.Request("Q", (1, 2), 2, resumable=True, adapter="lora"))
    steps = (v.Schedule(), Answer()) * 3
    actions = (*submits(1), first, *steps, chunk(2, priority=3), *steps, chunk(3), *steps)
    left = shrunk_by(Wrong, Program(CONFIG, actions))
    updates = [action for action in left.actions if isinstance(action, v.StreamingUpdate)]
    assert len(updates) <= 1
    requests = [request for action in left.actions if (request := get_request(action)) is not None]
    assert {request.request_id for request in requests} == {"A"}
    assert not any(request.priority or request.adapter for request in requests)


def test_a_program_is_seldom_tried_again() -> None:
    played: list[Program] = []

    def play(program: Program, *more: Any) -> Any:
        played.append(program)
        return run_program(program, *more)

    program = Program(CONFIG, LONG)
    _, findings = run_program(program, WrongDeeper)
    shrink(program, WrongDeeper, findings[0], play=play)
    times = Counter(played)
    assert len(times) > 20
    assert max(times.values()) <= 2  # what a pass halves, it may put out of the way again
    assert len(played) - len(times) <= 3
