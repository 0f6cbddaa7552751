"""Prompts: what a user asks to be continued, a text or token ids, as the tokens of a model."""

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
    """Its tokens; with those that begin a text, where it is one and `begins`.

    Raises:
        RequestError: it is neither text nor tokens of the model, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a text needs a tokenizer.json beside the model; give token ids")
        try:
            prompt = tokenizer.encode(prompt, add_special_tokens=begins).ids
        except TypeError as error:
            raise RequestError(f"prompt {prompt[:80]!r}: is no Unicode text") from error
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
    """The tokens of a prompt that is to be answered so.

    Raises:
        RequestError: as `encode_prompt`; or the params do not go with it.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params = {params!r}: must be SamplingParams")
    token_ids = encode_prompt(tokenizer, vocab_size, prompt, begins=begins)
    if params.stop and tokenizer is None:
        raise RequestError("stop: the model has no tokenizer.json; use stop_token_ids")
    if params.stop and is_session:
        raise RequestError("stop: a session stops at tokens only; use stop_token_ids")
    return token_ids


def expect_adapter(name: object, known: Iterable[str]) -> None:
    """Raises `RequestError` unless it is None, or one of the known adapters."""
    names = list(known)
    if name is not None and (not isinstance(name, str) or name not in names):
        told = ", ".join(map(repr, names)) or "none"
        raise RequestError(f"adapter = {name!r}: must be one of lora_modules: {told}")


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    several = list(_expect_sequence(prompts))
    return [prompts] if several and isinstance(several[0], int) else several  # type: ignore[list-item]


def give_each(name: str, kind: type[T], given: object, num_prompts: int, default: T) -> list[T]:
    """What is given for all prompts at once, or for each of them; `default` for None.

    Raises:
        RequestError: it is neither, or of another length; it is called by `name` then.
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
    """Neither an array, nor bytes, nor what can be walked once."""
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
    """What the scheduler is asked for; `number`: how many came before."""
    eos = () if params.ignore_eos else eos_token_ids
    return Request(
        request_id=name,
        prompt_token_ids=token_ids,
        max_tokens=params.max_tokens,
        eos_token_id=eos[0] if eos else None,
        stop_token_ids=(*eos[1:], *params.stop_token_ids),
        arrival_time=number,
    )
