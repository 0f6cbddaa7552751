"""States: quirks of releases with the blocks of recurrent groups."""

from __future__ import annotations

from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core import admission, token_budget
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.parts import Note, Part
from blockstep.spec.core.prefix_cache import get_prefix_hit, reads_prefix_cache
from blockstep.spec.core.requests import Hit, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.work import Scheduled, Step, Verdict
from blockstep.spec.features import kv_transfer, mamba
from blockstep.spec.releases.groups import get_search, hits_are_searched
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, MambaCacheMode


def chunk_rounds_down_to_zero(rules: Rules, _config: Config) -> Rules:
    """A chunk that does not end a prompt is rounded down to whole blocks, even to no token."""

    def get_aligned_share(
        config: Config, request: RequestState, num_computed: int, num_new: int
    ) -> int:
        modes = {group.mamba_cache_mode for group in config.groups}
        num_prompt, num_known = len(request.request.prompt_token_ids), request.num_known_tokens
        if MambaCacheMode.ALIGN not in modes or num_computed >= max(num_prompt, num_known - 1):
            return num_new
        size = config.block_size
        last = max(num_known // size * size - size * config.drops_last_hit_block, 0)
        if num_computed + num_new < last:
            return num_new // size * size
        return last - num_computed if num_computed < last else num_new

    return rules.replacing(mamba.get_aligned_share, get_aligned_share)


def chunks_end_at_checkpoints(rules: Rules, config: Config) -> Rules:
    """A chunk of a prompt ends before the last token, and where a longer hit of one group ends."""

    def get_aligned_share(
        config: Config, request: RequestState, num_computed: int, num_new: int
    ) -> int:
        modes = {group.mamba_cache_mode for group in config.groups}
        num_prompt, num_known = len(request.request.prompt_token_ids), request.num_known_tokens
        prompt_end = max(num_prompt, num_known - 1)
        if MambaCacheMode.ALIGN not in modes or num_new <= 0 or num_computed >= prompt_end:
            return num_new
        size, end = config.block_size, num_computed + num_new
        budget = config.max_num_batched_tokens
        longest = min(budget, config.long_prefill_token_threshold or budget)
        if end < prompt_end and (end // size * size > num_computed or size <= longest):
            end = end // size * size
        is_given_back = config.drops_last_hit_block
        last = (num_known - (not is_given_back)) // size - is_given_back
        stops = [last * size]
        if num_computed % size:
            stops.append((num_computed // size + 1) * size)
        longest_hit = LONGEST_GROUP_HIT.of(request)
        if num_computed < longest_hit < end:
            stops.append(num_computed + (longest_hit - num_computed) // size * size)
        within = [stop for stop in stops if num_computed < stop < end]
        if within and num_computed == num_known - 1:
            return 1  # a token that is padded with drafts runs without them, and not with fewer
        return max(min([*within, end]) - num_computed, 0)

    def look_for_junction(step: Step, request: RequestState, hit: Hit) -> tuple[RequestState, Hit]:
        """Return the request with the end of the longest hit of some of its groups."""
        config, longest = step.state.config, 0
        if not request.num_computed_tokens and reads_prefix_cache(config, request):
            pool = step.state.rules[admission.get_findable_pool](step)
            longest = search.find_longest(config, pool, request)[1]
        return LONGEST_GROUP_HIT.put(request, longest if longest > hit.num_tokens else 0), hit

    if not config.groups:
        return rules.replacing(mamba.get_aligned_share, get_aligned_share)
    search, hooks = get_search(rules.changes, config), rules.hooks
    if MambaCacheMode.ALIGN in {group.mamba_cache_mode for group in config.groups}:
        hooks = replace(hooks, hits=(look_for_junction, *hooks.hits))  # no other chunk ends there
    searching = hits_are_searched(replace(rules, hooks=hooks), config)
    return searching.replacing(mamba.get_aligned_share, get_aligned_share)


LONGEST_GROUP_HIT: Final = Part("longest_group_hit", 0)
"""The end of the longest hit of some groups of a request alone, if its own hit is shorter."""


def states_are_freed_at_once(rules: Rules, _config: Config) -> Rules:
    """A state is freed once the next token is computed, even with spare blocks for drafts."""

    def compute_num_certain(group: KVGroup, num_computed: int, num_unverified: int) -> int:
        del group
        return max(num_computed - num_unverified, 0)

    return rules.replacing(mamba.compute_num_certain, compute_num_certain)


def requests_wait_for_states_of_the_same_step(rules: Rules, config: Config) -> Rules:
    """A request that would hit a state of the same step waits, and so do all after it."""

    def get_findable_pool(step: Step) -> Pool:
        return step.pool

    def get_slots_at_admission(
        step: Step, request: RequestState, num_new: int, hit: Hit
    ) -> tuple[Pool, RequestState] | Verdict:
        if config.groups and _waits_for_states(step, request):
            return Verdict.NO_ROOM if num_new else Verdict.NO_BLOCKS
        return rules[admission.get_slots_at_admission](step, request, num_new, hit)

    return rules.replacing(admission.get_findable_pool, get_findable_pool).replacing(
        admission.get_slots_at_admission, get_slots_at_admission
    )


def _waits_for_states(step: Step, request: RequestState) -> bool:
    """Return whether the hit of a request in the pool has a state that the step has published."""
    config, before, pool = step.state.config, step.state.pool, step.pool
    # no-mutate clause: without recurrent groups there is no state to wait for
    if request.num_computed_tokens or not config.has_states:
        return False
    hit = get_prefix_hit(config, pool, request, step.state.rules)
    written = {pool.block_keys[block_id] for block_id in mamba.get_unwritten_states(step)}
    for group, table in zip(config.groups, hit.block_tables, strict=False):
        if group.kind is GroupKind.RECURRENT and table:
            key = pool.block_keys[table[-1]]
            assert key is not None, "what is hit is published"
            named = [before.block_keys[block_id] for block_id in pool.cached[key]]
            if key in written or named != [key] * len(named):
                return True
    return False


def only_full_attention_is_zeroed(rules: Rules, _config: Config) -> Rules:
    """Blocks of windows and chunks are not zeroed, though states may have been in them."""
    return rules.replacing(mamba.is_zeroed, is_zeroed)


def is_zeroed(group: KVGroup) -> bool:
    """Modified `mamba.is_zeroed`: if it has full attention."""
    return group.kind is GroupKind.FULL


def blocks_of_withdrawn_rows_are_zeroed(rules: Rules, _config: Config) -> Rules:
    """Blocks of a row that was removed from the step are zeroed as well.

    Another row may have taken them since.
    """

    def list_zeroed_rows(step: Step) -> list[Scheduled]:
        rows = rules[mamba.list_zeroed_rows](step)
        return [row for row in _GRANTED.of(step) if row.num_scheduled > 0 or row in rows]

    return _noting(rules).replacing(mamba.list_zeroed_rows, list_zeroed_rows)


def blocks_of_loads_are_zeroed(rules: Rules, _config: Config) -> Rules:
    """The plan that has the store load blocks at a later time also has them zeroed.

    Source: vLLM 0.19.1 `allocate_new_computed_blocks`, which records them for zeroing.
    """

    def process_parking(step: Step, request: RequestState, hit: Hit) -> Verdict:
        verdict = rules[kv_transfer.process_async_load](step, request, hit)
        if verdict is Verdict.SUSPENDED:
            name = request.request_id
            tables = step.requests[name].block_tables
            mamba.note_had(step, request, request, hit)
            _grant(step, Scheduled(name, hit.num_tokens, 0, tables))
        return verdict

    def list_zeroed_rows(step: Step) -> list[Scheduled]:
        rows = rules[mamba.list_zeroed_rows](step)
        return [row for row in _GRANTED.of(step) if row.num_scheduled == 0 or row in rows]

    return (
        _noting(rules)
        .replacing(mamba.list_zeroed_rows, list_zeroed_rows)
        .replacing(kv_transfer.process_async_load, process_parking)
    )


_GRANTED: Final = Note[tuple[Scheduled, ...]]("granted", ())
"""All rows, including withdrawn ones, and requests that are given blocks for a load."""


def _noting(rules: Rules) -> Rules:
    """Return the rules with which a step notes its rows."""
    hooks = rules.hooks
    if note_granted in hooks.grants:
        return rules
    return replace(rules, hooks=replace(hooks, grants=(*hooks.grants, note_granted)))


def note_granted(step: Step, request: RequestState) -> None:
    """Note a row that has its slots."""
    del request
    _grant(step, step.rows[-1])


def _grant(step: Step, row: Scheduled) -> None:
    _GRANTED.set(step, (*_GRANTED.of(step), row))


def chunk_is_cut_for_states_before_items(rules: Rules, config: Config) -> Rules:
    """A chunk is cut first for states, then at any token before an item that does not fit."""
    return rules.replacing(token_budget.process_limits, process_limits) if config.groups else rules


def process_limits(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
    """Modified `token_budget.process_limits`: in reverse order."""
    for limit in reversed(step.state.rules.hooks.limits):
        num_new = step.state.rules[limit](step, request, num_computed, num_new)
    return num_new


STORIES = (
    QuirkStory(
        Quirk.CHUNK_ROUNDS_DOWN_TO_ZERO,
        chunk_rounds_down_to_zero,
        "a chunk that does not end a prompt is rounded down to whole blocks, even to no token",
        ("P10", "P15"),
        "#40707",
        "0.19.1",
        "states in blocks of 4, `align`, a budget of 2: a prompt of 9 tokens is never scheduled",
    ),
    QuirkStory(
        Quirk.REQUESTS_WAIT_FOR_STATES_OF_THE_SAME_STEP,
        requests_wait_for_states_of_the_same_step,
        "a request that would hit a state of the same step waits, and so do all after it",
        ("P15",),
        "not found upstream",
        "0.19.1",
        "states in blocks of 1; two prompts of the same 2 tokens: the second is not admitted in "
        "the step that runs the first",
    ),
    QuirkStory(
        Quirk.ONLY_FULL_ATTENTION_IS_ZEROED,
        only_full_attention_is_zeroed,
        "blocks of windows and chunks are not zeroed, though states may have been in them",
        ("P26",),
        "not found upstream",
        "0.19.1",
        "a window and a recurrent group: the plan names no block to zero",
    ),
    QuirkStory(
        Quirk.BLOCKS_OF_WITHDRAWN_ROWS_ARE_ZEROED,
        blocks_of_withdrawn_rows_are_zeroed,
        "blocks of a row that was removed from the step are zeroed as well",
        (),
        "not found upstream",
        "0.19.1",
        "PRIORITY, full attention and a recurrent group; a request takes a block and is then "
        "preempted in the same step: the block is named twice",
    ),
    QuirkStory(
        Quirk.BLOCKS_OF_LOADS_ARE_ZEROED,
        blocks_of_loads_are_zeroed,
        "the plan that has the store load blocks at a later time also has them zeroed",
        ("P17",),
        "#48481 (merged; fixed by 0.27.0)",
        "0.19.1",
        "full attention and a recurrent group; a store loads a prompt later: its blocks are zeroed "
        "behind the steps in flight, maybe once they are loaded",
    ),
    QuirkStory(
        Quirk.CHUNKS_END_AT_CHECKPOINTS,
        chunks_end_at_checkpoints,
        "a chunk of a prompt ends before the last token, and where a longer hit of one group ends",
        ("P15",),
        "#47782 (merged), #50235",
        "0.33.0",
        "states in blocks of 1, `align`: a prompt of 2 tokens is computed in two steps",
    ),
    QuirkStory(
        Quirk.STATES_ARE_FREED_AT_ONCE,
        states_are_freed_at_once,
        "a state is freed once the next token is computed, even with spare blocks for drafts",
        (),
        "#47728 (merged)",
        "0.33.0",
        "states in blocks of 1 with one spare block, `align`; a prompt of 2 tokens and the first "
        "output: the plan of the second frees the state of the first",
    ),
    QuirkStory(
        Quirk.CHUNK_IS_CUT_FOR_STATES_BEFORE_ITEMS,
        chunk_is_cut_for_states_before_items,
        "a chunk is cut first for states, then at any token before an item that does not fit",
        (),
        "#51603 (merged)",
        "0.33.0",
        "states in blocks of 2, `align`, an encoder budget for one item; a prompt with items at 0 "
        "and 3: the first chunk is 3 tokens, not 2",
    ),
)
