"""Liveness in small worlds: no fair cycle of states without progress (P10).

Progress is a delivered token. Without outside events only Schedule and Commit are left, and a fair
run takes each of them again and again while it is possible. So there must be no cycle of Schedules
and of Commits that deliver nothing, while an unpaused request could run. A Schedule that changes
nothing while a frame is in flight is left out, since the commit of that frame is due. So is a state
in which the end of a transfer or a store's offer is due. While transfers are in flight the only
step is that one of them completes; a request that loads the same again and again is a cycle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from blockstep.conformance.explore.canonical import Digest
from blockstep.conformance.explore.transition_checks import Moment
from blockstep.spec import vocabulary as v
from blockstep.spec.features.kv_transfer.transfers import TRANSFERS, get_offer, is_moving
from blockstep.spec.features.structured_output import GRAMMAR_READY

GRAMMAR = v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def get_no_progress(moment: Moment, is_loop: bool) -> bool:
    """Whether a transition may be part of a forbidden cycle."""
    state = moment.before
    match moment.event, moment.observation:
        case v.Schedule(), v.Plan() if not (is_loop and state.frames):
            pass
        case v.Commit(transfers=transfers), v.Outputs(rows=()) if not transfers.invalid_block_ids:
            pass
        case v.TransfersReported(transfers=transfers), v.Outputs(rows=()):
            if is_loop or transfers.invalid_block_ids:
                return False
        case _:
            return False
    ends_transfer = isinstance(moment.event, v.TransfersReported)
    if (
        is_moving(TRANSFERS.of(state)) != ends_transfer
        or state.pause_state is not v.PauseState.UNPAUSED
    ):
        return False
    return any(
        get_offer(TRANSFERS.of(state), request.request_id).num_tokens is not None
        and request.status is not v.Status.WAITING_FOR_STREAMING_REQ
        and (GRAMMAR_READY.of(request) or request.status is not GRAMMAR)
        for request in state.requests.values()
    )


def find_cycles(stalls: Iterable[Iterable[Digest]]) -> list[list[Digest]]:
    """Return the states of each of the shortest cycles among these transitions.

    Each item alternates sources and targets. States without a way out are removed until only states
    on or before cycles are left.
    """
    ways: dict[Digest, list[Digest]] = {}
    sources: dict[Digest, list[Digest]] = {}
    for pairs in stalls:
        digests = iter(pairs)
        for source, target in zip(digests, digests, strict=True):
            ways.setdefault(source, []).append(target)
            sources.setdefault(target, []).append(source)
    num_ways = {source: len(targets) for source, targets in ways.items()}
    dead = [target for target in sources if target not in ways]
    while dead:
        for source in sources.get(dead.pop(), ()):
            num_ways[source] -= 1
            if num_ways[source] == 0:
                dead.append(source)
    left = sorted(digest for digest, count in num_ways.items() if count)
    cycles = (_shortest_cycle(ways, set(left), digest) for digest in left[:1000])
    found = [cycle for cycle in cycles if cycle]
    shortest = min(map(len, found), default=0)
    return [cycle for cycle in found if len(cycle) == shortest]


def _shortest_cycle(
    ways: dict[Digest, list[Digest]], left: set[Digest], start: Digest
) -> list[Digest]:
    """Return the states of a shortest cycle through `start`, beginning with it; [] if there is
    none.
    """
    before: dict[Digest, Digest] = {}
    queue = deque([start])
    while queue:
        digest = queue.popleft()
        for target in ways[digest]:
            if target == start:
                cycle = [digest]
                while cycle[-1] != start:
                    cycle.append(before[cycle[-1]])
                return cycle[::-1]
            if target in left and target not in before:
                before[target] = digest
                queue.append(target)
    return []
