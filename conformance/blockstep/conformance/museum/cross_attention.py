"""Seeded bugs in the cross-attention blocks of encoder-decoder models.

The episodes have an encoder and several KV groups; one of them may be a cross-attention group.
"""

from __future__ import annotations

from typing import Final

from blockstep.conformance.museum.bug import Page, Right, instead, replacing
from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import Growth, compute_num_blocks, count_taken, release_slots
from blockstep.spec.core.work import Step
from blockstep.spec.features.encoder import (
    CLAIM,
    EncoderShare,
    limit_to_items,
    process_items_taken,
)
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup

PAGE = Page(takes_groups=True, takes="encoder")


@PAGE.exhibit(
    "cross-attention blocks are allocated again in every step",
    "vLLM 0.19.1 schedule, breaks its rule",
    "P8 P26",
    invisible="efficiency: unused blocks are held until the request finishes",
)
@instead(count_taken)
def across_counted_again(right: Right[int], group: KVGroup, growth: Growth) -> int:
    """Each row allocates blocks for all encoder outputs, as only the first row should."""
    if group.kind is GroupKind.CROSS_ATTENTION:
        return compute_num_blocks(growth.num_slots, group.block_size)
    return right()


@PAGE.exhibit(
    "a cross-attention table is as long as the decoder's token sequence",
    "vLLM 0.19.1 CrossAttentionManager, breaks its rule",
    "P8 P26",
)
@instead(count_taken)
def across_as_long_as_the_text(right: Right[int], group: KVGroup, growth: Growth) -> int:
    """Cross-attention blocks are counted by the tokens of the step, as in the other groups."""
    if group.kind is GroupKind.CROSS_ATTENTION:
        growth = growth._replace(num_slots=growth.num_tokens)
    return right(growth=growth)


@PAGE.exhibit(
    "cross-attention blocks are not freed",
    "vLLM 0.19.1 SingleTypeKVCacheManager.free, breaks its rule",
    "P1 P10",
)
def across_is_kept(rules: Rules, config: Config) -> Rules:
    """A request that finishes or is preempted frees only its self-attention blocks."""

    def release(right: Right[Pool], request: RequestState) -> Pool:
        pairs = zip(config.kv_groups, request.holdings, strict=True)
        freed = [held for group, held in pairs if group.kind is not GroupKind.CROSS_ATTENTION]
        return right(request=replace(request, holdings=tuple(freed)))

    return replacing(rules, release_slots, release)


_IS_MADE: Final = Part("is_made", False)
"""Whether the encoder has run for a request."""


@PAGE.exhibit(
    "a resumed encoder-decoder request does not run its encoder again",
    "vLLM 0.19.1 _try_schedule_encoder_inputs, breaks its rule",
    "P22 P4 P3 P6",
)
def item_made_once(rules: Rules, config: Config) -> Rules:
    """The encoder runs once per request, although a preemption freed the cross-attention blocks."""

    def limit(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
        if not _IS_MADE.of(request):
            return rules[limit_to_items](step, request, num_computed, num_new)
        CLAIM.set(step, EncoderShare(num_new))
        return num_new

    def take(step: Step, request: RequestState) -> None:
        rules[process_items_taken](step, request)
        if CLAIM.of(step).items:
            name = request.request_id
            step.requests[name] = _IS_MADE.put(step.requests[name], True)

    if not config.is_encoder_decoder:
        return rules
    return rules.replacing(limit_to_items, limit).replacing(process_items_taken, take)
