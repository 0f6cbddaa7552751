"""Distinct: decides whether two failures of an engine are one defect.

Only the engine's code could tell for certain, and a hunt does not read it. Two failures count as
one defect

1. if the same check fails (`describe_failure`), both shrunk programs contain the same client
actions, such as
   aborts or a second request with a used id, and one program needs every means of the other:
   features of config and requests, and hits, chunks and preemptions. Means that the program can do
   without are removed first (`relax`). Exceptions after the same client action count as the same,
   for an engine raises wherever it notices, and so do those that it raises at one place. Of a row
   that is too long one means in common is enough, and a used id is no action apart: the request
   comes again, as a preempted one does;
2. or if one is a symptom of the other: both appear at the same event in both programs
   (`comes_with`); or one program, if it is run on, leads to the other failure without needing more
   means, or is the other failure with another bound, with smaller blocks, with the last prompt
   ending within a block or not, or without a client action (`comes_of`).

A defect that nearly every program meets would be a symptom, or the cause, of all others. So a
variant of a program must fail as the other one does at the event at which the program itself fails,
and not about a request that only the program aborts.
A failure that a program meets if it is run on does not count if it is met without the program's own
failure, too. Once enough failures of one message were shrunk, means are also removed where a
failure of that message is met first (`settled`).

A quirk that accounts for one failure and causes another one is dropped (`find_refuted`): the engine
decides like that release by chance.

Where this is wrong. Two defects are reported as one if they fail the same check after the same
client actions and one of them needs more means: a block lost when a hit is preempted, and another
block lost when any request is preempted. The same holds for two defects that schedule other
requests than the specification and fail no check, and for two causes of rows that are too long. The
second one is reported once the first is repaired. One defect is reported as two if it fails two
checks and no program shows both: a pool that is out of count may end in any failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import start_program
from blockstep.conformance.protocol.compare import ABSENT
from blockstep.conformance.protocol.feature import Feature
from blockstep.conformance.protocol.features import (
    ASYNC,
    CACHING,
    DRAFTS,
    FEATURES,
    GRAMMAR,
    PIPELINE,
    RESET,
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
from blockstep.conformance.search.shrink_candidates import (
    get_request,
    with_request,
    with_requests,
)
from blockstep.conformance.search.simpler import simpler_configs, with_block_size
from blockstep.conformance.search.suppressions import SuppressedEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Profile

ACTS = tuple(it for it in FEATURES if it.actions and it not in (DRAFTS, GRAMMAR))
"""Features that are actions of a client, such as aborts."""
USED_ID = "an id is used again"
"""The act of a client that submits a second request with the id of an ended one."""
OUTCOMES = frozenset({"hits", "chunks", "preempts"})
"""Means that plans show."""
PLENTY = 64
"""Number of blocks, and of tokens per step, that no short program uses up."""
STEPS_TO_END = 4
"""Steps after which the requests of a short program have finished."""
BY_CHANCE = {
    "P4 published_block_was_written": "P3 published_block_holds_the_right_prefix",
    "P4 attended_slot_was_written": "P3 attended_slot_holds_the_right_prefix",
    "P4 block_still_to_be_written_is_not_published": "P3 published_block_holds_the_right_prefix",
    "P16 preempted_tail_is_evicted_first": "P16 freed_tail_is_evicted_first",
    "P24 placeholder_stands_for_a_draft_after_the_last_plan": (
        "P24 drafts_are_the_last_scheduled_tokens"
    ),
}
"""Checks that find the same defect as another check, by that check. Which of them fails depends on
the run: whether a slot was used before, whether the state or the worker shows it first, whether a
request was preempted or finished, and whether a token of the request is in flight."""
SHAPE = frozenset({"P9", "P12", "P24", "P26"})
"""Properties of the shape of a plan, apart from what is in memory. A row of a wrong length breaks
several of them."""
LENGTH = frozenset({"P9", "P24"})
"""The properties of `SHAPE` that limit the length of a row or of a plan."""
TOO_LONG = frozenset(
    {
        "property P24 drafts_are_the_last_scheduled_tokens",
        "property P9 row_stays_within_its_caps",
        "property P9 row_stays_within_max_model_len",
        "property P9 plan_stays_within_token_budget",
    }
)
"""Sayings of a row that runs more tokens than it may."""
OF_LENGTH = frozenset({"table_holds_the_scheduled_tokens", "plans_alone_rebuild_the_request"})
"""Checks of P26 that a row of a wrong length fails. If another check of P26 fails, the row should
not exist or begins at a wrong position, so all that it reads and writes is wrong."""
MEMORY = frozenset(
    {
        "written_block_is_in_one_place",
        "attended_slot_holds_the_right_prefix",
        "attended_slot_is_of_the_same_adapter_salt_and_items",
    }
)
"""Checks of what the rows of a plan read and write, which a row of a wrong length need not fail:
its blocks are the right ones."""
CONSEQUENCES = {
    "P1": frozenset({"P2", "P3", "P4", "P6", "P10"}),
    "P3": frozenset({"P4", "P6"}),
}
"""Properties that a state breaks because it breaks another one. A pool that is out of count has
blocks with wrong holders and contents, and requests that wait for blocks. A block under a wrong key
is read by requests with other tokens."""
AT_ONCE = {
    "P8 admission_leaves_room_for_the_whole_prompt": CONSEQUENCES["P1"] | {"P1"},
    "P16 freed_tail_is_evicted_first": frozenset(
        {"P16 new_blocks_come_from_the_head_of_the_free_queue"}
    ),
}
"""Properties and checks that fail at the same event because a check fails. An admission that takes
more blocks than are free leaves the pool out of count. Blocks that a step frees in a wrong order
are allocated in a wrong order."""
RAISED = "engine_raises_nothing"
"""The name of the check that fails when an engine raises."""
_NAMES = re.compile(r"0x[0-9a-f]+|'[^']*'|\d+")


@dataclass(frozen=True, slots=True)
class FailureSignature:
    """The features of a failure by which it is compared with others."""

    message: str
    acts: frozenset[str] = frozenset()
    """Client actions in the program, such as aborts, by the name of their feature."""
    means: frozenset[str] = frozenset()
    """Other features that the program uses, and of hits, chunks and preempts those that occur."""

    @property
    def property_id(self) -> str:
        """The property that is broken, such as P1; "" if none is."""
        return self.message.split(" ")[1]

    @property
    def is_divergence(self) -> bool:
        """Whether the failure is a difference between spec and engine, and no broken property."""
        return self.message.startswith(FindingKind.DIVERGENCE)

    @property
    def is_exception(self) -> bool:
        """Whether the engine raised."""
        return RAISED in self.message

    def is_akin(self, other: FailureSignature) -> bool:
        """Whether both break a property of the shape of a plan."""
        return {self.property_id, other.property_id} <= SHAPE

    def is_like(self, other: FailureSignature) -> bool:
        """Whether the same check fails after the same acts, and one has all means of the other."""
        is_alike = self.message == other.message or (
            bool(self.acts) and self.is_exception and other.is_exception
        )
        acts, others = self.acts, other.acts
        can_compare = self.means <= other.means or other.means <= self.means or self.is_exception
        if self.message in TOO_LONG:  # other means only delay the row
            can_compare = can_compare or bool(self.means & other.means)
            acts, others = acts - {USED_ID}, others - {USED_ID}
        return acts == others and is_alike and can_compare

    def accounts_for(self, other: FailureSignature) -> bool:
        """Whether the other failure is suppressed where this one is known: it is like this one, and
        no other exception."""
        return self.message == other.message and self.is_like(other)

    def is_same(self, other: FailureSignature) -> bool:
        """Whether the same check fails after the same acts, with the same means."""
        return self.means == other.means and self.is_like(other)


def describe_failure(finding: Finding, raised_at: str = "") -> str:
    """Return the failed check and its message without numbers and names.

    `raised_at`: where the engine raised, if the finding is a fault.
    """
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
    """Return whether a state that breaks property `state` may lead to a failure of `later`."""
    return later in CONSEQUENCES.get(state, ())


def comes_at_once(later: FailureSignature, state: FailureSignature) -> bool:
    """Return whether failure `state` leads to failure `later`, at the same event or afterwards."""
    check, cause = (mark.message.partition(" ")[2] for mark in (later, state))
    if {later.property_id, check} & AT_ONCE.get(cause, frozenset()):
        return True
    return can_follow(later.property_id, state.property_id)


def list_masked(first: Finding, beside: Sequence[Finding]) -> list[Finding]:
    """Return the other findings of a step with a row that is too long, if they may be defects."""
    shapes = (it for it in beside if it.property_id in SHAPE - LENGTH)
    if first.property_id not in LENGTH or any(it.sentence not in OF_LENGTH for it in shapes):
        return []
    named = {it.sentence: it for it in reversed(beside) if it.sentence in MEMORY}
    return [
        it
        for it in named.values()
        if not any(can_follow(it.property_id, other.property_id) for other in beside)
    ]


def describe_crash(message: str) -> str:
    """Return the message of a crash or a hang: how the engine ended, and in which event."""
    how, _, where = message.partition(" at: ")
    return f"lost {_masked(how)} {where.partition(' ')[0]}"


def _masked(text: str) -> str:
    return _NAMES.sub("#", text)


def list_asked(program: Program) -> Iterator[Feature]:
    """Yield the features that a program uses, except prefix caching: hits are counted instead."""
    asked: list[v.Config | v.Request] = [program.config]
    asked += [action.request for action in program.actions if isinstance(action, v.Submit)]
    for feature in FEATURES:
        is_asked = any(feature.is_asked_by(thing) for thing in asked)
        is_done = any(isinstance(action, feature.actions) for action in program.actions)
        if feature is not CACHING and (is_asked or is_done):
            yield feature


def _list_outcomes(run: LockStep) -> Iterator[str]:
    """Yield hits, chunks and preempts as the plans show them, those of the specification included
    where the engine's plan differs.

    A session that continues gets a new row with the tokens that it has computed, which is no hit.
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


def _list_submitted(program: Program) -> list[v.RequestId]:
    return [it.request.request_id for it in program.actions if isinstance(it, v.Submit)]


def mark_of(program: Program, run: LockStep, finding: Finding) -> FailureSignature:
    """Return the mark of a finding of a run of the program."""
    engine = run.engine
    raised_at = engine.raised_at if isinstance(engine, SuppressedEngine) else ""
    asked = set(list_asked(program))
    means = {feature.name for feature in asked.difference(ACTS, (ASYNC, PIPELINE))}
    means.update(_list_outcomes(run))
    if asked & {ASYNC, PIPELINE}:
        means.add("several frames")
    acts = {feature.name for feature in asked.intersection(ACTS)}
    if len(_list_submitted(program)) > len(set(_list_submitted(program))):
        acts.add(USED_ID)
    if v.Reset(True) in program.actions:  # which preempts, as a step does that lacks blocks
        means.add("preempts")
        acts.discard(RESET.name)
    return FailureSignature(describe_failure(finding, raised_at), frozenset(acts), frozenset(means))


# Symptoms.


@dataclass(frozen=True, slots=True)
class Symptoms:
    """The mark of a failure, and the marks of other failures of its program and of plainer ones."""

    own: FailureSignature
    beside: frozenset[FailureSignature] = frozenset()
    """Failures at the same event."""
    onward: frozenset[FailureSignature] = frozenset()
    """Failures at that event and later, if the run continues to the end of its requests, except
    those that a variant without its own failure meets as well."""
    near: frozenset[FailureSignature] = frozenset()
    """Failures, at the last action, of the variants (`_list_variants`) in which its own does not
    occur."""
    length: int = 0
    """Number of actions of the program."""

    def comes_with(self, other: Symptoms) -> bool:
        """Whether both failures appear at the same event in both programs.

        In one program is enough if one failure leads to the other (`comes_at_once`), if both break
        properties of the shape of a plan, or if one is a divergence of the same fields.
        """
        mine = any(map(self.own.is_like, other.beside))
        others = any(map(other.own.is_like, self.beside))
        if (mine and self.own.is_divergence) or (others and other.own.is_divergence):
            return True
        if not self.own.is_akin(other.own):
            mine = mine and (others or comes_at_once(other.own, self.own))
            return mine or (others and comes_at_once(self.own, other.own))
        third = any(it.is_like(this) for it in self.beside for this in other.beside)
        return mine or others or third

    def comes_of(self, cause: Symptoms) -> bool:
        """Whether this failure is a symptom of the defect behind `cause`.

        It is if a variant of this program fails as the cause does, if the cause's program fails
        like this when it is run on, or if no longer a program fails in both ways. A longer program
        often contains the defect of a shorter one as well. So if this program is run on to the
        cause, its means must be the same, and a symptom needs the means of its cause. Where an
        engine raised, nothing tells what its plan would have been: hits, chunks and preemptions of
        the cause are not asked for.
        """
        needed = cause.own.means - (OUTCOMES if self.own.is_exception else frozenset())
        return (
            any(map(cause.own.is_like, self.near))
            or (self.length <= cause.length and any(map(cause.own.is_like, self.beside)))
            or any(self.own.is_like(mark) and needed <= self.own.means for mark in cause.onward)
            or any(map(cause.own.is_same, self.onward - self.beside))
            or any(self.own.is_like(it) and it.means <= self.own.means for it in cause.near)
        )


@dataclass(frozen=True, slots=True)
class Played:
    """Run of a program until a failure."""

    program: Program
    """The program without the actions after the failure."""
    run: LockStep
    findings: Sequence[Finding] = ()

    @property
    def marks(self) -> list[FailureSignature]:
        """Return the marks of the findings."""
        return [mark_of(self.program, self.run, finding) for finding in self.findings]


Play = Callable[[Program], Played | None]
"""Runs a program until a failure; returns None if the engine refuses its config."""


def play_with(
    make_engine: EngineFactory, profile: Profile, settled: frozenset[str] = frozenset()
) -> Play:
    """Return a function that runs programs on engines of a factory.

    A run continues after failures whose messages are all `settled`.
    """

    def play(program: Program) -> Played | None:
        try:
            run = start_program(program, make_engine, profile)
        except v.ConfigError:
            return None
        if run.unbuilt is not None:
            return Played(replace(program, actions=()), run, [run.unbuilt])
        for number, action in enumerate(program.actions, 1):
            findings = run.perform(action)
            if not settled.issuperset(map(describe_failure, findings)):
                return Played(replace(program, actions=program.actions[:number]), run, findings)
        return Played(program, run)

    return play


def find_symptoms(
    program: Program,
    make_engine: EngineFactory,
    profile: Profile,
    first: Finding,
    settled: Collection[str] = (),
) -> Symptoms:
    """Return the symptoms of a shrunk program that failed with `first`.

    The factory is a `SuppressingFactory`, whose engines note where they raise. `settled`: messages
    of failures after which a plainer program is run on, to its own failure.
    """
    play = play_with(make_engine, profile)
    length, message = len(program.actions), describe_failure(first)
    found = (mark.message for mark in _list_marks(program, play))
    own_message = next((it for it in found if it.startswith(message)), None)
    if own_message is None:  # it does not come back
        return Symptoms(FailureSignature(message))
    past = play_with(make_engine, profile, frozenset(settled) - {message})
    played = play(relax(program, own_message, play))
    assert played is not None, "a relaxed program fails"
    program, marks = played.program, played.marks
    own = next(mark for mark in marks if mark.message == own_message)
    without: list[Program] = []
    """Variants that do not fail like this one."""
    near: set[FailureSignature] = set()
    for variant in _list_variants(program):
        tried = play(variant)
        others = [] if tried is None else tried.marks
        if all(mark.message != own_message for mark in others):
            without.append(variant)
            if tried is not None and _fails_as_late(variant, tried, played):
                near.update(_list_marks_of_both(program, tried, others))
    messages = {mark.message for mark in marks}
    return Symptoms(
        mark_plainly(program, own, past) if settled else own,
        beside=frozenset(marks) - {own},
        onward=_list_onward(program, own, without, lambda it: _go_on(it, make_engine, profile)),
        near=frozenset(it for it in near if it.message not in messages),
        length=length,
    )


def _list_marks_of_both(
    program: Program, tried: Played, marks: Sequence[FailureSignature]
) -> Iterator[FailureSignature]:
    """Yield the `marks` of a variant's failures, except those about requests that only the program
    aborts: in the variant they live on, and may meet any defect."""
    aborted, others = _list_aborted(program), _list_aborted(tried.program)
    for finding, mark in zip(tried.findings, marks, strict=True):
        about = set(finding.subjects.requests)
        if not about or about - (aborted - others):
            yield mark


def _list_aborted(program: Program) -> set[v.RequestId]:
    aborts = (it for it in program.actions if isinstance(it, v.Abort))
    return {name for abort in aborts for name in abort.request_ids}


def _list_onward(
    program: Program,
    own: FailureSignature,
    without: Sequence[Program],
    go_on: Callable[[Program], Iterable[FailureSignature]],
) -> frozenset[FailureSignature]:
    """Return the marks of a run that continues after its failure `own`, except those of failures
    that a program without `own` meets as well: they are no consequences."""
    onward = set(go_on(program)) - {own}
    for other in without:
        if not onward:
            break
        alone = {mark.message for mark in go_on(other)}
        if own.message not in alone:
            onward = {mark for mark in onward if mark.message not in alone}
    return frozenset(onward)


def _fails_as_late(variant: Program, tried: Played, played: Played) -> bool:
    """Return whether a variant fails where the program does: at its last action, and after as many
    events if that is a drain."""
    if not tried.findings or len(tried.program.actions) < len(variant.actions):
        return False
    num_left_out = len(played.program.actions) - len(variant.actions)
    is_late = tried.run.num_events + num_left_out >= played.run.num_events
    return is_late or not any(isinstance(it, Drain) for it in variant.actions[-1:])


def _list_marks(program: Program, play: Play) -> list[FailureSignature]:
    """Return the marks of the findings of a program."""
    played = play(program)
    return [] if played is None else played.marks


def mark_plainly(program: Program, mark: FailureSignature, play: Play) -> FailureSignature:
    """Return the mark of a failure of a program after all means that it can do without are gone."""
    marks = _list_marks(relax(program, mark.message, play), play)
    return next((it for it in marks if it.message == mark.message), mark)


def relax(program: Program, message: str, play: Play) -> Program:
    """Return the program with plain requests, one plan at a time and plenty of blocks and tokens.

    A change is made only if the program still fails in the same way.
    """
    changes = (
        *(_submit_plainly, _give_ids, _take_turns, _let_end, _ask_for_resets),
        *(_give_blocks, _give_tokens),
    )
    for change in changes:
        plainer = change(program)
        if plainer == program:
            continue
        if any(mark.message == message for mark in _list_marks(plainer, play)):
            program = plainer
    return program


def _submit_plainly(program: Program) -> Program:
    """Return the program with hostile requests submitted as plain ones."""
    actions = (
        it.event if isinstance(it, Hostile) and isinstance(it.event, v.Submit) else it
        for it in program.actions
    )
    return replace(program, actions=tuple(actions))


def _give_ids(program: Program) -> Program:
    """Return the program with a new id for each request that is submitted with a used one.

    Other actions that name the id then mean the request that had it first.
    """
    used: set[v.RequestId] = set()
    actions: list[Action] = []
    for action in program.actions:
        if isinstance(action, v.Submit):
            name = action.request.request_id
            while name in used:
                name += "'"
            used.add(name)
            action = replace(action, request=replace(action.request, request_id=name))
        actions.append(action)
    return replace(program, actions=tuple(actions))


def _take_turns(program: Program) -> Program:
    """Return the program with one plan in flight at a time, and drafts proposed from outside."""
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
    """Return the program with steps in place of each abort, so that the requests finish."""
    end = (v.Schedule(), Answer()) * STEPS_TO_END
    actions: list[Action] = []
    for action in program.actions:
        actions += end if isinstance(action, v.Abort) else [action]
    return replace(program, actions=tuple(actions))


def _ask_for_resets(program: Program) -> Program:
    """Return the program with plain resets in place of forced ones."""
    actions = (v.Reset() if it == v.Reset(True) else it for it in program.actions)
    return replace(program, actions=tuple(actions))


def _give_blocks(program: Program) -> Program:
    return replace(program, config=replace(program.config, num_blocks=PLENTY))


def _give_tokens(program: Program) -> Program:
    budget = max(PLENTY, program.config.max_num_batched_tokens)
    plenty = {"max_num_batched_tokens": budget, "long_prefill_token_threshold": 0}
    return replace(program, config=replace(program.config, **plenty))  # type: ignore[arg-type]


def _go_on(
    program: Program, make_engine: EngineFactory, profile: Profile
) -> Iterator[FailureSignature]:
    """Yield the marks of all findings if the run continues after them, to a drain at its end.

    Then all requests come again, under new ids: an engine whose books are wrong raises when it next
    uses them. Of that only the exception counts, since a wrong state may break any property.
    """
    try:
        run = start_program(program, make_engine, profile)
    except v.ConfigError:
        return
    steps = (v.Schedule(), Answer()) * STEPS_TO_END
    submits = tuple(it for it in program.actions if isinstance(it, v.Submit))
    twice = _give_ids(replace(program, actions=submits * 2)).actions[len(submits) :]
    onward = (*program.actions, *steps, Drain())
    for number, action in enumerate((*onward, *twice, *steps)):
        try:
            findings = run.perform(action)
        except Exception:  # the judges may fail after a finding
            return
        faults = [it for it in findings if it.kind is FindingKind.FAULT]
        wanted = findings if number < len(onward) else faults
        yield from (mark_of(program, run, finding) for finding in wanted)
        if faults:
            return


def _list_variants(program: Program) -> Iterator[Program]:
    """Yield the program without each act, without each feature or bound of its config in no
    smaller a pool, with blocks of one token, with another end of its last prompt (`_move_end`), and
    with more blocks, tokens per step, or both."""
    for act in set(list_asked(program)).intersection(ACTS):
        left = tuple(it for it in program.actions if not isinstance(it, act.actions))
        yield replace(program, actions=left)
    sizes = program.config.num_blocks, program.config.block_size
    for config in simpler_configs(program.config):
        if (config.num_blocks, config.block_size) == sizes:
            yield replace(program, config=config)
    if program.config.block_size > 1:  # the same tokens in more blocks
        finer = with_block_size(program.config, 1)
        num_blocks = program.config.num_blocks * program.config.block_size
        yield replace(program, config=replace(finer, num_blocks=num_blocks))
    for changed in (_move_end(program), _give_blocks(program), _give_tokens(program)):
        if changed != program:
            yield changed
    yield _give_tokens(_give_blocks(program))


def _move_end(program: Program) -> Program:
    """Return the program with its last prompt ending within a block, or at the end of a block if it
    ends within one. Blocks of one token become blocks of two, with each token twice."""
    if any(it and (it.items or it.prompt_embeds) for it in map(get_request, program.actions)):
        return program  # they are for positions of the prompt
    if program.config.block_size == 1:
        program = _doubled(program)
    ends = [at for at, it in enumerate(program.actions) if isinstance(it, v.Submit)]
    actions, size = list(program.actions), program.config.block_size

    def move(request: v.Request) -> v.Request:
        tokens = request.prompt_token_ids
        num_missing = -len(tokens) % size
        moved = tokens + tokens[:1] * num_missing if num_missing else tokens[:-1]
        return replace(request, prompt_token_ids=moved)

    for at in ends[-1:]:
        actions[at] = with_request(actions[at], move)
    return replace(program, actions=tuple(actions))


def _doubled(program: Program) -> Program:
    """Return the program with each token twice, in blocks twice as large."""
    config = with_block_size(program.config, 2 * program.config.block_size)
    names = "max_num_batched_tokens", "long_prefill_token_threshold", "max_model_len"
    twice = {name: 2 * getattr(config, name) for name in names}

    def double(request: v.Request) -> v.Request:
        tokens = tuple(token for token in request.prompt_token_ids for _ in range(2))
        return replace(request, prompt_token_ids=tokens)

    config = replace(config, **twice)
    return replace(program, config=config, actions=with_requests(program.actions, double))
