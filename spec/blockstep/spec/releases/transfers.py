"""Transfers: what a release does with KV from a store, and with what a store says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.spec import copies
from blockstep.spec.lives.idle import has_runnable
from blockstep.spec.memory.groups import compute_num_skipped_tokens
from blockstep.spec.memory.slots import compute_num_blocks, skip_slots
from blockstep.spec.pool import Pool, allocate_blocks, touch_blocks
from blockstep.spec.releases.failures import (
    failed_tell_what_is_not_counted,
    only_the_first_goes_back,
)
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.requests import Hit, RequestState, without_nulls
from blockstep.spec.rules import Rules
from blockstep.spec.state import State
from blockstep.spec.vocabulary import (
    BlockId,
    BlockTables,
    Config,
    KVGroup,
)


def skipped_reading_still_loads(rules: Rules, _config: Config) -> Rules:
    """Who may not take what others have computed takes what a store has of it."""
    return replace(rules, asks_who_skips_reading=True)


def skipped_reading_counts_as_asked(rules: Rules, _config: Config) -> Rules:
    """Who may not take what others have computed counts as one that a store had nothing of."""
    return replace(rules, counts_who_skips_reading=True)


def last_token_is_loaded(rules: Rules, _config: Config) -> Rules:
    """A load that comes later has all known tokens; the last of them is then computed again."""

    def compute_num_external(
        num_offered: int, num_known: int, num_local: int, is_async: bool
    ) -> int:
        return rules.compute_num_external(num_offered, num_known + is_async, num_local, is_async)

    def get_returned(request: RequestState) -> RequestState:
        num_computed = min(request.num_computed_tokens, request.num_known_tokens - 1)
        return copies.replace(rules.get_returned(request), num_computed_tokens=num_computed)

    return replace(rules, compute_num_external=compute_num_external, get_returned=get_returned)


def loads_publish_at_once(rules: Rules, _config: Config) -> Rules:
    """What a store is to load for a step can be found before it has come."""
    return replace(rules, publishes_loads_at_once=True)


def returned_though_refused(rules: Rules, config: Config) -> Rules:
    """Who comes back from a load has come back, whether or not it is then admitted.

    What it has counts as cached from then on, unless some of its load failed.
    """

    def get_returned(request: RequestState) -> RequestState:
        after = rules.get_returned(request)
        num_loaded = compute_num_blocks(request.num_computed_tokens, config.block_sizes[0])
        if request.num_cached_tokens >= 0 or num_loaded < len(request.block_tables[0]):
            return after
        return copies.replace(after, num_cached_tokens=after.num_computed_tokens)

    return replace(rules, returns_for_good=True, get_returned=get_returned)


def loaded_wait_behind_the_head(rules: Rules, _config: Config) -> Rules:
    """Whose load has come waits behind a head that does not fit, with its blocks."""
    return replace(rules, looks_behind_the_head=False)


def loaded_keep_their_blocks(rules: Rules, _config: Config) -> Rules:
    """Whose load has come keeps its blocks until it runs, whoever lacks some."""
    return replace(rules, takes_back_from_parked=False)


def compute_num_loaded(group: KVGroup, num_tokens: int, num_found: int) -> int:
    """Blocks that a group takes for what a store loads, up to `num_tokens`, behind `num_found` hit.

    None if the hit of this group is longer than that, as that of a second full group may be
    (`only_the_first_full_group_is_cut`). There 0.19.1 asks its pool for a negative amount: it is
    given no block, and its count of free blocks is too large from then on. That is not followed.
    Source: vLLM 0.19.1 `allocate_new_computed_blocks`, `FreeKVCacheBlockQueue.popleft_n`; P1.
    """
    num_skipped = compute_num_skipped_tokens(group, num_tokens)
    if num_skipped == num_tokens and num_skipped >= group.block_size:
        return 0  # of its last block nothing is loaded
    return max(compute_num_blocks(num_tokens, group.block_size) - num_found, 0)


def groups_load_by_turns(rules: Rules, _config: Config) -> Rules:
    """A group takes blocks for what is loaded before the next one holds its hit."""

    def take_hit(
        config: Config, pool: Pool, request: RequestState, hit: Hit
    ) -> tuple[Pool, BlockTables]:
        if not hit.num_external or any(request.block_tables):
            return rules.take_hit(config, pool, request, hit)
        early: list[tuple[BlockId, ...]] = []
        hit_tables = hit.block_tables or ((),) * len(request.holdings)
        for group, found in zip(config.kv_groups, hit_tables, strict=True):
            pool = touch_blocks(pool, without_nulls(found))
            num_loaded = compute_num_loaded(group, hit.num_tokens, len(found))
            pool, taken = allocate_blocks(pool, num_loaded)
            early.append(taken)
        return pool, tuple(early)

    return replace(rules, take_hit=take_hit)


def holds_are_one(rules: Rules, _config: Config) -> Rules:
    """The first end of a transfer frees the blocks of an ended request, whoever else needs them."""
    return replace(rules, holds_are_one=True)


def skipped_loads_are_settled(rules: Rules, _config: Config) -> Rules:
    """Blocks of a load that are skipped, and so never loaded, count as found."""

    def count_settled(num_settled: int, found: Sequence[BlockId]) -> int:
        del num_settled
        return len(found)

    return replace(rules, count_settled=count_settled)


def ended_leave_their_windows_first(rules: Rules, _config: Config) -> Rules:
    """Who ends beside a store gives back what no token behind its known ones attends to, whatever
    still writes there; the store has null blocks in its place."""

    def let_go_at_end(ended: tuple[Pool, RequestState], state: State) -> tuple[Pool, RequestState]:
        pool, request = rules.let_go_at_end(ended, state)
        at_end = copies.replace(request, num_computed_tokens=request.num_known_tokens)
        pool, at_end = skip_slots(state.config, pool, at_end, 0, state.rules)
        return pool, copies.replace(request, holdings=at_end.holdings)

    return replace(rules, let_go_at_end=let_go_at_end)


def ended_leave_what_is_answered_first(rules: Rules, _config: Config) -> Rules:
    """The same of what no token behind those attends to whose step has been answered."""

    def let_go_at_end(ended: tuple[Pool, RequestState], state: State) -> tuple[Pool, RequestState]:
        pool, request = rules.let_go_at_end(ended, state)
        num_in_doubt = state.rules.count_in_doubt(state.frames, request.request_id)
        return skip_slots(state.config, pool, request, num_in_doubt, state.rules)

    return replace(rules, let_go_at_end=let_go_at_end)


def cached_tokens_of_the_offer(rules: Rules, _config: Config) -> Rules:
    """What a request looks up before its first output is told as cached, though a load fails of it,
    or the last token is computed again; preempted once, it is as it was."""

    def get_parked(request: RequestState) -> RequestState:
        if request.num_preemptions or request.output_token_ids:
            return rules.get_parked(request)
        return copies.replace(
            rules.get_parked(request), num_cached_tokens=request.num_computed_tokens
        )

    def get_num_cached_tokens(num_cached: int, request: RequestState, num_start: int) -> int:
        num_cached = rules.get_num_cached_tokens(num_cached, request, num_start)
        looks_up = request.num_computed_tokens == 0
        is_first = not request.num_preemptions and not request.output_token_ids
        return num_start if looks_up and is_first else num_cached

    return replace(rules, get_parked=get_parked, get_num_cached_tokens=get_num_cached_tokens)


def empty_transfers_are_reset(rules: Rules, _config: Config) -> Rules:
    """A reset asks whether blocks are held, and not for transfers: those of null blocks go on."""
    return replace(rules, waits_for_empty_transfers=False)


def pool_and_store_reset_apart(rules: Rules, _config: Config) -> Rules:
    """A store forgets though the pool does not, and the pool though there is no store."""
    return replace(rules, resets_apart=True)


def transfers_are_no_work(rules: Rules, _config: Config) -> Rules:
    """The loop sleeps though the end of a transfer is awaited."""

    def has_work(state: State) -> bool:
        return bool(state.finished_req_ids) or has_runnable(state)

    return replace(rules, has_work=has_work)


STORIES = (
    QuirkStory(
        Quirk.SKIPPED_READING_STILL_LOADS,
        skipped_reading_still_loads,
        "who may not take what others have computed takes what a store has of it",
        ("P13", "P21"),
        "#57269 (fixed by 0.32.0)",
        "0.19.1",
        "a request that skips reading, and an offer of its first block: it is computed behind it",
    ),
    QuirkStory(
        Quirk.SKIPPED_READING_COUNTS_AS_ASKED,
        skipped_reading_counts_as_asked,
        "who may not take what others have computed counts as one that a store had nothing of",
        ("P21",),
        "not found upstream",
        "0.33.0",
        "a request that skips reading is admitted: its tokens are queries of the store's hit rate",
    ),
    QuirkStory(
        Quirk.LAST_TOKEN_IS_LOADED,
        last_token_is_loaded,
        "a load that comes later has all known tokens; the last of them is then computed again",
        ("P2", "P10", "P12"),
        "not found upstream",
        "0.19.1",
        "a prompt of one block, all of it offered for later: its row writes into a block that "
        "others can find; a prompt of one token asks again whenever its load has come",
    ),
    QuirkStory(
        Quirk.LOADS_PUBLISH_AT_ONCE,
        loads_publish_at_once,
        "what a store is to load for a step can be found before it has come",
        ("P4", "P19"),
        "not found upstream",
        "0.19.1",
        "two equal prompts, a store has one block of the first, at once: the second shares it, and "
        "reads garbage where the load fails",
    ),
    QuirkStory(
        Quirk.RETURNED_THOUGH_REFUSED,
        returned_though_refused,
        "who comes back from a load has come back, whether or not it is then admitted",
        ("P7",),
        "not found upstream",
        "0.19.1",
        "a load has come of a request that then lacks a block: it waits like others, and what was "
        "loaded can be found",
    ),
    QuirkStory(
        Quirk.LOADED_WAIT_BEHIND_THE_HEAD,
        loaded_wait_behind_the_head,
        "whose load has come waits behind a head that does not fit, with its blocks",
        ("P10",),
        "#57841 (open), #45388; fixed by 0.32.0",
        "0.19.1",
        "the store does not know yet of a long prompt, and loads for a short one behind it; then "
        "it has nothing of the first, which lacks the blocks of the second: nobody ever runs",
    ),
    QuirkStory(
        Quirk.LOADED_KEEP_THEIR_BLOCKS,
        loaded_keep_their_blocks,
        "whose load has come keeps its blocks until it runs, whoever lacks some",
        ("P10", "P17", "P25"),
        "not found upstream",
        "0.19.1",
        "two prompts of which a store loads the first half each into all blocks that there are: "
        "neither is ever admitted; a forced reset stops by an error",
    ),
    QuirkStory(
        Quirk.GROUPS_LOAD_BY_TURNS,
        groups_load_by_turns,
        "a group takes blocks for what is loaded before the next one holds its hit",
        ("P1", "P2", "P8", "P16"),
        "#33775 (fixed by #44409, 0.24.0)",
        "0.19.1",
        "two groups, a hit on blocks that are free, and a load behind it: the first group takes a "
        "block of the second one's hit, which then stands in both tables",
    ),
    QuirkStory(
        Quirk.ONLY_THE_FIRST_GOES_BACK,
        only_the_first_goes_back,
        "whoever has computed an invalid block is cut there, if nobody before it has that block",
        ("P12", "P18", "P19"),
        "#49250 (open)",
        "0.19.1",
        "two equal prompts share a block whose load fails: the first computes it again, the second "
        "goes on behind it at once",
        upon=(Quirk.LOADS_PUBLISH_AT_ONCE,),
    ),
    QuirkStory(
        Quirk.FAILED_TELL_WHAT_IS_NOT_COUNTED,
        failed_tell_what_is_not_counted,
        "who fails before it ever ran is told to have -1 cached tokens",
        ("P21",),
        "not found upstream (fixed by 0.22.1)",
        "0.19.1",
        "a load of a new request fails, and it ends by policy: -1 of its tokens were cached",
    ),
    QuirkStory(
        Quirk.HOLDS_ARE_ONE,
        holds_are_one,
        "the first end of a transfer frees the blocks of an ended request, whoever else needs them",
        ("P17",),
        "not found upstream",
        "0.19.1",
        "a request is aborted during its load, and the store wants its blocks: they are free once "
        "they are sent, while the load writes to them",
    ),
    QuirkStory(
        Quirk.SKIPPED_LOADS_ARE_SETTLED,
        skipped_loads_are_settled,
        "blocks of a load that are skipped, and so never loaded, count as found",
        ("P3", "P19"),
        "not found upstream",
        "0.19.1",
        "blocks of 1, a window of 1, a store has the first token of a prompt of two: its block is "
        "a null block, and counts as cached while the load is under way",
    ),
    QuirkStory(
        Quirk.ENDED_LEAVE_THEIR_WINDOWS_FIRST,
        ended_leave_their_windows_first,
        "who ends beside a store first gives back what no token behind its known ones attends to",
        ("P16", "P17"),
        "not found upstream",
        "0.19.1",
        "blocks of 1, a window of 1, a prompt of 3 tokens; it is aborted while the second one is "
        "loaded: its block is free while the load writes to it",
    ),
    QuirkStory(
        Quirk.ENDED_LEAVE_WHAT_IS_ANSWERED_FIRST,
        ended_leave_what_is_answered_first,
        "who ends beside a store first gives back what no token behind its computed ones attends "
        "to, but for those in flight",
        ("P16",),
        "not found upstream",
        "0.33.0",
        "blocks of 1, full attention and a window of 1, a prompt of one token: it ends, and the "
        "block of its window is queued first",
    ),
    QuirkStory(
        Quirk.CACHED_TOKENS_OF_THE_OFFER,
        cached_tokens_of_the_offer,
        "what is told as cached is what a store offered when the load began",
        ("P19", "P21"),
        "not found upstream",
        "0.33.0",
        "a load that comes later of half a prompt fails: all of it is computed, and half is told "
        "as cached",
    ),
    QuirkStory(
        Quirk.EMPTY_TRANSFERS_ARE_RESET,
        empty_transfers_are_reset,
        "a reset does not wait for transfers of which no block is held",
        ("P25",),
        "not found upstream",
        "0.19.1",
        "blocks of 1, a window of 1, a store has the first token of a prompt of two, which the "
        "second does not attend to: a reset is done while that load is under way",
    ),
    QuirkStory(
        Quirk.POOL_AND_STORE_RESET_APART,
        pool_and_store_reset_apart,
        "a store forgets though the pool does not, and the pool though there is no store",
        ("P7", "P25"),
        "not found upstream",
        "0.19.1",
        "a request runs; a reset of pool and store is refused, and what the store had is forgotten",
    ),
    QuirkStory(
        Quirk.TRANSFERS_ARE_NO_WORK,
        transfers_are_no_work,
        "the loop sleeps while a store reads blocks of a request that has ended, or, in a pause, "
        "while one is loaded",
        ("P10", "P17"),
        "#46283, #46289 (open)",
        "0.19.1",
        "a request ends whose blocks a store reads: once its end was told there are no requests, "
        "the workers are never asked, and the blocks are never free",
    ),
)
