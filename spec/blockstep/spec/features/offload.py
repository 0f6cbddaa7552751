"""Offload: what a store saves of a victim (swap-out), before its blocks are reused.

    known        |------ prompt ------|-- verified outputs --|
    computed     |-------- KV exists, or will before this step is executed ----------->|
    saved        |     full blocks of every group     |

The KV of tokens that are known and computed is final: a worker executes plans in order, and drafts
that frames in flight may reject come after the known tokens. The blocks are read before any other
access in the step, so they are free at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.parts import Note
from blockstep.spec.core.requests import FrameRow, RequestState
from blockstep.spec.core.work import Step
from blockstep.spec.vocabulary import Config, KVSave, Plan

SAVES: Final = Note[tuple[KVSave, ...]]("saves", ())
"""The KV that a step saves, in the order of preemption."""


def compute_num_saved(
    num_computed: int, num_known: int, block_sizes: Sequence[int], min_tokens: int
) -> int:
    """Return the leading tokens of a victim that are saved: full blocks of all groups; 0 if too
    few.

    From `min_tokens` on it costs less to save and load them than to compute them again; at 0 it
    never does. Source: seed 002 "Preemption Strategies: Swap vs Recompute".
    """
    if min_tokens == 0:
        return 0  # before `lcm`, which would make a symbolic block size concrete
    unit = lcm(*block_sizes)
    num_full = min(num_computed, num_known) // unit * unit
    return num_full if num_full >= min_tokens else 0


def compute_break_even(num_setup: int, num_moved: int, num_computed: int) -> int:
    """Return the least number of tokens that cost no more to save and load than to compute again.

    0 if there is none. In any one unit of time: `num_setup` is the fixed cost of saving and
    loading, `num_moved` their cost per token together, `num_computed` the cost of computing a
    token. It is a measured value for `swap_min_tokens`. Source: seed 002 "Preemption Strategies:
    Swap vs Recompute", which counts one way alone.
    """
    num_gained = num_computed - num_moved
    return max(-(-num_setup // num_gained), 1) if num_gained > 0 else 0


def get_save(config: Config, victim: RequestState) -> KVSave | None:
    """Return the swap-out of a request that is about to lose its blocks, or None.

    A request whose own load is unconfirmed has none. Skipped blocks are null in it, as in the
    request's tables. Source: seed 002 "Eviction (GPU to CPU)", which assumes that its copies
    are done when it releases the blocks; P4, P19.
    """
    num_tokens = compute_num_saved(
        victim.num_computed_tokens,
        victim.num_known_tokens,
        config.block_sizes,
        config.swap_min_tokens,
    )
    if num_tokens == 0 or victim.has_unconfirmed_kv:
        return None
    tables = zip(victim.block_tables, config.block_sizes, strict=True)
    saved = tuple([table[: num_tokens // size] for table, size in tables])
    return KVSave(victim.request_id, saved, num_tokens)


def process_saving(step: Step, victim: RequestState, had_row: bool) -> None:
    """Plan to save the KV of a preempted request, if it is worth it. Source: P17."""
    del had_row
    save = get_save(step.state.config, victim)
    if save is not None:
        SAVES.set(step, (*SAVES.of(step), save))


def add_saves(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with the KV to save. Source: P17, P26."""
    return replace(plan, kv_saves=SAVES.of(step))


def may_save(config: Config) -> bool:
    """Whether KV of a victim may be saved. Source: seed 002 "Preemption Strategies: Swap vs
    Recompute"."""
    return config.swap_min_tokens > 0


FEATURE: Final = Feature("offload", may_save, Hooks(victims=(process_saving,), fields=(add_saves,)))
