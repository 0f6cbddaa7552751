"""Saves: the blocks of preempted requests that a store keeps, and when admission is closed.

    tables of a victim    a a a a | b b b b | c c . .      computed: 10, known: 10 or more
    saved                 ----------------->               8: no partly filled block

The store reads them before anything is written in the step, so the blocks are free at once.
"""

from __future__ import annotations

from math import lcm

from blockstep.impl.host.core import Core
from blockstep.impl.host.step import Step
from blockstep.spec.vocabulary import KVSave


class Saves(Core):
    """Saves the KV of preempted requests, and closes admission under memory pressure."""

    def _save(self, victim: int, step: Step) -> None:
        """Have a store save a victim's KV if there is enough of it (seed 002, "Swap-Out").

        The victim must still have its blocks, and its row of this step must be removed. Drafts and
        placeholders are not saved, as their tokens are not known. A victim with an unconfirmed load
        saves nothing (P19).
        """
        table, sizes = self.table, self.config.block_sizes
        settled = min(table.num_computed[victim], table.num_known[victim])
        num_tokens = settled // lcm(*sizes) * lcm(*sizes)
        if num_tokens < self.config.swap_min_tokens or self._is_unsettled(victim):
            return
        tables = zip(table.block_tables(victim), sizes, strict=True)
        block_ids = tuple([blocks[: num_tokens // size] for blocks, size in tables])
        step.saves.append(KVSave(table.requests[victim].request_id, block_ids, num_tokens))

    def _is_closed_behind(self, step: Step) -> bool:
        """Return whether admission is closed in this step, after its running phase.

        With a single threshold, the request admitted last would be preempted next, again and again
        (seed 002, "Memory Pressure Signals"). Running requests finish, and with none admission is
        open (P10).
        """
        config = self.config
        if not self.running:
            return False
        enough = config.admission_high_blocks if self.is_closed else config.admission_low_blocks
        return bool(step.preempted_req_ids) or self.pool.num_free < enough
