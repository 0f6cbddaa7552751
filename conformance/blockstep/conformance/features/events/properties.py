"""Telling: P20 the log of KV events alone describes the prefix cache, at every answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from blockstep.conformance.judge.kv_event_follower import Follower
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import (
    Complaint,
    Complaints,
    difference,
    differing,
    once_a_step,
    sentence,
    unequal,
)
from blockstep.conformance.protocol.compare import name_key
from blockstep.spec import vocabulary as v

_WITH_EVENTS = (v.Outputs, v.ResetDone)


def get_kv_events(step: Step) -> tuple[v.KVEvent, ...]:
    """The KV events of an answer; () if its type has none."""
    seen = step.observation
    return seen.kv_events if isinstance(seen, _WITH_EVENTS) else ()


@once_a_step
def followed(step: Step, history: History) -> tuple[Counter[v.BlockKey], list[v.BlockKey]]:
    """The copies of each key by the log after a step, and the keys removed that had no copy."""
    follower: Follower = history.follower.copy()
    unknown = follower.follow(get_kv_events(step))
    return follower.copies, unknown


def count_findable(snapshot: v.Snapshot) -> Counter[v.BlockKey]:
    """The number of copies of each key in a state."""
    return Counter({key: len(blocks) for key, blocks in snapshot.cached.items()})


@sentence("P20", v.Commit, v.TransfersReported, v.Reset, needs="enable_kv_cache_events")
def kv_events_rebuild_the_cache(step: Step, history: History) -> Complaints:
    """After each answer with KV events, the log describes exactly the cached blocks.

    Copies of one key are counted. A reset that failed has no events, nor has an engine that was not
    asked for them. A plan without rows, which has no commit, has nothing to log (P7).
    """
    if isinstance(step.observation, v.ResetDone) and not step.observation.success:
        yield from differing("kv_events of a reset that was refused", (), get_kv_events(step))
        return
    copies, _ = followed(step, history)
    findable = count_findable(step.after)
    if copies != findable:
        yield Complaint(
            "the log and the prefix cache differ",
            tuple(
                difference(f"copies of {name_key(key)}", findable[key], copies[key])
                for key in _list_differing(findable, copies)
            ),
        )


@sentence("P20", v.Commit, v.TransfersReported, v.Reset, needs="enable_kv_cache_events")
def kv_events_remove_only_stored_blocks(step: Step, history: History) -> Complaints:
    """A removed block was stored before, in the order of the log."""
    _, unknown = followed(step, history) if get_kv_events(step) else ({}, [])
    for key in unknown:
        yield Complaint(f"{name_key(key)} is removed, and no copy of it is left")


@sentence("P20", v.Commit, v.TransfersReported, v.Reset, needs="enable_kv_cache_events")
def stored_events_match_their_blocks(step: Step, _history: History) -> Complaints:
    """Blocks stored by one event follow each other, and the event has their parent and tokens."""
    for event in get_kv_events(step):
        if isinstance(event, v.BlockStored):
            yield from _judge_stored(step, event)


def _judge_stored(step: Step, event: v.BlockStored) -> Iterator[Complaint]:
    if not event.keys:
        yield Complaint("an event stores no block")
        return
    first = event.keys[0]
    sizes = dict(enumerate(step.block_sizes))
    size = sizes.get(first.group, 0)
    if {key.group for key in event.keys} != {first.group} or not size:
        yield Complaint(f"an event stores blocks of groups {[key.group for key in event.keys]}")
        return
    links = size // step.config.block_size
    for before, key in pairwise(event.keys):
        if _behind(key, links) != before:
            yield Complaint(f"{name_key(key)} is stored after {name_key(before)}")
    due = {
        "parent": _behind(first, links),
        "token_ids": tuple([token for key in event.keys for token in _tokens_of(key, links)]),
        "block_size": size,
        "adapter": first.adapter,
        "medium": v.MEDIUM_GPU,
    }
    for name, right in due.items():
        seen = getattr(event, name)
        if seen != right:
            yield unequal(f"{name_key(first)} is stored with another {name}", name, right, seen)


def _behind(key: v.BlockKey, links: int) -> v.BlockKey | None:
    """The key of the block before this one in its group, whose blocks have `links` keys each."""
    before: v.BlockKey | None = key
    for _ in range(links):
        before = before and before.parent
    return before and before.in_group(key.group)


def _tokens_of(key: v.BlockKey, links: int) -> list[v.TokenId]:
    """The tokens of the block that ends with this key."""
    return [token for link in key.chain()[-links:] for token in link.token_ids]


def _list_differing(
    left: Mapping[v.BlockKey, int], right: Mapping[v.BlockKey, int]
) -> list[v.BlockKey]:
    """Keys with different numbers of copies."""
    return [key for key in {**left, **right} if left.get(key, 0) != right.get(key, 0)]
