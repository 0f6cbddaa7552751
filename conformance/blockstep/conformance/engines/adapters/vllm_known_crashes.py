"""The events that the adapter does not send to a release of vLLM, because of defects that would end
every run.

Each has a reason, which the report of a run shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vllm.v1.request import Request as VllmRequest

from blockstep.conformance.engines.adapters.vllm_build import RELEASE, VOCABULARY_SIZE
from blockstep.conformance.engines.adapters.vllm_state import Run
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.spec import vocabulary as v

FORCED_RESET = "forced reset under asynchronous scheduling (#42043)"
RESUMED_TOO_EARLY = "resumed before its tokens (#47900)"
PAST_THE_END = "min_tokens at the model length"
BEHIND_DRAFTS = "a plan behind drafts in flight: fewer than no tokens"
BEYOND_MAX_LORAS = "a plan with rows of more adapters than max_loras"
ENDS_AMONG_THE_SKIPPED = "a preempted request skipped for its adapter before its frame ends it"
STOPS_TWICE = (
    "a plan with a session that a frame in flight may stop: it becomes idle, and stops once more"
)
TRIMMED_PROMISES = (
    "a session with drafts that the worker keeps: trimmed tokens stay counted as placeholders"
)
KEY_INSIDE_A_HEAP = "a chunk that changes the arrival of a session inside of a heap of several"
TRIMMED_DRAFTS = "drafts of a session that may stop amid them: more is computed then than is known"
RESET_AT_REST = "a forced reset while a waiting session or loaded request holds blocks: it raises"
STOPS_WHILE_PREEMPTED = "a session that stops while preempted: its tokens or its place are lost"
BEHIND_STATES = "a plan behind rejected drafts that had states: fewer blocks than there are"
LOADED_BESIDE = (
    "items of an encoder-decoder model are loaded: no cross-attention block is allocated for them"
)
MAX_ITEMS = 8
"""The largest number of items whose indices Python keeps in order in a set."""
OUT_OF_A_SET = "more than 8 items: a request frees them in the order of a set"
PADDED_PAST_THE_THRESHOLD = "padding above the long-prefill threshold (#54028)"
FAILED_GRAMMAR = "a grammar that fails: the next plan raises what its compilation did"
FAILED_LATER = "a grammar that fails: its request ends in the answer of a later step"
FORBIDDEN_DRAFTS = (
    "drafts told behind an overlooked end of reasoning: not cut, and the mask asserts"
)
PADDED_TO_THE_END = "a plan behind padding to the model length (#53962)"

WORKAROUNDS: Mapping[str, str] = MappingProxyType(
    {
        "separate_names": "an adapter and a salt of one name give a block the same digest (P6)",
        "spare_unservable": "a request that never fits is taken, and blocks the queue (#52520)",
        "spare_reuse": "an id is free again while a frame in flight names it; its answer goes to "
        "the new request, its rejected drafts are subtracted from that one, and tokens without a "
        "placeholder are an assertion",
        "abort_singly": "aborting several at once frees their blocks in the order of a set",
        "spare_counters": "counters of the prefix cache count attempts at admission that fail "
        "(#43736)",
        "spare_late_drafts": "late drafts are kept, by a request that waits or has a frame in "
        "flight (P24)",
        "spare_signals": "a signal of a transfer that comes twice, late, or about no request is an "
        "assertion (B21)",
        "spare_group_failures": "an invalid block with several groups is an assertion (B47)",
        "spare_full_loads": "a load at once of all known tokens is an assertion (B36)",
    }
)
"""Defects that each flag of an engine works around."""


def list_out_of_reach() -> frozenset[str]:
    """Return the coverage goals that this release cannot reach, or that the adapter avoids."""
    waits = {"admitted_past_a_stale_one", "passed_over_for_its_tokens"}
    ends = {"commit_for_preempted", "ended_while_preempted"}
    resets = {name for name in WITNESSES if name.startswith("reset_forced")}
    failures = {name for name in WITNESSES if name.startswith("masks_failed")}
    priorities = {name for name in WITNESSES if name.startswith("priority")}
    skipped = {"admission_after_skip", "grammar_skipped", "adapters_seat_taken"}
    across = {name for name in WITNESSES if name.startswith(("encoder_across", "encoder_beside"))}
    waiting = {name for name in WITNESSES if name.startswith("transfers_deferred")}
    waiting.add("transfers_waits_for_an_answer")
    # Without drafts no request outgrows the pool alone, or needs more tokens than a step before.
    drafts = {"head_drop", "block_for_lookahead_only", "all_preempted_in_flight"}
    requests_can_wait = RELEASE.has_pause or RELEASE.has_plain_grammar or RELEASE.has_async
    found = {"draft_placeholders_dropped"} | failures  # quirk `stale_draft_placeholders`
    for is_lacking, names in (
        (not RELEASE.has_sound_preemption, waits),
        (RELEASE.has_sound_async_reset, ends),  # it drops them: quirk `reset_drops_tokens`
        (not RELEASE.has_sound_async_reset, {"reset_forced_with_two_frames_in_flight"}),
        (not RELEASE.has_sound_priority, {*priorities, "admission_overtakes"}),
        (not RELEASE.has_forced_reset, resets | ends),
        # Seen by the queue in which they wait.
        (not RELEASE.has_skipped_waiting, {*waits, *skipped}),
        (not RELEASE.has_drafts, {*drafts, "running_left_out_by_budget"}),
        (not requests_can_wait, {"empty_plan_with_work"}),
        (not RELEASE.has_repetition_detection, {"stop_repetition"}),
        (not RELEASE.has_cache_opt_out, {"reading_skipped"}),
        (not RELEASE.masks_stops, {"min_tokens_held_back_a_stop"}),
        (not RELEASE.has_named_embeds, {"same_tokens_other_embeds"}),
        (not RELEASE.has_mixed_groups or RELEASE.has_partial_hits, {"groups_larger_block_filled"}),
        (not RELEASE.keeps_doubtful_blocks, {"groups_block_in_doubt"}),
        (not RELEASE.has_offers, {"encoder_item_loaded", "encoder_reset_in_use"}),
        (not RELEASE.has_across, across),
        (not RELEASE.has_group_gate, {"groups_admitted_past_its_room"}),
        (RELEASE.has_store, {"transfers_returned_behind_a_head"}),  # it looks at nobody there
        (not RELEASE.frees_behind_frames, waiting),  # quirk `blocks_freed_while_frames_write`
        (not RELEASE.has_recurrent_groups, {"groups_state_left", "groups_hit_of_a_state"}),
    ):
        found |= names if is_lacking else set()
    return frozenset(found)


def find_reason(run: Run, event: v.Event) -> str | None:
    """Return why an event is not sent: a feature that the release lacks, or a defect that would
    raise some steps later; None if it is sent.
    """
    match event:
        case v.Submit(request=request):
            return _find_lack(run, request)
        case v.StreamingUpdate(request=request):
            if _changes_a_key(run, request):
                return KEY_INSIDE_A_HEAP
            return OUT_OF_A_SET if _count_items(run, request) > MAX_ITEMS else None
        case v.Drafts(drafts=drafts):
            return TRIMMED_DRAFTS if _may_trim_a_session(run, drafts) else None
        case v.GrammarFailed():
            return FAILED_LATER if RELEASE.survives_bad_grammars else FAILED_GRAMMAR
        case v.GrammarBitmask(frame_id=frame_id, drafts=drafts):
            return FORBIDDEN_DRAFTS if _are_forbidden(run, frame_id, drafts) else None
        case v.EncoderOffer(identifiers=identifiers):
            if not RELEASE.has_offers:
                return "the release has no encoder results from elsewhere"
            return LOADED_BESIDE if identifiers and run.config.is_encoder_decoder else None
        case v.EncoderReset():
            return None if RELEASE.has_offers else "the release's encoder cache has no reset"
        case v.Reset(reset_running_requests=True):
            return _find_problem_of_reset(run)
        case v.Schedule():
            return _find_problem_of_plan(run)
    return None


def _find_problem_of_reset(run: Run) -> str | None:
    """Return what the release lacks for a forced reset, or the defect that it would meet."""
    if not RELEASE.has_forced_reset:
        return "the release has no forced reset"
    # One frame of each is thrown away, in flight or not.
    if run.config.async_scheduling and not RELEASE.has_sound_async_reset:
        return FORCED_RESET
    if not RELEASE.has_sound_sessions and _list_sessions_in_flight(run):
        return STOPS_WHILE_PREEMPTED
    if any(_does_hold(run, one) for one in (*run.scheduler.waiting, *run.get_skipped())):
        return RESET_AT_REST
    return PAST_THE_END if _is_any_full(run, run.scheduler.running) else None


def _find_problem_of_plan(run: Run) -> str | None:
    """Return the defect that a plan would meet, now or some steps later."""
    waiting = [*run.scheduler.waiting, *run.get_skipped()]
    # vLLM's own loop answers the oldest plan first, so that this one is not made.
    if not RELEASE.has_sound_preemption and any(
        request.num_output_placeholders for request in waiting
    ):
        return RESUMED_TOO_EARLY
    if _is_any_full(run, waiting):
        return PAST_THE_END
    if _is_behind_drafts(run):
        return BEHIND_DRAFTS
    if _is_behind_states(run):
        return BEHIND_STATES
    if _is_beyond_max_loras(run):
        return BEYOND_MAX_LORAS
    stopping = [] if RELEASE.has_sound_sessions else _list_stopping(run)
    if any(one.num_output_placeholders and not _is_sure_to_end(one) for one in stopping):
        return STOPS_TWICE
    if stopping and _may_preempt(run):
        return STOPS_WHILE_PREEMPTED
    if _may_end_among_the_skipped(run, waiting):
        return ENDS_AMONG_THE_SKIPPED
    return _find_padding_problem(run, waiting)


def _are_forbidden(run: Run, frame_id: v.FrameId, drafts: tuple[v.RowTokens, ...]) -> bool:
    """Return whether drafts that a grammar forbids would not be cut, since reasoning ends only with
    them.

    The release looks for the end token among the last tokens, but counts tokens in flight as if
    they were there: for a preempted request it looks at the wrong positions.
    """
    manager, requests = run.scheduler.structured_output_manager, run.scheduler.requests
    if RELEASE.has_fixed_mask_rows or run.config.reasoning_end_token_id is None:
        return False
    planned = run.frames[frame_id].scheduled_spec_decode_tokens
    for row in drafts if not manager.enable_in_reasoning else ():
        request = requests.get(row.request_id)
        if request is None or not request.use_structured_output or row.request_id not in planned:
            continue
        structured = request.structured_output_request
        known = request.all_token_ids
        planned_drafts = list(row.token_ids[: len(planned[row.request_id])])
        start = request.num_computed_tokens - request.num_output_placeholders
        if (
            not structured.reasoning_ended
            and run.config.reasoning_end_token_id in known[max(start, -len(known)) :]
            and structured.grammar.validate_tokens(planned_drafts) != planned_drafts
        ):
            return True
    return False


def _is_behind_drafts(run: Run) -> bool:
    """Return whether drafts in flight would be subtracted from the tokens that their request has
    left to compute.

    Drafts that are placeholders are counted right.
    """
    if run.config.async_scheduling or RELEASE.has_floor:
        return False
    return len(run.frames) < run.config.max_frames_in_flight and any(
        name in run.get_unfinished()
        for frame in run.frames.values()
        for name in frame.scheduled_spec_decode_tokens
    )


def _is_behind_states(run: Run) -> bool:
    """Return whether a request would be planned with fewer blocks of a recurrent group than it has.

    The release then treats these blocks as those of rejected drafts. How many tokens a request gets
    depends on the requests planned before it; where the budget may be short, one token is assumed.
    """
    config, running = run.config, run.scheduler.running
    aligned = [one for one in run.managers if getattr(one, "mamba_cache_mode", "") == "align"]
    if not aligned or RELEASE.has_partial_hits:
        return False
    wanted = [_count_wanted(config, request) for request in running]
    is_short = sum(wanted) > config.max_num_batched_tokens
    for request, num_wanted in zip(running, wanted, strict=True):
        end = request.num_computed_tokens + (1 if is_short else num_wanted)
        for one in aligned if num_wanted else ():
            num_held = len(one.req_to_blocks.get(request.request_id, ()))
            if -(-end // one.block_size) + one.num_speculative_blocks < num_held:
                return True
    return False


def _is_beyond_max_loras(run: Run) -> bool:
    """Return whether the next plan would have rows of more adapters than `max_loras`.

    A running request without a row uses no LoRA slot, so another adapter may have been admitted in
    its place. If the plan may preempt a request, whose tokens then go to others, all running
    requests are counted.
    """
    cap, budget = run.config.max_loras, run.config.max_num_batched_tokens
    if RELEASE.has_sound_lora_slots:
        return False
    if cap and _may_preempt(run):
        budget *= 1 + len(run.scheduler.running)
    seated = set()
    for request in run.scheduler.running if cap else ():
        num_tokens = 0 if _is_sure_to_end(request) else _count_wanted(run.config, request)
        if request.lora_request is not None and min(num_tokens, budget) > 0:
            seated.add(request.lora_request.lora_int_id)
        budget -= min(num_tokens, budget)
    return len(seated) > cap


def _may_end_among_the_skipped(run: Run, waiting: list[VllmRequest]) -> bool:
    """Return whether a preempted request with a frame in flight may be skipped for its adapter.

    If that frame finishes it, it is removed from one queue and stays in the queue of skipped
    requests.
    """
    if not run.config.max_loras or not RELEASE.has_skipped_waiting:
        return False
    in_flight = {name for frame in run.frames.values() for name in frame.num_scheduled_tokens}
    return any(
        request.status.name == "PREEMPTED"
        and request.lora_request is not None
        and request.request_id in in_flight
        for request in waiting
    )


def _changes_a_key(run: Run, chunk: v.Request) -> bool:
    """Return whether a chunk changes the arrival time of a waiting session, and so its place in a
    heap of several."""
    session = run.scheduler.requests.get(chunk.request_id)
    return (
        session is not None
        and run.config.policy is v.Policy.PRIORITY
        and chunk.resumable
        and session.status.name == "WAITING_FOR_STREAMING_REQ"
        and session.arrival_time != chunk.arrival_time
        and any(
            session in queue and len(queue) > 1
            for queue in ([*run.scheduler.waiting], run.get_skipped())
        )
    )


def _list_stopping(run: Run) -> list[VllmRequest]:
    """Return the running sessions that a frame in flight may stop."""
    return [request for request in _list_sessions_in_flight(run) if _may_stop(run, request)]


def _does_hold(run: Run, request: VllmRequest) -> bool:
    """Return whether a waiting request holds blocks or has computed tokens; after a load of its
    only token it has just a block."""
    tables = [one.req_to_blocks.get(request.request_id, ()) for one in run.managers]
    has_blocks = any(not block.is_null for table in tables for block in table)
    return has_blocks or bool(request.num_computed_tokens)


def _list_sessions_in_flight(run: Run) -> list[VllmRequest]:
    """Return the running sessions that have a row in a frame in flight."""
    in_flight = {name for frame in run.frames.values() for name in frame.num_scheduled_tokens}
    return [
        request
        for request in (run.scheduler.running if RELEASE.has_sessions else ())
        if request.resumable and request.request_id in in_flight
    ]


def _may_stop(run: Run, request: VllmRequest) -> bool:
    """Return whether the tokens that frames in flight sample may stop a request."""
    asked = run.known[request.request_id].request
    if request.is_prefill_chunk:
        return False
    if asked.eos_token_id is not None or asked.stop_token_ids or asked.repetition_detection:
        return True
    promised = max(request.num_output_placeholders, 1)
    if not run.config.async_scheduling:
        promised += run.config.num_speculative_tokens
    is_longest: bool = (
        request.num_output_tokens + promised >= request.max_tokens
        or request.num_tokens + promised >= run.config.max_model_len
    )
    return is_longest


def _may_trim_a_session(run: Run, drafts: tuple[v.RowTokens, ...]) -> bool:
    """Return whether a session is given drafts, some of which its stop may cut off."""
    requests = run.scheduler.requests
    if not RELEASE.has_sessions or RELEASE.has_sound_sessions:
        return False
    return any(
        row.token_ids
        and row.request_id in requests
        and requests[row.request_id].resumable
        and _may_stop(run, requests[row.request_id])
        for row in drafts
    )


def _may_preempt(run: Run) -> bool:
    """Return whether the next plan may run out of blocks: fewer are free than all running requests
    could take."""
    config, running = run.config, run.scheduler.running
    num_slots = sum(_count_wanted(config, one) + config.num_lookahead_tokens for one in running)
    num_wanted = sum(num_slots // size + 2 * len(running) for size in config.block_sizes)
    num_free: int = run.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return num_free < num_wanted


def _is_sure_to_end(request: VllmRequest) -> bool:
    """Return whether a frame in flight certainly takes a request to its `max_tokens`: plans have no
    row for it."""
    promised: int = request.num_output_placeholders
    num_tokens: int = request.num_computed_tokens + 2 - promised
    return promised > 0 and num_tokens >= request.num_prompt_tokens + request.max_tokens


def _count_wanted(config: v.Config, request: VllmRequest) -> int:
    """Return the tokens of a running request in the next plan, if the budget suffices for all."""
    num_known: int = request.num_tokens_with_spec + request.num_output_placeholders
    num_left: int = min(num_known, config.max_model_len - 1) - request.num_computed_tokens
    threshold = config.long_prefill_token_threshold or num_left
    return max(min(num_left, threshold), 0)


def _find_padding_problem(run: Run, waiting: list[VllmRequest]) -> str | None:
    """Return why a plan may raise, or be wrong for the worker, because drafts are padded; None if
    it cannot.

    Either some of a row's tokens would be cut off, but none of its drafts; or a row that was padded
    up to the model length has not been answered, and is planned with -1 tokens.
    """
    config = run.config
    if not RELEASE.pads_drafts or config.num_speculative_tokens == 0:
        return None
    num_tokens, size = 1 + config.num_speculative_tokens, config.block_size
    if 0 < config.long_prefill_token_threshold < num_tokens and any(
        # A hit is whole blocks; which blocks of this very step it may find is not known.
        (
            request.num_tokens % size == 1 % size
            and (config.enable_prefix_caching or request.num_tokens == 1)
        )
        or request.num_tokens == request.num_computed_tokens + 1  # a session with its blocks
        for request in waiting
    ):
        return PADDED_PAST_THE_THRESHOLD
    if not RELEASE.has_floor and any(
        request.num_computed_tokens >= config.max_model_len for request in run.scheduler.running
    ):
        return PADDED_TO_THE_END
    return None


def _find_lack(run: Run, request: v.Request) -> str | None:
    """Return which feature of this request or config the release lacks; None if it has all of
    them.
    """
    config = run.config
    if config.policy is v.Policy.PRIORITY and not RELEASE.has_sound_priority:
        return "PRIORITY: the release compares requests, and keeps a victim's row (#23347, #28558)"
    if config.spec_method is not v.SpecMethod.NONE and not RELEASE.has_drafts:
        return "a config with drafts: not followed in this release"
    if config.spec_method is v.SpecMethod.DRAFT_MODEL and not RELEASE.has_draft_models:
        return "a config with a draft model: the release has none"
    if request.repetition_detection is not None and not RELEASE.has_repetition_detection:
        return "the release has no repetition detection"
    if request.structured_output and not RELEASE.has_plain_grammar:
        return "a grammar: the release wants its bitmask when it plans"
    if not RELEASE.has_across and config.is_encoder_decoder:
        return "an encoder-decoder model: not followed in this release"
    if not RELEASE.has_offers and config.encoder_cache_size and _has_holes(request):
        return "an item with a mask: the release's encoder cache counts positions"
    if _count_items(run, request) > MAX_ITEMS:
        return OUT_OF_A_SET
    drafts_ahead = config.num_speculative_tokens if config.async_scheduling else 0
    if request.resumable and drafts_ahead and not RELEASE.has_sound_sessions:
        return TRIMMED_PROMISES
    if request.grammar is not None and _is_beyond(request.grammar):
        return f"a grammar over tokens from {VOCABULARY_SIZE} on: the model has no such token"
    if request.skip_reading_prefix_cache and not RELEASE.has_cache_opt_out:
        return "the release has no skip_reading_prefix_cache"
    if request.prompt_embeds and config.enable_prefix_caching and not RELEASE.has_named_embeds:
        return "embeddings with prefix caching: the release's front end has one or the other"
    return None


def _count_items(run: Run, request: v.Request) -> int:
    """Return the number of encoder items of a request, and of the session that it continues, if
    any.
    """
    if not run.config.encoder_cache_size:
        return 0
    session = run.scheduler.requests.get(request.request_id)
    queued = getattr(session, "streaming_queue", None) or ()
    features = [getattr(chunk, "mm_features", None) or () for chunk in (session, *queued)]
    return len(request.items) + sum(len(each) for each in features)


def _has_holes(request: v.Request) -> bool:
    return any(item.num_embeds < item.length for item in request.items)


def _is_beyond(grammar: v.Grammar) -> bool:
    return any(token >= VOCABULARY_SIZE for edges in grammar.edges for token, _ in edges)


def _is_any_full(run: Run, requests: list[VllmRequest]) -> bool:
    """Return whether an unfinished request is as long as the model length; only `min_tokens` allows
    that.

    When it is computed again, it is planned with -1 tokens next, and the commit of that plan
    raises.
    """
    full = run.config.max_model_len
    return not RELEASE.has_floor and any(request.num_tokens >= full for request in requests)
