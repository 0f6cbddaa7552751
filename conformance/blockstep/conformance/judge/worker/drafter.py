"""Drafter: the KV that a proposer keeps in the blocks of the requests, in layers of its own.

    | positions that the step runs | drafts, one after the other  |      a draft model, K drafts
    first                         end       in lookahead slots

In a step a draft model runs the tokens that the target runs, so its slots hold KV of the same
sequences, and then its own drafts in the slots after them. A slot whose last content is such a
draft belongs to no sequence: a request that reads it reads an old draft of another one.

A draft head computes the KV at a position from the token at the next one. So after a hit it reads,
at the last position of the hit, KV computed with the following token, which the key of that block
does not name. That is right if this token was computed after this very sequence: a hit ends one
block before the last cached block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blockstep.conformance.judge.worker.items import Items
from blockstep.conformance.judge.worker.prefix_names import Name
from blockstep.conformance.judge.worker.request_view import FrameRow
from blockstep.conformance.judge.worker.sampling import NextToken
from blockstep.conformance.protocol.findings import Subjects
from blockstep.spec import vocabulary as v


class Drafter(Items):
    """A worker's proposer with KV of its own, where the config has one."""

    def __init__(self, config: v.Config, next_token: NextToken) -> None:
        super().__init__(config, next_token)
        whole = [at for at, group in enumerate(self.groups) if group.kind is v.GroupKind.FULL]
        self._of_drafter = whole[0] if whole and config.num_lookahead_tokens else None
        """The KV group in whose blocks the proposer keeps its KV; None if it keeps none."""
        is_head = config.drops_last_hit_block and config.enable_prefix_caching
        # KV that a store loads or a branch shares is trusted: no plan shows how it was computed.
        is_in_plans = not (config.kv_connector or config.enable_forks)
        self._has_head = is_head and is_in_plans and self._of_drafter is not None
        self._drafts: dict[v.BlockId, dict[int, tuple[v.RequestId, v.FrameId]]] = {}
        """The drafts whose KV the proposer has in slots, by block and slot: the request and the
        plan."""
        self._followed: set[Name] = set()
        """Sequences whose last position a draft head has computed with the token after them."""

    def forget_drafts(self) -> None:
        """Note a reset: no sequence can be hit any more."""
        self._followed.clear()

    def copy_drafts(self, copies: Iterable[v.BlockCopy]) -> None:
        """Copy blocks one by one, in all layers."""
        for copy in copies:
            self._drafts.pop(copy.destination, None)
            if copy.source in self._drafts:
                self._drafts[copy.destination] = dict(self._drafts[copy.source])

    def load_drafts(self, loads: Iterable[v.KVLoad]) -> None:
        """Note loads: a store writes all layers of the blocks that it loads."""
        at = self._of_drafter
        if at is None or not self._drafts:
            return
        for load in loads:
            start, tables = load.num_computed_tokens, load.block_ids
            table = tables[at] if at < len(tables) else ()  # a wrong load has been told of
            self._settle_slots(table, start, start + load.num_external_tokens)

    def run_drafter(self, rows: Sequence[FrameRow], plan: v.Plan) -> None:
        """Run the proposer's layers after the target's: read the positions before each row, and run
        its own."""
        at = self._of_drafter
        if at is None:
            return
        admitted = {row.request_id for row in plan.new}
        admitted.update(row.request_id for row in plan.cached if row.resumed)
        for row in rows:
            self._settle_slots(row.view.tables[at], row.first, row.end)
            if self._has_head:
                self._follow(row)
        for row in rows:
            self._read_drafts(row, row.view.tables[at])
            if row.view.request.request_id not in admitted:
                self._check_lookahead(row)  # an admitted one may have no lookahead yet
            elif self._has_head:
                self._check_hit_of_head(row)

    def _follow(self, row: FrameRow) -> None:
        """Note that a draft head runs the positions of a row, each with the token after it, if
        known.

        The position before a session's next input keeps the KV made for the token that the input
        replaces. Drafts from it are worse and not wrong, so a hit may end there.
        """
        view = row.view
        if row.end < len(view.tokens):
            view.name_positions(row.end + 1, row.drafts)
        first = row.first if view.request.resumable else row.first + 1
        self._followed.update(view.chain[first : row.end + 1])

    def _settle_slots(self, table: Sequence[v.BlockId], first: int, end: int) -> None:
        """Note that positions of a table hold KV of known tokens."""
        if not self._drafts:
            return
        size = self._drafter_size
        for index in range(first // size, min(-(-end // size), len(table))):
            slots = self._drafts.get(table[index])
            if slots is None:
                continue
            for position in range(max(first, index * size), min(end, (index + 1) * size)):
                slots.pop(position % size, None)
            if not slots:
                del self._drafts[table[index]]

    def _read_drafts(self, row: FrameRow, table: Sequence[v.BlockId]) -> None:
        size, name = self._drafter_size, row.view.request.request_id
        for index, block in enumerate(table[: -(-row.first // size)] if self._drafts else ()):
            wrong = [at for at in self._drafts.get(block, ()) if index * size + at < row.first]
            if wrong:
                other, frame_id = self._drafts[block][wrong[0]]
                what = (
                    f"{name!r} reads slot {wrong[0]} of block {block} at position "
                    f"{index * size + wrong[0]}: there is a draft of {other!r}, of plan {frame_id}"
                )
                self._complain(
                    "P3",
                    "drafter_reads_no_draft_of_another",
                    what,
                    subjects=Subjects((name,), (block,)),
                )
                return

    @property
    def _drafter_size(self) -> int:
        assert self._of_drafter is not None, "a config without a drafter has no slots of one"
        return self.block_sizes[self._of_drafter]

    def _check_hit_of_head(self, row: FrameRow) -> None:
        """Check that the token after a hit was computed after the same sequence."""
        view = row.view
        if not row.first or view.request.resumable:
            return  # a session continues after a replaced token
        if row.first < len(view.chain) and view.chain[row.first] not in self._followed:
            what = (
                f"{view.request.request_id!r} has a hit of {row.first} tokens, and the token "
                "behind it was never computed there: the last slot is made for another one"
            )
            self._complain(
                "P5",
                "draft_head_has_run_the_token_behind_a_hit",
                what,
                subjects=view.request.request_id,
            )

    def propose_in_slots(self, row: FrameRow) -> None:
        """Run the drafts of a row that has sampled, one after the other, where there are slots."""
        at = self._of_drafter
        if at is None:
            return
        view, size = row.view, self._drafter_size
        if self._has_head:
            view.name_positions(len(view.tokens), ())
            self._followed.add(view.chain[-1])
        first, table = view.num_computed, view.tables[at]
        # A head begins with the last verified position, a model with the token after it.
        count = self.config.num_speculative_tokens - int(self.config.drops_last_hit_block)
        end = min(first + count, len(table) * size, self.config.max_model_len)
        for position in range(first, end):
            block = table[position // size]
            if block != v.NULL_BLOCK:
                mine = view.request.request_id, self.frame_id
                self._drafts.setdefault(block, {})[position % size] = mine

    def _check_lookahead(self, row: FrameRow) -> None:
        """Check that a running request that samples has a slot for each draft."""
        at = self._of_drafter
        if at is None or not row.samples:
            return
        num_slots = len(row.view.tables[at]) * self._drafter_size
        due = min(row.end + self.config.num_lookahead_tokens, self.config.max_model_len)
        if due > num_slots:
            what = f"{row.view.request.request_id!r}: drafts up to {due}, {num_slots} slots"
            self._complain(
                "P26",
                "table_holds_the_slots_of_its_drafts",
                what,
                subjects=row.view.request.request_id,
            )
