"""The encoder of a run, in vLLM's own classes: budgets, what is kept, what comes from outside.

    Request.items --> `vllm_items`     budgets -----> EncoderCacheManager --> EncoderSnapshot
                                       EncoderOffer -> `Offers`, an EC connector of ours

vLLM derives both budgets from its model's largest item and the token budget. There is no model
here, so they are set when the scheduler is built, and the manager is built again, of its own class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager

from blockstep.conformance.engine import EngineFault
from blockstep.spec import vocabulary as v


class Loads(ECConnectorMetadata):  # type: ignore[misc]
    """What a worker is to load instead of encoding it, in the order in which it was told."""

    def __init__(self, inputs: Sequence[tuple[v.RequestId, int]]) -> None:
        self.inputs = tuple(inputs)


class Offers(ECConnectorBase):  # type: ignore[misc]
    """A connector that holds what events say that it holds (the side of the scheduler)."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.identifiers: frozenset[str] = frozenset()
        self._inputs: list[tuple[v.RequestId, int]] = []

    def has_cache_item(self, identifier: str) -> bool:
        """Whether it holds an item."""
        return identifier in self.identifiers

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Room was made for an item: to be loaded, if it is held."""
        if self.has_cache_item(request.mm_features[index].identifier):
            self._inputs.append((request.request_id, index))

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        """What was to be loaded since the last plan."""
        del scheduler_output
        inputs, self._inputs = self._inputs, []
        return Loads(inputs)

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        """The side of the worker: there is none."""
        raise NotImplementedError("nobody loads here: this connector is a scheduler's")

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        """The side of the worker: there is none."""
        raise NotImplementedError("nobody saves here: this connector is a scheduler's")


def ask_for_offers(vllm_config: Any) -> None:
    """Have the release build `Offers` as its connector."""
    vllm_config.ec_transfer_config = ECTransferConfig(
        ec_connector=Offers.__name__, ec_connector_module_path=__name__, ec_role="ec_consumer"
    )


def read_loads(metadata: Any) -> tuple[v.EncoderInputs, ...]:
    """What the connector was told to load, by request.

    Raises:
        EngineFault: the plan has something else from a connector.
    """
    if metadata is None:
        return ()
    if not isinstance(metadata, Loads):
        raise EngineFault(f"ec_connector_metadata in this plan is {metadata!r}")
    found: dict[v.RequestId, list[int]] = {}
    for name, index in metadata.inputs:
        found.setdefault(name, []).append(index)
    return read_inputs(found)


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
    known.update(manager.freeable)
    for identifier, holders in manager.cached.items():
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
