"""Across: what encoder-decoder models hold of their items, beside the text.

These are given an encoder, and several KV groups; one of them may be read across.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page(takes_groups=True, takes="encoder")
PART = "groups_type"


@PAGE.exhibit(
    "blocks across are counted again with every step",
    "vLLM 0.19.1 schedule, by the rule that it breaks",
    "P8 P26",
    part=PART,
    invisible="efficiency: blocks that nobody reads are held until the end",
)
class AcrossCountedAgain(Defect):
    """Each row takes room for all that its items became, as the first one did."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            if group.is_beside:
                group.count_missing = lambda holding, _extent, of=group: of.count_blocks(
                    holding.num_beside
                )


@PAGE.exhibit(
    "a table across is as long as the text",
    "vLLM 0.19.1 CrossAttentionManager, by the rule that it breaks",
    "P8 P26",
    part=PART,
)
class AcrossAsLongAsTheText(Defect):
    """Blocks across are taken by the tokens of a step, as in every other group."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            if group.is_beside:
                group.count_missing = lambda holding, extent, of=group: max(
                    of.count_blocks(extent.num_slots) - len(holding.blocks), 0
                )


@PAGE.exhibit(
    "blocks across are not given back",
    "vLLM 0.19.1 SingleTypeKVCacheManager.free, by the rule that it breaks",
    "P1 P10",
    part=PART,
)
class AcrossIsKept(Defect):
    """Who ends, or is preempted, frees the blocks of its text."""

    def free(self, holdings: Any) -> None:
        for group, holding in zip(self.groups, holdings, strict=True):
            if group.is_beside:
                holding.clear()
        super().free(holdings)


@PAGE.exhibit(
    "who comes back has its item still",
    "vLLM 0.19.1 _try_schedule_encoder_inputs, by the rule that it breaks",
    "P22 P4 P3 P6",
    part="encoder_type",
)
class ItemMadeOnce(Defect):
    """An item beside the prompt is made once for a request, though preempted it lost its blocks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._made: set[int] = set()

    def choose(self, request: Any, num_computed: int, num_tokens: int, budget: int) -> Any:
        chosen = super().choose(request, num_computed, num_tokens, budget)
        if self.is_beside and id(request) in self._made:
            chosen.inputs.clear()
        return chosen

    def hold(self, request: Any, chosen: Any) -> None:
        if self.is_beside and chosen.inputs:
            self._made.add(id(request))
        super().hold(request, chosen)
