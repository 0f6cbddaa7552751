"""Cadence: P9 prompts get no tokens before their interval is over, unless nothing can decode."""

from __future__ import annotations

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import Complaint, Complaints, sentence
from blockstep.conformance.judge.properties.token_amounts import share_of
from blockstep.spec import vocabulary as v


def is_early(history: History) -> bool:
    """Whether the last plan that computed a prompt is less than an interval ago."""
    return history.num_plans_since_prompt < history.config.prefill_schedule_interval - 1


def can_decode(step: Step, history: History) -> bool:
    """Whether some running request has its prompt computed and a next token to compute."""
    running = [step.old[name] for name in step.before.running]
    return any(not old.is_prefill_chunk and share_of(history, old) > 0 for old in running)


def holds_prompts(step: Step, history: History) -> bool:
    """Whether a plan holds prompts."""
    return is_early(history) and can_decode(step, history)


@sentence("P9", v.Schedule, needs="has_prefill_interval", fixes="when prompts are computed")
def held_prompts_get_no_tokens(step: Step, history: History) -> Complaints:
    """While a request can decode, fewer than `prefill_schedule_interval` - 1 plans after one with a
    prompt, neither a running chunk nor a waiting request with more than its last token gets
    tokens."""
    if not holds_prompts(step, history):
        return
    for row in step.rows:
        if history.computes_prompt(step, row):
            num_plans = history.num_plans_since_prompt
            what = f"{row.request_id!r} computes its prompt {num_plans + 1} plans after another"
            yield Complaint(what, subjects=row.request_id)


HOLD = holds_prompts
