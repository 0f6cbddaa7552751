"""Drafts: what the proposer hands in for the next step is kept where it may be used."""

from __future__ import annotations

from blockstep.impl.host.core import Core
from blockstep.spec.vocabulary import (
    Drafts,
    DraftsTaken,
    RejectCode,
    Rejected,
    RequestId,
    SpecMethod,
    Status,
)


class Proposals(Core):
    """Takes Drafts: each is attached to a request that it can continue, or dropped."""

    def _take_proposals(self, event: Drafts) -> DraftsTaken | Rejected:
        problem = self._drafts_problem(event)
        if problem is not None:
            return problem
        taken: list[RequestId] = []
        for row in event.drafts:
            slot = self.table.slot_of.get(row.request_id)
            if slot is not None and self._may_draft(slot):
                self.table.spec_token_ids[slot] = row.token_ids
                taken.append(row.request_id)
        return DraftsTaken(tuple(taken))

    def _drafts_problem(self, event: Drafts) -> Rejected | None:
        if self.async_scheduling:
            detail = "under asynchronous scheduling the worker keeps its drafts"
            return _bad_drafts(f"{detail}; send none, or set max_frames_in_flight = 1")
        if self.config.spec_method is SpecMethod.NONE:
            return _bad_drafts("spec_method is none, so nobody drafts; configure a spec_method")
        most = self.config.num_speculative_tokens
        for row in event.drafts:
            if len(row.token_ids) > most:
                rule = f"has {len(row.token_ids)} tokens, more than num_speculative_tokens = {most}"
                return _bad_drafts(f"{row.request_id!r} {rule}; send at most {most}")
        if len({row.request_id for row in event.drafts}) != len(event.drafts):
            return _bad_drafts("a request is named twice; send one row for each")
        return None

    def _may_draft(self, slot: int) -> bool:
        """Whether drafts would continue its known tokens: all but the last are computed (P24).

        So it has an output, and no frame in flight has a row of it: the row would have left
        either a prefill chunk or no known token uncomputed.
        """
        table = self.table
        return (
            table.statuses[slot] is Status.RUNNING
            and not table.is_prefill_chunk[slot]
            and table.num_computed[slot] == table.num_known[slot] - 1
        )


def _bad_drafts(detail: str) -> Rejected:
    return Rejected(RejectCode.BAD_DRAFTS, f"drafts: {detail}")
