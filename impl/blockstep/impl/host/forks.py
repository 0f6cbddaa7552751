"""Forks: a request continues as several branches, which share their common blocks."""

from __future__ import annotations

from dataclasses import replace

from blockstep.impl.grammars import make_matcher
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.results import Results
from blockstep.impl.refusals import bad_fork, fork_problem
from blockstep.spec.vocabulary import Ack, Fork, Rejected, Request, RequestId, Status, TokenIds


class Forks(Results):
    """Makes branches: requests with outputs, and with blocks before their first row."""

    def _fork(self, event: Fork) -> Ack | Rejected:
        """Add a branch at the front of the queue (seed 002, "Fork: Creating New Beams")."""
        problem = self._fork_problem(event)
        if problem is not None:
            return problem
        table, parent = self.table, self.table.slot_of[event.request_id]
        request = replace(table.requests[parent], request_id=event.child_id)
        matcher = make_matcher(self.config, request)
        if matcher is not None:
            position = matcher.follow(event.output_token_ids)
            if position is None:
                return bad_fork(event, "its grammar forbids one of its outputs")
            matcher.position = position
        child = self._add_branch(request, event.output_token_ids)
        if child is None:
            return bad_fork(event, "one of its outputs ends it")
        if matcher is not None:
            self.matchers[request.request_id] = matcher
        table.grammar_ready[child] = table.grammar_ready[parent]
        table.num_cached_tokens[child] = table.num_cached_tokens[parent]
        self._share(parent, child)
        self.waiting.prepend((child,))
        return Ack()

    def _fork_problem(self, event: Fork) -> Rejected | None:
        """Return why the request cannot be forked, whatever the outputs are, or None."""
        slot = self.table.slot_of.get(event.request_id)
        may_fork = slot is not None and (
            self.table.statuses[slot] in (Status.RUNNING, Status.PREEMPTED)
            and not self.table.requests[slot].resumable
        )
        return fork_problem(
            self.config,
            event,
            is_unfinished=slot is not None,
            is_child_unfinished=event.child_id in self.table.slot_of,
            is_child_in_flight=self.is_in_flight(event.child_id),
            may_fork=may_fork,
            is_in_flight=self._has_row(event.request_id),
        )

    def _has_row(self, request_id: RequestId) -> bool:
        """Return whether a frame in flight has a row of the request."""
        return any(request_id in frame for frame in self.frames.values())

    def _add_branch(self, request: Request, outputs: TokenIds) -> int | None:
        """Return the slot of a new branch with its outputs; None if one of them finishes it."""
        lineage = Lineage(request, self.block_size, self.digest)
        max_known = min(len(request.prompt_token_ids) + request.max_tokens, self.max_model_len)
        slot = self.table.add(request, lineage, Status.WAITING, max_known)
        _, (reason, _) = self._accept(slot, outputs)
        if reason is None:
            return slot
        self.table.remove(slot)
        return None

    def _share(self, parent: int, child: int) -> None:
        """Let the branch hold the blocks of the common tokens that the parent has computed.

        First the parent's full blocks are published, so that each shared full block has its key,
        and is not published again by the branch.
        """
        assert self.groups is not None, "with forks there are groups, which count copies"
        table, (own, other) = self.table, (self.table.lineages[child], self.table.lineages[parent])
        common = own.adopt_names(other)
        computed, holdings = table.num_computed[parent], table.holdings[parent]
        self._publish(parent, computed, 0)
        most = min(computed, common, table.num_known[child] - 1)
        table.num_computed[child] = self.groups.find_branch_point(holdings, most)
        self.groups.branch(holdings, table.holdings[child], table.num_computed[child])
        if self.config.enable_prefix_caching:
            own.name_blocks()  # now, as for a submitted request
