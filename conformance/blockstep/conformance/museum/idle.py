"""Seeded bugs in `has_work`: the engine loop sleeps too early or never."""

from __future__ import annotations

from blockstep.conformance.museum.exhibit import Page
from blockstep.spec.core.rules import Rules
from blockstep.spec.idle import has_work
from blockstep.spec.vocabulary import Config

PAGE = Page()
LOOP = "vLLM 0.19.1 has_requests"
SHOWN = "books: only the state shows whether the loop may sleep"


@PAGE.exhibit("the engine loop sleeps while requests wait", LOOP, "P10", invisible_if_hidden=SHOWN)
def waiting_are_no_work(rules: Rules, _config: Config) -> Rules:
    """Only running requests count as work, so the last preempted one is never scheduled again."""
    return rules.replacing(has_work, lambda state: bool(state.finished_req_ids or state.running))


@PAGE.exhibit(
    "the engine loop keeps running while everything is paused",
    LOOP,
    "P10",
    invisible_if_hidden=SHOWN,
)
def paused_are_work(rules: Rules, _config: Config) -> Rules:
    """It makes empty plans as fast as it can."""
    return rules.replacing(has_work, lambda state: bool(state.finished_req_ids or state.requests))
