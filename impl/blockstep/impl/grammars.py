"""Grammars: the state of each request's grammar after its outputs, and the allowed next tokens.

state 0 --7--> 1 --8--> 2      outputs 7 8 led to state 2, which has no edges: it is terminated
               |--9--> 0
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, Config, Grammar, Request, TokenIds


class Position(NamedTuple):
    """A position in a grammar."""

    state: int
    """The state of the grammar."""
    holds: bool
    """Whether the grammar applies already; it does not while the model reasons."""


class Matcher:
    """The grammar of one request, advanced by its verified outputs (P23).

    Args:
        grammar: the grammar of the request.
        reasoning_end: the token after which it applies; None: it applies from the first output on.
        prompt: the prompt, in which reasoning may have ended already.
    """

    __slots__ = ("_edges", "_reasoning_end", "_tokens", "position")

    def __init__(self, grammar: Grammar, reasoning_end: int | None, prompt: TokenIds) -> None:
        self._edges = [dict(edges) for edges in grammar.edges]
        self._tokens = [tuple(edges) for edges in self._edges]
        self._reasoning_end = reasoning_end
        self.position = Position(0, reasoning_end is None or reasoning_end in prompt)

    @property
    def reasoning_ended(self) -> bool:
        """Return whether the grammar waited for the end of reasoning, and reasoning has ended."""
        return self._reasoning_end is not None and self.position.holds

    def list_allowed(self, position: Position) -> TokenIds | None:
        """Return the tokens allowed at a position, sorted; None: all are."""
        if not position.holds or self.is_terminated(position):
            return None
        return self._tokens[position.state]

    def is_terminated(self, position: Position) -> bool:
        """Return whether the grammar is terminated: it accepts no draft, and any token may be
        sampled."""
        return not self._edges[position.state]

    def go_on(self, position: Position, token: int) -> Position | None:
        """Return the position after a token; None: the grammar forbids it."""
        if not position.holds:
            return Position(position.state, token == self._reasoning_end)
        if self.is_terminated(position):
            return position
        state = self._edges[position.state].get(token)
        return None if state is None else Position(state, True)

    def follow(self, tokens: Iterable[int]) -> Position | None:
        """Return the position after sampled tokens, from the current one; None: it forbids one of
        them."""
        position = self.position
        for token in tokens:
            following = self.go_on(position, token)
            if following is None:
                return None
            position = following
        return position

    def cut(self, drafts: TokenIds) -> TokenIds:
        """Return the leading drafts that the grammar accepts (P23)."""
        position = self.position
        for count, token in enumerate(drafts):
            following = self._accept_draft(position, token)
            if following is None:
                return drafts[:count]
            position = following
        return drafts

    def list_masks(self, drafts: TokenIds) -> tuple[TokenIds | None, ...]:
        """Return the allowed tokens at each draft's place, and after them.

        The token after a placeholder is not known: there, the mask of the last known place is used.
        """
        position = self.position
        masks = [self.list_allowed(position)]
        for token in drafts:
            if token != DRAFT_PLACEHOLDER:
                position = self.go_on(position, token) or position
            masks.append(self.list_allowed(position))
        return tuple(masks)

    def _accept_draft(self, position: Position, token: int) -> Position | None:
        if position.holds and self.is_terminated(position):
            return None
        return self.go_on(position, token)


def make_matcher(config: Config, request: Request) -> Matcher | None:
    """Return the grammar of a request at its start; None if it has none."""
    if request.grammar is None:
        return None
    reasoning_end = None if config.enable_in_reasoning else config.reasoning_end_token_id
    return Matcher(request.grammar, reasoning_end, request.prompt_token_ids)
