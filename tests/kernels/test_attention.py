"""Paged attention: both implementations against float64, batch invariance, and wrong calls.

The bits of a request must not depend on its batch; this is tested interpreted and on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from kernel_support.oracle import Batch, attention
from kernel_support.sanitizers import Sanitizer, sanitize

from blockstep.kernels import (
    make_attention_workspace,
    paged_attention,
    partition,
    plan_attention,
    use_backend,
)

FP8 = torch.float8_e4m3fn
BATCHES = {
    "one token of one sequence": Batch((1,), (1,)),
    "one token, last block partial": Batch((1,), (37,)),
    "one token, last block full": Batch((1,), (32,)),
    "decodes, ragged": Batch((1, 1, 1, 1), (5, 64, 17, 1)),
    "prefill": Batch((19,), (19,)),
    "chunk in the middle of a block": Batch((9,), (30,)),
    "mixed": Batch((1, 17, 5, 1), (33, 17, 40, 2)),
    "a sequence without tokens": Batch((3, 0, 1), (3, 20, 18)),
    "drafts": Batch((4, 4, 1), (20, 36, 9)),
    "multi-head": Batch((1, 6), (20, 6), num_kv_heads=4),
    "multi-query": Batch((1, 6), (20, 6), num_kv_heads=1),
    "seven heads to one": Batch((1, 6), (20, 6), num_heads=14),
    "a group in three parts": Batch((1, 6), (20, 6), num_heads=2 * 71),
    "window": Batch((1, 17, 5), (70, 17, 40), rules={"sliding_window": 7}),
    "window of one": Batch((1, 5), (40, 5), rules={"sliding_window": 1}),
    "window of a block": Batch((20,), (50,), rules={"sliding_window": 16}),
    "chunks": Batch((1, 17, 5, 1), (70, 17, 40, 21), rules={"attention_chunk_size": 7}),
    "chunks of one": Batch((1, 5), (40, 5), rules={"attention_chunk_size": 1}),
    "chunks of a block": Batch((20, 1), (50, 33), rules={"attention_chunk_size": 16}),
    "chunks of any length": Batch((20, 1), (50, 33), rules={"attention_chunk_size": 64}),
    "soft cap": Batch((1, 9), (40, 9), rules={"soft_cap": 0.5}),
    "soft cap and window": Batch((1, 9), (40, 9), rules={"soft_cap": 2.0, "sliding_window": 4}),
    "head size 64": Batch((1, 5), (40, 9), head_size=64),
    "head size 80": Batch((1, 5), (40, 9), head_size=80),
    "head size 128": Batch((1, 5), (40, 9), head_size=128),
    "head size 256": Batch((1, 3), (20, 9), head_size=256),
    "block size 1": Batch((1, 5), (7, 9), block_size=1),
    "block size 8": Batch((1, 5), (20, 9), block_size=8),
    "block size 3": Batch((1, 5), (20, 9), block_size=3),
    "block size 128": Batch((1, 5), (140, 9), block_size=128),
    "float16": Batch((1, 5), (40, 9), dtype=torch.float16),
    "bfloat16": Batch((1, 5), (40, 9), dtype=torch.bfloat16),
    "fp8 cache": Batch((1, 5), (40, 9), cache_dtype=FP8, rules={"k_scale": 0.5, "v_scale": 2.0}),
    "fp8 cache, bfloat16": Batch((1, 5), (40, 9), dtype=torch.bfloat16, cache_dtype=FP8),
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check_against_oracle(batch: Batch, device: str, **bounds: int) -> None:
    arguments, rules = batch.make()
    expected = attention(*arguments, **rules)
    moved, rules = batch.make(device)
    out = paged_attention(*moved, **{**rules, **bounds})
    assert out.dtype == batch.dtype
    # With an fp8 cache a GPU multiplies a float32 query in bfloat16, as the docstring says.
    rounded = device != "cpu" and batch.cache_dtype == FP8 and batch.dtype == torch.float32
    tolerance = TOLERANCE[torch.bfloat16 if rounded else batch.dtype]
    torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_attention_agrees_with_float64(backend: str, device: str, batch: Batch) -> None:
    check_against_oracle(batch, device)


def test_bounds_of_the_host_change_nothing(backend: str, device: str) -> None:
    check_against_oracle(BATCHES["mixed"], device, max_query_len=17)


@pytest.mark.parametrize("seq_len", [1, 300, 513])
def test_a_long_decode_is_split(backend: str, device: str, seq_len: int) -> None:
    check_against_oracle(Batch((1, 1), (seq_len, 200)), device, max_query_len=1)


def test_a_long_decode_with_uneven_head_parts_is_split(backend: str, device: str) -> None:
    """The last part has 23 heads instead of 24, and so a row that writes nothing."""
    batch = Batch((1, 1), (300, 20), num_heads=2 * 71)
    check_against_oracle(batch, device, max_query_len=1)


@pytest.mark.parametrize("rule", ["sliding_window", "attention_chunk_size"])
def test_a_long_decode_is_split_inside_a_window(backend: str, device: str, rule: str) -> None:
    batch = Batch((1, 1), (559, 20), rules={rule: 140})
    check_against_oracle(batch, device, max_query_len=1)


def test_memory_of_splits_without_keys_is_not_read(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    """The memory is not written and may hold NaN; there are more splits than a merge loads."""

    def empty(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        is_float = options.get("dtype", torch.float32).is_floating_point
        return torch.full(shape, float("nan") if is_float else 1 << 30, **options)

    monkeypatch.setattr(torch, "empty", empty)
    check_against_oracle(Batch((1, 1), (700, 3)), device, max_query_len=1)


@pytest.mark.parametrize("rules", [{}, {"soft_cap": 2.0}], ids=["plain", "soft cap"])
def test_a_nan_is_not_hidden(backend: str, device: str, rules: dict[str, float]) -> None:
    arguments, named = Batch((1, 2), (40, 9), rules=rules).make(device)
    arguments[0][1, 2, 3] = float("nan")
    hidden = paged_attention(*arguments, **named).isnan().any(-1)
    assert hidden.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("outermost", ["slots", "heads"])
def test_blocks_need_not_be_the_outermost_dimension_of_a_large_cache(
    backend: str, device: str, outermost: str
) -> None:
    """Addresses two slots or KV heads after the first exceed 32 bits."""
    batch = Batch((1, 2), (20, 9), num_heads=3, num_kv_heads=3, block_size=3, cache_dtype=FP8)
    arguments, rules = batch.make()
    expected = attention(*arguments, **rules)
    query, key_cache, value_cache, *others = (x.to(device) for x in arguments)
    stride = 1 << 30
    memory = torch.empty(2 * stride + (1 << 16), dtype=FP8, device=device)  # hardly any is touched
    strides = (64, stride, 16, 1) if outermost == "slots" else (64, 16, stride, 1)
    caches = []
    for start, cache in ((0, key_cache), (1 << 15, value_cache)):
        far = memory.as_strided(cache.shape, strides, storage_offset=start)
        far.copy_(cache)
        caches.append(far)
    out = paged_attention(query, *caches, *others, **rules)
    torch.testing.assert_close(out.double().cpu(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("query_lens", [(), (0, 0)])
def test_a_batch_without_tokens_has_an_empty_result(
    backend: str, device: str, query_lens: tuple[int, ...]
) -> None:
    arguments, rules = Batch(query_lens, (8,) * len(query_lens)).make(device)
    assert paged_attention(*arguments, **rules).shape == (0, 4, 16)


def test_strides_and_padding_of_the_query(backend: str, device: str) -> None:
    """Query, key and value are slices of one projection, caches are slices of one allocation."""
    arguments, rules = Batch((1, 5), (40, 9)).make()
    expected = attention(*arguments, **rules)
    query, key_cache, value_cache, *others = (x.to(device) for x in arguments)
    fused = torch.full((9, 8, 16), float("nan"), device=device)
    fused[:6, :4] = query
    caches = torch.stack([key_cache, value_cache], 1)
    out = torch.zeros(9, 4, 16, device=device)
    done = paged_attention(fused[:, :4], caches[:, 0], caches[:, 1], *others, **rules, out=out)
    assert done is out
    torch.testing.assert_close(out[:6].double().cpu(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rule", [{"sliding_window": 7}, {"attention_chunk_size": 16}], ids=str)
def test_blocks_before_the_window_are_not_read(
    backend: str, device: str, rule: dict[str, int]
) -> None:
    """They may be freed, and their table entries may have any value."""
    arguments, rules = Batch((1, 3), (70, 40), rules=rule).make()
    expected = attention(*arguments, **rules)
    tables = arguments[3]
    tables[0, :3], tables[1, :1] = 2**30, -1
    out = paged_attention(*(x.to(device) for x in arguments), **rules)
    torch.testing.assert_close(out.double().cpu(), expected, atol=2e-5, rtol=2e-5)


def test_the_reference_computes_many_decodes_in_groups(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The groups limit its memory and do not change the result."""
    monkeypatch.setattr("blockstep.kernels.attention.NUM_GATHERED_MAX", 2 * 40 * 32)
    check_against_oracle(Batch((1,) * 6, (40, 40, 40, 3, 40, 9)), device)


# The bits of a request.

LENGTHS = {
    "decode of one split": (1, 11), "decode": (1, 331), "drafts": (4, 170), "many drafts": (9, 530),
    "prefill": (40, 40), "chunk": (70, 90),
}  # fmt: skip
"""Tokens in the step, and keys."""
COMPANIONS: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "among prefills": ([(17, 17), (50, 60)], [(33, 40)]),
    "among long ones": ([(1, 700)], [(5, 500)]),
    "among padding": ([], [(1, 1)] * 5),
    "among many": ([(1, 60)] * 3, [(1, 100), (0, 7), (1, 18)]),
}
"""Lengths of the requests before and after."""
PLAIN: dict[str, Any] = {}
WINDOW = {"rules": {"sliding_window": 150}}
CHUNKS = {"rules": {"attention_chunk_size": 96}}
SOFT_CAP = {"rules": {"soft_cap": 2.0}}
CACHE = {"cache_dtype": FP8, "rules": {"k_scale": 0.5, "v_scale": 2.0}}
BRAIN: dict[str, Any] = {"dtype": torch.bfloat16}
BRAIN_128 = {"dtype": torch.bfloat16, "head_size": 128}
REQUESTS = [
    *((name, PLAIN) for name in LENGTHS), ("decode", WINDOW), ("many drafts", WINDOW),
    ("decode", CHUNKS), ("drafts", SOFT_CAP), ("decode", CACHE), ("prefill", CACHE),
    ("drafts", BRAIN_128), ("prefill", BRAIN), ("drafts", {"num_heads": 14}),
]  # fmt: skip


def make_with_subject(batch: Batch, subject: int, device: str) -> tuple[Any, dict[str, Any]]:
    """Return arguments where request `subject` has the same numbers in any batch."""
    (query, keys, values, tables, starts, lens), rules = batch.make()
    draw = torch.Generator().manual_seed(7)
    start, stop = starts[subject : subject + 2].tolist()
    query[start:stop] = torch.randn(query[start:stop].shape, generator=draw).to(query.dtype)
    position = torch.arange(int(lens[subject]))
    blocks, offsets = tables[subject][position // batch.block_size], position % batch.block_size
    for cache in (keys, values):
        drawn = torch.randn((len(position), *cache.shape[2:]), generator=draw)
        wide = cache.float()
        wide[blocks.long(), offsets] = drawn
        cache.copy_(wide.to(cache.dtype))
    moved = tuple(x.to(device) for x in (query, keys, values, tables, starts, lens))
    return moved, rules


def plan_rules(rules: dict[str, Any]) -> dict[str, Any]:
    """Return those rules that a plan depends on."""
    names = ("sliding_window", "attention_chunk_size")
    return {name: rules[name] for name in names if name in rules}


def attend_in_batches(
    lengths: tuple[int, int],
    kind: dict[str, Any],
    device: str,
    set_processors: Callable[[int], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the rows of one request, alone and in each batch, on devices of different sizes."""
    batches = {"alone": ([], []), **COMPANIONS, "alone again": ([], [])}
    for count, (name, (before, after)) in enumerate(batches.items(), 1):
        set_processors(count)
        query_lens, seq_lens = zip(*before, lengths, *after, strict=True)
        batch = replace(Batch(query_lens, seq_lens), **kind)
        (query, *others), rules = make_with_subject(batch, len(before), device)
        workspace = make_attention_workspace(query, others[0], others[2].shape[1] * 16)
        start = sum(query_lens[: len(before)])
        how: dict[str, Any] = {}
        if before:
            plan = plan_attention(
                query, others[0], *others[3:], max_query_len=max(query_lens), **plan_rules(rules)
            )
            how = {"max_query_len": max(query_lens), "workspace": workspace, "plan": plan}
        out = paged_attention(query, *others, **{**rules, **how})
        yield name, out[start : start + lengths[0]]
        assert not workspace.counters.any()  # as they were, for the next call


@pytest.mark.sampled(one_in=9)
@pytest.mark.parametrize(("name", "kind"), REQUESTS, ids=str)
def test_bits_of_a_request_do_not_depend_on_its_batch(
    monkeypatch: pytest.MonkeyPatch, device: str, name: str, kind: dict[str, Any]
) -> None:
    """They do not depend on the number of multiprocessors, a bound or a workspace either."""
    attention_triton = pytest.importorskip("blockstep.kernels.attention_triton")

    def set_processors(count: int) -> None:
        monkeypatch.setattr(attention_triton, "count_processors", lambda _: count)

    with use_backend("triton"):
        found = dict(attend_in_batches(LENGTHS[name], kind, device, set_processors))
    alone = found.pop("alone")
    assert not alone.isnan().any()
    different = [name for name, rows in found.items() if not torch.equal(rows, alone)]
    assert different == []


@pytest.mark.sampled(one_in=9)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU chooses the order itself")
@pytest.mark.parametrize(
    "name", ["many drafts", *(pytest.param(n, marks=pytest.mark.soak) for n in ("decode", "chunk"))]
)
def test_bits_of_a_request_do_not_depend_on_the_order_of_programs(
    monkeypatch: pytest.MonkeyPatch, device: str, name: str
) -> None:
    """The programs run in reverse order.

    On a GPU a program may store splits of another one's query tile before that one starts. The
    interpreter runs programs one after the other.
    """
    attention_triton = pytest.importorskip("blockstep.kernels.attention_triton")
    builder = import_module("triton.runtime.interpreter").interpreter_builder
    forward = builder.set_grid_idx

    def set_processors(count: int) -> None:
        monkeypatch.setattr(attention_triton, "count_processors", lambda _: count)

    def run_backward(x: int, y: int, z: int) -> None:
        forward(builder.grid_dim[0] - 1 - x, y, z)

    with use_backend("triton"):
        expected = dict(attend_in_batches(LENGTHS[name], PLAIN, device, set_processors))
        monkeypatch.setattr(builder, "set_grid_idx", run_backward)
        found = dict(attend_in_batches(LENGTHS[name], PLAIN, device, set_processors))
    different = [name for name, rows in found.items() if not torch.equal(rows, expected[name])]
    assert different == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lengths", [(1, 531), (1, 8000), (4, 300)], ids=str)
def test_bits_of_a_request_are_the_same_in_a_graph_replay(
    lengths: tuple[int, int],
) -> None:
    """The graph is captured with padding of one key, then replayed with other requests there."""
    query_len, seq_len = lengths
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "head_size": 128, "num_heads": 8}
    batch = replace(Batch((query_len,) * 9, (seq_len, *[700] * 4, *[16 * 500] * 4)), **kind)
    (query, *others), rules = make_with_subject(batch, 0, "cuda")
    keys, values, tables, starts, lens = others
    wanted = lens.clone()
    lens.fill_(query_len)
    workspace = make_attention_workspace(query, keys, tables.shape[1] * 16)
    how = {"max_query_len": query_len, "workspace": workspace, **rules}
    paged_attention(query, *others, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(query, *others, **how)
    lens.copy_(wanted)
    graph.replay()
    alone = paged_attention(
        query[:query_len].clone(), keys, values, tables[:1].clone(), starts[:2].clone(),
        lens[:1].clone(), **rules,
    )  # fmt: skip
    assert torch.equal(out[:query_len], alone)
    expected = attention(*(x.cpu() for x in (query, *others)), **rules)
    torch.testing.assert_close(out.double().cpu(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 300), (1, 40), (70, 90), (0, 9), (4, 500), (20, 400), (1, 17)],
        [(1, 20), (1, 60), (0, 9), (1, 1), (2, 64), (20, 90), (1, 40)],
    ],
    ids=["long ones among short ones", "a program for each short one"],
)
def test_programs_compute_the_tiles_that_the_benchmark_counts(
    monkeypatch: pytest.MonkeyPatch, lengths: list[tuple[int, int]]
) -> None:
    """The benchmark's table of shares is therefore that of the kernel."""
    attention_triton = pytest.importorskip("blockstep.kernels.attention_triton")
    if torch.cuda.is_available():
        pytest.skip("looks at interpreted kernels")
    from benchmarks.attention import share_out

    tiles: Counter[int] = Counter()
    launches: list[list[int]] = []
    finish = Sanitizer.finish_launch

    def count(self: Sanitizer) -> None:
        tiles.clear()
        for access, _, _ in self.log:
            if access.line.startswith("load_tile"):
                tiles[access.program[0]] += 1
        if tiles:  # a plan has none
            order = [program // 2 + program % 2 * 5 for program in range(10)]  # two per processor
            launches.append([tiles[index] // 2 for index in order])  # keys and values
        finish(self)

    monkeypatch.setattr(Sanitizer, "finish_launch", count)
    monkeypatch.setattr(attention_triton, "count_processors", lambda _: 5)
    batch = Batch(*zip(*lengths, strict=True))  # type: ignore[arg-type]
    arguments, rules = batch.make()
    with use_backend("triton"), sanitize() as sanitizer:
        paged_attention(*arguments, **rules)
    assert sanitizer.findings == []
    tilings = attention_triton.choose_tilings(16, 2, 4)
    assert launches == [
        share_out("", lengths, tilings, 2, 10, is_few=is_few).tiles for is_few in (True, False)
    ]


def test_a_short_request_has_one_split_and_no_merge() -> None:
    rule: Any = partition
    sizes = [rule.choose_split_tiles(num_tiles, 1, rule.FEW) for num_tiles in range(1, 10)]
    assert sizes == [1, 2, 3, 4, 1, 1, 1, 1, 2]


def test_a_plan_serves_all_layers_of_a_step(backend: str, device: str) -> None:
    arguments, rules = Batch((1, 30, 3), (200, 90, 40)).make(device)
    query, keys, _, _, starts, lens = arguments
    plan = plan_attention(query, keys, starts, lens)
    expected = [paged_attention(*arguments, **rules) for _ in range(2)]
    made = [paged_attention(*arguments, **rules, plan=plan) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(made, expected, strict=True))


@pytest.mark.parametrize("change", [{"sliding_window": 8}, {"attention_chunk_size": 8}], ids=str)
def test_a_plan_for_other_rules_is_rejected(device: str, change: dict[str, int]) -> None:
    pytest.importorskip("triton")
    arguments, rules = Batch((1, 3), (20, 9)).make(device)
    query, keys, _, _, starts, lens = arguments
    with use_backend("triton"):
        plan = plan_attention(query, keys, starts, lens, **change)
        with pytest.raises(ValueError, match="plan: must be for"):
            paged_attention(*arguments, **rules, plan=plan)


def test_a_workspace_that_is_too_small_is_rejected(device: str) -> None:
    pytest.importorskip("triton")
    arguments, rules = Batch((1,), (3000,)).make(device)
    with use_backend("triton"):
        workspace = make_attention_workspace(arguments[0], arguments[1], 16)
        with pytest.raises(ValueError, match=r"workspace: must hold .* of at least 3008"):
            paged_attention(*arguments, **rules, workspace=workspace)


def test_the_reference_needs_no_workspace() -> None:
    arguments, rules = Batch((1,), (4,)).make()
    workspace = make_attention_workspace(arguments[0], arguments[1], 16)
    assert [x.numel() for x in workspace] == [0, 0, 0]
    out = paged_attention(*arguments, **rules, workspace=workspace)
    assert torch.equal(out, paged_attention(*arguments, **rules))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "list": ({"query": [1.0]}, TypeError, "query: must be a torch.Tensor, but is list"),
    "double": ({"query": torch.zeros(6, 4, 16).double()}, TypeError, "query: must be float32 or"),
    "mixed dtypes": (
        {"query": torch.zeros(6, 4, 16).half()}, TypeError, "key_cache: must be float16 or float8",
    ),
    "rank": ({"query": torch.zeros(6, 64)}, ValueError, "query: must have 3 dimensions"),
    "head size": (
        {"query": torch.zeros(6, 4, 8)}, ValueError, "head_size.* must be 8 as in query",
    ),
    "heads": ({"query": torch.zeros(6, 3, 16)}, ValueError, "multiple of num_kv_heads"),
    "offsets": (
        {"query_start_loc": torch.tensor([0, 6], dtype=torch.int32)}, ValueError,
        "query_start_loc: dimension 0",
    ),
    "descending": (
        {"query_start_loc": torch.tensor([0, 5, 4], dtype=torch.int32)}, ValueError,
        "query_start_loc: must ascend from 0",
    ),
    "too long": (
        {"seq_lens": torch.tensor([49, 9], dtype=torch.int32)}, ValueError,
        r"seq_lens: must hold what a row of block_tables can hold, in 0 <= x < 49, but holds 49",
    ),
    "too short": (
        {"seq_lens": torch.tensor([40, 4], dtype=torch.int32)}, ValueError,
        "seq_lens: must count this step's tokens too",
    ),
    "stale table": (
        {"block_tables": torch.full((2, 3), 99, dtype=torch.int32)}, ValueError,
        "block_tables: must hold ids of blocks of the cache",
    ),
    "layout": (
        {"query": torch.zeros(6, 16, 4).transpose(1, 2)}, ValueError,
        r"query: its last dimension must be contiguous.*pass query.contiguous\(\)",
    ),
    "device": (
        {"seq_lens": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError,
        "seq_lens: must be on the device of query",
    ),
    "scale": ({"scale": 0.0}, ValueError, "scale: must be positive"),
    "soft cap": ({"soft_cap": -1.0}, ValueError, "soft_cap: must be positive"),
    "window": ({"sliding_window": 0}, ValueError, "sliding_window: must be at least 1"),
    "chunk": ({"attention_chunk_size": 0}, ValueError, "attention_chunk_size: must be at least 1"),
    "window and chunk": (
        {"attention_chunk_size": 8, "sliding_window": 8}, ValueError,
        "attention_chunk_size: must not be given with sliding_window",
    ),
    "k_scale": ({"k_scale": 2.0}, ValueError, "k_scale: must be 1 unless the cache is float8"),
    "out": ({"out": torch.zeros(5, 4, 16)}, ValueError, "out: dimension 0"),
    "bound": ({"max_query_len": 0}, ValueError, "max_query_len: must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_is_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    names = ("query", "key_cache", "value_cache", "block_tables", "query_start_loc", "seq_lens")
    arguments, rules = Batch((1, 5), (40, 9)).make()
    call = {**dict(zip(names, arguments, strict=True)), **rules, **change}
    with pytest.raises(error, match=message):
        paged_attention(**call)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU checks every call")
def test_a_wrong_call_is_rejected_after_a_right_one() -> None:
    arguments, rules = Batch((1,), (4,)).make("cuda")
    for _ in range(2):
        paged_attention(*arguments, **rules)
        with pytest.raises(ValueError, match="scale: must be positive"):
            paged_attention(*arguments, **{**rules, "scale": 0.0})


def test_a_head_size_without_a_kernel_is_rejected() -> None:
    arguments, rules = Batch((1,), (4,), head_size=24).make()
    with pytest.raises(ValueError, match=r"head_size must be one of .* but is 24"):
        paged_attention(*arguments, **rules)
