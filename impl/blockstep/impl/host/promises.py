"""Promises: outputs that frames in flight will sample, counted before anyone knows them.

Under asynchronous scheduling a step is planned before the tokens of the one before are known. What
its rows will sample stands as placeholders: one for the token of the model's own, one per draft.

    known: verified | placeholders: promised by frames in flight
                    computed ---^  (all but the last, which nobody has read yet)

So `computed == known + placeholders - 1` for a running request with a promise (P12). Drafts stay
with the worker, and a plan says only how many of them to verify (seed 001, "Async scheduling
skip-ahead").

Without it nothing is promised, however many frames are in flight (pipeline parallelism): once a row
samples all known tokens are computed, so that the request has no other row before the token is
known, while others, and chunks of a prompt, are planned behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockstep.impl.host.core import Core
from blockstep.impl.host.groups import GroupMemory
from blockstep.spec.vocabulary import FrameId, RequestId, Status, TokenIds


class Promises(Core):
    """Makes promises when a plan is issued, keeps them when its frame is committed."""

    def _is_past_max_tokens(self, slot: int) -> bool:
        """Whether the promise will end the request by `max_tokens`: no row for it (skip-ahead).

        One promised token is sure, the others may be drafts that are rejected. By the law above
        `known + 1 == computed + 2 - placeholders`. Several frames in flight would make several
        tokens sure, but the rule, which is upstream's, was made for one frame ahead (seed 001,
        "Async scheduling skip-ahead").
        """
        table = self.table
        sure = table.num_computed[slot] + 2 - table.num_output_placeholders[slot]
        return sure >= table.num_prompt[slot] + table.requests[slot].max_tokens

    def _awaits_tokens(self, slot: int) -> bool:
        """Whether a request at the head of a queue was preempted, and a frame in flight samples
        for it.

        It is not admitted before: the position after its known tokens would be sampled twice
        (ours, P13; upstream #48245). A frame that runs a chunk of it, and samples nothing, does not
        hold it up.
        """
        request_id = self.table.requests[slot].request_id
        return any(frame.get(request_id) is not None for frame in self.frames.values())

    def _align_chunk(
        self, groups: GroupMemory, slot: int, num_computed: int, num_scheduled: int
    ) -> int:
        """Tokens of its row if states are kept at the ends of chunks."""
        table = self.table
        return groups.align(
            num_computed, num_scheduled, table.num_prompt[slot], table.num_known[slot]
        )

    def _count_drafts_in_flight(self, slot: int) -> int:
        """Drafts that frames in flight verify, and of which a commit may reject all."""
        if not self.draft_placeholders or not self.table.num_output_placeholders[slot]:
            return 0
        request_id = self.table.requests[slot].request_id
        return sum(len(frame.get(request_id) or ()) for frame in self.frames.values())

    def _promise_outputs(
        self, frame_id: FrameId, frame: Mapping[RequestId, TokenIds | None]
    ) -> None:
        """A plan has been made: its rows that sample promise outputs."""
        slot_of = self.table.slot_of
        for request_id, drafts in frame.items():
            if drafts is not None:
                self._promise(slot_of[request_id], len(drafts))
        if self.draft_placeholders:
            self._drop_unused_placeholders(frame_id)

    def _promise(self, slot: int, num_drafts: int) -> None:
        """Its row samples a token and verifies drafts; the worker will propose new ones then."""
        self.table.num_output_placeholders[slot] += 1 + num_drafts
        self.table.spec_token_ids[slot] = self.draft_placeholders

    def _drop_unused_placeholders(self, frame_id: FrameId) -> None:
        """Who runs but has no row in this plan has no drafts in the next one (ours, P24).

        A placeholder stands for what the worker proposed after the plan before, and it proposes
        nothing where it runs nothing (upstream #46899). The plan may have no rows at all.
        """
        # Drafts of a row that does not sample were given up when the row was made.
        table = self.table
        for slot in self.running:
            if table.last_frame[slot] != frame_id:
                table.spec_token_ids[slot] = ()

    def _keep_promise(self, slot: int, num_drafts: int) -> None:
        """A row that samples is committed: what it promised is known now, or rejected (P12).

        Also of a request that has been preempted since; it may be admitted again after the last.
        """
        self.table.num_output_placeholders[slot] -= 1 + num_drafts

    def _publish_verified(self, slot: int) -> None:
        """Make findable what a commit has verified: all full blocks before the last known token.

        Their KV was written when the tokens were computed, in this frame at the latest; the last
        token may not have run yet (P4). The Schedule of the step could publish none of it, as the
        tokens were not known. Also for a request that just ended, whose blocks are freed next;
        not for one that was preempted since, which has no blocks (P3).
        """
        if self.table.statuses[slot] is Status.RUNNING:
            self._publish(slot, self.table.num_known[slot] - 1, 0)
