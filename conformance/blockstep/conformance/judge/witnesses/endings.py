"""Situations of a commit: what it delivers, and whom it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from blockstep.conformance.judge.properties.ledger import Ledger, Life
from blockstep.conformance.judge.properties.pool import verified_blocks
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.judge.witnesses.drafts import of_acceptance
from blockstep.conformance.judge.witnesses.frames import num_frames
from blockstep.spec.vocabulary import FinishReason, OutputRow, Status, TokenIds

ENDINGS: Mapping[str, str] = {
    "stop_eos": "a request ended with its end-of-sequence token",
    "stop_token": "a request ended with one of its stop tokens",
    "stop_length": "a request ended with its last allowed output",
    "stop_model_length": "a request ended at max_model_len, before max_tokens",
    "stop_repetition": "a request ended because it repeated itself",
    "stop_inside_accepted_drafts": "a stop cut off accepted tokens that came after it",
    "min_tokens_held_back_a_stop": "a stop token came too early to count",
    "several_ended_in_one_commit": "one commit ended more than one",
    "prefill_row_sampled_nothing": "a commit had a row without tokens",
    "commit_for_aborted": "a commit had a row of one that was aborted meanwhile",
    "commit_for_preempted": "a forced reset preempted a request in flight; its tokens count",
    "ended_while_preempted": "a request in flight was reset by force and then ended",
}


def of_commit(step: Step, ledger: Ledger, rows: tuple[OutputRow, ...]) -> Iterator[str]:
    """What a commit brings to each row of its frame."""
    answers = {row.request_id: row for row in rows}
    if sum(row.finish_reason is not None for row in rows) > 1:
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
            yield from of_acceptance(step, flight, tokens)
            rejected = 1 + len(flight.drafts) - len(tokens)
            if rejected and _is_running(step, life) and num_frames(ledger, life) > 1:
                yield "rollback_with_frames_behind"
            answer = answers.get(flight.request_id)
            if answer is not None:
                is_stale = step.commit.frame_id >= ledger.first_frame_since_reset
                yield from _of_output(step, life, answer, tokens, is_stale)

    for name, _, blocks in verified_blocks(step, ledger):
        if blocks:
            yield "published_by_commit" if name in step.new else "published_by_the_last_commit"


def _is_running(step: Step, life: Life) -> bool:
    return step.old[life.request.request_id].status is Status.RUNNING


def _of_output(
    step: Step, life: Life, answer: OutputRow, tokens: TokenIds, is_stale: bool
) -> Iterator[str]:
    request = life.request
    if step.old[request.request_id].status is Status.PREEMPTED:
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
    if reason is FinishReason.STOP:
        yield "stop_eos" if answer.stop_token_id is None else "stop_token"
    elif reason is FinishReason.LENGTH:
        outputs = count + len(answer.new_token_ids)
        yield "stop_length" if outputs >= request.max_tokens else "stop_model_length"
    elif reason is FinishReason.REPETITION:
        yield "stop_repetition"
