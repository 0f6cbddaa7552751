"""Items of a prompt in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_block_keys import get_text
from blockstep.spec import vocabulary as v

MODALITY = "image"
"""The modality of every item; the scheduler does not distinguish modalities."""


def build_features(items: tuple[v.MultiModalItem, ...]) -> list[MultiModalFeatureSpec]:
    """Build vLLM's features of `items`, without pixels. New ones with each call.

    The scheduler changes them in place: it shifts those of a session's chunk (upstream
    `_update_request_as_session`). Shared, they were shifted for every later request, too.
    """
    return [
        MultiModalFeatureSpec(
            data=None,
            modality=MODALITY,
            identifier=get_text(item.identifier),
            mm_position=PlaceholderRange(
                offset=item.offset,
                length=item.length,
                is_embed=torch.tensor(item.is_embed) if item.is_embed else None,
            ),
        )
        for item in items
    ]


def hide_features(request: Any) -> None:
    """Take all features from a request, so that the scheduler encodes none.

    Up to 0.14.0 a request counts them when it is built, and the scheduler asserts that a request
    with such a count has features.
    """
    request.mm_features = []
    if "has_encoder_inputs" in vars(request):
        request.num_encoder_inputs, request.has_encoder_inputs = 0, False


def read_features(features: Iterable[Any]) -> tuple[v.MultiModalItem, ...]:
    """Return the items of a request as vLLM has them now.

    Raises:
        EngineFault: one is of another modality than it was built with.
    """
    features = list(features)
    for feature in features:
        if feature.modality != MODALITY:
            raise EngineFault(f"modality of {feature.identifier!r} is {feature.modality!r}")
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
