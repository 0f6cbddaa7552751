"""Saving: what a store is given to keep of a victim, before its blocks are anybody else's.

    known        |------ prompt ------|-- verified outputs --|
    computed     |-------- KV exists, or will before this step is carried out -------->|
    saved        |     full blocks of every group     |

What is known and computed has its KV for good: a worker carries plans out in their order, and what
frames in flight may still take back lies behind what is known. The blocks are read before anything
else is done in the step, so they are free at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from blockstep.spec.requests import RequestState
from blockstep.spec.vocabulary import Config, KVSave


def compute_num_saved(
    num_computed: int, num_known: int, block_sizes: Sequence[int], min_tokens: int
) -> int:
    """Leading tokens of a victim that are saved: full blocks of all groups, or none of too few.

    From `min_tokens` on it costs less to save and load them than to compute them again; at 0 it
    never does. Source: seed 002 "Preemption Strategies: Swap vs Recompute".
    """
    if min_tokens == 0:
        return 0  # before `lcm`, which would make a symbolic block size a number
    unit = lcm(*block_sizes)
    num_full = min(num_computed, num_known) // unit * unit
    return num_full if num_full >= min_tokens else 0


def compute_break_even(num_setup: int, num_moved: int, num_computed: int) -> int:
    """The least number of tokens that cost no more to save and load than to compute again; 0 if
    there is none.

    In any one unit of time: what both ways take however few tokens there are, and of one token
    saving and loading together, and computing. It is what `swap_min_tokens` wants to be, measured.
    Source: seed 002 "Preemption Strategies: Swap vs Recompute", which counts one way alone.
    """
    num_gained = num_computed - num_moved
    return max(-(-num_setup // num_gained), 1) if num_gained > 0 else 0


def get_save(config: Config, victim: RequestState) -> KVSave | None:
    """What is saved of a request that is about to lose its blocks, None if nothing is.

    Nothing is of one whose own load may not have come. What its windows have left behind is as
    absent from what is saved as from its tables. Source: seed 002 "Eviction (GPU to CPU)", which
    counts on its copies being done when it gives the blocks away; P4, P19.
    """
    num_tokens = compute_num_saved(
        victim.num_computed_tokens,
        victim.num_known_tokens,
        config.block_sizes,
        config.swap_min_tokens,
    )
    if num_tokens == 0 or victim.is_unsettled:
        return None
    tables = zip(victim.block_tables, config.block_sizes, strict=True)
    saved = tuple([table[: num_tokens // size] for table, size in tables])
    return KVSave(victim.request_id, saved, num_tokens)
