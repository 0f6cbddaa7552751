"""Data plane: an engine's plans run by real kernels on real, tagged memory.

`blockstep check --engine host-kernels` is `check` with a worker whose KV is a tensor: kernels
write, copy, swap and attend to slots, and after every step every slot is compared with what the
plans say it holds. Needs torch (the extra `engine`). The kernels are loaded by name, as engines
are.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

import torch

from blockstep.conformance.engine import Engine, EngineTraits
from blockstep.conformance.judge.dataplane.faults import FAULTS
from blockstep.conformance.judge.dataplane.worker import DataPlaneWorker, Kernels
from blockstep.conformance.judge.worker import NextToken
from blockstep.conformance.protocol.feature import resize_blocks, without_kind, without_states
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.vocabulary import Config, GroupKind

__all__ = ["HOST", "DataPlaneWorker", "Kernels", "OnKernels"]


@dataclass(frozen=True, slots=True)
class OnKernels:
    """An engine factory with a worker of its own: plans run on real memory."""

    engine: str = "host"
    """The engine that plans."""
    kernels: str = "blockstep.kernels"
    """Module of the kernels under test."""
    device: str | None = None
    """The device of the memory; None for a GPU if there is one."""
    fault: str | None = None
    """Name of a planted fault, see `faults`."""

    def __call__(self, config: Config) -> Engine:
        """Return the engine for a config."""
        return load_engine(self.engine)(config)

    @property
    def traits(self) -> EngineTraits:
        """The traits that name this worker and the features for which it has no kernels."""
        return EngineTraits(make_worker=self.make_worker, fit_config=fit_config)

    def make_worker(self, config: Config, next_token: NextToken) -> DataPlaneWorker:
        """Return the worker that runs its plans."""
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return DataPlaneWorker(config, next_token, self.load_kernels(), device)

    def load_kernels(self) -> Kernels:
        """Return the kernels under test."""
        kernels = cast("Kernels", importlib.import_module(self.kernels))
        return kernels if self.fault is None else FAULTS[self.fault](kernels)


def fit_config(config: Config) -> tuple[Config, str | None]:
    """The config without recurrent and cross-attention groups, for which there are no kernels
    here."""
    stateless = without_states(config)
    fitting = without_kind(stateless, GroupKind.CROSS_ATTENTION)
    if fitting is config:
        return config, None
    reason = "recurrent groups: the kernels keep no states"
    if stateless is config:
        reason = "cross-attention groups: the kernels keep no embeddings"
    return resize_blocks(fitting, config.block_size), reason


HOST = OnKernels()
"""Our engine on our kernels."""
