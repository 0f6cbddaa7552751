"""Grammars: where the outputs of each request have led its grammar, and what may come next.

state 0 --7--> 1 --8--> 2        outputs 7 8 led to 2, which has no edges: the text is complete
               |--9--> 0
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, Config, Grammar, Request, TokenIds


class Position(NamedTuple):
    """How far a text has come."""

    state: int
    """Of the grammar."""
    holds: bool
    """Whether the grammar holds already: it does not while the model reasons."""


class Matcher:
    """The grammar of one request, in step with its verified outputs (P23).

    Args:
        grammar: of the request.
        reasoning_end: the token behind which it holds; None: it holds from the first output on.
        prompt: in which reasoning may have ended before it began.
    """

    __slots__ = ("_edges", "_reasoning_end", "_tokens", "position")

    def __init__(self, grammar: Grammar, reasoning_end: int | None, prompt: TokenIds) -> None:
        self._edges = [dict(edges) for edges in grammar.edges]
        self._tokens = [tuple(edges) for edges in self._edges]
        self._reasoning_end = reasoning_end
        self.position = Position(0, reasoning_end is None or reasoning_end in prompt)

    @property
    def reasoning_ended(self) -> bool:
        """Whether it waited for the end of reasoning, and this has come."""
        return self._reasoning_end is not None and self.position.holds

    def list_allowed(self, position: Position) -> TokenIds | None:
        """The tokens that may stand there, sorted; None: all may."""
        if not position.holds or self.is_terminated(position):
            return None
        return self._tokens[position.state]

    def is_terminated(self, position: Position) -> bool:
        """Whether the text is complete there: then nothing is accepted, and all is allowed."""
        return not self._edges[position.state]

    def go_on(self, position: Position, token: int) -> Position | None:
        """Where a token leads that is sampled there; None: the grammar forbids it."""
        if not position.holds:
            return Position(position.state, token == self._reasoning_end)
        if self.is_terminated(position):
            return position
        state = self._edges[position.state].get(token)
        return None if state is None else Position(state, True)

    def follow(self, tokens: Iterable[int]) -> Position | None:
        """Where sampled tokens lead from where it stands; None: it forbids one of them."""
        position = self.position
        for token in tokens:
            following = self.go_on(position, token)
            if following is None:
                return None
            position = following
        return position

    def cut(self, drafts: TokenIds) -> TokenIds:
        """The first of these drafts that it accepts (P23)."""
        position = self.position
        for count, token in enumerate(drafts):
            following = self._accept_draft(position, token)
            if following is None:
                return drafts[:count]
            position = following
        return drafts

    def list_masks(self, drafts: TokenIds) -> tuple[TokenIds | None, ...]:
        """What may stand at each draft's place, and behind them.

        Nobody knows what follows a placeholder: there is the mask of the last place that is known.
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
    """The grammar of a request at its beginning; None where it has none."""
    if request.grammar is None:
        return None
    reasoning_end = None if config.enable_in_reasoning else config.reasoning_end_token_id
    return Matcher(request.grammar, reasoning_end, request.prompt_token_ids)
