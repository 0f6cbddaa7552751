"""Step records: a record that contradicts earlier ones fails a named check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.trace_lines import TraceError
from blockstep.conformance.recorded.validate import validate

SEEN = {
    "type": "step_snapshot",
    "step": 3,
    "running": ["A", "B"],
    "waiting": ["C"],
    "free_blocks": 4,
    "total_blocks": 9,
    "gpu_cached_blocks": 2,
    "num_pinned": 1,
    "pinned_blocks": 2,
    "pinned_job_ids": ["x"],
    "max_num_running_reqs": 3,
    "max_num_scheduled_tokens": 8,
}
HIT = {
    "type": "prefix_cache_event",
    "step": 3,
    "req_id": "C",
    "job_id": None,
    "local_hit_tokens": 2,
    "external_hit_tokens": 1,
    "total_prompt_tokens": 4,
    "num_tokens": 4,
    "connector_name": None,
    "load_kv_async": False,
}
DECIDED = {
    "type": "step_decision",
    "step": 3,
    "scheduled_new_req_ids": ["C"],
    "scheduled_resumed_req_ids": [],
    "scheduled_running_req_ids": ["A", "B"],
    "preempted_req_ids": [],
    "num_scheduled_tokens": {"A": 1, "B": 1, "C": 1},
    "total_scheduled_tokens": 3,
}
NEXT = {**SEEN, "step": 4, "running": ["A", "C"], "waiting": []}


def write(path: Path, *records: Any) -> Path:
    file = path / "steps.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_consistent_records_conform(tmp_path: Path) -> None:
    result = validate(write(tmp_path, SEEN, HIT, DECIDED, NEXT))
    assert result.conforms
    assert result.num_steps == 2


@pytest.mark.parametrize(
    ("sentence", "records"),
    [
        ("every_request_is_in_one_queue", [{**SEEN, "waiting": ["A"]}]),
        ("running_stays_within_max_num_seqs", [{**SEEN, "max_num_running_reqs": 1}]),
        ("every_block_is_free_or_held", [{**SEEN, "free_blocks": 7}]),
        ("pins_hold_cached_blocks", [{**SEEN, "pinned_job_ids": ["x", "x"]}]),
        ("pins_hold_cached_blocks", [{**SEEN, "pinned_blocks": 0}]),
        ("pins_hold_cached_blocks", [{**SEEN, "num_pinned": 0}]),
        ("hit_is_whole_blocks_and_leaves_a_token", [SEEN, {**HIT, "local_hit_tokens": 3}]),
        ("hit_is_whole_blocks_and_leaves_a_token", [SEEN, {**HIT, "total_prompt_tokens": 5}]),
        ("step_records_are_in_order", [HIT]),
        ("step_records_are_in_order", [SEEN, {**HIT, "step": 2}]),
        ("step_records_are_in_order", [SEEN, DECIDED, {**NEXT, "step": 5}]),
        ("running_follows_from_decisions", [SEEN, DECIDED, {**NEXT, "running": ["D"]}]),
        ("plan_stays_within_token_budget", [SEEN, {**DECIDED, "total_scheduled_tokens": 4}]),
        ("plan_stays_within_token_budget", [{**SEEN, "max_num_scheduled_tokens": 2}, DECIDED]),
        ("rows_are_of_running_or_waiting_requests",
         [SEEN, {**DECIDED, "scheduled_running_req_ids": ["A", "C"]}]),
        ("rows_are_of_running_or_waiting_requests",
         [SEEN, {**DECIDED, "scheduled_new_req_ids": ["D"]}]),
        ("rows_are_of_running_or_waiting_requests",
         [SEEN, {**DECIDED, "scheduled_resumed_req_ids": ["C"]}]),
        ("rows_are_of_running_or_waiting_requests",
         [SEEN, {**DECIDED, "preempted_req_ids": ["C"]}]),
        ("rows_are_of_running_or_waiting_requests",
         [SEEN, {**DECIDED, "num_scheduled_tokens": {"A": 3, "B": 0, "C": 0}}]),
        ("running_stays_within_max_num_seqs", [{**SEEN, "max_num_running_reqs": 2}, DECIDED]),
        ("no_admission_after_a_preemption",
         [SEEN, {**DECIDED, "preempted_req_ids": ["B"], "scheduled_running_req_ids": ["A"],
         "num_scheduled_tokens": {"A": 1, "C": 1}, "total_scheduled_tokens": 2}]),
    ],
)  # fmt: skip
def test_a_contradicting_record_is_reported_with_its_check(
    sentence: str, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    result = validate(write(tmp_path, *records, SEEN))
    assert result.finding is not None
    assert result.finding.sentence == sentence
    printed = CliRunner().invoke(app, ["validate", str(tmp_path / "steps.jsonl")])
    assert sentence in printed.output
    assert "explain " not in printed.output


def test_an_asynchronous_load_may_hit_the_whole_prompt(tmp_path: Path) -> None:
    hit = {**HIT, "external_hit_tokens": 2, "load_kv_async": True}
    assert validate(write(tmp_path, SEEN, hit)).conforms


def test_the_wrong_step_is_named_by_its_number(tmp_path: Path) -> None:
    decision = {**DECIDED, "step": 4, "total_scheduled_tokens": 9}
    result = validate(write(tmp_path, SEEN, DECIDED, NEXT, decision, {**NEXT, "step": 5}))
    assert (result.num_agreed, result.num_steps) == (1, 3)
    assert result.event == "decision of step 4, line 4"


def test_a_line_that_is_no_record_is_refused_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"steps.jsonl:2: .*a line is a step_snapshot"):
        validate(write(tmp_path, SEEN, {"type": "step"}))
