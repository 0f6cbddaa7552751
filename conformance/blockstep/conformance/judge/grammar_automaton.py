"""Automaton: the tokens that a grammar allows after some outputs, computed here only.

    outputs  7   8   3   7   8            3 ends reasoning: the grammar reads what follows
    state    0   0   0   0   1   2        2 has no edges: terminated

A terminated grammar constrains nothing and accepts no draft: the output is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blockstep.spec.vocabulary import Config, Request, TokenId, TokenIds


class Place(NamedTuple):
    """The state of a grammar after some outputs."""

    state: int = 0
    holds: bool = True
    """Whether the grammar reads the next token: it does not during reasoning."""


class Automaton:
    """The grammar of one request, read as the config says."""

    __slots__ = ("_edges", "_marker", "start")

    def __init__(self, config: Config, request: Request) -> None:
        grammar = request.grammar
        self._edges = [dict(edges) for edges in grammar.edges] if grammar is not None else [{}]
        self._marker = None if config.enable_in_reasoning else config.reasoning_end_token_id
        has_ended = self._marker is None or self._marker in request.prompt_token_ids
        self.start = Place(0, has_ended)

    def is_reasoning_over(self, place: Place) -> bool:
        """Whether there was reasoning to end, and it ended."""
        return self._marker is not None and place.holds

    def list_allowed(self, place: Place) -> TokenIds | None:
        """The tokens that may come next, sorted; None if any may."""
        edges = self._edges[place.state]
        return tuple(sorted(edges)) if place.holds and edges else None

    def take(self, place: Place, token: TokenId) -> Place | None:
        """The state after a sampled token; None if the token is forbidden."""
        if not place.holds:
            return Place(place.state, token == self._marker)
        edges = self._edges[place.state]
        if not edges:
            return place
        state = edges.get(token)
        return None if state is None else Place(state)

    def read(self, outputs: Iterable[TokenId]) -> Place | None:
        """The state after all outputs; None if one of them is forbidden."""
        place: Place | None = self.start
        for token in outputs:
            if place is None:
                break
            place = self.take(place, token)
        return place

    def cut(self, place: Place, drafts: Sequence[TokenId]) -> TokenIds:
        """The leading drafts that are accepted."""
        kept: list[TokenId] = []
        for draft in drafts:
            following = self.take(place, draft)
            is_terminated = place.holds and not self._edges[place.state]
            if following is None or is_terminated:
                break
            kept.append(draft)
            place = following
        return tuple(kept)
