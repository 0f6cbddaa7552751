"""Quirks of grammars: bitmasks of releases, and the token at which they end reasoning."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockstep.spec import Config, Grammar, Oracle, Request, SpecMethod
from blockstep.spec.features.structured_output.grammar import GRAMMAR, GrammarState
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.profiles import Profile, Quirk
from blockstep.spec.vocabulary import GrammarRow

EOS = 9
ONE_TWO = Grammar((((1, 1), (EOS, 2)), ((2, 0),), ()))
CONFIG = Config(num_blocks=20, block_size=2, max_model_len=24, max_num_batched_tokens=16)
DRAFTING = replace(CONFIG, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
ASYNC = replace(DRAFTING, async_scheduling=True, max_frames_in_flight=2)
REASONING = replace(DRAFTING, reasoning_end_token_id=7)
WITH_ITS_STEP = Quirk.REASONING_ENDS_WITH_ITS_STEP
AT_THE_LAST = Quirk.REASONING_ENDS_AT_THE_LAST_TOKEN


def begin(config: Config, quirks: set[Quirk], *prompts: tuple[int, ...]) -> Oracle:
    """Return an oracle with requests A, B of these prompts, whose grammars are compiled."""
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    for name, prompt in zip("AB", prompts, strict=False):
        request = Request(name, prompt, 12, structured_output=True, grammar=ONE_TWO)
        oracle.submit(request)
        oracle.grammar_ready(name)
    return oracle


@pytest.mark.parametrize("quirk", [False, True])
def test_forbidden_draft_unmasks_later_positions(quirk: bool) -> None:
    oracle = begin(ASYNC, {Quirk.FORBIDDEN_DRAFT_UNMASKS_LATER_POSITIONS} if quirk else set(), (5,))
    first, second = oracle.schedule(), oracle.schedule()
    oracle.commit(first, {"A": (1,)})
    (row,) = oracle.mask(second, {"A": (3, 3)})
    behind = None if quirk else (2,)
    assert row == GrammarRow("A", ((2,), behind, behind), (-1, -1))


@pytest.mark.parametrize("quirk", [False, True])
def test_mask_has_the_rows_that_sample_now(quirk: bool) -> None:
    config = replace(CONFIG, max_num_batched_tokens=2, max_frames_in_flight=2)
    quirks = {Quirk.MASK_HAS_THE_ROWS_THAT_SAMPLE_NOW} if quirk else set()
    oracle = begin(config, quirks, (5,), (6, 6))
    first = oracle.schedule()
    assert [row.request_id for row in oracle.mask(first)] == ["A"]
    oracle.schedule()
    named = [row.request_id for row in oracle.mask(first)]
    assert named == (["A", "B"] if quirk else ["A"])
    oracle.commit(first, {"A": (1,)})
    assert get_broken_invariants(oracle.state) == ()


@pytest.mark.parametrize("quirk", [False, True])
def test_mask_may_have_rows_in_a_frame_without_structured_output(quirk: bool) -> None:
    config = replace(CONFIG, max_num_batched_tokens=2, max_frames_in_flight=2)
    oracle = Oracle(
        config,
        Profile("some", frozenset({Quirk.MASK_HAS_THE_ROWS_THAT_SAMPLE_NOW} if quirk else ())),
    )
    oracle.submit(Request("A", (5,), 12, structured_output=True))
    oracle.submit(Request("B", (6, 6), 12, structured_output=True, grammar=ONE_TWO))
    oracle.grammar_ready("A")
    oracle.grammar_ready("B")
    first = oracle.schedule()
    assert not first.has_structured_output_requests, "no row of the plan has a grammar to follow"
    assert oracle.mask(first) == ()
    oracle.schedule()
    assert [row.request_id for row in oracle.mask(first)] == (["B"] if quirk else [])


@pytest.mark.parametrize("quirk", [False, True])
def test_reasoning_ends_with_its_step(quirk: bool) -> None:
    oracle = begin(REASONING, {WITH_ITS_STEP} if quirk else set(), (5,))
    oracle.commit(oracle.schedule(), {"A": (4,)})
    oracle.propose({"A": (7, 2)})
    plan = oracle.schedule()
    (row,) = oracle.mask(plan)
    if not quirk:
        assert row == GrammarRow("A", (None, (1, EOS)), (7,))
        return
    assert row == GrammarRow("A", (None, None, None), (7, 2))
    oracle.commit(plan, {"A": (7, 2, 2)})
    assert GRAMMAR.of(oracle.state.requests["A"]) == GrammarState(0, reasoning_ended=True)
    assert get_broken_invariants(oracle.state) == ("is_every_grammar_in_step",)


@pytest.mark.parametrize("other", [set(), {WITH_ITS_STEP}])
@pytest.mark.parametrize("quirk", [False, True])
def test_reasoning_ends_at_the_last_token(quirk: bool, other: set[Quirk]) -> None:
    oracle = begin(REASONING, other | ({AT_THE_LAST} if quirk else set()), (5,))
    oracle.commit(oracle.schedule(), {"A": (4,)})
    oracle.propose({"A": (7,)})
    oracle.commit(oracle.schedule(), {"A": (7, 1)})
    assert GRAMMAR.of(oracle.state.requests["A"]).reasoning_ended is not quirk
    oracle.commit(oracle.schedule(), {"A": (7,) if quirk else (2,) if not other else (1,)})
    assert GRAMMAR.of(oracle.state.requests["A"]).reasoning_ended, (
        "it was the last token of its step"
    )


@pytest.mark.parametrize("quirk", [False, True])
def test_reasoning_of_a_preempted_request_is_searched_from_the_start(quirk: bool) -> None:
    quirks = {WITH_ITS_STEP, AT_THE_LAST} if quirk else set()
    oracle = begin(replace(ASYNC, reasoning_end_token_id=7), quirks, (5,))
    oracle.commit(oracle.schedule(), {"A": (4,)})
    plan = oracle.schedule()
    oracle.mask(plan, {"A": (7, 1)})
    oracle.commit(plan, {"A": (7, 1, 1)} if quirk else {"A": (7, 1, 2)})
    assert GRAMMAR.of(oracle.state.requests["A"]).reasoning_ended is not quirk
    plan = oracle.schedule()
    oracle.reset(reset_running_requests=True)
    (row,) = oracle.mask(plan, {"A": (1, 2)})
    if quirk:
        assert row == GrammarRow("A", ((1, EOS), (2,), (1, EOS)), (1, 2)), "from the beginning"
    assert GRAMMAR.of(oracle.state.requests["A"]).reasoning_ended
