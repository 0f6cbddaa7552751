"""Params: how one request wants its tokens chosen, and when it has enough."""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.impl.engine.errors import SettingsError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names are vLLM's. Without a temperature the likeliest token is taken (greedy).

    Raises:
        SettingsError: a value out of its range.
    """

    max_tokens: int = 16
    """Output tokens, at most."""
    temperature: float = 0.0
    """0: greedy. Above: logits are divided by it, then a token is drawn."""
    top_k: int = 0
    """Draw among the k likeliest tokens, and those as likely as the last of them; 0: all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Draw among tokens that have at least this share of the likeliest one's probability."""
    seed: int | None = None
    """The same seed and text give the same tokens, whatever else is served; None: one is given."""
    stop: tuple[str, ...] = ()
    """Texts that end the output and are cut off it; they need a tokenizer."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside those of the model."""
    ignore_eos: bool = False
    """True: the model's own end-of-sequence tokens do not end it."""
    logprobs: int | None = None
    """So many likeliest tokens are reported with each output token; None: nothing is."""

    def __post_init__(self) -> None:
        for name, ok, rule in (
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "must be 0 or above"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0, and 1 at most"),
            ("min_p", 0 <= self.min_p <= 1, "must be from 0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "must be from 0 to 2**63 - 1"),
            (
                "stop",
                isinstance(self.stop, tuple) and all(self.stop),
                "must be a tuple of non-empty texts",
            ),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "must be 0 or above"),
        ):
            if not ok:
                raise SettingsError(f"{name} = {getattr(self, name)!r}: {rule}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0
