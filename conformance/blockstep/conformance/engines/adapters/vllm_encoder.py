"""The encoder of a run, in vLLM's own classes: items, budgets, and what is kept.

    Request.items --> MultiModalFeatureSpec, PlaceholderRange     budgets --> EncoderCacheManager
    what it holds --> EncoderSnapshot                             EncoderOffer --> `vllm_offers`

vLLM derives both budgets from its model's largest item and the token budget. There is no model
here, so they are set when the scheduler is built, and the manager is built again, of its own class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager

from blockstep.conformance.engine import EngineFault
from blockstep.spec import vocabulary as v


@lru_cache(maxsize=1024)
def build_features(items: tuple[v.MultiModalItem, ...]) -> list[MultiModalFeatureSpec]:
    """Items as a request has them, without what they show. To be copied before it is changed."""
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=item.identifier,
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


def install_encoder(scheduler: Any, config: v.Config) -> None:
    """Give a scheduler its budgets, and the manager that it has for such a model."""
    kind = EncoderDecoderCacheManager if config.is_encoder_decoder else EncoderCacheManager
    scheduler.is_encoder_decoder = config.is_encoder_decoder
    scheduler.max_num_encoder_input_tokens = config.encoder_compute_budget
    scheduler.encoder_cache_manager = kind(cache_size=config.encoder_cache_size)


def read_inputs(told: Mapping[v.RequestId, Sequence[int]]) -> tuple[v.EncoderInputs, ...]:
    """Encoder inputs of a plan, by request in the order of scheduling."""
    return tuple(v.EncoderInputs(name, tuple(indices)) for name, indices in told.items())


def read_encoder(scheduler: Any, known: dict[str, int]) -> v.EncoderSnapshot:
    """What the release keeps of items.

    It does not say how many embeddings an entry has that somebody needs: they are those of the item
    there. Nor are items of encoder-decoder models entries of a cache; they are counted, and dropped
    a step after they were encoded.

    Args:
        scheduler: The release's.
        known: Embeddings of each entry that was seen; what is new is added.

    Raises:
        EngineFault: none of those who need an entry has such an item.
    """
    manager = scheduler.encoder_cache_manager
    if isinstance(manager, EncoderDecoderCacheManager):
        num_free = manager.num_free_slots
        return v.EncoderSnapshot((), (), num_free, num_free, tuple(manager.to_free))
    entries = []
    for identifier, holders in manager.cached.items():
        known.update(manager.freeable)
        for name in holders if identifier not in known else ():
            for feature in scheduler.requests[name].mm_features:
                if feature.identifier == identifier:
                    known[identifier] = feature.mm_position.get_num_embeds()
        if identifier not in known:
            raise EngineFault(f"encoder cache entry {identifier!r} is held for an item of nobody")
        entries.append(v.EncoderEntry(identifier, known[identifier], tuple(sorted(holders))))
    for gone in known.keys() - manager.cached.keys():
        del known[gone]
    return v.EncoderSnapshot(
        entries=tuple(sorted(entries, key=lambda entry: entry.identifier)),
        freeable=tuple(manager.freeable),
        num_free=manager.num_free_slots,
        num_freeable=manager.num_freeable_slots,
        freed=tuple(manager.freed),
    )
