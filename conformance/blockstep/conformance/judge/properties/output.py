"""Output: P13 exactly what was sampled until a stop, P14 exact rollback, P24 real drafts, and P26 a
plan tells the worker all that happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from blockstep.conformance.engine import PartOfState
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import (
    ENDINGS,
    Complaint,
    Complaints,
    difference,
    differing_requests,
    once_a_step,
    sentence,
    unequal,
)
from blockstep.spec import vocabulary as v
from blockstep.spec.vocabulary import Schedule, Status, StreamingUpdate

_KEPT_BY_COMMIT = attrgetter(
    *("status", "spec_token_ids", "is_prefill_chunk", "block_tables"),
    *("num_cached_tokens", "num_preemptions", "grammar_ready"),
)


def stop_of(
    config: v.Config, request: v.Request, outputs: Sequence[v.TokenId]
) -> tuple[v.FinishReason, v.TokenId | None] | None:
    """The reason why a request ends after these outputs, with its stop token; None if it continues.

    Conditions in order: eos, stop token, length, repetition. `min_tokens` holds all back but
    length, since a request must end where nothing more can be computed. (Ours: 0.19.1 lets it mask
    length too.)
    """
    token, count = outputs[-1], len(outputs)
    may_stop = count >= request.min_tokens
    if may_stop and token == request.eos_token_id:
        return v.FinishReason.STOP, None
    if may_stop and token in request.stop_token_ids:
        return v.FinishReason.STOP, token
    known = len(request.prompt_token_ids) + count
    if count >= request.max_tokens or known >= config.max_model_len:
        return v.FinishReason.LENGTH, None
    if may_stop and repeats(request, outputs):
        return v.FinishReason.REPETITION, None
    return None


def repeats(request: v.Request, outputs: Sequence[v.TokenId]) -> bool:
    """Whether the outputs end with a pattern that is repeated `min_count` times."""
    rule = request.repetition_detection
    if rule is None:
        return False
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        length = size * rule.min_count
        if length > len(outputs):
            break
        tail = list(outputs[-length:])
        if tail[size:] == tail[:-size]:
            return True
    return False


def cut_at_stop(
    config: v.Config, request: v.Request, outputs: list[v.TokenId], sampled: v.TokenIds
) -> tuple[v.TokenIds, tuple[v.FinishReason, v.TokenId | None] | None]:
    """The sampled tokens that are delivered, and the reason why the request ends, if it does."""
    for count, token in enumerate(sampled, 1):
        outputs.append(token)
        stop = stop_of(config, request, outputs)
        if stop is not None:
            return sampled[:count], stop
    return sampled, None


@once_a_step
def expected_outputs(step: Step, history: History) -> dict[v.RequestId, v.OutputRow]:
    """The rows that a commit must deliver, computed from the sampled tokens."""
    rows = {}
    for flight in history.frame_of(step):
        name = flight.request_id
        life, tokens = history.lives.get(name), step.sampled.get(name)
        if life is not None and tokens and not flight.is_dropped:
            outputs = list(life.output_token_ids)
            delivered, stop = cut_at_stop(step.config, life.request, outputs, tokens)
            reason, stop_token = stop or (None, None)
            num_cached = max(life.num_cached_tokens, 0)
            rows[name] = v.OutputRow(name, delivered, reason, stop_token, num_cached)
    for name in history.find_void(step):
        rows.pop(name, None)
    for name in history.list_failing(step):
        rows[name] = make_error_row(history, name)
    return rows


def make_error_row(history: History, name: v.RequestId) -> v.OutputRow:
    """The output row of a request that ends because its load failed."""
    num_cached = max(history.lives[name].num_cached_tokens, 0)
    return v.OutputRow(name, (), v.FinishReason.ERROR, None, num_cached)


@sentence("P13", v.Commit)
def delivered_rows_are_those_that_sampled(step: Step, history: History) -> Complaints:
    """Each unfinished request that sampled gets one row, in order of scheduling; no other request
    does.

    Requests that end because their load failed get a row as well, after all others.
    """
    seen = [row.request_id for row in step.output_rows]
    return differing_requests("rows", list(expected_outputs(step, history)), seen)


@sentence("P13", v.Commit)
def delivered_tokens_are_the_sampled_ones_until_the_stop(
    step: Step, history: History
) -> Complaints:
    """No token is lost, repeated, invented, or delivered after the one that stops."""
    expected = expected_outputs(step, history)
    for row in step.output_rows:
        name, due = row.request_id, expected.get(row.request_id)
        tokens = () if due is None else due.new_token_ids
        if row.new_token_ids != tokens:
            has_failed = name in history.find_void(step) or name in history.list_failing(step)
            why = "tokens though its load has failed" if has_failed else "the wrong tokens"
            what = f"{name!r} was delivered {why}"
            yield unequal(what, "new_token_ids", tokens, row.new_token_ids, subjects=name)


@sentence("P13", v.Commit)
def finish_reason_is_the_one_that_holds(step: Step, history: History) -> Complaints:
    """A request ends when and only when a stop condition holds, with the first condition that
    holds."""
    expected = expected_outputs(step, history)
    for row in step.output_rows:
        due = expected.get(row.request_id, row)
        if (row.finish_reason, row.stop_token_id) != (due.finish_reason, due.stop_token_id):
            reasons = difference("finish_reason", due.finish_reason, row.finish_reason)
            tokens = difference("stop_token_id", due.stop_token_id, row.stop_token_id)
            yield Complaint(
                f"{row.request_id!r} after {row.new_token_ids}",
                (reasons, tokens),
                subjects=row.request_id,
            )


@sentence("P13", v.Commit)
def finished_requests_leave_the_state(step: Step, history: History) -> Complaints:
    """A commit removes exactly the requests with a finish reason.

    Sessions whose input has not ended stay.
    """
    expected = step.old.keys() - set(history.list_ended(step))
    if step.new.keys() != expected:
        what = "a commit ended others than it said"
        yield unequal(what, "unfinished", sorted(expected), sorted(step.new))


@sentence("P13", v.Commit)
def outputs_in_the_state_are_those_delivered(step: Step, history: History) -> Complaints:
    """A state has the delivered tokens as outputs, in order.

    A session that continued with its next input has none so far.
    """
    going_on = set(history.list_going_on(step))
    for name, new in step.new.items():
        life = history.lives.get(name)
        if life is not None:
            expected = (
                () if name in going_on else life.output_token_ids + step.delivered.get(name, ())
            )
            if new.output_token_ids != expected:
                what = f"the state has other outputs of {name!r}"
                yield unequal(what, "outputs", expected, new.output_token_ids, subjects=name)


@sentence("P21", v.Commit, v.GrammarFailed, v.TransfersReported)
def reported_cached_tokens_are_of_the_first_hit(step: Step, history: History) -> Complaints:
    """A client gets the length of the prefix hit at the first admission."""
    for row in step.output_rows:
        life = history.lives.get(row.request_id)
        due = 0 if life is None else max(life.num_cached_tokens, 0)
        if life is not None and row.num_cached_tokens != due:
            what = f"{row.request_id!r} got a wrong number of cached tokens"
            yield unequal(
                what, "num_cached_tokens", due, row.num_cached_tokens, subjects=row.request_id
            )


@sentence("P21", v.Commit, v.GrammarFailed, v.TransfersReported)
def reported_external_tokens_are_those_loaded(step: Step, history: History) -> Complaints:
    """A client gets the number of tokens that a store loaded for the hit at the first admission, if
    the engine returns this number at all."""
    for row in step.output_rows:
        life = history.lives.get(row.request_id)
        if life is None or row.num_external_tokens is None:
            continue
        due = life.num_external_tokens
        if row.num_external_tokens != due:
            what = f"{row.request_id!r} got a wrong number of loaded tokens"
            yield unequal(
                what, "num_external_tokens", due, row.num_external_tokens, subjects=row.request_id
            )


@sentence("P14", v.Commit, covered_by="plans_alone_rebuild_the_request")
def sampling_leaves_one_token_to_compute(step: Step, history: History) -> Complaints:
    """A commit leaves one token to compute, the last one, to each request that sampled.

    Rejected drafts leave the counters as if only the accepted drafts had been scheduled.
    Placeholders of later frames count as known. A row that is still in prefill keeps the computed
    tokens of its plan, or of later plans.
    """
    promised, void = history.promised_after(step), history.find_void(step)
    for flight in history.frame_of(step):
        new = step.new.get(flight.request_id)
        if new is None or new.status is not v.Status.RUNNING or flight.is_dropped:
            continue
        if flight.request_id in void:
            continue
        life = history.lives[flight.request_id]
        known = life.num_prompt + len(new.output_token_ids)
        if flight.samples:
            expected = known + promised.get(flight.request_id, 0) - 1
        elif step.config.max_frames_in_flight > 1:
            expected = step.old[flight.request_id].num_computed_tokens
        else:
            expected = flight.end
        if new.num_computed_tokens != expected:
            what = f"{flight.request_id!r} knows {known} tokens after the commit"
            yield unequal(
                what,
                "num_computed_tokens",
                expected,
                new.num_computed_tokens,
                subjects=flight.request_id,
            )


@sentence("P14", v.Commit, fixes="when blocks are taken and given back")
def commit_changes_only_outputs_and_computed_tokens(step: Step, history: History) -> Complaints:
    """A request that continues keeps its blocks, status and history; one that did not sample keeps
    everything.

    Under asynchronous scheduling a running request may count more cached blocks, and so may a
    request whose load is confirmed.
    """
    in_frame = {
        row.request_id for row in history.frame_of(step) if row.samples and not row.is_dropped
    }
    stopped, store = history.list_stopped(step), history.store
    settled = store.list_confirmed(step)
    # Another check is about requests whose load failed.
    others = {*stopped, *history.find_void(step), *store.find_failed(step)}
    for name, new in step.new.items():
        old = step.old.get(name)
        if old is None or new is old or name in others:
            continue
        sampled = name in in_frame
        runs = sampled and new.status is v.Status.RUNNING
        if (
            _KEPT_BY_COMMIT(old) != _KEPT_BY_COMMIT(new)
            or (not runs and old.num_computed_tokens != new.num_computed_tokens)
            or (not sampled and old.output_token_ids != new.output_token_ids)
            or (not sampled and old.num_output_placeholders != new.num_output_placeholders)
            or (
                not (runs and step.config.async_scheduling)
                and name not in settled
                and old.num_cached_blocks != new.num_cached_blocks
            )
        ):
            yield unequal(f"a commit changed {name!r}", "request", old, new, subjects=name)


@sentence("P24", v.Schedule, of="rows")
def dispatched_drafts_are_the_last_proposed_ones(step: Step, history: History) -> Complaints:
    """A row has, after the known tokens of its request, a prefix of the drafts last attached to it.

    Under asynchronous scheduling the drafts follow the placeholders of frames in flight, and are
    placeholders themselves: of what the worker proposes after the last plan, if the request sampled
    in it.
    """
    for row in step.rows:
        life = history.lives[row.request_id]
        due = life.num_known + history.placeholders(row.request_id)
        count = max(row.end - due, 0)
        if row.drafts != life.drafts[:count] or len(row.drafts) != count:
            what = f"{row.request_id!r} runs {count} tokens after the known ones and placeholders"
            yield unequal(
                what, "draft_token_ids", life.drafts[:count], row.drafts, subjects=row.request_id
            )


@sentence("P23", v.Drafts, fixes="when drafts are held to a grammar")
def attached_drafts_are_accepted_by_the_grammar(step: Step, history: History) -> Complaints:
    """A request with a grammar keeps only those proposed drafts that the grammar accepts."""
    for name, expected in _list_proposed(step, history).items():
        if name in step.new and keeps_more(step, name, expected):
            what = f"{name!r} keeps drafts that its grammar does not accept"
            seen = step.new[name].spec_token_ids
            yield unequal(what, "spec_token_ids", expected, seen, subjects=name)


def keeps_more(step: Step, name: v.RequestId, accepted: v.TokenIds) -> bool:
    """Whether a request keeps more of the drafts proposed in this step than were accepted."""
    if not isinstance(step.event, v.Drafts):
        return False
    seen = step.new[name].spec_token_ids
    proposed = {row.request_id: row.token_ids for row in step.event.drafts}.get(name, ())
    return len(seen) > len(accepted) and seen == proposed[: len(seen)]


@sentence("P24", v.Schedule, v.Commit, v.Drafts, fixes="which drafts are kept, and for how long")
def attached_drafts_are_the_last_proposed_ones(step: Step, history: History) -> Complaints:
    """A running request has the drafts that were accepted last, until it is scheduled.

    With a grammar these are the leading drafts that it accepts. Other checks are about drafts that
    a grammar does not accept (`attached_drafts_are_accepted_by_the_grammar`) and about drafts of
    other requests (`only_running_requests_hold_anything`). Under asynchronous
    scheduling they are placeholders, as many as there may be drafts, from a plan in which the
    request sampled to the next plan.
    """
    proposed = _list_proposed(step, history) if step.config.num_speculative_tokens else {}
    for name, new in step.new.items():
        life = history.lives.get(name)
        if life is not None and new.status is v.Status.RUNNING:
            expected = proposed.get(name, life.drafts)
            if new.spec_token_ids != expected and not keeps_more(step, name, expected):
                what = f"the drafts of {name!r} are not those proposed last"
                yield unequal(what, "spec_token_ids", expected, new.spec_token_ids, subjects=name)


def _list_proposed(step: Step, history: History) -> dict[v.RequestId, v.TokenIds]:
    """The drafts that requests have after a step, for those whose drafts the step changes."""
    proposed: dict[v.RequestId, v.TokenIds] = {}
    if isinstance(step.event, v.Drafts) and isinstance(step.observation, v.DraftsTaken):
        taken = step.observation.request_ids
        proposed = {
            row.request_id: history.lives[row.request_id].accept(row.token_ids)
            for row in step.event.drafts
            if row.request_id in taken and row.request_id in history.lives
        }
    elif isinstance(step.event, v.Schedule):
        if step.config.async_scheduling:
            proposed = dict.fromkeys(step.new, ())
        proposed.update(
            (row.request_id, history.drafts_after(history.flight_row(row))) for row in step.rows
        )
    return proposed | dict.fromkeys(history.find_void(step), ())


@sentence("P24", v.Drafts, fixes="which drafts are kept, and for how long")
def drafts_are_taken_only_for_the_next_position(step: Step, history: History) -> Complaints:
    """Drafts are accepted exactly for running requests that are not in flight and have one token to
    compute.

    Only then is the position of a draft certain; all others are dropped.
    """
    assert isinstance(step.event, v.Drafts)
    assert isinstance(step.observation, v.DraftsTaken)
    expected = []
    for row in step.event.drafts:
        old, life = step.old.get(row.request_id), history.lives.get(row.request_id)
        if (
            old is not None
            and life is not None
            and old.status is v.Status.RUNNING
            and not old.is_prefill_chunk
            and not history.in_flight(row.request_id)
            and life.num_known > life.num_prompt
            and old.num_computed_tokens == life.num_known - 1
        ):
            expected.append(row.request_id)
    return differing_requests("taken", tuple(expected), step.observation.request_ids)


@sentence("P26", Schedule)
def plan_names_the_finished(step: Step, history: History) -> Complaints:
    """A plan names all requests that ended since the plan before, sorted; the state then forgets
    them."""
    ended = tuple(sorted(history.ended))
    yield from differing_requests("finished_req_ids", ended, step.plan.finished_req_ids)
    yield from differing_requests("finished_req_ids kept", (), step.after.finished_req_ids)


@sentence("P26", *ENDINGS, StreamingUpdate, covered_by="plan_names_the_finished")
def finished_ids_wait_for_the_next_plan(step: Step, history: History) -> Complaints:
    """A request that ends is kept until the next plan names it."""
    ended = tuple(sorted(history.ended.union(history.list_ended(step))))
    return differing_requests("finished_req_ids", ended, step.after.finished_req_ids)


@sentence("P26", Schedule)
def plan_names_the_preempted(step: Step, _history: History) -> Complaints:
    """A plan names all requests that were preempted while it was made, sorted."""
    is_shown = any(request.status is Status.PREEMPTED for request in step.after.requests)
    if isinstance(step.after, PartOfState) and not is_shown:
        return ()  # the reason why a request waits need not be shown
    victims = tuple(sorted(step.victims))
    return differing_requests("preempted_req_ids", victims, step.plan.preempted_req_ids)


@sentence("P26", Schedule, of="rows")
def new_row_carries_the_request_as_submitted(step: Step, history: History) -> Complaints:
    """A new row has the request as the client submitted it."""
    for row in step.plan.new:
        life = history.lives.get(row.request_id)
        if life is None or (row.request is not life.request and row.request != life.request):
            yield Complaint(
                f"the new row of {row.request_id!r} is not the request submitted",
                subjects=row.request_id,
            )
