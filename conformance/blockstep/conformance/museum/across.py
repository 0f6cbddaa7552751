"""Seeded bugs in the cross-attention blocks of encoder-decoder models.

The episodes have an encoder and several KV groups; one of them may be a cross-attention group.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page(takes_groups=True, takes="encoder")
PART = "groups_type"


@PAGE.exhibit(
    "cross-attention blocks are allocated again in every step",
    "vLLM 0.19.1 schedule, breaks its rule",
    "P8 P26",
    part=PART,
    invisible="efficiency: unused blocks are held until the request finishes",
)
class AcrossCountedAgain(Defect):
    """Each row allocates blocks for all encoder outputs, as only the first row should."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            if group.is_beside:
                group.count_missing = lambda holding, _extent, of=group: of.count_blocks(
                    holding.num_beside
                )


@PAGE.exhibit(
    "a cross-attention table is as long as the decoder's token sequence",
    "vLLM 0.19.1 CrossAttentionManager, breaks its rule",
    "P8 P26",
    part=PART,
)
class AcrossAsLongAsTheText(Defect):
    """Cross-attention blocks are counted by the tokens of the step, as in the other groups."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            if group.is_beside:
                group.count_missing = lambda holding, extent, of=group: max(
                    of.count_blocks(extent.num_slots) - len(holding.blocks), 0
                )


@PAGE.exhibit(
    "cross-attention blocks are not freed",
    "vLLM 0.19.1 SingleTypeKVCacheManager.free, breaks its rule",
    "P1 P10",
    part=PART,
)
class AcrossIsKept(Defect):
    """A request that finishes or is preempted frees only its self-attention blocks."""

    def free(self, holdings: Any) -> None:
        for group, holding in zip(self.groups, holdings, strict=True):
            if group.is_beside:
                holding.clear()
        super().free(holdings)


@PAGE.exhibit(
    "a resumed encoder-decoder request does not run its encoder again",
    "vLLM 0.19.1 _try_schedule_encoder_inputs, breaks its rule",
    "P22 P4 P3 P6",
    part="encoder_type",
)
class ItemMadeOnce(Defect):
    """The encoder runs once per request, although a preemption freed the cross-attention blocks."""

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
