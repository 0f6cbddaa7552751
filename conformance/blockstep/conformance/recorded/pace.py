"""Pace: how fast the requests of a workload come, and the config that suits each workload."""

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
    """At their arrival time, however busy the engine is."""
    CLOSED = "closed"
    """As soon as fewer than `concurrency` are unfinished."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast requests come."""

    arrivals: Arrivals = Arrivals.CLOSED
    concurrency: int = 256
    """Requests unfinished at once, at most, when arrivals are closed."""
    ticks_per_step: int = 50
    """Ticks that one step takes, when arrivals are open; the ticks of a workload are ms."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.ticks_per_step < 1:
            raise ValueError(f"{self}: concurrency and ticks_per_step must be at least 1")


@dataclass(frozen=True, slots=True)
class ReplayPreset:
    """A config and a pace that suit one workload."""

    config: Config
    pace: Pace


REPLAY_PRESETS: Mapping[WorkloadFormat, ReplayPreset] = MappingProxyType(
    {
        # All blocks that the whole trace ever allocates fit (191,195): nothing is evicted, so
        # what hits depends on the trace alone.
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
        # A pool under pressure: prompts are unique, so what matters is the traffic in blocks.
        WorkloadFormat.AZURE: ReplayPreset(
            Config(
                num_blocks=16_384,
                block_size=16,
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                max_model_len=16_384,
            ),
            Pace(Arrivals.CLOSED, concurrency=256),
        ),
        WorkloadFormat.AGENT: ReplayPreset(
            Config(
                num_blocks=65_536,
                block_size=16,
                max_num_seqs=64,
                max_num_batched_tokens=8192,
                max_model_len=65_536,
            ),
            Pace(Arrivals.CLOSED, concurrency=64),
        ),
    }
)
"""What `blockstep replay` uses unless told otherwise."""
