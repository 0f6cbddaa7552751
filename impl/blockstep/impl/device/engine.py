"""DeviceEngine: the scheduler whose state and decisions are on the device.

The host validates events, writes them into the device's inbox and ring, launches a kernel, and
reads its results. The host uses request ids; the device uses request indices (`slot`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from blockstep.impl.array_engine import ArrayEngine
from blockstep.impl.capabilities import DEVICE
from blockstep.impl.device import layout
from blockstep.impl.device.dims import LANES, count_most_blocks
from blockstep.impl.device.frames import Frame, read_frame, read_outputs
from blockstep.impl.device.inbox import Inbox
from blockstep.impl.device.launch import Launch, get_numpied
from blockstep.impl.device.view import take_snapshot, take_stats
from blockstep.impl.rejections import most_slots, schedule_problem
from blockstep.spec.vocabulary import (
    Config,
    Drafts,
    DraftsTaken,
    FrameId,
    KVTransfers,
    Outputs,
    PauseState,
    Plan,
    Rejected,
    Request,
    RequestId,
    Snapshot,
    Stats,
    TokenIds,
)


class DeviceEngine(ArrayEngine[Frame]):
    """The scheduler and its paged KV memory as tensors, changed by one kernel per step.

    Args:
        config: the constants of the run.
        launch: how kernels are run; by default their source is run by numpy.
        lanes: a power of two; see `Dims`.
        slots: initial room for unfinished requests.

    Raises:
        ConfigError: `list_config_problems` finds a problem in the config.
    """

    def __init__(
        self, config: Config, launch: Launch | None = None, lanes: int = LANES, slots: int = 16
    ) -> None:
        super().__init__(config, DEVICE)
        self.inbox = Inbox(config, launch or get_numpied(), lanes, slots)
        self.previous_names: tuple[RequestId, ...] = ()
        """Requests of the last plan's rows."""

    def snapshot(self) -> Snapshot:
        """Return the whole state in canonical form. O(blocks and tokens); not part of a step."""
        self.inbox.launch("commands_kernel")
        return take_snapshot(self, self.inbox, self.previous_names)

    def stats(self) -> Stats:
        """Return the counters since the start (P21)."""
        self.inbox.launch("commands_kernel")
        return take_stats(self.inbox.state)

    def capabilities(self) -> frozenset[str]:
        """Return what the engine implements, as the values of conformance's `Capability`."""
        return DEVICE

    # a step

    def _schedule(self) -> Plan | Rejected:
        problem = schedule_problem(self.config, len(self.frames))
        if problem is not None:
            return problem
        is_open = self.pause_state is not PauseState.PAUSED_ALL
        control = self.inbox.state.control
        frame_id = self.next_frame_id
        control[layout.FRAME_ID], control[layout.PREVIOUS_ID] = frame_id, self._previous_id
        control[layout.OLDEST_ID] = next(iter(self.frames), frame_id)
        control[layout.BUDGET] = self.config.max_num_batched_tokens if is_open else 0
        control[layout.ADMITS] = self.pause_state is PauseState.UNPAUSED
        taken = {frame.place for frame in self.frames.values()}
        place = min(set(range(self.inbox.dims.frames)) - taken)
        control[layout.PLACE] = place
        self.inbox.launch("plan_kernel")
        finished = tuple(sorted(self.finished_req_ids))
        frame, plan = read_frame(self.inbox, frame_id, place, finished)
        if frame.slots:
            self.frames[frame_id] = frame
        self.finished_req_ids.clear()
        self.previous_names = tuple(frame.rows)
        self._previous_id, self.next_frame_id = frame_id, frame_id + 1
        return plan

    def _get_rows(self, frame: Frame) -> Mapping[RequestId, TokenIds | None]:
        return frame.rows

    def _take_answer(
        self, frame_id: FrameId, tokens: list[TokenIds], _transfers: KVTransfers
    ) -> Outputs:
        frame = self.frames[frame_id]
        self.inbox.reserve_nodes(sum(map(len, tokens)), len(tokens))
        s = self.inbox.state
        s.control[layout.COMMIT_PLACE] = frame.place
        for row, ids in enumerate(tokens):
            s.answer_counts[frame.place, row] = len(ids)
            s.answer_tokens[frame.place, row, : len(ids)] = ids
        self.inbox.launch("commit_kernel")
        outputs, ended = read_outputs(self.inbox, frame, tokens)
        for slot in ended:
            self._forget(slot)
        self._close(frame_id)
        return outputs

    @property
    def previous_id(self) -> FrameId:
        """Id of the last plan; -1 before the first."""
        return self._previous_id

    def take_steps(
        self,
        num_plans: int,
        reported: Set[RequestId],
        ended: Sequence[tuple[int, RequestId]],
        unreported: Set[RequestId],
        names: tuple[RequestId, ...],
    ) -> None:
        """Take note of `num_plans` steps that a loop without a host has planned and committed.

        `reported`: finished requests that its first plan listed. `ended`: indices and ids of
        requests that finished in these steps; the next plan lists those in `unreported`. `names`:
        requests of the last plan.
        """
        self.next_frame_id += num_plans
        self._previous_id = self.next_frame_id - 1
        self._drop_reported(reported)
        for slot, name in ended:
            if self.inbox.slot_of.get(name) == slot:  # if not aborted meanwhile
                self._forget(slot)
        self._drop_reported({name for _, name in ended} - unreported)
        self.previous_names = names

    def _drop_reported(self, reported: Set[RequestId]) -> None:
        """Leave these finished requests out of the next plan."""
        for name in reported:
            self.finished_req_ids.pop(name, None)

    def _get_last_frame(self, slot: int) -> FrameId:
        return self.inbox.last_frames.get(slot, layout.NONE)

    # events between steps

    @property
    def _register(self) -> Inbox:
        return self.inbox

    def _take_drafts(self, event: Drafts) -> DraftsTaken:
        asked: list[tuple[RequestId, int]] = []
        for row in event.drafts:
            slot = self.inbox.slot_of.get(row.request_id)
            if slot is not None:
                self.inbox.state.offered[slot, : len(row.token_ids)] = row.token_ids
                self.inbox.command(layout.DRAFT, slot, len(row.token_ids))
                asked.append((row.request_id, slot))
        self.inbox.launch("commands_kernel")
        taken = self.inbox.state.taken
        return DraftsTaken(tuple(request_id for request_id, slot in asked if taken[slot]))

    def _count_most_blocks(self, request: Request) -> int:
        return count_most_blocks(self.config, most_slots(self.config, request))

    def _set_grammar_ready(self, slot: int) -> None:
        self.inbox.command(layout.GRAMMAR, slot)

    def _end(self, slot: int) -> None:
        self.inbox.command(layout.ABORT, slot)

    def _reset(self, reset_running_requests: bool) -> bool:
        self.inbox.command(layout.RESET, 0, int(reset_running_requests))
        self.inbox.launch("commands_kernel")
        if reset_running_requests:
            self.previous_names = ()
        return bool(self.inbox.state.reset_done[0])
