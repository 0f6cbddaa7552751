"""Repetition: a request ends if its outputs repeat a pattern, where it asks for that."""

from __future__ import annotations

from typing import Final

from blockstep.spec.core import endings
from blockstep.spec.core.endings import Stop
from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.requests import RequestState
from blockstep.spec.vocabulary import FinishReason, RepetitionDetection, TokenIds


def compute_stop(
    request: RequestState, outputs: TokenIds, num_known: int, max_model_len: int
) -> Stop:
    """Return why a request ends: for a repetition, after all other reasons.

    Source: vLLM 0.19.1 `check_stop`; P13.
    """
    stop = endings.compute_stop(request, outputs, num_known, max_model_len)
    detection = request.request.repetition_detection
    if stop[0] is not None or detection is None or len(outputs) < request.request.min_tokens:
        return stop
    return (FinishReason.REPETITION, None) if is_repeating(outputs, detection) else stop


def is_repeating(outputs: TokenIds, detection: RepetitionDetection) -> bool:
    """Whether the outputs end with `min_count` copies of one pattern of an allowed size.

    Source: vLLM 0.19.1 `check_sequence_repetition`, when run.
    """
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        num_tokens = size * detection.min_count
        if num_tokens > len(outputs):
            return False
        tail = outputs[len(outputs) - num_tokens :]
        if tail == tail[:size] * detection.min_count:
            return True
    return False


FEATURE: Final = Feature("repetition", is_always, instead={endings.compute_stop: compute_stop})
