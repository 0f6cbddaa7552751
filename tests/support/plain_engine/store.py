"""Store: its offers, finished loads, and blocks of finished requests that transfers hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from blockstep.spec.vocabulary import (
    BlockId,
    HeldBlocks,
    KVLoad,
    KVOffer,
    KVTransfers,
    RequestId,
    Status,
    TransfersSnapshot,
)
from plain_engine.pool import Pool
from plain_engine.text import Text


class Store:
    """The scheduler's side of a store; without one there are no offers."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.offers: dict[RequestId, KVOffer] = {}
        self.received: set[Text] = set()
        """Waiting requests whose asynchronous load has ended."""
        self.held: dict[RequestId, HeldBlocks] = {}

    def ask(self, text: Text, hit: int) -> tuple[int, bool] | None:
        """Return the tokens to load after a hit, and whether the load is asynchronous.

        None: the store has no answer yet. The last known token is never loaded: a token must be
        sampled.
        """
        offer = self.offers.get(text.name, KVOffer(text.name))
        if text.request.skip_reading_prefix_cache:
            return 0, False
        if offer.num_tokens is None:
            return None
        count = min(offer.num_tokens, text.known - 1) - hit
        return (count, offer.is_async) if count > 0 else (0, False)

    def is_loading(self, text: Text) -> bool:
        """Whether an asynchronous load writes its blocks."""
        return text.status is Status.WAITING_FOR_REMOTE_KVS and text not in self.received

    def forget(self, text: Text) -> None:
        """Forget a finished request."""
        self.offers.pop(text.name, None)
        self.received.discard(text)

    def hold(self, text: Text) -> None:
        """Hold the blocks of a finishing request if a load writes them or the store will read
        them."""
        offer = self.offers.get(text.name, KVOffer(text.name))
        is_recving = self.is_loading(text)
        if text.table and (is_recving or offer.delays_free):
            tables = (tuple(text.table),)
            self.held[text.name] = HeldBlocks(text.name, tables, is_recving, offer.delays_free)
            text.table = []

    def finish(self, report: KVTransfers, parked: Collection[Text]) -> None:
        """End the loads and saves of a report."""
        self.received |= {text for text in parked if text.name in report.finished_recving}
        for name in report.finished_recving:
            if name in self.held:
                self.keep_or_free(replace(self.held[name], is_recving=False))
        for name in report.finished_sending:
            if name in self.held:
                self.keep_or_free(replace(self.held[name], is_sending=False))

    def keep_or_free(self, held: HeldBlocks) -> None:
        """Keep a hold that a transfer still needs, else release its blocks."""
        if held.is_recving or held.is_sending:
            self.held[held.request_id] = held
        else:
            del self.held[held.request_id]
            self.pool.release(held.block_tables[0])

    def show(self, running: Collection[Text]) -> TransfersSnapshot:
        """Return the part of the snapshot about transfers."""
        offers = [offer for _, offer in sorted(self.offers.items())]
        return TransfersSnapshot(
            offers=tuple(offer for offer in offers if offer != KVOffer(offer.request_id)),
            received=tuple(sorted(text.name for text in self.received)),
            unsettled=tuple(sorted(text.name for text in running if text.load)),
            held=tuple(held for _, held in sorted(self.held.items())),
        )


def count_valid(load: KVLoad, invalid: Collection[BlockId], block_size: int) -> int | None:
    """Return the leading tokens before the first block that could not be loaded; None if all
    could."""
    for at in range(load.num_computed_tokens // block_size, len(load.block_ids[0])):
        if load.block_ids[0][at] in invalid:
            return at * block_size
    return None
