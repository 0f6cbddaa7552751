"""Engines that differ from the specification in what an equivalence lets them differ in, and in
more.

Each is the specification: with functions replaced, or with its answers shown in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, ClassVar, Final

from blockstep.conformance.engine import Capability, EngineTraits, Renamed, SamePlans, show_state
from blockstep.conformance.protocol.changed_spec import ChangedSpec
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.core.block_pool import Pool, allocate_blocks
from blockstep.spec.core.parts import Part
from blockstep.spec.core.prefix_cache import find_published
from blockstep.spec.core.queues import select_victim
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.schedule import process_running_phase
from blockstep.spec.core.work import Step

RENAMED = EngineTraits(equivalence=Renamed())
PLANS = EngineTraits(equivalence=SamePlans(shows_blocks=True))
NO_BLOCKS = EngineTraits(equivalence=SamePlans())


def change_nothing(rules: Rules, _config: v.Config) -> Rules:
    """The specification as it is."""
    return rules


class Spec(ChangedSpec):
    """The specification, and the base of engines that are more."""

    change: Any = staticmethod(change_nothing)

    @property
    def config(self) -> v.Config:
        """Return the config."""
        return self.state.config


def take_last_unnamed(rules: Rules, _config: v.Config) -> Rules:
    """Take the last free block without a key instead of the first."""

    def allocate(pool: Pool, num_blocks: int) -> tuple[Pool, tuple[v.BlockId, ...]]:
        taken: tuple[v.BlockId, ...] = ()
        for _ in range(num_blocks):
            free = [*pool.free_queue]
            unnamed = [block for block in free if pool.block_keys[block] is None]
            if free[0] in unnamed:
                last = free.index(unnamed[-1])
                free[0], free[last] = free[last], free[0]
            pool, more = rules[allocate_blocks](replace(pool, free_queue=tuple(free)), 1)
            taken += more
        return pool, taken

    return rules.replacing(allocate_blocks, allocate)


class OtherOrder(Spec):
    """The specification with another order of free blocks: other ids, the same decisions."""

    traits = RENAMED
    change = staticmethod(take_last_unnamed)


class OtherIds(Spec):
    """The specification with block `b` called `num_blocks - b`; its free queue is a set."""

    traits = RENAMED

    def apply(self, event: v.Event) -> Any:
        answer = super().apply(event)
        if not isinstance(answer, v.Plan):
            return answer
        new = tuple(replace(row, block_ids=self._called(row.block_ids)) for row in answer.new)
        cached = tuple(
            replace(row, new_block_ids=self._called(row.new_block_ids)) for row in answer.cached
        )
        zeroed = self._called((answer.new_block_ids_to_zero,))[0]
        loads = self._all_called(answer.kv_loads, "block_ids")
        saves = self._all_called(answer.kv_saves, "block_ids")
        pairs = [(it.source, it.destination) for it in answer.block_copies]
        copies = tuple(v.BlockCopy(*pair) for pair in self._called(tuple(pairs)))
        plan = replace(answer, new=new, cached=cached, kv_loads=loads, kv_saves=saves)
        return replace(plan, new_block_ids_to_zero=zeroed, block_copies=copies)

    def _all_called(self, holders: Any, field: str = "block_tables") -> tuple[Any, ...]:
        return tuple(replace(it, **{field: self._called(getattr(it, field))}) for it in holders)

    def _called(self, tables: v.BlockTables) -> v.BlockTables:
        count = self.config.num_blocks
        return tuple(
            tuple(count - block if 0 < block < count else block for block in table)
            for table in tables
        )

    def _placed(self, of_blocks: tuple[Any, ...]) -> tuple[Any, ...]:
        names = (0, *self._called((tuple(range(1, len(of_blocks))),))[0])
        return tuple(of_blocks[block] for block in names)

    def snapshot(self) -> v.Snapshot:
        seen = super().snapshot()
        pins, transfers = seen.pins, seen.transfers
        if pins is not None:
            pins = replace(pins, pins=self._all_called(pins.pins))
        if transfers is not None:
            deferred = [
                replace(it, block_ids=self._called((it.block_ids,))[0])
                for it in transfers.deferred_frees
            ]
            transfers = replace(
                transfers, held=self._all_called(transfers.held), deferred_frees=tuple(deferred)
            )
        return replace(
            seen,
            requests=self._all_called(seen.requests),
            pins=pins,
            transfers=transfers,
            ref_counts=self._placed(seen.ref_counts),
            block_keys=self._placed(seen.block_keys),
            free_queue=tuple(sorted(self._called((seen.free_queue,))[0])),
            cached={key: self._called((blocks,))[0] for key, blocks in seen.cached.items()},
        )


class ShowsPart(OtherOrder):
    """The specification; it shows the part of the state that `show_state` needs."""

    kept: ClassVar[tuple[str, ...]] = ()
    """Names of the other fields of a request that the engine shows."""

    def snapshot(self) -> v.Snapshot:
        seen = super().snapshot()
        requests = [
            v.RequestSnapshot(
                request_id=it.request_id,
                status=v.Status.RUNNING if it.status is v.Status.RUNNING else v.Status.WAITING,
                output_token_ids=it.output_token_ids,
                num_computed_tokens=it.num_computed_tokens,
                block_tables=it.block_tables,
                **{name: getattr(it, name) for name in self.kept},
            )
            for it in seen.requests
        ]
        return show_state(
            requests,
            (*seen.skipped_waiting, *seen.waiting),
            seen.running,
            seen.ref_counts,
            seen.free_queue,
            seen.block_keys,
            len(seen.frames_in_flight),
        )


class OtherIdsInReports(OtherIds):
    """The same, with other ids also in the events that name a block."""

    def apply(self, event: v.Event) -> Any:
        if not isinstance(event, v.Commit | v.TransfersReported):
            return super().apply(event)
        (invalid,) = self._called((event.transfers.invalid_block_ids,))
        transfers = replace(event.transfers, invalid_block_ids=invalid)
        return super().apply(replace(event, transfers=transfers))


class Restless(OtherIds):
    """A defect: ids of blocks change with the third plan; each state alone looks right."""

    num_plans = 0

    def apply(self, event: v.Event) -> Any:
        self.num_plans += isinstance(event, v.Schedule)
        return super().apply(event)

    def _called(self, tables: v.BlockTables) -> v.BlockTables:
        return tables if self.num_plans > 2 else super()._called(tables)


class Mute:
    """The specification without a state."""

    def snapshot(self) -> Any:
        return None

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.SNAPSHOT}  # type: ignore[misc, no-any-return]


class Blockless(Mute):
    """The specification without blocks and without an order of rows.

    It shows rows only, so it does not take reports of blocks that were not loaded.
    """

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.TRANSFERS, Capability.TIERS}

    def apply(self, event: v.Event) -> Any:
        answer = super().apply(event)  # type: ignore[misc]
        if isinstance(answer, v.Outputs):
            rows = tuple(replace(row, num_cached_tokens=0) for row in answer.rows[::-1])
            return v.Outputs(rows)
        if not isinstance(answer, v.Plan):
            return answer
        return replace(
            answer,
            new=tuple(replace(row, block_ids=()) for row in answer.new[::-1]),
            cached=tuple(
                replace(row, new_block_ids=(), all_token_ids=None, num_output_tokens=0)
                for row in answer.cached[::-1]
            ),
            preempted_req_ids=answer.preempted_req_ids[::-1],
            finished_req_ids=(),
            remapped_req_ids=(),
            block_copies=(),
            num_common_prefix_blocks=(),
            new_block_ids_to_zero=(),
        )


class Silent(Mute, Spec):
    """The specification without a state, compared by plans."""


class Simulator(Blockless, Spec):
    """The specification with the outputs of a simulator: no state and no blocks."""

    traits = NO_BLOCKS


# Defects, each put before one of these.


def leave_last_hit_out(rules: Rules, _config: v.Config) -> Rules:
    """The last block of each hit is left out."""
    find = rules[find_published]
    return rules.replacing(find_published, lambda pool, keys: find(pool, keys)[:-1])


class HitOneShort:
    """The last block of each hit is left out."""

    change = staticmethod(leave_last_hit_out)


def share_nothing(rules: Rules, _config: v.Config) -> Rules:
    """A hit ends before the first block that another request holds."""

    def find(pool: Pool, keys: Sequence[v.BlockKey]) -> tuple[v.BlockId, ...]:
        found = rules[find_published](pool, keys)
        return tuple(takewhile(lambda block: pool.ref_counts[block] == 0, found))

    return rules.replacing(find_published, find)


class NoneShared:
    """A hit ends before the first block that another request holds."""

    change = staticmethod(share_nothing)


def preempt_the_oldest(rules: Rules, _config: v.Config) -> Rules:
    """The oldest of all is preempted."""
    return rules.replacing(select_victim, lambda _policy, _running, _requests: 0)


class OtherVictim:
    """The oldest of all is preempted."""

    change = staticmethod(preempt_the_oldest)


class Twice:
    """A token is delivered twice."""

    def apply(self, event: v.Event) -> Any:
        answer = super().apply(event)  # type: ignore[misc]
        if not isinstance(answer, v.Outputs):
            return answer
        rows = [replace(row, new_token_ids=row.new_token_ids * 2) for row in answer.rows]
        return v.Outputs(tuple(rows))


def held_to(base: type[ChangedSpec], traits: EngineTraits, *defects: type) -> Any:
    """An engine with these defects and traits."""
    changes = [base.change, *(one.change for one in defects if hasattr(one, "change"))]

    def change(rules: Rules, config: v.Config) -> Rules:
        for one in changes:
            rules = one(rules, config)
        return rules

    members = {"traits": traits, "change": staticmethod(change if changes[1:] else base.change)}
    return type(base.__name__, (*defects, base), members)


# To be scored.

ShortSimulator = held_to(Simulator, NO_BLOCKS, HitOneShort)
NUM_PLANS: Final = Part("num_plans", 0)


def leave_steps_out(rules: Rules, _config: v.Config) -> Rules:
    """Every fourth step runs no request."""

    def run(step: Step) -> None:
        NUM_PLANS.set(step, NUM_PLANS.of(step) + 1)
        if NUM_PLANS.of(step) % 4:
            rules[process_running_phase](step)
        else:
            step.budget = 0

    return rules.replacing(process_running_phase, run)


class Lazy(Spec):
    """Every fourth step runs no request."""

    change = staticmethod(leave_steps_out)


class Broken(SpecEngine):
    def apply(self, event: v.Event) -> Any:
        if isinstance(event, v.Commit) and event.frame_id == 2:
            raise ZeroDivisionError("inside")
        return super().apply(event)


class Hanging(SpecEngine):
    def apply(self, event: v.Event) -> Any:
        while isinstance(event, v.Commit):
            pass
        return super().apply(event)


class MoodyHits:
    was_short: ClassVar[bool] = False


def leave_hits_out_once(rules: Rules, _config: v.Config) -> Rules:
    """The last block of each hit is left out, and `MoodyHits.was_short` records that."""

    def find(pool: Pool, keys: Sequence[v.BlockKey]) -> tuple[v.BlockId, ...]:
        found = rules[find_published](pool, keys)
        MoodyHits.was_short |= bool(found)
        return found[:-1]

    return rules.replacing(find_published, find)


class Moody(Simulator):
    """Leaves the last block of hits out, unless an engine made before has done so."""

    def __init__(self, config: v.Config) -> None:
        self.change = change_nothing if MoodyHits.was_short else leave_hits_out_once
        super().__init__(config)
