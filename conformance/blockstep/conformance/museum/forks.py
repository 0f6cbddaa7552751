"""Seeded bugs in forks, copy on write, the watermark and the order of the free queue.

The defects in the block manager's listings on these topics are reproduced here. The others are
mistakes that suggest themselves, and wrong repairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blockstep.conformance.museum.bug import Page, Right, instead, replacing
from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool, free_blocks, get_num_free_blocks
from blockstep.spec.core.endings import get_released
from blockstep.spec.core.requests import (
    FrameRow,
    Holding,
    RequestState,
    without_nulls,
)
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import allocate_slots, count_copies
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.admission_control import get_watermark
from blockstep.spec.features.forks import (
    COPIES,
    add_copies,
    compute_num_copies,
    count_common_tokens,
    get_branch,
    get_shared,
    is_shareable,
    list_copies,
)
from blockstep.spec.features.full_isl import can_finish
from blockstep.spec.vocabulary import (
    BlockCopy,
    BlockId,
    Config,
    Fork,
    Plan,
    Status,
)

PAGE = Page(takes="forks")
GROUPS = Page(takes_groups=True, takes="forks")
FORK, COW, APPEND, WATERMARK = (
    f"the block manager: {where}, breaks its rule"
    for where in ("Fork", "The COW Mechanism", "Append Path", "The Watermark")
)
LEFT = "policy: how many free blocks an admission leaves"
ORDER = "policy: which free block is taken next"
Granted = tuple[Pool, RequestState] | None


# Sharing.


@PAGE.exhibit("a branch shares its parent's whole block table", FORK, "P5 P1")
@instead(get_shared)
def whole_table_is_shared(right: Right[Holding], holding: Holding) -> Holding:
    """Blocks that are not computed yet become the next blocks of two requests."""
    shared = right()
    return replace(shared, block_table=holding.block_table)


@PAGE.exhibit(
    "a branch shares all computed blocks of its parent, even if their tokens differ", FORK, "P5 P3"
)
def shared_behind_the_difference(rules: Rules, _config: Config) -> Rules:
    """It attends to tokens of its parent that are not its own."""
    return rules.replacing(count_common_tokens, lambda mine, _theirs: len(mine))


@PAGE.exhibit("a branch continues within a block that is in the prefix cache", FORK, "P5 P2 P3")
@instead(is_shareable)
def findable_block_is_written_again(right: Right[bool], holding: Holding) -> bool:
    """The block is written again and no longer holds the tokens of its key."""
    unpublished = replace(holding, num_cached_blocks=0)
    return right(holding=unpublished)


@GROUPS.exhibit(
    "a branch starts after blocks that its parent's sliding window has freed", FORK, "P5"
)
@instead(is_shareable)
def branch_behind_the_window(right: Right[bool], holding: Holding) -> bool:
    """The window of the branch includes blocks that were freed."""
    there = tuple([block_id or 1 for block_id in holding.block_table])
    return right(holding=replace(holding, block_table=there))


def change_branch(
    rules: Rules, change: Callable[[RequestState, RequestState], RequestState]
) -> Rules:
    """Return rules by which a branch is changed before it shares blocks: (parent, branch)."""

    def get(state: State, fork: Fork) -> RequestState | None:
        branch = rules[get_branch](state, fork)
        return None if branch is None else change(state.requests[fork.request_id], branch)

    return rules.replacing(get_branch, get)


@PAGE.exhibit("a branch inherits the drafts of its parent", "by the rule of P24", "P5 P24")
def branch_has_its_parents_drafts(rules: Rules, _config: Config) -> Rules:
    """They were proposed for another token sequence."""
    return change_branch(
        rules, lambda parent, branch: replace(branch, spec_token_ids=parent.spec_token_ids)
    )


@PAGE.exhibit("a branch uses its parent's block keys", "by the rule of P3", "P3 P6")
def branch_has_its_parents_names(rules: Rules, _config: Config) -> Rules:
    """Blocks after the common prefix are published under the keys of the parent's tokens."""

    def rename(parent: RequestState, branch: RequestState) -> RequestState:
        keys = parent.block_keys[: len(branch.block_keys)]
        return replace(branch, block_keys=keys + branch.block_keys[len(keys) :])

    return change_branch(rules, rename)


@PAGE.exhibit(
    "a request that finishes frees blocks that others hold",
    "the block manager: offload_to_cpu, breaks its rule",
    "P1 P2",
)
@instead(get_released)
def end_frees_what_others_hold(right: Right[State], state: State, request: RequestState) -> State:
    """Reference counts are ignored, so blocks of a branch are given to the next request."""
    counts = [*state.pool.ref_counts]
    for block_id in without_nulls(sum(request.block_tables, ())):
        counts[block_id] = 1
    pool = replace(state.pool, ref_counts=tuple(counts))
    return right(state=replace(state, pool=pool))


# Copy on write.


@PAGE.exhibit("a request writes to a block that it shares", APPEND, "P2 P8")
def written_in_place(rules: Rules, _config: Config) -> Rules:
    """The function that copies is there, but it is never called."""
    return rules.replacing(compute_num_copies, lambda _pool, _group, _holding, _num_computed: 0)


def change_slots(rules: Rules, change: Callable[[RequestState, Rules], Rules]) -> Rules:
    """Return rules by which slots of a request are allocated by other rules."""

    def allocate(right: Right[Granted], request: RequestState, rules: Rules) -> Granted:
        return right(rules=change(request, rules))

    return replacing(rules, allocate_slots, allocate)


@PAGE.exhibit(
    "only a request that is already running gets a copy on write",
    APPEND,
    "P2 P8",
    wrong_fix_of="written-in-place",
)
def first_row_writes_in_place(rules: Rules, _config: Config) -> Rules:
    """The first row of a branch, too, writes to a block that its parent holds."""

    def change(request: RequestState, rules: Rules) -> Rules:
        if request.status is Status.RUNNING:
            return rules
        return replace(rules, hooks=replace(rules.hooks, owns=()))

    return change_slots(rules, change)


@GROUPS.exhibit(
    "copy on write copies only the block of the first KV group",
    APPEND,
    "P2 P8",
    wrong_fix_of="written-in-place",
)
def first_group_alone_is_copied(rules: Rules, config: Config) -> Rules:
    """Two requests write to one block of a sliding-window group."""
    return replacing(
        rules,
        compute_num_copies,
        lambda right, group: right() if group == config.kv_groups[0] else 0,
    )


@PAGE.exhibit("the free block for a copy is not counted", COW, "P1 P2 P8 P10")
def copy_takes_what_is_not_there(rules: Rules, _config: Config) -> Rules:
    """If the pool is empty, the copy has no block."""
    return rules.replacing(count_copies, lambda _pool, _group, _holding, _num_computed, _rules: 0)


@PAGE.exhibit(
    "the free block for a copy is counted for running requests, but not at admission",
    COW,
    "P1 P2 P8 P10",
    wrong_fix_of="copy-takes-what-is-not-there",
)
def first_copy_is_not_counted(rules: Rules, _config: Config) -> Rules:
    """The first row of a branch takes a block that was not counted."""
    is_right = rules[can_finish]

    def without_copies(rules: Rules) -> Rules:
        return replace(rules, hooks=replace(rules.hooks, needs=()))

    def change(request: RequestState, rules: Rules) -> Rules:
        return rules if request.status is Status.RUNNING else without_copies(rules)

    return change_slots(rules, change).replacing(
        can_finish,
        lambda config, pool, request, hit, rules, *num_spared: is_right(
            config, pool, request, hit, without_copies(rules), *num_spared
        ),
    )


@PAGE.exhibit("source and destination of a copy are swapped", "by the rule of P8", "P8 P2 P4")
@instead(list_copies)
def copy_goes_the_other_way(right: Right[tuple[BlockCopy, ...]]) -> tuple[BlockCopy, ...]:
    """A new block without content overwrites one that two requests read."""
    copies = right()
    return tuple([BlockCopy(it.destination, it.source) for it in copies])


def change_copies(rules: Rules, change: Callable[[Step, Plan], Plan]) -> Rules:
    """Return rules by which the copies in a plan are changed."""

    def change_plan(step: Step, rows: Sequence[FrameRow], plan: Plan) -> Plan:
        return change(step, rules[add_copies](step, rows, plan))

    return rules.replacing(add_copies, change_plan)


@PAGE.exhibit(
    "a plan lists no copies",
    "the block manager: execute_pending_copies, breaks its rule",
    "P8 P4",
)
def copy_is_not_made(rules: Rules, _config: Config) -> Rules:
    """The plan has the new block in its table, but not the copy that fills it."""
    return change_copies(rules, lambda _step, plan: replace(plan, block_copies=()))


@PAGE.exhibit("the copy for a withdrawn row stays in the plan", "by the rule of P7", "P8 P26 P2")
def copy_outlives_its_row(rules: Rules, _config: Config) -> Rules:
    """The copy's destination may belong to another request in the same step."""

    def add(step: Step, plan: Plan) -> Plan:
        planned = {row.request_id for row in step.rows}
        others = [it for name, it in COPIES.of(step).items() if name not in planned]
        return replace(plan, block_copies=sum(others, plan.block_copies))

    return change_copies(rules, add)


@PAGE.exhibit(
    "a changed block table is sent as if blocks were appended", "by the rule of P26", "P26"
)
def remapping_is_not_told(rules: Rules, _config: Config) -> Rules:
    """The worker appends the whole table to the one that it has."""
    return change_copies(rules, lambda _step, plan: replace(plan, remapped_req_ids=()))


# The watermark and the order of the free queue.


@PAGE.exhibit("admissions ignore the watermark", WATERMARK, "P10", invisible=LEFT)
def watermark_ignored(rules: Rules, _config: Config) -> Rules:
    """The text subtracts the watermark from the free blocks, but the listing does not."""
    return rules.replacing(get_watermark, lambda _step: 0)


@PAGE.exhibit("running requests keep the watermark, too", WATERMARK, "P15 P10")
@instead(allocate_slots)
def running_leave_the_watermark(
    right: Right[Granted], config: Config, request: RequestState
) -> Granted:
    """Requests are preempted although there are free blocks, which were kept to avoid this."""
    granted = right()
    if granted is None or request.status is not Status.RUNNING:
        return granted
    grows = granted[1].block_tables != request.block_tables
    is_short = get_num_free_blocks(granted[0]) < config.watermark_blocks
    return None if grows and is_short else granted


@PAGE.exhibit(
    "the watermark is compared with the free blocks before the admission",
    "by the rule of P10",
    "P10 P15",
    invisible=LEFT,
    wrong_fix_of="watermark-ignored",
)
@instead(get_watermark)
def watermark_before_the_admission(right: Right[int], step: Step) -> int:
    """The last admission takes all free blocks."""
    num_kept = right()
    return 0 if get_num_free_blocks(step.pool) >= num_kept else num_kept


@PAGE.exhibit(
    "a LIFO free list reuses the head of a freed table first",
    "the block manager: Deallocation Path, breaks its rule",
    "P16",
    invisible=ORDER,
)
@instead(free_blocks)
def head_on_top_of_the_stack(
    right: Right[Pool], pool: Pool, block_table: Sequence[BlockId]
) -> Pool:
    """The block that is most likely to be hit again is reused first."""
    return right(block_table=block_table[::-1] if pool.is_lifo else block_table)
