"""Film: the holders of each block after each action of a program, for a page that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blockstep.conformance.engine import Capability, EngineFactory
from blockstep.conformance.lockstep.start_run import start_program
from blockstep.conformance.protocol.program import Program, describe
from blockstep.conformance.search.options import CheckOptions, find_profile
from blockstep.spec import vocabulary as v


@dataclass(frozen=True, slots=True)
class Picture:
    """Blocks after one action."""

    action: str
    """Action as a report shows it."""
    holders: Mapping[v.BlockId, tuple[v.RequestId, ...]]
    """Requests that have a block in their tables, sorted."""
    free: frozenset[v.BlockId] = frozenset()
    """Blocks in the free queue; empty if the engine shows no state."""
    cached: frozenset[v.BlockId] = frozenset()
    """Published blocks; empty if the engine shows no state."""


def make_film(options: CheckOptions, make_engine: EngineFactory, program: Program) -> list[Picture]:
    """Return the engine's blocks after each action, up to the first finding.

    They are taken from its snapshots, or from its plans if it shows no state.
    """
    run = start_program(program, make_engine, find_profile(options.profile))
    shows_state = Capability.SNAPSHOT in run.capabilities
    tables: dict[v.RequestId, tuple[v.BlockId, ...]] = {}
    film: list[Picture] = []
    num_seen = 0
    for action in program.actions:
        findings = run.perform(action)
        for exchange in run.exchanges[num_seen:]:
            if isinstance(exchange.seen, v.Plan):
                _follow(tables, exchange.seen)
        num_seen = len(run.exchanges)
        has_raised = num_seen > 0 and run.exchanges[-1].seen is None
        shown = run.engine.snapshot() if shows_state and not has_raised else None
        text = " ".join(describe(action).split())
        film.append(_take(text, shown) if shown is not None else Picture(text, _turn(tables)))
        if findings:
            break
    return film


def _take(action: str, shown: v.Snapshot) -> Picture:
    tables = {
        request.request_id: tuple(block for table in request.block_tables for block in table)
        for request in shown.requests
    }
    cached = {block for block, key in enumerate(shown.block_keys) if key is not None}
    return Picture(action, _turn(tables), frozenset(shown.free_queue), frozenset(cached))


def _turn(
    tables: Mapping[v.RequestId, tuple[v.BlockId, ...]],
) -> dict[v.BlockId, tuple[v.RequestId, ...]]:
    """Return the requests of each block, from the blocks of each request; without the null
    block."""
    holders: dict[v.BlockId, set[v.RequestId]] = {}
    for name, blocks in tables.items():
        for block in blocks:
            holders.setdefault(block, set()).add(name)
    return {block: tuple(sorted(holders[block])) for block in sorted(holders) if block}


def _follow(tables: dict[v.RequestId, tuple[v.BlockId, ...]], plan: v.Plan) -> None:
    """Update the tables of requests with a plan."""
    for name in (*plan.finished_req_ids, *plan.preempted_req_ids):
        tables.pop(name, None)
    for row in plan.rows:
        if isinstance(row, v.NewRow):
            tables[row.request_id] = tuple(block for table in row.block_ids for block in table)
            continue
        blocks = tuple(block for table in row.new_block_ids for block in table)
        is_whole = row.resumed or row.request_id in plan.remapped_req_ids
        tables[row.request_id] = blocks if is_whole else (*tables.get(row.request_id, ()), *blocks)
