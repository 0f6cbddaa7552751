"""Excuses: the deviations that an adapter declares, and what a run makes of them (D14).

A finding that was declared is counted and passed over, like the work of a quirk. Each deviation
says what it excuses, by the sentences that complain or the fields that differ, so nothing else is
passed over with it; and it brings a program that shows it, so it is seen when it has gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from blockstep.conformance.engine import Deviation
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.spec import vocabulary as v

OF_FIELD = "differs in {}"
"""How a field stands beside sentences, whose names have no spaces."""


@dataclass(slots=True)
class Excuses:
    """What was excused in one run."""

    deviations: Sequence[Deviation] = ()
    counts: Counter[str] = field(default_factory=Counter)
    """Findings, by the deviation that excused them."""
    is_over: bool = False
    """What was excused leaves nothing that the run could go on with."""

    def take(
        self,
        findings: list[Finding],
        event: v.Event,
        expected: v.Observation | None,
        seen: v.Observation | None,
    ) -> list[Finding]:
        """What no deviation excuses.

        The run goes on where both sides still mean the same: after a violated property, and after a
        difference that is not of a decision. `seen` is None if the engine raised or stands still.
        """
        if not findings or not self.deviations:
            return findings
        left = []
        for finding in findings:
            named = {self._find(what, event, seen) for what in _list_matters(finding)}
            if None in named:
                left.append(finding)
            else:
                self.counts.update(name for name in named if name is not None)
        self.is_over = not left and (seen is None or not _decides_alike(expected, seen))
        return left

    def _find(self, what: str, event: v.Event, seen: v.Observation | None) -> str | None:
        """The name of the deviation that excuses a sentence, or a difference in a field."""
        for deviation in self.deviations:
            fields = map(OF_FIELD.format, deviation.fields)
            is_declared = what in deviation.sentences or any(
                fnmatchcase(what, one) for one in fields
            )
            if is_declared and deviation.when(event, seen):
                return deviation.name
        return None


def _list_matters(finding: Finding) -> list[str]:
    """What must be excused of a finding: its sentence, or each field in which both sides differ."""
    if finding.kind is FindingKind.DIVERGENCE:
        return [OF_FIELD.format(difference.field) for difference in finding.differences]
    return [finding.sentence]


def _decides_alike(expected: v.Observation | None, seen: v.Observation) -> bool:
    """Whether answers differ in nothing that a later step follows from; None: not compared."""
    match expected, seen:
        case v.Outputs(rows=mine), v.Outputs(rows=theirs):
            left, right = ([_delivered(row) for row in rows] for rows in (mine, theirs))
            return left == right
        case _:
            return expected is None or expected == seen


def _delivered(row: v.OutputRow) -> tuple[str, v.TokenIds, bool]:
    return row.request_id, row.new_token_ids, row.finish_reason is not None
