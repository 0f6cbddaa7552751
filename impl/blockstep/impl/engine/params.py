"""Params: how the tokens of one request are sampled, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.impl.engine.errors import SettingsError

GREEDY_BELOW = 1e-5
"""Temperatures below it mean greedy, as in vLLM: logits divided by them overflow."""
TEMPERATURE_MAX = 1e30
"""Far below it all tokens are equally likely already; float32 can hold it."""
INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request, with vLLM's names; the default is greedy, whatever
    `generation_config.json` of the model says.

    Raises:
        SettingsError: a value is of the wrong type or out of range.
    """

    max_tokens: int = 16
    """Maximum number of output tokens."""
    temperature: float = 0.0
    """0 (or below 1e-5): greedy. Otherwise logits are divided by it, and a token is drawn."""
    top_k: int = 0
    """Draw among the k likeliest tokens and those as likely as the last of them; 0: all."""
    top_p: float = 1.0
    """Draw among the likeliest remaining tokens whose probabilities add up to at least this share.
    """
    min_p: float = 0.0
    """Draw among tokens that have at least this share of the likeliest one's probability."""
    seed: int | None = None
    """The same seed and prompt give the same tokens, whatever else is served. None: the engine
    chooses a seed."""
    stop: tuple[str, ...] = ()
    """Stop strings: they end the output, without being part of the text; they need a tokenizer."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, in addition to those of the model."""
    ignore_eos: bool = False
    """True: the model's own end-of-sequence tokens do not end the output."""
    regex: str | None = None
    """The whole output matches this regular expression."""
    json_schema: str | None = None
    """The output is JSON that is valid under this JSON schema."""
    choice: tuple[str, ...] = ()
    """The output is one of these strings."""
    logprobs: int | None = None
    """Number of likeliest tokens to report with each output token; None: no log probabilities."""
    n: int = 1
    """Number of outputs to a prompt; they share its KV. The seeds count up by one."""

    def __post_init__(self) -> None:
        seed, logprobs, stop, tokens = self.seed, self.logprobs, self.stop, self.stop_token_ids
        for name, ok, rule in (
            ("n", _is_int(self.n, 1), "must be an int from 1 to 2**31 - 1"),
            ("max_tokens", _is_int(self.max_tokens, 1), "must be an int from 1 to 2**31 - 1"),
            (
                "temperature",
                _is_number(self.temperature, TEMPERATURE_MAX),
                "must be from 0 to 1e30",
            ),
            ("top_k", _is_int(self.top_k, 0), "must be an int from 0 (off) to 2**31 - 1"),
            ("top_p", _is_number(self.top_p, 1) and self.top_p > 0, "must be above 0, at most 1"),
            ("min_p", _is_number(self.min_p, 1), "must be from 0 to 1"),
            ("seed", seed is None or _is_int(seed, 0, 2**63 - 1), "must be from 0 to 2**63 - 1"),
            (
                "stop",
                isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop),
                "must be a tuple of non-empty texts",
            ),
            (
                "stop_token_ids",
                isinstance(tokens, tuple | list) and all(_is_int(token, 0) for token in tokens),
                "must be a tuple of token ids",
            ),
            ("regex", _is_text(self.regex), "must be a non-empty text"),
            ("json_schema", _is_text(self.json_schema), "must be a text of JSON"),
            (
                "choice",
                isinstance(self.choice, tuple)
                and None not in self.choice
                and all(map(_is_text, self.choice)),
                "must be a tuple of non-empty texts",
            ),
            ("ignore_eos", type(self.ignore_eos) is bool, "must be True or False"),
            (
                "logprobs",
                logprobs is None or _is_int(logprobs, 0),
                "must be an int from 0 to 2**31 - 1",
            ),
        ):
            if not ok:
                raise SettingsError(f"{name} = {getattr(self, name)!r}: {rule}")
        if sum(map(bool, (self.regex, self.json_schema, self.choice))) > 1:
            raise SettingsError("regex, json_schema, choice: give one of them")

    @property
    def has_grammar(self) -> bool:
        """Whether the output is constrained by a grammar."""
        return bool(self.regex or self.json_schema or self.choice)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search parameters, with vLLM's names and the meaning of transformers' `generate`.

    Raises:
        SettingsError: a value is of the wrong type or out of range.
    """

    beam_width: int
    """Number of beams, and of sequences returned."""
    max_tokens: int = 16
    """Maximum number of output tokens."""
    length_penalty: float = 1.0
    """The score of a sequence is its log probability / (number of tokens ** length_penalty)."""
    early_stopping: bool = False
    """True: stop when `beam_width` sequences have ended. False: stop when no unfinished beam would
    have a better score if it ended now."""
    ignore_eos: bool = False
    """True: the model's own end-of-sequence tokens do not end a sequence."""

    def __post_init__(self) -> None:
        is_penalty = type(self.length_penalty) in (int, float) and abs(self.length_penalty) <= 100
        for name, ok, rule in (
            ("beam_width", _is_int(self.beam_width, 1), "must be an int of at least 1"),
            ("max_tokens", _is_int(self.max_tokens, 1), "must be an int from 1 to 2**31 - 1"),
            ("length_penalty", is_penalty, "must be a number from -100 to 100"),
            ("early_stopping", type(self.early_stopping) is bool, "must be True or False"),
            ("ignore_eos", type(self.ignore_eos) is bool, "must be True or False"),
        ):
            if not ok:
                raise SettingsError(f"{name} = {getattr(self, name)!r}: {rule}")


def _is_text(value: object) -> bool:
    """Whether it is a non-empty text, or None."""
    return value is None or (isinstance(value, str) and value != "")


def _is_int(value: object, least: int, most: int = INT_MAX) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: object, most: float) -> bool:
    """Whether it is a number from 0 to `most`; NaN is not."""
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value <= most
