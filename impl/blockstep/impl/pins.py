"""Pins: blocks that stay between two turns of a job, and for how long.

This state machine knows jobs by their ids and blocks by tables, and no queue or pool. The caller
that ends a pin frees its blocks.
"""

from __future__ import annotations

from collections import Counter

from blockstep.spec.vocabulary import NULL_BLOCK, BlockTables, Pin, PinEstimate, PinsSnapshot


class Pins:
    """The pins, at most one per job, in the order in which turns ended (seed 001, "Feature A")."""

    def __init__(self) -> None:
        self.now = 0
        """The latest time of a Clock event, in ticks."""
        self.pins: dict[str, Pin] = {}
        """The pin of each job, in the order of pinning."""
        self.estimates: dict[str, int] = {}
        """The ticks for which the blocks of each job with a pin or an unfinished turn stay pinned;
        never 0."""
        self._num_turns: Counter[str] = Counter()
        """The number of unfinished turns of each job."""

    def set_time(self, now: int) -> None:
        """Set the time; it never goes back."""
        self.now = max(self.now, now)

    def take_estimate(self, estimate: PinEstimate) -> None:
        """Set how long a job's blocks stay pinned; ignored if the job has neither pin nor turn."""
        job_id, pin = estimate.job_id, self.pins.get(estimate.job_id)
        if pin is not None:
            self.pins[job_id] = Pin(job_id, pin.block_tables, self.now + estimate.ttl)
        elif not self._num_turns[job_id]:
            return
        if estimate.ttl:
            self.estimates[job_id] = estimate.ttl
        else:
            self.estimates.pop(job_id, None)

    def begin_turn(self, job_id: str | None) -> None:
        """Count a new request of this job."""
        if job_id is not None:
            self._num_turns[job_id] += 1

    def end_turn(self, job_id: str | None) -> None:
        """Count a finished request of this job, whatever finished it."""
        if job_id is not None:
            self._num_turns[job_id] -= 1
            self._forget_if_gone(job_id)

    def may_pin(self, job_id: str) -> bool:
        """Return whether blocks of a turn that ends now would be pinned."""
        return job_id in self.estimates

    def pin(self, job_id: str, block_tables: BlockTables) -> None:
        """Pin blocks; the job must have no other pin."""
        self.pins[job_id] = Pin(job_id, block_tables, self.now + self.estimates[job_id])

    def end(self, job_id: str) -> BlockTables:
        """End a pin, if there is one; return its block tables."""
        pin = self.pins.pop(job_id, None)
        if pin is None:
            return ()
        self._forget_if_gone(job_id)
        return pin.block_tables

    def is_warm(self, job_id: str | None) -> bool:
        """Return whether blocks of the job's previous turn are pinned."""
        return job_id in self.pins

    def list_ended(self) -> list[str]:
        """Return the jobs whose pins have expired, in the order of pinning."""
        return [job_id for job_id, pin in self.pins.items() if pin.end <= self.now]

    def find_giver(self, needy: str | None) -> str | None:
        """Return the job whose pin is ended first to free blocks for a turn of `needy` (P10).

        That is the pin of another job that expires first, and of several the oldest; the job's own
        pin is the last.
        """
        return min(self.pins, key=lambda job: (job == needy, self.pins[job].end), default=None)

    def count_holds(self) -> int:
        """Return the number of holds of all pins; one block may be in several."""
        return sum(
            block != NULL_BLOCK
            for pin in self.pins.values()
            for table in pin.block_tables
            for block in table
        )

    def snapshot(self) -> PinsSnapshot:
        """Return its canonical state."""
        estimates = [PinEstimate(job_id, ttl) for job_id, ttl in sorted(self.estimates.items())]
        return PinsSnapshot(self.now, tuple(self.pins.values()), tuple(estimates))

    def _forget_if_gone(self, job_id: str) -> None:
        """Forget a job without a turn or a pin, so that the tables stay small."""
        if not self._num_turns[job_id]:
            del self._num_turns[job_id]
            if job_id not in self.pins:
                self.estimates.pop(job_id, None)
