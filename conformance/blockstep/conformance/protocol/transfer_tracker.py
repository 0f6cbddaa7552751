"""Transfers in flight between a pool and a store, derived from events and observations alone.

    plan names a load --> loading --its end is reported--> received --it gets a row--> over
    request ends whose blocks the store reads --> sending --it has read them--> over

The engine's state is not read, so the next reports of a store depend on its observations only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from blockstep.conformance.protocol.program import Report
from blockstep.spec import vocabulary as v

OVER_MAX = 4


@dataclass(slots=True)
class Transfers:
    """The transfers that a store was asked for and has not reported yet."""

    offers: dict[v.RequestId, v.KVOffer] = field(default_factory=dict)
    """The latest offer for each unfinished request."""
    loading: dict[v.RequestId, v.KVLoad] = field(default_factory=dict)
    """Asynchronous loads whose end was not reported; their request may have finished."""
    received: dict[v.RequestId, v.KVLoad] = field(default_factory=dict)
    """Loads whose end was reported, until their request has a row or finishes."""
    at_once: dict[v.FrameId, tuple[v.KVLoad, ...]] = field(default_factory=dict)
    """Loads that are part of a frame in flight."""
    sending: dict[v.RequestId, None] = field(default_factory=dict)
    """Finished requests whose blocks the store reads, if they held any."""
    saved: dict[v.RequestId, int] = field(default_factory=dict)
    """Leading tokens that were swapped out, for each unfinished victim."""
    over: list[v.RequestId] = field(default_factory=list)
    """Requests whose transfers ended lately, for a repeated report."""

    def offer(self, offer: v.KVOffer) -> None:
        """Record the store's new offer for an unfinished request."""
        self.offers[offer.request_id] = offer

    def get_offer(self, name: v.RequestId) -> v.KVOffer:
        """Return the store's offer for a request."""
        return self.offers.get(name) or v.KVOffer(name)

    def plan(self, plan: v.Plan) -> None:
        """Record the loads and swap-outs of a plan; a request with a row no longer waits for a
        load.
        """
        if not (self.received or plan.kv_loads or plan.kv_saves):
            return
        for row in plan.rows if self.received else ():
            self.received.pop(row.request_id, None)
        for load in plan.kv_loads:
            if load.is_async:
                self.received.pop(load.request_id, None)
                self.loading[load.request_id] = load
        for save in plan.kv_saves:
            self.saved[save.request_id] = save.num_tokens
        now = tuple(load for load in plan.kv_loads if not load.is_async)
        if now:
            self.at_once[plan.frame_id] = now

    def end(self, name: v.RequestId) -> None:
        """Record that a request has finished."""
        offer = self.offers.pop(name, None)
        self.received.pop(name, None)
        self.saved.pop(name, None)
        if offer is not None and offer.delays_free:
            self.sending[name] = None

    def take(self, report: v.KVTransfers, live: Iterable[v.RequestId]) -> None:
        """Record a worker's report, after the requests that it finishes were recorded."""
        for name in report.finished_recving:
            load = self.loading.pop(name, None)
            if load is not None:
                self._note_end(name)
                if name in live:
                    self.received[name] = load
        for name in report.finished_sending:
            if name in self.sending:
                del self.sending[name]
                self._note_end(name)

    def list_answers(self) -> list[v.KVOffer]:
        """Return the answers of a store after faults stop: it has nothing where it did not know
        yet.
        """
        unknown = [offer for offer in self.offers.values() if offer.num_tokens is None]
        return [replace(offer, num_tokens=0) for offer in unknown]

    def forget_offers(self) -> None:
        """Forget the offers after a reset that includes the store."""
        self.offers.clear()
        self.saved.clear()

    def _note_end(self, name: v.RequestId) -> None:
        self.over = [*self.over, name][-OVER_MAX:]

    def resolve(
        self, report: Report, block_sizes: Sequence[int], frame_id: v.FrameId | None = None
    ) -> v.KVTransfers:
        """Return the report with today's block ids; `frame_id` is the plan that is committed with
        it.
        """
        now = () if frame_id is None else self.at_once.get(frame_id, ())
        loads = self.received | {load.request_id: load for load in now} | self.loading
        invalid: dict[v.BlockId, None] = {}
        for name, place in report.invalid:
            blocks = [] if name not in loads else list_loaded(loads[name], block_sizes)
            if blocks:
                invalid[blocks[place % len(blocks)][1]] = None
        return v.KVTransfers(report.recving, report.sending, tuple(invalid))


def list_loaded(load: v.KVLoad, block_sizes: Sequence[int]) -> list[tuple[int, v.BlockId]]:
    """Return the blocks that a load writes: the position of the first slot of each, and its id.

    They are sorted by position, then by KV group.
    """
    found = [
        (index * size, group, block)
        for group, (table, size) in enumerate(zip(load.block_ids, block_sizes, strict=False))
        for index, block in enumerate(table)
        if index >= load.num_computed_tokens // size and block != v.NULL_BLOCK
    ]
    return [(position, block) for position, _, block in sorted(found)]


def count_valid(load: v.KVLoad, config: v.Config, invalid: Iterable[v.BlockId]) -> int | None:
    """Return the number of valid leading tokens if `invalid` blocks failed; None if all are
    valid.
    """
    wrong = set(invalid)
    loaded = list_loaded(load, config.block_sizes) if wrong else []
    num_valid = next((position for position, block in loaded if block in wrong), None)
    return 0 if num_valid is not None and loses_all(config) else num_valid


def loses_all(config: v.Config) -> bool:
    """Whether a failed load leaves no valid token, since a row at an earlier position would attend
    to blocks that a window or a recurrent group no longer holds.
    """
    return any(group.kind is not v.GroupKind.FULL for group in config.groups)


def list_failed(
    loads: Iterable[v.KVLoad], block_sizes: Sequence[int], report: v.KVTransfers
) -> Iterator[v.RequestId]:
    """Yield the ids of requests whose loads contain a block that a report says is invalid."""
    for load in loads if report.invalid_block_ids else ():
        wrong = {*report.invalid_block_ids}
        if any(block in wrong for _, block in list_loaded(load, block_sizes)):
            yield load.request_id
