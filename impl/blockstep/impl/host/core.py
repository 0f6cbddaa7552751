"""The core: the state of the host engine, and what several of its phases do to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import ClassVar

from blockstep.impl.capabilities import HOST, list_config_problems
from blockstep.impl.host.digests import Digest, find_digest
from blockstep.impl.host.encoder import EncoderCache
from blockstep.impl.host.grammars import Matcher
from blockstep.impl.host.groups import GroupMemory
from blockstep.impl.host.pins import Pins
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.impl.host.queues import make_queue
from blockstep.impl.host.table import RequestTable, Session
from blockstep.impl.host.telling import EventLog
from blockstep.impl.host.transfers import Transfers
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
    """What all phases share. Requests are named by their slot in `table`.

    Raises:
        ConfigError: `list_config_problems` has something against the config.
        ValueError: no digest has the name given.
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
        """Tokens of one request per step, at most."""
        self.async_scheduling = config.async_scheduling
        num_placeholders = config.num_speculative_tokens if self.async_scheduling else 0
        self.draft_placeholders: TokenIds = (DRAFT_PLACEHOLDER,) * num_placeholders
        """The drafts of a request whose last row samples: only the worker knows which. Empty
        without asynchronous scheduling, where an event hands drafts in."""
        self.prefix = self.prefix_type(config.num_blocks, verify=not self.digest.cryptographic)
        self.log = self.log_type(config.block_size) if config.enable_kv_cache_events else None
        """What is to be told of the prefix map; None where nobody is told."""
        self.prefix.log = self.log
        is_lifo = config.pool_order is PoolOrder.LIFO
        self.pool = self.pool_type(config.num_blocks, self.prefix, is_lifo)
        self.transfers = self.transfers_type() if config.kv_connector else None
        """What is under way to and from a store; None without one."""
        has_groups = bool(config.groups) or config.kv_connector or config.enable_forks
        self.groups = self.groups_type(config, self.pool, self.prefix) if has_groups else None
        """Their memory, where a config names groups, has a store or forks; None for the one that
        there is without."""
        self.encoder = self.encoder_type(config) if config.encoder_cache_size else None
        """What is kept of encoded items; None where no encoder is modelled."""
        self.pins = self.pins_type() if config.has_pins else None
        """What is kept between turns of jobs; None where nothing is."""
        self.table = RequestTable(len(config.kv_groups))
        self._no_new_blocks: BlockTables = ((),) * self.table.num_groups
        self._nothing_common = (0,) * self.table.num_groups
        self._common: dict[int, tuple[tuple[int, int], int]] = {}
        """By group: leading blocks in the tables of all who run, and as of when: so many running,
        and moves of the pool."""
        self.waiting = make_queue(config.policy, self.table.rank_of)
        self.skipped_waiting = make_queue(config.policy, self.table.rank_of)
        self.running: list[int] = []
        """Slots in running order."""
        self.pause_state = PauseState.UNPAUSED
        self.is_closed = False
        """Whether nobody is admitted until so many blocks are free again."""
        self.frames: dict[FrameId, dict[RequestId, TokenIds | None]] = {}
        """Frames in flight, oldest first. Of each row, in order of scheduling: the drafts that it
        carries, or None where it does not sample. Rows of ended requests stay."""
        self.sessions: dict[RequestId, Session] = {}
        """Of each unfinished request that is resumable, what is to come."""
        self.dropped: dict[FrameId, dict[RequestId, TokenIds]] = {}
        """Of frames in flight, rows that sample behind the stop of a session: their drafts. In the
        frame such a row stands as one that does not sample."""
        self.last_frame_of_ended: dict[RequestId, FrameId] = {}
        """Of ended requests that frames in flight name: the last of these frames."""
        self.next_frame_id: FrameId = 0
        self.matchers: dict[RequestId, Matcher] = {}
        """Of each unfinished request with a grammar, where that stands."""
        self.verifiable: dict[FrameId, dict[RequestId, TokenIds]] = {}
        """Of frames in flight whose mask was made: the drafts that placeholders turned out to stand
        for, as far as grammars accept them. Nothing else is verified (P23)."""
        self.finished_req_ids: set[RequestId] = set()
        self.prev_frame_id: FrameId = -1
        """The last plan; -1 before the first."""
        self.prev_scheduled_req_ids: Collection[RequestId] = ()
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.preemptions = 0
        self.drafts_scheduled = 0
        self.drafts_accepted = 0

    def stats(self) -> Stats:
        """The counters since the start (P21)."""
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
        """Whether planning again may do anything before the next event; else the loop may sleep."""
        if self.finished_req_ids:
            return True
        awaits = self.transfers is not None and self.transfers.awaits_any()
        return awaits or self._has_runnable()

    def _has_runnable(self) -> bool:
        """Whether there is a request that a plan may schedule, as the pause has it."""
        if self.pause_state is not PauseState.UNPAUSED:
            return self.pause_state is PauseState.PAUSED_NEW and bool(self.running)
        statuses = self.table.statuses
        return any(
            statuses[slot] is not Status.WAITING_FOR_STREAMING_REQ
            for slot in self.table.slot_of.values()
        )

    def is_in_flight(self, request_id: RequestId) -> bool:
        """Whether a frame in flight has a row of this id, which no unfinished request has."""
        return request_id in self.last_frame_of_ended

    def _publish(self, slot: int, num_computed: int, num_scheduled: int) -> None:
        """Make findable what this step fills: full blocks of verified tokens, drafts excluded.

            computed | scheduled: known ... | drafts
            --- published up to here ---^  (rounded down to a block)

        The KV is written later in the same dispatch, before anybody can read it (P4).
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
        """Whether it stands on KV that may not come: none of it is for others to find (P19)."""
        return (
            self.transfers is not None
            and self.table.requests[slot].request_id in self.transfers.unsettled
        )

    def _tell(self) -> tuple[KVEvent, ...]:
        """What has become of the prefix map since it was told last; nothing where nobody asks."""
        return () if self.log is None else self.log.take()

    def _preempt(self, slot: int) -> None:
        """Take everything from a request that has left `running`; it will start again.

        Its verified tokens stay, and with them its place in line: it goes first among those who
        wait (seed 001, "Preemption"). So do the outputs that frames in flight have promised:
        those frames go on, and what they sample is delivered (P13).
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
        """Unpublish what was published for work of this step that now does not run.

        P4; upstream #43569, where such a block stays findable without its KV.
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
        """Who holds blocks and does not run, in the order in which they give them up: sessions that
        rest before those that have input, branches and those whose load has come, and whoever is
        taken last before the others. Nobody takes the blocks of a load that is under way (P17).

        `passed_over`: who stands in no queue now, for others are tried before them.
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
        """Whether one that does not run holds blocks that can be taken from it."""
        if self.table.statuses[slot] is Status.WAITING_FOR_REMOTE_KVS:
            return self._has_received(slot)
        return self.table.num_computed[slot] > 0

    def _has_received(self, slot: int) -> bool:
        """Whether the load of a parked request has come to its end."""
        return (
            self.transfers is not None
            and self.table.requests[slot].request_id in self.transfers.received
        )

    def _count_kept_free(self) -> int:
        """Free blocks that an admission leaves for those that run, if anybody does."""
        return self.config.watermark_blocks if self.running else 0

    def _take_back_one(self, needy: int, passed_over: Sequence[int] = ()) -> bool:
        """Blocks are given up by a pin, or else by one that does not run, and is not this one;
        False if none can, or the first that can has a row in flight: then its turn is later."""
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
        """One that does not run gives its blocks up, and computes them again later."""
        self._free_blocks(slot)
        self.table.num_computed[slot] = 0
        if self.table.statuses[slot] is Status.WAITING_FOR_REMOTE_KVS:
            self._unpark(slot)

    def _unpark(self, slot: int) -> None:
        """A request whose load has come waits as it did before."""
        if self.transfers is not None:
            request_id = self.table.requests[slot].request_id
            self.table.statuses[slot] = self.transfers.unpark(request_id)

    def _find_fence(self, slot: int) -> FrameId | None:
        """The frame in flight whose answer the blocks of a request wait for before they are free;
        None if they are free at once.

        Rows of later plans run behind that frame, but a store does not: it could load into the
        blocks while the frame reads or writes them (P17; upstream #45357, #48481).
        """
        return self._get_fence(self.table.last_frame[slot])

    def _get_fence(self, last_frame: FrameId) -> FrameId | None:
        """The last frame that names a request, if it is in flight, and a store may load before it
        is answered: while it is the only one nothing is planned."""
        if self.transfers is None or self.config.max_frames_in_flight == 1:
            return None
        return last_frame if last_frame > self.transfers.last_answered else None

    def _free_behind(self, fence: FrameId | None) -> Callable[[Sequence[BlockId]], None]:
        """What frees blocks, or defers that to the answer to a frame."""
        if fence is None or self.transfers is None:
            return self.pool.free
        return partial(self.transfers.defer, fence)

    def _free_deferred(self, transfers: Transfers, frame_id: FrameId) -> None:
        """A frame is answered: it reads and writes no block any more."""
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
        """What they held is free, but for what somebody else holds; it can still be found."""
        if self.pins is None:
            return
        for job_id in job_ids:
            for table in self.pins.end(job_id):
                self.pool.free([block for block in table if block != NULL_BLOCK])

    def _is_warm(self, slot: int) -> bool:
        """Whether blocks of its job's turn before are kept."""
        return self.pins is not None and self.pins.is_warm(self.table.requests[slot].job_id)

    def _finish(self, slot: int) -> None:
        """End an unfinished request, wherever it is; the next plan tells the worker."""
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
        """Whether a transfer holds the blocks of one who ends: they are that one's now (P17)."""
        table = self.table
        return transfers.end(table.requests[slot].request_id, table.block_tables(slot))

    def _close_frame(self, frame_id: FrameId) -> None:
        """It is committed, and names nobody any more."""
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
