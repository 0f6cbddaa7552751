"""Slots: the sampling parameters of each request index, in tensors on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from blockstep.impl.engine.adapters import NO_ADAPTER
from blockstep.impl.engine.host_to_device import to_device
from blockstep.impl.engine.rows import Wanted
from blockstep.spec.vocabulary import Request, RequestId

SEED, TOP_K, ADAPTER = range(3)


class Sampling(NamedTuple):
    """Sampling parameters of each row, as arguments of `blockstep.kernels.sample_tokens`."""

    temperature: torch.Tensor
    """[n] float32; 0: greedy."""
    top_k: torch.Tensor
    """[n] int32"""
    top_p: torch.Tensor
    """[n] float32"""
    min_p: torch.Tensor
    """[n] float32"""
    seeds: torch.Tensor
    """[n] int64"""


class SlotParams:
    """Sampling parameters and adapters by request index; written when a request is added.

    Args:
        num_slots: number of request indices of the scheduler.
        adapters: names of the model's LoRA adapters, in order.
        device: device of the tensors.
    """

    def __init__(self, num_slots: int, adapters: Sequence[str], device: torch.device) -> None:
        self._adapters = {name: number for number, name in enumerate(adapters)}
        self._floats = np.zeros((3, num_slots), np.float32)
        self._ints = np.zeros((3, num_slots), np.int64)
        self._device = device
        self.floats = torch.zeros((3, num_slots), dtype=torch.float32, device=device)
        """[3, num_slots] on the device: temperatures, top-p, min-p."""
        self.ints = torch.zeros((3, num_slots), dtype=torch.int64, device=device)
        """[3, num_slots] on the device; see `SEED` and its siblings."""

    def put(self, requests: Mapping[int, Request], chosen: Mapping[RequestId, Wanted]) -> int:
        """Write the rows of these requests, before the next burst; return the bytes sent."""
        if not requests:
            return 0
        slots = np.fromiter(requests, np.int64, len(requests))
        for slot, request in requests.items():
            wanted = chosen[request.request_id]
            params = wanted.params
            temperature = 0.0 if params.is_greedy else params.temperature
            self._floats[:, slot] = temperature, params.top_p, params.min_p
            adapter = NO_ADAPTER
            if request.adapter is not None:
                adapter = self._adapters[request.adapter]
            self._ints[:, slot] = wanted.seed, params.top_k, adapter
        index = to_device(slots, self._device)
        floats = np.ascontiguousarray(self._floats[:, slots])
        ints = np.ascontiguousarray(self._ints[:, slots])
        self.floats.index_copy_(1, index, to_device(floats, self._device))
        self.ints.index_copy_(1, index, to_device(ints, self._device))
        num_bytes: int = slots.nbytes + floats.nbytes + ints.nbytes
        return num_bytes

    def has_adapters(self, slots: Sequence[int]) -> bool:
        """Whether any of these requests has an adapter."""
        return bool((self._ints[ADAPTER, slots] != NO_ADAPTER).any())

    def get_adapters(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the adapters `[n]` int64 at request indices `[n]`; `NO_ADAPTER` if there is
        none."""
        return self.ints[ADAPTER][slots]

    def get_sampling(self, slots: torch.Tensor) -> Sampling:
        """Return the sampling parameters at request indices `[n]`."""
        temperature, top_p, min_p = self.floats[:, slots]
        return Sampling(
            temperature,
            self.ints[TOP_K][slots].int(),
            top_p,
            min_p,
            self.ints[SEED][slots],
        )
