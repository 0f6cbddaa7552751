"""Scheduler: the requests, tokens and blocks of each step."""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.spec.vocabulary import (
    BlockCopy,
    BlockId,
    Config,
    KVLoad,
    KVSave,
    PauseState,
    Policy,
    Stats,
    Status,
)
from plain_engine.pins import Pins
from plain_engine.pool import Pool
from plain_engine.store import Store
from plain_engine.tables import Tables
from plain_engine.text import Text


@dataclass(eq=False)
class Row:
    """A request in one step: `count` tokens from `start` on."""

    text: Text
    start: int
    count: int
    new_blocks: list[BlockId]
    copies: list[BlockCopy]
    settled_before: int
    load: KVLoad | None = None
    """The load that it needs before it runs."""
    is_new: bool = False
    resumed: bool = False

    @property
    def samples(self) -> bool:
        """Whether it computes all known tokens (valid before its commit)."""
        return self.start + self.count == self.text.known


class Scheduler:
    """Queues, pool, and the step."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pool = Pool(config)
        self.tables = Tables(config, self.pool)
        self.pins = Pins(self.pool)
        self.store = Store(self.pool)
        self.waiting: list[Text] = []
        self.skipped: list[Text] = []
        self.running: list[Text] = []
        self.pause = PauseState.UNPAUSED
        self.is_closed = False
        """Whether admission is closed until enough blocks are free."""
        self.queries = self.hits = self.preemptions = 0
        self.external_queries = self.external_hits = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.rows: list[Row] = []
        self.preempted: list[Text] = []
        self.loads: list[KVLoad] = []
        self.saves: list[KVSave] = []
        self.budget = self.config.max_num_batched_tokens
        self.pins.end_all(until=self.pins.now)
        self.warm = set(self.pins.of)
        """Jobs with a pin when the step begins."""
        if self.warm:
            self.waiting.sort(key=self.rank_of_return)

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return Stats(
            self.queries,
            self.hits,
            self.preemptions,
            external_prefix_cache_queries=self.external_queries,
            external_prefix_cache_hits=self.external_hits,
        )

    # Queues.

    def put(self, queue: list[Text], text: Text, at_front: bool = False) -> None:
        """Insert a request at an end of a queue; under PRIORITY, by its rank."""
        queue.insert(0 if at_front else len(queue), text)
        if self.config.policy is Policy.PRIORITY:
            queue.sort(key=lambda one: one.rank)

    def rank_of_return(self, text: Text) -> int:
        """Return the rank of a waiting request: preempted, then jobs with a pin, then others."""
        return 0 if text.status is Status.PREEMPTED else 2 - self.is_warm(text)

    def is_warm(self, text: Text) -> bool:
        """Whether its job has a pin."""
        return text.request.job_id in self.warm

    def add(self, text: Text) -> None:
        """Add a new request to its queue."""
        if text.request.structured_output:
            text.status = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self.put(self.skipped, text)
        else:
            self.put(self.waiting, text)

    def line(self) -> list[Text]:
        """Return the waiting requests, in the order in which they are tried."""
        both = self.skipped + self.waiting
        if self.config.policy is Policy.PRIORITY:
            both.sort(key=lambda one: one.rank)
        return both

    def drop(self, text: Text) -> None:
        """Remove a finished request."""
        for queue in (self.running, self.waiting, self.skipped):
            if text in queue:
                queue.remove(text)
        self.store.hold(text)
        self.store.forget(text)
        self.give_up(text)

    def give_up(self, text: Text) -> None:
        """Release a request's blocks: it has computed nothing then, and has no load."""
        self.pool.release(text.table)
        text.table, text.settled, text.computed, text.load = [], 0, 0, None
        if text in self.store.received:
            self.store.received.remove(text)
            text.status = Status.PREEMPTED if text.num_preemptions else Status.WAITING

    def preempt(self, text: Text) -> None:
        """Move a running request to the front of the waiting queue, without its blocks."""
        self.running.remove(text)
        self.give_up(text)
        text.status = Status.PREEMPTED
        text.num_preemptions += 1
        self.preemptions += 1
        self.put(self.waiting, text, at_front=True)

    # A step.

    def step(self) -> None:
        """Plan a step; results are in `rows`, `preempted`, `loads` and `saves`."""
        self.begin()
        if self.pause is not PauseState.PAUSED_ALL:
            self.run_on()
        self.is_closed = self.must_close()
        if self.pause is PauseState.UNPAUSED and not (self.preempted or self.is_closed):
            self.admit_all()
        for row in self.rows:
            row.text.computed = row.start + row.count
            row.text.is_prefill_chunk = not row.samples

    def run_on(self) -> None:
        """Schedule running requests in order, as long as there is budget."""
        for text in list(self.running):
            if text not in self.running:
                continue
            if not self.budget:
                return
            count = self.cap(text.known - text.computed)
            if not self.make_room(text, count):
                return
            self.give_row(text, min(count, self.budget))

    def cap(self, count: int) -> int:
        """Limit the tokens of one request by threshold and budget."""
        threshold = self.config.long_prefill_token_threshold
        return min(count, threshold or count, self.budget)

    def make_room(self, text: Text, count: int) -> bool:
        """Preempt other requests, the last first; return False if `text` was preempted itself."""
        while self.tables.lacks(text, text.computed + count, []) > len(self.pool.free):
            if self.running == [text] and self.let_give_way(text):
                continue
            victim = self.choose_victim()
            self.take_back(victim)
            self.save(victim)
            self.preempt(victim)
            self.preempted.append(victim)
            if victim is text:
                return False
        return True

    def choose_victim(self) -> Text:
        """Return the last running request; of a job with a pin only if all are."""
        if self.config.policy is Policy.PRIORITY:
            return max(self.running, key=lambda text: text.rank)
        cold = [text for text in self.running if not self.is_warm(text)]
        return (cold or self.running)[-1]

    def let_give_way(self, text: Text) -> bool:
        """Reclaim blocks: end a pin, or release those of the last waiting request that has some.

        Returns False if there is neither.
        """
        if self.pins.let_give_way(text):
            return True
        for other in reversed(self.line()):
            if other is not text and other.table and not self.store.is_loading(other):
                self.give_up(other)
                return True
        return False

    def take_back(self, text: Text) -> None:
        """Withdraw its row from this step, if it has one, and the keys of blocks not written."""
        for row in self.rows:
            if row.text is text:
                self.rows.remove(row)
                self.budget += row.count
                for block in text.table[row.settled_before : text.settled]:
                    self.pool.withdraw(block)
                return

    def save(self, text: Text) -> None:
        """Add a swap-out of its full blocks, which it is about to lose, if it pays."""
        count = text.computed // self.config.block_size
        num_tokens = count * self.config.block_size
        if 0 < self.config.swap_min_tokens <= num_tokens:
            self.saves.append(KVSave(text.name, (tuple(text.table[:count]),), num_tokens))

    def must_close(self) -> bool:
        """Whether admission closes or stays closed; it is open if no request runs."""
        low, high = self.config.admission_low_blocks, self.config.admission_high_blocks
        if not (high and self.running):
            return False
        return bool(self.preempted) or len(self.pool.free) < (high if self.is_closed else low)

    def admit_all(self) -> None:
        """Admit waiting requests, as long as there are running slots, budget and blocks.

        After one that does not fit, only requests with a finished load are tried: they have blocks
        already.
        """
        is_full = False
        for text in self.line():
            if not self.budget or len(self.running) == self.config.max_num_seqs:
                return
            if is_full and text not in self.store.received:
                continue
            if not self.is_ready(text):
                self.pass_over(text)
            elif not self.admit(text):
                is_full = True

    def is_ready(self, text: Text) -> bool:
        """Whether the request waits for neither a grammar nor a store."""
        if text.status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            if not text.grammar_ready:
                return False
            text.status = Status.WAITING
        if self.store.is_loading(text):
            return False
        return text.computed > 0 or self.store.ask(text, 0) is not None

    def pass_over(self, text: Text) -> None:
        """Skip a request: from now on it waits in the skipped queue."""
        if text in self.waiting:
            self.waiting.remove(text)
            self.put(self.skipped, text)

    def admit(self, text: Text) -> bool:
        """Admit a request or start its load; return False, with nothing changed, if it does not
        fit."""
        config = self.config
        begins = text.computed == 0
        hits = self.tables.find(text) if begins else []
        hit = len(hits) * config.block_size
        external, is_later = (self.store.ask(text, hit) if begins else None) or (0, False)
        start = text.computed + hit + external
        count = 0 if is_later else text.known - start
        threshold = config.long_prefill_token_threshold
        count = min(count, threshold or count)
        if not config.enable_chunked_prefill and count > self.budget:
            return False
        count = min(count, self.budget)
        slots = text.known if config.scheduler_reserve_full_isl else start + count
        if not self.find_room(text, slots, hits):
            return False
        if begins:
            self.count(text, hit, external)
            self.tables.share(text, hits)
        self.store.received.discard(text)
        if external:
            self.tables.grow(text, start)
            tables = (tuple(text.table),)
            text.load = KVLoad(text.name, tables, hit, external, is_later)
            self.loads.append(text.load)
        else:
            text.load = None
        text.computed = start
        if is_later:
            self.pass_over(text)
            text.status = Status.WAITING_FOR_REMOTE_KVS
        else:
            self.run(text, count)
        return True

    def find_room(self, text: Text, slots: int, hits: list[BlockId]) -> bool:
        """Whether there is room to admit it; if so, blocks that it held and does not keep are
        released."""
        kept: list[BlockId] = []
        if text.computed == 0:
            kept, text.table = text.table, []
        watermark = self.config.watermark_blocks if self.running else 0
        while self.tables.lacks(text, slots, hits) + watermark > len(self.pool.free) + len(kept):
            if self.running or not self.let_give_way(text):
                text.table = text.table or kept
                return False
        self.pool.release(kept)
        return True

    def run(self, text: Text, count: int) -> None:
        """Move a request to the running list, with a row."""
        if text.num_cached_tokens < 0:
            text.num_cached_tokens = text.computed
        for queue in (self.waiting, self.skipped):
            if text in queue:
                queue.remove(text)
        text.status = Status.RUNNING
        self.running.append(text)
        row = self.give_row(text, count)
        row.load, row.resumed = text.load, text.num_preemptions > 0
        row.is_new = not row.resumed

    def give_row(self, text: Text, count: int) -> Row:
        """Schedule `count` tokens of a request, whose blocks must be available."""
        copies, settled = self.tables.copy(text), text.settled
        end = text.computed + count
        row = Row(text, text.computed, count, self.tables.grow(text, end), copies, settled)
        if text.load is None:
            self.tables.publish(text, end)
        self.rows.append(row)
        self.budget -= count
        return row

    def count(self, text: Text, hit: int, external: int) -> None:
        """Count the prefix-cache and store hits of an admission."""
        if text.request.skip_reading_prefix_cache:
            return
        if self.config.enable_prefix_caching:
            self.queries += text.known
            self.hits += hit
        if self.config.kv_connector:
            self.external_queries += text.known - hit
            self.external_hits += external

    # Others.

    def reset(self, is_forced: bool) -> bool:
        """Empty the prefix cache and end all pins.

        Returns False, with nothing changed, if a request or a transfer holds a block.
        """
        if self.store.held or any(map(self.store.is_loading, self.skipped)):
            return False
        if is_forced:
            while self.running:
                self.preempt(self.running[-1])
        elif any(text.table for text in self.running + self.line()):
            return False
        for text in reversed(self.line()):
            self.give_up(text)
        self.pins.end_all()
        self.pool.forget()
        return True

    def branch(self, parent: Text, child: Text) -> None:
        """Fork a child, which waits at the front of the queue with what it shares."""
        self.tables.branch(parent, child)
        self.put(self.waiting, child, at_front=True)
