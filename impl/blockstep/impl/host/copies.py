"""Copies: shared blocks of branches, each copied before one of the branches writes to it.

parent   3 7 9      9 is not full: it is copied for the branch that writes first,
branch   3 7 9      and the other, its last holder, writes in place
"""

from __future__ import annotations

from blockstep.impl.host.core import Core
from blockstep.impl.host.groups import GroupMemory
from blockstep.impl.host.kinds import Extent
from blockstep.impl.host.step import Step
from blockstep.spec.vocabulary import BlockTables


class Copies(Core):
    """Gives a row its blocks: the appended ones, and copies of shared ones that it writes to."""

    def _take(self, groups: GroupMemory, slot: int, extent: Extent, step: Step) -> BlockTables:
        """Append the blocks needed for `extent`; return them by group."""
        holdings = self.table.holdings[slot]
        if not groups.has_forks:
            return groups.take(holdings, extent)
        copies, taken = groups.take_own(holdings, self.table.num_computed[slot], extent)
        if copies:
            step.copies[slot] = copies
        return taken

    def _count_copies(self, slot: int) -> int:
        """Return the number of shared blocks that its next token is written to (P8)."""
        if self.groups is None:
            return 0
        return self.groups.count_copies(self.table.holdings[slot], self.table.num_computed[slot])
