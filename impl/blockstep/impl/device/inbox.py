"""Inbox: what the host writes for the device, and which request has which slot."""

from __future__ import annotations

from typing import Final

import numpy as np

from blockstep.impl.device import layout
from blockstep.impl.device.growth import check_reach, grow
from blockstep.impl.device.launch import Launch
from blockstep.impl.names import NOTHING, Extras, Labels, list_extras
from blockstep.spec.vocabulary import Config, FrameId, Policy, Request, RequestId

_COLUMNS: Final = layout.INBOX_COLUMNS


class Inbox:
    """Gives each unfinished request a slot, and sees to it that no tensor is too short."""

    def __init__(self, config: Config, launch: Launch, lanes: int = layout.LANES) -> None:
        self.config = config
        self.dims = layout.make_dims(config, lanes=lanes)
        check_reach(self.dims)
        self.state = layout.make_state(self.dims)
        self.slot_of: dict[RequestId, int] = {}
        self.requests: dict[int, Request] = {}
        """By slot."""
        self.extras: list[Extras] = [NOTHING]
        """By number; a number is never given again."""
        self._numbers: dict[Extras, int] = {NOTHING: 0}
        self._launch = launch
        self._labels: Labels[tuple[int, int, RequestId]] = Labels()
        self.last_frames: dict[int, FrameId] = {}
        """By slot: the last plan that had a row of the request, if one had."""
        self._births: dict[int, int] = {}
        self._unused: list[int] = []
        self._num_born = 0
        self._written = 0

    def launch(self, kernel: str) -> None:
        """Run a kernel; the device has taken all commands after it."""
        if kernel == "commands_kernel" and self._written == 0:
            return
        self._launch(kernel, self.state, self.dims)
        if kernel != "commit_kernel":
            self.taken()

    def taken(self) -> None:
        """A launch that somebody else made has taken all commands."""
        self._written = 0

    def command(self, opcode: int, slot: int, argument: int = 0) -> None:
        """Write a command into the ring; one that is full is emptied first."""
        if self._written == self.dims.commands:
            self.launch("commands_kernel")
        s, at = self.state, int(self.state.command_end[0])
        birth = self._births.get(slot, 0)
        s.commands[at % self.dims.commands] = opcode, slot, birth, argument
        s.command_end[0] = at + 1
        self._written += 1

    def add(self, request: Request) -> None:
        """A new request; it waits once the device has read of it."""
        stops = len(request.stop_token_ids)
        if stops > self.dims.stops or (not self._unused and self._is_full()):
            self._grow(max(stops, self.dims.stops))
        slot = self._unused.pop() if self._unused else len(self.slot_of)
        prompt = request.prompt_token_ids
        self.reserve_nodes(len(prompt), 1)
        self.slot_of[request.request_id], self.requests[slot] = slot, request
        s = self.state
        s.inbox[slot] = self._row_of(request)
        s.tokens[slot, : len(prompt)] = prompt
        s.stops[slot, :stops] = request.stop_token_ids
        s.extras[slot] = self._number_extras(request)
        if self.config.policy is Policy.PRIORITY:
            key = (request.priority, request.arrival_time, request.request_id)
            for name, label in self._labels.add(key):
                self._set_rank(self.slot_of[name[2]], label)
        self._num_born += 1
        self._births[slot] = self._num_born
        self.last_frames.pop(slot, None)
        self.command(layout.SUBMIT, slot)

    def _set_rank(self, slot: int, rank: int) -> None:
        """Of one that waits the key follows: all keys change together, so none is out of order."""
        self.launch("commands_kernel")
        self.state.ranks[slot] = rank
        if self.state.key[slot] != layout.FAR:
            self.state.key[slot] = rank

    def remove(self, slot: int) -> RequestId:
        """Forget a request that has ended, or is told to."""
        request = self.requests.pop(slot)
        del self.slot_of[request.request_id]
        self._unused.append(slot)
        if self.config.policy is Policy.PRIORITY:
            key = (request.priority, request.arrival_time, request.request_id)
            self._labels.remove(key)
        return request.request_id

    def reserve_nodes(self, num_tokens: int, num_requests: int) -> None:
        """Room for the contents that so many tokens of so many requests may fill."""
        needed = num_tokens // self.config.block_size + num_requests
        self.launch("commands_kernel")
        if self.state.num_free_nodes[0] < needed:
            self._launch("sweep_kernel", self.state, self.dims)
        if self.state.num_free_nodes[0] < needed:
            self._grow(self.dims.stops, num_nodes=2 * (self.dims.nodes + needed))

    def _is_full(self) -> bool:
        return len(self.slot_of) == self.dims.slots

    def _grow(self, stops: int, num_nodes: int = 0) -> None:
        """Longer tensors; the device must have taken all commands."""
        self.launch("commands_kernel")
        d = self.dims
        slots = 2 * d.slots if self._is_full() else d.slots
        dims = layout.make_dims(self.config, slots, stops, d.lanes, max(num_nodes, d.nodes))
        self.state, self.dims = grow(self.state, d, dims), dims

    def _row_of(self, request: Request) -> list[int]:
        """What is known of a new request, by column of `inbox`."""
        row = [0] * _COLUMNS
        row[layout.IN_PROMPT] = len(request.prompt_token_ids)
        row[layout.IN_MAX_TOKENS] = request.max_tokens
        row[layout.IN_MIN_TOKENS] = request.min_tokens
        eos = request.eos_token_id
        row[layout.IN_EOS] = layout.NONE if eos is None else eos
        row[layout.IN_NUM_STOPS] = len(request.stop_token_ids)
        row[layout.IN_SKIPS_CACHE] = request.skip_reading_prefix_cache
        if request.repetition_detection is not None:
            row[layout.IN_REPEATS_MIN] = request.repetition_detection.min_pattern_size
            row[layout.IN_REPEATS_MAX] = request.repetition_detection.max_pattern_size
            row[layout.IN_REPEATS_COUNT] = request.repetition_detection.min_count
        row[layout.IN_GRAMMAR] = int(bool(request.structured_output))
        return row

    def _number_extras(self, request: Request) -> layout.Int32s:
        """[table]; of each full block of the prompt, of the one after them, and of all others."""
        full = len(request.prompt_token_ids) // self.config.block_size
        found = np.empty(self.dims.table, np.int32)
        found[:] = self._number_of((request.adapter, *NOTHING[1:]))
        named = list_extras(request, self.config.block_size, full + 1)[: self.dims.table]
        found[: len(named)] = [self._number_of(extras) for extras in named]
        return found

    def _number_of(self, extras: Extras) -> int:
        if extras not in self._numbers:
            self._numbers[extras] = len(self.extras)
            self.extras.append(extras)
        return self._numbers[extras]
