"""Machine: the actions as a Hypothesis state machine, so that Hypothesis shrinks and remembers.

from blockstep.conformance.search.machine import machine
TestMyEngine = machine("mypkg.adapter:make").TestCase
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import note, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from blockstep.conformance.draw.actions import SeededDraw, is_enabled, list_actions
from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.view import View
from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Drain, describe
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import draw_options, fit_depth, start_run
from blockstep.conformance.search.options import CheckOptions, search_first
from blockstep.spec.vocabulary import Policy

T = TypeVar("T")


class HypothesisDraw:
    """Decisions from Hypothesis: the `Draw` of state machines."""

    def __init__(self, data: strategies.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        """Return an int between `low` and `high`, both included."""
        return self._data.draw(strategies.integers(low, max(low, high)))

    def choice(self, options: Sequence[T]) -> T:
        """Return one of `options`."""
        return self._data.draw(strategies.sampled_from(options))

    def chance(self, percent: int) -> bool:
        """Return True with a probability of `percent` in a hundred; shrinks to False."""
        return self._data.draw(strategies.integers(0, 99)) >= 100 - percent

    def tokens(self, count: int, vocabulary_size: int) -> tuple[int, ...]:
        """Return `count` token ids from one drawn seed; seed 0 gives zeros."""
        seed = self._data.draw(strategies.integers(0, 2**16))
        return SeededDraw(str(seed)).tokens(count, vocabulary_size) if seed else (0,) * count


class EngineMachine(RuleBasedStateMachine):
    """One engine in lock-step with the spec; every rule is an action, every step is compared."""

    make_engine: EngineFactory
    options: CheckOptions

    def __init__(self) -> None:
        super().__init__()
        self.view: View | None = None
        self.run: LockStep | None = None

    @initialize(data=strategies.data())
    def start(self, data: strategies.DataObject) -> None:
        """Draw a swarm and build both sides."""
        make_engine = type(self).make_engine
        options = fit_depth(self.options, make_engine)
        swarm = draw_options(options, HypothesisDraw(data), make_engine)
        self.run, self.view = start_run(swarm, make_engine, options)
        note(f"config {self.run.config}")

    def is_possible(self, name: str) -> bool:
        """Return whether action `name` makes sense now."""
        return self.view is not None and is_enabled(name, self.view)

    def act(self, name: str, data: strategies.DataObject) -> None:
        """Draw the details of action `name` and do it."""
        assert self.run is not None
        assert self.view is not None
        draw: Draw = HypothesisDraw(data)
        self.perform(self.run.fit(list_actions()[name].draw(self.view, draw)))

    def perform(self, action: Action) -> None:
        """Do one action on both sides. Raises AssertionError with what is wrong."""
        assert self.run is not None
        assert self.view is not None
        note(describe(action))
        findings = self.run.perform(action)
        assert not findings, "\n".join(describe_finding(found) for found in findings)
        self.view.note(action)

    def teardown(self) -> None:
        """Drain the run, unless it failed already."""
        if self.run is not None and self.view is not None and not self.run.has_failed:
            self.perform(Drain())


def _make_rule(name: str) -> Callable[[EngineMachine, strategies.DataObject], None]:
    """Return the rule of action `name`."""

    def act(self: EngineMachine, data: strategies.DataObject) -> None:
        self.act(name, data)

    act.__name__ = name
    return precondition(lambda self: self.is_possible(name))(rule(data=strategies.data())(act))


def describe_finding(finding: Finding) -> str:
    """Return a finding in a few lines."""
    head = f"{finding.kind} {finding.property_id} {finding.sentence}: {finding.message}"
    rows = [
        f"  {difference.field}: expected {difference.expected}, seen {difference.seen}"
        for difference in finding.differences
    ]
    return "\n".join([head, *rows])


def machine(
    engine: str | EngineFactory,
    preset: str = "small",
    policy: Policy | None = None,
    path: str | None = None,
) -> type[EngineMachine]:
    """Return a state machine class for an engine, named or given as a factory.

    `path` is a folder that is searched first for a named engine. The engine is checked under the
    equivalence that its factory declares.

    Raises:
        EngineNotFoundError: there is no engine of this name.
    """
    if path is not None:
        search_first(path)
    make_engine = load_engine(engine) if isinstance(engine, str) else engine
    members: dict[str, object] = {
        **{name: _make_rule(name) for name in list_actions()},
        "make_engine": staticmethod(make_engine),
        "options": CheckOptions(preset=preset, policy=policy),
    }
    return type("EngineMachine", (EngineMachine,), members)
