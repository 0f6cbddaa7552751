"""Endings: quirks of releases in when, and with which reason, a request finishes."""

from __future__ import annotations

from blockstep.spec.core import endings
from blockstep.spec.core.endings import Stop, is_at_length
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import Config, FinishReason, TokenIds


def min_tokens_mask_length(rules: Rules, _config: Config) -> Rules:
    """Below min_tokens a request does not finish, even at max_tokens or max_model_len."""

    def compute_stop(
        request: RequestState, outputs: TokenIds, num_known: int, max_model_len: int
    ) -> Stop:
        if len(outputs) < request.request.min_tokens:
            return None, None
        return rules[endings.compute_stop](request, outputs, num_known, max_model_len)

    return rules.replacing(endings.compute_stop, compute_stop)


def stop_tokens_ignore_min_tokens(rules: Rules, _config: Config) -> Rules:
    """A stop token below min_tokens finishes a request; only the sampler prevents such tokens."""

    def compute_stop(
        request: RequestState, outputs: TokenIds, num_known: int, max_model_len: int
    ) -> Stop:
        asked, last = request.request, outputs[-1]
        if last == asked.eos_token_id:
            return FinishReason.STOP, None
        if last in asked.stop_token_ids:
            return FinishReason.STOP, last
        return rules[endings.compute_stop](request, outputs, num_known, max_model_len)

    return rules.replacing(endings.compute_stop, compute_stop)


def length_comes_before_stop(rules: Rules, _config: Config) -> Rules:
    """A stop token at the length limit finishes a request with reason length."""

    def compute_stop(
        request: RequestState, outputs: TokenIds, num_known: int, max_model_len: int
    ) -> Stop:
        if is_at_length(request.request, len(outputs), num_known, max_model_len):
            return FinishReason.LENGTH, None
        return rules[endings.compute_stop](request, outputs, num_known, max_model_len)

    return rules.replacing(endings.compute_stop, compute_stop)


STORIES = (
    QuirkStory(
        Quirk.MIN_TOKENS_MASK_LENGTH,
        min_tokens_mask_length,
        "below min_tokens a request does not finish, even at max_tokens or max_model_len",
        ("P9", "P10", "P13"),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0",
        "max_model_len 4, a prompt of 2 tokens, min_tokens 8: at the model length it can neither "
        "be scheduled nor finish",
    ),
    QuirkStory(
        Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS,
        stop_tokens_ignore_min_tokens,
        "a stop token below min_tokens finishes a request; only the sampler prevents such tokens",
        ("P13",),
        "#47489, #49521, #51299 (named in its source)",
        "0.11.0 0.33.0",
        "min_tokens 3; the first output is the end-of-sequence token: the request finishes",
    ),
    QuirkStory(
        Quirk.LENGTH_COMES_BEFORE_STOP,
        length_comes_before_stop,
        "a stop token at the length limit finishes a request with reason length",
        ("P13",),
        "not found upstream (fixed in 0.11.1)",
        "0.11.0",
        "max_tokens 1; the output is the end-of-sequence token: the finish reason is length",
    ),
)
