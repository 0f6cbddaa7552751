"""Structured output: bitmasks, checks of commits and drafts, and the grammar state."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from blockstep.spec import (
    Abort,
    Commit,
    Config,
    Drafts,
    Grammar,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    Oracle,
    RejectedEvent,
    Request,
    Reset,
    Schedule,
    SpecMethod,
    Submit,
)
from blockstep.spec.core.state import State
from blockstep.spec.features.structured_output import get_verifiable_drafts
from blockstep.spec.features.structured_output.grammar import (
    GRAMMAR,
    get_next_state,
    get_states,
)
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import (
    Ack,
    FinishReason,
    GrammarOutput,
    GrammarRow,
    Outputs,
    Plan,
    RejectCode,
    Rejected,
    RequestSnapshot,
    RowTokens,
    TokenIds,
)

EOS = 9
ONE_TWO = Grammar((((1, 1), (EOS, 2)), ((2, 0),), ()))
"""(1 2)* and the end of the text."""
CONFIG = Config(num_blocks=20, block_size=2, max_model_len=24, max_num_batched_tokens=16)
DRAFTING = replace(CONFIG, spec_method=SpecMethod.NGRAM, num_speculative_tokens=3)
ASYNC = replace(DRAFTING, async_scheduling=True, max_frames_in_flight=3)


def constrained(name: str = "A", grammar: Grammar = ONE_TWO, **more: object) -> Request:
    request = Request(name, (5, 5), max_tokens=12, structured_output=True, grammar=grammar)
    return replace(request, **more)  # type: ignore[arg-type]


def begin(config: Config, *requests: Request) -> Oracle:
    """Submit requests and report that their grammars are compiled."""
    oracle = Oracle(config)
    for request in requests:
        oracle.submit(request)
        if request.structured_output:
            oracle.grammar_ready(request.request_id)
    return oracle


def step(oracle: Oracle, **sampled: TokenIds) -> Plan:
    plan = oracle.schedule()
    oracle.commit(plan, sampled)
    assert get_broken_invariants(oracle.state) == ()
    return plan


def shown(oracle: Oracle, name: str = "A") -> RequestSnapshot:
    found = oracle.snapshot().request(name)
    assert found is not None
    return found


# A request with a grammar.


def test_a_commit_with_a_forbidden_token_is_rejected() -> None:
    oracle = begin(CONFIG, constrained())
    plan = oracle.schedule()
    before = oracle.state
    with pytest.raises(RejectedEvent, match=r"bad_result: 'A': its grammar, in state 0, forbids"):
        oracle.commit(plan, {"A": (2,)})
    assert oracle.state == before
    oracle.commit(plan, {"A": (1,)})


def test_proposed_drafts_are_cut_at_the_first_forbidden_token() -> None:
    oracle = begin(DRAFTING, constrained(), Request("B", (5,)))
    step(oracle, A=(1,), B=(1,))
    assert oracle.propose({"A": (2, 1, 1), "B": (2, 1, 1)}) == ("A", "B")
    assert shown(oracle).spec_token_ids == (2, 1)
    plan = oracle.schedule()
    assert oracle.mask(plan) == (GrammarRow("A", ((2,), (1, EOS), (2,)), (2, 1)),)
    oracle.commit(plan, {"A": (2, EOS), "B": (3,)})
    assert shown(oracle).grammar_state == 2, "a rejected draft left no trace"
    oracle.propose({"A": (1,)})
    assert shown(oracle).spec_token_ids == ()
    plan = oracle.schedule()
    assert oracle.mask(plan) == (GrammarRow("A", (None,)),)
    oracle.commit(plan, {"A": (4,), "B": (3,)})
    assert shown(oracle).grammar_state == 2


# Asynchronous scheduling: only the worker knows the drafts.


def test_a_mask_waits_for_the_tokens_before_it() -> None:
    oracle = begin(ASYNC, constrained(), Request("B", (5,)))
    first, second = oracle.schedule(), oracle.schedule()
    assert not first.pending_structured_output_tokens
    assert second.pending_structured_output_tokens
    with pytest.raises(RejectedEvent, match="grammar_behind: 'A' samples in a frame before 1"):
        oracle.mask(second)
    assert oracle.mask(first) == (GrammarRow("A", ((1, EOS),)),)
    oracle.commit(first, {"A": (1,), "B": (1,)})
    late = oracle.apply(GrammarBitmask(first.frame_id))
    assert late == Rejected(RejectCode.UNKNOWN_FRAME), "a later frame does not stand for it"
    sent = {"A": (2, 1, 1), "B": (1, 1, 1), "nobody": (1,)}
    assert oracle.mask(second, sent) == (GrammarRow("A", ((2,), (1, EOS), (2,), (2,)), (2, 1, -1)),)
    with pytest.raises(RejectedEvent, match=r"bad_result: .* leading drafts of \(2, 1\)"):
        oracle.commit(second, {"A": (2, 1, 2, 1), "B": (4,)})
    oracle.commit(second, {"A": (2, 1, 2), "B": (4,)})
    assert get_broken_invariants(oracle.state) == ()
    assert shown(oracle).grammar_state == 0
    assert oracle.state.stats.drafts_scheduled == 5, "what was cut is not verified"
    assert oracle.state.stats.drafts_accepted == 2


def test_no_draft_is_accepted_if_the_worker_sent_none_for_the_mask() -> None:
    oracle = begin(ASYNC, constrained())
    first, second = oracle.schedule(), oracle.schedule()
    oracle.commit(first, {"A": (1,)})
    assert oracle.mask(second) == (GrammarRow("A", ((2,),) * 4, (-1, -1, -1)),)
    with pytest.raises(RejectedEvent, match="bad_result"):
        oracle.commit(second, {"A": (2, 1)})
    assert oracle.mask(second, {"A": (2, 3)})[0].draft_token_ids == (2, -1, -1)
    assert oracle.mask(second)[0].draft_token_ids == (2, -1, -1), "it keeps what it has"
    oracle.commit(second, {"A": (2, 1)})


def test_a_commit_is_checked_against_the_grammar_without_a_mask_too() -> None:
    oracle = begin(ASYNC, constrained())
    first, second = oracle.schedule(), oracle.schedule()
    oracle.commit(first, {"A": (1,)})
    with pytest.raises(RejectedEvent, match="forbids one of"):
        oracle.commit(second, {"A": (2, 2)})
    oracle.commit(second, {"A": (2, 1)})


def test_bad_mask_events_are_rejected() -> None:
    oracle = begin(DRAFTING, constrained())
    plan = oracle.schedule()
    for event, code in (
        (GrammarBitmask(7), RejectCode.UNKNOWN_FRAME),
        (GrammarBitmask(plan.frame_id, (RowTokens("A", (1,)),)), RejectCode.BAD_DRAFTS),
        (GrammarBitmask(-1), RejectCode.MALFORMED_EVENT),
    ):
        assert oracle.apply(event) == Rejected(code)
    oracle = begin(ASYNC, constrained())
    twice = GrammarBitmask(oracle.schedule().frame_id, (RowTokens("A"), RowTokens("A")))
    assert oracle.apply(twice) == Rejected(RejectCode.BAD_DRAFTS)


# Failed grammars.


@pytest.mark.parametrize("where", ["waits for it", "waits", "runs", "in flight", "preempted"])
def test_a_failed_grammar_finishes_its_request_in_every_state(where: str) -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(constrained())
    if where != "waits for it":
        oracle.grammar_ready("A")
    plan = oracle.schedule() if where in ("runs", "in flight", "preempted") else None
    if where == "runs" and plan is not None:
        oracle.commit(plan, {"A": (1,)})
    if where == "preempted":
        oracle.reset(reset_running_requests=True)
    outputs = oracle.grammar_failed("A")
    assert [(row.request_id, row.new_token_ids) for row in outputs.rows] == [("A", ())]
    assert outputs.rows[0].finish_reason is FinishReason.ERROR
    assert get_broken_invariants(oracle.state) == ()
    assert oracle.num_free_blocks == CONFIG.num_usable_blocks
    if where in ("in flight", "preempted") and plan is not None:
        assert oracle.mask(plan) == ()
        assert oracle.commit(plan, {"A": (4,)}) == Outputs(), "the row of A is ignored"
    assert oracle.schedule().finished_req_ids == ("A",)
    with pytest.raises(RejectedEvent, match="unknown_request"):
        oracle.grammar_failed("A")


def test_a_failed_grammar_of_an_unstructured_request_is_rejected() -> None:
    oracle = begin(CONFIG, Request("B", (5,)))
    assert oracle.apply(GrammarFailed("B")) == Rejected(RejectCode.NOT_STRUCTURED)


# Random walks.


def draw_event(draw: Random, state: State) -> object:
    """Return a random event; sampled tokens are mostly those that a mask would allow."""
    names = [*state.requests] or ["A"]
    name = draw.choice(names)
    kind = draw.randrange(12)
    if kind < 2:
        marker = (7,) if draw.random() < 0.2 else ()
        asked = constrained(draw.choice("ABC"), prompt_token_ids=(5, 5, *marker))
        return Submit(replace(asked, eos_token_id=EOS, min_tokens=draw.randrange(4)))
    if kind < 4:
        return GrammarReady(name)
    if kind == 4:
        drafts = tuple(draw.choice((1, 2, 7, EOS)) for _ in range(draw.randrange(4)))
        if not state.config.async_scheduling:
            return Drafts((RowTokens(name, drafts),))
        frame_id = draw.choice([frame.frame_id for frame in state.frames] or [0])
        return GrammarBitmask(frame_id, (RowTokens(name, drafts),))
    if kind == 5:
        return draw.choice((Reset(True), Abort((name,)), GrammarFailed(name)))
    if kind < 8 or not state.frames:
        return Schedule()
    rows = []
    for row in state.frames[0].rows:
        request = state.requests.get(row.request_id)
        current = None if request is None else GRAMMAR.of(request)
        number = 1 + draw.randrange(len(get_verifiable_drafts(row)) + 1)
        if current is None or not row.samples:
            rows.append(RowTokens(row.request_id, (4,) * row.samples))
            continue
        tokens = get_verifiable_drafts(row)[: number - 1]
        if -1 in tokens:
            tokens = ()
        states = get_states(state.config, ONE_TWO, current, tokens, get_next_state)
        edges = ONE_TWO.edges[states[-1].state] or ((4, 2),)
        token = draw.choice([token for token, _ in edges])
        if state.config.reasoning_end_token_id and not states[-1].reasoning_ended:
            token = draw.choice((4, 7))
        rows.append(RowTokens(row.request_id, (*tokens, token)))
    return Commit(state.frames[0].frame_id, tuple(rows))


def walk(text: TokenIds, prompt: TokenIds, has_reasoning: bool) -> tuple[int, bool]:
    """Return the grammar state and whether reasoning has ended, computed token by token."""
    ended, state = has_reasoning and 7 in prompt, 0
    for token in text:
        if has_reasoning and not ended:
            ended = token == 7
        elif state != 2:
            state = {(0, 1): 1, (0, EOS): 2, (1, 2): 0}[state, token]
    return state, ended


@pytest.mark.parametrize("has_reasoning", [False, True])
@pytest.mark.parametrize("config", [DRAFTING, ASYNC, replace(CONFIG, max_frames_in_flight=3)])
def test_the_grammar_state_follows_from_the_accepted_outputs(
    config: Config, has_reasoning: bool
) -> None:
    if has_reasoning:
        config = replace(config, reasoning_end_token_id=7)
    seen: set[tuple[str, bool]] = set()
    draw, oracle = Random(41), Oracle(replace(config, num_blocks=9))
    for _ in range(800):
        event = draw_event(draw, oracle.state)
        answer = oracle.apply(event)  # type: ignore[arg-type]
        seen.add((type(event).__name__, not isinstance(answer, Rejected)))
        assert get_broken_invariants(oracle.state) == ()
        for request in oracle.state.requests.values():
            prompt = request.request.prompt_token_ids
            expected = walk(request.output_token_ids, prompt, has_reasoning)
            assert (GRAMMAR.of(request).state, GRAMMAR.of(request).reasoning_ended) == expected
        if isinstance(answer, GrammarOutput):
            for row in answer.rows:
                assert len(row.allowed) == len(row.draft_token_ids) + 1
    assert {(name, True) for name in ("Commit", "Reset", "GrammarFailed")} <= seen


def test_a_mask_changes_only_the_drafts_of_its_frame() -> None:
    oracle = begin(ASYNC, constrained())
    first, second = oracle.schedule(), oracle.schedule()
    oracle.commit(first, {"A": (1,)})
    before = oracle.snapshot()
    oracle.mask(second, {"A": (2,)})
    assert oracle.snapshot() == before
    assert oracle.apply(GrammarReady("A")) == Ack()
