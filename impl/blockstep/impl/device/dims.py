"""Dims: the config as kernels read it, and the lengths of the state's tensors."""

from __future__ import annotations

from typing import Final, NamedTuple

from blockstep.spec.vocabulary import Config, KVGroup, Policy

LANES: Final = 16
"""Requests, blocks or tokens that a kernel processes together on a CPU."""
COLUMNS: Final = 16
"""Most tokens of a block that a kernel processes together."""


class Dims(NamedTuple):
    """The config as kernels read it, and the lengths of the tensors.

    The fields in `CONSTANTS` are the widths of vectors, which a compiler must know. All others are
    numbers at run time, so that configs share their compiled kernels.
    """

    size: int
    """Tokens of a block."""
    max_model_len: int
    max_num_seqs: int
    max_tokens_per_row: int
    num_lookahead: int
    num_placeholders: int
    """Drafts of a row that samples, under asynchronous scheduling; 0 otherwise."""
    is_async: int
    is_priority: int
    has_cache: int
    has_chunks: int
    reserves_whole: int
    drops_last_hit: int
    num_blocks: int
    rows: int
    """Most requests that can run at once, rounded up: one lane for each. See `round_rows`."""
    lanes: int
    """A power of two: how many requests, blocks or tokens are processed together."""
    chunk: int
    """Lanes of operations that compare each lane with each other one."""
    width: int
    """A power of two: how many tokens of a block are processed together."""
    slots: int
    """Most unfinished requests; a multiple of `lanes`."""
    table: int
    """Blocks of the longest request, rounded up to a multiple of `lanes`."""
    ring: int
    """Length of the free queue's ring; a power of two, at least twice the blocks."""
    nodes: int
    """Most nodes; a multiple of `lanes`."""
    buckets: int
    """Hash buckets of nodes; a power of two."""
    tokens: int
    """Tokens of the longest request."""
    drafts: int
    """Most drafts of a request; at least 1."""
    stops: int
    """Most stop tokens of a request; at least 1."""
    frames: int
    """Plans that can be in flight."""
    commands: int
    """Length of the command ring; a power of two."""
    batch: int
    """Most tokens of a step."""
    groups: int
    """KV groups."""
    has_windows: int
    """Whether one of them has a sliding window."""


CONSTANTS: Final = ("rows", "lanes", "chunk", "width")
"""Fields of `Dims` that are compiled into a kernel."""
GPU_LANES: Final = {64: 64, 256: 256, 1_024: 256, 4_096: 1_024}
"""Lanes on a GPU for each number of rows: one compiled variant for each."""


def make_dims(
    config: Config, slots: int = 16, stops: int = 4, lanes: int = LANES, nodes: int = 0
) -> Dims:
    """Return the dims of a config, with room for `slots` unfinished requests and `nodes` nodes."""
    size, running = config.block_size, count_running(config)
    rows = _power_of_two(running) if lanes <= LANES else round_rows(running)
    longest = -(-config.max_model_len // size) + 1
    if not config.has_windows:  # without windows, each place of a table has a block of its own
        longest = min(longest, config.num_blocks + 1)
    slots, table = _multiple(max(slots, running), lanes), _multiple(longest, lanes)
    nodes = _multiple(max(nodes, 4 * config.num_blocks), lanes)
    return Dims(
        size,
        config.max_model_len,
        config.max_num_seqs,
        config.long_prefill_token_threshold or config.max_model_len,
        config.num_lookahead_tokens,
        config.num_speculative_tokens if config.async_scheduling else 0,
        int(config.async_scheduling),
        int(config.policy is Policy.PRIORITY),
        int(config.enable_prefix_caching),
        int(config.enable_chunked_prefill),
        int(config.scheduler_reserve_full_isl),
        int(config.drops_last_hit_block),
        config.num_blocks,
        rows,
        lanes,
        # More would spill registers of the one warp, or of the four: see `launch.get_options`.
        min(lanes, 64 if rows > 256 else 32),
        min(_power_of_two(size), COLUMNS) if lanes <= LANES else COLUMNS,
        slots,
        table,
        _power_of_two(2 * config.num_blocks),
        nodes,
        _power_of_two(nodes),
        config.max_model_len + 1,
        max(config.num_speculative_tokens, 1),
        max(stops, 1),
        config.max_frames_in_flight,
        _power_of_two(2 * slots),
        config.max_num_batched_tokens,
        len(config.kv_groups),
        int(config.has_windows),
    )


def count_span(config: Config, group: KVGroup) -> int:
    """Return the most slots that a request holds at once in a sliding-window group (P8, P11).

    The window before the next token, what a step computes and reserves after it, and drafts in
    flight, which may have to be computed again. The window may begin at the end of a block.
    """
    row = min(
        config.max_num_batched_tokens,
        config.long_prefill_token_threshold or config.max_num_batched_tokens,
    )
    ahead = config.max_frames_in_flight - 1 if config.async_scheduling else 0
    in_doubt = ahead * min(config.num_speculative_tokens, row - 1)
    reach = row + config.num_lookahead_tokens
    return group.block_size - 1 + group.sliding_window - 1 + in_doubt + reach


def count_most_blocks(config: Config, num_slots: int) -> int:
    """Return the most blocks that a request of `num_slots` slots holds in all groups (P11)."""
    most = 0
    for group in config.kv_groups:
        held = min(count_span(config, group), num_slots) if group.sliding_window else num_slots
        most += -(-held // group.block_size)
    return most


def count_running(config: Config) -> int:
    """Return the most requests that can run at once: each holds a block."""
    return min(config.max_num_seqs, config.num_usable_blocks)


def round_rows(running: int) -> int:
    """Return the rows on a GPU: few different numbers, so that few variants are compiled."""
    return next((rows for rows in GPU_LANES if rows >= running), _power_of_two(running))


def count_gpu_lanes(config: Config) -> int:
    """Return the lanes on a GPU for a config."""
    return GPU_LANES.get(round_rows(count_running(config)), max(GPU_LANES.values()))


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of
