"""Machine: the same rules as a Hypothesis state machine, so that Hypothesis shrinks and remembers.

from blockstep.conformance.search.machine import machine
TestMyEngine = machine("mypkg.adapter:make").TestCase
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import note, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from blockstep.conformance.draw.actions import RULES, SeededDraw, View, is_enabled
from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS, Draw, Preset, draw_swarm
from blockstep.conformance.engine import EngineFactory, is_async
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Drain, describe
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.vocabulary import Policy, Submit

T = TypeVar("T")


class HypothesisDraw:
    """Decisions from Hypothesis: `Draw` for state machines."""

    def __init__(self, data: strategies.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        """An int between `low` and `high`, both included."""
        return self._data.draw(strategies.integers(low, max(low, high)))

    def choice(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return self._data.draw(strategies.sampled_from(options))

    def chance(self, percent: int) -> bool:
        """True in about `percent` of a hundred cases; shrinks to False."""
        return self._data.draw(strategies.integers(0, 99)) >= 100 - percent

    def tokens(self, count: int, vocabulary_size: int) -> tuple[int, ...]:
        """So many token ids, from one drawn seed; 0 stands for all zeros."""
        seed = self._data.draw(strategies.integers(0, 2**16))
        return SeededDraw(str(seed)).tokens(count, vocabulary_size) if seed else (0,) * count


class EngineMachine(RuleBasedStateMachine):
    """One engine beside the spec; every rule is an action, every step is compared."""

    make_engine: EngineFactory
    preset: Preset
    policy: Policy | None = None

    def __init__(self) -> None:
        super().__init__()
        self.view: View | None = None
        self.run: LockStep | None = None

    @initialize(data=strategies.data())
    def start(self, data: strategies.DataObject) -> None:
        """Draw a swarm and build both sides."""
        make_engine = type(self).make_engine
        depth = MAX_DEPTH if is_async(make_engine) else 1
        swarm = draw_swarm(self.preset, HypothesisDraw(data), self.policy, depth)
        note(f"config {swarm.config}")
        self.view = View(swarm)
        self.run = LockStep.start(
            swarm.config, make_engine, swarm.token_seed, swarm.vocabulary_size
        )

    def is_possible(self, name: str) -> bool:
        """Whether rule `name` makes sense now."""
        return self.view is not None and is_enabled(name, self.view)

    def act(self, name: str, data: strategies.DataObject) -> None:
        """Draw the details of rule `name` and do it."""
        assert self.view is not None
        draw: Draw = HypothesisDraw(data)
        self.perform(RULES[name].rule(self.view, draw))

    def perform(self, action: Action) -> None:
        """Do one action on both sides. Raises AssertionError with what is wrong."""
        assert self.run is not None
        assert self.view is not None
        note(describe(action))
        findings = self.run.perform(action)
        assert not findings, "\n".join(describe_finding(found) for found in findings)
        self.view.num_submitted += isinstance(action, Submit)
        self.view.live, self.view.ended = self.run.live, self.run.ended
        self.view.texts = self.run.texts
        self.view.frames_in_flight = [plan.frame_id for plan in self.run.plans]

    @precondition(lambda self: self.is_possible("submit"))
    @rule(data=strategies.data())
    def submit(self, data: strategies.DataObject) -> None:
        """See `rules.submit`; likewise those below."""
        self.act("submit", data)

    @precondition(lambda self: self.is_possible("schedule"))
    @rule(data=strategies.data())
    def schedule(self, data: strategies.DataObject) -> None:
        """Plan a step."""
        self.act("schedule", data)

    @precondition(lambda self: self.is_possible("answer"))
    @rule(data=strategies.data())
    def answer(self, data: strategies.DataObject) -> None:
        """Answer the plan in flight."""
        self.act("answer", data)

    @precondition(lambda self: self.is_possible("propose"))
    @rule(data=strategies.data())
    def propose(self, data: strategies.DataObject) -> None:
        """Hand in drafts."""
        self.act("propose", data)

    @precondition(lambda self: self.is_possible("abort"))
    @rule(data=strategies.data())
    def abort(self, data: strategies.DataObject) -> None:
        """End requests."""
        self.act("abort", data)

    @precondition(lambda self: self.is_possible("grammar_ready"))
    @rule(data=strategies.data())
    def grammar_ready(self, data: strategies.DataObject) -> None:
        """Report a grammar."""
        self.act("grammar_ready", data)

    @precondition(lambda self: self.is_possible("pause"))
    @rule(data=strategies.data())
    def pause(self, data: strategies.DataObject) -> None:
        """Pause or resume."""
        self.act("pause", data)

    @precondition(lambda self: self.is_possible("reset"))
    @rule(data=strategies.data())
    def reset(self, data: strategies.DataObject) -> None:
        """Empty the cache."""
        self.act("reset", data)

    @precondition(lambda self: self.is_possible("misanswer"))
    @rule(data=strategies.data())
    def misanswer(self, data: strategies.DataObject) -> None:
        """Answer wrongly."""
        self.act("misanswer", data)

    @precondition(lambda self: self.is_possible("hostile"))
    @rule(data=strategies.data())
    def hostile(self, data: strategies.DataObject) -> None:
        """Send what nobody should send."""
        self.act("hostile", data)

    def teardown(self) -> None:
        """Let everything end, unless the run failed already."""
        if self.run is not None and self.view is not None and not self.run.has_failed:
            self.perform(Drain())


def describe_finding(finding: Finding) -> str:
    """A finding in a few lines."""
    head = f"{finding.kind} {finding.property_id} {finding.sentence}: {finding.message}"
    rows = [
        f"  {difference.field}: expected {difference.expected}, seen {difference.seen}"
        for difference in finding.differences
    ]
    return "\n".join([head, *rows])


def machine(
    engine: str | EngineFactory, preset: str = "small", policy: Policy | None = None
) -> type[EngineMachine]:
    """A state machine class for an engine, named or given as a factory."""
    make_engine = load_engine(engine) if isinstance(engine, str) else engine
    members = {
        "make_engine": staticmethod(make_engine),
        "preset": PRESETS[preset],
        "policy": policy,
    }
    return type("EngineMachine", (EngineMachine,), members)
