"""Encodings: the encoder outputs that the rows of a step need (P9, P22).

Machine code stops at a row with a due item, and Python chooses what the row gets:

    items                  [ a ]     [ b ]
    tokens   | computed | . . . . . | . . .        a is due in a row that reaches it
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.impl.arrays import ArrayPlan
from blockstep.impl.compiled.planning import (
    PlanArrays,
    admit_due,
    admit_rows,
    count_due,
    end_running,
    issue,
    plan_step,
    run_due,
    run_rows,
)
from blockstep.impl.compiled.requests import Requests
from blockstep.impl.compiled.state import (
    BUDGET,
    DUE_POSITION,
    DUE_SLOT,
    DUE_START,
    DUE_TOKENS,
    MAX_NUM_SEQS,
    NEXT_ITEM,
    NONE,
    NUM_COMPUTED,
    NUM_PREEMPTED,
    NUM_ROWS,
    NUM_RUNNING,
    RUNNING,
    State,
)
from blockstep.impl.encoder import EncoderCache, Encoding
from blockstep.spec.vocabulary import (
    Config,
    EncoderInputs,
    EncoderOffer,
    EncoderReset,
    Rejected,
    Request,
    refuse_other_size,
)


class Encodings:
    """Chooses the encoder outputs of rows, and holds them once the rows have their blocks."""

    def __init__(self, config: Config, requests: Requests) -> None:
        self.config = config
        self.requests = requests
        self.cache = EncoderCache(config)
        self._budget = 0
        """Embeddings that may still be encoded in this step."""
        self._encodings: dict[int, Encoding] = {}
        """Choices by slot, in order of scheduling."""
        self._num_undone = 0
        """Preempted requests of this step whose encodings are undone."""

    def plan_step(
        self, s: State, frame_id: int, previous_id: int, oldest_id: int, budget: int, admits: bool
    ) -> PlanArrays:
        """Plan one step, as the function of machine code with this name does.

        Where that stops at a due item, the parts of the step are called one by one.
        """
        self._budget, self._num_undone = self.config.encoder_compute_budget, 0
        self._encodings.clear()
        result = plan_step(s, frame_id, previous_id, oldest_id, budget, admits)
        position, slot = s.scalars[[DUE_POSITION, DUE_SLOT]].tolist()
        self._undo_preempted(s)
        if position == NONE and slot == NONE:
            return result
        num_running = result[6]
        if position != NONE:
            while position != NONE:
                position = self._run_due(s, position)
                if position != NONE:
                    position = run_rows(s, position)
                    self._undo_preempted(s)
            num_running = end_running(s)
            if admits and not s.scalars[NUM_PREEMPTED]:
                slot = admit_rows(s, oldest_id)
        while slot != NONE:
            slot = admit_rows(s, oldest_id) if self._admit_due(s, slot) else NONE
        return issue(s, frame_id, previous_id, num_running)

    def tell(self, plan: ArrayPlan) -> None:
        """Add to a plan the encoder inputs to compute, load and drop; release what is behind."""
        if self.cache.freed or self.cache.sizes_freed:
            plan.free_encoder_mm_hashes = self.cache.announce()
        if not self._encodings:
            return
        requests = self.requests.requests
        for slot in self._encodings:
            computed = int(self.requests.state.requests[slot, NUM_COMPUTED])
            self.cache.release(requests[slot], computed)
            following = self.requests.find_item(requests[slot], computed)
            self.requests.state.requests[slot, NEXT_ITEM] = following
        chosen = [(requests[slot].request_id, of_row) for slot, of_row in self._encodings.items()]
        plan.scheduled_encoder_inputs = tuple(
            [EncoderInputs(name, tuple(it.inputs)) for name, it in chosen if it.inputs]
        )
        plan.external_encoder_inputs = tuple(
            [EncoderInputs(name, tuple(it.external)) for name, it in chosen if it.external]
        )

    def drop_running(self) -> None:
        """Release all items of running requests, before all are preempted."""
        s = self.requests.state
        for slot in s.lines[: s.scalars[NUM_RUNNING], RUNNING][::-1].tolist():
            self.cache.drop(self.requests.requests[slot])

    def take(self, event: EncoderReset | EncoderOffer) -> None:
        """Take a message about the cache."""
        if isinstance(event, EncoderReset):
            self.cache.reset()
        else:
            self.cache.offered = frozenset(event.identifiers)

    def find_other_size(self, request: Request, chunks: Sequence[Request]) -> Rejected | None:
        """Return why an item is rejected, or None: its identifier is in use with another size.

        `chunks`: further inputs of sessions.
        """
        for item in request.items:
            known = self._find_size(item.identifier, chunks)
            if known not in (None, item.num_embeds):
                return refuse_other_size(request, item, known)
        return None

    def _find_size(self, identifier: str, chunks: Sequence[Request]) -> int | None:
        unfinished = [self.requests.requests[slot] for slot in self.requests.slot_of.values()]
        for request in (*unfinished, *chunks):
            for item in request.items:
                if item.identifier == identifier:
                    return item.num_embeds
        kept = self.cache.entries.get(identifier)
        return None if kept is None else kept.num_embeds

    def _choose(self, slot: int, computed: int, tokens: int) -> Encoding:
        return self.cache.choose(self.requests.requests[slot], computed, tokens, self._budget)

    def _hold(self, slot: int, chosen: Encoding) -> None:
        """Hold what a new row needs."""
        self.cache.hold(self.requests.requests[slot], chosen)
        self._budget -= chosen.num_embeds
        self._encodings[slot] = chosen

    def _run_due(self, s: State, position: int) -> int:
        """Schedule the running request at `position`; return the next position, NONE if the phase
        ends."""
        slot, tokens = int(s.lines[position, RUNNING]), count_due(s, position)
        chosen = self._choose(slot, int(s.requests[slot, NUM_COMPUTED]), tokens)
        if chosen.num_tokens == 0:  # else two requests could wait for each other for ever (P10)
            self.cache.drop(self.requests.requests[slot])
        num_rows = s.scalars[NUM_ROWS]
        position = run_due(s, position, chosen.num_tokens)
        self._undo_preempted(s)
        if s.scalars[NUM_ROWS] > num_rows:
            self._hold(slot, chosen)
        return position

    def _admit_due(self, s: State, slot: int) -> bool:
        """Admit the head of a queue; False ends the phase."""
        chosen = self._choose(slot, int(s.scalars[DUE_START]), int(s.scalars[DUE_TOKENS]))
        if not admit_due(s, slot, chosen.num_tokens):
            return False
        self._hold(slot, chosen)
        return bool(s.scalars[BUDGET] > 0 and s.scalars[NUM_RUNNING] < s.scalars[MAX_NUM_SEQS])

    def _undo_preempted(self, s: State) -> None:
        """Undo the encodings of requests that were preempted since the last call (P4, P22)."""
        num_preempted = int(s.scalars[NUM_PREEMPTED])
        for slot in s.scratch[self._num_undone : num_preempted].tolist():
            self._budget += self.cache.undo(slot, self._encodings, self.requests.requests)
        self._num_undone = num_preempted
