"""Seeded bugs in the limit on LoRA adapters and in sessions.

Each list is checked with one additional feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from blockstep.conformance.museum.bug import Page, Right, instead, replacing
from blockstep.spec.copies import replace
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features.identity import name_content
from blockstep.spec.features.lora import list_seated, process_adapter_gate
from blockstep.spec.features.reclaim import find_giver, process_reclaim
from blockstep.spec.features.sessions import RESTING, get_continued
from blockstep.spec.vocabulary import Config, RequestId, Status

ADAPTERS = Page(takes="adapters")
SESSIONS = Page(takes="sessions")


@ADAPTERS.exhibit(
    "a request without a LoRA adapter needs a free LoRA slot",
    "SGLang #23141, breaks its rule",
    "P15 P16",
    invisible="policy: which request is skipped",
)
def base_model_takes_a_seat(rules: Rules, _config: Config) -> Rules:
    """Requests of the base model are skipped while `max_loras` adapters are running."""

    def admit(step: Step, request: RequestState) -> Verdict | None:
        in_use = {step.requests[name].request.adapter for name in rules[list_seated](step)}
        is_full = len(in_use - {None}) >= step.state.config.max_loras
        if is_full and request.request.adapter is None:
            return Verdict.PASSED_OVER
        return rules[process_adapter_gate](step, request)

    return rules.replacing(process_adapter_gate, admit)


@ADAPTERS.exhibit(
    "max_loras is checked against the adapters at the begin of the step", "SGLang #23141", "P9 P16"
)
@instead(list_seated)
def adapters_counted_afterwards(right: Right[list[RequestId]], step: Step) -> list[RequestId]:
    """All requests admitted in one step see the LoRA slots that were free before it."""
    admitted = {row.request_id for row in step.rows if row.status is not Status.RUNNING}
    return [name for name in right() if name not in admitted]


@SESSIONS.exhibit(
    "idle sessions never free their blocks when another request lacks them", "#49439", "P10"
)
def sessions_never_give_way(rules: Rules, _config: Config) -> Rules:
    """Two sessions that wait for input may each hold the blocks that the other one needs."""
    return rules.replacing(process_reclaim, lambda _step, _receiver_id: False)


@SESSIONS.exhibit(
    "only sessions without input free their blocks when another request lacks them",
    "#49439",
    "P10",
    wrong_fix_of="sessions-never-give-way",
)
@instead(find_giver)
def sessions_with_input_never_give_way(
    right: Right[RequestId | None], step: Step, receiver_id: RequestId | None
) -> RequestId | None:
    """Two sessions that have new input may each hold the blocks that the other one needs."""
    giver_id = right()  # idle ones come first
    is_kept = receiver_id and giver_id and step.requests[giver_id].status is not RESTING
    return None if is_kept else giver_id


_IS_CONTINUED: Final = Part("is_continued", False)


@SESSIONS.exhibit(
    "block keys of a session's later inputs contain only its last item", "#36708, rule", "P6 P3"
)
def last_item_names_a_chunk(rules: Rules, _config: Config) -> Rules:
    """The search for a block's items starts at the last item, as it may for blocks of outputs."""

    def go_on(right: Right[RequestState], request: RequestState) -> RequestState:
        return right(request=_IS_CONTINUED.put(request, True))

    def name(right: Right[Mapping[str, Any]], request: RequestState) -> Mapping[str, Any]:
        if not _IS_CONTINUED.of(request):
            return right()
        asked = replace(request.request, items=request.request.items[-1:])
        return right(request=replace(request, request=asked))

    return replacing(replacing(rules, get_continued, go_on), name_content, name)
