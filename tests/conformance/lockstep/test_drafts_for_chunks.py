"""Drafts for a request in the middle of its prompt, which a proposer makes for every row."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.engine import Capability
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Answer, Program, Propose, describe
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search.check import InProcess, check
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.profiles import STRICT

CONFIG = v.Config(
    16, 1, max_num_batched_tokens=4, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=1
)
ACTIONS = (
    v.Submit(v.Request("A", (0,), max_tokens=9)),
    v.Submit(v.Request("B", (0, 0, 0, 0, 0, 0), max_tokens=9)),
    v.Schedule(),
    Answer(),
)


class Attaching(SpecEngine):
    """An engine that keeps drafts for a request in the middle of its prompt, but no late drafts."""

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.LATE_DRAFTS, Capability.REJECTION}

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if not (isinstance(event, v.Drafts) and isinstance(answer, v.DraftsTaken)):
            return answer
        requests, taken = self.state.requests.to_dict(), list(answer.request_ids)
        for row in event.drafts:
            request = requests.get(row.request_id)
            if request is not None and request.is_prefill_chunk:
                requests[row.request_id] = replace(request, spec_token_ids=row.token_ids)
                taken.append(row.request_id)
        self.state = replace(self.state, requests=FrozenMap(requests))
        return v.DraftsTaken(tuple(taken))


def test_drafts_for_a_chunk_reach_the_engine() -> None:
    _, found = run_program(Program(CONFIG, (*ACTIONS, Propose(((1, 1),)))), Attaching, STRICT)
    assert not found
    with_chunks = Propose(((1, 1),), for_chunks=True)
    assert describe(with_chunks) == "drafts    1(1 right), for chunks too"
    _, found = run_program(Program(CONFIG, (*ACTIONS, with_chunks)), Attaching, STRICT)
    assert "drafts_are_taken_only_for_the_next_position" in {it.sentence for it in found}


def test_a_check_draws_drafts_for_chunks() -> None:
    options = CheckOptions(preset="tiny", max_events=4_000, with_features=("drafts",))
    result = check(options, place=InProcess(load=lambda _options: Attaching))
    assert result.first is not None
    assert result.first.sentence == "drafts_are_taken_only_for_the_next_position"
