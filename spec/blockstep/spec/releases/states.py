"""States: what a release does where recurrent groups take from the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.spec.pool import Pool
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.requests import Hit, RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import BlockId, Config, GroupKind, KVGroup, MambaCacheMode


def chunks_round_to_nothing(rules: Rules, _config: Config) -> Rules:
    """A chunk that does not end a prompt is whole blocks, and if need be none."""

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

    return replace(rules, get_aligned_share=get_aligned_share)


def fresh_states_are_waited_for(rules: Rules, config: Config) -> Rules:
    """Who would hit a state that this very step writes waits for the next, and all behind it."""

    def hide_states(pool: Pool, block_ids: Sequence[BlockId]) -> Pool:
        del block_ids
        return pool

    def waits_for_states(before: Pool, pool: Pool, unwritten: Sequence[BlockId], hit: Hit) -> bool:
        written = {pool.block_keys[block_id] for block_id in unwritten}
        for group, table in zip(config.groups, hit.block_tables, strict=False):
            if group.kind is GroupKind.RECURRENT and table:
                key = pool.block_keys[table[-1]]
                assert key is not None, "what is hit is published"
                named = [before.block_keys[block_id] for block_id in pool.cached[key]]
                if key in written or named != [key] * len(named):
                    return True
        return False

    return replace(rules, hide_states=hide_states, waits_for_states=waits_for_states)


def only_full_attention_is_zeroed(rules: Rules, _config: Config) -> Rules:
    """Blocks of windows and chunks are taken as they are, states of others in them."""

    def is_zeroed(group: KVGroup) -> bool:
        return group.kind is GroupKind.FULL

    return replace(rules, is_zeroed=is_zeroed)


def withdrawn_blocks_are_zeroed(rules: Rules, _config: Config) -> Rules:
    """Blocks of a row that the step took back are zeroed, too, whoever has them then."""
    return replace(rules, zeroes_withdrawn=True)


STORIES = (
    QuirkStory(
        Quirk.CHUNKS_ROUND_TO_NOTHING,
        chunks_round_to_nothing,
        "a chunk that does not end a prompt is whole blocks, and if need be none",
        ("P10", "P15"),
        "#40707",
        "0.19.1",
        "states in blocks of 4, `align`, a budget of 2: a prompt of 9 tokens is never planned",
    ),
    QuirkStory(
        Quirk.FRESH_STATES_ARE_WAITED_FOR,
        fresh_states_are_waited_for,
        "who would hit a state that this very step writes waits for the next, and all behind it",
        ("P15",),
        "not found upstream",
        "0.19.1",
        "states in blocks of 1; two prompts of the same 2 tokens: the second is not admitted in "
        "the step that runs the first",
    ),
    QuirkStory(
        Quirk.ONLY_FULL_ATTENTION_IS_ZEROED,
        only_full_attention_is_zeroed,
        "blocks of windows and chunks are taken as they are, states of others in them",
        ("P26",),
        "not found upstream",
        "0.19.1",
        "a window and a recurrent group: the plan names no block to be zeroed",
    ),
    QuirkStory(
        Quirk.WITHDRAWN_BLOCKS_ARE_ZEROED,
        withdrawn_blocks_are_zeroed,
        "blocks of a row that the step took back are zeroed, too, whoever has them then",
        (),
        "not found upstream",
        "0.19.1",
        "PRIORITY, full attention and a recurrent group; a request takes a block and is then "
        "preempted in the same step: the block is named twice",
    ),
)
