"""Laws about the end of a request, and about its block keys.

PYTEST_DONT_REWRITE.

Tokens are symbolic where a rule reads them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.host_states import RESULTS, build_host
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec import vocabulary as v
from blockstep.spec.core.endings import Stop, compute_stop, get_extended
from blockstep.spec.core.prefix_cache import extend_block_keys, get_tokens
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import STRICT_RULES, Rules
from blockstep.spec.features import get_config_rules
from blockstep.spec.features.identity import get_item_keys
from blockstep.spec.features.repetition import is_repeating
from blockstep.spec.releases.block_keys import (
    output_block_key_has_only_the_last_item as last_item_names_outputs,
)

ROOM = LawModule("output")
Names = tuple[tuple[str, int], ...]


# Mistakes.


@instead(compute_stop, theirs="not found upstream")
def min_tokens_hold_off_the_length(
    right: Right[Stop], request: RequestState, outputs: v.TokenIds
) -> Stop:
    """No length cap finishes a request before min_tokens."""
    return (None, None) if len(outputs) < request.request.min_tokens else right()


@instead(extend_block_keys, theirs="not found upstream")
def last_item_names_the_blocks_of_outputs(
    right: Right[tuple[v.BlockKey, ...]], rules: Rules
) -> tuple[v.BlockKey, ...]:
    """A key of a block with outputs contains only the last item."""
    return right(rules=last_item_names_outputs(rules, v.Config(8)))


# Ends of requests.


@ROOM.law("P9 P10 P13", (5, 20, 20, 30, 100), min_tokens_hold_off_the_length)
def check_length_finishes_a_request_even_below_min_tokens(
    num_prompt: int, num_outputs: int, max_tokens: int, min_tokens: int, max_model_len: int
) -> None:
    """Otherwise it could neither run nor finish: position max_model_len - 1 is never computed."""
    assert 1 <= num_prompt and 1 <= num_outputs and 1 <= max_tokens and 0 <= min_tokens
    assert 2 <= max_model_len
    request = h.build_request("a", num_prompt, num_outputs, max_tokens, min_tokens=min_tokens)
    num_known = num_prompt + num_outputs
    reason, _ = compute_stop(request, request.output_token_ids, num_known, max_model_len)
    is_long = num_known >= max_model_len or num_outputs >= max_tokens
    assert reason is (v.FinishReason.LENGTH if is_long else None)


@ROOM.law("P13", (7, 7, 9, 3, 2))
def check_stop_tokens_finish_a_request_from_min_tokens_on(
    last: int, eos: int, stop: int, num_outputs: int, min_tokens: int
) -> None:
    """The end of sequence comes before a stop token, and either comes before the length caps."""
    assert 0 <= last and 0 <= eos and 0 <= stop and 1 <= num_outputs < 1000 and 0 <= min_tokens
    request = h.build_request(
        "a", 1, eos_token_id=eos, stop_token_ids=(stop,), min_tokens=min_tokens
    )
    outputs = h.Tokens(num_outputs, last)
    reason, token = compute_stop(request, outputs, num_outputs + 1, 8192)
    is_over = num_outputs >= min_tokens and last in (eos, stop)
    assert (reason is v.FinishReason.STOP) == is_over
    assert token == (stop if is_over and last != eos else None)


@ROOM.law("P13", (1, 7, 2, 7))
def check_no_token_is_delivered_after_the_stop(
    first: int, second: int, third: int, eos: int
) -> None:
    """A step has three tokens; those up to the first end of sequence are delivered."""
    assert 0 <= first and 0 <= second and 0 <= third and 0 <= eos
    request = replace(h.build_request("a", 1, eos_token_id=eos), output_token_ids=())
    tokens = (first, second, third)
    after, row = get_extended(request, tokens, 8192, STRICT_RULES)
    num_taken = 1 if first == eos else 2 if second == eos else 3
    assert row.new_token_ids == tokens[:num_taken]
    assert after.output_token_ids == row.new_token_ids
    assert (row.finish_reason is v.FinishReason.STOP) == (eos in tokens)


@ROOM.law("P13", (4, 4, 4))
def check_repetition_of_one_token_needs_three_equal_tokens(
    first: int, second: int, third: int
) -> None:
    """The pattern has one token, and three copies are demanded."""
    assert 0 <= first and 0 <= second and 0 <= third
    is_over = is_repeating((9, first, second, third), v.RepetitionDetection(1, min_count=3))
    assert is_over == (first == second == third)


# Block keys.


@ROOM.law("P6", (3, 4, 0, 4))
def check_item_is_in_the_keys_of_exactly_the_blocks_it_overlaps(
    offset: int, length: int, index: int, block_size: int
) -> None:
    """The item is in the key exactly if the block shares a token with it."""
    assert 0 <= offset and 1 <= length and 0 <= index and 1 <= block_size
    request = v.Request("a", (1,), items=(v.MultiModalItem("image", offset, length),))
    start = index * block_size
    named = get_item_keys(request, start, start + block_size)
    shared = min(offset + length, start + block_size) - max(offset, start)
    assert (len(named) == 1) == (shared > 0)


@ROOM.law("P6", (0, 1, 2, 4))
def check_item_at_two_offsets_of_a_block_has_two_keys(
    offset: int, other_offset: int, length: int, block_size: int
) -> None:
    """The placeholder tokens are equal in both blocks, so only the offset differs."""
    assert 0 <= offset < block_size and 0 <= other_offset < block_size and 1 <= length
    first = v.Request("a", (1,), items=(v.MultiModalItem("image", offset, length),))
    second = v.Request("b", (1,), items=(v.MultiModalItem("image", other_offset, length),))
    same = get_item_keys(first, 0, block_size) == get_item_keys(second, 0, block_size)
    assert same == (offset == other_offset)


@ROOM.law("P3", (2, 5))
def check_block_key_has_the_tokens_of_prompt_and_outputs(start: int, end: int) -> None:
    """This holds wherever the prompt ends."""
    assert 0 <= start <= end <= 6
    request = replace(
        h.build_request("a", 1), request=v.Request("a", (10, 11, 12)), output_token_ids=(13, 14, 15)
    )
    tokens = get_tokens(request, start, end)
    assert tokens == (10, 11, 12, 13, 14, 15)[start:end]


@ROOM.law("P3 P6", (4, 6), last_item_names_the_blocks_of_outputs)
def check_block_completed_by_an_output_has_all_its_items_in_the_key(
    offset: int, next_offset: int
) -> None:
    """Blocks have four tokens; the prompt has seven, with two items in its second block; one
    output.
    """
    assert 4 <= offset < next_offset <= 6
    items = (v.MultiModalItem("x", offset, 1), v.MultiModalItem("y", next_offset, 1))
    asked = v.Request("a", (1, 1, 1, 1, 1, 1, 1), items=items)
    request = replace(h.build_request("a", 1), request=asked, output_token_ids=(2,))
    keys = extend_block_keys(request, 4, get_config_rules(h.build_config()))
    assert len(keys) == 2
    assert keys[1].items == (("x", offset - 4), ("y", next_offset - 4))


# The engine.


@ROOM.law("P13", (5, 3, 3, 5, 100))
def check_engine_finishes_for_length_at_the_same_token(
    num_prompt: int, num_outputs: int, max_tokens: int, min_tokens: int, max_model_len: int
) -> None:
    """It has one bound instead of two."""
    assert 1 <= num_prompt < max_model_len <= 8192 and 1 <= num_outputs <= max_tokens <= 8192
    assert 0 <= min_tokens and num_prompt + num_outputs <= max_model_len
    request = h.build_request("a", num_prompt, num_outputs, max_tokens, min_tokens=min_tokens)
    host = build_host(h.build_config(max_model_len=max_model_len), request)
    due = compute_stop(request, request.output_token_ids, request.num_known_tokens, max_model_len)
    assert judge(host, 1) == due


@ROOM.law("P13", (7, 7, 9, 3, 2, 5))
def check_engine_finishes_for_a_stop_token_at_the_same_token(
    last: int, eos: int, stop: int, num_outputs: int, min_tokens: int, max_tokens: int
) -> None:
    """It looks for such tokens only where a request has some."""
    assert 0 <= last and 0 <= eos and 0 <= stop and 0 <= min_tokens
    assert 1 <= num_outputs <= max_tokens < 8000
    request = h.build_request(
        "a",
        1,
        num_outputs,
        max_tokens=max_tokens,
        eos_token_id=eos,
        stop_token_ids=(stop,),
        min_tokens=min_tokens,
    )
    host = build_host(h.build_config(), request)
    due = compute_stop(request, h.Tokens(num_outputs, last), 1 + num_outputs, 8192)
    assert judge(host, last) == due


def judge(host: Any, token: int) -> Stop:
    """Return what the engine decides about the last token of request 0, as `compute_stop` does."""
    verdict = RESULTS._judge(host, 0, token)
    if verdict == RESULTS.BY_LENGTH:
        return v.FinishReason.LENGTH, None
    if verdict == RESULTS.BY_EOS:
        return v.FinishReason.STOP, None
    is_stop_token = verdict == RESULTS.BY_STOP_TOKEN
    return (v.FinishReason.STOP, token) if is_stop_token else (None, None)
