"""Output: when a request ends."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


@PAGE.exhibit("a request gets one token too many", "seed 000 Request Completion", "P13")
class LengthOffByOne(Defect):
    """The cap is checked with a token's delay."""

    def _accept(self, slot: int, tokens: Any) -> Any:
        self.table.max_known[slot] += 1
        accepted = super()._accept(slot, tokens)
        if slot < len(self.table.max_known):
            self.table.max_known[slot] -= 1
        return accepted


@PAGE.exhibit("min_tokens holds off the length caps", "vLLM 0.19.1 check_stop", "P13 P10")
class MinTokensMasksLength(Defect):
    """At the model length the request can neither stop nor go on."""

    def _stop_verdict(self, slot: int, token: int) -> Any:
        if not self._has_min_tokens(slot):
            return super()._accept.__globals__["_GOES_ON"]
        return super()._stop_verdict(slot, token)
