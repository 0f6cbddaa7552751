"""Refusals: P7 they change nothing, P11 what never fits is refused, P18 what is stale as well."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.conformance.judge.properties.amounts import blocks_for, longest_extent
from blockstep.conformance.judge.properties.ledger import FlightRow, Ledger
from blockstep.conformance.judge.properties.sentence import (
    Complaint,
    Complaints,
    difference,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec import vocabulary as v


@sentence("P7", v.Rejected)
def rejected_event_changes_nothing(step: Step, _ledger: Ledger) -> Complaints:
    """The state after a refusal is the state before it, statistics included."""
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
            f"a refused event changed {', '.join(names)}",
            tuple(difference(name, getattr(before, name), getattr(after, name)) for name in names),
        )
    ]


@sentence("P11", v.Submit)
def accepted_request_fits_an_empty_pool(step: Step, _ledger: Ledger) -> Complaints:
    """What was accepted can be served: at its longest it fits the pool when nobody else runs."""
    assert isinstance(step.event, v.Submit)
    code = _never_served(step.config, step.event.request)
    return () if code is None else [Complaint(f"accepted, but can never be served: {code}")]


@sentence("P11", v.Rejected)
def request_is_refused_for_its_size_only_if_it_never_fits(
    step: Step, _ledger: Ledger
) -> Complaints:
    """PROMPT_TOO_LONG and NEVER_FITS are true when they are said."""
    assert isinstance(step.observation, v.Rejected)
    code = step.observation.code
    if code not in (v.RejectCode.PROMPT_TOO_LONG, v.RejectCode.NEVER_FITS):
        return ()
    true = (
        _never_served(step.config, step.event.request) if isinstance(step.event, v.Submit) else None
    )
    return () if true is code else [Complaint(f"refused as {code}, which is not so")]


@sentence("P18", v.Rejected)
def refusal_names_what_is_wrong(step: Step, ledger: Ledger) -> Complaints:
    """The code of a refusal is the one that the event earned."""
    assert isinstance(step.observation, v.Rejected)
    expected = due_refusal(step.config, step.event, ledger)
    if expected is step.observation.code:
        return ()
    due = "none" if expected is None else expected
    differences = (difference("code", due, step.observation.code),)
    return [Complaint("the event was refused, but not for that", differences)]


@sentence("P18", *v.EVENT_TYPES)
def stale_or_wrong_event_is_refused(step: Step, ledger: Ledger) -> Complaints:
    """What is malformed, unknown, late or a duplicate is not taken."""
    expected = due_refusal(step.config, step.event, ledger)
    if expected is None:
        return ()
    return [unequal("the event was taken", "answer", expected, "taken")]


def due_refusal(config: v.Config, event: object, ledger: Ledger) -> v.RejectCode | None:
    """Why an event must be refused now; None if it must be taken."""
    problem = v.event_problem(event)
    if problem is not None:
        return problem.code
    match event:
        case v.Submit(request=request):
            if request.request_id in ledger.lives:
                return v.RejectCode.DUPLICATE_REQUEST
            if ledger.in_flight(request.request_id):
                return v.RejectCode.REQUEST_IN_FLIGHT
            return _never_served(config, request)
        case v.Schedule() if len(ledger.frames) >= config.max_frames_in_flight:
            return v.RejectCode.PIPELINE_FULL
        case v.Commit(frame_id=frame_id, sampled=sampled):
            if frame_id not in ledger.frames:
                return v.RejectCode.UNKNOWN_FRAME
            if frame_id != next(iter(ledger.frames)):
                return v.RejectCode.FRAME_OUT_OF_ORDER
            frame = ledger.frames[frame_id]
            return None if _answers(config, sampled, frame) else v.RejectCode.BAD_RESULT
        case v.Drafts(drafts=drafts):
            return None if _may_be_drafts(config, drafts) else v.RejectCode.BAD_DRAFTS
        case v.GrammarReady(request_id=request_id):
            if request_id not in ledger.lives:
                return v.RejectCode.UNKNOWN_REQUEST
            if not ledger.lives[request_id].request.structured_output:
                return v.RejectCode.NOT_STRUCTURED
    return None


def _never_served(config: v.Config, request: v.Request) -> v.RejectCode | None:
    if len(request.prompt_token_ids) >= config.max_model_len:
        return v.RejectCode.PROMPT_TOO_LONG
    if blocks_for(config, longest_extent(config, request)) > config.num_usable_blocks:
        return v.RejectCode.NEVER_FITS
    return None


def _answers(config: v.Config, sampled: Sequence[v.RowTokens], frame: Sequence[FlightRow]) -> bool:
    """Whether rows answer a frame: each request once, and only what it can have sampled.

    Which drafts were accepted cannot be compared where only the worker knows them.
    """
    tokens_of = {row.request_id: row.token_ids for row in sampled}
    if len(sampled) != len(frame) or tokens_of.keys() != {row.request_id for row in frame}:
        return False
    for row in frame:
        tokens = tokens_of[row.request_id]
        least, most = (1, 1 + len(row.drafts)) if row.samples else (0, 0)
        if not least <= len(tokens) <= most:
            return False
        if not config.async_scheduling and tokens[:-1] != row.drafts[: max(len(tokens) - 1, 0)]:
            return False
    return True


def _may_be_drafts(config: v.Config, drafts: Sequence[v.RowTokens]) -> bool:
    if config.spec_method is v.SpecMethod.NONE or config.async_scheduling:
        return False
    limit = config.num_speculative_tokens
    if any(len(row.token_ids) > limit for row in drafts):
        return False
    return len({row.request_id for row in drafts}) == len(drafts)
