"""Items of a prompt in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from blockstep.conformance.engines.adapters.vllm_names import get_text
from blockstep.spec import vocabulary as v


@lru_cache(maxsize=1024)
def build_features(items: tuple[v.MultiModalItem, ...]) -> list[MultiModalFeatureSpec]:
    """Items as a request has them, without what they show. To be copied before it is changed."""
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=get_text(item.identifier),
            mm_position=PlaceholderRange(
                offset=item.offset,
                length=item.length,
                is_embed=torch.tensor(item.is_embed) if item.is_embed else None,
            ),
        )
        for item in items
    ]


def read_features(features: Iterable[Any]) -> tuple[v.MultiModalItem, ...]:
    """Items as vLLM has them now."""
    return tuple(
        v.MultiModalItem(
            feature.identifier,
            feature.mm_position.offset,
            feature.mm_position.length,
            is_embed=()
            if feature.mm_position.is_embed is None
            else tuple(map(bool, feature.mm_position.is_embed.tolist())),
        )
        for feature in features
    )
