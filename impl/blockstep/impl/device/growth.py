"""Growth: moves the state into longer tensors, between two launches.

On a GPU the graphs must then be captured again; a serving host makes tensors long enough at first.
"""

from __future__ import annotations

from math import prod

import numpy as np

from blockstep.impl.device.dims import Dims
from blockstep.impl.device.layout import NONE, State, make_state, shape_of


def check_reach(d: Dims) -> None:
    """Check that tensors are small enough for kernels, which count elements in int32.

    Raises:
        ValueError: a tensor would have 2**31 elements or more.
    """
    for name in State._fields:
        shape = shape_of(name, d)
        if prod(shape) >= 1 << 31:
            count = " x ".join(map(str, shape))
            raise ValueError(
                f"{name} would have {count} elements, but kernels address fewer than 2**31: "
                "let fewer requests wait, or lower max_model_len"
            )


def grow(old: State, was: Dims, d: Dims) -> State:
    """Return the state in tensors with more slots, nodes or stops; commands must have been
    executed."""
    check_reach(d)
    made = make_state(d)
    for name in State._fields:
        before, after = getattr(old, name), getattr(made, name)
        after[tuple(slice(length) for length in before.shape)] = before
    fresh = np.arange(was.nodes, d.nodes, dtype=np.int32)
    count = int(old.num_free_nodes[0])
    carried = old.node >= 0
    group, node = np.divmod(old.node[carried], was.nodes)
    made.node[carried] = group * d.nodes + node
    made.free_nodes[:] = NONE
    made.free_nodes[: count + len(fresh)] = np.concatenate([old.free_nodes[:count], fresh])
    made.num_free_nodes[:] = count + len(fresh)
    made.buckets[:] = NONE
    used = np.ones(d.nodes, bool)
    used[made.free_nodes[: count + len(fresh)]] = False
    for node in used.nonzero()[0].tolist():
        bucket = int(made.node_hash[node]) & (d.buckets - 1)
        made.next_node[node], made.buckets[bucket] = made.buckets[bucket], node
    made.command_at[:] = made.command_end[:]
    return made
