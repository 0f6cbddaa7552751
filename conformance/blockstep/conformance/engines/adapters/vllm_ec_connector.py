"""An EC connector of vLLM's own class that has encoder results which events offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_encoder import read_inputs
from blockstep.spec import vocabulary as v


class Loads(ECConnectorMetadata):  # type: ignore[misc]
    """The items that a worker loads instead of encoding them, in the order of allocation."""

    def __init__(self, inputs: Sequence[tuple[v.RequestId, int]]) -> None:
        self.inputs = tuple(inputs)


class ScriptedECConnector(ECConnectorBase):  # type: ignore[misc]
    """An EC connector, scheduler side, that has exactly the items that events say it has."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.identifiers: frozenset[str] = frozenset()
        self._inputs: list[tuple[v.RequestId, int]] = []

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether it has an item."""
        return identifier in self.identifiers

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Record an item to load, if it has it, when the scheduler has made room for it."""
        if self.has_cache_item(request.mm_features[index].identifier):
            self._inputs.append((request.request_id, index))

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        """Return the items to load since the last plan."""
        del scheduler_output
        inputs, self._inputs = self._inputs, []
        return Loads(inputs)

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        """Raise: there is no worker side."""
        raise NotImplementedError("this connector has no worker side, so it loads nothing")

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        """Raise: there is no worker side."""
        raise NotImplementedError("this connector has no worker side, so it saves nothing")


def ask_for_offers(vllm_config: Any) -> None:
    """Make the release build `ScriptedECConnector` as its connector."""
    vllm_config.ec_transfer_config = ECTransferConfig(
        ec_connector=ScriptedECConnector.__name__,
        ec_connector_module_path=__name__,
        ec_role="ec_consumer",
    )


def read_loads(metadata: Any) -> tuple[v.EncoderInputs, ...]:
    """Return the items that the connector was asked to load, by request.

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
