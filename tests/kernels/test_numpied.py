"""Running a kernel's source with numpy: equal results, and stricter checks than the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockstep.kernels.numpied import HeldBack, Memory, RefusedError, Watched, launch, load_kernels

LANES = 16
HEAD = "import triton\nimport triton.language as tl\n\n"


def write(folder: Path, body: str) -> list[Path]:
    """Write a file with a kernel `k(x, y, n)`."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    file = folder / "made.py"
    file.write_text(f"{HEAD}@triton.jit\ndef k(x, y, n: tl.constexpr):\n{lines}")
    return [file]


def play(folder: Path, body: str, memory: Memory, size: int = 8) -> tuple[Any, Any]:
    """Run the kernel. Return x, which counts from 0, and y, which starts with zeros."""
    x, y = np.arange(size, dtype=np.int32), np.zeros(size, np.int32)
    launch(load_kernels(write(folder, body), memory)["k"], memory, x, y, size)
    return x, y


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels")
@pytest.mark.parametrize("name", ["arithmetic", "reductions", "allocate", "atomics"])
@pytest.mark.parametrize("make", [Memory, Watched])
def test_numpy_and_the_interpreter_leave_equal_tensors(
    name: str, make: Callable[[], Memory]
) -> None:
    """All elements of all tensors are compared, including overflows and negative operands."""
    pytest.importorskip("triton")
    from kernel_support import toys

    memory, draw = make(), np.random.default_rng(7)
    kernel = load_kernels([Path(toys.__file__)], memory)[name]
    sizes, changed = toys.Sizes(LANES), 0
    for number in range(12):
        reach = 1 << draw.integers(3, 31)
        ints = draw.integers(-reach, reach, LANES, dtype=np.int64).astype(np.int32)
        longs = draw.integers(-(1 << 50), 1 << 50, LANES, dtype=np.int64)
        table = draw.integers(-9, 9, (LANES, 4)).astype(np.int32)
        outs = np.zeros((16, LANES), np.int32), np.zeros((8, LANES), np.int64)
        state = toys.Toys(ints, longs, table, *outs)
        other = toys.Toys(*[torch.from_numpy(tensor.copy()) for tensor in state])
        launch(kernel, memory, state, sizes)
        getattr(toys, name)[(1,)](other, sizes)
        for field, here, there in zip(state._fields, state, other, strict=True):
            assert np.array_equal(here, there.numpy()), (name, number, field)
        changed += int(state.out.any()) + int(state.wide.any())
    assert changed >= 12


REFUSED = {
    "while n > 0:\n    break": "made.py:7: break: put a flag into the condition",
    "for i in range(n):\n    continue": "made.py:7: continue",
    "while n > 0:\n    return": "made.py:6: return in a loop: use a flag",
    "if n > 0 and n < 3:\n    pass": "made.py:6: and, or: both sides are evaluated",
    "if not n:\n    pass": "made.py:6: not: write == 0",
    "a = 0 < n < 3": "made.py:6: a chain of comparisons",
    "a = n / 2": "made.py:6: /: these are kernels of integers",
    "a = n * 0.5": "made.py:6: 0.5: these are kernels of integers",
    "a = tl.sort(tl.arange(0, 8))": "made.py:6: tl.sort is not supported",
    "a = n.bit_length()": "made.py:6: .bit_length() is not supported",
    "a = [i for i in range(n)]": "made.py:6: ListComp is not supported",
    "p = x + 1\na = tl.load(p)": "made.py:7: tl.load at p: write tensor + offset",
    "x = x + 1\na = tl.load(x)": "made.py:7: tl.load at x: write tensor + offset",
    "a = tl.load(x, cache_modifier='.cg')": "made.py:6: tl.load(cache_modifier=) is not supported",
    "for i in tl.range(n, num_stages=2):\n    pass": "made.py:6: num_stages: a loop is run as it",
    "for i in x:\n    pass": "made.py:6: a for loop runs over range",
    "x[0] = 1": "made.py:6: x[0] = ...: assign to a name",
    "with n:\n    pass": "made.py:6: With is not supported",
    "a = elsewhere(n)": "made.py:6: elsewhere() is not supported",
}


@pytest.mark.parametrize(("body", "sentence"), REFUSED.items())
def test_an_unsupported_operation_is_rejected_with_name_and_line(
    tmp_path: Path, body: str, sentence: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        load_kernels(write(tmp_path, body), Memory())
    assert str(refused.value).startswith(sentence)


STORED_THEN_READ = """\
lane = tl.arange(0, n)
value = tl.load(x + lane)
tl.store(x + n - 1 - lane, value){barrier}
tl.store(y + lane, tl.load(x + lane))"""


def test_a_store_is_visible_only_after_a_barrier(tmp_path: Path) -> None:
    lacks = STORED_THEN_READ.format(barrier="")
    has = STORED_THEN_READ.format(barrier="\ntl.debug_barrier()")
    assert play(tmp_path, lacks, Memory())[1].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert play(tmp_path, lacks, HeldBack())[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert play(tmp_path, has, HeldBack())[1].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


WATCHED = {
    "tl.store(x + 1, 5)\na = tl.load(x + 1)": ["STORE-LOAD k:6 -> k:7"],
    "a = tl.load(x)\ntl.store(x, 5)": ["LOAD-STORE k:6 -> k:7"],
    "lane = tl.arange(0, n)\na = tl.load(x + lane)\ntl.store(x + n - 1 - lane, a)": [
        "LOAD-STORE k:7 -> k:8"
    ],
    "lane = tl.arange(0, n)\ntl.store(x + lane, lane)\ntl.store(x + n - 1 - lane, lane)": [
        "STORE-STORE k:7 -> k:8"
    ],
    "lane = tl.arange(0, n)\ntl.store(x + (lane >> 1), lane)": ["STORED-TWICE k:7"],
    # A lane may be loaded by many threads; one of them stores it.
    "lane = tl.arange(0, n)\na = tl.load(x + lane)\ntl.store(x + lane, a + 1)": [
        "LOAD-STORE k:7 -> k:8"
    ],
    "tl.atomic_add(x, 1)\na = tl.load(x)": ["STORE-LOAD k:6 -> k:7"],
    # In order: by a barrier, by one thread, by one vector of pointers, or because it is all one.
    "tl.store(x + 1, 5)\ntl.debug_barrier()\na = tl.load(x + 1)": [],
    "tl.store(x + 1, 5)\ntl.store(x + 1, 6)": [],
    "lane = tl.arange(0, n)\ntl.store(x + lane, 1)\ntl.store(x + lane, lane)": [],
    "lane = tl.arange(0, n)\ntl.store(x + lane, 1)\ntl.store(x + (lane ^ 1), 1)": [],
    "lane = tl.arange(0, n)\ntl.atomic_add(x + (lane >> 1), 1)": [],
}


@pytest.mark.parametrize(("body", "findings"), WATCHED.items())
def test_accesses_that_no_barrier_orders_are_found(
    tmp_path: Path, body: str, findings: list[str]
) -> None:
    memory = Watched()
    play(tmp_path, body, memory)
    assert memory.findings == findings


def test_launches_are_ordered(tmp_path: Path) -> None:
    memory = Watched()
    kernel = load_kernels(write(tmp_path, "tl.store(y, tl.load(x + 1))"), memory)["k"]
    x, y = np.zeros(4, np.int32), np.zeros(4, np.int32)
    launch(kernel, memory, x, y, 4)
    launch(kernel, memory, y, x, 4)
    assert memory.findings == []


OUTSIDE = {
    "a = tl.load(x + n)": "k:6: element 8 of a tensor of 8",
    "a = tl.load(x - 1 + 0 * n)": "k:6: element -1 of a tensor of 8",
    "tl.store(x + (0 - 1), 3)": "k:6: element -1 of a tensor of 8",
    "a = tl.load(x + tl.arange(0, n) + 1)": "k:6: element 8 of a tensor of 8",
    "tl.store(x + tl.arange(0, n) - 2, 0, mask=tl.arange(0, n) > 0)": "element -1 of a tensor",
    "a = tl.load(x + tl.arange(0, n).to(tl.int64) * (1 << 40))": "element 1099511627776 of",
    "tl.atomic_add(x + tl.arange(0, n) + 1, 1)": "k:6: element 8 of a tensor of 8",
}


@pytest.mark.parametrize("make", [Memory, HeldBack, Watched])
@pytest.mark.parametrize(("body", "sentence"), OUTSIDE.items())
def test_an_access_outside_of_a_tensor_is_an_error(
    tmp_path: Path, make: Callable[[], Memory], body: str, sentence: str
) -> None:
    with pytest.raises(IndexError, match="OUT-OF-BOUNDS") as outside:
        play(tmp_path, body, make())
    assert sentence in str(outside.value)


def test_masked_lanes_of_a_load_are_poisoned_in_a_suspicious_run(tmp_path: Path) -> None:
    body = "lane = tl.arange(0, n)\ntl.store(y + lane, tl.load(x + lane, mask=lane < 2))"
    assert play(tmp_path, body, Memory())[1].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert set(play(tmp_path, body, HeldBack())[1].tolist()[2:]) == {0x5A5A5A5A}


def test_lanes_count_in_any_order(tmp_path: Path) -> None:
    body = "lane = tl.arange(0, n)\ntl.store(y + lane, tl.atomic_add(x + 0 * lane, 1))"
    orders = {tuple(play(tmp_path, body, HeldBack(seed))[1].tolist()) for seed in range(5)}
    assert play(tmp_path, body, Memory())[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len(orders) == 5
    assert all(sorted(order) == [*range(8)] for order in orders)


def test_changed_source_replaces_the_file(tmp_path: Path) -> None:
    memory = Memory()
    files = write(tmp_path, "tl.store(y, 1)")
    changed = {files[0]: files[0].read_text().replace("y, 1", "y, 2")}
    y = np.zeros(1, np.int32)
    launch(load_kernels(files, memory, changed)["k"], memory, y, y, 1)
    assert y.tolist() == [2]
