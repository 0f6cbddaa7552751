"""What requests bring to a vLLM release: adapters, sessions, grammars and encoder inputs.

Each test hands events to the adapter alone, and looks at what the release plans, answers and shows.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm_support.installed import RELEASE, needs, needs_newest, needs_reference, needs_vllm, quiet

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import vocabulary as v

pytestmark = [
    quiet,
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),  # of xgrammar
    needs_vllm,
]
needs_sessions = needs(RELEASE.has_sessions, "the release has no sessions")
needs_masks = needs(RELEASE.has_frame_masks, "the release has no such masks")
needs_encoder = needs(RELEASE.has_encoder, "the release's is not followed")
needs_offers = needs(RELEASE.has_offers, "the release has none of it")
XGRAMMAR = "blockstep.conformance.engines.adapters.vllm_xgrammar:XgrammarEngine"


class EngineDriver:
    """An engine, and what it is asked in a line."""

    def __init__(self, config: v.Config, name: str = "vllm") -> None:
        engine: Any = load_engine(name)(config)
        self.engine = engine
        self.scheduler = engine.run.scheduler

    def submit(self, name: str, *tokens: int, **fields: Any) -> None:
        """Hand in a request."""
        self.engine.apply(v.Submit(v.Request(name, tokens, **fields)))

    def update(self, name: str, *tokens: int, **fields: Any) -> v.Observation:
        """Go on with a session; without tokens: end it."""
        fields.setdefault("resumable", bool(tokens))
        answer: v.Observation = self.engine.apply(
            v.StreamingUpdate(v.Request(name, tokens or (0,), **fields))
        )
        return answer

    def plan(self) -> v.Plan:
        """Plan a step."""
        plan: v.Plan = self.engine.apply(v.Schedule())
        return plan

    def declines(self, event: v.Event) -> str:
        """Why an event would not be given to it; empty if it would."""
        return self.engine.declines(event) or ""

    def commit(self, frame_id: int, **sampled: tuple[int, ...]) -> tuple[v.OutputRow, ...]:
        """Answer a plan."""
        rows = tuple(v.RowTokens(name, tokens) for name, tokens in sampled.items())
        outputs: v.Outputs = self.engine.apply(v.Commit(frame_id, rows))
        return outputs.rows

    def mask(self, frame_id: int, **drafts: tuple[int, ...]) -> tuple[v.GrammarRow, ...]:
        """What a frame may sample; the drafts are those that its placeholders stand for."""
        rows = tuple(v.RowTokens(name, tokens) for name, tokens in drafts.items())
        output: v.GrammarOutput = self.engine.apply(v.GrammarBitmask(frame_id, rows))
        return output.rows

    @property
    def state(self) -> v.Snapshot:
        """All of it now."""
        shown: v.Snapshot = self.engine.snapshot()
        return shown

    def request(self, name: str) -> v.RequestSnapshot:
        """A request as it stands."""
        found = self.state.request(name)
        assert found is not None
        return found


def rows_of(plan: v.Plan) -> dict[str, int]:
    """Who has how many tokens in a plan."""
    return {row.request_id: row.num_scheduled_tokens for row in plan.rows}


# Adapters.


PIPELINE: dict[str, Any] = {"max_frames_in_flight": 2}


@needs_reference
def test_a_plan_that_would_admit_too_many_adapters_is_declined_and_raises() -> None:
    """A runs without a row while it waits for its token, and B takes its seat."""
    driver = EngineDriver(v.Config(num_blocks=20, max_loras=1, **PIPELINE))
    driver.submit("A", 1, max_tokens=3, adapter="x")
    driver.submit("B", 1, max_tokens=3, adapter="y")
    driver.plan()
    assert rows_of(driver.plan()) == {"B": 1}
    driver.commit(0, A=(7,))
    assert driver.declines(v.Schedule()) == ""  # B has no row: it waits for its token
    driver.commit(1, B=(7,))
    assert "more adapters" in driver.declines(v.Schedule())
    with pytest.raises(AssertionError):
        driver.plan()


@needs_reference
def test_a_request_that_may_end_while_passed_over_is_not_planned_past_as_it_would_stay_queued() -> (
    None
):
    driver = EngineDriver(v.Config(num_blocks=3, block_size=1, max_loras=1, **PIPELINE))
    driver.submit("A", 1, max_tokens=2, adapter="y")
    driver.plan()
    driver.submit("B", 1, max_tokens=1, adapter="x")
    driver.plan()
    driver.engine.apply(v.Reset(reset_running_requests=True))
    driver.commit(0, A=(7,))
    assert "skipped for its adapter" in driver.declines(v.Schedule())
    driver.plan()
    driver.commit(1, B=(7,))
    with pytest.raises(EngineFault, match="names 'B', which is gone"):
        _ = driver.state


# Sessions.


@needs_reference
def test_a_session_that_a_frame_in_flight_may_stop_is_not_planned_for_it_would_stop_twice() -> None:
    driver = EngineDriver(v.Config(num_blocks=20, async_scheduling=True, **PIPELINE))
    driver.submit("A", 1, 1, max_tokens=5, stop_token_ids=(1,), resumable=True)
    driver.plan()
    assert "stops once more" in driver.declines(v.Schedule())
    driver.plan()
    driver.commit(0, A=(1,))
    driver.commit(1, A=(1,))
    with pytest.raises(EngineFault, match="name 'A' 2 times"):
        _ = driver.state


@needs_reference
def test_a_session_that_stops_while_preempted_is_lost_and_a_reset_is_declined() -> None:
    driver = EngineDriver(v.Config(num_blocks=20))
    driver.submit("A", 1, 2, max_tokens=1, resumable=True)
    driver.update("A", 3, 4)
    driver.plan()
    reset = v.Reset(reset_running_requests=True)
    assert "while preempted" in driver.declines(reset)
    driver.engine.apply(reset)
    driver.commit(0, A=(7,))
    assert driver.request("A").status is v.Status.WAITING
    assert driver.state.waiting == driver.state.skipped_waiting == ()


@needs_reference
def test_a_forced_reset_raises_where_a_session_rests() -> None:
    driver = EngineDriver(v.Config(num_blocks=20))
    driver.submit("A", 1, 2, max_tokens=1, resumable=True)
    driver.plan()
    driver.commit(0, A=(7,))
    reset = v.Reset(reset_running_requests=True)
    assert "holds blocks" in driver.declines(reset)
    with pytest.raises(RuntimeError, match="Failed to reset"):
        driver.engine.apply(reset)


@needs_reference
def test_a_session_keeps_what_its_stop_trimmed_promised_and_is_declined() -> None:
    drafts: dict[str, Any] = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 1}
    driver = EngineDriver(v.Config(num_blocks=20, async_scheduling=True, **PIPELINE, **drafts))
    asked = v.Request("A", (1, 2), max_tokens=2, resumable=True)
    assert "stay counted as placeholders" in driver.declines(v.Submit(asked))
    driver.engine.apply(v.Submit(asked))
    driver.plan()
    driver.commit(0, A=(7,))
    driver.plan()
    driver.commit(1, A=(7, 7))
    assert driver.request("A").num_output_placeholders == 1


@needs_newest
def test_a_session_with_one_token_to_compute_is_padded_past_the_threshold_and_declined() -> None:
    drafts: dict[str, Any] = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 1}
    driver = EngineDriver(
        v.Config(num_blocks=9, block_size=4, long_prefill_token_threshold=1, **drafts)
    )
    driver.submit("A", 1, 2, max_tokens=1, resumable=True)
    driver.plan()
    driver.commit(0, A=(7,))
    driver.update("A", 3)
    driver.submit("B", 1, 2)  # a single request has no threshold
    assert "threshold" in driver.declines(v.Schedule())
    with pytest.raises(AssertionError):
        driver.plan()


@needs_sessions
def test_a_chunk_that_changes_its_place_in_a_heap_is_declined_as_it_is_not_sorted_again() -> None:
    driver = EngineDriver(v.Config(num_blocks=20, policy=v.Policy.PRIORITY))
    for name, arrival in (("A", 1), ("B", 2)):
        driver.submit(name, 1, 2, max_tokens=1, arrival_time=arrival, resumable=True)
    driver.plan()
    driver.commit(0, A=(7,), B=(7,))
    later = v.StreamingUpdate(v.Request("A", (3,), arrival_time=5, resumable=True))
    assert "heap" in driver.declines(later)
    driver.engine.apply(later)
    driver.update("B", 3, arrival_time=2)
    assert [row.request_id for row in driver.plan().new] == ["A", "B"]


@needs_reference
def test_a_session_that_stops_amid_its_drafts_cannot_go_on() -> None:
    driver = EngineDriver(
        v.Config(num_blocks=20, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=4)
    )
    driver.submit("A", 1, max_tokens=2, resumable=True)
    driver.update("A", 2, 3)
    driver.plan()
    driver.commit(0, A=(7,))
    drafts = v.Drafts((v.RowTokens("A", (7, 7, 7, 7)),))
    assert "amid them" in driver.declines(drafts)
    driver.engine.apply(drafts)
    driver.plan()
    driver.commit(1, A=(7, 7, 7, 7, 7))
    with pytest.raises(AssertionError):
        driver.plan()


# Grammars.

ABC = v.Grammar((((1, 1), (2, 0)), ((3, 2),), ()))
"""2 as often as one likes, then 1, then 3; then it is terminated."""


@needs_reference
def test_drafts_behind_an_end_of_reasoning_that_was_overlooked_are_declined_and_assert() -> None:
    drafts: dict[str, Any] = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 2}
    driver = EngineDriver(
        v.Config(
            num_blocks=9, block_size=1, async_scheduling=True, reasoning_end_token_id=9,
            **PIPELINE, **drafts,
        )
    )  # fmt: skip
    driver.submit("A", 5, max_tokens=9, structured_output=True, grammar=ABC)
    driver.engine.apply(v.GrammarReady("A"))
    driver.plan()
    driver.commit(0, A=(7,))
    driver.plan()
    driver.commit(1, A=(9, 7, 7))
    assert not driver.request("A").reasoning_ended  # it looks at the last token only
    driver.plan()
    assert driver.plan().preempted_req_ids == ("A",)
    assert driver.declines(v.GrammarBitmask(2, (v.RowTokens("A", (1, 3)),))) == ""
    mask = v.GrammarBitmask(2, (v.RowTokens("A", (1, 7)),))
    assert "overlooked" in driver.declines(mask)
    with pytest.raises(AssertionError):
        driver.engine.apply(mask)


@needs_masks
def test_a_grammar_that_allows_everything_has_no_rows() -> None:
    driver = EngineDriver(v.Config(num_blocks=20))
    driver.submit("A", 5, 6, structured_output=True)
    driver.engine.apply(v.GrammarReady("A"))
    assert not driver.plan().has_structured_output_requests
    assert driver.mask(0) == ()
    driver.commit(0, A=(1000,))


@needs_reference
def test_a_grammar_that_fails_is_declined_and_kills_the_release() -> None:
    driver = EngineDriver(v.Config(num_blocks=20))
    driver.submit("A", 5, 6, structured_output=True, grammar=ABC)
    assert driver.engine.declines(v.GrammarFailed("A")) is not None
    assert driver.engine.apply(v.GrammarFailed("A")) == v.Outputs(())
    with pytest.raises(ValueError, match="the grammar of 'A' is none"):
        driver.plan()


@needs_newest
def test_a_grammar_that_fails_ends_its_request_some_answers_later_and_is_declined() -> None:
    driver = EngineDriver(v.Config(num_blocks=20))
    driver.submit("A", 5, 6, structured_output=True, grammar=ABC)
    driver.submit("B", 5, 6)
    assert "later step" in driver.declines(v.GrammarFailed("A"))
    assert driver.engine.apply(v.GrammarFailed("A")) == v.Outputs(())
    driver.plan()
    with pytest.raises(EngineFault, match="names 'A', which is not in this frame"):
        driver.commit(0, B=(7,))
    assert driver.state.request("A") is None


ENDS_WITH_2 = v.Grammar((((1, 1), (3, 0)), ((2, 2), (4, 0)), ()))


@needs_masks
def test_a_backend_of_the_release_masks_like_the_automaton_that_its_grammar_was_made_of() -> None:
    driver = EngineDriver(v.Config(num_blocks=20), XGRAMMAR)
    driver.submit("A", 5, 6, structured_output=True, grammar=ENDS_WITH_2)
    driver.engine.apply(v.GrammarReady("A"))
    seen = []
    for frame_id, token in enumerate((3, 1, 2, 8)):
        driver.plan()
        (row,) = driver.mask(frame_id)
        driver.commit(frame_id, A=(token,))
        seen.append((row.allowed[0], driver.request("A").grammar_state))
    assert seen == [((1, 3), 0), ((1, 3), 1), ((2, 4), 2), (None, 2)]
    structured = driver.scheduler.requests["A"].structured_output_request
    assert type(structured.grammar.inner).__name__ == "XgrammarGrammar"


@needs_masks
def test_a_grammar_that_ends_otherwise_is_not_for_that_backend() -> None:
    driver = EngineDriver(v.Config(num_blocks=20), XGRAMMAR)
    asked = v.Request("A", (5, 6), structured_output=True, grammar=ABC)
    assert "cannot be given" in driver.declines(v.Submit(asked))
    assert "has none" in driver.declines(v.Submit(v.Request("A", (5,), structured_output=True)))
    stopped = v.Request(
        "A", (5,), structured_output=True, grammar=ENDS_WITH_2, stop_token_ids=(3,), eos_token_id=2
    )
    is_left_out = "end of the output" in driver.declines(v.Submit(stopped))
    assert is_left_out is RELEASE.hands_stops_over


# Encoder inputs.


def shows(name: str, offset: int, length: int = 4, **fields: Any) -> v.MultiModalItem:
    """An item."""
    return v.MultiModalItem(name, offset, length, **fields)


def has_encoder(budget: int, size: int, **fields: Any) -> EngineDriver:
    """An engine with an encoder."""
    fields.setdefault("num_blocks", 40)
    return EngineDriver(v.Config(encoder_compute_budget=budget, encoder_cache_size=size, **fields))


TEXT = tuple(range(1, 13))
"""Of twelve tokens."""


@needs(RELEASE.has_encoder and not RELEASE.has_offers, "the release's encoder cache has it all")
def test_what_a_plain_encoder_cache_lacks_is_declined() -> None:
    driver = has_encoder(8, 8)
    item = shows("cat", 1, is_embed=(True, False, False, True))
    for event, lack in (
        (v.Submit(v.Request("A", TEXT, items=(item,))), "counts positions"),
        (v.EncoderOffer(("cat",)), "elsewhere"),
        (v.EncoderReset(), "no reset"),
    ):
        assert lack in driver.declines(event)
    assert driver.declines(v.Submit(v.Request("A", TEXT, items=(shows("cat", 1),)))) == ""
    across = has_encoder(8, 8, is_encoder_decoder=True, enable_chunked_prefill=False)
    assert "encoder-decoder" in across.declines(v.Submit(v.Request("A", TEXT)))


@needs_encoder
def test_items_beyond_what_a_set_has_in_order_are_declined() -> None:
    driver = has_encoder(8, 8)
    items = tuple(shows("cat", index, 1) for index in range(9))
    text = tuple(range(1, 12))
    assert "order of a set" in driver.declines(v.Submit(v.Request("A", text, items=items)))
    assert driver.declines(v.Submit(v.Request("A", text, items=items[:8]))) == ""


def has_blocks_across() -> EngineDriver:
    """An engine of an encoder-decoder model."""
    return has_encoder(
        8, 8, enable_chunked_prefill=False, enable_prefix_caching=False, is_encoder_decoder=True,
        disable_chunked_mm_input=True, block_size=2,
        groups=(
            v.KVGroup(v.GroupKind.FULL, 2), v.KVGroup(v.GroupKind.CROSS_ATTENTION, 2),
        ),
    )  # fmt: skip


@needs_offers
def test_what_is_loaded_has_no_blocks_across_so_nothing_is_offered_there() -> None:
    driver = has_blocks_across()
    offer = v.EncoderOffer(("cat",))
    assert driver.declines(v.EncoderOffer(())) == ""
    assert "no cross-attention block" in driver.declines(offer)
    driver.engine.apply(offer)
    driver.submit("A", 1, 2, 3, items=(shows("cat", 0, 6),))
    assert driver.plan().new[0].block_ids == ((1, 2), ())
