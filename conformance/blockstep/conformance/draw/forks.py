"""Forks: requests that go on as several, and how a branch's outputs differ from its parent's.

Most branch where the parent stands, as a beam or a sample does; some earlier, some with more than
it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.draw.decisions import Draw
from blockstep.conformance.protocol.features import settle_states, without_states
from blockstep.spec import vocabulary as v


def draw_forks(config: v.Config, draw: Draw) -> v.Config:
    """The config with forks; some leave blocks to those who run, some take what was freed last."""
    if config.is_encoder_decoder:
        config = settle_states(replace(config, is_encoder_decoder=False))
    return replace(
        without_states(config),
        enable_forks=True,
        watermark_blocks=draw.choice((0, 0, 1, 1, 2)),
        pool_order=draw.choice((v.PoolOrder.LRU, v.PoolOrder.LRU, v.PoolOrder.LIFO)),
    )


def draw_outputs(outputs: v.TokenIds, max_tokens: int, size: int, draw: Draw) -> v.TokenIds:
    """What a branch has said: what its parent has, with another last token, less, or more.

    Seldom as much as a request may say: nobody goes on behind that.
    """
    token = draw.integer(0, size - 1)
    cut = outputs[: draw.integer(0, len(outputs))]
    other = (*outputs[:-1], token)
    told = draw.choice(
        (outputs, outputs, other, other, (*outputs, token), cut, (*cut, token), ()),
    )
    return told if draw.chance(4) else told[: max_tokens - 1]


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
