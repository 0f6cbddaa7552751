"""Options of a check, the budget of a search, and exit codes of a process."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS
from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.protocol.feature import SEVERAL_AT_ONCE
from blockstep.conformance.protocol.feature_selection import FeatureSelection, make_wish
from blockstep.conformance.protocol.features import (
    PRIORITY,
    UsageError,
    find_policy,
    list_policies,
)
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.registry import EQUIVALENCE_NAMES, load_engine
from blockstep.conformance.protocol.settings import TABLE, Settings
from blockstep.conformance.search.engine_wrappers import hide_state
from blockstep.spec.profiles import PROFILES, STRICT, Profile, get_profile
from blockstep.spec.vocabulary import Policy

SECONDS = {"s": 1, "m": 60, "h": 3600}


def read_budget(text: str) -> tuple[int | None, float | None]:
    """Return (events, seconds), one of them None, of `60s`, `5m`, `200000` or `200000events`.

    Raises:
        ValueError: if it is neither.
    """
    match = re.fullmatch(r"\s*([\d_,]+(?:\.\d+)?)\s*(s|m|h|events?|)\s*", text)
    number = float(match[1].replace("_", "").replace(",", "")) if match else 0.0
    if match is None or number <= 0:
        raise ValueError(
            f"budget {text!r}: must be a time (60s, 5m) or a number of events (200000), above 0"
        )
    unit = match[2]
    return (None, number * SECONDS[unit]) if unit in SECONDS else (int(number), None)


class ExitCode(IntEnum):
    """Exit code of a process (architecture section 5)."""

    CONFORMS = 0
    FAILED = 1
    """A divergence, a violated property or an error of the engine."""
    USAGE = 2
    SPEC = 3
    """The spec raised, as by an assertion of its own."""
    LIVENESS = 4
    HARNESS = 5
    """No verdict: nothing ran, a required coverage goal is missing, the canary was not caught, or
    a check raised."""


def exit_code_of(finding: Finding | None) -> ExitCode:
    """Return the exit code for a first finding."""
    if finding is None:
        return ExitCode.CONFORMS
    codes = {
        FindingKind.SPEC: ExitCode.SPEC,
        FindingKind.LIVENESS: ExitCode.LIVENESS,
        FindingKind.HARNESS: ExitCode.HARNESS,
    }
    return codes.get(finding.kind, ExitCode.FAILED)


def exit_code_of_all(findings: Iterable[Finding]) -> ExitCode:
    """Return the exit code for the findings of several defects: what Blockstep raised counts only
    if the engine has none."""
    codes = set(map(exit_code_of, findings))
    if ExitCode.SPEC in codes:
        return ExitCode.SPEC
    if codes - {ExitCode.HARNESS}:
        return ExitCode.FAILED
    return ExitCode.HARNESS if codes else ExitCode.CONFORMS


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Engine, scope and length of a check."""

    engine: str = "host"
    preset: str = "small"
    policy: Policy | None = None
    seed: int = 0
    max_events: int | None = None
    max_seconds: float | None = None
    episode: int | None = None
    """Run this one episode only."""
    sentence: str | None = None
    """Check whose failure is shrunk if several fail at once; None: the first one."""
    program: str | None = None
    """File of the one program that is run instead of drawn ones."""
    jobs: int = 1
    max_depth: int = MAX_DEPTH
    """Most frames in flight. An engine that cannot have several is given one at a time."""
    profile: str = STRICT.name
    """Release whose known quirks the spec follows; `strict` follows none."""
    path: str | None = None
    """Folder that is searched first when the engine is imported."""
    hide_state: bool = False
    """Judge plans and answers only: the engine is not asked for its state."""
    with_features: tuple[str, ...] = ()
    """Features (`features.FEATURES`) that every run has."""
    without_features: tuple[str, ...] = ()
    """Features that no run has."""

    @property
    def is_single(self) -> bool:
        """Return whether the options select one run, which gives no verdict on the engine."""
        return self.episode is not None or self.program is not None


def get_wish(options: CheckOptions) -> FeatureSelection:
    """Return the features that the options require and exclude.

    Raises:
        UsageError: a name is in no row of the table, or the options contradict each other.
    """
    policy = find_policy(options.policy)
    asked = () if policy is None else (policy.name,)
    wish = make_wish((*options.with_features, *asked), options.without_features)
    if options.max_depth == 1:
        for name in sorted(wish.always & SEVERAL_AT_ONCE):
            raise UsageError(f"feature {name!r}: needs 2 plans in flight or more, not depth 1")
    if options.policy is Policy.FCFS and PRIORITY.name in wish.always:
        raise UsageError(f"feature {PRIORITY.name!r}: cannot be with policy {options.policy}")
    for other in list_policies() if options.policy is not None else ():
        if other is not policy and other.name in wish.always:
            raise UsageError(f"feature {other.name!r}: cannot be with policy {options.policy}")
    if options.policy is Policy.PRIORITY and PRIORITY.name in wish.never:
        raise UsageError(f"without {PRIORITY.name!r}: the policy cannot be {options.policy}")
    return wish


def find_profile(name: str) -> Profile:
    """Return the profile called `name`. Raises UsageError with the known names."""
    profile = get_profile(name)
    if profile is None:
        known = ", ".join(profile.name for profile in PROFILES)
        raise UsageError(
            f"profile {name!r}: must be one of {known}, or vllm- and the three numbers of another "
            "release since 0.11.0"
        )
    return profile


def check_settings(settings: Settings) -> None:
    """Check the values of a project's table. Raises UsageError naming the key."""
    where = f"{settings.file}: {TABLE}"
    if settings.preset is not None and settings.preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise UsageError(f"{where}.preset: {settings.preset!r}: must be one of {known}")
    if settings.equivalence is not None and settings.equivalence not in EQUIVALENCE_NAMES:
        known = ", ".join(EQUIVALENCE_NAMES)
        raise UsageError(f"{where}.equivalence: {settings.equivalence!r}: must be one of {known}")
    try:
        find_profile(settings.profile or STRICT.name)
        read_budget(settings.budget or "1")
    except ValueError as error:
        raise UsageError(f"{where}.{error}") from None


def load(options: CheckOptions) -> EngineFactory:
    """Return the engine of the options, searched in their folder first.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
    """
    if options.path is not None:
        search_first(options.path)
    make_engine = load_engine(options.engine, find_profile(options.profile))
    return hide_state(make_engine) if options.hide_state else make_engine


def search_first(path: str) -> None:
    """Make Python search this folder first when it imports an engine."""
    if path not in sys.path:
        sys.path.insert(0, path)
