"""Laws about placeholders: output tokens of frames in flight.

PYTEST_DONT_REWRITE.

All laws rest on one invariant: a running request with k known tokens and p placeholders has k + p -
1 computed tokens, that is, all that will be known but the last. A plan preserves it, and so does
the commit of every frame.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.host_states import PLANNING, build_host
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.async_ import (
    get_fulfilled,
    is_held_by_frames,
    is_past_max_tokens,
    process_placeholders,
)
from blockstep.spec.core.preemption import get_preempted
from blockstep.spec.core.requests import Frame, FrameRow, Holding, RequestState
from blockstep.spec.core.speculation import get_rolled_back
from blockstep.spec.core.token_budget import compute_share
from blockstep.spec.core.work import Step
from blockstep.spec.releases.drafts import stale_draft_placeholders as gap_rule
from blockstep.spec.vocabulary import MAX_INT, Config, SpecMethod, Status

ROOM = LawModule("async_placeholders")

DRAFTS = (-1, -1)
"""Placeholders of drafts that only the worker knows."""
CONFIG = Config(
    num_blocks=4,
    block_size=1_000_000,
    max_model_len=900_000,
    enable_prefix_caching=False,
    max_frames_in_flight=2,
    async_scheduling=True,
    spec_method=SpecMethod.NGRAM,
    num_speculative_tokens=2,
)


# Mistakes.


@instead(process_placeholders, theirs="#46899")
def stale_draft_placeholders(right: Right[None], step: Step) -> None:
    """A request left out of a plan keeps its draft placeholders."""
    before = step.state
    step.state = replace(before, rules=gap_rule(before.rules, before.config))
    right()
    step.state = before


@instead(is_held_by_frames, theirs="#47900, #48245")
def admission_does_not_wait_for_tokens_in_flight() -> bool:
    """A preempted request is admitted while its tokens are in flight."""
    return False


def build_promised(
    num_prompt: int, num_placeholders: int, name: str = "a", block: int = 1, **of_request: int
) -> RequestState:
    """Return a running request that satisfies the invariant, with draft placeholders."""
    request = h.build_request(name, num_prompt, **of_request)
    return replace(
        request,
        status=Status.RUNNING,
        num_computed_tokens=request.num_known_tokens + num_placeholders - 1,
        num_output_placeholders=num_placeholders,
        spec_token_ids=DRAFTS,
        holdings=(Holding((block,)),),
    )


# A plan.


@ROOM.law("P12", (20, 3, 5))
def check_computed_tokens_are_one_less_than_promised_after_a_plan(
    num_known: int, num_placeholders: int, budget: int
) -> None:
    """This holds for every budget; without placeholders a prefill may be cut."""
    assert 1 <= num_known and 0 <= num_placeholders and 1 <= budget
    assert num_known + num_placeholders < 1000
    config = replace(CONFIG, max_num_batched_tokens=budget)
    request = build_promised(num_known, num_placeholders)
    if num_placeholders == 0:
        request = replace(request, num_computed_tokens=0, spec_token_ids=())
    after, _ = h.schedule(h.build_state(config, (request,)))
    now = after.requests["a"]
    assert num_placeholders <= now.num_output_placeholders <= num_placeholders + 3
    assert (
        now.num_output_placeholders == 0
        or now.num_computed_tokens == num_known + now.num_output_placeholders - 1
    )


@ROOM.law("P15", (20, 3, 8))
def check_request_with_placeholders_runs_its_next_token_and_all_drafts(
    num_known: int, num_placeholders: int, budget: int
) -> None:
    """It does not wait for the frame in flight, within the budget."""
    assert 1 <= num_known and 1 <= num_placeholders and 1 <= budget
    assert num_known + num_placeholders < 1000
    config = replace(CONFIG, max_num_batched_tokens=budget)
    _, plan = h.schedule(h.build_state(config, (build_promised(num_known, num_placeholders),)))
    assert [row.num_scheduled_tokens for row in plan.rows] == [min(1 + len(DRAFTS), budget)]


@ROOM.law("P24", (20, 30, 2), stale_draft_placeholders)
def check_request_without_a_row_has_no_drafts_in_the_next_plan(
    num_known: int, num_known_behind: int, budget: int
) -> None:
    """The worker proposes drafts only for rows that it runs; a row that samples gets new ones."""
    assert 1 <= num_known < 1000 and 1 <= num_known_behind < 1000 and 1 <= budget
    config = replace(CONFIG, max_num_batched_tokens=budget)
    first = build_promised(num_known, 1)
    second = build_promised(num_known_behind, 1, "b", block=2)
    after, plan = h.schedule(h.build_state(config, (first, second)))
    planned = {row.request_id for row in plan.rows}
    assert after.requests["a"].spec_token_ids == DRAFTS
    assert after.requests["b"].spec_token_ids == (DRAFTS if "b" in planned else ())


@ROOM.law("P13 P15", (5, 2, 2, 4))
def check_no_row_is_planned_after_the_last_token(
    num_prompt: int, num_outputs: int, num_placeholders: int, max_tokens: int
) -> None:
    """A row is planned exactly if one more token is needed even if all drafts are rejected."""
    assert 1 <= num_prompt < 1000 and 0 <= num_outputs < max_tokens < 1000
    assert 1 <= num_placeholders < 1000
    request = build_promised(
        num_prompt, num_placeholders, num_outputs=num_outputs, max_tokens=max_tokens
    )
    _, plan = h.schedule(h.build_state(CONFIG, (request,)))
    assert bool(plan.rows) == (num_outputs + 1 < max_tokens)


# The commit of a frame.


@ROOM.law("P12 P14", (20, 7, 3, 2))
def check_computed_tokens_are_one_less_than_promised_after_a_commit(
    num_known: int, num_placeholders: int, num_drafts: int, num_sampled: int
) -> None:
    """This holds for any number of rejected drafts and of other frames in flight."""
    assert 1 <= num_known and 0 <= num_drafts and 1 + num_drafts <= num_placeholders
    assert 1 <= num_sampled <= num_drafts + 1
    before = build_promised(num_known, num_placeholders)
    after = get_rolled_back(get_fulfilled(CONFIG, before, num_drafts), num_drafts, num_sampled)
    assert after.num_output_placeholders == num_placeholders - 1 - num_drafts
    assert after.num_computed_tokens == num_known + num_sampled + after.num_output_placeholders - 1


# Preemption with frames in flight.


@ROOM.law("P12 P13", (20, 2, 0))
def check_frames_of_a_preempted_request_deliver_exactly_its_placeholders(
    num_known: int, num_drafts: int, num_drafts_later: int
) -> None:
    """Two frames are in flight at the preemption; both deliver, and no placeholder is left."""
    assert 1 <= num_known and 0 <= num_drafts and 0 <= num_drafts_later
    running = build_promised(num_known, 2 + num_drafts + num_drafts_later)
    request = get_fulfilled(CONFIG, get_preempted(running), num_drafts)
    request = get_fulfilled(CONFIG, request, num_drafts_later)
    assert request.num_output_placeholders == 0
    assert request.num_computed_tokens == 0


@ROOM.law("P12 P13", (20, 0, 30), admission_does_not_wait_for_tokens_in_flight)
def check_resumed_request_samples_exactly_when_its_known_tokens_are_computed(
    num_known: int, num_placeholders: int, budget: int
) -> None:
    """Only then does the worker sample, since it knows no placeholders."""
    assert 1 <= num_known < 1000 and 0 <= num_placeholders < 1000 and 1 <= budget
    config = replace(CONFIG, max_num_batched_tokens=budget)
    request = replace(
        h.build_request("a", num_known),
        status=Status.PREEMPTED,
        num_output_placeholders=num_placeholders,
    )
    state = h.build_state(config, (), (request,))
    if num_placeholders > 0:
        state = replace(state, frames=(Frame(0, (FrameRow("a", (), samples=True),)),))
    after, _ = h.schedule(state)
    for row in (row for frame in after.frames[len(state.frames) :] for row in frame.rows):
        assert row.samples == (after.requests["a"].num_computed_tokens >= num_known)


# The engine.


@ROOM.law("P12 P15", (5, 2, 2, 8, 4))
def check_engine_counts_the_same_placeholders(
    num_prompt: int, num_outputs: int, num_placeholders: int, max_tokens: int, budget: int
) -> None:
    """A request with placeholders is computed but for one token."""
    assert 1 <= num_prompt and 0 <= num_outputs < max_tokens and 0 <= num_placeholders
    assert num_prompt + max_tokens + num_placeholders < 8000 and 1 <= budget <= MAX_INT
    request = build_promised(
        num_prompt, num_placeholders, num_outputs=num_outputs, max_tokens=max_tokens
    )
    config = h.build_config(max_frames_in_flight=3, max_num_batched_tokens=budget)
    host = build_host(config, request)
    num_computed = request.num_computed_tokens
    num_with_spec = num_prompt + num_outputs + num_placeholders + len(DRAFTS)
    is_past = is_past_max_tokens(num_computed, num_placeholders, num_prompt, max_tokens)
    due = compute_share(num_with_spec, num_computed, 0, budget, 8191)
    assert PLANNING._tokens_to_run(host, 0) == (0 if is_past else due)
