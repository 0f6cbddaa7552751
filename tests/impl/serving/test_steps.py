"""Step traces: records of the state before a plan, of prefix hits, and of the decision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from blockstep.conformance.recorded.validate import validate
from blockstep.impl.host import HostEngine
from blockstep.impl.serving.steps import (
    PrefixCacheEvent,
    StepDecision,
    StepRecord,
    StepSnapshot,
    StepTrace,
    write_record,
)
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    Event,
    Fork,
    KVOffer,
    Plan,
    Request,
    Reset,
    RowTokens,
    Schedule,
    Submit,
)

CONFIG = Config(num_blocks=6, block_size=2, max_num_seqs=2, max_num_batched_tokens=8)
A = Request("A", (1, 2, 3, 4, 5), max_tokens=2, job_id="x")
B = Request("B", (1, 2, 3, 4, 6, 7), max_tokens=2)


class Traced:
    """An engine and all records of its steps."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.engine, self.trace = HostEngine(config), StepTrace(config, "shelf")
        self.records: list[StepRecord] = []

    def do(self, *events: Event) -> list[StepRecord]:
        """Return the records of some events."""
        records: list[StepRecord] = []
        for event in events:
            before = self.engine.snapshot()
            answer = self.engine.apply(event)
            records += self.trace.observe(before, event, answer, self.engine.snapshot())
            self.plan = answer if isinstance(answer, Plan) else self.plan
        self.records += records
        return records

    plan = Plan(0)

    def answer(self, token: int = 9) -> list[StepRecord]:
        rows = [RowTokens(row.request_id, (token,)) for row in self.plan.rows]
        return self.do(Commit(self.plan.frame_id, tuple(rows)))


def test_a_step_has_records_of_state_hits_and_decision() -> None:
    traced = Traced()
    assert traced.do(Submit(A)) == []
    seen, hit, decision = traced.do(Schedule())
    assert seen == StepSnapshot(
        *(0, [], ["A"]),
        free_blocks=5,
        total_blocks=6,
        gpu_cached_blocks=0,
        num_pinned=0,
        pinned_blocks=0,
        pinned_job_ids=[],
        max_num_running_reqs=2,
        max_num_scheduled_tokens=8,
    )
    assert hit == PrefixCacheEvent(0, "A", "x", 0, 0, 5, 5)
    assert decision == StepDecision(0, ["A"], [], [], [], {"A": 5}, 5)


def begin_branch() -> Traced:
    """Return a trace where A has an output and a branch of A waits."""
    traced = Traced(replace(CONFIG, num_blocks=9, enable_forks=True))
    traced.do(Submit(A), Schedule())
    traced.answer()
    assert traced.do(Fork("A", "C", (8,)), Fork("unknown", "F")) == []
    return traced


def test_blocks_that_a_branch_shares_are_not_traced_as_a_hit() -> None:
    seen, decision = begin_branch().do(Schedule())
    assert isinstance(seen, StepSnapshot)
    assert seen.waiting == ["C"]
    assert isinstance(decision, StepDecision)
    assert decision.scheduled_new_req_ids == ["C"]


def test_a_branch_without_shared_blocks_is_traced_like_others() -> None:
    traced = begin_branch()
    traced.do(Reset(reset_running_requests=True))
    hits = [one for one in traced.do(Schedule()) if isinstance(one, PrefixCacheEvent)]
    assert hits == [
        PrefixCacheEvent(1, "C", "x", 4, 0, 5, 6),
        PrefixCacheEvent(1, "A", "x", 0, 0, 5, 6),
    ]


def test_hits_are_traced_of_admitted_requests_only() -> None:
    traced = Traced()
    traced.do(Submit(A), Schedule())
    assert traced.answer() == []
    traced.do(Submit(B))
    seen, hit, decision = traced.do(Schedule())
    assert isinstance(seen, StepSnapshot)
    assert (seen.running, seen.waiting, seen.free_blocks) == (["A"], ["B"], 2)
    assert seen.gpu_cached_blocks == 2
    assert hit == PrefixCacheEvent(1, "B", None, 4, 0, 6, 6)
    assert decision == StepDecision(1, ["B"], [], ["A"], [], {"A": 1, "B": 2}, 3)


def test_outputs_of_a_resumed_request_count_in_its_hit_record() -> None:
    traced = Traced(Config(num_blocks=6, block_size=2, max_num_seqs=2, max_num_batched_tokens=12))
    first = Request("A", (1, 2, 3, 4), max_tokens=6)
    traced.do(Submit(first), Submit(Request("B", (5, 6, 7), max_tokens=6)), Schedule())
    while not (records := traced.do(Schedule()) if not traced.answer() else []) or not (
        isinstance(records[-1], StepDecision) and records[-1].preempted_req_ids
    ):
        pass
    assert records[-1].preempted_req_ids == ["B"]
    while not any(isinstance(it, PrefixCacheEvent) for it in records):
        traced.answer()
        records = traced.do(Schedule())
    _, hit, decision = records
    assert isinstance(hit, PrefixCacheEvent)
    assert isinstance(decision, StepDecision)
    assert hit.num_tokens > hit.total_prompt_tokens == 3
    assert decision.scheduled_resumed_req_ids == ["B"]


def test_synchronous_and_asynchronous_loads_are_traced_with_the_store() -> None:
    config = Config(num_blocks=9, block_size=2, kv_connector=True)
    traced = Traced(config)
    traced.do(Submit(A), KVOffer("A", 4), Submit(B), KVOffer("B", 4, is_async=True))
    _, *hits, decision = traced.do(Schedule())
    assert hits == [
        PrefixCacheEvent(0, "A", "x", 0, 4, 5, 5, "shelf"),
        PrefixCacheEvent(0, "B", None, 0, 4, 6, 6, "shelf", load_kv_async=True),
    ]
    assert isinstance(decision, StepDecision)
    assert decision.scheduled_new_req_ids == ["A"]


def test_a_rejected_schedule_has_no_record() -> None:
    traced = Traced()
    traced.do(Submit(A), Schedule())
    assert traced.do(Schedule()) == []


def test_written_records_are_read_back_and_conform(tmp_path: Path) -> None:
    traced = Traced()
    traced.do(Submit(A), Submit(B), Schedule())
    for _ in range(4):
        traced.answer()
        traced.do(Schedule())
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"".join(map(write_record, traced.records)))
    first = msgspec.json.decode(path.read_bytes().splitlines()[0])
    assert first["type"] == "step_snapshot"
    assert "cpu_free_blocks" in first
    result = validate(path)
    assert result.conforms
    assert (result.num_steps, result.equivalence) == (5, "safety")
