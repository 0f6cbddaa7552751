"""Goals of every engine: plans, admissions, preemptions, commits, frames and outside events."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.gates import holds_prompts
from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import FlightRow, History, RequestHistory
from blockstep.conformance.judge.properties.hits import may_ask_the_cache
from blockstep.conformance.judge.properties.observed_step import PlannedRow, RowKind, Step
from blockstep.conformance.judge.properties.pool import verified_blocks
from blockstep.conformance.judge.properties.queue_replay import (
    admits_no_request,
    next_in_line,
    passed_over,
    preempted_in_order,
)
from blockstep.conformance.judge.properties.token_amounts import (
    blocks_for,
    ends_in_flight,
    share_of,
)
from blockstep.spec import vocabulary as v

UNPAUSED, RUNNING = v.PauseState.UNPAUSED, RowKind.RUNNING
PLANS = {
    "chunked_prefill": "a row left known tokens for a later step",
    "chunk_ends_on_block_boundary": "a chunk of a prefill ended exactly where a block does",
    "threshold_caps_a_chunk": "the long-prefill threshold cut a row short",
    "prefill_and_decode_in_one_step": "a plan had a chunk of a prompt and a sampling row",
    "running_left_out_by_budget": "the budget was used up before all running requests had a row",
    "pool_exactly_full": "no block was free after a plan",
    "empty_plan": "a plan had no row",
    "empty_plan_with_work": "a plan had no row although requests were unfinished",
    "paused_new": "a plan was made under PAUSED_NEW while a request waited",
    "paused_all": "a plan was made under PAUSED_ALL with requests in the running list",
}
PREEMPTION = {
    "preempted": "a request was preempted for lack of blocks",
    "preempted_twice": "a request was preempted for at least the second time",
    "several_preempted_in_one_step": "one step preempted more than one request",
    "self_preempted": "a request that lacked blocks preempted itself",
    "priority_victim_already_scheduled": "a victim had a row in the same step, which was withdrawn",
    "priority_victim_not_last": "PRIORITY preempted a request that FCFS would not have",
    "preempted_then_resumed": "a preempted request was resumed",
    "resumed_with_hit": "a preempted request was resumed with a prefix hit",
    "resumed_with_outputs": "a preempted request was resumed with outputs to compute again",
}


def of_schedule(step: Step, history: History) -> list[str]:
    """Return the goals of a plan."""
    found = [*of_plan(step, history), *of_rows(step, history)]
    for row in step.admitted_rows:
        found += of_admission(step, history, row)
    found += of_waiting(step, history)
    if step.plan.preempted_req_ids:
        found += of_preemption(step, history)
    if step.config.max_frames_in_flight > 1:
        found += of_frames(step, history)
    return found


def of_plan(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan as a whole."""
    after, rows = step.after, step.rows
    if not rows:
        yield "empty_plan"
        if after.requests:
            yield "empty_plan_with_work"
    if not after.free_queue:
        yield "pool_exactly_full"
    if history.pause_state is not UNPAUSED:
        is_partial = history.pause_state is v.PauseState.PAUSED_NEW
        if is_partial and (after.waiting or after.skipped_waiting):
            yield "paused_new"
        if not is_partial and step.before.running:
            yield "paused_all"
    if len({history.flight_row(row).samples for row in rows}) == 2:
        yield "prefill_and_decode_in_one_step"
    rest = step.config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if not rest and len(step.running_rows) < len(step.before.running) and not step.admitted_rows:
        yield "running_left_out_by_budget"
    if step.all_gained:
        before = step.before.block_keys
        for block in step.all_gained:
            if before[block] is not None:
                yield "eviction_of_cached_block"
    old, keys = step.before.cached, after.block_keys
    if after.cached is not old and len(keys) - keys.count(None) > len(after.cached):
        for key, blocks in after.cached.items():
            if len(blocks) > 1 and len(blocks) > len(old.get(key, ())):
                yield "duplicate_key_published"


def of_rows(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of each row, admitted or not."""
    config = step.config
    for row in step.rows:
        life = history.lives[row.request_id]
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
        if row.kind is RUNNING and row.gained:
            tables = step.old[row.request_id].block_tables
            held = zip(step.block_sizes, tables, row.gained_tables, strict=True)
            if any(gained and row.end <= len(table) * size for size, table, gained in held):
                yield "block_for_lookahead_only"


def of_preemption(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan that preempts."""
    victims = preempted_in_order(step, history)
    place = step.place
    last_row = max((place[row.request_id] for row in step.running_rows), default=-1)
    if len(victims) > 1:
        yield "several_preempted_in_one_step"
    if not any(row.gained for row in step.running_rows):
        # No row got a block, so the request that lacked some is a victim.
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
        if place[name] < last_row and share_of(history, old) > 0:
            # A later one was scheduled, so there was budget left when it was visited.
            yield "priority_victim_already_scheduled"


ADMISSION = {
    "admitted": "a request was admitted",
    "prefix_hit": "an admitted request found its first blocks in the cache",
    "hit_on_freed_block": "a hit block was in the free queue, without a holder",
    "hit_on_shared_block": "a hit block was held by another request",
    "hit_within_the_step": "a hit block was published by another row of the same plan",
    "full_prompt_hit_recomputes_last_block": "all full blocks were cached, the last not taken",
    "head_drop": "a draft head made a hit drop its last block",
    "reading_skipped": "a request that must not read the cache could have had a hit",
    "same_tokens_other_adapter": "a first block was not shared because adapters differ",
    "same_tokens_other_salt": "a first block was not shared because salts differ",
    "same_tokens_other_items": "a first block was not shared because items differ",
    "same_tokens_other_embeds": "a first block was not shared because embeddings differ",
    "duplicate_key_published": "a second block was published under the same key",
    "eviction_of_cached_block": "a block was taken that could still have been hit",
    "admission_blocked_by_pool": "a request was left waiting for blocks, not for budget",
    "admission_blocked_by_max_num_seqs": (
        "a request was left waiting because max_num_seqs requests run"
    ),
    "admission_after_skip": "a request was admitted before one that waits for its grammar",
    "grammar_skipped": "a request was skipped because its grammar is not compiled yet",
    "grammar_promoted": "a request whose grammar had been compiled was admitted",
    "admission_overtakes": "PRIORITY admitted a request before one submitted earlier",
}


def of_admission(step: Step, history: History, row: PlannedRow) -> Iterator[str]:
    """Yield the goals of an admitted row."""
    life = history.lives[row.request_id]
    yield "admitted"
    if step.old[row.request_id].status is v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        yield "grammar_promoted"
    if row.kind is RowKind.RESUMED:
        yield "preempted_then_resumed"
        if row.hits:
            yield "resumed_with_hit"
        if life.num_known > life.num_prompt:
            yield "resumed_with_outputs"
    yield from _of_hit(step, history, row)
    if step.config.policy is v.Policy.PRIORITY:
        submitted = list(history.lives)
        earlier = submitted[: submitted.index(row.request_id)]
        left = {*step.after.waiting, *step.after.skipped_waiting}
        if any(name in left and history.lives[name].order > life.order for name in earlier):
            yield "admission_overtakes"
    if step.config.enable_prefix_caching and life.num_prompt >= step.config.block_size:
        yield from _kept_apart(step, history, life)


def _of_hit(step: Step, history: History, row: PlannedRow) -> Iterator[str]:
    life, before = history.lives[row.request_id], step.before
    size = step.block_sizes[0]
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
    met, index, following = "", row.first // size, row.first + size
    if not may_ask_the_cache(step, life):
        met, index = "reading_skipped" * (life.num_known > size), 0
    elif following == life.num_known:
        met = "full_prompt_hit_recomputes_last_block"
    elif following < life.num_known and step.config.drops_last_hit_block:
        # With several groups another may have had no block to drop.
        met = "head_drop" if row.first or not step.config.groups else ""
    if met and life.block_name(index, size) in history.named_blocks(before):
        yield met


def _kept_apart(step: Step, history: History, life: RequestHistory) -> Iterator[str]:
    """Yield the goals of two requests that hold equal first blocks under different ids."""
    size, request = step.config.block_size, life.request
    for other in history.lives.values():
        other_request = other.request
        if (
            other is life
            or other_request.prompt_token_ids[:size] != request.prompt_token_ids[:size]
        ):
            continue
        new = step.new.get(other_request.request_id)
        if new is None or not any(new.block_tables):
            continue
        if other_request.adapter != request.adapter:
            yield "same_tokens_other_adapter"
        if other_request.cache_salt != request.cache_salt:
            yield "same_tokens_other_salt"
        if _first_items(other, size) != _first_items(life, size):
            yield "same_tokens_other_items"
        if other_request.prompt_embeds[:size] != request.prompt_embeds[:size]:
            yield "same_tokens_other_embeds"


def _first_items(life: RequestHistory, size: int) -> list[object]:
    extras = life.extras.items()
    return [(at, what[:2]) for at, what in extras if at < size and isinstance(what[0], str)]


def of_waiting(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of requests left waiting, if the plan reached its waiting phase."""
    after, config = step.after, step.config
    if not (after.waiting or after.skipped_waiting):
        return
    rest = config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if rest <= 0 and not after.skipped_waiting:
        return
    if history.pause_state is not UNPAUSED or admits_no_request(step, history):
        return
    if rest > 0:
        if len(after.running) >= config.max_num_seqs:
            yield "admission_blocked_by_max_num_seqs"
        elif (
            next_in_line(step, history) is not None
            and not holds_prompts(step, history)
            and (
                # The rest of the budget cannot have been the reason.
                config.enable_chunked_prefill or rest >= config.max_model_len
            )
        ):
            yield "admission_blocked_by_pool"
    skipped = [
        name
        for name in after.skipped_waiting
        if step.new[name].status is v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        and not history.lives[name].grammar_ready
    ]
    if skipped:
        yield from _of_passing_over(step, history, skipped, rest)


def _of_passing_over(
    step: Step, history: History, skipped: list[v.RequestId], rest: int
) -> Iterator[str]:
    """Yield the goals of requests that wait for a grammar, and of those admitted before them."""
    first = min(history.lives[name].order for name in skipped)
    admitted = [history.lives[row.request_id].order for row in step.admitted_rows]
    is_fcfs = step.config.policy is v.Policy.FCFS
    if admitted and (is_fcfs or max(admitted) > first):
        yield "admission_after_skip"
        yield "grammar_skipped"
    elif rest > 0 and len(step.after.running) < step.config.max_num_seqs:
        following = next_in_line(step, history)
        if is_fcfs or following is None or history.lives[following].order > first:
            yield "grammar_skipped"


COMMITS = {
    "drafts_taken": "drafts were attached to a request",
    "drafts_dropped": "drafts for a request that cannot use them were dropped",
    "drafts_replaced": "drafts were attached over others not yet scheduled",
    "drafts_scheduled": "a row carried drafts",
    "drafts_trimmed": "a row carried fewer drafts than were attached",
    "drafts_lost_by_preemption": "a request was preempted with drafts attached",
    "block_for_lookahead_only": "a row gained a block that only the lookahead needs",
    "drafts_all_accepted": "every draft of a row was accepted",
    "drafts_some_accepted": "some drafts of a row were accepted, others not",
    "drafts_none_accepted": "the first draft of a row was rejected",
    "rollback_over_a_block_boundary": "rejected drafts had reached into another block",
    "stop_eos": "a request ended with its end-of-sequence token",
    "stop_token": "a request ended with one of its stop tokens",
    "stop_length": "a request ended with its last allowed output",
    "stop_model_length": "a request ended at max_model_len, before max_tokens",
    "stop_repetition": "a request ended because it repeated itself",
    "stop_inside_accepted_drafts": "a stop cut off accepted tokens that came after it",
    "min_tokens_held_back_a_stop": "a stop token came too early to count",
    "several_ended_in_one_commit": "one commit ended more than one request",
    "prefill_row_sampled_nothing": "a commit had a row without tokens",
    "commit_for_aborted": "a commit had a row of a request that was aborted since",
    "commit_for_preempted": "a forced reset preempted a request in flight; its tokens count",
    "ended_while_preempted": "a request in flight was reset by force and then ended",
}


def of_commit(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of each row of the committed frame."""
    answers = {row.request_id: row for row in step.output_rows}
    if len(step.ended) > 1:
        yield "several_ended_in_one_commit"
    for flight in history.frame_of(step):
        tokens = step.sampled.get(flight.request_id, ())
        life = history.lives.get(flight.request_id)
        if life is None:
            stopped = flight.request_id in history.stopped_in_flight
            yield "row_of_an_ended_request_ignored" if stopped else "commit_for_aborted"
        elif not tokens:
            yield "prefill_row_sampled_nothing"
        else:
            yield from _of_acceptance(step, flight, tokens)
            rejected = 1 + len(flight.drafts) - len(tokens)
            is_running = step.old[flight.request_id].status is v.Status.RUNNING
            if rejected and is_running and num_frames(history, flight.request_id) > 1:
                yield "rollback_with_frames_behind"
            answer = answers.get(flight.request_id)
            if answer is not None:
                is_stale = step.commit.frame_id >= history.first_frame_since_reset
                yield from _of_output(step, life, answer, tokens, is_stale)

    before, after = step.before.block_keys, step.after.block_keys
    is_published = after is not before and after != before
    for stretch in verified_blocks(step, history) if is_published else ():
        if stretch.blocks:
            lives = stretch.request_id in step.new
            yield "published_by_commit" if lives else "published_by_the_last_commit"


def _of_output(
    step: Step, life: RequestHistory, answer: v.OutputRow, tokens: v.TokenIds, is_stale: bool
) -> Iterator[str]:
    request = life.request
    if step.old[request.request_id].status is v.Status.PREEMPTED:
        yield "stale_tokens_delivered" if is_stale else "commit_for_preempted"
        if is_stale and not step.config.async_scheduling:
            yield "pipeline_token_after_preemption"
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
    if reason is v.FinishReason.STOP:
        yield "stop_eos" if answer.stop_token_id is None else "stop_token"
    elif reason is v.FinishReason.LENGTH:
        outputs = count + len(answer.new_token_ids)
        yield "stop_length" if outputs >= request.max_tokens else "stop_model_length"
    elif reason is v.FinishReason.REPETITION:
        yield "stop_repetition"


def _of_acceptance(step: Step, flight: FlightRow, tokens: v.TokenIds) -> Iterator[str]:
    """Yield the goals for the number of accepted drafts of a row."""
    if not flight.drafts:
        return
    accepted, count, config = len(tokens) - 1, len(flight.drafts), step.config
    if accepted == count:
        yield "drafts_all_accepted"
    else:
        yield "drafts_some_accepted" if accepted else "drafts_none_accepted"
    size = config.block_size
    if blocks_for(flight.end - count + accepted, size) < blocks_for(flight.end, size):
        yield "rollback_over_a_block_boundary"


def of_drafts(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of proposed drafts."""
    assert isinstance(step.event, v.Drafts)
    assert isinstance(step.observation, v.DraftsTaken)
    for row in step.event.drafts:
        if row.request_id not in step.observation.request_ids:
            yield "drafts_dropped"
        elif row.token_ids:
            yield "drafts_taken"
            if history.lives[row.request_id].drafts:
                yield "drafts_replaced"


FRAMES = {
    "several_frames_in_flight": "a second plan was made before the first was committed",
    "four_frames_in_flight": "a fourth plan was made before the first was committed",
    "planned_before_its_token": "a row was to run a token that a frame in flight would sample",
    "chunks_in_two_frames": "two chunks of one prompt were in flight",
    "skip_ahead": "a running request had no row, because its last output might be in flight",
    "preempted_in_flight": (
        "a request was preempted for lack of blocks while a frame in flight samples for it"
    ),
    "all_preempted_in_flight": "the only running request, with tokens in flight, preempted itself",
    "stale_tokens_delivered": "a request preempted in flight for lack of blocks got its tokens",
    "ended_while_stale": "a request preempted in flight for lack of blocks ended with those tokens",
    "passed_over_for_its_tokens": "a request that waits for its own tokens in flight was skipped",
    "admitted_past_a_stale_one": "a request was admitted before one that waits for its own tokens",
    "resumed_after_stale_tokens": "a request that had got tokens while preempted was resumed",
    "abort_stale": "a preempted request with tokens in flight was aborted",
    "published_by_commit": "a commit published a block of a request that continues",
    "published_by_the_last_commit": "a commit published a block of a request that it ended",
    "draft_placeholders_scheduled": "a row carried placeholders for drafts",
    "draft_placeholders_dropped": "a running request had no row, and lost its placeholders",
    "rollback_with_frames_behind": (
        "drafts were rejected while a later frame had a row of the request"
    ),
    "row_of_an_ended_request_ignored": (
        "a commit had a row of a request that an earlier commit had ended"
    ),
    "abort_with_two_frames_in_flight": "a request with rows in two frames in flight was aborted",
    "reset_forced_with_two_frames_in_flight": (
        "a forced reset preempted a request with rows in two frames in flight"
    ),
    "rejected_pipeline_full_async": "a plan was rejected with several frames in flight",
    "pipeline_chunks_in_two_frames": (
        "two chunks of one prompt were in flight, without placeholders"
    ),
    "pipeline_waits_for_its_token": (
        "a running request had no row, because a frame in flight samples its token"
    ),
    "pipeline_preempted_in_flight": (
        "a request was preempted while a frame in flight samples its token"
    ),
    "pipeline_token_after_preemption": "a request preempted in flight got the token of that frame",
    "dropped_token_runs_again": (
        "a preempted request lost a token in flight, and is resumed before its position (of "
        "engines whose traits say that they drop such tokens)"
    ),
}


def of_frames(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan made while others are in flight."""
    if step.rows and len(step.after.frames_in_flight) > 1:
        yield "several_frames_in_flight"
        if len(step.after.frames_in_flight) > 3:
            yield "four_frames_in_flight"
    yield from (_of_promises if step.config.async_scheduling else _of_pipeline)(step, history)


def _of_promises(step: Step, history: History) -> Iterator[str]:
    """Yield these goals under asynchronous scheduling."""
    for row in step.rows:
        if row.drafts:
            yield "draft_placeholders_scheduled"
        if history.placeholders(row.request_id):
            yield "planned_before_its_token"
        elif row.kind is RowKind.RUNNING and history.in_flight(row.request_id):
            yield "chunks_in_two_frames"
        life = history.lives[row.request_id]
        if row.kind is RowKind.RESUMED and life.num_known_then not in (0, life.num_known):
            yield "resumed_after_stale_tokens"
    for name in _without_row(step):
        if step.old[name].spec_token_ids:
            yield "draft_placeholders_dropped"
        if _tried_all_running(step, history) and ends_in_flight(history, step.old[name]):
            yield "skip_ahead"
    if any(map(history.placeholders, step.plan.preempted_req_ids)):
        yield "preempted_in_flight"
        if not step.after.running:
            yield "all_preempted_in_flight"
    if any(name not in step.place for name in history.promised):
        yield from _of_stale(step, history)


def _of_pipeline(step: Step, history: History) -> Iterator[str]:
    """Yield these goals where each request waits for its own token."""
    for row in step.rows:
        if row.kind is RowKind.RUNNING and history.in_flight(row.request_id):
            yield "pipeline_chunks_in_two_frames"
    if any(map(history.promised.get, _without_row(step))) and _tried_all_running(step, history):
        yield "pipeline_waits_for_its_token"
    if any(map(history.promised.get, step.plan.preempted_req_ids)):
        yield "pipeline_preempted_in_flight"


def _without_row(step: Step) -> list[v.RequestId]:
    """Running requests without a row."""
    if len(step.running_rows) == len(step.before.running):
        return []
    others = {*step.plan.preempted_req_ids, *(row.request_id for row in step.rows)}
    return [name for name in step.before.running if name not in others]


def _tried_all_running(step: Step, history: History) -> bool:
    """Whether a plan tried all running requests: budget, blocks and pause allowed it."""
    rest = step.config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    is_paused = history.pause_state is v.PauseState.PAUSED_ALL
    return rest > 0 and not step.plan.preempted_req_ids and not is_paused


def _of_stale(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of requests that were skipped for their own tokens."""
    met = [name for name in passed_over(step, history) if history.placeholders(name)]
    if not met:
        return
    yield "passed_over_for_its_tokens"
    admitted = [history.lives[row.request_id].order for row in step.admitted_rows]
    first = min(history.lives[name].order for name in met)
    if admitted and (step.config.policy is v.Policy.FCFS or max(admitted) > first):
        yield "admitted_past_a_stale_one"


def num_frames(history: History, name: v.RequestId) -> int:
    """Number of frames in flight with a row of a request."""
    return sum(any(row.request_id == name for row in rows) for rows in history.frames.values())


SIGNALS = {
    "abort_waiting": "a request that had never run was aborted",
    "abort_running": "a running request without a frame in flight was aborted",
    "abort_preempted": "a preempted request was aborted",
    "abort_in_flight": "a request with a row in flight was aborted",
    "abort_unknown": "an abort named an id that is not unfinished",
    "abort_of_shared_block": "a request was aborted whose blocks have other holders",
    "grammar_ready_twice": "a grammar was reported as compiled again",
    "reset_refused": "a reset failed because blocks were held",
    "reset_done": "a reset without force emptied a cache that was not empty",
    "reset_forced": "a forced reset preempted a request",
    "reset_forced_in_flight": "a forced reset preempted a request with a row in flight",
    "id_used_again": "an id was submitted again before a plan named its last request as finished",
}


def of_submission(step: Step, history: History) -> Iterator[str]:
    """Yield a goal if the id was used before."""
    assert isinstance(step.event, v.Submit)
    if step.event.request.request_id in history.ended:
        yield "id_used_again"


def of_grammar(step: Step, history: History) -> Iterator[str]:
    """Yield a goal if the grammar was compiled already."""
    assert isinstance(step.event, v.GrammarReady)
    if history.lives[step.event.request_id].grammar_ready:
        yield "grammar_ready_twice"


def of_abort(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of an abort."""
    assert isinstance(step.event, v.Abort)
    ref_counts = step.before.ref_counts
    for name in dict.fromkeys(step.event.request_ids):
        old = step.old.get(name)
        if old is None:
            yield "abort_unknown"
            continue
        yield _kind_of_abort(history, name, old.status)
        if old.status is v.Status.PREEMPTED and history.placeholders(name):
            yield "abort_stale"
        if num_frames(history, name) > 1:
            yield "abort_with_two_frames_in_flight"
        if any(ref_counts[block] > 1 for table in old.block_tables for block in table):
            yield "abort_of_shared_block"


def _kind_of_abort(history: History, name: v.RequestId, status: v.Status) -> str:
    if history.in_flight(name):
        return "abort_in_flight"
    if status is v.Status.RUNNING:
        return "abort_running"
    return "abort_preempted" if status is v.Status.PREEMPTED else "abort_waiting"


def of_reset(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a reset."""
    assert isinstance(step.event, v.Reset)
    assert isinstance(step.observation, v.ResetDone)
    if not step.observation.success:
        yield "reset_refused"
    elif not step.event.reset_running_requests:
        if step.before.cached:
            yield "reset_done"
    elif step.before.running:
        yield "reset_forced"
        if any(map(history.in_flight, step.before.running)):
            yield "reset_forced_in_flight"
        if any(num_frames(history, name) > 1 for name in step.before.running):
            yield "reset_forced_with_two_frames_in_flight"


def of_refusal(step: Step, _history: History) -> Iterator[str]:
    """Yield the goals of a rejected event."""
    assert isinstance(step.observation, v.Rejected)
    code = step.observation.code
    yield f"rejected_{code}"
    if code is v.RejectCode.PIPELINE_FULL and step.config.async_scheduling:
        yield "rejected_pipeline_full_async"


GOALS = Goals(
    ADMISSION | PLANS | PREEMPTION | COMMITS | SIGNALS | FRAMES,
    {
        v.Submit: of_submission,
        v.Schedule: of_schedule,
        v.Commit: of_commit,
        v.Drafts: of_drafts,
        v.GrammarReady: of_grammar,
        v.Abort: of_abort,
        v.Reset: of_reset,
    },
)
REFUSALS = Goals(
    {f"rejected_{code}": f"an event was refused as {code}" for code in v.RejectCode},
    {v.Rejected: of_refusal},
)
