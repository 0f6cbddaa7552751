"""Which mixes of KV-cache groups a release of vLLM takes, and the nearest one that it does.

Its own configuration never builds the others: where it meets one, it treats every group as full
attention, which is another config. Nothing here imports vLLM.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.engines.adapters.vllm_releases import Release
from blockstep.conformance.protocol.feature import resize_blocks, without_states
from blockstep.spec.vocabulary import (
    Config,
    ConfigError,
    ConfigProblem,
    GroupKind,
    MambaCacheMode,
    SpecMethod,
)

ALL_EQUAL = "groups that are all equal: the release wants two that differ"
CHUNKS_WITH_A_HEAD = "chunked-local groups with a draft head: the release asserts that it has none"
CHUNKS_OF_ANOTHER_SIZE = "chunked-local groups with other block sizes: the release wants one size"
SEVERAL_SIZES = "groups of several block sizes: the release wants one size"
NO_RECURRENT = "recurrent groups: not followed in this release"
NO_STATES_OF_ALL = "recurrent groups of mode all: the release has the others alone"
PARTS_OF_BLOCKS = "groups of several block sizes: the release publishes parts of blocks"
NARROW_WINDOWS = "windows of one token: the release publishes no block for such a group"
NULL_BLOCKS = "windows under asynchronous scheduling: the release publishes the null block"
OTHER_MIXES = (
    "other groups than of full attention and, all before or all behind them, of one other kind"
)


def find_problem(release: Release, config: Config) -> str | None:
    """Return why the release cannot be built with the groups of `config`, or raises later; None if
    it can.

    Except for recurrent groups, all reasons are about prefix hits: without prefix caching every
    release takes every mix of groups. Source: `HybridKVCacheCoordinator`, and the assertions of its
    managers.
    """
    groups = config.groups
    has_windows = any(group.kind is GroupKind.SLIDING_WINDOW for group in groups)
    has_chunks = any(group.kind is GroupKind.CHUNKED_LOCAL for group in groups)
    has_states = any(group.kind is GroupKind.RECURRENT for group in groups)
    has_sizes = len(set(config.block_sizes)) > 1
    if has_states and not release.has_recurrent_groups:
        return NO_RECURRENT
    if not config.enable_prefix_caching or not groups:
        return None
    skips_blocks = has_windows or has_chunks
    if skips_blocks and config.async_scheduling and not release.publishes_no_null_block:
        return NULL_BLOCKS
    if release.has_partial_hits:
        if any(group.mamba_cache_mode is MambaCacheMode.ALL for group in groups):
            return NO_STATES_OF_ALL
        if has_sizes:
            return PARTS_OF_BLOCKS
        # With a draft head one block of them is published: that which it gives back.
        if not config.drops_last_hit_block and any(one.sliding_window == 1 for one in groups):
            return NARROW_WINDOWS
    if has_chunks and config.drops_last_hit_block:
        return CHUNKS_WITH_A_HEAD
    if has_sizes and not release.has_mixed_groups:
        return SEVERAL_SIZES
    if has_sizes and has_chunks:
        return CHUNKS_OF_ANOTHER_SIZE
    if len(groups) == 1:
        return None
    if not release.has_mixed_groups:
        return None if config == _arrange(config) else OTHER_MIXES
    return ALL_EQUAL if len(set(groups)) == 1 and not release.has_equal_groups else None


def fit_groups(release: Release, config: Config) -> tuple[Config, str | None]:
    """Return the nearest config whose groups the release takes, and why it differs, or None."""
    first = reason = find_problem(release, config)
    while reason is not None:
        config = _mend(config, reason)
        reason = find_problem(release, config)
    return config, first


def require_groups(release: Release, config: Config) -> None:
    """Raise `ConfigError` if the release cannot be built with the groups of `config`."""
    reason = find_problem(release, config)
    if reason is not None:
        rule = f"is no mix for vLLM {release.version}: {reason}"
        fitting = fit_groups(release, config)[0]
        fix = f"use {fitting.groups!r} (block_size {fitting.block_size}), or no prefix caching"
        if reason == CHUNKS_WITH_A_HEAD:
            fix = f"use {fitting.spec_method}, or no prefix caching"
        if reason == NULL_BLOCKS:
            fix = "use no asynchronous scheduling, or no prefix caching"
        raise ConfigError([ConfigProblem("groups", config.groups, rule, fix)])


def _mend(config: Config, reason: str) -> Config:
    """Return the config without what `reason` names."""
    if reason == CHUNKS_WITH_A_HEAD:
        return replace(config, spec_method=SpecMethod.NGRAM)
    if reason in (SEVERAL_SIZES, CHUNKS_OF_ANOTHER_SIZE, PARTS_OF_BLOCKS):
        return resize_blocks(config, max(config.block_sizes))
    if reason == NULL_BLOCKS:
        return replace(config, async_scheduling=False)
    if reason == NARROW_WINDOWS:
        wider = [
            replace(g, sliding_window=2) if g.sliding_window == 1 else g for g in config.groups
        ]
        return replace(config, groups=tuple(wider))
    if reason == NO_STATES_OF_ALL:
        modes = {MambaCacheMode.ALL: MambaCacheMode.ALIGN}
        aligned = [
            replace(g, mamba_cache_mode=modes.get(g.mamba_cache_mode, g.mamba_cache_mode))
            for g in config.groups
        ]
        # Chunks that end at blocks may end inside of an item.
        config = replace(
            config,
            groups=tuple(aligned),
            enable_chunked_prefill=True,
            disable_chunked_mm_input=config.disable_chunked_mm_input and config.is_encoder_decoder,
        )
        # A block is to be of more tokens than there are drafts in a step.
        num_drafts = max(group.num_speculative_blocks for group in config.groups)
        return resize_blocks(config, max(*config.block_sizes, num_drafts + 1))
    if reason == NO_RECURRENT:
        return resize_blocks(without_states(config), config.block_size)
    return _arrange(config) if reason == OTHER_MIXES else replace(config, groups=config.groups[:1])


def _arrange(config: Config) -> Config:
    """Return the config with full-attention groups next to each other, and next to them the groups
    of one other kind.

    If either is missing, one group is left.
    """
    full = [group for group in config.groups if group.kind is GroupKind.FULL]
    others = [group for group in config.groups if group.kind is not GroupKind.FULL]
    if not full or not others:
        return replace(config, groups=config.groups[:1])
    alike = [group for group in others if group == others[0]]
    is_full_first = config.groups[0].kind is GroupKind.FULL
    return replace(config, groups=tuple(full + alike if is_full_first else alike + full))
