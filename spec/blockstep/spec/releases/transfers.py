"""Transfers: quirks of releases with the KV of a store, and with the store's reports."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from blockstep.spec import idle
from blockstep.spec.copies import replace
from blockstep.spec.core import admission, endings, slots
from blockstep.spec.core.block_pool import Pool, allocate_blocks, touch_blocks
from blockstep.spec.core.requests import Hit, Holding, RequestState, without_nulls
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import compute_num_blocks
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features import kv_transfer, reclaim, resets
from blockstep.spec.features.groups import count_unverified, skip_slots
from blockstep.spec.features.groups.kinds import compute_num_skipped_tokens
from blockstep.spec.features.kv_transfer import transfers as machine
from blockstep.spec.features.kv_transfer.transfers import (
    NO_OFFERS,
    TRANSFERS,
    Transfers,
    is_received,
)
from blockstep.spec.releases.load_failures import (
    failed_request_reports_minus_one_cached_tokens,
    invalid_block_rolls_back_one_request,
)
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import (
    BlockId,
    BlockTables,
    Config,
    KVGroup,
    KVOffer,
    RequestId,
    Reset,
    ResetDone,
    Status,
)


def skip_cache_still_loads(rules: Rules, _config: Config) -> Rules:
    """A request with skip_reading_prefix_cache loads KV from a store."""
    return rules.replacing(kv_transfer.queries_store, asks_store)


def asks_store(request: RequestState) -> bool:
    """Modified `kv_transfer.asks_store`: also if it skips reading the cache."""
    return request.num_computed_tokens == 0


def skip_cache_counts_as_a_store_miss(rules: Rules, _config: Config) -> Rules:
    """A request with skip_reading_prefix_cache counts as a miss of the store."""

    def process_admitted(step: Step, request: RequestState, after: RequestState, hit: Hit) -> None:
        asked = replace(request.request, skip_reading_prefix_cache=False)
        rules[kv_transfer.process_admitted](step, replace(request, request=asked), after, hit)

    return rules.replacing(kv_transfer.process_admitted, process_admitted)


def last_token_is_loaded(rules: Rules, config: Config) -> Rules:
    """An asynchronous load has all known tokens; the last of them is then computed again.

    Not with states, which cannot be rolled back: connectors with states leave the last token out.
    Source: vLLM 0.19.1 `NixlConnectorScheduler.get_num_new_matched_tokens`; upstream #37310.
    """
    if config.has_states:
        return rules

    def compute_num_external(offer: KVOffer, num_known: int, num_local: int) -> int:
        compute = rules[machine.compute_num_external]
        return compute(offer, num_known + offer.is_async, num_local)

    def process_return(step: Step, request_id: RequestId) -> None:
        rules[kv_transfer.process_load_done](step, request_id)
        after = step.requests[request_id]
        num_computed = min(after.num_computed_tokens, after.num_known_tokens - 1)
        step.requests[request_id] = replace(after, num_computed_tokens=num_computed)

    return rules.replacing(machine.compute_num_external, compute_num_external).replacing(
        kv_transfer.process_load_done, process_return
    )


def loads_are_published_before_they_are_loaded(rules: Rules, _config: Config) -> Rules:
    """Blocks that a store loads within a step are published before they are loaded."""

    def look_in_store(
        step: Step, request: RequestState, hit: Hit
    ) -> tuple[RequestState, Hit] | Verdict:
        found = rules[kv_transfer.look_in_store](step, request, hit)
        if isinstance(found, Verdict):
            return found
        return replace(found[0], has_unconfirmed_kv=False), found[1]

    return rules.replacing(kv_transfer.look_in_store, look_in_store)


def load_ends_without_admission(rules: Rules, _config: Config) -> Rules:
    """A request whose load has finished is unparked even if it is not admitted then.

    Its loaded tokens count as cached from then on, unless some of its load failed.
    """

    def process_return(step: Step, request_id: RequestId) -> None:
        config, before = step.state.config, step.requests[request_id]
        rules[kv_transfer.process_load_done](step, request_id)
        num_loaded = compute_num_blocks(before.num_computed_tokens, config.block_sizes[0])
        num_loaded += config.kv_groups[0].num_speculative_blocks
        is_whole = num_loaded >= len(before.block_tables[0])
        if before.num_computed_tokens and before.num_cached_tokens < 0 and is_whole:
            after = step.requests[request_id]
            num_cached = after.num_computed_tokens
            step.requests[request_id] = replace(after, num_cached_tokens=num_cached)

    def process_trial(step: Step, request_id: RequestId) -> Verdict:
        if is_received(TRANSFERS.of(step), request_id):
            step.state.rules[kv_transfer.process_load_done](step, request_id)
        return rules[admission.process_gates](step, request_id)

    return rules.replacing(admission.process_gates, process_trial).replacing(
        kv_transfer.process_load_done, process_return
    )


def loaded_request_waits_behind_the_head(rules: Rules, _config: Config) -> Rules:
    """A request whose load has finished waits behind a head that does not fit, holding its
    blocks."""
    return rules.replacing(kv_transfer.process_received_behind, process_received_behind)


def process_received_behind(step: Step, head_id: RequestId) -> None:
    """Modified `kv_transfer.process_received_behind`: they wait."""


def loaded_request_keeps_its_blocks(rules: Rules, _config: Config) -> Rules:
    """A request whose load has finished keeps its blocks until it runs, even under memory
    pressure."""

    def list_queued(step: Step) -> list[RequestId]:
        parked = Status.WAITING_FOR_REMOTE_KVS
        queued = rules[reclaim.list_queued](step)
        return [name for name in queued if step.requests[name].status is not parked]

    return rules.replacing(reclaim.list_queued, list_queued)


def compute_num_loaded(group: KVGroup, num_tokens: int, num_found: int) -> int:
    """Return the blocks that a group takes for a load up to `num_tokens`, after `num_found` hit
    blocks.

    Returns 0 if the hit of this group is longer than that, as that of a second full group may be
    (`only_first_full_attention_group_is_cut`). There 0.19.1 takes a negative number of blocks: it
    gets none, and its count of free blocks is too large from then on, which is not imitated.
    Source: vLLM 0.19.1 `allocate_new_computed_blocks`, `FreeKVCacheBlockQueue.popleft_n`; P1.
    """
    num_skipped = compute_num_skipped_tokens(group, num_tokens)
    if num_skipped == num_tokens and num_skipped >= group.block_size:
        return 0  # nothing is loaded into its last block
    return max(compute_num_blocks(num_tokens, group.block_size) - num_found, 0)


def external_blocks_per_group(rules: Rules, _config: Config) -> Rules:
    """A group takes blocks for a load before the next group holds its hit."""

    def take_blocks(
        config: Config,
        pool: Pool,
        request: RequestState,
        hit: Hit,
        nums_new: Sequence[int],
        within: Rules,
    ) -> tuple[Pool, list[Holding], list[tuple[BlockId, ...]]]:
        take = rules[slots.take_blocks]
        if not hit.num_pending or any(request.block_tables):
            return take(config, pool, request, hit, nums_new, within)
        early: list[tuple[BlockId, ...]] = []
        hit_tables = hit.block_tables or ((),) * len(request.holdings)
        for group, found in zip(config.kv_groups, hit_tables, strict=True):
            pool = touch_blocks(pool, without_nulls(found))
            num_loaded = compute_num_loaded(group, hit.num_tokens, len(found))
            pool, taken = allocate_blocks(pool, num_loaded)
            early.append(taken)
        nums_left = [num - len(taken) for num, taken in zip(nums_new, early, strict=True)]
        without_tables = replace(hit, block_tables=())
        pool, owned, others = take(config, pool, request, without_tables, nums_left, within)
        return pool, owned, [*map(add, early, others)]

    return rules.replacing(slots.take_blocks, take_blocks)


def first_transfer_frees_the_blocks(rules: Rules, _config: Config) -> Rules:
    """The first transfer to finish frees the blocks of a finished request, even if another uses
    them."""

    def end_transfer(
        transfers: Transfers, request_id: RequestId, is_recving: bool
    ) -> tuple[Transfers, BlockTables]:
        entry = transfers.held.get(request_id)
        if entry is None:
            return rules[machine.end_transfer](transfers, request_id, is_recving)
        return replace(transfers, held=transfers.held.without(request_id)), entry.block_tables

    return rules.replacing(machine.end_transfer, end_transfer)


def skipped_load_blocks_count_as_cached(rules: Rules, _config: Config) -> Rules:
    """Skipped blocks of a load, which are never loaded, count as cached."""
    return rules.replacing(slots.get_nums_settled, get_nums_settled)


def get_nums_settled(config: Config, hit: Hit) -> tuple[int, ...]:
    """Modified `slots.get_nums_settled`: all blocks that a group has before it takes some."""
    return tuple(map(len, hit.block_tables or ((),) * len(config.kv_groups)))


def finished_request_first_frees_blocks_outside_windows(rules: Rules, config: Config) -> Rules:
    """A request that finishes with a store first frees the blocks outside its windows, loads or
    not.

    Windows are those after all known tokens, and the store gets null blocks in place of the freed
    ones.
    """

    def get_released(state: State, request: RequestState) -> State:
        at_end = replace(request, num_computed_tokens=request.num_known_tokens)
        pool, at_end = skip_slots(state.config, state.pool, at_end, 0, state.rules)
        request = replace(request, holdings=at_end.holdings)
        return rules[endings.get_released](replace(state, pool=pool), request)

    return rules.replacing(endings.get_released, get_released) if config.kv_connector else rules


def finished_request_first_frees_committed_blocks(rules: Rules, config: Config) -> Rules:
    """A request that finishes with a store first frees the blocks outside its windows, but for
    steps in flight.

    Windows are those after the tokens of committed steps.
    """

    def get_released(state: State, request: RequestState) -> State:
        num_unverified = state.rules[count_unverified](state.frames, request.request_id)
        pool, request = skip_slots(state.config, state.pool, request, num_unverified, state.rules)
        return rules[endings.get_released](replace(state, pool=pool), request)

    return rules.replacing(endings.get_released, get_released) if config.kv_connector else rules


def cached_tokens_as_the_store_offered(rules: Rules, _config: Config) -> Rules:
    """The reported cached tokens are those that a store offered when the load began.

    They stay if the load fails or the last token is computed again, until the first output or
    preemption.
    """

    def process_parking(step: Step, request: RequestState, hit: Hit) -> Verdict:
        verdict = rules[kv_transfer.process_async_load](step, request, hit)
        is_first = not request.num_preemptions and not request.output_token_ids
        if verdict is Verdict.SUSPENDED and is_first:
            after = replace(step.requests[request.request_id], num_cached_tokens=hit.num_tokens)
            step.requests[request.request_id] = after
        return verdict

    def get_num_cached_tokens(request: RequestState, num_start: int) -> int:
        num_cached = rules[admission.get_num_cached_tokens](request, num_start)
        looks_up = request.num_computed_tokens == 0
        is_first = not request.num_preemptions and not request.output_token_ids
        return num_start if looks_up and is_first else num_cached

    return rules.replacing(kv_transfer.process_async_load, process_parking).replacing(
        admission.get_num_cached_tokens, get_num_cached_tokens
    )


def reset_ignores_transfers_without_blocks(rules: Rules, _config: Config) -> Rules:
    """A reset does not wait for transfers that hold no block.

    These are transfers of null blocks.
    """

    def is_awaiting_transfers(state: State) -> bool:
        return not resets.is_idle(state) and rules[kv_transfer.is_awaiting_transfers](state)

    return rules.replacing(kv_transfer.is_awaiting_transfers, is_awaiting_transfers)


def pool_and_store_reset_separately(rules: Rules, _config: Config) -> Rules:
    """A reset clears the store even if the pool cannot be reset, and the pool even without a
    store."""

    def process_reset(state: State, reset: Reset) -> tuple[State, ResetDone]:
        if not reset.reset_connector:
            return rules[resets.process_reset](state, reset)
        of_pool = replace(reset, reset_connector=False)
        state, done = rules[resets.process_reset](state, of_pool)
        state = TRANSFERS.put(state, replace(TRANSFERS.of(state), offers=NO_OFFERS))
        return state, replace(done, success=done.success and state.config.kv_connector)

    return rules.replacing(resets.process_reset, process_reset)


def reset_without_a_store_succeeds(rules: Rules, config: Config) -> Rules:
    """A reset of pool and store, where there is no store, is a reset of the pool."""
    if config.kv_connector:
        return rules

    def process_reset(state: State, reset: Reset) -> tuple[State, ResetDone]:
        return rules[resets.process_reset](state, replace(reset, reset_connector=False))

    return rules.replacing(resets.process_reset, process_reset)


def loop_sleeps_during_transfers(rules: Rules, _config: Config) -> Rules:
    """The loop sleeps while a store reads blocks of a finished request, or, in a pause, loads
    some."""
    return rules.replacing(idle.has_work, idle.has_work)  # that of the core


STORIES = (
    QuirkStory(
        Quirk.SKIP_CACHE_STILL_LOADS,
        skip_cache_still_loads,
        "a request with skip_reading_prefix_cache loads KV from a store",
        ("P13", "P21"),
        "#57269 (fixed by 0.32.0)",
        "0.19.1",
        "a request that skips reading, and an offer of its first block: the block is loaded",
    ),
    QuirkStory(
        Quirk.SKIP_CACHE_COUNTS_AS_A_STORE_MISS,
        skip_cache_counts_as_a_store_miss,
        "a request with skip_reading_prefix_cache counts as a miss of the store",
        ("P21",),
        "not found upstream",
        "0.33.0",
        "a request that skips reading is admitted: its tokens are queries of the store's hit rate",
    ),
    QuirkStory(
        Quirk.LAST_TOKEN_IS_LOADED,
        last_token_is_loaded,
        "an asynchronous load has all known tokens; the last of them is then computed again",
        ("P2", "P10", "P12"),
        "not found upstream",
        "0.19.1",
        "a prompt of one block, all of it offered for an asynchronous load: its row writes into a "
        "published block; a prompt of one token asks again each time its load has finished",
    ),
    QuirkStory(
        Quirk.LOADS_ARE_PUBLISHED_BEFORE_THEY_ARE_LOADED,
        loads_are_published_before_they_are_loaded,
        "blocks that a store loads within a step are published before they are loaded",
        ("P4", "P19"),
        "not found upstream",
        "0.19.1",
        "two equal prompts, a store loads one block of the first within the step: the second "
        "shares it, and reads garbage if the load fails",
    ),
    QuirkStory(
        Quirk.LOAD_ENDS_WITHOUT_ADMISSION,
        load_ends_without_admission,
        "a request whose load has finished is unparked even if it is not admitted then",
        ("P7",),
        "not found upstream",
        "0.19.1",
        "a load of a request has finished, and it lacks one more block: it waits like others, and "
        "the loaded blocks are published",
    ),
    QuirkStory(
        Quirk.LOADED_REQUEST_WAITS_BEHIND_THE_HEAD,
        loaded_request_waits_behind_the_head,
        "a request whose load has finished waits behind a head that does not fit, holding its "
        "blocks",
        ("P10",),
        "#57841 (open), #45388; fixed by 0.32.0",
        "0.19.1",
        "the store does not know yet about a long prompt, and loads for a short one after it; then"
        " it offers nothing for the first, which lacks the blocks of the second: neither ever runs",
    ),
    QuirkStory(
        Quirk.LOADED_REQUEST_KEEPS_ITS_BLOCKS,
        loaded_request_keeps_its_blocks,
        "a request whose load has finished keeps its blocks until it runs, even under memory "
        "pressure",
        ("P10", "P17", "P25"),
        "not found upstream",
        "0.19.1",
        "two prompts of which a store loads the first half each, into all blocks of the pool: "
        "neither is ever admitted; a forced reset stops with an error",
    ),
    QuirkStory(
        Quirk.EXTERNAL_BLOCKS_PER_GROUP,
        external_blocks_per_group,
        "a group takes blocks for a load before the next group holds its hit",
        ("P1", "P2", "P8", "P16"),
        "#33775 (fixed by #44409, 0.24.0)",
        "0.19.1",
        "two groups, a hit on blocks that are free, and a load after it: the first group takes a "
        "block of the second one's hit, which is then in both tables",
    ),
    QuirkStory(
        Quirk.INVALID_BLOCK_ROLLS_BACK_ONE_REQUEST,
        invalid_block_rolls_back_one_request,
        "of requests that share an invalid block only the first computes it again",
        ("P12", "P18", "P19"),
        "#49250 (open)",
        "0.19.1",
        "two equal prompts share a block whose load fails: the first computes it again, and the "
        "second continues after it at once",
        upon=(Quirk.LOADS_ARE_PUBLISHED_BEFORE_THEY_ARE_LOADED,),
    ),
    QuirkStory(
        Quirk.FAILED_REQUEST_REPORTS_MINUS_ONE_CACHED_TOKENS,
        failed_request_reports_minus_one_cached_tokens,
        "a request that fails before its first admission is reported with -1 cached tokens",
        ("P21",),
        "not found upstream (fixed by 0.22.1)",
        "0.19.1",
        "a load of a new request fails, and the request fails by policy: -1 of its tokens were "
        "cached",
    ),
    QuirkStory(
        Quirk.FIRST_TRANSFER_FREES_THE_BLOCKS,
        first_transfer_frees_the_blocks,
        "the first transfer to finish frees the blocks of a finished request, even if another uses"
        " them",
        ("P17",),
        "not found upstream",
        "0.19.1",
        "a request is aborted during its load, and the store saves its blocks: they are free once "
        "they are saved, while the load writes to them",
    ),
    QuirkStory(
        Quirk.SKIPPED_LOAD_BLOCKS_COUNT_AS_CACHED,
        skipped_load_blocks_count_as_cached,
        "skipped blocks of a load, which are never loaded, count as cached",
        ("P3", "P19"),
        "not found upstream",
        "0.19.1",
        "blocks of 1, a window of 1, a store offers the first token of a prompt of two: its block "
        "is a null block, and counts as cached while the load is under way",
    ),
    QuirkStory(
        Quirk.FINISHED_REQUEST_FIRST_FREES_BLOCKS_OUTSIDE_WINDOWS,
        finished_request_first_frees_blocks_outside_windows,
        "a request that finishes with a store first frees the blocks outside its windows, loads or"
        " not",
        ("P16", "P17"),
        "not found upstream",
        "0.19.1",
        "blocks of 1, a window of 1, a prompt of 3 tokens; it is aborted while the second one is "
        "loaded: its block is free while the load writes to it",
    ),
    QuirkStory(
        Quirk.FINISHED_REQUEST_FIRST_FREES_COMMITTED_BLOCKS,
        finished_request_first_frees_committed_blocks,
        "a request that finishes with a store first frees the blocks outside its windows, but for "
        "steps in flight",
        ("P16",),
        "not found upstream",
        "0.33.0",
        "blocks of 1, full attention and a window of 1, a prompt of one token: it finishes, and "
        "the block of its window is queued first",
    ),
    QuirkStory(
        Quirk.CACHED_TOKENS_AS_THE_STORE_OFFERED,
        cached_tokens_as_the_store_offered,
        "the reported cached tokens are those that a store offered when the load began",
        ("P19", "P21"),
        "not found upstream",
        "0.33.0",
        "an asynchronous load of half a prompt fails: all of it is computed, and half is reported "
        "as cached",
    ),
    QuirkStory(
        Quirk.RESET_IGNORES_TRANSFERS_WITHOUT_BLOCKS,
        reset_ignores_transfers_without_blocks,
        "a reset does not wait for transfers that hold no block",
        ("P25",),
        "not found upstream",
        "0.19.1",
        "blocks of 1, a window of 1, a store offers the first token of a prompt of two, which the "
        "second does not read: a reset is done while that load is under way",
    ),
    QuirkStory(
        Quirk.POOL_AND_STORE_RESET_SEPARATELY,
        pool_and_store_reset_separately,
        "a reset clears the store even if the pool cannot be reset, and the pool even without a "
        "store",
        ("P7", "P25"),
        "not found upstream",
        "0.19.1",
        "a request runs; a reset of pool and store is rejected, but the store's offers are cleared",
    ),
    QuirkStory(
        Quirk.RESET_WITHOUT_A_STORE_SUCCEEDS,
        reset_without_a_store_succeeds,
        "a reset of pool and store succeeds where there is no store",
        ("P25",),
        "#42693",
        "0.27.0 0.29.0 0.33.0",
        "no store, and no block is held: a reset of pool and store succeeds",
    ),
    QuirkStory(
        Quirk.LOOP_SLEEPS_DURING_TRANSFERS,
        loop_sleeps_during_transfers,
        "the loop sleeps while a store reads blocks of a finished request, or, in a pause, loads "
        "some",
        ("P10", "P17"),
        "#46283, #46289 (open)",
        "0.19.1",
        "a request finishes whose blocks a store reads: once its end was reported there are no "
        "requests, the workers are never asked, and the blocks are never free",
    ),
)
