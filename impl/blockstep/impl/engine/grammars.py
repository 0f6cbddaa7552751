"""Grammars: outputs that are held to a regular expression, a JSON schema or a choice of texts.

    regex, json_schema, choice -> llguidance -> which tokens may follow -> mask -> sampler

Drafts are masked like tokens: behind each that the grammar accepts stands the mask of the text up
to it, and behind the first that it does not every mask repeats the one before, for nobody accepts
that draft. A grammar stands where the outputs led it, whatever was rejected, preempted or planned
ahead. Where the model reasons first, a grammar holds from the token behind the one that ends that:

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
from blockstep.impl.engine.params import SamplingParams
from blockstep.impl.engine.transfer import to_device


class Matcher:
    """Where the outputs of one request stand in its grammar."""

    def __init__(
        self, inner: Any, eos_token_ids: Sequence[int], reasoning_end: int | None = None
    ) -> None:
        self._inner = inner
        self._eos_token_ids = eos_token_ids
        self._reasoning_end = reasoning_end
        self._is_reasoning = reasoning_end is not None
        """The token that ends it was not read yet; the grammar does not hold."""
        self._is_over = False
        """It has read the end of its text; a step that was planned ahead may sample behind it."""

    @property
    def error(self) -> str:
        """Why it can go no further (a limit of the library, say); "" while it can."""
        found: str = self._inner.get_error()
        return found

    def read_prompt(self, prompt: Sequence[int]) -> None:
        """To be called before any output: reasoning may have ended in the prompt."""
        self._is_reasoning = self._reasoning_end is not None and self._reasoning_end not in prompt

    def advance(self, tokens: Sequence[int]) -> None:
        """Read what was sampled."""
        num_free = self._count_free(tokens)
        self._is_reasoning = self._is_reasoning and self._reasoning_end not in tokens
        for token in tokens[num_free:]:
            if not self._is_over:
                self._inner.consume_token(token)
                self._is_over = token in self._eos_token_ids

    def count_accepted(self, drafts: Sequence[int]) -> int:
        """How many drafts the grammar accepts, up to the first that it does not."""
        num_free = self._count_free(drafts)
        count: int = self._inner.validate_tokens(list(drafts[num_free:]))
        return num_free + count

    def get_masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        """What may stand at the place of each draft, and behind the last: a bit for each token.

        None: anything may.
        """
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
        """Those of the next tokens that the grammar does not read: up to the end of reasoning."""
        if not self._is_reasoning:
            return 0
        ends = (count for count, token in enumerate(tokens, 1) if token == self._reasoning_end)
        return next(ends, len(tokens))


class Grammars:
    """What makes the grammars of one model's requests."""

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
        """The token behind which grammars hold; None: they hold from the first output on."""

    def begin(self, params: SamplingParams) -> Matcher | None:
        """The grammar that `params` ask for, before any output; None if they ask for none.

        Raises:
            RequestError: it is no grammar, or the model lacks what it takes.
        """
        if not params.has_grammar:
            return None
        if self.tokenizer is None:
            raise RequestError("a grammar holds text, and the model has no tokenizer.json")
        if not self.eos_token_ids or params.ignore_eos:
            raise RequestError("a grammar ends with the end-of-sequence token: do not ignore it")
        if find_spec("llguidance") is None:
            raise RequestError("a grammar needs: python -m pip install 'blockstep[grammars]'")
        inner = self._library.LLMatcher(self._tokens, self._compile(params), log_level=0)
        if inner.is_error():
            raise RequestError(f"grammar: {inner.get_error()}")
        return Matcher(inner, self.eos_token_ids, self.reasoning_end)

    @cached_property
    def _library(self) -> Any:
        return import_module("llguidance")

    @cached_property
    def _tokens(self) -> Any:
        """What each token of the model says, as the library wants it; a second's work."""
        assert self.tokenizer is not None, "asked for behind a check"
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
    """The logits [num_rows, vocab_size] with -inf where `masks` of `rows` have no bit.

    Others are left as they are; the argument is not changed.
    """
    if not rows:
        return logits
    vocab_size = logits.shape[1]
    words = np.stack([np.frombuffer(mask, np.uint8) for mask in masks])
    bits = np.unpackbits(words, axis=1, bitorder="little")[:, :vocab_size].astype(bool)
    forbidden = to_device(~bits, logits.device)
    where = to_device(np.array(rows, np.int64), logits.device)
    return logits.index_copy(0, where, logits[where].masked_fill(forbidden, -torch.inf))
