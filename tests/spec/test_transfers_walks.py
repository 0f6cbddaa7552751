"""Random walks with a store: nobody reads what was not loaded, and every hold ends.

A memory beside the specification knows what each slot holds: the tokens up to it, or nothing that
anybody may read. What plans have loaded and computed is all that is written to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from groups_support import attends, chunks, full, window

from blockstep.spec import Config, Oracle, Policy, Request
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.memory.slots import is_servable
from blockstep.spec.vocabulary import (
    BlockId,
    BlockTables,
    FinishReason,
    FrameId,
    KVLoad,
    KVLoadFailurePolicy,
    KVTransfers,
    Outputs,
    Plan,
    RequestId,
    StreamingUpdate,
    TokenIds,
)

GROUPS = (
    *((), ()),
    *((full(2), full(4)), (full(1), full(2), full(2))),
    *((full(2), window(2, 3)), (window(1, 4), full(2)), (chunks(2, 4), window(2, 5))),
)


def draw_config(random: Random) -> Config:
    groups = random.choice(GROUPS)
    depth = random.choice((1, 1, 2, 3))
    return Config(
        num_blocks=random.randint(8, 24),
        block_size=min((group.block_size for group in groups), default=2),
        max_num_seqs=3,
        max_num_batched_tokens=random.randint(2, 10),
        max_model_len=16,
        policy=random.choice((Policy.FCFS, Policy.PRIORITY)),
        enable_prefix_caching=random.random() < 0.8,
        scheduler_reserve_full_isl=random.random() < 0.6,
        max_frames_in_flight=depth,
        async_scheduling=depth > 1 and random.random() < 0.7,
        groups=groups,
        kv_connector=True,
        kv_load_failure_policy=random.choice(tuple(KVLoadFailurePolicy)),
    )


@dataclass
class Row:
    """What a frame computes of one request."""

    request_id: RequestId
    start: int
    end: int
    tables: BlockTables
    known: TokenIds
    num_promised: int


@dataclass
class Loading:
    """A load, for these tokens; blocks of it may fail."""

    load: KVLoad
    tokens: TokenIds
    frame_id: FrameId
    """It begins when the frames before this one have run."""
    invalid: set[BlockId] = field(default_factory=set)


class Walk:
    """A run of drawn events, a worker and a store that may fail, lie and be late."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.config = draw_config(self.random)
        self.oracle = Oracle(self.config)
        self.frames: list[tuple[Plan, list[Row], list[Loading]]] = []
        self.under_way: list[Loading] = []
        self.texts: dict[RequestId, TokenIds] = {}
        self.slots: dict[tuple[BlockId, int], TokenIds | None] = {}
        self.counts: Counter[str] = Counter()

    def run(self, num_events: int) -> None:
        kinds = ("submit", "offer", "schedule", "commit", "report", "abort", "reset", "update")
        for number in range(num_events):
            (kind,) = self.random.choices(kinds, (20, 12, 50, 45, 20, 4, 2, 5))
            getattr(self, kind)(number)
            assert get_broken_invariants(self.oracle.state) == ()
        self.drain()

    def drain(self) -> None:
        """A store that is fair, and everybody ends, for everybody could be served."""
        for name, request in [*self.oracle.state.requests.items()]:
            if request.request.resumable:
                self.oracle.apply(StreamingUpdate(Request(name, (0,))))
        for _ in range(300):
            state = self.oracle.state
            for name in [n for n, o in state.transfers.offers.items() if o.num_tokens is None]:
                self.oracle.offer_kv(name, 0)
            ended = [loading.load.request_id for loading in self.get_begun()]
            invalid = {block_id for loading in self.get_begun() for block_id in loading.invalid}
            self.receive(ended)
            self.oracle.report(ended, sorted(state.transfers.held), sorted(invalid))
            self.schedule()
            self.commit(is_fair=True)
            if not self.oracle.state.requests:
                break
        assert not self.oracle.state.requests
        while self.frames:
            self.commit(is_fair=True)
        self.oracle.report(finished_sending=sorted(self.oracle.state.transfers.held))
        assert self.oracle.num_free_blocks == self.config.num_usable_blocks
        assert self.oracle.reset(reset_connector=True)

    # Clients and operators.

    def submit(self, number: int) -> None:
        random = self.random
        if len(self.oracle.state.requests) >= 6:
            return
        prompt = tuple(random.choice((0, 0, 0, 1)) for _ in range(random.randint(1, 12)))
        request = Request(
            f"r{number}",
            prompt,
            random.randint(1, 4),
            priority=random.randint(0, 2),
            skip_reading_prefix_cache=random.random() < 0.1,
            resumable=random.random() < 0.15,
        )
        if is_servable(self.config, request):
            self.oracle.submit(request)
            if random.random() < 0.7:
                self.offer_to(request.request_id)

    def update(self, _number: int) -> None:
        sessions = [n for n, r in self.oracle.state.requests.items() if r.request.resumable]
        if sessions:
            name, resumable = self.random.choice(sorted(sessions)), self.random.random() < 0.6
            self.oracle.apply(StreamingUpdate(Request(name, (0, 1), 1, resumable=resumable)))

    def abort(self, _number: int) -> None:
        names = sorted(self.oracle.state.requests)
        if names:
            self.oracle.abort(self.random.choice(names))

    def reset(self, _number: int) -> None:
        before, random = self.oracle.state, self.random
        done = self.oracle.reset(random.random() < 0.6, random.random() < 0.5)
        self.counts["reset"] += done
        assert done or self.oracle.state == before

    # A worker.

    def schedule(self, _number: int = 0) -> None:
        if len(self.oracle.state.frames) == self.config.max_frames_in_flight:
            return
        parked = {loading.load.request_id for loading in self.under_way}
        promised = {n: r.num_output_placeholders for n, r in self.oracle.state.requests.items()}
        plan, requests = self.oracle.schedule(), self.oracle.state.requests
        self.counts["preempted"] += len(plan.preempted_req_ids)
        at_once: list[Loading] = []
        for load in plan.kv_loads:
            tokens = requests[load.request_id].all_token_ids
            num_there = load.num_computed_tokens + load.num_external_tokens
            assert num_there < len(tokens)
            assert load.request_id not in parked
            self.counts["later" if load.is_async else "at once"] += 1
            loading = Loading(load, tokens, plan.frame_id)
            (self.under_way if load.is_async else at_once).append(loading)
        rows = []
        for row in plan.rows:
            assert row.request_id not in {load.load.request_id for load in self.under_way}
            request = requests[row.request_id]
            end = row.num_computed_tokens + row.num_scheduled_tokens
            start, known = row.num_computed_tokens, request.all_token_ids
            tables, num_promised = request.block_tables, promised[row.request_id]
            rows.append(Row(row.request_id, start, end, tables, known, num_promised))
        if rows:
            self.frames.append((plan, rows, at_once))

    def commit(self, _number: int = 0, is_fair: bool = False) -> None:
        if not self.frames:
            return
        plan, rows, at_once = self.frames.pop(0)
        told = self.draw_invalid(at_once) if not is_fair else ()
        for loading in at_once:
            self.store_writes(loading)
        asked = self.oracle.state.frames[0].rows
        sampled = {row.request_id: (self.random.choice((0, 0, 1)),) * row.samples for row in asked}
        misled = self.compute(rows, sampled)
        transfers = self.draw_transfers(told) if not is_fair else KVTransfers()
        outputs = self.oracle.commit(plan, sampled, transfers)
        delivered = {row.request_id for row in outputs.rows if row.new_token_ids}
        assert not delivered & misled, "what was sampled on KV that is not there is dropped"
        self.counts["misled"] += len(misled)
        self.look_at(outputs)

    def compute(self, rows: list[Row], sampled: dict[RequestId, TokenIds]) -> set[RequestId]:
        """Compute all rows side by side; who read something else than what should have been there,
        or what such a one wrote."""
        misled: dict[RequestId, None] = {}
        for row in rows:
            text = self.texts.get(row.request_id, ())
            text = row.known + text[len(row.known) : len(row.known) + row.num_promised]
            assert len(text) >= row.end
            self.texts[row.request_id] = text
            self.write(row.tables, row.start, row.end, text)
        for _ in rows:
            for row in rows:
                if row.request_id not in misled and not self.reads_right(row):
                    self.write(row.tables, row.start, row.end, None)
                    misled[row.request_id] = None
        for row in rows:
            self.texts[row.request_id] += sampled[row.request_id]
        return {*misled}

    def reads_right(self, row: Row) -> bool:
        text = self.texts[row.request_id]
        for group, table in zip(self.config.kv_groups, row.tables, strict=True):
            for position in range(row.start):
                is_read = any(attends(group, one, position) for one in range(row.start, row.end))
                place = table[position // group.block_size], position % group.block_size
                if is_read and self.slots.get(place) != text[: position + 1]:
                    return False
        return True

    def places(self, tables: BlockTables, position: int) -> Iterator[tuple[BlockId, int]]:
        for table, size in zip(tables, self.config.block_sizes, strict=True):
            if position // size < len(table) and table[position // size]:
                yield table[position // size], position % size

    def write(self, tables: BlockTables, start: int, end: int, tokens: TokenIds | None) -> None:
        for position in range(start, end):
            for place in self.places(tables, position):
                self.slots[place] = None if tokens is None else tokens[: position + 1]

    # A store.

    def offer(self, _number: int) -> None:
        self.offer_to(self.random.choice([*sorted(self.oracle.state.requests), "nobody"]))

    def offer_to(self, name: RequestId) -> None:
        random = self.random
        num_tokens = random.choice((None, 0, 1, 3, 4, 7, 8, 20))
        later, delays = random.random() < 0.5, random.random() < 0.2
        self.oracle.offer_kv(name, num_tokens, is_async=later, delays_free=delays)

    def report(self, _number: int) -> None:
        told = self.draw_transfers(self.draw_invalid([]))
        ids = told.finished_recving, told.finished_sending
        self.look_at(self.oracle.report(*ids, told.invalid_block_ids))

    def draw_invalid(self, at_once: list[Loading]) -> tuple[BlockId, ...]:
        """Blocks that some loads do not get, and at times one that nobody loads."""
        random, told = self.random, []
        for loading in (*at_once, *self.get_begun()):
            load, sizes = loading.load, self.config.block_sizes
            loaded = [
                block_id
                for table, size in zip(load.block_ids, sizes, strict=True)
                for block_id in table[load.num_computed_tokens // size :]
                if block_id
            ]
            if loaded and random.random() < 0.25:
                loading.invalid.update(random.sample(loaded, 1))
            told += sorted(loading.invalid) if random.random() < 0.9 or at_once else []
        for loading in at_once:
            told += sorted(loading.invalid)
        return tuple(told)

    def draw_transfers(self, invalid: tuple[BlockId, ...]) -> KVTransfers:
        random, held = self.random, sorted(self.oracle.state.transfers.held)
        under_way = [loading.load.request_id for loading in self.under_way]
        ended = [
            loading.load.request_id
            for loading in self.get_begun()
            if random.random() < 0.3 and loading.invalid <= {*invalid}
        ]
        sent = [name for name in held if random.random() < 0.3]
        strange = [*sorted(self.oracle.state.requests)[:1], "nobody"]
        strange = [name for name in strange if random.random() < 0.2 and name not in under_way]
        self.receive(ended)
        return KVTransfers((*ended, *strange, *ended), (*sent, *strange), invalid)

    def get_begun(self) -> list[Loading]:
        """Loads under way that have begun."""
        oldest = self.frames[0][0].frame_id if self.frames else self.oracle.state.next_frame_id
        return [loading for loading in self.under_way if loading.frame_id <= oldest]

    def receive(self, names: list[RequestId]) -> None:
        for loading in [one for one in self.under_way if one.load.request_id in names]:
            self.under_way.remove(loading)
            self.store_writes(loading)

    def store_writes(self, loading: Loading) -> None:
        load = loading.load
        for position in range(
            load.num_computed_tokens, load.num_computed_tokens + load.num_external_tokens
        ):
            for place in self.places(load.block_ids, position):
                is_there = place[0] not in loading.invalid
                self.slots[place] = loading.tokens[: position + 1] if is_there else None

    def look_at(self, outputs: Outputs) -> None:
        failed = [row for row in outputs.rows if row.finish_reason is FinishReason.ERROR]
        assert all(row.new_token_ids == () for row in failed)
        self.counts["failed"] += len(failed)
        self.counts["held"] += len(self.oracle.state.transfers.held)


@pytest.mark.parametrize("part", range(2))
def test_nobody_reads_what_was_not_loaded_and_every_hold_ends(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part * 40, part * 40 + 40):
        walk = Walk(seed)
        walk.run(100)
        counts += walk.counts
    assert {*counts} == {"later", "at once", "misled", "failed", "held", "reset", "preempted"}
