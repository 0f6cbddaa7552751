"""The request table: one slot per unfinished request, one column per thing known about it."""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.queues import Rank
from blockstep.spec.vocabulary import MAX_INT, Request, RequestId, Status, TokenIds

TAIL: Final = 256
"""Tokens of one request that may wait in its tail; a power of two."""
STOP_BITS: Final = (1 << 12) - 1
"""Token ids are looked up by these bits among those that may end a request."""
BY_TOKEN: Final = 1
BY_REPETITION: Final = 2
_SLOTS: Final = 8
"""Slots of an empty table."""


class Columns:
    """The numbers of a table as numpy sees them, without a copy: one array per column.

    Shapes are [slots], types those of the column; `tails` is flat, `TAIL` tokens for each slot.
    """

    def __init__(self, table: RequestTable) -> None:
        def view(column: Any, kind: type) -> NDArray[Any]:
            return np.frombuffer(column, kind)

        self.num_prompt = view(table.num_prompt, np.int32)
        self.num_known = view(table.num_known, np.int32)
        self.num_output_placeholders = view(table.num_output_placeholders, np.int32)
        self.num_computed = view(table.num_computed, np.int32)
        self.num_cached_blocks = view(table.num_cached_blocks, np.int32)
        self.num_cached_tokens = view(table.num_cached_tokens, np.int32)
        self.num_held_blocks = view(table.num_held_blocks, np.int32)
        self.max_known = view(table.max_known, np.int32)
        self.end_by_max_tokens = view(table.end_by_max_tokens, np.int32)
        self.last_frame = view(table.last_frame, np.int64)
        self.births = view(table.births, np.int64)
        self.is_watched = view(table.is_watched, np.uint8)
        self.is_prefill_chunk = view(table.is_prefill_chunk, np.bool_)
        table.reserve_tails()
        self.tails = view(table.tails, np.int32)
        self.may_stop = np.zeros(STOP_BITS + 1, np.bool_)
        """By token id, in `STOP_BITS`: whether it may end any request. Says no with certainty."""
        self.request_ids = np.full(len(self.births), None, object)
        for slot, request in enumerate(table.requests):
            self.note(slot, request)

    def note(self, slot: int, request: Request) -> None:
        """A request has got this slot."""
        self.request_ids[slot] = request.request_id
        for token in _stop_tokens_of(request):
            self.may_stop[token & STOP_BITS] = True


class RequestTable:
    """A struct of arrays, indexed by slot; slots of ended requests are used again.

    Numbers lie in array("i") / array("q") and flags in bytearrays: scalar code reads them in half
    of numpy's time, and `columns` lends the same memory to numpy. All grow together, by doubling.

        tokens    | lineage: settled            | tail: outputs that came in arrays |
                  0                             len(lineage.tokens)                 num_known
    """

    def __init__(self) -> None:
        self.slot_of: dict[RequestId, int] = {}
        self._unused: list[int] = []
        self.requests: list[Request] = []
        self.lineages: list[Lineage] = []
        self.block_tables: list[array[int]] = []
        self.spec_token_ids: list[TokenIds] = []
        self.statuses: list[Status] = []
        self.num_prompt = _ints()
        self.num_known = _ints()
        """Prompt and verified output tokens: those of the lineage, and those in the tail."""
        self.num_output_placeholders = _ints()
        """Outputs promised by frames in flight; always 0 without asynchronous scheduling."""
        self.num_computed = _ints()
        self.num_cached_blocks = _ints()
        self.num_cached_tokens = _ints()
        self.num_held_blocks = _ints()
        """The length of its block table."""
        self.num_preemptions = _ints()
        self.max_known = _ints()
        """Known tokens at which it ends for its length."""
        self.end_by_max_tokens = _ints()
        """Prompt and `max_tokens`, whatever the model length."""
        self.last_frame: array[int] = array("q", bytes(8 * _SLOTS))
        """The last plan that scheduled it; -1 before the first."""
        self.births: array[int] = array("q", bytes(8 * _SLOTS))
        """A number for each request that ever was: tells it from others in the same slot."""
        self.is_watched = bytearray(_SLOTS)
        """Whether what it outputs can end it, beside how much: `BY_TOKEN` and `BY_REPETITION`."""
        self.is_prefill_chunk = bytearray(_SLOTS)
        self.grammar_ready = bytearray(_SLOTS)
        self.tails: array[int] = array("i")
        """`TAIL` tokens for each slot; empty until tokens come in arrays."""
        self.num_born = 0
        self.num_watched = 0
        """Unfinished requests that are watched."""
        self._columns: Columns | None = None

    @property
    def columns(self) -> Columns:
        """The numbers for numpy. Valid until a request is added: never kept for longer."""
        if self._columns is None:
            self._columns = Columns(self)
        return self._columns

    def __getstate__(self) -> dict[str, Any]:
        """Without the views: a copy has memory of its own."""
        return {**vars(self), "_columns": None}

    def add(self, request: Request, lineage: Lineage, status: Status, max_known: int) -> int:
        """The slot of a new request with an id that no unfinished one has."""
        slot = self._unused.pop() if self._unused else self._use_next(request, lineage)
        self.requests[slot] = request
        self.lineages[slot] = lineage
        self.block_tables[slot] = array("i")
        self.spec_token_ids[slot] = ()
        self.statuses[slot] = status
        prompt = len(request.prompt_token_ids)
        self.num_prompt[slot] = self.num_known[slot] = prompt
        self.num_output_placeholders[slot] = self.num_computed[slot] = 0
        self.num_cached_blocks[slot] = self.num_preemptions[slot] = self.num_held_blocks[slot] = 0
        self.num_cached_tokens[slot] = self.last_frame[slot] = -1
        self.max_known[slot] = max_known
        self.end_by_max_tokens[slot] = min(prompt + request.max_tokens, MAX_INT)
        self.is_watched[slot] = self._watch(request)
        self.is_prefill_chunk[slot] = self.grammar_ready[slot] = False
        self.num_born += 1
        self.births[slot] = self.num_born
        self.slot_of[request.request_id] = slot
        if self._columns is not None:
            self._columns.note(slot, request)
        return slot

    def remove(self, slot: int) -> None:
        """Forget an ended request."""
        del self.slot_of[self.requests[slot].request_id]
        self.births[slot] = 0
        self.num_watched -= self.is_watched[slot] != 0
        self._unused.append(slot)

    def rank_of(self, slot: int) -> Rank:
        """Where it stands among those who wait, under `Policy.PRIORITY`; the lowest goes first."""
        request = self.requests[slot]
        return (request.priority, request.arrival_time, request.request_id)

    def settle(self, slot: int, num_left: int = 0) -> Lineage:
        """Its lineage, with every known token in it but the last `num_left`, which may stay."""
        lineage = self.lineages[slot]
        if self.tails:
            tokens = lineage.tokens
            start = len(tokens)
            missing = self.num_known[slot] - num_left - start
            if missing > 0:
                at = slot * TAIL + start % TAIL
                end, stop = at + missing, (slot + 1) * TAIL
                tokens.extend(self.tails[at : min(end, stop)])
                if end > stop:
                    tokens.extend(self.tails[slot * TAIL : end - TAIL])
        return lineage

    def reserve_tails(self) -> None:
        """From now on tokens may come in arrays."""
        if not self.tails:
            self.tails = _ints(len(self.num_known) * TAIL)

    def num_outputs(self, slot: int) -> int:
        """Verified output tokens."""
        return self.num_known[slot] - self.num_prompt[slot]

    def output_token_ids(self, slot: int) -> TokenIds:
        """Verified output tokens."""
        return tuple(self.settle(slot).tokens[self.num_prompt[slot] :])

    def all_token_ids(self, slot: int) -> TokenIds:
        """Prompt and verified output tokens."""
        return tuple(self.settle(slot).tokens)

    def _watch(self, request: Request) -> int:
        """How its outputs can end it."""
        watched = BY_TOKEN if _stop_tokens_of(request) else 0
        if request.repetition_detection is not None:
            watched |= BY_REPETITION
        self.num_watched += watched != 0
        return watched

    def _use_next(self, request: Request, lineage: Lineage) -> int:
        if len(self.requests) == len(self.num_prompt):
            self._grow()
        self.requests.append(request)
        self.lineages.append(lineage)
        self.block_tables.append(array("i"))
        self.spec_token_ids.append(())
        self.statuses.append(Status.WAITING)
        return len(self.requests) - 1

    def _grow(self) -> None:
        """Twice as many slots, in new memory: what numpy looks at cannot be resized."""
        for name in (
            "num_prompt", "num_known", "num_output_placeholders", "num_computed",
            "num_cached_blocks", "num_cached_tokens", "num_held_blocks", "num_preemptions",
            "max_known", "end_by_max_tokens", "last_frame", "births", "is_watched",
            "is_prefill_chunk", "grammar_ready", "tails",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) * 2)
        self._columns = None


def _ints(count: int = _SLOTS) -> array[int]:
    return array("i", bytes(4 * count))


def _stop_tokens_of(request: Request) -> TokenIds:
    if request.eos_token_id is None:
        return request.stop_token_ids
    return (*request.stop_token_ids, request.eos_token_id)
