"""The figures of a replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.recorded.arrival_rate import Pace
from blockstep.spec.vocabulary import Config, Event


@dataclass(slots=True)
class ReplayReport:
    """The figures of a replay so far.

    Rates are between 0 and 1; the rate of an empty whole is 0.
    """

    config: Config
    pace: Pace
    equivalence: str = "none"
    """"exact" (snapshots are equal), "observations", the weaker equivalence that the engine
    declares, or "none" for an engine alone."""
    snapshot_every: int = 0
    """Events between two snapshots, with one more at the end; 0 if none are taken."""
    finding: Finding | None = None
    """The finding that stopped the replay; None if it finished."""
    finding_step: int | None = None
    """Number of Schedules before the event of `finding`."""
    finding_event: Event | None = None
    excused: dict[str, int] = field(default_factory=dict)
    """Number of findings that the engine's adapter declares, by the deviation."""
    requests_submitted: int = 0
    requests_finished: int = 0
    requests_refused: dict[str, int] = field(default_factory=dict)
    """Rejected requests, by reject code."""
    requests_running_peak: int = 0
    steps: int = 0
    """Number of Schedules."""
    events: int = 0
    snapshots_taken: int = 0
    rows: int = 0
    """Rows of all plans."""
    tokens_scheduled: int = 0
    tokens_prompt: int = 0
    """Prompt tokens of requests at their first admission; the next three fields are counted there,
    too."""
    tokens_prefix_hit: int = 0
    blocks_prompt: int = 0
    """A partly filled last block counts as one, as in the published traces."""
    blocks_prefix_hit: int = 0
    tokens_resumed_hit: int = 0
    """Prefix hits of resumed requests."""
    tokens_output: int = 0
    preemptions: int = 0
    pool_blocks_usable: int = 0
    pool_blocks_peak: int = 0
    """The most blocks held after a plan."""
    pool_blocks_mean: float = 0.0
    """The mean number of blocks held after a plan."""
    seconds: float = 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that prefix hits served."""
        return get_ratio(self.tokens_prefix_hit, self.tokens_prompt)

    @property
    def block_hit_rate(self) -> float:
        """Share of the prompt blocks that prefix hits served."""
        return get_ratio(self.blocks_prefix_hit, self.blocks_prompt)

    @property
    def events_per_second(self) -> float:
        """Events per second of wall time, including the replayer's own work."""
        return get_ratio(self.events, self.seconds)


def get_ratio(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if the whole is 0."""
    return part / whole if whole else 0.0
