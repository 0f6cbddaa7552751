"""Engines with one defect each, that answer and show their state as any other engine would.

Each is our host, and each defect is one that was reported of a real engine, or is the plainest one
against a property that `safety` asks. What must find it stands beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from otherwise import Unlike

from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v


class PutsReportsAside(Unlike):
    """That a store has read blocks is looked at only while a request waits (SGLang #20049)."""

    def __init__(self, config: v.Config, digest: Any = "sha256") -> None:
        super().__init__(config, digest)
        self.put_aside: list[v.KVTransfers] = []

    def _take_finished(self, transfers: Any, report: v.KVTransfers) -> None:
        self.put_aside.append(report)
        if len(self.waiting) or len(self.skipped_waiting):
            self._look()

    def _look(self) -> None:
        assert self.transfers is not None
        reports, self.put_aside = self.put_aside, []
        for report in reports:
            super()._take_finished(self.transfers, report)

    def _submit(self, request: v.Request) -> v.Ack | v.Rejected:
        answer = super()._submit(request)
        if self.transfers is not None:
            self._look()
        return answer

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        if self.transfers is not None:
            self._look()


class TellsLastHit(Unlike):
    """Clients are told the hit of the last admission, not of the first (LMCache #2912)."""

    def _start(self, slot: int, num_hit: int, *args: Any) -> None:
        self.table.num_cached_tokens[slot] = -1
        super()._start(slot, num_hit, *args)


class SeatsOfRows(Unlike):
    """It counts the rows of a step against `max_num_seqs`, and leaves out a running request."""

    def _tokens_to_run(self, slot: int, budget: int) -> int:
        if len(self.waiting) and len(self.running) > 1 and slot == self.running[-1]:
            return 0
        return super()._tokens_to_run(slot, budget)

    def _schedule_waiting(self, step: Any) -> None:
        config, left = self.config, len(self.running) - len(step.rows)
        self.config = replace(config, max_num_seqs=config.max_num_seqs + left)
        super()._schedule_waiting(step)
        self.config = config


class KeepsOldDrafts(Unlike):
    """It takes drafts for a request in flight, and runs them at another position."""

    def _may_draft(self, slot: int) -> bool:
        status = self.table.statuses[slot]
        return status is v.Status.RUNNING and self.table.num_outputs(slot) > 0


class TellsNoAborts(Unlike):
    """No plan tells a worker of requests that were aborted."""

    def _abort(self, request_ids: tuple[v.RequestId, ...]) -> v.Aborted:
        before = set(self.finished_req_ids)
        answer = super()._abort(request_ids)
        for name in set(self.finished_req_ids) - before:
            self.finished_req_ids.remove(name)
        return answer


class IgnoresFailedGrammars(Unlike):
    """A grammar that cannot be had ends nothing."""

    def _fail_grammar(self, request_id: v.RequestId) -> v.Outputs | v.Rejected:
        if request_id in self.table.slot_of:
            return v.Outputs()
        return super()._fail_grammar(request_id)


class LeavesSessions(Unlike):
    """A session that rests stays when its client says that no more input comes."""

    def _update(self, update: v.Request) -> Any:
        slot = self.table.slot_of.get(update.request_id)
        resting = v.Status.WAITING_FOR_STREAMING_REQ
        if slot is not None and self.table.statuses[slot] is resting and not update.resumable:
            return v.Ack()
        return super()._update(update)


class KeepsPins(Unlike):
    """It keeps what it has pinned beyond its time."""

    def _begin_with_pins(self, pins: Any) -> None:
        """Nothing ends."""


class CountsTwice(Unlike):
    """A request that was preempted is counted twice."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        self.preemptions += 1


class DropsNoHit(Unlike):
    """With a draft head it gives back no block of a hit."""

    def _find_hits(self, slot: int) -> list[int]:
        if not self._asks_cache(slot):
            return []
        limit = (self.table.num_known[slot] - 1) // self.block_size
        return self.prefix.hits(self.table.lineages[slot], limit)


class LooksNotAhead(Unlike):
    """It takes no slots for drafts."""

    def __init__(self, config: v.Config, digest: Any = "sha256") -> None:
        super().__init__(config, digest)
        self.num_lookahead_tokens = 0


class Seeded(NamedTuple):
    """A defect, and the sentence that must find it."""

    engine: type[HostEngine]
    sentence: str
    features: tuple[str, ...] = ()
    if_hidden: str = ""
    """The sentence where no state is shown; "": nothing can be seen then."""


SEEDED = (
    Seeded(PutsReportsAside, "every_hold_has_an_owner_and_an_end", ("transfers",)),
    Seeded(TellsLastHit, "first_hit_is_remembered",
        if_hidden="told_cached_tokens_are_those_of_the_first_hit"),
    Seeded(SeatsOfRows, "worker_keeps_at_most_max_num_seqs_requests",
        if_hidden="worker_keeps_at_most_max_num_seqs_requests"),
    Seeded(KeepsOldDrafts, "dispatched_drafts_are_the_last_proposed_ones", ("drafts",),
        "dispatched_drafts_are_the_last_proposed_ones"),
    Seeded(TellsNoAborts, "plan_tells_who_ended", if_hidden="plan_tells_who_ended"),
    Seeded(IgnoresFailedGrammars, "failed_grammar_ends_its_request", ("masks",),
        "failed_grammar_ends_its_request"),
    Seeded(LeavesSessions, "end_of_its_input_ends_who_rests", ("sessions",),
        "end_of_its_input_ends_who_rests"),
    Seeded(KeepsPins, "pins_end_in_time", ("pins",)),
    Seeded(CountsTwice, "counters_grow_by_what_happened"),
    Seeded(DropsNoHit, "draft_head_has_run_the_token_behind_a_hit", ("drafts",),
        "draft_head_has_run_the_token_behind_a_hit"),
    Seeded(LooksNotAhead, "table_holds_the_slots_of_its_drafts", ("drafts",),
        "table_holds_the_slots_of_its_drafts"),
)  # fmt: skip
