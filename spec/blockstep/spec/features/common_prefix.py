"""Common prefix: the leading blocks that all running requests share.

A worker may compute attention to these once for all of them (cascade attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.requests import FrameRow
from blockstep.spec.core.work import Step
from blockstep.spec.vocabulary import BlockId, Plan


def add_common_prefix(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with the number of common blocks of each group. Source: P26."""
    counts = step.state.rules[get_num_common_prefix_blocks](step)
    return replace(plan, num_common_prefix_blocks=counts)


def get_num_common_prefix_blocks(step: Step) -> tuple[int, ...]:
    """Return, per group, the number of leading blocks that all running requests share.

    Source: vLLM 0.19.1 `get_num_common_prefix_blocks`; P26.
    """
    config = step.state.config
    if not step.running or not config.enable_prefix_caching:
        return (0,) * len(config.block_sizes)
    return tuple(step.state.rules[list_common_prefixes](step))


def list_common_prefixes(step: Step) -> list[int]:
    """Return, per group, the leading blocks that the tables of all running requests share.

    Source: P26.
    """
    running = [step.requests[name].block_tables for name in step.running]
    return [count_common_blocks(of_group) for of_group in zip(*running, strict=True)]


def count_common_blocks(tables: Sequence[tuple[BlockId, ...]]) -> int:
    """Return the leading blocks that all tables share; the least and the greatest decide.

    Source: P26.
    """
    least, greatest = min(tables), max(tables)
    if least == greatest:
        return len(least)
    num_common = 0
    for mine, theirs in zip(least, greatest, strict=False):
        if mine != theirs:
            break
        num_common += 1
    return num_common


FEATURE: Final = Feature("common_prefix", is_always, Hooks(fields=(add_common_prefix,)))
