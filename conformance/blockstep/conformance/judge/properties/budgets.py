"""Budgets and counters: P9 what a step may use, P12 counters of a request, P21 of a run."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from blockstep.conformance.judge.attention_ranges import count_across, is_across
from blockstep.conformance.judge.grammar_automaton import Automaton
from blockstep.conformance.judge.properties.history import SLOTS, STATISTICS, History
from blockstep.conformance.judge.properties.hits import may_ask_the_cache, may_ask_the_store
from blockstep.conformance.judge.properties.observed_step import (
    PlannedRow,
    RowKind,
    Step,
    is_parked,
    keeps_blocks,
)
from blockstep.conformance.judge.properties.property_check import (
    ENDINGS,
    Complaint,
    Complaints,
    difference,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.store_history import has_lost_all
from blockstep.spec import vocabulary as v


@sentence("P9", v.Schedule, of="rows")
def plan_stays_within_token_budget(step: Step, _history: History) -> Complaints:
    """A step runs at most `max_num_batched_tokens` tokens."""
    total = sum(row.num_scheduled for row in step.rows)
    limit = step.config.max_num_batched_tokens
    return [Complaint(f"{total} tokens planned, {limit} allowed")] if total > limit else ()


@sentence("P9", v.Schedule, of="changes", needs=SLOTS)
def running_stays_within_max_num_seqs(step: Step, _history: History) -> Complaints:
    """No more than `max_num_seqs` requests run."""
    running, limit = len(step.after.running), step.config.max_num_seqs
    return [Complaint(f"{running} requests run, {limit} may")] if running > limit else ()


@sentence("P9", v.Schedule, of="rows", fixes="how the tokens of a step are shared out")
def row_stays_within_its_caps(step: Step, _history: History) -> Complaints:
    """A row runs at least one token, and at most the long-prefill threshold."""
    config = step.config
    threshold = config.long_prefill_token_threshold or config.max_num_batched_tokens
    for row in step.rows:
        if not 1 <= row.num_scheduled <= threshold:
            yield Complaint(
                f"{row.request_id!r} runs {row.num_scheduled} tokens, of {threshold}",
                subjects=row.request_id,
            )


@sentence("P9", v.Schedule, of="rows")
def row_stays_within_max_model_len(step: Step, _history: History) -> Complaints:
    """The last position of the model is never run: no token can be sampled from it.

    To stop one position before the limit is a policy.
    """
    for row in step.rows:
        if row.end > step.config.max_model_len - 1:
            yield Complaint(
                f"{row.request_id!r} runs up to position {row.end - 1} "
                f"of a model length of {step.config.max_model_len}",
                subjects=row.request_id,
            )


@sentence("P9", v.Schedule, of="rows")
def paused_scheduler_admits_no_request(step: Step, history: History) -> Complaints:
    """PAUSED_NEW admits no request, PAUSED_ALL schedules none."""
    if history.pause_state is v.PauseState.UNPAUSED:
        return ()
    rows = step.rows if history.pause_state is v.PauseState.PAUSED_ALL else step.admitted_rows
    return [
        Complaint(
            f"{row.request_id!r} scheduled while {history.pause_state}", subjects=row.request_id
        )
        for row in rows
    ]


@sentence("P9", v.Schedule, of="admitted_rows")
def prompt_is_not_cut_without_chunking(step: Step, history: History) -> Complaints:
    """An admission without chunked prefill runs all uncached tokens, or as many as the threshold
    allows.

    It may end earlier, before an item that the encoder may not have computed.
    """
    if step.config.enable_chunked_prefill:
        return
    threshold = step.config.long_prefill_token_threshold
    for row in step.admitted_rows:
        rest = history.lives[row.request_id].num_known - row.end
        items = (
            history.lives[row.request_id].request.items if step.config.encoder_cache_size else ()
        )
        most = row.end + step.config.num_encoder_lookahead_tokens
        is_at_item = any(row.end <= item.offset <= most for item in items)
        if rest > 0 and row.num_scheduled != threshold and not is_at_item:
            yield Complaint(
                f"{row.request_id!r} was admitted with {rest} tokens left out",
                subjects=row.request_id,
            )


@sentence(
    "P12",
    *ENDINGS,
    v.Schedule,
    v.Reset,
    v.Fork,
    of="changes",
    fixes="what a request keeps that does not run",
)
def only_running_requests_hold_anything(step: Step, history: History) -> Complaints:
    """A waiting request has no block, no computed token and no draft; an idle session no draft."""
    no_tables, nothing_settled = nothing_held(step)
    for request in step.after.requests:
        if request.status is v.Status.RUNNING:
            continue
        if keeps_blocks(request) and not request.spec_token_ids:
            life = history.lives.get(request.request_id)
            if life is None or life.is_branch or request.prompt_token_ids or is_parked(request):
                continue  # it may hold kept, shared or loaded blocks
        if (
            request.block_tables != no_tables
            or request.num_computed_tokens
            or request.num_cached_blocks != nothing_settled
            or request.spec_token_ids
        ):
            released = replace(
                request,
                block_tables=no_tables,
                num_computed_tokens=0,
                num_cached_blocks=nothing_settled,
                spec_token_ids=(),
            )
            what = f"{request.request_id!r} is {request.status} and was not released"
            yield unequal(
                what,
                f"request {request.request_id}",
                released,
                request,
                subjects=request.request_id,
            )


@sentence("P12", *ENDINGS, v.Schedule, v.Reset, covered_by="plans_alone_rebuild_the_request")
def counters_stay_within_what_is_known(step: Step, history: History) -> Complaints:
    """The computed tokens are less than known tokens and placeholders, and exactly one less if the
    request has placeholders and runs.

    The placeholders are those of its frames in flight, also after a preemption. No block counts as
    cached that is not full of computed, known tokens.
    """
    promised, promised_before, old = history.promised_after(step), history.promised, step.old
    is_same = step.after.requests is step.before.requests and promised is promised_before
    if is_same and old.keys() <= history.lives.keys():
        return
    config, sizes = step.config, step.block_sizes
    is_async, has_across = config.async_scheduling, config.is_encoder_decoder
    may_lose_all = bool(config.kv_connector and config.groups)
    for request in step.after.requests:
        name = request.request_id
        life, owed = history.lives.get(name), promised.get(name, 0)
        if life is None:
            yield Complaint(f"{name!r} was never submitted, or has ended", subjects=name)
            continue
        if old.get(name) is request and owed == promised_before.get(name, 0):
            continue  # as before
        num_prompt = len(request.prompt_token_ids) or life.num_prompt
        known = num_prompt + len(request.output_token_ids)
        computed = request.num_computed_tokens
        # The last token is not computed yet, be it known or in flight.
        most = known + owed - 1
        # All others are, once a sampling row is dispatched.
        least = most if owed and request.status is v.Status.RUNNING else 0
        filled = min(computed, known)
        if may_lose_all and has_lost_all(config, request):
            # Its hit counts as cached until it is given back.
            load = history.store.parked.get(name)
            filled = 0 if load is None else load.num_computed_tokens
        tables, nums_settled, is_held = request.block_tables, request.num_cached_blocks, True
        due = computed
        for group, size in enumerate(sizes):
            if has_across:
                due = computed
                if is_across(step.groups[group]):
                    due = count_across(config, life.request) if computed else 0
            if len(tables[group]) * size < due or not (0 <= nums_settled[group] <= filled // size):
                is_held = False
        placeholders = owed if is_async else 0
        is_possible = least <= computed <= most
        if not is_possible or request.num_output_placeholders != placeholders or not is_held:
            what = (
                f"the counters of {name!r} cannot be: {known} tokens known, "
                f"{owed} in flight, {least} to {most} computed"
            )
            owing = difference(
                "num_output_placeholders", placeholders, request.num_output_placeholders
            )
            holding = difference(
                "num_computed_tokens, block_tables, num_cached_blocks",
                f"blocks for all computed tokens, none cached after token {filled}",
                (computed, tables, nums_settled),
            )
            comparisons = (
                (is_possible, difference("num_computed_tokens", f"{least} to {most}", computed)),
                (owing.expected == owing.seen, owing),
                (is_held, holding),
            )
            wrong = tuple(one for is_right, one in comparisons if not is_right)
            yield Complaint(what, wrong, name)


def nothing_held(step: Step) -> tuple[v.BlockTables, tuple[int, ...]]:
    """Block tables and counts of cached blocks of a request without blocks, one per KV group."""
    num_groups = len(step.block_sizes)
    return ((),) * num_groups, (0,) * num_groups


_GOING_ON = (RowKind.RUNNING, RowKind.CONTINUED)
_MOVED_BY_A_ROW = (
    *("num_computed_tokens", "is_prefill_chunk", "spec_token_ids", "status"),
    *("output_token_ids", "grammar_ready"),
)
_after_a_row = attrgetter(*_MOVED_BY_A_ROW)


@sentence("P12", v.Schedule, of="rows", covered_by="plans_alone_rebuild_the_request")
def row_advances_by_what_it_runs(step: Step, history: History) -> Complaints:
    """A row begins at the computed tokens of its request and adds the tokens that it runs.

    It adds no output, and with prefix caching off no cached block.
    """
    for row in step.rows:
        old, new = step.old[row.request_id], step.new[row.request_id]
        flight = history.flight_row(row)
        drafts = history.drafts_after(flight)
        outputs, is_ready = old.output_token_ids, old.grammar_ready
        due = (row.end, not flight.samples, drafts, v.Status.RUNNING, outputs, is_ready)
        seen = _after_a_row(new)
        if seen != due:
            for name, one, other in zip(_MOVED_BY_A_ROW, due, seen, strict=True):
                if one != other:
                    yield _moved(row, name, one, other)
        if row.kind in _GOING_ON and old.num_computed_tokens != row.first:
            yield _moved(row, "num_computed_tokens before", old.num_computed_tokens, row.first)
        if not step.config.enable_prefix_caching and any(new.num_cached_blocks):
            nothing_settled = nothing_held(step)[1]
            yield _moved(row, "num_cached_blocks", nothing_settled, new.num_cached_blocks)


def _moved(row: PlannedRow, name: str, due: object, seen: object) -> Complaint:
    what = f"{row.request_id!r} ran positions {row.first} to {row.end - 1}"
    return unequal(what, name, due, seen, subjects=row.request_id)


@sentence(
    "P12", v.Schedule, v.Reset, of="preempted", fixes="what a request keeps that does not run"
)
def preempted_request_starts_again(step: Step, _history: History) -> Complaints:
    """A preempted request keeps its outputs and history and counts one preemption more.

    Its placeholders stay, since frames in flight still deliver their tokens.
    `only_running_requests_hold_anything` checks what it loses.
    """
    for name in step.preempted:
        old, new = step.old[name], step.new[name]
        expected = replace(
            old,
            status=v.Status.PREEMPTED,
            num_computed_tokens=new.num_computed_tokens,
            spec_token_ids=new.spec_token_ids,
            block_tables=new.block_tables,
            num_cached_blocks=new.num_cached_blocks,
            num_preemptions=old.num_preemptions + 1,
        )
        if new != expected:
            yield unequal(
                f"{name!r} was preempted", f"request {name}", expected, new, subjects=name
            )


@sentence("P12", v.Submit, fixes="what is reserved for a request when it is submitted")
def submitted_request_starts_from_nothing(step: Step, _history: History) -> Complaints:
    """A new request waits, for its grammar if it has one, and holds nothing."""
    assert isinstance(step.event, v.Submit)
    request = step.event.request
    grammar, waiting = v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, v.Status.WAITING
    status = grammar if request.structured_output else waiting
    no_tables, nothing_settled = nothing_held(step)
    expected = v.RequestSnapshot(
        request.request_id,
        status,
        block_tables=no_tables,
        num_cached_blocks=nothing_settled,
        reasoning_ended=has_stopped_reasoning(step.config, request),
        prompt_token_ids=request.prompt_token_ids if request.resumable else (),
    )
    seen = step.new.get(request.request_id)
    if seen != expected:
        what = f"{request.request_id!r} was accepted"
        yield unequal(
            what, f"request {request.request_id}", expected, seen, subjects=request.request_id
        )


def has_stopped_reasoning(config: v.Config, request: v.Request) -> bool:
    """Whether a request's reasoning ended in its prompt, if its grammar starts only after that."""
    if request.grammar is None:
        return False
    automaton = Automaton(config, request)
    return automaton.is_reasoning_over(automaton.start)


@sentence("P21", *v.EVENT_TYPES, needs=STATISTICS)
def counters_grow_by_what_happened(step: Step, history: History) -> Complaints:
    """The counters grow by queries and hits of admitted requests, by preemptions, and by drafts
    that were scheduled and accepted; once each."""
    expected, seen = _after(step.before.stats, step, history), step.after.stats
    if history.uncounted:
        expected = replace(expected, **{name: getattr(seen, name) for name in history.uncounted})
    if seen is expected or seen == expected:
        return ()
    return [unequal("the counters are not what happened", "stats", expected, seen)]


def _after(stats: v.Stats, step: Step, history: History) -> v.Stats:
    queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
    preemptions = stats.preemptions
    scheduled, accepted = stats.drafts_scheduled, stats.drafts_accepted
    external_queries = stats.external_prefix_cache_queries
    external_hits = stats.external_prefix_cache_hits
    if isinstance(step.event, v.Schedule):
        if not (step.victims or step.askers) and step.after.stats == stats:
            return stats
        preemptions += len(step.victims)
        for row in step.askers:
            life = history.lives[row.request_id]
            if may_ask_the_cache(step, life):
                queries += life.num_known
                hits += row.num_hit
            if may_ask_the_store(step.config, life.request):
                external_queries += life.num_known - row.num_hit
                external_hits += row.num_external
        if step.hides_what_was_given:
            queries = step.after.stats.prefix_cache_queries
            hits = step.after.stats.prefix_cache_hits
            external_queries = step.after.stats.external_prefix_cache_queries
            external_hits = step.after.stats.external_prefix_cache_hits
    elif isinstance(step.event, v.Commit):
        void = history.find_void(step)
        preemptions += len(history.list_lost(step))
        for flight in history.frame_of(step):
            tokens = step.sampled.get(flight.request_id, ())
            is_over = flight.is_dropped or flight.request_id in void
            if flight.drafts and flight.request_id in history.lives and not is_over:
                scheduled += len(flight.verified)
                accepted += len(tokens) - 1
    elif isinstance(step.event, v.Reset):
        done = step.observation
        if step.event.reset_running_requests and isinstance(done, v.ResetDone) and done.success:
            preemptions += len(step.before.running)
    else:
        return stats
    counted = (queries, hits, preemptions, scheduled, accepted)
    return v.Stats(*counted, external_queries, external_hits)


@sentence("P21", v.Schedule, of="rows", needs=STATISTICS)
def first_hit_is_remembered(step: Step, history: History) -> Complaints:
    """The state keeps the length of the prefix hit at the first admission, whatever later
    admissions hit."""
    for row in step.rows:
        old, new = step.old[row.request_id], step.new[row.request_id]
        first = history.lives[row.request_id].num_cached_tokens
        expected = row.first if first < 0 else first
        num_preemptions = old.num_preemptions + (row.request_id in step.victims)
        if (new.num_cached_tokens, new.num_preemptions) != (expected, num_preemptions):
            what = f"{row.request_id!r} was scheduled at position {row.first}"
            yield unequal(
                what, "num_cached_tokens", expected, new.num_cached_tokens, subjects=row.request_id
            )
