"""Counting: a worker for plans that name no blocks. It knows every token and no slot.

It checks that rows are of requests that it knows and resume as they should, that each runs its next
tokens, and that drafts are those that were proposed. It samples by its own decision, like any
worker (D6).
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.conformance.judge.worker.request_view import FrameRow, RequestView
from blockstep.conformance.judge.worker.sampling import NextToken
from blockstep.conformance.judge.worker.worker import Tables, Worker
from blockstep.spec import vocabulary as v


class CountingWorker(Worker):
    """A model worker without memory, for one run."""

    keeps_requests = False

    def __init__(self, config: v.Config, next_token: NextToken) -> None:
        super().__init__(config, next_token)
        self.kv = []  # no slot is ever written or read
        self._of_drafter = None

    def _start_new(self, row: v.NewRow) -> FrameRow:
        """Begin a request; its id may be used again without a plan that names the end of the last
        one."""
        self.views.pop(row.request_id, None)
        return super()._start_new(row)

    def _blocks(self, request_id: v.RequestId, tables: v.BlockTables) -> Tables:
        """Return empty tables; complain if a plan names blocks although the engine's factory says
        that none does."""
        if tables:
            what = (
                f"{request_id!r} gets blocks {tables}, and the factory says that plans show none: "
                "give (), or set shows_blocks"
            )
            self._complain("P26", "plan_shows_no_blocks", what, subjects=request_id)
        return [[] for _ in self.groups]

    def _count_slots(self, view: RequestView) -> int:
        """Return more slots than a row can run, since the pool is not shown."""
        return len(view.tokens) + self.config.max_model_len

    def _take_tokens(self, row: v.CachedRow, view: RequestView) -> None:
        """Compare the tokens of a row where a plan sends them; the worker knows them all."""
        if row.all_token_ids is not None:
            super()._take_tokens(row, view)

    def _count_outputs(self, row: v.CachedRow, view: RequestView) -> None:
        """Check nothing: the number follows from the rows before."""

    def _check_common(self, nums_common: tuple[int, ...], rows: Sequence[FrameRow]) -> None:
        """Check nothing: there are no blocks."""

    def load(self, plan: v.Plan, rows: Sequence[FrameRow]) -> None:
        """Load nothing: there are no slots."""

    def _write(self, rows: list[FrameRow]) -> None:
        """Write nothing."""

    def keep_states(self, row: FrameRow) -> None:
        """Keep no state."""

    def _read(self, row: FrameRow) -> None:
        """Read nothing."""
