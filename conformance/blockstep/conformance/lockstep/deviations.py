"""Deviations: those that an adapter declares, applied to the findings of a run (D14).

A declared finding is counted and does not fail the run, like a finding that a quirk explains. Each
deviation lists the checks or the differing fields that it covers, so that it covers nothing else;
and it has a program that shows it, so that a test notices when it is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from blockstep.conformance.engine import Deviation
from blockstep.conformance.lockstep.exchange import ask_adapter
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.spec import vocabulary as v

OF_FIELD = "differs in {}"
"""Form of a differing field in this list; names of checks have no spaces."""


@dataclass(slots=True)
class DeviationCounter:
    """Deviations of one run, and how often each was used."""

    deviations: Sequence[Deviation] = ()
    counts: Counter[str] = field(default_factory=Counter)
    """Number of findings, by the deviation that covers them."""
    is_over: bool = False
    """Whether a covered finding leaves the two sides in states from which the run cannot
    continue."""

    def take(
        self,
        findings: list[Finding],
        event: v.Event,
        expected: v.Observation | None,
        seen: v.Observation | None,
    ) -> list[Finding]:
        """Return the findings that no deviation covers.

        The run continues if both sides still have the same meaning: after a violated property, and
        after a difference that is no decision. `seen` is None if the engine raised or does not
        progress.
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
        """Return the name of the deviation that covers a check or a differing field."""
        for deviation in self.deviations:
            fields = map(OF_FIELD.format, deviation.fields)
            is_declared = what in deviation.sentences or any(
                fnmatchcase(what, one) for one in fields
            )
            name = f"when of deviation {deviation.name}"
            if is_declared and ask_adapter(name, deviation.when, event, seen):
                return deviation.name
        return None


def _list_matters(finding: Finding) -> list[str]:
    """Return what a deviation must cover: the check of a finding, or each field that differs."""
    if finding.kind is FindingKind.DIVERGENCE:
        return [OF_FIELD.format(difference.field) for difference in finding.differences]
    return [finding.sentence]


def _decides_alike(expected: v.Observation | None, seen: v.Observation) -> bool:
    """Return whether two answers have the same decisions; None: not compared."""
    match expected, seen:
        case v.Outputs(rows=mine), v.Outputs(rows=theirs):
            left, right = ([_delivered(row) for row in rows] for rows in (mine, theirs))
            return left == right
        case _:
            return expected is None or expected == seen


def _delivered(row: v.OutputRow) -> tuple[str, v.TokenIds, bool]:
    return row.request_id, row.new_token_ids, row.finish_reason is not None
