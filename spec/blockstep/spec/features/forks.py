"""Forks: a request branches off another one, and shares its blocks until one of them writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.features.structured_output.grammar import STAND, get_first_stand
from blockstep.spec.features.structured_output.masks import get_advanced
from blockstep.spec.hashing import get_keyed
from blockstep.spec.lives.endings import get_extended
from blockstep.spec.lives.lifecycle import get_id_problem
from blockstep.spec.memory.forks import compute_num_shared, count_common_tokens, get_shared
from blockstep.spec.memory.slots import publish_slots
from blockstep.spec.pool import Pool, touch_blocks
from blockstep.spec.requests import NOTHING_HELD, FrameRow, RequestState, without_nulls
from blockstep.spec.state import State
from blockstep.spec.step.queues import process_prepend
from blockstep.spec.step.work import Step
from blockstep.spec.vocabulary import Ack, Config, Fork, Plan, RejectCode, Rejected, Status


def process_fork(state: State, fork: Fork) -> tuple[State, Ack] | Rejected:
    """Start a branch: it waits at the front of the queue with the blocks it shares with its parent.

    Source: seed 002 "Fork: Creating New Beams"; P2, P4, P16.
    """
    # refuse
    problem = get_fork_problem(state, fork)
    if problem is not None:
        return problem
    branch = get_branch(state, fork)
    if branch is None:
        detail = f"{fork.child_id!r}: an output of {fork.output_token_ids} ends it or is forbidden"
        return Rejected(RejectCode.BAD_FORK, f"{detail}; leave it out")
    # pool
    pool, parent = publish_computed(state, state.requests[fork.request_id])
    num_common = count_common_tokens(parent.all_token_ids, branch.all_token_ids)
    num_tokens = min(parent.num_computed_tokens, num_common, branch.num_known_tokens - 1)
    groups = state.config.kv_groups
    num_shared = compute_num_shared(groups, parent.holdings, num_tokens)
    holdings = tuple(map(get_shared, groups, parent.holdings, [num_shared] * len(groups)))
    for holding in holdings:
        pool = touch_blocks(pool, without_nulls(holding.block_table))
    # requests
    branch = replace(branch, holdings=holdings, num_computed_tokens=num_shared)
    requests = state.requests.having(fork.request_id, parent).having(fork.child_id, branch)
    waiting = list(state.waiting)
    process_prepend(state.config.policy, waiting, fork.child_id, requests)
    return replace(state, pool=pool, requests=requests, waiting=tuple(waiting)), Ack()


def get_fork_problem(state: State, fork: Fork) -> Rejected | None:
    """Return why this request cannot fork now, or None. Source: P7, P13, P18."""
    name, parent = fork.request_id, state.requests.get(fork.request_id)
    if not state.config.enable_forks:
        detail = "forks are off; set enable_forks, or submit the request once more"
        return Rejected(RejectCode.BAD_FORK, detail)
    if parent is None:
        return Rejected(
            RejectCode.UNKNOWN_REQUEST, f"{name!r} is unknown; fork an unfinished request"
        )
    problem = state.rules[get_id_problem](state, fork.child_id)
    if problem is not None:
        return problem
    if parent.request.resumable:
        return Rejected(RejectCode.BAD_FORK, f"{name!r} is a session; submit another request")
    if parent.status not in (Status.RUNNING, Status.PREEMPTED):
        return Rejected(RejectCode.BAD_FORK, f"{name!r} has not started; submit it once more")
    for frame in state.frames:
        if any(row.request_id == name for row in frame.rows):
            detail = f"frame {frame.frame_id} has a row of {name!r}; commit it first"
            return Rejected(RejectCode.FORK_IN_FLIGHT, detail)
    return None


def get_branch(state: State, fork: Fork) -> RequestState | None:
    """Return the branch before it shares blocks; None if an output ends it, or is forbidden.

    Source: seed 002 "Fork: Creating New Beams"; P13, P23.
    """
    config, parent = state.config, state.requests[fork.request_id]
    asked, outputs = replace(parent.request, request_id=fork.child_id), fork.output_token_ids
    branch = RequestState(
        asked,
        Status.WAITING,
        holdings=NOTHING_HELD * len(config.block_sizes),
        num_cached_tokens=parent.num_cached_tokens,
        grammar_ready=parent.grammar_ready,
    )
    branch, row = get_extended(branch, outputs, config.max_model_len, state.rules)
    if row.finish_reason is not None:
        return None
    if asked.grammar is not None:
        stand = get_first_stand(config, asked.prompt_token_ids)
        advanced = get_advanced(state, STAND.put(branch, stand), outputs)
        if advanced is None:
            return None
        branch = advanced
    return get_keyed(config, branch, state.rules)


def publish_computed(state: State, parent: RequestState) -> tuple[Pool, RequestState]:
    """Publish the full blocks of a parent, so that shared blocks have keys.

    Source: seed 001 "Phase 5: commit to the prefix cache"; P3, P4.
    """
    config, is_running = state.config, parent.status is Status.RUNNING
    if not config.enable_prefix_caching or not is_running:
        return state.pool, parent
    num_there = min(parent.num_computed_tokens, parent.num_known_tokens)
    nums_full = [num_there // size for size in config.block_sizes]
    return publish_slots(config, state.pool, parent, nums_full, state.rules)


def tell_copies(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with blocks to be copied, and with the requests whose tables change by that.

    Source: seed 002 "The COW Mechanism" (`pending_copies`); P2, P26.
    """
    running = [row for row in step.rows if row.copies and row.status is Status.RUNNING]
    return replace(
        plan,
        block_copies=tuple([copy for row in step.rows for copy in row.copies]),
        remapped_req_ids=tuple(sorted([row.request_id for row in running])),
    )


def has_forks(config: Config) -> bool:
    """Whether requests may fork. Source: seed 002 "Fork: Creating New Beams"."""
    return config.enable_forks


FEATURE: Final = Feature("forks", has_forks, Hooks(fields=(tell_copies,)))
