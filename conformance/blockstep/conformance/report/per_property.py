"""Subjects: the result of a check for each property and each other aspect."""

from __future__ import annotations

from typing import Any

ASPECTS = ("divergence", "fault", "liveness", "verdict")
"""Subjects that are not one property."""


def verdict_on(subject: str, check: dict[str, Any]) -> tuple[str, str]:
    """Return (passed, failed or skipped; why skipped) for a property or aspect, from a check's
    JSON.

    A check ends at its first finding, so subjects without a finding were not checked to the end.
    """
    if check["failure"] is not None:
        accused = set[str]()
        for finding in check["failure"]["findings"]:
            kind = finding["kind"] if finding["kind"] in ASPECTS else ""
            accused |= {finding["property"] or kind or "verdict", kind}
        if subject in accused:
            return "failed", ""
        return "skipped", f"the run ended at another finding: {_name(check['failure'])}"
    if subject == "verdict":
        return ("passed" if check["conforms"] else "failed"), ""
    if not check["num_events"] or check["exit_code"] not in {0, 2, 5}:
        return "skipped", "the run was not completed"
    equivalence = check["equivalence"]
    if subject in {"fault", "liveness"}:
        return "passed", ""
    if subject == "divergence" and equivalence == "safety":
        return "skipped", f"not compared with the specification: equivalence {equivalence}"
    if subject == "divergence" or (equivalence in {"exact", "renamed"} and check["shows_states"]):
        return "passed", ""
    shown = "" if check["shows_states"] else ", no states shown"
    return "skipped", f"judged in part only, and nothing found: equivalence {equivalence}{shown}"


def _name(failure: dict[str, Any]) -> str:
    first = failure["findings"][0]
    return f"{first['property'] or first['kind']} {first['sentence']}"
