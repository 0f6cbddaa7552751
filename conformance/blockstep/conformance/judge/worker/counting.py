"""Counting: a worker for plans that name no blocks. It knows every token, and no slot.

What it asks of a plan: that rows are of requests that it knows and return as they should, that each
runs its next tokens, and that drafts are those that were proposed. It samples by its own decision,
like any other (D6).
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.conformance.judge.worker.sampling import NextToken
from blockstep.conformance.judge.worker.view import FrameRow, RequestView
from blockstep.conformance.judge.worker.worker import Tables, Worker
from blockstep.conformance.protocol.findings import of_request
from blockstep.spec import vocabulary as v


class CountingWorker(Worker):
    """A model worker without memory. One object is one run."""

    keeps_requests = False

    def __init__(self, config: v.Config, next_token: NextToken) -> None:
        super().__init__(config, next_token)
        self.kv = []  # no slot is ever written or read
        self._of_drafter = None

    def _start_new(self, row: v.NewRow) -> FrameRow:
        """An id may come again: who has ended need not be told."""
        self.views.pop(row.request_id, None)
        return super()._start_new(row)

    def _blocks(self, request_id: v.RequestId, tables: v.BlockTables) -> Tables:
        """None; a plan that names some was said to name none."""
        if tables:
            what = (
                f"{request_id!r} gets blocks {tables}, and the factory says that plans show none: "
                "give (), or set shows_blocks"
            )
            self._complain("P26", "plan_shows_no_blocks", what, subjects=of_request(request_id))
        return [[] for _ in self.groups]

    def _count_slots(self, view: RequestView) -> int:
        """More than a row can run: the pool is not shown."""
        return len(view.tokens) + self.config.max_model_len

    def _take_tokens(self, row: v.CachedRow, view: RequestView) -> None:
        """Tokens are compared where they are sent; it knows them all."""
        if row.all_token_ids is not None:
            super()._take_tokens(row, view)

    def _count_outputs(self, row: v.CachedRow, view: RequestView) -> None:
        """Not asked: it follows from the rows before."""

    def _check_common(self, nums_common: tuple[int, ...], rows: Sequence[FrameRow]) -> None:
        """Of blocks it knows nothing."""

    def load(self, plan: v.Plan, rows: Sequence[FrameRow]) -> None:
        """What is loaded has no place."""

    def _write(self, rows: list[FrameRow]) -> None:
        """Nothing is written ..."""

    def keep_states(self, row: FrameRow) -> None:
        """No state is kept ..."""

    def _read(self, row: FrameRow) -> None:
        """... and nothing read."""
