"""Goals of a commit: delivered tokens, ended requests, accepted and rejected drafts."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.properties.amounts import blocks_for
from blockstep.conformance.judge.properties.ledger import FlightRow, Ledger
from blockstep.conformance.judge.properties.life import Life
from blockstep.conformance.judge.properties.pool import verified_blocks
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.judge.witnesses.frames import num_frames
from blockstep.spec import vocabulary as v

COMMITS = {
    "drafts_taken": "drafts were attached to a request",
    "drafts_dropped": "drafts for a request that cannot use them were dropped",
    "drafts_replaced": "drafts were attached over others not yet scheduled",
    "drafts_scheduled": "a row carried drafts",
    "drafts_trimmed": "a row carried fewer drafts than were attached",
    "drafts_lost_by_preemption": "a request was preempted with drafts attached",
    "block_for_lookahead_only": "a row gained a block that only the lookahead needs",
    "drafts_all_accepted": "every draft of a row was accepted",
    "drafts_some_accepted": "some drafts of a row were accepted, others not",
    "drafts_none_accepted": "the first draft of a row was rejected",
    "rollback_over_a_block_boundary": "rejected drafts had reached into another block",
    "stop_eos": "a request ended with its end-of-sequence token",
    "stop_token": "a request ended with one of its stop tokens",
    "stop_length": "a request ended with its last allowed output",
    "stop_model_length": "a request ended at max_model_len, before max_tokens",
    "stop_repetition": "a request ended because it repeated itself",
    "stop_inside_accepted_drafts": "a stop cut off accepted tokens that came after it",
    "min_tokens_held_back_a_stop": "a stop token came too early to count",
    "several_ended_in_one_commit": "one commit ended more than one request",
    "prefill_row_sampled_nothing": "a commit had a row without tokens",
    "commit_for_aborted": "a commit had a row of a request that was aborted since",
    "commit_for_preempted": "a forced reset preempted a request in flight; its tokens count",
    "ended_while_preempted": "a request in flight was reset by force and then ended",
}


def of_commit(step: Step, ledger: Ledger, rows: tuple[v.OutputRow, ...]) -> Iterator[str]:
    """Yield the goals of each row of the committed frame."""
    answers = {row.request_id: row for row in rows}
    if len(step.ended) > 1:
        yield "several_ended_in_one_commit"
    for flight in ledger.frame_of(step):
        tokens = step.sampled.get(flight.request_id, ())
        life = ledger.lives.get(flight.request_id)
        if life is None:
            stopped = flight.request_id in ledger.stopped_in_flight
            yield "row_of_an_ended_request_ignored" if stopped else "commit_for_aborted"
        elif not tokens:
            yield "prefill_row_sampled_nothing"
        else:
            yield from _of_acceptance(step, flight, tokens)
            rejected = 1 + len(flight.drafts) - len(tokens)
            is_running = step.old[flight.request_id].status is v.Status.RUNNING
            if rejected and is_running and num_frames(ledger, flight.request_id) > 1:
                yield "rollback_with_frames_behind"
            answer = answers.get(flight.request_id)
            if answer is not None:
                is_stale = step.commit.frame_id >= ledger.first_frame_since_reset
                yield from _of_output(step, life, answer, tokens, is_stale)

    is_published = step.after.block_keys != step.before.block_keys
    for stretch in verified_blocks(step, ledger) if is_published else ():
        if stretch.blocks:
            lives = stretch.request_id in step.new
            yield "published_by_commit" if lives else "published_by_the_last_commit"


def _of_output(
    step: Step, life: Life, answer: v.OutputRow, tokens: v.TokenIds, is_stale: bool
) -> Iterator[str]:
    request = life.request
    if step.old[request.request_id].status is v.Status.PREEMPTED:
        yield "stale_tokens_delivered" if is_stale else "commit_for_preempted"
        if is_stale and not step.config.async_scheduling:
            yield "pipeline_token_after_preemption"
        if answer.finish_reason is not None:
            yield "ended_while_stale" if is_stale else "ended_while_preempted"
    if len(answer.new_token_ids) < len(tokens):
        yield "stop_inside_accepted_drafts"
    stops = {request.eos_token_id, *request.stop_token_ids}
    count = life.num_known - life.num_prompt
    for index, token in enumerate(answer.new_token_ids, count + 1):
        if token in stops and index < request.min_tokens:
            yield "min_tokens_held_back_a_stop"
    reason = answer.finish_reason
    if reason is v.FinishReason.STOP:
        yield "stop_eos" if answer.stop_token_id is None else "stop_token"
    elif reason is v.FinishReason.LENGTH:
        outputs = count + len(answer.new_token_ids)
        yield "stop_length" if outputs >= request.max_tokens else "stop_model_length"
    elif reason is v.FinishReason.REPETITION:
        yield "stop_repetition"


def _of_acceptance(step: Step, flight: FlightRow, tokens: v.TokenIds) -> Iterator[str]:
    """Yield the goals for the number of accepted drafts of a row."""
    if not flight.drafts:
        return
    accepted, count, config = len(tokens) - 1, len(flight.drafts), step.config
    if accepted == count:
        yield "drafts_all_accepted"
    else:
        yield "drafts_some_accepted" if accepted else "drafts_none_accepted"
    size = config.block_size
    if blocks_for(flight.end - count + accepted, size) < blocks_for(flight.end, size):
        yield "rollback_over_a_block_boundary"


def of_drafts(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of proposed drafts."""
    assert isinstance(step.event, v.Drafts)
    assert isinstance(step.observation, v.DraftsTaken)
    for row in step.event.drafts:
        if row.request_id not in step.observation.request_ids:
            yield "drafts_dropped"
        elif row.token_ids:
            yield "drafts_taken"
            if ledger.lives[row.request_id].drafts:
                yield "drafts_replaced"
