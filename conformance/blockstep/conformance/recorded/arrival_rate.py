"""The arrival rate of a workload's requests, and a config for each workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from blockstep.conformance.draw.workloads import WorkloadFormat
from blockstep.spec.vocabulary import Config


class Arrivals(StrEnum):
    """When requests are submitted."""

    OPEN = "open"
    """A request is submitted at its arrival time, however busy the engine is."""
    CLOSED = "closed"
    """A request is submitted when fewer than `concurrency` are unfinished."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The arrival rate of requests."""

    arrivals: Arrivals = Arrivals.CLOSED
    concurrency: int = 256
    """The most unfinished requests, with closed arrivals."""
    ticks_per_step: int = 50
    """Ticks per step, with open arrivals; the ticks of a workload are milliseconds."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.ticks_per_step < 1:
            raise ValueError(f"{self}: concurrency and ticks_per_step must be at least 1")


@dataclass(frozen=True, slots=True)
class ReplayPreset:
    """A config and a pace that fit one workload."""

    config: Config
    pace: Pace


# A pool under pressure: what matters is the traffic in blocks.
_SMALL_BLOCKS = ReplayPreset(
    Config(
        num_blocks=16_384,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=16_384,
    ),
    Pace(Arrivals.CLOSED, concurrency=256),
)
_LONG_PROMPTS = ReplayPreset(
    Config(
        num_blocks=65_536,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        max_model_len=65_536,
    ),
    Pace(Arrivals.CLOSED, concurrency=64),
)
REPLAY_PRESETS: Mapping[WorkloadFormat, ReplayPreset] = MappingProxyType(
    {
        # All blocks that the whole trace allocates fit (191,195): nothing is evicted, so the hits
        # depend on the trace alone.
        WorkloadFormat.MOONCAKE: ReplayPreset(
            Config(
                num_blocks=200_000,
                block_size=512,
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                max_model_len=131_072,
            ),
            Pace(Arrivals.CLOSED, concurrency=256),
        ),
        **dict.fromkeys(
            (
                *(WorkloadFormat.AZURE, WorkloadFormat.BURSTGPT, WorkloadFormat.SERVINGSIM),
                *(WorkloadFormat.VLLM_BENCH, WorkloadFormat.VLLM_CUSTOM),
                *(WorkloadFormat.SHAREGPT, WorkloadFormat.AIPERF),
            ),
            _SMALL_BLOCKS,
        ),
        **dict.fromkeys(
            (
                *(WorkloadFormat.AGENT, WorkloadFormat.QWEN, WorkloadFormat.TIMED_TRACE),
                WorkloadFormat.DYNAMO,
            ),
            _LONG_PROMPTS,
        ),
    }
)
"""The defaults of `blockstep replay`."""
