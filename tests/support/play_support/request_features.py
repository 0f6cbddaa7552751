"""Features of requests: plays with LoRA, grammars, sessions and items, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.impl.host import HostEngine
from blockstep.impl.host import state as c
from blockstep.spec.releases import Quirk, get_rules
from blockstep.spec.vocabulary import (
    Abort,
    Config,
    Drafts,
    EncoderInputs,
    EncoderOffer,
    EncoderReset,
    Event,
    FinishReason,
    Grammar,
    GrammarBitmask,
    GrammarFailed,
    GrammarOutput,
    GrammarReady,
    GroupKind,
    KVGroup,
    KVTransfers,
    MultiModalItem,
    Reset,
    RowTokens,
    Schedule,
    StreamingUpdate,
    Submit,
    TransfersReported,
)
from play_support.play import (
    CONFIG,
    Bend,
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
from play_support.scenes import AHEAD, DRAFTING, DRAFTING_AHEAD

X = request("X", 1, 2, 3, adapter="x")
Y = request("Y", 1, 2, 3, adapter="y")


def of_two_adapters() -> Play:
    return Play().do(Submit(X), Submit(Y), Schedule())


def capped_behind_its_back() -> Play:
    """The config has a cap on LoRA adapters that the engine ignores."""
    play = of_two_adapters()
    play.config = replace(play.config, max_loras=1)
    play.make_engine = uncapped
    return play


def held_prompt() -> Play:
    """Q waits with its prompt while X decodes."""
    config = replace(CONFIG, prefill_schedule_interval=3)
    play = Play(config, HostEngine).do(Submit(X)).run(1)
    return play.do(Submit(request("Q", 4, 5, 6)), Schedule())


def forget_the_wait(engine: Any) -> None:
    """Set the engine's count of steps since the last prompt to 0."""
    engine.requests.state.scalars[c.PREFILL_WAIT] = 0


def uncapped(config: Config) -> HostEngine:
    return HostEngine(replace(config, max_loras=0))


STEPS = Grammar((((1, 1), (2, 1)), ((3, 2), (4, 2)), ((1, 0),)))
"""The grammar accepts 1 or 2, then 3 or 4, then 1, and begins again."""
HELD = request("A", 1, 2, 3, max_tokens=9, structured_output=True, grammar=STEPS)


def held(config: Config = AHEAD) -> Play:
    """The grammar of A is ready, and its first step is planned."""
    return Play(config, SpecEngine).do(Submit(HELD), GrammarReady("A"), Schedule())


def held_and_committed() -> Play:
    return held().commit()


def held_and_drafted() -> Play:
    return held(DRAFTING).commit().do(Drafts((RowTokens("A", (3,)),)))


def drafted_beyond_its_grammar() -> Play:
    """The grammar accepts the first of two drafts."""
    return held(DRAFTING).commit().do(Drafts((RowTokens("A", (3, 3)),)))


def held_and_reset() -> Play:
    return held_and_committed().do(Reset(reset_running_requests=True))


def failed() -> Play:
    return held().do(GrammarFailed("A"))


def masked() -> Play:
    play = held()
    return play.do(GrammarBitmask(play.plans[0].frame_id))


def masked_with_drafts() -> Play:
    """The first of two drafts is right, and the grammar forbids the second."""
    play = Play(DRAFTING_AHEAD, SpecEngine)
    play.worker.acceptance = (1,)
    play.do(Submit(HELD), GrammarReady("A"), Schedule(), Schedule()).commit()
    frame_id = play.plans[0].frame_id
    play.do(GrammarBitmask(frame_id, play.worker.list_drafts(frame_id)))
    (row,) = masks_of(play.step)
    assert row.draft_token_ids[0] > 0 > row.draft_token_ids[1]
    return play


def masks_of(step: Step) -> Any:
    assert isinstance(step.observation, GrammarOutput)
    return step.observation.rows


def with_mask(step: Step, **fields: Any) -> Step:
    """Return the step with other fields in the row of A of the bitmask."""
    (row,) = masks_of(step)
    return observed(step, rows=(replace(row, **fields),))


OF_MASKS: list[Case] = [
    (
        "mask_has_the_rows_that_sample_under_a_grammar",
        masked,
        nothing,
        lambda s: observed(s, rows=()),
    ),
    (
        "mask_allows_what_the_grammar_does",
        masked,
        nothing,
        lambda s: with_mask(s, allowed=((1, 2, 3),)),
    ),
    (
        "mask_keeps_the_drafts_that_are_accepted",
        masked_with_drafts,
        nothing,
        lambda s: with_mask(s, draft_token_ids=(-1, -1)),
    ),
    (
        "nothing_behind_a_placeholder_is_unmasked",
        masked_with_drafts,
        nothing,
        lambda s: with_mask(s, allowed=(*masks_of(s)[0].allowed[:2], None)),
    ),
]
"""Wrong bitmasks, and the check of the worker that finds each."""


def resting() -> Play:
    """A session has stopped; it is idle and keeps its blocks."""
    session = request("A", 1, 2, 3, max_tokens=1, resumable=True)
    return Play(CONFIG, SpecEngine).do(Submit(session), Schedule()).commit()


def ended_at_rest() -> Play:
    return resting().do(StreamingUpdate(request("A", 0)))


CAT, DOG = MultiModalItem("cat", 0, 2), MultiModalItem("dog", 3, 2)


def encoding(budget: int = 2, size: int = 4) -> Play:
    """A has two items of two embeddings each; its first step encodes the first item."""
    config = replace(
        CONFIG,
        encoder_compute_budget=budget,
        encoder_cache_size=size,
    )
    pictured = request("A", 1, 2, 3, 4, 5, 6, items=(CAT, DOG))
    return Play(config, SpecEngine).do(Submit(pictured), Schedule())


def encoding_both() -> Play:
    """The first chunk of A reads both items."""
    return encoding(8, 4)


def amid_an_item() -> Play:
    config = replace(
        CONFIG, encoder_compute_budget=2, encoder_cache_size=4, max_num_batched_tokens=1
    )
    return Play(config, SpecEngine).do(Submit(request("A", 1, 2, 3, items=(CAT,))), Schedule())


def encoding_at_ease() -> Play:
    return encoding(4, 2)


def a_whole_item_waits() -> Play:
    """O takes two of the three tokens of a step; the item of A needs more than one token."""
    config = replace(
        CONFIG,
        max_num_batched_tokens=3,
        encoder_compute_budget=2,
        encoder_cache_size=2,
        disable_chunked_mm_input=True,
    )
    pictured = request("A", 1, 1, 1, items=(CAT,))
    return Play(config, SpecEngine).do(Submit(request("O", 9, 9)), Submit(pictured), Schedule())


def splitting_whole_items(engine: Any) -> None:
    """Give A that one token, as vLLM 0.19.1 does."""
    rules = get_rules(frozenset({Quirk.WHOLE_ITEMS_ARE_SPLIT}), engine.state.config)
    engine.state = replace(engine.state, rules=rules)


def with_inputs(*indices: int) -> Bend:
    """Return a bend: the plan encodes these items of A."""
    inputs = (EncoderInputs("A", indices),) if indices else ()
    return lambda step: observed(step, scheduled_encoder_inputs=inputs)


def with_encoder(step: Step, **fields: Any) -> Step:
    """Return the step with other fields in the encoder's state after it."""
    encoder = step.after.encoder
    assert encoder is not None
    return after(step, encoder=replace(encoder, **fields))


def with_entry(step: Step, **fields: Any) -> Step:
    """Return the step with other fields in the entry that the first step made."""
    encoder = step.after.encoder
    assert encoder is not None
    (entry,) = encoder.entries
    return with_encoder(step, entries=(replace(entry, **fields),))


ACROSS = KVGroup(GroupKind.CROSS_ATTENTION, 2)
BESIDE = replace(
    CONFIG,
    encoder_compute_budget=4,
    encoder_cache_size=4,
    is_encoder_decoder=True,
    disable_chunked_mm_input=True,
    enable_chunked_prefill=False,
    enable_prefix_caching=False,
    max_num_batched_tokens=CONFIG.max_model_len,
    groups=(KVGroup(GroupKind.FULL, 2), ACROSS),
)
OWL = MultiModalItem("owl", 0, 3)


def beginning_beside(config: Config = BESIDE) -> Play:
    """A reads by cross attention the item that this step encodes."""
    return Play(config, SpecEngine).do(Submit(request("A", 1, 2, 3, items=(OWL,))), Schedule())


def going_on_beside() -> Play:
    """A reads by cross attention what an earlier step has written."""
    return beginning_beside().commit().do(Schedule())


OF_ITEMS: list[Case] = [
    ("plan_stays_within_encoder_compute_budget", encoding, nothing, with_inputs(0, 1)),
    ("items_stay_within_encoder_cache_size", encoding_at_ease, nothing, with_inputs(0, 1)),
    ("encoded_item_is_of_its_request", encoding, nothing, with_inputs(0, 7)),
    ("item_is_made_once_in_a_plan", encoding_both, nothing, with_inputs(0, 1, 1)),
    ("item_that_a_row_reads_is_there", encoding, nothing, with_inputs()),
    ("row_ends_inside_of_no_whole_item", a_whole_item_waits, splitting_whole_items, same),
    (
        "encoder_decoder_items_are_dropped_with_the_next_plan",
        going_on_beside,
        nothing,
        lambda s: observed(s, free_encoder_mm_hashes=()),
    ),
]
"""Wrong plans of items, and the check of the worker that finds each."""
ALONE: list[Case] = [
    (
        "encoder_cache_adds_up",
        encoding,
        nothing,
        lambda s: with_encoder(s, num_free=9),
    ),
    (
        "encoder_cache_stays_within_its_size",
        encoding,
        nothing,
        lambda s: with_encoder(with_entry(s, num_embeds=9), num_free=-5, num_freeable=4),
    ),
    (
        "only_running_requests_hold_items",
        amid_an_item,
        nothing,
        lambda s: with_entry(s, holders=("A", "nobody")),
    ),
    (
        "session_keeps_all_but_its_last_token",
        resting,
        nothing,
        lambda s: changed(s, "A", num_streaming_updates=1),
    ),
    (
        "end_of_input_finishes_an_idle_session",
        ended_at_rest,
        nothing,
        lambda s: after(s, requests=s.before.requests),
    ),
    (
        "grammar_state_follows_outputs",
        held_and_committed,
        nothing,
        lambda s: changed(s, "A", grammar_state=0),
    ),
    (
        "attached_drafts_are_accepted_by_the_grammar",
        drafted_beyond_its_grammar,
        nothing,
        lambda s: changed(s, "A", spec_token_ids=(3, 3)),
    ),
    (
        "plan_flags_structured_output",
        held,
        nothing,
        lambda s: observed(s, has_structured_output_requests=False),
    ),
    (
        "failed_grammar_ends_its_request",
        failed,
        nothing,
        lambda s: first_output(s, finish_reason=FinishReason.ABORT),
    ),
    ("held_prompts_get_no_tokens", held_prompt, forget_the_wait, same),
    (
        "running_stays_within_max_loras",
        of_two_adapters,
        nothing,
        lambda s: replace(s, config=replace(s.config, max_loras=1)),
    ),
]


def encoding_and(*events: Event) -> Callable[[], Play]:
    """Return a play in which these events follow while A has an item in the encoder's cache."""
    return lambda: encoding().do(*events)


def encoding_and_answered() -> Play:
    return encoding().commit()


GIVEN_UP, EMPTIED = encoding_and(Abort(("A",))), encoding_and(Reset(reset_running_requests=True))
REPORTED = encoding_and(TransfersReported(KVTransfers()))
ENCODER_RESET, OFFERED = encoding_and(EncoderReset()), encoding_and(EncoderOffer(("cat",)))


def counted_wrong(step: Step) -> Step:
    return with_encoder(step, num_free=9)


def held_by_no_request(step: Step) -> Step:
    return with_entry(step, holders=("nobody",))


def elsewhere(step: Step) -> Step:
    """The state of A's grammar does not follow from its outputs."""
    return changed(step, "A", grammar_state=2)


EACH_KIND: list[tuple[str, Callable[[], Play], Bend]] = [
    *[("encoder_cache_adds_up", play, counted_wrong) for play in (GIVEN_UP, EMPTIED, REPORTED)],
    ("encoder_cache_adds_up", encoding_and_answered, counted_wrong),
    ("encoder_cache_adds_up", ENCODER_RESET, counted_wrong),
    *[
        ("only_running_requests_hold_items", play, held_by_no_request)
        for play in (GIVEN_UP, EMPTIED, REPORTED)
    ],
    ("only_running_requests_hold_items", encoding_and_answered, held_by_no_request),
    ("counters_grow_by_what_happened", OFFERED, counted),
    ("counters_grow_by_what_happened", ENCODER_RESET, counted),
    (
        "stale_or_wrong_event_is_rejected",
        OFFERED,
        lambda s: replace(s, event=EncoderOffer((1,))),  # type: ignore[arg-type]
    ),
    (
        "stale_or_wrong_event_is_rejected",
        encoding_and(Submit(request("B", 1, 2, 3, items=(CAT,)))),
        lambda s: replace(s, event=Submit(request("B", 1, 2, 3, items=(replace(CAT, length=1),)))),
    ),
    ("grammar_state_follows_outputs", held, elsewhere),
    ("grammar_state_follows_outputs", held_and_drafted, elsewhere),
    ("grammar_state_follows_outputs", held_and_reset, elsewhere),
    (
        "reported_cached_tokens_are_of_the_first_hit",
        failed,
        lambda s: first_output(s, num_cached_tokens=2),
    ),
]
"""Wrong steps of the other kinds of events that these checks read."""
OF_ANSWERS: list[Case] = [
    ("plan_stays_within_max_loras", capped_behind_its_back, nothing, lambda s: s),
]
