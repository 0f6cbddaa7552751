"""Promises: placeholders for the outputs that frames in flight will sample.

Under asynchronous scheduling a step is planned before the previous step's tokens are known. The
outputs of its rows are counted as placeholders: one for the sampled token, one per draft.

    known: verified | placeholders of frames in flight
                    computed ---^  (all but the last, which no row has computed yet)

So `computed == known + placeholders - 1` for a running request with placeholders (P12). Drafts stay
with the worker; a plan only gives the number of drafts to verify (seed 001, "Async scheduling
skip-ahead").

Without asynchronous scheduling there are no placeholders, however many frames are in flight
(pipeline parallelism): a row that samples has computed all known tokens, so the request has no
other row until its token is known, while rows of other requests, and later chunks of a prompt, are
planned.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockstep.impl.host.core import Core
from blockstep.impl.host.groups import GroupMemory
from blockstep.spec.vocabulary import FrameId, RequestId, Status, TokenIds


class Promises(Core):
    """Adds placeholders when a plan is issued, and removes them when its frame is committed."""

    def _is_past_max_tokens(self, slot: int) -> bool:
        """Return whether the placeholders reach `max_tokens`: then it needs no row (skip-ahead).

        One token is certain; the other placeholders may be rejected drafts. By the equation above
        `known + 1 == computed + 2 - placeholders`. With several frames in flight several tokens
        would be certain, but upstream's rule was made for one frame ahead (seed 001, "Async
        scheduling skip-ahead").
        """
        table = self.table
        sure = table.num_computed[slot] + 2 - table.num_output_placeholders[slot]
        return sure >= table.num_prompt[slot] + table.requests[slot].max_tokens

    def _awaits_tokens(self, slot: int) -> bool:
        """Return whether a waiting request was preempted, and a frame in flight samples for it.

        It is not admitted before that commit: else the position after its known tokens would be
        sampled twice (ours, P13; upstream #48245). A frame with a chunk of it that does not sample
        does not delay it.
        """
        request_id = self.table.requests[slot].request_id
        return any(frame.get(request_id) is not None for frame in self.frames.values())

    def _align_chunk(
        self, groups: GroupMemory, slot: int, num_computed: int, num_scheduled: int
    ) -> int:
        """Return the tokens of its row, aligned if states are kept at the ends of chunks."""
        table = self.table
        return groups.align(
            num_computed, num_scheduled, table.num_prompt[slot], table.num_known[slot]
        )

    def _count_drafts_in_flight(self, slot: int) -> int:
        """Return the number of its drafts in flight, of which commits may reject all."""
        if not self.draft_placeholders or not self.table.num_output_placeholders[slot]:
            return 0
        request_id = self.table.requests[slot].request_id
        return sum(len(frame.get(request_id) or ()) for frame in self.frames.values())

    def _promise_outputs(
        self, frame_id: FrameId, frame: Mapping[RequestId, TokenIds | None]
    ) -> None:
        """Add placeholders for the rows of a new plan that sample."""
        slot_of = self.table.slot_of
        for request_id, drafts in frame.items():
            if drafts is not None:
                self._promise(slot_of[request_id], len(drafts))
        if self.draft_placeholders:
            self._drop_unused_placeholders(frame_id)

    def _promise(self, slot: int, num_drafts: int) -> None:
        """Add placeholders for a token and the drafts of a row; the next row has draft
        placeholders."""
        self.table.num_output_placeholders[slot] += 1 + num_drafts
        self.table.spec_token_ids[slot] = self.draft_placeholders

    def _drop_unused_placeholders(self, frame_id: FrameId) -> None:
        """Drop the draft placeholders of running requests without a row in this plan (ours, P24).

        A placeholder is for a draft that the worker proposes after a row, and without a row it
        proposes none (upstream #46899). The plan may have no rows at all.
        """
        # The drafts of a row that does not sample were dropped when the row was made.
        table = self.table
        for slot in self.running:
            if table.last_frame[slot] != frame_id:
                table.spec_token_ids[slot] = ()

    def _keep_promise(self, slot: int, num_drafts: int) -> None:
        """Remove the placeholders of a row that is committed: its tokens are known or rejected
        (P12).

        This holds for a preempted request, too; it may be admitted again after its last such row.
        """
        self.table.num_output_placeholders[slot] -= 1 + num_drafts

    def _publish_verified(self, slot: int) -> None:
        """Publish the blocks that a commit has verified: all full blocks before the last known
        token.

        Their KV was written when the tokens were computed, in this frame at the latest; the last
        token may not be computed yet (P4). The Schedule of the step could not publish them, as the
        tokens were not known. A request that finishes now publishes, too, before its blocks are
        freed; one that was preempted since has no blocks (P3).
        """
        if self.table.statuses[slot] is Status.RUNNING:
            self._publish(slot, self.table.num_known[slot] - 1, 0)
