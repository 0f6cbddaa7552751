"""Rejections: bad input gets a code, raises nothing, and leaves the state unchanged."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from groups_support import recurrent
from hypothesis import given
from hypothesis import strategies as st

from blockstep.spec import (
    Abort,
    Commit,
    Config,
    ConfigError,
    Drafts,
    GrammarReady,
    MultiModalItem,
    Oracle,
    Rejected,
    Request,
    Reset,
    Schedule,
    SetPause,
    SpecMethod,
    State,
    StreamingUpdate,
    Submit,
    initial_state,
    transition,
)
from blockstep.spec.vocabulary import (
    MAX_INT,
    EncoderOffer,
    Fork,
    GroupKind,
    KVGroup,
    RejectCode,
    RepetitionDetection,
    RowTokens,
    config_problems,
    item_problem,
)

GOOD = Request("new", (1, 2, 3), max_tokens=4)


def make_busy() -> Oracle:
    """Return an oracle with requests in several states.

    A is in flight with a draft, B was aborted in flight, and G waits for its grammar.
    """
    config = Config(
        num_blocks=9,
        block_size=2,
        max_model_len=12,
        spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=2,
    )
    oracle = Oracle(config)
    oracle.submit(Request("A", (1, 2, 3), max_tokens=4))
    oracle.submit(Request("B", (4, 5), max_tokens=4))
    oracle.submit(Request("G", (6,), max_tokens=2, structured_output=True))
    plan = oracle.schedule()
    oracle.commit(plan, {"A": [7], "B": [8]})
    oracle.apply(Drafts((RowTokens("A", (9, 9)),)))
    oracle.schedule()
    oracle.abort("B")
    return oracle


@cache
def get_busy_state(copy: int = 0) -> State:
    """Return the state of `make_busy`; another `copy` is an equal state built again."""
    del copy
    return make_busy().state


def bad_request(**changes: Any) -> Submit:
    return Submit(replace(GOOD, **changes))


def answer(*rows: tuple[str, tuple[int, ...]]) -> Commit:
    return Commit(1, tuple(RowTokens(name, tokens) for name, tokens in rows))


B_ROW = ("B", (1,))
M, R = RejectCode.MALFORMED_EVENT, RejectCode.BAD_REQUEST

CASES: dict[str, tuple[object, RejectCode]] = {
    "no event": (None, M),
    "a number": (42, M),
    "a class": (Schedule, M),
    "a dict": ({"type": "schedule"}, M),
    "submit of nothing": (Submit(None), M),  # type: ignore[arg-type]
    "submit of a string": (Submit("A"), M),  # type: ignore[arg-type]
    "id is empty": (bad_request(request_id=""), M),
    "id is a number": (bad_request(request_id=7), M),
    "prompt is a list": (bad_request(prompt_token_ids=[1, 2]), M),
    "prompt is None": (bad_request(prompt_token_ids=None), M),
    "prompt has a string": (bad_request(prompt_token_ids=(1, "2")), M),
    "prompt has a bool": (bad_request(prompt_token_ids=(True,)), M),
    "prompt has a negative token": (bad_request(prompt_token_ids=(-1,)), M),
    "prompt has a huge token": (bad_request(prompt_token_ids=(MAX_INT + 1,)), M),
    "prompt is empty": (bad_request(prompt_token_ids=()), R),
    "prompt is too long": (
        bad_request(prompt_token_ids=(1,) * 12),
        RejectCode.PROMPT_TOO_LONG,
    ),
    "max_tokens is zero": (bad_request(max_tokens=0), R),
    "max_tokens is negative": (bad_request(max_tokens=-3), R),
    "max_tokens is huge": (bad_request(max_tokens=MAX_INT + 1), R),
    "max_tokens has more digits than Python prints": (bad_request(max_tokens=10**5000), R),
    "frame has more digits than Python prints": (Commit(10**5000, ()), M),
    "max_tokens is a float": (bad_request(max_tokens=4.0), M),
    "max_tokens is None": (bad_request(max_tokens=None), M),
    "min_tokens exceeds max_tokens": (bad_request(min_tokens=5), R),
    "min_tokens is negative": (bad_request(min_tokens=-1), R),
    "eos is a string": (bad_request(eos_token_id="</s>"), M),
    "eos is negative": (bad_request(eos_token_id=-2), M),
    "stop tokens are an int": (bad_request(stop_token_ids=3), M),
    "stop tokens are a set": (bad_request(stop_token_ids={3}), M),
    "priority is a float": (bad_request(priority=0.5), M),
    "priority is huge": (bad_request(priority=2**40), M),
    "arrival is a float": (bad_request(arrival_time=1.5), M),
    "arrival is negative": (bad_request(arrival_time=-1), R),
    "adapter is empty": (bad_request(adapter=""), M),
    "adapter is a number": (bad_request(adapter=1), M),
    "salt is bytes": (bad_request(cache_salt=b"x"), M),
    "flag is an int": (bad_request(structured_output=1), M),
    "skip flag is None": (bad_request(skip_reading_prefix_cache=None), M),
    "items are a list": (bad_request(items=[MultiModalItem("cat", 0, 1)]), M),
    "item is a tuple": (bad_request(items=(("cat", 0, 1),)), M),
    "item without a name": (bad_request(items=(MultiModalItem("", 0, 1),)), M),
    "item with a negative offset": (bad_request(items=(MultiModalItem("cat", -1, 1),)), M),
    "item without tokens": (bad_request(items=(MultiModalItem("cat", 0, 0),)), R),
    "item beyond the prompt": (bad_request(items=(MultiModalItem("cat", 2, 2),)), R),
    "items overlap": (
        bad_request(items=(MultiModalItem("cat", 0, 2), MultiModalItem("dog", 1, 1))),
        R,
    ),
    "items unsorted": (
        bad_request(items=(MultiModalItem("cat", 2, 1), MultiModalItem("dog", 0, 1))),
        R,
    ),
    "item mask is a list": (bad_request(items=(MultiModalItem("cat", 0, 1, [True]),)), M),  # type: ignore[arg-type]
    "item mask of ints": (bad_request(items=(MultiModalItem("cat", 0, 1, (1,)),)), M),  # type: ignore[arg-type]
    "item mask too short": (bad_request(items=(MultiModalItem("cat", 0, 2, (True,)),)), R),
    "item without an embedding": (bad_request(items=(MultiModalItem("cat", 0, 1, (False,)),)), R),
    "offer of a string": (EncoderOffer("cat"), M),  # type: ignore[arg-type]
    "offer of a nameless item": (EncoderOffer(("",)), M),
    "repetition is a tuple": (bad_request(repetition_detection=(1, 2)), M),
    "repetition of strings": (bad_request(repetition_detection=RepetitionDetection("a")), M),  # type: ignore[arg-type]
    "repetition once": (bad_request(repetition_detection=RepetitionDetection(2, 1, 1)), R),
    "repetition sizes crossed": (bad_request(repetition_detection=RepetitionDetection(1, 2)), R),
    "id is taken": (bad_request(request_id="A"), RejectCode.DUPLICATE_REQUEST),
    "id is in flight": (bad_request(request_id="B"), RejectCode.REQUEST_IN_FLIGHT),
    "schedule with the pipeline full": (Schedule(), RejectCode.PIPELINE_FULL),
    "frame is a string": (Commit("0", ()), M),  # type: ignore[arg-type]
    "frame is negative": (Commit(-1, ()), M),
    "rows are a dict": (Commit(1, {"A": (1,)}), M),  # type: ignore[arg-type]
    "row is a tuple": (Commit(1, (("A", (1,)),)), M),  # type: ignore[arg-type]
    "row without a name": (answer(("", (1,)), B_ROW), M),
    "row with a negative token": (answer(("A", (-1,)), B_ROW), M),
    "frame committed already": (Commit(0, ()), RejectCode.UNKNOWN_FRAME),
    "frame of the future": (Commit(2, ()), RejectCode.UNKNOWN_FRAME),
    "no rows": (Commit(1, ()), RejectCode.BAD_RESULT),
    "a row is missing": (answer(B_ROW), RejectCode.BAD_RESULT),
    "a row is foreign": (answer(("A", (1,)), B_ROW, ("C", (1,))), RejectCode.BAD_RESULT),
    "a row comes twice": (answer(("A", (1,)), ("A", (1,))), RejectCode.BAD_RESULT),
    "no token for a row that samples": (answer(("A", ()), B_ROW), RejectCode.BAD_RESULT),
    "too many tokens": (answer(("A", (9, 9, 1, 1)), B_ROW), RejectCode.BAD_RESULT),
    "accepts a token that was no draft": (answer(("A", (8, 1)), B_ROW), RejectCode.BAD_RESULT),
    "the aborted row is wrong too": (answer(("A", (1,)), ("B", ())), RejectCode.BAD_RESULT),
    "drafts are None": (Drafts(None), M),  # type: ignore[arg-type]
    "resumable with an int": (bad_request(resumable=1), M),
    "drafts of a string": (Drafts(("A",)), M),  # type: ignore[arg-type]
    "too many drafts": (Drafts((RowTokens("A", (1, 1, 1)),)), RejectCode.BAD_DRAFTS),
    "drafts twice": (Drafts((RowTokens("A"), RowTokens("A"))), RejectCode.BAD_DRAFTS),
    "abort of a string": (Abort("A"), M),  # type: ignore[arg-type]
    "abort of a number": (Abort((1,)), M),  # type: ignore[arg-type]
    "abort of an empty id": (Abort(("",)), M),
    "grammar of an unknown request": (GrammarReady("nobody"), RejectCode.UNKNOWN_REQUEST),
    "grammar of a request without one": (GrammarReady("A"), RejectCode.NOT_STRUCTURED),
    "grammar of None": (GrammarReady(None), M),  # type: ignore[arg-type]
    "update of an unknown request": (
        StreamingUpdate(replace(GOOD, request_id="nobody")),
        RejectCode.UNKNOWN_REQUEST,
    ),
    "update of no session": (
        StreamingUpdate(replace(GOOD, request_id="A")),
        RejectCode.NOT_RESUMABLE,
    ),
    "update with None": (StreamingUpdate(None), M),  # type: ignore[arg-type]
    "fork while forks are off": (Fork("A", "a branch"), RejectCode.BAD_FORK),
    "fork of None": (Fork(None, "a branch"), M),  # type: ignore[arg-type]
    "pause with a string": (SetPause("paused_all"), M),  # type: ignore[arg-type]
    "pause with a bool": (SetPause(True), M),  # type: ignore[arg-type]
    "reset with an int": (Reset(1), M),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_rejected_and_changes_nothing(name: str) -> None:
    event, code = CASES[name]
    oracle = make_busy()
    result = oracle.apply(event)  # type: ignore[arg-type]
    assert isinstance(result, Rejected)
    assert result.code is code
    assert result.detail, "a rejection says what is wrong"
    assert oracle.state == get_busy_state()


def test_cases_cover_all_codes_that_other_tests_do_not() -> None:
    assert len(CASES) >= 40
    elsewhere = {RejectCode.NEVER_FITS, RejectCode.FRAME_OUT_OF_ORDER, RejectCode.GRAMMAR_BEHIND}
    elsewhere.add(RejectCode.FORK_IN_FLIGHT)
    assert {code for _, code in CASES.values()} >= set(RejectCode) - elsewhere


def test_a_request_that_never_fits_is_rejected_with_the_block_counts() -> None:
    oracle = Oracle(Config(num_blocks=4, block_size=2, max_model_len=64))
    result = oracle.apply(Submit(Request("A", (1, 2, 3), max_tokens=5)))
    assert result == Rejected(RejectCode.NEVER_FITS)
    assert isinstance(result, Rejected)
    assert result.detail == (
        "'A' may need 4 blocks, the pool has 3; lower max_tokens or add blocks"
    )
    fits = oracle.apply(Submit(Request("A", (1, 2, 3), max_tokens=4)))
    assert not isinstance(fits, Rejected)


BESIDE: dict[str, object] = {
    "encoder_compute_budget": 4,
    "encoder_cache_size": 4,
    "disable_chunked_mm_input": True,
    "is_encoder_decoder": True,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "max_model_len": 64,
}
N = RejectCode.NEVER_FITS
BOTH_4: dict[str, object] = {"encoder_compute_budget": 4, "encoder_cache_size": 4}
BOTH_9: dict[str, object] = {"encoder_compute_budget": 9, "encoder_cache_size": 9}
HEAD: dict[str, object] = {"spec_method": SpecMethod.EAGLE, "num_speculative_tokens": 1}
WHOLE: dict[str, object] = {"disable_chunked_mm_input": True}
CONFIGS: dict[str, dict[str, object]] = {
    "no usable block": {"num_blocks": 1},
    "negative blocks": {"num_blocks": -4},
    "blocks as float": {"num_blocks": 8.0},
    "blocks as bool": {"num_blocks": True},
    "block size zero": {"block_size": 0},
    "block size as string": {"block_size": "16"},
    "no seats": {"max_num_seqs": 0},
    "no budget": {"max_num_batched_tokens": 0},
    "model length one": {"max_model_len": 1},
    "threshold negative": {"long_prefill_token_threshold": -1},
    "speculation without a method": {"num_speculative_tokens": 2},
    "method without speculation": {"spec_method": SpecMethod.EAGLE},
    "method as string": {"spec_method": "eagle"},
    "policy as string": {"policy": "fcfs"},
    "caching as int": {"enable_prefix_caching": 1},
    "depth zero": {"max_frames_in_flight": 0},
    "compute for no cache": {"encoder_compute_budget": 4},
    "a cache without compute": {"encoder_cache_size": 4},
    "whole items without an encoder": {"disable_chunked_mm_input": True},
    "whole items where chunks end at blocks": {
        **WHOLE,
        "encoder_compute_budget": 4,
        "encoder_cache_size": 4,
        "groups": (KVGroup(GroupKind.FULL, 16), recurrent(16)),
    },
    "a decoder without an encoder": {"is_encoder_decoder": True},
    "cross attention without an encoder": {"groups": (KVGroup(GroupKind.CROSS_ATTENTION, 16),)},
    "encoder-decoder in chunks": {**BESIDE, "enable_chunked_prefill": True},
    "encoder-decoder with prefix caching": {**BESIDE, "enable_prefix_caching": True},
    "encoder-decoder with a threshold": {**BESIDE, "long_prefill_token_threshold": 2},
    "encoder-decoder with items in parts": {**BESIDE, "disable_chunked_mm_input": False},
    "whole prompts that fit no step": {"enable_chunked_prefill": False, "max_model_len": 9000},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bad_config_is_rejected_with_field_rule_and_fix(name: str) -> None:
    config = replace(Config(num_blocks=8), **CONFIGS[name])  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        initial_state(config)
    problems = caught.value.problems
    assert problems
    assert all(problem.field and problem.rule and problem.fix for problem in problems)
    assert str(problems[0]) in str(caught.value)


def test_an_encoder_decoder_model_may_have_an_encoder_cache() -> None:
    config = replace(Config(num_blocks=8), **BESIDE)  # type: ignore[arg-type]
    assert config_problems(config) == ()


CAT, DOG = MultiModalItem("cat", 1, 3), MultiModalItem("dog", 4, 3)
BIT = (False, True, False)


@pytest.mark.parametrize(
    ("changes", "items", "code", "sentence"),
    [
        ({}, (CAT, DOG), None, ""),
        ({}, (replace(DOG, offset=6),), R, "item 'dog' at 6 must lie inside the prompt"),
        ({}, (replace(CAT, length=5),), N, "item 'cat' at 1 must have 4 embeddings at most"),
        ({}, (replace(CAT, length=5, is_embed=(True,) * 4 + (False,)),), None, ""),
        ({"encoder_cache_size": 2}, (CAT,), N, "must have 2 embeddings at most"),
        ({"encoder_compute_budget": 2}, (replace(CAT, is_embed=BIT),), None, ""),
        (HEAD, (CAT, DOG), N, "and the next one have more than 4 embeddings, and are adjacent"),
        (HEAD, (CAT, replace(DOG, offset=5)), None, ""),
        (HEAD, (CAT, replace(DOG, identifier="cat")), None, ""),
        (HEAD, (CAT, replace(DOG, is_embed=BIT)), None, ""),
        ({}, (CAT, replace(CAT, offset=4)), None, ""),
        ({}, (CAT, replace(CAT, offset=4, length=2)), R, "has 2 embeddings, and 3 elsewhere: an"),
        (WHOLE | {"max_num_batched_tokens": 2}, (CAT,), N, "must have at most 2 tokens: a chunk"),
        (WHOLE | {"long_prefill_token_threshold": 2}, (CAT,), N, "must have at most 2 tokens"),
        (WHOLE | {"long_prefill_token_threshold": 3}, (CAT, DOG), None, ""),
        (BESIDE, (CAT,), R, "item 'cat' at 1 is not part of the prompt: use offset 0, and no mask"),
        (BESIDE, (replace(CAT, offset=0, length=4),), None, ""),
        (BESIDE, (replace(CAT, offset=0, is_embed=BIT),), R, "use offset 0, and no mask"),
        (BESIDE | BOTH_9, (replace(CAT, offset=0, length=9),), None, ""),
    ],
)
def test_an_item_that_the_encoder_can_never_take_is_rejected(
    changes: dict[str, object], items: tuple[MultiModalItem, ...], code: RejectCode, sentence: str
) -> None:
    config = replace(Config(num_blocks=8), **BOTH_4 | changes)  # type: ignore[arg-type]
    problem = item_problem(config, Request("A", (1,) * 8, items=items))
    assert (problem.code if problem else None) is code
    assert sentence in (problem.detail if problem else "")


def test_a_value_that_is_not_a_config_is_rejected() -> None:
    assert config_problems("config")[0].field == "config"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.lists(inner, max_size=2),
    max_leaves=4,
)
rows = st.builds(RowTokens, st.sampled_from(["A", "B", "G", ""]) | junk, junk)
events = st.one_of(
    junk,
    st.builds(Submit, junk | st.builds(Request, junk, junk, junk, junk, junk, junk)),
    st.builds(Commit, st.integers(-1, 3) | junk, junk | st.lists(rows, max_size=3).map(tuple)),
    st.builds(Drafts, junk | st.lists(rows, max_size=3).map(tuple)),
    st.builds(Abort, junk),
    st.builds(GrammarReady, junk),
    st.builds(StreamingUpdate, junk | st.builds(Request, st.sampled_from(["A", "B"]) | junk, junk)),
    st.builds(SetPause, junk),
    st.builds(Reset, junk),
)


@given(events)
def test_no_input_makes_the_spec_raise(event: object) -> None:
    state = get_busy_state()
    first, second = transition(state, event), transition(state, event)  # type: ignore[arg-type]
    assert first == second, "deterministic"
    assert state == get_busy_state(copy=1), "the state is a value"
