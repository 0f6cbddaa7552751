"""Goals that need a store for victims, or thresholds of admission."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.features.tiers.properties import count_settled_tokens
from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec import vocabulary as v

TEXTS = {
    "tiers_victim_saved": "the KV of a victim was saved",
    "tiers_several_saved": "the KV of several victims of one step was saved",
    "tiers_too_little_to_save": "a victim had KV, but too little to save",
    "tiers_saved_beside_frames": "a victim was saved while frames were in flight",
    "tiers_saved_behind_a_window": "skipped blocks of a victim were not saved",
    "tiers_victim_comes_back": "a saved victim is loaded again",
    "tiers_victim_comes_back_later": "a saved victim is loaded again, asynchronously",
    "tiers_closed_by_low": "admission closed because few blocks were free",
    "tiers_closed_by_preemption": "admission closed because a request was preempted",
    "tiers_stays_closed": "admission stayed closed with more free blocks than it closes at",
    "tiers_opened_by_high": "admission opened while requests run",
    "tiers_opened_for_nobody": "admission opened because no request ran",
    "tiers_waits_while_closed": "a request waited for which blocks were free",
}


def of_tiers(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan with saves or thresholds."""
    if step.config.swap_min_tokens:
        yield from of_saves(step, history)
    if step.config.admission_high_blocks:
        yield from of_thresholds(step)


def of_saves(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of saved victims, of others, and of saved ones that are loaded."""
    saves = {save.request_id: save for save in step.plan.kv_saves}
    if len(saves) > 1:
        yield "tiers_several_saved"
    for name in step.preempted:
        save = saves.get(name)
        if save is None:
            if count_settled_tokens(step, history, name):
                yield "tiers_too_little_to_save"
            continue
        yield "tiers_victim_saved"
        if step.before.frames_in_flight:
            yield "tiers_saved_beside_frames"
        if any(v.NULL_BLOCK in table for table in save.block_ids):
            yield "tiers_saved_behind_a_window"
    for load in step.plan.kv_loads:
        if load.request_id in history.store.transfers.saved:
            yield "tiers_victim_comes_back"
            if load.is_async:
                yield "tiers_victim_comes_back_later"


def of_thresholds(step: Step) -> Iterator[str]:
    """Yield the goals of admission that closes or opens."""
    before, after = step.before, step.after
    num_free, config = len(after.free_queue), step.config
    if not after.admission_closed:
        if before.admission_closed:
            ran_on = set(before.running) - set(step.preempted)
            yield "tiers_opened_by_high" if ran_on else "tiers_opened_for_nobody"
        return
    if step.preempted:
        yield "tiers_closed_by_preemption"
    elif not before.admission_closed:
        yield "tiers_closed_by_low"
    elif num_free >= config.admission_low_blocks:
        yield "tiers_stays_closed"
    if num_free and (after.waiting or after.skipped_waiting):
        yield "tiers_waits_while_closed"


GOALS = Goals(TEXTS, {v.Schedule: of_tiers})
