"""Scenes: plays, each of which ends with a step of some kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.token_function import token_function
from blockstep.spec.profiles import get_profile
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    Event,
    GrammarReady,
    PauseState,
    Policy,
    Reset,
    Schedule,
    SetPause,
    SpecMethod,
    Status,
    Submit,
)
from play_support.play import CONFIG, A, B, C, Play, request


def submitted() -> Play:
    return Play().do(Submit(C), Submit(A))


def admitted_together() -> Play:
    """One step admits C and A."""
    return submitted().do(Schedule())


def committed_together() -> Play:
    """The whole prompts of A and C have run, and each request gets a token."""
    return Play().do(Submit(A)).run(1).do(Submit(C), Schedule()).commit()


def admitted() -> Play:
    """C is admitted while A runs."""
    return Play().do(Submit(A)).run(1).do(Submit(C), Schedule())


def hitting() -> Play:
    """A has ended and its blocks are free; B hits two of them."""
    return Play().do(Submit(A)).run(3).do(Submit(B), Schedule())


def hitting_all() -> Play:
    """All tokens of B are cached; the last of them must run."""
    play = Play().do(Submit(A)).run(3).do(Submit(request("B", 1, 2, 3, 4)), Schedule())
    assert play.step.plan.new[0].num_computed_tokens == 2
    return play


def hitting_before_a_head() -> Play:
    """Two blocks of B are cached; the draft head needs the second one computed again."""
    config = replace(CONFIG, spec_method=SpecMethod.EAGLE, num_speculative_tokens=1)
    play = Play(config).do(Submit(A)).run(3).do(Submit(B), Schedule())
    assert play.step.plan.new[0].num_computed_tokens == 2
    return play


def hitting_a_copy() -> Play:
    """Two blocks have one key, since A and B computed the same tokens in different chunks."""
    config = replace(CONFIG, long_prefill_token_threshold=1)
    play = Play(config).do(Submit(request("A", 1, 2, 3)), Submit(request("B", 1, 2, 4)))
    play.run(5).do(Submit(request("D", 1, 2, 5)), Schedule())
    assert max(map(len, play.before.cached.values())) == 2
    return play


def skipping_the_cache() -> Play:
    last = request("D", 1, 2, 3, 4, 5, skip_reading_prefix_cache=True)
    return Play().do(Submit(A)).run(3).do(Submit(last), Schedule())


def blocked() -> Play:
    """A holds too many blocks for B to fit; the plan has A only."""
    config = replace(CONFIG, num_blocks=5, max_model_len=8)
    other = request("B", 6, 6, 6, 6, 6)
    return Play(config).do(Submit(A)).run(1).do(Submit(other), Schedule())


def idle() -> Play:
    return Play().do(SetPause(PauseState.PAUSED_ALL), Submit(A), Schedule())


def idle_for_two() -> Play:
    return Play().do(SetPause(PauseState.PAUSED_ALL), Submit(A), Submit(C), Schedule())


def paused() -> Play:
    return Play().do(Submit(C)).run(1).do(SetPause(PauseState.PAUSED_NEW), Submit(A), Schedule())


def chunked() -> Play:
    config = replace(CONFIG, max_num_batched_tokens=3)
    return Play(config).do(Submit(A), Schedule())


def chunked_by_one() -> Play:
    return Play(replace(CONFIG, max_num_batched_tokens=4)).do(Submit(A), Schedule())


def preempting(policy: Policy = Policy.FCFS) -> Play:
    """A and B fill the pool, C waits; now A needs a fourth block."""
    config = replace(
        CONFIG, num_blocks=7, policy=policy, max_model_len=10, scheduler_reserve_full_isl=False
    )
    play = Play(config)
    for index, name in enumerate("ABC"):
        prompt = (10 * index + 1, 10 * index + 2, 10 * index + 3, 10 * index + 4)
        play.do(Submit(request(name, *prompt, max_tokens=5, priority=index % 2)))
    play.run(3).do(Schedule())
    assert play.step.plan.preempted_req_ids
    return play


def preempting_by_priority() -> Play:
    return preempting(Policy.PRIORITY)


def taking_a_row_back() -> Play:
    """V has its row already when R, more important, needs its blocks; then S is visited."""
    config = replace(CONFIG, num_blocks=8, policy=Policy.PRIORITY)
    play = Play(config).do(Submit(request("V", 1, 2, 3, max_tokens=8, priority=5))).run(1)
    play.do(Submit(request("R", 4, 5, 6, max_tokens=8)), Submit(request("S", 7, 8, max_tokens=8)))
    play.run(2).do(Schedule())
    assert play.step.plan.preempted_req_ids == ("V",)
    assert play.step.before.running == ("V", "R", "S")
    return play


def sharing() -> Play:
    """A and B hold the same two blocks."""
    return Play().do(Submit(A)).run(1).do(Submit(B), Schedule())


def committed() -> Play:
    """A samples its last token and ends, while C runs."""
    return (
        Play()
        .do(Submit(A), Submit(request("C", 7, 8, max_tokens=9)))
        .run(2)
        .do(Schedule())
        .commit()
    )


DRAFTING = replace(CONFIG, spec_method=SpecMethod.NGRAM, num_speculative_tokens=3)
LONG = request("A", 1, 2, 3, 4, 5, max_tokens=9)


def drafted() -> Play:
    return Play(DRAFTING).do(Submit(LONG)).run(1).propose("A", 3, 1)


def scheduled_drafts() -> Play:
    return drafted().do(Schedule())


def rolled_back() -> Play:
    return scheduled_drafts().commit()


def waiting_for_grammar() -> Play:
    return Play().do(Submit(replace(A, structured_output=True)), Submit(C))


def grammar_ready() -> Play:
    return waiting_for_grammar().do(GrammarReady("A"))


def promoted() -> Play:
    """The grammar of A is ready, and there are too few blocks for A."""
    config = replace(CONFIG, num_blocks=5, max_model_len=8)
    play = Play(config).do(Submit(request("B", 6, 6, 6, 6, 6))).run(1)
    play.do(Submit(replace(A, structured_output=True)), GrammarReady("A"), Schedule())
    assert play.step.new["A"].status is Status.WAITING
    return play


def promoted_already() -> Play:
    return promoted().commit().do(Schedule())


def drafted_and_paused() -> Play:
    return drafted().do(SetPause(PauseState.PAUSED_ALL), Schedule())


def skipping_the_unready() -> Play:
    return waiting_for_grammar().do(Schedule())


def pausing() -> Play:
    return Play().do(SetPause(PauseState.PAUSED_ALL))


def aborted() -> Play:
    return Play().do(Submit(A), Submit(C)).run(1).do(Abort(("C", "nobody", "C")))


def aborted_before_it_ran() -> Play:
    """C is aborted, and A still waits."""
    return Play().do(Submit(A), Submit(C), Abort(("C",)))


def refused() -> Play:
    return Play().do(Submit(A), Submit(A))


def refused_for_size() -> Play:
    big = request("D", *range(14), max_tokens=20)
    return Play(replace(CONFIG, num_blocks=4)).do(Submit(A), Submit(big))


def reset_done() -> Play:
    return Play().do(Submit(A)).run(3).do(Reset())


def reset_refused() -> Play:
    return Play().do(Submit(A)).run(1).do(Reset())


def reset_forced() -> Play:
    return Play().do(Submit(A), Submit(C)).run(1).do(Reset(True))


def reset_forced_with_one_waiting() -> Play:
    return Play().do(Submit(A)).run(1).do(Submit(C), Reset(True))


AHEAD = replace(CONFIG, max_frames_in_flight=3, async_scheduling=True)
DRAFTING_AHEAD = replace(AHEAD, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)


def starving(num_steps: int) -> Play:
    """A takes a block in each step; B is preempted in the fifth step and in the seventh."""
    config = replace(
        CONFIG,
        max_num_seqs=2,
        enable_prefix_caching=False,
        long_prefill_token_threshold=2,
        max_model_len=17,
        scheduler_reserve_full_isl=False,
    )
    play = Play(config).do(Submit(request("A", *range(16), max_tokens=1)))
    play.do(Submit(request("B", *range(20, 29))), Submit(C))
    return play.run(num_steps - 1).do(Schedule())


def preempted_again() -> Play:
    play = starving(7)
    assert play.step.plan.preempted_req_ids == ("B",)
    assert play.step.old["B"].num_preemptions == 1
    return play


def ahead() -> Play:
    """Three plans are in flight; the last two compute tokens that are not sampled yet."""
    return Play(AHEAD).do(Submit(LONG), Schedule(), Schedule(), Schedule())


def refused_a_plan_too_many() -> Play:
    return ahead().do(Schedule())


def ahead_four_deep() -> Play:
    play = Play(replace(AHEAD, max_frames_in_flight=4, async_scheduling=True)).do(
        Submit(LONG), *[Schedule()] * 4
    )
    assert play.step.new["A"].num_output_placeholders == 4
    return play


def answered() -> Play:
    """The oldest of three plans is committed."""
    return ahead().commit()


def publishing() -> Play:
    """The second token confirms position 6, and the block that ends there is published."""
    play = answered().commit()
    assert play.step.new["A"].num_cached_blocks == (3,)
    return play


def publishing_at_the_end() -> Play:
    last = request("A", 1, 2, 3, 4, 5, max_tokens=2)
    play = Play(AHEAD).do(Submit(last), Schedule(), Schedule()).commit().commit()
    assert play.step.new == {}
    assert play.step.before.block_keys != play.step.after.block_keys
    return play


def last_token_in_flight() -> Play:
    """The plan is empty: the last token of A is in flight."""
    return Play(AHEAD).do(Submit(request("A", 1, 2, 3, max_tokens=1)), Schedule(), Schedule())


def chunks_ahead() -> Play:
    """Two chunks of a prompt are in flight; the first is committed."""
    config = replace(AHEAD, max_num_batched_tokens=2)
    return Play(config).do(Submit(A), Schedule(), Schedule()).commit()


def drafted_ahead() -> Play:
    """The plan has placeholders for drafts that the worker proposes after the plan before."""
    play = Play(DRAFTING_AHEAD)
    play.worker.acceptance = (1,)
    return play.do(Submit(LONG), Schedule(), Schedule())


def rolled_back_ahead() -> Play:
    """One of two drafts is rejected, with another plan of A in flight."""
    play = drafted_ahead().do(Schedule()).commit().commit()
    assert play.step.new["A"].num_output_placeholders == 3
    return play


def gap() -> Play:
    """A runs but has no row, so the worker's drafts for A are not used."""
    play = drafted_ahead()
    return play.do(SetPause(PauseState.PAUSED_ALL), Schedule())


def passing_over() -> Play:
    """A waits for its tokens in flight; C, behind it, is admitted."""
    play = Play(AHEAD).do(Submit(LONG), Schedule(), Reset(True), Submit(C), Schedule())
    assert play.step.after.skipped_waiting == ("A",)
    assert [row.request_id for row in play.step.plan.new] == ["C"]
    return play


def passing_over_by_priority() -> Play:
    play = Play(replace(AHEAD, policy=Policy.PRIORITY))
    return play.do(Submit(LONG), Schedule(), Reset(True), Submit(C), Schedule())


def back_again() -> Play:
    """A has got its tokens and is admitted from the queue of skipped requests."""
    play = passing_over().commit().do(Schedule())
    assert play.step.plan.cached[-1].resumed
    return play


def preempting_ahead() -> Play:
    """A needs a block while a token of B is in flight."""
    config = replace(AHEAD, num_blocks=7, max_model_len=10, scheduler_reserve_full_isl=False)
    play = Play(config)
    for index, name in enumerate("AB"):
        prompt = (10 * index + 1, 10 * index + 2, 10 * index + 3, 10 * index + 4)
        play.do(Submit(request(name, *prompt, max_tokens=5)))
    play.do(Schedule(), Schedule(), Schedule()).commit().do(Schedule())
    assert play.step.plan.preempted_req_ids == ("B",)
    return play


def delivering_to_the_preempted() -> Play:
    play = preempting_ahead().commit()
    assert play.step.new["B"].status is Status.PREEMPTED
    return play


def alone_and_preempted() -> Play:
    """Plans in flight need a block for A that its sampled tokens never need, and none is free."""
    config = replace(AHEAD, num_blocks=4, max_num_batched_tokens=9)
    play = Play(config).do(Submit(request("A", *range(5), max_tokens=2)))
    play.do(Schedule(), Schedule(), Schedule())
    return play


PIPELINE = replace(CONFIG, max_frames_in_flight=3)


def waiting_for_its_token() -> Play:
    """A's token is in flight: the next plan has C, and no row of A."""
    play = Play(PIPELINE, SpecEngine).do(Submit(LONG), Schedule(), Submit(C), Schedule())
    assert [row.request_id for row in play.step.plan.new] == ["C"]
    assert play.step.plan.cached == ()
    return play


def chunks_in_pipeline() -> Play:
    """Three chunks of a prompt are in flight, the last one samples; the first is committed."""
    config = replace(PIPELINE, max_num_batched_tokens=2)
    return Play(config, SpecEngine).do(Submit(A), *[Schedule()] * 3).commit()


def running_on_in_pipeline() -> Play:
    """A and C take turns: each is planned when its token of two plans before is there."""
    play = Play(PIPELINE, SpecEngine).do(Submit(LONG), Schedule(), Submit(C), Schedule())
    play.commit().do(Schedule()).commit().do(Schedule()).commit()
    assert play.step.new["A"].num_computed_tokens == 6
    return play


def passing_over_in_pipeline() -> Play:
    """A is reset by force with its token in flight; C, behind it, is admitted."""
    play = Play(PIPELINE, SpecEngine)
    play.do(Submit(LONG), Schedule(), Reset(True), Submit(C), Schedule())
    assert play.step.after.skipped_waiting == ("A",)
    assert [row.request_id for row in play.step.plan.new] == ["C"]
    return play


def back_again_in_pipeline() -> Play:
    """A has got its token and is admitted from the queue of skipped requests."""
    play = passing_over_in_pipeline().commit()
    assert play.step.new["A"].output_token_ids
    play.do(Schedule())
    assert play.step.plan.cached[-1].resumed
    return play


def preempting_in_pipeline() -> Play:
    """A needs a block while a token of B is in flight."""
    config = replace(PIPELINE, num_blocks=7, max_model_len=10, scheduler_reserve_full_isl=False)
    play = Play(config, SpecEngine).do(Submit(request("A", 1, 2, 3, 4, max_tokens=5))).run(2)
    play.do(Schedule(), Submit(request("B", 11, 12, 13, 14, 15, max_tokens=5)), Schedule())
    play.commit().do(Schedule())
    assert play.step.plan.preempted_req_ids == ("B",)
    assert play.history.promised == {"B": 1}
    return play


def delivering_in_pipeline() -> Play:
    play = preempting_in_pipeline().commit()
    assert play.step.new["B"].status is Status.PREEMPTED
    assert len(play.step.new["B"].output_token_ids) == 1
    return play


def embedded() -> Play:
    """B has the tokens and embeddings of A in its first block, other embeddings in the second."""
    first = replace(A, prompt_embeds=(7, 7, 7, 7, 7))
    play = Play(CONFIG, SpecEngine).do(Submit(first)).run(1)
    play.do(Submit(replace(first, request_id="B", prompt_embeds=(7, 7, 7, 8, 7))), Schedule())
    assert play.step.plan.new[0].num_computed_tokens == 2
    return play


def drafted_in_pipeline() -> Play:
    """A runs with drafts behind a plan of C."""
    config = replace(DRAFTING, max_frames_in_flight=2)
    play = Play(config, SpecEngine).do(Submit(LONG), Schedule(), Submit(C), Schedule()).commit()
    return play.propose("A", 3, 1).do(Schedule())


def refused_out_of_order() -> Play:
    play = ahead()
    newest = play.plans[-1].frame_id
    return play.do(Commit(newest, play.worker.answer(newest)))


# Bends.


def taking_turns(
    depth: int, num_steps: int, beside: Event | None = None
) -> Iterator[tuple[Step, History, Worker]]:
    """Yield the steps of a release in which two requests preempt each other in turn.

    Each step comes with the history and the worker before they have recorded the step. The release
    preempts the older one of two equal requests. `beside`: an event before every second step.
    """
    config = Config(
        num_blocks=6,
        block_size=2,
        max_model_len=12,
        max_num_batched_tokens=4,
        policy=Policy.PRIORITY,
        enable_prefix_caching=False,
        long_prefill_token_threshold=2,
        scheduler_reserve_full_isl=False,
        max_frames_in_flight=depth,
        async_scheduling=depth > 1,
        kv_connector=beside is not None,
    )
    release = get_profile("vllm-0.19.1")
    assert release is not None
    engine, history = SpecEngine(config, release), History(config)
    worker = Worker(config, token_function(1, 50))
    events: list[Event] = [Submit(request(name, *range(8))) for name in "AB"]
    for index in range(num_steps):
        before = engine.snapshot()
        flying = before.frames_in_flight
        event: Event = Schedule()
        if events:
            event = events.pop()
        elif beside is not None and index % 2:
            event = beside
        elif len(flying) == depth:
            event = Commit(flying[0], worker.answer(flying[0]))
        step = Step(config, index, event, engine.apply(event), before, engine.snapshot())
        yield step, history, worker
        worker.observe(step.event, step.observation)
        history.record(step)
