"""The core: the state of the host engine, and the changes that several of its phases make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import ClassVar

from blockstep.impl.capabilities import HOST, list_config_problems
from blockstep.impl.digests import Digest, find_digest
from blockstep.impl.encoder import EncoderCache
from blockstep.impl.grammars import Matcher
from blockstep.impl.host.groups import GroupMemory
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.impl.host.queues import make_queue
from blockstep.impl.host.table import RequestTable, Session
from blockstep.impl.host.telling import EventLog
from blockstep.impl.host.transfers import Transfers
from blockstep.impl.pins import Pins
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    NULL_BLOCK,
    BlockId,
    BlockTables,
    Config,
    ConfigError,
    FrameId,
    KVEvent,
    PauseState,
    Policy,
    PoolOrder,
    RequestId,
    Stats,
    Status,
    TokenIds,
)


class Core:
    """The state and methods that all phases share. They name a request by its slot in `table`.

    Raises:
        ConfigError: `list_config_problems` finds a problem in the config.
        ValueError: no digest has this name.
    """

    pool_type: ClassVar[type[BlockPool]] = BlockPool
    prefix_type: ClassVar[type[PrefixMap]] = PrefixMap
    groups_type: ClassVar[type[GroupMemory]] = GroupMemory
    encoder_type: ClassVar[type[EncoderCache]] = EncoderCache
    log_type: ClassVar[type[EventLog]] = EventLog
    transfers_type: ClassVar[type[Transfers]] = Transfers
    pins_type: ClassVar[type[Pins]] = Pins

    def __init__(self, config: Config, digest: str | Digest = "sha256") -> None:
        problems = list_config_problems(config, HOST)
        if problems:
            raise ConfigError(problems)
        self.config = config
        self.digest = find_digest(digest)
        self.block_size = config.block_size
        self.max_model_len = config.max_model_len
        self.num_lookahead_tokens = config.num_lookahead_tokens
        self.max_tokens_per_row = config.long_prefill_token_threshold or config.max_model_len
        """The most tokens that one row may have."""
        self.async_scheduling = config.async_scheduling
        num_placeholders = config.num_speculative_tokens if self.async_scheduling else 0
        self.draft_placeholders: TokenIds = (DRAFT_PLACEHOLDER,) * num_placeholders
        """The drafts of a request whose last row samples: placeholders, as only the worker knows
        the drafts. Empty without asynchronous scheduling, where an event sets the drafts."""
        self.prefix = self.prefix_type(config.num_blocks, verify=not self.digest.cryptographic)
        self.log = self.log_type(config.block_size) if config.enable_kv_cache_events else None
        """The KV events to be returned next; None if the config has no KV events."""
        self.prefix.log = self.log
        is_lifo = config.pool_order is PoolOrder.LIFO
        self.pool = self.pool_type(config.num_blocks, self.prefix, is_lifo)
        self.transfers = self.transfers_type(config.has_states) if config.kv_connector else None
        """The transfers with a store; None without one."""
        has_groups = bool(config.groups) or config.kv_connector or config.enable_forks
        self.groups = self.groups_type(config, self.pool, self.prefix) if has_groups else None
        """The block tables of all groups; None if the config has neither groups nor a store nor
        forks, and so one table per request."""
        self.encoder = self.encoder_type(config) if config.encoder_cache_size else None
        """The cache of encoder outputs; None if the config models no encoder."""
        self.pins = self.pins_type() if config.has_pins else None
        """The blocks pinned between the turns of jobs; None if the config has no pins."""
        self.table = RequestTable(len(config.kv_groups))
        self._no_new_blocks: BlockTables = ((),) * self.table.num_groups
        self._nothing_common = (0,) * self.table.num_groups
        self._common: dict[int, tuple[tuple[int, int], int]] = {}
        """For each group, the number of leading blocks that all running requests share, and what it
        was computed for: the number of running requests, and the number of moves of the pool."""
        self.waiting = make_queue(config.policy, self.table.rank_of)
        self.skipped_waiting = make_queue(config.policy, self.table.rank_of)
        self.running: list[int] = []
        """Slots in running order."""
        self.pause_state = PauseState.UNPAUSED
        self.is_closed = False
        """Whether admission is closed until enough blocks are free again."""
        self.frames: dict[FrameId, dict[RequestId, TokenIds | None]] = {}
        """Frames in flight, oldest first. For each row, in the order of scheduling: its drafts, or
        None if it does not sample. Rows of finished requests stay."""
        self.sessions: dict[RequestId, Session] = {}
        """For each unfinished session, the inputs that follow."""
        self.dropped: dict[FrameId, dict[RequestId, TokenIds]] = {}
        """For frames in flight, the drafts of rows that sample after the stop of a session. In
        `frames` such a row counts as one that does not sample."""
        self.last_frame_of_ended: dict[RequestId, FrameId] = {}
        """The last frame with a row of each finished request that has rows in flight."""
        self.next_frame_id: FrameId = 0
        self.matchers: dict[RequestId, Matcher] = {}
        """For each unfinished request with a grammar, the position in the grammar."""
        self.verifiable: dict[FrameId, dict[RequestId, TokenIds]] = {}
        """The real drafts of each row, cut at the first that the grammar forbids, of each frame in
        flight whose bitmask was made. No other drafts are verified (P23)."""
        self.finished_req_ids: set[RequestId] = set()
        self.prev_frame_id: FrameId = -1
        """The frame of the last plan; -1 before the first."""
        self.prev_scheduled_req_ids: Collection[RequestId] = ()
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.preemptions = 0
        self.drafts_scheduled = 0
        self.drafts_accepted = 0

    def stats(self) -> Stats:
        """Return the counters since the start (P21)."""
        return Stats(
            self.prefix_cache_queries,
            self.prefix_cache_hits,
            self.preemptions,
            self.drafts_scheduled,
            self.drafts_accepted,
            0 if self.transfers is None else self.transfers.queries,
            0 if self.transfers is None else self.transfers.hits,
        )

    def has_work(self) -> bool:
        """Return whether a Schedule may do anything before the next event; else the loop may
        sleep."""
        if self.finished_req_ids:
            return True
        awaits = self.transfers is not None and self.transfers.awaits_any()
        return awaits or self._has_runnable()

    def _has_runnable(self) -> bool:
        """Return whether some request may be scheduled under the current pause state."""
        if self.pause_state is not PauseState.UNPAUSED:
            return self.pause_state is PauseState.PAUSED_NEW and bool(self.running)
        statuses = self.table.statuses
        return any(
            statuses[slot] is not Status.WAITING_FOR_STREAMING_REQ
            for slot in self.table.slot_of.values()
        )

    def is_in_flight(self, request_id: RequestId) -> bool:
        """Return whether a finished request of this id still has a row in flight."""
        return request_id in self.last_frame_of_ended

    def _publish(self, slot: int, num_computed: int, num_scheduled: int) -> None:
        """Publish the blocks that this step fills with verified tokens, drafts excluded.

            computed | scheduled: known ... | drafts
            --- published up to here ---^  (rounded down to a block)

        The KV is written later in the same step, before any row can read it (P4).
        """
        table = self.table
        written = num_computed + num_scheduled
        known = table.num_known[slot]
        if written > known:
            written = known
        if self.groups is not None:
            if self.config.enable_prefix_caching and not self._is_unsettled(slot):
                holdings, lineage = table.holdings[slot], table.lineages[slot]
                self.groups.publish(holdings, lineage, num_computed, written)
            return
        full = written // self.block_size
        for holding in table.holdings[slot]:
            if full > holding.num_cached and self.config.enable_prefix_caching:
                lineage, fresh = table.lineages[slot], range(holding.num_cached, full)
                for index in fresh:
                    self.prefix.publish(holding.blocks[index], lineage, index)
                if self.prefix.log is not None:
                    self.prefix.log.stored(lineage, fresh)
                holding.num_cached = full

    def _is_unsettled(self, slot: int) -> bool:
        """Return whether its KV depends on an unconfirmed load: then no block is published
        (P19)."""
        return (
            self.transfers is not None
            and self.table.requests[slot].request_id in self.transfers.unsettled
        )

    def _tell(self) -> tuple[KVEvent, ...]:
        """Return the KV events since the last call; none if the config has no KV events."""
        return () if self.log is None else self.log.take()

    def _preempt(self, slot: int) -> None:
        """Take all blocks from a request that has left `running`; it will start again.

        Its verified tokens stay, and it is first among the waiting requests (seed 001,
        "Preemption"). The output placeholders of its rows in flight stay, too: these frames still
        run, and their tokens are delivered (P13).
        """
        table = self.table
        self._withdraw_unwritten(slot)
        self._free_blocks(slot)
        if self.transfers is not None:
            self.transfers.unsettled.pop(table.requests[slot].request_id, None)
        if self.encoder is not None:
            self.encoder.drop(table.requests[slot])
        table.num_computed[slot] = 0
        table.spec_token_ids[slot] = ()
        table.num_preemptions[slot] += 1
        table.statuses[slot] = Status.PREEMPTED
        self.preemptions += 1
        self._requeue_preempted(slot)

    def _withdraw_unwritten(self, slot: int) -> None:
        """Unpublish the blocks that a removed row of this step would have filled.

        P4; upstream #43569, where such a block can be hit without its KV.
        """
        table = self.table
        if self.groups is not None:
            self.groups.withdraw(table.holdings[slot], table.num_computed[slot])
            return
        first = table.num_computed[slot] // self.block_size
        for holding in table.holdings[slot]:
            for block in holding.blocks[first:]:
                self.prefix.withdraw(block)

    def _requeue_preempted(self, slot: int) -> None:
        self.waiting.prepend((slot,))

    def _list_idle(self, passed_over: Sequence[int] = ()) -> list[int]:
        """Return the requests that hold blocks and do not run, in the order in which they give them
        up: idle sessions before requests that have work (sessions with input, branches, and those
        whose load has finished), and the last in the queue before the others. A load that has not
        finished keeps its blocks (P17).

        `passed_over`: requests that are out of their queue in this step, as others are tried first.
        """
        has_loaded = self.transfers is not None and bool(self.transfers.received)
        if not (self.sessions or has_loaded or self.config.enable_forks):
            return []
        line = [*passed_over, *self.skipped_waiting, *self.waiting]
        if self.config.policy is Policy.PRIORITY:
            line.sort(key=self.table.rank_of)
        idle = [slot for slot in reversed(line) if self._may_give(slot)]
        resting = Status.WAITING_FOR_STREAMING_REQ
        idle.sort(key=lambda slot: self.table.statuses[slot] is not resting)
        return idle

    def _may_give(self, slot: int) -> bool:
        """Return whether a request that does not run holds blocks that can be taken from it."""
        if self.table.statuses[slot] is Status.WAITING_FOR_REMOTE_KVS:
            return self._has_received(slot)
        return self.table.num_computed[slot] > 0

    def _has_received(self, slot: int) -> bool:
        """Return whether the load that a request waits for has finished."""
        return (
            self.transfers is not None
            and self.table.requests[slot].request_id in self.transfers.received
        )

    def _count_kept_free(self) -> int:
        """Return the number of free blocks that an admission must leave while any request runs."""
        return self.config.watermark_blocks if self.running else 0

    def _take_back_one(self, needy: int, passed_over: Sequence[int] = ()) -> bool:
        """Free the blocks of a pin, or else of a request other than `needy` that does not run.

        Returns False if there is none, or if the first has a row in flight: then its blocks are not
        free at once.
        """
        if self.pins is not None:
            giver = self.pins.find_giver(self.table.requests[needy].job_id)
            if giver is not None:
                self._end_pins([giver])
                return True
        idle = [slot for slot in self._list_idle(passed_over) if slot != needy]
        if not idle or self._find_fence(idle[0]) is not None:
            return False
        self._take_back(idle[0])
        return True

    def _take_back(self, slot: int) -> None:
        """Take the blocks from a request that does not run; it computes their tokens again
        later."""
        self._free_blocks(slot)
        self.table.num_computed[slot] = 0
        if self.table.statuses[slot] is Status.WAITING_FOR_REMOTE_KVS:
            self._unpark(slot)

    def _unpark(self, slot: int) -> None:
        """Give a request whose load has finished the waiting status that it had before."""
        if self.transfers is not None:
            request_id = self.table.requests[slot].request_id
            self.table.statuses[slot] = self.transfers.unpark(request_id)

    def _find_fence(self, slot: int) -> FrameId | None:
        """Return the frame in flight that must be committed before the request's blocks are free;
        None if they are free at once.

        A later frame runs after that one, but a store does not: it could load into the blocks while
        the frame reads or writes them (P17; upstream #45357, #48481).
        """
        return self._get_fence(self.table.last_frame[slot])

    def _get_fence(self, last_frame: FrameId) -> FrameId | None:
        """Return the frame if it is in flight and a store may load before it is committed, else
        None.

        With one frame in flight at most, no load starts before the commit.
        """
        if self.transfers is None or self.config.max_frames_in_flight == 1:
            return None
        return last_frame if last_frame > self.transfers.last_answered else None

    def _free_behind(self, fence: FrameId | None) -> Callable[[Sequence[BlockId]], None]:
        """Return the function that frees blocks now, or after the commit of a frame."""
        if fence is None or self.transfers is None:
            return self.pool.free
        return partial(self.transfers.defer, fence)

    def _free_deferred(self, transfers: Transfers, frame_id: FrameId) -> None:
        """Free the blocks that waited for a frame: it is committed and accesses no block any
        more."""
        transfers.last_answered = frame_id
        for blocks in transfers.take_deferred(frame_id):
            self.pool.free(blocks)

    def _free_blocks(self, slot: int) -> None:
        if self.groups is not None:
            fence = self._find_fence(slot)
            if fence is None:
                self.groups.free(self.table.holdings[slot])
            else:
                self._free_behind(fence)(self.groups.clear(self.table.holdings[slot]))
            return
        for holding in self.table.holdings[slot]:
            self.pool.free(holding.blocks)
            holding.clear()

    def _end_pins(self, job_ids: Iterable[str]) -> None:
        """End the pins of these jobs.

        Their blocks become free unless held otherwise, and can still be hit.
        """
        if self.pins is None:
            return
        for job_id in job_ids:
            for table in self.pins.end(job_id):
                self.pool.free([block for block in table if block != NULL_BLOCK])

    def _is_warm(self, slot: int) -> bool:
        """Return whether blocks of the job's previous turn are pinned."""
        return self.pins is not None and self.pins.is_warm(self.table.requests[slot].job_id)

    def _finish(self, slot: int) -> None:
        """Finish an unfinished request in any status; the next plan reports it to the worker."""
        table = self.table
        if table.statuses[slot] is Status.RUNNING:
            self.running.remove(slot)
        elif not self.waiting.remove(slot):
            self.skipped_waiting.remove(slot)
        if self.transfers is None or not self._leave_held(self.transfers, slot):
            self._free_blocks(slot)
        if self.encoder is not None:
            self.encoder.drop(table.requests[slot])
        request_id = table.requests[slot].request_id
        self.finished_req_ids.add(request_id)
        if table.last_frame[slot] in self.frames:
            self.last_frame_of_ended[request_id] = table.last_frame[slot]
        if self.matchers:
            self.matchers.pop(request_id, None)
        if self.sessions:
            self.sessions.pop(request_id, None)
        if self.pins is not None:
            self.pins.end_turn(table.requests[slot].job_id)
        table.remove(slot)

    def _leave_held(self, transfers: Transfers, slot: int) -> bool:
        """Return whether a transfer still uses the blocks of a finished request, and so holds them
        (P17)."""
        table = self.table
        return transfers.end(table.requests[slot].request_id, table.block_tables(slot))

    def _close_frame(self, frame_id: FrameId) -> None:
        """Remove a committed frame, and all that is kept for it."""
        del self.frames[frame_id]
        if self.transfers is not None:
            self.transfers.loads.pop(frame_id, None)
        if self.verifiable:
            self.verifiable.pop(frame_id, None)
        if self.dropped:
            self.dropped.pop(frame_id, None)
        if self.last_frame_of_ended:
            self.last_frame_of_ended = {
                name: last for name, last in self.last_frame_of_ended.items() if last != frame_id
            }
