"""Schedule: one step's work, from one token budget.

There is no prefill phase and no decode phase. Each request has computed tokens and known tokens
(and drafts), and a step lets the first catch up with the second: running requests before waiting
ones, in order, until tokens or blocks run out. With asynchronous scheduling the placeholders of
frames in flight count as known. Source: seed 001 "The schedule() Method"; seed 000 "Scheduler
Iteration".
"""

from __future__ import annotations

from blockstep.spec.copies import replace
from blockstep.spec.core.admission import process_waiting_phase
from blockstep.spec.core.async_ import is_past_max_tokens
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.plans import get_frame_rows, get_plan, process_advance
from blockstep.spec.core.preemption import process_claim
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.core.token_budget import (
    compute_num_drafts,
    compute_share,
    get_threshold,
    process_limits,
)
from blockstep.spec.core.work import Scheduled, Step
from blockstep.spec.vocabulary import PauseState, Plan, RejectCode, Rejected


def process_schedule(state: State) -> tuple[State, Plan] | Rejected:
    """Plan one step. Source: seed 001 "schedule() Circular Flow"; P9, P15, P16."""
    # refuse
    if len(state.frames) >= state.config.max_frames_in_flight:
        waiting = ", ".join(str(frame.frame_id) for frame in state.frames)
        return Rejected(RejectCode.PIPELINE_FULL, f"commit frame {waiting} first")
    # select
    step = create_step(state)
    for begin in state.rules.hooks.begins:
        state.rules[begin](step)
    process_running_phase(step)
    closed = [state.rules[close](step) for close in state.rules.hooks.closes]
    if not (step.preempted or step.awaits_answer or any(closed)):
        process_waiting_phase(step)
    assert step.budget >= 0, "the budget is never overdrawn (P9)"
    # observe
    frame_rows = state.rules[get_frame_rows](step)
    plan = get_plan(step, frame_rows)
    return process_advance(step, frame_rows), plan


def create_step(state: State) -> Step:
    """Return a step in which nothing is planned yet; its budget is 0 while all is paused.

    Source: seed 001 "Unified Token Budget"; P9.
    """
    is_paused = state.pause_state is PauseState.PAUSED_ALL
    return Step(  # by position: keywords would make a dictionary, which doubles the time
        state,
        0 if is_paused else state.config.max_num_batched_tokens,
        state.pool,
        state.requests.to_dict(),
        list(state.running),
        list(state.waiting),
        list(state.skipped_waiting),
        state.stats,
        state.parts.to_dict(),
    )


# Running requests.


def process_running_phase(step: Step) -> None:
    """Schedule running requests, in running order; preempt when blocks are short.

    Stops when the budget is spent, when a request had to preempt itself, or when one waits for
    blocks that a commit will free. Source: seed 001 "Schedule RUNNING Requests"; seed 000 "Phase
    1"; P15.
    """
    index, goes_on, turn = 0, True, step.state.rules[process_turn]
    while goes_on and index < len(step.running) and step.budget > 0:
        index, goes_on = turn(step, index)


def process_turn(step: Step, index: int) -> tuple[int, bool]:
    """Schedule the running request at `index`; return the next index, and whether the phase
    continues: where a request lacks blocks, so would later ones. Source: seed 001 "For Running
    Requests", "Preemption in the Running Loop"; P15.
    """
    request, rules = step.requests[step.running[index]], step.state.rules
    num_new = get_num_running_tokens(step, request)
    num_new = rules[process_limits](step, request, request.num_computed_tokens, num_new)
    if num_new <= 0:
        return index + 1, True
    granted, index = process_claim(step, index, num_new)
    if granted is None:
        return index, False
    process_grant(step, request, num_new, granted)
    for grant in rules.hooks.grants:
        rules[grant](step, request)
    return index + 1, True


def get_num_running_tokens(step: Step, request: RequestState) -> int:
    """Return the tokens that a running request could have in this step; none if 0 or less.

    Position max_model_len - 1 is never computed: the token sampled before it was the last. Source:
    seed 001 "For Running Requests", "Async scheduling skip-ahead".
    """
    config, asked = step.state.config, request.request
    num_computed, num_placeholders = request.num_computed_tokens, request.num_output_placeholders
    num_prompt = len(asked.prompt_token_ids)
    if is_past_max_tokens(num_computed, num_placeholders, num_prompt, asked.max_tokens):
        return 0
    return compute_share(
        request.num_known_tokens + num_placeholders + len(request.spec_token_ids),
        num_computed,
        step.state.rules[get_threshold](step),
        step.budget,
        end=config.max_model_len - 1,
    )


def process_grant(
    step: Step, request: RequestState, num_new: int, granted: tuple[Pool, RequestState]
) -> None:
    """Add a running request's row to the step, with its drafts.

    A draft that the budget cut off is dropped: the next proposal is based on more tokens, and so
    better. Source: seed 001 "Packing Spec Tokens at Schedule Time".
    """
    step.pool, after = granted
    num_computed = request.num_computed_tokens
    num_promised = request.num_known_tokens + request.num_output_placeholders
    num_drafts = compute_num_drafts(num_computed, num_new, num_promised)
    if request.spec_token_ids:
        after = replace(after, spec_token_ids=())
    step.requests[request.request_id] = after
    held = zip(request.holdings, after.holdings, strict=True)
    gained = tuple([now.block_table[len(before.block_table) :] for before, now in held])
    drafts = request.spec_token_ids[:num_drafts]
    step.add(Scheduled(request.request_id, num_computed, num_new, gained, drafts))
