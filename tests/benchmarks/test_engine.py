"""The benchmark of the model engine on a GPU, run on a CPU with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import engine
from benchmarks.engine import Span, compute_union, make_model, run_vllm, summarize


def fail(*_: object) -> dict[str, float]:
    raise RuntimeError("no such engine here")


def test_every_way_is_measured_and_generates_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.json"
    for name, value in (("NUM_RUNS", 2), ("NUM_STEPS", 4), ("NUM_COMPARED", 8)):
        monkeypatch.setattr(engine, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(engine, "PEERS", {"fast": lambda *_: {"tokens": 1.0}, "failing": fail})
    monkeypatch.setattr(
        sys, "argv", ["engine", "--tiny", "-n", "3", "-n", "1", "--json", f"{file}"]
    )
    assert engine.main() == 0
    found = json.loads(file.read_text())
    assert [*found["ways"]] == [*engine.WAYS]
    for way in found["ways"].values():
        for running in (3, 1):
            row = way[f"{running}"]
            assert row["num_alike"] == running
            assert row["tokens_per_second"] == pytest.approx(1e3 * running / row["ms_per_step"])
            share = 100 * row["bound_ms"] / row["ms_per_step"]
            assert row["percent_of_bound"] == pytest.approx(share)
            assert row["busy_percent"] is None  # nothing of a GPU was seen
    best = found["best"]["3"]
    rows = {way: found["ways"][way]["3"]["ms_per_step"] for way in engine.WAYS}
    assert best["ms_per_step"] == min(rows.values())
    device = found["best_device"]["3"]
    assert device["ms_per_step"] == min(rows["device"], rows["device, two frames"])
    fastest = min(rows["host"], rows["two frames"])
    assert device["host_by_device"] == pytest.approx(fastest / device["ms_per_step"])
    assert found["peers"]["1"]["fast"] == {"tokens": 1.0}
    assert found["peers"]["1"]["failing"].startswith("not measured: RuntimeError: no such")
    assert "3 running, two frames" in capsys.readouterr().out


def test_a_way_that_fails_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.json"
    ways = {"broken": {"scheduler": "no such"}, "host": engine.WAYS["host"]}
    monkeypatch.setattr(engine, "WAYS", ways)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["engine", "--tiny", "--warm", "-n", "1", "--json", f"{file}"])
    assert engine.main() == 1
    assert "scheduler = 'no such'" in capsys.readouterr().err
    host = json.loads(file.read_text())["ways"]["host"]
    assert host["first_token_s"] > 0
    assert "1" not in host  # it was to warm up only


def test_a_step_reads_all_weights_but_the_embeddings_and_the_kv(tmp_path: Path) -> None:
    model = make_model(tmp_path, engine.TINY_SHAPE, "cpu")
    hidden, vocab, layers, kv_heads, per_head = 64, 512, 2, 2, 16
    table = vocab * hidden
    assert model.weight_bytes == 4 * (model.num_parameters - table)
    assert model.kv_bytes == 4 * 2 * layers * kv_heads * per_head
    assert model.compute_bytes(3, 10) == model.weight_bytes + 30 * model.kv_bytes


def test_busy_time_is_the_union_of_the_spans() -> None:
    spans = [Span("a", 0, 10), Span("b", 5, 8), Span("b", 9, 14), Span("a", 20, 21)]
    assert compute_union(spans) == 15
    assert compute_union([]) == 0


def test_exposed_time_excludes_overlap_with_other_kernels() -> None:
    spans = [
        Span("model", 0, 800), Span("plan_kernel", 700, 900), Span("model", 1_000, 1_700),
        Span("plan_kernel", 1_100, 1_200),
    ]  # fmt: skip
    summary = summarize(spans, 2, 1.0, {"plan_kernel", "commit_kernel"})
    assert summary["busy_ms"] == pytest.approx(0.8)
    assert summary["busy_percent"] == pytest.approx(80)
    assert summary["scheduler_ms"] == pytest.approx(0.15)
    assert summary["exposed_percent"] == pytest.approx(5)
    assert summary["launches_per_step"] == 2
    assert summary["kernels"][0] == {"name": "model", "us": 750, "launches": 1}


def test_vllm_runs_with_ignored_end_of_sequence_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class LLM:
        def __init__(self, folder: str, **options: Any) -> None:
            asked.append(options)

        def generate(self, inputs: Any, params: Any, use_tqdm: bool) -> list[Any]:
            made = SimpleNamespace(token_ids=[0] * params.max_tokens)
            return [SimpleNamespace(outputs=[made]) for _ in inputs]

    fake = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    model = make_model(tmp_path, engine.TINY_SHAPE, "cpu")
    result = run_vllm(model, [[1, 2], [3, 4]], "cpu", 6)
    assert result["tokens"] == 12
    assert result["tokens_per_second"] == pytest.approx(12 / result["seconds"])
    assert asked[0]["max_num_seqs"] == 2
