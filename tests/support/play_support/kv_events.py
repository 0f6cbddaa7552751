"""KV events: plays with a log of KV events, and the checks of the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec.vocabulary import (
    AllBlocksCleared,
    BlockKey,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Outputs,
    Reset,
    ResetDone,
    Schedule,
    Submit,
)
from play_support.play import CONFIG, A, B, Bend, Case, Play, nothing, observed, request

NEVER = BlockKey(None, (8, 8))
"""The key of a block that was never stored."""
LAST = request("D", *[6] * 14)
"""A request of seven blocks: one block of another request stays in the pool."""


def storing() -> Play:
    """The log reports two blocks of A as stored."""
    return Play(replace(CONFIG, enable_kv_cache_events=True)).do(Submit(A), Schedule()).commit()


def storing_more() -> Play:
    """The log reports one more block of A as stored."""
    return storing().do(Schedule()).commit()


def evicting() -> Play:
    """D takes blocks of A, and the log reports these as removed."""
    return storing_more().run(1).do(Submit(LAST)).run(1).do(Schedule()).commit()


def resetting() -> Play:
    """A reset with a plan in flight: the log has the plan's blocks, then `AllBlocksCleared`."""
    return storing().do(Submit(B), Schedule(), Reset(reset_running_requests=True))


def list_events(step: Step) -> tuple[KVEvent, ...]:
    assert isinstance(step.observation, Outputs | ResetDone)
    return step.observation.kv_events


def silent(step: Step) -> Step:
    """Return the step without KV events."""
    return observed(step, kv_events=())


def removing_another(step: Step) -> Step:
    """Return the step with the removal of a block that was never stored."""
    return observed(step, kv_events=(BlockRemoved((NEVER,)), *list_events(step)))


def stored_as(**fields: Any) -> Bend:
    """Return a bend: stored blocks are reported with other fields."""

    def bend(step: Step) -> Step:
        events = [
            replace(event, **fields) if isinstance(event, BlockStored) else event
            for event in list_events(step)
        ]
        assert tuple(events) != list_events(step)
        return observed(step, kv_events=tuple(events))

    return bend


ALONE: list[Case] = [
    ("kv_events_rebuild_the_cache", storing, nothing, silent),
    ("kv_events_remove_only_stored_blocks", storing, nothing, removing_another),
    ("stored_events_match_their_blocks", storing, nothing, stored_as(token_ids=(1, 2, 3))),
]


def out_of_order(step: Step) -> Step:
    """Return the step with the keys of each `BlockStored` in reverse order."""
    events = [
        replace(event, keys=event.keys[::-1]) if isinstance(event, BlockStored) else event
        for event in list_events(step)
    ]
    return observed(step, kv_events=tuple(events))


def together_with_nothing(step: Step) -> Step:
    return observed(step, kv_events=(*list_events(step), BlockStored((), None, (), 2)))


def of_no_group(step: Step) -> Step:
    (event,) = list_events(step)
    assert isinstance(event, BlockStored)
    first, *others = event.keys
    return observed(step, kv_events=(replace(event, keys=(first.in_group(3), *others)),))


def stored_once_more(step: Step) -> Step:
    """Return the step with each event twice, as if there were a second copy of the block."""
    return observed(step, kv_events=(*list_events(step), *list_events(step)))


def evicted_in_silence(step: Step) -> Step:
    kept = [event for event in list_events(step) if not isinstance(event, BlockRemoved)]
    assert len(kept) < len(list_events(step))
    return observed(step, kv_events=tuple(kept))


def not_cleared(step: Step) -> Step:
    kept = [event for event in list_events(step) if not isinstance(event, AllBlocksCleared)]
    assert len(kept) < len(list_events(step))
    return observed(step, kv_events=tuple(kept))


def refused(step: Step) -> Step:
    """Return the step as a refused reset that has KV events."""
    return observed(step, success=False)


EACH_KIND: list[tuple[str, Callable[[], Play], Bend]] = [
    ("kv_events_rebuild_the_cache", storing, stored_once_more),
    ("kv_events_rebuild_the_cache", storing_more, silent),
    ("kv_events_rebuild_the_cache", evicting, evicted_in_silence),
    ("kv_events_rebuild_the_cache", resetting, silent),
    ("kv_events_rebuild_the_cache", resetting, not_cleared),
    ("kv_events_rebuild_the_cache", resetting, refused),
    ("kv_events_remove_only_stored_blocks", storing_more, removing_another),
    ("kv_events_remove_only_stored_blocks", resetting, removing_another),
    ("stored_events_match_their_blocks", storing_more, stored_as(parent=None)),
    ("stored_events_match_their_blocks", storing_more, stored_as(parent=NEVER)),
    ("stored_events_match_their_blocks", storing, stored_as(block_size=4)),
    ("stored_events_match_their_blocks", storing, stored_as(adapter="x")),
    ("stored_events_match_their_blocks", storing, out_of_order),
    ("stored_events_match_their_blocks", storing, together_with_nothing),
    ("stored_events_match_their_blocks", storing, of_no_group),
    ("stored_events_match_their_blocks", resetting, stored_as(token_ids=())),
]
"""Wrong steps of each kind of event, and with each field of a KV event changed."""
