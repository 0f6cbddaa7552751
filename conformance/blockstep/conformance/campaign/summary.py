"""Summary: defects, coverage and verdict of a campaign, from what its store holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from blockstep.conformance.campaign.leases import Lease, Store
from blockstep.conformance.campaign.plan import Plan
from blockstep.conformance.campaign.play import find_known
from blockstep.conformance.campaign.records import (
    Found,
    Past,
    Seen,
    TargetTotals,
    Totals,
    decode,
)
from blockstep.conformance.campaign.worker import Campaign
from blockstep.conformance.search.defects import Defect, group_failures
from blockstep.conformance.search.options import ExitCode, exit_code_of_all
from blockstep.conformance.search.verdict_requirements import missing_goals

COURSE_MAX = 200
"""The course of a campaign shows at most this number of rounds, evenly spaced."""


@dataclass(frozen=True, slots=True)
class Row:
    """One defect of an engine: its shortest finding, and where it was seen."""

    found: Found
    digests: tuple[str, ...]
    """All findings that were counted as this defect."""
    seen: Mapping[str, Seen]
    """Sightings by target."""
    known: str
    """Known program that shows the defect; "" if there is none."""

    @property
    def count(self) -> int:
        """Return the number of shrunk failures."""
        return sum(seen.count for seen in self.seen.values())


@dataclass(frozen=True, slots=True)
class Summary:
    """State of a campaign."""

    plan: Plan
    totals: Totals
    num_rounds: int
    is_finished: bool
    leases: tuple[Lease, ...]
    rows: tuple[Row, ...]
    """Defects, those that are not known first, then in the order in which they were found."""
    missing: Mapping[str, tuple[str, ...]]
    """Required goals that were not reached, by target."""
    course: tuple[Past, ...]

    @property
    def new(self) -> tuple[Row, ...]:
        """Return the defects that are not known."""
        return tuple(row for row in self.rows if not row.known)

    @property
    def gone(self) -> tuple[str, ...]:
        """Return the known programs that fail in no target."""
        looks = [it.look for it in self.totals.targets if it.look is not None]
        played = {name for look in looks for name in look.known}
        return tuple(sorted(n for n in played if not any(it.known.get(n) for it in looks)))

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of the campaign."""
        if self.new:
            return exit_code_of_all(row.found.first for row in self.new)
        looks = [it.look for it in self.totals.targets]
        is_alive = any(look is None or not look.canary for look in looks)
        has_missed = any(self.missing.values()) and not self.rows  # known failures end episodes
        is_empty = any(not target.events for target in self.totals.targets)
        return ExitCode.HARNESS if is_alive or has_missed or is_empty else ExitCode.CONFORMS


def summarize(plan: Plan, store: Store, with_course: bool = False) -> Summary:
    """Return the state of a campaign; `with_course` also reads its rounds."""
    campaign = Campaign(plan, store)
    totals, num_rounds = campaign.read_all(), store.count_rounds()
    leases = tuple(store.list_leases())
    step = -(-num_rounds // COURSE_MAX) or 1
    rounds = range(0, num_rounds, step) if with_course else ()
    names = [target.name for target in plan.targets]
    return Summary(
        plan=plan,
        totals=totals,
        num_rounds=num_rounds,
        is_finished=num_rounds > 0 and not leases and campaign.is_spent(num_rounds, totals),
        leases=leases,
        rows=tuple(sorted(_list_rows(plan, totals, store), key=lambda row: bool(row.known))),
        missing={
            name: _find_missing(plan, place, totals.targets[place])
            for place, name in enumerate(names)
        },
        course=tuple(campaign.get_round(number).past for number in rounds),
    )


def _find_missing(plan: Plan, place: int, target: TargetTotals) -> tuple[str, ...]:
    """Return the required goals that were not reached, with the options of the target's plainest
    cell."""
    if target.look is None:
        return ()
    cells = [it for it in plan.cells if it.target == place and it.preset is not None]
    cell = min(cells, key=lambda it: (len(it.features), it.preset != "small"))
    options = plan.make_options(cell, max_depth=target.look.facts.max_depth)
    return missing_goals(target.goals, options, target.look.facts)


def _list_rows(plan: Plan, totals: Totals, store: Store) -> Iterator[Row]:
    """Yield the defects of each engine: findings that `found.gather` counts as one."""
    for engine in dict.fromkeys(target.engine for target in plan.targets):
        pairs = zip(plan.targets, totals.targets, strict=True)
        targets = {it.name: total for it, total in pairs if it.engine == engine}
        known = {
            digest: file
            for total in targets.values()
            if total.look is not None
            for file, digest in total.look.known.items()
        }
        asked = dict.fromkeys(
            name for total in targets.values() for name in (*find_known(total), *total.findings)
        )
        data = store.get([f"finding/{name}" for name in asked])
        founds = [decode(it, Found) for it in data if it is not None]
        founds.sort(key=lambda it: (it.unit, it.length, it.digest))
        for plainest, members in _gather(plan, founds):
            digests = tuple(found.digest for found in members)
            seen = {
                name: _join([total.findings[it] for it in digests if it in total.findings])
                for name, total in targets.items()
                if any(it in total.findings for it in digests)
            }
            file = next((known[it] for it in digests if it in known), "")
            if seen or file:
                yield Row(plainest, digests, seen, file)


def _gather(plan: Plan, founds: Sequence[Found]) -> Iterator[tuple[Found, list[Found]]]:
    """Yield the findings of each defect, the plainest first: those with the same known causes, and
    those that `found.gather` counts as one."""
    named: dict[tuple[str, ...], list[Found]] = {}
    alone = {found.causes for found in founds if len(found.causes) == 1}
    for found in founds:
        is_sum = all((cause,) in alone for cause in found.causes)
        named.setdefault(found.causes[:1] if is_sum else found.causes, []).append(found)
    unnamed = named.pop((), [])
    for members in named.values():
        yield min(members, key=lambda it: it.length), members
    defects = {id(it): (it, found) for found in unnamed for it in [_make_defect(plan, found)]}
    for group in group_failures([it for it, _ in defects.values()]):
        yield defects[id(group.plainest)][1], [defects[id(it)][1] for it in group.defects]


def _make_defect(plan: Plan, found: Found) -> Defect:
    """Return a finding as `found.gather` takes it."""
    options = replace(plan.make_options(plan.cells[0]), episode=found.episode)
    loss, length = found.loss, found.length
    return Defect((), found.first, options, found.episode, length, 0, found.symptoms, loss=loss)


def _join(seen: list[Seen]) -> Seen:
    first, last = min(seen, key=lambda it: it.first_at), max(seen, key=lambda it: it.last_at)
    total = sum(it.count for it in seen)
    return Seen(total, first.first_at, last.last_at, first.first_unit, last.last_unit)


def summary_to_json(summary: Summary) -> dict[str, object]:
    """Return the summary as docs/reference/json.md has it."""
    totals, plan = summary.totals, summary.plan
    return {
        "format": "blockstep-campaign",
        "version": 1,
        "campaign": plan.key,
        "finished": summary.is_finished,
        "exit_code": int(summary.exit_code),
        "num_rounds": summary.num_rounds,
        "num_episodes": totals.episodes,
        "num_events": totals.events,
        "seconds": round(totals.seconds, 3),
        "leases": [
            {"unit": it.unit, "owner": it.owner, "seconds": round(it.seconds, 1)}
            for it in summary.leases
        ],
        "targets": [
            {
                "name": it.name,
                "version": "" if total.look is None else total.look.version,
                "num_episodes": total.episodes,
                "num_events": total.events,
                "num_failures": sum(total.sayings.values()),
                "num_spurious": total.num_spurious,
                "goals": dict(sorted(total.goals.items())),
                "num_lines": len(total.lines),
                "missing": list(summary.missing[it.name]),
                "deviations": total.deviations,
                "untried": [] if total.look is None else list(total.look.untried),
            }
            for it, total in zip(plan.targets, totals.targets, strict=True)
        ],
        "cells": [
            {
                "target": plan.targets[cell.target].name,
                "preset": cell.preset or "mutants",
                "features": list(cell.features),
                "num_units": total.units,
                "num_episodes": total.episodes,
                "num_events": total.events,
            }
            for cell, total in zip(plan.cells, totals.cells, strict=True)
        ],
        "known_gone": list(summary.gone),
        "defects": [_row_to_json(row) for row in summary.rows],
    }


def _row_to_json(row: Row) -> dict[str, object]:
    return {
        "digest": row.found.digest,
        "digests": list(row.digests),
        "name": row.found.name,
        "message": row.found.first.message,
        "known": row.known,
        "causes": list(row.found.causes),
        "length": row.found.length,
        "targets": {
            name: {"count": it.count, "first_seen": it.first_at, "last_seen": it.last_at}
            for name, it in row.seen.items()
        },
    }
