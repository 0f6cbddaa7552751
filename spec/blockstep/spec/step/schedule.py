"""Schedule: one step's work, from one token budget.

There is no prefill phase and no decode phase. Each request has computed tokens and known tokens
(and drafts), and a step lets the first catch up with the second: running requests before waiting
ones, in order, until tokens or blocks run out. With asynchronous scheduling the tokens that frames
in flight promise count as known. Source: seed 001 "The schedule() Method"; seed 000 "Scheduler
Iteration".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from blockstep.spec.lives.drafts import compute_num_drafts
from blockstep.spec.maps import FrozenMap
from blockstep.spec.memory.prefix import get_prefix_hit, reads_prefix_cache
from blockstep.spec.memory.slots import allocate_slots, can_hold, release_slots, revoke_slots
from blockstep.spec.pool import Pool
from blockstep.spec.profiles import Quirk
from blockstep.spec.state import Frame, FrameRow, RequestState, State
from blockstep.spec.step.queues import (
    is_blocked,
    process_prepend,
    select_queue,
    select_victim,
)
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    BlockId,
    CachedRow,
    NewRow,
    PauseState,
    Plan,
    Policy,
    RejectCode,
    Rejected,
    RequestId,
    Stats,
    Status,
    TokenIds,
)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's share of the step being planned."""

    request_id: RequestId
    num_computed: int
    """Computed tokens before the step, the prefix hit included."""
    num_scheduled: int
    new_blocks: tuple[BlockId, ...]
    """Blocks appended in this step; all of them for an admitted request."""
    drafts: TokenIds = ()
    status: Status = Status.RUNNING
    """What it was before: RUNNING, or WAITING or PREEMPTED when the step admits it."""


@dataclass(slots=True)
class Step:
    """A step while it is planned: the one place where this module changes something."""

    state: State
    """As it was before the step."""
    budget: int
    pool: Pool
    requests: dict[RequestId, RequestState]
    running: list[RequestId]
    waiting: list[RequestId]
    skipped: list[RequestId]
    stats: Stats
    rows: list[Scheduled] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)


def is_past_max_tokens(
    num_computed: int, num_placeholders: int, num_prompt: int, max_tokens: int
) -> bool:
    """Whether a frame in flight ends the request even if all of its drafts are rejected.

    With placeholders, computed - placeholders + 1 tokens are known, and one more at least is on its
    way; so nothing is scheduled behind the last token. Deeper pipelines may still run a row too
    many, which ends with its request. Source: seed 001 "Async scheduling skip-ahead"; P13.
    """
    return num_placeholders > 0 and num_computed + 2 - num_placeholders >= num_prompt + max_tokens


def compute_num_running_tokens(
    num_with_spec: int, num_computed: int, threshold: int, budget: int, max_model_len: int
) -> int:
    """Tokens a running request gets: its gap, under every cap; 0 or less means none.

    Position max_model_len - 1 is never computed: the token sampled before it was the last.
    Source: seed 001 "For Running Requests", seed 000 "1. Calculate Tokens"; P9.
    """
    num_new = num_with_spec - num_computed
    if 0 < threshold < num_new:
        num_new = threshold
    return min(num_new, budget, max_model_len - 1 - num_computed)


def compute_num_waiting_tokens(num_known: int, num_hit: int, threshold: int) -> int:
    """Tokens a waiting request wants: what the hit leaves, under the threshold.

    Outputs of a preempted request count as known: they are computed again.
    Source: seed 001 "For Waiting Requests (First Prefill)".
    """
    num_new = num_known - num_hit
    return threshold if 0 < threshold < num_new else num_new


def process_schedule(state: State) -> tuple[State, Plan] | Rejected:
    """Plan one step. Source: seed 001 "schedule() Circular Flow"; P9, P15, P16."""
    # refuse
    if len(state.frames) >= state.config.max_frames_in_flight:
        waiting = ", ".join(str(frame.frame_id) for frame in state.frames)
        return Rejected(RejectCode.PIPELINE_FULL, f"commit frame {waiting} first")
    # select
    paused = state.pause_state is PauseState.PAUSED_ALL
    step = Step(
        state=state,
        budget=0 if paused else state.config.max_num_batched_tokens,
        pool=state.pool,
        requests=state.requests.to_dict(),
        running=list(state.running),
        waiting=list(state.waiting),
        skipped=list(state.skipped_waiting),
        stats=state.stats,
    )
    process_running_phase(step)
    if not step.preempted and state.pause_state is PauseState.UNPAUSED:
        process_waiting_phase(step)
    assert step.budget >= 0, "the budget is never overdrawn (P9)"
    # observe
    plan = get_plan(step)
    return process_advance(step, plan), plan


def process_running_phase(step: Step) -> None:
    """Let running requests catch up, in running order; preempt where blocks are short.

    Stops when the budget is spent, or when a request had to preempt itself.
    Source: seed 001 "Schedule RUNNING Requests"; seed 000 "Phase 1"; P15.
    """
    config = step.state.config
    index = 0
    while index < len(step.running) and step.budget > 0:
        request = step.requests[step.running[index]]
        num_new = get_num_running_tokens(step, request)
        if num_new <= 0:
            index += 1
            continue
        while True:
            granted = allocate_slots(
                config, step.pool, request, num_new, config.num_lookahead_tokens
            )
            if granted is not None:
                break
            victim_index = select_victim(
                config.policy, step.running, step.requests, step.state.quirks
            )
            num_rows = len(step.rows)
            victim_id = process_preemption(step, victim_index)
            if victim_id == request.request_id:
                break
            if (
                Quirk.VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT in step.state.quirks
                and len(step.rows) == num_rows
            ):
                continue  # upstream counts back only for a victim that had a row
            if victim_index < index:
                index -= 1
        if granted is None:
            # It preempted itself, so it is no longer there; the next one has its place.
            if Quirk.SELF_VICTIM_LETS_OTHERS_RUN not in step.state.quirks:
                return
            if config.policy is Policy.FCFS:
                return
            continue
        process_grant(step, request, num_new, granted)
        index += 1


def get_num_running_tokens(step: Step, request: RequestState) -> int:
    """Tokens that a running request gets in this step; none if 0 or less.

    Source: seed 001 "For Running Requests", "Async scheduling skip-ahead".
    """
    config, asked = step.state.config, request.request
    num_computed, num_placeholders = request.num_computed_tokens, request.num_output_placeholders
    num_prompt = len(asked.prompt_token_ids)
    if is_past_max_tokens(num_computed, num_placeholders, num_prompt, asked.max_tokens):
        return 0
    return compute_num_running_tokens(
        request.num_known_tokens + num_placeholders + len(request.spec_token_ids),
        num_computed,
        get_threshold(step.state),
        step.budget,
        config.max_model_len,
    )


def get_threshold(state: State) -> int:
    """The most tokens of a long prefill that a step computes; 0: as many as there are.

    Source: seed 001 "For Running Requests".
    """
    if Quirk.LONE_REQUEST_HAS_NO_THRESHOLD in state.quirks and len(state.requests) == 1:
        return 0
    return state.config.long_prefill_token_threshold


def process_grant(
    step: Step, request: RequestState, num_new: int, granted: tuple[Pool, RequestState]
) -> None:
    """Put a running request into the step; its drafts go along, or are gone.

    A draft the budget cut off is dropped: next step's proposer sees more tokens and knows better.
    Source: seed 001 "Packing Spec Tokens at Schedule Time".
    """
    step.pool, after = granted
    num_computed = request.num_computed_tokens
    num_promised = request.num_known_tokens + request.num_output_placeholders
    num_drafts = compute_num_drafts(num_computed, num_new, num_promised)
    if request.spec_token_ids:
        after = replace(after, spec_token_ids=())
    step.requests[request.request_id] = after
    step.budget -= num_new
    step.rows.append(
        Scheduled(
            request_id=request.request_id,
            num_computed=num_computed,
            num_scheduled=num_new,
            new_blocks=after.block_table[len(request.block_table) :],
            drafts=request.spec_token_ids[:num_drafts],
        )
    )


def process_preemption(step: Step, victim_index: int) -> RequestId:
    """Send one running request back to wait; if it was in this step already, take it out.

    Under PRIORITY the victim may have been planned earlier in the same step: its tokens return to
    the budget, its row, its drafts and what it published for this step are withdrawn.
    Source: seed 001 "Preemption in the Running Loop"; upstream #23347, #23713, #28558, #43569;
    P4, P9, P14.
    """
    victim_id = step.running.pop(victim_index)
    # select
    for row in step.rows:
        if row.request_id == victim_id:
            step.budget += row.num_scheduled
    step.rows = [row for row in step.rows if row.request_id != victim_id]
    step.preempted.append(victim_id)
    # pool, requests
    victim = step.requests[victim_id]
    if Quirk.UNWRITTEN_KEYS_STAY in step.state.quirks:
        step.pool = release_slots(step.pool, victim, step.state.frees_unnamed_first)
    else:
        step.pool = revoke_slots(step.pool, victim, step.state.config.block_size)
    step.requests[victim_id] = get_preempted(victim, step.state.quirks)
    step.stats = replace(step.stats, preemptions=step.stats.preemptions + 1)
    process_prepend(step.state.config.policy, step.waiting, victim_id, step.requests)
    return victim_id


def get_preempted(request: RequestState, quirks: frozenset[Quirk] = frozenset()) -> RequestState:
    """The request after it lost its blocks: it recomputes everything, but keeps its outputs.

    It keeps its placeholders, too: frames in flight still deliver its tokens, and until they have
    it is not admitted again. Dropping the frames' tokens, or their count, is what upstream does in
    turns (#47900, #48245). Source: seed 001 "Preemption Policy -- Recomputation Only in V1"; P12.
    """
    keeps_drafts = Quirk.DRAFTS_OUTLIVE_PREEMPTION in quirks
    return replace(
        request,
        status=Status.PREEMPTED,
        num_computed_tokens=0,
        spec_token_ids=request.spec_token_ids if keeps_drafts else (),
        block_table=(),
        num_cached_blocks=0,
        num_preemptions=request.num_preemptions + 1,
    )


def process_waiting_phase(step: Step) -> None:
    """Admit waiting requests, in queue order, while tokens, seats and blocks last.

    Blocked ones are passed over, among them those whose tokens are still in flight: admitted now,
    they would sample a position twice (upstream #48245). The first that does not fit ends the
    phase: nobody overtakes it, and nobody is preempted for it.
    Source: seed 001 "Waiting Queue -- Admission Gate"; seed 000 "Phase 2"; P15, P16.
    """
    config = step.state.config
    passed_over: list[RequestId] = []
    while (step.waiting or step.skipped) and step.budget > 0:
        if len(step.running) == config.max_num_seqs:
            break
        queue = select_queue(config.policy, step.waiting, step.skipped, step.requests)
        request = step.requests[queue[0]]
        if is_blocked(request):
            if not request.grammar_ready:
                passed_over.append(queue.pop(0))
                continue
            request = replace(request, status=Status.WAITING)
            step.requests[request.request_id] = request
        if request.num_output_placeholders > 0 or is_held_by_a_frame(step.state, request):
            passed_over.append(queue.pop(0))
            continue
        if not process_admission(step, request):
            if is_passed_over_as_too_long(step, request):
                passed_over.append(queue.pop(0))
                continue
            break
        queue.pop(0)
    has_two_queues = Quirk.ONE_WAITING_QUEUE not in step.state.quirks
    if Quirk.PASSED_OVER_COME_BACK_REVERSED in step.state.quirks:
        passed_over.reverse()
    for request_id in reversed(passed_over):
        queue = step.skipped if has_two_queues else step.waiting
        process_prepend(config.policy, queue, request_id, step.requests)


def is_held_by_a_frame(state: State, request: RequestState) -> bool:
    """Whether a preempted request waits until every frame with a row of it was answered.

    Only with a quirk: a row that does not sample has nothing to wait for.
    Source: vLLM 0.27.0 `schedule`, when run; upstream #48245.
    """
    return Quirk.FRAMES_HOLD_THE_PREEMPTED in state.quirks and any(
        row.request_id == request.request_id and not row.is_dropped
        for frame in state.frames
        for row in frame.rows
    )


def is_passed_over_as_too_long(step: Step, request: RequestState) -> bool:
    """Whether a prompt that the budget cannot take in one piece holds nobody up; only a quirk.

    Source: vLLM 0.11.0 `schedule`, when run.
    """
    config = step.state.config
    if config.enable_chunked_prefill or Quirk.TOO_LONG_IS_PASSED_OVER not in step.state.quirks:
        return False
    num_hit = len(get_prefix_hit(config, step.pool, request)) * config.block_size
    threshold = get_threshold(step.state)
    return compute_num_waiting_tokens(request.num_known_tokens, num_hit, threshold) > step.budget


def process_admission(step: Step, request: RequestState) -> bool:
    """Admit `request` if it fits; otherwise change nothing and return False (P7).

    Source: seed 001 "Decision 2: Which WAITING requests get admitted?", "Full ISL reservation";
    upstream #37307; P7, P8.
    """
    config = step.state.config
    # refuse
    hit = get_prefix_hit(config, step.pool, request)
    num_hit = len(hit) * config.block_size
    num_known = request.num_known_tokens
    num_padding = get_num_padding(step, num_known, num_hit)
    if num_padding is None:
        return False
    num_wanted = num_known + num_padding
    num_new = compute_num_waiting_tokens(num_wanted, num_hit, get_threshold(step.state))
    if not config.enable_chunked_prefill and num_new > step.budget:
        return False
    num_new = min(num_new, step.budget)
    if config.scheduler_reserve_full_isl and Quirk.NOTHING_RESERVED not in step.state.quirks:
        num_slots = min(num_known, config.max_model_len)
        if not can_hold(step.pool, num_slots, config.block_size, 0, hit):
            return False
    num_lookahead = 0
    if Quirk.ADMITTED_WITH_LOOKAHEAD in step.state.quirks:
        num_lookahead = config.num_lookahead_tokens
    granted = allocate_slots(config, step.pool, request, num_new, num_lookahead, hit)
    if granted is None:
        return False
    # pool
    step.pool, after = granted
    # requests
    first_hit = num_hit if request.num_cached_tokens < 0 else request.num_cached_tokens
    if Quirk.CACHED_TOKENS_OF_THE_LAST_HIT in step.state.quirks and not request.output_token_ids:
        first_hit = num_hit
    step.requests[request.request_id] = replace(
        after, status=Status.RUNNING, num_computed_tokens=num_hit, num_cached_tokens=first_hit
    )
    step.running.append(request.request_id)
    step.budget -= num_new
    if reads_prefix_cache(config, request):
        step.stats = replace(
            step.stats,
            prefix_cache_queries=step.stats.prefix_cache_queries + num_known,
            prefix_cache_hits=step.stats.prefix_cache_hits + num_hit,
        )
    # observe
    drafts = (DRAFT_PLACEHOLDER,) * compute_num_drafts(num_hit, num_new, num_known)
    step.rows.append(
        Scheduled(request.request_id, num_hit, num_new, after.block_table, drafts, request.status)
    )
    return True


def get_num_padding(step: Step, num_known: int, num_hit: int) -> int | None:
    """Placeholder drafts that a request is admitted with; None if it is to wait for their sake.

    None of them was proposed, so only a quirk has any: where a request has one token to compute,
    and those that run are decoding, its row gets the shape of theirs.
    Source: vLLM 0.27.0, 0.33.0 `schedule`, when run; upstream #45237, #53962, #55126.
    """
    config, quirks = step.state.config, step.state.quirks
    num_drafts = config.num_speculative_tokens
    if Quirk.ADMITTED_WITH_PADDING not in quirks or num_drafts == 0 or num_known - num_hit != 1:
        return 0
    running = [step.requests[row.request_id] for row in step.rows if row.status is Status.RUNNING]
    is_company = bool(running) or (Quirk.HIT_IS_COMPANY_ENOUGH in quirks and num_hit > 0)
    if not is_company or any(request.is_prefill_chunk for request in running):
        return 0
    has_budget = 1 + num_drafts <= step.budget
    if Quirk.PADDING_WAITS_AT_THE_END in quirks:
        return num_drafts if has_budget and num_known + num_drafts <= config.max_model_len else None
    if num_known + num_drafts >= config.max_model_len:
        return 0
    return num_drafts if has_budget else None


def get_plan(step: Step) -> Plan:
    """The plan of the step: everything about new requests, differences for known ones.

    Source: seed 001 "SchedulerOutput Construction", "CachedRequestData Construction"; P26.
    """
    new: list[NewRow] = []
    cached: list[CachedRow] = []
    resumed: list[CachedRow] = []
    for row in step.rows:
        request = step.requests[row.request_id]
        if row.status is Status.WAITING:
            new.append(
                NewRow(request.request, (row.new_blocks,), row.num_computed, row.num_scheduled)
            )
            continue
        known_to_worker = row.request_id in step.state.prev_scheduled_req_ids
        is_resumed = row.status is Status.PREEMPTED
        assert not (is_resumed and known_to_worker), "a preempted request was not in the last plan"
        (resumed if is_resumed else cached).append(
            CachedRow(
                request_id=row.request_id,
                resumed=is_resumed,
                new_block_ids=(row.new_blocks,),
                all_token_ids=None if known_to_worker else request.all_token_ids,
                num_computed_tokens=row.num_computed,
                num_output_tokens=len(request.output_token_ids) + request.num_output_placeholders,
                num_scheduled_tokens=row.num_scheduled,
                draft_token_ids=row.drafts,
            )
        )
    return Plan(
        frame_id=step.state.next_frame_id,
        new=tuple(new),
        cached=(*cached, *resumed),
        finished_req_ids=step.state.finished_req_ids,
        preempted_req_ids=tuple(sorted({*step.preempted, *step.state.reset_req_ids})),
    )


def process_advance(step: Step, plan: Plan) -> State:
    """The state once the plan is on its way: scheduled tokens count as computed.

    So that a next step can be planned before this one ends; what is rejected later is taken back
    by the commit. Source: seed 001 "_update_after_schedule()"; P12.
    """
    rows = []
    for row in step.rows:
        request = step.requests[row.request_id]
        num_computed = row.num_computed + row.num_scheduled
        samples = num_computed >= request.num_known_tokens + request.num_output_placeholders
        rows.append(FrameRow(row.request_id, row.drafts, samples))
        step.requests[row.request_id] = replace(
            request, num_computed_tokens=num_computed, is_prefill_chunk=not samples
        )
    if step.state.config.async_scheduling:
        process_promises(step, rows)
    frames = step.state.frames
    if rows:
        frames = (*frames, Frame(plan.frame_id, tuple(rows)))
    return replace(
        step.state,
        pool=step.pool,
        requests=FrozenMap(step.requests),
        waiting=tuple(step.waiting),
        skipped_waiting=tuple(step.skipped),
        running=tuple(step.running),
        frames=frames,
        next_frame_id=plan.frame_id + 1,
        finished_req_ids=(),
        prev_scheduled_req_ids=tuple(sorted(row.request_id for row in step.rows)),
        reset_req_ids=(),
        stats=step.stats,
    )


def process_promises(step: Step, rows: list[FrameRow]) -> None:
    """Count the tokens that the step will sample, and leave room for the drafts that follow them.

    A row that samples promises a token and its drafts. What the worker then proposes only it knows,
    and only until the next plan: who is left out of this one has no drafts in the next, where
    upstream keeps its placeholders and has them verified as if they were drafts (#46899).
    Source: vLLM 0.19.1 `AsyncScheduler._update_after_schedule`; P12, P24.
    """
    promising = {row.request_id: 1 + len(row.draft_token_ids) for row in rows if row.samples}
    planned = {row.request_id for row in rows}
    placeholders = (DRAFT_PLACEHOLDER,) * step.state.config.num_speculative_tokens
    for request_id in step.running:
        request = step.requests[request_id]
        num_promised = promising.get(request_id, 0)
        if Quirk.PLACEHOLDERS_OUTLIVE_A_GAP in step.state.quirks and request_id not in planned:
            continue
        if Quirk.DRAFTS_OUTLIVE_PREEMPTION in step.state.quirks and num_promised == 0:
            continue
        step.requests[request_id] = replace(
            request,
            num_output_placeholders=request.num_output_placeholders + num_promised,
            spec_token_ids=placeholders if num_promised else (),
        )
