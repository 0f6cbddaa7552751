"""Meter: each sample is counted once, at the time that the caller gave."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from blockstep.impl.host import HostEngine
from blockstep.impl.serving.meter import Kind, Meter, Sample
from blockstep.spec.vocabulary import (
    Abort,
    Ack,
    Commit,
    Config,
    Event,
    Fork,
    GroupKind,
    KVGroup,
    KVLoadFailurePolicy,
    KVOffer,
    KVTransfers,
    Observation,
    PinEstimate,
    Plan,
    Policy,
    Request,
    RowTokens,
    Schedule,
    StreamingUpdate,
    Submit,
    TransfersReported,
)

CONFIG = Config(num_blocks=9, block_size=2, max_num_seqs=2, max_model_len=16)
A = Request("A", (1, 2, 3, 4, 5), max_tokens=3)


class Metered:
    """An engine with a meter and a clock that the test sets."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.engine, self.meter = HostEngine(config), Meter(config)
        self.now = 0.0
        self.counted: Counter[tuple[str, str]] = Counter()
        self.seen: dict[str, list[float]] = {}
        self.shown: dict[tuple[str, str], float] = {}
        self.samples: list[Sample] = []

    def do(self, event: Event, now: float) -> Observation:
        before = self.engine.snapshot()
        answer = self.engine.apply(event)
        samples = self.meter.observe(before, event, answer, self.engine.snapshot(), now)
        self.samples += samples
        for sample in samples:
            label = sample.label[1] if sample.label else ""
            if sample.kind is Kind.COUNTER:
                self.counted[sample.name, label] += int(sample.value)
            elif sample.kind is Kind.GAUGE:
                self.shown[sample.name, label] = sample.value
            else:
                self.seen.setdefault(sample.name, []).append(sample.value)
        return answer

    def look(self) -> None:
        for sample in self.meter.explain(self.engine.snapshot()):
            assert sample.label is not None
            self.shown[sample.name, sample.label[1]] = sample.value

    def step(self, planned: float, committed: float) -> None:
        plan = self.do(Schedule(), planned)
        assert isinstance(plan, Plan)
        drafts = self.engine.frames[plan.frame_id].build_rows()
        rows = [RowTokens(name, () if d is None else (7,)) for name, d in drafts.items()]
        self.do(Commit(plan.frame_id, tuple(rows)), committed)


def test_times_of_a_request_are_measured_from_its_own_events() -> None:
    metered = Metered()
    metered.do(Submit(A), 1.0)
    metered.step(2.0, 4.0)
    metered.step(4.0, 5.0)
    metered.step(5.0, 8.0)
    assert metered.seen == {
        "time_to_first_token_seconds": [3.0],
        "inter_token_latency_seconds": [1.0, 3.0],
        "iteration_tokens_total": [6.0, 1.0, 1.0],
        "e2e_request_latency_seconds": [7.0],
        "request_queue_time_seconds": [1.0],
        "request_prefill_time_seconds": [2.0],
        "request_decode_time_seconds": [4.0],
        "request_inference_time_seconds": [6.0],
        "request_time_per_output_token_seconds": [2.0],
        "request_prompt_tokens": [5.0],
        "request_generation_tokens": [3.0],
        "request_params_max_tokens": [3.0],
    }
    assert metered.counted["prompt_tokens", ""] == 5
    assert metered.counted["generation_tokens", ""] == 3
    assert metered.counted["request_success", "length"] == 1


def test_cached_and_computed_prompt_tokens_are_counted_separately() -> None:
    metered = Metered()
    for name in "AB":
        metered.do(Submit(replace(A, request_id=name, max_tokens=1)), 0.0)
        metered.step(0.0, 1.0)
    assert metered.counted["prompt_tokens_by_source", "local_cache_hit"] == 4
    assert metered.counted["prompt_tokens_by_source", "local_compute"] == 6
    assert metered.counted["prompt_tokens_cached", ""] == 4
    assert metered.counted["prefix_cache_queries", ""] == 10
    assert metered.counted["prefix_cache_hits", ""] == 4


def test_gauges_show_the_state_and_the_waiting_reasons() -> None:
    metered = Metered()
    for name in "ABC":
        metered.do(Submit(replace(A, request_id=name)), 0.0)
    metered.look()
    assert metered.shown["num_requests_waiting_by_reason", "next"] == 1
    assert metered.shown["num_requests_waiting_by_reason", "behind"] == 2
    metered.do(Schedule(), 1.0)
    metered.look()
    assert metered.shown["num_requests_running", ""] == 2
    assert metered.shown["num_requests_waiting", ""] == 1
    assert metered.shown["num_requests_waiting_by_reason", "seats"] == 1
    assert metered.shown["num_requests_waiting_by_reason", "next"] == 0
    assert metered.shown["kv_cache_usage_perc", ""] == 4 / 8  # B shares two blocks of A


def test_pinned_blocks_that_no_request_holds_are_shown() -> None:
    metered = Metered(replace(CONFIG, policy=Policy.CONTINUUM))
    turn = replace(A, max_tokens=1, job_id="j")
    for name, job in (("A", "j"), ("B", "k")):
        metered.do(Submit(replace(turn, request_id=name, job_id=job)), 0.0)
        metered.do(PinEstimate(job, 4), 0.0)
        metered.step(0.0, 1.0)
    assert metered.shown["kv_cache_usage_perc", ""] == 2 / 8  # both pins hold the same two blocks
    assert metered.shown["kv_cache_pinned_perc", ""] == 2 / 8
    metered.do(Submit(replace(turn, request_id="C")), 1.0)
    metered.do(Schedule(), 2.0)
    assert metered.shown["kv_cache_usage_perc", ""] == 3 / 8
    assert metered.shown["kv_cache_pinned_perc", ""] == 0


def test_an_aborted_request_has_no_times_of_steps_it_did_not_reach() -> None:
    metered = Metered()
    metered.do(Submit(A), 0.0)
    metered.do(Abort(("A", "nobody")), 3.0)
    assert metered.counted["request_success", "abort"] == 1
    assert metered.seen["e2e_request_latency_seconds"] == [3.0]
    assert "request_queue_time_seconds" not in metered.seen


def test_waiting_reasons_are_computed_on_demand() -> None:
    metered = Metered(replace(CONFIG, groups=(KVGroup(GroupKind.FULL, 2),)))
    metered.do(Submit(A), 0.0)
    assert metered.shown["num_requests_waiting", ""] == 1
    assert ("num_requests_waiting_by_reason", "next") not in metered.shown
    shown = {
        sample.label: sample.value for sample in metered.meter.explain(metered.engine.snapshot())
    }
    assert shown["reason", "next"] == 1
    assert shown["reason", "remote_kv"] == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_externally_cached_tokens_are_counted_separately(is_async: bool) -> None:
    metered = Metered(replace(CONFIG, kv_connector=True, num_blocks=12))
    metered.do(
        Submit(replace(A, request_id="first", prompt_token_ids=(1, 2, 9), max_tokens=1)), 0.0
    )
    metered.step(0.0, 1.0)
    metered.do(Submit(replace(A, max_tokens=1)), 1.0)
    metered.do(KVOffer("A", 4, is_async), 1.0)
    if is_async:
        metered.do(Schedule(), 1.0)
        metered.do(TransfersReported(KVTransfers(finished_recving=("A",))), 2.0)
    metered.step(2.0, 3.0)
    assert metered.counted["external_prefix_cache_queries", ""] == 3 + 3
    assert metered.counted["external_prefix_cache_hits", ""] == 2
    assert metered.counted["prompt_tokens_by_source", "external_kv_transfer"] == 2
    assert metered.counted["prompt_tokens_by_source", "local_cache_hit"] == 2
    assert metered.counted["prompt_tokens_by_source", "local_compute"] == 3 + 1
    assert metered.counted["prompt_tokens_cached", ""] == 4


def test_a_failed_load_is_not_counted_as_transferred() -> None:
    policy = KVLoadFailurePolicy.RECOMPUTE
    metered = Metered(
        replace(CONFIG, kv_connector=True, num_blocks=12, kv_load_failure_policy=policy)
    )
    metered.do(Submit(replace(A, max_tokens=1)), 1.0)
    metered.do(KVOffer("A", 4, is_async=True), 1.0)
    plan = metered.do(Schedule(), 1.0)
    assert isinstance(plan, Plan)
    metered.do(Submit(replace(A, request_id="B", prompt_token_ids=(1, 2, 9), max_tokens=1)), 1.0)
    metered.step(1.0, 2.0)
    invalid = plan.kv_loads[0].block_ids[0]
    metered.do(TransfersReported(KVTransfers(("A",), (), invalid)), 2.0)
    metered.do(KVOffer("A"), 2.0)
    metered.step(2.0, 3.0)
    assert metered.counted["prompt_tokens_by_source", "external_kv_transfer"] == 0
    assert metered.counted["prompt_tokens_by_source", "local_cache_hit"] == 2


def test_a_request_with_a_failed_load_has_no_first_token() -> None:
    metered = Metered(replace(CONFIG, kv_connector=True, num_blocks=12))
    metered.do(Submit(A), 1.0)
    metered.do(KVOffer("A", 4, is_async=True), 1.0)
    plan = metered.do(Schedule(), 1.0)
    assert isinstance(plan, Plan)
    metered.do(TransfersReported(KVTransfers((), (), plan.kv_loads[0].block_ids[0])), 2.0)
    assert metered.counted["request_success", "error"] == 1
    assert metered.counted["prompt_tokens", ""] == 0
    assert "time_to_first_token_seconds" not in metered.seen


def test_a_session_is_counted_when_it_ends() -> None:
    metered = Metered()
    metered.do(Submit(replace(A, max_tokens=1, resumable=True)), 0.0)
    metered.step(0.0, 1.0)
    assert metered.counted["request_success", "length"] == 0
    metered.do(StreamingUpdate(Request("A", (4, 5), 1, resumable=True)), 1.0)
    metered.do(StreamingUpdate(Request("A", (4,))), 1.0)
    metered.step(1.0, 2.0)
    assert metered.counted["request_success", "length"] == 1
    assert metered.meter.explain(metered.engine.snapshot())[0].value == 0


def test_a_branch_counts_as_a_request_without_prompt_tokens() -> None:
    metered = Metered(replace(CONFIG, enable_forks=True))
    metered.do(Submit(A), 1.0)
    metered.step(2.0, 3.0)
    assert metered.do(Fork("A", "B", (8,)), 4.0) == Ack()
    assert metered.do(Fork("C", "D"), 4.0) != Ack()
    metered.look()
    assert metered.shown["num_requests_waiting_by_reason", "next"] == 1
    metered.step(5.0, 6.0)
    metered.step(7.0, 8.0)
    assert metered.counted["request_success", "length"] == 2
    assert metered.counted["prompt_tokens", ""] == len(A.prompt_token_ids)
    assert metered.counted["prompt_tokens_by_source", "local_compute"] == len(A.prompt_token_ids)
    assert metered.seen["iteration_tokens_total"] == [6.0, 2.0, 2.0]
    assert metered.seen["time_to_first_token_seconds"] == [2.0, 2.0]
    assert sorted(metered.seen["request_generation_tokens"]) == [2.0, 3.0]


def test_prometheus_exports_samples_under_vllm_names() -> None:
    client: Any = pytest.importorskip("prometheus_client")
    export: Any = pytest.importorskip("blockstep.impl.serving.export")
    registry = client.CollectorRegistry()
    exporter, metered = export.Exporter(registry, "tiny"), Metered()
    metered.do(Submit(A), 0.0)
    for _ in range(3):
        metered.step(0.5, 1.0)
    exporter.take(metered.samples)
    text = client.generate_latest(registry).decode()
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:prompt_tokens_total{labels} 5.0" in text
    assert f"vllm:num_requests_running{labels} 0.0" in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",' in text
    assert f"vllm:e2e_request_latency_seconds_count{labels} 1.0" in text
