"""Laws about the number of tokens that a request gets in a step. PYTEST_DONT_REWRITE."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove.harness import Tokens, build_config, build_runner
from blockstep.conformance.prove.host_states import PLANNING, build_host
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.async_ import is_past_max_tokens
from blockstep.spec.core.token_budget import compute_share
from blockstep.spec.vocabulary import MAX_INT

ROOM = LawModule("counts")


# Mistakes.


@instead(compute_share)
def last_position_is_computed_too(right: Right[int], end: int) -> int:
    """The limit is the model length itself instead of one token less."""
    return right(end=end + 1)


@instead(compute_share, theirs="#40707 (recurrent state)")
def chunk_is_rounded_down_to_blocks(right: Right[int], num_wanted: int, num_computed: int) -> int:
    """Chunks end at a multiple of 16; vLLM does this for recurrent state ('align')."""
    num_new = right()
    return num_new if num_new == num_wanted - num_computed else num_new // 16 * 16


@instead(compute_share)
def hit_counts_twice(num_wanted: int, num_computed: int, threshold: int, budget: int) -> int:
    """The hit is subtracted once more if the threshold applies."""
    num_new = num_wanted - num_computed
    capped = 0 < threshold < num_new
    return min(threshold - min(num_computed, threshold) if capped else num_new, budget)


# A running request.


@ROOM.law("P9 P12", (20, 4, 8, 6, 100), last_position_is_computed_too)
def check_running_request_stays_within_every_limit(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> None:
    """The limits are the budget, the threshold, the tokens left to compute, and the model length.

    The token sampled before the last position was the last one.
    """
    assert 0 <= num_computed <= num_with_spec and 0 <= threshold and 0 <= budget
    assert 2 <= max_model_len
    num_new = compute_share(num_with_spec, num_computed, threshold, budget, max_model_len - 1)
    assert num_new <= budget
    assert num_new <= threshold or threshold == 0
    assert num_computed + num_new <= num_with_spec
    assert num_computed + num_new <= max_model_len - 1


@ROOM.law("P10 P15", (20, 4, 8, 6, 100), chunk_is_rounded_down_to_blocks)
def check_running_request_gets_all_its_tokens_unless_a_limit_binds(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> None:
    """It gets the tokens left to compute, or exactly what one of the three limits allows.

    That is at least one token within budget and model length; otherwise the same step would repeat
    for ever.
    """
    assert 0 <= num_computed < num_with_spec and 0 <= threshold and 0 <= budget
    num_new = compute_share(num_with_spec, num_computed, threshold, budget, max_model_len - 1)
    caps = (num_with_spec - num_computed, budget, max_model_len - 1 - num_computed)
    assert num_new in caps or (threshold > 0 and num_new == threshold)
    assert num_new >= 1 or budget == 0 or num_computed >= max_model_len - 1


@ROOM.law("P15", (20, 4, 60, 100))
def check_threshold_of_zero_is_no_threshold(
    num_with_spec: int, num_computed: int, budget: int, max_model_len: int
) -> None:
    """The result is that of a threshold as large as the number of tokens left."""
    assert 0 <= num_computed < num_with_spec and 0 <= budget
    gap = num_with_spec - num_computed
    without = compute_share(num_with_spec, num_computed, 0, budget, max_model_len - 1)
    assert without == compute_share(num_with_spec, num_computed, gap, budget, max_model_len - 1)


@ROOM.law("P15", (20, 4, 8, 6, 3, 100))
def check_more_budget_never_means_fewer_tokens(
    num_with_spec: int,
    num_computed: int,
    threshold: int,
    budget: int,
    more: int,
    max_model_len: int,
) -> None:
    """The number of tokens grows by no more than the budget."""
    assert 0 <= num_computed <= num_with_spec and 0 <= threshold and 0 <= budget and 0 <= more
    assert 2 <= max_model_len
    few = compute_share(num_with_spec, num_computed, threshold, budget, max_model_len - 1)
    many = compute_share(num_with_spec, num_computed, threshold, budget + more, max_model_len - 1)
    assert few <= many <= few + more


@ROOM.law("P15", (20, 4, 6, 5, 100))
def check_two_steps_compute_as_much_as_one_with_both_budgets(
    num_with_spec: int, num_computed: int, budget: int, next_budget: int, max_model_len: int
) -> None:
    """Chunked prefill skips no token and computes none twice."""
    assert 0 <= num_computed < num_with_spec and 0 <= budget and 0 <= next_budget
    assert num_computed < max_model_len
    first = compute_share(num_with_spec, num_computed, 0, budget, max_model_len - 1)
    second = compute_share(num_with_spec, num_computed + first, 0, next_budget, max_model_len - 1)
    assert first + second == compute_share(
        num_with_spec, num_computed, 0, budget + next_budget, max_model_len - 1
    )


# A request with a frame in flight: computed == prompt + outputs + placeholders - 1.


@ROOM.law("P13 P15", (5, 2, 2, 3))
def check_request_is_skipped_exactly_when_its_token_in_flight_is_the_last(
    num_prompt: int, num_outputs: int, num_placeholders: int, max_tokens: int
) -> None:
    """A frame's sampled token is sure; its drafts may be rejected."""
    assert 1 <= num_prompt and 0 <= num_outputs < max_tokens and 1 <= num_placeholders
    num_computed = num_prompt + num_outputs + num_placeholders - 1
    is_past = is_past_max_tokens(num_computed, num_placeholders, num_prompt, max_tokens)
    assert is_past == (num_outputs + 1 >= max_tokens)


@ROOM.law("P10 P15", (5, 5, 1))
def check_request_without_placeholders_is_never_skipped(
    num_computed: int, num_prompt: int, max_tokens: int
) -> None:
    """A request without a frame in flight would never be finished by a commit."""
    assert 0 <= num_computed and 1 <= num_prompt and 1 <= max_tokens
    is_past = is_past_max_tokens(num_computed, 0, num_prompt, max_tokens)
    assert not is_past


# A waiting request.


@ROOM.law("P12 P15", (20, 16, 8), hit_counts_twice)
def check_new_request_computes_the_tokens_after_its_hit(
    num_known: int, num_hit: int, threshold: int
) -> None:
    """It gets at least one token if the hit leaves one, and none of the hit."""
    assert 0 <= num_hit < num_known and 0 <= threshold
    num_new = compute_share(num_known, num_hit, threshold, num_known, num_known)
    assert 1 <= num_new <= num_known - num_hit
    assert num_new == num_known - num_hit or num_new == threshold


@ROOM.law("P15", (20, 4, 8, 100))
def check_admission_and_running_phase_count_tokens_alike(
    num_known: int, num_done: int, threshold: int, budget: int
) -> None:
    """A hit counts like computed tokens: there is no prefill phase with a rule of its own."""
    assert 0 <= num_done < num_known and 0 <= threshold and 0 <= budget
    waiting = compute_share(num_known, num_done, threshold, budget, num_known)
    whole = compute_share(num_known, num_done, threshold, budget, num_known, is_whole=True)
    running = compute_share(num_known, num_done, threshold, budget, num_known + 1)
    assert waiting == running
    due = compute_share(num_known, num_done, threshold, num_known, num_known)
    assert whole == (due if due <= budget else 0)


# The engine.


@ROOM.law("P9 P15", (20, 4, 2, 8, 6, 100))
def check_engine_counts_the_same_tokens_for_a_running_request(
    num_known: int,
    num_computed: int,
    num_drafts: int,
    threshold: int,
    budget: int,
    max_model_len: int,
) -> None:
    """The model length replaces a threshold of zero in the engine's arrays."""
    assert 1 <= num_known < max_model_len <= MAX_INT and 0 <= num_computed and 0 <= num_drafts
    assert 0 <= threshold <= MAX_INT and 1 <= budget <= MAX_INT
    config = build_config(
        max_model_len=max_model_len,
        long_prefill_token_threshold=threshold,
        max_num_batched_tokens=budget,
    )
    request = replace(build_runner("a", num_known, num_computed), spec_token_ids=Tokens(num_drafts))
    host = build_host(config, request)
    due = compute_share(num_known + num_drafts, num_computed, threshold, budget, max_model_len - 1)
    assert PLANNING._tokens_to_run(host, 0) == due
