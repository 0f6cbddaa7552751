"""Witnesses: which situations a run reached, so that no green means less than it says (D9).

Each has a name and one line. They are counted from steps and the ledger only, like the properties,
and the counts of several runs, or processes, add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from blockstep.conformance.judge.properties.admission import next_in_line
from blockstep.conformance.judge.properties.amounts import blocks_for, ends_in_flight, share_of
from blockstep.conformance.judge.properties.hits import may_ask_the_cache
from blockstep.conformance.judge.properties.ledger import FlightRow, Ledger, Life
from blockstep.conformance.judge.properties.pool import verified_blocks
from blockstep.conformance.judge.properties.queue_replay import passed_over, victims_of
from blockstep.conformance.judge.properties.step import PlannedRow, RowKind, Step
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Commit,
    Drafts,
    DraftsTaken,
    FinishReason,
    GrammarReady,
    OutputRow,
    Outputs,
    PauseState,
    Policy,
    RejectCode,
    Rejected,
    RequestId,
    Reset,
    ResetDone,
    Schedule,
    Status,
    Submit,
    TokenIds,
)

Name: TypeAlias = str

_ADMISSION: dict[Name, str] = {
    "admitted": "a request was admitted",
    "prefix_hit": "an admitted request found its first blocks in the cache",
    "hit_on_freed_block": "a hit block was in the free queue, held by nobody",
    "hit_on_shared_block": "a hit block was held by another request",
    "hit_within_the_step": "a hit block was published by another row of the same plan",
    "full_prompt_hit_recomputes_last_block": "all full blocks were cached, the last not taken",
    "head_drop": "a draft head made a hit give back its last block",
    "reading_skipped": "a request that must not read the cache could have had a hit",
    "same_tokens_other_adapter": "a first block was not shared because adapters differ",
    "same_tokens_other_salt": "a first block was not shared because salts differ",
    "same_tokens_other_items": "a first block was not shared because items differ",
    "duplicate_key_published": "a second block was published under the same key",
    "eviction_of_cached_block": "a block was taken that could still have been hit",
    "admission_blocked_by_pool": "somebody was left waiting for blocks, not for budget",
    "admission_blocked_by_max_num_seqs": "somebody was left waiting because enough run",
    "admission_after_skip": "somebody was admitted past one that waits for its grammar",
    "grammar_skipped": "one whose grammar is not compiled was passed over",
    "grammar_promoted": "one whose grammar had been compiled was admitted",
    "admission_overtakes": "PRIORITY admitted somebody before one submitted earlier",
}
_STEPS: dict[Name, str] = {
    "chunked_prefill": "a row left known tokens for a later step",
    "chunk_ends_on_block_boundary": "a chunk of a prefill ended exactly where a block does",
    "threshold_caps_a_chunk": "the long-prefill threshold cut a row short",
    "prefill_and_decode_in_one_step": "a plan had a chunk of a prompt and a sampling row",
    "running_left_out_by_budget": "the budget was gone before all running ones had a row",
    "pool_exactly_full": "no block was free after a plan",
    "empty_plan": "a plan had no row",
    "empty_plan_with_work": "a plan had no row although requests were unfinished",
    "paused_new": "a plan was made while nobody may be admitted, and somebody waited",
    "paused_all": "a plan was made while nobody may be scheduled, and somebody ran",
}
_PREEMPTION: dict[Name, str] = {
    "preempted": "a request was preempted for want of blocks",
    "preempted_twice": "a request was preempted for at least the second time",
    "several_preempted_in_one_step": "one step preempted more than one",
    "self_preempted": "a request that lacked blocks preempted itself",
    "priority_victim_already_scheduled": "a victim had its row of the same step taken back",
    "priority_victim_not_last": "PRIORITY preempted one that FCFS would not have",
    "preempted_then_resumed": "a preempted request was admitted again",
    "resumed_with_hit": "a preempted request found its own or other blocks again",
    "resumed_with_outputs": "a preempted request returned with outputs to compute again",
}
_DRAFTS: dict[Name, str] = {
    "drafts_taken": "drafts were attached to a request",
    "drafts_dropped": "drafts for one that cannot use them were dropped",
    "drafts_replaced": "drafts were attached over others not yet scheduled",
    "drafts_scheduled": "a row carried drafts",
    "drafts_trimmed": "a row carried fewer drafts than were attached",
    "drafts_lost_by_preemption": "a request was preempted with drafts attached",
    "block_for_lookahead_only": "a row gained a block that only the lookahead needs",
    "drafts_all_accepted": "every draft of a row was right",
    "drafts_some_accepted": "some drafts of a row were right, and some not",
    "drafts_none_accepted": "the first draft of a row was wrong",
    "rollback_over_a_block_boundary": "rejected drafts had reached into another block",
}
_ENDINGS: dict[Name, str] = {
    "stop_eos": "a request ended with its end-of-sequence token",
    "stop_token": "a request ended with one of its stop tokens",
    "stop_length": "a request ended with its last allowed output",
    "stop_model_length": "a request ended at max_model_len, before max_tokens",
    "stop_repetition": "a request ended because it repeated itself",
    "stop_inside_accepted_drafts": "a stop cut off accepted tokens that came after it",
    "min_tokens_held_back_a_stop": "a stop token came too early to count",
    "several_ended_in_one_commit": "one commit ended more than one",
    "prefill_row_sampled_nothing": "a commit had a row without tokens",
    "commit_for_aborted": "a commit had a row of one that was aborted meanwhile",
    "commit_for_preempted": "a forced reset preempted a request in flight; its tokens count",
    "ended_while_preempted": "a request in flight was reset by force and then ended",
}
_SIGNALS: dict[Name, str] = {
    "abort_waiting": "one that had never run was aborted",
    "abort_running": "one that runs was aborted, not in flight",
    "abort_preempted": "a preempted one was aborted",
    "abort_in_flight": "one in flight was aborted",
    "abort_unknown": "an abort named an id that is not unfinished",
    "abort_of_shared_block": "one was aborted whose blocks others go on holding",
    "grammar_ready_twice": "a grammar was reported as compiled again",
    "reset_refused": "a reset failed because blocks were held",
    "reset_done": "a reset without force emptied a cache that was not empty",
    "reset_forced": "a reset by force preempted somebody",
    "reset_forced_in_flight": "a reset by force preempted somebody in flight",
    "id_used_again": "an id was submitted again, before a plan told of its end",
}
_FLIGHT: dict[Name, str] = {
    "several_frames_in_flight": "a second plan was made before the first was committed",
    "four_frames_in_flight": "a fourth plan was made before the first was committed",
    "planned_before_its_token": "a row was to run a token that a frame in flight would sample",
    "chunks_in_two_frames": "two chunks of one prompt were in flight",
    "skip_ahead": "one that runs had no row, because its last output might be in flight",
    "preempted_in_flight": "one was preempted for want of blocks while a frame would sample for it",
    "all_preempted_in_flight": "alone and planned ahead, one preempted itself; nobody was left",
    "stale_tokens_delivered": "one preempted in flight for want of blocks got its tokens",
    "ended_while_stale": "one preempted in flight for want of blocks ended with those tokens",
    "passed_over_for_its_tokens": "one waited for its own tokens in flight and was passed over",
    "admitted_past_a_stale_one": "somebody was admitted past one that waits for its own tokens",
    "resumed_after_stale_tokens": "one came back that had got tokens while preempted",
    "abort_stale": "one that waits for its own tokens in flight was aborted",
    "published_by_commit": "a commit published a block of a request that goes on",
    "published_by_the_last_commit": "a commit published a block of a request that it ended",
    "draft_placeholders_scheduled": "a row carried placeholders for drafts",
    "draft_placeholders_dropped": "one that runs had no row, and its placeholders were gone",
    "rollback_with_frames_behind": "drafts were rejected while a later frame ran the request too",
    "row_of_an_ended_request_ignored": "a commit had a row of one that had stopped in another",
    "abort_with_two_frames_in_flight": "one was aborted that two frames in flight name",
    "reset_forced_with_two_frames_in_flight": "one was reset by force that two frames name",
    "rejected_pipeline_full_async": "a plan was refused with several in flight",
}
_REJECTED: dict[Name, str] = {
    f"rejected_{code}": f"an event was refused as {code}" for code in RejectCode
}

WITNESSES: Mapping[Name, str] = {
    **_ADMISSION,
    **_STEPS,
    **_PREEMPTION,
    **_DRAFTS,
    **_ENDINGS,
    **_SIGNALS,
    **_FLIGHT,
    **_REJECTED,
}
"""All situations, by name, with what they mean."""

_ONLY_PRIORITY = frozenset(
    {"admission_overtakes", "priority_victim_already_scheduled", "priority_victim_not_last"}
)
_NOT_REQUIRED = frozenset({"abort_stale", "rejected_request_in_flight"})
"""Counted, but no reason to fail a run: each is seen a few times in 40,000 events."""
_ONLY_ASYNC = frozenset({*_FLIGHT, "rejected_frame_out_of_order"})
"""Out of reach with one frame in flight at most."""
_STALE = frozenset(
    {
        "abort_with_two_frames_in_flight",
        "admitted_past_a_stale_one",
        "all_preempted_in_flight",
        "ended_while_stale",
        "passed_over_for_its_tokens",
        "preempted_in_flight",
        "published_by_the_last_commit",
        "rejected_pipeline_full_async",
        "reset_forced_with_two_frames_in_flight",
        "resumed_after_stale_tokens",
        "stale_tokens_delivered",
    }
)
"""Rare in large pools, like preemption, aborts and resets themselves."""
_SMALL_ONLY = frozenset(
    {
        *_PREEMPTION,
        *_STALE,
        "abort_preempted",
        "admission_blocked_by_max_num_seqs",
        "drafts_lost_by_preemption",
        "ended_while_preempted",
        "pool_exactly_full",
        "rejected_never_fits",
        "rejected_not_structured",
        "rejected_prompt_too_long",
        "reset_done",
        "stop_model_length",
        "same_tokens_other_items",
    }
)
"""Rare where pools are large: required at small scopes only."""


_RARE_AT_TINY = frozenset(
    {
        "abort_of_shared_block",
        "abort_preempted",
        "drafts_lost_by_preemption",
        "drafts_some_accepted",
        "running_left_out_by_budget",
    }
)
"""Where requests are two or three tokens long, seen a few times in 60,000 events."""


class Witnesses:
    """Counts situations of one run."""

    def __init__(self) -> None:
        self.counts: Counter[Name] = Counter()

    def observe(self, step: Step, ledger: Ledger) -> None:
        """Count what a step reached; `ledger` knows all steps before it."""
        self.counts.update(situations(step, ledger))

    def merge(self, counts: Mapping[Name, int]) -> None:
        """Add the counts of another run."""
        self.counts.update(counts)

    def missing(
        self, preset: str = "small", policy: Policy | None = None, max_depth: int = 1
    ) -> tuple[Name, ...]:
        """Required situations that were not reached."""
        return missing_witnesses(self.counts, preset, policy, max_depth)


def required_witnesses(
    preset: str = "small", policy: Policy | None = None, max_depth: int = 1
) -> tuple[Name, ...]:
    """What a run must reach to be worth anything.

    `policy` None stands for both, `max_depth` for configs of up to so many frames in flight.
    """
    left_out = set(_NOT_REQUIRED)
    if max_depth == 1:
        left_out |= _ONLY_ASYNC
    elif max_depth < 4:
        left_out.add("four_frames_in_flight")
    if policy is Policy.FCFS:
        left_out |= _ONLY_PRIORITY
    if preset == "tiny":
        left_out |= _RARE_AT_TINY
    elif preset != "small":
        left_out |= _SMALL_ONLY
    return tuple(name for name in WITNESSES if name not in left_out)


def missing_witnesses(
    counts: Mapping[Name, int],
    preset: str = "small",
    policy: Policy | None = None,
    max_depth: int = 1,
) -> tuple[Name, ...]:
    """Required situations that `counts` lacks."""
    required = required_witnesses(preset, policy, max_depth)
    return tuple(name for name in required if not counts.get(name))


def situations(step: Step, ledger: Ledger) -> Iterator[Name]:
    """The situations that a step is, each as often as it occurs in it."""
    match step.event, step.observation:
        case _, Rejected(code=code):
            yield f"rejected_{code}"
            if code is RejectCode.PIPELINE_FULL and step.config.async_scheduling:
                yield "rejected_pipeline_full_async"
        case Schedule(), _:
            yield from _of_plan(step, ledger)
            for row in step.rows:
                yield from _of_row(step, ledger.lives[row.request_id], row)
            for row in step.admitted_rows:
                yield from _of_admission(step, ledger, row)
            yield from _of_waiting(step, ledger)
            if step.plan.preempted_req_ids:
                yield from _of_preemption(step, ledger)
            if step.config.async_scheduling:
                yield from _of_flight(step, ledger)
        case Commit(), Outputs(rows=rows):
            yield from _of_commit(step, ledger, rows)
        case Drafts(), DraftsTaken():
            yield from _of_drafts(step, ledger)
        case Abort(), Aborted():
            yield from _of_abort(step, ledger)
        case Reset(), ResetDone(success=success):
            yield from _of_reset(step, ledger, success)
        case GrammarReady(request_id=request_id), _:
            if ledger.lives[request_id].grammar_ready:
                yield "grammar_ready_twice"
        case Submit(request=request), _:
            if request.request_id in ledger.ended:
                yield "id_used_again"


def _of_plan(step: Step, ledger: Ledger) -> Iterator[Name]:
    after, rows = step.after, step.rows
    if not rows:
        yield "empty_plan"
        if after.requests:
            yield "empty_plan_with_work"
    if not after.free_queue:
        yield "pool_exactly_full"
    waiting = after.waiting or after.skipped_waiting
    if ledger.pause_state is PauseState.PAUSED_NEW and waiting:
        yield "paused_new"
    if ledger.pause_state is PauseState.PAUSED_ALL and step.before.running:
        yield "paused_all"
    samples = {ledger.flight_row(row).samples for row in rows}
    if len(samples) == 2:
        yield "prefill_and_decode_in_one_step"
    rest = step.config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if not rest and len(step.running_rows) < len(step.before.running) and not step.admitted_rows:
        yield "running_left_out_by_budget"
    if step.all_gained:
        before = step.before.block_keys
        for block in step.all_gained:
            if before[block] is not None:
                yield "eviction_of_cached_block"
    old = step.before.cached
    for key, blocks in after.cached.items():
        if len(blocks) > 1 and len(blocks) > len(old.get(key, ())):
            yield "duplicate_key_published"


def _of_row(step: Step, life: Life, row: PlannedRow) -> Iterator[Name]:
    config = step.config
    if row.end < life.num_known:
        yield "chunked_prefill"
        if row.end % config.block_size == 0:
            yield "chunk_ends_on_block_boundary"
        if row.num_scheduled == config.long_prefill_token_threshold:
            yield "threshold_caps_a_chunk"
    if row.drafts:
        yield "drafts_scheduled"
    if len(row.drafts) < len(life.drafts):
        yield "drafts_trimmed"
    if row.kind is RowKind.RUNNING and row.gained:
        held = len(step.old[row.request_id].block_tables[0])
        if blocks_for(config, row.end) <= held:
            yield "block_for_lookahead_only"


def _of_admission(step: Step, ledger: Ledger, row: PlannedRow) -> Iterator[Name]:
    life = ledger.lives[row.request_id]
    yield "admitted"
    if step.old[row.request_id].status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        yield "grammar_promoted"
    if row.kind is RowKind.RESUMED:
        yield "preempted_then_resumed"
        if row.hits:
            yield "resumed_with_hit"
        if life.num_known > life.num_prompt:
            yield "resumed_with_outputs"
    yield from _of_hit(step, ledger, row)
    if step.config.policy is Policy.PRIORITY:
        submitted = list(ledger.lives)
        earlier = submitted[: submitted.index(row.request_id)]
        left = {*step.after.waiting, *step.after.skipped_waiting}
        if any(name in left and ledger.lives[name].order > life.order for name in earlier):
            yield "admission_overtakes"
    if step.config.enable_prefix_caching and life.num_prompt >= step.config.block_size:
        yield from _kept_apart(step, ledger, life)


def _of_hit(step: Step, ledger: Ledger, row: PlannedRow) -> Iterator[Name]:
    life, before = ledger.lives[row.request_id], step.before
    size = step.config.block_size
    if row.hits:
        yield "prefix_hit"
    for block in row.hits:
        if before.block_keys[block] is None:
            yield "hit_within_the_step"
        elif before.ref_counts[block]:
            yield "hit_on_shared_block"
        else:
            yield "hit_on_freed_block"
    if not before.cached:
        return
    cached = ledger.named_blocks(before)
    if not may_ask_the_cache(step, life):
        if life.num_known > size and life.block_name(0) in cached:
            yield "reading_skipped"
        return
    following = (len(row.hits) + 1) * size
    if following <= life.num_known and life.block_name(len(row.hits)) in cached:
        if following == life.num_known:
            yield "full_prompt_hit_recomputes_last_block"
        elif step.config.drops_last_hit_block:
            yield "head_drop"


def _kept_apart(step: Step, ledger: Ledger, life: Life) -> Iterator[Name]:
    """Others whose first block has the same tokens, but is another block."""
    size, request = step.config.block_size, life.request
    for other in ledger.lives.values():
        if (
            other is life
            or other.request.prompt_token_ids[:size] != request.prompt_token_ids[:size]
        ):
            continue
        new = step.new.get(other.request.request_id)
        if new is None or not new.block_tables[0]:
            continue
        if other.request.adapter != request.adapter:
            yield "same_tokens_other_adapter"
        if other.request.cache_salt != request.cache_salt:
            yield "same_tokens_other_salt"
        if _first_items(other, size) != _first_items(life, size):
            yield "same_tokens_other_items"


def _first_items(life: Life, size: int) -> list[object]:
    extras = life.extras.items()
    return [(at, what[:2]) for at, what in extras if at < size and isinstance(what[0], str)]


def _of_waiting(step: Step, ledger: Ledger) -> Iterator[Name]:
    """Who was left waiting, if the plan got as far as to admit."""
    after, config = step.after, step.config
    if ledger.pause_state is not PauseState.UNPAUSED or step.plan.preempted_req_ids:
        return
    rest = config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if rest > 0 and (after.waiting or after.skipped_waiting):
        if len(after.running) >= config.max_num_seqs:
            yield "admission_blocked_by_max_num_seqs"
        elif next_in_line(step, ledger, after) is not None and _fits_budget(step, rest):
            yield "admission_blocked_by_pool"
    skipped = [
        name
        for name in after.skipped_waiting
        if step.new[name].status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        and not ledger.lives[name].grammar_ready
    ]
    if skipped:
        yield from _of_passing_over(step, ledger, skipped, rest)


def _of_passing_over(
    step: Step, ledger: Ledger, skipped: list[RequestId], rest: int
) -> Iterator[Name]:
    """Somebody waits for its grammar; was it met at a queue's head, and did others go past it?"""
    first = min(ledger.lives[name].order for name in skipped)
    admitted = [ledger.lives[row.request_id].order for row in step.admitted_rows]
    is_fcfs = step.config.policy is Policy.FCFS
    if admitted and (is_fcfs or max(admitted) > first):
        yield "admission_after_skip"
        yield "grammar_skipped"
    elif rest > 0 and len(step.after.running) < step.config.max_num_seqs:
        following = next_in_line(step, ledger, step.after)
        if is_fcfs or following is None or ledger.lives[following].order > first:
            yield "grammar_skipped"


def _fits_budget(step: Step, rest: int) -> bool:
    """Whether the budget left cannot have been what kept the next in line out."""
    return step.config.enable_chunked_prefill or rest >= step.config.max_model_len


def _of_flight(step: Step, ledger: Ledger) -> Iterator[Name]:
    """What only planning ahead brings."""
    plan, before, after = step.plan, step.before, step.after
    if step.rows and len(after.frames_in_flight) > 1:
        yield "several_frames_in_flight"
        if len(after.frames_in_flight) > 3:
            yield "four_frames_in_flight"
    rows = set()
    for row in step.rows:
        rows.add(row.request_id)
        if row.drafts:
            yield "draft_placeholders_scheduled"
        if ledger.placeholders(row.request_id):
            yield "planned_before_its_token"
        elif row.kind is RowKind.RUNNING and ledger.in_flight(row.request_id):
            yield "chunks_in_two_frames"
        life = ledger.lives[row.request_id]
        if row.kind is RowKind.RESUMED and life.num_known_then not in (0, life.num_known):
            yield "resumed_after_stale_tokens"
    victims = plan.preempted_req_ids
    rest = step.config.max_num_batched_tokens - plan.total_num_scheduled_tokens
    for name in before.running:
        if name in rows or name in victims:
            continue
        if step.old[name].spec_token_ids:
            yield "draft_placeholders_dropped"
        is_met = rest > 0 and not victims and ledger.pause_state is not PauseState.PAUSED_ALL
        if is_met and ends_in_flight(ledger, step.old[name]):
            yield "skip_ahead"
    if any(map(ledger.placeholders, victims)):
        yield "preempted_in_flight"
        if not after.running:
            yield "all_preempted_in_flight"
    if ledger.promised:
        yield from _of_stale(step, ledger)


def _of_stale(step: Step, ledger: Ledger) -> Iterator[Name]:
    """Who waits for its own tokens, met at a queue's head."""
    met = [name for name in passed_over(step, ledger) if ledger.placeholders(name)]
    if not met:
        return
    yield "passed_over_for_its_tokens"
    admitted = [ledger.lives[row.request_id].order for row in step.admitted_rows]
    first = min(ledger.lives[name].order for name in met)
    if admitted and (step.config.policy is Policy.FCFS or max(admitted) > first):
        yield "admitted_past_a_stale_one"


def _of_preemption(step: Step, ledger: Ledger) -> Iterator[Name]:
    victims = victims_of(step, ledger)
    place = {name: index for index, name in enumerate(step.before.running)}
    last_row = max((place[row.request_id] for row in step.running_rows), default=-1)
    if len(victims) > 1:
        yield "several_preempted_in_one_step"
    if not any(row.gained for row in step.running_rows):
        # Nobody got a block, so whoever lacked some is among the victims.
        yield "self_preempted"
    if set(victims) != set(step.before.running[-len(victims) :]):
        yield "priority_victim_not_last"
    for name in victims:
        old = step.old[name]
        yield "preempted"
        if old.num_preemptions:
            yield "preempted_twice"
        if old.spec_token_ids:
            yield "drafts_lost_by_preemption"
        if place[name] < last_row and share_of(ledger, old) > 0:
            # One behind it was scheduled, so the budget was not gone when it was visited.
            yield "priority_victim_already_scheduled"


def _of_commit(step: Step, ledger: Ledger, rows: tuple[OutputRow, ...]) -> Iterator[Name]:
    assert isinstance(step.event, Commit)
    sampled = {row.request_id: row.token_ids for row in step.event.sampled}
    answers = {row.request_id: row for row in rows}
    if sum(row.finish_reason is not None for row in rows) > 1:
        yield "several_ended_in_one_commit"
    for flight in ledger.frames.get(step.event.frame_id, ()):
        tokens = sampled.get(flight.request_id, ())
        life = ledger.lives.get(flight.request_id)
        if life is None:
            stopped = flight.request_id in ledger.stopped_in_flight
            yield "row_of_an_ended_request_ignored" if stopped else "commit_for_aborted"
        elif not tokens:
            yield "prefill_row_sampled_nothing"
        else:
            yield from _of_acceptance(step, flight, tokens)
            rejected = 1 + len(flight.drafts) - len(tokens)
            if rejected and _is_running(step, life) and _num_frames(ledger, life) > 1:
                yield "rollback_with_frames_behind"
            answer = answers.get(flight.request_id)
            if answer is not None:
                is_stale = step.event.frame_id >= ledger.first_frame_since_reset
                yield from _of_output(step, life, answer, tokens, is_stale)

    for name, _, blocks in verified_blocks(step, ledger):
        if blocks:
            yield "published_by_commit" if name in step.new else "published_by_the_last_commit"


def _is_running(step: Step, life: Life) -> bool:
    return step.old[life.request.request_id].status is Status.RUNNING


def _num_frames(ledger: Ledger, life: Life) -> int:
    """Frames in flight that name a request."""
    name = life.request.request_id
    return sum(any(row.request_id == name for row in rows) for rows in ledger.frames.values())


def _of_acceptance(step: Step, flight: FlightRow, tokens: TokenIds) -> Iterator[Name]:
    if not flight.drafts:
        return
    accepted, size = len(tokens) - 1, step.config.block_size
    if accepted == len(flight.drafts):
        yield "drafts_all_accepted"
    elif accepted:
        yield "drafts_some_accepted"
    else:
        yield "drafts_none_accepted"
    kept = flight.end - (len(flight.drafts) - accepted)
    if blocks_for(step.config, kept) < -(-flight.end // size):
        yield "rollback_over_a_block_boundary"


def _of_output(
    step: Step, life: Life, answer: OutputRow, tokens: TokenIds, is_stale: bool
) -> Iterator[Name]:
    request = life.request
    if step.old[request.request_id].status is Status.PREEMPTED:
        yield "stale_tokens_delivered" if is_stale else "commit_for_preempted"
        if answer.finish_reason is not None:
            yield "ended_while_stale" if is_stale else "ended_while_preempted"
    if len(answer.new_token_ids) < len(tokens):
        yield "stop_inside_accepted_drafts"
    stops = {request.eos_token_id, *request.stop_token_ids}
    count = life.num_known - life.num_prompt
    for index, token in enumerate(answer.new_token_ids, count + 1):
        if token in stops and index < request.min_tokens:
            yield "min_tokens_held_back_a_stop"
    reason = answer.finish_reason
    if reason is FinishReason.STOP:
        yield "stop_eos" if answer.stop_token_id is None else "stop_token"
    elif reason is FinishReason.LENGTH:
        outputs = count + len(answer.new_token_ids)
        yield "stop_length" if outputs >= request.max_tokens else "stop_model_length"
    elif reason is FinishReason.REPETITION:
        yield "stop_repetition"


def _of_drafts(step: Step, ledger: Ledger) -> Iterator[Name]:
    assert isinstance(step.event, Drafts)
    assert isinstance(step.observation, DraftsTaken)
    for row in step.event.drafts:
        if row.request_id not in step.observation.request_ids:
            yield "drafts_dropped"
        elif row.token_ids:
            yield "drafts_taken"
            if ledger.lives[row.request_id].drafts:
                yield "drafts_replaced"


def _of_abort(step: Step, ledger: Ledger) -> Iterator[Name]:
    assert isinstance(step.event, Abort)
    ref_counts = step.before.ref_counts
    for name in dict.fromkeys(step.event.request_ids):
        old = step.old.get(name)
        if old is None:
            yield "abort_unknown"
            continue
        yield _kind_of_abort(ledger, name, old.status)
        if old.status is Status.PREEMPTED and ledger.placeholders(name):
            yield "abort_stale"
        if _num_frames(ledger, ledger.lives[name]) > 1:
            yield "abort_with_two_frames_in_flight"
        if any(ref_counts[block] > 1 for block in old.block_tables[0]):
            yield "abort_of_shared_block"


def _kind_of_abort(ledger: Ledger, name: RequestId, status: Status) -> Name:
    if ledger.in_flight(name):
        return "abort_in_flight"
    if status is Status.RUNNING:
        return "abort_running"
    return "abort_preempted" if status is Status.PREEMPTED else "abort_waiting"


def _of_reset(step: Step, ledger: Ledger, success: bool) -> Iterator[Name]:
    assert isinstance(step.event, Reset)
    if not success:
        yield "reset_refused"
    elif not step.event.reset_running_requests:
        if step.before.cached:
            yield "reset_done"
    elif step.before.running:
        yield "reset_forced"
        if any(map(ledger.in_flight, step.before.running)):
            yield "reset_forced_in_flight"
        if any(_num_frames(ledger, ledger.lives[name]) > 1 for name in step.before.running):
            yield "reset_forced_with_two_frames_in_flight"
