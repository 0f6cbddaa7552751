"""View: the engine's state as a snapshot, the same for every exact engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Final, TypeAlias

from blockstep.impl.array_engine import ArrayEngine
from blockstep.impl.grammars import Matcher
from blockstep.impl.host import state as c
from blockstep.impl.host.frames import Frame
from blockstep.impl.host.grammar_bitmask import Masks
from blockstep.impl.host.keys import Keys
from blockstep.impl.host.kv_transfers import Transfers
from blockstep.impl.host.lives import get_tokens
from blockstep.impl.host.requests import Requests
from blockstep.impl.host.sessions import Sessions
from blockstep.impl.interning import STATUSES
from blockstep.spec import vocabulary as v

WIDE: Final = 256
"""Most blocks of a table that is compared whole, whatever number of them is held."""


Contents: TypeAlias = tuple[
    tuple[v.BlockKey | None, ...], Mapping[v.BlockKey, tuple[v.BlockId, ...]]
]
"""The keys of blocks, and the blocks of each key, as in a snapshot."""


class View:
    """Reads the state of one engine; `parts` return the states of its managers.

    Two snapshots share the objects of what did not change between them.
    """

    def __init__(
        self,
        doors: ArrayEngine[Frame],
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
        self._contents: tuple[tuple[bytes, int], Contents] = (b"", 0), ((), {})
        """The arrays behind the contents of the last snapshot, and those contents."""

    def take(self, previous_names: Iterable[v.RequestId]) -> v.Snapshot:
        """Return the canonical state: nodes become structural keys, slots become request ids.

        `previous_names`: the requests of the last plan's rows.
        """
        doors, s, list_queue = self.doors, self.requests.state, self.requests.list_queue
        scalars, blocks = s.scalars.tolist(), s.blocks.tolist()
        block_keys, cached = self._get_contents(blocks, scalars[c.NUM_NODES_BORN])
        first_free = blocks[v.NULL_BLOCK][c.NEXT_FREE]
        return v.Snapshot(
            pause_state=doors.pause_state,
            waiting=self._name(list_queue(c.WAITING)),
            skipped_waiting=self._name(list_queue(c.SKIPPED)),
            running=self._name(s.lines[: scalars[c.NUM_RUNNING], c.RUNNING].tolist()),
            requests=self._list_requests(),
            ref_counts=tuple([block[c.REF_COUNT] for block in blocks]),
            free_queue=tuple(_follow(blocks, first_free, c.NEXT_FREE, v.NULL_BLOCK)),
            block_keys=block_keys,
            cached=cached,
            frames_in_flight=tuple(doors.frames),
            next_frame_id=doors.next_frame_id,
            finished_req_ids=tuple(sorted(doors.finished_req_ids)),
            prev_scheduled_req_ids=tuple(sorted(previous_names)),
            stats=_make_stats(scalars),
            admission_closed=scalars[c.IS_CLOSED] != 0,
            has_work=self.has_work(),
            **{name: show() for name, show in self.parts.items()},
        )

    def _name(self, slots: Iterable[int]) -> tuple[v.RequestId, ...]:
        requests = self.requests.requests
        return tuple([requests[slot].request_id for slot in slots])

    def has_work(self) -> bool:
        """Whether planning again may do anything before the next event."""
        doors, pause_state = self.doors, self.doors.pause_state
        if doors.finished_req_ids:
            return True
        if pause_state is v.PauseState.UNPAUSED:
            is_ready = len(self.requests.slot_of) > self.sessions.count_resting()
        else:
            is_running = self.requests.state.scalars[c.NUM_RUNNING] > 0
            is_ready = pause_state is v.PauseState.PAUSED_NEW and bool(is_running)
        return is_ready or (self.transfers is not None and not self.transfers.can_reset())

    def stats(self) -> v.Stats:
        """Return the counters since the start (P21)."""
        return _make_stats(self.requests.state.scalars.tolist())

    def _get_contents(self, blocks: list[list[int]], num_nodes_born: int) -> Contents:
        """Return the contents of blocks: the same objects as long as none of them changes."""
        known = self.requests.state.blocks[:, c.NODE :].tobytes(), num_nodes_born
        if self._contents[0] != known:
            self._contents = known, self._make_contents(blocks)
        return self._contents[1]

    def _make_contents(self, blocks: list[list[int]]) -> Contents:
        carriers, cached = self.requests.state.carriers, {}
        places = [(block[c.NODE], block[c.GROUP]) for block in blocks]
        keys = {place: self.keys.key_in(*place) for place in {*places} if place[0] != c.NONE}
        for (node, group), key in keys.items():
            first = int(carriers[node, group, c.FIRST_BLOCK])
            cached[key] = tuple(_follow(blocks, first, c.NEXT_SAME, c.NONE))
        return tuple(map(keys.get, places)), cached

    def _list_requests(self) -> tuple[v.RequestSnapshot, ...]:
        """Return the requests by id: for each the same object as long as nothing of it changes."""
        s, found = self.requests.state, list[v.RequestSnapshot]()
        rows, holdings, tables = s.requests, s.holdings, s.block_tables
        is_wide = tables.shape[2] > WIDE
        updates, matchers, shown = self.sessions.updates, self.masks.matchers, self._shown
        for name, slot in sorted(self.requests.slot_of.items()):
            row, held, place = rows[slot], holdings[slot], rows[slot, c.BATCH_ROW]
            table = tables[:, place, : held[:, c.HELD].max()] if is_wide else tables[:, place]
            known: tuple[object, ...] = row.tobytes(), held.tobytes(), table.tobytes()
            if row[c.NUM_DRAFTS]:
                known += (s.drafts[place].tobytes(),)
            if name in updates:
                known += (len(updates[name]),)
            if name in matchers:
                known += (matchers[name].position.state, matchers[name].reasoning_ended)
            last = shown.get(slot)
            if last is None or last[0] != known:
                made = self._make_request(slot, updates.get(name), matchers.get(name))
                last = shown[slot] = known, made
            found.append(last[1])
        return tuple(found)

    def _make_request(
        self, slot: int, updates: Sized | None, matcher: Matcher | None
    ) -> v.RequestSnapshot:
        s, request = self.requests.state, self.requests.requests[slot]
        row = s.requests[slot].tolist()
        drafts: v.TokenIds = (v.DRAFT_PLACEHOLDER,) * row[c.NUM_DRAFTS]
        if drafts and not self.doors.config.async_scheduling:
            drafts = tuple(s.drafts[row[c.BATCH_ROW], : row[c.NUM_DRAFTS]].tolist())
        return v.RequestSnapshot(
            request_id=request.request_id,
            status=STATUSES[row[c.STATUS]],
            output_token_ids=tuple(get_tokens(s, slot)[row[c.NUM_PROMPT] :].tolist()),
            num_computed_tokens=row[c.NUM_COMPUTED],
            num_output_placeholders=row[c.NUM_PROMISED],
            spec_token_ids=drafts,
            is_prefill_chunk=row[c.IS_PREFILL] != 0,
            block_tables=self.requests.list_tables(slot, c.HELD),
            num_cached_blocks=tuple(s.holdings[slot, :, c.PUBLISHED].tolist()),
            num_cached_tokens=row[c.NUM_CACHED_TOKENS],
            num_preemptions=row[c.TIMES_PREEMPTED],
            grammar_ready=row[c.GRAMMAR_READY] != 0,
            grammar_state=0 if matcher is None else matcher.position.state,
            prompt_token_ids=() if updates is None else request.prompt_token_ids,
            num_streaming_updates=0 if updates is None else len(updates),
            reasoning_ended=matcher is not None and matcher.reasoning_ended,
        )


def _make_stats(scalars: list[int]) -> v.Stats:
    return v.Stats(
        prefix_cache_queries=scalars[c.QUERIES],
        prefix_cache_hits=scalars[c.HITS],
        preemptions=scalars[c.PREEMPTIONS],
        drafts_scheduled=scalars[c.DRAFTS_SCHEDULED],
        drafts_accepted=scalars[c.DRAFTS_ACCEPTED],
        external_prefix_cache_queries=scalars[c.EXTERNAL_QUERIES],
        external_prefix_cache_hits=scalars[c.EXTERNAL_HITS],
    )


def _follow(rows: list[list[int]], first: int, column: int, end: int) -> list[int]:
    """Return the items of a list that is linked by a column, from `first` on."""
    found: list[int] = []
    while first != end:
        found.append(first)
        first = rows[first][column]
    return found
