"""Rejections: P7 a rejected event changes nothing, P11 requests that never fit are rejected, P18
stale events are rejected.

Also stillness: an event changes only what it is about (P18), and a reset is complete (P25).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from blockstep.conformance.features.forks.properties import problem_of_fork
from blockstep.conformance.judge.properties.history import WHOLE, FlightRow, History, RequestHistory
from blockstep.conformance.judge.properties.observed_step import Step, keeps_blocks
from blockstep.conformance.judge.properties.property_check import (
    Complaint,
    Complaints,
    difference,
    differing,
    differing_requests,
    once_a_step,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.queue_replay import find_keeper
from blockstep.conformance.judge.properties.token_amounts import least_need, most_need
from blockstep.conformance.protocol.features import SIGNAL_OF
from blockstep.conformance.protocol.session_tracker import find_problem_of_chunk, get_longest
from blockstep.spec import vocabulary as v


@sentence("P7", v.Rejected)
def rejected_event_changes_nothing(step: Step, _history: History) -> Complaints:
    """A rejected event leaves the state as it is, statistics included."""
    before, after = step.before, step.after
    if after is before or after == before:
        return ()
    names = [
        name
        for name in type(before).__dataclass_fields__
        if getattr(before, name) != getattr(after, name)
    ]
    return [
        Complaint(
            f"a rejected event changed {', '.join(names)}",
            tuple(difference(name, getattr(before, name), getattr(after, name)) for name in names),
        )
    ]


_FOR_SIZE = (v.RejectCode.PROMPT_TOO_LONG, v.RejectCode.NEVER_FITS)


@sentence("P11", v.Submit, v.StreamingUpdate, fixes="how large a request can be served")
def accepted_request_fits_an_empty_pool(step: Step, history: History) -> Complaints:
    """An accepted request can be served: at its longest it fits the pool when no other request
    runs."""
    code = _due(step, history)
    return [Complaint(f"accepted, but can never be served: {code}")] if code in _FOR_SIZE else ()


@sentence("P11", v.Rejected, fixes="how large a request can be served")
def request_is_refused_for_its_size_only_if_it_never_fits(
    step: Step, history: History
) -> Complaints:
    """PROMPT_TOO_LONG and NEVER_FITS are answered only where they are true."""
    assert isinstance(step.observation, v.Rejected)
    code, due = step.observation.code, _due(step, history)
    if code not in _FOR_SIZE or code is due:
        return ()
    if code is v.RejectCode.NEVER_FITS and _may_be_too_large(step.config, step.event, history):
        return ()
    return [Complaint(f"rejected as {code}, which is not true")]


@sentence("P18", v.Rejected, fixes="which of several problems a rejection names")
def rejection_names_the_problem(step: Step, history: History) -> Complaints:
    """The code of a rejection is the one that the event deserves. P11 is about the codes for
    size."""
    assert isinstance(step.observation, v.Rejected)
    expected = _due(step, history)
    if expected is step.observation.code or step.observation.code in _FOR_SIZE:
        return ()
    differences = (difference("code", expected or "none", step.observation.code),)
    return [Complaint("the event was rejected with another code", differences)]


@sentence("P18", *[kind for kind in v.EVENT_TYPES if kind is not v.EncoderReset])
def stale_or_wrong_event_is_rejected(step: Step, history: History) -> Complaints:
    """A malformed, unknown, late or repeated event is rejected. P11 is about requests that are too
    large."""
    expected = _due(step, history)
    if expected is None or expected in _FOR_SIZE:
        return ()
    return [unequal("the event was accepted", "answer", expected, "accepted")]


@once_a_step
def _due(step: Step, history: History) -> v.RejectCode | None:
    return due_refusal(step.config, step.event, history, step.before.encoder)


def due_refusal(
    config: v.Config, event: object, history: History, kept: v.EncoderSnapshot | None = None
) -> v.RejectCode | None:
    """The code with which an event must be rejected now; None if it must be accepted. `kept`: the
    encoder cache before the event."""
    problem = v.event_problem(event)
    if problem is not None:
        return problem.code
    match event:
        case v.Submit(request=request):
            if request.request_id in history.lives:
                return v.RejectCode.DUPLICATE_REQUEST
            if history.in_flight(request.request_id) or request.request_id in history.store.held:
                return v.RejectCode.REQUEST_IN_FLIGHT
            return _never_served(config, request) or _has_other_size(request, history, kept)
        case v.Schedule() if len(history.frames) >= config.max_frames_in_flight:
            return v.RejectCode.PIPELINE_FULL
        case v.Commit(frame_id=frame_id, sampled=sampled):
            if frame_id not in history.frames:
                return v.RejectCode.UNKNOWN_FRAME
            if frame_id != next(iter(history.frames)):
                return v.RejectCode.FRAME_OUT_OF_ORDER
            frame = history.frames[frame_id]
            is_answer = _answers(config, sampled, frame) and _is_allowed(sampled, frame, history)
            return None if is_answer else v.RejectCode.BAD_RESULT
        case v.StreamingUpdate(request=request):
            problem_of_it = _problem_of_going_on(config, request, history)
            if problem_of_it is not None or not request.resumable:
                return problem_of_it
            return _has_other_size(request, history, kept)
        case v.GrammarBitmask():
            return _problem_of_asking(config, event, history)
        case v.Fork():
            return problem_of_fork(config, event, history)
        case v.Drafts(drafts=drafts):
            return None if _may_be_drafts(config, drafts) else v.RejectCode.BAD_DRAFTS
        case v.GrammarReady(request_id=request_id) | v.GrammarFailed(request_id=request_id):
            if request_id not in history.lives:
                return v.RejectCode.UNKNOWN_REQUEST
            if not history.lives[request_id].request.structured_output:
                return v.RejectCode.NOT_STRUCTURED
    return None


def _never_served(config: v.Config, request: v.Request) -> v.RejectCode | None:
    problem = v.item_problem(config, request)
    if problem is not None:
        return problem.code
    if len(request.prompt_token_ids) >= config.max_model_len:
        return v.RejectCode.PROMPT_TOO_LONG
    if least_need(config, request) > config.num_usable_blocks:
        return v.RejectCode.NEVER_FITS
    return None


def _has_other_size(
    request: v.Request, history: History, kept: v.EncoderSnapshot | None
) -> v.RejectCode | None:
    """BAD_REQUEST if an item has another number of embeddings than its identifier is known to
    have."""
    if kept is None or not request.items:
        return None
    sizes = {(entry.identifier, entry.num_embeds) for entry in kept.entries}
    for life in history.lives.values():
        chunks = () if life.session is None else life.session.updates
        for asked in (life.request, *chunks):
            sizes |= {(item.identifier, item.num_embeds) for item in asked.items}
    known = {name for name, _ in sizes}
    wrong = any(
        item.identifier in known and (item.identifier, item.num_embeds) not in sizes
        for item in request.items
    )
    return v.RejectCode.BAD_REQUEST if wrong else None


def _may_be_too_large(config: v.Config, event: v.Event, history: History) -> bool:
    """Whether a request fits depends on how windows are counted, so that rejecting it is
    allowed."""
    if not config.groups or not isinstance(event, v.Submit | v.StreamingUpdate):
        return False
    request = event.request
    if isinstance(event, v.StreamingUpdate):
        request = _at_its_longest(config, history.lives[request.request_id], request)
    return most_need(config, request) > config.num_usable_blocks


def _answers(config: v.Config, sampled: Sequence[v.RowTokens], frame: Sequence[FlightRow]) -> bool:
    """Whether rows answer a frame: each request once, with tokens that it can have sampled.

    The accepted drafts cannot be compared where only the worker knows them.
    """
    tokens_of = {row.request_id: row.token_ids for row in sampled}
    if len(sampled) != len(frame) or tokens_of.keys() != {row.request_id for row in frame}:
        return False
    for row in frame:
        tokens = tokens_of[row.request_id]
        drafts = row.verified
        least, most = (1, 1 + len(drafts)) if row.samples else (0, 0)
        if not least <= len(tokens) <= most:
            return False
        is_known = not config.async_scheduling or row.verifiable is not None
        if is_known and tokens[:-1] != drafts[: max(len(tokens) - 1, 0)]:
            return False
    return True


def _is_allowed(
    sampled: Sequence[v.RowTokens], frame: Sequence[FlightRow], history: History
) -> bool:
    """Whether the grammars of unfinished requests allow the sampled tokens."""
    if not history.has_grammars:
        return True
    tokens_of = {row.request_id: row.token_ids for row in sampled}
    names = [row.request_id for row in frame if not row.is_dropped]
    lives = [history.lives[name] for name in names if name in history.lives]
    return not any(
        life.automaton is not None and life.find_place(tokens_of[life.request.request_id]) is None
        for life in lives
    )


def _problem_of_going_on(
    config: v.Config, update: v.Request, history: History
) -> v.RejectCode | None:
    """The code with which the next input of a session must be rejected; the limits hold for the
    whole of its prompt."""
    life = history.lives.get(update.request_id)
    if life is None:
        return v.RejectCode.UNKNOWN_REQUEST
    if life.session is None or life.session.is_closed:
        return v.RejectCode.NOT_RESUMABLE
    if not update.resumable:
        return None
    problem = find_problem_of_chunk(life.request, update)
    return problem or _never_served(config, _at_its_longest(config, life, update))


def _at_its_longest(config: v.Config, life: RequestHistory, update: v.Request) -> v.Request:
    """The longest request that a session may become with this input and those that wait before
    it."""
    assert life.session is not None, "only a session continues"
    return get_longest(config, life.request, life.output_token_ids, life.session, update)


def _problem_of_asking(
    config: v.Config, event: v.GrammarBitmask, history: History
) -> v.RejectCode | None:
    """The code with which a bitmask for a frame must be rejected now."""
    if event.frame_id not in history.frames:
        return v.RejectCode.UNKNOWN_FRAME
    names = [row.request_id for row in event.drafts]
    if (names and not config.async_scheduling) or len(set(names)) < len(names):
        return v.RejectCode.BAD_DRAFTS
    older = [rows for frame_id, rows in history.frames.items() if frame_id < event.frame_id]
    sampling = {
        row.request_id for rows in older for row in rows if row.samples and not row.is_dropped
    }
    masked = {row.request_id for row in history.list_masked(event.frame_id)}
    return v.RejectCode.GRAMMAR_BEHIND if masked & sampling else None


def _may_be_drafts(config: v.Config, drafts: Sequence[v.RowTokens]) -> bool:
    if config.spec_method is v.SpecMethod.NONE or config.async_scheduling:
        return False
    if any(len(row.token_ids) > config.num_speculative_tokens for row in drafts):
        return False
    return len({row.request_id for row in drafts}) == len(drafts)


_POOL = ("ref_counts", "free_queue", "block_keys", "cached")
_QUEUES = ("waiting", "skipped_waiting", "running")
_FRAMES = ("frames_in_flight", "next_frame_id", "finished_req_ids", "prev_scheduled_req_ids")

_STILL: dict[type, tuple[str, ...]] = {
    **dict.fromkeys(
        (v.GrammarBitmask, v.KVOffer, *SIGNAL_OF),
        ("pause_state", "requests", "encoder", *_QUEUES, *_POOL, *_FRAMES),
    ),
    v.Submit: ("pause_state", "running", "encoder", *_POOL, *_FRAMES),
    v.Drafts: ("pause_state", "encoder", *_QUEUES, *_POOL, *_FRAMES),
    v.GrammarReady: ("pause_state", "encoder", *_QUEUES, *_POOL, *_FRAMES),
    v.GrammarFailed: (
        *("pause_state", "block_keys", "cached"),
        *("frames_in_flight", "next_frame_id", "prev_scheduled_req_ids"),
    ),
    v.StreamingUpdate: (
        *("pause_state", "running", "block_keys", "cached"),
        *("frames_in_flight", "next_frame_id", "prev_scheduled_req_ids"),
    ),
    v.SetPause: ("requests", "encoder", *_QUEUES, *_POOL, *_FRAMES),
    v.EncoderReset: ("pause_state", "requests", *_QUEUES, *_POOL, *_FRAMES),
    v.TransfersReported: (
        *("pause_state", "block_keys", "cached"),
        *("frames_in_flight", "next_frame_id", "prev_scheduled_req_ids"),
    ),
    v.Fork: ("pause_state", "encoder", "running", "skipped_waiting", "free_queue", *_FRAMES),
    v.Schedule: ("pause_state",),
    v.Commit: ("pause_state", "block_keys", "cached", "next_frame_id", "prev_scheduled_req_ids"),
    v.Abort: (
        *("pause_state", "block_keys", "cached"),
        *("frames_in_flight", "next_frame_id", "prev_scheduled_req_ids"),
    ),
    v.Reset: ("pause_state", "frames_in_flight", "next_frame_id", "finished_req_ids"),
}
"""Fields of a state that an accepted event does not change, by type of event."""

_STILL_ASYNC = {
    **_STILL,
    # `only_verified_blocks_are_published` checks what it publishes, also for loads.
    v.Commit: tuple(name for name in _STILL[v.Commit] if name not in ("block_keys", "cached")),
}
"""The same under asynchronous scheduling, where a commit publishes blocks."""


def _make_look(names: tuple[str, ...]) -> Callable[[v.Snapshot], tuple[object, ...]]:
    """Return a function that reads these fields of a state."""
    look = attrgetter(*names)
    return look if len(names) > 1 else lambda snapshot: (look(snapshot),)


_LOOK_AT = {names: _make_look(names) for names in (*_STILL.values(), *_STILL_ASYNC.values())}


@sentence("P18", *_STILL, fixes="what is moved, reserved or published between two plans")
def event_changes_only_what_it_is_about(step: Step, history: History) -> Complaints:
    """An event changes only what it is about: an abort changes no frame, a pause no queue, and so
    on.

    A signal changes nothing but its own field of the request that it names.
    """
    yield from _list_changes_by_a_signal(step)
    kind = type(step.event)
    may_publish = step.config.async_scheduling or step.config.kv_connector
    still = (_STILL_ASYNC if may_publish else _STILL)[kind]
    look = _LOOK_AT[still]
    before, after = look(step.before), look(step.after)
    if before == after:
        return
    lost = history.list_lost(step)
    if lost:
        scheduled = tuple(n for n in step.before.prev_scheduled_req_ids if n not in lost)
        before = look(replace(step.before, prev_scheduled_req_ids=scheduled))
    for name, old, new in zip(still, before, after, strict=True):
        if old != new:
            yield unequal(f"{kind.__name__} changed {name}", name, old, new)


def _list_changes_by_a_signal(step: Step) -> Complaints:
    """Complain about changes that a compiled grammar or drafts made to the requests that they
    name."""
    names: tuple[v.RequestId, ...] = ()
    field = "spec_token_ids"
    if isinstance(step.event, v.GrammarReady):
        names, field = (step.event.request_id,), "grammar_ready"
    elif isinstance(step.observation, v.DraftsTaken):
        names = step.observation.request_ids
    for name in names:
        old, new = step.old.get(name), step.new.get(name)
        if old is None or new is None or new is old:
            continue
        if replace(old, **{field: getattr(new, field)}) != new:
            what = f"{name!r} changed in more than it should"
            yield unequal(what, f"request {name}", old, new, subjects=name)


@sentence("P18", v.Submit, v.Drafts, v.GrammarReady, v.GrammarFailed, v.StreamingUpdate, v.Abort)
def event_leaves_other_requests_alone(step: Step, _history: History) -> Complaints:
    """Requests that an event does not name, or whose part of it was dropped, do not change.

    A signal adds and removes no request; other checks judge what a submission adds.
    """
    concerned: tuple[v.RequestId, ...] = ()
    is_signal = isinstance(step.event, v.GrammarReady | v.Drafts)
    if isinstance(step.event, v.GrammarReady):
        concerned = (step.event.request_id,)
    elif isinstance(step.observation, v.DraftsTaken):
        concerned = step.observation.request_ids
    elif isinstance(step.event, v.StreamingUpdate):
        concerned = (step.event.request.request_id,)
    elif isinstance(step.event, v.GrammarFailed):
        concerned = (step.event.request_id,)
    elif isinstance(step.observation, v.Aborted):
        concerned = (*step.observation.request_ids, *step.observation.ending_req_ids)
    for name, old in step.old.items():
        new = step.new.get(name)
        if new is old or new == old:
            continue
        if name not in concerned:
            yield unequal(f"{name!r} changed", f"request {name}", old, new, subjects=name)
    if is_signal and [it.request_id for it in step.after.requests] != [*step.old]:
        yield Complaint("a request came or went, or is there twice")


@sentence("P18", v.GrammarReady, v.SetPause, needs=WHOLE)
def signal_is_remembered(step: Step, _history: History) -> Complaints:
    """A compiled grammar is marked as ready, also if it is signalled twice; a pause state is as
    set."""
    if isinstance(step.event, v.SetPause):
        return differing("pause_state", step.event.pause_state, step.after.pause_state)
    assert isinstance(step.event, v.GrammarReady)
    request = step.new.get(step.event.request_id)
    if request is not None and request.grammar_ready:
        return ()
    return [
        Complaint(
            f"the grammar of {step.event.request_id!r} is not marked as ready",
            subjects=step.event.request_id,
        )
    ]


@sentence("P18", v.Abort)
def abort_finishes_exactly_the_named_requests(step: Step, history: History) -> Complaints:
    """An abort ends the unfinished requests that it names, once each, in the order named; unknown
    ids have no effect."""
    assert isinstance(step.event, v.Abort)
    assert isinstance(step.observation, v.Aborted)
    expected = tuple(
        dict.fromkeys(name for name in step.event.request_ids if name in history.lives)
    )
    yield from differing_requests("aborted", expected, step.observation.request_ids)
    left = step.old.keys() - set(expected)
    yield from differing_requests("unfinished", sorted(left), sorted(step.new))


@sentence("P25", v.Reset, covered_by="published_block_was_written_since_the_reset")
def reset_empties_the_cache(step: Step, _history: History) -> Complaints:
    """A reset that succeeds leaves no block that can be hit."""
    assert isinstance(step.observation, v.ResetDone)
    if not step.observation.success:
        return ()
    keyed = [block for block, key in enumerate(step.after.block_keys) if key is not None]
    if keyed or step.after.cached:
        return [Complaint(f"blocks {keyed} still carry keys after the reset")]
    return ()


@sentence("P25", v.Reset, fixes="when a cache is emptied without force")
def reset_succeeds_unless_blocks_are_held(step: Step, history: History) -> Complaints:
    """A forced reset succeeds; another one only if no block is held, kept ones left out.

    It fails while a load has not ended or blocks are held for a transfer, and if it is for a store
    that does not exist.
    """
    assert isinstance(step.event, v.Reset)
    assert isinstance(step.observation, v.ResetDone)
    before = step.before
    all_free = _all_free(step, before)
    if find_keeper(history) is not None:
        all_free = not any(any(chain(*request.block_tables)) for request in before.requests)
        all_free &= before.transfers is None or not before.transfers.deferred_frees
    expected = step.event.reset_running_requests or all_free
    if step.event.reset_connector and not step.config.kv_connector:
        expected = False
    if history.store.held or any(map(history.store.is_under_way, step.before.requests)):
        expected = False
    return differing("success", expected, step.observation.success)


@sentence("P25", v.Reset, covered_by="attended_slot_was_written_since_the_reset")
def forced_reset_preempts_all_running_requests(step: Step, _history: History) -> Complaints:
    """A forced reset lets no request continue with older KV; a reset without force changes no
    request."""
    assert isinstance(step.event, v.Reset)
    after = step.after
    assert isinstance(step.observation, v.ResetDone)
    if not (step.event.reset_running_requests and step.observation.success):
        for name in (*_QUEUES, "requests", "prev_scheduled_req_ids"):
            expected = getattr(step.before, name)
            yield from differing(name, expected, getattr(after, name))
        return
    if after.running or after.prev_scheduled_req_ids or not _all_free(step, after, True):
        yield Complaint("after a forced reset a request still runs or holds a block")
    for name, old in step.old.items():
        may_give = keeps_blocks(old) and any(old.block_tables)
        if name not in step.before.running and step.new.get(name) != old and not may_give:
            yield Complaint(f"a reset changed {name!r}, which did not run", subjects=name)


@sentence("P25", v.Reset)
def refused_reset_changes_nothing(step: Step, _history: History) -> Complaints:
    """A reset that fails changes nothing."""
    assert isinstance(step.observation, v.ResetDone)
    if step.observation.success or step.before == step.after:
        return ()
    return [Complaint("the reset did not succeed, but the state changed")]


def _all_free(step: Step, snapshot: v.Snapshot, but_for_frames: bool = False) -> bool:
    """Whether no block is held; with `but_for_frames` blocks that wait for frames in flight do not
    count."""
    num_free, transfers = len(snapshot.free_queue), snapshot.transfers
    if but_for_frames and transfers is not None:
        num_free += len({block for it in transfers.deferred_frees for block in it.block_ids})
    return num_free == step.config.num_usable_blocks
