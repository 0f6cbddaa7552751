"""Checks of a scheduler's own records of its steps, which must be consistent.

Such a file has no events and no states, so nothing can be replayed. But the state before a step and
the decision in it must be consistent: budgets, running requests, admissions, pinned blocks. The
format is that of the fork that seed 001 describes ("Feature B"); `impl.serving.steps` writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from blockstep.conformance.protocol.findings import Finding, of_request, violated
from blockstep.conformance.protocol.trace_lines import TraceError, read_lines, shown


class Snapshot(msgspec.Struct, frozen=True, tag="step_snapshot"):
    """The state that a scheduler recorded before a step."""

    step: int
    running: list[str]
    waiting: list[str]
    free_blocks: int | None
    total_blocks: int | None
    gpu_cached_blocks: int | None
    num_pinned: int
    pinned_blocks: int
    pinned_job_ids: list[str]
    max_num_running_reqs: int
    max_num_scheduled_tokens: int


class Hit(msgspec.Struct, frozen=True, tag="prefix_cache_event"):
    """The hits of a waiting request in the prefix cache and in the store."""

    step: int
    req_id: str
    local_hit_tokens: int
    external_hit_tokens: int
    total_prompt_tokens: int
    num_tokens: int
    job_id: str | None = None
    load_kv_async: bool = False


class Decision(msgspec.Struct, frozen=True, tag="step_decision"):
    """The decision of a step."""

    step: int
    scheduled_new_req_ids: list[str]
    scheduled_resumed_req_ids: list[str]
    scheduled_running_req_ids: list[str]
    preempted_req_ids: list[str]
    num_scheduled_tokens: dict[str, int]
    total_scheduled_tokens: int

    @property
    def admitted(self) -> list[str]:
        """Ids of new and resumed requests."""
        return self.scheduled_new_req_ids + self.scheduled_resumed_req_ids


Record: TypeAlias = Snapshot | Hit | Decision
_DECODER = msgspec.json.Decoder(Record)
_FIX = "give the file as it was written"


def is_step_file(path: Path) -> bool:
    """Return whether a file begins with the record of a step, so that it is not a recorded run."""
    try:
        _, line = next(read_lines(path), (0, ""))
        _DECODER.decode(line)
    except (TraceError, msgspec.MsgspecError):
        return False
    return True


def read_steps(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the records of a file, with their line numbers. Raises `TraceError`."""
    for number, line in read_lines(path, "step file"):
        try:
            yield number, _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            rule = "a line is a step_snapshot, a prefix_cache_event or a step_decision"
            raise TraceError(path, number, f"{shown(line)} ({error})", rule, _FIX) from None


@dataclass(slots=True)
class StepJudge:
    """Checks the records of one scheduler in their order."""

    seen: Snapshot | None = None
    """The snapshot of the step whose records are being read."""
    hits: list[Hit] = field(default_factory=list)
    left: list[str] | None = None
    """Ids of the requests that run after the last decision."""

    def take(self, record: Record) -> Finding | None:
        """Return what is wrong with a record, given those before it; None if nothing."""
        match record:
            case Snapshot():
                finding = self._judge(_OF_SNAPSHOTS, record) or self._take_up(record)
                self.seen, self.hits = record, []
            case Hit():
                finding = self._belongs(record.step) or _judge_hit(record)
                self.hits.append(record)
            case Decision():
                finding = self._belongs(record.step) or self._judge_decision(record)
        return finding

    def _judge(
        self, judges: Iterable[Callable[[Snapshot], Finding | None]], record: Snapshot
    ) -> Finding | None:
        return next(filter(None, (judge(record) for judge in judges)), None)

    def _belongs(self, step: int) -> Finding | None:
        """Check that a record belongs to the step of the last snapshot."""
        if self.seen is None or self.seen.step != step:
            last = "none" if self.seen is None else str(self.seen.step)
            what = f"a record of step {step}, where the last snapshot is of step {last}"
            return violated("P26", "step_records_are_in_order", what)
        return None

    def _take_up(self, seen: Snapshot) -> Finding | None:
        """Check that steps are consecutive, and that running requests follow from the last
        decision.
        """
        if self.seen is not None and seen.step != self.seen.step + 1:
            what = f"step {seen.step} follows step {self.seen.step}"
            return violated("P26", "step_records_are_in_order", what)
        strangers = [] if self.left is None else [it for it in seen.running if it not in self.left]
        if strangers:
            what = f"{strangers} run before step {seen.step}, and did not behind the step before"
            return violated("P16", "running_follows_from_decisions", what)
        return None

    def _judge_decision(self, decision: Decision) -> Finding | None:
        assert self.seen is not None, "a decision belongs to a snapshot"
        left = [name for name in self.seen.running if name not in set(decision.preempted_req_ids)]
        self.left = left + decision.admitted
        found = (judge(self.seen, decision) for judge in _OF_DECISIONS)
        return next(filter(None, found), None)


def _judge_running(seen: Snapshot) -> Finding | None:
    """Check that no more requests run than may, and that each is in one queue only."""
    names = Counter(seen.running + seen.waiting)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        return violated("P16", "every_request_is_in_one_queue", f"{twice} stand in two places")
    if len(seen.running) > seen.max_num_running_reqs:
        what = f"{len(seen.running)} run, {seen.max_num_running_reqs} may"
        return violated("P9", "running_stays_within_max_num_seqs", what)
    return None


def _judge_pool(seen: Snapshot) -> Finding | None:
    """Check that free and pinned blocks are no more than the pool has."""
    if seen.free_blocks is None or seen.total_blocks is None:
        return None
    usable = seen.total_blocks - 1
    if seen.free_blocks + seen.pinned_blocks > usable:
        what = (
            f"{seen.free_blocks} blocks are free and {seen.pinned_blocks} pinned, of {usable} "
            "without the null block"
        )
        return violated("P1", "every_block_is_free_or_held", what)
    return None


def _judge_pins(seen: Snapshot) -> Finding | None:
    """Check that a job has at most one pin, and that pins hold blocks."""
    if len(set(seen.pinned_job_ids)) != len(seen.pinned_job_ids):
        return violated("P17", "pins_hold_cached_blocks", f"a job twice: {seen.pinned_job_ids}")
    if bool(seen.num_pinned) is not bool(seen.pinned_blocks):
        what = f"{seen.num_pinned} pins hold {seen.pinned_blocks} blocks"
        return violated("P17", "pins_hold_cached_blocks", what)
    return None


_OF_SNAPSHOTS = (_judge_running, _judge_pool, _judge_pins)


def _judge_hit(hit: Hit) -> Finding | None:
    """Check that a hit leaves a token to compute, except for an asynchronous load."""
    num_hit = hit.local_hit_tokens + hit.external_hit_tokens
    most = hit.num_tokens - (not hit.load_kv_async)
    if not (0 <= num_hit <= most and hit.total_prompt_tokens <= hit.num_tokens):
        what = f"{hit.req_id!r} of {hit.num_tokens} tokens has hits of {num_hit}"
        return violated(
            "P5", "hit_is_whole_blocks_and_leaves_a_token", what, subjects=of_request(hit.req_id)
        )
    return None


def _judge_budget(seen: Snapshot, decision: Decision) -> Finding | None:
    total = sum(decision.num_scheduled_tokens.values())
    if total != decision.total_scheduled_tokens:
        what = f"rows of {total} tokens are counted as {decision.total_scheduled_tokens}"
        return violated("P9", "plan_stays_within_token_budget", what)
    if total > seen.max_num_scheduled_tokens:
        what = f"{total} tokens in a step of at most {seen.max_num_scheduled_tokens}"
        return violated("P9", "plan_stays_within_token_budget", what)
    return None


def _judge_rows(seen: Snapshot, decision: Decision) -> Finding | None:
    """Check that each row is of a running request or an admitted one, once, and runs a token."""
    rows = Counter(decision.admitted + decision.scheduled_running_req_ids)
    ran = set(seen.running) - set(decision.preempted_req_ids)
    strangers = [name for name in decision.scheduled_running_req_ids if name not in ran]
    strangers += [name for name in decision.admitted if name not in seen.waiting]
    strangers += [name for name in decision.preempted_req_ids if name not in seen.running]
    if (
        strangers
        or set(rows) != set(decision.num_scheduled_tokens)
        or max(rows.values(), default=1) > 1
    ):
        what = f"rows are not of running or waiting requests, each once: {strangers or dict(rows)}"
        return violated("P26", "rows_are_of_running_or_waiting_requests", what)
    if any(count < 1 for count in decision.num_scheduled_tokens.values()):
        return violated("P26", "rows_are_of_running_or_waiting_requests", "a row runs no token")
    return None


def _judge_admission(seen: Snapshot, decision: Decision) -> Finding | None:
    """Check that no more requests run than may, and that no step both preempts and admits.

    The fork of seed 001 first asserted the former, and later only warned of it ("Change 9").
    """
    if decision.admitted and decision.preempted_req_ids:
        what = f"{decision.admitted} admitted although {decision.preempted_req_ids} were preempted"
        return violated("P16", "no_admission_after_a_preemption", what)
    num_running = len(seen.running) - len(decision.preempted_req_ids) + len(decision.admitted)
    if num_running > seen.max_num_running_reqs:
        what = f"{num_running} run after the step, {seen.max_num_running_reqs} may"
        return violated("P9", "running_stays_within_max_num_seqs", what)
    return None


_OF_DECISIONS = (_judge_budget, _judge_rows, _judge_admission)
