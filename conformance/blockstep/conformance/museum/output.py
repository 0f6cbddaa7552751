"""Output: when a request ends."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Methods, Page

PAGE = Page()


@PAGE.exhibit("a request gets one token too many", "seed 000 Request Completion", "P13")
def length_off_by_one(clean: Any) -> Methods:
    """The cap is checked with a token's delay."""

    def _accept(self: Any, slot: int, tokens: Any) -> Any:
        self.table.max_known[slot] += 1
        accepted = clean._accept(self, slot, tokens)
        if slot < len(self.table.max_known):
            self.table.max_known[slot] -= 1
        return accepted

    return {"_accept": _accept}


@PAGE.exhibit("min_tokens holds off the length caps", "vLLM 0.19.1 check_stop", "P13", "P10")
def min_tokens_masks_length(clean: Any) -> Methods:
    """At the model length the request can neither stop nor go on."""

    def _stop_verdict(self: Any, slot: int, token: int) -> Any:
        if not self._has_min_tokens(slot):
            return clean._accept.__globals__["_GOES_ON"]
        return clean._stop_verdict(self, slot, token)

    return {"_stop_verdict": _stop_verdict}
