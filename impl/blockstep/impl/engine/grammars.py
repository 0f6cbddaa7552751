"""Grammars: outputs constrained by a regular expression, a JSON schema or a list of choices.

    regex, json_schema, choice -> llguidance -> allowed next tokens -> mask -> sampler

Drafts are masked like tokens: the position after each draft that the grammar accepts has the mask
of the sequence up to it. After the first draft that the grammar does not accept, masks repeat the
one before, because that draft is always rejected. A grammar state follows from the outputs alone,
whatever was rejected, preempted or planned ahead. If the model reasons first, the grammar applies
after the token that ends the reasoning:

    output  r r r </think> y e s        draft  r </think> y z
    mask    - - - -        m m m        mask   - -        m m m
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from blockstep.impl.engine.errors import RequestError
from blockstep.impl.engine.host_to_device import to_device
from blockstep.impl.engine.params import SamplingParams


class Matcher:
    """The grammar state of one request after its outputs."""

    def __init__(
        self, inner: Any, eos_token_ids: Sequence[int], reasoning_end: int | None = None
    ) -> None:
        self._inner = inner
        self._eos_token_ids = eos_token_ids
        self._reasoning_end = reasoning_end
        self._is_reasoning = reasoning_end is not None
        """True until the token that ends reasoning was read; the grammar does not apply before."""
        self._is_over = False
        """True once the end of the text was read; a step that was planned ahead may sample past it.
        """

    @property
    def error(self) -> str:
        """Why the grammar cannot continue (a limit of the library, say); "" while it can."""
        found: str = self._inner.get_error()
        return found

    def read_prompt(self, prompt: Sequence[int]) -> None:
        """Look for the end of reasoning in the prompt; to be called before any output."""
        self._is_reasoning = self._reasoning_end is not None and self._reasoning_end not in prompt

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance the grammar by sampled tokens."""
        num_free = self._count_free(tokens)
        self._is_reasoning = self._is_reasoning and self._reasoning_end not in tokens
        for token in tokens[num_free:]:
            if not self._is_over:
                self._inner.consume_token(token)
                self._is_over = token in self._eos_token_ids

    def count_accepted(self, drafts: Sequence[int]) -> int:
        """Return the number of leading drafts that the grammar accepts."""
        num_free = self._count_free(drafts)
        count: int = self._inner.validate_tokens(list(drafts[num_free:]))
        return num_free + count

    def get_masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        """Return the bitmask at the position of each draft and after the last; None: all tokens
        allowed."""
        num_free = self._count_free(drafts)
        free: list[bytes | None] = [None] * num_free
        if self._is_reasoning and self._reasoning_end not in drafts:
            return [*free, None]
        held = drafts[num_free:]
        probe = self._inner.deep_copy() if held else self._inner
        masks: list[bytes] = [probe.compute_bitmask()]
        for draft in held:
            is_read = probe is not None and probe.try_consume_tokens([draft]) == 1
            probe = probe if is_read else None
            masks.append(masks[-1] if probe is None else probe.compute_bitmask())
        return [*free, *masks]

    def _count_free(self, tokens: Sequence[int]) -> int:
        """Return how many of the next tokens are still reasoning, which the grammar does not
        read."""
        if not self._is_reasoning:
            return 0
        ends = (count for count, token in enumerate(tokens, 1) if token == self._reasoning_end)
        return next(ends, len(tokens))


class Grammars:
    """Builds the grammars of one model's requests."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        reasoning_end: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.reasoning_end = reasoning_end
        """The token after which grammars apply; None: they apply from the first output."""

    def begin(self, params: SamplingParams) -> Matcher | None:
        """Return the grammar state of `params` before any output; None if they have no grammar.

        Raises:
            RequestError: the grammar is invalid, or the model or installation lacks what it needs.
        """
        if not params.has_grammar:
            return None
        if self.tokenizer is None:
            raise RequestError("a grammar needs a tokenizer, and the model has no tokenizer.json")
        if not self.eos_token_ids or params.ignore_eos:
            raise RequestError("a grammar ends with the end-of-sequence token: do not ignore it")
        if find_spec("llguidance") is None:
            raise RequestError("a grammar needs: python -m pip install 'blockstep[grammars]'")
        try:
            inner = self._library.LLMatcher(self._tokens, self._compile(params), log_level=0)
        except ValueError as error:  # half of a surrogate pair, say, which UTF-8 does not have
            raise RequestError(f"grammar: {error}") from error
        if inner.is_error():
            raise RequestError(f"grammar: {inner.get_error()}")
        return Matcher(inner, self.eos_token_ids, self.reasoning_end)

    @cached_property
    def _library(self) -> Any:
        return import_module("llguidance")

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer in the library's form; building it takes about a second."""
        assert self.tokenizer is not None, "`begin` checks for a tokenizer"
        return self._library.LLTokenizer(
            self.tokenizer.to_str(), n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids)
        )

    def _compile(self, params: SamplingParams) -> str:
        make = self._library.LLMatcher
        grammar: str
        if params.regex is not None:
            grammar = make.grammar_from_regex(params.regex)
        elif params.choice:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
            grammar = make.grammar_from_lark(f"start: {texts}")
        else:
            grammar = make.grammar_from_json_schema(params.json_schema)
        return grammar


def mask_logits(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[bytes]) -> torch.Tensor:
    """Return the logits [num_rows, vocab_size], with -inf where `masks` of `rows` have no bit.

    Other rows are unchanged; the argument is not modified.
    """
    if not rows:
        return logits
    vocab_size = logits.shape[1]
    words = np.stack([np.frombuffer(mask, np.uint8) for mask in masks])
    bits = np.unpackbits(words, axis=1, bitorder="little")[:, :vocab_size].astype(bool)
    forbidden = to_device(~bits, logits.device)
    where = to_device(np.array(rows, np.int64), logits.device)
    return logits.index_copy(0, where, logits[where].masked_fill(forbidden, -torch.inf))
