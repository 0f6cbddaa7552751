"""Branches: who goes on as two, and with which outputs.

Most branch where the parent stands, as a beam or a sample does; some earlier, some with more than
it has.
"""

from __future__ import annotations

from blockstep.conformance.draw.decisions import Draw
from blockstep.conformance.draw.memory import Memory
from blockstep.spec import vocabulary as v


def draw_fork(client: Memory, child_id: v.RequestId, size: int, draw: Draw) -> v.Fork:
    """One that can goes on as two, most often; tokens are below `size`."""
    ready = list_ready(client)
    names = ready if ready and draw.chance(92) else [*client.live]
    name = draw.choice(names or ["nobody"])
    asked = client.live.get(name, v.Request(name, (0,)))
    outputs = draw_outputs(client.said.get(name, ()), asked.max_tokens, size, draw)
    return v.Fork(name, child_id, outputs)


def list_ready(client: Memory) -> list[v.RequestId]:
    """Whoever can go on as two: it has said something, and no frame in flight has a row of it."""
    flying = {row.request_id for plan in client.plans for row in plan.rows}
    begun = [name for name in client.live if client.said.get(name)]
    return [name for name in begun if name not in flying and name not in client.sessions]


def draw_outputs(outputs: v.TokenIds, max_tokens: int, size: int, draw: Draw) -> v.TokenIds:
    """What a branch has said: what its parent has, with another token, less, or more.

    Seldom as much as a request may say: nobody goes on behind that.
    """
    token = draw.integer(0, size - 1)
    cut = outputs[: draw.integer(0, len(outputs))]
    other = (*outputs[:-1], token)
    anew = (token, *outputs[1:])
    told = draw.choice(
        (outputs, outputs, other, other, anew, (*outputs, token), cut, (*cut, token), ()),
    )
    return told if draw.chance(4) else told[: max_tokens - 1]
