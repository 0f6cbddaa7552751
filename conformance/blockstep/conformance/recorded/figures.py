"""Figures: what a replay counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.recorded.pace import Pace
from blockstep.spec.vocabulary import Config, Event


@dataclass(slots=True)
class ReplayReport:
    """What a replay did, or has done so far. Rates are between 0 and 1, and 0 of nothing."""

    config: Config
    pace: Pace
    equivalence: str = "none"
    """"exact" (snapshots equal), "observations", the weaker one that the engine declares, or
    "none": an engine alone."""
    snapshot_every: int = 0
    """Events between two snapshots, with one more at the end; 0: none taken."""
    finding: Finding | None = None
    """What stopped the replay; None if it went through."""
    finding_step: int | None = None
    """Schedules before the event that `finding` is about."""
    finding_event: Event | None = None
    excused: dict[str, int] = field(default_factory=dict)
    """Findings that the engine's adapter declares, by the deviation."""
    requests_submitted: int = 0
    requests_finished: int = 0
    requests_refused: dict[str, int] = field(default_factory=dict)
    """By reject code."""
    requests_running_peak: int = 0
    steps: int = 0
    """Schedules."""
    events: int = 0
    snapshots_taken: int = 0
    rows: int = 0
    """Rows of all plans."""
    tokens_scheduled: int = 0
    tokens_prompt: int = 0
    """Of requests at their first admission; likewise the next three."""
    tokens_prefix_hit: int = 0
    blocks_prompt: int = 0
    """A partial last block counts as one, as it does in the published traces."""
    blocks_prefix_hit: int = 0
    tokens_resumed_hit: int = 0
    """Prefix hits of requests that came back from preemption."""
    tokens_output: int = 0
    preemptions: int = 0
    pool_blocks_usable: int = 0
    pool_blocks_peak: int = 0
    """Blocks held after a plan, at most."""
    pool_blocks_mean: float = 0.0
    """Blocks held after a plan, on average over plans."""
    seconds: float = 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that a prefix hit served."""
        return get_ratio(self.tokens_prefix_hit, self.tokens_prompt)

    @property
    def block_hit_rate(self) -> float:
        """Share of prompt blocks that a prefix hit served."""
        return get_ratio(self.blocks_prefix_hit, self.blocks_prompt)

    @property
    def events_per_second(self) -> float:
        """Events by wall clock, the replayer's own work included."""
        return get_ratio(self.events, self.seconds)


def get_ratio(part: float, whole: float) -> float:
    """The share, 0 of nothing."""
    return part / whole if whole else 0.0
