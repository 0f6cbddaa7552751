"""Engines with other policies than the specification that are right.

Each is the specification with another policy. None breaks a property that an engine must keep, so
`safety` must say nothing of any: they are the controls against false alarms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from equivalent_engines import (
    NUM_PLANS,
    OtherIdsInReports,
    Spec,
    leave_last_hit_out,
    share_nothing,
    take_last_unnamed,
)

from blockstep.conformance.engine import EngineTraits, Safety
from blockstep.conformance.museum.admission import admission_after_preemption
from blockstep.conformance.protocol.changed_spec import ChangedSpec
from blockstep.spec import vocabulary as v
from blockstep.spec.core.admission import get_waiting_share, process_waiting_phase
from blockstep.spec.core.block_pool import Pool, find_block
from blockstep.spec.core.queues import Requests, select_victim
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.schedule import get_num_running_tokens, process_running_phase
from blockstep.spec.core.speculation import can_take_drafts, process_drafts
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features.kv_transfer.transfers import compute_num_external
from blockstep.spec.features.resets import process_reset

SAFETY = EngineTraits(equivalence=Safety())


class Unlike(Spec):
    """The specification, held to properties alone."""

    traits = SAFETY


class OtherBlocks(Unlike):
    """It takes the last free block without a key."""

    change = staticmethod(take_last_unnamed)


class OtherNames(OtherIdsInReports):
    """The specification with other ids of blocks and a sorted free queue."""

    traits = SAFETY


def preempt_the_second(rules: Rules, _config: v.Config) -> Rules:
    def select(policy: v.Policy, running: list[v.RequestId], requests: Requests) -> int:
        if policy is v.Policy.FCFS and len(running) > 2:
            return len(running) - 2
        return rules[select_victim](policy, running, requests)

    return rules.replacing(select_victim, select)


class OtherVictim(Unlike):
    """FCFS: it preempts the second youngest request, unless that is the oldest."""

    change = staticmethod(preempt_the_second)


def cut_chunks(rules: Rules, config: v.Config) -> Rules:
    def cut(request: RequestState, count: int) -> int:
        is_free = config.enable_chunked_prefill and not config.groups
        return min(count, 2) if is_free and not request.request.items else count

    def run(step: Step, request: RequestState) -> int:
        is_prefill = request.num_computed_tokens < request.num_known_tokens - 1
        count = rules[get_num_running_tokens](step, request)
        return cut(request, count) if is_prefill else count

    def admit(step: Step, request: RequestState, num_start: int) -> int | Verdict:
        count = rules[get_waiting_share](step, request, num_start)
        return count if isinstance(count, Verdict) else cut(request, count)

    return rules.replacing(get_num_running_tokens, run).replacing(get_waiting_share, admit)


class SmallChunks(Unlike):
    """It runs at most two tokens of a prompt in a step, where chunks may end anywhere."""

    change = staticmethod(cut_chunks)


def skip_the_youngest(rules: Rules, _config: v.Config) -> Rules:
    def run(step: Step) -> None:
        NUM_PLANS.set(step, NUM_PLANS.of(step) + 1)
        rules[process_running_phase](step)

    def count(step: Step, request: RequestState) -> int:
        is_skipped = NUM_PLANS.of(step) % 4 == 0 and len(step.running) > 1
        if is_skipped and request.request_id == step.running[-1]:
            return 0
        return rules[get_num_running_tokens](step, request)

    return rules.replacing(process_running_phase, run).replacing(get_num_running_tokens, count)


class Skipping(Unlike):
    """The youngest of several running requests gets no row in every fourth step."""

    change = staticmethod(skip_the_youngest)


class UnsharedHits(Unlike):
    """It does not hit a block that another request holds, and computes it again."""

    change = staticmethod(share_nothing)


class ShortHitting(Unlike):
    """It leaves out the last block of each hit."""

    change = staticmethod(leave_last_hit_out)


def find_newest(rules: Rules, _config: v.Config) -> Rules:
    def find(pool: Pool, key: v.BlockKey) -> v.BlockId | None:
        return pool.cached[key][-1] if key in pool.cached else None

    return rules.replacing(find_block, find)


class NewestCopy(Unlike):
    """It hits the copy of a block that was published last."""

    change = staticmethod(find_newest)


def admit_newest_first(rules: Rules, config: v.Config) -> Rules:
    def admit(step: Step) -> None:
        step.waiting.reverse()
        rules[process_waiting_phase](step)
        step.waiting.reverse()

    is_sorted = config.policy is v.Policy.PRIORITY
    return rules if is_sorted else rules.replacing(process_waiting_phase, admit)


class NewestFirst(Unlike):
    """It admits the request that came last."""

    change = staticmethod(admit_newest_first)


class AdmittingAlways(Unlike):
    """It admits requests also in a step in which it has preempted one, and that one, too."""

    change = staticmethod(admission_after_preemption)


def keep_one_draft(rules: Rules, config: v.Config) -> Rules:
    def take(
        state: State, drafts: tuple[v.RowTokens, ...]
    ) -> tuple[State, v.DraftsTaken] | v.Rejected:
        is_long = any(len(row.token_ids) > config.num_speculative_tokens for row in drafts)
        kept = tuple([replace(row, token_ids=row.token_ids[:1]) for row in drafts])
        return rules[process_drafts](state, drafts if is_long else kept)

    return rules.replacing(process_drafts, take)


class FewDrafts(Unlike):
    """It keeps one draft of each proposal."""

    change = staticmethod(keep_one_draft)


def keep_no_draft(rules: Rules, _config: v.Config) -> Rules:
    return rules.replacing(can_take_drafts, lambda _state, _request: False)


class NoDrafts(Unlike):
    """It drops every proposal."""

    change = staticmethod(keep_no_draft)


class LateEnds(Unlike):
    """An abort takes effect with the next plan."""

    def __init__(self, config: v.Config) -> None:
        super().__init__(config)
        self.to_end: dict[str, None] = {}

    def list_known(self, names: Sequence[str]) -> dict[str, None]:
        """Return the unfinished requests among these names, each once."""
        return {name: None for name in names if name in self.state.requests}

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Abort) and not v.event_problem(event):
            named = self.list_known(event.request_ids)
            self.to_end |= named
            return v.Aborted((), tuple(named))
        is_full = len(self.state.frames) >= self.config.max_frames_in_flight
        if isinstance(event, v.Schedule) and self.to_end and not is_full:
            names, self.to_end = tuple(self.to_end), {}
            super().apply(v.Abort(names))
        answer = super().apply(event)
        self.to_end = self.list_known([*self.to_end])
        return answer


def reset_by_force(rules: Rules, _config: v.Config) -> Rules:
    def reset(state: State, reset: v.Reset) -> tuple[State, v.ResetDone]:
        if not reset.reset_running_requests:
            return state, v.ResetDone(False)
        return rules[process_reset](state, reset)

    return rules.replacing(process_reset, reset)


class Reluctant(Unlike):
    """It resets its cache by force only."""

    change = staticmethod(reset_by_force)


def load_less(rules: Rules, config: v.Config) -> Rules:
    def count(offer: v.KVOffer, num_known: int, num_local: int) -> int:
        found = rules[compute_num_external](offer, num_known, num_local)
        return max(found // config.block_size - 1, 0) * config.block_size

    return rules.replacing(compute_num_external, count)


class LoadingLess(Unlike):
    """It loads one block less than the store has."""

    change = staticmethod(load_less)


UNLIKE: tuple[type[ChangedSpec], ...] = (
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
