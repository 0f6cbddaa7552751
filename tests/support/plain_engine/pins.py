"""Pins: blocks of finished turns kept for the next turns of their jobs, estimates, and the time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from blockstep.spec.vocabulary import Pin, PinEstimate, PinsSnapshot
from plain_engine.pool import Pool
from plain_engine.text import Text


class Pins:
    """The pins, at most one per job, in the order in which turns finished."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.now = 0
        self.of: dict[str, Pin] = {}
        self.ttls: dict[str, int] = {}
        """Estimates by job, without those of 0 ticks, which mean that nothing is kept."""

    def estimate(self, job: str, ttl: int) -> None:
        """Set the estimate of a job, for its present pin and for the next one."""
        self.ttls[job] = ttl
        if job in self.of:
            self.of[job] = replace(self.of[job], end=self.now + ttl)

    def keep(self, text: Text) -> None:
        """Pin the cached blocks of a turn that has finished by its outputs: one more holder.

        The pin replaces the job's earlier one; after the last turn there is no pin.
        """
        job, is_last = text.request.job_id, text.request.is_last_step
        if job is None:
            return
        is_kept = job in self.ttls and text.settled > 0 and not is_last
        if job in self.of and (is_kept or is_last):
            self.end(job)
        if is_kept:
            kept = tuple(text.table[: text.settled])
            self.pool.hold(kept)
            self.of[job] = Pin(job, (kept,), self.now + self.ttls[job])

    def end(self, job: str) -> None:
        """End the pin of a job: its blocks lose a holder, and stay cached."""
        self.pool.release(self.of.pop(job).block_tables[0])

    def end_all(self, until: int | None = None) -> None:
        """End the pins whose time is over at `until`; None: all."""
        for job, pin in list(self.of.items()):
            if until is None or pin.end <= until:
                self.end(job)

    def let_give_way(self, to: Text) -> bool:
        """End a pin before its time: of another job if there is one, the one that ends first."""
        if not self.of:
            return False
        self.end(min(self.of, key=lambda job: (job == to.request.job_id, self.of[job].end)))
        return True

    def forget(self, unfinished: Collection[str | None]) -> None:
        """Forget estimates of jobs without a pin and without an unfinished turn."""
        self.ttls = {
            job: ttl
            for job, ttl in self.ttls.items()
            if ttl and (job in self.of or job in unfinished)
        }

    def show(self) -> PinsSnapshot:
        """Return the part of the snapshot about pins."""
        estimates = tuple(PinEstimate(*entry) for entry in sorted(self.ttls.items()))
        return PinsSnapshot(self.now, tuple(self.of.values()), estimates)
