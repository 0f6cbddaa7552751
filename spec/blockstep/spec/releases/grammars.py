"""Grammars: quirks of releases with bitmasks, and with the end of reasoning."""

from __future__ import annotations

from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.endings import compute_stop
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import Frame, FrameRow, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features import structured_output as masks
from blockstep.spec.features.sessions import UPDATES, get_num_kept
from blockstep.spec.features.structured_output import grammar as automaton
from blockstep.spec.features.structured_output.grammar import (
    GRAMMAR,
    Follow,
    GrammarState,
    get_states,
    holds,
)
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import (
    Config,
    Grammar,
    GrammarBitmask,
    GrammarOutput,
    Rejected,
    TokenId,
    TokenIds,
)


def forbidden_draft_unmasks_later_positions(rules: Rules, _config: Config) -> Rules:
    """Positions after a draft that the grammar forbids have a full mask."""

    def get_mask(
        config: Config, grammar: Grammar, current: GrammarState, drafts: TokenIds, follow: Follow
    ) -> tuple[TokenIds | None, ...]:
        allowed = rules[automaton.get_mask](config, grammar, current, drafts, follow)
        num_read = len(get_states(config, grammar, current, drafts, follow))
        return (*allowed[:num_read], *[None] * (len(allowed) - num_read))

    return rules.replacing(automaton.get_mask, get_mask)


def mask_has_the_rows_that_sample_now(rules: Rules, _config: Config) -> Rules:
    """A bitmask has the rows that sample when it is made, not those of its frame's plan."""
    hooks = replace(rules.hooks, frames=(*rules.hooks.frames, fill_structured))
    return replace(rules, hooks=hooks).replacing(masks.list_masked, list_masked)


IS_STRUCTURED: Final = Part("is_structured", False)
"""Whether a row of a frame samples for a request with structured output."""


def fill_structured(step: Step, frame: Frame) -> Frame:
    """Return a frame with whether a row samples for a request with structured output."""
    sampling = [step.requests[row.request_id].request for row in frame.rows if row.samples]
    return IS_STRUCTURED.put(frame, any(request.structured_output for request in sampling))


def list_masked(state: State, frame: Frame) -> list[FrameRow]:
    """Modified `structured_output.list_masked`: those of requests with a grammar that decode by
    now."""
    rows = [row for row in frame.rows if row.request_id in state.requests]
    requests = [state.requests[row.request_id] for row in rows]
    return [
        row
        for row, request in zip(rows, requests, strict=True)
        if IS_STRUCTURED.of(frame)
        and request.request.grammar is not None
        and not request.is_prefill_chunk
    ]


def reasoning_ends_with_its_step(rules: Rules, _config: Config) -> Rules:
    """The grammar does not apply to the rest of the step in which reasoning ends.

    Nor do these tokens advance the grammar.
    """

    def get_next(
        config: Config, grammar: Grammar, current: GrammarState, token: TokenId
    ) -> GrammarState | None:
        if not holds(config, current):
            return current
        return rules[automaton.get_next_state](config, grammar, current, token)

    def get_read(
        state: State, row: FrameRow, request: RequestState, tokens: TokenIds
    ) -> RequestState:
        after = rules[masks.get_read](state, row, request, tokens)
        return _get_reasoned(state.config, after, tokens) if masks.HAS_MASK.of(row) else after

    return rules.replacing(automaton.get_next_state, get_next).replacing(masks.get_read, get_read)


def _get_reasoned(config: Config, request: RequestState, tokens: TokenIds) -> RequestState:
    """Return the request with its reasoning ended, if one of these tokens ends it."""
    if holds(config, GRAMMAR.of(request)) or config.reasoning_end_token_id not in tokens:
        return request
    return GRAMMAR.put(request, GrammarState(GRAMMAR.of(request).state, reasoning_ended=True))


def reasoning_ends_at_the_last_token(rules: Rules, _config: Config) -> Rules:
    """The end of reasoning is seen only as the last token of a step.

    Its tokens are searched again when drafts are sent with a mask.
    """
    is_stepwise = Quirk.REASONING_ENDS_WITH_ITS_STEP in rules.changes

    def get_seen(config: Config, request: RequestState, before: GrammarState) -> RequestState:
        seen = _list_seen(request, request.all_token_ids)
        after = _get_reasoned(config, request, seen) if is_stepwise else request
        is_seen = holds(config, before) or config.reasoning_end_token_id in seen
        return after if is_seen else GRAMMAR.put(after, before)

    def get_read(
        state: State, row: FrameRow, request: RequestState, tokens: TokenIds
    ) -> RequestState:
        after = masks.get_read(state, row, request, tokens)
        return (
            get_seen(state.config, after, GRAMMAR.of(request)) if masks.HAS_MASK.of(row) else after
        )

    def process_bitmask(
        state: State, bitmask: GrammarBitmask
    ) -> tuple[State, GrammarOutput] | Rejected:
        result = rules[masks.process_bitmask](state, bitmask)
        if isinstance(result, Rejected):
            return result
        state, output = result
        requests = state.requests
        (frame,) = [frame for frame in state.frames if frame.frame_id == bitmask.frame_id]
        rows = {row.request_id: row for row in frame.rows}
        for name in [row.request_id for row in bitmask.drafts if row.request_id in rows]:
            request = requests.get(name)
            if request is None or not rows[name].draft_token_ids or not request.request.grammar:
                continue
            requests = requests.having(name, get_seen(state.config, request, GRAMMAR.of(request)))
        state = replace(state, requests=requests)
        masked = [masks.get_mask_row(state, rows[row.request_id]) for row in output.rows]
        return state, GrammarOutput(tuple(masked))

    return rules.replacing(masks.get_read, get_read).replacing(
        masks.process_bitmask, process_bitmask
    )


def _list_seen(request: RequestState, text: TokenIds) -> TokenIds:
    """Return the tokens in which the end of reasoning is searched: the uncomputed ones.

    The release counts from the end of `text` where placeholders exceed computed tokens.
    """
    first = request.num_computed_tokens - request.num_output_placeholders
    return text[first if first >= 0 else max(len(text) + first, 0) :]


def reasoning_end_is_searched_in_the_next_input(rules: Rules, _config: Config) -> Rules:
    """The end of reasoning is searched for in the next input of a session, not in its outputs.

    This is at a stop that the session continues from: its text is searched as it is by then. The
    last sampled token is gone, and the next input follows:

        computed        |------ prompt ------|-- kept --|
        searched                                        |-- next input --|
        should be                                   |--- sampled ---|
    """

    def get_read(
        state: State, row: FrameRow, request: RequestState, tokens: TokenIds
    ) -> RequestState:
        config, before = state.config, GRAMMAR.of(request)
        chunk = next(iter(UPDATES.of(request)), None)
        is_last = not masks.HAS_MASK.of(row) or chunk is None or not chunk.resumable
        if is_last or holds(config, before):
            return rules[masks.get_read](state, row, request, tokens)
        assert chunk is not None
        reason, _ = rules[compute_stop](
            request, request.output_token_ids, request.num_known_tokens, config.max_model_len
        )
        if reason is None:
            return rules[masks.get_read](state, row, request, tokens)
        text = request.all_token_ids[: rules[get_num_kept](request)] + chunk.prompt_token_ids
        is_seen = config.reasoning_end_token_id in _list_seen(request, text)
        return GRAMMAR.put(request, GrammarState(before.state, is_seen))

    return rules.replacing(masks.get_read, get_read)


STORIES = (
    QuirkStory(
        Quirk.FORBIDDEN_DRAFT_UNMASKS_LATER_POSITIONS,
        forbidden_draft_unmasks_later_positions,
        "positions after a draft that the grammar forbids have a full mask",
        ("P24",),
        "not found upstream",
        "0.19.1",
        "asynchronous, two drafts, a grammar that forbids the first of them: the mask of the first"
        " position follows the grammar, and those of the next two allow every token",
    ),
    QuirkStory(
        Quirk.MASK_HAS_THE_ROWS_THAT_SAMPLE_NOW,
        mask_has_the_rows_that_sample_now,
        "a bitmask has the rows that sample when it is made, not those of its frame's plan",
        (),
        "not found upstream",
        "0.19.1",
        "two frames, two requests with grammars, the prompt of one in two chunks: once the second "
        "chunk is planned, the bitmask of the first frame has a row of that request",
    ),
    QuirkStory(
        Quirk.REASONING_ENDS_WITH_ITS_STEP,
        reasoning_ends_with_its_step,
        "the grammar does not apply to the rest of the step in which reasoning ends",
        ("P23", "P24"),
        "#44006",
        "0.19.1",
        "a grammar that waits for the end of reasoning; the drafts are the end of reasoning and a "
        "token that the grammar forbids: both are taken, scheduled, and may be accepted",
    ),
    QuirkStory(
        Quirk.REASONING_ENDS_AT_THE_LAST_TOKEN,
        reasoning_ends_at_the_last_token,
        "the end of reasoning is seen only as the last token of a step",
        ("P23",),
        "#43388",
        "0.19.1",
        "a grammar that waits for the end of reasoning; a step samples the end of reasoning, a "
        "draft, and one token more: the grammar never applies",
    ),
    QuirkStory(
        Quirk.REASONING_END_IS_SEARCHED_IN_THE_NEXT_INPUT,
        reasoning_end_is_searched_in_the_next_input,
        "the end of reasoning is searched for in the next input of a session, not in its outputs",
        ("P23",),
        "not found upstream",
        "0.19.1",
        "a grammar that waits for the end of reasoning; a session samples the end of reasoning as "
        "the only token of an input, and the next input is queued: its grammar does not apply to "
        "that",
        upon=(Quirk.SESSIONS_KEEP_THEIR_GRAMMAR,),
    ),
)
