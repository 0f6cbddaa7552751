"""Laws about grammars: accepted drafts, bitmasks and the state after outputs.

PYTEST_DONT_REWRITE.

Tokens are symbolic. The grammar is `(1 2)* 9`: state 0 before 1 or 9, state 1 before 2, and state 2
where the output is complete. Token 7 ends the reasoning, if there is any.
"""

from __future__ import annotations

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.requests import FrameRow
from blockstep.spec.features.structured_output import IS_CUT, get_verifiable_drafts
from blockstep.spec.features.structured_output.grammar import (
    Follow,
    GrammarState,
    get_allowed,
    get_first_state,
    get_mask,
    get_next_state,
    get_state_after,
    get_states,
    holds,
)
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, Config, Grammar, TokenIds

ROOM = LawModule("grammars")
GRAMMAR = Grammar((((1, 1), (9, 2)), ((2, 0),), ()))
PLAIN = h.build_config()
REASONING = h.build_config(reasoning_end_token_id=7)
PAD = DRAFT_PLACEHOLDER
Mask = tuple[TokenIds | None, ...]


# Mistakes.


@instead(get_next_state, theirs="#44006")
def nothing_holds_the_rest_of_the_step_in_which_reasoning_ends(
    right: Right[GrammarState | None], config: Config, current: GrammarState
) -> GrammarState | None:
    """The grammar is not advanced by tokens of the step in which reasoning ends."""
    return right() if holds(config, current) else current


@instead(get_mask, theirs="not found upstream")
def forbidden_draft_unmasks_later_positions(
    right: Right[Mask],
    config: Config,
    grammar: Grammar,
    current: GrammarState,
    drafts: TokenIds,
    follow: Follow,
) -> Mask:
    """Positions after a placeholder are not masked."""
    num_read = len(get_states(config, grammar, current, drafts, follow))
    return (*right()[:num_read], *[None] * (len(drafts) + 1 - num_read))


# Drafts.


def is_led(state: int, token: int) -> bool:
    """Whether the grammar accepts a token in a state, written out."""
    return (state == 0 and token in (1, 9)) or (state == 1 and token == 2)


def lead(state: int, token: int) -> int:
    """Return the state after an accepted token, written out."""
    return 0 if state == 1 else 1 if token == 1 else 2


@ROOM.law("P23", (1, 3))  # fmt: skip
def check_drafts_are_cut_to_the_longest_accepted_prefix(first: int, second: int) -> None:
    """A placeholder never belongs to this prefix."""
    assert first >= PAD and second >= PAD
    states = get_states(PLAIN, GRAMMAR, GrammarState(), (first, second), get_next_state)
    if not is_led(0, first):
        assert len(states) == 1
    elif not is_led(lead(0, first), second):
        assert len(states) == 2
    else:
        assert len(states) == 3


@ROOM.law("P23", (4,))
def check_complete_output_accepts_no_draft(token: int) -> None:
    """This holds for every draft."""
    assert token >= 0
    states = get_states(PLAIN, GRAMMAR, GrammarState(2), (token,), get_next_state)
    assert len(states) == 1


@ROOM.law("P24", (2, 3))
def check_draft_cut_by_a_mask_cannot_be_accepted(num_accepted: int, num_cut: int) -> None:
    """A placeholder may stand for any draft if there is no bitmask."""
    assert 0 <= num_accepted <= 3 and 0 <= num_cut <= 3
    drafts = (1,) * num_accepted + (PAD,) * num_cut
    row = FrameRow("A", drafts, samples=True)
    assert get_verifiable_drafts(IS_CUT.put(row, True)) == drafts[:num_accepted]
    assert get_verifiable_drafts(row) == drafts


# Bitmasks.


@ROOM.law("P24", (1, PAD), forbidden_draft_unmasks_later_positions)  # fmt: skip
def check_masks_follow_the_grammar_through_the_drafts(first: int, second: int) -> None:
    """Positions after a rejected draft repeat the last mask; only a complete output is unmasked."""
    assert first >= PAD and second >= PAD
    mask = get_mask(PLAIN, GRAMMAR, GrammarState(), (first, second), get_next_state)
    behind: TokenIds | None = (1, 9)
    assert len(mask) == 3
    assert mask[0] == behind
    if is_led(0, first):
        behind = (2,) if first == 1 else None
    assert mask[1] == behind
    if is_led(0, first) and is_led(lead(0, first), second):
        behind = (1, 9)
    assert mask[2] == behind


@ROOM.law("P23", (5,))
def check_complete_output_is_not_constrained(token: int) -> None:
    """The state stays as it is for every sampled token."""
    assert token >= 0
    allowed = get_allowed(PLAIN, GRAMMAR, GrammarState(2))
    assert allowed is None
    assert get_state_after(
        PLAIN, GRAMMAR, GrammarState(2), (token,), get_next_state
    ) == GrammarState(2)


@ROOM.law("P23", (3,))
def check_mask_allows_exactly_the_tokens_that_the_grammar_accepts(token: int) -> None:
    """A worker that samples by the bitmask is therefore never rejected."""
    assert token >= 0
    for state in (0, 1):
        allowed = get_allowed(PLAIN, GRAMMAR, GrammarState(state))
        read = get_state_after(PLAIN, GRAMMAR, GrammarState(state), (token,), get_next_state)
        assert allowed is not None
        assert (token in allowed) == (read is not None)


# Outputs.


@ROOM.law("P23", (4, 7, 1), nothing_holds_the_rest_of_the_step_in_which_reasoning_ends)  # fmt: skip
def check_grammar_state_does_not_depend_on_the_division_into_steps(
    first: int, second: int, third: int
) -> None:
    """This also holds if reasoning ends within a step."""
    assert first >= 0 and second >= 0 and third >= 0
    text = (first, second, third)
    config, grammar, follow = REASONING, GRAMMAR, get_next_state
    at_once = get_state_after(config, grammar, GrammarState(), text, follow)
    halfway = get_state_after(config, grammar, GrammarState(), text[:1], follow)
    assert halfway is not None
    for token in text[1:]:
        if halfway is not None:
            halfway = get_state_after(config, grammar, halfway, (token,), follow)
    ended = 7 in text[:2]
    assert at_once == halfway
    assert at_once is None or at_once.reasoning_ended == (ended or third == 7)


@ROOM.law("P23", (4,))  # fmt: skip
def check_grammar_applies_after_the_end_of_reasoning(token: int) -> None:
    """Reasoning ends in the prompt or in an output; before that every token may be sampled."""
    assert token >= 0
    state = get_first_state(REASONING, (token,))
    assert state.reasoning_ended == (token == 7)
    assert get_first_state(PLAIN, (token,)) == GrammarState()
    behind = get_state_after(REASONING, GRAMMAR, GrammarState(), (token,), get_next_state)
    assert behind == GrammarState(0, reasoning_ended=token == 7)
