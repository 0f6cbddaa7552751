"""Requests: the unfinished ones by id, and arrays long enough for their data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockstep.impl.compiled.lives import end, get_tokens, store_input, store_prompt
from blockstep.impl.compiled.queues import append, prepend
from blockstep.impl.compiled.results import BY_EOS, BY_STOP_TOKEN, append_outputs
from blockstep.impl.compiled.state import (
    ADAPTER,
    ARRIVAL,
    AWAITS_GRAMMAR,
    BIRTH,
    END_BY_MAX_TOKENS,
    EOS,
    EXTRAS,
    FIRST_EXTRAS,
    FIRST_ITEM,
    GOES_ON,
    GRAMMAR_READY,
    HAS_GRAMMAR,
    HAS_STOPS,
    IS_SESSION,
    IS_WAITING,
    KEEPS_TURN,
    LABEL,
    LAST_FRAME,
    LAST_SAMPLE,
    MAX_KNOWN,
    MAY_KEEP,
    MIN_TOKENS,
    MORE_STOPS,
    NEXT_ITEM,
    NONE,
    NUM_BESIDE,
    NUM_BORN,
    NUM_CACHED_TOKENS,
    NUM_COMPUTED,
    NUM_FREE_NODES,
    NUM_KNOWN,
    NUM_MORE_STOPS,
    NUM_PROMPT,
    NUM_SESSIONS,
    PRIORITY,
    REPEATS_COUNT,
    REPEATS_MAX,
    REPEATS_MIN,
    REQUEST_COLUMNS,
    SEAT,
    SKIPPED,
    SKIPS_CACHE,
    STATUS,
    STOPS,
    STOPS_END,
    WAITING,
    Int32s,
    Int64s,
    grow_adapters,
    grow_extras,
    grow_nodes,
    grow_seats,
    grow_slots,
    make_state,
)
from blockstep.impl.names import NOTHING, ExtrasTable, Labels, list_extras
from blockstep.spec.vocabulary import BlockTables, Config, Policy, Request, RequestId, TokenIds

_NO_ITEM: Final = 1 << 40
_OF_INPUT: Final = [
    *(NUM_PROMPT, NUM_KNOWN, END_BY_MAX_TOKENS, MAX_KNOWN, MIN_TOKENS, EOS, ARRIVAL, FIRST_ITEM),
    *(HAS_STOPS, MORE_STOPS, REPEATS_MIN, REPEATS_MAX, REPEATS_COUNT, *range(STOPS, STOPS_END)),
]
"""Columns that the next input of a session sets."""


class Requests:
    """Gives each unfinished request an index (slot), and makes arrays longer when needed.

    Machine code does not check bounds: room for whatever it writes is reserved here first.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state = make_state(config)
        self.slot_of: dict[RequestId, int] = {}
        self.requests: list[Request] = []
        self.extras = ExtrasTable()
        self.names: NDArray[np.object_] = np.full(len(self.state.requests), None, object)
        """[slots]: request ids."""
        self._are_names_lent = False
        self._adapters: dict[str, int] = {}
        """Numbers of adapters of unfinished requests, if running adapters are limited."""
        self._num_of_adapter: Counter[int] = Counter()
        """The number of unfinished requests by number of adapter."""
        self._labels: Labels[RequestId] = Labels()
        self._unused: list[int] = []

    def add(self, request: Request) -> int:
        """Add a new request to its queue; return its index."""
        slot = self._enter(request)
        append(self.state, SKIPPED if request.structured_output else WAITING, slot)
        return slot

    def branch(self, parent: int, child_id: RequestId, outputs: TokenIds) -> int:
        """Add a branch of a request to the front of the queue; return its index, or NONE if one of
        its outputs ends it."""
        request = replace(self.requests[parent], request_id=child_id)
        slot, s = self._enter(request), self.state
        s.requests[slot, STATUS] = IS_WAITING
        for column in (GRAMMAR_READY, NUM_CACHED_TOKENS):
            s.requests[slot, column] = s.requests[parent, column]
        prepend(s, WAITING, slot)
        self.reserve_nodes(len(outputs), 1)
        marks = [_mark_of(request, token) for token in outputs]
        tokens = np.array(outputs, np.int32)
        if append_outputs(self.state, slot, tokens, np.array(marks, np.uint8)):
            return slot
        end(self.state, slot)
        self.remove(slot)
        return NONE

    def _enter(self, request: Request) -> int:
        """Give a new request an index, and store its prompt."""
        slot = self._find_slot(request)
        self.slot_of[request.request_id] = slot
        if self._are_names_lent and self.names[slot] is not None:
            self.names, self._are_names_lent = self.names.copy(), False
        self.names[slot] = request.request_id
        self.state.scalars[NUM_BORN] += 1
        self.state.scalars[NUM_SESSIONS] += request.resumable
        self._reserve_seats()
        tokens = np.array(request.prompt_token_ids, np.int32)
        self.reserve_nodes(len(tokens), 1 + len(self.state.nodes) // 8)  # called outside of a step
        extras = self._number_extras(request, len(tokens) // self.config.block_size)
        self.state.requests[slot] = self._row_of(request)
        self.state.requests[slot, ADAPTER] = self._number_adapter(request)
        self._hold_extras(slot, extras)
        store_prompt(self.state, slot, tokens, extras)
        if self.config.policy is Policy.PRIORITY:
            for name, label in self._labels.add(request.request_id):
                self.state.requests[self.slot_of[name], LABEL] = label
        self.state.scalars[NUM_MORE_STOPS] += self.state.requests[slot, MORE_STOPS]
        return slot

    def go_on(self, slot: int, whole: Request) -> None:
        """Continue a session: `whole` is its request with the next input; its status is waiting."""
        self._release_extras(slot)
        self.requests[slot] = whole
        tokens = np.array(whole.prompt_token_ids, np.int32)
        self.reserve_nodes(len(tokens), 1 + len(self.state.nodes) // 8)
        extras = self._number_extras(whole, len(tokens) // self.config.block_size)
        had_more = self.state.requests[slot, MORE_STOPS]
        self.state.requests[slot, _OF_INPUT] = np.array(self._row_of(whole))[_OF_INPUT]
        self.state.requests[slot, STATUS] = IS_WAITING
        computed = int(self.state.requests[slot, NUM_COMPUTED])
        self.state.requests[slot, NEXT_ITEM] = self.find_item(whole, computed)
        self.state.scalars[NUM_MORE_STOPS] += self.state.requests[slot, MORE_STOPS] - had_more
        self._hold_extras(slot, extras)
        store_input(self.state, slot, tokens, extras)

    def _hold_extras(self, slot: int, extras: NDArray[np.int32]) -> None:
        self.state.requests[slot, FIRST_EXTRAS], self.state.requests[slot, EXTRAS] = extras[-2:]
        if _has_extras(self.requests[slot]):
            np.add.at(self.state.extras_uses, extras[-2:], 1)

    def _release_extras(self, slot: int) -> None:
        if _has_extras(self.requests[slot]):
            row = self.state.requests[slot]
            np.subtract.at(self.state.extras_uses, row[[EXTRAS, FIRST_EXTRAS]], 1)

    def remove(self, slot: int) -> RequestId:
        """Forget a finished request; return its id."""
        request = self.requests[slot]
        del self.slot_of[request.request_id]
        self._unused.append(slot)
        self.state.scalars[NUM_SESSIONS] -= request.resumable
        self._release_extras(slot)
        if self.config.max_loras and request.adapter is not None:
            number = self._adapters[request.adapter]
            self._num_of_adapter[number] -= 1
            if not self._num_of_adapter[number]:
                del self._adapters[request.adapter], self._num_of_adapter[number]
        if self.config.policy is Policy.PRIORITY:
            self._labels.remove(request.request_id)
        return request.request_id

    def get_tokens(self, slot: int) -> TokenIds:
        """Return the prompt and verified output tokens of a request."""
        return tuple(get_tokens(self.state, slot).tolist())

    def list_tables(self, slot: int, column: int) -> BlockTables:
        """Return the block tables of a request, up to the number in a column of its holdings."""
        s, seat = self.state, self.state.requests[slot, SEAT]
        lengths = s.holdings[slot, :, column].tolist()
        pairs = zip(s.block_tables, lengths, strict=True)
        return tuple([tuple(table[seat, :length].tolist()) for table, length in pairs])

    def lend_names(self) -> NDArray[np.object_]:
        """Return [slots]: an array of ids that later requests do not change."""
        self._are_names_lent = True
        return self.names

    def reserve_nodes(self, num_tokens: int, num_requests: int) -> None:
        """Make room for the nodes that `num_tokens` tokens of `num_requests` requests may fill."""
        needed = num_tokens // self.config.block_size + num_requests
        while self.state.scalars[NUM_FREE_NODES] < needed:
            self.state = grow_nodes(self.state, 2 * len(self.state.nodes))

    def mark(
        self,
        who: Int64s,
        samples: Int32s,
        token_ids: Int32s,
        counts: Int32s | None,
    ) -> NDArray[np.uint8]:
        """Return [tokens]: the finish reason, if any, for requests with `MORE_STOPS`."""
        lengths = samples if counts is None else counts
        slots, births = np.repeat(who, lengths, axis=1)
        marks = np.zeros(len(token_ids), np.uint8)
        is_alive = self.state.requests[slots, BIRTH] == births
        asks = is_alive & (self.state.requests[slots, MORE_STOPS] != 0)
        for at in asks.nonzero()[0].tolist():
            marks[at] = _mark_of(self.requests[slots[at]], int(token_ids[at]))
        return marks

    def _find_slot(self, request: Request) -> int:
        if self._unused:
            slot = self._unused.pop()
            self.requests[slot] = request
            return slot
        slot = len(self.requests)
        self.requests.append(request)
        if slot == len(self.state.requests):
            self.state = grow_slots(self.state, 2 * slot)
            self.names = np.concatenate((self.names, np.full(slot, None, object)))
        return slot

    def _reserve_seats(self) -> None:
        """Make room for all requests that may hold blocks.

        Each but a branch has taken at least one block, so there are no more of them than blocks.
        """
        most = len(self.requests)
        if not self.config.enable_forks:
            if not self.config.kv_connector:
                most = min(most, self.config.max_num_seqs + int(self.state.scalars[NUM_SESSIONS]))
            most = min(most, self.config.num_usable_blocks)
        while len(self.state.lines) < most:
            self.state = grow_seats(self.state, 2 * len(self.state.lines))

    def _row_of(self, request: Request) -> list[int]:
        """Return the data of a new request, by column."""
        row = [0] * REQUEST_COLUMNS
        prompt = len(request.prompt_token_ids)
        row[NUM_PROMPT] = row[NUM_KNOWN] = prompt
        row[END_BY_MAX_TOKENS] = prompt + request.max_tokens
        row[MAX_KNOWN] = min(prompt + request.max_tokens, self.config.max_model_len)
        row[MIN_TOKENS] = request.min_tokens
        row[SKIPS_CACHE] = request.skip_reading_prefix_cache
        stops = request.stop_token_ids
        columns = STOPS_END - STOPS
        row[STOPS:STOPS_END] = (*stops[:columns], *(NONE,) * (columns - len(stops)))
        row[MORE_STOPS] = len(stops) > columns
        row[HAS_STOPS] = bool(stops) or request.eos_token_id is not None
        row[EOS] = NONE if request.eos_token_id is None else request.eos_token_id
        if request.repetition_detection is not None:
            row[REPEATS_MIN] = request.repetition_detection.min_pattern_size
            row[REPEATS_MAX] = request.repetition_detection.max_pattern_size
            row[REPEATS_COUNT] = request.repetition_detection.min_count
        row[HAS_GRAMMAR] = request.grammar is not None
        row[FIRST_ITEM] = row[NEXT_ITEM] = self.find_item(request, 0)
        row[NUM_BESIDE] = sum(item.num_embeds for item in request.items)
        row[PRIORITY], row[ARRIVAL] = request.priority, request.arrival_time
        row[BIRTH], row[IS_SESSION] = self.state.scalars[NUM_BORN], request.resumable
        row[MAY_KEEP] = KEEPS_TURN * (self.config.has_pins and request.job_id is not None)
        row[STATUS] = AWAITS_GRAMMAR if request.structured_output else IS_WAITING
        for column in (NUM_CACHED_TOKENS, LAST_FRAME, LAST_SAMPLE, SEAT):
            row[column] = NONE
        return row

    def find_item(self, request: Request, computed: int) -> int:
        """Return `NEXT_ITEM` behind `computed` tokens: where the first item that is not behind
        begins, less the tokens that are looked ahead."""
        is_beside = self.config.is_encoder_decoder
        if self.config.encoder_cache_size and not (is_beside and computed):
            for item in request.items:
                if is_beside or item.offset + item.length > computed:
                    return item.offset - self.config.num_encoder_lookahead_tokens
        return _NO_ITEM

    def _number_adapter(self, request: Request) -> int:
        """Count a new request for its adapter; return the adapter's number, 0 if none counts."""
        if not self.config.max_loras or request.adapter is None:
            return 0
        number = self._adapters.get(request.adapter)
        if number is None:
            taken = self._num_of_adapter
            number = next(at for at in range(1, len(taken) + 2) if at not in taken)
            self._adapters[request.adapter] = number
            if number >= len(self.state.adapters):
                self.state = grow_adapters(self.state, 2 * number)
        self._num_of_adapter[number] += 1
        return number

    def _number_extras(self, request: Request, full: int) -> NDArray[np.int32]:
        """Return the extras' number of each full prompt block, of the next block, and of all later
        ones."""
        if not _has_extras(request):
            return np.zeros(full + 2, np.int32)
        if self.extras.count_unused(len(self.state.extras_uses)) < full + 2:
            self.extras.sweep(self.state.extras_uses)
            if self.extras.count_unused(len(self.state.extras_uses)) < full + 2:
                self.state = grow_extras(self.state, 2 * (len(self.extras.values) + full + 2))
        found = list_extras(request, self.config.block_size, full + 1)
        found.append((request.adapter, *NOTHING[1:]))
        return np.array([self.extras.number_of(extras) for extras in found], np.int32)


def _has_extras(request: Request) -> bool:
    is_named = request.adapter is not None or request.cache_salt is not None
    return is_named or bool(request.items or request.prompt_embeds)


def _mark_of(request: Request, token: int) -> int:
    if token == request.eos_token_id:
        return BY_EOS
    return BY_STOP_TOKEN if token in request.stop_token_ids else GOES_ON
