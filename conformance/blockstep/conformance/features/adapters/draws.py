"""Limits on adapters, and requests with adapters beyond the limit."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.feature import Draws, Late
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.protocol.features import KEYS
from blockstep.spec import vocabulary as v


def add_to_config(late: Late) -> None:
    """Limit the adapters to one or two."""
    late.config = replace(late.config, max_loras=late.draw.choice((1, 1, 2)))


def goes_with(late: Late) -> bool:
    """Return whether requests may have adapters, which are keys."""
    return KEYS.name not in late.wish.never


def add_to_request(swarm: Swarm, draw: Draw, request: v.Request, _goes_on: bool) -> v.Request:
    """Return the request with an adapter, of one more than the limit, or with none."""
    adapter = draw.choice((None, "x", "y", "z", *"xyz"[: swarm.config.max_loras + 1]))
    return replace(request, adapter=adapter)


DRAWS = Draws(add_to_config=add_to_config, goes_with=goes_with, add_to_request=add_to_request)
