"""The benchmark of pins: conversion of a trace, and a difference between the two sides."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks._tiers import Tier, Tiers
from benchmarks.pins import SIDES, make_page, make_sessions, measure, read_sessions

from blockstep.conformance.draw.workloads import OUTPUT_TOKENS_START
from blockstep.impl.tiers import Link
from blockstep.spec.vocabulary import KVLoad, KVTransfers, Request, TransfersReported


def row(session: str, ms: int, num_prompt: int, num_outputs: int, ids: range) -> dict[str, Any]:
    return {
        "suite": "s",
        "session": session,
        "timestamp_us": 1000 * ms,
        "hash_ids": [*ids],
        "input_length": num_prompt,
        "output_length": num_outputs,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_time_of_a_tool_is_the_gap_minus_the_outputs(tmp_path: Path) -> None:
    rows = [
        row("x", 0, 32, 20, range(2)),
        row("y", 50, 32, 20, range(2)),
        row("x", 200, 64, 9, range(4)),
        row("x", 210, 0, 9, range(0)),
        row("x", 300, 48, 9, range(100, 103)),
    ]
    x, y = read_sessions(write(tmp_path / "trace.jsonl", rows), [])
    assert (x.name, y.name) == ("s/x", "s/y")
    assert [turn.tool_ms for turn in x.turns] == [80.0, 46.0, None]  # 200 - 6 * 20, 100 - 6 * 9
    first, second, third = x.turns
    assert (*first.prompt, *first.outputs) == second.prompt[:52]
    assert [turn.num_found for turn in x.turns] == [None, 52, 0]
    assert third.outputs == (OUTPUT_TOKENS_START,) * 9


def test_pins_and_tiers_keep_hits_when_other_jobs_need_the_pool(tmp_path: Path) -> None:
    """Two jobs keep three quarters of the pool.

    Requests of other jobs arrive once and need up to half of the pool.
    """
    rows = []
    for number in range(8):
        for agent in range(2):
            ids = range(1_000 * agent, 1_000 * agent + 100 + number)
            rows.append(row(f"a{agent}", 400 * number, 16 * len(ids), 16, ids))
        once = range(10_000 + 1_000 * number, 10_150 + 1_000 * number)
        rows.append(row(f"b{number}", 400 * number, 16 * len(once), 16, once))
    sessions = read_sessions(write(tmp_path / "trace.jsonl", rows), [])
    args = argparse.Namespace(
        agents=3, step_ms=6.0, token_us=50.0, block_kib=2048, host_blocks=400, file_blocks=800
    )
    sides = {side: measure(side, 270, sessions, args) for side in SIDES}
    none = sides.pop("no pins")
    for side, figures in sides.items():
        assert figures.hit_rate > 1.2 * none.hit_rate
        if side.startswith("tiers"):
            continue  # copies of so many blocks take their time
        assert figures.whole_s < none.whole_s
        assert figures.mean_turn_ms < none.mean_turn_ms
    assert make_page([*sides.values()]).count("\n") == 7


def test_synthetic_sessions_continue_from_turn_to_turn() -> None:
    sessions = make_sessions(1)
    assert sessions == make_sessions(1) != make_sessions(2)
    for session in sessions:
        for before, turn in pairwise(session.turns):
            known = (*before.prompt, *before.outputs)
            assert (turn.prompt[: len(known)], turn.num_found) == (known, len(known))
        assert [turn.tool_ms is None for turn in session.turns].index(True) + 1 == len(
            session.turns
        )


def test_loaded_blocks_are_available_after_their_copies_end() -> None:
    link = Link(1 << 20, 500_000_000)  # a block a second, and half a second for each copy
    tiers = Tiers([Tier(2, link, link), Tier(2, link, link)], 16, 1 << 20)
    asked = Request("a", tuple(range(64)))
    assert tiers.begin(asked).num_tokens == 0
    tiers.end("a", asked.prompt_token_ids, now=0.0)
    assert tiers.list_events(2_499.0) == []  # two blocks into each tier, side by side
    (sent,) = tiers.list_events(2_500.0)
    assert sent == TransfersReported(KVTransfers(finished_sending=("a",)))
    assert tiers.begin(replace(asked, request_id="b")).num_tokens == 64
    tiers.load(KVLoad("b", ((1, 2, 3, 4),), 16, 48, is_async=True), now=5_000.0)
    assert tiers.find_next_end(0.0) == 7_500.0  # two come out of the second tier, one of the first
    (come,) = tiers.list_events(7_500.0)
    assert come == TransfersReported(KVTransfers(("b",)))
    assert tiers.num_loaded == 3


@pytest.mark.parametrize("suite", ["s", "t"])
def test_a_suite_can_be_chosen(tmp_path: Path, suite: str) -> None:
    path = write(tmp_path / "trace.jsonl", [row("x", 0, 32, 1, range(2))])
    assert len(read_sessions(path, [suite])) == (suite == "s")
