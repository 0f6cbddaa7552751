"""Features of requests in vLLM: adapters, sessions, grammars and encoder inputs.

Each test sends events to the adapter alone, and checks plans, answers and snapshots.
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
needs_masks = needs(RELEASE.has_frame_masks, "the release has no bitmasks of frames")
needs_encoder = needs(
    RELEASE.has_encoder, "the adapter does not follow the release's encoder cache"
)
needs_offers = needs(RELEASE.has_offers, "the release has no offers of encoder outputs")
XGRAMMAR = "blockstep.conformance.engines.adapters.vllm_xgrammar:XgrammarEngine"


class EngineDriver:
    """An engine, with a short method for each event."""

    def __init__(self, config: v.Config, name: str = "vllm") -> None:
        engine: Any = load_engine(name)(config)
        self.engine = engine
        self.scheduler = engine.run.scheduler

    def submit(self, name: str, *tokens: int, **fields: Any) -> None:
        """Submit a request."""
        self.engine.apply(v.Submit(v.Request(name, tokens, **fields)))

    def update(self, name: str, *tokens: int, **fields: Any) -> v.Observation:
        """Continue a session, or end it if there are no tokens."""
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
        """Return why the adapter declines an event; empty if it does not."""
        return self.engine.declines(event) or ""

    def commit(self, frame_id: int, **sampled: tuple[int, ...]) -> tuple[v.OutputRow, ...]:
        """Commit the sampled tokens of a frame."""
        rows = tuple(v.RowTokens(name, tokens) for name, tokens in sampled.items())
        outputs: v.Outputs = self.engine.apply(v.Commit(frame_id, rows))
        return outputs.rows

    def mask(self, frame_id: int, **drafts: tuple[int, ...]) -> tuple[v.GrammarRow, ...]:
        """Return the bitmask rows of a frame; `drafts` are the tokens of its placeholders."""
        rows = tuple(v.RowTokens(name, tokens) for name, tokens in drafts.items())
        output: v.GrammarOutput = self.engine.apply(v.GrammarBitmask(frame_id, rows))
        return output.rows

    @property
    def state(self) -> v.Snapshot:
        """Return a snapshot of the engine."""
        shown: v.Snapshot = self.engine.snapshot()
        return shown

    def request(self, name: str) -> v.RequestSnapshot:
        """Return the snapshot of a request."""
        found = self.state.request(name)
        assert found is not None
        return found


def rows_of(plan: v.Plan) -> dict[str, int]:
    """Return the number of scheduled tokens of each request in a plan."""
    return {row.request_id: row.num_scheduled_tokens for row in plan.rows}


# Adapters.


PIPELINE: dict[str, Any] = {"max_frames_in_flight": 2}


@needs_reference
def test_a_plan_that_would_admit_too_many_adapters_is_declined_and_raises() -> None:
    """A has no row while it waits for its token, and B takes its LoRA slot."""
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
def test_a_plan_that_skips_a_request_that_a_frame_may_end_is_declined() -> None:
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
def test_a_plan_with_a_session_that_a_frame_may_stop_is_declined() -> None:
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
def test_a_reset_that_preempts_a_session_that_may_stop_is_declined() -> None:
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
def test_a_forced_reset_with_an_idle_session_is_declined() -> None:
    driver = EngineDriver(v.Config(num_blocks=20))
    driver.submit("A", 1, 2, max_tokens=1, resumable=True)
    driver.plan()
    driver.commit(0, A=(7,))
    reset = v.Reset(reset_running_requests=True)
    assert "holds blocks" in driver.declines(reset)
    with pytest.raises(RuntimeError, match="Failed to reset"):
        driver.engine.apply(reset)


@needs_reference
def test_a_session_whose_stop_leaves_placeholders_is_declined() -> None:
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
def test_a_plan_that_pads_a_session_past_the_threshold_is_declined() -> None:
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
def test_an_input_that_changes_the_order_of_the_heap_is_declined() -> None:
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
def test_drafts_within_which_a_session_stops_are_declined() -> None:
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
"""Token 2 any number of times, then 1, then 3; then the grammar is terminated."""


@needs_reference
def test_masks_of_drafts_after_a_missed_end_of_reasoning_are_declined() -> None:
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
    assert not driver.request("A").reasoning_ended  # the release looks at the last token only
    driver.plan()
    assert driver.plan().preempted_req_ids == ("A",)
    assert driver.declines(v.GrammarBitmask(2, (v.RowTokens("A", (1, 3)),))) == ""
    mask = v.GrammarBitmask(2, (v.RowTokens("A", (1, 7)),))
    assert "overlooked" in driver.declines(mask)
    with pytest.raises(AssertionError):
        driver.engine.apply(mask)


@needs_masks
def test_a_grammar_that_allows_every_token_has_no_bitmask_rows() -> None:
    driver = EngineDriver(v.Config(num_blocks=20))
    driver.submit("A", 5, 6, structured_output=True)
    driver.engine.apply(v.GrammarReady("A"))
    assert not driver.plan().has_structured_output_requests
    assert driver.mask(0) == ()
    driver.commit(0, A=(1000,))


@needs_reference
def test_a_failed_grammar_on_which_the_release_raises_is_declined() -> None:
    driver = EngineDriver(v.Config(num_blocks=20))
    driver.submit("A", 5, 6, structured_output=True, grammar=ABC)
    assert driver.engine.declines(v.GrammarFailed("A")) is not None
    assert driver.engine.apply(v.GrammarFailed("A")) == v.Outputs(())
    with pytest.raises(ValueError, match="the grammar of 'A' is none"):
        driver.plan()


@needs_newest
def test_a_failed_grammar_that_ends_its_request_late_is_declined() -> None:
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
def test_xgrammar_allows_the_tokens_of_the_grammar_automaton() -> None:
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
def test_a_grammar_that_xgrammar_cannot_express_is_declined() -> None:
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
"""Twelve tokens."""


@needs(RELEASE.has_encoder and not RELEASE.has_offers, "the release's encoder cache lacks nothing")
def test_features_that_a_plain_encoder_cache_lacks_are_declined() -> None:
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
def test_more_items_than_a_set_keeps_in_order_are_declined() -> None:
    driver = has_encoder(8, 8)
    items = tuple(shows("cat", index, 1) for index in range(9))
    text = tuple(range(1, 12))
    assert "order of a set" in driver.declines(v.Submit(v.Request("A", text, items=items)))
    assert driver.declines(v.Submit(v.Request("A", text, items=items[:8]))) == ""


def build_encoder_decoder_driver() -> EngineDriver:
    """An engine of an encoder-decoder model."""
    return has_encoder(
        8, 8, enable_chunked_prefill=False, enable_prefix_caching=False, is_encoder_decoder=True,
        disable_chunked_mm_input=True, block_size=2,
        groups=(
            v.KVGroup(v.GroupKind.FULL, 2), v.KVGroup(v.GroupKind.CROSS_ATTENTION, 2),
        ),
    )  # fmt: skip


@needs_offers
def test_offers_of_encoder_outputs_with_cross_attention_are_declined() -> None:
    driver = build_encoder_decoder_driver()
    offer = v.EncoderOffer(("cat",))
    assert driver.declines(v.EncoderOffer(())) == ""
    assert "no cross-attention block" in driver.declines(offer)
    driver.engine.apply(offer)
    driver.submit("A", 1, 2, 3, items=(shows("cat", 0, 6),))
    assert driver.plan().new[0].block_ids == ((1, 2), ())
