"""Telling: an engine that is right, and tells of its blocks what is not so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page(takes="events")
SKIPPING = Page(takes_groups=True, takes_states=True, takes="events")
_UNSEEN = "books: what is told is held against the state, and hidden there is none"


@PAGE.exhibit(
    "an eviction is not told",
    "LMCache #5076 tells stores only",
    "P20",
    part="log_type",
    invisible_if_hidden=_UNSEEN,
)
class EvictionsAreNotTold(Defect):
    """Whoever follows the log believes in everything that was ever there."""

    def removed(self, _key: Any) -> None:
        return None


@PAGE.exhibit(
    "only the last copy of a key is told to be gone",
    "#55092, #48933",
    "P20",
    part="prefix_type",
    invisible_if_hidden=_UNSEEN,
)
class LastCopyAloneIsTold(Defect):
    """Each copy is told when it is stored, so whoever counts them never comes to none."""

    log: Any

    def withdraw(self, block: int) -> None:
        bucket, log = self._buckets.get(self._digests[block]), self.log
        self.log = None if isinstance(bucket, list) and len(bucket) > 1 else log
        super().withdraw(block)
        self.log = log


@PAGE.exhibit(
    "blocks are told again with each that follows",
    "Dynamo #8012, for its followers",
    "P20",
    part="log_type",
    invisible_if_hidden=_UNSEEN,
)
class PrefixIsToldAgain(Defect):
    """Each event begins with the prompt; whoever counts copies counts too many."""

    def _store(self, lineage: Any, run: Any, group: int, per: int) -> None:
        super()._store(lineage, range(run[-1] + 1), group, per)


@PAGE.exhibit(
    "a reset is not told",
    "AIBrix #2287",
    "P20",
    part="log_type",
    invisible_if_hidden=_UNSEEN,
)
class ResetsAreNotTold(Defect):
    """Prompts are sent for what is forgotten."""

    def cleared(self) -> None:
        return None


@PAGE.exhibit(
    "looking for a hit is told as a reset",
    "TokenSpeed #166",
    "P20",
    part="prefix_type",
    invisible_if_hidden=_UNSEEN,
)
class LookingIsToldAsAReset(Defect):
    """What was stored before is there, and nobody knows."""

    def hits(self, lineage: Any, limit: int) -> Any:
        if self.log is not None:
            self.log.cleared()
        return super().hits(lineage, limit)


@PAGE.exhibit(
    "what a step takes back is not told to be gone",
    "#43569, half repaired",
    "P20",
    wrong_fix_of="zombie-key",
    invisible_if_hidden=_UNSEEN,
)
class TakenBackInSilence(Defect):
    """The key goes, and whoever was told of it is not told."""

    def _withdraw_unwritten(self, slot: int) -> None:
        log, self.prefix.log = self.prefix.log, None
        super()._withdraw_unwritten(slot)
        self.prefix.log = log


@PAGE.exhibit(
    "what is told in one batch begins a prompt",
    "by the rule that it breaks",
    "P20",
    part="log_type",
    invisible_if_hidden=_UNSEEN,
)
class ParentIsForgotten(Defect):
    """Chunks of a prompt look like prompts."""

    def _store(self, lineage: Any, run: Any, group: int, per: int) -> None:
        super()._store(lineage, run, group, per)
        self._pending[-1] = replace(self._pending[-1], parent=None)


@SKIPPING.exhibit(
    "tokens of blocks that are skipped are told",
    "#44451",
    "P20",
    part="log_type",
    invisible_if_hidden=_UNSEEN,
)
class SkippedTokensAreTold(Defect):
    """Where states are kept at some boundaries only, tokens of the others are told with them."""

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
