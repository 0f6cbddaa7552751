"""View: the engine's state as a snapshot, in the form that all engines share."""

from __future__ import annotations

from blockstep.impl.host.core import Core
from blockstep.impl.host.table import RequestTable
from blockstep.spec.vocabulary import BlockId, RequestId, RequestSnapshot, Snapshot, TokenIds


def take_snapshot(core: Core) -> Snapshot:
    """Return the canonical state: keys in place of digests, request ids in place of slots."""
    table = core.table
    requests = table.requests
    block_keys, cached = core.prefix.show()
    return Snapshot(  # by position: keyword arguments make a dictionary, which takes as long again
        core.pause_state,
        tuple([requests[slot].request_id for slot in core.waiting]),
        tuple([requests[slot].request_id for slot in core.skipped_waiting]),
        tuple([requests[slot].request_id for slot in core.running]),
        tuple([_request(core, table, slot, name) for name, slot in sorted(table.slot_of.items())]),
        tuple(core.pool.ref_counts),
        tuple(core.pool.free_queue()),
        block_keys,
        cached,
        tuple(core.frames),
        core.next_frame_id,
        tuple(sorted(core.finished_req_ids)),
        tuple(sorted(core.prev_scheduled_req_ids)),
        core.stats(),
        encoder=None if core.encoder is None else core.encoder.snapshot(),
        transfers=None if core.transfers is None else core.transfers.snapshot(),
        pins=None if core.pins is None else core.pins.snapshot(),
        admission_closed=core.is_closed,
        has_work=core.has_work(),
    )


def _request(core: Core, table: RequestTable, slot: int, request_id: RequestId) -> RequestSnapshot:
    grammar_state, reasoning_ended = 0, False
    if request_id in core.matchers:
        matcher = core.matchers[request_id]
        grammar_state, reasoning_ended = matcher.position.state, matcher.reasoning_ended
    prompt_token_ids: TokenIds = ()
    num_streaming_updates = 0
    tables: list[tuple[BlockId, ...]] = []
    nums_cached: list[int] = []
    for held in table.holdings[slot]:
        tables.append(tuple(held.blocks))
        nums_cached.append(held.num_cached)
    if request_id in core.sessions:
        prompt_token_ids = table.requests[slot].prompt_token_ids
        num_streaming_updates = len(core.sessions[request_id].updates)
    return RequestSnapshot(  # likewise
        request_id,
        table.statuses[slot],
        tuple(table.lineages[slot].tokens[table.num_prompt[slot] :]),
        table.num_computed[slot],
        table.num_output_placeholders[slot],
        table.spec_token_ids[slot],
        table.is_prefill_chunk[slot],
        tuple(tables),
        tuple(nums_cached),
        table.num_cached_tokens[slot],
        table.num_preemptions[slot],
        table.grammar_ready[slot],
        grammar_state,
        reasoning_ended,
        prompt_token_ids,
        num_streaming_updates,
    )
