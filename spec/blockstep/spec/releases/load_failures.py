"""Failures: quirks of releases after loads that failed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core import plans
from blockstep.spec.core.block_pool import withdraw_blocks
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import Frame, FrameRow
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import compute_num_blocks
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features import kv_transfer
from blockstep.spec.features.structured_output import drop_row
from blockstep.spec.vocabulary import (
    BlockId,
    Config,
    KVLoadFailurePolicy,
    KVTransfers,
    OutputRow,
    RequestId,
    Status,
)

NUM_SCHEDULED: Final = Part("num_scheduled", 0)
"""The number of tokens of a row in flight."""


def invalid_block_rolls_back_one_request(rules: Rules, _config: Config) -> Rules:
    """The first of the requests that share an invalid block computes it again, and no other.

    All requests that run or wait for a load are checked. Placeholders of rows in
    flight stay, and their tokens are delivered.
    """

    def get_failures(
        state: State, invalid: Sequence[BlockId], frame: Frame | None
    ) -> tuple[State, tuple[RequestId, ...]]:
        if not invalid:
            return state, ()
        rows = {row.request_id: NUM_SCHEDULED.of(row) for row in frame.rows} if frame else {}
        parked = [
            name
            for name in state.skipped_waiting
            if state.requests[name].status is Status.WAITING_FOR_REMOTE_KVS
        ]
        state, of_parked, _ = get_cut(state, parked, rows, frozenset(invalid))
        state, of_running, behind = get_cut(state, state.running, rows, frozenset(invalid))
        ends = state.config.kv_load_failure_policy is KVLoadFailurePolicy.FAIL
        if ends:
            state = replace(state, pool=withdraw_blocks(state.pool, behind))
        failed = (*of_parked, *of_running) if ends else ()
        if frame is not None:
            frame, *later = state.frames
            for name in failed if ends else of_running:
                frame = drop_row(frame, name)
            state = replace(state, frames=(frame, *later))
        return state, failed

    def get_frame_rows(step: Step) -> tuple[FrameRow, ...]:
        found = zip(rules[plans.get_frame_rows](step), step.rows, strict=True)
        return tuple([NUM_SCHEDULED.put(row, planned.num_scheduled) for row, planned in found])

    return rules.replacing(kv_transfer.get_failures, get_failures).replacing(
        plans.get_frame_rows, get_frame_rows
    )


def get_cut(
    state: State,
    names: Sequence[RequestId],
    rows: dict[RequestId, int],
    invalid: Collection[BlockId],
) -> tuple[State, list[RequestId], list[BlockId]]:
    """Return the state with the tokens of some requests uncomputed from an invalid block on; the
    requests that have one; and their blocks from there on.

    An invalid block that an earlier request has does not count for a later one. Source: vLLM 0.19.1
    `_update_requests_with_invalid_blocks`; P19.
    """
    requests, size = state.requests, state.config.block_sizes[0]
    affected: list[RequestId] = []
    marked: set[BlockId] = set()
    behind: list[BlockId] = []
    for name in names:
        request = requests[name]
        (table, *_) = request.block_tables
        num_before = request.num_computed_tokens - rows.get(name, 0)
        computed = table[: max(compute_num_blocks(num_before, size), 0)]
        found = [index for index, block_id in enumerate(computed) if block_id in invalid]
        if not found:
            continue
        own = [index for index in found if table[index] not in marked]
        marked.update([table[index] for index in own])
        behind += table[own[0] :] if own else ()
        num_computed = own[0] * size if own else num_before
        requests = requests.having(name, replace(request, num_computed_tokens=num_computed))
        affected.append(name)
    return replace(state, requests=requests), affected, behind


def failed_request_reports_minus_one_cached_tokens(rules: Rules, _config: Config) -> Rules:
    """A request that fails before its first admission is reported with -1 cached tokens."""

    def get_reported(
        state: State, transfers: KVTransfers, failed: Sequence[RequestId]
    ) -> tuple[State, tuple[OutputRow, ...]]:
        after, rows = rules[kv_transfer.get_reported](state, transfers, failed)
        nums_cached = [state.requests[row.request_id].num_cached_tokens for row in rows]
        pairs = zip(rows, nums_cached, strict=True)
        return after, tuple([replace(row, num_cached_tokens=num) for row, num in pairs])

    return rules.replacing(kv_transfer.get_reported, get_reported)
