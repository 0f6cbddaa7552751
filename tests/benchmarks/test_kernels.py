"""The benchmark of the kernels without a GPU: it reports that, and every case can run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import kernels
from benchmarks.kernels import Case, Size, choose_file, list_cases, report

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels.py"
SMALL = Size(
    num_heads=2, num_kv_heads=1, head_size=16, num_tokens=32, num_rows=4,
    vocab_size=16, num_copied=2, num_swapped=2, bytes_in_turn=1 << 14,
)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it measures")
def test_a_missing_gpu_is_reported() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no CUDA device is available" in done.stderr


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "2026-01-02-kernels-h100-80gb-hbm3.json"),
        ("NVIDIA H200", "2026-01-02-kernels-h200.json"),
    ],
)
def test_result_files_are_named_by_day_and_device(tmp_path: Path, device: str, name: str) -> None:
    assert choose_file(tmp_path, "2026-01-02", device) == tmp_path / name
    assert choose_file(tmp_path / "mine.json", "2026-01-02", device) == tmp_path / "mine.json"


def test_a_missing_peer_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The times are made up; the test looks at what is done with them."""

    def fail() -> Any:
        raise ModuleNotFoundError("No module named 'guest'")

    monkeypatch.setattr(kernels, "measure", lambda run, in_graph: (50.0, 60.0))
    case = Case("copy", int, "copy", "", 8000, {"known": lambda: int, "guest": fail})
    row = report(case, {"copy": 1e9})
    assert row["bytes_per_second"] == pytest.approx(case.num_bytes / 50e-6)
    assert row["percent_of_bound"] == pytest.approx(row["bytes_per_second"] / 1e7)
    assert row["peers"]["known"] == 50.0
    assert "No module named 'guest'" in row["peers"]["guest"]
    assert "not measured: ModuleNotFoundError" in capsys.readouterr().out


def test_measurements_are_kept_when_a_later_case_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU is pretended, and the times are made up."""

    def fail() -> None:
        raise RuntimeError("illegal memory access")

    def measure(run: Any, *, in_graph: bool) -> tuple[float, float]:
        run()
        return 50.0, 60.0

    cases = [Case("one", int, "copy", "", 8), Case("two", fail, "copy", "", 8)]
    monkeypatch.setattr(kernels, "list_cases", lambda size, device: iter(cases))
    monkeypatch.setattr(kernels, "measure", measure)
    monkeypatch.setattr(kernels, "measure_rates", lambda: {"copy": 1e9})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(kernels, "version", lambda name: "0")
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--json", str(tmp_path)])
    with pytest.raises(RuntimeError, match="illegal"):
        kernels.main()
    (file,) = tmp_path.iterdir()
    assert [case["name"] for case in json.loads(file.read_text())["cases"]] == ["one"]


def test_every_case_runs() -> None:
    names = []
    for case in list_cases(SMALL, "cpu"):
        case.run()
        for make in case.peers.values():
            make()()
        assert (case.bound == "launch") == (case.num_bytes == 0)
        names.append(case.name)
    assert len(names) == len(set(names)) == 31
