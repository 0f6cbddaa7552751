"""Requests: the unfinished ones by id, and arrays long enough for their data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockstep.impl.host import state as c
from blockstep.impl.host.jit import compile_entries
from blockstep.impl.host.lives import end, get_tokens, store_input, store_prompt
from blockstep.impl.host.queues import append, prepend
from blockstep.impl.host.results import append_outputs
from blockstep.impl.interning import NOTHING, ExtrasTable, Labels, list_extras
from blockstep.spec.vocabulary import BlockTables, Config, Policy, Request, RequestId, TokenIds

_NO_ITEM: Final = 1 << 40
_OF_INPUT: Final = [
    c.NUM_PROMPT, c.NUM_KNOWN, c.END_BY_MAX_TOKENS, c.MAX_KNOWN, c.NUM_CERTAIN, c.MIN_TOKENS,
    c.EOS, c.ARRIVAL, c.FIRST_ITEM, c.HAS_STOPS, c.NUM_STOPS, c.REPEATS_MIN, c.REPEATS_MAX,
    c.REPEATS_COUNT,
]  # fmt: skip
"""Columns that the next input of a session sets."""


class Requests:
    """Gives each unfinished request an index (slot), and makes arrays longer when needed.

    Machine code does not check bounds: room for whatever it writes is reserved here first.
    """

    def __init__(self, config: Config) -> None:
        compile_entries()
        self.config = config
        self.state = c.make_state(config)
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
        append(self.state, c.SKIPPED if request.structured_output else c.WAITING, slot)
        return slot

    def branch(self, parent: int, child_id: RequestId, outputs: TokenIds) -> int:
        """Add a branch of a request to the front of the queue; return its index, or NONE if one of
        its outputs ends it."""
        request = replace(self.requests[parent], request_id=child_id)
        slot, s = self._enter(request), self.state
        s.requests[slot, c.STATUS] = c.IS_WAITING
        for column in (c.GRAMMAR_READY, c.NUM_CACHED_TOKENS):
            s.requests[slot, column] = s.requests[parent, column]
        prepend(s, c.WAITING, slot)
        self.reserve_nodes(len(outputs), 1)
        if append_outputs(self.state, slot, np.array(outputs, np.int32)):
            return slot
        end(self.state, slot)
        self.remove(slot)
        return c.NONE

    def _enter(self, request: Request) -> int:
        """Give a new request an index, and store its prompt."""
        slot = self._find_slot(request)
        self.slot_of[request.request_id] = slot
        if self._are_names_lent and self.names[slot] is not None:
            self.names, self._are_names_lent = self.names.copy(), False
        self.names[slot] = request.request_id
        self.state.scalars[c.NUM_BORN] += 1
        self.state.scalars[c.NUM_SESSIONS] += request.resumable
        self._reserve_batch_rows()
        tokens = np.array(request.prompt_token_ids, np.int32)
        self.reserve_nodes(len(tokens), 1 + len(self.state.nodes) // 8)  # called outside of a step
        extras = self._number_extras(request, len(tokens) // self.config.block_size)
        self.state.requests[slot, : c.REQUEST_COLUMNS] = self._row_of(request)
        self._reserve_table(slot)
        self._store_stops(slot)
        self.state.requests[slot, c.ADAPTER] = self._number_adapter(request)
        store_prompt(self.state, slot, tokens, extras)
        if self.config.policy is Policy.PRIORITY:
            for name, label in self._labels.add(request.request_id):
                self.state.requests[self.slot_of[name], c.LABEL] = label
        return slot

    def go_on(self, slot: int, whole: Request) -> None:
        """Continue a session: `whole` is its request with the next input; its status is waiting."""
        self.requests[slot] = whole
        tokens = np.array(whole.prompt_token_ids, np.int32)
        self.reserve_nodes(len(tokens), 1 + len(self.state.nodes) // 8)
        extras = self._number_extras(whole, len(tokens) // self.config.block_size)
        self.state.requests[slot, _OF_INPUT] = np.array(self._row_of(whole))[_OF_INPUT]
        self.state.requests[slot, c.STATUS] = c.IS_WAITING
        computed = int(self.state.requests[slot, c.NUM_COMPUTED])
        self.state.requests[slot, c.NEXT_ITEM] = self.find_item(whole, computed)
        self._reserve_table(slot)
        self._store_stops(slot)
        store_input(self.state, slot, tokens, extras)

    def remove(self, slot: int) -> RequestId:
        """Forget a finished request; return its id."""
        return self.remove_all(np.array([slot]))[0]

    def remove_all(self, slots: c.Int64s) -> list[RequestId]:
        """Forget finished requests; return their ids."""
        names: list[RequestId] = self.names.take(slots).tolist()
        self._unused += (unused := [*map(self.slot_of.pop, names)])
        if self.state.scalars[c.NUM_SESSIONS]:
            num_sessions = sum([self.requests[slot].resumable for slot in unused])
            self.state.scalars[c.NUM_SESSIONS] -= num_sessions
        for slot in unused if self._adapters else ():
            adapter = self.requests[slot].adapter
            if adapter is not None:
                number = self._adapters[adapter]
                self._num_of_adapter[number] -= 1
                if not self._num_of_adapter[number]:
                    del self._adapters[adapter], self._num_of_adapter[number]
        for name in names if self.config.policy is Policy.PRIORITY else ():
            self._labels.remove(name)
        return names

    def get_tokens(self, slot: int) -> TokenIds:
        """Return the prompt and verified output tokens of a request."""
        return tuple(get_tokens(self.state, slot).tolist())

    def list_queue(self, queue: int) -> list[int]:
        """Return the requests of a queue, in its order."""
        s, found = self.state, list[int]()
        slot = int(s.scalars[c.QUEUES + 2 * queue])
        while slot != c.NONE:
            found.append(slot)
            slot = int(s.requests[slot, c.NEXT])
        return found

    def list_tables(self, slot: int, column: int) -> BlockTables:
        """Return the block tables of a request, up to the number in a column of its holdings."""
        s, lengths = self.state, self.state.holdings[slot, :, column].tolist()
        tables = s.block_tables[:, s.requests[slot, c.BATCH_ROW], : max(lengths)].tolist()
        return tuple([tuple(table[:length]) for table, length in zip(tables, lengths, strict=True)])

    def lend_names(self) -> NDArray[np.object_]:
        """Return [slots]: an array of ids that later requests do not change."""
        self._are_names_lent = True
        return self.names

    def reserve_nodes(self, num_tokens: int, num_requests: int) -> None:
        """Make room for the nodes that `num_tokens` tokens of `num_requests` requests may fill."""
        needed = num_tokens // self.config.block_size + num_requests
        while self.state.scalars[c.NUM_FREE_NODES] < needed:
            self.state = c.grow_nodes(self.state, 2 * len(self.state.nodes))

    def _store_stops(self, slot: int) -> None:
        stops = self.requests[slot].stop_token_ids
        if c.STOPS + len(stops) > self.state.requests.shape[1]:
            self.state = c.grow_stops(self.state, 2 * len(stops))
        self.state.requests[slot, c.STOPS : c.STOPS + len(stops)] = stops

    def _find_slot(self, request: Request) -> int:
        if self._unused:
            slot = self._unused.pop()
            self.requests[slot] = request
            return slot
        slot = len(self.requests)
        self.requests.append(request)
        if slot == len(self.state.requests):
            self.state = c.grow_slots(self.state, 2 * slot)
            self.names = np.concatenate((self.names, np.full(slot, None, object)))
        return slot

    def _reserve_batch_rows(self) -> None:
        """Make room for all requests that may hold blocks.

        Each but a branch has taken at least one block, so there are no more of them than blocks.
        """
        most = len(self.requests)
        if not self.config.enable_forks:
            if not self.config.kv_connector:
                most = min(most, self.config.max_num_seqs + int(self.state.scalars[c.NUM_SESSIONS]))
            most = min(most, self.config.num_usable_blocks)
        while len(self.state.lines) < most:
            self.state = c.grow_batch(self.state, 2 * len(self.state.lines))

    def _reserve_table(self, slot: int) -> None:
        """Make room for all blocks that a request may hold."""
        needed = c.count_longest(self.config, int(self.state.requests[slot, c.MAX_KNOWN]))
        width = self.state.node_tables.shape[1]
        if width < needed:
            longest = c.count_longest(self.config, self.config.max_model_len)
            width = min(max(needed, 2 * width), longest)
            self.state = c.resize_tables(self.state, len(self.state.lines), width)

    def _row_of(self, request: Request) -> list[int]:
        """Return the data of a new request, by column."""
        row = [0] * c.REQUEST_COLUMNS
        prompt = len(request.prompt_token_ids)
        row[c.NUM_PROMPT] = row[c.NUM_KNOWN] = prompt
        row[c.END_BY_MAX_TOKENS] = prompt + request.max_tokens
        row[c.MAX_KNOWN] = min(prompt + request.max_tokens, self.config.max_model_len)
        row[c.MIN_TOKENS] = request.min_tokens
        row[c.SKIPS_CACHE] = request.skip_reading_prefix_cache
        row[c.NUM_STOPS] = len(request.stop_token_ids)
        row[c.HAS_STOPS] = bool(request.stop_token_ids) or request.eos_token_id is not None
        row[c.EOS] = c.NONE if request.eos_token_id is None else request.eos_token_id
        if request.repetition_detection is not None:
            row[c.REPEATS_MIN] = request.repetition_detection.min_pattern_size
            row[c.REPEATS_MAX] = request.repetition_detection.max_pattern_size
            row[c.REPEATS_COUNT] = request.repetition_detection.min_count
        if not row[c.NUM_STOPS] and not row[c.REPEATS_COUNT]:
            row[c.NUM_CERTAIN] = row[c.MAX_KNOWN] - 1
        row[c.HAS_GRAMMAR] = request.grammar is not None
        row[c.FIRST_ITEM] = row[c.NEXT_ITEM] = self.find_item(request, 0)
        row[c.NUM_BESIDE] = sum(item.num_embeds for item in request.items)
        row[c.PRIORITY], row[c.ARRIVAL] = request.priority, request.arrival_time
        row[c.BIRTH], row[c.IS_SESSION] = self.state.scalars[c.NUM_BORN], request.resumable
        row[c.STATUS] = c.AWAITS_GRAMMAR if request.structured_output else c.IS_WAITING
        for column in (c.NUM_CACHED_TOKENS, c.LAST_FRAME, c.LAST_SAMPLE, c.BATCH_ROW):
            row[column] = c.NONE
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
                longer = c.lengthen(self.state.adapters, 2 * number)
                self.state = self.state._replace(adapters=longer)
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
                count = 2 * (len(self.extras.values) + full + 2)
                longer = c.lengthen(self.state.extras_uses, count)
                self.state = self.state._replace(extras_uses=longer)
        found = list_extras(request, self.config.block_size, full + 1)
        found.append((request.adapter, *NOTHING[1:]))
        return np.array([self.extras.number_of(extras) for extras in found], np.int32)


def _has_extras(request: Request) -> bool:
    is_named = request.adapter is not None or request.cache_salt is not None
    return is_named or bool(request.items or request.prompt_embeds)
