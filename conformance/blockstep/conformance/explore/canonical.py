"""Canonical forms: states that no future event can distinguish have the same digest.

Statistics, counts of preemptions and frame ids are left out: they only grow and decide nothing.
Names without a meaning are renumbered in order of appearance:

    block ids      free queue, head first, then block tables, of finished ones last, and what
                   features keep: each block is in one of these
    request ids    running, waiting, skipped, then frames, then the rest; within a class
    tokens         outputs, drafts, then keys; those that no request names

Each request is in exactly one queue, and each block in the free queue or in a table, so the order
of appearance follows from the state alone, and no permutations have to be tried.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeAlias

from blockstep.conformance.explore.world import World, get_scopes
from blockstep.spec.core.requests import Frame, FrameRow, RequestState
from blockstep.spec.core.state import State
from blockstep.spec.features.admission_control import ADMISSION_CLOSED
from blockstep.spec.features.encoder.cache import ENCODER, NO_ENCODER, Encoder
from blockstep.spec.features.groups import IN_DOUBT
from blockstep.spec.features.kv_transfer.transfers import FRAME_LOADS, TRANSFERS
from blockstep.spec.features.sessions import UPDATES
from blockstep.spec.features.structured_output import GRAMMAR_READY, HAS_MASK, IS_CUT
from blockstep.spec.features.structured_output.grammar import GRAMMAR
from blockstep.spec.releases.block_pool import WAS_REFUSED
from blockstep.spec.releases.grammars import IS_STRUCTURED
from blockstep.spec.releases.in_flight import list_reset_victims
from blockstep.spec.releases.load_failures import NUM_SCHEDULED
from blockstep.spec.releases.mamba_state import LONGEST_GROUP_HIT
from blockstep.spec.releases.sessions import LAST_STOP
from blockstep.spec.vocabulary import (
    AllBlocksCleared,
    BlockId,
    BlockKey,
    BlockTables,
    KVEvent,
    PauseState,
    RequestId,
    Status,
    TokenId,
    TokenIds,
)

Form: TypeAlias = tuple[Any, ...]
"""Nested tuples of integers and strings."""
Digest: TypeAlias = int
"""64 bits of BLAKE2. With two million states the chance of a collision is one in nine million."""

_STATUSES = {status: index for index, status in enumerate(Status)}
_PAUSES = {pause_state: index for index, pause_state in enumerate(PauseState)}
_NO_KEY = ((), ())

LEFT_OUT = frozenset(
    {
        "config", "rules", "stats", "next_frame_id",  # of State: fixed, or only growing
        "request", "request_id", "num_preemptions", "block_keys",  # of RequestState, FrameRow
        "frame_id",  # of Frame
        "is_shared", "budget", "planned", "evicted",  # of Encoder: fixed, or of a step in planning
        "is_lifo",  # of Pool: fixed
    }
)  # fmt: skip
"""Fields that are not part of a digest: fixed, growing, or derived from others."""


class Canonicaliser:
    """Computes digests of the states of one world."""

    def __init__(self, world: World) -> None:
        self._classes = world.classes
        self._is_named = len(set(world.classes.values())) == len(world.classes)
        self._free_tokens = world.free_tokens
        self._scopes = [scope for scope in get_scopes() if scope.is_on(world.config)]
        self._contents: dict[BlockKey, tuple[TokenIds, Form]] = {}

    def digest(self, state: State) -> Digest:
        """Return the digest of a state; it is equal exactly for states with the same future."""
        # Version 2 of marshal writes equal values equally, even if they are different objects.
        data = marshal.dumps(self.form(state), 2)
        return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")

    def form(self, state: State) -> Form:
        """Return all that matters of a state in canonical names: nested tuples of integers and
        strings.
        """
        labels: Mapping[RequestId, Any] = self._classes if self._is_named else self._label(state)
        pool = state.pool
        places = {block_id: place for place, block_id in enumerate(pool.free_queue)}
        order = (*state.running, *state.waiting, *state.skipped_waiting)
        requests: list[Form] = []
        for name in order:
            request = state.requests[name]
            for block_id in chain.from_iterable(request.block_tables):
                places.setdefault(block_id, len(places))
            requests.append(_request_form(request, labels[name], places))
        kept = chain.from_iterable(scope.list_tables(state) for scope in self._scopes)
        for block_id in chain.from_iterable(_list_other_tables(state, labels, kept)):
            places.setdefault(block_id, len(places))
        contents = [
            _NO_KEY if key is None else self._content(key)
            for key in (pool.block_keys[block_id] for block_id in places)
        ]
        events = pool.journal or ()
        contents += [self._content(key) for event in events for key in _get_keys(event)]
        frames: Form = tuple(
            tuple(
                (labels[row.request_id], row.draft_token_ids, *_get_flags(frame, row))
                for row in frame.rows
            )
            for frame in state.frames
        )
        if self._free_tokens:
            requests, frames, contents = self._rename_tokens(requests, frames, contents)
        equals = [blocks for blocks in pool.cached.values() if len(blocks) > 1]
        return (
            _PAUSES[state.pause_state],
            *_get_more(ADMISSION_CLOSED.of(state)),
            (len(state.running), len(state.waiting), len(pool.free_queue)),
            tuple(requests),
            tuple(pool.ref_counts[block_id] for block_id in places),
            tuple(contents),
            tuple(sorted(tuple(places[block_id] for block_id in blocks) for blocks in equals)),
            frames,
            *(tuple(sorted(labels[name] for name in names)) for names in _get_sets(state)),
            *_encoder_form(ENCODER.of(state), labels),
            *_transfers_form(state, labels, places),
            *chain.from_iterable(scope.get_form(state, places) for scope in self._scopes),
            *((type(event).__name__, len(_get_keys(event))) for event in events),
        )

    def _label(self, state: State) -> dict[RequestId, tuple[int, int]]:
        """Return for each request its class, and the number of requests of the class that appear
        before it.
        """
        rows = (row.request_id for frame in state.frames for row in frame.rows)
        appear = dict.fromkeys((*state.running, *state.waiting, *state.skipped_waiting, *rows))
        sets = _get_sets(state)
        rest = {name for names in sets for name in names if name not in appear}
        # Only the sets that contain them are left of these requests, so ids may break the ties.
        appear |= dict.fromkeys(
            sorted(rest, key=lambda name: ([name in names for names in sets], name))
        )
        counts: dict[int, int] = {}
        labels = {}
        for name in appear:
            kind = self._classes[name]
            labels[name] = (kind, counts.get(kind, 0))
            counts[kind] = counts.get(kind, 0) + 1
        return labels

    def _content(self, key: BlockKey) -> tuple[TokenIds, Form]:
        """Return all tokens up to the end of the block, and the other parts of its chain of
        keys.
        """
        found = self._contents.get(key)
        if found is None:
            chain = key.chain()
            tokens = tuple(token for link in chain for token in link.token_ids)
            extras: Form = tuple(
                (link.adapter or "", link.cache_salt or "", link.items, link.embeds)
                for link in chain
            )
            extras = extras if any(map(any, extras)) else ()
            found = self._contents[key] = (tokens, (*extras, key.group) if key.group else extras)
        return found

    def _rename_tokens(
        self, requests: list[Form], frames: Form, contents: list[tuple[TokenIds, Form]]
    ) -> tuple[list[Form], Form, list[tuple[TokenIds, Form]]]:
        names: dict[TokenId, TokenId] = {}
        free = self._free_tokens

        def renamed(tokens: TokenIds) -> TokenIds:
            for token in tokens:
                if token in free and token not in names:
                    names[token] = -2 - len(names)
            return tuple(names.get(token, token) for token in tokens)

        return (
            [(label, renamed(outputs), renamed(drafts), *rest)
             for label, outputs, drafts, *rest in requests],
            tuple(
                tuple((label, renamed(drafts), *rest) for label, drafts, *rest in rows)
                for rows in frames
            ),
            [(renamed(tokens), extras) for tokens, extras in contents],
        )  # fmt: skip


def _list_other_tables(
    state: State, labels: Mapping[RequestId, Any], kept: Iterable[Sequence[BlockId]]
) -> Iterator[Sequence[BlockId]]:
    """Yield the tables of blocks that no unfinished request need have: of transfers and frames, and
    those that features keep.
    """
    held = sorted(TRANSFERS.of(state).held.values(), key=lambda entry: labels[entry.request_id])
    for entry in held:
        yield from entry.block_tables
    for deferred in state.pool.deferred_frees:
        yield deferred.block_ids
    yield from kept
    for frame in state.frames:
        for load in FRAME_LOADS.of(frame):
            yield from load.block_ids


def _request_form(request: RequestState, label: object, places: dict[int, int]) -> Form:
    return (
        label,
        request.output_token_ids,
        request.spec_token_ids,
        _STATUSES[request.status],
        request.num_computed_tokens,
        request.num_output_placeholders,
        request.is_prefill_chunk,
        *(tuple(places[block_id] for block_id in table) for table in request.block_tables),
        *(held.num_cached_blocks for held in request.holdings),
        request.num_cached_tokens,
        GRAMMAR_READY.of(request),
        *_get_more(
            GRAMMAR.of(request).state,
            GRAMMAR.of(request).reasoning_ended,
            LONGEST_GROUP_HIT.of(request),
        ),
        *_get_more(request.has_unconfirmed_kv),
        *_get_more(2 * WAS_REFUSED.of(request)),  # not the form of a request that is unsettled
        *_session_form(request),
    )


def _get_keys(event: KVEvent) -> tuple[BlockKey, ...]:
    """Return the keys of an event's blocks; its other fields follow from them."""
    return () if isinstance(event, AllBlocksCleared) else event.keys


def _get_flags(frame: Frame, row: FrameRow) -> tuple[int, ...]:
    masks = (HAS_MASK.of(row), IS_CUT.of(row), IS_STRUCTURED.of(frame))
    more = _get_more(IN_DOUBT.of(row), NUM_SCHEDULED.of(row), *masks)
    return row.samples, row.is_dropped, *more


def _get_more(*values: int) -> tuple[int, ...]:
    """Return the values, or nothing if all are zero, so that the form of most states is short."""
    return values if any(values) else ()


def _session_form(request: RequestState) -> Form:
    """Return a session's request and its waiting inputs; nothing for other requests."""
    asked = request.request
    if not asked.resumable:
        return ()
    chunks = [(one.prompt_token_ids, one.max_tokens, one.resumable) for one in UPDATES.of(request)]
    ends = (
        LAST_STOP.of(request),
        asked.min_tokens,
        asked.eos_token_id,
        asked.stop_token_ids,
        asked.arrival_time,
    )
    items = [(item.identifier, item.offset) for item in asked.items]
    return asked.prompt_token_ids, asked.max_tokens, *ends, *items, tuple(chunks)


def _encoder_form(encoder: Encoder, labels: Mapping[RequestId, Any]) -> Form:
    """Return the items in the encoder cache and their holders; between two steps there is nothing
    else.
    """
    if encoder is NO_ENCODER:
        return ()
    entries = []
    for name, entry in sorted(encoder.entries.items()):
        holders = sorted((labels[holder], index) for holder, index in entry.holders)
        entries.append((name, entry.num_embeds, tuple(holders)))
    return encoder.size, tuple(entries), encoder.freeable, encoder.offered, encoder.freed


def _transfers_form(
    state: State, labels: Mapping[RequestId, Any], places: Mapping[int, int]
) -> Form:
    """Return the transfers between pool and store; nothing without a store."""
    moving = TRANSFERS.of(state)
    if not state.config.kv_connector:
        return ()

    def placed(tables: BlockTables) -> Form:
        return tuple(tuple(places[block_id] for block_id in table) for table in tables)

    offers = [
        (labels[name], -1 if offer.num_tokens is None else offer.num_tokens, offer.is_async,
         offer.delays_free)
        for name, offer in moving.offers.items()
    ]  # fmt: skip
    loads = [
        (labels[name], _STATUSES[load.status], load.is_received)
        for name, load in moving.parked.items()
    ]
    held = [
        (labels[name], placed(entry.block_tables), entry.is_recving, entry.is_sending)
        for name, entry in moving.held.items()
    ]
    at_once = [
        [
            (labels[load.request_id], placed(load.block_ids), load.num_computed_tokens,
             load.num_external_tokens, load.is_async)
            for load in FRAME_LOADS.of(frame)
        ]
        for frame in state.frames
    ]  # fmt: skip
    frame_ids = [frame.frame_id for frame in state.frames]
    deferred = [
        (frame_ids.index(entry.frame_id), *placed((entry.block_ids,)))
        for entry in state.pool.deferred_frees
    ]
    sets = tuple(sorted(offers)), tuple(sorted(loads)), tuple(sorted(held))
    return *sets, *map(tuple, at_once), tuple(deferred)


def _get_sets(state: State) -> tuple[Iterable[RequestId], ...]:
    held = (TRANSFERS.of(state).held,) if state.config.kv_connector else ()
    return state.finished_req_ids, state.prev_scheduled_req_ids, list_reset_victims(state), *held
