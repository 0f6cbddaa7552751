"""Seeded bugs in the KV event log: the scheduler is right, but its events are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page(takes="events")
SKIPPING = Page(takes_groups=True, takes_states=True, takes="events")
_UNSEEN = "books: the events are compared with the state, which is hidden"


@PAGE.exhibit(
    "no BlockRemoved is sent for an evicted block",
    "LMCache #5076 sends stores only",
    "P20",
    part="log_type",
    invisible_if_hidden=_UNSEEN,
)
class EvictionsAreNotTold(Defect):
    """A router takes every block that was ever stored as cached."""

    def removed(self, _key: Any) -> None:
        return None


@PAGE.exhibit(
    "BlockRemoved is sent only when the last block with a key is evicted",
    "#55092, #48933",
    "P20",
    part="prefix_type",
    invisible_if_hidden=_UNSEEN,
)
class LastCopyAloneIsTold(Defect):
    """BlockStored is sent for each block, so a router that counts them never reaches zero."""

    log: Any

    def withdraw(self, block: int) -> None:
        bucket, log = self._buckets.get(self._digests[block]), self.log
        self.log = None if isinstance(bucket, list) and len(bucket) > 1 else log
        super().withdraw(block)
        self.log = log


@PAGE.exhibit(
    "BlockStored repeats the blocks before the new ones",
    "Dynamo #8012, for its followers",
    "P20",
    part="log_type",
    invisible_if_hidden=_UNSEEN,
)
class PrefixIsToldAgain(Defect):
    """Each event starts with the prompt's first block, so a router counts too many copies."""

    def _store(self, lineage: Any, run: Any, group: int, per: int) -> None:
        super()._store(lineage, range(run[-1] + 1), group, per)


@PAGE.exhibit(
    "no AllBlocksCleared is sent for a reset",
    "AIBrix #2287",
    "P20",
    part="log_type",
    invisible_if_hidden=_UNSEEN,
)
class ResetsAreNotTold(Defect):
    """A router sends prompts to an engine that no longer has their prefix."""

    def cleared(self) -> None:
        return None


@PAGE.exhibit(
    "a prefix-cache lookup sends AllBlocksCleared",
    "TokenSpeed #166",
    "P20",
    part="prefix_type",
    invisible_if_hidden=_UNSEEN,
)
class LookingIsToldAsAReset(Defect):
    """The stored blocks are still cached, but a router takes them as gone."""

    def hits(self, lineage: Any, limit: int) -> Any:
        if self.log is not None:
            self.log.cleared()
        return super().hits(lineage, limit)


@PAGE.exhibit(
    "no BlockRemoved is sent for keys that a preemption withdraws",
    "#43569, repaired in part",
    "P20",
    wrong_fix_of="zombie-key",
    invisible_if_hidden=_UNSEEN,
)
class TakenBackInSilence(Defect):
    """The key leaves the map, but a router that got it as stored still has it."""

    def _withdraw_unwritten(self, slot: int) -> None:
        log, self.prefix.log = self.prefix.log, None
        super()._withdraw_unwritten(slot)
        self.prefix.log = log


@SKIPPING.exhibit(
    "BlockStored lists the tokens of blocks that are not cached",
    "#44451",
    "P20",
    part="log_type",
    invisible_if_hidden=_UNSEEN,
)
class SkippedTokensAreTold(Defect):
    """States are kept at some block boundaries only; tokens of the other blocks are listed, too."""

    def stored(self, lineage: Any, indices: Any, group: int = 0, per: int = 1) -> None:
        ends, first = self.__dict__.setdefault("ends", {}), len(self._pending)
        super().stored(lineage, indices, group, per)
        begin = ends.get((lineage, group))
        if not indices:
            return
        ends[lineage, group] = indices[-1] + 1
        if begin is not None and begin < indices[0]:
            size = self._pending[first].block_size
            tokens = tuple(lineage.tokens[begin * size : (indices[-1] + 1) * size])
            self._pending[first] = replace(self._pending[first], token_ids=tokens)
