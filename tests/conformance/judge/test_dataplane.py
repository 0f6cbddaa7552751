"""Data plane: our kernels execute plans on real memory, and each planted fault is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.judge.dataplane import HOST, DataPlaneWorker, OnKernels, memory
from blockstep.conformance.judge.dataplane.faults import FAULTS
from blockstep.conformance.judge.worker.prefix_names import (
    BEFORE_RESET,
    GARBLED,
    NEVER_WRITTEN,
    SPOILED,
)
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, MambaCacheMode

SMALL = CheckOptions(preset="small", without_features=("groups",))
GROUPS = CheckOptions(preset="small", with_features=("groups",))
STORE = CheckOptions(preset="small", with_features=("transfers",), without_features=("groups",))
NAMES = [0, 1, 5, BEFORE_RESET, SPOILED, 300, 70_000, NEVER_WRITTEN, 12_345_678]
TOKENS, SLOT, MOVED, ATTENTION = (
    "step_runs_the_tokens_of_the_plan",
    "slot_holds_what_the_plan_writes",
    "copied_block_arrives_unchanged",
    "attention_reads_the_slots_of_the_block_table",
)
FOUND_BY = {
    "shifted-slots": SLOT,
    "wrong-block-at-boundary": SLOT,
    "stale-rows": SLOT,
    "drafts-before-the-last": TOKENS,
    "swapped-keys-and-values": SLOT,
    "last-token-not-written": SLOT,
    "copied-in-any-order": MOVED,
    "copied-backwards": MOVED,
    "keys-copied-only": MOVED,
    "swapped-in-elsewhere": MOVED,
    "blind-to-itself": ATTENTION,
    "heads-interleaved": ATTENTION,
}
FOUND_IN_GROUPS_BY = {
    "one-block-size-for-all": SLOT,
    "null-block-written": SLOT,
    "window-one-short": ATTENTION,
    "window-one-long": ATTENTION,
    "window-of-the-last-token": ATTENTION,
    "chunks-as-windows": ATTENTION,
    "reads-what-it-masks": ATTENTION,
}


def find_first(
    make_engine: EngineFactory, episodes: range, options: CheckOptions = SMALL
) -> Finding | None:
    for index in episodes:
        found = run_episode(options, index, make_engine).first
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_a_prefix_name_is_read_back_from_every_type_of_cache(dtype: torch.dtype) -> None:
    keys, values = (
        torch.from_numpy(part).to(dtype).float().numpy() for part in memory.spell(NAMES)
    )
    assert memory.read(keys, values) == NAMES


def test_slots_with_mixed_or_changed_kv_are_read_as_garbled() -> None:
    keys, values = memory.spell([7, 7, 7, 7, 7])
    keys[0], values[0] = values[0].copy(), keys[0].copy()
    keys[1] = keys[1, ::-1]
    values[2] = 0
    keys[3, 1, 9] += 1
    keys[4] = np.nan
    assert memory.read(keys, values) == [GARBLED] * 5


def test_a_name_beyond_the_largest_one_is_rejected() -> None:
    with pytest.raises(OverflowError, match="16777216 can be spelled"):
        memory.spell([16**6])


@pytest.mark.parametrize(
    ("options", "num_episodes", "reaches"),
    [
        (SMALL, 12, ("preempted", "prefix_hit", "drafts_scheduled", "reset_forced")),
        (GROUPS, 8, ("groups_window_slid", "groups_chunk_left", "groups_hit_in_several")),
    ],
)
def test_our_kernels_carry_out_the_plans(
    options: CheckOptions, num_episodes: int, reaches: tuple[str, ...]
) -> None:
    num_events, reached = 0, set[str]()
    for index in range(num_episodes):
        episode = run_episode(options, index, HOST)
        assert episode.first is None
        num_events += episode.num_events
        reached |= episode.witnesses.keys()
    assert num_events > 1_000
    assert reached.issuperset(reaches)


def test_loaded_blocks_go_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = set[str]()
    for index in range(4):
        episode = run_episode(STORE, index, HOST)
        assert episode.first is None
        reached |= episode.witnesses.keys()
    assert {"transfers_load_at_once", "transfers_parked"} <= reached
    monkeypatch.setattr(
        DataPlaneWorker, "_swap_blocks", lambda _: None
    )  # only loads call the faulty kernel now
    found = find_first(OnKernels(fault="swapped-in-elsewhere"), range(12), STORE)
    assert found is not None
    assert found.sentence == SLOT


def test_every_fault_has_an_expected_check() -> None:
    assert FOUND_BY.keys() | FOUND_IN_GROUPS_BY.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_its_check(fault: str) -> None:
    seen_by, options = (FOUND_BY, SMALL) if fault in FOUND_BY else (FOUND_IN_GROUPS_BY, GROUPS)
    found = find_first(OnKernels(fault=fault), range(16), options)
    assert found is not None
    assert found.sentence == seen_by[fault]


def test_groups_without_a_kernel_are_left_out_and_reported() -> None:
    window = KVGroup(GroupKind.SLIDING_WINDOW, 8, sliding_window=3)
    state = KVGroup(GroupKind.RECURRENT, 4, mamba_cache_mode=MambaCacheMode.ALL)
    mixed = Config(num_blocks=9, block_size=4, groups=(window, state))
    fitting, reason = HOST.traits.fit_config(mixed)
    assert fitting.groups == (replace(window, block_size=4),)
    assert reason == "recurrent groups: the kernels keep no states"
    assert HOST.traits.fit_config(fitting) == (fitting, None)
    assert HOST.traits.fit_config(replace(mixed, groups=(state,)))[0].groups == ()


@pytest.mark.parametrize("block_sizes", [(4,), (2, 4), (4, 2, 6)])
def test_a_block_of_every_group_takes_the_same_bytes(block_sizes: tuple[int, ...]) -> None:
    heads = memory.count_heads(block_sizes)
    assert len({size * count for size, count in zip(block_sizes, heads, strict=True)}) == 1
    keys, values = memory.spell(NAMES, max(heads))
    assert memory.read(keys, values) == NAMES
    assert memory.read(keys[:, ::-1], values) == [GARBLED] * 7 + [NEVER_WRITTEN, GARBLED]


def test_a_defect_of_the_engine_is_found_in_the_memory() -> None:
    found = find_first(OnKernels("museum:salt-ignored"), range(200))
    assert found is not None
    assert found.property_id in {"P6", "P3"}


INTERPRETED = """
from blockstep.conformance.search.check import CheckOptions, run_episode
from blockstep.conformance.judge.dataplane import OnKernels
from blockstep.kernels import use_backend

tiny = CheckOptions(preset="tiny", without_features=("groups",))
groups = CheckOptions(preset="tiny", with_features=("groups",))
ours, wanted = OnKernels(device="cpu"), {"groups_window_slid", "groups_chunk_left"}
rich = next(i for i in range(99) if wanted <= run_episode(groups, i, ours).witnesses.keys())
with use_backend("triton"):
    assert run_episode(tiny, 0, ours).first is None
    assert run_episode(groups, rich, ours).first is None
    found = run_episode(tiny, 0, OnKernels(device="cpu", fault="shifted-slots")).first
print(found.sentence)  # words: allow, this is code
"""


def test_the_triton_kernels_carry_out_the_plans() -> None:
    """The kernels run interpreted, in a process where the variable is set before the import."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == SLOT


def test_the_command_checks_kernels(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    arguments = "check --engine host-kernels --preset tiny --episode 3 --jobs 1 --in-process --json"
    result = CliRunner().invoke(app, [*arguments.split(), str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["engine"] == "host-kernels"
