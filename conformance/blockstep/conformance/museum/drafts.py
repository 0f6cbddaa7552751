"""Drafts: what is published, rolled back and dispatched of them."""

from __future__ import annotations

from copy import copy
from typing import Any

from blockstep.conformance.museum.exhibit import Methods, Page
from blockstep.spec.vocabulary import SpecMethod

PAGE = Page()


@PAGE.exhibit(
    "blocks with draft tokens are published", "seed 001 Draft tokens are never cached", "P3"
)
def cached_drafts(clean: Any) -> Methods:
    """A rejected draft stays findable as if it had been said."""

    def _publish(self: Any, slot: int, num_computed: int, num_scheduled: int) -> None:
        table = self.table
        past = num_computed + num_scheduled - table.num_known[slot]
        drafts = table.spec_token_ids[slot][: max(past, 0)]
        if not drafts:
            clean._publish(self, slot, num_computed, num_scheduled)
            return
        honest, known = table.lineages[slot], table.num_known[slot]
        guessed = copy(honest)
        guessed.tokens = honest.tokens[:]
        guessed._digests, guessed._keys = honest._digests[:], honest._keys[:]
        for token in drafts:
            guessed.append(token)
        table.lineages[slot], table.num_known[slot] = guessed, known + len(drafts)
        clean._publish(self, slot, num_computed, num_scheduled)
        table.lineages[slot], table.num_known[slot] = honest, known

    return {"_publish": _publish}


@PAGE.exhibit(
    "rejected drafts stay computed", "seed 001 Rejection Clawback", "P14", "P12", "P4", "P26"
)
def lost_rollback(clean: Any) -> Methods:
    """The next step starts behind tokens that nobody computed."""

    def _roll_back(self: Any, slot: int, drafts: Any, tokens: Any) -> None:
        self.drafts_scheduled += len(drafts)
        self.drafts_accepted += len(tokens) - 1

    return {"_roll_back": _roll_back}


@PAGE.exhibit("one draft too many is rolled back", "seed 001 Rejection Clawback", "P14", "P26")
def rollback_off_by_one(clean: Any) -> Methods:
    """The token of the model's own is taken for a rejected draft."""

    def _roll_back(self: Any, slot: int, drafts: Any, tokens: Any) -> None:
        clean._roll_back(self, slot, drafts, tokens)
        if len(tokens) <= len(drafts):
            self.table.num_computed[slot] -= 1

    return {"_roll_back": _roll_back}


@PAGE.exhibit("drafts survive a preemption", "#30916", "P24", "P12")
def stale_drafts(clean: Any) -> Methods:
    """They are verified at a position they were not made for."""

    def _preempt(self: Any, slot: int) -> None:
        drafts = self.table.spec_token_ids[slot] or (0,) * self.config.num_speculative_tokens
        clean._preempt(self, slot)
        if self.config.spec_method is not SpecMethod.NONE:
            self.table.spec_token_ids[slot] = drafts

    return {"_preempt": _preempt}
