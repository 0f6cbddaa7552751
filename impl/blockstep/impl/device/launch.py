"""Launch: runs a kernel by numpy or on a GPU, and compiles it before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

from blockstep.impl.device.dims import CONSTANTS, Dims
from blockstep.impl.device.layout import INT64S, State
from blockstep.kernels import numpied

Launch: TypeAlias = Callable[[str, State, Dims], None]
"""Runs a kernel of `step`, by its name, on a state of numpy arrays, which it changes."""
FOLDER: Final = Path(__file__).parent
MODULES: Final = (
    "pool", "prefix_cache", "groups", "queues", "commands", "running", "waiting", "results",
    "node_gc", "inputs", "steady", "step",
)  # fmt: skip
"""The modules of the kernels; each calls those before it."""
GPU_KERNELS: Final = ("loop_kernel", "settle_kernel", "sweep_kernel")
"""The kernels that a serving engine launches on a GPU; it runs the others by numpy."""
MOST_WARPS: Final = 16
REGISTERS: Final = 65_536
"""Registers of a multiprocessor."""
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the kernel that is compiled next, the number done, and the number in total."""


def list_files() -> Sequence[Path]:
    """Return the sources, in the order of `MODULES`."""
    return [FOLDER / f"{module}.py" for module in MODULES]


class Numpied:
    """Runs the kernels' source by numpy.

    Args:
        memory: what loads and stores do; by default every store is visible at once.
        changed: source texts that replace those of modules, by module name.
    """

    def __init__(
        self, memory: numpied.Memory | None = None, changed: Mapping[str, str] | None = None
    ) -> None:
        self.memory = numpied.Memory() if memory is None else memory
        texts = {FOLDER / f"{name}.py": text for name, text in (changed or {}).items()}
        self._kernels = numpied.load_kernels(list_files(), self.memory, texts)

    def __call__(self, kernel: str, state: State, dims: Dims) -> None:
        """Run one kernel."""
        numpied.launch(self._kernels[kernel], self.memory, state, dims)


@cache
def get_numpied() -> Numpied:
    """Return the instance that engines share: it keeps nothing between launches."""
    return Numpied()


def get_constants(dims: Dims) -> tuple[int, ...]:
    """Return the dims that are compiled into a kernel: dims with equal ones share it."""
    return tuple(getattr(dims, name) for name in CONSTANTS)


def get_options(dims: Dims) -> dict[str, int]:
    """Triton's options for a kernel.

    One program has a multiprocessor for itself, so it may use all registers. A load must not be
    prefetched before an earlier store, so loops have one stage.
    """
    # One warp needs no shared memory for sums; with 64 rows each thread has two.
    warps = 1 if dims.rows <= 64 else min(max(dims.rows // 128, 4), MOST_WARPS)
    registers = min(255, REGISTERS // (32 * warps))
    return {"num_warps": warps, "num_stages": 1, "maxnreg": registers}


def compile_kernel(kernel: str, dims: Dims, target: Any = None) -> Any:
    """Compile a kernel of `step`, or read it from Triton's cache on disk.

    Only the fields in `CONSTANTS` are compiled in, so other dims with the same ones get the same
    kernel. Triton's own launcher would compile one for each number that is 1 or divisible by 16,
    and would assume aligned tensors: then a thread takes four neighbours of a dense column, while
    gathers need them apart, and layouts are converted through shared memory all the time.

    Args:
        kernel: its name.
        dims: the dims that it will be launched with.
        target: Triton's `GPUTarget`; by default the current GPU.

    Returns:
        kernel: Triton's compiled kernel: `compiled[1, 1, 1](state, dims)` launches it.
    """
    compiler: Any = import_module("triton.compiler")
    function = getattr(import_module("blockstep.impl.device.step"), kernel)
    pointers: Any = ("*i64" if name in INT64S else "*i32" for name in State._fields)
    types: Any = ("constexpr" if name in CONSTANTS else "i32" for name in Dims._fields)
    source = compiler.ASTSource(
        fn=function,
        signature={"s": State(*pointers), "d": Dims(*types)},
        constexprs={(1, Dims._fields.index(name)): getattr(dims, name) for name in CONSTANTS},
    )
    return compiler.compile(source, target=target, options=get_options(dims))


@cache
def _get_compiled(kernel: str, constants: Sequence[int], _device: int) -> Any:
    """Return the kernel, compiled once in this process for each GPU: it is loaded there."""
    named = dict(zip(CONSTANTS, constants, strict=True))
    return compile_kernel(kernel, Dims(**{name: named.get(name, 0) for name in Dims._fields}))


def launch_kernel(kernel: str, state: State, dims: Dims) -> None:
    """Launch a kernel on a state of tensors on the current GPU.

    If Triton interprets (`TRITON_INTERPRET=1`), tensors may be on any device.
    """
    if import_module("triton").knobs.runtime.interpret:
        language: Any = import_module("triton.language")
        wrapped = zip(CONSTANTS, map(language.constexpr, get_constants(dims)), strict=True)
        function = getattr(import_module("blockstep.impl.device.step"), kernel)
        function[(1,)](state, dims._replace(**dict(wrapped)))
        return
    device = import_module("torch").cuda.current_device()
    _get_compiled(kernel, get_constants(dims), device)[1, 1, 1](state, dims)


def warm_up(
    dims: Dims, progress: Progress | None = None, kernels: Sequence[str] = GPU_KERNELS
) -> None:
    """Compile kernels for a GPU before the first step needs them; do nothing without a GPU.

    The first process compiles for some seconds per kernel; others read Triton's cache on disk.

    Args:
        dims: the dims of the scheduler that will run.
        progress: called before each kernel, and once when all are done.
        kernels: their names.
    """
    torch: Any = import_module("torch")
    if not torch.cuda.is_available() or import_module("triton").knobs.runtime.interpret:
        return
    for done, kernel in enumerate(kernels):
        if progress is not None:
            progress(kernel, done, len(kernels))
        _get_compiled(kernel, get_constants(dims), torch.cuda.current_device())
    if progress is not None:
        progress("", len(kernels), len(kernels))
