"""Distinct: whether two failures of an engine are one defect that shows twice.

Nothing says so but the engine's code, and a hunt does not read it. So two failures are one defect

1. if they say the same (`saying`), their shrunk programs do the same beside steps (abort, reset,
   pause), and the one uses all the means of the other: features of config and requests, and hits,
   chunks and preemptions; where a program can do without, it does (`relax`). Whatever an engine
   raises after such an act counts as the same: where it notices, it raises;
2. or if one is a symptom of the other: both come at the same event, each with the other
   (`comes_with`); or a plain program of the one goes on to what the other says, which needs no
   less, or comes to it with another bound of its config or without an act (`comes_of`).

A quirk that accounts for one failure and causes another one is dropped (`find_refuted`): the engine
decides like that release by chance.

Where this is wrong. Two defects are told as one if they break the same sentence by the same acts,
and one of them needs more means: a block lost when a hit is preempted, and another lost when any
request is. So are two that schedule other requests than the specification by the same acts, and
break no property. The second shows once the first is repaired. One defect is told as two if it
breaks two sentences and neither program comes near the other: a broken pool may end as anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.runs import run_program, start_program
from blockstep.conformance.protocol.compare import ABSENT
from blockstep.conformance.protocol.features import (
    ASYNC,
    CACHING,
    DRAFTS,
    FEATURES,
    GRAMMAR,
    PIPELINE,
    RESET,
    Feature,
)
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.conformance.protocol.program import (
    Action,
    Answer,
    Drain,
    Hostile,
    Program,
    Propose,
)
from blockstep.conformance.search.forgiving import ForgivenEngine
from blockstep.conformance.search.simpler import simpler_configs
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Profile

ACTS = tuple(it for it in FEATURES if it.actions and it not in (DRAFTS, GRAMMAR))
"""Features that are something done, which a step alone does not do."""
PLENTY = 64
"""Blocks and tokens with which a short program is short of nothing."""
STEPS_TO_END = 4
"""Steps in which a request of a short program ends by itself."""
BY_CHANCE = {
    "P4 published_block_was_written": "P3 published_block_holds_the_right_prefix",
    "P4 attended_slot_was_written": "P3 attended_slot_holds_the_right_prefix",
    "P4 block_still_to_be_written_is_not_published": "P3 published_block_holds_the_right_prefix",
}
"""Sentences that say the same as another: a slot was used before, or it was not, or the state
told so before the worker did."""
SHAPE = frozenset({"P9", "P12", "P24", "P26"})
"""Properties of what a plan says, apart from what is in memory: a row of a wrong length is in
disagreement with everything that it is held to."""
LENGTH = frozenset({"P9", "P24"})
"""Those of them that say how long a row, or a plan, may be."""
OF_LENGTH = frozenset({"table_holds_the_scheduled_tokens", "plans_alone_rebuild_the_request"})
"""Sentences that such a row breaks of P26. By another one the row should not be, or begins
elsewhere: then it is wrong in all that it reads and writes."""
MEMORY = frozenset(
    {
        "written_block_is_in_one_place",
        "attended_slot_holds_the_right_prefix",
        "attended_slot_is_of_the_same_adapter_salt_and_items",
    }
)
"""Sentences of what the rows of a plan write and read, which a row of a wrong length need not
break: it ends elsewhere than it should, in blocks that are as they were."""
CONSEQUENCES = {
    "P1": frozenset({"P2", "P3", "P4", "P6", "P10"}),
    "P3": frozenset({"P4", "P6"}),
}
"""What becomes of a state that breaks a property: of a pool that is out of count, who is in a block
and what, and who waits for one; of a block under a wrong name, what is read there."""
RAISED = "engine_raises_nothing"
"""The sentence of whatever an engine raises."""
_NAMES = re.compile(r"0x[0-9a-f]+|'[^']*'|\d+")


@dataclass(frozen=True, slots=True)
class Mark:
    """What tells one failure from another."""

    saying: str
    acts: frozenset[str] = frozenset()
    """What is done beside steps: features that are actions of a client, such as aborts."""
    means: frozenset[str] = frozenset()
    """The other features that the program asks for, and whether it hits, chunks or preempts."""

    @property
    def property_id(self) -> str:
        """ "P1" ..., "" if no property names it."""
        return self.saying.split(" ")[1]

    @property
    def is_divergence(self) -> bool:
        """Whether spec and engine differ, and no property is broken."""
        return self.saying.startswith(FindingKind.DIVERGENCE)

    @property
    def is_exception(self) -> bool:
        """Whether the engine raised."""
        return RAISED in self.saying

    def is_akin(self, other: Mark) -> bool:
        """Whether both say something of the shape of a plan."""
        return {self.property_id, other.property_id} <= SHAPE

    def is_like(self, other: Mark) -> bool:
        """Whether both say the same after the same acts, and one by all the means of the other."""
        is_alike = self.saying == other.saying or (
            bool(self.acts) and self.is_exception and other.is_exception
        )
        can_compare = self.means <= other.means or other.means <= self.means
        return self.acts == other.acts and is_alike and can_compare

    def is_same(self, other: Mark) -> bool:
        """Whether both say the same after the same acts, by the same means."""
        return self.means == other.means and self.is_like(other)


def saying(finding: Finding, raised_at: str = "") -> str:
    """What a finding says, without numbers and names; of a fault where it was raised."""
    name = f"{finding.property_id} {finding.sentence}"
    name = f"{finding.kind} {BY_CHANCE.get(name, name)}"
    match finding.kind:
        case FindingKind.PROPERTY:
            return name
        case FindingKind.DIVERGENCE:
            fields = {difference.field.split(" ")[0] for difference in finding.differences}
            if any(map(_is_of_a_row, finding.differences)):
                fields = {"rows"}  # pool, queues and counters follow from who is scheduled
            return f"{name} {sorted(fields)}"
        case FindingKind.LIVENESS:
            return f"{name} {_masked(finding.message.partition(';')[0])}"
        case _:
            return f"{name} {_masked(finding.message)} {_masked(raised_at)}"


def _is_of_a_row(difference: Difference) -> bool:
    """Whether only one of two plans has a row of a request."""
    is_row = difference.field.split(" ")[0] in {"new", "cached"}
    return is_row and {difference.expected, difference.seen} == {"there", ABSENT}


def can_follow(later: str, state: str) -> bool:
    """Whether what breaks one property may have to come of a state that breaks another."""
    return later in CONSEQUENCES.get(state, ())


def list_masked(first: Finding, beside: Sequence[Finding]) -> list[Finding]:
    """What is found beside a row that is too long, and may be wrong by itself."""
    shapes = (it for it in beside if it.property_id in SHAPE - LENGTH)
    if first.property_id not in LENGTH or any(it.sentence not in OF_LENGTH for it in shapes):
        return []
    named = {it.sentence: it for it in reversed(beside) if it.sentence in MEMORY}
    return [
        it
        for it in named.values()
        if not any(can_follow(it.property_id, other.property_id) for other in beside)
    ]


def saying_of_loss(message: str) -> str:
    """The same of an engine that did not live: how it ended, and in which event."""
    how, _, where = message.partition(" at: ")
    return f"lost {_masked(how)} {where.partition(' ')[0]}"


def _masked(text: str) -> str:
    return _NAMES.sub("#", text)


def list_asked(program: Program) -> Iterator[Feature]:
    """The features that a program asks for. A hit tells more than that hits are allowed."""
    asked: list[v.Config | v.Request] = [program.config]
    asked += [action.request for action in program.actions if isinstance(action, v.Submit)]
    for feature in FEATURES:
        is_asked = any(feature.is_asked_by(thing) for thing in asked)
        is_done = any(isinstance(action, feature.actions) for action in program.actions)
        if feature is not CACHING and (is_asked or is_done):
            yield feature


def _list_outcomes(run: LockStep) -> Iterator[str]:
    """What plans show; a session that goes on is told anew, with what it has, and hits nothing.

    So do the specification's plans, where the engine should have planned otherwise.
    """
    having: set[v.RequestId] = set()
    for exchange in run.exchanges:
        is_alike = exchange.seen == exchange.expected
        for plan in (exchange.seen,) if is_alike else (exchange.seen, exchange.expected):
            if isinstance(plan, v.Plan):
                having.difference_update(plan.finished_req_ids, plan.preempted_req_ids)
                yield from _list_outcomes_of(plan, having)
        if isinstance(exchange.seen, v.Plan):
            having.update(row.request_id for row in exchange.seen.rows)


def _list_outcomes_of(plan: v.Plan, having: set[v.RequestId]) -> Iterator[str]:
    if plan.preempted_req_ids:
        yield "preempts"
    for row in plan.rows:
        is_new = isinstance(row, v.NewRow) and row.request_id not in having
        if row.num_computed_tokens and (is_new or (isinstance(row, v.CachedRow) and row.resumed)):
            yield "hits"
        end = row.num_computed_tokens + row.num_scheduled_tokens
        if isinstance(row, v.NewRow) and end < len(row.request.prompt_token_ids):
            yield "chunks"


def mark_of(program: Program, run: LockStep, finding: Finding) -> Mark:
    """The mark of a failure to which a run of the program came."""
    engine = run.engine
    raised_at = engine.raised_at if isinstance(engine, ForgivenEngine) else ""
    asked = set(list_asked(program))
    means = {feature.name for feature in asked.difference(ACTS, (ASYNC, PIPELINE))}
    means.update(_list_outcomes(run))
    if asked & {ASYNC, PIPELINE}:
        means.add("several frames")
    acts = {feature.name for feature in asked.intersection(ACTS)}
    if v.Reset(True) in program.actions:  # which preempts, as a step does that lacks blocks
        means.add("preempts")
        acts.discard(RESET.name)
    return Mark(saying(finding, raised_at), frozenset(acts), frozenset(means))


# What is one defect.


@dataclass(frozen=True, slots=True)
class Symptoms:
    """The mark of a failure, and those that its program comes to beside it."""

    own: Mark
    beside: frozenset[Mark] = frozenset()
    """At the same event."""
    onward: frozenset[Mark] = frozenset()
    """If the run goes on as though nothing were wrong, to its end and a drain."""
    near: frozenset[Mark] = frozenset()
    """Instead of its own, without an act, with a bound or a feature of the config out of the way,
    or at the same event with more blocks or tokens."""
    length: int = 0
    """Actions of the program."""

    def comes_with(self, other: Symptoms) -> bool:
        """Whether both come at the same event: each with the other, or as what has to come.

        A divergence that breaks no property comes with a property where the same fields differ.
        """
        mine = any(map(self.own.is_like, other.beside))
        others = any(map(other.own.is_like, self.beside))
        if (mine and self.own.is_divergence) or (others and other.own.is_divergence):
            return True
        if not self.own.is_akin(other.own):
            mine = mine and (others or can_follow(other.own.property_id, self.own.property_id))
            return mine or (others and can_follow(self.own.property_id, other.own.property_id))
        third = any(it.is_like(this) for it in self.beside for this in other.beside)
        return mine or others or third

    def comes_of(self, cause: Symptoms) -> bool:
        """Whether the other goes on to this, or is this in another config or as long a program.

        A longer program often holds a shorter one's defect as well; so if this goes on to the
        other it must do just the same, and what comes of the other cannot do without its means.
        """
        return (
            any(map(cause.own.is_like, self.near))
            or (self.length <= cause.length and any(map(cause.own.is_like, self.beside)))
            or any(
                self.own.is_like(mark) and cause.own.means <= self.own.means
                for mark in cause.onward
            )
            or any(map(cause.own.is_same, self.onward - self.beside))
            or self.own in cause.near
        )


Play = Callable[[Program], tuple[LockStep, list[Finding]] | None]
"""Runs a program until something is wrong; None if the engine cannot have its config."""


def play_with(make_engine: EngineFactory, profile: Profile) -> Play:
    """Runs programs on engines of a factory."""

    def play(program: Program) -> tuple[LockStep, list[Finding]] | None:
        try:
            return run_program(program, make_engine, profile)
        except v.ConfigError:
            return None

    return play


def find_symptoms(
    program: Program, make_engine: EngineFactory, profile: Profile, first: Finding
) -> Symptoms:
    """The symptoms of a shrunk program, which failed with `first`.

    The engine is one of `Forgiving`, so that what it raises is told by where.
    """

    play = play_with(make_engine, profile)
    length, played = len(program.actions), _list_marks(play(program), program)
    own = next((mark for mark in played if mark.saying.startswith(saying(first))), None)
    if own is None:  # it does not come back
        return Symptoms(Mark(saying(first)))
    program = relax(program, own.saying, play)
    result = play(program)
    played = _list_marks(result, program)
    own = next(mark for mark in played if mark.saying == own.saying)

    plainer = [_list_marks(play(it), it) for it in _list_plainer(program)]
    assert result is not None, "the program has just failed"
    for roomier in _list_roomier(program):
        tried = play(roomier)
        if tried is not None and tried[0].num_events == result[0].num_events:
            plainer.append(_list_marks(tried, roomier))
    said = {mark.saying for mark in played}
    near = [marks for marks in plainer if own.saying not in {mark.saying for mark in marks}]
    return Symptoms(
        own,
        beside=frozenset(played) - {own},
        onward=frozenset(_go_on(program, make_engine, profile)) - {own},
        near=frozenset(it for marks in near for it in marks if it.saying not in said),
        length=length,
    )


def _list_marks(played: tuple[LockStep, list[Finding]] | None, program: Program) -> list[Mark]:
    """The marks of what is wrong at the end of a run."""
    if played is None:
        return []
    run, findings = played
    return [mark_of(program, run, finding) for finding in findings]


def mark_plainly(program: Program, mark: Mark, play: Play) -> Mark:
    """The mark of what a program comes to, where that does without what it can."""
    program = relax(program, mark.saying, play)
    played = _list_marks(play(program), program)
    return next((it for it in played if it.saying == mark.saying), mark)


def relax(program: Program, says: str, play: Play) -> Program:
    """The program where nothing is short and nobody in a hurry, as far as it fails as before."""
    changes = (_submit_plainly, _take_turns, _let_end, _ask_for_resets, _give_blocks, _give_tokens)
    for change in changes:
        plainer = change(program)
        if any(mark.saying == says for mark in _list_marks(play(plainer), plainer)):
            program = plainer
    return program


def _submit_plainly(program: Program) -> Program:
    """No request is a mistake of a client: what is taken of one is a request like others."""
    actions = (
        it.event if isinstance(it, Hostile) and isinstance(it.event, v.Submit) else it
        for it in program.actions
    )
    return replace(program, actions=tuple(actions))


def _take_turns(program: Program) -> Program:
    """One plan in flight at a time, and drafts from outside."""
    config = replace(program.config, max_frames_in_flight=1, async_scheduling=False)
    turn: tuple[Action, ...] = (v.Schedule(), Answer())
    if DRAFTS.is_asked_by(config):
        turn = (*turn, Propose(((1, 0),)))
    actions: list[Action] = []
    for action in program.actions:
        if not isinstance(action, Answer):
            actions += turn if isinstance(action, v.Schedule) else [action]
    return replace(program, config=config, actions=tuple(actions))


def _let_end(program: Program) -> Program:
    """Aborted requests end by themselves."""
    end = (v.Schedule(), Answer()) * STEPS_TO_END
    actions: list[Action] = []
    for action in program.actions:
        actions += end if isinstance(action, v.Abort) else [action]
    return replace(program, actions=tuple(actions))


def _ask_for_resets(program: Program) -> Program:
    """No reset by force."""
    actions = (v.Reset() if it == v.Reset(True) else it for it in program.actions)
    return replace(program, actions=tuple(actions))


def _give_blocks(program: Program) -> Program:
    return replace(program, config=replace(program.config, num_blocks=PLENTY))


def _give_tokens(program: Program) -> Program:
    budget = max(PLENTY, program.config.max_num_batched_tokens)
    plenty = {"max_num_batched_tokens": budget, "long_prefill_token_threshold": 0}
    return replace(program, config=replace(program.config, **plenty))  # type: ignore[arg-type]


def _go_on(program: Program, make_engine: EngineFactory, profile: Profile) -> Iterator[Mark]:
    """What the program comes to if nobody minds its findings: to its end, and a drain."""
    run = start_program(program, make_engine, profile)
    steps = (v.Schedule(), Answer()) * STEPS_TO_END
    for action in (*program.actions, *steps, Drain()):
        try:
            findings = run.perform(action)
        except Exception:  # whoever judges has lost count by now
            return
        yield from (mark_of(program, run, finding) for finding in findings)
        if any(finding.kind is FindingKind.FAULT for finding in findings):
            return


def _list_roomier(program: Program) -> Iterator[Program]:
    """The program in a larger pool, with a larger budget of tokens, and with both."""
    for roomier in (_give_blocks(program), _give_tokens(program)):
        if roomier != program:
            yield roomier
    yield _give_tokens(_give_blocks(program))


def _list_plainer(program: Program) -> Iterator[Program]:
    """The programs without a feature or a bound of the config, in no smaller a pool, and those
    without one of the acts."""
    for act in set(list_asked(program)).intersection(ACTS):
        left = tuple(it for it in program.actions if not isinstance(it, act.actions))
        yield replace(program, actions=left)
    sizes = program.config.num_blocks, program.config.block_size
    for config in simpler_configs(program.config):
        if (config.num_blocks, config.block_size) == sizes:
            yield replace(program, config=config)
