"""Forks: configs under which requests can be forked, and forks that must be rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.draw.decisions import Draw
from blockstep.conformance.draw.groups import leave_states_out
from blockstep.conformance.protocol.features import settle_states
from blockstep.spec import vocabulary as v


def draw_forks(config: v.Config, draw: Draw) -> v.Config:
    """Return the config with forks, drawing a watermark and the order of the free queue."""
    if config.is_encoder_decoder:
        config = settle_states(replace(config, is_encoder_decoder=False))
    return draw_pool(replace(leave_states_out(config), enable_forks=True), draw)


def draw_pool(config: v.Config, draw: Draw) -> v.Config:
    """Return the config with a watermark, with a LIFO free queue, or unchanged."""
    return replace(
        config,
        watermark_blocks=draw.choice((0, 0, 1, 1, 2)),
        pool_order=draw.choice((v.PoolOrder.LRU, v.PoolOrder.LRU, v.PoolOrder.LIFO)),
    )


def list_strange_forks(names: Sequence[v.RequestId]) -> list[v.Event]:
    """Return malformed forks, forks of unknown requests, and forks under an id that exists."""
    return [
        v.Fork("", "x"),
        v.Fork(names[0], ""),
        v.Fork(names[0], "x", (-1,)),
        v.Fork("nobody", "x"),
        v.Fork(names[0], names[-1]),
        v.Fork(names[-1], names[0], (0,)),
        v.Fork(names[0], "x", (0,) * 99),
    ]
