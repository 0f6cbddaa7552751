"""Runs: construction of the run that an engine's equivalence needs, and of runs of programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from blockstep.conformance.engine import (
    EngineFactory,
    Equivalence,
    Renamed,
    Safety,
    SamePlans,
    get_traits,
)
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.plan_equivalence import PlanRun
from blockstep.conformance.lockstep.renamed_equivalence import RenamedRun
from blockstep.conformance.lockstep.safety_equivalence import SafetyRun
from blockstep.conformance.lockstep.scoped_run import ScopedRun
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Program
from blockstep.spec.profiles import STRICT, Profile

_KINDS: Mapping[type[Equivalence], type[ScopedRun]] = {
    Renamed: RenamedRun,
    SamePlans: PlanRun,
    Safety: SafetyRun,
}


def get_start(make_engine: EngineFactory) -> Callable[..., LockStep]:
    """Return `start` of the kind of run that the factory's equivalence needs."""
    scope = get_traits(make_engine).equivalence
    if scope is None:
        return LockStep.start
    return next(run for kind, run in _KINDS.items() if isinstance(scope, kind)).start


def start_program(
    program: Program, make_engine: EngineFactory, profile: Profile = STRICT
) -> LockStep:
    """Return the run of a program before its first action."""
    return get_start(make_engine)(
        program.config,
        make_engine,
        program.token_seed,
        program.vocabulary_size,
        keep_exchanges=True,
        profile=profile,
    )


def run_program(
    program: Program, make_engine: EngineFactory, profile: Profile = STRICT
) -> tuple[LockStep, list[Finding]]:
    """Run a program from the start until it ends or something is wrong.

    Raises:
        ConfigError: the engine rejects the config.
    """
    run = start_program(program, make_engine, profile)
    if run.unbuilt is not None:
        return run, [run.unbuilt]
    for action in program.actions:
        findings = run.perform(action)
        if findings:
            return run, findings
    return run, []
