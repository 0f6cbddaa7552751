"""Pins: what turns of jobs leave in the pool for the next ones, the estimates, and the time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from blockstep.impl.plain.pool import Pool
from blockstep.impl.plain.text import Text
from blockstep.spec.vocabulary import Pin, PinEstimate, PinsSnapshot


class Pins:
    """One pin for each job at most, in the order in which turns ended."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.now = 0
        self.of: dict[str, Pin] = {}
        self.ttls: dict[str, int] = {}
        """Estimates but for those of 0 ticks, by which nothing stays."""

    def estimate(self, job: str, ttl: int) -> None:
        """For the pin that is there, from now on, and for the one to come."""
        self.ttls[job] = ttl
        if job in self.of:
            self.of[job] = replace(self.of[job], end=self.now + ttl)

    def keep(self, text: Text) -> None:
        """A turn has ended by its outputs: what can be found of it goes from its table to a pin.

        That takes the place of the pin before; the end of a last turn leaves neither.
        """
        job, is_last = text.request.job_id, text.request.is_last_step
        if job is None:
            return
        is_kept = job in self.ttls and text.settled > 0 and not is_last
        if job in self.of and (is_kept or is_last):
            self.end(job)
        if is_kept:
            kept, text.table = tuple(text.table[: text.settled]), text.table[text.settled :]
            self.of[job] = Pin(job, (kept,), self.now + self.ttls[job])

    def end(self, job: str) -> None:
        """Its blocks are free, if nobody else holds them; they can still be found."""
        self.pool.release(self.of.pop(job).block_tables[0])

    def end_all(self, until: int | None = None) -> None:
        """Those whose time is over by then; None: all."""
        for job, pin in list(self.of.items()):
            if until is None or pin.end <= until:
                self.end(job)

    def let_give_way(self, to: Text) -> bool:
        """One ends before its time: of another job if there is one, of these the first to end."""
        if not self.of:
            return False
        self.end(min(self.of, key=lambda job: (job == to.request.job_id, self.of[job].end)))
        return True

    def forget(self, unfinished: Collection[str | None]) -> None:
        """Estimates of jobs without a pin and without an unfinished turn."""
        self.ttls = {
            job: ttl
            for job, ttl in self.ttls.items()
            if ttl and (job in self.of or job in unfinished)
        }

    def show(self) -> PinsSnapshot:
        """For a snapshot."""
        estimates = tuple(PinEstimate(*entry) for entry in sorted(self.ttls.items()))
        return PinsSnapshot(self.now, tuple(self.of.values()), estimates)
