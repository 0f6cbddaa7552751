"""Strict: the specification's own rules, for decisions that some release takes differently."""

from __future__ import annotations

from typing import Final

from blockstep.spec.beside.encoder import (
    compute_end_between_items,
    free_items,
    is_item_needed,
    withdraw_items,
)
from blockstep.spec.beside.transfers import compute_num_external
from blockstep.spec.hashing import get_item_keys
from blockstep.spec.lives.idle import has_work
from blockstep.spec.lives.reports import get_failures
from blockstep.spec.memory.prefix import get_joint_hit
from blockstep.spec.memory.slots import count_reserved_blocks, revoke_slots, take_hit
from blockstep.spec.memory.states import compute_num_certain
from blockstep.spec.memory.telling import get_stored
from blockstep.spec.pool import free_blocks, take_events, withdraw_blocks
from blockstep.spec.requests import count_in_doubt
from blockstep.spec.rules import Rules
from blockstep.spec.step.plans import is_attended
from blockstep.spec.step.preemption import get_preempted
from blockstep.spec.step.share import get_aligned_share


def get_strict_rules() -> Rules:
    """Return the rules of the specification proper. Source: architecture D5."""
    return STRICT_RULES


STRICT_RULES: Final = Rules(
    quirks=frozenset(),
    remake=(get_strict_rules, ()),
    get_item_keys=get_item_keys,
    free_blocks=free_blocks,
    revoke_slots=revoke_slots,
    get_joint_hit=get_joint_hit,
    count_reserved_blocks=count_reserved_blocks,
    count_in_doubt=count_in_doubt,
    compute_num_certain=compute_num_certain,
    get_aligned_share=get_aligned_share,
    hide_states=withdraw_blocks,
    is_zeroed=is_attended,
    is_item_needed=is_item_needed,
    compute_end_between_items=compute_end_between_items,
    withdraw_items=withdraw_items,
    free_items=free_items,
    get_preempted=get_preempted,
    take_hit=take_hit,
    compute_num_external=compute_num_external,
    get_failures=get_failures,
    get_stored=get_stored,
    take_events=take_events,
    has_work=has_work,
)
