"""Kernels of a burst besides scheduler and model: they write what the reference writes.

The reference is the code that runs on a CPU. `tests/conformance/engines/test_sync_points.py`
compares whole bursts with the decisions of the host's scheduler.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheels but for Linux")
if torch.cuda.is_available():
    pytest.skip("looks at interpreted kernels", allow_module_level=True)

from engine_support.bursts import FIRST_ID, FRAME_ID, draw_memory, draw_plan
from kernel_support.interpreter import speed_up
from kernel_support.sanitizers import sanitize

from blockstep.impl.device import layout
from blockstep.impl.engine import bursts, bursts_triton
from blockstep.impl.engine.adapters import NO_ADAPTER
from blockstep.impl.engine.bursts import BurstMemory
from blockstep.impl.engine.padded import (
    ADAPTER,
    ELSEWHERE,
    FED,
    SLOT_MAPPING,
    TOKEN,
    Padded,
)
from blockstep.impl.engine.sampler import NO_TOKEN

speed_up()
SHAPES = [
    # rows, width, frames, groups
    (0, 1, 1, 1), (1, 1, 2, 1), (3, 4, 1, 1), (5, 8, 2, 1), (8, 8, 2, 2), (0, 4, 2, 2),
    (7, 8, 3, 1), (2, 8, 3, 2),
]  # fmt: skip


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return a function that runs a call on the kernels, under the sanitizer."""

    def run(call: Callable[[], object]) -> None:
        with monkeypatch.context() as patched, sanitize() as sanitizer:
            patched.setattr(bursts, "_find_kernels", lambda tensor: bursts_triton)
            call()
        assert sanitizer.findings == []

    return run


def assert_same_rows(one: Padded, other: Padded, block_size: int) -> None:
    """Compare everything that a pass reads; of tables, the blocks of each row's tokens."""
    count = SLOT_MAPPING + len(one.tables)
    assert torch.equal(one.numbers[:count], other.numbers[:count])
    assert torch.equal(one.ints, other.ints)
    assert torch.equal(one.floats, other.floats)
    num_blocks = -(-one.ints[0] // block_size)
    used = torch.arange(one.tables.shape[2]) < num_blocks[:, None]
    assert torch.equal(one.tables[:, used], other.tables[:, used])


def assert_same(one: BurstMemory, other: BurstMemory) -> None:
    """Compare what a burst writes besides rows; the last entry of `sampled` is never read."""
    assert torch.equal(one.out, other.out)
    assert torch.equal(one.sampled[:-1], other.sampled[:-1])
    for name in one.state._fields:
        assert torch.equal(getattr(one.state, name), getattr(other.state, name)), name


@pytest.mark.parametrize(("num_rows", "width", "frames", "groups"), SHAPES)
def test_rows_of_a_plan_equal_those_of_the_reference(
    on_kernels: Any, num_rows: int, width: int, frames: int, groups: int
) -> None:
    expected = draw_memory(num_rows, width=width, frames=frames, groups=groups)
    memory = deepcopy(expected)
    rows, wanted = memory.get_rows(width)[1], expected.get_rows(width)[1]
    expected.write_rows(wanted)
    on_kernels(lambda: memory.write_rows(rows))
    assert_same_rows(rows, wanted, expected.dims.size)
    assert_same(memory, expected)
    line = expected.get_lines(width)[FRAME_ID - 1 - FIRST_ID]
    assert int((line[1:3] != 0).any()) == (num_rows > 0)
    numbers = wanted.numbers[:, num_rows:]
    assert bool((numbers[ADAPTER] == NO_ADAPTER).all())
    assert bool((numbers[SLOT_MAPPING : SLOT_MAPPING + groups] == -1).all())
    assert bool((wanted.ints[0, num_rows:] == 1).all())
    assert not wanted.floats[:, num_rows:].any()
    assert not wanted.tables[:, num_rows:, 0].any()


@pytest.mark.parametrize(("num_rows", "width", "frames", "groups"), SHAPES)
@pytest.mark.parametrize("has_next", [False, True])
def test_sampled_tokens_are_stored_as_in_the_reference(
    on_kernels: Any, num_rows: int, width: int, frames: int, groups: int, has_next: bool
) -> None:
    expected = draw_memory(num_rows, width=width, frames=frames, groups=groups)
    expected.write_rows(expected.get_rows(width)[0])
    draw_plan(expected, num_rows, torch.Generator().manual_seed(1))
    expected.write_rows(expected.get_rows(width)[1])
    memory = deepcopy(expected)
    tokens = torch.arange(100, 100 + width)
    tokens[0] = NO_TOKEN
    for one, run in ((expected, lambda call: call()), (memory, on_kernels)):
        now, following = one.get_rows(width)
        given = (tokens, now, following if has_next else None)
        run(lambda one=one, given=given: one.take_rows_tokens(*given, is_alone=True))
    wanted, rows = expected.get_rows(width)[0], memory.get_rows(width)[0]
    assert_same_rows(rows, wanted, expected.dims.size)
    assert_same(memory, expected)


def test_a_row_gets_the_token_of_the_last_pass_that_sampled_for_it(on_kernels: Any) -> None:
    """Two plans follow each other; both ways give the tokens that the first one's pass drew."""
    memory = draw_memory(4, width=4, frames=3, groups=1)
    state, width = memory.state, 4
    now, following = memory.get_rows(width)
    slots = [3, 1, 6, 2]
    for place, order in ((0, slots), (1, [6, 3, 8, 1])):
        state.plans[place, layout.ROW_SLOT, :4] = torch.tensor(order)
        state.plans[place, layout.ROW_SAMPLES, :4] = 1
        state.plan_rows[place] = 4
    state.known.fill_(10)
    state.positions[:4] = 9
    state.control[layout.PLACE] = 1
    memory.write_rows(now)
    state.positions[:4] = 10
    state.control[layout.PLACE] = 2
    memory.write_rows(following)
    assert following.numbers[FED].tolist() == [2, 0, ELSEWHERE, 1]
    memory.sampled[8] = 77
    copied = deepcopy(memory)
    tokens = torch.tensor([50, 51, NO_TOKEN, 53])
    for one, run in ((memory, lambda call: call()), (copied, on_kernels)):
        pair = one.get_rows(width)
        run(lambda one=one, pair=pair: one.take_rows_tokens(tokens, *pair, is_alone=True))
        assert pair[0].numbers[TOKEN].tolist() == [0, 50, 77, 51]
        assert one.sampled[slots].tolist() == tokens.tolist()
    assert_same(copied, memory)


@pytest.mark.parametrize("num_rows", [0, 5, 8])
@pytest.mark.parametrize("is_last", [False, True])
def test_the_record_of_a_burst_equals_that_of_the_reference(
    on_kernels: Any, num_rows: int, is_last: bool
) -> None:
    expected = draw_memory(num_rows, width=8, frames=2, groups=1)
    memory = deepcopy(expected)
    expected.note_end(8, 1, is_last=is_last)
    on_kernels(lambda: memory.note_end(8, 1, is_last=is_last))
    assert_same(memory, expected)
    assert bool(expected.summary.any()) == is_last
    on_kernels(memory.look)
    expected.look()
    assert_same(memory, expected)
    line = FRAME_ID - FIRST_ID + 1
    assert torch.equal(expected.get_lines(8)[line, 4:], expected.state.record[:, :8])


PLANTED = {
    "a row's numbers are overwritten before they are read": (
        "        tl.debug_barrier()  # this row's numbers were read\n", "",
        "NO-BARRIER READ-WRITE tokens_kernel",
    ),
    "rows write to the column of another": (
        "to = numbers + row\n", "to = numbers + row // 2\n", "BETWEEN-PROGRAMS WRITE-WRITE",
    ),
    "tables of one row": (
        "* to_group + row) * table\n", "* to_group) * table\n", "BETWEEN-PROGRAMS WRITE-WRITE",
    ),
    "tokens of rows that do not sample are kept": (
        "mask=feed < slots", "mask=feed >= 0", "BETWEEN-PROGRAMS WRITE-WRITE tokens_kernel",
    ),
    "a record past the last row": (
        "other=0)\n                tl.store(at + column * width + row, value, mask=row < width)",
        "other=0)\n                tl.store(at + column * width + row, value)", "end_kernel",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "finding"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_mistake_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, finding: str
) -> None:
    source = Path(bursts_triton.__file__).read_text()
    assert old in source
    file = tmp_path / "planted.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("planted_bursts", file)
    assert spec is not None
    assert spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    monkeypatch.setattr(bursts, "_find_kernels", lambda tensor: planted)
    memory = draw_memory(2, width=4, frames=2, groups=1)
    now, following = memory.get_rows(4)
    with sanitize() as sanitizer:
        memory.write_rows(now)
        memory.write_rows(following)
        memory.take_rows_tokens(torch.arange(4), now, following, is_alone=True)
        memory.note_end(4, 0, is_last=True)
    assert [found for found in sanitizer.findings if finding in found], sanitizer.findings
