"""Stillness: what an event is not about stays as it is (P18), and a reset is complete (P25)."""

from __future__ import annotations

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.sentence import (
    Complaint,
    Complaints,
    differing,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec import vocabulary as v

_POOL = ("ref_counts", "free_queue", "block_keys", "cached")
_QUEUES = ("waiting", "skipped_waiting", "running")
_FRAMES = ("frames_in_flight", "next_frame_id", "finished_req_ids", "prev_scheduled_req_ids")

_STILL: dict[type, tuple[str, ...]] = {
    v.Submit: ("pause_state", "running", *_POOL, *_FRAMES),
    v.Drafts: ("pause_state", *_QUEUES, *_POOL, *_FRAMES),
    v.GrammarReady: ("pause_state", *_QUEUES, *_POOL, *_FRAMES),
    v.SetPause: ("requests", *_QUEUES, *_POOL, *_FRAMES),
    v.Schedule: ("pause_state",),
    v.Commit: ("pause_state", "block_keys", "cached", "next_frame_id", "prev_scheduled_req_ids"),
    v.Abort: (
        "pause_state",
        "block_keys",
        "cached",
        "frames_in_flight",
        "next_frame_id",
        "prev_scheduled_req_ids",
    ),
    v.Reset: ("pause_state", "frames_in_flight", "next_frame_id", "finished_req_ids"),
}
"""Fields of a state that an accepted event leaves alone, by type of event."""

_STILL_ASYNC = {
    **_STILL,
    # What it may publish is said by `only_verified_blocks_are_published`.
    v.Commit: tuple(name for name in _STILL[v.Commit] if name not in ("block_keys", "cached")),
}
"""Likewise under asynchronous scheduling, where a commit publishes blocks."""


@sentence("P18", *_STILL)
def event_leaves_alone_what_it_is_not_about(step: Step, _ledger: Ledger) -> Complaints:
    """An event changes only what it is about: an abort no frame, a pause no queue, and so on."""
    before, after = step.before, step.after
    found = []
    still = _STILL_ASYNC if step.config.async_scheduling else _STILL
    for name in still[type(step.event)]:
        old, new = getattr(before, name), getattr(after, name)
        if old is not new and old != new:
            what = f"{type(step.event).__name__} changed {name}"
            found.append(unequal(what, name, old, new))
    return found


@sentence("P18", v.Submit, v.Drafts, v.GrammarReady, v.Abort)
def event_leaves_other_requests_alone(step: Step, _ledger: Ledger) -> Complaints:
    """Requests that an event does not name, or whose part in it was dropped, are as before."""
    concerned = _concerned(step)
    for name, old in step.old.items():
        new = step.new.get(name)
        if name not in concerned and new is not old and new != old:
            yield unequal(f"{name!r} changed", f"request {name}", old, new)
        elif (
            new is not None
            and isinstance(step.event, v.Drafts | v.GrammarReady)
            and _besides(step, old) != _besides(step, new)
        ):
            yield unequal(f"{name!r} changed in more than it should", f"request {name}", old, new)


def _concerned(step: Step) -> tuple[v.RequestId, ...]:
    if isinstance(step.observation, v.Aborted | v.DraftsTaken):
        return step.observation.request_ids
    return (step.event.request_id,) if isinstance(step.event, v.GrammarReady) else ()


def _besides(step: Step, request: v.RequestSnapshot) -> list[object]:
    """All fields of a request but the one that the event may change."""
    field = "spec_token_ids" if isinstance(step.event, v.Drafts) else "grammar_ready"
    return [getattr(request, name) for name in type(request).__dataclass_fields__ if name != field]


@sentence("P18", v.GrammarReady, v.SetPause)
def signal_is_remembered(step: Step, _ledger: Ledger) -> Complaints:
    """A compiled grammar is marked as ready, also twice; a pause state is as set."""
    if isinstance(step.event, v.SetPause):
        return differing("pause_state", step.event.pause_state, step.after.pause_state)
    assert isinstance(step.event, v.GrammarReady)
    request = step.new.get(step.event.request_id)
    if request is not None and request.grammar_ready:
        return ()
    return [Complaint(f"the grammar of {step.event.request_id!r} is not marked as ready")]


@sentence("P18", v.Abort)
def abort_ends_exactly_the_unfinished_it_names(step: Step, ledger: Ledger) -> Complaints:
    """Those named and unfinished end, once each, in the order named; unknown ids do nothing."""
    assert isinstance(step.event, v.Abort)
    assert isinstance(step.observation, v.Aborted)
    expected = tuple(dict.fromkeys(name for name in step.event.request_ids if name in ledger.lives))
    yield from differing("aborted", expected, step.observation.request_ids)
    left = step.old.keys() - set(expected)
    yield from differing("unfinished", sorted(left), sorted(step.new))


@sentence("P25", v.Reset)
def reset_empties_the_cache(step: Step, _ledger: Ledger) -> Complaints:
    """After a reset that succeeded no block can be found, whoever published it."""
    assert isinstance(step.observation, v.ResetDone)
    if not step.observation.success:
        return ()
    keyed = [block for block, key in enumerate(step.after.block_keys) if key is not None]
    if keyed or step.after.cached:
        return [Complaint(f"blocks {keyed} still carry keys after the reset")]
    return ()


@sentence("P25", v.Commit)
def answer_from_before_a_reset_publishes_nothing(step: Step, ledger: Ledger) -> Complaints:
    """What a frame computed that was dispatched before the reset cannot be hit after it."""
    assert isinstance(step.event, v.Commit)
    before, after = step.before.block_keys, step.after.block_keys
    if step.event.frame_id >= ledger.first_frame_since_reset or after is before:
        return ()
    if after == before and step.after.cached == step.before.cached:
        return ()
    return [Complaint(f"frame {step.event.frame_id}, planned before the reset, published a block")]


@sentence("P25", v.Reset)
def reset_succeeds_unless_blocks_are_held(step: Step, _ledger: Ledger) -> Complaints:
    """By force always; otherwise only if nobody holds a block."""
    assert isinstance(step.event, v.Reset)
    assert isinstance(step.observation, v.ResetDone)
    all_free = len(step.before.free_queue) == step.config.num_usable_blocks
    expected = step.event.reset_running_requests or all_free
    return differing("success", expected, step.observation.success)


@sentence("P25", v.Reset)
def forced_reset_preempts_all_who_run(step: Step, _ledger: Ledger) -> Complaints:
    """By force nobody runs on with KV from before; otherwise no request changes."""
    assert isinstance(step.event, v.Reset)
    after = step.after
    if not step.event.reset_running_requests:
        for name in (*_QUEUES, "requests", "prev_scheduled_req_ids"):
            expected = getattr(step.before, name)
            yield from differing(name, expected, getattr(after, name))
        return
    if after.running or after.prev_scheduled_req_ids or not _all_free(step, after):
        yield Complaint("after a forced reset somebody still runs or holds a block")
    for name, old in step.old.items():
        if name not in step.before.running and step.new.get(name) != old:
            yield Complaint(f"a reset changed {name!r}, which did not run")


@sentence("P25", v.Reset)
def refused_reset_changes_nothing(step: Step, _ledger: Ledger) -> Complaints:
    """A reset that says no leaves the cache as it is."""
    assert isinstance(step.observation, v.ResetDone)
    if step.observation.success or step.before == step.after:
        return ()
    return [Complaint("the reset did not succeed, but the state changed")]


def _all_free(step: Step, snapshot: v.Snapshot) -> bool:
    return len(snapshot.free_queue) == step.config.num_usable_blocks
