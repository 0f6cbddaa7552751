"""LLMServingSim: `score` finds its three known differences, and without them it agrees.

Set BLOCKSTEP_LLMSERVINGSIM to a checkout of LLMServingSim to run these tests.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from blockstep.conformance.lockstep.score import Aspect
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.score import ScoreResult, score

CHECKOUT = os.environ.get("BLOCKSTEP_LLMSERVINGSIM")
pytestmark = pytest.mark.skipif(
    CHECKOUT is None, reason="BLOCKSTEP_LLMSERVINGSIM names no checkout of LLMServingSim"
)
RELEASE = "vllm-0.19.1"


def scored(num_events: int, **options: Any) -> ScoreResult:
    wanted = {"engine": "llmservingsim", "path": CHECKOUT, "profile": RELEASE, **options}
    return score(CheckOptions(max_events=num_events, **wanted))


def test_llmservingsim_agrees_without_a_pipeline_and_a_prefix_cache() -> None:
    result = scored(1500, max_depth=1, without_features=("caching",))
    assert all(result.agreed[aspect] == result.total[aspect] for aspect in Aspect)
    assert result.total[Aspect.PREEMPTIONS] > 20


def test_the_three_known_differences_are_found() -> None:
    found = {it.kind: it.shrunk for it in scored(5000).list_firsts()}
    assert all(found.values())
    kinds = {(it.aspect, it.shape, it.has_pipeline, it.has_cache) for it in found}
    assert (Aspect.STEPS, "", True, False) in kinds, "a request runs again before its token"
    assert (Aspect.TOKENS, "not delivered", True, False) in kinds, "preempted, it loses its token"
    assert (Aspect.HITS, "", False, True) in kinds, "one of two equal blocks can be hit"
