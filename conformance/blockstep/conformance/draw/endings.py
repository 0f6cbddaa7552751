"""Endings: the requests that finish with their next token."""

from __future__ import annotations

from collections.abc import Mapping

from blockstep.spec import vocabulary as v


def list_ending(
    plan: v.Plan,
    live: Mapping[v.RequestId, v.Request],
    said: Mapping[v.RequestId, v.TokenIds],
) -> list[v.RequestId]:
    """Return the requests of a plan in flight that finish with their next token."""
    names = [row.request_id for row in plan.rows if row.request_id in live]
    return [name for name in names if len(said.get(name, ())) + 1 >= live[name].max_tokens]
