"""Sessions: requests that a stop does not end, for further input goes on with them."""

from __future__ import annotations

from blockstep.spec.state import State
from blockstep.spec.vocabulary import Ack, RejectCode, Rejected, Request


def process_streaming_update(state: State, update: Request) -> tuple[State, Ack] | Rejected:
    """Refuse to go on with what is no session. Source: vLLM 0.19.1 `add_request`."""
    request = state.requests.get(update.request_id)
    if request is None:
        detail = f"no unfinished request {update.request_id!r}; submit it first"
        return Rejected(RejectCode.UNKNOWN_REQUEST, detail)
    detail = f"{update.request_id!r} was submitted without resumable"
    return Rejected(RejectCode.NOT_RESUMABLE, detail)
