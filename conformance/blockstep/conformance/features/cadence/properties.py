"""Cadence: P9 prompts get no tokens before their interval is over, unless nothing can decode."""

from __future__ import annotations

from blockstep.conformance.judge.properties.amounts import share_of
from blockstep.conformance.judge.properties.ledger import Ledger
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
