"""Properties: checks that hold for every correct engine, made without a reference (D5).

Data flows through the modules of `judge.properties` in this order: `step` is one event with the
states around it, `history` what was known before it, `sentence` the form of a check, `amounts` and
`queue_replay` what several checks need; then one module for each family of checks. The checks of a
feature are in its folder of `conformance.features`.

The `Worker` judges as well what is about contents (P2, P3, P4, P6, P25) or about plans (P26).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

from blockstep.conformance.judge.properties import (
    admission,
    budgets,
    hits,
    output,
    policy_order,
    pool,
    rejections,
    tables,
    work,
)
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import PropertyCheck, judge
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.protocol.features import SIGNAL_OF, load_parts
from blockstep.conformance.protocol.findings import Finding, violated
from blockstep.spec import vocabulary as v


@dataclass(frozen=True, slots=True)
class Property:
    """One line of `properties.md`, and its checks."""

    id: str
    name: str
    statement: str
    checks: tuple[PropertyCheck, ...]


_FAMILIES = (
    *(pool, rejections, budgets, output, admission, policy_order, hits, tables),
    *load_parts("properties").values(),
    work,
)
"""The modules of checks, those of features among them. The checks of one property are made in this
order."""
_SENTENCES = [
    found
    for family in _FAMILIES
    for found in vars(family).values()
    if isinstance(found, PropertyCheck)
]
_STATEMENTS = {
    "P1 pool conservation": "each non-null block is either in the free queue exactly once with ref "
    "0, or absent from it with ref = number of holders; the null block is never queued or freed",
    "P2 exclusive writing": "a block that may still be written occupies one position of one "
    "block table",
    "P3 sound cache map": "map[h] = b iff b carries h, and b's content is what h names",
    "P4 publish after write": "a hit reads only KV already written, or certainly written earlier "
    "in the same dispatch; a hash published for work that then did not run is withdrawn",
    "P5 boundary valid for all groups": "a hit length is valid for every KV group, and is the "
    "largest such",
    "P6 key partition": "requests that differ in adapter, salt, multimodal item, its offset or an "
    "embedding never share a block",
    "P7 failed admission is a no-op": "after a failed admission the state equals the state before "
    "it, statistics included",
    "P8 estimate = consumption": "the capacity check and the allocation that follows agree exactly",
    "P9 budgets": "tokens per step and running requests: never exceeded, also not after a rollback",
    "P10 progress": "no cycle of states without progress while unfinished requests exist and no "
    "external event is due; preemptions per newly computed block are bounded",
    "P11 servability": "what cannot fit into an empty pool is refused with a reason; everything "
    "else is served",
    "P12 token accounting": "0 <= placeholders = output tokens of frames in flight; 0 "
    "<= computed < known + placeholders; scheduled spec tokens <= drafts",
    "P13 exact output": "per request: no token lost, repeated or delivered after its stop; every "
    "request terminates with one reason",
    "P14 exact rollback": "rejecting k drafts restores exactly the counters of having never "
    "scheduled those k",
    "P15 work conservation": "a schedulable request is not skipped while budget and blocks for it "
    "remain",
    "P16 policy order": "FCFS, priority and eviction order are as documented, ties included",
    "P17 transfer ownership": "a block with a transfer in flight is not reused; every hold has an "
    "owner and an end",
    "P18 idempotent signals": "late, duplicate or unknown completions change nothing and kill "
    "nothing",
    "P19 load failure": "after a failed external load no request computes on, or publishes, what "
    "was not loaded",
    "P20 faithful events": "replaying the KV event stream rebuilds exactly the set of cached "
    "blocks",
    "P21 statistics": "counters equal what happened, once each",
    "P22 encoder cache": "references count occurrences; budget restored on rollback; no release of "
    "what is still needed",
    "P23 grammar in step": "the grammar's state equals the accepted output; invalid drafts are "
    "never accepted",
    "P24 real drafts": "a dispatched draft is a draft proposed for exactly this position of this "
    "request",
    "P25 complete reset": "after a reset nothing computed before it can be hit",
    "P26 worker view": "the plans alone rebuild each request's tokens and block table at the "
    "worker",
}


def _judged(title: str, statement: str) -> Property:
    number, name = title.split(" ", 1)
    checks = tuple(found for found in _SENTENCES if found.property_id == number)
    return Property(number, name, statement, checks)


PROPERTIES: tuple[Property, ...] = tuple(_judged(*entry) for entry in _STATEMENTS.items())

CHECKS_OF: dict[type, tuple[PropertyCheck, ...]] = {
    kind: tuple(found for entry in PROPERTIES for found in entry.checks if kind in found.kinds)
    for kind in (*v.EVENT_TYPES, v.Rejected)
}
"""The checks of an accepted event, by its type; under `Rejected` those of a rejected event."""

_QUOTE_THE_FREE_QUEUE = (
    policy_order.new_blocks_come_from_the_head_of_the_free_queue,
    policy_order.preempted_tail_is_evicted_first,
    policy_order.freed_tail_is_evicted_first,
)
RENAMED_CHECKS: dict[type, tuple[PropertyCheck, ...]] = {
    kind: tuple(found for found in checks if found not in _QUOTE_THE_FREE_QUEUE)
    for kind, checks in CHECKS_OF.items()
}
"""The same without the checks that are about the order of the free queue."""

ASKED_OF_ANSWERS = frozenset(
    {
        "abort_finishes_exactly_the_named_requests",
        "delivered_rows_are_those_that_sampled",
        "delivered_tokens_are_the_sampled_ones_until_the_stop",
        "dispatched_drafts_are_the_last_proposed_ones",
        "end_of_input_finishes_an_idle_session",
        "failed_grammar_ends_its_request",
        "finish_reason_is_the_one_that_holds",
        "new_row_carries_the_request_as_submitted",
        "plan_stays_within_token_budget",
        "plan_names_the_finished",
        "row_stays_within_max_model_len",
        "stale_or_wrong_event_is_rejected",
        "reported_cached_tokens_are_of_the_first_hit",
    }
)
"""Property checks that a safety run makes on answers alone, with or without a state
(`judge.answers`). Where the engine shows a state, it also makes `rejected_event_changes_nothing` on
an event that the engine must refuse."""
_ASKED_OF_BOTH = frozenset(
    {"end_of_input_finishes_an_idle_session", "failed_grammar_ends_its_request"}
)
"""The checks of `ASKED_OF_ANSWERS` that a safety run makes on states as well, since no answer says
that a request is gone."""
_ASKED_ELSEWHERE = ASKED_OF_ANSWERS - _ASKED_OF_BOTH | {
    rejections.rejected_event_changes_nothing.sentence
}

JUDGED: tuple[PropertyCheck, ...] = tuple(
    found
    for entry in PROPERTIES
    for found in entry.checks
    if found.is_asked_at_safety and found.sentence not in _ASKED_ELSEWHERE
)
"""Property checks on states and steps that need no reference: they hold for every engine.

A safety run makes them where the engine shows its state. Each of the others says why it is left
out: it would fix a policy where other policies are right too (`PropertyCheck.fixes`), or another
check sees the same from outside (`PropertyCheck.covered_by`). """

ANSWER_TYPES: dict[type, tuple[type, ...]] = {
    v.Submit: (v.Ack,),
    v.Schedule: (v.Plan,),
    v.Commit: (v.Outputs,),
    v.Drafts: (v.DraftsTaken,),
    v.Abort: (v.Aborted,),
    v.GrammarReady: (v.Ack,),
    v.GrammarFailed: (v.Outputs,),
    v.GrammarBitmask: (v.GrammarOutput,),
    v.StreamingUpdate: (v.Ack, v.Aborted),
    v.SetPause: (v.Ack,),
    v.Reset: (v.ResetDone,),
    v.EncoderReset: (v.Ack,),
    v.EncoderOffer: (v.Ack,),
    v.KVOffer: (v.Ack,),
    v.TransfersReported: (v.Outputs,),
    v.Fork: (v.Ack,),
    **dict.fromkeys(SIGNAL_OF, (v.Ack,)),
}
"""The types of answers to each type of accepted event."""


def find_wrong_kind(event: v.Event, seen: v.Observation) -> Finding | None:
    """Return the finding about an answer that is of another kind than accepted events of this type
    have, or None."""
    if type(seen) in ANSWER_TYPES.get(type(event), ()):
        return None
    what = f"{type(event).__name__} was answered with {type(seen).__name__}"
    return violated("P18", "answer_is_of_the_kind_of_the_event", what)


class Asked(Enum):
    """Which property checks are made on a step."""

    ALL = "all"
    WITHOUT_REFERENCE = "those that need no reference"
    """`JUDGED`."""
    NONE = "none"


NONE = Asked.NONE
"""Named here since Python 3.11 looks up members of enums slowly, and each step asks for it."""


@cache
def list_sentences(
    kind: type,
    is_renamed: bool,
    lacked: frozenset[str],
    absent: tuple[str, ...] = (),
    needs_none: bool = False,
) -> tuple[PropertyCheck, ...]:
    """The property checks for a step of an event type, in the order of the properties.

    Args:
        kind: The type of the event, or `Rejected` for a rejected one.
        is_renamed: Leave out those that quote the order of the free queue.
        lacked: Leave out those that need one of these (`PropertyCheck.needs`).
        absent: Leave out those that are about one of these (`PropertyCheck.of`).
        needs_none: Leave out those that are not in `JUDGED`: they need a reference.
    """
    checks: Mapping[type, tuple[PropertyCheck, ...]] = RENAMED_CHECKS if is_renamed else CHECKS_OF
    found = [it for it in checks[kind] if it.needs not in lacked and it.of not in absent]
    if needs_none:
        names = {it.sentence for it in JUDGED}
        found = [it for it in found if it.sentence in names]
    return tuple(found)


_SPOKEN_OF = ("changes", "rows", "admitted_rows", "askers", "preempted", "acts")


def find_absent(step: Step) -> tuple[str, ...]:
    """Names of the fields of a step that are empty, among those that checks are about: see
    `PropertyCheck.of`."""
    if not isinstance(step.observation, v.Plan):
        return () if step.changes else ("changes",)
    try:
        return tuple([name for name in _SPOKEN_OF if not getattr(step, name)])
    except Exception:
        return ()  # the step makes no sense, which each check will find


def check_step(
    step: Step,
    history: History,
    worker: Worker | None = None,
    is_renamed: bool = False,
    asked: Asked = Asked.ALL,
) -> list[Finding]:
    """Return the findings of the worker and of the property checks on a step.

    Args:
        step: The event, its answer and the states around it.
        history: Knows all steps before this one; `History.record(step)` comes after.
        worker: Observes the event and its answer here, if given.
        is_renamed: Leave out the property checks that quote the order of the free queue.
        asked: The property checks to make. Where one of them or the worker finds something, all
            are made, to name what went wrong.
    """
    if isinstance(step.observation, v.Rejected):
        kind: type = v.Rejected
    else:
        kind = type(step.event)
        if (wrong := find_wrong_kind(step.event, step.observation)) is not None:
            return [wrong]
    findings = [] if worker is None else _inform_worker(step, worker)
    if not findings and asked is NONE:
        return findings
    matters = kind, is_renamed, history.lacked, find_absent(step)
    if asked is Asked.WITHOUT_REFERENCE and not findings:
        sentences = list_sentences(*matters, needs_none=True)
        if not judge(sentences, step, history):
            return findings
    return findings + judge(list_sentences(*matters), step, history)


def _inform_worker(step: Step, worker: Worker) -> list[Finding]:
    findings = worker.observe(step.event, step.observation)
    is_plan = isinstance(step.event, v.Schedule)
    if not (is_plan or isinstance(step.event, v.Commit)):
        return findings
    if is_plan or step.config.async_scheduling or step.config.kv_connector:
        findings += worker.check_published(step.after)
    return findings + worker.check_view(step.after)
