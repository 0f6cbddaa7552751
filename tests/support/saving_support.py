"""A worker with a store that knows nothing but plans: what is saved of victims, and comes back.

The store keeps, under each text, what slots held when they were saved. A load may lose blocks on
its way; whoever computes on such a one computes nothing that anybody may read.
"""

from __future__ import annotations

from random import Random
from typing import Any

from forks_support import Walk, Worker
from forks_support import draw_config as draw_forking
from groups_support import attends

from blockstep.spec import Config, Oracle, State
from blockstep.spec import vocabulary as v
from blockstep.spec.copies import replace
from blockstep.spec.profiles import STRICT, Profile
from blockstep.spec.requests import RequestState, list_rows_in_flight

EVENTS = ("submit", "offer", "schedule", "commit", "propose", "report", "abort", "reset", "pause")
WEIGHTS = (16, 10, 50, 42, 15, 12, 2, 1, 1)


def draw_config(random: Random) -> Config:
    """A small engine with a store, short of blocks as often as not."""
    depth = random.choice((1, 2, 2, 3))
    high = random.choice((0, 0, random.randint(1, 6)))
    changes: dict[str, Any] = {
        "num_blocks": random.randint(8, 22),
        "max_num_seqs": 4,
        "max_frames_in_flight": depth,
        "async_scheduling": depth > 1 and random.random() < 0.8,
        "enable_prefix_caching": random.random() < 0.4,
        "scheduler_reserve_full_isl": random.random() < 0.3,
        "enable_forks": False,
        "kv_connector": True,
        "kv_load_failure_policy": random.choice(tuple(v.KVLoadFailurePolicy)),
        "swap_min_tokens": random.choice((1, 1, 2, 4, 6)),
        "admission_high_blocks": high,
        "admission_low_blocks": random.randint(0, high),
    }
    config = draw_forking(random, **changes)
    return config if config.groups else replace(config, block_size=random.choice((1, 1, 2)))


class SavingWorker(Worker):
    """It saves before all else, loads before it runs, and looks at every slot that it reads."""

    def __init__(self, config: Config, random: Random) -> None:
        super().__init__(config, random)
        self.store: dict[tuple[int, v.TokenIds], v.TokenIds | None] = {}
        self.known: dict[v.RequestId, v.TokenIds] = {}
        """Of each that is unfinished: what was delivered of it, and its prompt."""
        self.misled: set[v.RequestId] = set()
        """Those that computed on what was not loaded, until somebody is told."""
        self.lost: dict[int, list[v.BlockId]] = {}
        """By frame: blocks of its loads that did not come."""
        self.under_way: dict[v.RequestId, v.KVLoad] = {}

    def run(self, plan: v.Plan) -> dict[v.RequestId, v.TokenIds]:
        """Save, load, and then as always."""
        for save in plan.kv_saves:
            self.save(save)
        self.misled -= {*plan.preempted_req_ids}
        for load in plan.kv_loads:
            if load.is_async:
                self.under_way[load.request_id] = load
            else:
                self.lost.setdefault(plan.frame_id, []).extend(self.load(load))
        return super().run(plan)

    def list_places(self, tables: v.BlockTables, first: int, end: int) -> list[Any]:
        """Group, position, block and slot of what is there of positions `first` to `end`."""
        return [
            (index, position, table[position // group.block_size], position % group.block_size)
            for index, (group, table) in enumerate(zip(self.groups, tables, strict=True))
            for position in range(first, end)
            if table[position // group.block_size] != v.NULL_BLOCK
        ]

    def save(self, save: v.KVSave) -> None:
        """Keep what is there, whatever it is; what is saved are whole blocks."""
        text = self.known[save.request_id]
        assert len(text) >= save.num_tokens, "a store names what it keeps by tokens"
        for group, table in zip(self.groups, save.block_ids, strict=True):
            assert len(table) * group.block_size == save.num_tokens
        for index, position, block, slot in self.list_places(save.block_ids, 0, save.num_tokens):
            self.store[index, text[: position + 1]] = self.slots.get((block, slot))
        self.seen["saved"] += 1
        self.seen["saved with nulls"] += any(v.NULL_BLOCK in table for table in save.block_ids)

    def load(self, load: v.KVLoad) -> list[v.BlockId]:
        """Write what the store has; returns the blocks that are lost on the way."""
        name, first = load.request_id, load.num_computed_tokens
        text = self.known[name]
        places = self.list_places(load.block_ids, first, first + load.num_external_tokens)
        blocks = sorted({block for _, _, block, _ in places})
        lost = [self.random.choice(blocks)] if blocks and self.random.random() < 0.25 else []
        for index, position, block, slot in places:
            tag = self.store.get((index, text[: position + 1]))
            self.slots.pop((block, slot), None)
            if tag is not None and block not in lost:
                self.slots[block, slot] = tag
        self.seen["lost" if lost else "loaded"] += 1
        if lost and not load.is_async:
            self.misled.add(name)
        return lost

    def count(self, text: v.TokenIds) -> int:
        """The most tokens from whose end on everything that is attended to is kept.

        What a window has left was not saved, so fewer may be of more use; the last token is always
        computed.
        """
        for num_tokens in range(len(text) - 1, 0, -1):
            if all(
                (index, text[: position + 1]) in self.store
                for index, group in enumerate(self.groups)
                for position in range(num_tokens)
                if attends(group, num_tokens, position)
            ):
                return num_tokens
        return 0

    def write(
        self, name: v.RequestId, start: int, text: list[int], written: set[tuple[v.BlockId, int]]
    ) -> None:
        """Nobody may read what is computed on what is not there."""
        super().write(name, start, text, written)
        if name in self.misled:
            for _, _, block, slot in self.list_places(self.get_tables(name), start, len(text)):
                self.slots.pop((block, slot), None)

    def read(self, name: v.RequestId, start: int, text: list[int]) -> None:
        """Whoever is misled reads anything."""
        if name not in self.misled:
            super().read(name, start, text)

    def get_tables(self, name: v.RequestId) -> v.BlockTables:
        """Those that the worker knows."""
        return tuple(map(tuple, self.tables[name]))


class SavingWalk(Walk):
    """A run of drawn events with a store that says what it has, and loses some of it."""

    def __init__(self, seed: int, profile: Profile = STRICT) -> None:
        random = Random(seed)
        super().__init__(seed, draw_config(random))
        self.oracle = Oracle(self.config, profile)
        self.worker: SavingWorker = SavingWorker(self.config, self.random)
        self.seen = self.worker.seen

    def schedule(self) -> None:
        before = self.oracle.state
        self.worker.known |= {name: it.all_token_ids for name, it in before.requests.items()}
        super().schedule()
        if before is not self.oracle.state and self.random.random() < 0.7:
            self.offer()

    def offer(self) -> None:
        """The store says what it has of each of them."""
        for name, request in [*self.oracle.state.requests.items()]:
            num_tokens = self.worker.count(request.all_token_ids)
            later, delays = self.random.random() < 0.3, self.random.random() < 0.1
            self.oracle.offer_kv(name, num_tokens, is_async=later, delays_free=delays)

    def check_plan(self, before: State, plan: v.Plan) -> None:
        """Of each victim what is to be saved is, by the words; and closed is closed."""
        after, saves = self.oracle.state, {save.request_id: save for save in plan.kv_saves}
        assert saves.keys() <= {*plan.preempted_req_ids}
        for name in plan.preempted_req_ids:
            num_tokens = self.find_saved(before.requests[name])
            assert (saves[name].num_tokens if name in saves else 0) == num_tokens
            self.seen["not saved"] += num_tokens == 0
        admitted = {*after.running} - {*before.running}
        parked = {load.request_id for load in plan.kv_loads if load.is_async}
        self.seen["closed"] += after.admission_closed
        assert not (after.admission_closed and (admitted | parked))
        assert after.running or not after.admission_closed

    def find_saved(self, victim: RequestState) -> int:
        """The most whole blocks of all groups, of what is known and computed; or none."""
        most = min(victim.num_computed_tokens, victim.num_known_tokens)
        whole = [
            n for n in range(most + 1) if not any(n % size for size in self.config.block_sizes)
        ]
        is_enough = whole[-1] >= self.config.swap_min_tokens and not victim.is_unsettled
        return whole[-1] if is_enough else 0

    def commit(self) -> None:
        if not self.frames:
            return
        plan, sampled = self.frames.pop(0)
        del self.worker.num_rejected[plan.frame_id]
        lost = self.worker.lost.pop(plan.frame_id, [])
        self.oracle.commit(plan, sampled, v.KVTransfers(invalid_block_ids=tuple(lost)))
        self.forget_what_is_dropped()

    def forget_what_is_dropped(self) -> None:
        """Of whom nothing is in flight, what is known is all that there is."""
        state = self.oracle.state
        for name, request in state.requests.items():
            if name in self.worker.texts and not list_rows_in_flight(state.frames, name):
                self.worker.texts[name] = [*request.all_token_ids]
                self.worker.misled.discard(name)
                for rejected in self.worker.num_rejected.values():
                    rejected.pop(name, None)

    def report(self) -> None:
        """Loads end, and reads of what has ended do."""
        lost: list[v.BlockId] = []
        names = [name for name in self.worker.under_way if self.random.random() < 0.7]
        for name in names:
            lost += self.worker.load(self.worker.under_way.pop(name))
        self.oracle.report(invalid_block_ids=lost)
        self.oracle.report(names, sorted(self.oracle.state.transfers.held))

    def step(self, what: str) -> None:
        match what:
            case "offer":
                self.offer()
            case "report":
                self.report()
            case "pause":
                self.oracle.pause(self.random.choice(tuple(v.PauseState)))
            case _:
                super().step(what)

    def run(self, num_events: int) -> None:
        """So many events, then steps until everybody has ended."""
        for _ in range(num_events):
            self.step(self.random.choices(EVENTS, WEIGHTS)[0])
        self.oracle.resume()
        for _ in range(2000):
            if not self.oracle.state.requests:
                break
            for what in ("report", "schedule", "commit"):
                self.step(what)
        assert not self.oracle.state.requests
        while self.frames:
            self.step("commit")
        while self.worker.under_way or self.oracle.state.transfers.held:
            self.step("report")
        assert self.oracle.num_free_blocks == self.config.num_usable_blocks
