"""Structured output: requests whose grammar is compiled first, and then constrains their tokens.

`grammar` is the automaton, `masks` what a frame may sample.
"""

from __future__ import annotations

from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core import speculation
from blockstep.spec.core.endings import get_ended
from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import RequestState, list_rows_in_flight
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features.structured_output.grammar import (
    STAND,
    get_first_stand,
    get_next_stand,
    get_stand_behind,
    get_stands,
)
from blockstep.spec.features.structured_output.masks import (
    HAS_MASK,
    fill_mask,
    get_accepted_drafts,
    get_forbidden,
    get_read,
    get_verifiable_drafts,
    tell_masks,
)
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Ack,
    FinishReason,
    OutputRow,
    Outputs,
    RejectCode,
    Rejected,
    RequestId,
    Status,
)

COMPILING: Final = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
GRAMMAR_READY: Final = Part("grammar_ready", False)
"""Whether the grammar of a request is compiled."""


def get_structured_entry(state: State, entry: RequestState) -> RequestState:
    """Return a new request: with structured output it is blocked until its grammar is compiled.

    Source: seed 001 "RequestStatus Lifecycle"; P23.
    """
    asked = entry.request
    if asked.structured_output:
        entry = replace(entry, status=COMPILING)
    if asked.grammar is None:
        return entry
    return STAND.put(entry, get_first_stand(state.config, asked.prompt_token_ids))


def process_grammar_gate(step: Step, request: RequestState) -> Verdict | None:
    """Skip a request whose grammar is not compiled; once it is, the request waits like others.

    Source: seed 001 "Filter on blocking status"; P15.
    """
    if request.status is not COMPILING:
        return None
    if not GRAMMAR_READY.of(request):
        return Verdict.PASSED_OVER
    step.requests[request.request_id] = replace(request, status=Status.WAITING)
    return None


# Events.


def process_grammar_ready(state: State, request_id: RequestId) -> tuple[State, Ack] | Rejected:
    """Note that the grammar is compiled; the next Schedule that tries the request makes it waiting.

    Source: seed 001 "Filter on blocking status"; P18.
    """
    # refuse
    request = get_structured(state, request_id)
    if isinstance(request, Rejected):
        return request
    # requests
    requests = state.requests.having(request_id, GRAMMAR_READY.put(request, True))
    return replace(state, requests=requests), Ack()


def get_structured(state: State, request_id: RequestId) -> RequestState | Rejected:
    """Return the request to which an event about a grammar refers, or why there is none.

    Source: P18.
    """
    request = state.requests.get(request_id)
    if request is None:
        detail = f"no unfinished request {request_id!r}"
        return Rejected(RejectCode.UNKNOWN_REQUEST, detail)
    if not request.request.structured_output:
        detail = f"{request_id!r} was submitted without structured_output"
        return Rejected(RejectCode.NOT_STRUCTURED, detail)
    return request


def get_error_row(request: RequestState) -> OutputRow:
    """Return the output row of a request that cannot be served.

    Source: vLLM 0.19.1 `update_from_output`; P13.
    """
    num_cached = max(request.num_cached_tokens, 0)
    return OutputRow(request.request_id, (), FinishReason.ERROR, num_cached_tokens=num_cached)


def process_grammar_failed(state: State, request_id: RequestId) -> tuple[State, Outputs] | Rejected:
    """Finish a request whose grammar cannot be compiled, with an error, whatever its status.

    Upstream's engine ends, not the request: a failed compilation raises during the next plan.
    Frames in flight still return tokens for it, which are ignored, as after an abort. Source: vLLM
    0.19.1 `is_grammar_ready`; P13, P18.
    """
    # refuse
    request = get_structured(state, request_id)
    if isinstance(request, Rejected):
        return request
    # observe
    return get_ended(state, [request_id]), Outputs((get_error_row(request),))


# Every state.


def is_every_grammar_in_step(state: State) -> bool:
    """A grammar state follows from the outputs, and accepts the drafts that follow. Source: P23.

    These are the drafts that are known: stored for the next step, or in a frame that can be
    committed next.
    """
    config = state.config
    for _, request in sorted(state.requests.items()):
        grammar, asked = request.request.grammar, request.request
        if grammar is None:
            continue
        first = get_first_stand(config, asked.prompt_token_ids)
        outputs = request.output_token_ids
        if get_stand_behind(config, grammar, first, outputs, get_next_stand) != STAND.of(request):
            return False
        rows = list_rows_in_flight(state.frames, request.request_id)
        mine = [get_verifiable_drafts(row) for row in rows if HAS_MASK.of(row)]
        for drafts in (request.spec_token_ids, *mine[:1]):
            known = tuple([token for token in drafts if token != DRAFT_PLACEHOLDER])
            stands = get_stands(config, grammar, STAND.of(request), known, get_next_stand)
            if len(stands) <= len(known):
                return False
    return True


FEATURE: Final = Feature(
    "structured_output",
    is_always,
    Hooks(
        arrives=(get_structured_entry,),
        gates=(process_grammar_gate,),
        rows=(fill_mask,),
        fields=(tell_masks,),
        disputes=(get_forbidden,),
        reads=(get_read,),
        accepts=(get_accepted_drafts,),
    ),
    instead={speculation.get_verifiable_drafts: get_verifiable_drafts},
    invariants=(is_every_grammar_in_step,),
)
