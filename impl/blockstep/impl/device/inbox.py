"""Inbox: the tensors that the host writes for the device, and the index of each request.

A device may run steps on a copy of the state (`Copy`). Then the host's arrays are behind it, except
for rows that only the host writes: these are listed in `written`, and are copied later.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np

from blockstep.impl.device import layout
from blockstep.impl.device.dims import LANES, count_span, make_dims
from blockstep.impl.device.growth import check_reach, grow
from blockstep.impl.device.launch import Launch
from blockstep.impl.interning import NOTHING, Extras, Labels, list_extras
from blockstep.spec.vocabulary import MAX_INT, Config, FrameId, Policy, Request, RequestId

_COLUMNS: Final = layout.INBOX_COLUMNS


class Copy(Protocol):
    """A copy of the state on which a device runs steps without the host."""

    def pull(self) -> None:
        """Update the host's arrays, after all steps that were launched on the copy."""
        ...


class Inbox:
    """Gives each unfinished request an index (slot), and makes tensors longer when needed."""

    def __init__(self, config: Config, launch: Launch, lanes: int = LANES, slots: int = 16) -> None:
        self.config = config
        self.dims = make_dims(config, slots, lanes=lanes)
        check_reach(self.dims)
        self.arrays = layout.make_state(self.dims)
        for number, group in enumerate(config.kv_groups):
            if group.sliding_window:
                self.arrays.windows[number] = group.sliding_window
                self.arrays.spans[number] = count_span(config, group)
        """The host's arrays, which may be behind; see `state`."""
        self.copy: Copy | None = None
        self.is_behind = False
        """Whether steps ran on `copy` that the host's arrays do not show."""
        self.is_ahead = True
        """Whether the host has run a kernel, or made tensors longer, since `copy` was updated."""
        self.written: list[tuple[str, int]] = []
        """Names and rows of tensors that the host wrote since `copy` was updated."""
        self.spare_nodes = 0
        """While the arrays are behind: unused nodes that neither steps nor commands will use."""
        self.added: list[int] = []
        """Indices of added requests; a burst removes them from the list when it serves them."""
        self.slot_of: dict[RequestId, int] = {}
        self.requests: dict[int, Request] = {}
        """Unfinished requests by index."""
        self.extras: list[Extras] = [NOTHING]
        """Extras by number; a number is never reused."""
        self._numbers: dict[Extras, int] = {NOTHING: 0}
        self._launch = launch
        self._labels: Labels[tuple[int, int, RequestId]] = Labels()
        self.last_frames: dict[int, FrameId] = {}
        """The last plan that had a row of the request, by request index, if there was one."""
        self._births: dict[int, int] = {}
        self._unused: list[int] = []
        self._num_born = 0
        self._written = 0

    @property
    def state(self) -> layout.State:
        """The host's arrays, updated with all steps so far."""
        if self.is_behind and self.copy is not None:
            self.copy.pull()
            self.is_behind = False
        return self.arrays

    def launch(self, kernel: str) -> None:
        """Run a kernel on the host's arrays; afterwards the device has executed all commands."""
        is_current = self._written == 0 and not self.arrays.steady[layout.STEPS_BEHIND]
        if kernel == "commands_kernel" and is_current:
            return
        state = self.state
        self.is_ahead = True
        self._launch(kernel, state, self.dims)
        if kernel != "commit_kernel":
            self.taken()

    def launch_on(self, kernel: str, arrays: layout.State) -> None:
        """Run a kernel on a copy of the state in the host's memory."""
        self._launch(kernel, arrays, self.dims)

    @property
    def has_commands(self) -> bool:
        """Whether there are commands that no launch has executed."""
        return self._written > 0

    def taken(self) -> None:
        """Note that a launch on the copy of the state has executed all commands."""
        self._written = 0

    def _write(self, name: str, row: int, values: Any) -> None:
        """Write the beginning of a row that only the host writes, or of a request's tokens."""
        array = getattr(self.arrays, name)
        if isinstance(values, int):
            array[row] = values
        else:
            array[row, : len(values)] = values
        if not self.is_ahead:
            self.written.append((name, row))

    def command(self, opcode: int, slot: int, argument: int = 0) -> None:
        """Write a command into the ring; if the ring is full, execute its commands first."""
        if self._written == self.dims.commands:
            self.launch("commands_kernel")
        at, birth = int(self.arrays.command_end[0]), self._births.get(slot, 0)
        self._write("commands", at % self.dims.commands, (opcode, slot, birth, argument))
        self._write("command_end", 0, at + 1)
        self._written += 1

    def add(self, request: Request) -> None:
        """Add a new request; it waits once the device has executed the command."""
        stops = len(request.stop_token_ids)
        if stops > self.dims.stops or (not self._unused and self._is_full()):
            self._grow(max(stops, self.dims.stops))
        slot = self._unused.pop() if self._unused else len(self.slot_of)
        prompt = request.prompt_token_ids
        needed = self._count_nodes(len(prompt), 1)
        if self.is_behind and needed <= self.spare_nodes:
            self.spare_nodes -= needed
        else:
            self.reserve_nodes(len(prompt), 1)
        self.slot_of[request.request_id], self.requests[slot] = slot, request
        self.added.append(slot)
        self._write("inbox", slot, self._row_of(request))
        self._write("tokens", slot, prompt)
        self._write("stops", slot, request.stop_token_ids)
        self._write("extras", slot, self._number_extras(request))
        if self.config.policy is Policy.PRIORITY:
            key = (request.priority, request.arrival_time, request.request_id)
            for name, label in self._labels.add(key):
                if name[2] == request.request_id:
                    self._write("ranks", slot, label)
                else:
                    self._set_rank(self.slot_of[name[2]], label)
        self._num_born += 1
        self._births[slot] = self._num_born
        self.last_frames.pop(slot, None)
        self.command(layout.SUBMIT, slot)

    def _set_rank(self, slot: int, rank: int) -> None:
        """Set the rank of a waiting request, and its key: ranks change together, so order is
        kept."""
        self.launch("commands_kernel")
        self.is_ahead = True
        self.state.ranks[slot] = rank
        if self.state.key[slot] != layout.FAR:
            self.state.key[slot] = rank

    def remove(self, slot: int) -> RequestId:
        """Forget a request that has finished or is being aborted; return its id."""
        request = self.requests.pop(slot)
        del self.slot_of[request.request_id]
        self._unused.append(slot)
        if self.config.policy is Policy.PRIORITY:
            key = (request.priority, request.arrival_time, request.request_id)
            self._labels.remove(key)
        return request.request_id

    def reserve_nodes(self, num_tokens: int, num_requests: int) -> None:
        """Make room for the nodes that `num_tokens` tokens of `num_requests` requests may fill."""
        needed = self._count_nodes(num_tokens, num_requests)
        self.launch("commands_kernel")
        if self.state.num_free_nodes[0] < needed:
            self.is_ahead = True
            self._launch("sweep_kernel", self.state, self.dims)
        if self.state.num_free_nodes[0] < needed:
            self._grow(self.dims.stops, num_nodes=2 * (self.dims.nodes + needed))

    def _count_nodes(self, num_tokens: int, num_requests: int) -> int:
        return num_tokens // self.config.block_size + num_requests

    def _is_full(self) -> bool:
        return len(self.slot_of) == self.dims.slots

    def _grow(self, stops: int, num_nodes: int = 0) -> None:
        """Make tensors longer; the device must have executed all commands."""
        self.launch("commands_kernel")
        d, self.is_ahead = self.dims, True
        slots = 2 * d.slots if self._is_full() else d.slots
        dims = make_dims(self.config, slots, stops, d.lanes, max(num_nodes, d.nodes))
        self.arrays, self.dims = grow(self.state, d, dims), dims

    def _row_of(self, request: Request) -> list[int]:
        """Return the row of a new request in `inbox`."""
        row = [0] * _COLUMNS
        prompt = row[layout.IN_PROMPT] = len(request.prompt_token_ids)
        # Kernels add both in int32; no request is as long as the bound.
        row[layout.IN_MAX_TOKENS] = min(request.max_tokens, MAX_INT - prompt)
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
        """Return [table]: the extras' number of each full prompt block, of the next one, and of all
        later."""
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
