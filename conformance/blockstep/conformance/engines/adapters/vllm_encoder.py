"""The encoder inputs of a run in vLLM's own classes: budgets, encoder cache, external results.

    Request.items --> `vllm_items`     budgets -----> EncoderCacheManager --> EncoderSnapshot
                                       EncoderOffer -> `vllm_ec_connector`

vLLM derives both budgets from its model's largest item and the token budget. There is no model
here, so they are set after the scheduler is built, and its encoder cache manager is built again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core import encoder_cache_manager as managers

from blockstep.conformance.engine import EngineFault
from blockstep.spec import vocabulary as v


def install_encoder(scheduler: Any, config: v.Config) -> None:
    """Set a scheduler's encoder budgets, and give it the release's encoder cache manager for this
    model.

    A release without a manager for encoder-decoder models gets no request of such a model
    (`vllm_known_crashes`).
    """
    kind: Any = managers.EncoderCacheManager
    across = getattr(managers, "EncoderDecoderCacheManager", None)
    scheduler.is_encoder_decoder = config.is_encoder_decoder and across is not None
    if scheduler.is_encoder_decoder:
        kind = across
    scheduler.max_num_encoder_input_tokens = config.encoder_compute_budget
    scheduler.encoder_cache_manager = kind(cache_size=config.encoder_cache_size)


def read_inputs(scheduled: Mapping[v.RequestId, Sequence[int]]) -> tuple[v.EncoderInputs, ...]:
    """Return the encoder inputs of a plan, by request in the order of scheduling."""
    return tuple(v.EncoderInputs(name, tuple(indices)) for name, indices in scheduled.items())


def read_encoder(scheduler: Any, known: dict[str, int]) -> v.EncoderSnapshot:
    """Return the encoder cache as a snapshot.

    The release does not say how many embeddings an entry has while requests hold it: the number is
    taken from the item of a holder. Items of encoder-decoder models are not entries of a cache:
    they are counted, and dropped one step after they were encoded.

    Args:
        scheduler: The release's.
        known: Embeddings of each entry that was seen; what is new is added.

    Raises:
        EngineFault: no request that holds an entry has such an item.
    """
    manager = scheduler.encoder_cache_manager
    if scheduler.is_encoder_decoder:
        num_free = manager.num_free_slots
        return v.EncoderSnapshot((), (), num_free, num_free, tuple(manager.to_free))
    entries = []
    counted = getattr(manager, "request_hash_refs", {})
    known.update(manager.freeable)
    for identifier, holders in manager.cached.items():
        for name in holders if identifier not in known else ():
            for feature in scheduler.requests[name].mm_features:
                if feature.identifier == identifier:
                    known[identifier] = feature.mm_position.get_num_embeds()
        if identifier not in known:
            raise EngineFault(
                f"encoder cache entry {identifier!r} is held, but no request has this item"
            )
        # Newer releases count each place of an item; in others who has several holds it once.
        counts = {name: counted.get(name, {}).get(identifier, 1) for name in holders}
        held = sorted(name for name, count in counts.items() for _ in range(count))
        entries.append(v.EncoderEntry(identifier, known[identifier], tuple(held)))
    for gone in known.keys() - manager.cached.keys():
        del known[gone]
    return v.EncoderSnapshot(
        entries=tuple(sorted(entries, key=lambda entry: entry.identifier)),
        freeable=tuple(manager.freeable),
        num_free=manager.num_free_slots,
        num_freeable=manager.num_freeable_slots,
        freed=tuple(manager.freed),
    )
