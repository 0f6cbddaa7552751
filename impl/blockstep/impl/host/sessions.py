"""Sessions: requests that a stop does not finish. They become idle, and continue with more input.

| prompt | outputs of a chunk | x        x: the last output; its KV is not computed
| prompt of the next chunk       | ...
"""

from __future__ import annotations

from blockstep.impl.chunks import append_chunk, chunk_problem
from blockstep.impl.grammars import make_matcher
from blockstep.impl.host.core import Core
from blockstep.impl.host.table import Session
from blockstep.impl.refusals import (
    count_beside,
    most_blocks,
    most_slots,
    submit_problem,
    update_problem,
)
from blockstep.spec.vocabulary import (
    Aborted,
    Ack,
    Policy,
    Rejected,
    Request,
    Status,
    refuse_other_size,
)


class Sessions(Core):
    """Makes a session idle at its stop, or continues it after its computed tokens (P3, P13)."""

    def _most_blocks(self, request: Request) -> int:
        """Return the most blocks that the request holds at once (P11)."""
        if self.groups is not None:
            across = self.groups.count_across(count_beside(request))
            return self.groups.count_most(most_slots(self.config, request)) + across
        return most_blocks(self.config, request)

    def _update(self, update: Request) -> Ack | Aborted | Rejected:
        """Take the next input of a session, or its end."""
        slot = self.table.slot_of.get(update.request_id)
        session = self.sessions.get(update.request_id)
        if slot is None or session is None or session.is_closed:
            return update_problem(update.request_id, slot is not None)
        problem = None
        if update.resumable:
            problem = chunk_problem(self.table.requests[slot], update)
            problem = problem or self._limit_problem(slot, session, update)
        if problem is not None:
            return problem
        if self.table.statuses[slot] is not Status.WAITING_FOR_STREAMING_REQ:
            session.updates.append(update)
            return Ack()
        if not update.resumable:
            self._finish(slot)
            return Aborted((update.request_id,))
        self._go_on_in_line(slot, update)
        return Ack()

    def _limit_problem(self, slot: int, session: Session, update: Request) -> Rejected | None:
        """Return why the session can never fit if each input samples as many tokens as it may
        (P11)."""
        whole = self.table.requests[slot]
        if self.table.statuses[slot] is Status.WAITING_FOR_STREAMING_REQ:
            num_kept = self.table.num_known[slot] - 1
            whole = append_chunk(whole, tuple(self.table.lineages[slot].tokens[:num_kept]), update)
        else:
            for chunk in (*session.updates, update):
                end = min(len(whole.prompt_token_ids) + whole.max_tokens, self.max_model_len) - 1
                kept = (*whole.prompt_token_ids, *[0] * (end - len(whole.prompt_token_ids)))
                whole = append_chunk(whole, kept, chunk)
        problem = submit_problem(self.config, whole, self._most_blocks(whole), False, False)
        return problem or self._other_size_problem(update)

    def _other_size_problem(self, request: Request) -> Rejected | None:
        """Return why an item is rejected: its identifier is in use with another size (P22)."""
        for item in request.items if self.encoder is not None else ():
            known = self._find_size(item.identifier)
            if known not in (None, item.num_embeds):
                return refuse_other_size(request, item, known)
        return None

    def _find_size(self, identifier: str) -> int | None:
        """Return the embeddings of a known or cached item; None if the identifier is new."""
        brought = [self.table.requests[slot] for slot in self.table.slot_of.values()]
        brought += [chunk for session in self.sessions.values() for chunk in session.updates]
        for request in brought:
            for item in request.items:
                if item.identifier == identifier:
                    return item.num_embeds
        kept = None if self.encoder is None else self.encoder.entries.get(identifier)
        return None if kept is None else kept.num_embeds

    def _rest(self, slot: int) -> bool:
        """Make a session idle at its stop, or continue it; return False if it finishes."""
        session = self.sessions.get(self.table.requests[slot].request_id)
        if session is None or (session.updates and not session.updates[0].resumable):
            return False
        self._leave_line(slot)
        self._drop_rows_behind(slot)
        table = self.table
        table.num_output_placeholders[slot] = 0
        table.spec_token_ids[slot] = ()
        if session.updates:
            self._go_on(slot, session.updates.popleft())
            self.waiting.append(slot)
        else:
            table.statuses[slot] = Status.WAITING_FOR_STREAMING_REQ
            self.skipped_waiting.append(slot)
        return True

    def _leave_line(self, slot: int) -> None:
        """Remove a stopped session from `running`, or from its queue if it was preempted since."""
        if self.table.statuses[slot] is Status.RUNNING:
            self.running.remove(slot)
            self._go_back(slot)
        elif not self.waiting.remove(slot):
            self.skipped_waiting.remove(slot)

    def _go_back(self, slot: int) -> None:
        """Uncompute all tokens from the last one on, even those that frames in flight compute."""
        num_computed = self._count_kept(slot)
        has_run_ahead = self.table.num_computed[slot] > num_computed
        self.table.num_computed[slot] = num_computed
        groups, holdings = self.groups, self.table.holdings[slot]
        if groups is not None and not groups.can_go_back(holdings, num_computed, has_run_ahead):
            self._take_back(slot)

    def _drop_rows_behind(self, slot: int) -> None:
        """Mark the rows of later frames: their tokens come after the stop and are discarded
        (P13)."""
        request_id = self.table.requests[slot].request_id
        for frame_id, frame in self.frames.items():
            drafts = frame.get(request_id)
            if drafts is not None:
                frame[request_id] = None
                self.dropped.setdefault(frame_id, {})[request_id] = drafts

    def _go_on_in_line(self, slot: int, update: Request) -> None:
        """Continue an idle session in its place; under priority, where its new arrival time puts
        it."""
        if self.config.policy is not Policy.PRIORITY:
            self._go_on(slot, update)
            return
        self.skipped_waiting.remove(slot)
        self._go_on(slot, update)
        self.skipped_waiting.append(slot)

    def _go_on(self, slot: int, update: Request) -> None:
        """Append the next input after the tokens that the session keeps: all but the last."""
        table, lineage = self.table, self.table.lineages[slot]
        num_kept = self._count_kept(slot)
        whole = append_chunk(table.requests[slot], tuple(lineage.tokens[:num_kept]), update)
        lineage.go_on(whole, num_kept)
        matcher = make_matcher(self.config, whole)
        if matcher is not None:  # grammars start again with each input
            self.matchers[whole.request_id] = matcher
        table.go_on(slot, whole, min(len(lineage.tokens) + whole.max_tokens, self.max_model_len))

    def _count_kept(self, slot: int) -> int:
        return self.table.num_known[slot] - 1
