"""Saves: what a store is given of those who are preempted; and when nobody is admitted for a time.

    tables of a victim    a a a a | b b b b | c c . .      computed: 10, known: 10 or more
    saved                 ----------------->               8: no block that is filled in part

Read before anything is written in the step, so the blocks are free for whoever took them.
"""

from __future__ import annotations

from math import lcm

from blockstep.impl.host.core import Core
from blockstep.impl.host.step import Step
from blockstep.spec.vocabulary import KVSave


class Saves(Core):
    """What becomes of KV that is given up, and of those who would need more of it."""

    def _save(self, victim: int, step: Step) -> None:
        """Have a store keep what a victim has, if that is worth it (seed 002, "Swap-Out").

        It must still have its blocks, and what this step planned for it must be undone. Neither
        drafts nor tokens that are promised are known, so nobody could ask for them by name; and of
        KV that is to be loaded nobody knows yet whether it comes (P19).
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
        """Whether nobody is admitted in this step, of which the running phase is over.

        With one threshold who was admitted last would be preempted next, again and again (seed 002,
        "Memory Pressure Signals"). Whoever runs comes to an end, and with nobody it is open (P10).
        """
        config = self.config
        if not self.running:
            return False
        enough = config.admission_high_blocks if self.is_closed else config.admission_low_blocks
        return bool(step.preempted_req_ids) or self.pool.num_free < enough
