"""KV transfer: plays with loads from a store and held blocks, and the checks of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec.core.block_pool import get_fence
from blockstep.spec.core.preemption import process_preemption
from blockstep.spec.core.requests import Frame
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.work import Step as Planning
from blockstep.spec.features.kv_transfer import process_received_behind
from blockstep.spec.features.kv_transfer.transfers import compute_num_external
from blockstep.spec.vocabulary import (
    Abort,
    BlockKey,
    BlockRemoved,
    BlockStored,
    Clock,
    Commit,
    Config,
    DeferredFree,
    EncoderOffer,
    EncoderReset,
    GrammarReady,
    HeldBlocks,
    KVLoad,
    KVLoadFailurePolicy,
    KVOffer,
    KVTransfers,
    Outputs,
    PauseState,
    PinEstimate,
    Policy,
    Reset,
    Schedule,
    SetPause,
    SpecMethod,
    Status,
    Submit,
    TransfersReported,
)
from play_support.plants import answering, becoming
from play_support.play import (
    CONFIG,
    A,
    B,
    Bend,
    C,
    Case,
    Play,
    after,
    changed,
    counted,
    first_output,
    nothing,
    observed,
    request,
    same,
)

FAILING = replace(CONFIG, kv_connector=True, enable_kv_cache_events=True)
STORE = replace(FAILING, kv_load_failure_policy=KVLoadFailurePolicy.RECOMPUTE)


def offered(num_tokens: int = 4, is_async: bool = True, config: Config = STORE) -> Play:
    """A store offers the first two blocks of A."""
    return Play(config).do(Submit(A), KVOffer("A", num_tokens, is_async))


def parked() -> Play:
    return offered().do(Schedule())


def received() -> Play:
    return parked().do(TransfersReported(KVTransfers(("A",))))


def returned() -> Play:
    return received().do(Schedule())


def loaded() -> Play:
    """One step loads the blocks of A and runs it."""
    return offered(is_async=False).do(Schedule())


def settled() -> Play:
    return loaded().commit()


def without_block(play: Play, index: int) -> Play:
    """Commit the plan in flight, with one block of A reported as invalid."""
    plan = play.plans[0]
    transfers = KVTransfers(invalid_block_ids=(plan.kv_loads[0].block_ids[0][index],))
    return play.do(Commit(plan.frame_id, play.worker.answer(plan.frame_id), transfers))


def void() -> Play:
    return without_block(loaded(), 1)


def lost() -> Play:
    """The second block of A's asynchronous load is reported as invalid."""
    play = parked()
    block = play.step.plan.kv_loads[0].block_ids[0][1]
    return play.do(TransfersReported(KVTransfers(invalid_block_ids=(block,))))


def failed() -> Play:
    """The same, with the policy that fails the request: A ends."""
    play = offered(config=FAILING).do(Schedule())
    block = play.step.plan.kv_loads[0].block_ids[0][1]
    return play.do(TransfersReported(KVTransfers(invalid_block_ids=(block,))))


def failed_at_once() -> Play:
    """A runs in the step that loads its blocks, and ends with the commit that reports failure."""
    return without_block(offered(is_async=False, config=FAILING).do(Schedule()), 1)


def ending() -> Play:
    """The store will read the blocks of B when B ends."""
    play = Play(STORE).do(Submit(B), KVOffer("B", delays_free=True), Schedule()).commit()
    return play.do(Schedule())


def held() -> Play:
    return ending().do(Abort(("B",)))


def held_and_planned() -> Play:
    return held().commit().do(Submit(request("D", 9, 9, 9)), Schedule())


def released() -> Play:
    return held().do(TransfersReported(KVTransfers((), ("B",))))


def held_and_reset() -> Play:
    return held().do(Reset(reset_running_requests=True))


def stranded() -> Play:
    """D, the head of the queue, does not fit; A behind it has received its load."""
    config = replace(STORE, num_blocks=7, policy=Policy.PRIORITY)
    play = Play(config).do(Submit(request("E", 1, max_tokens=9)), Schedule()).commit()
    play.do(Submit(replace(A, priority=1)), KVOffer("A", 4, True), Schedule()).commit()
    play.do(Submit(request("D", *[8] * 7)))
    return play.do(TransfersReported(KVTransfers(("A",))), Schedule())


def reported_again() -> Play:
    """The load of A is reported a second time, with one of an unknown request."""
    return received().do(TransfersReported(KVTransfers(("A", "nobody"))))


def committed_beside() -> Play:
    """A plan with C is committed while A waits for its asynchronous load."""
    play = offered().do(Submit(C))
    return play.do(Schedule()).commit()


def reset_beside() -> Play:
    return parked().do(Reset())


AHEAD = replace(STORE, max_frames_in_flight=2, async_scheduling=True)


def deferred() -> Play:
    """A is aborted while its first plan is in flight: its blocks are freed with the commit."""
    return Play(AHEAD).do(Submit(A), Schedule(), Abort(("A",)))


def deferred_and_planned() -> Play:
    return deferred().do(Submit(C), Schedule())


def deferred_and_answered() -> Play:
    return deferred_and_planned().commit()


def deferred_and_reported() -> Play:
    return deferred().do(TransfersReported(KVTransfers(("nobody",))))


def deferred_and_reset() -> Play:
    return deferred().do(Reset())


def short_in_flight() -> Play:
    """D lacks a block while a plan with D and E is in flight."""
    config = replace(AHEAD, num_blocks=3, block_size=2, scheduler_reserve_full_isl=False)
    play = Play(config).do(Submit(request("D", 1, 2, max_tokens=2)))
    return play.do(Submit(request("E", 3, 4, max_tokens=2)), Schedule(), Schedule())


def preempt_in_flight(rules: Rules, _config: Config) -> Rules:
    """Return rules that preempt a request without looking for its rows in flight."""
    victims: list[int] = []

    def preempt(step: Planning, victim_index: int) -> str:
        victims.append(victim_index)
        name = rules[process_preemption](step, victim_index)
        victims.pop()
        return name

    def find(config: Config, frames: Sequence[Frame], request_id: str) -> int | None:
        return rules[get_fence](config, frames, request_id) if victims else None

    return rules.replacing(process_preemption, preempt).replacing(get_fence, find)


def waiting_for_no_frame(step: Step) -> Step:
    """Return the step with deferred frees, before and after, of a frame that is not in flight."""
    assert step.before.transfers is not None
    (entry,) = step.before.transfers.deferred_frees
    wrong = (replace(entry, frame_id=99),)
    transfers = replace(step.before.transfers, deferred_frees=wrong)
    step = replace(step, before=replace(step.before, transfers=transfers))
    return with_store(step, deferred_frees=wrong)


def waiting_besides(step: Step) -> Step:
    """Return the step with one more deferred free."""
    assert step.after.transfers is not None
    more = DeferredFree(99, (1,))
    return with_store(step, deferred_frees=(*step.after.transfers.deferred_frees, more))


def with_store(step: Step, **fields: Any) -> Step:
    """Return the step with other fields in the state of transfers after it."""
    assert step.after.transfers is not None
    return after(step, transfers=replace(step.after.transfers, **fields))


def loading_for_no_request(step: Step) -> Step:
    return observed(step, kv_loads=(KVLoad("C", ((1,),), 0, 2),))


def loaded_at_once(step: Step) -> Step:
    (load,) = step.plan.kv_loads
    return observed(step, kv_loads=(replace(load, is_async=False),))


def out_of_order(step: Step) -> Step:
    return observed(step, kv_loads=step.plan.kv_loads[::-1])


def published_at_once(step: Step) -> Step:
    """Return the step with the blocks of a load in flight already published."""
    first = BlockKey(None, (1, 2))
    block = step.new["A"].block_tables[0][0]
    keys = [first if at == block else key for at, key in enumerate(step.after.block_keys)]
    return after(step, block_keys=tuple(keys), cached={first: (block,)})


def held_otherwise(step: Step) -> Step:
    assert step.after.transfers is not None
    (held,) = step.after.transfers.held
    return with_store(step, held=(replace(held, is_recving=not held.is_recving),))


def preempted_before(step: Step) -> Step:
    return changed(step, "A", num_preemptions=1)


WAITING_FOR_NO_FRAME: Case = (
    "deferred_free_ends_with_the_answer_to_its_frame",
    deferred_and_reported,
    nothing,
    waiting_for_no_frame,
)
ALONE: list[Case] = [
    ("load_is_what_the_store_offers", loaded, answering(compute_num_external, by=1), same),
    ("loading_request_matches_its_load", parked, nothing, preempted_before),
    ("unconfirmed_blocks_are_not_shared", loaded, nothing, published_at_once),
    (
        "unconfirmed_loads_are_those_in_flight",
        loaded,
        nothing,
        lambda s: with_store(s, unsettled=()),
    ),
    ("offers_are_those_made_last", offered, nothing, lambda s: with_store(s, offers=())),
    ("received_are_those_reported", received, nothing, lambda s: with_store(s, received=())),
    ("every_hold_has_an_owner_and_an_end", held, nothing, held_otherwise),
    ("block_in_transfer_is_not_reused", held_and_planned, nothing, held_otherwise),
    WAITING_FOR_NO_FRAME,
    (
        "block_of_a_frame_in_flight_is_free_behind_its_answer",
        deferred,
        answering(get_fence, by=None),
        same,
    ),
    ("preempted_request_has_no_row_in_flight", short_in_flight, becoming(preempt_in_flight), same),
    ("report_changes_only_what_it_is_about", reported_again, nothing, preempted_before),
    (
        "failed_load_counts_no_further_than_it_came",
        lost,
        nothing,
        lambda s: changed(s, "A", num_computed_tokens=4),
    ),
    (
        "failed_loads_finish_exactly_their_requests",
        failed,
        nothing,
        lambda s: first_output(s, stop_token_id=3),
    ),
    (
        "loaded_request_passes_a_blocked_head",
        stranded,
        answering(process_received_behind, by=None),
        same,
    ),
]


def each(
    play: Callable[[], Play], bends: dict[str, Bend]
) -> list[tuple[str, Callable[[], Play], Bend]]:
    """Return a row for each check that fails once the last step of the play is bent."""
    return [(name, play, bend) for name, bend in bends.items()]


def held_by_a_stranger(step: Step) -> Step:
    return after(step, ref_counts=(0, 9, *step.after.ref_counts[2:]))


def in_another_order(step: Step) -> Step:
    return after(step, free_queue=step.after.free_queue[::-1])


def with_offer(step: Step) -> Step:
    return with_store(step, offers=(KVOffer("Z", 1),))


def with_received(step: Step) -> Step:
    return with_store(step, received=("Z",))


def with_unsettled(step: Step) -> Step:
    return with_store(step, unsettled=("Z",))


def with_held(step: Step) -> Step:
    return with_store(step, held=(HeldBlocks("Z", ((1,),), True),))


def malformed(step: Step) -> Step:
    """Return the step with an accepted event that had to be refused."""
    if isinstance(step.event, KVOffer):
        return replace(step, event=KVOffer(""))
    return replace(step, event=TransfersReported(KVTransfers(("",))))


def stored_for_nothing(step: Step) -> Step:
    """Return the step with the KV event of a block that was not stored."""
    assert isinstance(step.observation, Outputs)
    event = BlockStored((BlockKey(None, (8, 8)),), None, (8,), 2)
    return observed(step, kv_events=(*step.observation.kv_events, event))


def removed_for_nothing(step: Step) -> Step:
    assert isinstance(step.observation, Outputs)
    return observed(step, kv_events=(BlockRemoved((BlockKey(None, (8, 8)),)),))


def submitted() -> Play:
    return Play(STORE).do(Submit(A))


def drafted() -> Play:
    config = replace(STORE, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    play = Play(config).do(Submit(A)).run(1)
    return play.propose("A", 1, 1)


def compiled() -> Play:
    return Play(STORE).do(Submit(replace(A, structured_output=True)), GrammarReady("A"))


def paused() -> Play:
    return Play(STORE).do(SetPause(PauseState.PAUSED_NEW))


def encoder_reset() -> Play:
    return Play(STORE).do(EncoderReset())


def encoder_offered() -> Play:
    return Play(STORE).do(EncoderOffer(()))


def clocked() -> Play:
    return Play(STORE).do(Clock(3))


def estimated() -> Play:
    return Play(STORE).do(PinEstimate("x", 1))


OF_EACH = (
    *(submitted, parked, settled, drafted, held, compiled, paused, held_and_reset),
    *(encoder_reset, encoder_offered, offered, received, clocked, estimated),
)
"""A play for each kind of event."""
OF_DEFERRED = (
    *(deferred, deferred_and_planned, deferred_and_answered),
    *(deferred_and_reported, deferred_and_reset),
)
"""A play for each kind of event that frees blocks or commits a plan."""

EACH_KIND: list[tuple[str, Callable[[], Play], Bend]] = [
    (
        "failed_loads_finish_exactly_their_requests",
        failed_at_once,
        lambda s: first_output(s, finish_reason=None),
    ),
    *[("offers_are_those_made_last", play, with_offer) for play in OF_EACH],
    *[("received_are_those_reported", play, with_received) for play in OF_EACH],
    *[("unconfirmed_loads_are_those_in_flight", play, with_unsettled) for play in OF_EACH],
    *[
        ("every_hold_has_an_owner_and_an_end", play, with_held)
        for play in OF_EACH
        if play is not parked
    ],
    *[
        ("block_of_a_frame_in_flight_is_free_behind_its_answer", play, waiting_besides)
        for play in (*OF_EACH, *OF_DEFERRED)
    ],
    *[
        ("deferred_free_ends_with_the_answer_to_its_frame", play, waiting_besides)
        for play in OF_DEFERRED
    ],
    *each(
        received,
        {
            "pool_keeps_its_size": lambda s: after(s, block_keys=s.after.block_keys[:-1]),
            "every_block_is_free_or_held": held_by_a_stranger,
            "cache_map_and_blocks_agree": lambda s: after(s, cached={BlockKey(None, (6,)): ()}),
            "counters_stay_within_what_is_known": lambda s: changed(s, "A", num_computed_tokens=9),
            "only_running_requests_hold_anything": lambda s: changed(s, "A", status=Status.WAITING),
            "every_request_is_in_one_queue": lambda s: after(s, skipped_waiting=()),
            "loading_request_matches_its_load": preempted_before,
            "freed_tail_is_evicted_first": in_another_order,
            "kv_events_rebuild_the_cache": stored_for_nothing,
            "kv_events_remove_only_stored_blocks": removed_for_nothing,
            "stored_events_match_their_blocks": stored_for_nothing,
            "unconfirmed_blocks_are_not_shared": published_at_once,
            "counters_grow_by_what_happened": counted,
            "stale_or_wrong_event_is_rejected": malformed,
        },
    ),
    ("unconfirmed_blocks_are_not_shared", committed_beside, published_at_once),
    (
        "reported_cached_tokens_are_of_the_first_hit",
        failed,
        lambda s: first_output(s, num_cached_tokens=2),
    ),
    (
        "reported_external_tokens_are_those_loaded",
        failed,
        lambda s: first_output(s, num_external_tokens=2),
    ),
    ("counters_grow_by_what_happened", offered, counted),
    ("stale_or_wrong_event_is_rejected", offered, malformed),
    ("unconfirmed_blocks_are_not_shared", reset_beside, published_at_once),
    (
        "failed_load_counts_no_further_than_it_came",
        void,
        lambda s: changed(s, "A", num_computed_tokens=5),
    ),
    (
        "failed_load_counts_no_further_than_it_came",
        void,
        lambda s: changed(s, "A", is_prefill_chunk=False),
    ),
    ("load_is_what_the_store_offers", parked, loaded_at_once),
    ("finished_ids_wait_for_the_next_plan", failed, lambda s: after(s, finished_req_ids=())),
]
"""Wrong steps of each kind of event."""
