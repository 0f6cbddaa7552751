"""View: the engine's state as a snapshot, the same for every exact engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Final, NamedTuple

from blockstep.impl.doors import Doors
from blockstep.impl.grammars import Matcher
from blockstep.impl.host import state as c
from blockstep.impl.host.frames import Frame
from blockstep.impl.host.keys import Keys
from blockstep.impl.host.lives import get_tokens
from blockstep.impl.host.masks import Masks
from blockstep.impl.host.requests import Requests
from blockstep.impl.host.sessions import Sessions
from blockstep.impl.host.transfers import Transfers
from blockstep.impl.names import STATUSES
from blockstep.spec import vocabulary as v

WIDE: Final = 256
"""Most blocks of a table that is compared whole, whatever number of them is held."""


class Blocks(NamedTuple):
    """The fields of a snapshot that follow from blocks and their contents."""

    ref_counts: tuple[int, ...]
    free_queue: tuple[v.BlockId, ...]
    block_keys: tuple[v.BlockKey | None, ...]
    cached: Mapping[v.BlockKey, tuple[v.BlockId, ...]]


class View:
    """Reads the state of one engine; `parts` return the states of its managers.

    Two snapshots share the objects of what did not change between them.
    """

    def __init__(
        self,
        doors: Doors[Frame],
        requests: Requests,
        keys: Keys,
        masks: Masks,
        sessions: Sessions,
        transfers: Transfers | None,
        parts: Mapping[str, Callable[[], Any] | None],
    ) -> None:
        self.doors = doors
        self.requests = requests
        self.keys = keys
        self.masks = masks
        self.sessions = sessions
        self.transfers = transfers
        self.parts = {name: show for name, show in parts.items() if show is not None}
        self._shown: dict[int, tuple[tuple[object, ...], v.RequestSnapshot]] = {}
        """By index: all that a request's snapshot is made of, and that snapshot."""
        self._blocks: tuple[tuple[bytes, int], Blocks] = (b"", 0), Blocks((), (), (), {})
        """The arrays behind the blocks of the last snapshot, and those blocks."""

    def take(self, previous_names: Iterable[v.RequestId]) -> v.Snapshot:
        """Return the canonical state: nodes become structural keys, slots become request ids.

        `previous_names`: the requests of the last plan's rows.
        """
        doors, s = self.doors, self.requests.state
        names, blocks = self.requests.names, self._list_blocks()
        list_queue = self.requests.list_queue
        return v.Snapshot(
            pause_state=doors.pause_state,
            waiting=tuple(names[list_queue(c.WAITING)].tolist()),
            skipped_waiting=tuple(names[list_queue(c.SKIPPED)].tolist()),
            running=tuple(names[s.lines[: s.scalars[c.NUM_RUNNING], c.RUNNING]].tolist()),
            requests=tuple(
                self._request(slot) for _, slot in sorted(self.requests.slot_of.items())
            ),
            ref_counts=blocks.ref_counts,
            free_queue=blocks.free_queue,
            block_keys=blocks.block_keys,
            cached=blocks.cached,
            frames_in_flight=tuple(doors.frames),
            next_frame_id=doors.next_frame_id,
            finished_req_ids=tuple(sorted(doors.finished_req_ids)),
            prev_scheduled_req_ids=tuple(sorted(previous_names)),
            stats=self.stats(),
            admission_closed=bool(s.scalars[c.IS_CLOSED]),
            has_work=self.has_work(),
            **{name: show() for name, show in self.parts.items()},
        )

    def has_work(self) -> bool:
        """Whether planning again may do anything before the next event."""
        doors = self.doors
        num_ready = {
            v.PauseState.UNPAUSED: len(self.requests.slot_of) - self.sessions.count_resting(),
            v.PauseState.PAUSED_NEW: int(self.requests.state.scalars[c.NUM_RUNNING]),
            v.PauseState.PAUSED_ALL: 0,
        }[doors.pause_state]
        awaits = self.transfers is not None and not self.transfers.can_reset()
        return bool(doors.finished_req_ids) or num_ready > 0 or awaits

    def stats(self) -> v.Stats:
        """Return the counters since the start (P21)."""
        scalars = self.requests.state.scalars.tolist()
        return v.Stats(
            prefix_cache_queries=scalars[c.QUERIES],
            prefix_cache_hits=scalars[c.HITS],
            preemptions=scalars[c.PREEMPTIONS],
            drafts_scheduled=scalars[c.DRAFTS_SCHEDULED],
            drafts_accepted=scalars[c.DRAFTS_ACCEPTED],
            external_prefix_cache_queries=scalars[c.EXTERNAL_QUERIES],
            external_prefix_cache_hits=scalars[c.EXTERNAL_HITS],
        )

    def _list_blocks(self) -> Blocks:
        """Return the blocks of a snapshot: the same objects as long as no block changes."""
        s = self.requests.state
        known = s.blocks.tobytes(), int(s.scalars[c.NUM_NODES_BORN])
        if self._blocks[0] != known:
            self._blocks = known, self._make_blocks()
        return self._blocks[1]

    def _make_blocks(self) -> Blocks:
        blocks, carriers = self.requests.state.blocks.tolist(), self.requests.state.carriers
        places = [(block[c.NODE], block[c.GROUP]) for block in blocks]
        keys = {place: self.keys.key_in(*place) for place in {*places} if place[0] != c.NONE}
        cached = {}
        for (node, group), key in keys.items():
            first = int(carriers[node, group, c.FIRST_BLOCK])
            cached[key] = tuple(_follow(blocks, first, c.NEXT_SAME, c.NONE))
        return Blocks(
            tuple([block[c.REF_COUNT] for block in blocks]),
            tuple(_follow(blocks, blocks[v.NULL_BLOCK][c.NEXT_FREE], c.NEXT_FREE, v.NULL_BLOCK)),
            tuple([keys.get(place) for place in places]),
            cached,
        )

    def _request(self, slot: int) -> v.RequestSnapshot:
        """Return the snapshot of a request: the same object as long as nothing of it changes."""
        s, request = self.requests.state, self.requests.requests[slot]
        updates = self.sessions.updates.get(request.request_id)
        matcher = self.masks.matchers.get(request.request_id)
        row, seat, held = s.requests[slot], s.requests[slot, c.SEAT], s.holdings[slot]
        shown = s.block_tables[:, seat]
        if shown.shape[1] > WIDE:
            shown = shown[:, : held[:, c.HELD].max()]
        tables = shown.tobytes()
        drafts = s.drafts[seat].tobytes() if row[c.NUM_DRAFTS] else b""
        known: tuple[object, ...] = (
            *(row.tobytes(), held.tobytes(), tables, drafts, updates is None or len(updates)),
            *((matcher.position.state, matcher.reasoning_ended) if matcher else ()),
        )
        last = self._shown.get(slot)
        if last is None or last[0] != known:
            last = self._shown[slot] = known, self._make_request(slot, updates, matcher)
        return last[1]

    def _make_request(
        self, slot: int, updates: Sized | None, matcher: Matcher | None
    ) -> v.RequestSnapshot:
        requests = self.requests
        s, request = requests.state, requests.requests[slot]
        row = s.requests[slot].tolist()
        tokens = get_tokens(s, slot)
        drafts: v.TokenIds = (v.DRAFT_PLACEHOLDER,) * row[c.NUM_DRAFTS]
        if drafts and not self.doors.config.async_scheduling:
            drafts = tuple(s.drafts[row[c.SEAT], : row[c.NUM_DRAFTS]].tolist())
        return v.RequestSnapshot(
            request_id=request.request_id,
            status=STATUSES[row[c.STATUS]],
            output_token_ids=tuple(tokens[len(request.prompt_token_ids) :].tolist()),
            num_computed_tokens=row[c.NUM_COMPUTED],
            num_output_placeholders=row[c.NUM_PROMISED],
            spec_token_ids=drafts,
            is_prefill_chunk=bool(row[c.IS_PREFILL]),
            block_tables=requests.list_tables(slot, c.HELD),
            num_cached_blocks=tuple(s.holdings[slot, :, c.PUBLISHED].tolist()),
            num_cached_tokens=row[c.NUM_CACHED_TOKENS],
            num_preemptions=row[c.TIMES_PREEMPTED],
            grammar_ready=bool(row[c.GRAMMAR_READY]),
            grammar_state=0 if matcher is None else matcher.position.state,
            prompt_token_ids=() if updates is None else request.prompt_token_ids,
            num_streaming_updates=0 if updates is None else len(updates),
            reasoning_ended=matcher is not None and matcher.reasoning_ended,
        )


def _follow(rows: list[list[int]], first: int, column: int, end: int) -> list[int]:
    """Return the items of a list that is linked by a column, from `first` on."""
    found: list[int] = []
    while first != end:
        found.append(first)
        first = rows[first][column]
    return found
