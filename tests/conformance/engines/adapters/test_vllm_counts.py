"""Counters of vLLM's prefix cache: only the lookups of failed admissions are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blockstep.conformance.engines.adapters.vllm_counts import Lookups, leave_out
from blockstep.spec import vocabulary as v


def build_request(status: str, num_tokens: int, num_computed: int) -> Any:
    return SimpleNamespace(
        status=SimpleNamespace(name=status),
        num_tokens=num_tokens,
        num_computed_tokens=num_computed,
        num_external_computed_tokens=0,
        skip_reading_prefix_cache=False,
        is_finished=lambda: False,
    )


def build_scheduler(received: tuple[str, ...] = (), **requests: Any) -> Any:
    return SimpleNamespace(requests=requests, finished_recving_kv_req_ids=set(received))


BEFORE = build_scheduler(A=build_request("WAITING", 3, 0), B=build_request("WAITING", 5, 0))
AFTER = build_scheduler(A=build_request("RUNNING", 3, 3), B=build_request("WAITING", 5, 0))


@pytest.mark.parametrize(
    ("counted", "failed"),
    [
        ((3, 2), (0, 0)),  # A, with two of its tokens
        ((8, 6), (5, 4)),  # and B, which was not admitted
        ((6, 2), (0, 0)),  # A twice: no waiting request has three tokens
        ((8, 1), (0, 0)),  # fewer hits than A had
    ],
)
def test_only_requests_that_still_wait_count_as_failed_lookups(
    counted: tuple[int, int], failed: tuple[int, int]
) -> None:
    lookups = Lookups.now(BEFORE, (10, 10))
    now = (10 + counted[0], 10 + counted[1])
    assert lookups.list_failed(AFTER, {"A": 1}, now) == failed


def test_loading_and_running_requests_make_no_lookup() -> None:
    loading = build_request("WAITING_FOR_REMOTE_KVS", 1, 1)
    running = build_request("RUNNING", 4, 0)  # its load failed
    assert Lookups.now(build_scheduler(A=loading, B=running), (0, 0)).known == {}
    assert Lookups.now(build_scheduler(("A",), A=loading), (0, 0)).known == {"A": 1}


def test_counts_of_failed_lookups_are_subtracted() -> None:
    stats = v.Stats(prefix_cache_queries=8, prefix_cache_hits=6)
    left = v.Stats(prefix_cache_queries=3, prefix_cache_hits=2)
    assert leave_out(stats, (5, 4)) == left
