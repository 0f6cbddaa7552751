"""Refusable: the events that an engine may reject, judged from its own earlier answers.

An engine with `Capability.REJECTION` answers bad input with a rejection. Whether input is bad
follows from the vocabulary, the config and the answers up to now. Whether an engine may also accept
it depends on the input:

* some input it may accept, if it can: a request that seems too long, drafts that cannot be used, a
  commit of a later plan without requests of an earlier one. What follows is judged as usual;
* any other input must have no effect, whether it is rejected or ignored (P18).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from blockstep.conformance.features.forks.properties import may_not_output
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.protocol.findings import Finding, violated
from blockstep.conformance.protocol.program import describe_observation
from blockstep.conformance.protocol.session_tracker import find_problem_of_chunk, get_longest
from blockstep.spec import vocabulary as v
from blockstep.spec.core.state import State
from blockstep.spec.transition import transition

ILL_FORMED = frozenset((v.RejectCode.MALFORMED_EVENT, v.RejectCode.BAD_REQUEST))
"""Reject codes of input that no adapter can be asked about."""
MAY_BE_TAKEN = frozenset(
    (v.RejectCode.PROMPT_TOO_LONG, v.RejectCode.NEVER_FITS, v.RejectCode.BAD_DRAFTS)
)
"""Reject codes of input that another engine may be able to handle, or ignore."""


def find_expected_rejection(
    event: v.Event,
    empty: State,
    live: Mapping[v.RequestId, v.Request],
    plans: Sequence[v.Plan],
    worker: Worker,
) -> v.RejectCode | None:
    """Return why an event may be rejected now; None: every engine must accept it.

    `empty` is the state of the specification before any event, `live` are the unfinished requests,
    `plans` are in flight, oldest first.
    """
    match event:
        case v.Submit(request=request):
            problem = v.event_problem(event)
            if problem is not None:
                return problem.code
            if request.request_id in live:
                return v.RejectCode.DUPLICATE_REQUEST
            if request.request_id in list_in_flight(plans):
                return v.RejectCode.REQUEST_IN_FLIGHT
            return _code_of(empty, event) or _problem_of_items(request, empty, live, worker)
        case v.Schedule():
            is_full = len(plans) >= empty.config.max_frames_in_flight
            return v.RejectCode.PIPELINE_FULL if is_full else None
        case v.Commit():
            return _problem_of_answer(event, plans, worker)
        case v.GrammarBitmask():
            return _problem_of_asking(event, empty, plans, worker)
        case v.GrammarReady(request_id=name) | v.GrammarFailed(request_id=name):
            if name not in live:
                return v.RejectCode.UNKNOWN_REQUEST
            return None if live[name].structured_output else v.RejectCode.NOT_STRUCTURED
        case v.Drafts():
            return _code_of(empty, event)
        case _:
            problem = v.event_problem(event)
            return None if problem is None else problem.code


def find_problem_of_update(
    event: v.StreamingUpdate, empty: State, client: Client
) -> v.RejectCode | None:
    """Return why a streaming update may be rejected now."""
    problem = v.event_problem(event)
    if problem is not None:
        return problem.code
    update = event.request
    if update.request_id not in client.live:
        return v.RejectCode.UNKNOWN_REQUEST
    session = client.sessions.get(update.request_id)
    if session is None or session.is_closed:
        return v.RejectCode.NOT_RESUMABLE
    if not update.resumable:
        return None
    request, delivered = client.live[update.request_id], client.delivered.get(update.request_id, ())
    problem_of_chunk = find_problem_of_chunk(request, update)
    if problem_of_chunk is not None:
        return problem_of_chunk
    return _code_of(empty, v.Submit(get_longest(empty.config, request, delivered, session, update)))


def find_problem_of_fork(
    event: v.Fork, empty: State, client: Client, not_begun: Container[v.RequestId]
) -> v.RejectCode | None:
    """Return why a fork may be rejected now; requests in `not_begun` had no row yet."""
    problem, name = v.event_problem(event), event.request_id
    if problem is not None:
        return problem.code
    if not empty.config.enable_forks:
        return v.RejectCode.BAD_FORK
    if name not in client.live:
        return v.RejectCode.UNKNOWN_REQUEST
    if event.child_id in client.live:
        return v.RejectCode.DUPLICATE_REQUEST
    in_flight = list_in_flight(client.plans)
    if event.child_id in in_flight:
        return v.RejectCode.REQUEST_IN_FLIGHT
    if name in client.sessions or name in not_begun:
        return v.RejectCode.BAD_FORK
    if name in in_flight:
        return v.RejectCode.FORK_IN_FLIGHT
    is_wrong = may_not_output(empty.config, client.live[name], event.output_token_ids)
    return v.RejectCode.BAD_FORK if is_wrong else None


def may_take(code: v.RejectCode, event: v.Event, plans: Sequence[v.Plan], worker: Worker) -> bool:
    """Return whether an engine may accept, with its effect, an event that it may reject for
    `code`."""
    if code is v.RejectCode.FRAME_OUT_OF_ORDER and isinstance(event, v.Commit):
        later = next(plan for plan in plans if plan.frame_id == event.frame_id)
        older = plans[: plans.index(later)]
        waiting = {name for plan in older for name in worker.list_awaited(plan.frame_id)}
        return event.sampled == worker.answer(event.frame_id) and not any(
            row.token_ids and row.request_id in waiting for row in event.sampled
        )
    return code in MAY_BE_TAKEN


def check_rejection(event: v.Event, seen: v.Observation) -> Iterator[Finding]:
    """Yield findings of P18: an event that must not be accepted is rejected, or has no effect."""
    match event, seen:
        case (_, v.Rejected()) | (v.Commit(), v.Outputs(rows=())) | (v.GrammarReady(), v.Ack()):
            return
        case v.Schedule(), v.Plan(frame_id=frame_id) if seen == v.Plan(frame_id):
            return
        case v.Submit(), v.Ack() if v.event_problem(event) is None:
            return  # an id that is in use already
    what = f"the event was taken, and answered with {describe_observation(seen)}"
    yield violated("P18", "stale_or_wrong_event_is_rejected", what)


def list_in_flight(plans: Sequence[v.Plan]) -> set[v.RequestId]:
    """Return the requests that have a row in a plan in flight."""
    return {row.request_id for plan in plans for row in plan.rows}


def _code_of(empty: State, event: v.Event) -> v.RejectCode | None:
    """Return the code with which the specification rejects an event in its empty state."""
    answer = transition(empty, event)
    return answer.code if isinstance(answer, v.Rejected) else None


def _problem_of_items(
    request: v.Request, empty: State, live: Mapping[v.RequestId, v.Request], worker: Worker
) -> v.RejectCode | None:
    """Return why items contradict their identifiers in other requests or at the worker."""
    if not empty.config.encoder_cache_size or not request.items:
        return None
    sizes = {} if empty.config.is_encoder_decoder else dict(worker.encoded)
    for other in live.values():
        sizes |= {item.identifier: item.num_embeds for item in other.items}
    wrong = any(sizes.get(it.identifier, it.num_embeds) != it.num_embeds for it in request.items)
    return v.RejectCode.BAD_REQUEST if wrong else None


def _problem_of_answer(
    event: v.Commit, plans: Sequence[v.Plan], worker: Worker
) -> v.RejectCode | None:
    place = next((at for at, plan in enumerate(plans) if plan.frame_id == event.frame_id), None)
    if place is None:
        return v.RejectCode.UNKNOWN_FRAME
    if place:
        return v.RejectCode.FRAME_OUT_OF_ORDER
    right = worker.answer(event.frame_id)
    if event.sampled is right or event.sampled == right:
        return None
    drafts = {row.request_id: row.draft_token_ids for row in plans[0].rows}
    if worker.forbids(event):
        return v.RejectCode.BAD_RESULT
    return None if _can_be_answered(event.sampled, right, drafts) else v.RejectCode.BAD_RESULT


def _problem_of_asking(
    event: v.GrammarBitmask, empty: State, plans: Sequence[v.Plan], worker: Worker
) -> v.RejectCode | None:
    """Return why no bitmask can be made for a plan in flight."""
    problem = v.event_problem(event)
    if problem is not None:
        return problem.code
    place = next((at for at, plan in enumerate(plans) if plan.frame_id == event.frame_id), None)
    if place is None:
        return v.RejectCode.UNKNOWN_FRAME
    names = [row.request_id for row in event.drafts]
    if (names and not empty.config.async_scheduling) or len(set(names)) < len(names):
        return v.RejectCode.BAD_DRAFTS
    older = {
        row.view.request.request_id
        for plan in plans[:place]
        for row in worker.list_masked(plan.frame_id)
    }
    masked = {row.view.request.request_id for row in worker.list_masked(event.frame_id)}
    return v.RejectCode.GRAMMAR_BEHIND if masked & older else None


def _can_be_answered(
    sampled: Sequence[v.RowTokens],
    right: Sequence[v.RowTokens],
    drafts: Mapping[v.RequestId, v.TokenIds],
) -> bool:
    """Return whether another worker could have answered with `sampled` instead of `right`.

    It then has the same rows, and in each the drafts of that row up to a token of its own.
    """
    tokens_of = {row.request_id: row.token_ids for row in sampled}
    if len(sampled) != len(right) or tokens_of.keys() != {row.request_id for row in right}:
        return False
    return all(
        _can_be_sampled(tokens_of[row.request_id], drafts[row.request_id])
        if row.token_ids
        else not tokens_of[row.request_id]
        for row in right
    )


def _can_be_sampled(tokens: v.TokenIds, drafts: v.TokenIds) -> bool:
    """Return whether tokens are some leading drafts, whatever a placeholder is, and one more
    token."""
    return 1 <= len(tokens) <= 1 + len(drafts) and all(
        draft in (token, v.DRAFT_PLACEHOLDER)
        for token, draft in zip(tokens[:-1], drafts, strict=False)
    )
