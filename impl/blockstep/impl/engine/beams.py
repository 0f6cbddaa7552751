"""Beams: which texts are followed, and which of those that have ended are the best.

    candidates of a step   the likeliest continuations of all beams, best first
                           | first `width` | as many again, for each token that may end a text |
    ended                  among the first: it is kept, if its score is one of the best
    not ended              the first `width` of these are the next beams

This is the search of transformers' `generate`, of one prompt; it knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockstep.impl.engine.params import BeamSearchParams
from blockstep.spec.vocabulary import FinishReason, TokenIds


class Candidate(NamedTuple):
    """A beam with another token behind it."""

    logprob: float
    """Of all its tokens together."""
    beam: int
    """Which of the beams, by its place."""
    token_id: int


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """A text that was found."""

    token_ids: TokenIds
    """Outputs, with the token that ended them."""
    score: float
    """Its log probability over its number of tokens to the power of `length_penalty`."""
    finish_reason: FinishReason
    text: str = ""
    """"" without a tokenizer."""


class BeamSearch:
    """The search for the best continuations of one prompt.

    Args:
        params: how wide and how far it goes.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: TokenIds) -> None:
        self.params = params
        self.eos_token_ids = () if params.ignore_eos else eos_token_ids
        self.num_candidates = max(2, 1 + len(self.eos_token_ids)) * params.beam_width
        """Of a step: enough that so many beams go on whichever tokens end a text."""
        self.beams: list[TokenIds] = [()]
        """Outputs of each, the likeliest first."""
        self.logprobs = [0.0]
        """Of each beam."""
        self.found: list[BeamSequence] = []
        """Texts that have ended, the best first; as many as beams, at most."""
        self.is_done = False

    def advance(self, continuations: Sequence[dict[int, float]]) -> list[Candidate]:
        """Choose among what may follow each beam; the beams from now on, none once it is done.

        `continuations`: of each beam the likeliest tokens, `num_candidates` of them or all that
        there are, and their log probabilities.
        """
        candidates = sorted(
            Candidate(self.logprobs[beam] + logprob, beam, token)
            for beam, tokens in enumerate(continuations)
            for token, logprob in tokens.items()
        )[: -self.num_candidates - 1 : -1]
        width, length = self.params.beam_width, len(self.beams[0]) + 1
        is_last = length == self.params.max_tokens
        going_on = [one for one in candidates if not (is_last or self._is_end(one.token_id))]
        self._keep([one for one in candidates[:width] if one not in going_on], length)
        chosen = going_on[:width]
        self.beams = [(*self.beams[one.beam], one.token_id) for one in chosen]
        self.logprobs = [one.logprob for one in chosen]
        self.is_done = not chosen or self._is_enough(length)
        return [] if self.is_done else chosen

    def _is_end(self, token: int) -> bool:
        return token in self.eos_token_ids

    def _keep(self, ended: Sequence[Candidate], length: int) -> None:
        """The best of all that have ended."""
        for one in ended:
            reason = FinishReason.STOP if self._is_end(one.token_id) else FinishReason.LENGTH
            tokens = (*self.beams[one.beam], one.token_id)
            self.found.append(BeamSequence(tokens, self._score(one.logprob, length), reason))
        self.found.sort(key=lambda text: -text.score)
        del self.found[self.params.beam_width :]

    def _is_enough(self, length: int) -> bool:
        """Whether no beam can be better than what has ended, as far as can be told."""
        if len(self.found) < self.params.beam_width:
            return False
        best = self._score(self.logprobs[0], length)
        return self.params.early_stopping or best <= self.found[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.params.length_penalty)
