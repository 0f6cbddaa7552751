"""Liveness: in a drain no state may return before a token was delivered (P10).

A drained scheduler is deterministic and gets no events from outside, so a state that returns will
return for ever. The reported cycle is the shortest: it ends at the first return.

A plan without rows is no progress by itself, though it loads or preempts: a load that is started
again and again, or a request that is admitted and preempted in the same plan, repeats for ever. If
the engine shows no state, the number of such plans is limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blockstep.conformance.protocol.findings import (
    SUBJECTS_MAX,
    Difference,
    Finding,
    FindingKind,
    Subjects,
)
from blockstep.conformance.protocol.program import describe_observation
from blockstep.conformance.protocol.session_tracker import Session
from blockstep.spec.vocabulary import MAX_INT, Plan, Request, RequestId, Snapshot, Stats

LINES_MAX = 12
"""Most plans of a cycle that are shown."""


@dataclass(slots=True)
class Watch:
    """States of a drain since the last token."""

    progress: tuple[int, int] = (-1, -1)
    """Tokens delivered to unfinished requests, and the number of these requests."""
    plans: list[Plan] = field(default_factory=list)
    """Plans since the last progress."""
    seen: dict[object, list[tuple[int, Snapshot]]] = field(default_factory=dict)
    """States after these plans, with the number of plans before each, by fields that are cheap to
    compare."""
    cycle: list[Plan] = field(default_factory=list)
    delivered: tuple[int, int] = (-1, -1)
    """Tokens that clients have received, and the number of unfinished requests."""
    num_idle: int = 0
    """Plans without rows and without a frame in flight since clients received the last token."""

    def see(
        self,
        plan: Plan,
        is_in_flight: bool,
        is_token_due: bool,
        after: Snapshot | None,
        delivered: tuple[int, int] = (0, 0),
    ) -> str:
        """Record a plan and the state after it; return why no progress is possible, or "".

        `is_token_due` says whether a frame in flight will sample a token. `delivered`: tokens that
        clients of unfinished requests have received, and the number of unfinished requests.
        """
        if delivered != self.delivered:
            self.delivered, self.num_idle = delivered, 0
        if not plan.rows:
            if is_in_flight:
                return ""
            if not (plan.preempted_req_ids or plan.kv_loads):
                return "a plan is empty, although no output, load or other event is due"
            self.num_idle += 1
            if self.num_idle > idle_bound(delivered[1]):
                return f"{self.num_idle} plans without rows loaded or preempted"
        if after is None:
            return ""
        num_outputs = sum([len(request.output_token_ids) for request in after.requests])
        progress = (num_outputs, len(after.requests))
        if progress != self.progress:
            self.progress, self.plans, self.seen = progress, [], {}
        self.plans.append(plan)
        if is_token_due:
            return ""  # so this state will not return
        alike = self.seen.setdefault((after.waiting, after.running, after.free_queue), [])
        first = next((at for at, state in alike if is_same_state(state, after)), None)
        alike.append((len(self.plans), after))
        if first is None:
            return ""
        self.cycle = self.plans[first:]
        return f"the same state returns after {len(self.cycle)} plans that delivered no token"

    def stall(self, live: Mapping[RequestId, Request], why: str) -> Finding:
        """Return the finding, with the cycle if there is one."""
        names = ", ".join(live)
        shown = [describe_observation(plan) for plan in self.cycle[:LINES_MAX]]
        if len(self.cycle) > LINES_MAX:
            shown.append(f"... {len(self.cycle)} plans in all")
        return Finding(
            FindingKind.LIVENESS,
            "P10",
            "every_request_finishes_after_faults_stop",
            f"{why}; unfinished: {names}",
            tuple(Difference("cycle", "a token in it", line) for line in shown),
            Subjects(tuple(live)[:SUBJECTS_MAX]),
        )


def is_same_state(left: Snapshot, right: Snapshot) -> bool:
    """Return whether two states have the same future: all is equal except counters, frame ids and
    finished requests that no plan has listed yet."""
    return len(left.frames_in_flight) == len(right.frames_in_flight) and _what_matters(
        left
    ) == _what_matters(right)


def _what_matters(snapshot: Snapshot) -> Snapshot:
    return replace(
        snapshot,
        requests=tuple(replace(request, num_preemptions=0) for request in snapshot.requests),
        frames_in_flight=(),
        next_frame_id=0,
        finished_req_ids=(),
        stats=Stats(),
        has_work=None,
    )


def idle_bound(num_live: int) -> int:
    """Return how many plans without rows may load or preempt before a token is delivered.

    Each request may be loaded once, lose its blocks to another one, and be loaded again; and it may
    be preempted in between.
    """
    return 3 * (num_live + 1)


def drain_bound(
    live: Mapping[RequestId, Request],
    max_model_len: int = MAX_INT,
    sessions: Mapping[RequestId, Session] | None = None,
) -> int:
    """Return the steps within which a drained scheduler must finish these requests.

    Each step computes at least one token, and each request may be preempted by each other one and
    start again. The bound is generous: it ends a run, and measures nothing.
    """
    chunks = [chunk for one in (sessions or {}).values() for chunk in one.updates]
    texts = [len(one.prompt_token_ids) + one.max_tokens for one in (*live.values(), *chunks)]
    work = sum(min(length, max_model_len) for length in texts)
    return 20 + work * (1 + len(live) + len(chunks))
