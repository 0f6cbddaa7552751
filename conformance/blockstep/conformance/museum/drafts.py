"""Seeded bugs in draft tokens: how they are published, rolled back and dispatched."""

from __future__ import annotations

from copy import copy
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import SpecMethod

PAGE = Page()


@PAGE.exhibit(
    "blocks with unverified draft tokens are published in the prefix cache",
    "vLLM V1: Draft tokens are never cached",
    "P3",
)
class CachedDrafts(Defect):
    """A rejected draft can be hit as if it were part of the request's tokens."""

    def _publish(self, slot: int, num_computed: int, num_scheduled: int) -> None:
        table = self.table
        past = num_computed + num_scheduled - table.num_known[slot]
        drafts = table.spec_token_ids[slot][: max(past, 0)]
        if not drafts:
            super()._publish(slot, num_computed, num_scheduled)
            return
        honest, known = table.lineages[slot], table.num_known[slot]
        guessed = copy(honest)
        guessed.tokens = honest.tokens[:]
        guessed._digests, guessed._keys = honest._digests[:], honest._keys[:]
        for token in drafts:
            guessed.append(token)
        table.lineages[slot], table.num_known[slot] = guessed, known + len(drafts)
        super()._publish(slot, num_computed, num_scheduled)
        table.lineages[slot], table.num_known[slot] = honest, known


@PAGE.exhibit("rejected drafts count as computed", "vLLM V1: Rejection Clawback", "P14 P12 P4 P26")
class LostRollback(Defect):
    """The next step starts after tokens whose KV is not valid."""

    def _roll_back(self, slot: int, drafts: Any, tokens: Any) -> None:
        self.drafts_scheduled += len(drafts)
        self.drafts_accepted += len(tokens) - 1


@PAGE.exhibit("drafts survive a preemption", "#30916", "P24 P12")
class StaleDrafts(Defect):
    """They are verified at a position for which they were not proposed."""

    def _preempt(self, slot: int) -> None:
        drafts = self.table.spec_token_ids[slot] or (0,) * self.config.num_speculative_tokens
        super()._preempt(slot)
        if self.config.spec_method is not SpecMethod.NONE:
            self.table.spec_token_ids[slot] = drafts
