"""Tables (P5, P8): with windows, chunks or states a request holds the blocks that it attends to.

    |   skipped blocks    |       attended to       |          before a token at `certain`
    |     null blocks     |          held           |

`certain` is the position at which a request continues if every draft in flight is rejected.
"""

from __future__ import annotations

from blockstep.conformance.judge.attention_ranges import count_unattended, is_recurrent
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import RowKind, Step
from blockstep.conformance.judge.properties.property_check import Complaint, Complaints, sentence
from blockstep.conformance.judge.properties.queue_replay import unattended_ends
from blockstep.conformance.judge.properties.store_history import has_lost_all
from blockstep.spec import vocabulary as v


@sentence("P5", v.Schedule, v.Commit, needs="groups")
def attended_blocks_are_held(step: Step, history: History) -> Complaints:
    """A null block takes the place only of a block that no token attends to that may still be
    computed.

    This holds even if every draft in flight is rejected. The worker checks what a row reads in its
    own step.
    """
    nulls = [
        (request, at, table)
        for request in step.after.requests
        for at, table in enumerate(request.block_tables)
        if v.NULL_BLOCK in table and not has_lost_all(step.config, request)
    ]
    in_doubt = history.count_drafts_in_flight(step) if nulls else {}
    for request, at, table in nulls:
        group = step.config.groups[at]
        certain = request.num_computed_tokens - in_doubt.get(request.request_id, 0)
        end = count_unattended(group, certain)
        if is_recurrent(group):  # its state is in one of these
            end = max(len(table) - 1 - group.num_speculative_blocks, 0)
        if v.NULL_BLOCK in table[end:]:
            index = table.index(v.NULL_BLOCK, end)
            yield Complaint(
                f"{request.request_id!r} continues at position {certain} at the earliest, and has "
                f"no block at index {index} of group {at}, which it attends to",
                subjects=request.request_id,
            )


@sentence("P8", v.Schedule, needs="groups", fixes="when blocks are taken and given back")
def row_has_freed_skipped_blocks(step: Step, history: History) -> Complaints:
    """A request with a row holds no skipped block.

    When to give them back is a policy: an engine could wait. It is fixed because admissions rely on
    it, and the order of eviction depends on it.
    """
    in_doubt = history.count_drafts_in_flight()
    for row in step.rows:
        name, is_running = row.request_id, row.kind is RowKind.RUNNING
        first, unsure = row.first, 0
        if is_running:
            first, unsure = step.old[name].num_computed_tokens, in_doubt.get(name, 0)
        ends = unattended_ends(step, first, unsure, is_running)
        tables = step.new[name].block_tables
        for at, (end, table) in enumerate(zip(ends, tables, strict=True)):
            if any(table[:end]):
                kept = [block for block in table[:end] if block != v.NULL_BLOCK]
                yield Complaint(
                    f"{name!r} runs from position {row.first} on and keeps blocks {kept} "
                    f"of group {at}, which it skips",
                    subjects=name,
                )
