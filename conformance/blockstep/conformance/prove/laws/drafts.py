"""Laws about draft tokens that are scheduled and rolled back.

PYTEST_DONT_REWRITE.

They are about a step of a request that samples: k known tokens, d drafts among n scheduled tokens,
s sampled tokens.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove.harness import build_config, build_runner, build_state
from blockstep.conformance.prove.host_states import COLUMNS, ENGINE, PLANNING, RESULTS, build_host
from blockstep.conformance.prove.law import LawModule, instead
from blockstep.conformance.prove.laws.slots import surplus_gives_a_negative_count
from blockstep.spec.core.requests import Frame, FrameRow, RequestState
from blockstep.spec.core.slots import (
    compute_num_new_blocks,
    compute_num_publishable_blocks,
    compute_num_slots,
)
from blockstep.spec.core.speculation import (
    can_take_drafts,
    compute_num_rejected,
    count_drafts,
    get_rolled_back,
    is_accepted_prefix,
)
from blockstep.spec.core.token_budget import compute_num_drafts, compute_share
from blockstep.spec.vocabulary import Stats, Status

ROOM = LawModule("drafts")


# Mistakes.


@instead(get_rolled_back)
def preempted_request_is_rolled_back_below_zero(
    request: RequestState, num_drafts: int, num_sampled: int
) -> RequestState:
    """A stale frame rolls back a request that lost its computed tokens."""
    num_rejected = compute_num_rejected(num_drafts, num_sampled)
    return replace(request, num_computed_tokens=request.num_computed_tokens - num_rejected)


# Scheduling drafts.


@ROOM.law("P12 P24", (20, 3, 19, 2, 100))
def check_scheduled_drafts_are_attached_drafts(
    num_known: int, num_attached: int, num_computed: int, budget: int, max_model_len: int
) -> None:
    """No draft is made up, and a prefill chunk has none."""
    assert 0 <= num_computed < num_known < max_model_len and 0 <= num_attached and 1 <= budget
    num_new = compute_share(num_known + num_attached, num_computed, 0, budget, max_model_len - 1)
    num_drafts = compute_num_drafts(num_computed, num_new, num_known)
    assert 0 <= num_drafts <= num_attached
    assert num_computed + num_new >= num_known or num_drafts == 0


@ROOM.law("P12", (19, 3, 20))
def check_budget_cuts_drafts_before_known_tokens(
    num_computed: int, num_scheduled: int, num_known: int
) -> None:
    """The scheduled tokens without the drafts are known tokens, without a gap."""
    assert 0 <= num_computed < num_known and 1 <= num_scheduled
    num_drafts = compute_num_drafts(num_computed, num_scheduled, num_known)
    assert num_computed + num_scheduled - num_drafts == min(num_computed + num_scheduled, num_known)


# Rolling back rejected drafts.


@ROOM.law("P14", (20, 4, 2))
def check_sampling_leaves_exactly_the_last_token_to_compute(
    num_known: int, num_drafts: int, num_sampled: int
) -> None:
    """This holds for any number of rejected drafts."""
    assert 1 <= num_known and 0 <= num_drafts and 1 <= num_sampled <= num_drafts + 1
    before = build_runner("a", num_known, num_known + num_drafts)
    after = get_rolled_back(before, num_drafts, num_sampled)
    assert after.num_computed_tokens == num_known + num_sampled - 1


@ROOM.law("P14", (20, 4, 2))
def check_rejected_drafts_leave_no_trace_in_the_counters(
    num_known: int, num_drafts: int, num_accepted: int
) -> None:
    """The counters are those of a step that scheduled the accepted drafts only."""
    assert 1 <= num_known and 0 <= num_accepted <= num_drafts
    scheduled = build_runner("a", num_known, num_known + num_drafts)
    without = build_runner("a", num_known, num_known + num_accepted)
    after = get_rolled_back(scheduled, num_drafts, num_accepted + 1)
    assert after == get_rolled_back(without, num_accepted, num_accepted + 1)
    assert after.num_computed_tokens == without.num_computed_tokens


@ROOM.law("P12 P14", (20, 4, 2), preempted_request_is_rolled_back_below_zero)
def check_preempted_request_has_nothing_to_roll_back(
    num_known: int, num_drafts: int, num_sampled: int
) -> None:
    """The frame was in flight when the request lost its computed tokens."""
    assert 1 <= num_known and 0 <= num_drafts and 1 <= num_sampled <= num_drafts + 1
    before = replace(build_runner("a", num_known, 0), status=Status.PREEMPTED)
    after = get_rolled_back(before, num_drafts, num_sampled)
    assert after.num_computed_tokens == 0


@ROOM.law("P4 P14", (16, 8, 20, 4, 16))
def check_published_tokens_stay_computed_after_rejections(
    num_computed: int, num_scheduled: int, num_known: int, num_sampled: int, block_size: int
) -> None:
    """A commit therefore never has to withdraw a key."""
    assert 0 <= num_computed < num_known and 1 <= block_size
    assert num_known <= num_computed + num_scheduled
    assert 1 <= num_sampled <= num_computed + num_scheduled - num_known + 1
    num_full = compute_num_publishable_blocks(num_computed, num_scheduled, num_known, block_size)
    num_drafts = compute_num_drafts(num_computed, num_scheduled, num_known)
    num_rejected = compute_num_rejected(num_drafts, num_sampled)
    assert num_full * block_size <= num_computed + num_scheduled - num_rejected


@ROOM.law("P8 P14", (20, 4, 2, 1, 100, 16), surplus_gives_a_negative_count)
def check_blocks_of_rejected_drafts_are_reused_by_the_next_step(
    num_known: int,
    num_drafts: int,
    num_sampled: int,
    num_new: int,
    max_model_len: int,
    block_size: int,
) -> None:
    """No block is freed or taken twice: the new blocks are those that the longer table lacks."""
    assert 1 <= block_size and 1 <= num_known and 0 <= num_drafts
    assert 1 <= num_sampled <= num_drafts + 1 and 1 <= num_new
    assert num_known + num_drafts < max_model_len
    assert num_known + num_sampled - 1 + num_new < max_model_len
    held = compute_num_new_blocks(num_known + num_drafts, block_size, 0)
    num_computed = num_known + num_drafts - compute_num_rejected(num_drafts, num_sampled)
    num_slots = compute_num_slots(num_computed, num_new, 0, max_model_len)
    taken = compute_num_new_blocks(num_slots, block_size, held)
    assert taken >= 0
    assert taken == 0 or (held + taken - 1) * block_size < num_slots <= (held + taken) * block_size


# The model output.


@ROOM.law("P3 P13", (7, 8, 9, 7, 8, 5))
def check_two_drafts_are_accepted_only_as_they_were_proposed(
    first_draft: int, second_draft: int, third_draft: int, first: int, second: int, own: int
) -> None:
    """Two of three drafts are accepted, then the model's own token follows, which may be any."""
    assert 0 <= first_draft and 0 <= second_draft and 0 <= third_draft
    assert 0 <= first and 0 <= second and 0 <= own
    drafts = (first_draft, second_draft, third_draft)
    is_accepted = is_accepted_prefix((first, second, own), drafts)
    assert is_accepted == (first == first_draft and second == second_draft)


@ROOM.law("P21", (10, 6, 4, 2))
def check_accepted_drafts_never_outnumber_scheduled_ones(
    num_scheduled: int, num_accepted: int, num_drafts: int, num_sampled: int
) -> None:
    """The token that the model itself sampled is not an accepted draft."""
    assert 0 <= num_accepted <= num_scheduled
    assert 0 <= num_drafts and 1 <= num_sampled <= num_drafts + 1
    before = Stats(drafts_scheduled=num_scheduled, drafts_accepted=num_accepted)
    after = count_drafts(before, num_drafts, num_sampled)
    assert after.drafts_scheduled == num_scheduled + num_drafts
    assert after.drafts_accepted == num_accepted + num_sampled - 1
    assert after.drafts_accepted <= after.drafts_scheduled


# The engine.


@ROOM.law("P12 P24", (20, 3))
def check_engine_schedules_as_many_drafts(num_known: int, num_scheduled: int) -> None:
    """Three drafts are attached to the request, for the position after its known tokens."""
    assert 1 <= num_known < 8000 and 1 <= num_scheduled <= 4
    request = replace(build_runner("a", num_known, num_known - 1), spec_token_ids=(5, 6, 7))
    host = build_host(build_config(num_speculative_tokens=3), request)
    host.requests[0, COLUMNS.QUIET] = 8192  # its row takes and publishes no block
    PLANNING._run_row(host, 0, num_scheduled, 0)
    due = compute_num_drafts(num_known - 1, num_scheduled, num_known)
    assert host.lines[0, COLUMNS.ROW_DRAFTS] == due
    assert host.requests[0, COLUMNS.NUM_DRAFTS] == 0


@ROOM.law("P14", (20, 3, 1, 1))
def check_engine_rolls_back_as_many_tokens(
    num_known: int, num_drafts: int, num_accepted: int, is_running: bool
) -> None:
    """A running request is rolled back; a preempted one has no computed tokens."""
    assert 1 <= num_known < 8000 and 0 <= num_accepted <= num_drafts <= 3
    request = build_runner("a", num_known, num_known + num_drafts)
    if not is_running:
        request = replace(request, status=Status.WAITING, num_computed_tokens=0)
    host = build_host(build_config(num_speculative_tokens=3), request)
    RESULTS._roll_back(host, 0, num_drafts, num_accepted + 1)
    due = get_rolled_back(request, num_drafts, num_accepted + 1)
    assert host.requests[0, COLUMNS.NUM_COMPUTED] == due.num_computed_tokens


@ROOM.law("P24", (20, 19, 0, 0))
def check_engine_accepts_drafts_without_reading_frames(
    num_known: int, num_computed: int, is_in_flight: bool, is_prefill_chunk: bool
) -> None:
    """It looks at the chunk flag and the computed tokens, which a row in flight has set."""
    assert 1 <= num_known < 8000 and 0 <= num_computed <= num_known
    assert not is_in_flight or is_prefill_chunk == (num_computed < num_known)
    request = replace(
        build_runner("a", num_known, num_computed), is_prefill_chunk=bool(is_prefill_chunk)
    )
    config = build_config(num_speculative_tokens=1)
    state = build_state(config, (request,))
    if is_in_flight:
        state = replace(state, frames=(Frame(0, (FrameRow("a", (), not is_prefill_chunk),)),))
    host = build_host(config, request)
    assert ENGINE._may_draft(host.requests.values[0]) == can_take_drafts(state, request)
