"""Branches: the request that is forked, and the outputs of its branch.

Most branches have the outputs of their parent, as beam search and parallel sampling do; some have
fewer, some more.
"""

from __future__ import annotations

from blockstep.conformance.draw.decisions import Draw
from blockstep.conformance.draw.memory import Memory
from blockstep.spec import vocabulary as v


def draw_fork(client: Memory, child_id: v.RequestId, size: int, draw: Draw) -> v.Fork:
    """Draw a fork, most often of a request that can be forked; token ids are below `size`."""
    ready = list_ready(client)
    names = ready if ready and draw.chance(92) else [*client.live]
    name = draw.choice(names or ["nobody"])
    asked = client.live.get(name, v.Request(name, (0,)))
    outputs = draw_outputs(client.said.get(name, ()), asked.max_tokens, size, draw)
    return v.Fork(name, child_id, outputs)


def list_ready(client: Memory) -> list[v.RequestId]:
    """Return the requests that can be forked: with outputs, and without a row in flight."""
    flying = {row.request_id for plan in client.plans for row in plan.rows}
    begun = [name for name in client.live if client.said.get(name)]
    return [name for name in begun if name not in flying and name not in client.sessions]


def draw_outputs(outputs: v.TokenIds, max_tokens: int, size: int, draw: Draw) -> v.TokenIds:
    """Draw the outputs of a branch: those of its parent, one of them changed, more, or fewer.

    They seldom reach `max_tokens`, since such a branch has nothing left to generate.
    """
    token = draw.integer(0, size - 1)
    cut = outputs[: draw.integer(0, len(outputs))]
    other = (*outputs[:-1], token)
    anew = (token, *outputs[1:])
    told = draw.choice(
        (outputs, outputs, other, other, anew, (*outputs, token), cut, (*cut, token), ()),
    )
    return told if draw.chance(4) else told[: max_tokens - 1]
