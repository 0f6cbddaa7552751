"""Items in vLLM's words."""

from __future__ import annotations

from functools import lru_cache

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from blockstep.spec import vocabulary as v


@lru_cache(maxsize=1024)
def build_features(items: tuple[v.MultiModalItem, ...]) -> list[MultiModalFeatureSpec]:
    """Items as a request has them, without what they show. To be copied before it is changed."""
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=item.identifier,
            mm_position=PlaceholderRange(offset=item.offset, length=item.length),
        )
        for item in items
    ]
