"""Seeded bugs in grammars: bitmasks, drafts and outputs that a grammar does not allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.parts import Part
from blockstep.spec.core.preemption import get_preempted
from blockstep.spec.core.requests import Frame, FrameRow, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Scheduled, Step
from blockstep.spec.features.structured_output import (
    fill_mask,
    get_accepted_drafts,
    get_advanced,
    get_behind,
    get_read,
    process_bitmask,
)
from blockstep.spec.features.structured_output.grammar import (
    GRAMMAR,
    get_next_state,
    get_states,
    holds,
)
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.releases.grammars import forbidden_draft_unmasks_later_positions
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Config,
    GrammarOutput,
    Rejected,
    RequestId,
    TokenIds,
)

PAGE = Page(takes="masks")


@PAGE.exhibit(
    "positions after a draft that was cut are not masked", "vLLM 0.19.1 grammar_bitmask", "P24"
)
def unmasked_behind_a_placeholder(rules: Rules, config: Config) -> Rules:
    """Only positions up to the first placeholder are masked."""
    return forbidden_draft_unmasks_later_positions(rules, config)


@PAGE.exhibit("drafts that the grammar rejects are verified", "vLLM #30916", "P23 P24 P18")
def drafts_not_cut(rules: Rules, _config: Config) -> Rules:
    """The bitmask keeps all drafts that the worker proposed."""
    return rules.replacing(get_accepted_drafts, lambda _state, _request, drafts: drafts)


@PAGE.exhibit("a bitmask is computed before older frames are committed", "vLLM #45014", "P23 P18")
def mask_of_a_stale_grammar(rules: Rules, _config: Config) -> Rules:
    """It is computed from a grammar state that lacks the tokens of these frames."""
    return rules.replacing(get_behind, lambda _frames, _frame, _masked: None)


_AWAITED: Final = Part("awaited", -1)
"""The frame for which the mask of a row waits."""


@PAGE.exhibit(
    "a bitmask waits for the oldest frame only",
    "vLLM #45014, #45015",
    "P23 P18",
    wrong_fix_of="mask-of-a-stale-grammar",
)
def mask_waits_for_one_frame(rules: Rules, _config: Config) -> Rules:
    """The bitmask of a third frame lacks the tokens that the second one samples."""

    def fill(step: Step, row: Scheduled, frame_row: FrameRow) -> FrameRow:
        frame_row = rules[fill_mask](step, row, frame_row)
        frames = step.state.frames
        return _AWAITED.put(frame_row, frames[0].frame_id) if frames else frame_row

    def find(frames: Sequence[Frame], frame: Frame, masked: Sequence[FrameRow]) -> RequestId | None:
        awaited = {_AWAITED.of(row) for row in frame.rows}
        is_there = any(one.frame_id in awaited for one in frames)
        return rules[get_behind](frames, frame, masked) if is_there else None

    return rules.replacing(fill_mask, fill).replacing(get_behind, find)


def change_preempted(
    rules: Rules, change: Callable[[RequestState, RequestState], RequestState]
) -> Rules:
    """Return rules by which a preempted request with a grammar is changed: (before, after)."""

    def get(request: RequestState) -> RequestState:
        after = rules[get_preempted](request)
        return change(request, after) if request.request.grammar is not None else after

    return rules.replacing(get_preempted, get)


@PAGE.exhibit("drafts of a request with a grammar survive a preemption", "#30916", "P24 P12 P23")
def drafts_outlive_a_preemption(rules: Rules, _config: Config) -> Rules:
    """They were proposed after a shorter token sequence."""
    return change_preempted(
        rules, lambda before, after: replace(after, spec_token_ids=before.spec_token_ids)
    )


@PAGE.exhibit(
    "a preempted request keeps the drafts that its grammar accepts",
    "#30916",
    "P24 P12 P23",
    wrong_fix_of="drafts-outlive-a-preemption",
)
def drafts_cut_at_a_preemption(rules: Rules, config: Config) -> Rules:
    """The grammar accepts them after today's tokens, but they are verified after more tokens."""

    def keep(before: RequestState, after: RequestState) -> RequestState:
        drafts, grammar = before.spec_token_ids, before.request.grammar
        assert grammar is not None
        states = get_states(config, grammar, GRAMMAR.of(before), drafts, get_next_state)
        return replace(after, spec_token_ids=drafts[: len(states) - 1])

    return change_preempted(rules, keep)


@PAGE.exhibit(
    "a preemption resets the grammar state", "rule: outputs survive a preemption", "P23 P12 P18"
)
def grammar_begins_anew(rules: Rules, _config: Config) -> Rules:
    """The request keeps its outputs, but the grammar state that they led to is lost."""
    return change_preempted(
        rules, lambda _before, after: GRAMMAR.put(after, replace(GRAMMAR.of(after), state=0))
    )


@PAGE.exhibit(
    "tokens after the end of reasoning do not advance the grammar",
    "vLLM 0.19.1 should_advance",
    "P23 P18",
)
def tokens_behind_reasoning_lost(rules: Rules, config: Config) -> Rules:
    """One commit can deliver the end of reasoning and, with drafts, the grammar's first tokens."""

    def read(state: State, row: FrameRow, request: RequestState, tokens: TokenIds) -> RequestState:
        after = rules[get_read](state, row, request, tokens)
        grammar_state = GRAMMAR.of(after)
        is_begun = holds(config, grammar_state) and not holds(config, GRAMMAR.of(request))
        return GRAMMAR.put(after, replace(grammar_state, state=0)) if is_begun else after

    return rules.replacing(get_read, read)


@PAGE.exhibit(
    "computing a bitmask advances the grammar by the drafts", "vLLM 0.19.1 rule S4", "P23 P18"
)
@instead(process_bitmask)
def mask_moves_the_grammar(
    right: Right[tuple[State, GrammarOutput] | Rejected], state: State
) -> tuple[State, GrammarOutput] | Rejected:
    """The drafts may be rejected; those accepted advance the grammar once more with the outputs."""
    result = right()
    if isinstance(result, Rejected):
        return result
    state, answer = result
    requests = state.requests.to_dict()
    for row in answer.rows:
        known = tuple([token for token in row.draft_token_ids if token != DRAFT_PLACEHOLDER])
        request = requests[row.request_id]
        requests[row.request_id] = get_advanced(state, request, known) or request
    return replace(state, requests=FrozenMap(requests)), answer
