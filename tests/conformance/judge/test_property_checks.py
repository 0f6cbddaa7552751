"""Property checks: each is the first and only one to report some wrong step.

A case is a play that is correct up to its last step, a defect planted into the engine before that
step, and a change of the step. A check without a case finds nothing that no other check finds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bends_support import in_answer, in_output, in_request, in_row, in_state, in_step
from play_support import (
    disabled_features,
    forks,
    kv_events,
    kv_transfer,
    pins,
    request_features,
    tiers,
    work_left,
)
from play_support.groups import FULL, WINDOW, attending_as, going_on
from play_support.plants import Changeable, answering, becoming, going_by
from play_support.play import (
    CONFIG,
    A,
    B,
    Bend,
    C,
    Case,
    Plant,
    Play,
    after,
    changed,
    first_output,
    nothing,
    observed,
    request,
    same,
    table_of,
    with_count,
)
from play_support.scenes import (
    DRAFTING,
    LONG,
    aborted,
    admitted,
    ahead,
    answered,
    blocked,
    chunked,
    committed,
    delivering_to_the_preempted,
    drafted,
    drafted_in_pipeline,
    grammar_ready,
    hitting,
    hitting_a_copy,
    last_token_in_flight,
    paused,
    pausing,
    preempting,
    preempting_by_priority,
    publishing,
    refused,
    refused_for_size,
    reset_done,
    reset_forced,
    reset_refused,
    rolled_back,
    skipping_the_cache,
    submitted,
    taking_a_row_back,
    taking_turns,
)

from blockstep.conformance.engine import EngineFactory, EngineTraits, Safety
from blockstep.conformance.judge import answers, reported
from blockstep.conformance.judge.answers import judge_answer
from blockstep.conformance.judge.checks import ASKED_OF_ANSWERS, JUDGED, PROPERTIES, check_step
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.worker.blockless_worker import CountingWorker
from blockstep.conformance.lockstep.safety_equivalence import SafetyRun
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.findings import Difference, Finding
from blockstep.conformance.report.check_texts import SENTENCES as OUTSIDE
from blockstep.spec.core.admission import (
    get_findable_pool,
    get_open_queue,
    process_waiting_phase,
)
from blockstep.spec.core.async_ import is_past_max_tokens
from blockstep.spec.core.block_pool import (
    Pool,
    allocate_blocks,
    find_block,
    free_blocks,
    publish_blocks,
    withdraw_all,
    withdraw_blocks,
)
from blockstep.spec.core.lifecycle import get_submit_problem
from blockstep.spec.core.plans import get_frame_rows
from blockstep.spec.core.preemption import get_victim_index, process_preemption
from blockstep.spec.core.prefix_cache import (
    extend_block_keys,
    find_hit,
    get_keyed,
    get_prefix_hit,
    reads_prefix_cache,
)
from blockstep.spec.core.queues import select_queue
from blockstep.spec.core.requests import NO_HIT, FrameRow, Hit, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.schedule import get_num_running_tokens, process_running_phase
from blockstep.spec.core.slots import Growth, count_taken
from blockstep.spec.core.speculation import can_take_drafts, get_rolled_back, process_drafts
from blockstep.spec.core.work import Step as Planning
from blockstep.spec.features.resets import is_held_besides, is_idle
from blockstep.spec.releases.quirk import Change
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    BlockKey,
    Commit,
    Config,
    Drafts,
    DraftsTaken,
    Event,
    FinishReason,
    KVGroup,
    NewRow,
    Observation,
    OutputRow,
    Outputs,
    PauseState,
    Plan,
    Policy,
    RejectCode,
    Rejected,
    Request,
    RowTokens,
    Schedule,
    SetPause,
    Snapshot,
    SpecMethod,
    Stats,
    Status,
    Submit,
)


@pytest.fixture(autouse=True)
def _plays_use_an_engine_with_changeable_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plays use an engine whose rules can be replaced by wrong ones."""
    monkeypatch.setattr(Play, "default", Changeable)


SENTENCES = {each.sentence: each for entry in PROPERTIES for each in entry.checks}


# Plants.


def publish_without_caching(engine: Changeable) -> None:
    """Blocks are published although prefix caching is off."""
    engine.become(enable_prefix_caching=True)
    answering(reads_prefix_cache, by=False)(engine)
    for each in engine.state.requests.values():
        put_request(engine, get_keyed(engine.state.config, each, engine.state.rules))


def put_request(engine: Changeable, request: RequestState) -> None:
    requests = engine.state.requests.having(request.request_id, request)
    engine.state = replace(engine.state, requests=requests)


def choose_the_newest(rules: Rules, _config: Config) -> Rules:
    def find(pool: Pool, key: BlockKey) -> int | None:
        return pool.cached[key][-1] if key in pool.cached else None

    return rules.replacing(find_block, find)


def share_a_draft(rules: Rules, config: Config) -> Rules:
    """B hits the block that A is about to fill with drafts."""
    steps: list[Planning] = []

    def look(step: Planning) -> Pool:
        steps[:] = [step]
        return rules[get_findable_pool](step)

    def find(config: Config, pool: Pool, request: RequestState) -> Hit:
        (hit,) = rules[find_hit](config, pool, request).block_tables
        hit = (*hit, steps[0].requests["A"].block_tables[0][3])
        return Hit(len(hit) * config.block_size, (hit,))

    return rules.replacing(get_findable_pool, look).replacing(find_hit, find)


def hit_although_not_asked(rules: Rules, _config: Config) -> Rules:
    """A request that asks for no hit gets one."""

    def find(config: Config, pool: Pool, request: RequestState, _rules: Rules) -> Hit:
        return rules[find_hit](config, pool, request)

    return rules.replacing(get_prefix_hit, find)


def take_one_more(rules: Rules, _config: Config) -> Rules:
    """A request that is admitted takes a block more than it needs."""

    def count(group: KVGroup, growth: Growth, num_held: int, num_hit: int) -> int:
        return rules[count_taken](group, growth, num_held, num_hit) + (num_held == 0)

    return rules.replacing(count_taken, count)


def admit_while_paused(rules: Rules, _config: Config) -> Rules:
    def find(step: Planning) -> list[str]:
        return select_queue(step.state.config.policy, step.waiting, step.skipped, step.requests)

    return rules.replacing(get_open_queue, find)


def preempt_the_last(rules: Rules, _config: Config) -> Rules:
    """The last request of the running list is preempted before any request is scheduled."""

    def run(step: Planning) -> None:
        process_preemption(step, len(step.running) - 1)
        rules[process_running_phase](step)

    return rules.replacing(process_running_phase, run)


def leaving_out(name: str) -> Change:
    """One running request gets no row."""

    def change(rules: Rules, _config: Config) -> Rules:
        def count(step: Planning, request: RequestState) -> int:
            if request.request_id == name:
                return 0
            return rules[get_num_running_tokens](step, request)

        return rules.replacing(get_num_running_tokens, count)

    return change


def publish_the_unwritten_block(engine: Changeable) -> None:
    """The block that A never wrote is published as the second block of X."""
    state = engine.state
    key = make_keys(engine, X)[1]
    pool = publish_blocks(state.pool, state.pool.free_queue[1:2], (key,))
    engine.state = replace(state, pool=pool)


def make_keys(engine: Changeable, asked: Request) -> tuple[BlockKey, ...]:
    """Return the keys of the full blocks of a prompt."""
    state = engine.state
    named = RequestState(asked, Status.WAITING)
    return extend_block_keys(named, state.config.block_size, state.rules)


def admit_past_the_head(rules: Rules, _config: Config) -> Rules:
    """The waiting phase runs after a preemption, for requests behind the preempted one."""

    def list_rows(step: Planning) -> tuple[FrameRow, ...]:
        head = step.waiting.pop(0)
        rules[process_waiting_phase](step)
        step.waiting.insert(0, head)
        return rules[get_frame_rows](step)

    return rules.replacing(get_frame_rows, list_rows)


def key_as_of(other: Request) -> Plant:
    """Published blocks get the keys of another request."""

    def plant(engine: Changeable) -> None:
        request = engine.state.requests[other.request_id]
        put_request(engine, replace(request, block_keys=make_keys(engine, other)))

    return plant


def reverse_the_waiting_queue(engine: Changeable) -> None:
    engine.state = replace(engine.state, waiting=engine.state.waiting[::-1])


def lose_a_key(engine: Changeable) -> None:
    """A cached block loses its key although it is not reused."""
    pool = engine.state.pool
    block = next(block for block, key in enumerate(pool.block_keys) if key is not None)
    engine.state = replace(engine.state, pool=withdraw_blocks(pool, (block,)))


def keep_keys(rules: Rules, _config: Config) -> Rules:
    """A block that is taken keeps its key."""

    def take(pool: Pool, num_blocks: int) -> tuple[Pool, tuple[int, ...]]:
        after, taken = rules[allocate_blocks](pool, num_blocks)
        return replace(after, block_keys=pool.block_keys, cached=pool.cached), taken

    return rules.replacing(allocate_blocks, take)


def roll_back_too_far(rules: Rules, _config: Config) -> Rules:
    def roll_back(request: RequestState, num_drafts: int, num_sampled: int) -> RequestState:
        request = rules[get_rolled_back](request, num_drafts, num_sampled)
        return replace(request, num_computed_tokens=request.num_computed_tokens - 1)

    return rules.replacing(get_rolled_back, roll_back)


def free_from_the_head(rules: Rules, _config: Config) -> Rules:
    def free(pool: Pool, block_table: Sequence[int]) -> Pool:
        return rules[free_blocks](pool, block_table[::-1])

    return rules.replacing(free_blocks, free)


def take_no_drafts(rules: Rules, _config: Config) -> Rules:
    return rules.replacing(process_drafts, lambda state, _drafts: (state, DraftsTaken()))


def keep_all_keys(rules: Rules, _config: Config) -> Rules:
    return rules.replacing(withdraw_all, lambda pool: pool)


def reset_in_use(rules: Rules, _config: Config) -> Rules:
    """A reset ignores that blocks are held."""
    rules = rules.replacing(is_idle, lambda _state: True)
    return rules.replacing(is_held_besides, lambda _pool: False)


# Scenes.


def sharing_drafts() -> Play:
    """A has drafts, and the prompt of B is the tokens of A with the first two drafts."""
    play = drafted()
    text = [*play.worker.views["A"].tokens, *play.step.new["A"].spec_token_ids[:2], 9]
    return play.do(Submit(request("B", *text)), Schedule())


def first_plan_without_caching() -> Play:
    return Play(replace(CONFIG, enable_prefix_caching=False)).do(Submit(C), Schedule())


def first_plan() -> Play:
    return Play().do(Submit(C), Schedule())


def idle_with_a_cache() -> Play:
    return Play().do(Submit(A)).run(3).do(SetPause(PauseState.PAUSED_ALL), Submit(B), Schedule())


def full_for_the_whole_prompt() -> Play:
    """The first chunk of B fits, its whole prompt does not."""
    config = replace(CONFIG, num_blocks=6, max_model_len=9, long_prefill_token_threshold=2)
    other = request("B", 6, 6, 6, 6, 6, 6)
    return Play(config).do(Submit(A)).run(3).do(Submit(other), Schedule())


def capped() -> Play:
    return Play(replace(CONFIG, long_prefill_token_threshold=2)).do(Submit(A), Schedule())


def two_capped() -> Play:
    config = replace(CONFIG, long_prefill_token_threshold=2, max_num_batched_tokens=3)
    return Play(config).do(Submit(A), Submit(C), Schedule())


def refused_with_a_cache() -> Play:
    return Play().do(Submit(A)).run(1).do(Submit(A))


X = request("X", 1, 2, 3, 4, max_tokens=1)


def looking_ahead() -> Play:
    """A gets a block that it does not write yet, and that had a key of X."""
    config = replace(
        CONFIG, num_blocks=6, spec_method=SpecMethod.DRAFT_MODEL, num_speculative_tokens=2
    )
    play = Play(config).do(Submit(X)).run(1)
    play.do(Submit(request("A", 5, 6, 7, 8))).run(1).do(Schedule())
    block = table_of(play.step, "A")[-1]
    assert play.step.before.block_keys[block] is not None
    assert play.step.new["A"].num_computed_tokens == 5
    return play


def given_back_unwritten() -> Play:
    """The block that A never wrote is free, and still has the KV of X."""
    return looking_ahead().do(Abort(("A",))).commit().do(Submit(C), Schedule())


def chunked_twice() -> Play:
    return chunked().commit().do(Schedule())


def one_at_a_time() -> Play:
    return Play(replace(CONFIG, max_num_seqs=1)).do(Submit(C), Submit(A), Schedule())


def one_waits() -> Play:
    """A commit, with C waiting for its turn."""
    config = replace(CONFIG, max_num_seqs=1)
    return Play(config).do(Submit(A)).run(1).do(Submit(C), Schedule()).commit()


def alone_by_priority() -> Play:
    return Play(replace(CONFIG, policy=Policy.PRIORITY)).do(Submit(A)).run(1).do(Schedule())


def drafts_for_no_request() -> Play:
    return Play(DRAFTING).do(Drafts((RowTokens("nobody", (1, 2, 3, 4)),)))


def uncached() -> Play:
    return Play(replace(CONFIG, enable_prefix_caching=False)).do(Submit(A), Schedule())


FREED_TOO_EARLY: Case = (
    "attended_blocks_are_held",
    going_on,
    attending_as(FULL, replace(WINDOW, sliding_window=1)),
    same,
)
AT_EITHER: list[Case] = [
    ("pool_keeps_its_size", reset_done, nothing,
     lambda s: after(s, block_keys=(*s.after.block_keys, None))),
    ("every_block_is_free_or_held", admitted, nothing,
     lambda s: with_count(s, table_of(s, "C")[0], 2)),
    ("block_still_to_be_written_has_one_holder", sharing_drafts, becoming(share_a_draft), same),
    ("cache_map_and_blocks_agree", admitted, nothing, in_state(cached={BlockKey(None, (6,)): ()})),
]  # fmt: skip
"""Cases that run both compared with the specification and at safety."""

EXTERNAL: Case = (
    "reported_external_tokens_are_those_loaded",
    committed,
    nothing,
    lambda s: first_output(s, num_external_tokens=2),
)
ALONE: list[Case] = [
    *request_features.ALONE,
    *kv_events.ALONE,
    *kv_transfer.ALONE,
    *pins.ALONE,
    *forks.ALONE,
    *tiers.ALONE,
    *disabled_features.ALONE,
    *work_left.ALONE,
    *AT_EITHER,
    FREED_TOO_EARLY,
    ("row_has_freed_skipped_blocks",
     going_on, attending_as(FULL, replace(WINDOW, sliding_window=8)),
     same),
    ("nothing_is_cached_without_caching", first_plan_without_caching, publish_without_caching,
     in_request("C", num_cached_blocks=(0,))),
    ("computed_full_blocks_are_published", admitted, nothing,
     in_request("C", num_cached_blocks=(0,))),
    ("verified_full_blocks_are_published", publishing, nothing,
     in_request("A", num_cached_blocks=(2,))),
    ("only_verified_blocks_are_published", answered, lose_a_key, same),
    ("block_still_to_be_written_is_not_published", looking_ahead, becoming(keep_keys),
     same),
    ("only_computed_blocks_are_published", given_back_unwritten, publish_the_unwritten_block, same),
    ("hit_is_whole_blocks_and_leaves_a_token",
     skipping_the_cache, becoming(hit_although_not_asked), same),
    ("hit_is_the_longest_possible", hitting, answering(find_hit, by=NO_HIT), same),
    ("hit_takes_the_oldest_copy", hitting_a_copy, becoming(choose_the_newest), same),
    ("rejected_event_changes_nothing", refused_with_a_cache, lose_a_key, same),
    ("request_without_a_row_stays_the_same", blocked, nothing,
     in_request("B", num_cached_tokens=2)),
    ("empty_plan_changes_nothing", idle_with_a_cache, lose_a_key, same),
    ("row_gains_exactly_the_blocks_it_needs", admitted, becoming(take_one_more), same),
    ("admission_leaves_room_for_the_whole_prompt",
     full_for_the_whole_prompt, going_by(scheduler_reserve_full_isl=False),
     same),
    ("plan_stays_within_token_budget", two_capped, going_by(max_num_batched_tokens=4), same),
    ("running_stays_within_max_num_seqs", one_at_a_time, going_by(max_num_seqs=2), same),
    ("row_stays_within_its_caps", capped, going_by(long_prefill_token_threshold=3), same),
    ("row_stays_within_max_model_len", admitted, nothing,
     lambda s: replace(s, config=replace(s.config, max_model_len=6))),
    ("paused_scheduler_admits_no_request", paused, becoming(admit_while_paused), same),
    ("prompt_is_not_cut_without_chunking", chunked, nothing,
     lambda s: replace(s, config=replace(s.config, enable_chunked_prefill=False))),
    ("preemption_leaves_a_running_request", alone_by_priority, becoming(preempt_the_last), same),
    ("accepted_request_fits_an_empty_pool",
     refused_for_size, answering(get_submit_problem, by=None),
     same),
    ("request_is_refused_for_its_size_only_if_it_never_fits",
     submitted, answering(get_submit_problem, by=Rejected(RejectCode.NEVER_FITS)),
     same),
    ("counters_stay_within_what_is_known", admitted, nothing,
     in_request("A", num_output_placeholders=1)),
    ("only_running_requests_hold_anything", preempting, nothing,
     in_request("B", spec_token_ids=(1,))),
    ("row_advances_by_what_it_runs", ahead, nothing, in_request("A", is_prefill_chunk=True)),
    ("preempted_request_starts_again", preempting, nothing, in_request("B", num_preemptions=0)),
    ("submitted_request_starts_from_nothing", submitted, nothing,
     in_request("A", num_cached_tokens=3)),
    ("delivered_rows_are_those_that_sampled", committed, nothing,
     lambda s: observed(s, rows=s.output_rows[::-1])),
    ("delivered_tokens_are_the_sampled_ones_until_the_stop", committed, nothing,
     in_output(new_token_ids=(1, 2))),
    ("finish_reason_is_the_one_that_holds", committed, nothing,
     in_output(finish_reason=FinishReason.STOP)),
    ("finished_requests_leave_the_state", one_waits, nothing,
     lambda s: after(s, requests=s.after.requests[:1], waiting=())),
    ("commit_changes_only_outputs_and_computed_tokens", committed, nothing,
     in_request("C", num_preemptions=1)),
    ("running_request_gets_all_it_can", chunked_twice, going_by(max_num_batched_tokens=1), same),
    ("no_row_after_the_last_token",
     last_token_in_flight, answering(is_past_max_tokens, by=False),
     same),
    ("tokens_of_a_preempted_row_are_given_back",
     taking_a_row_back, becoming(leaving_out("S")), same),
    ("head_of_the_queue_is_admitted_when_it_fits", admitted, going_by(max_num_seqs=1), same),
    ("every_request_is_in_one_queue", committed, nothing,
     lambda s: after(s, running=s.before.running)),
    ("new_request_joins_the_end_of_its_queue", submitted, nothing,
     lambda s: after(s, waiting=s.after.waiting[::-1])),
    ("admissions_follow_the_policy", one_at_a_time, reverse_the_waiting_queue, same),
    ("queues_keep_their_order", reset_forced, nothing,
     lambda s: after(s, waiting=s.after.waiting[::-1])),
    ("running_list_keeps_its_order", admitted, nothing,
     lambda s: after(s, running=s.after.running[::-1])),
    ("preempted_fcfs_are_the_youngest", preempting, answering(get_victim_index, by=0), same),
    ("preempted_priority_never_outrank_survivors",
     preempting_by_priority, answering(get_victim_index, by=0),
     same),
    ("no_admission_after_a_preemption", preempting, becoming(admit_past_the_head), same),
    ("new_blocks_come_from_the_head_of_the_free_queue", admitted, nothing,
     lambda s: after(s, free_queue=s.after.free_queue[::-1])),
    ("preempted_tail_is_evicted_first", taking_a_row_back, becoming(free_from_the_head), same),
    ("freed_tail_is_evicted_first", committed, becoming(free_from_the_head), same),
    ("rejection_names_the_problem", refused, nothing,
     in_step(observation=Rejected(RejectCode.BAD_DRAFTS))),
    ("stale_or_wrong_event_is_rejected",
     drafts_for_no_request, becoming(take_no_drafts),
     same),
    ("event_changes_only_what_it_is_about", pausing, nothing, in_state(next_frame_id=9)),
    ("event_leaves_other_requests_alone", aborted, nothing, in_request("A", num_preemptions=3)),
    ("signal_is_remembered", grammar_ready, nothing, in_request("A", grammar_ready=False)),
    ("abort_finishes_exactly_the_named_requests", aborted, nothing,
     in_answer(request_ids=("C", "C"))),
    ("counters_grow_by_what_happened", hitting, nothing, in_state(stats=Stats())),
    ("first_hit_is_remembered", hitting, nothing, in_request("B", num_cached_tokens=0)),
    ("reported_cached_tokens_are_of_the_first_hit", committed, nothing,
     in_output(num_cached_tokens=2)),
    EXTERNAL,
    ("dispatched_drafts_are_the_last_proposed_ones", drafted_in_pipeline, nothing,
     in_row("A", draft_token_ids=(7, 7, 7))),
    ("attached_drafts_are_the_last_proposed_ones", drafted, nothing,
     in_request("A", spec_token_ids=(1,))),
    ("drafts_are_taken_only_for_the_next_position",
     drafted, answering(can_take_drafts, by=False), same),
    ("reset_empties_the_cache", reset_done, becoming(keep_all_keys), same),
    ("reset_succeeds_unless_blocks_are_held", reset_refused, becoming(reset_in_use),
     same),
    ("forced_reset_preempts_all_running_requests", reset_forced, nothing,
     in_state(prev_scheduled_req_ids=("A",))),
    ("refused_reset_changes_nothing", reset_refused, lose_a_key, same),
    ("plan_names_the_finished", hitting, nothing, in_answer(finished_req_ids=())),
    ("finished_ids_wait_for_the_next_plan", aborted, nothing, in_state(finished_req_ids=())),
    ("plan_names_the_preempted", preempting, nothing, in_answer(preempted_req_ids=())),
    ("new_row_carries_the_request_as_submitted", admitted, nothing,
     in_row("C", request=replace(C, max_tokens=99))),
]  # fmt: skip

WITHOUT_THE_WORKER: list[Case] = [
    ("held_block_key_matches_its_tokens", first_plan, key_as_of(request("C", 7, 9)), same),
    ("held_block_key_has_adapter_salt_and_items",
     first_plan, key_as_of(replace(C, cache_salt="x")),
     same),
    ("outputs_in_the_state_are_those_delivered", committed, nothing,
     in_request("C", output_token_ids=(1, 2, 3))),
    ("sampling_leaves_one_token_to_compute", rolled_back, becoming(roll_back_too_far), same),
]  # fmt: skip


IN_A_RELEASE = "no_repeated_preemption_without_progress"


def play(case: Case, with_worker: bool = True) -> list[str]:
    """Return the checks that fail on the last step, in order."""
    _, scene, plant, bend = case
    play, event = scene().rewound()
    plant(play.engine)
    step = bend(play.take(event))
    found = check_step(step, play.history, play.worker if with_worker else None)
    return list(dict.fromkeys(each.sentence for each in found))


@pytest.mark.parametrize("case", ALONE, ids=[case[0] for case in ALONE])
def test_only_one_check_fails(case: Case) -> None:
    assert play(case) == [case[0]]


BROUGHT = request_features.OF_MASKS + request_features.OF_ITEMS


@pytest.mark.parametrize("case", BROUGHT, ids=[case[0] for case in BROUGHT])
def test_only_the_worker_reports_wrong_masks_and_items(case: Case) -> None:
    assert play(case) == [case[0]]


@pytest.mark.parametrize("case", WITHOUT_THE_WORKER, ids=[case[0] for case in WITHOUT_THE_WORKER])
def test_only_one_check_fails_without_the_worker(case: Case) -> None:
    """`explore` checks without a worker; with one, the worker reports the same defect, too."""
    assert play(case, with_worker=False) == [case[0]]
    assert play(case) != [case[0]]


def test_the_worker_checks_blocks_that_a_commit_publishes() -> None:
    other = replace(LONG, prompt_token_ids=(9, 2, 3, 4, 5, 6))
    found = play(("", publishing, key_as_of(other), same))
    assert "published_block_holds_the_right_prefix" in found


def test_only_one_check_fails_where_requests_preempt_each_other() -> None:
    """Correct order starves no request, so the history is of a release with a wrong order."""
    found = []
    for step, history, worker in taking_turns(depth=1, num_steps=19):
        found.append([each.sentence for each in check_step(step, history, worker)])
    assert found[-1] == [IN_A_RELEASE]


def test_every_check_has_a_case_in_which_it_fails_alone() -> None:
    """A check without such a case is not needed: merge it, or plant what only it finds."""
    names = [case[0] for case in ALONE + WITHOUT_THE_WORKER] + [IN_A_RELEASE]
    assert sorted(names) == sorted(SENTENCES)
    assert len(SENTENCES) == 129


# At safety.


class Bent:
    """An engine that returns each step changed by `bend`."""

    traits = EngineTraits(equivalence=Safety())
    bend: Bend = staticmethod(same)

    def __init__(self, make_engine: EngineFactory, config: Config) -> None:
        self.config, self.engine = config, make_engine(config)
        self.shown: Snapshot | None = self.engine.snapshot()

    def apply(self, event: Event) -> Observation:
        before = self.engine.snapshot()
        answer = self.engine.apply(event)
        after = self.engine.snapshot()
        assert before is not None
        assert after is not None
        step = self.bend(Step(self.config, 0, event, answer, before, after))
        self.shown = step.after
        return step.observation

    def snapshot(self) -> Snapshot | None:
        return self.shown

    def capabilities(self) -> frozenset[str]:
        return self.engine.capabilities()


class Hidden(Bent):
    """The same without blocks in its plans and without a visible state."""

    traits = EngineTraits(equivalence=Safety(), make_worker=CountingWorker)

    def apply(self, event: Event) -> Observation:
        answer = super().apply(event)
        if not isinstance(answer, Plan):
            return answer
        new = [replace(row, block_ids=()) for row in answer.new]
        cached = [replace(row, new_block_ids=()) for row in answer.cached]
        return replace(answer, new=tuple(new), cached=tuple(cached))

    def snapshot(self) -> None:
        return None


def play_at_safety(case: Case, wrap: type[Bent] = Bent) -> list[str]:
    """Return the checks that fail on the last step of a run at safety, in order."""
    _, scene, plant, bend = case
    play = scene()

    class Wrapped(wrap):  # type: ignore[valid-type, misc]
        def __init__(self, config: Config) -> None:
            super().__init__(play.make_engine, config)

    run = SafetyRun.start(play.config, Wrapped, token_seed=1)
    run.worker.acceptance = play.worker.acceptance
    *events, last = play.events
    for event in events:
        assert run.apply(event) == []
    assert isinstance(run.engine, Bent)
    plant(run.engine.engine)
    run.engine.bend = bend
    return list(dict.fromkeys(each.sentence for each in run.apply(last)))


def after_an_abort() -> Play:
    return aborted().do(Schedule())


def drafts_at_the_end() -> Play:
    """One token is left before max_model_len, and three drafts are proposed."""
    long = request("A", *range(13), max_tokens=9)
    play = Play(replace(DRAFTING, num_blocks=12, max_num_batched_tokens=16)).do(Submit(long))
    return play.run(1).propose("A", 3, 0).do(Schedule())


def answered_out_of_turn() -> Play:
    """No plan in flight has this frame id, so the specification rejects the commit."""
    return Play().do(Submit(A), Schedule(), Commit(7, (RowTokens("A", (1,)),)))


def otherwise_waiting(step: Step) -> Step:
    """B, which was preempted, is shown as a waiting request with another output."""
    return changed(step, "B", status=Status.WAITING, output_token_ids=(9,))


def beyond_its_slots(step: Step) -> Step:
    """The waiting request is shown in the running list."""
    return after(step, running=step.after.running + step.after.waiting, waiting=())


def too_long_for_the_rest() -> Play:
    """The budget left by C and A is too small for the prompt of D, which may not be chunked."""
    config = replace(CONFIG, max_num_batched_tokens=9, max_model_len=9)
    play = Play(replace(config, enable_chunked_prefill=False))
    return play.do(Submit(C), Submit(A), Submit(request("D", 9, 9, 9, 9, 9)), Schedule())


DIFFERENTLY_AT_SAFETY: list[Case] = [
    ("running_stays_within_max_num_seqs", one_at_a_time, nothing, beyond_its_slots),
    ("prompt_is_not_cut_without_chunking",
     too_long_for_the_rest, going_by(enable_chunked_prefill=True),
     same),
    ("nothing_is_cached_without_caching", first_plan_without_caching, publish_without_caching,
     same),
    ("outputs_in_the_state_are_those_delivered", delivering_to_the_preempted, nothing,
     otherwise_waiting),
]  # fmt: skip
"""Cases in which a check fails alone at safety, but not where all checks run."""
ASKED_OF_STATES = (
    *("pool_keeps_its_size", "every_block_is_free_or_held"),
    *("block_still_to_be_written_has_one_holder", "shared_block_is_not_written"),
    *("cache_map_and_blocks_agree", "nothing_is_cached_without_caching"),
    *("block_still_to_be_written_is_not_published", "attended_blocks_are_held"),
    *("fork_changes_no_other_request", "running_stays_within_max_num_seqs"),
    *("paused_scheduler_admits_no_request", "prompt_is_not_cut_without_chunking"),
    *("encoder_cache_stays_within_its_size", "loop_runs_while_there_is_work"),
    "loop_sleeps_without_work",
    "finished_requests_leave_the_state",
    "outputs_in_the_state_are_those_delivered",
    "session_keeps_all_but_its_last_token",
    *("end_of_input_finishes_an_idle_session", "every_request_is_in_one_queue"),
    *("every_hold_has_an_owner_and_an_end", "block_in_transfer_is_not_reused"),
    "deferred_free_ends_with_the_answer_to_its_frame",
    *("pins_end_in_time", "event_leaves_other_requests_alone"),
    *("signal_is_remembered", "received_are_those_reported"),
    *("report_changes_only_what_it_is_about", "clock_and_estimates_follow_events"),
    *("disabled_features_leave_no_state", "kv_events_rebuild_the_cache"),
    *("kv_events_remove_only_stored_blocks", "stored_events_match_their_blocks"),
    *("counters_grow_by_what_happened", "first_hit_is_remembered"),
    *("reported_external_tokens_are_those_loaded", "encoder_cache_adds_up"),
    *("grammar_state_follows_outputs", "plan_flags_structured_output"),
    *("failed_grammar_ends_its_request", "refused_reset_changes_nothing"),
    "plan_names_the_preempted",
)
"""The checks of `JUDGED`, in their order."""
_CASE_OF = {case[0]: case for case in [*ALONE, *WITHOUT_THE_WORKER, *DIFFERENTLY_AT_SAFETY]}
AT_SAFETY: list[Case] = [_CASE_OF[name] for name in ASKED_OF_STATES]


def with_a_row_of_c(step: Step) -> Step:
    """C, which was aborted while it waited, has the row of a new request."""
    return observed(step, new=(NewRow(C, (step.after.free_queue[:1],), 0, 2),))


def aborted_while_it_waited() -> Play:
    play = Play().do(Submit(A)).run(1).do(SetPause(PauseState.PAUSED_NEW))
    return play.do(Submit(C), Abort(("C",)), Schedule())


OF_ANSWERS_AS_OF_STEPS = (
    "dispatched_drafts_are_the_last_proposed_ones",
    "failed_grammar_ends_its_request",
    "reported_cached_tokens_are_of_the_first_hit",
)
"""Checks whose cases are the same at safety."""
OF_ANSWERS: list[Case] = [
    *request_features.OF_ANSWERS,
    ("rejected_event_changes_nothing", refused_with_a_cache, lose_a_key, same),
    ("stale_or_wrong_event_is_rejected", answered_out_of_turn, nothing,
     in_step(observation=Outputs((OutputRow("A", (1,)),)))),
    ("computed_tokens_are_in_blocks_that_are_held", delivering_to_the_preempted, nothing,
     in_request("B", num_computed_tokens=-1)),
    ("abort_finishes_exactly_the_named_requests", aborted, nothing,
     in_answer(request_ids=("C", "A"))),
    ("plan_stays_within_token_budget", two_capped, going_by(max_num_batched_tokens=4), same),
    ("plan_names_the_finished", after_an_abort, nothing, in_answer(finished_req_ids=())),
    *[_CASE_OF[name] for name in OF_ANSWERS_AS_OF_STEPS],
    ("row_stays_within_max_model_len", drafts_at_the_end, going_by(max_model_len=20), same),
    ("new_row_carries_the_request_as_submitted", admitted, nothing,
     in_row("C", request=replace(C, max_tokens=99))),
    ("hit_only_with_prefix_caching", skipping_the_cache, becoming(hit_although_not_asked), same),
    ("delivered_rows_are_those_that_sampled", committed, nothing,
     lambda s: observed(s, rows=(*s.output_rows, OutputRow("nobody", (1,))))),
    ("delivered_tokens_are_the_sampled_ones_until_the_stop", committed, nothing,
     in_output(new_token_ids=(1, 2))),
    ("finish_reason_is_the_one_that_holds", committed, nothing,
     in_output(finish_reason=FinishReason.STOP)),
]  # fmt: skip


def waiting_for_a_slot() -> Play:
    """A runs, and C waits for the running slot."""
    play = Play(replace(CONFIG, max_num_seqs=1)).do(Submit(A)).run(1)
    return play.do(Submit(C), Schedule())


def give_its_slot_away(engine: Changeable) -> None:
    """C is admitted while A runs, and A has no row in that step."""
    engine.become(leaving_out("A"), max_num_seqs=2)


OF_ANSWERS_ALONE: list[Case] = [
    ("request_has_one_row", admitted, nothing, lambda s: observed(s, cached=s.plan.cached * 2)),
    ("row_is_of_an_unfinished_request", aborted_while_it_waited, nothing, with_a_row_of_c),
    ("plan_stays_within_max_num_seqs", one_at_a_time, going_by(max_num_seqs=2), same),
    ("worker_keeps_at_most_max_num_seqs_requests", waiting_for_a_slot, give_its_slot_away, same),
    ("end_of_input_finishes_an_idle_session", request_features.ended_at_rest, nothing,
     in_step(observation=Aborted())),
]  # fmt: skip
"""Checks that fail alone where state and blocks are hidden: otherwise more checks fail."""


@pytest.mark.parametrize("case", AT_SAFETY + OF_ANSWERS, ids=lambda case: case[0])
def test_only_one_check_fails_at_safety(case: Case) -> None:
    assert play_at_safety(case) == [case[0]]


@pytest.mark.parametrize("case", OF_ANSWERS_ALONE, ids=lambda case: case[0])
def test_only_one_check_fails_at_safety_without_a_visible_state(case: Case) -> None:
    assert play_at_safety(case, Hidden) == [case[0]]


def test_each_check_runs_at_safety_or_has_a_reason_why_not() -> None:
    asked = {each.sentence for each in JUDGED} | ASKED_OF_ANSWERS
    asked.add("rejected_event_changes_nothing")
    named = SENTENCES.keys() | OUTSIDE.keys()
    for name, each in SENTENCES.items():
        assert (name in asked) is not bool(each.fixes or each.covered_by), name
        assert not (each.fixes and each.covered_by), name
        assert not each.covered_by or each.covered_by in named, name
        assert each.covered_by not in SENTENCES or each.covered_by in asked, name
    assert asked <= SENTENCES.keys()
    assert len(asked) == 54


def test_the_checks_that_run_at_safety_are_listed_by_name() -> None:
    assert [each.sentence for each in JUDGED] == [*ASKED_OF_STATES]
    source = Path(answers.__file__).read_text() + Path(reported.__file__).read_text()
    names = set(re.findall(r'"([a-z]+(?:_[a-z]+){3,})"', source))
    names |= {name for feature in FEATURES for name in feature.checks}
    assert names | ASKED_OF_ANSWERS | {"rejected_event_changes_nothing"} == {
        case[0] for case in OF_ANSWERS + OF_ANSWERS_ALONE
    }


def judge_one(event: Event, answer: Observation, **fields: Any) -> list[Finding]:
    """Return the findings of one answer while A and C are unfinished."""
    config, live = replace(CONFIG, **fields), {"A": A, "C": C}
    return [*judge_answer(config, live, {}, event, answer)]


def test_a_row_may_run_up_to_the_length_of_the_model() -> None:
    plan = Plan(0, new=(NewRow(A, ((1, 2, 3),), 0, 5),))
    assert judge_one(Schedule(), plan, max_model_len=5) == []
    (found,) = judge_one(Schedule(), plan, max_model_len=4)
    assert found.sentence == "row_stays_within_max_model_len"


def test_with_caching_off_no_request_has_a_hit() -> None:
    plan = Plan(0, new=(NewRow(A, ((1, 2, 3),), 2, 3),))
    assert judge_one(Schedule(), plan) == []
    (found,) = judge_one(Schedule(), plan, enable_prefix_caching=False)
    assert found.sentence == "hit_only_with_prefix_caching"


def test_no_output_is_due_to_an_ended_request_or_an_empty_row() -> None:
    sampled = (RowTokens("ended", (4,)), RowTokens("A", ()), RowTokens("C", (4,)))
    assert judge_one(Commit(0, sampled), Outputs((OutputRow("C", (4,)),))) == []


def test_each_row_is_checked_also_after_a_wrong_row() -> None:
    rows = (OutputRow("nobody", (1,)), OutputRow("C", (4,), FinishReason.STOP, 4))
    foreign, wrong = judge_one(Commit(0, (RowTokens("C", (4,)),)), Outputs(rows))
    assert foreign.differences == (Difference("rows", "['C']", "['C', 'nobody']"),)
    assert wrong.differences == (Difference("finish_reason", "None", "stop by token 4"),)
