"""Groups: which tokens each kind of attention still reads, and so which blocks must be held.

    | skipped |     attended     |  new  | lookahead |        before a token at position c
    |  null   |       held       |     allocate      |

The kind of a group only decides which tokens are skipped; the rest follows from it.
"""

from __future__ import annotations

from math import gcd
from typing import assert_never

from blockstep.spec.memory.states import compute_max_held_states
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, Request


def compute_num_skipped_tokens(group: KVGroup, num_computed: int) -> int:
    """Return the leading tokens to which no token from position `num_computed` on attends.

    Source: vLLM 0.19.1 `get_num_skipped_tokens`.
    """
    match group.kind:
        case GroupKind.FULL | GroupKind.CROSS_ATTENTION:
            return 0
        case GroupKind.SLIDING_WINDOW:
            return max(num_computed - group.sliding_window + 1, 0)
        case GroupKind.CHUNKED_LOCAL:
            return num_computed // group.attention_chunk_size * group.attention_chunk_size
        case GroupKind.RECURRENT:
            return max(num_computed - 1, 0)
        case _:
            assert_never(group.kind)


def compute_num_skipped_blocks(group: KVGroup, num_computed: int) -> int:
    """Return the leading blocks with no attended token.

    Source: vLLM 0.19.1 `remove_skipped_blocks`.
    """
    return compute_num_skipped_tokens(group, num_computed) // group.block_size


def compute_max_reach(config: Config) -> int:
    """Return the most slots of one request from the first token on that it may have to compute
    again.

    A row of a step, the lookahead after it, and drafts in flight before it: until they are verified
    a request may have to roll back to the first of them. Source: P8, P14.
    """
    budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
    num_row = min(budget, threshold) if threshold else budget
    return compute_max_doubt(config) + num_row + config.num_lookahead_tokens


def compute_max_doubt(config: Config) -> int:
    """Return the most computed tokens of one request that are drafts in flight. Source: P14."""
    budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
    num_row = min(budget, threshold) if threshold else budget
    num_frames = config.max_frames_in_flight - 1 if config.async_scheduling else 0
    return num_frames * min(config.num_speculative_tokens, num_row - 1)


def compute_max_held_blocks(
    group: KVGroup, num_slots: int, max_reach: int, max_doubt: int = 0
) -> int:
    """Return the most blocks of one group that a request of `num_slots` holds at once.

    Whatever its chunks are. Under full attention all of them; else those that a window and the
    reach of a step touch, wherever they begin. Upstream charges a window for the whole request, and
    so never admits some requests (#39734). Source: vLLM 0.19.1 `max_memory_usage_bytes` of each
    kind, without what cannot happen; P8, P11.
    """
    size = group.block_size
    num_all = -(-num_slots // size)
    match group.kind:
        case GroupKind.FULL | GroupKind.CROSS_ATTENTION:
            return num_all
        case GroupKind.SLIDING_WINDOW:
            num_tokens, offset = group.sliding_window - 1 + max_reach, size - 1
        case GroupKind.CHUNKED_LOCAL:
            num_tokens = group.attention_chunk_size - 1 + max_reach
            offset = size - gcd(group.attention_chunk_size, size)
        case GroupKind.RECURRENT:
            return compute_max_held_states(group, num_all, max_reach, max_doubt)
        case _:
            assert_never(group.kind)
    # The largest offset of attended tokens in a block: a window begins anywhere, a chunk does not.
    return min(num_all, -(-(offset + num_tokens) // size))


def get_num_slots_of(group: KVGroup, num_slots: int, request: Request) -> int:
    """Return the slots in one group's table: those of the tokens, or of the encoder outputs.

    Source: vLLM 0.19.1 `KVCacheCoordinator.allocate_new_blocks`; P8.
    """
    if group.kind is not GroupKind.CROSS_ATTENTION:
        return num_slots
    return sum([item.num_embeds for item in request.items])
