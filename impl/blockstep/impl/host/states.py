"""States: groups of recurrent layers, whose blocks hold a state instead of tokens' KV."""

from __future__ import annotations

from blockstep.impl.host.kinds import Extent, Group
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.table import Holding
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId


class StateGroup(Group):
    """A group of states: the state after a token is computed from the state after the token before.

    A block has the state after its last token, or after the request's last one. After the last
    block are spare blocks for the states of drafts that may be rejected.
    """

    def count_read(self, num_computed: int) -> int:
        """See `Group`: only the last token is read, as the state is after it."""
        return min(num_computed, 1)

    def count_doubt(self, in_doubt: int) -> int:
        """See `Group`. Each draft that may be rejected has a spare block."""
        return max(in_doubt, self.num_spare)

    def count_blocks(self, num_slots: int) -> int:
        """See `Group`."""
        return super().count_blocks(num_slots) + self.num_spare

    def count_held(self, num_slots: int) -> int:
        """See `Group`."""
        return self.count_held_of(1, 1, num_slots)


class AlignedGroup(StateGroup):
    """A group of states at the ends of chunks, where chunks end at the ends of blocks.

    A step writes one state, the last one; the worker copies the previous state there first. Where a
    chunk spans several blocks, the entries of those without a state are null blocks. The spare
    blocks follow the state; they are written in turn, or move on.

        one spare block    7 3    ->    7 3 4    ->    0 3 0 4 5    the last but one is the state

    The first step behind a load reads the state that was loaded, so that has a block as well.

        two blocks loaded, and a chunk of two more       0 7 0 4 5
    """

    def count_missing(self, holding: Holding, extent: Extent) -> int:
        """See `Group`. There is no lookahead: a token that has not run has no state."""
        if not holding.has_spare:
            return 1 + self.num_spare + self._has_loaded_apart(extent)
        return int(self.count_blocks(extent.num_tokens) > len(holding.blocks))

    def _has_loaded_apart(self, extent: Extent) -> bool:
        """Whether a state is loaded into another block than the one that the chunk writes."""
        if not extent.num_loaded:
            return False
        return self.count_blocks(extent.num_loaded) < self.count_blocks(extent.num_tokens)

    def extend(self, holding: Holding, extent: Extent, pool: BlockPool) -> tuple[BlockId, ...]:
        """See `Group`."""
        missing = self.count_missing(holding, extent)
        if not missing:
            return ()
        blocks, before = holding.blocks, len(holding.blocks)
        end = self.count_blocks(extent.num_tokens)
        state = end - 1 - self.num_spare
        taken = pool.take(missing)
        first_spare = before - self.num_spare if holding.has_spare else before
        if not holding.has_spare and self._has_loaded_apart(extent):
            blocks.append(taken.pop(0))
        holding.has_spare = True
        blocks += [NULL_BLOCK] * (state - len(blocks))
        for index in range(first_spare, min(before, state)):
            blocks.append(blocks[index])
            blocks[index] = NULL_BLOCK
        blocks += taken
        assert len(blocks) == end, "a state and its spare blocks end the table"
        return tuple(blocks[before:])

    def count_held(self, num_slots: int) -> int:
        """See `Group`.

        One state in each block from that of the last certain token to that of the last draft which
        a step writes, and the spare blocks.
        """
        span = self.count_doubt(self.max_doubt) + 1 + 1 + self.num_spare
        num_states = -(-(self.block_size - 1 + span) // self.block_size)
        return min(self.count_blocks(num_slots), num_states + self.num_spare)
