"""Steps: one plan, part by part where machine code stops at a request and Python continues.

An item of the request is due, or it lacks blocks that only turns that have ended hold:

    running   a b | c ..      machine code has scheduled a and b, and stops at c
"""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.impl.host import planning as p
from blockstep.impl.host import state as c
from blockstep.impl.host.agent_turns import AgentTurns
from blockstep.impl.host.encoder_inputs import EncoderInputs
from blockstep.impl.host.kv_transfers import Transfers
from blockstep.impl.host.queues import pass_over
from blockstep.impl.host.state import State


@dataclass(eq=False)
class Steps:
    """Makes plans with the managers of the resources that machine code does not know."""

    encodings: EncoderInputs | None
    turns: AgentTurns | None
    transfers: Transfers | None

    def plan_step(
        self, s: State, part: int, at: int, given: int, frame_id: int, previous_id: int,
        oldest_id: int, budget: int, admits: bool,
    ) -> p.PlanArrays:  # fmt: skip
        """Plan one step, as the function of machine code with this name does.

        Where that stops, Python serves the request, and machine code continues behind it.
        """
        if self.encodings is not None:
            self.encodings.begin_step()
        if self.turns is not None:
            self.turns.begin_step()
        more = frame_id, previous_id, oldest_id, budget, admits
        result = p.plan_step(s, part, at, given, *more)
        self._undo_preempted(s)
        while s.scalars[c.STOPPED] != c.GOES_ON:
            part, at = p.WAITING, result[6]
            if s.scalars[c.STOP_POSITION] != c.NONE:
                part, at = p.ROWS, self._run_stopped(s, int(s.scalars[c.STOP_POSITION]))
            elif not self._admit_stopped(s, int(s.scalars[c.STOP_SLOT]), oldest_id):
                part, s.scalars[c.STOPPED] = p.ISSUE, c.GOES_ON
            result = p.plan_step(s, part, at, c.NONE, *more)
            self._undo_preempted(s)
        return result

    def _undo_preempted(self, s: State) -> None:
        if self.encodings is not None:
            self.encodings.undo_preempted(s)

    def _run_stopped(self, s: State, position: int) -> int:
        """Schedule the running request at which machine code has stopped; return the next position,
        NONE if the phase ends."""
        slot, tokens = int(s.lines[position, c.RUNNING]), int(s.scalars[c.STOP_TOKENS])
        chosen = None
        if self.encodings is not None and s.scalars[c.STOPPED] == c.IS_DUE:
            chosen = self.encodings.choose(slot, int(s.requests[slot, c.NUM_COMPUTED]), tokens)
            if chosen.num_tokens == 0:  # else two requests could wait for each other for ever (P10)
                self.encodings.give_way(slot)
            tokens = chosen.num_tokens
        elif self.turns is not None:
            self.turns.give(slot)
        num_rows = s.scalars[c.NUM_ROWS]
        position = _run_one(s, position, tokens)
        while self.turns is not None and s.scalars[c.STOPPED] == c.IS_SHORT:
            self.turns.give(slot)
            position = _run_one(s, int(s.scalars[c.STOP_POSITION]), tokens)
        self._undo_preempted(s)
        if self.encodings is not None and chosen is not None and s.scalars[c.NUM_ROWS] > num_rows:
            self.encodings.hold(slot, chosen)
        return position

    def _admit_stopped(self, s: State, slot: int, oldest_id: int) -> bool:
        """Admit the head of a queue at which machine code has stopped; False ends the phase."""
        if s.scalars[c.STOPPED] == c.IS_SHORT and self.turns is not None:
            self.turns.give(slot)
        code = p.REFUSED if s.scalars[c.STOPPED] == c.IS_REFUSED else self._try_admit(s, slot)
        while code == p.REFUSED:
            s.scalars[c.STOPPED] = c.GOES_ON
            if not p.may_try_again(s, slot):
                if s.scalars[c.STOPPED] != c.IS_SHORT or self.turns is None:
                    self._admit_loaded(s, slot, oldest_id)
                    return False
                self.turns.give(slot)
            code = self._try_admit(s, slot)
        if code == p.PARKED:
            pass_over(s, slot)
        return True

    def _admit_loaded(self, s: State, head: int, oldest_id: int) -> None:
        """Admit requests whose load has finished, although the head of the queue does not fit
        (P10).

        Their blocks are loaded, so they can run, and each frees its blocks at its end. One that
        does not fit either stays where it is.
        """
        for slot in () if self.transfers is None else self.transfers.list_received():
            if s.scalars[c.BUDGET] <= 0 or s.scalars[c.NUM_RUNNING] >= s.scalars[c.MAX_NUM_SEQS]:
                return
            if slot != head and not p.is_passed_over(s, slot, oldest_id):
                self._try_admit(s, slot)

    def _try_admit(self, s: State, slot: int) -> int:
        """Admit a request, or change nothing; if its load has brought no block, it looks for hits
        again, without the blocks that it has."""
        status, computed = s.requests[slot, [c.STATUS, c.NUM_COMPUTED]].tolist()
        if self.transfers is None or status != c.HAS_LOADED or computed:
            return self._try_with_items(s, slot)
        kept = self.transfers.begin_anew(slot)
        code = self._try_with_items(s, slot)
        if code == p.REFUSED:
            self.transfers.restore(slot, kept)
        return code

    def _try_with_items(self, s: State, slot: int) -> int:
        code = p.try_admit(s, slot, c.NONE)
        if code == p.DUE and self.encodings is not None:
            start, tokens = s.scalars[[c.STOP_START, c.STOP_TOKENS]].tolist()
            chosen = self.encodings.choose(slot, start, tokens)
            code = p.try_admit(s, slot, chosen.num_tokens)
            if code == p.ADMITTED:
                self.encodings.hold(slot, chosen)
        return int(code)


def _run_one(s: State, position: int, tokens: int) -> int:
    """Schedule the running request at a position; return the next position."""
    return p.plan_step(s, p.ONE, position, tokens, c.NONE, c.NONE, c.NONE, 0, False)[6]
