"""The verdict as JSON; the schema is in docs/reference/json.md and never loses a field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from blockstep.conformance.protocol.findings import Difference, Finding, Subjects
from blockstep.conformance.protocol.program import describe, describe_config
from blockstep.conformance.report.failure import reproduce
from blockstep.conformance.report.headlines import make_headline
from blockstep.conformance.search.check import CheckResult


def check_to_json(result: CheckResult, corpus: Sequence[CheckResult] = ()) -> dict[str, Any]:
    """Return dicts, lists, strings and numbers, with the results of a corpus."""
    options = result.options
    return {
        "format": "blockstep-check",
        "version": 2,
        "engine": options.engine,
        "preset": options.preset,
        "profile": options.profile,
        "policy": None if options.policy is None else str(options.policy),
        "with": list(options.with_features),
        "without": list(options.without_features),
        "seed": options.seed,
        "episode": options.episode,
        "program_file": options.program,
        "exit_code": int(result.exit_code),
        "conforms": result.exit_code == 0,
        "equivalence": result.equivalence,
        "shows_states": result.has_snapshot,
        "not_asked": list(result.not_asked),
        "settings": [asdict(setting) for setting in result.settings],
        "num_events": result.num_events,
        "num_episodes": result.num_episodes,
        "seconds": round(result.seconds, 3),
        "canary_killed_after_events": result.canary_killed_after,
        "witnesses": dict(sorted(result.witnesses.items())),
        "witnesses_missing": list(result.missing),
        "pairs_not_met": list(result.apart),
        "quirk_sides_not_met": list(result.unseen_sides),
        "findings_known": dict(sorted(result.known.items())),
        "deviations": {name: result.excused[name] for name in sorted(result.deviations)},
        "deviations_stale": list(result.stale),
        "known_programs": dict(result.known_programs),
        "capabilities_missing": dict(sorted(result.skipped.items())),
        "failure": failure_to_json(result),
        "corpus": [_played_to_json(played) for played in corpus],
    }


def _played_to_json(result: CheckResult) -> dict[str, object]:
    return {
        "program_file": result.options.program,
        "exit_code": int(result.exit_code),
        "num_events": result.num_events,
        "capabilities_missing": dict(sorted(result.skipped.items())),
        "failure": failure_to_json(result),
    }


def failure_to_json(result: CheckResult) -> Mapping[str, object] | None:
    """Return the first failure as docs/reference/json.md has it; None if there is none."""
    if result.first is None:
        return None
    failure, loss, findings = result.failure, result.loss, [result.first]
    if failure is not None:
        findings = [*(failure.findings or findings)]
        data: dict[str, object] = {
            "event": failure.num_events,
            "config": describe_config(failure.program.config),
            "program": [describe(action) for action in failure.program.actions],
            "num_shrink_runs": failure.num_runs,
            "reproduce": reproduce(result.options, result.failed_episode or 0),
        }
    elif loss is not None:
        data = {
            "event": len(loss.events),
            "config": loss.config,
            "program": list(loss.events),
            "num_shrink_runs": 0,
            "reproduce": reproduce(result.options, result.failed_episode or 0, loss),
        }
    else:
        return None
    if loss is not None and loss.finding not in findings:
        findings.append(loss.finding)
    return {
        "episode": result.failed_episode,
        "findings": [finding_to_json(finding) for finding in findings],
        **data,
    }


def finding_to_json(finding: Finding) -> dict[str, object]:
    """Return a finding as docs/reference/json.md has it."""
    return {
        "kind": str(finding.kind),
        "property": finding.property_id,
        "sentence": finding.sentence,
        "message": finding.message,
        "headline": make_headline(finding),
        "subjects": subjects_to_json(finding.subjects),
        "differences": [difference_to_json(difference) for difference in finding.differences],
        "frames": list(finding.frames),
    }


def subjects_to_json(subjects: Subjects) -> dict[str, object]:
    """Return the requests and blocks that a finding is about."""
    return {"requests": list(subjects.requests), "blocks": list(subjects.blocks)}


def difference_to_json(difference: Difference) -> dict[str, object]:
    """Return one field in which two sides differ."""
    return asdict(difference)
