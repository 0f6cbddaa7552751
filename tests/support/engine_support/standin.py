"""A stand-in for a GPU: the memory of the CPU, used by the rules of a CUDA device.

Code for `device="cuda"` runs on it, with interpreted kernels. It shows four things that otherwise
only a GPU shows:

- each wait of the host: it reads a number, asks for a size that depends on numbers, copies from or
  to memory that is not pinned, or waits for an event. During a capture a wait raises, as in CUDA;
- copies into pinned memory: the memory holds garbage until the host has waited for an event that
  was recorded after the copy;
- operations on tensors of host and device together;
- graphs: a capture records launches and leaves garbage in the tensors that it made; a replay runs
  the recorded launches on the same memory. In the mode "global" a call of another thread to the
  device invalidates the capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor

READS = {
    "item", "tolist", "nonzero", "argwhere", "masked_select", "unique", "equal",
    "allclose", "bincount", "__bool__", "__int__", "__float__", "__index__",
}  # fmt: skip
"""Functions whose result the host has to wait for."""
GARBAGE = -77
SHARED_BYTES = 227 * 1024
"""Shared memory of a program, as on an H100."""
PROCESSORS = 3
"""Multiprocessors of the device: few, since attention launches that many programs in a loop."""


class GpuTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor that claims to be on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note calls of other threads: the mode `GPU` sees those of its own thread only."""
        GPU.now.note_call_of_another_thread()
        return super().__torch_function__(func, types, args, kwargs or {})


class PinnedTensor(torch.Tensor):  # type: ignore[misc]
    """Pinned memory of the host, which the device copies from and to asynchronously."""


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self) -> None:
        self._copies: list[Callable[[], object]] = []

    def record(self) -> None:
        """Record the event after all copies to the host so far."""
        self._copies = list(GPU.now.copies)

    def synchronize(self) -> None:
        """Wait, and carry out the copies."""
        GPU.now.wait("synchronize")
        GPU.now.events.append("wait")
        with torch._C.DisableTorchFunction():
            for copy in self._copies:
                copy()
        GPU.now.copies = [copy for copy in GPU.now.copies if copy not in self._copies]


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    num_pools: ClassVar[int] = 0

    def __init__(self) -> None:
        self.tape: list[Callable[[], object]] = []
        self.made: list[Any] = []
        self._pool: object = None

    def pool(self) -> object:
        """The handle of its memory."""
        return self._pool

    def start(self, pool: object) -> None:
        """Take a pool, or a new one."""
        if pool is None:
            Graph.num_pools += 1
            pool = ("pool", Graph.num_pools)
        self._pool = pool

    def replay(self) -> None:
        """Run what was recorded."""
        GPU.now.events.append("replay")
        with torch._C.DisableTorchFunction():
            for run in self.tape:
                run()


class Stream:
    """Stands in for `torch.cuda.Stream`: all streams run in the order of launches."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    def wait_stream(self, _other: Stream) -> None:
        """Order this stream behind another one."""
        GPU.now.events.append("wait for a stream")


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Stands in for `torch.cuda.stream`."""
    gpu = GPU.now
    before, gpu.stream = gpu.stream, stream
    try:
        yield
    finally:
        gpu.stream = before


@dataclass
class GPU(TorchFunctionMode):  # type: ignore[misc]
    """The device, as long as the mode is on."""

    events: list[str] = field(default_factory=list)
    """Launches, captures, replays and waits for events, in order."""
    waits: list[str] = field(default_factory=list)
    """Functions that made the host wait, in order."""
    copies: list[Callable[[], object]] = field(default_factory=list)
    """Copies to the host that no event has been waited for."""
    capturing: Graph | None = None
    stream: Stream = field(default_factory=Stream)
    """The current one."""
    capture_error_mode: str = "global"
    """Mode of the capture in progress."""
    is_invalidated: bool = False
    """Whether another thread has spoilt the capture under way."""
    thread: int = field(default_factory=threading.get_ident)
    now: ClassVar[Any] = None

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        home = name == "cpu" or (name == "to" and takes_home(args, kwargs))
        home = home and isinstance(args[0], GpuTensor)
        if name == "pin_memory":
            return func.__objclass__.clone(args[0]).as_subclass(PinnedTensor)
        if kwargs.pop("pin_memory", False):
            return func(*args, **kwargs).as_subclass(PinnedTensor)
        if name == "copy_" and isinstance(args[0], PinnedTensor) and isinstance(args[1], GpuTensor):
            return self.copy_home(*args, **kwargs)
        to_gpu, args, kwargs = take_device(name, args, kwargs)
        self.check(name, args, to_gpu=to_gpu, waits=not kwargs.get("non_blocking"))
        if self.capturing is not None and is_in_place(name) and isinstance(args[0], GpuTensor):
            self.capturing.tape.append(lambda: func(*args, **kwargs))  # nothing runs meanwhile
            return args[0]
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
        if home:
            self.wait(name)
            return out.clone().as_subclass(torch.Tensor)
        if to_gpu or any(isinstance(x, GpuTensor) for x in flatten((args, kwargs))):
            out = as_gpu(out)
            if self.capturing is not None:
                self.record(self.capturing, name, func, args, kwargs, out)
        return out

    def copy_home(self, to: Any, given: Any, non_blocking: bool = False) -> Any:
        """A copy into pinned memory, which comes when an event behind it was waited for."""
        with torch._C.DisableTorchFunction():
            kept, to_now = given.clone(), to.as_subclass(torch.Tensor)
            to_now.fill_(GARBAGE)
        self.copies.append(lambda: to_now.copy_(kept))
        if not non_blocking:
            event = Event()
            event.record()
            event.synchronize()
        return to

    def note_call_of_another_thread(self) -> None:
        """Another thread uses the device: during a capture in the mode "global" both fail."""
        is_another = threading.get_ident() != self.thread
        if is_another and self.capturing is not None and self.capture_error_mode == "global":
            self.is_invalidated = True
            raise RuntimeError("cudaErrorStreamCaptureUnsupported: another thread is capturing")

    def check(self, name: str, args: Any, *, to_gpu: bool, waits: bool) -> None:
        """Notice a wait, and tensors of host and device in one operation."""
        tensors = [x for x in flatten(args) if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, GpuTensor)]
        theirs = [x for x in tensors if not isinstance(x, GpuTensor)]
        if to_gpu and (theirs or name in ("tensor", "as_tensor")):
            if waits or not isinstance(theirs[0], PinnedTensor):
                self.wait(f"{name} from pageable memory")
        elif name == "copy_" and isinstance(args[0], PinnedTensor) and not waits:
            pass  # home, by itself: an event tells when it is there
        elif ours and any(x.dim() > 0 for x in theirs):
            if name not in ("__getitem__", "__setitem__", "copy_"):
                raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
            is_async = name == "copy_" and isinstance(theirs[0], PinnedTensor) and not waits
            if not is_async:
                self.wait(f"{name} of host and device")
        boolean = name in ("__getitem__", "__setitem__") and any(
            x.dtype == torch.bool for x in flatten(args[1]) if isinstance(x, torch.Tensor)
        )
        by_counts = name == "repeat_interleave" and len(ours) > 1
        if ours and name in ("numpy", "__array__"):
            raise TypeError("can't convert a tensor on a GPU to numpy; copy it to the host first")
        if ours and (name in READS or boolean or by_counts):
            self.wait(name)

    def wait(self, name: str) -> None:
        """The host waits for the device here; recording, it must not."""
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        self.waits.append(name)

    def record(
        self, graph: Graph, name: str, func: Any, args: Any, kwargs: Any, out: object
    ) -> None:
        """Onto the tape, unless nothing runs: a view, or memory that was asked for."""
        if name in ("empty", "empty_like", "__get__", "size", "stride", "dim", "numel"):
            return
        made = [x for x in flatten(out) if isinstance(x, torch.Tensor)]
        given = {storage(x) for x in flatten((args, kwargs)) if isinstance(x, torch.Tensor)}
        if made and not given.intersection(map(storage, made)):
            graph.made += made
            graph.tape.append(
                lambda: [
                    old.copy_(new)
                    for old, new in zip(made, flatten(func(*args, **kwargs)), strict=True)
                ]
            )


def take_device(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any, dict[str, Any]]:
    """Whether something is asked for on the GPU; the arguments, with the CPU in its place."""

    def is_gpu(value: object) -> bool:
        return isinstance(value, str | torch.device) and str(value).startswith("cuda")

    asked = is_gpu(kwargs.get("device")) or any(map(is_gpu, args))
    if not asked:
        return False, args, kwargs
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    # A copy even so: memory of the device is not that of the host.
    if name == "to" and not isinstance(args[0], GpuTensor):
        kwargs = {**kwargs, "copy": True}
    return True, tuple("cpu" if is_gpu(value) else value for value in args), kwargs


def takes_home(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor is sent to the host."""
    return any(str(value) == "cpu" for value in (*args[1:], kwargs.get("device")))


def flatten(value: object) -> Iterator[Any]:
    """Yield the values in nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from flatten(one)
    elif isinstance(value, dict):
        yield from flatten(list(value.values()))
    else:
        yield value


def as_gpu(value: Any) -> Any:
    """The same with its tensors on the GPU."""
    if isinstance(value, torch.Tensor) and not isinstance(value, GpuTensor):
        with torch._C.DisableTorchFunction():
            return value.as_subclass(GpuTensor)
    if isinstance(value, tuple | list):
        return type(value)([as_gpu(one) for one in value])
    return value


def is_in_place(name: str) -> bool:
    """Whether a function changes its first argument."""
    ends = name.endswith("_") and not name.startswith("__")
    return ends or name in ("__setitem__", "__iadd__")


def as_plain(value: Any) -> Any:
    """The same with its tensors on the CPU; the types of named tuples are kept."""
    if isinstance(value, GpuTensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(as_plain, value))
    return value


def storage(tensor: Any) -> int:
    """Return the address at which the memory of a tensor begins."""
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage().data_ptr())


@contextmanager
def capture(
    graph: Graph, pool: object = None, *, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Stands in for `torch.cuda.graph`."""
    gpu = GPU.now
    gpu.events.append("capture")
    graph.start(pool)
    gpu.capturing, gpu.capture_error_mode, gpu.is_invalidated = graph, capture_error_mode, False
    try:
        yield
    finally:
        gpu.capturing = None
    if gpu.is_invalidated:
        raise RuntimeError("cudaErrorStreamCaptureInvalidated")
    with torch._C.DisableTorchFunction():
        for tensor in graph.made:
            tensor.fill_(GARBAGE)


def launch(call: Callable[..., None], executor: Any, *args: Any, **named: Any) -> None:
    """A launch of an interpreted kernel: recorded while capturing, and run otherwise."""

    def run() -> None:
        with torch._C.DisableTorchFunction():
            call(executor, *map(as_plain, args), **named)

    gpu = GPU.now
    tensors = [x for x in flatten(args) if isinstance(x, torch.Tensor)]
    if not all(isinstance(x, GpuTensor) for x in tensors):
        raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    if gpu.capturing is not None:
        gpu.capturing.tape.append(run)
        return
    gpu.events.append("launch")
    run()


@contextmanager
def standin() -> Iterator[GPU]:
    """Inside the `with`, there is a GPU."""
    gpu = GPU.now = GPU()
    call = GridExecutor.__call__
    with (
        patch.multiple(
            torch.cuda, is_available=lambda: True, CUDAGraph=Graph, graph=capture,
            Stream=Stream, Event=Event, stream=use_stream, current_stream=lambda: gpu.stream,
            mem_get_info=lambda device: (1 << 24, 1 << 24),
            get_device_capability=lambda device: (8, 0),  # kernels that wait are not interpreted
            get_device_properties=lambda device: SimpleNamespace(
                multi_processor_count=PROCESSORS, shared_memory_per_block_optin=SHARED_BYTES
            ),
        ),
        patch.object(GridExecutor, "__call__", lambda *args, **named: launch(call, *args, **named)),
        gpu,
    ):  # fmt: skip
        yield gpu
