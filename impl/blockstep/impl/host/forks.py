"""Forks: a request continues as several branches, which share their common blocks.

A shared block that is not full is copied for the branch that writes to it first; the last holder
writes in place. Machine code makes the copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blockstep.impl.array_plans import ArrayPlan
from blockstep.impl.grammars import Matcher, make_matcher
from blockstep.impl.host import state as c
from blockstep.impl.host.frames import Frame
from blockstep.impl.host.grammar_bitmask import Masks
from blockstep.impl.host.lives import branch
from blockstep.impl.host.requests import Requests
from blockstep.impl.rejections import bad_fork, fork_problem
from blockstep.spec.vocabulary import Ack, BlockCopy, Config, Fork, FrameId, Rejected, RequestId


@dataclass(eq=False)
class Forks:
    """Makes branches: requests with outputs, and with blocks before their first row."""

    config: Config
    requests: Requests
    masks: Masks
    frames: Mapping[FrameId, Frame]
    ended: Mapping[RequestId, FrameId]
    """The last frame in flight with a row of each finished request, if there is one."""

    def fork(self, event: Fork) -> Ack | Rejected:
        """Add a branch at the front of the queue (seed 002, "Fork: Creating New Beams")."""
        problem = self._find_problem(event)
        if problem is not None:
            return problem
        parent = self.requests.slot_of[event.request_id]
        matcher = make_matcher(self.config, self.requests.requests[parent])
        if matcher is not None:
            position = matcher.follow(event.output_token_ids)
            if position is None:
                return bad_fork(event, "its grammar forbids one of its outputs")
            matcher.position = position
        child = self.requests.branch(parent, event.child_id, event.output_token_ids)
        if child == c.NONE:
            return bad_fork(event, "one of its outputs ends it")
        self._begin(parent, child, matcher)
        return Ack()

    def add_to(self, plan: ArrayPlan, num_running: int) -> None:
        """Add to a plan the copies of shared blocks, and the outputs of new branches."""
        s = self.requests.state
        if not (plan.new_rows or s.scalars[c.NUM_COPIES]):
            return
        copies = [
            copy for copy in s.copies[: s.scalars[c.NUM_COPIES]].tolist() if copy[0] != c.NONE
        ]
        plan.block_copies = tuple([BlockCopy(source, own) for _, source, own in copies])
        slots = {*plan.slots[:num_running].tolist()}.intersection([copy[0] for copy in copies])
        plan.remapped_req_ids = tuple(sorted([self.requests.names[slot] for slot in slots]))
        plan.new_outputs = {
            row: self.requests.get_tokens(int(plan.slots[row]))[len(request.prompt_token_ids) :]
            for row, request in plan.new_rows.items()
        }

    def _begin(self, parent: int, child: int, matcher: Matcher | None) -> None:
        """Let a new branch share what it has in common with its parent."""
        requests, request = self.requests.state.requests, self.requests.requests[child]
        if matcher is not None:
            self.masks.matchers[request.request_id] = matcher
        own, other = self.requests.get_tokens(child), self.requests.get_tokens(parent)
        pairs = enumerate(zip(own, other, strict=False))
        common = next((at for at, (a, b) in pairs if a != b), min(len(own), len(other)))
        branch(self.requests.state, parent, child, common)
        computed = int(requests[child, c.NUM_COMPUTED])
        requests[child, c.NEXT_ITEM] = self.requests.find_item(request, computed)

    def _find_problem(self, event: Fork) -> Rejected | None:
        """Return why the request cannot be forked, whatever the outputs are, or None."""
        slot = self.requests.slot_of.get(event.request_id)
        status, last, may_fork = c.NONE, c.NONE, False
        if slot is not None:
            status, last = self.requests.state.requests[slot, [c.STATUS, c.LAST_FRAME]].tolist()
            is_session = self.requests.requests[slot].resumable
            may_fork = status in (c.IS_RUNNING, c.IS_PREEMPTED) and not is_session
        return fork_problem(
            self.config,
            event,
            is_unfinished=slot is not None,
            is_child_unfinished=event.child_id in self.requests.slot_of,
            is_child_in_flight=event.child_id in self.ended,
            may_fork=may_fork,
            is_in_flight=last in self.frames,
        )
