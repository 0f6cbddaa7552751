"""Renaming of an engine's block ids to the spec's, as far as a bijection exists.

Blocks are matched by their use, in this order: place in a block table, key in the prefix cache, the
rest. So two states that differ only in block ids and in the order of their free queues are equal
after renaming; if no bijection makes them equal, the difference is shown in the spec's ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count

from blockstep.conformance.protocol.features import PARTS, list_kept
from blockstep.spec import vocabulary as v


class Names:
    """A bijection from an engine's block ids to the spec's; the first pairing of a block is
    kept.
    """

    def __init__(self) -> None:
        self.of: dict[v.BlockId, v.BlockId] = {v.NULL_BLOCK: v.NULL_BLOCK}
        self._taken = {v.NULL_BLOCK}

    def pair(self, mine: Iterable[v.BlockId], theirs: Iterable[v.BlockId]) -> None:
        """Pair the spec's blocks with the engine's in order; blocks that have a partner keep it."""
        for left, right in zip(mine, theirs, strict=False):
            if left not in self._taken and right not in self.of:
                self.of[right] = left
                self._taken.add(left)

    def pair_rest(self, mine: Iterable[v.BlockId], theirs: Iterable[v.BlockId]) -> None:
        """Pair the blocks that have no partner yet, in order."""
        left = [block for block in mine if block not in self._taken]
        self.pair(left, [block for block in theirs if block not in self.of])

    def rename(self, tables: v.BlockTables) -> v.BlockTables:
        """Return tables in the spec's ids; a block without a partner gets the smallest free id."""
        for block in chain.from_iterable(tables):
            if block not in self.of:
                self.pair([next(free for free in count(1) if free not in self._taken)], [block])
        return tuple(tuple(self.of[block] for block in table) for table in tables)


def rename_snapshot(spec: v.Snapshot, engine: v.Snapshot) -> v.Snapshot:
    """Return the engine's state with the spec's block ids, and its free queue in the spec's
    order.
    """
    return engine if spec == engine else _renamed(spec, engine, pair_states(spec, engine))


def rename_plan(plan: v.Plan, names: Names) -> v.Plan:
    """Return the engine's plan with the spec's block ids, except in swap-outs and sources of
    copies, which are of the state before the plan.
    """
    return replace(
        plan,
        new=tuple(replace(row, block_ids=names.rename(row.block_ids)) for row in plan.new),
        cached=tuple(
            replace(row, new_block_ids=names.rename(row.new_block_ids)) for row in plan.cached
        ),
        block_copies=_copies(plan, destination=names),
        new_block_ids_to_zero=names.rename((plan.new_block_ids_to_zero,))[0],
        kv_loads=tuple(
            replace(load, block_ids=names.rename(load.block_ids)) for load in plan.kv_loads
        ),
    )


def _copies(plan: v.Plan, **names: Names) -> tuple[v.BlockCopy, ...]:
    """Return the copies of a plan with sources or destinations renamed."""

    def rename(copy: v.BlockCopy) -> v.BlockCopy:
        named = {side: of.rename(((getattr(copy, side),),))[0][0] for side, of in names.items()}
        return replace(copy, **named)

    return tuple(map(rename, plan.block_copies))


def pair_states(spec: v.Snapshot, engine: v.Snapshot) -> Names:
    """Return the names of the engine's blocks in these states."""
    names = Names()
    tables_of = {request.request_id: request.block_tables for request in engine.requests}
    for request in spec.requests:
        theirs = tables_of.get(request.request_id, ())
        names.pair(chain.from_iterable(request.block_tables), chain.from_iterable(theirs))
    others = _list_left(engine)
    for name, tables in _list_left(spec).items():
        names.pair(chain.from_iterable(tables), chain.from_iterable(others.get(name, ())))
    for key, blocks in spec.cached.items():
        names.pair_rest(blocks, engine.cached.get(key, ()))
    names.pair_rest(_by_use(spec), _by_use(engine))
    known = (*range(len(engine.ref_counts)), *engine.free_queue)
    names.rename((known, *(blocks for blocks in engine.cached.values())))
    return names


def _list_left(snapshot: v.Snapshot) -> dict[tuple[str, str], v.BlockTables]:
    """Return blocks that requests left held: for a transfer, a frame in flight, or a feature."""
    transfers = snapshot.transfers
    held = () if transfers is None else transfers.held
    left = {("request", it.request_id): it.block_tables for it in held}
    deferred = () if transfers is None else transfers.deferred_frees
    for number, it in enumerate(deferred):
        left["frame", f"{it.frame_id} {number}"] = (it.block_ids,)
    return left | {("kept", it.owner): it.block_tables for it in list_kept(snapshot)}


def _by_use(snapshot: v.Snapshot) -> list[v.BlockId]:
    """Return all blocks: free ones first, then those that cannot be allocated, by id."""
    queued = set(snapshot.free_queue)
    counts = snapshot.ref_counts
    return sorted(range(len(counts)), key=lambda block: (block not in queued, counts[block], block))


def _renamed(spec: v.Snapshot, engine: v.Snapshot, names: Names) -> v.Snapshot:
    size = len(engine.ref_counts)
    new_size = 1 + max((names.of[block] for block in range(size)), default=-1)
    ref_counts, block_keys = [0] * new_size, [None] * new_size
    for block in range(size):
        ref_counts[names.of[block]] = engine.ref_counts[block]
    keys = dict(zip((names.of[block] for block in range(size)), engine.block_keys, strict=False))
    place = {block: index for index, block in enumerate(spec.free_queue)}
    transfers = engine.transfers
    if transfers is not None:
        held = [replace(it, block_tables=names.rename(it.block_tables)) for it in transfers.held]
        deferred = [
            replace(it, block_ids=names.rename((it.block_ids,))[0])
            for it in transfers.deferred_frees
        ]
        transfers = replace(transfers, held=tuple(held), deferred_frees=tuple(deferred))
    parts = {part.name: (part, getattr(engine, part.name)) for part in PARTS}
    free = sorted(names.rename((engine.free_queue,))[0], key=lambda block: place.get(block, size))
    return replace(
        engine,
        requests=tuple(
            replace(request, block_tables=names.rename(request.block_tables))
            for request in engine.requests
        ),
        ref_counts=tuple(ref_counts),
        free_queue=tuple(free),
        block_keys=tuple(keys.get(block) for block, _ in enumerate(block_keys)),
        cached={key: names.rename((blocks,))[0] for key, blocks in engine.cached.items()},
        transfers=transfers,
        **{
            name: part.rename(shown, names.rename)
            for name, (part, shown) in parts.items()
            if shown is not None
        },
    )


def sort_free_queue(snapshot: v.Snapshot) -> v.Snapshot:
    """Return the state with its free queue sorted by id, for an engine whose order is not
    compared.
    """
    return replace(snapshot, free_queue=tuple(sorted(snapshot.free_queue)))


@dataclass(slots=True)
class TablePairs:
    """The block tables of both sides, as their plans list them."""

    of: dict[v.RequestId, tuple[v.BlockTables, v.BlockTables]] = field(default_factory=dict)
    """The spec's and the engine's tables of each request that holds blocks."""

    def take_read(self, engine: v.Plan) -> v.Plan:
        """Return the engine's plan with the spec's block ids in its swap-outs and its sources of
        copies.

        These are ids before the plan, which may allocate swapped-out blocks to other requests, so
        one bijection cannot name both.
        """
        if not (engine.kv_saves or engine.block_copies):
            return engine
        names = self._pair()
        saves = [replace(it, block_ids=names.rename(it.block_ids)) for it in engine.kv_saves]
        return replace(engine, kv_saves=tuple(saves), block_copies=_copies(engine, source=names))

    def take(self, spec: v.Plan, engine: v.Plan) -> v.Plan:
        """Take over the tables of a plan of each side; return the engine's plan in the spec's block
        ids.
        """
        for name in {*spec.preempted_req_ids, *engine.preempted_req_ids}:
            self.of.pop(name, None)
        loaded = {load.request_id: load.block_ids for load in engine.kv_loads}
        for load in spec.kv_loads:  # a request that waits for a load has no row
            self.of[load.request_id] = load.block_ids, loaded.get(load.request_id, ())
        gained = {row.request_id: row for row in engine.rows}
        for row in spec.rows:
            other = gained.get(row.request_id)
            if other is not None:
                mine, theirs = self.of.get(row.request_id, ((), ()))
                self.of[row.request_id] = _grown(mine, row, spec), _grown(theirs, other, engine)
        return rename_plan(engine, self._pair())

    def _pair(self) -> Names:
        names = Names()
        for mine, theirs in self.of.values():
            names.pair(chain.from_iterable(mine), chain.from_iterable(theirs))
        return names

    def let_go(self, held: Mapping[v.RequestId, v.BlockTables]) -> None:
        """Drop the places whose block left the spec's tables, for example behind a window."""
        for name, (mine, theirs) in self.of.items():
            now = held.get(name, mine)
            if now != mine:
                self.of[name] = (_kept(mine, mine, now), _kept(theirs, mine, now))

    def fork(self, parent: v.RequestId, child: v.RequestId, held: v.BlockTables) -> None:
        """Give a branch the tables of its parent, as far as the spec's branch holds them."""
        if parent in self.of:
            mine, theirs = self.of[parent]
            self.of[child] = _cut(mine, held), _cut(theirs, held)

    def drop(self, names: Iterable[v.RequestId]) -> None:
        """Drop the tables of requests that hold no blocks any more."""
        for name in names:
            self.of.pop(name, None)


@dataclass(slots=True)
class LoadPairs:
    """Blocks that a store loads, as the plans of both sides list them."""

    num_blocks: int
    of: dict[v.BlockId, v.BlockId] = field(default_factory=dict)
    """The engine's blocks by the spec's, of the latest loads; each block occurs once."""

    def take(self, spec: v.Plan, engine: v.Plan) -> None:
        """Take over the loads of a plan of each side."""
        theirs = {load.request_id: load.block_ids for load in engine.kv_loads}
        for load in spec.kv_loads:
            others = chain.from_iterable(theirs.get(load.request_id, ()))
            for mine, other in zip(chain.from_iterable(load.block_ids), others, strict=False):
                self.of = {left: right for left, right in self.of.items() if right != other}
                self.of[mine] = other

    def to_engine(self, blocks: Iterable[v.BlockId]) -> tuple[v.BlockId, ...]:
        """Return the spec's blocks in the engine's ids; blocks not loaded on either side pair in
        order.
        """
        known, called = {v.NULL_BLOCK, *self.of}, {v.NULL_BLOCK, *self.of.values()}
        mine = (block for block in range(self.num_blocks) if block not in known)
        theirs = (block for block in range(self.num_blocks) if block not in called)
        names = dict(zip(mine, theirs, strict=False)) | self.of
        return tuple(names.get(block, block) for block in blocks)


def _kept(tables: v.BlockTables, mine: v.BlockTables, now: v.BlockTables) -> v.BlockTables:
    """Return the tables without the places at which the spec's tables changed."""
    return tuple(
        tuple(
            block if old == new else v.NULL_BLOCK
            for block, old, new in zip(table, before, after, strict=False)
        )
        for table, before, after in zip(tables, mine, now, strict=False)
    )


def _cut(tables: v.BlockTables, held: v.BlockTables) -> v.BlockTables:
    """Return from each table as many blocks as are held."""
    return tuple(table[: len(own)] for table, own in zip(tables, held, strict=False))


def _grown(tables: v.BlockTables, row: v.NewRow | v.CachedRow, plan: v.Plan) -> v.BlockTables:
    """Return a request's tables after a row is dispatched."""
    if isinstance(row, v.NewRow):
        return row.block_ids
    if row.resumed or not tables or row.request_id in plan.remapped_req_ids:
        return row.new_block_ids
    return tuple(old + new for old, new in zip(tables, row.new_block_ids, strict=False))
