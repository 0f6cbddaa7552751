"""Forks: configs under which a request goes on as several, and what nobody should ask of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.draw.decisions import Draw
from blockstep.conformance.draw.groups import leave_states_out
from blockstep.conformance.protocol.features import settle_states
from blockstep.spec import vocabulary as v


def draw_forks(config: v.Config, draw: Draw) -> v.Config:
    """The config with forks; some leave blocks to those who run, some take what was freed last."""
    if config.is_encoder_decoder:
        config = settle_states(replace(config, is_encoder_decoder=False))
    return draw_pool(replace(leave_states_out(config), enable_forks=True), draw)


def draw_pool(config: v.Config, draw: Draw) -> v.Config:
    """The config with a watermark, or a pool that gives what was freed last, or as it was."""
    return replace(
        config,
        watermark_blocks=draw.choice((0, 0, 1, 1, 2)),
        pool_order=draw.choice((v.PoolOrder.LRU, v.PoolOrder.LRU, v.PoolOrder.LIFO)),
    )


def list_strange_forks(names: Sequence[v.RequestId]) -> list[v.Event]:
    """Malformed ones, and those of nobody, or as somebody who is there."""
    return [
        v.Fork("", "x"),
        v.Fork(names[0], ""),
        v.Fork(names[0], "x", (-1,)),
        v.Fork("nobody", "x"),
        v.Fork(names[0], names[-1]),
        v.Fork(names[-1], names[0], (0,)),
        v.Fork(names[0], "x", (0,) * 99),
    ]
