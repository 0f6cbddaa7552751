"""Cadence: P9 prompts get no tokens before their interval is over, unless nothing can decode."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.amounts import share_of
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.queue_replay import admits_nobody, next_in_line
from blockstep.conformance.judge.properties.sentence import Complaint, Complaints, sentence
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec import vocabulary as v


def is_early(ledger: Ledger) -> bool:
    """Whether the last plan that computed a prompt is less than an interval ago."""
    return ledger.num_plans_since_prompt < ledger.config.prefill_schedule_interval - 1


def can_decode(step: Step, ledger: Ledger) -> bool:
    """Whether some running request has its prompt computed and a next token to compute."""
    running = [step.old[name] for name in step.before.running]
    return any(not old.is_prefill_chunk and share_of(ledger, old) > 0 for old in running)


def holds_prompts(step: Step, ledger: Ledger) -> bool:
    """Whether a plan holds prompts."""
    return is_early(ledger) and can_decode(step, ledger)


@sentence("P9", v.Schedule, needs="has_prefill_interval", fixes="when prompts are computed")
def held_prompts_get_no_tokens(step: Step, ledger: Ledger) -> Complaints:
    """While a request can decode, fewer than `prefill_schedule_interval` - 1 plans after one with a
    prompt, neither a running chunk nor a waiting request with more than its last token gets
    tokens."""
    if not holds_prompts(step, ledger):
        return
    for row in step.rows:
        if ledger.computes_prompt(step, row):
            num_plans = ledger.num_plans_since_prompt
            what = f"{row.request_id!r} computes its prompt {num_plans + 1} plans after another"
            yield Complaint(what, subjects=row.request_id)


HOLD = holds_prompts


TEXTS = {
    "cadence_chunk_held": "a running request had to wait with the next chunk of its prompt",
    "cadence_waiting_held": "a waiting request was not admitted because prompts were held",
    "cadence_last_token_admitted": (
        "a request with one token to compute was admitted while prompts were held"
    ),
    "cadence_load_begins": "a load began while prompts were held",
    "cadence_interval_over": "after the interval a prompt was computed, and others decoded",
    "cadence_nothing_decodes": "prompts were computed early because nothing decodes",
    "cadence_decodes_in_flight": (
        "prompts were computed early because all that decode wait for their tokens"
    ),
}


def find(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of a plan."""
    if not isinstance(step.observation, v.Plan) or not step.rows:
        return
    prompts = [row for row in step.rows if ledger.computes_prompt(step, row)]
    if holds_prompts(step, ledger):
        yield from of_held(step, ledger)
    elif prompts and is_early(ledger):
        decodes = [name for name in step.before.running if not step.old[name].is_prefill_chunk]
        yield "cadence_decodes_in_flight" if decodes else "cadence_nothing_decodes"
    elif prompts and can_decode(step, ledger):
        yield "cadence_interval_over"


def of_held(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of a plan that holds prompts."""
    after = step.after
    if any(name in step.old and step.new[name].is_prefill_chunk for name in after.running):
        yield "cadence_chunk_held"
    if step.admitted_rows:
        yield "cadence_last_token_admitted"
    if step.parked:
        yield "cadence_load_begins"
    is_open = ledger.pause_state is v.PauseState.UNPAUSED and not admits_nobody(step, ledger)
    has_seat = len(after.running) < step.config.max_num_seqs
    has_tokens = step.plan.total_num_scheduled_tokens < step.config.max_num_batched_tokens
    if is_open and has_seat and has_tokens and next_in_line(step, ledger) is not None:
        yield "cadence_waiting_held"


GOALS = Goals(TEXTS, find)
