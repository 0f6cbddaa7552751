"""Steps: a scheduler's own records of its steps, judged by what they say of each other.

Such a file has no events and no states, so nothing can be replayed. But what was seen before a step
and what was decided in it must fit: budgets, who runs, who may be admitted, what pins hold. The
form is that of the fork that seed 001 describes ("Feature B"); `impl.serving.steps` writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from blockstep.conformance.protocol.findings import Finding, violated
from blockstep.conformance.protocol.lines import TraceError, read_lines, shown


class Snapshot(msgspec.Struct, frozen=True, tag="step_snapshot"):
    """What a scheduler saw before a step."""

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
    """What cache and store had for a request that was looked at."""

    step: int
    req_id: str
    local_hit_tokens: int
    external_hit_tokens: int
    total_prompt_tokens: int
    num_tokens: int
    job_id: str | None = None
    load_kv_async: bool = False


class Decision(msgspec.Struct, frozen=True, tag="step_decision"):
    """What it decided."""

    step: int
    scheduled_new_req_ids: list[str]
    scheduled_resumed_req_ids: list[str]
    scheduled_running_req_ids: list[str]
    preempted_req_ids: list[str]
    num_scheduled_tokens: dict[str, int]
    total_scheduled_tokens: int

    @property
    def admitted(self) -> list[str]:
        """New and resumed."""
        return self.scheduled_new_req_ids + self.scheduled_resumed_req_ids


Record: TypeAlias = Snapshot | Hit | Decision
_DECODER = msgspec.json.Decoder(Record)
_FIX = "give the file as it was written"


def is_step_file(path: Path) -> bool:
    """Whether a file begins with the record of a step, and so is no recorded run."""
    try:
        _, line = next(read_lines(path), (0, ""))
        _DECODER.decode(line)
    except (TraceError, msgspec.MsgspecError):
        return False
    return True


def read_steps(path: Path) -> Iterator[tuple[int, Record]]:
    """The records of a file, with the numbers of their lines. Raises `TraceError`."""
    for number, line in read_lines(path, "step file"):
        try:
            yield number, _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            rule = "a line is a step_snapshot, a prefix_cache_event or a step_decision"
            raise TraceError(path, number, f"{shown(line)} ({error})", rule, _FIX) from None


@dataclass(slots=True)
class StepJudge:
    """Takes the records of one scheduler in their order, and says what is wrong with the next."""

    seen: Snapshot | None = None
    """Of the step that is being told."""
    hits: list[Hit] = field(default_factory=list)
    left: list[str] | None = None
    """Who runs once the last decision was carried out."""

    def take(self, record: Record) -> Finding | None:
        """What is wrong with a record, behind those before it."""
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
        """A record is of the step whose snapshot came last."""
        if self.seen is None or self.seen.step != step:
            last = "none" if self.seen is None else str(self.seen.step)
            what = f"a record of step {step}, where the last snapshot is of step {last}"
            return violated("P26", "step_is_told_in_order", what)
        return None

    def _take_up(self, seen: Snapshot) -> Finding | None:
        """Steps follow each other, and who runs was left running by the step before."""
        if self.seen is not None and seen.step != self.seen.step + 1:
            what = f"step {seen.step} is told behind step {self.seen.step}"
            return violated("P26", "step_is_told_in_order", what)
        strangers = [] if self.left is None else [it for it in seen.running if it not in self.left]
        if strangers:
            what = f"{strangers} run before step {seen.step}, and did not behind the step before"
            return violated("P16", "running_follows_from_decisions", what)
        return None

    def _judge_decision(self, told: Decision) -> Finding | None:
        assert self.seen is not None, "a decision belongs to a snapshot"
        left = [name for name in self.seen.running if name not in set(told.preempted_req_ids)]
        self.left = left + told.admitted
        found = (judge(self.seen, told) for judge in _OF_DECISIONS)
        return next(filter(None, found), None)


def _judge_running(seen: Snapshot) -> Finding | None:
    """No more run than may, each once, and nobody waits who runs."""
    names = Counter(seen.running + seen.waiting)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        return violated("P16", "every_request_stands_in_one_queue", f"{twice} stand in two places")
    if len(seen.running) > seen.max_num_running_reqs:
        what = f"{len(seen.running)} run, of {seen.max_num_running_reqs} who may"
        return violated("P9", "running_stays_within_max_num_seqs", what)
    return None


def _judge_pool(seen: Snapshot) -> Finding | None:
    """What is free and what pins hold is together no more than there is."""
    if seen.free_blocks is None or seen.total_blocks is None:
        return None
    usable = seen.total_blocks - 1
    if seen.free_blocks + seen.pinned_blocks > usable:
        what = (
            f"{seen.free_blocks} blocks are free and {seen.pinned_blocks} pinned, of {usable} that "
            "there are beside the null block"
        )
        return violated("P1", "every_block_is_free_or_held", what)
    return None


def _judge_pins(seen: Snapshot) -> Finding | None:
    """A job has one pin at most, and pins hold blocks."""
    if len(set(seen.pinned_job_ids)) != len(seen.pinned_job_ids):
        return violated("P17", "pins_hold_what_can_be_found", f"a job twice: {seen.pinned_job_ids}")
    if bool(seen.num_pinned) is not bool(seen.pinned_blocks):
        what = f"{seen.num_pinned} pins hold {seen.pinned_blocks} blocks"
        return violated("P17", "pins_hold_what_can_be_found", what)
    return None


_OF_SNAPSHOTS = (_judge_running, _judge_pool, _judge_pins)


def _judge_hit(hit: Hit) -> Finding | None:
    """A hit leaves a token to compute; a load that takes longer than a step need not."""
    num_hit = hit.local_hit_tokens + hit.external_hit_tokens
    most = hit.num_tokens - (not hit.load_kv_async)
    if not (0 <= num_hit <= most and hit.total_prompt_tokens <= hit.num_tokens):
        what = f"{hit.req_id!r} of {hit.num_tokens} tokens has hits of {num_hit}"
        return violated("P5", "hit_is_whole_blocks_and_leaves_a_token", what)
    return None


def _judge_budget(seen: Snapshot, told: Decision) -> Finding | None:
    total = sum(told.num_scheduled_tokens.values())
    if total != told.total_scheduled_tokens:
        what = f"rows of {total} tokens are told as {told.total_scheduled_tokens}"
        return violated("P9", "plan_stays_within_token_budget", what)
    if total > seen.max_num_scheduled_tokens:
        what = f"{total} tokens in a step of at most {seen.max_num_scheduled_tokens}"
        return violated("P9", "plan_stays_within_token_budget", what)
    return None


def _judge_rows(seen: Snapshot, told: Decision) -> Finding | None:
    """Each row is of one who ran and goes on, or waited and is admitted, and runs a token."""
    rows = Counter(told.admitted + told.scheduled_running_req_ids)
    ran = set(seen.running) - set(told.preempted_req_ids)
    strangers = [name for name in told.scheduled_running_req_ids if name not in ran]
    strangers += [name for name in told.admitted if name not in seen.waiting]
    strangers += [name for name in told.preempted_req_ids if name not in seen.running]
    if (
        strangers
        or set(rows) != set(told.num_scheduled_tokens)
        or max(rows.values(), default=1) > 1
    ):
        what = f"rows are not of who ran or waited, each once: {strangers or dict(rows)}"
        return violated("P26", "rows_are_of_who_ran_or_waited", what)
    if any(count < 1 for count in told.num_scheduled_tokens.values()):
        return violated("P26", "rows_are_of_who_ran_or_waited", "a row runs no token")
    return None


def _judge_admission(seen: Snapshot, told: Decision) -> Finding | None:
    """No more run than may; and where somebody was preempted nobody is admitted.

    The first is what the fork of seed 001 had asserted, and then only warned of ("Change 9").
    """
    if told.admitted and told.preempted_req_ids:
        what = f"{told.admitted} admitted although {told.preempted_req_ids} were preempted"
        return violated("P16", "nobody_is_admitted_after_a_preemption", what)
    num_running = len(seen.running) - len(told.preempted_req_ids) + len(told.admitted)
    if num_running > seen.max_num_running_reqs:
        what = f"{num_running} run behind the step, of {seen.max_num_running_reqs} who may"
        return violated("P9", "running_stays_within_max_num_seqs", what)
    return None


_OF_DECISIONS = (_judge_budget, _judge_rows, _judge_admission)
