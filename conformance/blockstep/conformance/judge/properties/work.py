"""Work: P10 an engine loop must not sleep while there is work, nor plan for ever without any; P18
states and answers show no feature that the config switches off.
"""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.features.events.properties import get_kv_events
from blockstep.conformance.judge.properties.history import WHOLE, History
from blockstep.conformance.judge.properties.observed_step import Step, is_parked
from blockstep.conformance.judge.properties.property_check import (
    Complaints,
    differing,
    sentence,
    unequal,
)
from blockstep.conformance.protocol.features import PARTS
from blockstep.spec import vocabulary as v


@sentence("P10", *v.EVENT_TYPES)
def loop_runs_while_there_is_work(step: Step, history: History) -> Complaints:
    """A state says that there is work while a request could be scheduled, a worker must be sent a
    finished request, or a transfer has not ended. Otherwise the loop sleeps and nothing wakes it.

    Nothing is required while a frame is in flight, since its commit wakes the loop.
    """
    if step.after.has_work is False and not step.after.frames_in_flight:
        for why in _list_due(step, history):
            yield unequal(f"the loop may sleep, and {why}", "has_work", True, False)
            return


@sentence("P10", *v.EVENT_TYPES)
def loop_sleeps_without_work(step: Step, history: History) -> Complaints:
    """A state says that there is no work if all unfinished requests are idle sessions or paused,
    nothing is to be sent and no transfer is awaited. Otherwise the loop plans for ever without
    effect."""
    after = step.after
    if not after.has_work or after.frames_in_flight or _has_transfers(step):
        return
    is_open = after.pause_state is v.PauseState.UNPAUSED
    may_run = any(_is_awake(request) for request in after.requests) if is_open else False
    may_run |= bool(after.running) and after.pause_state is not v.PauseState.PAUSED_ALL
    if not (may_run or _has_untold(step, history)):
        what = "the loop keeps planning, and there is nothing to do"
        yield unequal(what, "has_work", False, True)


def _list_due(step: Step, history: History) -> Iterator[str]:
    """Yield the work that is left after a step, in words."""
    after = step.after
    if after.finished_req_ids:
        yield f"no plan has named {after.finished_req_ids[0]!r} as finished"
    if _has_transfers(step):
        yield "the end of a transfer is awaited"
    if after.pause_state is v.PauseState.PAUSED_ALL:
        return
    if after.running:
        yield f"{after.running[0]!r} runs"
    if after.pause_state is v.PauseState.UNPAUSED:
        offers = history.store.transfers.offers
        for request in after.requests:
            offer = offers.get(request.request_id)
            is_unknown = offer is not None and offer.num_tokens is None
            if _is_awake(request) and not is_unknown and not _awaits_grammar(request):
                yield f"{request.request_id!r} waits"


def _is_awake(request: v.RequestSnapshot) -> bool:
    return request.status is not v.Status.WAITING_FOR_STREAMING_REQ


def _awaits_grammar(request: v.RequestSnapshot) -> bool:
    waits = request.status is v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return waits and not request.grammar_ready


def _has_transfers(step: Step) -> bool:
    """Whether a load has not ended after a step, or blocks are held for a store."""
    shown = step.after.transfers
    if shown is None:
        return False
    parked = {request.request_id for request in step.after.requests if is_parked(request)}
    return bool(shown.held) or not parked <= {*shown.received}


def _has_untold(step: Step, history: History) -> bool:
    """Whether a request has ended, or is about to, and no plan has named it."""
    if isinstance(step.observation, v.Plan):
        return bool(step.after.finished_req_ids)
    has_ended = bool(step.old.keys() - step.new.keys())
    return has_ended or bool(step.after.finished_req_ids or history.ended or history.ending)


@sentence("P18", *v.EVENT_TYPES, needs=WHOLE)
def disabled_features_leave_no_state(step: Step, history: History) -> Complaints:
    """A state shows no encoder, no store, no kept blocks and no closed admission, a plan no load,
    and an answer no KV event, unless the config asks for them."""
    after, seen, lacked = step.after, step.observation, history.lacked
    for name, part in (
        ("encoder_cache_size", after.encoder),
        ("kv_connector", after.transfers),
        *[(it.setting, getattr(after, it.name)) for it in PARTS],
    ):
        if (part is None) is not (name in lacked):
            yield from differing(name, name not in lacked, part is not None)
    if after.admission_closed and "admission_high_blocks" in lacked:
        yield from differing("admission_closed", False, True)
    if isinstance(seen, v.Plan):
        if seen.kv_loads and "kv_connector" in lacked:
            yield from differing("kv_loads", (), seen.kv_loads)
    elif "enable_kv_cache_events" in lacked:
        yield from differing("kv_events", (), get_kv_events(step))
