"""Encodings: the encoder outputs that the rows of a step need (P9, P22).

Machine code stops at a row with a due item, and Python chooses what the row gets:

    items                  [ a ]     [ b ]
    tokens   | computed | . . . . . | . . .        a is due in a row that reaches it
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.impl.array_plans import ArrayPlan
from blockstep.impl.encoder import EncoderCache, Encoding
from blockstep.impl.host import state as c
from blockstep.impl.host.requests import Requests
from blockstep.impl.host.state import State
from blockstep.spec import vocabulary as v


class EncoderInputs:
    """Chooses the encoder outputs of rows, and holds them once the rows have their blocks."""

    def __init__(self, config: v.Config, requests: Requests) -> None:
        self.config = config
        self.requests = requests
        self.cache = EncoderCache(config)
        self._budget = 0
        """Embeddings that may still be encoded in this step."""
        self._encodings: dict[int, Encoding] = {}
        """Choices by slot, in order of scheduling."""
        self._num_undone = 0
        """Preempted requests of this step whose encodings are undone."""

    def begin_step(self) -> None:
        """Begin a step."""
        self._budget, self._num_undone = self.config.encoder_compute_budget, 0
        self._encodings.clear()

    def add_to(self, plan: ArrayPlan) -> None:
        """Add to a plan the encoder inputs to compute, load and drop; release what is behind."""
        if self.cache.freed or self.cache.sizes_freed:
            plan.free_encoder_mm_hashes = self.cache.announce()
        if not self._encodings:
            return
        requests = self.requests.requests
        for slot in self._encodings:
            computed = int(self.requests.state.requests[slot, c.NUM_COMPUTED])
            self.cache.release(requests[slot], computed)
            following = self.requests.find_item(requests[slot], computed)
            self.requests.state.requests[slot, c.NEXT_ITEM] = following
        chosen = [(requests[slot].request_id, of_row) for slot, of_row in self._encodings.items()]
        inputs = [v.EncoderInputs(name, tuple(it.inputs)) for name, it in chosen if it.inputs]
        loaded = [v.EncoderInputs(name, tuple(it.external)) for name, it in chosen if it.external]
        plan.scheduled_encoder_inputs, plan.external_encoder_inputs = tuple(inputs), tuple(loaded)

    def drop_running(self) -> None:
        """Release all items of running requests, before all are preempted."""
        s = self.requests.state
        for slot in s.lines[: s.scalars[c.NUM_RUNNING], c.RUNNING][::-1].tolist():
            self.cache.drop(self.requests.requests[slot])

    def take(self, event: v.EncoderReset | v.EncoderOffer) -> None:
        """Take a message about the cache."""
        if isinstance(event, v.EncoderReset):
            self.cache.reset()
        else:
            self.cache.offered = frozenset(event.identifiers)

    def find_other_size(self, request: v.Request, chunks: Sequence[v.Request]) -> v.Rejected | None:
        """Return why an item is rejected, or None: its identifier is in use with another size.

        `chunks`: further inputs of sessions.
        """
        for item in request.items:
            known = self._find_size(item.identifier, chunks)
            if known not in (None, item.num_embeds):
                return v.refuse_other_size(request, item, known)
        return None

    def _find_size(self, identifier: str, chunks: Sequence[v.Request]) -> int | None:
        unfinished = [self.requests.requests[slot] for slot in self.requests.slot_of.values()]
        for request in (*unfinished, *chunks):
            for item in request.items:
                if item.identifier == identifier:
                    return item.num_embeds
        kept = self.cache.entries.get(identifier)
        return None if kept is None else kept.num_embeds

    def choose(self, slot: int, computed: int, tokens: int) -> Encoding:
        """Return what a row of up to `tokens` tokens needs; this changes nothing."""
        return self.cache.choose(self.requests.requests[slot], computed, tokens, self._budget)

    def give_way(self, slot: int) -> None:
        """Release the items of a running request whose next item does not fit."""
        self.cache.drop(self.requests.requests[slot])

    def hold(self, slot: int, chosen: Encoding) -> None:
        """Hold what a new row needs."""
        self.cache.hold(self.requests.requests[slot], chosen)
        self._budget -= chosen.num_embeds
        self._encodings[slot] = chosen

    def undo_preempted(self, s: State) -> None:
        """Undo the encodings of requests that were preempted since the last call (P4, P22)."""
        num_preempted = int(s.scalars[c.NUM_PREEMPTED])
        for slot in s.scratch[self._num_undone : num_preempted].tolist() if num_preempted else ():
            self._budget += self.cache.undo(slot, self._encodings, self.requests.requests)
        self._num_undone = num_preempted
