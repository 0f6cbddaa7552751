"""Structured output: requests whose grammar is compiled first, and then constrains their tokens.

`grammar` is the automaton, `masks` what a frame may sample.
"""

from __future__ import annotations

from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.features.structured_output.grammar import STAND, get_first_stand
from blockstep.spec.features.structured_output.masks import (
    get_accepted_drafts,
    get_forbidden,
    get_read,
    tell_masks,
)
from blockstep.spec.lives.endings import get_ended, get_error_row
from blockstep.spec.requests import RequestState
from blockstep.spec.state import State
from blockstep.spec.step.work import Step, Verdict
from blockstep.spec.vocabulary import Ack, Outputs, RejectCode, Rejected, RequestId, Status

COMPILING: Final = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


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
    if not request.grammar_ready:
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
    requests = state.requests.having(request_id, replace(request, grammar_ready=True))
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


FEATURE: Final = Feature(
    "structured_output",
    is_always,
    Hooks(
        arrives=(get_structured_entry,),
        gates=(process_grammar_gate,),
        fields=(tell_masks,),
        disputes=(get_forbidden,),
        reads=(get_read,),
        accepts=(get_accepted_drafts,),
    ),
)
