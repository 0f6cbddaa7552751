"""The connector of the vLLM adapter: events reach vLLM's scheduler, and its state is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm_support.installed import PROFILE, RELEASE, VERSION, needs, quiet
from worker_support import ROW_BEHIND_A_FAILED_LOAD

from blockstep.conformance.engine import Engine, EngineFault, get_declines
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program, Report
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.suppressions import KnownCause, SuppressionKind, find_causes
from blockstep.spec import vocabulary as v

pytestmark = [quiet, needs(RELEASE.has_store, "no connector is followed")]
ENGINE = "blockstep.conformance.engines.adapters.vllm:VllmWithStore"
"""The adapter with a store, also for releases whose store no profile follows."""
CONFIG = v.Config(
    num_blocks=12,
    block_size=2,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=16,
    kv_connector=True,
)
REQUEST = v.Request("A", prompt_token_ids=(1, 2, 3, 4, 5), max_tokens=3)
LOADING = v.Status.WAITING_FOR_REMOTE_KVS


def start(config: v.Config = CONFIG, **offer: Any) -> Engine:
    """Return an engine with one request, and an offer of the store for the request."""
    engine = load_engine(ENGINE)(config)
    engine.apply(v.Submit(REQUEST))
    engine.apply(v.KVOffer("A", **offer))
    return engine


def schedule(engine: Engine) -> v.Plan:
    """Return the next plan."""
    plan = engine.apply(v.Schedule())
    assert isinstance(plan, v.Plan)
    return plan


def show(engine: Engine) -> v.Snapshot:
    """Return the state."""
    shown = engine.snapshot()
    assert shown is not None
    return shown


def get_transfers(engine: Engine) -> v.TransfersSnapshot:
    """Return the transfers in the state."""
    shown = show(engine)
    assert shown.transfers is not None
    return shown.transfers


@needs(RELEASE.follows_store, "no profile follows its store")
def test_a_read_that_ends_in_the_last_step_of_its_request_is_followed() -> None:
    """The request finishes by its length in the same step; the adapter declines nothing."""
    program = Program(
        replace(CONFIG, num_blocks=3, block_size=4),
        (
            v.Submit(v.Request("A", prompt_token_ids=(1, 2, 3, 4, 5), max_tokens=1)),
            v.KVOffer("A", num_tokens=0, delays_free=True),
            v.Schedule(),
            Answer(report=Report(sending=("A",))),
            v.Submit(v.Request("B", prompt_token_ids=(6, 7, 8, 9, 10), max_tokens=1)),
            Drain(),
        ),
    )
    run, findings = run_program(program, load_engine("vllm"), PROFILE)
    assert (findings, dict(run.skipped)) == ([], {})
    assert run.witnesses["transfers_read_by_its_end"] > 0


@needs(RELEASE.follows_store, "no profile follows its store")
def test_a_draft_that_no_grammar_accepts_is_not_counted_after_a_failed_load() -> None:
    """A load fails while a later row of its request is in flight: the worker reports the draft of
    that row, and the release does not count it."""
    program = ROW_BEHIND_A_FAILED_LOAD
    program = replace(program, actions=(*program.actions, Answer()))
    run, findings = run_program(program, load_engine("vllm"), PROFILE)
    assert (findings, dict(run.skipped)) == ([], {})


@needs(RELEASE.follows_store, "no profile follows its store")
def test_a_load_that_fails_by_a_shared_block_is_declined_by_its_assert() -> None:
    """A loads its only token again into the block that B hits. The release takes that block of B
    for valid, as A computes it, and 0.19 asserts that B has a token left."""
    program = Program(
        replace(CONFIG, block_size=1, kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE),
        (
            v.Submit(v.Request("A", prompt_token_ids=(1,), max_tokens=1)),
            v.KVOffer("A", num_tokens=1, is_async=True),
            v.Schedule(),
            v.Submit(v.Request("B", prompt_token_ids=(1, 0), max_tokens=1)),
            v.KVOffer("B", num_tokens=2, is_async=True),
            Report(recving=("A",)),
            v.Schedule(),
            Report(recving=("A", "B"), invalid=(("A", -1),)),
            v.Schedule(),
        ),
    )
    run, findings = run_program(program, load_engine("vllm"), PROFILE)
    assert findings == []
    declined = [reason for reason in run.skipped if "asserts that a token is left" in reason]
    assert len(declined) == RELEASE.asserts_on_shared_failures


follows_events_of_items = needs(
    RELEASE.has_events and RELEASE.has_encoder, "no events or no encoder is followed"
)


def find_in_events(block_size: int, *actions: Action) -> list[Finding]:
    """Return the findings of actions with an encoder and KV events, and a drain."""
    config = v.Config(
        num_blocks=3,
        block_size=block_size,
        encoder_compute_budget=1,
        encoder_cache_size=1,
        enable_kv_cache_events=True,
    )
    program = Program(config, (*actions, Drain()))
    return run_program(program, load_engine("vllm"), PROFILE)[1]


@follows_events_of_items
def test_an_output_block_is_reported_with_all_its_items() -> None:
    """0.19.1 hashes only the last item for such a block."""
    items = (v.MultiModalItem("x", 3, 1), v.MultiModalItem("x", 4, 1))
    request = v.Request("A", (0,) * 5, max_tokens=2, items=items)
    assert find_in_events(3, v.Submit(request)) == []


@follows_events_of_items
def test_an_output_block_is_hashed_without_items_of_the_next_input() -> None:
    """0.19.1 publishes the block later, and its event has the items of the next input."""
    first = v.Request("A", (0,), max_tokens=1, resumable=True)
    chunk = replace(first, items=(v.MultiModalItem("x", 0, 1),))
    assert find_in_events(1, v.Submit(first), v.StreamingUpdate(chunk)) == []


def get_request(engine: Engine) -> v.RequestSnapshot:
    """Return the snapshot of request A."""
    shown = show(engine)
    found = shown.request("A")
    assert found is not None
    return found


def report(**signals: Any) -> v.TransfersReported:
    """Return the event with which a worker reports these signals."""
    return v.TransfersReported(v.KVTransfers(**signals))


def find_decline(engine: Engine, event: v.Event) -> str:
    """Return why the adapter declines an event; empty if it does not."""
    declines = get_declines(engine)
    assert declines is not None
    return declines(event) or ""


LATER: dict[str, Any] = {"num_tokens": 4, "is_async": True}


@pytest.mark.parametrize(
    ("event", "offer"),
    [
        (report(finished_recving=("A",)), {}),
        (report(finished_sending=("A",)), LATER),
        (report(finished_recving=("Z",)), LATER),
    ],
)
def test_a_report_on_which_the_release_raises_is_declined(
    event: v.Event, offer: dict[str, Any]
) -> None:
    """If the event is sent anyway, the release raises."""
    engine = start(**offer)
    engine.apply(v.Schedule())
    assert "(B21)" in find_decline(engine, event)
    with pytest.raises(AssertionError):
        engine.apply(event)


def test_a_repeated_report_of_an_aborted_request_is_declined() -> None:
    """The report may come twice before the abort; after it, the release forgets the request."""
    engine = start(**LATER)
    engine.apply(v.Schedule())
    signal = report(finished_recving=("A",))
    for _ in range(2):  # before the end it may come twice
        assert not find_decline(engine, signal)
        engine.apply(signal)
    engine.apply(v.Abort(("A",)))
    assert "(B21)" in find_decline(engine, signal)


def test_invalid_blocks_of_several_groups_are_declined() -> None:
    """If the event is sent anyway, the release raises."""
    groups = (v.KVGroup(v.GroupKind.FULL, 2), v.KVGroup(v.GroupKind.FULL, 4))
    engine = start(replace(CONFIG, groups=groups, enable_prefix_caching=False), **LATER)
    engine.apply(v.Schedule())
    event = report(invalid_block_ids=(1,))
    assert "(B47)" in find_decline(engine, event)
    with pytest.raises((ValueError, RuntimeError), match=r"unpack|multiple KV cache groups"):
        engine.apply(event)


@pytest.mark.parametrize("policy", v.KVLoadFailurePolicy)
def test_failed_loads_of_several_requests_are_declined_if_they_finish(
    policy: v.KVLoadFailurePolicy,
) -> None:
    """With the policy `fail`, the requests would finish in an unknown order."""
    engine = start(replace(CONFIG, kv_load_failure_policy=policy), **LATER)
    engine.apply(v.Submit(replace(REQUEST, request_id="B", prompt_token_ids=(7, 8, 9, 6, 5))))
    engine.apply(v.KVOffer("B", num_tokens=4, is_async=True))
    engine.apply(v.Schedule())
    assert not find_decline(engine, report(invalid_block_ids=(1, 2)))
    does_fail = policy is v.KVLoadFailurePolicy.FAIL
    assert bool(find_decline(engine, report(invalid_block_ids=(1, 3)))) is does_fail


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_forced_reset_with_blocks_in_transfer_is_declined(is_loading: bool) -> None:
    """If the event is sent anyway, the release raises, even if all blocks of a load are invalid."""
    config = replace(CONFIG, kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE)
    engine = start(config, **LATER) if is_loading else start(config, delays_free=True)
    engine.apply(v.Schedule())
    if is_loading:
        engine.apply(report(invalid_block_ids=(1,)))
        assert get_request(engine).num_computed_tokens == 0
    else:
        engine.apply(v.Abort(("A",)))
    event = v.Reset(reset_running_requests=True)
    assert "held for a transfer" in find_decline(engine, event)
    with pytest.raises(RuntimeError):
        engine.apply(event)


def test_a_forced_reset_with_a_finished_load_of_one_token_is_declined() -> None:
    """The only token does not count as computed, and the waiting request holds its block."""
    engine = load_engine(ENGINE)(replace(CONFIG, enable_prefix_caching=False))
    engine.apply(v.Submit(replace(REQUEST, prompt_token_ids=(1,))))
    engine.apply(v.KVOffer("A", **LATER))
    engine.apply(v.Schedule())
    engine.apply(v.KVOffer("A", num_tokens=None))
    engine.apply(report(finished_recving=("A",)))
    engine.apply(v.Schedule())
    assert get_request(engine).num_computed_tokens == 0
    if not get_request(engine).block_tables[0]:
        pytest.skip("the release admits it, or gives its block back")
    event = v.Reset(reset_running_requests=True)
    assert "loaded request holds blocks" in find_decline(engine, event)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.apply(event)


def test_a_mask_of_an_ended_request_that_holds_blocks_is_declined() -> None:
    """If the event is sent anyway, the release returns a row for the finished request."""
    grammar = v.Grammar(edges=(((7, 0),),))
    engine = load_engine(ENGINE)(replace(CONFIG, max_frames_in_flight=2, async_scheduling=True))
    request = replace(REQUEST, stop_token_ids=(7,), structured_output=True, grammar=grammar)
    engine.apply(v.Submit(request))
    engine.apply(v.GrammarReady("A"))
    engine.apply(v.KVOffer("A", delays_free=True))
    first, second = schedule(engine), schedule(engine)
    event = v.GrammarBitmask(second.frame_id)
    assert not find_decline(engine, event)
    engine.apply(v.Commit(first.frame_id, (v.RowTokens("A", (7,)),)))
    assert "held" in find_decline(engine, event)
    mask = engine.apply(event)
    assert isinstance(mask, v.GrammarOutput)
    assert [row.request_id for row in mask.rows] == ["A"]


def test_a_failed_load_of_a_request_with_placeholders_is_declined() -> None:
    """If the event is sent anyway, a placeholder stays although no frame is in flight."""
    policy = v.KVLoadFailurePolicy.RECOMPUTE
    config = replace(CONFIG, max_frames_in_flight=2, async_scheduling=True)
    engine = start(replace(config, kv_load_failure_policy=policy), num_tokens=4)
    plan = schedule(engine)
    failed = v.KVTransfers(invalid_block_ids=(1,))
    event = v.Commit(plan.frame_id, (v.RowTokens("A", (7,)),), failed)
    assert "stay placeholders" in find_decline(engine, event)
    engine.apply(event)
    assert get_request(engine).num_output_placeholders == 1


@needs(not RELEASE.has_sound_sessions, "a session keeps its whole prompt")
def test_a_failed_load_of_a_session_with_a_row_in_flight_is_declined() -> None:
    """If the event is sent anyway, the session stops after half of its prompt: the next input comes
    after that, and the prompt counts as long as if nothing had been lost."""
    policy = v.KVLoadFailurePolicy.RECOMPUTE
    engine: Any = load_engine(ENGINE)(replace(CONFIG, kv_load_failure_policy=policy))
    session = replace(REQUEST, max_tokens=1, resumable=True)
    engine.apply(v.Submit(session))
    engine.apply(v.StreamingUpdate(replace(session, prompt_token_ids=(8,))))
    engine.apply(v.KVOffer("A", num_tokens=4))
    plan = engine.apply(v.Schedule())
    event = report(invalid_block_ids=(2,))
    assert "of which the end is then lost" in find_decline(engine, event)
    failed = v.KVTransfers(invalid_block_ids=(2,))
    commit = v.Commit(plan.frame_id, (v.RowTokens("A", (7,)),), failed)
    assert not find_decline(engine, commit), "with the answer to its row, it does not stop"
    engine.apply(event)
    engine.apply(v.Commit(plan.frame_id, (v.RowTokens("A", (7,)),)))
    request = engine.scheduler.requests["A"]
    assert (request.num_tokens, request.num_prompt_tokens) == (3, 6)


def test_a_failed_load_that_removes_several_blocks_is_declined() -> None:
    """Their KV events have the order of a set; a single removed block has no order."""
    engine = load_engine(ENGINE)(replace(CONFIG, enable_kv_cache_events=True))
    engine.apply(v.Submit(REQUEST))
    engine.apply(v.KVOffer("A", num_tokens=4))
    plan = schedule(engine)
    for block_id, is_declined in ((1, True), (2, False)):
        failed = v.KVTransfers(invalid_block_ids=(block_id,))
        event = v.Commit(plan.frame_id, (v.RowTokens("A", (7,)),), failed)
        assert ("order of a set" in find_decline(engine, event)) is is_declined


@needs(not RELEASE.has_sound_preemption, "the preempted wait for their frames")
def test_a_load_of_a_request_that_a_frame_may_finish_is_declined() -> None:
    """If the step is planned anyway, the finished request stays in a queue."""
    engine = load_engine(ENGINE)(replace(CONFIG, max_frames_in_flight=2))
    engine.apply(v.Submit(replace(REQUEST, max_tokens=1)))
    frame = schedule(engine)
    engine.apply(v.Reset(reset_running_requests=True))
    engine.apply(v.KVOffer("A", **LATER))
    assert "before its frame ends it" in find_decline(engine, v.Schedule())
    engine.apply(v.Schedule())
    engine.apply(v.Commit(frame.frame_id, (v.RowTokens("A", (7,)),)))
    with pytest.raises(EngineFault, match="which is gone"):
        engine.snapshot()


@needs(RELEASE.frees_behind_frames, "blocks are freed at once")
def test_a_forced_reset_with_a_frame_in_flight_is_declined() -> None:
    """If the event is sent anyway, the release raises: the frame may still write to the blocks."""
    engine = load_engine(ENGINE)(replace(CONFIG, max_frames_in_flight=2))
    engine.apply(v.Submit(REQUEST))
    frame = schedule(engine)
    event = v.Reset(reset_running_requests=True)
    assert "and a frame in flight" in find_decline(engine, event)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.apply(event)
    engine.apply(v.Commit(frame.frame_id, ()))
    assert not find_decline(engine, event)


def test_held_blocks_are_shown_after_their_request_was_reported() -> None:
    """A newer release then reports finished requests, although the next plan names none."""
    engine = start(delays_free=True)
    engine.apply(v.Abort(("A",)))
    engine.apply(v.Submit(replace(REQUEST, request_id="B")))
    engine.apply(v.KVOffer("B", delays_free=True))
    plan = schedule(engine)
    engine.apply(v.Abort(("B",)))
    engine.apply(v.Commit(plan.frame_id, ()))
    engine.apply(v.Schedule())
    assert [held.request_id for held in get_transfers(engine).held] == ["B"]


def test_newer_releases_load_nothing_for_a_request_that_skips_reading() -> None:
    """The store is asked anyway; only older releases take its offer."""
    engine = load_engine(ENGINE)(CONFIG)
    engine.apply(v.Submit(replace(REQUEST, skip_reading_prefix_cache=True)))
    engine.apply(v.KVOffer("A", num_tokens=4))
    plan = schedule(engine)
    assert bool(plan.kv_loads) is not RELEASE.ignores_offers_without_cache_reads
    assert engine.snapshot() is not None


def test_the_release_raises_on_a_synchronous_load_of_all_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The adapter offers no such load, unless the workaround is off."""
    engine_class = type(start())
    monkeypatch.setattr(engine_class, "spare_full_loads", False)
    engine = start(num_tokens=5)
    with pytest.raises(AssertionError):
        engine.apply(v.Schedule())


@pytest.mark.parametrize(
    ("flag", "groups", "actions"),
    [
        ("spare_signals", (), (v.Submit(REQUEST), report(finished_recving=("A",)))),
        ("spare_group_failures",
         (v.KVGroup(v.GroupKind.FULL, 2), v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2,
         sliding_window=4)), (v.Submit(REQUEST), v.KVOffer("A", num_tokens=4, is_async=True),
         v.Schedule(), report(invalid_block_ids=(1,)))),
        ("spare_full_loads", (), (v.Submit(REQUEST), v.KVOffer("A", num_tokens=5), v.Schedule())),
    ],
)  # fmt: skip
def test_hunt_names_the_workaround_that_hides_a_store_event(
    flag: str, groups: tuple[v.KVGroup, ...], actions: tuple[Action, ...]
) -> None:
    """A correct worker or store may send these events."""
    program = Program(replace(CONFIG, groups=groups), actions, vocabulary_size=1)
    cause = KnownCause(SuppressionKind.WORKAROUND, flag)
    assert cause in find_causes(program, load_engine(ENGINE), frozenset(), tuple(PROFILE.quirks))


@needs(VERSION == "0.19.1", "0.33.0 holds all hits before it takes blocks")
def test_a_step_in_which_a_load_may_end_before_a_hit_is_declined() -> None:
    """The release would ask for a negative number of blocks, and count too many as free."""
    groups = (
        v.KVGroup(v.GroupKind.FULL, 2),
        v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=4),
        v.KVGroup(v.GroupKind.FULL, 4),
    )
    engine: Any = load_engine(ENGINE)(replace(CONFIG, groups=groups))
    engine.apply(v.Submit(REQUEST))
    engine.apply(v.KVOffer("A", num_tokens=3, is_async=True))
    assert engine.declines(v.Schedule()) is None
    engine.apply(v.Submit(replace(REQUEST, request_id="B", prompt_token_ids=(7, 2, 3))))
    assert engine.declines(v.Schedule()) is None
    engine.apply(v.Submit(replace(REQUEST, request_id="C")))
    reason = engine.declines(v.Schedule())
    assert reason is not None
    assert reason.startswith("a load that may end before the hit of a second full group")


# Stalls: the cycles of `explore --stalls`, event by event.


LACKING = replace(
    CONFIG, num_blocks=3, block_size=1, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=3,
    enable_prefix_caching=False, scheduler_reserve_full_isl=False,
)  # fmt: skip
"""The world `lacking`: two blocks, either of two requests needs both."""
ALIKE = tuple(v.Request(name, (0, 0), max_tokens=1) for name in "AB")
SCHEDULE = v.Schedule()


def play(config: v.Config, *events: v.Event) -> Engine:
    """Return an engine after these events."""
    engine = load_engine(ENGINE)(config)
    for event in events:
        engine.apply(event)
    return engine


def list_turns(engine: Engine, *cycle: v.Event) -> list[v.Snapshot]:
    """Return the state after each of four turns of a cycle, in which no request has a row."""
    states = []
    for _ in range(4):
        for event in cycle:
            answer = engine.apply(event)
            assert not isinstance(answer, v.Plan) or not answer.rows
        shown = engine.snapshot()
        assert shown is not None
        states.append(shown)
    return states


def goes_round(states: list[v.Snapshot]) -> bool:
    """Return whether all states are equal, apart from counters."""
    alike = {(s.waiting, s.skipped_waiting, s.free_queue, s.requests, s.transfers) for s in states}
    return len(alike) == 1


def later(name: v.RequestId) -> v.KVOffer:
    """Return an offer of one token, which is loaded asynchronously."""
    return v.KVOffer(name, 1, is_async=True)


@needs(VERSION == "0.19.1", "0.33.0 begins no load that others may lack")
def test_two_loaded_requests_wait_for_each_others_blocks_for_ever() -> None:
    submits = map(v.Submit, ALIKE)
    engine = play(
        LACKING, *submits, later("A"), later("B"), SCHEDULE,
        report(finished_recving=("A",)), report(finished_recving=("B",)), SCHEDULE,
    )  # fmt: skip
    assert goes_round(list_turns(engine, SCHEDULE))


@needs(VERSION == "0.19.1", "fixed by 0.32.0")
def test_a_loaded_request_behind_a_head_without_blocks_waits_for_ever() -> None:
    first, second = map(v.Submit, ALIKE)
    engine = play(
        LACKING, first, v.KVOffer("A", None), second, later("B"), SCHEDULE,
        v.KVOffer("A", 0), report(finished_recving=("B",)), SCHEDULE,
    )  # fmt: skip
    assert goes_round(list_turns(engine, SCHEDULE))


def test_a_prompt_of_one_token_is_loaded_again_for_ever() -> None:
    engine = play(LACKING, v.Submit(v.Request("A", (0,), max_tokens=1)), later("A"), SCHEDULE)
    assert goes_round(list_turns(engine, report(finished_recving=("A",)), SCHEDULE))


@needs(VERSION == "0.33.0", "nothing is kept free for others there")
@pytest.mark.parametrize("num_blocks", [3, 4])
def test_a_request_with_a_failed_load_can_wait_for_ever(
    num_blocks: int,
) -> None:
    policy = v.KVLoadFailurePolicy.RECOMPUTE
    config = replace(LACKING, num_blocks=num_blocks, kv_load_failure_policy=policy)
    engine = play(
        config, v.Submit(ALIKE[0]), later("A"), SCHEDULE,
        report(finished_recving=("A",), invalid_block_ids=(1,)),
    )  # fmt: skip
    plan = engine.apply(SCHEDULE)
    assert isinstance(plan, v.Plan)
    assert bool(plan.kv_loads) is (num_blocks == 4)
    assert get_request(engine).status is (LOADING if plan.kv_loads else v.Status.WAITING)
    assert goes_round(list_turns(engine, SCHEDULE))


# With recurrent groups.


def with_states(mode: v.MambaCacheMode) -> v.Config:
    """The config with a group of states of this mode."""
    caching = mode is not v.MambaCacheMode.NONE
    size = 2 if caching else CONFIG.max_model_len
    states = v.KVGroup(v.GroupKind.RECURRENT, size, mamba_cache_mode=mode)
    groups = (v.KVGroup(v.GroupKind.FULL, 2), states)
    return replace(CONFIG, groups=groups, enable_prefix_caching=caching)


LOADS_STATES = needs(RELEASE.loads_no_aligned_states, "of releases before 0.24.0")


@LOADS_STATES
@pytest.mark.parametrize("mode", [v.MambaCacheMode.NONE, v.MambaCacheMode.ALL])
def test_the_state_after_the_last_offered_token_is_loaded(mode: v.MambaCacheMode) -> None:
    """An offer of all five tokens loads nothing, since a state cannot be rolled back."""
    plan = schedule(start(with_states(mode), num_tokens=4, is_async=True))
    (load,) = plan.kv_loads
    assert load.num_external_tokens == 4
    assert load.block_ids[1][-1] != v.NULL_BLOCK
    assert schedule(start(with_states(mode), num_tokens=5, is_async=True)).kv_loads == ()


@LOADS_STATES
@pytest.mark.parametrize("is_async", [False, True])
def test_an_offer_to_a_model_of_aligned_states_is_declined(is_async: bool) -> None:
    """If the event is sent anyway, the release raises."""
    engine = start(with_states(v.MambaCacheMode.ALIGN), num_tokens=0)
    offer = v.KVOffer("A", 4, is_async=is_async)
    assert "#43508" in find_decline(engine, offer)
    assert not find_decline(engine, v.KVOffer("A", 0, delays_free=True))
    assert not find_decline(start(with_states(v.MambaCacheMode.ALL), num_tokens=0), offer)
    engine.apply(offer)
    with pytest.raises(AssertionError, match="not verified"):
        engine.apply(v.Schedule())
