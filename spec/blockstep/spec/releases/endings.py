"""Endings: when and why a release ends a request."""

from __future__ import annotations

from dataclasses import replace

from blockstep.spec.lives.endings import is_at_length
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.requests import RequestState
from blockstep.spec.rules import Rules, Stop
from blockstep.spec.vocabulary import Config, FinishReason, TokenIds


def min_tokens_mask_length(rules: Rules, _config: Config) -> Rules:
    """Below min_tokens not even max_tokens and max_model_len end a request."""

    def compute_stop(
        request: RequestState, outputs: TokenIds, num_known: int, max_model_len: int
    ) -> Stop:
        if len(outputs) < request.request.min_tokens:
            return None, None
        return rules.compute_stop(request, outputs, num_known, max_model_len)

    return replace(rules, compute_stop=compute_stop)


def stop_tokens_ignore_min_tokens(rules: Rules, _config: Config) -> Rules:
    """Stop tokens end a request below min_tokens; only the sampler holds them off."""

    def compute_stop(
        request: RequestState, outputs: TokenIds, num_known: int, max_model_len: int
    ) -> Stop:
        asked, last = request.request, outputs[-1]
        if last == asked.eos_token_id:
            return FinishReason.STOP, None
        if last in asked.stop_token_ids:
            return FinishReason.STOP, last
        return rules.compute_stop(request, outputs, num_known, max_model_len)

    return replace(rules, compute_stop=compute_stop)


def length_comes_before_stop(rules: Rules, _config: Config) -> Rules:
    """A stop token at the length cap ends a request by length."""

    def compute_stop(
        request: RequestState, outputs: TokenIds, num_known: int, max_model_len: int
    ) -> Stop:
        if is_at_length(request.request, len(outputs), num_known, max_model_len):
            return FinishReason.LENGTH, None
        return rules.compute_stop(request, outputs, num_known, max_model_len)

    return replace(rules, compute_stop=compute_stop)


STORIES = (
    QuirkStory(
        Quirk.MIN_TOKENS_MASK_LENGTH,
        min_tokens_mask_length,
        "below min_tokens not even max_tokens and max_model_len end a request",
        ("P9", "P10", "P13"),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0",
        "max_model_len 4, a prompt of 2 tokens, min_tokens 8: at the model length it can neither "
        "be scheduled nor end",
    ),
    QuirkStory(
        Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS,
        stop_tokens_ignore_min_tokens,
        "stop tokens end a request below min_tokens; only the sampler holds them off",
        ("P13",),
        "#47489, #49521, #51299 (named in its source)",
        "0.11.0 0.33.0",
        "min_tokens 3; the first output is the end-of-sequence token: the request ends",
    ),
    QuirkStory(
        Quirk.LENGTH_COMES_BEFORE_STOP,
        length_comes_before_stop,
        "a stop token at the length cap ends a request by length",
        ("P13",),
        "not found upstream (fixed in 0.11.1)",
        "0.11.0",
        "max_tokens 1; the output is the end-of-sequence token: the reason told is length",
    ),
)
