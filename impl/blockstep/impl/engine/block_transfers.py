"""Moves: copies of blocks between an engine's caches and host memory, and jobs that do them.

    cache [.. 7 .. 3 .. 9 ..]  --gather-->  staging [7 3 9]  -->  blocks of their own
    cache [.. 7 .. 3 .. 9 ..]  <-scatter--  staging [7 3 9]  <--  blocks of their own

All caches of an engine share block ids: a block is moved in each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch

from blockstep.impl.engine.cache import PagedCache
from blockstep.impl.engine.store import BlockKV
from blockstep.kernels import gather_blocks, scatter_blocks
from blockstep.spec.vocabulary import BlockId


class Mover:
    """Moves blocks of `caches`, which share block ids."""

    def __init__(self, caches: Sequence[PagedCache]) -> None:
        self._views = [cache.kv.flatten(0, 1) for cache in caches]
        """Per cache, the keys and values of its layers [num_views, num_blocks, ...]."""

    def read(self, block_ids: Sequence[BlockId]) -> list[BlockKV]:
        """Return a copy of the contents of the blocks."""
        ids = torch.tensor(block_ids, dtype=torch.int64)
        staged = []
        for views in self._views:
            staging = _make_staging(views, len(block_ids))
            for view, part in zip(views, staging, strict=True):
                gather_blocks(view, ids, part)
            staged.append(staging)
        return [tuple(staging[:, at].clone() for staging in staged) for at in range(len(block_ids))]

    def write(self, block_ids: Sequence[BlockId], blocks: Sequence[BlockKV]) -> None:
        """Write the contents `blocks` to the blocks with these ids."""
        if not block_ids:
            return
        ids = torch.tensor(block_ids, dtype=torch.int64)
        for number, views in enumerate(self._views):
            staging = _make_staging(views, len(block_ids))
            for at, block in enumerate(blocks):
                staging[:, at] = block[number]
            for view, part in zip(views, staging, strict=True):
                scatter_blocks(part, ids, view)


def _make_staging(views: torch.Tensor, num_blocks: int) -> torch.Tensor:
    shape = (views.shape[0], num_blocks, *views.shape[2:])
    return torch.empty(shape, dtype=views.dtype)


class Jobs(Protocol):
    """Runs jobs in the background of an engine's steps."""

    def add(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `work` at some later time; a `poll` after that passes its result to `done`."""
        ...

    def poll(self, timeout_s: float = 0.0) -> None:
        """Call `done` for all finished jobs, in order; wait up to `timeout_s` for the first."""
        ...

    def stop(self) -> None:
        """Forget all jobs; returns when none is running."""
        ...

    def __len__(self) -> int:
        """Return the number of jobs whose `done` was not called."""
        ...


class ThreadJobs:
    """Jobs run in a thread of their own, one after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-store")
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def add(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """See `Jobs.add`."""
        self._waiting.append((self._executor.submit(work), done))

    def poll(self, timeout_s: float = 0.0) -> None:
        """See `Jobs.poll`."""
        if self._waiting and timeout_s:
            wait([self._waiting[0][0]], timeout_s)
        while self._waiting and self._waiting[0][0].done():
            future, done = self._waiting.popleft()
            done(future.result())

    def stop(self) -> None:
        """See `Jobs.stop`."""
        futures = [future for future, _ in self._waiting]
        self._waiting.clear()
        wait([future for future in futures if not future.cancel()])

    def __len__(self) -> int:
        return len(self._waiting)


class LateJobs:
    """Jobs run in the `num_polls`-th poll after they were added.

    Runs are reproducible, and each job is as late as a real one may be.
    """

    def __init__(self, num_polls: int = 1) -> None:
        self._num_polls = num_polls
        self._waiting: list[tuple[int, Callable[[], Any], Callable[[Any], None]]] = []
        self._num_polled = 0

    def add(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """See `Jobs.add`."""
        self._waiting.append((self._num_polled + self._num_polls, work, done))

    def poll(self, timeout_s: float = 0.0) -> None:  # noqa: ARG002
        """See `Jobs.poll`; it waits for nothing."""
        self._num_polled += 1
        due = [one for one in self._waiting if one[0] <= self._num_polled]
        self._waiting = [one for one in self._waiting if one[0] > self._num_polled]
        for _, work, done in due:
            done(work())

    def stop(self) -> None:
        """See `Jobs.stop`."""
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)
