"""Sessions: KV kept between inputs, idle sessions, reclaim of their blocks, and input fields."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from groups_support import full, recurrent, window

from blockstep.spec import (
    Commit,
    Config,
    Drafts,
    MultiModalItem,
    Oracle,
    Outputs,
    Policy,
    RejectedEvent,
    Request,
    SpecMethod,
)
from blockstep.spec.core.requests import RequestState
from blockstep.spec.features.structured_output.grammar import GRAMMAR
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.profiles import Profile, Quirk
from blockstep.spec.vocabulary import (
    SESSION_FIELDS,
    FinishReason,
    Grammar,
    OutputRow,
    PauseState,
    Plan,
    RejectCode,
    Rejected,
    RepetitionDetection,
    RowTokens,
    Status,
    StreamingUpdate,
)

CONFIG = Config(num_blocks=20, block_size=2, max_model_len=16)
IDLE = Status.WAITING_FOR_STREAMING_REQ
DRAFTING: dict[str, Any] = {"spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 2}
AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}


def session(*tokens: int, name: str = "A", max_tokens: int = 2, **more: Any) -> Request:
    return Request(name, tokens, max_tokens=max_tokens, resumable=True, **more)


def end(name: str = "A") -> Request:
    return Request(name, (0,))


def answer(oracle: Oracle, *tokens: int) -> tuple[OutputRow, ...]:
    """Commit the oldest frame: every row that samples, the first of them or all accepted ones."""
    frame = oracle.state.frames[0]
    sampled = [RowTokens(row.request_id, tokens if row.samples else ()) for row in frame.rows]
    outputs = oracle.apply(Commit(frame.frame_id, tuple(sampled)))
    assert isinstance(outputs, Outputs), outputs
    assert get_broken_invariants(oracle.state) == ()
    return outputs.rows


def step(oracle: Oracle, token: int = 9) -> Plan:
    plan = oracle.schedule()
    if plan.rows:
        answer(oracle, token)
    return plan


def state_of(oracle: Oracle, name: str = "A") -> RequestState:
    return oracle.state.requests[name]


def run_first_input(oracle: Oracle, *tokens: int, name: str = "A", **more: Any) -> None:
    """Submit a session and run it until it is idle."""
    oracle.submit(session(*tokens, name=name, **{"max_tokens": 1, **more}))
    for _ in range(20):
        if oracle.state.requests[name].status is IDLE:
            return
        step(oracle)
    pytest.fail("the session did not become idle")


def test_an_idle_session_keeps_its_blocks_and_drops_its_last_token() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(session(1, 2, 3))
    step(oracle, 5)
    oracle.schedule()
    (row,) = answer(oracle, 6)
    assert row == OutputRow("A", (6,), FinishReason.LENGTH)
    resting = state_of(oracle)
    assert (resting.status, resting.num_computed_tokens) == (IDLE, 4)
    assert oracle.state.skipped_waiting == ("A",)
    assert oracle.state.finished_req_ids == ()
    assert oracle.schedule().rows == ()
    assert not oracle.reset(), "its blocks are held"
    assert oracle.update(session(7, 8, max_tokens=1, arrival_time=3)) == ()
    shown = oracle.snapshot().request("A")
    assert shown is not None
    assert shown.prompt_token_ids == (1, 2, 3, 5, 7, 8)
    assert (shown.status, shown.output_token_ids) == (Status.WAITING, ())
    plan = oracle.schedule()
    (new,) = plan.new
    assert new.request == session(1, 2, 3, 5, 7, 8, max_tokens=1, arrival_time=3)
    assert (new.num_computed_tokens, new.num_scheduled_tokens) == (4, 2)
    assert new.block_ids == state_of(oracle).block_tables
    assert new.block_ids[0][:2] == resting.block_tables[0]
    (row,) = answer(oracle, 4)
    assert row.finish_reason is FinishReason.LENGTH
    assert oracle.update(end()) == ("A",)
    assert oracle.num_free_blocks == 19
    assert oracle.schedule().finished_req_ids == ("A",)


def code_of(oracle: Oracle, update: Request) -> RejectCode | None:
    before = oracle.state
    seen = oracle.apply(StreamingUpdate(update))
    if not isinstance(seen, Rejected):
        return None
    assert oracle.state == before
    assert seen.detail
    return seen.code


def test_input_is_rejected_without_a_session_that_accepts_it() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(Request("B", (1,)))
    assert code_of(oracle, session(1)) is RejectCode.UNKNOWN_REQUEST
    assert code_of(oracle, session(1, name="B")) is RejectCode.NOT_RESUMABLE
    oracle.submit(session(1))
    oracle.update(end())
    assert code_of(oracle, session(1)) is RejectCode.NOT_RESUMABLE
    assert code_of(oracle, end()) is RejectCode.NOT_RESUMABLE
    with pytest.raises(RejectedEvent):
        oracle.submit(session(1))


def test_limits_apply_to_all_inputs_together() -> None:
    """An idle session counts its known tokens; an input that has not run counts its maximum."""
    oracle = Oracle(CONFIG)
    oracle.submit(session(*range(8), max_tokens=8, eos_token_id=99))
    assert code_of(oracle, session(1)) is RejectCode.PROMPT_TOO_LONG, "15 are kept at most"
    oracle.schedule()
    answer(oracle, 99)
    assert code_of(oracle, session(*range(8))) is RejectCode.PROMPT_TOO_LONG
    assert code_of(oracle, session(*range(7), max_tokens=1)) is None
    oracle = Oracle(replace(CONFIG, num_blocks=4))
    oracle.submit(session(1, 2, max_tokens=2))
    assert code_of(oracle, session(3, 4, max_tokens=3)) is RejectCode.NEVER_FITS
    assert code_of(oracle, session(3, max_tokens=3)) is None
    assert code_of(oracle, session(3, max_tokens=1)) is RejectCode.NEVER_FITS, "behind the other"


@pytest.mark.parametrize("quirk", [False, True])
def test_session_keys_are_appended(quirk: bool) -> None:
    """P3, P6: the dropped last token had completed the first block."""
    quirks = {Quirk.SESSION_KEYS_ARE_APPENDED} if quirk else set()
    oracle = Oracle(CONFIG, Profile("some", frozenset(quirks)))
    run_first_input(oracle, 1)
    oracle.update(session(7, 8, max_tokens=1))
    step(oracle)
    (key,) = state_of(oracle).block_keys[:1]
    assert key.token_ids == ((1, 9) if quirk else (1, 7))
    assert oracle.peek(Request("B", (1, 7, 0))) == (0 if quirk else 2)


@pytest.mark.parametrize("quirk", [False, True])
def test_sessions_keep_max_tokens(quirk: bool) -> None:
    quirks = {Quirk.SESSIONS_KEEP_MAX_TOKENS} if quirk else set()
    oracle = Oracle(CONFIG, Profile("some", frozenset(quirks)))
    run_first_input(oracle, 1)
    oracle.update(session(2, max_tokens=2))
    step(oracle)
    assert (state_of(oracle).status is IDLE) is quirk


@pytest.mark.parametrize("quirk", [False, True])
def test_sessions_keep_what_is_computed(quirk: bool) -> None:
    """Two drafts are accepted, and the first is the last token of the input."""
    quirks = {Quirk.SESSIONS_KEEP_WHAT_IS_COMPUTED} if quirk else set()
    oracle = Oracle(replace(CONFIG, **DRAFTING), Profile("some", frozenset(quirks)))
    oracle.submit(session(1, max_tokens=2))
    step(oracle, 9)
    oracle.apply(Drafts((RowTokens("A", (8, 7)),)))
    oracle.schedule()
    frame = oracle.state.frames[0]
    oracle.apply(Commit(frame.frame_id, (RowTokens("A", (8, 7, 6)),)))
    oracle.update(session(4, 5, 3))
    assert state_of(oracle).request.prompt_token_ids[:3] == ((1, 9, 8) if quirk else (1, 9, 4))
    (row,) = oracle.schedule().rows
    assert row.num_computed_tokens == (4 if quirk else 2)


@pytest.mark.parametrize("quirk", [False, True])
def test_sessions_keep_placeholders(quirk: bool) -> None:
    quirks = {Quirk.SESSIONS_KEEP_PLACEHOLDERS} if quirk else set()
    oracle = Oracle(replace(CONFIG, **AHEAD), Profile("some", frozenset(quirks)))
    oracle.submit(session(1, max_tokens=4, eos_token_id=9))
    oracle.schedule()
    oracle.schedule()
    frame = oracle.state.frames[0]
    oracle.apply(Commit(frame.frame_id, (RowTokens("A", (9,)),)))
    assert state_of(oracle).status is IDLE
    assert state_of(oracle).num_output_placeholders == quirk
    frame = oracle.state.frames[0]
    outputs = oracle.apply(Commit(frame.frame_id, (RowTokens("A", (3,)),)))
    assert outputs == Outputs((OutputRow("A", (3,)),) if quirk else ())


def test_a_session_preempted_in_flight_is_idle_without_blocks() -> None:
    """T8: its tokens are kept, and it is in one queue only."""
    for more in (AHEAD, {"max_frames_in_flight": 2}):
        for chunks in ((), (session(7, max_tokens=1),)):
            oracle = Oracle(replace(CONFIG, **more))
            oracle.submit(session(1, 2, max_tokens=1))
            for chunk in chunks:
                oracle.update(chunk)
            oracle.schedule()
            oracle.reset(reset_running_requests=True)
            answer(oracle, 5)
            assert state_of(oracle).num_computed_tokens == 0
            if not chunks:
                assert state_of(oracle).status is IDLE
                oracle.update(session(7, max_tokens=1))
            (new,) = oracle.schedule().new
            assert new.request.prompt_token_ids == (1, 2, 7)
            answer(oracle, 5)


@pytest.mark.parametrize("quirk", [False, True])
def test_sessions_keep_their_blocks(quirk: bool) -> None:
    """P10: a new request needs blocks of an idle session, and no request runs."""
    quirks = {Quirk.SESSIONS_KEEP_THEIR_BLOCKS} if quirk else set()
    oracle = Oracle(replace(CONFIG, num_blocks=4), Profile("some", frozenset(quirks)))
    run_first_input(oracle, 1, 2, 3)
    oracle.submit(Request("B", (4, 5, 6), max_tokens=1))
    plan = oracle.schedule()
    assert bool(plan.rows) is not quirk
    assert oracle.reset(reset_running_requests=True) is not quirk
    assert state_of(oracle).num_computed_tokens == (3 if quirk else 0)
    assert plan.preempted_req_ids == ()


def test_two_waiting_sessions_with_blocks_do_not_deadlock() -> None:
    """Upstream #49439: each lacks blocks of the other; those of the later one are reclaimed."""
    oracle = Oracle(replace(CONFIG, num_blocks=5))
    run_first_input(oracle, 1, 2, 3)
    run_first_input(oracle, 4, 5, 6, name="B")
    oracle.update(session(7, 8, 9, max_tokens=1))
    oracle.update(session(7, 8, 9, name="B", max_tokens=1))
    (new,) = step(oracle).new
    assert (new.request_id, new.num_computed_tokens) == ("A", 3)
    assert state_of(oracle, "B").num_computed_tokens == 0
    (new,) = step(oracle).new
    assert (new.request_id, new.num_computed_tokens) == ("B", 2), "a hit on what it had computed"


def test_blocks_of_idle_sessions_are_reclaimed_before_those_of_waiting_ones() -> None:
    """Three sessions hold all six blocks, and the head of the waiting queue lacks blocks."""
    oracle = Oracle(replace(CONFIG, num_blocks=7))
    for token, name in enumerate("ABC"):
        run_first_input(oracle, token, token, token, name=name)
    oracle.update(session(7, 7, 7, name="C", max_tokens=1))
    oracle.update(session(7, 7, 7, max_tokens=1))
    plan = oracle.schedule()
    assert [row.request_id for row in plan.rows] == ["A", "C"]
    held = {name: request.num_computed_tokens for name, request in oracle.state.requests.items()}
    assert held == {"A": 6, "B": 0, "C": 6}, "C, behind B, keeps its own"


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
def test_blocks_of_the_idle_session_of_lowest_rank_are_reclaimed(policy: Policy) -> None:
    """Each of two sessions holds two of four blocks, and a new request needs two."""
    oracle = Oracle(replace(CONFIG, num_blocks=5, policy=policy))
    run_first_input(oracle, 1, 2, 3, priority=2)
    run_first_input(oracle, 4, 5, 6, name="B", priority=1)
    oracle.submit(Request("C", (7, 8, 9), max_tokens=1))
    (new,) = oracle.schedule().new
    gives, keeps = "BA" if policy is Policy.FCFS else "AB"
    assert new.request.request_id == "C"
    assert state_of(oracle, gives).block_tables == ((),)
    assert len(state_of(oracle, keeps).block_tables[0]) == 2


def test_a_request_that_runs_alone_reclaims_before_it_preempts_itself() -> None:
    oracle = Oracle(replace(CONFIG, num_blocks=4, scheduler_reserve_full_isl=False))
    run_first_input(oracle, 1, 2, 3)
    oracle.submit(Request("B", (4,), max_tokens=4))
    for _ in range(4):
        step(oracle, 7)
    assert "B" not in oracle.state.requests
    assert oracle.state.stats.preemptions == 0
    assert state_of(oracle).num_computed_tokens == 0


def test_new_input_changes_the_rank_of_a_session() -> None:
    oracle = Oracle(replace(CONFIG, policy=Policy.PRIORITY))
    run_first_input(oracle, 1)
    run_first_input(oracle, 2, name="B")
    oracle.update(session(3, max_tokens=1, arrival_time=5))
    assert oracle.state.skipped_waiting == ("B", "A")
    assert get_broken_invariants(oracle.state) == ()


def test_windows_and_states_past_the_continuation_are_computed_again() -> None:
    """With three frames ahead, the window has freed blocks that the next input attends to."""
    for num_frames, num_computed in ((2, 2), (3, 0)):
        more = AHEAD | {"max_frames_in_flight": num_frames}
        oracle = Oracle(replace(CONFIG, block_size=1, groups=(full(1), window(1, 2)), **more))
        oracle.submit(session(1, 2, max_tokens=6, eos_token_id=9))
        for _ in range(num_frames):
            oracle.schedule()
        answer(oracle, 9)
        assert state_of(oracle).num_computed_tokens == num_computed
        assert any(state_of(oracle).block_tables) is (num_computed > 0)
    oracle = Oracle(replace(CONFIG, groups=(recurrent(2),)))
    run_first_input(oracle, 1, 2)
    assert state_of(oracle).num_computed_tokens == 2
    drafting = DRAFTING | {"num_speculative_tokens": 1}
    oracle = Oracle(replace(CONFIG, groups=(recurrent(2, num_speculative=1),), **drafting))
    run_first_input(oracle, 1, 2)
    assert state_of(oracle).num_computed_tokens == 0


@pytest.mark.parametrize("quirk", [False, True])
def test_keys_of_further_input_have_all_items_of_the_block(quirk: bool) -> None:
    quirks = {Quirk.OUTPUT_BLOCK_KEY_HAS_ONLY_THE_LAST_ITEM} if quirk else set()
    oracle = Oracle(CONFIG, Profile("some", frozenset(quirks)))
    run_first_input(oracle, 1, 2)
    items = (MultiModalItem("cat", 0, 1), MultiModalItem("dog", 1, 1))
    oracle.update(session(3, 4, items=items))
    *_, key = state_of(oracle).block_keys
    assert [name for name, _ in key.items] == (["dog"] if quirk else ["cat", "dog"])


@pytest.mark.parametrize("quirk", [False, True])
def test_sessions_admitted_with_lookahead(quirk: bool) -> None:
    quirks = {Quirk.SESSIONS_ADMITTED_WITH_LOOKAHEAD} if quirk else set()
    more = {"spec_method": SpecMethod.DRAFT_MODEL, "num_speculative_tokens": 2}
    oracle = Oracle(replace(CONFIG, **more), Profile("some", frozenset(quirks)))  # type: ignore[arg-type]
    run_first_input(oracle, 1, 2)
    oracle.update(session(3, 4, max_tokens=1))
    (new,) = oracle.schedule().new
    assert len(new.block_ids[0]) == (3 if quirk else 2)


@pytest.mark.parametrize("quirk", [False, True])
def test_refused_session_frees_skipped_blocks(quirk: bool) -> None:
    quirks = {Quirk.SESSIONS_KEEP_THEIR_BLOCKS}
    if quirk:
        quirks.add(Quirk.REFUSED_SESSION_FREES_SKIPPED_BLOCKS)
    config = replace(CONFIG, num_blocks=11, block_size=1, groups=(full(1), window(1, 2)))
    config = replace(config, scheduler_reserve_full_isl=False, max_frames_in_flight=2)
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    run_first_input(oracle, 1, 2)
    oracle.submit(Request("B", (3, 4), max_tokens=1))
    oracle.schedule()
    oracle.update(session(5, 6, 7, max_tokens=1))
    before = oracle.num_free_blocks
    assert oracle.schedule().new == ()
    assert oracle.num_free_blocks == before + quirk
    assert [table[0] == 0 for table in state_of(oracle).block_tables] == [False, quirk]


@pytest.mark.parametrize("quirk", [False, True])
def test_sessions_keep_their_grammar(quirk: bool) -> None:
    """P23: each input starts the grammar from its first state.

    With the quirk the completed grammar stays, and no longer constrains any token.
    """
    quirks = {Quirk.SESSIONS_KEEP_THEIR_GRAMMAR} if quirk else set()
    oracle = Oracle(CONFIG, Profile("some", frozenset(quirks)))
    grammar = Grammar((((5, 1),), ()))
    oracle.submit(session(1, max_tokens=1, structured_output=True, grammar=grammar))
    oracle.grammar_ready("A")
    oracle.schedule()
    oracle.apply(Commit(0, (RowTokens("A", (5,)),)))
    oracle.update(session(2, max_tokens=1))
    oracle.schedule()
    seen = oracle.apply(Commit(1, (RowTokens("A", (9,)),)))
    assert isinstance(seen, Rejected) is not quirk


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize(("sampled", "waiting"), [(7, 1), (1, 7), (1, 1)])
def test_reasoning_end_is_searched_in_the_next_input(
    sampled: int, waiting: int, stops: bool
) -> None:
    """P23: with the quirk, the end of reasoning (7) is searched after a waiting input was appended.

    So a sampled one is overlooked, and one in the input of a client counts.
    """
    kept = {Quirk.SESSIONS_KEEP_THEIR_GRAMMAR}
    config = replace(CONFIG, reasoning_end_token_id=7)
    ended = []
    for quirks in (kept, kept | {Quirk.REASONING_END_IS_SEARCHED_IN_THE_NEXT_INPUT}):
        oracle = Oracle(config, Profile("some", frozenset(quirks)))
        oracle.submit(
            session(
                1,
                max_tokens=1 if stops else 2,
                structured_output=True,
                grammar=Grammar((((1, 0), (5, 0)),)),
            )
        )
        oracle.update(session(waiting, max_tokens=1))
        oracle.grammar_ready("A")
        oracle.schedule()
        oracle.apply(Commit(0, (RowTokens("A", (sampled,)),)))
        ended.append(GRAMMAR.of(oracle.state.requests["A"]).reasoning_ended)
    assert ended == [sampled == 7, waiting == 7 if stops else sampled == 7]


def test_a_repetition_clears_the_last_stop_token_of_a_session() -> None:
    quirks = frozenset({Quirk.SESSION_REPEATS_ITS_STOP_TOKEN})
    oracle = Oracle(CONFIG, Profile("some", quirks))
    twice = RepetitionDetection(max_pattern_size=1, min_pattern_size=1, min_count=2)
    oracle.submit(session(1, stop_token_ids=(9,)))
    step(oracle)
    oracle.update(session(2, repetition_detection=twice, max_tokens=3))
    ends = []
    for _ in range(2):
        oracle.schedule()
        ends += [(row.finish_reason, row.stop_token_id) for row in answer(oracle, 5)]
    assert ends == [(None, 9), (FinishReason.REPETITION, None)]
    oracle.update(session(3))
    oracle.schedule()
    assert answer(oracle, 5) == (OutputRow("A", (5,)),)


@pytest.mark.parametrize("quirk", [False, True])
def test_common_prefix_counts_idle_sessions(quirk: bool) -> None:
    quirks = {Quirk.COMMON_PREFIX_COUNTS_IDLE_SESSIONS} if quirk else set()
    oracle = Oracle(CONFIG, Profile("some", frozenset(quirks)))
    run_first_input(oracle, 1, 2)
    oracle.submit(Request("B", (3, 4, 5), max_tokens=1))
    assert oracle.schedule().num_common_prefix_blocks == ((0,) if quirk else (2,))


@pytest.mark.parametrize("quirk", [False, True])
def test_separate_queue_for_computed_requests(quirk: bool) -> None:
    """With the quirk, a request with computed tokens is first, whatever its priority."""
    quirks = (
        {Quirk.SINGLE_WAITING_QUEUE, Quirk.SEPARATE_QUEUE_FOR_COMPUTED_REQUESTS} if quirk else set()
    )
    config = replace(CONFIG, policy=Policy.PRIORITY, max_num_seqs=1, max_frames_in_flight=2)
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(session(1, 2, max_tokens=1, priority=5))
    step(oracle)
    assert oracle.state.skipped_waiting == ("A",)
    oracle.submit(Request("B", (3,), max_tokens=1))
    oracle.update(session(3, max_tokens=1, priority=5))
    oracle.pause(PauseState.PAUSED_NEW)
    names = [[row.request_id for row in step(oracle).new] for _ in range(2)]
    assert names == ([["A"], []] if quirk else [[], []])
    oracle.pause(PauseState.UNPAUSED)
    assert [row.request_id for row in step(oracle).new] == ["B"]
    assert get_broken_invariants(oracle.state) == ()


@pytest.mark.parametrize("quirk", [False, True])
def test_idle_sessions_keep_running_slots(quirk: bool) -> None:
    quirks = {Quirk.IDLE_SESSIONS_KEEP_RUNNING_SLOTS} if quirk else set()
    oracle = Oracle(replace(CONFIG, max_num_seqs=1), Profile("some", frozenset(quirks)))
    run_first_input(oracle, 1, 2)
    oracle.submit(Request("B", (3,), max_tokens=1))
    assert [row.request_id for row in step(oracle).new] == ([] if quirk else ["B"])
    assert oracle.abort("A") == ("A",)
    assert [row.request_id for row in step(oracle).new] == (["B"] if quirk else [])


@pytest.mark.parametrize("quirk", [False, True])
def test_session_keeps_blocks_without_check(quirk: bool) -> None:
    """Only the worker knows which block has the last state, since drafts have states."""
    quirks = {Quirk.SESSION_KEEPS_BLOCKS_WITHOUT_CHECK} if quirk else set()
    config = replace(CONFIG, groups=(recurrent(2, num_speculative=1),), **DRAFTING)
    config = replace(config, num_speculative_tokens=1)
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    run_first_input(oracle, 1, 2)
    assert state_of(oracle).num_computed_tokens == (2 if quirk else 0)
    assert [len(table) for table in state_of(oracle).block_tables] == [2 if quirk else 0]


@pytest.mark.parametrize("quirk", [False, True])
def test_a_row_that_delivers_no_token_still_counts_as_in_flight(quirk: bool) -> None:
    """The session continues while its old row is in flight; this decides what its window frees."""
    quirks = {Quirk.WINDOW_WAITS_FOR_COMMITS} if quirk else set()
    config = replace(CONFIG, block_size=1, groups=(window(1, 1),), **AHEAD)
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(session(1, 2, max_tokens=4, stop_token_ids=(5,)))
    oracle.update(session(3))
    oracle.schedule()
    oracle.schedule()
    answer(oracle, 5)
    (new,) = oracle.schedule().new
    (table,) = new.block_ids
    assert new.num_computed_tokens == 2
    assert (table[1] == 0) is not quirk, "the row in flight is of one token"


# Fields of an input.

CHUNK = Request("S", (4, 5), max_tokens=3, resumable=True)
ANOTHER: dict[str, dict[str, Any]] = {
    "prompt_token_ids": {"prompt_token_ids": (4, 6)},
    "max_tokens": {"max_tokens": 2},
    "min_tokens": {"min_tokens": 1},
    "eos_token_id": {"eos_token_id": 9},
    "stop_token_ids": {"stop_token_ids": (9,)},
    "repetition_detection": {"repetition_detection": RepetitionDetection(3, 1, 2)},
    "arrival_time": {"arrival_time": 7},
    "items": {"items": (MultiModalItem("cat", 0, 1),)},
    "prompt_embeds": {"prompt_embeds": (1, 2)},
    "priority": {"priority": 2},
    "adapter": {"adapter": "other"},
    "cache_salt": {"cache_salt": "other"},
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "structured_output": {"structured_output": True},
    "grammar": {"structured_output": True, "grammar": Grammar((((1, 0),),))},
    "job_id": {"job_id": "other"},
    "is_last_step": {"is_last_step": True},
}
"""Inputs that differ in one field. `request_id` is the session's, `resumable=False` ends it."""


def make_idle_session(**fields: Any) -> Oracle:
    """Return an oracle with a session that is idle after one token."""
    oracle = Oracle(Config(num_blocks=20, block_size=2))
    oracle.submit(replace(Request("S", (1, 2, 3), max_tokens=1, resumable=True), **fields))
    oracle.commit(oracle.schedule(), {"S": [7]})
    return oracle


def test_every_field_of_a_request_has_a_case() -> None:
    names = {part.name for part in dataclasses.fields(Request)}
    assert names == {*ANOTHER, "request_id", "resumable"}
    assert set(SESSION_FIELDS) < names


@pytest.mark.parametrize("name", ANOTHER)
@pytest.mark.parametrize("rests", [True, False])
def test_every_field_of_an_input_is_used_or_rejected(name: str, rests: bool) -> None:
    """No field is ignored silently, least of all a salt that isolates tenants (upstream #57685)."""
    plain, other = make_idle_session(), make_idle_session()
    if not rests:
        for oracle in (plain, other):
            oracle.update(CHUNK)
    changed = replace(CHUNK, **ANOTHER[name])
    plain.update(CHUNK)
    if name in (*SESSION_FIELDS, "prompt_embeds"):
        before = other.state
        with pytest.raises(RejectedEvent, match="bad_request"):
            other.update(changed)
        assert other.state == before
        return
    other.update(changed)
    assert other.state.requests["S"] != plain.state.requests["S"]


def test_the_end_of_input_ignores_its_fields() -> None:
    oracle = make_idle_session()
    oracle.update(replace(CHUNK, resumable=False, cache_salt="other", max_tokens=9))
    assert "S" not in oracle.state.requests
