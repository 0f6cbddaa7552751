"""The fixture: own programs, run on the engine of the session."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import get_start
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Program
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.report.failure import render_outcome, render_program
from blockstep.conformance.search.isolation import Isolation, RefusedError
from blockstep.conformance.search.options import CheckOptions, find_profile, search_first
from blockstep.conformance.search.shrink import conclude
from blockstep.spec.vocabulary import Config


class Walk:
    """An own program, one action at a time. It runs in this process, unlike `Bench.run`."""

    def __init__(self, bench: Bench, run: LockStep) -> None:
        self._bench = bench
        self.run = run
        """The run of spec and engine: `run.engine`, `run.plans` in flight, `run.live`,
        `run.last_plan`."""
        self.actions: list[Action] = []

    def perform(self, *actions: Action) -> None:
        """Do these actions on both sides. Raises AssertionError with all findings."""
        __tracebackhide__ = True
        for action in actions:
            self.actions.append(action)
            findings = self.run.perform(action)
            if findings:
                raise AssertionError(self._bench.render(self, findings))


class Bench:
    """The value of the fixture `blockstep`: runs own programs on the engine."""

    def __init__(
        self, options: CheckOptions, isolation: Isolation, folders: Sequence[str], nodeid: str
    ) -> None:
        self._options = options
        """The engine, its profile and the folder that is searched before all others."""
        self._isolation = isolation
        self._folders = folders
        """Further folders that are searched for the engine."""
        self._nodeid = nodeid
        self.engine = options.engine
        self.profile = options.profile

    def run(self, program: Program | Sequence[Action], config: Config | None = None) -> None:
        """Run a program, or actions with a config, in a child process.

        Raises:
            AssertionError: with all findings.
        """
        __tracebackhide__ = True
        if not isinstance(program, Program):
            if config is None:
                raise ValueError(
                    "actions need a config: blockstep.run(actions, config=Config(...))"
                )
            program = Program(config, tuple(program))
        elif config is not None:
            raise ValueError("a Program has a config of its own: leave config out")
        try:
            outcome = self._isolation.run(self._options, program)
        except RefusedError as error:
            pytest.skip(f"not tried: {error}")
        if outcome.first is not None:
            raise AssertionError(f"{render_outcome(outcome, self.engine)}\n{self._reproduce()}")
        for name, count in outcome.skipped.items():
            pytest.skip(f"not tried: the engine lacks {name} ({count} actions left out)")

    def lockstep(self, config: Config, token_seed: int = 0, vocabulary_size: int = 50) -> Walk:
        """Return a run of spec and engine that takes one action at a time, in this process."""
        for path in (*reversed(self._folders), self._options.path):
            if path is not None:
                search_first(path)
        make_engine = load_engine(self.engine)
        profile = find_profile(self.profile)
        start = get_start(make_engine)
        run = start(config, make_engine, token_seed, vocabulary_size, True, profile)
        return Walk(self, run)

    def render(self, walk: Walk, findings: list[Finding]) -> str:
        """Return the report of a failure, ending with how to reproduce it."""
        program = Program(walk.run.config, tuple(walk.actions))
        text = render_program(conclude(program, walk.run, findings), self.engine)
        return f"{text}\n{self._reproduce()}"

    def _reproduce(self) -> str:
        profile = "" if self.profile == "strict" else f" --blockstep-profile={self.profile}"
        path = self._options.path
        profile += "" if path is None else f" --blockstep-path={shlex.quote(path)}"
        command = f"pytest '{self._nodeid}' --blockstep-engine={shlex.quote(self.engine)}{profile}"
        return f"  reproduce  {command} -m 'not blockstep'"
