"""Seeded bugs in KV transfers: late or failed loads, and blocks that a transfer still uses.

Their episodes have a store; those of the pages `GROUPS` and `STATES` have several KV groups as
well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from blockstep.conformance.museum.bug import Page, Right, instead, replacing
from blockstep.spec.copies import replace
from blockstep.spec.core.admission import process_gates
from blockstep.spec.core.block_pool import (
    Pool,
    free_deferred_blocks,
    get_num_free_blocks,
    withdraw_blocks,
)
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import Hit, RequestState, without_nulls
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import allocate_slots, compute_num_blocks
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features.groups import skip_slots
from blockstep.spec.features.kv_transfer import (
    LOADS,
    get_failures,
    get_reported,
    get_rolled_back_to_load,
    look_in_store,
    process_async_load,
    process_unparking,
    publish_loaded,
)
from blockstep.spec.features.kv_transfer.transfers import (
    TRANSFERS,
    Transfers,
    compute_num_external,
    compute_num_valid,
    end_transfer,
    get_offer,
    hold_ended,
    is_received,
    take_offer,
)
from blockstep.spec.features.mamba import get_blocks_to_zero, is_zeroed
from blockstep.spec.features.reclaim import list_queued
from blockstep.spec.releases.in_flight import blocks_freed_while_frames_write as fences_are_missing
from blockstep.spec.releases.transfers import (
    external_blocks_per_group,
    loaded_request_keeps_its_blocks,
    loaded_request_waits_behind_the_head,
)
from blockstep.spec.vocabulary import (
    BlockId,
    BlockTables,
    Config,
    KVOffer,
    KVTransfers,
    OutputRow,
    RequestId,
    Status,
)

PAGE = Page(takes="transfers")
GROUPS = Page(takes_groups=True, takes="transfers")
STATES = Page(takes_groups=True, takes_states=True, takes="transfers")
_PARKED: Final = Status.WAITING_FOR_REMOTE_KVS
Granted = tuple[Pool, RequestState] | None
Reported = tuple[State, tuple[OutputRow, ...]]


# Asynchronous loads that are complete.


@PAGE.exhibit(
    "completed loads wait behind a head of the queue that does not fit", "#57841, #45388", "P10"
)
def loaded_behind_the_head(rules: Rules, config: Config) -> Rules:
    """They hold the blocks that the head lacks, and are neither admitted nor reclaimed."""
    return loaded_request_keeps_its_blocks(
        loaded_request_waits_behind_the_head(rules, config), config
    )


@PAGE.exhibit(
    "behind a head that does not fit, completed loads are reclaimed, but never admitted",
    "#57841",
    "P15 P16",
    wrong_fix_of="loaded-behind-the-head",
    invisible="efficiency: blocks are loaded again",
)
def loaded_give_way_alone(rules: Rules, config: Config) -> Rules:
    """Requests that could run at once lose their blocks as soon as nothing runs."""
    return loaded_request_waits_behind_the_head(rules, config)


@PAGE.exhibit(
    "blocks that are still being loaded are reclaimed",
    "#57841, #32255",
    "P17 P2",
    wrong_fix_of="loaded-behind-the-head",
)
def load_under_way_gives_way(rules: Rules, _config: Config) -> Rules:
    """The load writes into blocks that belong to another request by then."""
    return rules.replacing(list_queued, list_queued)  # as without a store


@PAGE.exhibit("a preempted request is sent as new after a load", "#31583", "P26 P16")
@instead(process_unparking)
def new_after_a_load(right: Right[RequestState]) -> RequestState:
    """The worker has its outputs from before the preemption."""
    return replace(right(), status=Status.WAITING)


@PAGE.exhibit(
    "blocks of a completed load are published although the request is not admitted",
    "vLLM 0.19.1 _update_waiting_for_remote_kv",
    "P7 P4",
)
@instead(process_gates)
def published_though_not_let_in(
    right: Right[Verdict], step: Step, request_id: RequestId
) -> Verdict:
    """An admission that fails changes the prefix cache."""
    request, has_come = step.requests[request_id], is_received(TRANSFERS.of(step), request_id)
    verdict = right()
    num_loaded = request.num_computed_tokens if has_come else 0
    if num_loaded and verdict not in (Verdict.ADMITTED, Verdict.SUSPENDED):
        config, all_rules = step.state.config, step.state.rules
        step.pool, after = publish_loaded(config, step.pool, request, num_loaded, all_rules)
        step.requests[request_id] = replace(request, holdings=after.holdings)
    return verdict


# How many tokens are loaded.


@PAGE.exhibit("all known tokens are loaded", "#30320, #11186", "P10 P12 P11 P13")
@instead(compute_num_external)
def full_load(right: Right[int], num_known: int) -> int:
    """No token is left to compute, so nothing can be sampled."""
    return right(num_known=num_known + 1)


@PAGE.exhibit(
    "the last token that the store offers is never loaded",
    "#53706",
    "P15",
    wrong_fix_of="full-load",
    invisible="efficiency: one more token is computed",
)
@instead(compute_num_external)
def one_token_less_than_offered(right: Right[int], offer: KVOffer, num_known: int) -> int:
    """This is needed only if the offer covers all known tokens."""
    return right(num_known=min(offer.num_tokens or 0, num_known))


@PAGE.exhibit("the capacity check does not count loaded tokens", "#46892", "P8 P17 P2")
@instead(allocate_slots)
def load_is_free(
    right: Right[Granted], config: Config, pool: Pool, num_new: int, hit: Hit
) -> Granted:
    """The check counts the tokens of the step only; blocks for the load belong to others."""
    granted = right()
    num_needed = compute_num_blocks(max(num_new, 1), config.block_size)
    if granted is not None or not hit.num_pending or num_needed > get_num_free_blocks(pool):
        return granted
    held = [block_id for block_id, count in enumerate(pool.ref_counts) if count > 0]
    granted = right(pool=replace(pool, free_queue=pool.free_queue + tuple(held)))
    return None if granted is None else (replace(granted[0], free_queue=()), granted[1])


def publish_at_once(rules: Rules) -> Rules:
    """Return rules by which blocks are published before their load is confirmed."""

    def allocate(right: Right[Granted], request: RequestState) -> Granted:
        granted = right(request=replace(request, has_unconfirmed_kv=False))
        if granted is None:
            return None
        return granted[0], replace(granted[1], has_unconfirmed_kv=request.has_unconfirmed_kv)

    return replacing(rules, allocate_slots, allocate)


@PAGE.exhibit(
    "blocks of an unconfirmed load are published", "#49250; vLLM 0.19.1 allocate_slots", "P19 P4 P3"
)
def found_before_it_came(rules: Rules, _config: Config) -> Rules:
    """Other requests hit blocks whose load may still fail."""
    return publish_at_once(rules)


@PAGE.exhibit(
    "after a failed load only new requests cannot hit its blocks",
    "#49250, #26813",
    "P19 P4 P3",
    wrong_fix_of="found-before-it-came",
)
def withdrawn_from_newcomers_only(rules: Rules, _config: Config) -> Rules:
    """Requests that already share these blocks rely on the owner to compute them again."""

    def go_back(state: State, request: RequestState, num_valid: int) -> State:
        pool, sizes = state.pool, state.config.block_sizes
        for table, size in zip(request.block_tables, sizes, strict=True):
            pool = withdraw_blocks(pool, without_nulls(table[num_valid // size :]))
        return rules[get_rolled_back_to_load](replace(state, pool=pool), request, num_valid)

    return publish_at_once(rules).replacing(get_rolled_back_to_load, go_back)


# Reports of loads.


@PAGE.exhibit(
    "a late or repeated report of a load crashes the engine", "#53049, #50546, #51595", "P18"
)
@instead(get_reported)
def late_report_kills(right: Right[Reported], state: State, transfers: KVTransfers) -> Reported:
    """The code assumes that the reported request still waits for its load."""
    for name in transfers.finished_recving:
        assert name not in state.requests or state.requests[name].status is _PARKED
    return right()


_EARLY: Final = Part("early", frozenset[RequestId]())
"""The requests of which a load was reported."""


@PAGE.exhibit(
    "a late report of a load counts for the next load",
    "#53049",
    "P18 P19 P4",
    wrong_fix_of="late-report-kills",
)
def late_report_is_kept(rules: Rules, _config: Config) -> Rules:
    """A request that loads again reads blocks that are not loaded yet."""

    def report(state: State, transfers: KVTransfers, failed: Sequence[RequestId]) -> Reported:
        state, rows = rules[get_reported](state, transfers, failed)
        return _EARLY.put(state, _EARLY.of(state).union(transfers.finished_recving)), rows

    def park(step: Step, request: RequestState, hit: Hit) -> Verdict:
        verdict, name = rules[process_async_load](step, request, hit), request.request_id
        if verdict is Verdict.SUSPENDED and name in _EARLY.of(step):
            TRANSFERS.set(step, end_transfer(TRANSFERS.of(step), name, True)[0])
        return verdict

    return rules.replacing(get_reported, report).replacing(process_async_load, park)


@PAGE.exhibit("a request computes on after a failed load", "#49250, rule", "P19")
def invalid_is_passed_over(rules: Rules, _config: Config) -> Rules:
    """The report of invalid blocks is read, but ignored."""
    return rules.replacing(compute_num_valid, lambda _tables, _firsts, _sizes, _invalid: None)


@PAGE.exhibit(
    "the token of a row that read a failed load is delivered",
    "#26813, #19330",
    "P19 P13",
    wrong_fix_of="invalid-is-passed-over",
)
@instead(get_failures)
def broken_row_is_delivered(
    right: Right[tuple[State, tuple[RequestId, ...]]], state: State
) -> tuple[State, tuple[RequestId, ...]]:
    """The tokens are computed again, but after a token that was sampled from invalid KV."""
    after, failed = right()
    return replace(after, frames=state.frames), failed


# Which blocks a transfer holds.


@PAGE.exhibit("an abort frees blocks that are being loaded", "#32255", "P17 P2 P16")
@instead(hold_ended)
def abort_frees_a_load(
    right: Right[Transfers], transfers: Transfers, request_id: RequestId
) -> Transfers:
    """The load writes into blocks that belong to another request by then."""
    forgotten = replace(transfers, parked=transfers.parked.without(request_id))
    return right(transfers=forgotten)


@PAGE.exhibit(
    "an aborted request leaves its blocks to a load that is already complete",
    "#32255, review",
    "P17",
    wrong_fix_of="abort-frees-a-load",
)
@instead(hold_ended)
def held_without_an_end(
    right: Right[Transfers], transfers: Transfers, request_id: RequestId
) -> Transfers:
    """No other report will come for this load, so the blocks are never freed."""
    load = transfers.parked.get(request_id)
    if load is not None:
        parked = transfers.parked.having(request_id, replace(load, is_received=False))
        transfers = replace(transfers, parked=parked)
    return right(transfers=transfers)


@PAGE.exhibit(
    "a completed load of an aborted request does not free its blocks",
    "#46283, #46289",
    "P17 P16",
)
@instead(end_transfer)
def aborted_load_is_kept(
    right: Right[tuple[Transfers, BlockTables]],
    transfers: Transfers,
    request_id: RequestId,
    is_recving: bool,
) -> tuple[Transfers, BlockTables]:
    """The blocks leak."""
    if is_recving and request_id in transfers.held:
        return transfers, ()
    return right()


# Blocks that a frame in flight reads or writes.


@PAGE.exhibit(
    "blocks are freed while a frame in flight writes them, and a load writes into them",
    "#45357, #47728, #48481, vllm-ascend #14055",
    "P17",
)
def blocks_freed_while_frames_write(rules: Rules, config: Config) -> Rules:
    """The load is not ordered after the frame, so the frame overwrites the loaded KV."""
    return fences_are_missing(rules, config)


@PAGE.exhibit(
    "blocks that wait for a frame are never freed",
    "rule P17",
    "P17 P1 P10",
    wrong_fix_of="blocks-freed-while-frames-write",
)
def frame_holds_for_ever(rules: Rules, _config: Config) -> Rules:
    """The wait is recorded, but never ends."""
    return rules.replacing(free_deferred_blocks, lambda pool, _frame_id, _rules: pool)


@GROUPS.exhibit(
    "blocks that leave a sliding window are freed while a frame in flight reads them",
    "#45357, breaks P17",
    "P17",
    wrong_fix_of="blocks-freed-while-frames-write",
)
@instead(skip_slots)
def windows_leave_too_early(
    right: Right[tuple[Pool, RequestState]],
) -> tuple[Pool, RequestState]:
    """Finished and preempted requests wait for the frame; windows do not."""
    return right(fence=None)


# Several KV groups.


@GROUPS.exhibit(
    "a load takes a hit of the next KV group as its new block", "#33775, #44409", "P2 P1 P8 P16"
)
def load_eats_a_hit(rules: Rules, config: Config) -> Rules:
    """Only requests without a load touch all of their hits first."""
    return external_blocks_per_group(rules, config)


@GROUPS.exhibit("only the first KV group is checked for failed loads", "#35223", "P19")
@instead(compute_num_valid)
def first_group_alone(
    right: Right[int | None], tables: BlockTables, invalid: Collection[BlockId]
) -> int | None:
    """Invalid blocks of the other groups are ignored."""
    return right(invalid={*invalid}.intersection(tables[0]))


@GROUPS.exhibit(
    "of failed loads in several KV groups only the last one counts",
    "#35223, #48216",
    "P19",
    wrong_fix_of="first-group-alone",
)
@instead(compute_num_valid)
def last_group_counts(
    right: Right[int | None], tables: BlockTables, firsts: Sequence[int], block_sizes: Sequence[int]
) -> int | None:
    """Each group gives the number of valid tokens, but the minimum is not taken."""
    found = None
    for table, first, size in zip(tables, firsts, block_sizes, strict=True):
        num_valid = right(tables=(table,), firsts=(first,), block_sizes=(size,))
        found = found if num_valid is None else num_valid
    return found


# Loads of states.


@STATES.exhibit(
    "a state is loaded that includes the last token, which then runs once more",
    "#37310, #51094",
    "P3 P19 P5",
)
@instead(look_in_store)
def loaded_state_runs_twice(
    right: Right[tuple[RequestState, Hit] | Verdict], step: Step, request: RequestState
) -> tuple[RequestState, Hit] | Verdict:
    """The store's state includes all tokens; all but the last count as loaded."""
    transfers = TRANSFERS.of(step)
    offer = get_offer(transfers, request.request_id)
    if offer.num_tokens is not None:
        num_tokens = min(offer.num_tokens, request.num_known_tokens - 1)
        TRANSFERS.set(step, take_offer(transfers, replace(offer, num_tokens=num_tokens)))
    found = right()
    TRANSFERS.set(step, replace(TRANSFERS.of(step), offers=transfers.offers))
    return found


@STATES.exhibit("a plan has blocks zeroed that a store writes meanwhile", "#48481", "P17")
def zeroed_while_loaded(rules: Rules, config: Config) -> Rules:
    """The worker may zero a block after the store has written it."""

    def list_zeroed(step: Step) -> tuple[BlockId, ...]:
        written: list[BlockId] = []
        for load in LOADS.of(step):
            for group, table in zip(config.kv_groups, load.block_ids, strict=True):
                if load.is_async and is_zeroed(group):
                    loaded = table[load.num_computed_tokens // group.block_size :]
                    written += without_nulls(loaded)
        return rules[get_blocks_to_zero](step) + tuple(written)

    return rules.replacing(get_blocks_to_zero, list_zeroed) if config.has_states else rules
