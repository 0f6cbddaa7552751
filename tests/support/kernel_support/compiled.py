"""Every kernel that the public functions launch, compiled for an H100 on a machine without one.

    python -m kernel_support.compiled attention    (TRITON_INTERPRET unset)

Nothing is configured here a second time: the public functions are called, what they would launch is
recorded with its arguments, and that is compiled as a launch would (an integer of 1 is a constant,
multiples of 16 are known to be such). Prints a JSON list of `Compiled`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kernel_support.oracle import Batch

TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Compiled:
    """The resources of a compiled kernel, as the assembler reports them."""

    call: str
    kernel: str
    registers: int
    stack: int
    """Bytes of stack, to which registers are spilled."""
    shared: int
    """Bytes of shared memory."""
    seconds: float
    waits: bool
    """Whether a program waits for earlier kernels before it loads or stores anything, if it may
    begin before they have ended."""


@dataclass
class Recorder:
    """Stands in for a kernel, and keeps what it is launched with."""

    kernel: Any
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **named: self.launches.append((self.kernel, args, named))


def record(modules: list[ModuleType], call: Callable[[], object]) -> list[Any]:
    """The launches of a call."""
    from triton.runtime.jit import JITFunction

    launches: list[Any] = []
    replaced = []
    for module in modules:
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                replaced.append((module, name, kernel))
                setattr(module, name, Recorder(kernel, launches))
    try:
        call()
    finally:
        for module, name, kernel in replaced:
            setattr(module, name, kernel)
    assert launches, "the call launched nothing"
    return launches


def specialise(
    kernel: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """Return types, constants and hints of a launch: another one means another compilation."""
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **named}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        specialised = not kernel.params[index].do_not_specialize
        if name in named or (isinstance(value, int) and value == 1 and specialised):
            signature[name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[name] = describe(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        aligned = specialised and not kernel.params[index].do_not_specialize_on_alignment
        if isinstance(number, int) and number % 16 == 0 and aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(
    call: str, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> Compiled:
    """Compile one launch for sm_90a, and read its resources from the binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: named.pop(name) for name in OPTIONS if name in named}
    signature, constants, attributes = specialise(kernel, args, named)
    start = time.perf_counter()
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    seconds = time.perf_counter() - start
    registers, stack = read_resources(compiled.asm["cubin"])
    return Compiled(
        call, kernel.fn.__name__, registers, stack, compiled.metadata.shared, round(seconds, 2),
        not options.get("launch_pdl") or is_waiting(compiled.asm["ptx"]),
    )  # fmt: skip


def is_waiting(ptx: str) -> bool:
    """Return whether `griddepcontrol.wait` comes before the first access of global memory."""
    access = re.search(r"\b(ld|st|atom|red|cp\.async\S*)(\.volatile)?\.global", ptx)
    wait = ptx.find("griddepcontrol.wait")
    return wait >= 0 and (access is None or wait < access.start())


def describe(value: object) -> str:
    """The type of an argument, as Triton writes it."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def read_resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack."""
    from triton.backends import nvidia

    tool = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", output)
    assert found, output
    return int(found[1]), int(found[2])


# The calls.

Call = tuple[str, Callable[[], object]]
HALF, BRAIN, SINGLE, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


KINDS = {"few": 1, "many": 40}
"""The two launches of attention, by the tokens of a request."""
BOTH: dict[str, Any] = {"sliding_window": 64, "soft_cap": 30.0}
CHUNKS: dict[str, Any] = {"attention_chunk_size": 64}
RULES: list[dict[str, Any]] = [{}, {"sliding_window": 64}, {"soft_cap": 30.0}, BOTH, CHUNKS]


def list_attention(*, every: bool) -> Iterator[Call]:
    """Return the cases: one head size per tiling by default, else all sizes and groups."""
    from blockstep.kernels.arguments import HEAD_SIZES

    if every:
        dtypes = [(query, cache) for query in (BRAIN, HALF, SINGLE) for cache in (None, FP8)]
        sizes = [size for size in HEAD_SIZES if size >= 64]
        yield from attention_calls(dtypes, sizes, [4], [{}], list(KINDS))
        dtypes = [(query, cache) for query in (BRAIN, SINGLE) for cache in (None, FP8)]
        groups = [1, 4, 7, 16, 32, 64, 71, 256]
        yield from attention_calls(dtypes, [64, 128, 256], groups, RULES, list(KINDS))
    else:
        yield from attention_calls([(BRAIN, None)], [128], [8], [BOTH], list(KINDS))
        yield from attention_calls([(BRAIN, None)], [128], [8], [CHUNKS], list(KINDS))
        yield from attention_calls([(BRAIN, None)], [128], [64], [{}], ["few"])
        yield from attention_calls([(BRAIN, None)], [256], [7], [{}], list(KINDS))
        yield from attention_calls([(SINGLE, None)], [128], [71], [{}], list(KINDS))
        dtypes = [(BRAIN, None), (SINGLE, None), (BRAIN, FP8)]
        yield from attention_calls(dtypes, [64, 128, 256], [4], [{}], list(KINDS))


def attention_calls(
    dtypes: list[Any], sizes: list[int], groups: list[int], rules: list[Any], kinds: list[str]
) -> Iterator[Call]:
    """Return the calls of attention for all combinations of these values."""
    from blockstep.kernels import paged_attention

    for (dtype, cache), size, group, rule, kind in product(dtypes, sizes, groups, rules, kinds):
        length = KINDS[kind]
        batch = Batch((length,), (64,), 2 * group, 2, size, 16, dtype, cache, dict(rule))
        name = f"{kind} {dtype} {cache} head_size={size} group={group} {rule}".replace("torch.", "")
        arguments, named = batch.make()
        yield name, partial(paged_attention, *arguments, **named, max_query_len=length)


def list_others(*, every: bool) -> Iterator[Call]:
    """Everything but attention."""
    from blockstep.kernels import (
        commit_step,
        copy_blocks,
        gather_blocks,
        keep_tokens,
        merge_drafts,
        prepare_step,
        rejection_sample,
        reshape_and_cache,
        scatter_blocks,
        stage_step,
    )

    caches = [(BRAIN, BRAIN), (HALF, FP8), (BRAIN, FP8), (SINGLE, FP8), (SINGLE, SINGLE)]
    for dtype, cache in [*caches, (SINGLE, HALF)]:
        tokens, blocks = torch.zeros(4, 8, 128, dtype=dtype), torch.zeros(4, 16, 8, 128).to(cache)
        slots, pairs = torch.arange(4), torch.tensor([[0, 1], [2, 3]])
        yield (
            f"reshape_and_cache {dtype} {cache}",
            partial(reshape_and_cache, tokens, tokens, blocks, blocks, slots),
        )
        small, ids, staging = blocks[:, :1], torch.arange(2), blocks[:2, :1].clone()
        yield f"copy_blocks {cache}", partial(copy_blocks, [blocks], pairs)
        yield f"copied at once {cache}", partial(copy_blocks, [blocks], pairs, independent=True)
        yield f"gather_blocks {cache}", partial(gather_blocks, small, ids, staging)
        yield f"scatter_blocks {cache}", partial(scatter_blocks, staging, ids, small)
    tables, ones = torch.zeros(32, 64, dtype=torch.int32), torch.ones(32, dtype=torch.int32)
    rows, starts = torch.arange(32), torch.arange(33, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int64)
    for row, out in ((None, None), (rows, tables)):
        yield (
            f"prepare_step rows={row is not None}",
            partial(prepare_step, tables, ones, ones, 16, row_indices=row, out_block_tables=out),
        )
        yield (
            f"commit_step rows={row is not None}",
            partial(
                commit_step, ones, rows, ones, rows[:, None], ones, starts * 0, row_indices=row
            ),
        )
    yield "merge_drafts", partial(merge_drafts, rows, starts, rows, none, starts * 0)
    grouped = tables[None]
    new = {"new_blocks": grouped[:, 0, :32], "new_places": torch.stack((rows, rows))}
    fed = {"token_ids": rows, "fed_at": rows, "last_token_ids": rows}
    for more in ({}, new, fed, {**new, **fed}):
        yield f"stage_step {[*more]}", partial(stage_step, grouped, grouped, rows, **more)
    yield "keep_tokens", partial(keep_tokens, rows, rows, rows)
    for dtype, probs in product((SINGLE, HALF, BRAIN), (None, torch.zeros(32, 4096))):
        yield (
            f"rejection_sample {dtype} probs={probs is not None}",
            partial(
                rejection_sample, torch.zeros(64, 4096, dtype=dtype), rows, starts,
                temperature=ones.float(), seeds=rows, positions=rows, draft_probs=probs,
            ),
        )  # fmt: skip
        yield (
            f"rejection_sample {dtype} large",
            partial(
                rejection_sample, torch.zeros(64, 131_072, dtype=dtype), rows, starts,
                temperature=ones.float(), seeds=rows, positions=rows,
            ),
        )  # fmt: skip


def list_layers(*, every: bool) -> Iterator[Call]:
    """The kernels of a decoder layer without attention, and sampling."""
    from blockstep.kernels import (
        add_rms_norm,
        multiply_in_parts,
        multiply_silu_and_mul,
        rms_norm,
        rotate_and_cache,
        sample_tokens,
        silu_and_mul,
    )

    for dtype, size in product((BRAIN, HALF, SINGLE), (64, 2048, 5632, 16384)):
        hidden = torch.zeros(4, size, dtype=dtype)
        yield f"rms_norm {dtype} {size}", partial(rms_norm, hidden, hidden[0], 1e-6)
        added = partial(add_rms_norm, hidden, hidden.clone(), hidden[0], 1e-6)
        yield f"add_rms_norm {dtype} {size}", added
        yield f"silu_and_mul {dtype} {size}", partial(silu_and_mul, hidden)
    dtypes = [(BRAIN, BRAIN), (BRAIN, FP8), (HALF, FP8), (SINGLE, SINGLE)]
    for (dtype, cache), size, normed in product(dtypes, (64, 80, 128, 256), (False, True)):
        qkv, blocks = torch.zeros(4, 12 * size, dtype=dtype), torch.zeros(4, 16, 2, size).to(cache)
        slots, table = torch.arange(4), torch.zeros(4, size, dtype=dtype)
        norm = table[0] if normed else None
        yield (
            f"rotate_and_cache {dtype} {cache} head_size={size} normed={normed}",
            partial(
                rotate_and_cache, qkv, blocks, blocks, slots, slots, table, q_norm=norm, k_norm=norm
            ),
        )
        qkv = qkv[None].float().expand(4, -1, -1).contiguous()
        yield (
            f"rotate_and_cache parts {dtype} {cache} head_size={size} normed={normed}",
            partial(
                rotate_and_cache, qkv, blocks, blocks, slots, slots, table, q_norm=norm, k_norm=norm
            ),
        )
    for dtype, num_tokens, (out_size, in_size) in product(
        (BRAIN, HALF), (1, 17, 64), ((2560, 2048), (2048, 5632), (28_672, 4096), (96, 72))
    ):
        hidden = torch.zeros(num_tokens, in_size, dtype=dtype)
        weight = torch.zeros(out_size, in_size, dtype=dtype)
        name = f"{dtype} {num_tokens} x {in_size} x {out_size}"
        yield f"multiply_in_parts {name}", partial(multiply_in_parts, hidden, weight)
        yield f"multiply_silu_and_mul {name}", partial(multiply_silu_and_mul, hidden, weight)
    rows = torch.arange(16)
    ones, ids = torch.ones(16), rows.int()
    for dtype, vocab_size in product((BRAIN, HALF, SINGLE), (128, 32_000, 131_072)):
        yield (
            f"sample_tokens {dtype} {vocab_size}",
            partial(
                sample_tokens, torch.zeros(16, vocab_size, dtype=dtype), temperature=ones,
                top_k=ids, top_p=ones, min_p=ones, seeds=rows, indices=rows,
            ),
        )  # fmt: skip


def list_bursts(*, every: bool) -> Iterator[Call]:
    """Return the launches of a burst's step other than scheduler, model and sampling."""
    from engine_support.bursts import draw_memory

    for frames, groups in ((1, 1), (2, 1), (2, 3)):
        memory = draw_memory(5, width=64, frames=frames, groups=groups, lanes=64)
        now, following = memory.get_rows(64)
        name, tokens = f"{frames} frames, {groups} groups", torch.arange(64)
        yield name, partial(memory.write_rows, following)
        for after in (None, following):
            yield name, partial(memory.take_rows_tokens, tokens, now, after, is_alone=True)
        yield name, partial(memory.note_end, 64, 0, is_last=False)
        yield name, partial(memory.note_end, 64, 0, is_last=True)
        yield name, memory.look


LISTS = {
    "attention": list_attention,
    "others": list_others,
    "layers": list_layers,
    "bursts": list_bursts,
}


def record_all(calls: Iterable[Call]) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the launches of the calls, each with the name of its call."""
    from blockstep.kernels import dispatch, use_backend
    from blockstep.kernels import attention_triton, blocks_triton, cache_triton  # isort: skip
    from blockstep.kernels import rejection_triton, step_triton  # isort: skip
    from blockstep.kernels import layers_triton, products_triton, sampling_triton  # isort: skip
    from blockstep.impl.engine import bursts, bursts_triton  # isort: skip

    bursts._find_kernels = lambda tensor: bursts_triton

    # The tensors here are on the CPU, and what is asked is what a GPU would be given.
    attention_triton.is_compiled = lambda query: True
    vars(products_triton)["count_processors"] = lambda device: 132
    modules = [attention_triton, blocks_triton, cache_triton, rejection_triton, step_triton]
    modules += [layers_triton, products_triton, sampling_triton, bursts_triton]
    vars(dispatch)["is_dependent_launch"] = lambda device: True
    with use_backend("triton"):
        for name, call in calls:
            for kernel, args, named in record(modules, call):
                yield name, kernel, args, named


def list_steps() -> Iterator[Call]:
    """Yield the sizes of successive decode steps with more and longer sequences."""
    from engine_support.bursts import draw_memory

    from blockstep.kernels import (
        commit_step,
        keep_tokens,
        merge_drafts,
        paged_attention,
        prepare_step,
        stage_step,
    )

    memory = draw_memory(5, width=32, frames=2, groups=1, lanes=64)
    for num_seqs, num_blocks in ((1, 1), (2, 3), (16, 16), (17, 31)):
        now, following = memory.get_rows(num_seqs)
        yield "rows", partial(memory.write_rows, following)
        ids = torch.arange(num_seqs)
        yield "tokens", partial(memory.take_rows_tokens, ids, now, following, is_alone=True)
        yield "end", partial(memory.note_end, num_seqs, num_blocks - 1, is_last=True)
        ones = torch.ones(num_seqs, dtype=torch.int32)
        rows, starts = torch.arange(num_seqs), torch.arange(num_seqs + 1, dtype=torch.int32)
        tables, none = torch.zeros(num_seqs, num_blocks, dtype=torch.int32), rows[:0]
        name = f"{num_seqs} sequences of {num_blocks} blocks"
        yield (
            name,
            partial(prepare_step, tables, ones, ones, 16, out_block_tables=tables.clone()),
        )
        yield name, partial(merge_drafts, rows, starts, rows, none, starts * 0)
        batch = torch.zeros(1, 64 * num_seqs, 128, dtype=torch.int32)
        both, places = torch.arange(2 * num_seqs), torch.zeros(2, num_blocks, dtype=torch.int64)
        yield (
            name,
            partial(
                stage_step, batch[:, :num_seqs, :num_blocks], batch, both[num_seqs:],
                new_blocks=places[:1].int(), new_places=places, token_ids=rows,
                fed_at=0 * both[num_seqs:], last_token_ids=torch.arange(64 * num_seqs),
            ),
        )  # fmt: skip
        yield name, partial(keep_tokens, both, both[num_seqs:], rows)
        tokens = torch.zeros(num_seqs, num_blocks, dtype=torch.int64)
        yield name, partial(commit_step, ones, rows, ones, tokens, ones, starts * 0)
        for query_len in KINDS.values():
            lengths = (query_len,) * num_seqs, (48 + 16 * num_blocks,) * num_seqs
            arguments, named = Batch(*lengths, 8, 2, 64, 16, BRAIN).make()
            yield name, partial(paged_attention, *arguments, **named, max_query_len=query_len)
        yield from list_layers_of_step(name, num_seqs, arguments[1], arguments[2])


def list_layers_of_step(
    name: str, num_seqs: int, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> Iterator[Call]:
    """The kernels of a layer without attention, and sampling, in a step of `list_steps`."""
    from blockstep.kernels import (
        add_rms_norm,
        multiply_in_parts,
        multiply_silu_and_mul,
        rotate_and_cache,
        sample_tokens,
        silu_and_mul,
    )

    # Columns of larger tensors, which are not always aligned to 16 bytes.
    both, more = torch.ones(2 * num_seqs), torch.arange(2 * num_seqs)
    rows, ones = torch.arange(num_seqs), torch.ones(num_seqs, dtype=torch.int32)
    hidden, weight = torch.zeros(num_seqs, 768, dtype=BRAIN), torch.zeros(64, 768, dtype=BRAIN)
    yield name, partial(add_rms_norm, hidden, hidden.clone(), hidden[0], 1e-6)
    yield name, partial(silu_and_mul, hidden)
    yield name, partial(multiply_in_parts, hidden, weight)
    yield name, partial(multiply_silu_and_mul, hidden, weight)
    table = torch.zeros(num_seqs, 64, dtype=BRAIN)
    yield (
        name,
        partial(rotate_and_cache, hidden, key_cache, value_cache, more[num_seqs:], rows, table),
    )
    yield (
        name,
        partial(
            sample_tokens, hidden, temperature=both[:num_seqs], top_k=ones, top_p=both[num_seqs:],
            min_p=both[num_seqs:], seeds=rows, indices=more[num_seqs:],
        ),
    )  # fmt: skip


def count_variants() -> dict[str, int]:
    """Return the number of compilations of each kernel in these steps."""
    found: dict[str, set[str]] = {}
    for _, kernel, args, named in record_all(list_steps()):
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        found.setdefault(name, set()).add(str(specialise(kernel, args, named)))
    return {name: len(variants) for name, variants in found.items()}


def compile_all(which: str, *, every: bool = False) -> list[dict[str, Any]]:
    """Compile what the calls of a list launch, each kernel once."""
    found: dict[tuple[str, str, str], Any] = {}
    for launch in record_all(LISTS[which](every=every)):
        _, kernel, args, named = launch
        options = [named.get(name) for name in OPTIONS]
        key = kernel.fn.__name__, str(options), str(specialise(kernel, args, named))
        found.setdefault(key, launch)
    return [asdict(compile_launch(*launch)) for launch in found.values()]


if __name__ == "__main__":
    of = sys.argv[1]
    result = count_variants() if of == "variants" else compile_all(of, every="--every" in sys.argv)
    sys.stdout.write(json.dumps(result) + "\n")
