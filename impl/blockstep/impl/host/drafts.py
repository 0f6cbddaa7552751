"""Drafts: proposed drafts are kept for requests that can verify them in the next step."""

from __future__ import annotations

from blockstep.impl.host.core import Core
from blockstep.impl.refusals import drafts_problem
from blockstep.spec.vocabulary import (
    Drafts,
    DraftsTaken,
    Rejected,
    RequestId,
    RowTokens,
    Status,
    TokenIds,
)


class Proposals(Core):
    """Takes Drafts: each row is attached to a request that it can continue, or dropped."""

    def _take_proposals(self, event: Drafts) -> DraftsTaken | Rejected:
        problem = drafts_problem(self.config, event)
        if problem is not None:
            return problem
        taken: list[RequestId] = []
        for row in event.drafts:
            slot = self.table.slot_of.get(row.request_id)
            if slot is not None and self._may_draft(slot):
                self.table.spec_token_ids[slot] = self._cut_proposal(row)
                taken.append(row.request_id)
        return DraftsTaken(tuple(taken))

    def _cut_proposal(self, row: RowTokens) -> TokenIds:
        """Return the drafts that may be verified: the leading ones that the grammar accepts."""
        matcher = self.matchers.get(row.request_id)
        return row.token_ids if matcher is None else matcher.cut(row.token_ids)

    def _may_draft(self, slot: int) -> bool:
        """Return whether drafts continue its known tokens: all known tokens but the last are
        computed (P24).

        Then it has an output, and no frame in flight has its row: such a row would leave either
        a prefill chunk or no known token uncomputed. Its own token must be known first, also with
        several frames in flight.
        """
        table = self.table
        return (
            table.statuses[slot] is Status.RUNNING
            and not table.is_prefill_chunk[slot]
            and table.num_computed[slot] == table.num_known[slot] - 1
        )
