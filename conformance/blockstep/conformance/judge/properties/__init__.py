"""Properties: what holds for every correct engine, judged without a reference (D5).

Data flows through the modules in this order: `step` is one event with the states around it,
`ledger` what was known before it, `sentence` what must hold of both, `amounts` and `queue_replay`
what several sentences need; then one module for each family of sentences.

A property that speaks of contents (P2, P3, P4, P6, P25) or of what the plans tell (P26) is judged
by the `Worker` as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.conformance.judge.properties import (
    admission,
    budgets,
    hits,
    messages,
    order,
    output,
    pool,
    progress,
    refusals,
    statistics,
    stillness,
)
from blockstep.conformance.judge.properties.ledger import FlightRow, Ledger, Life
from blockstep.conformance.judge.properties.sentence import Complaint, Sentence
from blockstep.conformance.judge.properties.step import PlannedRow, RowKind, Step
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.spec.vocabulary import (
    EVENT_TYPES,
    Abort,
    Aborted,
    Ack,
    Commit,
    Drafts,
    DraftsTaken,
    GrammarReady,
    Outputs,
    Plan,
    Rejected,
    Reset,
    ResetDone,
    Schedule,
    SetPause,
    Submit,
)

__all__ = [
    "ANSWER_TYPES",
    "CHECKS_OF",
    "PROPERTIES",
    "Complaint",
    "FlightRow",
    "Ledger",
    "Life",
    "PlannedRow",
    "Property",
    "RowKind",
    "Sentence",
    "Step",
    "check_step",
]


@dataclass(frozen=True, slots=True)
class Property:
    """One line of `properties.md`, and the sentences by which a step is held to it."""

    id: str
    name: str
    statement: str
    checks: tuple[Sentence, ...]


_FAMILIES = (
    *(pool, refusals, budgets, progress, statistics, output, messages),
    *(admission, order, hits, stillness),
)
"""In the order in which sentences of one property speak."""
_SENTENCES = tuple(
    found for family in _FAMILIES for found in vars(family).values() if isinstance(found, Sentence)
)


def _judged(number: str, name: str, statement: str) -> Property:
    checks = tuple(found for found in _SENTENCES if found.property_id == number)
    return Property(number, name, statement, checks)


PROPERTIES: tuple[Property, ...] = (
    _judged(
        "P1",
        "pool conservation",
        "each non-null block is either in the free queue exactly once with ref 0, or absent "
        "from it with ref = number of holders; the null block is never queued or freed",
    ),
    _judged(
        "P2",
        "exclusive writing",
        "a block that somebody may still write occupies one position of one block table",
    ),
    _judged("P3", "sound cache map", "map[h] = b iff b carries h, and b's content is what h names"),
    _judged(
        "P4",
        "publish after write",
        "a hit reads only KV already written, or certainly written earlier in the same "
        "dispatch; a hash published for work that then did not run is withdrawn",
    ),
    _judged(
        "P5",
        "boundary valid for all groups",
        "a hit length is valid for every KV group, and is the largest such",
    ),
    _judged(
        "P6",
        "key partition",
        "requests that differ in adapter, salt, multimodal item, its offset or an embedding never "
        "share a block",
    ),
    _judged(
        "P7",
        "failed admission is a no-op",
        "after a refused admission the state equals the state before it, statistics included",
    ),
    _judged(
        "P8",
        "estimate = consumption",
        "the capacity check and the allocation that follows agree exactly",
    ),
    _judged(
        "P9",
        "budgets",
        "tokens per step and running requests: never exceeded, also not after a rollback",
    ),
    _judged(
        "P10",
        "progress",
        "no cycle of states without progress while unfinished requests exist and no external "
        "event is due; preemptions per newly computed block are bounded",
    ),
    _judged(
        "P11",
        "servability",
        "what cannot fit into an empty pool is refused with a reason; everything else is served",
    ),
    _judged(
        "P12",
        "token accounting",
        "0 <= placeholders = output tokens still owed by frames in flight; 0 <= computed < "
        "known + owed; scheduled spec tokens <= drafts",
    ),
    _judged(
        "P13",
        "exact output",
        "per request: no token lost, repeated or delivered after its stop; every request "
        "terminates with one reason",
    ),
    _judged(
        "P14",
        "exact rollback",
        "rejecting k drafts restores exactly the counters of having never scheduled those k",
    ),
    _judged(
        "P15",
        "work conservation",
        "a schedulable request is not skipped while budget and blocks for it remain",
    ),
    _judged(
        "P16",
        "policy order",
        "FCFS, priority and eviction order are as documented, ties included",
    ),
    _judged(
        "P18",
        "idempotent signals",
        "late, duplicate or unknown completions change nothing and kill nothing",
    ),
    _judged("P21", "statistics", "counters equal what happened, once each"),
    _judged(
        "P24",
        "real drafts",
        "a dispatched draft is a draft proposed for exactly this position of this request",
    ),
    _judged("P25", "complete reset", "after a reset nothing computed before it can be hit"),
    _judged(
        "P26",
        "worker view",
        "the plans alone rebuild each request's tokens and block table at the worker",
    ),
)

CHECKS_OF: dict[type, tuple[Sentence, ...]] = {
    kind: tuple(
        sentence
        for one_property in PROPERTIES
        for sentence in one_property.checks
        if kind in sentence.kinds
    )
    for kind in (*EVENT_TYPES, Rejected)
}
"""The checks that judge an accepted event, by its type; under `Rejected` those of a refusal."""

ANSWER_TYPES: dict[type, type] = {
    Submit: Ack,
    Schedule: Plan,
    Commit: Outputs,
    Drafts: DraftsTaken,
    Abort: Aborted,
    GrammarReady: Ack,
    SetPause: Ack,
    Reset: ResetDone,
}
"""What an accepted event is answered with."""


def check_step(step: Step, ledger: Ledger, worker: Worker | None = None) -> list[Finding]:
    """Everything that is wrong with a step.

    `ledger` knows all steps before this one; `Ledger.record(step)` comes after. A worker is told
    of the step here: of plans (unless `Worker.execute` was called already), commits and resets.
    """
    if isinstance(step.observation, Rejected):
        kind: type = Rejected
    else:
        kind = type(step.event)
        due = ANSWER_TYPES.get(kind)
        if due is None or type(step.observation) is not due:
            return [_wrong_answer(step)]
    findings = [] if worker is None else _tell(step, worker)
    for sentence in CHECKS_OF[kind]:
        try:
            for complaint in sentence.judge(step, ledger):
                findings.append(sentence.finding(*complaint))
        except Exception as error:
            # Plan and states contradict each other so much that the sentence has no meaning.
            what = f"the step makes no sense: {type(error).__name__}: {error}"
            findings.append(sentence.finding(what))
    return findings


def _tell(step: Step, worker: Worker) -> list[Finding]:
    findings = worker.observe(step.event, step.observation)
    if isinstance(step.event, Schedule) or (
        isinstance(step.event, Commit) and step.config.async_scheduling
    ):
        findings = [*findings, *worker.check_published(step.after)]
    if isinstance(step.event, Schedule | Commit):
        findings = [*findings, *worker.check_view(step.after)]
    return findings


def _wrong_answer(step: Step) -> Finding:
    answer, event = type(step.observation).__name__, type(step.event).__name__
    return Finding(
        FindingKind.PROPERTY,
        "P18",
        "answer_is_of_the_kind_of_the_event",
        f"{event} was answered with {answer}",
    )
