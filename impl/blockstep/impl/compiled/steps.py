"""Steps: one plan, part by part where machine code stops at a request and Python goes on.

An item of the request is due, or it lacks blocks while no other request runs and a pin may end:

    running   a b | c ..      machine code has scheduled a and b, and stops at c
"""

from __future__ import annotations

from blockstep.impl.compiled.encodings import Encodings
from blockstep.impl.compiled.planning import (
    ADMITTED,
    DUE,
    REFUSED,
    PlanArrays,
    admit_rows,
    end_running,
    issue,
    may_try_again,
    plan_step,
    run_due,
    run_rows,
    try_admit,
)
from blockstep.impl.compiled.state import (
    IS_DUE,
    IS_SHORT,
    NONE,
    NUM_COMPUTED,
    NUM_PREEMPTED,
    NUM_ROWS,
    RUNNING,
    STOP_POSITION,
    STOP_SLOT,
    STOP_START,
    STOP_TOKENS,
    STOPPED,
    State,
)
from blockstep.impl.compiled.turns import Turns


class Steps:
    """Makes plans with the managers of the resources that machine code does not know."""

    def __init__(self, encodings: Encodings | None, turns: Turns | None) -> None:
        self.encodings = encodings
        self.turns = turns

    def plan_step(
        self, s: State, frame_id: int, previous_id: int, oldest_id: int, budget: int, admits: bool
    ) -> PlanArrays:
        """Plan one step, as the function of machine code with this name does.

        Where that stops, the parts of the step are called one by one.
        """
        if self.encodings is not None:
            self.encodings.begin_step()
        if self.turns is not None:
            self.turns.begin_step()
        result = plan_step(s, frame_id, previous_id, oldest_id, budget, admits)
        self._undo_preempted(s)
        if not s.scalars[STOPPED]:
            return result
        position, slot = s.scalars[[STOP_POSITION, STOP_SLOT]].tolist()
        num_running = result[6]
        if position != NONE:
            while position != NONE:
                position = self._run_stopped(s, position)
                if position != NONE:
                    position = run_rows(s, position)
                    self._undo_preempted(s)
            num_running = end_running(s)
            if admits and not s.scalars[NUM_PREEMPTED]:
                slot = admit_rows(s, oldest_id)
        while slot != NONE:
            slot = admit_rows(s, oldest_id) if self._admit_stopped(s, slot) else NONE
        return issue(s, frame_id, previous_id, num_running)

    def _undo_preempted(self, s: State) -> None:
        if self.encodings is not None:
            self.encodings.undo_preempted(s)

    def _run_stopped(self, s: State, position: int) -> int:
        """Schedule the running request at which machine code has stopped; return the next position,
        NONE if the phase ends."""
        slot, tokens = int(s.lines[position, RUNNING]), int(s.scalars[STOP_TOKENS])
        chosen = None
        if self.encodings is not None and s.scalars[STOPPED] == IS_DUE:
            chosen = self.encodings.choose(slot, int(s.requests[slot, NUM_COMPUTED]), tokens)
            if chosen.num_tokens == 0:  # else two requests could wait for each other for ever (P10)
                self.encodings.give_way(slot)
            tokens = chosen.num_tokens
        elif self.turns is not None:
            self.turns.give(slot)
        num_rows = s.scalars[NUM_ROWS]
        position = run_due(s, position, tokens)
        while self.turns is not None and s.scalars[STOPPED] == IS_SHORT:
            self.turns.give(slot)
            position = run_due(s, int(s.scalars[STOP_POSITION]), tokens)
        self._undo_preempted(s)
        if self.encodings is not None and chosen is not None and s.scalars[NUM_ROWS] > num_rows:
            self.encodings.hold(slot, chosen)
        return position

    def _admit_stopped(self, s: State, slot: int) -> bool:
        """Admit the head of a queue at which machine code has stopped; False ends the phase."""
        if s.scalars[STOPPED] == IS_SHORT and self.turns is not None:
            self.turns.give(slot)
        while self._try_admit(s, slot) == REFUSED:
            s.scalars[STOPPED] = 0
            if not may_try_again(s, slot):
                if s.scalars[STOPPED] != IS_SHORT or self.turns is None:
                    return False
                self.turns.give(slot)
        return True

    def _try_admit(self, s: State, slot: int) -> int:
        code = try_admit(s, slot, NONE)
        if code == DUE and self.encodings is not None:
            start, tokens = s.scalars[[STOP_START, STOP_TOKENS]].tolist()
            chosen = self.encodings.choose(slot, start, tokens)
            code = try_admit(s, slot, chosen.num_tokens)
            if code == ADMITTED:
                self.encodings.hold(slot, chosen)
        return int(code)
