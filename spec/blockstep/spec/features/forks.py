"""Forks: a request branches off another one, and shares its blocks until one of them writes.

    parent   [ 4 ][ 7 ][ 9 . ]     c computed tokens, 9 is not full
    branch   [ 4 ][ 7 ][ 9 . ]     the tokens that both have in common

Full blocks are published, and never written again. The block after them is shared as well; the
first request that writes to it replaces it by a copy, and the last holder writes in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool, allocate_blocks, free_blocks, touch_blocks
from blockstep.spec.core.endings import get_extended
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.lifecycle import get_id_problem
from blockstep.spec.core.parts import Note
from blockstep.spec.core.prefix_cache import get_keyed
from blockstep.spec.core.queues import process_prepend
from blockstep.spec.core.requests import (
    NOTHING_HELD,
    FrameRow,
    Holding,
    RequestState,
    without_nulls,
)
from blockstep.spec.core.slots import publish_slots
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.groups.kinds import compute_num_skipped_blocks
from blockstep.spec.features.structured_output import GRAMMAR_READY, get_advanced
from blockstep.spec.features.structured_output.grammar import GRAMMAR, get_first_state
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    Ack,
    BlockCopy,
    BlockTables,
    Config,
    Fork,
    KVGroup,
    Plan,
    RejectCode,
    Rejected,
    RequestId,
    Status,
    TokenIds,
)


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
    )
    branch = GRAMMAR_READY.put(branch, GRAMMAR_READY.of(parent))
    branch, row = state.rules[get_extended](branch, outputs, config.max_model_len, state.rules)
    if row.finish_reason is not None:
        return None
    if asked.grammar is not None:
        grammar_state = get_first_state(config, asked.prompt_token_ids)
        advanced = get_advanced(state, GRAMMAR.put(branch, grammar_state), outputs)
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


# Shared blocks.


def count_common_tokens(mine: TokenIds, theirs: TokenIds) -> int:
    """Return the number of leading tokens that two sequences share. Source: seed 002 "Fork"; P2."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    differing = (at for at, (one, other) in pairs if one != other)
    return next(differing, min(len(mine), len(theirs)))


def compute_num_shared(
    groups: Sequence[KVGroup], holdings: Sequence[Holding], num_tokens: int
) -> int:
    """Return the most of `num_tokens` common computed tokens that a branch can continue after.

    Source: seed 002 "Fork: Creating New Beams", where it is all of them; P2, P5.
    """
    return max(
        num_shared
        for num_shared in range(num_tokens + 1)
        if all(map(is_shareable, groups, holdings, [num_shared] * len(groups)))
    )


def is_shareable(group: KVGroup, holding: Holding, num_shared: int) -> bool:
    """Whether a branch with `num_shared` computed tokens of a table can continue after them.

    Not within a published block: that is not written again. And all blocks that the next token
    attends to must be there. Source: P2, P4, P5.
    """
    size, table = group.block_size, holding.block_table
    is_within = num_shared % size > 0 and num_shared // size < holding.num_cached_blocks
    attended = table[compute_num_skipped_blocks(group, num_shared) : -(-num_shared // size)]
    return not is_within and NULL_BLOCK not in attended


def get_shared(group: KVGroup, holding: Holding, num_shared: int) -> Holding:
    """Return what a branch holds of its parent's table. Source: seed 002 "Fork"; P2."""
    size = group.block_size
    num_settled = min(holding.num_cached_blocks, num_shared // size)
    return Holding(holding.block_table[: -(-num_shared // size)], num_settled)


def compute_num_copies(pool: Pool, group: KVGroup, holding: Holding, num_computed: int) -> int:
    """Return the blocks that must be copied to continue after `num_computed` tokens: one at most.

    Source: seed 002 "The COW Mechanism"; P2, P8.
    """
    index, table = num_computed // group.block_size, holding.block_table
    is_within = num_computed % group.block_size > 0
    return int(is_within and pool.ref_counts[table[index]] > 1)


def get_own(
    pool: Pool, group: KVGroup, holding: Holding, num_computed: int
) -> tuple[Pool, Holding]:
    """Replace the block in which a request continues by a new one if others hold it, too.

    The caller has checked the capacity. Source: seed 002 "The COW Mechanism"; P1, P2.
    """
    if not compute_num_copies(pool, group, holding, num_computed):
        return pool, holding
    index, table = num_computed // group.block_size, holding.block_table
    pool, taken = allocate_blocks(pool, 1)
    pool = free_blocks(pool, table[index : index + 1])
    own = table[:index] + taken + table[index + 1 :]
    return pool, Holding(own, holding.num_cached_blocks)


def list_copies(before: BlockTables, after: BlockTables) -> tuple[BlockCopy, ...]:
    """Return the copies to make, from tables before and after; skipped blocks are not copied.

    Source: seed 002 "The COW Mechanism"; P26.
    """
    return tuple(
        [
            BlockCopy(source, destination)
            for mine, others in zip(before, after, strict=True)
            for source, destination in zip(mine, others, strict=False)
            if source != destination and NULL_BLOCK not in (source, destination)
        ]
    )


# Copies in a step.

COPIES: Final = Note[Mapping[RequestId, tuple[BlockCopy, ...]]]("copies", {})
"""The copies of shared blocks that the rows of a step need, by request."""


def note_copies(step: Step, request: RequestState) -> None:
    """Note the copies that a row needs; a running request's plan then has its whole tables.

    `request`: as it was before it had its slots. Source: seed 002 "The COW Mechanism"; P26.
    """
    tables = step.requests[request.request_id].block_tables
    copies = list_copies(request.block_tables, tables)
    COPIES.set(step, {**COPIES.of(step), request.request_id: copies})
    if copies and request.status is Status.RUNNING:
        step.rows[-1] = replace(step.rows[-1], new_blocks=tables)


def add_copies(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with blocks to be copied, and with the requests whose tables change by that.

    A new request may have outputs already. Source: seed 002 "The COW Mechanism"
    (`pending_copies`); P2, P26.
    """
    known = step.requests
    copies = [(row, COPIES.of(step)[row.request_id]) for row in step.rows]
    running = [row.request_id for row, of_row in copies if of_row and row.status is Status.RUNNING]
    new = [
        replace(row, output_token_ids=known[row.request.request_id].output_token_ids)
        for row in plan.new
    ]
    return replace(
        plan,
        new=tuple(new),
        block_copies=tuple([copy for _, of_row in copies for copy in of_row]),
        remapped_req_ids=tuple(sorted(running)),
    )


def has_forks(config: Config) -> bool:
    """Whether requests may fork. Source: seed 002 "Fork: Creating New Beams"."""
    return config.enable_forks


FEATURE: Final = Feature(
    "forks",
    has_forks,
    Hooks(
        needs=(compute_num_copies,), owns=(get_own,), grants=(note_copies,), fields=(add_copies,)
    ),
    events={Fork: process_fork},
)
