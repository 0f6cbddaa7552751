"""Engines that differ from our host in what an equivalence lets them differ in, and in more."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any, ClassVar

from blockstep.conformance.engine import Capability, EngineTraits, Renamed, SamePlans, show_state
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.impl.host import HostEngine
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.spec import vocabulary as v

RENAMED = EngineTraits(equivalence=Renamed())
PLANS = EngineTraits(equivalence=SamePlans(shows_blocks=True))
NO_BLOCKS = EngineTraits(equivalence=SamePlans())


class OtherPool(BlockPool):
    """Of two unnamed free blocks it does not matter which is taken: the last one is, here."""

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            free = self.free_queue()
            unnamed = [block for block in free if self.prefix._lineages[block] is None]
            if free[0] in unnamed:
                self._swap(free[0], unnamed[-1])
            taken += super().take(1)
        return taken

    def _swap(self, left: int, right: int) -> None:
        place = self._place
        place[left], place[right] = place[right], place[left]
        self._queue[place[left]], self._queue[place[right]] = left, right


class OtherOrder(HostEngine):
    """Another free order: other ids, the same decisions."""

    traits = RENAMED
    pool_type = OtherPool


class OtherIds(HostEngine):
    """Block `b`, if not null, is called `num_blocks - b`; the free queue is seen as a set only."""

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
    """It shows what `show_state` takes, and of its requests what every engine shows."""

    kept: ClassVar[tuple[str, ...]] = ()
    """Further fields of a request that it shows."""

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


class OtherIdsTold(OtherIds):
    """Whoever speaks to it of a block calls it as it does."""

    def apply(self, event: v.Event) -> Any:
        if not isinstance(event, v.Commit | v.TransfersReported):
            return super().apply(event)
        (invalid,) = self._called((event.transfers.invalid_block_ids,))
        told = replace(event.transfers, invalid_block_ids=invalid)
        return super().apply(replace(event, transfers=told))


class Restless(OtherIds):
    """Each state alone could be that of `OtherIds`; from the third plan on, ids mean another."""

    num_plans = 0

    def apply(self, event: v.Event) -> Any:
        self.num_plans += isinstance(event, v.Schedule)
        return super().apply(event)

    def _called(self, tables: v.BlockTables) -> v.BlockTables:
        return tables if self.num_plans > 2 else super()._called(tables)


class Mute:
    """It shows no state."""

    def snapshot(self) -> Any:
        return None

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.SNAPSHOT}  # type: ignore[misc, no-any-return]


class Blockless(Mute):
    """No blocks, no order of rows, and nothing but what runs; so it cannot be told of blocks that
    were not loaded."""

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


class Silent(Mute, HostEngine):
    """Our host, without a state to look at."""


class Simulator(Blockless, HostEngine):
    """Our host, as a simulator would show it."""

    traits = NO_BLOCKS


# Defects, each put before one of these.


class ShortHits(PrefixMap):
    def hits(self, *args: Any) -> list[int]:
        return super().hits(*args)[:-1]


class HitOneShort:
    """A hit leaves its last block out."""

    prefix_type: ClassVar[type[PrefixMap]] = ShortHits


class NoneShared:
    """What somebody holds is not shared: it is computed again."""

    def _find_hits(self, slot: int) -> list[int]:
        hits = super()._find_hits(slot)  # type: ignore[misc]
        return list(takewhile(self.pool.is_free, hits))  # type: ignore[attr-defined]


class OtherVictim:
    """The oldest of all is preempted."""

    def _select_victim(self) -> int:
        return 0


class Twice:
    """A token is delivered twice."""

    def apply(self, event: v.Event) -> Any:
        answer = super().apply(event)  # type: ignore[misc]
        if not isinstance(answer, v.Outputs):
            return answer
        rows = [replace(row, new_token_ids=row.new_token_ids * 2) for row in answer.rows]
        return v.Outputs(tuple(rows))


def held_to(base: type[Any], traits: EngineTraits, *defects: type) -> Any:
    """An engine with these defects and traits."""
    return type(base.__name__, (*defects, base), {"traits": traits})


# To be scored.

ShortSimulator = held_to(Simulator, NO_BLOCKS, HitOneShort)


class Lazy(HostEngine):
    """Every fourth step is left out: nobody runs."""

    num_plans = 0

    def _schedule_running(self, step: Any) -> None:
        self.num_plans += 1
        if self.num_plans % 4:
            super()._schedule_running(step)
        else:
            step.budget = 0


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


class MoodyHits(PrefixMap):
    was_short: ClassVar[bool] = False

    def __init__(self, num_blocks: int, verify: bool) -> None:
        super().__init__(num_blocks, verify)
        self._is_short = not MoodyHits.was_short

    def hits(self, *args: Any) -> list[int]:
        found = super().hits(*args)
        if not self._is_short:
            return found
        MoodyHits.was_short |= bool(found)
        return found[:-1]


class Moody(Simulator):
    """Its engines leave the last block of a hit out until one has done so; later ones do not."""

    prefix_type = MoodyHits
