"""Snapshots: the state in the form in which it is compared with an engine's."""

from __future__ import annotations

from collections.abc import Callable

from blockstep.spec.core.parts import NO_PARTS
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.features.admission_control import ADMISSION_CLOSED
from blockstep.spec.features.encoder import has_encoder
from blockstep.spec.features.encoder.cache import ENCODER, Encoder, count_free, count_freeable
from blockstep.spec.features.kv_transfer.transfers import TRANSFERS, is_received
from blockstep.spec.features.pins import PINS, Pins
from blockstep.spec.features.sessions import UPDATES
from blockstep.spec.features.structured_output import GRAMMAR_READY
from blockstep.spec.features.structured_output.grammar import STAND
from blockstep.spec.idle import has_work
from blockstep.spec.vocabulary import (
    EncoderEntry,
    EncoderSnapshot,
    PinEstimate,
    PinsSnapshot,
    RequestSnapshot,
    Snapshot,
    TransfersSnapshot,
)


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
        encoder=get_encoder_snapshot(ENCODER.of(state)) if has_encoder(state.config) else None,
        transfers=get_transfers_snapshot(state) if state.config.kv_connector else None,
        pins=get_pins_snapshot(PINS.of(state)) if state.config.has_pins else None,
        admission_closed=ADMISSION_CLOSED.of(state),
        has_work=state.rules[has_work](state),
    )


def get_encoder_snapshot(encoder: Encoder) -> EncoderSnapshot:
    """Return the encoder's cache, holders by request. Source: architecture D1."""
    entries = [
        EncoderEntry(name, entry.num_embeds, tuple([holder[0] for holder in entry.holders]))
        for name, entry in sorted(encoder.entries.items())
    ]
    return EncoderSnapshot(
        entries=tuple(entries),
        freeable=encoder.freeable,
        num_free=count_free(encoder),
        num_freeable=count_freeable(encoder),
        freed=encoder.freed,
    )


def get_transfers_snapshot(state: State) -> TransfersSnapshot:
    """Return the transfers between pool and store. Source: architecture D1."""
    moving, requests = TRANSFERS.of(state), state.requests
    unsettled = [name for name in state.running if requests[name].is_unsettled]
    return TransfersSnapshot(
        offers=tuple([moving.offers[name] for name in sorted(moving.offers)]),
        received=tuple([name for name in sorted(moving.parked) if is_received(moving, name)]),
        unsettled=tuple(sorted(unsettled)),
        held=tuple([moving.held[name] for name in sorted(moving.held)]),
        deferred_frees=state.pool.deferred_frees,
    )


def get_pins_snapshot(pins: Pins) -> PinsSnapshot:
    """Return the pins of jobs, and estimates by job. Source: architecture D1."""
    estimates = [PinEstimate(*entry) for entry in sorted(pins.estimates.items())]
    return PinsSnapshot(now=pins.now, pins=pins.pins, estimates=tuple(estimates))


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
    stand, ready, num_updates = STAND.absent, False, 0
    if request.parts is not NO_PARTS:
        stand, ready = STAND.of(request), GRAMMAR_READY.of(request)
        num_updates = len(UPDATES.of(request))
    return RequestSnapshot(
        request_id=request.request_id,
        status=request.status,
        output_token_ids=request.output_token_ids,
        num_computed_tokens=request.num_computed_tokens,
        num_output_placeholders=request.num_output_placeholders,
        spec_token_ids=request.spec_token_ids,
        is_prefill_chunk=request.is_prefill_chunk,
        block_tables=request.block_tables,
        num_cached_blocks=tuple([holding.num_cached_blocks for holding in request.holdings]),
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        grammar_ready=ready,
        prompt_token_ids=request.request.prompt_token_ids if request.request.resumable else (),
        num_streaming_updates=num_updates,
        grammar_state=stand.state,
        reasoning_ended=stand.reasoning_ended,
    )
