"""The benchmark of links: its copies move the blocks, and its fit follows the measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import links

from blockstep.impl.tiers import Link

NUM_BLOCKS, BLOCK_BYTES = 4, 1 << 10


def test_blocks_are_unchanged_after_a_copy_through_every_memory(tmp_path: Path) -> None:
    with links.list_runs(tmp_path, BLOCK_BYTES, NUM_BLOCKS) as runs:
        host = getattr(runs["host out"], "__self__", None)
        assert isinstance(host, links.Memory)
        before = host.cache.clone()
        runs["host out"](NUM_BLOCKS)
        assert torch.equal(host.staging, before[host.ids[:NUM_BLOCKS]])
        runs["file out"](NUM_BLOCKS)
        for way in ("file back, warm", "file back, cold"):
            staged = host.staging.clone()
            host.staging.zero_()
            runs[way](NUM_BLOCKS)
            assert torch.equal(host.staging, staged)
        host.cache.zero_()
        runs["host back"](NUM_BLOCKS)
        taken = host.ids[:NUM_BLOCKS]
        assert torch.equal(host.cache[taken], before[taken])
        assert host.cache.count_nonzero() == before[taken].count_nonzero() > 0


def test_a_run_of_one_block_copies_one_block(tmp_path: Path) -> None:
    with links.list_runs(tmp_path, BLOCK_BYTES, NUM_BLOCKS) as runs:
        host = getattr(runs["host out"], "__self__", None)
        assert isinstance(host, links.Memory)
        runs["host out"](1)
        assert host.staging[0].count_nonzero() > 0
        assert host.staging[1:].count_nonzero() == 0


def measured(us_of_one: float, us_of_all: float) -> links.Measured:
    return links.Measured("host out", 6_400, 5, us_of_one, us_of_all, us_of_all)


def test_the_fitted_line_goes_through_the_measurements() -> None:
    # Four blocks more take 8 us, so a block 2 us, 3,200 bytes each, and 5 us before.
    assert measured(7.0, 15.0).link == Link(3_200 * 10**6, ns_per_copy=5_000)


def test_no_fitted_latency_is_negative() -> None:
    assert measured(1.0, 17.0).link == Link(1_600 * 10**6)


def test_each_lower_memory_has_a_break_even() -> None:
    out, back = measured(7.0, 15.0), links.Measured("host back", 6_400, 5, 1.0, 17.0, 17.0)
    # 5 us, and 6 us for each block of 16 tokens; a token takes 1 us to compute. So from 12 tokens
    # on, but for the first one of the second block, where both take 17 us.
    assert list(links.list_break_evens([out, back], 10**6)) == [("host", 18)]
    assert list(links.list_break_evens([out, back], 10**7)) == [("host", None)]


def test_results_are_written_with_command_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "links.json"
    args = ["--block-kib", "1", "--blocks", "4", "--rounds", "2", "--tokens-per-second", "7"]
    monkeypatch.setattr(sys, "argv", ["links.py", *args, "--json", str(file)])
    num_threads = torch.get_num_threads()
    links.main()
    torch.set_num_threads(num_threads)
    record = json.loads(file.read_text())
    assert record["command"].startswith("python benchmarks/links.py --block-kib 1 --blocks 4")
    assert {"machine", "cores", "python", "torch", "load"} <= record.keys()
    names = [each["name"] for each in record["measured"]]
    assert names[:5] == ["host out", "host back", "file out", "file back, warm", "file back, cold"]
    assert all(each["link"]["bytes_per_second"] > 0 for each in record["measured"])
    assert "rather than compute 7 tokens/s" in capsys.readouterr().out
