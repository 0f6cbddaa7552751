"""mini-sglang on a CPU: its scheduler unchanged, with replacements for everything around it.

Scheduler, managers, radix cache and both loops are imported from the checkout and run unchanged.
Replaced are: packages whose `__init__` would import a model or a server, by empty ones (`_load`);
the engine, by one without a model (`Runner`); comparison of token sequences, by Python; and pinned
memory, by ordinary memory (`OnCpu`).
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from blockstep.conformance.engine import EngineFault
from blockstep.spec import vocabulary as v

EOS = 1  # the tokenizer's, and so one for the whole engine: a request can only ignore it

# Stand-ins.


class OnCpu(TorchFunctionMode):  # type: ignore[misc]
    """Torch without pinned memory."""

    def __torch_function__(self, function: Any, _types: Any, args: Any, kwargs: Any = None) -> Any:
        """Call a function of torch; pinning does nothing."""
        if function is torch.Tensor.pin_memory:
            return args[0]
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*args, **kwargs)


def count_common(left: Any, right: Any) -> int:
    """Return the length of the common prefix; the original is a C++ kernel."""
    size = min(len(left), len(right))
    differing = (left[:size] != right[:size]).nonzero()
    return int(differing[0]) if len(differing) else size


class Forward(NamedTuple):
    """The result of a forward pass: tokens on both sides, and the end of their copy."""

    next_tokens_gpu: Any
    next_tokens_cpu: Any
    copy_done: Any


class Runner:
    """mini-sglang's engine without a model: it records the rows of each launched batch."""

    def __init__(self, config: Any) -> None:
        num_slots = config.num_page_override * config.page_size
        self.device, self.num_pages = torch.device("cpu"), config.num_page_override
        self.max_seq_len, self.page_size = min(config.max_seq_len, num_slots), config.page_size
        width = -(-self.max_seq_len // 32) * 32
        self.page_table = torch.zeros((config.max_running_req, width), dtype=torch.int32)
        core.__dict__["_GLOBAL_CTX"] = core.Context(config.page_size)
        self.stream, self.tp_cpu_group = SimpleNamespace(wait_stream=lambda _other: None), None
        self.attn_backend = self.graph_runner = self.sampler = self
        self.rows: list[Row] = []
        self.writer: dict[int, tuple[Any, int]] = {}
        """The request and the position of each placeholder."""

    def pad_batch(self, batch: Any) -> None:
        """Pad nothing, since there are no CUDA graphs."""
        batch.padded_reqs = batch.reqs

    def prepare(self, _batch: Any) -> None:
        """Do nothing: the worker decides how to sample."""

    def prepare_metadata(self, batch: Any) -> None:
        """Record what attention will read: its backends copy the page table here, up to
        `device_len`.
        """
        self.rows = [
            Row(req, req.cached_len, req.extend_len, tuple(self._read_table(req, req.device_len)))
            for req in batch.reqs
        ]

    def forward_batch(self, batch: Any, _args: None) -> Forward:
        """Launch a batch, with placeholders for its tokens until they are known."""
        self._account_for(batch)
        first = -1 - len(self.writer)
        tokens = torch.arange(first, first - len(batch.reqs), -1, dtype=torch.int32)
        for token, req in zip(tokens.tolist(), batch.reqs, strict=True):
            self.writer[token] = req.uid, req.device_len
            req.complete_one()
        return Forward(tokens, tokens.clone(), SimpleNamespace(synchronize=lambda: None))

    def _read_table(self, req: Any, length: int) -> Iterator[v.BlockId]:
        """Yield the blocks of the first `length` slots of a request; ours are one higher than
        pages.
        """
        for position, slot in enumerate(self.page_table[req.table_idx, :length].tolist()):
            page, offset = divmod(slot, self.page_size)
            if offset != position % self.page_size:
                what = f"position {position} of request {req.uid} is slot {offset} of page {page}"
                raise EngineFault(what)
            if offset == 0:
                yield page + 1

    def read_table(self, req: Any) -> tuple[v.BlockId, ...]:
        """Return the blocks of the computed tokens of a request."""
        return tuple(self._read_table(req, req.cached_len))

    def _account_for(self, batch: Any) -> None:
        """Check that positions, tokens and slots of a batch are those of its rows."""
        given = zip(
            *(part.tolist() for part in (batch.positions, batch.input_ids, batch.out_loc)),
            strict=True,
        )
        for row in self.rows:
            text, size = row.req.input_ids.tolist(), self.page_size
            for position in range(row.first, row.first + row.length):
                block, slot = row.blocks[position // size], position % size
                place, token, written = next(given)
                known = text[position] if position < len(text) else None
                if token < 0:
                    known, token = (row.req.uid, position), self.writer[token]
                if (place, token, written) != (position, known, (block - 1) * size + slot):
                    raise EngineFault(
                        f"request {row.req.uid} runs position {position} with token {known} in "
                        f"block {block}; its batch has position {place}, {token}, slot {written}"
                    )
        if list(given):
            raise EngineFault("the batch has tokens of no request")


class Row(NamedTuple):
    """One request of a launched batch."""

    req: Any
    first: int
    length: int
    blocks: tuple[v.BlockId, ...]


def _find() -> None:
    """Put `python/` of a checkout on the path, if its root is there."""
    for entry in map(Path, sys.path):
        if (entry / "minisgl").is_dir():
            return
        if (entry / "python" / "minisgl").is_dir():
            sys.path.insert(0, str(entry / "python"))
            return


def _load(name: str, **names: Any) -> Any:
    """Return an empty package in place of one of theirs, with some names in it.

    The `__init__` of the real package is not run.
    """
    package, found = ModuleType(name), find_spec("minisgl")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("no minisgl: --path names a checkout of mini-sglang")
    package.__path__ = [str(Path(next(iter(found.submodule_search_locations))) / name[8:])]
    package.__dict__.update(names)
    sys.modules[name] = package
    return package


if "minisgl.utils" not in sys.modules:
    _find()
    tokenizer = SimpleNamespace(eos_token_id=EOS)
    queues = dict.fromkeys(f"Zmq{kind}Queue" for kind in ("Pub", "Pull", "Push", "Sub"))
    utils = _load("minisgl.utils", load_tokenizer=lambda _path: tokenizer, **queues)
    utils.cached_load_hf_config = None
    import_module("minisgl.utils.logger").__dict__["_LOG_LEVEL"] = logging.ERROR
    for part in ("arch", "logger", "misc", "registry", "torch_utils"):
        utils.__dict__.update(import_module(f"minisgl.utils.{part}").__dict__)
    _load("minisgl.kernel", fast_compare_key=count_common)
    _load("minisgl.engine", Engine=Runner)
    sys.modules["minisgl.engine"].__dict__.update(import_module("minisgl.engine.config").__dict__)

core: Any = import_module("minisgl.core")
distributed: Any = import_module("minisgl.distributed.info")
messages: Any = import_module("minisgl.message")
scheduling: Any = import_module("minisgl.scheduler.scheduler")
SchedulerConfig: Any = import_module("minisgl.scheduler.config").SchedulerConfig
ChunkedReq: Any = import_module("minisgl.scheduler.prefill").ChunkedReq
if distributed.try_get_tp_info() is None:
    distributed.set_tp_info(0, 1)
cuda = SimpleNamespace(
    Stream=lambda **_: None, stream=lambda _: nullcontext(), set_stream=lambda _: None
)
scheduling.torch = ModuleType("torch")
scheduling.torch.__dict__.update(torch.__dict__, cuda=cuda)
# Batches are lists made from sets, so their order must be reproducible; the cache's clock, too.
core.Req.__hash__ = lambda req: req.uid
_radix = (
    f"minisgl.kvcache.radix_{'cache' if find_spec('minisgl.kvcache.radix_cache') else 'manager'}"
)
import_module(_radix).__dict__["time"] = SimpleNamespace(monotonic_ns=itertools.count(1).__next__)


class Loop(scheduling.Scheduler):  # type: ignore[misc]
    """mini-sglang's scheduler offline: messages come from and go to this object, and a turn stops
    halfway."""

    def __init__(self, config: Any) -> None:
        self.inbox: list[Any] = []
        self.replies: list[Any] = []
        self.due: Any = None
        """The batch that the second half of the turn will process."""
        self.freed: set[int] = set()
        """Uids of requests that freed what they held."""
        super().__init__(config)

    def offline_receive_msg(self, blocking: bool = False) -> list[Any]:
        """Return all messages. Before it would block, it checks its own consistency."""
        if blocking:
            self.run_when_idle()
        received, self.inbox = self.inbox, []
        return received

    def offline_send_result(self, reply: list[Any]) -> None:
        """Record the replies to clients."""
        self.replies += reply

    @property
    def tree(self) -> Any:
        """Return its cache; before February 2026 this field had another name, like the next
        one."""
        manager = vars(self.cache_manager)
        return manager["prefix_cache"] if "prefix_cache" in manager else manager["manager"]

    @property
    def free_slots(self) -> list[int]:
        """Return the first slot of every free page, in the order of its list."""
        manager = vars(self.cache_manager)
        slots = manager["free_slots"] if "free_slots" in manager else manager["_free_slots"]
        return list(slots.tolist())

    def _free_req_resources(self, req: Any) -> None:
        self.freed.add(req.uid)
        super()._free_req_resources(req)

    def _process_last_data(self, last_data: Any) -> None:
        self.due = last_data

    def answer(self) -> list[Any]:
        """Run the second half of the turn, and return the replies."""
        due, self.due, self.replies = self.due, None, []
        super()._process_last_data(due)
        return self.replies
