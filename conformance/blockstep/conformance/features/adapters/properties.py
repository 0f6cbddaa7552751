"""Adapters: P9 requests use no more different adapters than the limit, and others are skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import Complaint, Complaints, sentence
from blockstep.conformance.protocol.findings import Finding, violated
from blockstep.spec import vocabulary as v


@sentence(
    "P9", v.Schedule, of="changes", fixes="when adapters of requests without a row are exchanged"
)
def running_stays_within_max_loras(step: Step, history: History) -> Complaints:
    """Running requests, with a row or without, use at most `max_loras` different adapters."""
    limit = step.config.max_loras
    if not limit:
        return ()
    lives = [history.lives[name] for name in step.after.running if name in history.lives]
    used = sorted({life.request.adapter for life in lives if life.request.adapter is not None})
    return [Complaint(f"adapters {used} are in use, {limit} may be")] if len(used) > limit else ()


def judge_plan(
    config: v.Config, live: Mapping[v.RequestId, v.Request], plan: v.Plan
) -> Iterator[Finding]:
    """Yield a finding if the plan has too many adapters; `live` are the unfinished requests."""
    if not config.max_loras:
        return
    names = [row.request_id for row in plan.rows]
    adapters = {live[name].adapter for name in names if name in live} - {None}
    if len(adapters) > config.max_loras:
        what = f"adapters {sorted(map(str, adapters))} in one plan, {config.max_loras} allowed"
        yield violated("P9", "plan_stays_within_max_loras", what)


class LoraSlots:
    """The LoRA slots that requests occupy: at most `max_loras` different adapters."""

    def __init__(self, history: History) -> None:
        self._lives = history.lives
        self._most = history.config.max_loras
        self._taken: set[str] = set()

    def has_room_for(self, name: v.RequestId) -> bool:
        """Whether a request has no adapter, one that has a slot, or a slot is left."""
        adapter = self._lives[name].request.adapter
        return adapter is None or adapter in self._taken or len(self._taken) < self._most

    def take(self, name: v.RequestId) -> None:
        """Give a request's adapter a slot."""
        adapter = self._lives[name].request.adapter
        if adapter is not None:
            self._taken.add(adapter)


GATE = LoraSlots
