"""Plans: what machine code has decided in a step, as a plan in arrays."""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.impl.array_plans import ArrayPlan, RowDrafts, SlotNames
from blockstep.impl.host import state as c
from blockstep.impl.host.agent_turns import AgentTurns
from blockstep.impl.host.encoder_inputs import EncoderInputs
from blockstep.impl.host.forks import Forks
from blockstep.impl.host.frames import Frame
from blockstep.impl.host.grammar_bitmask import Masks
from blockstep.impl.host.groups import count_common
from blockstep.impl.host.kv_transfers import Transfers
from blockstep.impl.host.planning import BEGIN, plan_step
from blockstep.impl.host.requests import Requests
from blockstep.impl.host.state import Int32s
from blockstep.impl.host.steps import Steps
from blockstep.spec.vocabulary import Config, FrameId, GroupKind, RequestId


@dataclass(eq=False)
class Plans:
    """Makes plans; each manager adds its part, and is None if the config lacks it."""

    config: Config
    requests: Requests
    masks: Masks
    encodings: EncoderInputs | None
    turns: AgentTurns | None
    transfers: Transfers | None
    forks: Forks | None

    def __post_init__(self) -> None:
        parts = (self.encodings, self.turns, self.transfers)
        self.steps = Steps(*parts) if any(part is not None for part in parts) else None
        """None if machine code plans without managers."""
        self._num_sections = 2 if len(self.config.kv_groups) == 1 else 3
        """Numbers for each new block of a plan: its row, its id and, if of several, its group."""

    def make(
        self,
        frame_id: FrameId,
        previous_id: FrameId,
        oldest_id: FrameId,
        budget: int,
        admits: bool,
        finished: tuple[RequestId, ...],
    ) -> tuple[ArrayPlan, Frame]:
        """Plan one step; return the plan, and what is kept of it until its commit.

        `finished`: requests that have finished since the plan before. The others are those of
        `plan_step`.
        """
        (
            owners, planned, ids, num_blocks, num_zeroed, num_samples, num_running, num_missed,
            num_preempted, num_common,
        ) = (plan_step if self.steps is None else self.steps.plan_step)(
            self.requests.state, BEGIN, 0, c.NONE, frame_id, previous_id, oldest_id, budget, admits
        )  # fmt: skip
        for kept in (owners, planned, ids):  # the frame keeps them, and machine code trusts them
            kept.setflags(write=False)
        slots, num_rows = owners[0], owners.shape[1]
        blocks_end = num_blocks * self._num_sections
        names = SlotNames(self.requests.lend_names(), slots)
        plan = ArrayPlan(
            frame_id,
            slots,
            names,
            planned[c.PLAN_COMPUTED],
            planned[c.PLAN_SCHEDULED],
            planned[c.PLAN_OUTPUTS],
            None if num_samples == num_rows else planned[c.PLAN_SAMPLES] != 0,
            ids[:num_blocks],
            ids[num_blocks : 2 * num_blocks],
            RowDrafts(planned[c.PLAN_DRAFTS], ids) if len(ids) > blocks_end + num_zeroed else {},
            {},
            {},
            [],
            finished,
            (),
            (num_common,),
        )
        if self._num_sections > 2:
            self._add_groups(plan, ids[2 * num_blocks : blocks_end], num_common)
        if num_zeroed:
            zeroed = ids[blocks_end : blocks_end + num_zeroed]
            plan.new_block_ids_to_zero = tuple(zeroed.tolist())
        if self.masks.matchers:
            masked, behind = self.masks.look_at(slots, planned)
            plan.has_structured_output_requests = masked
            plan.pending_structured_output_tokens = behind
        if self.encodings is not None:
            self.encodings.add_to(plan)
        if num_preempted or num_missed or num_running < num_rows:
            self._add_changes(plan, num_running, num_missed, num_preempted)
        if self.forks is not None:
            self.forks.add_to(plan, num_running)
        if self.transfers is not None:
            self.transfers.add_to(plan)
        return plan, Frame(owners, names, planned, ids)

    def _add_groups(self, plan: ArrayPlan, block_groups: Int32s, num_common: int) -> None:
        """Add to a plan of several groups the group of each new block, and the common prefixes."""
        s = self.requests.state
        kinds = enumerate(self.config.kv_groups)
        others = [
            count_common(s, number) if group.kind is GroupKind.FULL else 0
            for number, group in kinds
            if number
        ]
        plan.block_groups = block_groups
        plan.num_common_prefix_blocks = (num_common, *others)

    def _add_changes(
        self, plan: ArrayPlan, num_running: int, num_missed: int, num_preempted: int
    ) -> None:
        """Add new, resumed and preempted requests to a plan, and tokens the worker may lack."""
        scratch = self.requests.state.scratch
        if num_preempted:
            names = self.requests.names[scratch[:num_preempted]].tolist()
            plan.preempted_req_ids = tuple(sorted(names))
        for row in scratch[num_preempted : num_preempted + num_missed].tolist():
            plan.all_token_ids[row] = self.requests.get_tokens(int(plan.slots[row]))
        slots, requests = plan.slots[num_running:], self.requests.requests
        were_preempted = self.requests.state.requests[slots, c.WAS_PREEMPTED].tolist()
        pairs = enumerate(slots.tolist(), num_running)
        plan.new_rows = {row: requests[slot] for row, slot in pairs}
        if 1 in were_preempted:
            for row, was_preempted in enumerate(were_preempted, num_running):
                if was_preempted:
                    del plan.new_rows[row]
                    plan.resumed_rows.append(row)
                    plan.all_token_ids[row] = self.requests.get_tokens(int(plan.slots[row]))
