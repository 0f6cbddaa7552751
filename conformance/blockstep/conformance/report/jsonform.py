"""The verdict for machines; the schema is in docs/reference/json.md and never loses a field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockstep.conformance.protocol.findings import Difference, Finding
from blockstep.conformance.protocol.program import describe
from blockstep.conformance.report.failure import describe_config, reproduce
from blockstep.conformance.search.check import CheckResult


def check_to_json(result: CheckResult) -> dict[str, Any]:
    """A plain structure of dicts, lists, strings and numbers."""
    options = result.options
    return {
        "format": "blockstep-check",
        "version": 1,
        "engine": options.engine,
        "preset": options.preset,
        "profile": options.profile,
        "policy": None if options.policy is None else str(options.policy),
        "seed": options.seed,
        "episode": options.episode,
        "exit_code": int(result.exit_code),
        "conforms": result.exit_code == 0,
        "equivalence": result.equivalence,
        "num_events": result.num_events,
        "num_episodes": result.num_episodes,
        "seconds": round(result.seconds, 3),
        "canary_killed_after_events": result.canary_killed_after,
        "witnesses": dict(sorted(result.witnesses.items())),
        "witnesses_missing": list(result.missing),
        "findings_known": dict(sorted(result.known.items())),
        "capabilities_missing": dict(sorted(result.skipped.items())),
        "failure": failure_to_json(result),
    }


def failure_to_json(result: CheckResult) -> Mapping[str, object] | None:
    """The first failure as docs/reference/json.md has it; None if there is none."""
    if result.told is not None:
        return result.told.failure
    if result.failure is None or result.first is None or result.failed_episode is None:
        return None
    program = result.failure.program
    findings = result.failure.findings or [result.first]
    return {
        "episode": result.failed_episode,
        "event": result.failure.run.num_events,
        "findings": [finding_to_json(finding) for finding in findings],
        "config": describe_config(program.config),
        "program": [describe(action) for action in program.actions],
        "num_shrink_runs": result.failure.num_runs,
        "reproduce": reproduce(result.options, result.failed_episode),
    }


def finding_to_json(finding: Finding) -> dict[str, object]:
    """A finding as docs/reference/json.md has it."""
    return {
        "kind": str(finding.kind),
        "property": finding.property_id,
        "sentence": finding.sentence,
        "message": finding.message,
        "differences": [difference_to_json(difference) for difference in finding.differences],
    }


def difference_to_json(difference: Difference) -> dict[str, object]:
    """One field in which two sides differ."""
    return {
        "field": difference.field,
        "expected": difference.expected,
        "seen": difference.seen,
        "note": difference.note,
    }
