"""Schedule: one step's work, from one token budget.

There is no prefill phase and no decode phase. Each request has computed tokens and known tokens
(and drafts), and a step lets the first catch up with the second: running requests before waiting
ones, in order, until tokens or blocks run out. With asynchronous scheduling the placeholders of
frames in flight count as known. Source: seed 001 "The schedule() Method"; seed 000 "Scheduler
Iteration".
"""

from __future__ import annotations

from blockstep.spec.state import State
from blockstep.spec.step.admission import process_waiting_phase
from blockstep.spec.step.plans import get_frame_rows, get_plan, process_advance
from blockstep.spec.step.running import process_running_phase
from blockstep.spec.step.work import Step
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
    return Step(
        state=state,
        budget=0 if is_paused else state.config.max_num_batched_tokens,
        pool=state.pool,
        requests=state.requests.to_dict(),
        running=list(state.running),
        waiting=list(state.waiting),
        skipped=list(state.skipped_waiting),
        stats=state.stats,
        parts=state.parts.to_dict(),
    )
