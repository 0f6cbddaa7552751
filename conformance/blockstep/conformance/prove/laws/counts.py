"""Counts: how many tokens a request gets in a step. PYTEST_DONT_REWRITE."""

from __future__ import annotations

from blockstep.conformance.prove.law import Room, instead
from blockstep.spec.step.schedule import (
    compute_num_running_tokens,
    compute_num_waiting_tokens,
    is_past_max_tokens,
)

ROOM = Room("counts")


# Mistakes.


def budget_is_overdrawn_by_a_decode(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> int:
    """A shortcut for the plain decode, taken without a look at the budget."""
    if num_with_spec - num_computed == 1:
        return 1
    capped = threshold if 0 < threshold < num_with_spec - num_computed else budget
    return min(num_with_spec - num_computed, capped, budget, max_model_len - 1 - num_computed)


def last_position_is_computed_too(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> int:
    """The room is counted up to the model length itself."""
    num_new = num_with_spec - num_computed
    if 0 < threshold < num_new:
        num_new = threshold
    return min(num_new, budget, max_model_len - num_computed)


def threshold_is_for_newcomers_only(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> int:
    """A runner is not held to it."""
    return min(num_with_spec - num_computed, budget, max_model_len - 1 - num_computed)


def threshold_is_a_minimum(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> int:
    """A request is given the threshold even where its gap is smaller."""
    num_new = max(num_with_spec - num_computed, threshold)
    return min(num_new, budget, max_model_len - 1 - num_computed)


def threshold_is_taken_off_the_budget(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> int:
    """What the threshold reserves for others is not given to anybody."""
    num_new = num_with_spec - num_computed
    return min(num_new, max(budget - threshold, 1), max_model_len - 1 - num_computed)


def chunk_is_rounded_down_to_blocks(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> int:
    """Chunks end at a block of 16; upstream does so for recurrent state ('align')."""
    num_new = num_with_spec - num_computed
    if 0 < threshold < num_new:
        num_new = threshold
    num_new = min(num_new, budget, max_model_len - 1 - num_computed)
    return num_new if num_new == num_with_spec - num_computed else num_new // 16 * 16


def threshold_of_zero_caps(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> int:
    """Zero is taken as a cap instead of as no cap."""
    num_new = min(num_with_spec - num_computed, threshold)
    return min(num_new, budget, max_model_len - 1 - num_computed)


def whoever_does_not_fit_waits(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> int:
    """No chunking: all or nothing."""
    num_new = num_with_spec - num_computed
    return num_new if num_new <= min(budget, max_model_len - 1 - num_computed) else 0


def drafts_count_as_sure(
    num_computed: int, num_placeholders: int, num_prompt: int, max_tokens: int
) -> bool:
    """Every placeholder is taken for an output, though drafts may be rejected."""
    return num_placeholders > 0 and num_computed + 1 >= num_prompt + max_tokens


def own_token_is_not_counted(
    num_computed: int, num_placeholders: int, num_prompt: int, max_tokens: int
) -> bool:
    """The token that the frame in flight is sure to sample is left out."""
    return num_placeholders > 0 and num_computed + 1 - num_placeholders >= num_prompt + max_tokens


def nothing_in_flight_counts_as_a_promise(
    num_computed: int, num_placeholders: int, num_prompt: int, max_tokens: int
) -> bool:
    """The rule is applied to a request that nobody has promised anything."""
    return num_computed + 2 - num_placeholders >= num_prompt + max_tokens


def hit_is_computed_again(num_known: int, num_hit: int, threshold: int) -> int:
    """The hit is not taken off."""
    return threshold if 0 < threshold < num_known else num_known


def hit_counts_twice(num_known: int, num_hit: int, threshold: int) -> int:
    """The hit is taken off once more where the threshold caps."""
    num_new = num_known - num_hit
    return threshold - min(num_hit, threshold) if 0 < threshold < num_new else num_new


def threshold_is_for_runners_only(num_known: int, num_hit: int, threshold: int) -> int:
    """A newcomer is not held to the threshold."""
    return num_known - num_hit


# A running request.


@ROOM.law(
    "P9",
    witness=(20, 4, 8, 6, 100),
    twins=(instead(compute_num_running_tokens, budget_is_overdrawn_by_a_decode),),
)
def check_running_request_stays_within_the_budget(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> bool:
    """Whatever the caps are, zero budget included."""
    assert 0 <= num_computed <= num_with_spec and 0 <= threshold and 0 <= budget
    assert 2 <= max_model_len
    num_new = compute_num_running_tokens(
        num_with_spec, num_computed, threshold, budget, max_model_len
    )
    assert num_new <= budget
    return True


@ROOM.law(
    "P9",
    witness=(20, 4, 8, 6, 100),
    twins=(instead(compute_num_running_tokens, last_position_is_computed_too),),
)
def check_position_before_the_model_length_is_never_computed(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> bool:
    """The token sampled before it was the last one."""
    assert 0 <= num_computed <= num_with_spec and 0 <= threshold and 0 <= budget
    assert 2 <= max_model_len
    num_new = compute_num_running_tokens(
        num_with_spec, num_computed, threshold, budget, max_model_len
    )
    assert num_computed + num_new <= max_model_len - 1
    return True


@ROOM.law(
    "P9",
    witness=(20, 4, 8, 60, 100),
    twins=(instead(compute_num_running_tokens, threshold_is_for_newcomers_only),),
)
def check_running_request_stays_within_the_threshold(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> bool:
    """One request gets no more than that in one step."""
    assert 0 <= num_computed <= num_with_spec and 0 < threshold and 0 <= budget
    assert 2 <= max_model_len
    num_new = compute_num_running_tokens(
        num_with_spec, num_computed, threshold, budget, max_model_len
    )
    assert num_new <= threshold
    return True


@ROOM.law(
    "P12",
    witness=(20, 4, 8, 60, 100),
    twins=(instead(compute_num_running_tokens, threshold_is_a_minimum),),
)
def check_running_request_gets_no_more_than_its_gap(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> bool:
    """Nothing is scheduled that nobody knows, promised or drafted."""
    assert 0 <= num_computed <= num_with_spec and 0 <= threshold and 0 <= budget
    assert 2 <= max_model_len
    num_new = compute_num_running_tokens(
        num_with_spec, num_computed, threshold, budget, max_model_len
    )
    assert num_computed + num_new <= num_with_spec
    return True


@ROOM.law(
    "P15",
    witness=(20, 4, 8, 6, 100),
    twins=(instead(compute_num_running_tokens, threshold_is_taken_off_the_budget),),
)
def check_running_request_catches_up_unless_a_cap_binds(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> bool:
    """It gets its gap, or exactly what one of the three caps leaves."""
    assert 0 <= num_computed < num_with_spec and 0 <= threshold and 0 <= budget
    num_new = compute_num_running_tokens(
        num_with_spec, num_computed, threshold, budget, max_model_len
    )
    caps = (num_with_spec - num_computed, budget, max_model_len - 1 - num_computed)
    assert num_new in caps or (threshold > 0 and num_new == threshold)
    return True


@ROOM.law(
    "P10",
    witness=(20, 4, 8, 6, 100),
    twins=(
        instead(compute_num_running_tokens, whoever_does_not_fit_waits),
        instead(
            compute_num_running_tokens,
            chunk_is_rounded_down_to_blocks,
            theirs="#40707 (recurrent state)",
        ),
    ),
)
def check_running_request_with_a_gap_room_and_budget_progresses(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> bool:
    """One token at least: the same step would come again otherwise, and bring no more."""
    assert 0 <= num_computed < num_with_spec and 0 <= threshold
    assert 1 <= budget and num_computed < max_model_len - 1
    num_new = compute_num_running_tokens(
        num_with_spec, num_computed, threshold, budget, max_model_len
    )
    assert num_new >= 1
    return True


@ROOM.law(
    "P15",
    witness=(20, 4, 60, 100),
    twins=(instead(compute_num_running_tokens, threshold_of_zero_caps),),
)
def check_threshold_of_zero_is_no_threshold(
    num_with_spec: int, num_computed: int, budget: int, max_model_len: int
) -> bool:
    """It gives what a threshold as large as the gap gives."""
    assert 0 <= num_computed < num_with_spec and 0 <= budget
    gap = num_with_spec - num_computed
    without = compute_num_running_tokens(num_with_spec, num_computed, 0, budget, max_model_len)
    assert without == compute_num_running_tokens(
        num_with_spec, num_computed, gap, budget, max_model_len
    )
    return True


@ROOM.law(
    "P15",
    witness=(20, 4, 8, 6, 3, 100),
    twins=(instead(compute_num_running_tokens, whoever_does_not_fit_waits),),
)
def check_more_budget_never_means_fewer_tokens(
    num_with_spec: int,
    num_computed: int,
    threshold: int,
    budget: int,
    more: int,
    max_model_len: int,
) -> bool:
    """And no more of them than there is more budget."""
    assert 0 <= num_computed <= num_with_spec and 0 <= threshold and 0 <= budget and 0 <= more
    assert 2 <= max_model_len
    few = compute_num_running_tokens(num_with_spec, num_computed, threshold, budget, max_model_len)
    many = compute_num_running_tokens(
        num_with_spec, num_computed, threshold, budget + more, max_model_len
    )
    assert few <= many <= few + more
    return True


@ROOM.law(
    "P15",
    witness=(20, 4, 6, 5, 100),
    twins=(instead(compute_num_running_tokens, whoever_does_not_fit_waits),),
)
def check_two_steps_compute_what_one_of_both_budgets_would(
    num_with_spec: int, num_computed: int, budget: int, next_budget: int, max_model_len: int
) -> bool:
    """Cutting a prompt into chunks loses nothing and repeats nothing."""
    assert 0 <= num_computed < num_with_spec and 0 <= budget and 0 <= next_budget
    assert num_computed < max_model_len
    first = compute_num_running_tokens(num_with_spec, num_computed, 0, budget, max_model_len)
    second = compute_num_running_tokens(
        num_with_spec, num_computed + first, 0, next_budget, max_model_len
    )
    assert first + second == compute_num_running_tokens(
        num_with_spec, num_computed, 0, budget + next_budget, max_model_len
    )
    return True


# A request with a promise in flight: computed == prompt + outputs + placeholders - 1.


@ROOM.law(
    "P13",
    "P15",
    witness=(5, 2, 2, 3),
    twins=(
        instead(is_past_max_tokens, drafts_count_as_sure),
        instead(is_past_max_tokens, own_token_is_not_counted),
    ),
)
def check_request_is_passed_over_exactly_when_the_sure_token_is_its_last(
    num_prompt: int, num_outputs: int, num_placeholders: int, max_tokens: int
) -> bool:
    """Of what a frame promises one token is sure; the others are drafts, to be rejected perhaps."""
    assert 1 <= num_prompt and 0 <= num_outputs < max_tokens and 1 <= num_placeholders
    num_computed = num_prompt + num_outputs + num_placeholders - 1
    is_past = is_past_max_tokens(num_computed, num_placeholders, num_prompt, max_tokens)
    assert is_past == (num_outputs + 1 >= max_tokens)
    return True


@ROOM.law(
    "P10",
    "P15",
    witness=(5, 5, 1),
    twins=(instead(is_past_max_tokens, nothing_in_flight_counts_as_a_promise),),
)
def check_request_with_nothing_promised_is_never_passed_over(
    num_computed: int, num_prompt: int, max_tokens: int
) -> bool:
    """Nobody would end it."""
    assert 0 <= num_computed and 1 <= num_prompt and 1 <= max_tokens
    is_past = is_past_max_tokens(num_computed, 0, num_prompt, max_tokens)
    assert not is_past
    return True


# A waiting request.


@ROOM.law(
    "P12",
    "P15",
    witness=(20, 16, 8),
    twins=(
        instead(compute_num_waiting_tokens, hit_is_computed_again),
        instead(compute_num_waiting_tokens, hit_counts_twice),
    ),
)
def check_newcomer_computes_what_the_hit_leaves_up_to_the_threshold(
    num_known: int, num_hit: int, threshold: int
) -> bool:
    """With a hit that leaves a token it gets at least one, and never one that was hit."""
    assert 0 <= num_hit < num_known and 0 <= threshold
    num_new = compute_num_waiting_tokens(num_known, num_hit, threshold)
    assert 1 <= num_new <= num_known - num_hit
    assert num_new == num_known - num_hit or num_new == threshold
    return True


@ROOM.law(
    "P15",
    witness=(20, 4, 8, 100),
    twins=(
        instead(compute_num_waiting_tokens, threshold_is_for_runners_only),
        instead(compute_num_running_tokens, threshold_of_zero_caps),
    ),
)
def check_admission_and_running_count_alike(
    num_known: int, num_done: int, threshold: int, budget: int
) -> bool:
    """A hit is as good as computed tokens: there is no prefill phase with a rule of its own."""
    assert 0 <= num_done < num_known and 0 <= threshold and 0 <= budget
    waiting = min(compute_num_waiting_tokens(num_known, num_done, threshold), budget)
    assert waiting == compute_num_running_tokens(
        num_known, num_done, threshold, budget, num_known + 1
    )
    return True
