"""The sanitizer finds mistakes planted in kernels, at least one in each kernel.

Every test that runs an interpreted kernel shows that the unchanged kernels are clean: the fixture
`backend` runs them under the sanitizer.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernel_support.oracle import Batch
from kernel_support.sanitizers import Sanitizer, sanitize

import blockstep.kernels
from blockstep.kernels import (
    add_rms_norm,
    commit_step,
    copy_blocks,
    gather_blocks,
    keep_tokens,
    merge_drafts,
    multiply_in_parts,
    multiply_silu_and_mul,
    paged_attention,
    prepare_step,
    rejection_sample,
    reshape_and_cache,
    rotate_and_cache,
    sample_tokens,
    silu_and_mul,
    stage_step,
    use_backend,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at interpreted kernels")


def scatter() -> None:
    tokens, caches = torch.zeros(4, 1, 80), torch.zeros(2, 2, 4, 1, 80)
    slots = torch.tensor([0, -1, 5, 7])
    reshape_and_cache(tokens, tokens, caches[:, 0], caches[:, 1], slots)


def copy_chain() -> None:
    copy_blocks([torch.zeros(4, 33)], torch.tensor([[0, 1], [1, 2]]))


def gather() -> None:
    gather_blocks(torch.zeros(4, 33), torch.tensor([3, 1]), torch.zeros(2, 33))


def prepare() -> None:
    numbers = torch.tensor([3, 1], dtype=torch.int32)
    tables = torch.zeros(2, 2, dtype=torch.int32)
    prepare_step(tables, numbers, numbers, 4, out_block_tables=tables.clone(), num_tokens=6)


def merge() -> None:
    starts, drafts = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([7])
    ends = torch.tensor([0, 1, 1], dtype=torch.int32)
    merge_drafts(torch.zeros(5, dtype=torch.int64), starts, torch.tensor([1, -1]), drafts, ends)


def commit() -> None:
    ints = torch.ones(3, dtype=torch.int32)
    tokens = torch.ones(3, 1, dtype=torch.int64)
    commit_step(ints, tokens[:, 0].clone(), ints, tokens, ints, torch.zeros(4, dtype=torch.int32))


def stage() -> None:
    tables, ids = torch.zeros(1, 3, 4, dtype=torch.int32), torch.arange(2)
    stage_step(
        torch.zeros(1, 2, 3, dtype=torch.int32), tables, ids, new_blocks=tables[:, 0, :2].clone(),
        new_places=ids.expand(2, 2), token_ids=ids.clone(), fed_at=ids - 1,
        last_token_ids=torch.arange(3),
    )  # fmt: skip


def keep() -> None:
    keep_tokens(torch.zeros(3, dtype=torch.int64), torch.arange(2), torch.arange(2))


def sample() -> None:
    rejection_sample(
        torch.zeros(4, 9), torch.tensor([4, 5]), torch.tensor([0, 2, 2], dtype=torch.int32),
        temperature=torch.tensor([1.0, 0.0]), seeds=torch.zeros(2, dtype=torch.int64),
        positions=torch.zeros(2, dtype=torch.int64),
    )  # fmt: skip


def norm() -> None:
    hidden = torch.ones(3, 40)
    add_rms_norm(hidden, hidden.clone(), hidden[0].clone(), 1e-6)


def gate() -> None:
    silu_and_mul(torch.ones(3, 80))


def rotate() -> None:
    caches = torch.zeros(2, 2, 4, 2, 80)
    slots = torch.tensor([0, -1, 1])
    table = torch.ones(3, 80)
    rotate_and_cache(
        torch.ones(3, 7 * 80), caches[:, 0], caches[:, 1], slots, slots.clip(0, 2), table
    )


def multiply() -> None:
    weight = torch.ones(70, 1100)
    for num_tokens in (1, 3):
        multiply_in_parts(weight[:num_tokens].clone(), weight)
        multiply_silu_and_mul(weight[:num_tokens].clone(), weight)


def draw() -> None:
    ones = torch.ones(3)
    sample_tokens(
        torch.arange(150.0).view(3, 50), temperature=ones, top_k=torch.tensor([0, 0, 4]).int(),
        top_p=torch.tensor([1.0, 0.9, 1.0]), min_p=0 * ones, seeds=torch.arange(3),
        indices=torch.arange(3),
    )  # fmt: skip


def attend() -> None:
    arguments, rules = Batch((1, 5), (21, 9), head_size=80, block_size=4).make()
    paged_attention(*arguments, **rules)


def attend_parts() -> None:
    arguments, rules = Batch((1, 3), (5, 9), num_heads=2 * 35).make()
    paged_attention(*arguments, **rules)


def attend_split() -> None:
    arguments, rules = Batch((1, 1), (300, 9), head_size=80).make()
    paged_attention(*arguments, **{**rules, "max_query_len": 1})


KEEP = """mask = sequence < num_seqs
    row = tl.load(row_indices + sequence, mask=mask, other=0)
    token"""
PLANTED = {
    "scatter writes past a token": (
        "cache", scatter, "mask = element < NUM_HEADS * HEAD_SIZE", "mask = element >= 0",
        "OUT-OF-BOUNDS scatter_kernel",
    ),
    "scatter writes padding": ("cache", scatter, "if slot >= 0:", "if slot >= -1:", "OUT-OF"),
    "scatter takes the keys' strides for values": (
        "cache", scatter, "block * value_block", "block * value_block + key_head", "OUT-OF-BOUNDS",
    ),
    "copy without its barrier": (
        "blocks", copy_chain, "        tl.debug_barrier()\n", "",
        "NO-BARRIER WRITE-READ copy_in_sequence_kernel",
    ),
    "copy past a block": (
        "blocks", copy_chain, "mask = element < NUMEL", "mask = element >= 0",
        "NO-BARRIER READ-WRITE copy_in_sequence_kernel",
    ),
    "gather past a block": (
        "blocks", gather, "mask = element < NUMEL", "mask = element >= 0", "BETWEEN-PROGRAMS WRITE",
    ),
    "step writes into its neighbour": (
        "step", prepare, "mask = step < scheduled", "mask = step <= scheduled",
        "BETWEEN-PROGRAMS WRITE-WRITE prepare_kernel",
    ),
    "step gathers too many blocks": (
        "step", prepare, "mask = index < num_blocks", "mask = index >= 0", "OUT-OF-BOUNDS prepare",
    ),
    "drafts before the first": (
        "step", merge, "mask=mask & (step > 0)", "mask=mask", "OUT-OF-BOUNDS merge_kernel",
    ),
    "drafts one too late": (
        "step", merge, "+ 1) - first + 1\n", "+ 1) - first + 2\n", "BETWEEN-PROGRAMS WRITE-WRITE",
    ),
    "commit past the last sequence": (
        "step", commit, "mask = sequence < num_seqs", "mask = sequence >= 0",
        "OUT-OF-BOUNDS commit_kernel",
    ),
    "staging without its barrier": (
        "step", stage, "        tl.debug_barrier()\n", "", "NO-BARRIER WRITE-READ stage_kernel",
    ),
    "staging into one row": (
        "step", stage, "num_rows + row) * max_blocks", "num_rows) * max_blocks",
        "BETWEEN-PROGRAMS WRITE-READ stage_kernel",
    ),
    "staging past the last column": (
        "step", stage, "mask = index < num_columns", "mask = index >= 0", "stage_kernel",
    ),
    "feeding where nothing is fed": (
        "step", stage, "if (at >= 0)", "if (at >= -1)", "OUT-OF-BOUNDS stage_kernel",
    ),
    "keeping past the last token": (
        "step", keep, KEEP, KEEP.replace("< num_seqs", ">= 0"), "OUT-OF-BOUNDS keep_kernel",
    ),
    "sampling past the vocabulary": (
        "rejection", sample, "mask=token < vocab_size", "mask=token >= 0",
        "OUT-OF-BOUNDS find_best",
    ),
    "sampling past the last token": (
        "rejection", sample, "mask=step < width", "mask=step >= 0", "finish_kernel",
    ),
    "norm past the row": (
        "layers", norm, "mask = lane < HIDDEN_SIZE", "mask = lane >= 0",
        "BETWEEN-PROGRAMS WRITE-WRITE norm_kernel",
    ),
    "gate past the row": (
        "layers", gate, "mask = element < INNER_SIZE", "mask = element >= 0",
        "BETWEEN-PROGRAMS WRITE-WRITE gate_kernel",
    ),
    "rotation past the head": (
        "layers", rotate, "in_half = lane < half", "in_half = lane >= 0", "rotate_kernel",
    ),
    "rotation caches padding": (
        "layers", rotate, "if slot >= 0:", "if slot >= -1:", "OUT-OF-BOUNDS rotate_kernel",
    ),
    "rotation takes values for keys": (
        "layers", rotate, "(~(is_query | is_value))", "(~is_query)",
        "BETWEEN-PROGRAMS WRITE-WRITE rotate_kernel",
    ),
    "product past its columns": (
        "products", multiply, "(n % LANES < COLUMNS) & ", "", "BETWEEN-PROGRAMS WRITE-WRITE",
    ),
    "product past the last token": (
        "products", multiply, "is_token = m < num_tokens", "is_token = m >= 0",
        "OUT-OF-BOUNDS load_tile",
    ),
    "product past the last column": (
        "products", multiply, "tl.minimum(begin + PART_SIZE, IN_SIZE)", "begin + PART_SIZE",
        "OUT-OF-BOUNDS load_tile",
    ),
    "product of one token past its columns": (
        "products", multiply, "is_column = column < OUT_SIZE", "is_column = column >= 0",
        "vector_kernel",
    ),
    "product of one token past the last column": (
        "products", multiply, "mask=k < IN_SIZE", "mask=k >= 0", "OUT-OF-BOUNDS vector_kernel",
    ),
    "drawing past the vocabulary": (
        "sampling", draw, "mask = token < vocab_size", "mask = token >= 0",
        "OUT-OF-BOUNDS scan_kernel",
    ),
    "drawing before the copies are there": (
        "sampling", draw, "    tl.debug_barrier()\n", "", "NO-BARRIER WRITE-READ copy_out",
    ),
    "attention past the head": (
        "attention", attend, "in_head = dim < HEAD_SIZE", "in_head = dim >= 0",
        "OUT-OF-BOUNDS load_queries",
    ),
    "attention past the sequence": (
        "attention", attend, "& (key_at < last)", "& (key_at >= 0)", "OUT-OF-BOUNDS load_",
    ),
    "attention takes its neighbour's queries": (
        "attention", attend, " & (step < query_len)", "", "OUT-OF-BOUNDS store_out",
    ),
    "attention takes the heads of the next group": (
        "attention", attend_parts, " & (in_group < GROUP)", "",
        "BETWEEN-PROGRAMS WRITE-WRITE store_out",
    ),
    "splits are counted before they are stored": (
        "attention", attend_split, "tl.debug_barrier()  # all threads have stored", "#",
        "BETWEEN-PROGRAMS WRITE-READ store_split",
    ),
    "splits are counted without an order": (
        "attention", attend_split, 'sem="acq_rel"', 'sem="relaxed"',
        "BETWEEN-PROGRAMS WRITE-READ store_split",
    ),
    "a plan of two programs in one row": (
        "attention", attend_split, "items_before + index + program", "items_before + index",
        "BETWEEN-PROGRAMS WRITE-WRITE store_run",
    ),
    "splits share a slot": (
        "attention", attend_split, "slot = first_slot + split\n", "slot = first_slot\n",
        "BETWEEN-PROGRAMS WRITE-WRITE store_split",
    ),
}  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, concept: str, old: str, new: str) -> None:
    """Replace a module of kernels by a changed copy."""
    name = f"{concept}_triton"
    source = (Path(blockstep.kernels.__path__[0]) / f"{name}.py").read_text()
    assert old in source
    file = folder / f"{name}.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"planted_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    monkeypatch.setitem(sys.modules, f"blockstep.kernels.{name}", planted)


@pytest.mark.parametrize(
    ("concept", "call", "old", "new", "finding"), PLANTED.values(), ids=PLANTED.keys()
)
def test_a_planted_mistake_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, concept: str, call: Callable[[], None],
    old: str, new: str, finding: str,
) -> None:  # fmt: skip
    with use_backend("triton"):
        with sanitize() as clean:
            call()
        plant(monkeypatch, tmp_path, concept, old, new)
        with sanitize() as sanitizer, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it wrongly reads may be NaN, or anything
            call()
    assert clean.findings == []
    assert [found for found in sanitizer.findings if finding in found], sanitizer.findings


@dataclass(frozen=True)
class Handle:
    """A pointer of the interpreter: an array, and the type of its elements."""

    data: npt.NDArray[Any]
    dtype: str = ""


def test_an_access_to_another_tensor_is_out_of_bounds() -> None:
    """A write past a tensor may hit memory of another one, such as the length of a loop."""
    both = torch.zeros(8, dtype=torch.int64)
    here, behind = both[:5], both[5:]
    sanitizer = Sanitizer(tensors=[here, here[:2], behind])
    pointers = Handle(np.arange(2, 8, dtype=np.uint64) * 8 + both.data_ptr())
    mask = sanitizer.access(pointers, Handle(np.ones(6, bool)), "store")
    assert mask.data.tolist() == [True, True, True, False, False, False]
    assert len(sanitizer.findings) == 1
    assert sanitizer.findings[0].startswith("OUT-OF-BOUNDS")
    masked = sanitizer.access(pointers, Handle(np.zeros(6, bool)), "store")
    assert not masked.data.any()


def test_an_atomic_that_the_sanitizer_does_not_model_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import InterpreterError

    reset = 'tl.atomic_xchg(counter, 0, sem="relaxed")'
    plant(monkeypatch, tmp_path, "attention", reset, "tl.atomic_cas(counter, 1, 0)")
    refused = pytest.raises(InterpreterError, match="does not model atomic_cas")
    with use_backend("triton"), sanitize(), refused:
        attend_split()


def test_pairs_declared_independent_are_checked() -> None:
    """The kernel is called directly, since the CPU implementation rejects a false declaration."""
    from blockstep.kernels import blocks_triton

    with sanitize() as sanitizer:
        pairs = torch.tensor([[0, 1], [1, 2]])
        blocks_triton.launch_copy_blocks(torch.zeros(4, 8), pairs, independent=True)
    assert len(sanitizer.findings) == 1
    assert sanitizer.findings[0].startswith("BETWEEN-PROGRAMS WRITE-READ move_kernel")
