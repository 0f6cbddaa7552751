"""Forks: plays with branches, and the checks of forks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec.vocabulary import (
    BlockCopy,
    Fork,
    Schedule,
    Submit,
)
from play_support.plants import going_by
from play_support.play import (
    CONFIG,
    Bend,
    C,
    Case,
    Play,
    after,
    changed,
    counted,
    nothing,
    observed,
    request,
    same,
    with_row,
)

FORKING = replace(CONFIG, enable_forks=True)
P = request("P", 1, 2, 3, 4, 5, max_tokens=6)
"""A request of two full blocks and a partial one."""
Q = Fork("P", "Q", (7,))


def forked() -> Play:
    """A branch with another output shares the computed blocks of its parent."""
    return Play(FORKING).do(Submit(P), Schedule()).commit().do(Q)


def forked_ahead() -> Play:
    """C waits, and the branch is queued in front of C."""
    return Play(FORKING).do(Submit(P), Schedule()).commit().do(Submit(C), Q)


def copied() -> Play:
    """The parent gets a copy of the partial block, and the branch writes to the shared one."""
    return forked().do(Schedule())


def copied_beside_a_waiting_one() -> Play:
    """One request can run, and prefix caching is off."""
    config = replace(FORKING, max_num_seqs=1, enable_prefix_caching=False)
    return Play(config).do(Submit(P), Schedule()).commit().do(Q, Schedule())


def not_admitted() -> Play:
    """W waits: its admission would leave fewer free blocks than the watermark."""
    config = replace(FORKING, watermark_blocks=1, scheduler_reserve_full_isl=False)
    config = replace(config, max_num_batched_tokens=16)
    play = Play(config).do(Submit(P), Schedule()).commit()
    return play.do(Submit(request("W", *[9] * 10, max_tokens=2)), Schedule())


def shared_and_written(step: Step) -> Step:
    """Return the step with the parent writing to the block that it shares with the branch."""
    (copy,) = step.plan.block_copies
    counts = list(step.before.ref_counts)
    table = step.old["P"].block_tables[0]
    step = with_row(step, "P", new_block_ids=((),))
    step = observed(step, block_copies=(), remapped_req_ids=())
    assert counts[copy.source] == 2
    step = after(step, ref_counts=tuple(counts), free_queue=step.before.free_queue)
    return changed(step, "P", block_tables=(table,))


def named_once_more(step: Step) -> Step:
    """Return the step with a free block that has the key of a shared block."""
    keys = list(step.after.block_keys)
    block = step.new["P"].block_tables[0][0]
    free, key = step.after.free_queue[-1], keys[block]
    assert key is not None
    keys[free] = key
    cached = {**step.after.cached, key: (*step.after.cached[key], free)}
    return after(step, block_keys=tuple(keys), cached=cached)


def malformed(step: Step) -> Step:
    """Return the step with an accepted event that had to be refused."""
    return replace(step, event=Fork("P", ""))


ALONE: list[Case] = [
    (
        "branch_shares_all_common_blocks",
        forked,
        nothing,
        lambda s: changed(s, "Q", num_cached_tokens=3),
    ),
    (
        "fork_changes_no_other_request",
        forked,
        nothing,
        lambda s: changed(s, "P", is_prefill_chunk=True),
    ),
    ("full_blocks_of_a_parent_are_published", forked, nothing, named_once_more),
    (
        "branch_goes_to_the_front_of_the_queue",
        forked_ahead,
        nothing,
        lambda s: after(s, waiting=("C", "Q")),
    ),
    (
        "shared_block_is_not_written",
        copied_beside_a_waiting_one,
        nothing,
        shared_and_written,
    ),
    (
        "shared_blocks_are_copied_where_they_are_written",
        copied,
        nothing,
        lambda s: observed(s, block_copies=(*s.plan.block_copies, BlockCopy(7, 8))),
    ),
    ("admission_leaves_the_watermark", not_admitted, going_by(watermark_blocks=0), same),
]
EACH_KIND: list[tuple[str, Callable[[], Play], Bend]] = [
    ("counters_grow_by_what_happened", forked, counted),
    ("stale_or_wrong_event_is_rejected", forked, malformed),
    ("pool_keeps_its_size", forked, lambda s: after(s, block_keys=s.after.block_keys[1:])),
    ("every_block_is_free_or_held", forked, lambda s: after(s, ref_counts=s.before.ref_counts)),
    ("cache_map_and_blocks_agree", forked, lambda s: after(s, cached={})),
    ("only_running_requests_hold_anything", forked, lambda s: changed(s, "Q", spec_token_ids=(1,))),
    ("every_request_is_in_one_queue", forked, lambda s: after(s, waiting=())),
]
"""Wrong steps of a fork."""
