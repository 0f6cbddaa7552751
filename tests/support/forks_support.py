"""A worker of branches that knows nothing but plans: KV by what it was written for, and copies.

It runs each plan when it is made. Every slot remembers the text whose last token it was written
for, and every token that is attended to is looked at when it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from groups_support import attends, chunks, full, window

from blockstep.spec import Config, Oracle, Policy, Request, SpecMethod, State
from blockstep.spec import vocabulary as v
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.memory import slots
from blockstep.spec.requests import RequestState

MIXES: tuple[tuple[v.KVGroup, ...], ...] = (
    *((), (), (), ()),
    (full(2), window(2, 3)),
    (window(1, 4), full(3)),
    (full(4), window(2, 5), chunks(2, 6)),
    (chunks(3, 5), full(3)),
    (window(3, 2),),
)


def draw_config(random: Random, **changes: Any) -> Config:
    """A small engine that may fork, short of blocks as often as not."""
    groups = random.choice(MIXES)
    method = random.choice((SpecMethod.NONE, SpecMethod.NGRAM, SpecMethod.DRAFT_MODEL))
    depth = random.choice((1, 1, 2, 3))
    fields: dict[str, Any] = {
        "num_blocks": random.randint(8, 26),
        "block_size": min([group.block_size for group in groups], default=random.randint(1, 4)),
        "max_num_seqs": random.randint(2, 5),
        "max_num_batched_tokens": random.randint(2, 12),
        "max_model_len": 24,
        "policy": random.choice((Policy.FCFS, Policy.PRIORITY)),
        "enable_prefix_caching": random.random() < 0.6,
        "long_prefill_token_threshold": random.choice((0, 0, 3)),
        "scheduler_reserve_full_isl": random.random() < 0.6,
        "spec_method": method,
        "num_speculative_tokens": 0 if method is SpecMethod.NONE else random.randint(1, 3),
        "max_frames_in_flight": depth,
        "async_scheduling": depth > 1 and random.random() < 0.7,
        "groups": groups,
        "enable_forks": True,
        "watermark_blocks": random.choice((0, 0, 1, 3)),
        "pool_order": random.choice((v.PoolOrder.LRU, v.PoolOrder.LIFO)),
        "enable_kv_cache_events": random.random() < 0.3,
    }
    return Config(**fields | changes)


class Worker:
    """Block tables, texts and slots, by what plans say."""

    def __init__(self, config: Config, random: Random) -> None:
        self.groups, self.random = config.kv_groups, random
        self.slots: dict[tuple[v.BlockId, int], v.TokenIds] = {}
        self.tables: dict[v.RequestId, list[list[v.BlockId]]] = {}
        self.texts: dict[v.RequestId, list[int]] = {}
        self.num_rejected: dict[int, dict[v.RequestId, int]] = {}
        """By frame in flight: drafts that its rows did not accept."""
        self.seen: Counter[str] = Counter()

    def run(self, plan: v.Plan) -> dict[v.RequestId, v.TokenIds]:
        """Copy, write, read, sample."""
        for copy in plan.block_copies:
            assert copy.source != copy.destination
            assert v.NULL_BLOCK not in (copy.source, copy.destination)
            for slot in range(max(group.block_size for group in self.groups)):
                self.slots.pop((copy.destination, slot), None)
                if (copy.source, slot) in self.slots:
                    self.slots[copy.destination, slot] = self.slots[copy.source, slot]
        self.seen["copied"] += len(plan.block_copies)
        for name in (*plan.finished_req_ids, *plan.preempted_req_ids):
            self.tables.pop(name, None)
        rows = []
        for row in plan.rows:
            if isinstance(row, v.NewRow):
                self.learn_new(row)
            else:
                self.learn_cached(plan, row)
            rows.append((row, *self.get_span(row)))
        written: set[tuple[v.BlockId, int]] = set()
        for row, start, text in rows:
            self.write(row.request_id, start, text, written)
        for row, start, text in rows:
            self.read(row.request_id, start, text)
        self.num_rejected[plan.frame_id] = {}
        return {row.request_id: self.sample(plan, row, text) for row, _, text in rows}

    def learn_new(self, row: v.NewRow) -> None:
        """Somebody new, with everything about it."""
        self.tables[row.request_id] = [*map(list, row.block_ids)]
        self.texts[row.request_id] = [*row.request.prompt_token_ids, *row.output_token_ids]
        self.seen["branch row"] += row.num_computed_tokens > 0
        self.seen["branch with outputs"] += bool(row.output_token_ids)

    def learn_cached(self, plan: v.Plan, row: v.CachedRow) -> None:
        """Somebody known, with what has changed."""
        name = row.request_id
        if row.all_token_ids is not None:
            assert self.texts[name][: len(row.all_token_ids)] == [*row.all_token_ids]
        if row.resumed or name in plan.remapped_req_ids:
            self.seen["remapped"] += not row.resumed
            self.tables[name] = [*map(list, row.new_block_ids)]
        else:
            for table, new in zip(self.tables[name], row.new_block_ids, strict=True):
                table.extend(new)

    def get_span(self, row: v.NewRow | v.CachedRow) -> tuple[int, list[int]]:
        """The first position of a row, and the text up to its last: with drafts, if any."""
        name = row.request_id
        behind = sum(frame.get(name, 0) for frame in self.num_rejected.values())
        start = row.num_computed_tokens - behind
        drafts = [
            self.random.choice((0, 1)) if draft == v.DRAFT_PLACEHOLDER else draft
            for draft in row.draft_token_ids
        ]
        text = [*self.texts[name], *drafts]
        end = start + row.num_scheduled_tokens
        assert start < end <= len(text)
        assert not drafts or end == len(text)
        return start, text[:end]

    def write(
        self, name: v.RequestId, start: int, text: list[int], written: set[tuple[v.BlockId, int]]
    ) -> None:
        """KV of each token; no slot is written twice in a step."""
        for group, table in zip(self.groups, self.tables[name], strict=True):
            for position in range(start, len(text)):
                block, slot = table[position // group.block_size], position % group.block_size
                assert block != v.NULL_BLOCK
                assert (block, slot) not in written
                written.add((block, slot))
                self.slots[block, slot] = tuple(text[: position + 1])

    def read(self, name: v.RequestId, start: int, text: list[int]) -> None:
        """What each token attends to is what its own text has there."""
        for group, table in zip(self.groups, self.tables[name], strict=True):
            size = group.block_size
            for reader in range(start, len(text)):
                for position in range(reader + 1):
                    if attends(group, reader, position):
                        place = (table[position // size], position % size)
                        assert self.slots.get(place) == tuple(text[: position + 1])

    def sample(self, plan: v.Plan, row: v.NewRow | v.CachedRow, text: list[int]) -> v.TokenIds:
        """Some drafts and a token of its own, if the row reaches the end of what is known."""
        known, name = self.texts[row.request_id], row.request_id
        if len(text) < len(known):
            return ()
        drafts = tuple(text[len(known) :])
        accepted = drafts[: self.random.randint(0, len(drafts))]
        self.num_rejected[plan.frame_id][name] = len(drafts) - len(accepted)
        tokens = (*accepted, self.random.choice((0, 1, 2)))
        known.extend(tokens)
        return tokens


class Walk:
    """A run of drawn events, each followed by a look at the invariants."""

    def __init__(self, seed: int, config: Config | None = None) -> None:
        self.random = Random(seed)
        self.config = config or draw_config(self.random)
        self.oracle, self.worker = Oracle(self.config), Worker(self.config, self.random)
        self.frames: list[tuple[v.Plan, dict[v.RequestId, v.TokenIds]]] = []
        self.names = iter(f"r{number}" for number in range(10_000))
        self.seen = self.worker.seen

    def submit(self) -> None:
        random = self.random
        prompt = tuple([random.choice((0, 0, 1)) for _ in range(random.randint(1, 9))])
        asked = Request(
            next(self.names), prompt, random.randint(1, 9), priority=random.randint(0, 2)
        )
        if slots.is_servable(self.config, asked):
            self.oracle.submit(asked)

    def fork(self) -> None:
        """A branch of anybody: with leading outputs of its parent, and some of its own."""
        state, random = self.oracle.state, self.random
        if not state.requests or len(state.requests) > 7:
            return
        busy = {row.request_id for frame in state.frames for row in frame.rows}
        names = sorted(state.requests.keys() - busy) if random.random() < 0.7 else ()
        parent = state.requests[random.choice(names or sorted(state.requests))]
        mine = parent.output_token_ids[: random.randint(0, len(parent.output_token_ids))]
        more = tuple([random.choice((0, 1, 2)) for _ in range(random.choice((0, 0, 1, 1, 2)))])
        name = next(self.names)
        answer = self.oracle.apply(v.Fork(parent.request_id, name, mine + more))
        if isinstance(answer, v.Rejected):
            self.seen[str(answer.code)] += 1
            assert self.oracle.state is state
        else:
            assert answer == v.Ack()
            self.seen["forked"] += 1
            child = self.oracle.state.requests[name]
            assert child.num_computed_tokens == self.find_shared(parent, child)
            self.seen["shared within a block"] += self.count_partial() > 0

    def find_shared(self, parent: RequestState, child: RequestState) -> int:
        """The most that a branch may share, looked for from the end."""
        mine, theirs = child.all_token_ids, parent.all_token_ids
        for num_tokens in range(min(len(mine) - 1, parent.num_computed_tokens), 0, -1):
            if mine[:num_tokens] != theirs[:num_tokens]:
                continue
            if all(
                self.may_go_on(group, table, parent.num_computed_tokens, num_tokens)
                for group, table in zip(self.config.kv_groups, parent.block_tables, strict=True)
            ):
                return num_tokens
        return 0

    def may_go_on(
        self, group: v.KVGroup, table: Sequence[v.BlockId], num_computed: int, num_tokens: int
    ) -> bool:
        """Whether one group has all that the next token reads, and lets it be written."""
        size = group.block_size
        is_read = [attends(group, num_tokens, position) for position in range(num_tokens)]
        blocks = {position // size for position in range(num_tokens) if is_read[position]}
        blocks |= {num_tokens // size} if num_tokens % size else set()
        is_full = num_tokens // size < num_computed // size
        is_found = self.config.enable_prefix_caching and num_tokens % size > 0 and is_full
        return not is_found and all(table[block] != v.NULL_BLOCK for block in blocks)

    def count_partial(self) -> int:
        """Waiting requests that share a block which is not full of what they have computed."""
        state, found = self.oracle.state, 0
        for name in state.waiting:
            request = state.requests[name]
            for group, table in zip(self.config.kv_groups, request.block_tables, strict=True):
                index, behind = divmod(request.num_computed_tokens, group.block_size)
                found += behind > 0 and state.pool.ref_counts[table[index]] > 1
        return found

    def schedule(self) -> None:
        before = self.oracle.state
        if len(before.frames) == self.config.max_frames_in_flight:
            return
        plan = self.oracle.schedule()
        self.check_plan(before, plan)
        sampled = self.worker.run(plan)
        if plan.rows:
            self.frames.append((plan, sampled))
        else:
            del self.worker.num_rejected[plan.frame_id]
        self.seen["preempted"] += len(plan.preempted_req_ids)

    def check_plan(self, before: State, plan: v.Plan) -> None:
        """Copies are of rows in the plan, and an admission beside others leaves the watermark."""
        after = self.oracle.state
        held: set[v.BlockId] = set()
        for row in plan.rows:
            held |= {b for table in after.requests[row.request_id].block_tables for b in table}
        assert {copy.destination for copy in plan.block_copies} <= held
        for name in plan.remapped_req_ids:
            assert name in before.running
        is_admitted = len(after.running) > len(before.running) - len(plan.preempted_req_ids)
        if is_admitted and len(after.running) > 1:
            assert self.oracle.num_free_blocks >= self.config.watermark_blocks

    def commit(self) -> None:
        if not self.frames:
            return
        plan, sampled = self.frames.pop(0)
        del self.worker.num_rejected[plan.frame_id]
        self.oracle.commit(plan, sampled)

    def propose(self) -> None:
        config, random = self.config, self.random
        if config.num_speculative_tokens and not config.async_scheduling:
            names = [n for n in self.oracle.state.running if random.random() < 0.8]
            most = config.num_speculative_tokens
            drafts = {
                n: [random.choice((0, 1)) for _ in range(random.randint(1, most))] for n in names
            }
            self.oracle.propose(drafts)

    def step(self, what: str) -> None:
        state = self.oracle.state
        match what:
            case "submit" if len(state.requests) < 5:
                self.submit()
            case "fork":
                self.fork()
            case "schedule":
                self.schedule()
            case "commit":
                self.commit()
            case "propose":
                self.propose()
            case "abort" if state.requests:
                self.oracle.abort(self.random.choice(sorted(state.requests)))
            case "reset":
                self.oracle.reset(reset_running_requests=self.random.random() < 0.7)
        assert get_broken_invariants(self.oracle.state) == ()

    def run(self, num_events: int) -> None:
        """So many events, then steps until everybody has ended."""
        for _ in range(num_events):
            self.step(self.random.choices(EVENTS, WEIGHTS)[0])
        for _ in range(2000):
            if not self.oracle.state.requests:
                break
            self.step("schedule")
            self.step("commit")
        assert not self.oracle.state.requests
        while self.frames:
            self.step("commit")
        assert self.oracle.num_free_blocks == self.config.num_usable_blocks


EVENTS: Sequence[str] = ("submit", "fork", "schedule", "commit", "propose", "abort", "reset")
WEIGHTS = (14, 22, 45, 42, 15, 4, 1)


def get_tables(oracle: Oracle, name: v.RequestId) -> v.BlockTables:
    """The block tables of an unfinished request."""
    return oracle.state.requests[name].block_tables
