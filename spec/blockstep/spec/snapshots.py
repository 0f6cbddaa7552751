"""Snapshots: the state in the form in which it is compared with an engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from blockstep.spec.core.parts import NO_PARTS
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.features import FEATURES
from blockstep.spec.idle import has_work
from blockstep.spec.vocabulary import RequestSnapshot, Snapshot

OF_REQUEST: Final[Mapping[str, Callable[[RequestState], Any]]] = {
    name: show for feature in FEATURES for name, show in feature.shows_of_request.items()
}
"""The functions that return the fields of features in the snapshot of a request."""


def get_snapshot(state: State, shown: tuple[RequestSnapshot, ...] | None = None) -> Snapshot:
    """Return the canonical snapshot of `state`. Source: architecture D1.

    `shown`: cached results for callers with many states; it must equal `get_request_snapshots`.
    """
    return Snapshot(  # by position: keywords would make a dictionary, which doubles the time
        state.pause_state,
        state.waiting,
        state.skipped_waiting,
        state.running,
        get_request_snapshots(state) if shown is None else shown,
        state.pool.ref_counts,
        state.pool.free_queue,
        state.pool.block_keys,
        state.pool.cached,
        tuple([frame.frame_id for frame in state.frames]),
        state.next_frame_id,
        state.finished_req_ids,
        state.prev_scheduled_req_ids,
        state.stats,
        has_work=state.rules[has_work](state),
        **{name: state.rules[show](state) for name, show in state.rules.shows.items()},
    )


def get_request_snapshots(
    state: State, show: Callable[[RequestState], RequestSnapshot] | None = None
) -> tuple[RequestSnapshot, ...]:
    """Return the unfinished requests, by id. Source: architecture D1.

    `show`: a cached function for callers with many states; it must equal `get_request_snapshot`.
    """
    show = show or get_request_snapshot
    return tuple([show(request) for _, request in sorted(state.requests.items())])


def get_request_snapshot(request: RequestState) -> RequestSnapshot:
    """Return one request, with block tables per group. Source: architecture D1."""
    shown = {}
    if request.parts is not NO_PARTS:
        shown = {name: show(request) for name, show in OF_REQUEST.items()}
    return RequestSnapshot(  # by position, as above
        request.request_id,
        request.status,
        request.output_token_ids,
        request.num_computed_tokens,
        request.num_output_placeholders,
        request.spec_token_ids,
        request.is_prefill_chunk,
        request.block_tables,
        tuple([holding.num_cached_blocks for holding in request.holdings]),
        request.num_cached_tokens,
        request.num_preemptions,
        prompt_token_ids=request.request.prompt_token_ids if request.request.resumable else (),
        **shown,
    )
