"""Results of an encoder that come from elsewhere, in vLLM's own class: a connector of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_encoder import read_inputs
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
