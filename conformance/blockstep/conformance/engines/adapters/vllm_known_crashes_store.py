"""The transfer events that the adapter does not send to a release of vLLM, since its scheduler
raises, with reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from blockstep.conformance.engines.adapters.vllm_build import RELEASE
from blockstep.conformance.engines.adapters.vllm_state import Run
from blockstep.conformance.lockstep.quirks import name_spared
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Quirk

UNKNOWN_SIGNAL = "a signal of a transfer about a request without one: it asserts (B21)"
SEVERAL_GROUPS = "invalid blocks with several groups: it unpacks one table (B47)"
SEVERAL_FAILURES = "loads of several that fail at once: they end in the order of a set of strings"
SHARED_FAILURES = (
    "a load of all known tokens that fails by the blocks of an earlier failed load alone: it "
    "asserts that a token is left to compute"
)
EVICTED_OUT_OF_A_SET = "blocks after an invalid one are reported as removed in the order of a set"
MASK_OF_THE_HELD = "the mask of a frame with an ended request whose blocks are held: it has a row"
FAILED_PROMISES = (
    "a failed load of a request with placeholders: its tokens are dropped, and stay placeholders"
)
CUT_SESSIONS = (
    "a failed load of a session that a frame has a row of: it may stop within its prompt, of which "
    "the end is then lost"
)
PARKED = "WAITING_FOR_REMOTE_KVS"
FULL = "FullAttentionSpec"
"""The name of vLLM's type of a group of full attention."""
RESET_BESIDE_HELD = "a forced reset while blocks are held for a transfer: it raises"
RESET_IN_FLIGHT = (
    "a forced reset with a store and a frame in flight: its blocks are freed behind it"
)
FEWER_THAN_NO_BLOCKS = (
    "a load that may end before the hit of a second full group: the pool is asked for fewer than "
    "no blocks, and counts more free ones than it has"
)
LOADS_OF_ALIGNED_STATES = (
    "an offer to a model with states of mode align: it asserts that nothing is loaded (#43508)"
)
ENDS_WHILE_PARKED = "a preempted request that waits for the store before its frame ends it"
SPARED_BY = {UNKNOWN_SIGNAL: "spare_signals", SEVERAL_GROUPS: "spare_group_failures"}
"""The engine flag that keeps away each event that a correct worker or store may send, but that the
release raises on."""
OUT_OF_REACH_WITH: Mapping[str, frozenset[str]] = {
    "states": frozenset(
        (
            *("transfers_failed_at_its_first_block", "transfers_failed_at_a_later_block"),
            *("transfers_failure_ends", "transfers_asked_anew"),
            "transfers_gave_back",  # blocks of a load that has arrived stay with its request
            name_spared(Quirk.FAILED_REQUEST_REPORTS_MINUS_ONE_CACHED_TOKENS),
        )
    )
}
"""Coverage goals of loads that fail (`SEVERAL_GROUPS`): configs with recurrent groups have at least
two."""


def find_store_reason(run: Run, event: v.Event) -> str | None:
    """Return why an event of a run with a store is not sent: a defect by which the release would
    raise, or end requests in the order of a set; None if it is sent."""
    match event:
        case v.Commit(frame_id=frame_id, transfers=transfers) if frame_id in run.frames:
            scheduled = run.frames[frame_id].num_scheduled_tokens
            return _find_report_reason(run, transfers, scheduled, _list_ending(run, event))
        case v.TransfersReported(transfers=transfers):
            return _find_report_reason(run, transfers, {})
        case v.KVOffer(num_tokens=num_tokens) if num_tokens and RELEASE.loads_no_aligned_states:
            modes = {group.mamba_cache_mode for group in run.config.groups}
            return LOADS_OF_ALIGNED_STATES if v.MambaCacheMode.ALIGN in modes else None
        case v.GrammarBitmask(frame_id=frame_id) if frame_id in run.frames:
            return MASK_OF_THE_HELD if _has_held_rows(run, frame_id) else None
        case v.Reset(reset_running_requests=True):
            # A request whose load brought no tokens holds its blocks as well.
            is_held = any(
                one.is_finished() or one.status.name == PARKED
                for one in run.scheduler.requests.values()
            )
            if not is_held and RELEASE.frees_behind_frames and run.frames:
                return RESET_IN_FLIGHT
            return RESET_BESIDE_HELD if is_held else None
        case v.Schedule():
            if RELEASE.takes_loads_by_turns and _may_take_less_than_nothing(run):
                return FEWER_THAN_NO_BLOCKS
            return ENDS_WHILE_PARKED if _may_end_while_parked(run) else None
    return None


def _list_ending(run: Run, event: v.Commit) -> frozenset[v.RequestId]:
    """Return the requests that an answer finishes by length and whose blocks the store then reads.

    The release handles the rows of an answer first, and the reports of the store after them: it
    accepts the end of such a read in the same answer.
    """
    found = set()
    for row in event.sampled:
        request = run.scheduler.requests.get(row.request_id)
        offer = None if run.store is None else run.store.offers.get(row.request_id)
        if request is None or offer is None or not offer.delays_free or not row.token_ids:
            continue
        asked = run.known[row.request_id].request
        num_outputs = len(request.output_token_ids) + len(row.token_ids)
        is_last = num_outputs >= max(asked.max_tokens, asked.min_tokens)
        if request.status.name == "RUNNING" and not asked.resumable and is_last:
            found.add(row.request_id)
    return frozenset(found)


def _find_report_reason(
    run: Run,
    transfers: v.KVTransfers,
    scheduled: Mapping[v.RequestId, int],
    over: Collection[v.RequestId] = (),
) -> str | None:
    """Return why a report must not be sent, given the tokens of each row of its answer; None if it
    may.

    `over`: requests that the answer finishes, and whose blocks the store may have read.
    """
    invalid = frozenset(transfers.invalid_block_ids)
    does_fail = run.config.kv_load_failure_policy is v.KVLoadFailurePolicy.FAIL
    parked = [one for one in run.get_skipped() if one.status.name == PARKED]
    looked_at = [*parked, *run.scheduler.running] if invalid else []
    if looked_at and len(run.managers) > 1:
        return SEVERAL_GROUPS
    affected = [one.request_id for one in looked_at if _list_invalid(run, one, invalid, scheduled)]
    if does_fail and len(affected) > 1:
        return SEVERAL_FAILURES
    if does_fail and _evicts_several(run, affected, invalid):
        return EVICTED_OUT_OF_A_SET
    if RELEASE.asserts_on_shared_failures and _leaves_no_token(run, parked, invalid):
        return SHARED_FAILURES
    requests = run.scheduler.requests
    if not does_fail and any(requests[name].num_output_placeholders for name in affected):
        return FAILED_PROMISES
    elsewhere = {name for frame in run.frames.values() for name in frame.num_scheduled_tokens}
    behind = elsewhere.intersection(affected).difference(scheduled)
    if not does_fail and any(getattr(requests[name], "resumable", False) for name in behind):
        return CUT_SESSIONS
    ending = affected if does_fail else ()
    over = frozenset(over).difference(affected)  # whose rows are passed over
    return None if _are_signals_known(run, transfers, ending, over) else UNKNOWN_SIGNAL


def _list_invalid(
    run: Run,
    request: Any,
    invalid: Collection[v.BlockId],
    scheduled: Mapping[v.RequestId, int],
) -> set[v.BlockId]:
    """Return the blocks of this request that the release considers invalid."""
    manager = run.managers[0]
    num_computed = request.num_computed_tokens - scheduled.get(request.request_id, 0)
    num_blocks = max(-(-num_computed // manager.block_size), 0)
    table = manager.req_to_blocks.get(request.request_id, ())
    return {block.block_id for block in table[:num_blocks]}.intersection(invalid)


def _leaves_no_token(run: Run, parked: Sequence[Any], invalid: Collection[v.BlockId]) -> bool:
    """Return whether a load of all tokens of a request fails although the release takes each of its
    blocks for valid, as an earlier request computes those that are invalid."""
    seen: set[v.BlockId] = set()
    for request in parked:
        found = _list_invalid(run, request, invalid, {})
        if found and found <= seen and request.num_computed_tokens == request.num_tokens:
            return True
        seen |= found
    return False


def _evicts_several(
    run: Run, affected: Collection[v.RequestId], invalid: Collection[v.BlockId]
) -> bool:
    """Return whether KV events would report the removal of more than one block of a request that
    fails."""
    for request in run.scheduler.running if run.config.enable_kv_cache_events else ():
        if request.request_id in affected:
            table = run.managers[0].req_to_blocks[request.request_id]
            first = next(index for index, one in enumerate(table) if one.block_id in invalid)
            return sum(one.block_hash is not None for one in table[first:]) > 1
    return False


def _has_held_rows(run: Run, frame_id: v.FrameId) -> bool:
    """Return whether a frame has a row with a grammar of a finished request that the scheduler
    still knows."""
    requests = run.scheduler.requests
    return any(
        name in requests
        and requests[name].is_finished()
        and run.known[name].request.grammar is not None
        for name in run.frames[frame_id].num_scheduled_tokens
    )


def _are_signals_known(
    run: Run,
    transfers: v.KVTransfers,
    ending: Collection[v.RequestId],
    over: Collection[v.RequestId],
) -> bool:
    """Return whether the release accepts each signal, in the order in which it handles them.

    Args:
        run: The run.
        transfers: What is reported.
        ending: Requests that the same report finishes for invalid blocks. If their load was
            confirmed before, the release no longer knows them.
        over: Requests that end by the answer that brings the report.
    """
    requests, gone = run.scheduler.requests, set()
    received = run.scheduler.finished_recving_kv_req_ids
    for name in dict.fromkeys(transfers.finished_recving):
        request = requests.get(name)
        if request is None or (name in ending and name in received):
            return False
        if request.is_finished() or name in ending:
            gone.add(name)
        elif request.status.name != PARKED:
            return False
    return all(
        name in requests and (requests[name].is_finished() or name in over) and name not in gone
        for name in transfers.finished_sending
    )


def _may_take_less_than_nothing(run: Run) -> bool:
    """Return whether a request may be admitted whose load ends before the hit of a second
    full-attention group.

    That group's hit is not cut to the hit of all groups, so the group needs a negative number of
    blocks for the load. Blocks that the same step publishes may be hit as well: a request with the
    same first block as another one is counted.
    """
    if [type(one.kv_cache_spec).__name__ for one in run.managers].count(FULL) < 2:
        return False
    offers = {} if run.store is None else run.store.offers
    unfinished = run.get_unfinished().values()
    for request in (*run.scheduler.waiting, *run.get_skipped()):
        offer, digests = offers.get(request.request_id), request.block_hashes
        if offer is None or not offer.num_tokens or not digests or request.num_computed_tokens:
            continue
        others = [one for one in unfinished if one is not request and one.block_hashes]
        if any(one.block_hashes[0] == digests[0] for one in others):
            return True
        if _has_hit_behind(run, request, offer.num_tokens):
            return True
    return False


def _has_hit_behind(run: Run, request: Any, num_offered: int) -> bool:
    """Return whether some group has a hit that is longer than the hit of all groups and the load
    together."""
    coordinator = run.scheduler.kv_cache_manager.coordinator
    hits, num_hit = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    end = max(num_hit, min(num_offered, request.num_tokens))
    pairs = zip(hits, run.managers, strict=True)
    return end > num_hit and any(len(found) > -(-end // one.block_size) for found, one in pairs)


def _may_end_while_parked(run: Run) -> bool:
    """Return whether a preempted request with a frame in flight is moved to the queue of requests
    that wait for the store.

    If that frame finishes it, it is removed from the other queue; the drafts that its frame rejects
    are subtracted from what is loaded.
    """
    offers = {} if run.store is None else run.store.offers
    in_flight = {name for frame in run.frames.values() for name in frame.num_scheduled_tokens}
    waiting = {one.request_id for one in (*run.scheduler.waiting, *run.get_skipped())}
    return any(
        offers[name].is_async or offers[name].num_tokens is None
        for name in in_flight & waiting & offers.keys()
    )
