"""Liveness: once all is healed, no state may come back before somebody got a token (P10).

A drained scheduler is deterministic and nothing comes from outside, so a state that returns will
return for ever. The cycle that is reported is the shortest: it ends at the first return.

A plan without rows is no progress by itself, though it loads or preempts: a load that is told again
and again, or a request that is admitted and preempted in the same plan, goes on for ever. Where no
state is shown such plans have a bound.
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
from blockstep.conformance.protocol.sessions import Session
from blockstep.spec.vocabulary import MAX_INT, Plan, Request, RequestId, Snapshot, Stats

LINES_MAX = 12
"""Plans of a cycle that are shown, at most."""


@dataclass(slots=True)
class Watch:
    """Remembers the states of a drain since the last token."""

    progress: tuple[int, int] = (-1, -1)
    """Tokens delivered to the unfinished, and how many those are."""
    plans: list[Plan] = field(default_factory=list)
    """Since the last progress."""
    seen: dict[object, list[tuple[int, Snapshot]]] = field(default_factory=dict)
    """States after these plans, with how many of them it took to get there; by what is cheap to
    compare."""
    cycle: list[Plan] = field(default_factory=list)
    delivered: tuple[int, int] = (-1, -1)
    """As `progress`, but as the client was told."""
    num_idle: int = 0
    """Plans without rows since the client was told of the last token, with no frame in flight."""

    def see(
        self,
        plan: Plan,
        is_in_flight: bool,
        is_token_due: bool,
        after: Snapshot | None,
        delivered: tuple[int, int] = (0, 0),
    ) -> str:
        """Take in a plan and the state after it; why nothing can ever come of it, or "".

        `is_token_due` says whether a frame in flight will sample for anybody. `delivered`: tokens
        that clients of unfinished requests were told, and how many requests are unfinished.
        """
        if delivered != self.delivered:
            self.delivered, self.num_idle = delivered, 0
        if not plan.rows:
            if is_in_flight:
                return ""
            if not (plan.preempted_req_ids or plan.kv_loads):
                return "a plan is empty although nothing is due from outside"
            self.num_idle += 1
            if self.num_idle > idle_bound(delivered[1]):
                return f"{self.num_idle} plans loaded or preempted, and no row came of it"
        if after is None:
            return ""
        num_outputs = sum(len(request.output_token_ids) for request in after.requests)
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
        """The finding, with the cycle if there is one."""
        names = ", ".join(live)
        shown = [describe_observation(plan) for plan in self.cycle[:LINES_MAX]]
        if len(self.cycle) > LINES_MAX:
            shown.append(f"... {len(self.cycle)} plans in all")
        return Finding(
            FindingKind.LIVENESS,
            "P10",
            "every_request_ends_once_all_is_healed",
            f"{why}; unfinished: {names}",
            tuple(Difference("cycle", "a token in it", line) for line in shown),
            Subjects(tuple(live)[:SUBJECTS_MAX]),
        )


def is_same_state(left: Snapshot, right: Snapshot) -> bool:
    """Whether two states have the same future: equal but for what only ever grows, and for ended
    requests of which no plan has told yet."""
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
    """Plans without rows that may load or preempt until a token is delivered.

    Each request may be loaded once, give its blocks up to another one, and be loaded again; and it
    may be preempted in between.
    """
    return 3 * (num_live + 1)


def drain_bound(
    live: Mapping[RequestId, Request],
    max_model_len: int = MAX_INT,
    sessions: Mapping[RequestId, Session] | None = None,
) -> int:
    """Steps within which a drained scheduler must end these requests.

    Each step computes a token at least, and each of the requests may be preempted by each other
    one and start again. A generous bound: it is there to end, not to measure.
    """
    chunks = [chunk for one in (sessions or {}).values() for chunk in one.updates]
    texts = [len(one.prompt_token_ids) + one.max_tokens for one in (*live.values(), *chunks)]
    work = sum(min(length, max_model_len) for length in texts)
    return 20 + work * (1 + len(live) + len(chunks))
