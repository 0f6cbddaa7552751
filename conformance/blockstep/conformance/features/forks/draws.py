"""Configs with forks, the request that is forked, and the outputs of its branch.

Most branches have the outputs of their parent, as beam search and parallel sampling do; some have
fewer, some more.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw, Memory
from blockstep.conformance.draw.feature import Draws, Late, Situation
from blockstep.conformance.draw.groups import leave_states_out
from blockstep.conformance.draw.requests import request_name, shuffled
from blockstep.conformance.draw.view import View, WeightedAction
from blockstep.conformance.features.forks import FEATURE
from blockstep.conformance.protocol.feature import settle_states
from blockstep.conformance.protocol.features import HOSTILE, list_apart
from blockstep.conformance.protocol.program import Action
from blockstep.spec import vocabulary as v


def add_to_config(late: Late) -> None:
    """Allow forks, and draw a watermark and the order of the free queue."""
    config = late.config
    if config.is_encoder_decoder:
        config = settle_states(replace(config, is_encoder_decoder=False))
    late.config = draw_pool(replace(leave_states_out(config), enable_forks=True), late.draw)


def finish_config(late: Late) -> None:
    """Sometimes draw a watermark and the order of the free queue for a config without forks.

    They have the same capability as forks, but work with features that forks do not go with, too.
    """
    config = late.config
    if config.enable_forks or FEATURE.name in late.wish.never or not late.takes(FEATURE):
        return
    beside = config.encoder_cache_size or not goes_with(late)
    if beside and late.draw.chance(30):
        late.config = draw_pool(config, late.draw)


def goes_with(late: Late) -> bool:
    """Return whether the config has no late feature that no run has together with forks."""
    apart = [other for other in list_apart(FEATURE.name) if other.is_late]
    return not any(other.is_asked_by(late.config) for other in apart)


def draw_pool(config: v.Config, draw: Draw) -> v.Config:
    """Return the config with a watermark, with a LIFO free queue, or unchanged."""
    return replace(
        config,
        watermark_blocks=draw.choice((0, 0, 1, 1, 2)),
        pool_order=draw.choice((v.PoolOrder.LRU, v.PoolOrder.LRU, v.PoolOrder.LIFO)),
    )


def fork(view: View, draw: Draw) -> Action:
    """Fork a running request; sometimes one that cannot be forked, or an unknown id."""
    child_id, swarm = request_name(shuffled(view.num_submitted)), view.swarm
    if swarm.has(HOSTILE) and draw.chance(4):
        child_id = draw.choice([*view.client.live, *view.client.ended[-2:], child_id])
        if view.client.ended and draw.chance(50):  # its parent is gone
            return v.Fork(view.client.ended[-1], child_id)
    return draw_fork(view.client, child_id, swarm.vocabulary_size, draw)


def draw_fork(client: Memory, child_id: v.RequestId, size: int, draw: Draw) -> v.Fork:
    """Draw a fork, most often of a request that can be forked; token ids are below `size`."""
    ready = list_ready(client)
    names = ready if ready and draw.chance(92) else [*client.live]
    name = draw.choice(names or ["nobody"])
    asked = client.live.get(name, v.Request(name, (0,)))
    outputs = draw_outputs(client.delivered.get(name, ()), asked.max_tokens, size, draw)
    return v.Fork(name, child_id, outputs)


def list_ready(client: Memory) -> list[v.RequestId]:
    """Return the requests that can be forked: with outputs, and without a row in flight."""
    flying = {row.request_id for plan in client.plans for row in plan.rows}
    begun = [name for name in client.live if client.delivered.get(name)]
    return [name for name in begun if name not in flying and name not in client.sessions]


def draw_outputs(outputs: v.TokenIds, max_tokens: int, size: int, draw: Draw) -> v.TokenIds:
    """Draw the outputs of a branch: those of its parent, one of them changed, more, or fewer.

    They seldom reach `max_tokens`, since such a branch has nothing left to generate.
    """
    token = draw.integer(0, size - 1)
    cut = outputs[: draw.integer(0, len(outputs))]
    other = (*outputs[:-1], token)
    anew = (token, *outputs[1:])
    drawn = draw.choice(
        (outputs, outputs, other, other, anew, (*outputs, token), cut, (*cut, token), ()),
    )
    return drawn if draw.chance(4) else drawn[: max_tokens - 1]


def _may_fork(view: View) -> bool:
    room = len(view.client.live) < view.swarm.preset.num_requests_max + 2
    return bool(view.client.live) and room


def _weigh_forks(weight: int, view: View) -> int:
    return weight * 3 if list_ready(view.client) else 2


def list_mistakes(situation: Situation) -> list[v.Event]:
    """Return malformed forks, forks of unknown requests, and forks under an id that exists."""
    names = situation.names
    return [
        v.Fork("", "x"),
        v.Fork(names[0], ""),
        v.Fork(names[0], "x", (-1,)),
        v.Fork("nobody", "x"),
        v.Fork(names[0], names[-1]),
        v.Fork(names[-1], names[0], (0,)),
        v.Fork(names[0], "x", (0,) * 99),
    ]


DRAWS = Draws(
    add_to_config=add_to_config,
    finish_config=finish_config,
    goes_with=goes_with,
    waits=True,
    actions={"fork": WeightedAction(fork, 16, FEATURE, _weigh_forks, _may_fork)},
    list_mistakes=list_mistakes,
)
