"""View: the engine's state as a snapshot, the same for every exact engine."""

from __future__ import annotations

from collections.abc import Iterable

from blockstep.impl.compiled.encodings import Encodings
from blockstep.impl.compiled.frames import Frame
from blockstep.impl.compiled.keys import Keys
from blockstep.impl.compiled.lives import get_tokens
from blockstep.impl.compiled.masks import Masks
from blockstep.impl.compiled.requests import Requests
from blockstep.impl.compiled.sessions import Sessions
from blockstep.impl.compiled.state import (
    DRAFTS_ACCEPTED,
    DRAFTS_SCHEDULED,
    EXTERNAL_HITS,
    EXTERNAL_QUERIES,
    FIRST_BLOCK,
    GRAMMAR_READY,
    GROUP,
    HELD,
    HITS,
    IS_CLOSED,
    IS_PREFILL,
    NEXT,
    NEXT_FREE,
    NEXT_SAME,
    NODE,
    NONE,
    NUM_CACHED_TOKENS,
    NUM_COMPUTED,
    NUM_DRAFTS,
    NUM_PROMISED,
    NUM_RUNNING,
    PREEMPTIONS,
    PUBLISHED,
    QUERIES,
    QUEUES,
    REF_COUNT,
    RUNNING,
    SEAT,
    SKIPPED,
    STATUS,
    TIMES_PREEMPTED,
    WAITING,
)
from blockstep.impl.compiled.transfers import Transfers
from blockstep.impl.compiled.turns import Turns
from blockstep.impl.doors import Doors
from blockstep.impl.names import STATUSES
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    NULL_BLOCK,
    PauseState,
    RequestId,
    RequestSnapshot,
    Snapshot,
    Stats,
    TokenIds,
)


class View:
    """Reads the state of one engine."""

    def __init__(
        self,
        doors: Doors[Frame],
        requests: Requests,
        keys: Keys,
        masks: Masks,
        sessions: Sessions,
    ) -> None:
        self.sessions = sessions
        self.encodings: Encodings | None = None
        self.turns: Turns | None = None
        self.transfers: Transfers | None = None
        self.doors = doors
        self.masks = masks
        self.requests = requests
        self.keys = keys

    def take(self, previous_names: Iterable[RequestId]) -> Snapshot:
        """Return the canonical state: nodes become structural keys, slots become request ids.

        `previous_names`: the requests of the last plan's rows.
        """
        doors = self.doors
        s = self.requests.state
        blocks = s.blocks.tolist()
        return Snapshot(
            pause_state=doors.pause_state,
            waiting=self._queue(WAITING),
            skipped_waiting=self._queue(SKIPPED),
            running=tuple(
                self.requests.names[s.lines[: s.scalars[NUM_RUNNING], RUNNING]].tolist(),
            ),
            requests=tuple(
                self._request(slot) for _, slot in sorted(self.requests.slot_of.items())
            ),
            ref_counts=tuple(block[REF_COUNT] for block in blocks),
            free_queue=tuple(_follow(blocks, blocks[NULL_BLOCK][NEXT_FREE], NEXT_FREE, NULL_BLOCK)),
            block_keys=tuple(
                None if block[NODE] == NONE else self.keys.key_in(block[NODE], block[GROUP])
                for block in blocks
            ),
            cached={
                self.keys.key_in(node, group): tuple(
                    _follow(blocks, int(s.carriers[node, group, FIRST_BLOCK]), NEXT_SAME, NONE)
                )
                for node, group in {
                    (block[NODE], block[GROUP]) for block in blocks if block[NODE] != NONE
                }
            },
            frames_in_flight=tuple(doors.frames),
            next_frame_id=doors.next_frame_id,
            finished_req_ids=tuple(sorted(doors.finished_req_ids)),
            prev_scheduled_req_ids=tuple(sorted(previous_names)),
            stats=self.stats(),
            encoder=None if self.encodings is None else self.encodings.cache.snapshot(),
            transfers=None if self.transfers is None else self.transfers.snapshot(),
            pins=None if self.turns is None else self.turns.pins.snapshot(),
            admission_closed=bool(s.scalars[IS_CLOSED]),
            has_work=self.has_work(),
        )

    def has_work(self) -> bool:
        """Whether planning again may do anything before the next event."""
        doors = self.doors
        num_ready = {
            PauseState.UNPAUSED: len(self.requests.slot_of) - self.sessions.count_resting(),
            PauseState.PAUSED_NEW: int(self.requests.state.scalars[NUM_RUNNING]),
            PauseState.PAUSED_ALL: 0,
        }[doors.pause_state]
        awaits = self.transfers is not None and self.transfers.awaits_any()
        return bool(doors.finished_req_ids) or num_ready > 0 or awaits

    def stats(self) -> Stats:
        """Return the counters since the start (P21)."""
        scalars = self.requests.state.scalars.tolist()
        return Stats(
            prefix_cache_queries=scalars[QUERIES],
            prefix_cache_hits=scalars[HITS],
            preemptions=scalars[PREEMPTIONS],
            drafts_scheduled=scalars[DRAFTS_SCHEDULED],
            drafts_accepted=scalars[DRAFTS_ACCEPTED],
            external_prefix_cache_queries=scalars[EXTERNAL_QUERIES],
            external_prefix_cache_hits=scalars[EXTERNAL_HITS],
        )

    def _queue(self, queue: int) -> tuple[RequestId, ...]:
        requests = self.requests
        found: list[RequestId] = []
        slot = int(requests.state.scalars[QUEUES + 2 * queue])
        while slot != NONE:
            found.append(requests.names[slot])
            slot = int(requests.state.requests[slot, NEXT])
        return tuple(found)

    def _request(self, slot: int) -> RequestSnapshot:
        requests = self.requests
        s, request = requests.state, requests.requests[slot]
        row = s.requests[slot].tolist()
        tokens = get_tokens(s, slot)
        drafts: TokenIds = (DRAFT_PLACEHOLDER,) * row[NUM_DRAFTS]
        if drafts and not self.doors.config.async_scheduling:
            drafts = tuple(s.drafts[row[SEAT], : row[NUM_DRAFTS]].tolist())
        updates = self.sessions.updates.get(request.request_id)
        matcher = self.masks.matchers.get(request.request_id)
        return RequestSnapshot(
            request_id=request.request_id,
            status=STATUSES[row[STATUS]],
            output_token_ids=tuple(tokens[len(request.prompt_token_ids) :].tolist()),
            num_computed_tokens=row[NUM_COMPUTED],
            num_output_placeholders=row[NUM_PROMISED],
            spec_token_ids=drafts,
            is_prefill_chunk=bool(row[IS_PREFILL]),
            block_tables=requests.list_tables(slot, HELD),
            num_cached_blocks=tuple(s.holdings[slot, :, PUBLISHED].tolist()),
            num_cached_tokens=row[NUM_CACHED_TOKENS],
            num_preemptions=row[TIMES_PREEMPTED],
            grammar_ready=bool(row[GRAMMAR_READY]),
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
