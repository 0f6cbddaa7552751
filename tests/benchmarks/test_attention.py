"""The benchmark of attention without a GPU: shares of programs, and cases that run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import attention
from benchmarks.attention import (
    IMBALANCE_MAX,
    Case,
    Inputs,
    Run,
    find_peak,
    list_shares,
    list_variants,
    main,
    repeat,
    report,
    report_variants,
    use_variant,
)

SMALL = [
    Case("decode", repeat(2, 1, 40), 90),
    Case("prefill", repeat(1, 30, 30), 60, "sdpa"),
    Case("ragged", [(1, 20), (1, 70)], 75),
    Case("short", repeat(1, 1, 20), 6.0, "us"),
]


class OnCpu(Inputs):
    """Inputs on the CPU, whatever device is requested."""

    def __init__(self, lengths: Any, device: str, *others: Any) -> None:
        super().__init__(lengths, "cpu", *others)


class Pool:
    """Stands in for a pool of processes."""

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Any, names: Iterable[str]) -> list[str]:
        return ["OutOfResources: shared memory" if "merged by 8" in name else "" for name in names]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for a GPU: every call runs once on the CPU and takes 50 us."""

    def measure(runs: Sequence[Run]) -> float:
        for run in runs:
            run()
        return 50.0

    monkeypatch.setattr(attention, "measure", measure)
    monkeypatch.setattr(attention, "measure_copy_rate", lambda: 1e9)
    monkeypatch.setattr(attention, "NUM_BYTES_ROTATED", 1 << 19)
    monkeypatch.setattr(attention, "Inputs", OnCpu)
    monkeypatch.setattr(attention, "CASES", SMALL)
    monkeypatch.setattr(attention, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def test_programs_have_even_shares_if_there_is_enough_work() -> None:
    pytest.importorskip("triton")
    shares = list(list_shares())
    even = [share for share in shares if not share.is_small]
    assert len(even) >= 10
    uneven = [(share.name, share.imbalance) for share in even if share.imbalance > IMBALANCE_MAX]
    assert uneven == []
    # Others are as even as splits allow: a program has at most a split at either end of its range.
    few = [share for share in shares if "(few)" in share.name]
    assert all(max(share.tiles) < share.mean + 2 * share.largest for share in few)


def test_the_table_of_shares_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "argv", ["attention.py", "--partition"])
    assert main() == 0
    printed = capsys.readouterr().out
    assert "decode 64 x 4096 (few)" in printed
    assert "too small to be even" in printed


def test_cases_are_compared_with_their_aims(made_up: None) -> None:
    decode, prefill, ragged, short = (report(case, 1e9, 2e9) for case in SMALL)
    assert decode["percent_of_copy"] == pytest.approx(SMALL[0].num_bytes / 50e-6 / 1e7)
    assert decode["percent_of_peak"] == pytest.approx(decode["percent_of_copy"] / 2)
    assert decode["met"]
    assert (prefill["aim"], prefill["met"]) == ("60 % of sdpa", True)
    assert decode["sdpa_differs_by"] == pytest.approx(0, abs=2e-2)
    assert prefill["sdpa_differs_by"] == pytest.approx(0, abs=2e-2)
    assert "sdpa_us" not in ragged
    assert not short["met"]
    assert "vllm" in short["vllm_failure"]


def test_measurements_are_written_to_the_file(
    made_up: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "attention.json"
    monkeypatch.setattr(sys, "argv", ["attention.py", "--only", "decode", "--json", str(file)])
    monkeypatch.setattr(attention, "version", lambda name: "0")
    assert main() == 0
    written = json.loads(file.read_text())
    assert [case["name"] for case in written["cases"]] == ["decode"]
    assert written["copy_bytes_per_second"] == 1e9


def test_variants_are_timed_for_cases_of_their_kind(
    made_up: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    rows = report_variants("", 1e9)
    names = {case.name: [row for row in rows if row["case"] == case.name] for case in SMALL}
    assert all(row["variant"].startswith("many") for row in names["prefill"])
    assert all(row["variant"].startswith("few") for row in names["decode"])
    assert "not measured: OutOfResources" in capsys.readouterr().out


def test_a_variant_changes_the_tiling_of_its_kind() -> None:
    attention_triton = pytest.importorskip("blockstep.kernels.attention_triton")
    chosen = attention_triton.choose_tilings(128, 4, 2)
    for name, changes in list_variants().items():
        kind, other = ("few", "many") if name.startswith("few") else ("many", "few")
        with use_variant(name):
            tilings = attention_triton.choose_tilings(128, 4, 2)
        assert getattr(tilings, kind) == getattr(chosen, kind)._replace(**changes)
        assert getattr(tilings, other) == getattr(chosen, other)
        assert (tilings == chosen) == name.endswith("chosen")


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H200", 4.8e12), ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA A10", None)],
)
def test_a_peak_is_known_or_left_out(device: str, peak: float | None) -> None:
    assert find_peak(device) == peak
