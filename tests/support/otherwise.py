"""Engines that decide otherwise than the specification, and are right.

Each is our host with another policy. None breaks a property that an engine must keep, so `safety`
must say nothing of any: they are the controls against false alarms.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from equivalent_engines import OtherIdsTold, OtherPool

from blockstep.conformance.engine import EngineTraits, Safety
from blockstep.impl.host import HostEngine
from blockstep.impl.host.prefix import PrefixMap
from blockstep.impl.host.queues import FcfsQueue
from blockstep.spec import vocabulary as v

SAFETY = EngineTraits(equivalence=Safety())


class Unlike(HostEngine):
    """Our host, held to the properties alone."""

    traits = SAFETY


class OtherBlocks(Unlike):
    """Of the free blocks without a key it takes the last one."""

    pool_type = OtherPool


class OtherNames(OtherIdsTold):
    """Its blocks have other ids, and its free queue is a sorted set."""

    traits = SAFETY


class OtherVictim(Unlike):
    """FCFS: it preempts the second youngest, if that is not the oldest, which always goes on."""

    def _select_victim(self) -> int:
        if self.config.policy is v.Policy.FCFS and len(self.running) > 2:
            return len(self.running) - 2
        return super()._select_victim()


class SmallChunks(Unlike):
    """It runs at most two tokens of a prompt in a step, where chunks may end anywhere."""

    def _cut(self, slot: int, count: int) -> int:
        config = self.config
        is_free = config.enable_chunked_prefill and not config.groups
        has_items = bool(self.table.requests[slot].items)
        return min(count, 2) if is_free and not has_items else count

    def _tokens_to_run(self, slot: int, budget: int) -> int:
        table = self.table
        is_prefill = table.num_computed[slot] < table.num_known[slot] - 1
        count = super()._tokens_to_run(slot, budget)
        return self._cut(slot, count) if is_prefill else count

    def _tokens_to_admit(self, slot: int, num_hit: int, budget: int) -> int:
        return self._cut(slot, super()._tokens_to_admit(slot, num_hit, budget))


class Skipping(Unlike):
    """In every fourth step the youngest of several running requests gets no row."""

    num_plans = 0

    def _schedule_running(self, step: Any) -> None:
        self.num_plans += 1
        super()._schedule_running(step)

    def _tokens_to_run(self, slot: int, budget: int) -> int:
        is_skipped = self.num_plans % 4 == 0 and len(self.running) > 1
        if is_skipped and slot == self.running[-1]:
            return 0
        return super()._tokens_to_run(slot, budget)


class UnsharedHits(Unlike):
    """It does not hit a block that another request holds, and computes it again."""

    def _find_hits(self, slot: int) -> list[int]:
        return list(takewhile(self.pool.is_free, super()._find_hits(slot)))


class ShortHits(PrefixMap):
    """Its hits are a block shorter than they could be."""

    def hits(self, *args: Any) -> list[int]:
        return super().hits(*args)[:-1]


class ShortHitting(Unlike):
    """Its hits are a block shorter than they could be."""

    prefix_type = ShortHits


class NewestCopy(Unlike):
    """Of several copies of a block it hits the one that was published last."""

    def __init__(self, config: v.Config, digest: Any = "sha256") -> None:
        super().__init__(config, digest)
        setattr(self.prefix, "_choose", lambda blocks: blocks[-1])  # noqa: B010 - for mypy


class NewestFirst(Unlike):
    """It admits the request that came last."""

    def _schedule_waiting(self, step: Any) -> None:
        queue = self.waiting
        if isinstance(queue, FcfsQueue):
            queue._slots.reverse()
        super()._schedule_waiting(step)
        if isinstance(queue, FcfsQueue):
            queue._slots.reverse()


class AdmittingAlways(Unlike):
    """It admits requests also in a step in which it has preempted one, and that one, too."""

    def _issue_plan(self, step: Any) -> Any:
        may_admit = self.pause_state is v.PauseState.UNPAUSED and not self.is_closed
        if step.preempted_req_ids and may_admit:
            self._schedule_waiting(step)
        return super()._issue_plan(step)


class FewDrafts(Unlike):
    """It keeps one draft of each proposal."""

    def _cut_proposal(self, row: v.RowTokens) -> v.TokenIds:
        return super()._cut_proposal(row)[:1]


class NoDrafts(Unlike):
    """It drops every proposal."""

    def _may_draft(self, _slot: int) -> bool:
        return False


class LateEnds(Unlike):
    """An abort takes effect with the next plan."""

    def __init__(self, config: v.Config, digest: Any = "sha256") -> None:
        super().__init__(config, digest)
        self.to_end: dict[str, None] = {}

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Abort) and not v.event_problem(event):
            named = dict.fromkeys(n for n in event.request_ids if n in self.table.slot_of)
            self.to_end |= named
            return v.Aborted((), tuple(named))
        is_full = len(self.frames) >= self.config.max_frames_in_flight
        if isinstance(event, v.Schedule) and self.to_end and not is_full:
            names, self.to_end = tuple(self.to_end), {}
            super().apply(v.Abort(names))
        answer = super().apply(event)
        if self.to_end:
            self.to_end = {name: None for name in self.to_end if name in self.table.slot_of}
        return answer


class Reluctant(Unlike):
    """It resets its cache by force only."""

    def _reset(self, reset_running_requests: bool) -> bool:
        return reset_running_requests and super()._reset(reset_running_requests)


class LoadingLess(Unlike):
    """It has a store load a block less than that has."""

    def _find_load(self, slot: int, num_hit: int) -> tuple[int, bool]:
        count, is_async = super()._find_load(slot, num_hit)
        left = max(count - self.config.block_size, 0)
        if left % self.config.block_size:
            left -= left % self.config.block_size
        return left, is_async and left > 0


UNLIKE: tuple[type[HostEngine], ...] = (
    OtherBlocks,
    OtherNames,
    OtherVictim,
    SmallChunks,
    Skipping,
    UnsharedHits,
    ShortHitting,
    NewestCopy,
    NewestFirst,
    AdmittingAlways,
    FewDrafts,
    NoDrafts,
    LateEnds,
    Reluctant,
    LoadingLess,
)
