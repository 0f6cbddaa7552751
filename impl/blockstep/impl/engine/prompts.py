"""Prompts: conversion of a user's prompt (a text or token ids) into tokens of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from tokenizers import Tokenizer

from blockstep.impl.engine.errors import RequestError
from blockstep.impl.engine.params import SamplingParams
from blockstep.spec.vocabulary import Request, RequestId, TokenIds

Prompt: TypeAlias = str | Sequence[int]
T = TypeVar("T")


def encode_prompt(
    tokenizer: Tokenizer | None, vocab_size: int, prompt: Prompt, *, begins: bool = True
) -> TokenIds:
    """Return the prompt's tokens; for a text with `begins`, including the tokens that start a text.

    Raises:
        RequestError: it is neither text nor tokens of the model, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a text needs the model's tokenizer.json; give token ids")
        try:
            prompt = tokenizer.encode(prompt, add_special_tokens=begins).ids
        except TypeError as error:
            raise RequestError(f"prompt {prompt[:80]!r}: is not Unicode text") from error
    token_ids = tuple(_expect_sequence(prompt))
    wrong = next((t for t in token_ids if type(t) is not int or not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"token {wrong!r}: the model has tokens 0 to {vocab_size - 1}, ints")
    return token_ids


def encode_for(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    prompt: Prompt,
    params: SamplingParams,
    *,
    is_session: bool,
    begins: bool = True,
) -> TokenIds:
    """Return the tokens of a prompt, and check that `params` suit it.

    Raises:
        RequestError: as `encode_prompt`; or the parameters cannot be used with it.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params = {params!r}: must be SamplingParams")
    if params.n != 1:
        raise RequestError(f"n = {params.n}: use generate for several outputs to a prompt")
    token_ids = encode_prompt(tokenizer, vocab_size, prompt, begins=begins)
    if params.stop and tokenizer is None:
        raise RequestError("stop: the model has no tokenizer.json; use stop_token_ids")
    if params.stop and is_session:
        raise RequestError("stop: a session stops at tokens only; use stop_token_ids")
    return token_ids


def expect_adapter(name: object, known: Iterable[str]) -> None:
    """Raise `RequestError` unless `name` is None or one of the known adapters."""
    names = list(known)
    if name is not None and (not isinstance(name, str) or name not in names):
        listed = ", ".join(map(repr, names)) or "none"
        raise RequestError(f"adapter = {name!r}: must be one of lora_modules: {listed}")


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list; a single prompt becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    several = list(_expect_sequence(prompts))
    return [prompts] if several and isinstance(several[0], int) else several  # type: ignore[list-item]


def give_each(name: str, kind: type[T], given: object, num_prompts: int, default: T) -> list[T]:
    """Return one value per prompt: `given` itself for all, or one each; `default` for None.

    Raises:
        RequestError: it is neither, or has another length; the message calls it `name`.
    """
    if given is None or isinstance(given, kind):
        return [default if given is None else given] * num_prompts
    if not isinstance(given, Sequence):
        raise RequestError(f"{name} = {given!r}: must be {kind.__name__}, or a list of them")
    if len(given) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts and {len(given)} {name}: give one for all, or one each"
        )
    return list(given)


def _expect_sequence(prompt: Any) -> Sequence[Any]:
    """Return `prompt` if it is a list-like sequence, not an array, bytes or an iterator."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray):
        raise RequestError(f"prompt {prompt!r:.80}: must be a text, or a list of token ids")
    return prompt


def make_request(
    name: RequestId,
    token_ids: TokenIds,
    params: SamplingParams,
    eos_token_ids: TokenIds,
    number: int,
) -> Request:
    """Return the scheduler's request; `number`: count of earlier requests, its arrival time."""
    eos = () if params.ignore_eos else eos_token_ids
    return Request(
        request_id=name,
        prompt_token_ids=token_ids,
        max_tokens=params.max_tokens,
        eos_token_id=eos[0] if eos else None,
        stop_token_ids=(*eos[1:], *params.stop_token_ids),
        arrival_time=number,
    )
