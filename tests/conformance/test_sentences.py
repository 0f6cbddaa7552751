"""Sentences: each is the first and only one to speak of some wrong step.

A case is a play that is right up to its last step, a defect that is planted into the engine just
before, and a bend of what came of it. A sentence without a case says nothing that no other says.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bends_support import in_answer, in_output, in_request, in_row, in_state, in_step
from play_support import brought, forking, idling, lacking, pinning, telling, tiering, transferring
from play_support.grouped import FULL, WINDOW, attending_as, going_on
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
from blockstep.conformance.judge import answers, told
from blockstep.conformance.judge.answers import judge_answer
from blockstep.conformance.judge.checks import ASKED_OF_ANSWERS, JUDGED, PROPERTIES, check_step
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.judge.worker.counting import CountingWorker
from blockstep.conformance.lockstep.safety import SafetyRun
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.findings import Difference, Finding
from blockstep.conformance.report.sentences import SENTENCES as OUTSIDE
from blockstep.impl.host import HostEngine
from blockstep.impl.host.lineage import Lineage
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
def _plants_are_for_the_old_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They replace its methods and change its tables."""
    monkeypatch.setattr(Play, "default", HostEngine)


SENTENCES = {each.sentence: each for entry in PROPERTIES for each in entry.checks}


def having(**values: object) -> Plant:
    """The engine has other constants."""

    def plant(engine: Any) -> None:
        for name, value in values.items():
            setattr(engine, name, value)

    return plant


def going_by(**fields: Any) -> Plant:
    """The engine goes by another config."""

    def plant(engine: Any) -> None:
        engine.config = replace(engine.config, **fields)

    return plant


def answering(name: str, value: object) -> Plant:
    """A method of the engine answers always the same. `pool.take`: of a part of it."""

    def plant(engine: Any) -> None:
        *parts, method = name.split(".")
        for part in parts:
            engine = getattr(engine, part)
        setattr(engine, method, lambda *_: value)

    return plant


def holding_of(engine: Any, name: str) -> Any:
    return engine.table.holdings[engine.table.slot_of[name]][0]


# Plants.


def publishing_all_the_same(engine: Any) -> None:
    """Blocks are published with caching off, where nobody asks for them."""
    going_by(enable_prefix_caching=True)(engine)
    answering("_asks_cache", False)(engine)


def choosing_the_newest(engine: Any) -> None:
    engine.prefix._choose = lambda blocks: blocks[-1]


def sharing_a_draft(engine: Any) -> None:
    """B hits the block that A is about to fill with drafts."""
    find = engine._find_hits
    engine._find_hits = lambda slot: [*find(slot), holding_of(engine, "A").blocks[3]]


def hitting_all_the_same(engine: Any) -> None:
    """A request that asks for no hit gets one."""
    engine._find_hits = lambda slot: engine.prefix.hits(engine.table.lineages[slot], 2)


def one_block_more(engine: Any) -> None:
    count = engine._blocks_to_admit
    engine._blocks_to_admit = lambda *args: count(*args) + 1


def admitting_in_the_end(engine: Any) -> None:
    """Whatever has happened, the waiting phase follows."""
    issue = engine._issue_plan

    def admit(step: Any) -> Any:
        engine._schedule_waiting(step)
        return issue(step)

    engine._issue_plan = admit


def preempting_the_last(engine: Any) -> None:
    """The last of the running list is preempted before anybody is scheduled."""
    schedule = engine._schedule_running

    def preempt(step: Any) -> None:
        slot = engine.running.pop()
        engine._preempt(slot)
        step.preempted_req_ids.append(engine.table.requests[slot].request_id)
        schedule(step)

    engine._schedule_running = preempt


def leaving_out(name: str) -> Plant:
    """One running request gets no row."""

    def plant(engine: Any) -> None:
        count, left_out = engine._tokens_to_run, engine.table.slot_of[name]
        engine._tokens_to_run = lambda slot, budget: 0 if slot == left_out else count(slot, budget)

    return plant


def finding_it_again(engine: Any) -> None:
    """The block that A never wrote is findable again as the second block of X."""
    block = engine.pool.free_queue()[1]
    engine.prefix.publish(block, Lineage(X, engine.block_size, engine.digest), 1)


def admitting_past_the_head(engine: Any) -> None:
    """The waiting phase follows a preemption, for those behind whoever was preempted."""
    issue = engine._issue_plan

    def admit(step: Any) -> Any:
        head = engine.waiting.pop()
        engine._schedule_waiting(step)
        engine.waiting.prepend([head])
        return issue(step)

    engine._issue_plan = admit


def naming(other: Request) -> Plant:
    """What is published is named as if it were of another request."""

    def plant(engine: Any) -> None:
        publish = engine.prefix.publish
        lineage = Lineage(other, engine.block_size, engine.digest)
        engine.prefix.publish = lambda block, _lineage, index: publish(block, lineage, index)

    return plant


def newest_first(engine: Any) -> None:
    engine.waiting._slots.reverse()


def losing_a_key(engine: Any) -> None:
    """A block is no longer found, though nobody took it."""
    block = next(block for block, key in enumerate(engine.prefix.keys()) if key is not None)
    engine.prefix.withdraw(block)


def rolling_back_too_far(engine: Any) -> None:
    roll_back = engine._roll_back

    def roll(slot: int, *args: Any) -> None:
        roll_back(slot, *args)
        engine.table.num_computed[slot] -= 1

    engine._roll_back = roll


def freeing_from_the_head(engine: Any) -> None:
    free = engine.pool.free
    engine.pool.free = lambda table: free(table[::-1])


# Scenes.


def sharing_drafts() -> Play:
    """A is drafted for, and B is the text with the first two drafts of it."""
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
    """B fits by its first chunk, not by its prompt."""
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
    """A gains a block that it does not write yet, and that carries a key of X."""
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
    """The block that A never wrote is free, and still holds what X wrote."""
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


def drafts_for_nobody() -> Play:
    return Play(DRAFTING).do(Drafts((RowTokens("nobody", (1, 2, 3, 4)),)))


def uncached() -> Play:
    return Play(replace(CONFIG, enable_prefix_caching=False)).do(Submit(A), Schedule())


GIVEN_UP: Case = (
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
    ("block_still_to_be_written_has_one_holder", sharing_drafts, sharing_a_draft, same),
    ("cache_map_and_blocks_agree", admitted, nothing, in_state(cached={BlockKey(None, (6,)): ()})),
]  # fmt: skip
"""Held to the specification, and at safety."""

EXTERNAL: Case = (
    "told_external_tokens_are_those_that_were_loaded",
    committed,
    nothing,
    lambda s: first_output(s, num_external_tokens=2),
)
ALONE: list[Case] = [
    *brought.ALONE,
    *telling.ALONE,
    *transferring.ALONE,
    *pinning.ALONE,
    *forking.ALONE,
    *tiering.ALONE,
    *lacking.ALONE,
    *idling.ALONE,
    *AT_EITHER,
    GIVEN_UP,
    ("row_has_given_back_what_it_attends_to_no_more",
     going_on, attending_as(FULL, replace(WINDOW, sliding_window=8)),
     same),
    ("nothing_is_cached_without_caching", first_plan_without_caching, publishing_all_the_same,
     in_request("C", num_cached_blocks=(0,))),
    ("computed_full_blocks_are_published", admitted, nothing,
     in_request("C", num_cached_blocks=(0,))),
    ("verified_full_blocks_are_published", publishing, nothing,
     in_request("A", num_cached_blocks=(2,))),
    ("only_verified_blocks_are_published", answered, losing_a_key, same),
    ("block_still_to_be_written_is_not_published", looking_ahead, answering("pool._evict", None),
     same),
    ("only_computed_blocks_are_published", given_back_unwritten, finding_it_again, same),
    ("hit_is_whole_blocks_and_leaves_a_token", skipping_the_cache, hitting_all_the_same, same),
    ("hit_is_the_longest_there_is", hitting, answering("_find_hits", []), same),
    ("hit_takes_the_oldest_copy", hitting_a_copy, choosing_the_newest, same),
    ("rejected_event_changes_nothing", refused_with_a_cache, losing_a_key, same),
    ("request_without_a_row_stays_the_same", blocked, nothing,
     in_request("B", num_cached_tokens=2)),
    ("plan_for_nobody_leaves_no_trace", idle_with_a_cache, losing_a_key, same),
    ("row_gains_exactly_the_blocks_it_needs", admitted, one_block_more, same),
    ("admission_leaves_room_for_the_whole_prompt",
     full_for_the_whole_prompt, going_by(scheduler_reserve_full_isl=False),
     same),
    ("plan_stays_within_token_budget", two_capped, going_by(max_num_batched_tokens=4), same),
    ("running_stays_within_max_num_seqs", one_at_a_time, going_by(max_num_seqs=2), same),
    ("row_stays_within_its_caps", capped, having(max_tokens_per_row=3), same),
    ("row_stays_within_max_model_len", admitted, nothing,
     lambda s: replace(s, config=replace(s.config, max_model_len=6))),
    ("paused_scheduler_admits_nobody", paused, admitting_in_the_end, same),
    ("prompt_is_not_cut_without_chunking", chunked, nothing,
     lambda s: replace(s, config=replace(s.config, enable_chunked_prefill=False))),
    ("preemption_leaves_somebody_running", alone_by_priority, preempting_the_last, same),
    ("accepted_request_fits_an_empty_pool", refused_for_size, answering("_submit_problem", None),
     same),
    ("request_is_refused_for_its_size_only_if_it_never_fits",
     submitted, answering("_submit_problem", Rejected(RejectCode.NEVER_FITS)),
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
    ("finished_request_is_forgotten_and_others_stay", one_waits, nothing,
     lambda s: after(s, requests=s.after.requests[:1], waiting=())),
    ("commit_changes_only_outputs_and_computed_tokens", committed, nothing,
     in_request("C", num_preemptions=1)),
    ("running_request_gets_all_it_can", chunked_twice, going_by(max_num_batched_tokens=1), same),
    ("nobody_runs_past_its_last_token",
     last_token_in_flight, answering("_is_past_max_tokens", False),
     same),
    ("tokens_of_a_preempted_row_are_given_back", taking_a_row_back, leaving_out("S"), same),
    ("head_of_the_queue_is_admitted_when_it_fits", admitted, going_by(max_num_seqs=1), same),
    ("every_request_stands_in_one_queue", committed, nothing,
     lambda s: after(s, running=s.before.running)),
    ("newcomer_goes_to_the_end_of_its_queue", submitted, nothing,
     lambda s: after(s, waiting=s.after.waiting[::-1])),
    ("admissions_follow_the_policy", one_at_a_time, newest_first, same),
    ("queues_keep_their_order", reset_forced, nothing,
     lambda s: after(s, waiting=s.after.waiting[::-1])),
    ("running_list_keeps_its_order", admitted, nothing,
     lambda s: after(s, running=s.after.running[::-1])),
    ("preempted_fcfs_are_the_youngest", preempting, answering("_select_victim", 0), same),
    ("preempted_priority_never_outrank_survivors",
     preempting_by_priority, answering("_select_victim", 0),
     same),
    ("nobody_is_admitted_after_a_preemption", preempting, admitting_past_the_head, same),
    ("new_blocks_come_from_the_head_of_the_free_queue", admitted, nothing,
     lambda s: after(s, free_queue=s.after.free_queue[::-1])),
    ("preempted_tail_is_evicted_first", taking_a_row_back, freeing_from_the_head, same),
    ("freed_tail_is_evicted_first", committed, freeing_from_the_head, same),
    ("refusal_names_what_is_wrong", refused, nothing,
     in_step(observation=Rejected(RejectCode.BAD_DRAFTS))),
    ("stale_or_wrong_event_is_refused",
     drafts_for_nobody, answering("_take_proposals", DraftsTaken()),
     same),
    ("event_leaves_alone_what_it_is_not_about", pausing, nothing, in_state(next_frame_id=9)),
    ("event_leaves_other_requests_alone", aborted, nothing, in_request("A", num_preemptions=3)),
    ("signal_is_remembered", grammar_ready, nothing, in_request("A", grammar_ready=False)),
    ("abort_ends_exactly_the_unfinished_it_names", aborted, nothing,
     in_answer(request_ids=("C", "C"))),
    ("counters_grow_by_what_happened", hitting, nothing, in_state(stats=Stats())),
    ("first_hit_is_remembered", hitting, nothing, in_request("B", num_cached_tokens=0)),
    ("told_cached_tokens_are_those_of_the_first_hit", committed, nothing,
     in_output(num_cached_tokens=2)),
    EXTERNAL,
    ("dispatched_drafts_are_the_last_proposed_ones", drafted_in_pipeline, nothing,
     in_row("A", draft_token_ids=(7, 7, 7))),
    ("attached_drafts_are_the_last_proposed_ones", drafted, nothing,
     in_request("A", spec_token_ids=(1,))),
    ("drafts_are_taken_only_for_the_next_position", drafted, answering("_may_draft", False), same),
    ("reset_empties_the_cache", reset_done, answering("prefix.clear", None), same),
    ("reset_succeeds_unless_blocks_are_held", reset_refused, answering("pool.is_unused", True),
     same),
    ("forced_reset_preempts_all_who_run", reset_forced, nothing,
     in_state(prev_scheduled_req_ids=("A",))),
    ("refused_reset_changes_nothing", reset_refused, losing_a_key, same),
    ("plan_tells_who_ended", hitting, nothing, in_answer(finished_req_ids=())),
    ("ended_are_kept_for_the_next_plan", aborted, nothing, in_state(finished_req_ids=())),
    ("plan_tells_who_was_preempted", preempting, nothing, in_answer(preempted_req_ids=())),
    ("new_row_carries_the_request_as_submitted", admitted, nothing,
     in_row("C", request=replace(C, max_tokens=99))),
]  # fmt: skip

BESIDE_THE_WORKER: list[Case] = [
    ("held_block_carries_the_name_of_its_tokens", first_plan, naming(request("C", 7, 9)), same),
    ("held_block_carries_the_extra_keys_of_its_request",
     first_plan, naming(replace(C, cache_salt="x")),
     same),
    ("outputs_in_the_state_are_those_delivered", committed, nothing,
     in_request("C", output_token_ids=(1, 2, 3))),
    ("sampling_leaves_one_token_to_compute", rolled_back, rolling_back_too_far, same),
]  # fmt: skip


IN_A_RELEASE = "nobody_is_preempted_again_without_progress"


def play(case: Case, hears_worker: bool = True) -> list[str]:
    """The sentences that speak of the last step, in order."""
    _, scene, plant, bend = case
    play, event = scene().rewound()
    plant(play.engine)
    step = bend(play.take(event))
    found = check_step(step, play.ledger, play.worker if hears_worker else None)
    return list(dict.fromkeys(each.sentence for each in found))


@pytest.mark.parametrize("case", ALONE, ids=[case[0] for case in ALONE])
def test_a_sentence_speaks_alone(case: Case) -> None:
    assert play(case) == [case[0]]


BROUGHT = brought.OF_MASKS + brought.OF_ITEMS


@pytest.mark.parametrize("case", BROUGHT, ids=[case[0] for case in BROUGHT])
def test_what_the_worker_says_of_masks_and_items_it_says_alone(case: Case) -> None:
    assert play(case) == [case[0]]


@pytest.mark.parametrize("case", BESIDE_THE_WORKER, ids=[case[0] for case in BESIDE_THE_WORKER])
def test_a_sentence_speaks_alone_where_no_worker_does(case: Case) -> None:
    """`explore` judges without a worker; where there is one, it sees the same from its side."""
    assert play(case, hears_worker=False) == [case[0]]
    assert play(case) != [case[0]]


def test_what_a_commit_publishes_is_looked_at_by_the_worker_too() -> None:
    other = replace(LONG, prompt_token_ids=(9, 2, 3, 4, 5, 6))
    said = play(("", publishing, naming(other), same))
    assert "published_block_holds_the_right_prefix" in said


def test_a_sentence_speaks_alone_in_a_release_that_takes_turns() -> None:
    """Where policy is followed nobody starves; so its history is one in which it was not."""
    said = []
    for step, ledger, worker in taking_turns(depth=1, num_steps=19):
        said.append([each.sentence for each in check_step(step, ledger, worker)])
    assert said[-1] == [IN_A_RELEASE]


def test_every_sentence_speaks_alone_somewhere() -> None:
    """A sentence that never does says nothing of its own: merge it, or plant what only it sees."""
    names = [case[0] for case in ALONE + BESIDE_THE_WORKER] + [IN_A_RELEASE]
    assert sorted(names) == sorted(SENTENCES)
    assert len(SENTENCES) == 128


# At safety.


class Bent:
    """An engine whose last step is bent."""

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
    """Its plans name no blocks, and its state is not shown."""

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
    """The sentences that speak of the last step of a run at safety, in order."""
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
    """One token is left to the end of the model, and three drafts are proposed."""
    long = request("A", *range(13), max_tokens=9)
    play = Play(replace(DRAFTING, num_blocks=12, max_num_batched_tokens=16)).do(Submit(long))
    return play.run(1).propose("A", 3, 0).do(Schedule())


def answered_out_of_turn() -> Play:
    """No plan in flight has this number; the specification refuses the answer."""
    return Play().do(Submit(A), Schedule(), Commit(7, (RowTokens("A", (1,)),)))


def otherwise_waiting(step: Step) -> Step:
    """B, which was preempted, is shown as one that waits, with another output."""
    return changed(step, "B", status=Status.WAITING, output_token_ids=(9,))


def beyond_its_seats(step: Step) -> Step:
    """A request that waits is shown in the running list."""
    return after(step, running=step.after.running + step.after.waiting, waiting=())


def too_long_for_the_rest() -> Play:
    """Behind C and A the budget has no room for a whole prompt, which may not be cut."""
    config = replace(CONFIG, max_num_batched_tokens=9, max_model_len=9)
    play = Play(replace(config, enable_chunked_prefill=False))
    return play.do(Submit(C), Submit(A), Submit(request("D", 9, 9, 9, 9, 9)), Schedule())


DIFFERENTLY_AT_SAFETY: list[Case] = [
    ("running_stays_within_max_num_seqs", one_at_a_time, nothing, beyond_its_seats),
    ("prompt_is_not_cut_without_chunking",
     too_long_for_the_rest, going_by(enable_chunked_prefill=True),
     same),
    ("nothing_is_cached_without_caching", first_plan_without_caching, publishing_all_the_same,
     same),
    ("outputs_in_the_state_are_those_delivered", delivering_to_the_preempted, nothing,
     otherwise_waiting),
]  # fmt: skip
"""What shows a sentence alone where nothing is compared, and does not where all are asked."""
ASKED_OF_STATES = (
    *("pool_keeps_its_size", "every_block_is_free_or_held"),
    *("block_still_to_be_written_has_one_holder", "nobody_writes_in_what_another_holds"),
    *("cache_map_and_blocks_agree", "nothing_is_cached_without_caching"),
    *("block_still_to_be_written_is_not_published", "attended_blocks_are_held"),
    *("fork_changes_nobody_else", "running_stays_within_max_num_seqs"),
    *("paused_scheduler_admits_nobody", "prompt_is_not_cut_without_chunking"),
    *("encoder_cache_stays_within_its_size", "loop_goes_on_while_there_is_work"),
    "loop_sleeps_where_nothing_is_to_be_done",
    "finished_request_is_forgotten_and_others_stay",
    "outputs_in_the_state_are_those_delivered",
    "session_goes_on_behind_all_but_its_last_token",
    *("end_of_its_input_ends_who_rests", "every_request_stands_in_one_queue"),
    *("every_hold_has_an_owner_and_an_end", "held_block_is_given_to_nobody"),
    "deferred_free_ends_with_the_answer_to_its_frame",
    *("pins_end_in_time", "event_leaves_other_requests_alone"),
    *("signal_is_remembered", "received_are_those_reported"),
    *("report_changes_only_what_it_is_about", "time_and_estimates_are_as_told"),
    *("nothing_is_known_of_what_the_config_lacks", "log_tells_what_can_be_found"),
    *("log_removes_what_was_there", "stored_blocks_are_told_as_they_are"),
    *("counters_grow_by_what_happened", "first_hit_is_remembered"),
    *("told_external_tokens_are_those_that_were_loaded", "encoder_cache_adds_up"),
    *("grammar_stands_where_the_outputs_led_it", "plan_tells_that_it_has_a_mask"),
    *("failed_grammar_ends_its_request", "refused_reset_changes_nothing"),
    "plan_tells_who_was_preempted",
)
"""The sentences of `JUDGED`, in their order."""
_CASE_OF = {case[0]: case for case in [*ALONE, *BESIDE_THE_WORKER, *DIFFERENTLY_AT_SAFETY]}
AT_SAFETY: list[Case] = [_CASE_OF[name] for name in ASKED_OF_STATES]


def of_one_that_ended(step: Step) -> Step:
    """C was aborted while it waited, and has the row of a newcomer."""
    return observed(step, new=(NewRow(C, (step.after.free_queue[:1],), 0, 2),))


def aborted_while_it_waited() -> Play:
    play = Play().do(Submit(A)).run(1).do(SetPause(PauseState.PAUSED_NEW))
    return play.do(Submit(C), Abort(("C",)), Schedule())


OF_ANSWERS_AS_OF_STEPS = (
    "dispatched_drafts_are_the_last_proposed_ones",
    "failed_grammar_ends_its_request",
    "told_cached_tokens_are_those_of_the_first_hit",
)
"""What shows these alone does so, too, where nothing is compared."""
OF_ANSWERS: list[Case] = [
    *brought.OF_ANSWERS,
    ("rejected_event_changes_nothing", refused_with_a_cache, losing_a_key, same),
    ("stale_or_wrong_event_is_refused", answered_out_of_turn, nothing,
     in_step(observation=Outputs((OutputRow("A", (1,)),)))),
    ("computed_tokens_are_in_blocks_that_are_held", delivering_to_the_preempted, nothing,
     in_request("B", num_computed_tokens=-1)),
    ("abort_ends_exactly_the_unfinished_it_names", aborted, nothing,
     in_answer(request_ids=("C", "A"))),
    ("plan_stays_within_token_budget", two_capped, going_by(max_num_batched_tokens=4), same),
    ("plan_tells_who_ended", after_an_abort, nothing, in_answer(finished_req_ids=())),
    *[_CASE_OF[name] for name in OF_ANSWERS_AS_OF_STEPS],
    ("row_stays_within_max_model_len", drafts_at_the_end, having(max_model_len=20), same),
    ("new_row_carries_the_request_as_submitted", admitted, nothing,
     in_row("C", request=replace(C, max_tokens=99))),
    ("hit_is_taken_only_where_one_may_be", skipping_the_cache, hitting_all_the_same, same),
    ("delivered_rows_are_those_that_sampled", committed, nothing,
     lambda s: observed(s, rows=(*s.output_rows, OutputRow("nobody", (1,))))),
    ("delivered_tokens_are_the_sampled_ones_until_the_stop", committed, nothing,
     in_output(new_token_ids=(1, 2))),
    ("finish_reason_is_the_one_that_holds", committed, nothing,
     in_output(finish_reason=FinishReason.STOP)),
]  # fmt: skip


def one_runs() -> Play:
    """A runs, and C waits for its seat."""
    play = Play(replace(CONFIG, max_num_seqs=1)).do(Submit(A)).run(1)
    return play.do(Submit(C), Schedule())


def giving_its_seat_away(engine: Any) -> None:
    """C is admitted beside A, which has no row in that step."""
    going_by(max_num_seqs=2)(engine)
    leaving_out("A")(engine)


OF_ANSWERS_ALONE: list[Case] = [
    ("request_has_one_row", admitted, nothing, lambda s: observed(s, cached=s.plan.cached * 2)),
    ("row_is_of_an_unfinished_request", aborted_while_it_waited, nothing, of_one_that_ended),
    ("plan_stays_within_max_num_seqs", one_at_a_time, going_by(max_num_seqs=2), same),
    ("worker_keeps_at_most_max_num_seqs_requests", one_runs, giving_its_seat_away, same),
    ("end_of_its_input_ends_who_rests", brought.ended_at_rest, nothing,
     in_step(observation=Aborted())),
]  # fmt: skip
"""They speak alone where the state is hidden: a worker with slots, or a state, sees more."""


@pytest.mark.parametrize("case", AT_SAFETY + OF_ANSWERS, ids=lambda case: case[0])
def test_a_sentence_speaks_alone_at_safety(case: Case) -> None:
    assert play_at_safety(case) == [case[0]]


@pytest.mark.parametrize("case", OF_ANSWERS_ALONE, ids=lambda case: case[0])
def test_a_sentence_speaks_alone_at_safety_where_no_state_is_shown(case: Case) -> None:
    assert play_at_safety(case, Hidden) == [case[0]]


def test_each_sentence_is_asked_at_safety_or_says_why_it_is_not() -> None:
    asked = {each.sentence for each in JUDGED} | ASKED_OF_ANSWERS
    asked.add("rejected_event_changes_nothing")
    named = SENTENCES.keys() | OUTSIDE.keys()
    for name, each in SENTENCES.items():
        assert (name in asked) is not bool(each.fixes or each.said_by), name
        assert not (each.fixes and each.said_by), name
        assert not each.said_by or each.said_by in named, name
        assert each.said_by not in SENTENCES or each.said_by in asked, name
    assert asked <= SENTENCES.keys()
    assert len(asked) == 54


def test_what_is_judged_at_safety_is_listed_by_name() -> None:
    assert [each.sentence for each in JUDGED] == [*ASKED_OF_STATES]
    source = Path(answers.__file__).read_text() + Path(told.__file__).read_text()
    said = set(re.findall(r'"([a-z]+(?:_[a-z]+){3,})"', source))
    said |= {name for feature in FEATURES for name in feature.checks}
    assert said | ASKED_OF_ANSWERS | {"rejected_event_changes_nothing"} == {
        case[0] for case in OF_ANSWERS + OF_ANSWERS_ALONE
    }


def judge_one(event: Event, answer: Observation, **fields: Any) -> list[Finding]:
    """What is said of one answer, where A and C have not ended."""
    config, live = replace(CONFIG, **fields), {"A": A, "C": C}
    return [*judge_answer(config, live, {}, event, answer)]


def test_a_row_may_run_up_to_the_length_of_the_model() -> None:
    plan = Plan(0, new=(NewRow(A, ((1, 2, 3),), 0, 5),))
    assert judge_one(Schedule(), plan, max_model_len=5) == []
    (found,) = judge_one(Schedule(), plan, max_model_len=4)
    assert found.sentence == "row_stays_within_max_model_len"


def test_with_caching_off_nobody_has_a_hit() -> None:
    plan = Plan(0, new=(NewRow(A, ((1, 2, 3),), 2, 3),))
    assert judge_one(Schedule(), plan) == []
    (found,) = judge_one(Schedule(), plan, enable_prefix_caching=False)
    assert found.sentence == "hit_is_taken_only_where_one_may_be"


def test_who_has_ended_or_sampled_nothing_is_told_of_no_token() -> None:
    sampled = (RowTokens("ended", (4,)), RowTokens("A", ()), RowTokens("C", (4,)))
    assert judge_one(Commit(0, sampled), Outputs((OutputRow("C", (4,)),))) == []


def test_each_row_is_judged_whoever_stands_before_it() -> None:
    rows = (OutputRow("nobody", (1,)), OutputRow("C", (4,), FinishReason.STOP, 4))
    foreign, wrong = judge_one(Commit(0, (RowTokens("C", (4,)),)), Outputs(rows))
    assert foreign.differences == (Difference("rows", "['C']", "['C', 'nobody']"),)
    assert wrong.differences == (Difference("finish_reason", "None", "stop by token 4"),)
