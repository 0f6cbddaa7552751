"""Translates the plans of vLLM that are made for Model Runner V2.

A plan for the older runner tells resumed requests as cached rows. A plan for Model Runner V2 tells
each request that enters from a queue as a new row with all its known tokens: first those that were
never preempted, then the resumed ones. Its cached rows are running ones only, and it keeps no
record of the step before. The vocabulary has one plan for both, so this module sorts the new rows;
everything that such a plan must or must not contain is checked here as well.

    plan for Model Runner V2          plan in our words
    scheduled_new_reqs  A B | C       new     A B
    scheduled_cached_reqs   D E       cached  D E C    (C is resumed)

Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockstep.conformance.engine import EngineFault
from blockstep.spec import vocabulary as v

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from blockstep.conformance.engines.adapters.vllm_state import Run


@dataclass(frozen=True, slots=True)
class Entering:
    """State of the requests before a plan that the plan itself does not contain."""

    resumed: frozenset[v.RequestId]
    """Requests that are resumed if the plan admits them."""
    placeholders: Mapping[v.RequestId, int]
    """Tokens that frames in flight still deliver, for each request."""


def note_entering(requests: Mapping[v.RequestId, Any]) -> Entering:
    """Return what must be known of the requests before the next plan is made.

    After a confirmed load a request is admitted as it would be without the load: new or resumed.
    """
    resumed = {
        name
        for name, request in requests.items()
        if request.status.name == "PREEMPTED"
        or (request.status.name == "WAITING_FOR_REMOTE_KVS" and request.num_preemptions)
    }
    placeholders = {name: one.num_output_placeholders for name, one in requests.items()}
    return Entering(frozenset(resumed), placeholders)


def split_new_rows(
    run: Run, output: SchedulerOutput, entering: Entering
) -> tuple[list[NewRequestData], list[NewRequestData]]:
    """Return the new rows of a plan, and those of its new rows that resume a request.

    Raises:
        EngineFault: a resumed row comes before a new one, or the plan was made for the older
            runner and has a preempted request among its new rows.
    """
    rows = list(output.scheduled_new_reqs)
    flags = [row.req_id in entering.resumed for row in rows]
    num_new = flags.count(False)
    if any(flags[:num_new]) or (any(flags) and not run.has_second_runner):
        raise EngineFault(
            f"scheduled_new_reqs in this plan are {[row.req_id for row in rows]}, and those that "
            f"were preempted are {sorted(entering.resumed)}"
        )
    return rows[:num_new], rows[num_new:]


def read_resumed_rows(
    output: SchedulerOutput, resumed: list[NewRequestData]
) -> tuple[v.CachedRow, ...]:
    """Return the rows that resume requests, as the cached rows that the vocabulary has."""
    return tuple(
        v.CachedRow(
            request_id=row.req_id,
            resumed=True,
            new_block_ids=tuple(map(tuple, row.block_ids)),
            all_token_ids=tuple(row.prefill_token_ids or ()),
            num_computed_tokens=row.num_computed_tokens,
            num_output_tokens=len(row.prefill_token_ids or ()) - len(row.prompt_token_ids or ()),
            num_scheduled_tokens=output.num_scheduled_tokens[row.req_id],
            draft_token_ids=tuple(output.scheduled_spec_decode_tokens.get(row.req_id, ())),
        )
        for row in resumed
    )


def check_runner(run: Run, output: SchedulerOutput, entering: Entering) -> None:
    """See that a plan says what its runner reads, and nothing that only the other runner reads.

    Raises:
        EngineFault: naming the field.
    """
    new, resumed = split_new_rows(run, output, entering)
    for row in new:
        seen = getattr(row, "prefill_token_ids", None)
        expected = row.prompt_token_ids if run.has_second_runner else None
        if seen != expected:
            raise EngineFault(
                f"prefill_token_ids of new row {row.req_id!r} is {seen!r}, not {expected!r}"
            )
    for row in resumed:
        num_prompt, seen = len(row.prompt_token_ids or ()), row.prefill_token_ids
        if not seen or seen[:num_prompt] != row.prompt_token_ids:
            raise EngineFault(
                f"prefill_token_ids of resumed row {row.req_id!r} is {seen!r}, and its prompt is "
                f"{row.prompt_token_ids!r}"
            )
    if run.has_second_runner:
        _check_cached_rows(run, output)
    _check_skipped_drafts(run, output, entering)


def _check_cached_rows(run: Run, output: SchedulerOutput) -> None:
    """See that cached rows for Model Runner V2 resume nothing, since resumed requests are new rows.

    In 0.23.0 they also have all tokens of a request that the last plan left out, as for the older
    runner; 0.27.0 leaves them out.
    """
    cached, requests = output.scheduled_cached_reqs, run.scheduler.requests
    if cached.resumed_req_ids:
        raise EngineFault(
            f"scheduled_cached_reqs.resumed_req_ids is {cached.resumed_req_ids!r}: Model Runner V2 "
            "is given resumed requests as new rows"
        )
    for name, seen in cached.all_token_ids.items():
        expected = None if name in run.planned else list(requests[name].all_token_ids)
        if seen != expected:
            raise EngineFault(
                f"scheduled_cached_reqs.all_token_ids of {name!r} is {seen!r}, not {expected!r}"
            )


def _check_skipped_drafts(run: Run, output: SchedulerOutput, entering: Entering) -> None:
    """See that a plan spares its drafter exactly where no row of the step can use the drafts.

    A row that the step planned and took back counts as well, and no plan lists these rows: if the
    step preempts a request, a drafter that runs in vain is accepted.
    """
    seen = getattr(output, "skip_drafts", False)
    drafts_itself = run.config.spec_method in (v.SpecMethod.EAGLE, v.SpecMethod.DRAFT_MODEL)
    expected = run.has_second_runner and drafts_itself and hasattr(output, "skip_drafts")
    if expected:
        expected = not any(
            _can_use_drafts(run, name, entering) for name in output.num_scheduled_tokens
        )
    if seen == expected or (expected and output.preempted_req_ids):
        return
    raise EngineFault(f"skip_drafts in this plan is {seen}, and its rows say {expected}")


def _can_use_drafts(run: Run, name: v.RequestId, entering: Entering) -> bool:
    """Return whether a later step may verify what is drafted for a request with a row in this plan.

    It cannot where the row ends before the last known token, or where the request has all its
    outputs with what this step and a frame in flight sample.
    """
    request = run.scheduler.requests[name]
    # The plan has been counted as computed by now.
    if request.num_computed_tokens < request.num_tokens:
        return False
    num_sampled = 1 + (entering.placeholders[name] > 0)
    return bool(request.num_output_tokens + num_sampled < request.max_tokens)
