"""Connector: what an engine tells its scheduler about a store, and the KV that it moves for it.

    submit ----> block keys --count--> KVOffer --> plan.kv_loads --load--> blocks
    finished_req_ids --> keys of computed blocks --save--> store --> finished_sending
    plan.kv_saves -----> keys of computed blocks --save--> store --> KVOffer

It has two sides. For the scheduler it makes offers and passes reports on. For the worker it loads
and saves, within a plan or in background jobs. Blocks that the store no longer has are reported as
invalid, and the scheduler decides what to do. An offer holds for the life of the request, or until
a load fails: then less is offered, so that the request does not retry a failing load for ever
(P10). A preempted request gets the same offer again, or a new one. After a swap-out the store has
no answer for the victim (`num_tokens` None) until it has saved the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from blockstep.impl.digests import name_blocks
from blockstep.impl.engine.block_transfers import Jobs, Mover
from blockstep.impl.engine.input_batch import Batch
from blockstep.impl.engine.store import BlockKV, BlockName, KVStore, StoreError
from blockstep.spec.vocabulary import (
    NO_TRANSFERS,
    BlockId,
    Event,
    FrameId,
    KVLoad,
    KVOffer,
    KVTransfers,
    Plan,
    Request,
    RequestId,
    TokenIds,
    TransfersReported,
)

ASK_AGAIN_S = 0.002
"""Seconds between two questions to a store without an answer, while nothing else is to be done."""


class KVRole(StrEnum):
    """Role of an engine with respect to its store; the names are vLLM's."""

    PRODUCER = "kv_producer"
    """It announces to the store what it will compute, and saves it."""
    CONSUMER = "kv_consumer"
    """It loads stored blocks, and waits for announced ones."""
    BOTH = "kv_both"
    """It loads and saves."""


@dataclass(slots=True)
class _Life:
    """A request that was submitted and that no plan has listed as finished."""

    request: Request
    names: list[BlockName]
    """Store keys of the prompt's full blocks; of more blocks if more were saved by a swap-out."""
    most: int | None = None
    """Upper bound of the blocks that are offered, after a load of later ones failed."""


class Connector:
    """One engine's side of a store.

    Args:
        store: keeps the KV.
        mover: moves blocks of the engine's caches.
        jobs: runs loads and saves in the background of the steps.
        block_size: tokens in a block.
        identity: hash of everything but the request that determines KV: model, dtype, block size.
            Engines with different identities never share KV.
        adapters: the identity of each LoRA adapter, by name.
        role: whether it loads, saves, or both.
        is_async: whether a request waits for its load while steps continue; otherwise the step
            waits.
    """

    def __init__(
        self,
        store: KVStore,
        mover: Mover,
        jobs: Jobs,
        block_size: int,
        identity: bytes,
        adapters: Mapping[str, str],
        role: KVRole = KVRole.BOTH,
        is_async: bool = False,
    ) -> None:
        self._store, self._mover, self._jobs = store, mover, jobs
        self._block_size = block_size
        self._identity = identity
        self._adapters = adapters
        self._role = role
        self._is_async = is_async
        self._forget_all()

    def _forget_all(self) -> None:
        self._lives: dict[RequestId, _Life] = {}
        self._unknown: set[RequestId] = set()
        """Requests about which the store is to be asked again."""
        self._saving: set[RequestId] = set()
        self._swapping: set[RequestId] = set()
        """Victims whose KV was read, and which the store has not saved yet."""
        self._received: list[RequestId] = []
        self._sent: list[RequestId] = []
        self._invalid: list[BlockId] = []
        self._invalid_of_frame: dict[FrameId, tuple[BlockId, ...]] = {}

    def start_anew(self) -> None:
        """Forget all requests; returns after the last job has stopped using the caches."""
        self._jobs.stop()
        for life in self._lives.values():
            self._announce(life, is_coming=False)
        self._forget_all()

    # For the scheduler.

    def begin(self, request: Request) -> KVOffer:
        """Register a request that was just submitted; return the store's offer for it."""
        life = _Life(request, self._name(request, request.prompt_token_ids))
        self._lives[request.request_id] = life
        self._announce(life, is_coming=True)
        return self._ask(life)

    def list_events(self) -> list[Event]:
        """Return the events for the scheduler: offers and the report of transfers outside plans.

        Offers are for requests about which the store had no answer before.
        """
        self._jobs.poll()
        events: list[Event] = [self._ask(self._lives[name]) for name in sorted(self._unknown)]
        if self._received or self._sent or self._invalid:
            reports = tuple(self._received), tuple(self._sent), tuple(self._invalid)
            events.append(TransfersReported(KVTransfers(*reports)))
            self._saving.difference_update(self._sent)
            self._received, self._sent, self._invalid = [], [], []
        return events

    def take_answer(self, frame_id: FrameId) -> KVTransfers:
        """Return the blocks of a plan that could not be loaded, to be reported with its model
        output."""
        invalid = self._invalid_of_frame.pop(frame_id, ())
        return KVTransfers(invalid_block_ids=invalid) if invalid else NO_TRANSFERS

    def is_saving(self, *names: RequestId) -> bool:
        """Whether the KV of any of these requests is being saved, or will be when it finishes."""
        if self._role is KVRole.CONSUMER:
            return False
        return any(name in self._saving or name in self._lives for name in names)

    def wait(self) -> bool:
        """Wait a moment for running jobs or the store; return whether there is anything to wait
        for."""
        if not (len(self._jobs) or self._unknown or self._received or self._sent):
            return False
        if len(self._jobs):
            self._jobs.poll(ASK_AGAIN_S if self._unknown else 10 * ASK_AGAIN_S)
        elif self._unknown:
            time.sleep(ASK_AGAIN_S)
        return True

    def _ask(self, life: _Life) -> KVOffer:
        request_id, num_blocks = life.request.request_id, self._count(life)
        if num_blocks is None:
            self._unknown.add(request_id)
        else:
            self._unknown.discard(request_id)
        num_tokens = None if num_blocks is None else num_blocks * self._block_size
        is_sent = self._role is not KVRole.CONSUMER
        return KVOffer(request_id, num_tokens, self._is_async, is_sent)

    def _count(self, life: _Life) -> int | None:
        if self._role is KVRole.PRODUCER:
            return 0
        if life.request.request_id in self._swapping:
            return None
        try:
            num_blocks = self._store.count(life.names)
        except StoreError:
            return 0
        if num_blocks is None or life.most is None:
            return num_blocks
        return min(num_blocks, life.most)

    def _announce(self, life: _Life, is_coming: bool) -> None:
        if self._role is KVRole.PRODUCER and life.names:
            with suppress(StoreError):  # then no other engine waits for these
                self._store.expect(life.names, is_coming)

    def _name(self, request: Request, tokens: TokenIds) -> list[BlockName]:
        """Return store keys of the full blocks of `tokens`, hashed with the request's salt and
        adapter."""
        adapter = request.adapter
        if adapter is not None:
            adapter = f"{adapter} {self._adapters[adapter]}"
        like = replace(request, prompt_token_ids=tokens, adapter=adapter)
        digests = name_blocks(like, self._block_size)
        return [self._identity + digest for digest in digests]

    # For the worker.

    def save(self, plan: Plan, batch: Batch) -> None:
        """Save the computed blocks of finished requests; `batch` must still have their rows."""
        for request_id in plan.finished_req_ids:
            life = self._lives.pop(request_id, None)
            self._unknown.discard(request_id)
            self._swapping.discard(request_id)
            if life is None or self._role is KVRole.CONSUMER:
                continue
            tokens, block_ids = batch.get_computed(request_id)
            names = self._name(life.request, tokens)
            self._saving.add(request_id)
            work = partial(self._keep, life, names, block_ids)
            self._jobs.add(work, partial(self._end_saving, request_id))

    def swap(self, plan: Plan, batch: Batch) -> None:
        """Save the computed blocks of victims before anything is written to them.

        The blocks are read at once; the store saves them in a background job.
        """
        for victim in plan.kv_saves:
            request_id = victim.request_id
            life = self._lives[request_id]
            tokens = batch.get_computed(request_id)[0][: victim.num_tokens]
            names = self._name(life.request, tokens)
            if len(names) > len(life.names):
                life.names = names
            life.most = None
            try:
                first = self._store.count(names) or 0
            except StoreError:
                continue  # not saved: the victim is computed again
            blocks = self._mover.read(victim.block_ids[0][first : len(names)])
            self._swapping.add(request_id)
            self._unknown.add(request_id)
            work = partial(self._keep_blocks, names, first, blocks)
            self._jobs.add(work, partial(self._end_swap, request_id))

    def _keep_blocks(self, names: list[BlockName], first: int, blocks: list[BlockKV]) -> None:
        with suppress(StoreError):  # the store stays without these blocks
            self._store.save(names, first, blocks)

    def _end_swap(self, request_id: RequestId, _: None) -> None:
        self._swapping.discard(request_id)

    def load(self, plan: Plan) -> dict[RequestId, int]:
        """Load what the plan says; return the number of valid tokens of each request whose load
        failed."""
        failed: dict[RequestId, int] = {}
        for load in plan.kv_loads:
            first = load.num_computed_tokens // self._block_size
            work, block_ids = self._get_work(load, first)
            if load.is_async:
                self._jobs.add(work, self._get_end(load.request_id, first, block_ids))
                continue
            num_loaded = work()
            if num_loaded < len(block_ids):
                invalid = (*self._invalid_of_frame.get(plan.frame_id, ()), *block_ids[num_loaded:])
                self._invalid_of_frame[plan.frame_id] = invalid
                failed[load.request_id] = (first + num_loaded) * self._block_size
                self._offer_less(load.request_id, first + num_loaded)
        return failed

    def _get_work(self, load: KVLoad, first: int) -> tuple[Callable[[], int], tuple[BlockId, ...]]:
        """Return a function that loads these blocks and returns how many it loaded, and their
        ids."""
        block_ids = load.block_ids[0][first:]
        names = self._lives[load.request_id].names[: first + len(block_ids)]
        return partial(self._fill, names, first, block_ids), block_ids

    def _end_saving(self, request_id: RequestId, _: None) -> None:
        self._sent.append(request_id)

    def _get_end(
        self, request_id: RequestId, first: int, block_ids: tuple[BlockId, ...]
    ) -> Callable[[int], None]:
        def end(num_loaded: int) -> None:
            self._invalid += block_ids[num_loaded:]
            self._received.append(request_id)
            if num_loaded < len(block_ids):
                self._offer_less(request_id, first + num_loaded)

        return end

    def _offer_less(self, request_id: RequestId, num_blocks: int) -> None:
        life = self._lives.get(request_id)
        if life is not None:  # None: it has finished meanwhile
            life.most = num_blocks
            self._unknown.add(request_id)

    def _fill(self, names: list[BlockName], first: int, block_ids: tuple[BlockId, ...]) -> int:
        try:
            blocks = self._store.load(names[first:])
        except StoreError:
            return 0
        self._mover.write(block_ids[: len(blocks)], blocks)
        return len(blocks)

    def _keep(self, life: _Life, names: list[BlockName], block_ids: tuple[BlockId, ...]) -> None:
        with suppress(StoreError):  # the store stays without these blocks
            first = self._store.count(names) or 0
            self._store.save(names, first, self._mover.read(block_ids[first:]))
        self._announce(life, is_coming=False)
