"""Pins: blocks that stay between two turns of a job, and for how long.

A machine of its own: it knows jobs by their ids and blocks by tables, and no queue or pool. Whoever
ends a pin here frees its blocks there.
"""

from __future__ import annotations

from collections import Counter

from blockstep.spec.vocabulary import NULL_BLOCK, BlockTables, Pin, PinEstimate, PinsSnapshot


class Pins:
    """At most one pin per job, in the order in which turns ended (seed 001, "Feature A")."""

    def __init__(self) -> None:
        self.now = 0
        """Ticks: the latest time that was told."""
        self.pins: dict[str, Pin] = {}
        """By job, in the order in which they were pinned."""
        self.estimates: dict[str, int] = {}
        """By job that has a pin or an unfinished turn: ticks for which its blocks stay; never 0."""
        self._num_turns: Counter[str] = Counter()
        """By job: its unfinished turns."""

    def tell_time(self, now: int) -> None:
        """Time does not go back."""
        self.now = max(self.now, now)

    def take_estimate(self, estimate: PinEstimate) -> None:
        """From now on this holds of a job, if there is anything of it."""
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
        """A request of this job is there."""
        if job_id is not None:
            self._num_turns[job_id] += 1

    def end_turn(self, job_id: str | None) -> None:
        """It is there no more, however it ended."""
        if job_id is not None:
            self._num_turns[job_id] -= 1
            self._forget_if_gone(job_id)

    def may_pin(self, job_id: str) -> bool:
        """Whether blocks of a turn that ends now would stay at all."""
        return job_id in self.estimates

    def pin(self, job_id: str, block_tables: BlockTables) -> None:
        """They stay from now on; the job has no other pin."""
        self.pins[job_id] = Pin(job_id, block_tables, self.now + self.estimates[job_id])

    def end(self, job_id: str) -> BlockTables:
        """A pin ends; what it held, nothing if there was none."""
        pin = self.pins.pop(job_id, None)
        if pin is None:
            return ()
        self._forget_if_gone(job_id)
        return pin.block_tables

    def is_warm(self, job_id: str | None) -> bool:
        """Whether blocks of the turn before are kept for this job."""
        return job_id in self.pins

    def list_ended(self) -> list[str]:
        """Jobs whose pins have had their time, in the order in which they were pinned."""
        return [job_id for job_id, pin in self.pins.items() if pin.end <= self.now]

    def find_giver(self, needy: str | None) -> str | None:
        """The job whose pin goes first for a turn of `needy`: its own goes last (P10).

        Of the others that which ends first, and of these the oldest.
        """
        return min(self.pins, key=lambda job: (job == needy, self.pins[job].end), default=None)

    def count_holds(self) -> int:
        """How often pins hold blocks; one block may be in several of them."""
        return sum(
            block != NULL_BLOCK
            for pin in self.pins.values()
            for table in pin.block_tables
            for block in table
        )

    def snapshot(self) -> PinsSnapshot:
        """Its canonical state."""
        estimates = [PinEstimate(job_id, ttl) for job_id, ttl in sorted(self.estimates.items())]
        return PinsSnapshot(self.now, tuple(self.pins.values()), tuple(estimates))

    def _forget_if_gone(self, job_id: str) -> None:
        """Nothing is known of a job without a turn or a pin, so that what is known stays small."""
        if not self._num_turns[job_id]:
            del self._num_turns[job_id]
            if job_id not in self.pins:
                self.estimates.pop(job_id, None)
