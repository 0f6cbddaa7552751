"""Laws about the tokens that a session keeps, and about reclaiming its blocks.

PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule, instead
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.requests import Holding, RequestState
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.features.reclaim import process_reclaim
from blockstep.spec.features.sessions import (
    compute_longest,
    compute_num_kept,
    get_num_kept,
    get_num_kept_keys,
    get_stopped,
)
from blockstep.spec.vocabulary import BlockKey, Status

ROOM = LawModule("sessions")


# Mistakes.


@instead(get_num_kept, theirs="0.19.1")
def as_many_are_kept_as_are_computed(request: RequestState) -> int:
    """Accepted drafts after the stop, and frames in flight, count as kept."""
    return request.num_computed_tokens


@instead(get_stopped, theirs="0.19.1")
def computed_is_left_as_it_is(pool: Pool, request: RequestState) -> tuple[Pool, RequestState]:
    """Tokens after the stop count as computed, although other tokens will take their places."""
    return pool, request


@instead(get_num_kept_keys, theirs="0.19.1")
def keys_are_appended(request: RequestState) -> int:
    """The key of a block with the dropped last token stays."""
    return len(request.block_keys)


@instead(compute_num_kept, theirs="#42489")
def chunks_are_looked_at_alone() -> int:
    """The tokens kept from earlier inputs do not count."""
    return 0


@instead(process_reclaim, theirs="#49439")
def sessions_never_give_way() -> bool:
    """An idle session keeps its blocks when another request lacks them."""
    return False


# Laws.


@ROOM.law("P3 P12 P13", (5, 3, 2), as_many_are_kept_as_are_computed, computed_is_left_as_it_is)
def check_stopped_session_keeps_all_tokens_but_the_last(
    num_prompt: int, num_outputs: int, num_computed: int
) -> None:
    """The input has stopped while it ran, or after it was preempted.

    No token behind the kept ones stays computed; fewer are only if the session was preempted.
    """
    assert 1 <= num_prompt and 1 <= num_outputs and 0 <= num_computed
    request = h.build_request("a", num_prompt, num_outputs, resumable=True)
    request = replace(request, num_computed_tokens=num_computed)
    assert get_num_kept(request) == num_prompt + num_outputs - 1
    pool = h.build_pool((0,), (), ())
    _, after = get_stopped(h.build_config(), pool, request, STRICT_RULES)
    assert after.num_computed_tokens == min(num_computed, num_prompt + num_outputs - 1)


@ROOM.law("P3 P6", (6, 3), keys_are_appended)
def check_stopped_session_keeps_the_keys_of_full_kept_blocks(
    num_known: int, block_size: int
) -> None:
    """All full blocks have keys; the last token, which is dropped, may complete a block."""
    assert 2 <= num_known and 1 <= block_size
    keys = cast("tuple[BlockKey, ...]", h.Tokens(num_known // block_size))
    request = replace(h.build_request("a", num_known), block_keys=keys)
    num_kept = compute_num_kept(num_known)
    num_keys = get_num_kept_keys(request, num_kept, block_size)
    assert num_keys * block_size <= num_kept < (num_keys + 1) * block_size


@ROOM.law("P11", (5, 3, 2, 4, 100), chunks_are_looked_at_alone)
def check_session_never_exceeds_the_length_its_inputs_were_checked_for(
    num_prompt: int, num_outputs: int, num_more: int, max_tokens: int, max_model_len: int
) -> None:
    """This holds however early an input stops; `num_more` tokens follow the kept ones."""
    assert 1 <= num_prompt and 1 <= num_outputs <= max_tokens and 1 <= num_more
    assert num_prompt + num_outputs <= max_model_len
    reckoned = compute_num_kept(compute_longest(num_prompt, max_tokens, max_model_len)) + num_more
    assert num_prompt + num_outputs - 1 + num_more <= reckoned


@ROOM.law("P10 P17", (20, 8, 100), sessions_never_give_way)
def check_idle_session_gives_up_blocks_that_a_waiting_request_needs(
    known_b: int, block_size: int, budget: int
) -> None:
    """Request `a` holds two of three blocks; it keeps them exactly if `b` needs only one."""
    assert 1 <= block_size and 1 <= budget and 1 <= known_b <= 3 * block_size < 8192
    config = h.build_config(block_size, num_blocks=4, max_num_batched_tokens=budget)
    resting = replace(
        h.build_runner("a", 2 * block_size, 2 * block_size - 1, (1, 2), resumable=True),
        status=Status.WAITING_FOR_STREAMING_REQ,
    )
    state = h.build_state(config, (resting,), (h.build_request("b", known_b),))
    after, _ = h.schedule(replace(state, running=(), skipped_waiting=("a",)))
    assert after.running == ("b",)
    holds = after.requests["a"].holdings == (Holding((1, 2), 0),)
    assert holds == (known_b <= block_size)
    assert holds or after.requests["a"].num_computed_tokens == 0
