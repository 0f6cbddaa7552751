"""View: the device's state as a snapshot, the same for every exact engine."""

from __future__ import annotations

from collections.abc import Iterable

from blockstep.impl.array_engine import ArrayEngine
from blockstep.impl.device import layout
from blockstep.impl.device.frames import Frame, get_tokens
from blockstep.impl.device.inbox import Inbox
from blockstep.impl.device.layout import State
from blockstep.impl.interning import STATUSES
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    BlockKey,
    PauseState,
    RequestId,
    RequestSnapshot,
    Snapshot,
    Stats,
    TokenIds,
)


def take_snapshot(
    doors: ArrayEngine[Frame], inbox: Inbox, previous_names: Iterable[RequestId]
) -> Snapshot:
    """Return the canonical state: nodes become structural keys, slots become request ids.

    `previous_names`: the requests of the last plan's rows.
    """
    s = inbox.state
    nodes = s.node.tolist()
    keys = _list_keys(inbox, nodes)
    return Snapshot(
        pause_state=doors.pause_state,
        waiting=_list_queue(inbox, layout.WAITING),
        skipped_waiting=_list_queue(inbox, layout.SKIPPED),
        running=tuple(
            inbox.requests[slot].request_id for slot in s.run[: int(s.num_running[0])].tolist()
        ),
        requests=tuple(_take_request(inbox, slot) for _, slot in sorted(inbox.slot_of.items())),
        ref_counts=tuple(s.ref_count.tolist()),
        free_queue=_list_free(inbox),
        block_keys=tuple(keys.get(node) for node in nodes),
        cached={keys[node]: _list_same(s, node) for node in set(nodes) - {layout.NONE}},
        frames_in_flight=tuple(doors.frames),
        next_frame_id=doors.next_frame_id,
        finished_req_ids=tuple(sorted(doors.finished_req_ids)),
        prev_scheduled_req_ids=tuple(sorted(previous_names)),
        stats=take_stats(s),
        has_work=_has_work(doors, inbox),
    )


def _has_work(doors: ArrayEngine[Frame], inbox: Inbox) -> bool:
    """Whether planning again may do anything before the next event."""
    if doors.finished_req_ids:
        return True
    if doors.pause_state is PauseState.PAUSED_NEW:
        return int(inbox.state.num_running[0]) > 0
    return doors.pause_state is PauseState.UNPAUSED and bool(inbox.slot_of)


def take_stats(s: State) -> Stats:
    """Return the counters since the start (P21)."""
    return Stats(
        prefix_cache_queries=int(s.queries[0]),
        prefix_cache_hits=int(s.hits[0]),
        preemptions=int(s.preemptions[0]),
        drafts_scheduled=int(s.drafts_scheduled[0]),
        drafts_accepted=int(s.drafts_accepted[0]),
    )


def _list_queue(inbox: Inbox, queue: int) -> tuple[RequestId, ...]:
    keys = inbox.state.key.tolist()
    waiting = [slot for slot in inbox.requests if inbox.state.queue[slot] == queue]
    return tuple(inbox.requests[slot].request_id for slot in sorted(waiting, key=keys.__getitem__))


def _list_free(inbox: Inbox) -> tuple[int, ...]:
    s, ring = inbox.state, inbox.dims.ring
    places = [place % ring for place in range(int(s.head[0]), int(s.tail[0]))]
    return tuple(block for block in s.ring[places].tolist() if block != layout.NONE)


def _list_keys(inbox: Inbox, carried: Iterable[int]) -> dict[int, BlockKey]:
    """Return the structural key of each carried node and group, by `group * nodes + node`."""
    keys: dict[int, BlockKey] = {}
    found: dict[int, BlockKey] = {}
    for number in {*carried} - {layout.NONE}:
        group, node = divmod(number, inbox.dims.nodes)
        _add_key(inbox, node, keys)
        found[number] = keys[node].in_group(group) if group else keys[node]
    return found


def _list_same(s: State, node: int) -> tuple[int, ...]:
    """Return the blocks that carry a node in a group, in order of publication.

    Raises:
        AssertionError: the list has a cycle.
    """
    found: list[int] = []
    block = int(s.first_block.flat[node])
    while block != layout.NONE:
        found.append(block)
        assert len(found) < len(s.next_same), f"blocks that carry node {node} follow each other"
        block = int(s.next_same[block])
    return tuple(found)


def _add_key(inbox: Inbox, node: int, keys: dict[int, BlockKey]) -> None:
    """Add the structural keys of a node and its ancestors."""
    s, missing = inbox.state, []
    while node != layout.NONE and node not in keys:
        missing.append(node)
        node = int(s.parent[node])
    for each in reversed(missing):
        adapter, salt, items, embeds = inbox.extras[int(s.node_extras[each])]
        tokens = tuple(s.node_tokens[each].tolist())
        parent = keys.get(int(s.parent[each]))
        keys[each] = BlockKey(parent, tokens, adapter, salt, items, embeds=embeds)


def _take_request(inbox: Inbox, slot: int) -> RequestSnapshot:
    s, request = inbox.state, inbox.requests[slot]
    num_drafts = int(s.num_drafts[slot])
    drafts: TokenIds = (DRAFT_PLACEHOLDER,) * num_drafts
    if drafts and not inbox.dims.is_async:
        drafts = tuple(s.drafts[slot, :num_drafts].tolist())
    return RequestSnapshot(
        request_id=request.request_id,
        status=STATUSES[int(s.status[slot])],
        output_token_ids=get_tokens(inbox, slot)[len(request.prompt_token_ids) :],
        num_computed_tokens=int(s.computed[slot]),
        num_output_placeholders=int(s.promised[slot]),
        spec_token_ids=drafts,
        is_prefill_chunk=bool(s.is_prefill[slot]),
        block_tables=tuple(
            tuple(table[slot, :held].tolist())
            for table, held in zip(s.tables, s.held[:, slot].tolist(), strict=True)
        ),
        num_cached_blocks=tuple(s.published[:, slot].tolist()),
        num_cached_tokens=int(s.cached[slot]),
        num_preemptions=int(s.preempted[slot]),
        grammar_ready=bool(s.grammar_ready[slot]),
    )
