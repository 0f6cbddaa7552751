"""Sessions: requests that rest at a stop, keep their blocks, and continue with their next input.

Machine code stops a session; this module queues it, and appends its next input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from blockstep.impl.chunks import append_chunk, chunk_problem
from blockstep.impl.host import state as c
from blockstep.impl.host.grammar_bitmask import Masks
from blockstep.impl.host.lives import get_tokens
from blockstep.impl.host.queues import append, leave_queue
from blockstep.impl.host.requests import Requests
from blockstep.impl.rejections import update_problem
from blockstep.spec import vocabulary as v


@dataclass(eq=False)
class Sessions:
    """The inputs of unfinished sessions that follow their next stops."""

    config: v.Config
    requests: Requests
    masks: Masks
    updates: dict[v.RequestId, deque[v.Request]] = field(default_factory=dict)
    """The next inputs of each unfinished session; one that is not resumable is the last."""

    def add(self, request: v.Request) -> None:
        """Take a new request."""
        if request.resumable:
            self.updates[request.request_id] = deque()

    def count_resting(self) -> int:
        """Return the number of sessions that await their next input."""
        if not self.updates:
            return 0
        slots = [self.requests.slot_of[name] for name in self.updates]
        return int((self.requests.state.requests[slots, c.STATUS] == c.IS_RESTING).sum())

    def update(
        self, update: v.Request, find_problem: Callable[[v.Request, v.Request], v.Rejected | None]
    ) -> v.Ack | v.Aborted | v.Rejected:
        """Take the next input of a session, or its end: Aborted if the caller must end it now.

        `find_problem`: returns why the whole request with this input is rejected, or None.
        """
        slot = self.requests.slot_of.get(update.request_id)
        updates = self.updates.get(update.request_id)
        if slot is None or updates is None or (updates and not updates[-1].resumable):
            return update_problem(update.request_id, slot is not None)
        row = self.requests.state.requests[slot]
        is_resting = row[c.STATUS] == c.IS_RESTING
        if update.resumable:
            problem = chunk_problem(self.requests.requests[slot], update)
            if problem is None:
                whole = self._append_all(slot, updates, update, is_resting=is_resting)
                problem = find_problem(whole, update)
            if problem is not None:
                return problem
        if not is_resting:
            updates.append(update)
            row[c.IS_SESSION] = updates[0].resumable
            return v.Ack()
        if not update.resumable:
            return v.Aborted((update.request_id,))
        if self.config.policy is v.Policy.PRIORITY:  # its new arrival time puts it elsewhere
            leave_queue(self.requests.state, slot)
        self._go_on(slot, update)
        if self.config.policy is v.Policy.PRIORITY:
            append(self.requests.state, c.SKIPPED, slot)
        return v.Ack()

    def stop(self, slot: int) -> bool:
        """Queue a session that machine code has stopped; return False if the request ends."""
        state, name = self.requests.state, self.requests.requests[slot].request_id
        if name not in self.updates or not state.requests[slot, c.IS_SESSION]:
            return False
        for cut in self.masks.verifiable.values():  # rows behind the stop are discarded
            cut.pop(name, None)
        updates = self.updates[name]
        if updates:
            self._go_on(slot, updates.popleft())
            append(self.requests.state, c.WAITING, slot)
        else:
            append(state, c.SKIPPED, slot)
        return True

    def _go_on(self, slot: int, update: v.Request) -> None:
        """Append the next input after the tokens that the session keeps: all but the last."""
        request, updates = self.requests.requests[slot], self.updates[update.request_id]
        whole = append_chunk(request, self._get_kept(slot), update)
        self.requests.go_on(slot, whole)
        self.masks.add(whole)  # grammars start again with each input
        can_rest = not updates or updates[0].resumable
        self.requests.state.requests[slot, c.IS_SESSION] = can_rest

    def _get_kept(self, slot: int) -> v.TokenIds:
        return tuple(get_tokens(self.requests.state, slot)[:-1].tolist())

    def _append_all(
        self, slot: int, updates: deque[v.Request], update: v.Request, *, is_resting: bool
    ) -> v.Request:
        """Return the session's request with an input more, if each samples as many tokens as it may
        (P11); its items are as near to each other as if each sampled only one."""
        whole = self.requests.requests[slot]
        if is_resting:
            return append_chunk(whole, self._get_kept(slot), update)
        least = len(whole.prompt_token_ids)
        for chunk in (*updates, update):
            prompt = whole.prompt_token_ids
            end = min(len(prompt) + whole.max_tokens, self.config.max_model_len) - 1
            whole = append_chunk(whole, (*prompt, *[0] * (end - len(prompt))), chunk, least)
            least += len(chunk.prompt_token_ids)
        return whole
