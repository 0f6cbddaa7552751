"""Goals that need a prefill cadence: prompts that are held, and those that are not."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.features.cadence.properties import can_decode, holds_prompts, is_early
from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.queue_replay import admits_no_request, next_in_line
from blockstep.spec import vocabulary as v

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


def of_cadence(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan."""
    if not step.rows:
        return
    prompts = [row for row in step.rows if history.computes_prompt(step, row)]
    if holds_prompts(step, history):
        yield from of_held(step, history)
    elif prompts and is_early(history):
        decodes = [name for name in step.before.running if not step.old[name].is_prefill_chunk]
        yield "cadence_decodes_in_flight" if decodes else "cadence_nothing_decodes"
    elif prompts and can_decode(step, history):
        yield "cadence_interval_over"


def of_held(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan that holds prompts."""
    after = step.after
    if any(name in step.old and step.new[name].is_prefill_chunk for name in after.running):
        yield "cadence_chunk_held"
    if step.admitted_rows:
        yield "cadence_last_token_admitted"
    if step.parked:
        yield "cadence_load_begins"
    is_open = history.pause_state is v.PauseState.UNPAUSED and not admits_no_request(step, history)
    has_slot = len(after.running) < step.config.max_num_seqs
    has_tokens = step.plan.total_num_scheduled_tokens < step.config.max_num_batched_tokens
    if is_open and has_slot and has_tokens and next_in_line(step, history) is not None:
        yield "cadence_waiting_held"


GOALS = Goals(TEXTS, {v.Schedule: of_cadence})
