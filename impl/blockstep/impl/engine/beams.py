"""Beams: which token sequences a beam search follows, and the best of those that have ended.

    candidates of a step   the likeliest continuations of all beams, best first
                           | first `width` | as many again, for each token that ends a sequence |
    ended                  among the first `width`: kept if its score is one of the best
    not ended              the first `width` of these are the next beams

This is the search of transformers' `generate` for one prompt; it knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockstep.impl.engine.params import BeamSearchParams
from blockstep.spec.vocabulary import FinishReason, TokenIds


class Candidate(NamedTuple):
    """A beam with one more token."""

    logprob: float
    """Log probability of all its tokens together."""
    beam: int
    """Index of the beam that it extends."""
    token_id: int


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """A token sequence that the search found."""

    token_ids: TokenIds
    """Outputs, including the token that ended them."""
    score: float
    """Log probability / (number of tokens ** length_penalty)."""
    finish_reason: FinishReason
    text: str = ""
    """"" without a tokenizer."""


class BeamSearch:
    """Search for the best continuations of one prompt.

    Args:
        params: width, length and penalty of the search.
        eos_token_ids: tokens that end a sequence.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: TokenIds) -> None:
        self.params = params
        self.eos_token_ids = () if params.ignore_eos else eos_token_ids
        self.num_candidates = max(2, 1 + len(self.eos_token_ids)) * params.beam_width
        """Candidates per step: `beam_width` of them do not end, whichever tokens end a sequence."""
        self.beams: list[TokenIds] = [()]
        """Output tokens of each beam, the likeliest beam first."""
        self.logprobs = [0.0]
        """Log probability of each beam."""
        self.found: list[BeamSequence] = []
        """Sequences that have ended, the best first, `beam_width` at most."""
        self.is_done = False

    def advance(self, continuations: Sequence[dict[int, float]]) -> list[Candidate]:
        """Choose the next beams among the continuations; return them, or none once the search is
        done.

        `continuations`: for each beam the log probabilities of its likeliest next tokens,
        `num_candidates` of them or the whole vocabulary.
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
        """Add sequences that ended in this step, and keep the best of all."""
        for one in ended:
            reason = FinishReason.STOP if self._is_end(one.token_id) else FinishReason.LENGTH
            tokens = (*self.beams[one.beam], one.token_id)
            self.found.append(BeamSequence(tokens, self._score(one.logprob, length), reason))
        self.found.sort(key=lambda text: -text.score)
        del self.found[self.params.beam_width :]

    def _is_enough(self, length: int) -> bool:
        """Whether no beam is expected to beat the sequences that have ended."""
        if len(self.found) < self.params.beam_width:
            return False
        best = self._score(self.logprobs[0], length)
        return self.params.early_stopping or best <= self.found[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.params.length_penalty)
