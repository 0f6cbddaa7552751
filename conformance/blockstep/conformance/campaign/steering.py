"""Steering: totals of rounds, and the units of the next round.

The rule. An episode earns, for each goal, pair and line of the engine that it reached, 1 / (1 + n),
where n is the number of episodes of its target that had reached it before this round. A cell's
value is what its units earned per event, of late: both sums are multiplied by `KEEP` in each round.
A unit of the next round goes

1. to the first cell that had no unit yet, in the order of the plan;
2. otherwise, in one case of `EXPLORE_ONE_IN`, to a cell drawn evenly;
3. otherwise to a cell drawn with its value as its weight.

The mutants of a target's kept programs are a cell of their own, which opens with the first such
program; their parents are drawn with weight 1 / (1 + n) of the goal or line for which they were
kept.

Draws are seeded with the campaign's key and the number of the round, and the totals are those of
all rounds up to two before. So the units of a round are the same on every worker. They are
stored with the round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from random import Random

from blockstep.conformance.campaign.plan import Plan
from blockstep.conformance.campaign.records import (
    CellTotals,
    Past,
    Round,
    Seen,
    TargetTotals,
    Totals,
    Unit,
    UnitResult,
)
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.search.verdict_requirements import require_wish

KEEP = 0.9
EXPLORE_ONE_IN = 4
KEPT_MAX = 64
"""Most programs that are kept for one target: those of the rarest goals."""


def start_totals(plan: Plan) -> Totals:
    """Return the totals before the first round."""
    return Totals(-1, [TargetTotals() for _ in plan.targets], [CellTotals() for _ in plan.cells])


def get_base(number: int) -> int:
    """Return the last round whose results decide the units of round `number`; -1: none."""
    return max(number - 2, 0) if number else -1


def open_round(plan: Plan, totals: Totals, last: Round | None, at: float) -> Round:
    """Return the round after `last`, given the totals of its base. The first one asks each engine
    for its facts."""
    cells, number = plan.cells, 0 if last is None else last.number + 1
    past = Past(
        at,
        totals.episodes,
        totals.events,
        sum(len(target.goals) for target in totals.targets),
        len(set(chain.from_iterable(target.findings for target in totals.targets))),
        sum(len(target.lines) for target in totals.targets),
    )
    if last is None:
        first = [next(i for i, it in enumerate(cells) if it.target == n) for n in _places(plan)]
        looks = tuple(Unit(cell, plan.file.seeds[0], 0, looks=True) for cell in first)
        return Round(0, looks, (0,) * len(cells), past)
    rng = Random(f"{plan.key}/{number}")  # noqa: S311 - not for secrets
    given, units = list(last.given), []
    choices = [index for index in range(len(cells)) if _is_open(plan, totals, index)]
    for _ in range(plan.file.round if choices else 0):
        index = _choose(choices, given, totals, rng)
        units.append(_make_unit(plan, totals, index, given[index], rng))
        given[index] += 1
    units.sort(key=lambda unit: cells[unit.cell].target)  # a worker starts few engines in a round
    return Round(number, tuple(units), tuple(given), past)


def _places(plan: Plan) -> range:
    return range(len(plan.targets))


def _is_open(plan: Plan, totals: Totals, index: int) -> bool:
    """Return whether a cell's engine can be built and has its features; mutants need parents."""
    cell = plan.cells[index]
    target = totals.targets[cell.target]
    if (
        target.look is None
        or not target.look.facts.equivalence
        or (cell.preset is None and not target.kept)
    ):
        return False
    try:
        require_wish(plan.make_options(cell), target.look.facts)
    except UsageError:
        return False
    return True


def _choose(choices: Sequence[int], given: Sequence[int], totals: Totals, rng: Random) -> int:
    for index in choices:
        if not given[index]:
            return index
    if not rng.randrange(EXPLORE_ONE_IN):
        return rng.choice(choices)
    values = [totals.cells[index].reward / max(totals.cells[index].cost, 1.0) for index in choices]
    return rng.choices(choices, values)[0] if any(values) else rng.choice(choices)


def _make_unit(plan: Plan, totals: Totals, index: int, turn: int, rng: Random) -> Unit:
    """Return a cell's unit number `turn`: its seeds take turns."""
    seeds, count = plan.file.seeds, plan.file.episodes
    seed, start = seeds[turn % len(seeds)], turn // len(seeds) * count
    cell = plan.cells[index]
    if cell.preset is not None:
        return Unit(index, seed, start)
    target = totals.targets[cell.target]
    goals = sorted(target.kept)
    weights = [1 / (1 + target.count(goal)) for goal in goals]
    parents = tuple(target.kept[goal] for goal in rng.choices(goals, weights, k=count))
    return Unit(index, seed, start, parents=parents)


def add_round(
    plan: Plan, totals: Totals, played: Round, results: Sequence[UnitResult | None]
) -> Totals:
    """Return the totals with the results of one more round, in the order of its units.

    A unit without a result is left out. `totals` is changed.
    """
    assert played.number == totals.round + 1
    cells = plan.cells
    for cell in totals.cells:
        cell.reward *= KEEP
        cell.cost *= KEEP
    before = [{**target.goals, **target.lines} for target in totals.targets]
    for name, unit, result in zip(played.list_names(), played.units, results, strict=True):
        place = cells[unit.cell].target
        if result is None:
            continue
        if result.look is not None:
            totals.targets[place].look = result.look
        _add_to_target(totals.targets[place], name, result)
        cell = totals.cells[unit.cell]
        cell.units += not unit.looks
        cell.episodes += result.episodes
        cell.events += result.events
        cell.cost += result.events
        rarity, reached = before[place], {**result.goals, **result.lines}
        cell.reward += sum(n / (1 + rarity.get(name, 0)) for name, n in reached.items())
        totals.seconds += result.seconds
    for target in totals.targets:
        rarest = sorted(target.kept, key=lambda goal: (target.count(goal), goal))
        target.kept = {goal: target.kept[goal] for goal in rarest[:KEPT_MAX]}
    totals.round = played.number
    return totals


def _add_to_target(target: TargetTotals, unit: str, result: UnitResult) -> None:
    target.episodes += result.episodes
    target.events += result.events
    target.num_spurious += result.num_spurious
    for name in ("goals", "lines", "sayings", "shrunk", "deviations"):
        setattr(target, name, dict(Counter(getattr(target, name)) + Counter(getattr(result, name))))
    for goal, program in result.kept.items():
        target.kept.setdefault(goal, program)
    for found, count in result.findings.items():
        at = result.at
        seen = target.findings.setdefault(found, Seen(0, at, at, unit, unit))
        seen.count += count
        seen.first_at, seen.last_at = min(seen.first_at, at), max(seen.last_at, at)
        seen.last_unit = unit
