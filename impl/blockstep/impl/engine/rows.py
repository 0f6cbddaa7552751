"""Rows: the numbers, tokens and block tables of the requests in the batch, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blockstep.impl.engine.grammars import Matcher
from blockstep.impl.engine.params import SamplingParams
from blockstep.spec.vocabulary import Config


@dataclass(frozen=True, slots=True)
class Wanted:
    """Sampling parameters, seed and grammar of a request, or of one input of a session."""

    params: SamplingParams
    seed: int
    matcher: Matcher | None = None
    """The grammar state of its outputs, if it has a grammar."""


class Columns:
    """Numbers of each row of the batch, [num_rows] each; int64 unless noted."""

    __slots__ = (
        "adapter", "births", "has_logprobs", "min_p", "num_blocks", "num_cached", "num_computed",
        "num_known", "num_late", "num_pending", "num_prompt", "seeds", "slot", "temperature",
        "top_k", "top_p",
    )  # fmt: skip

    def __init__(self, num_rows: int) -> None:
        def zeros(dtype: type = np.int64) -> np.ndarray:
            return np.zeros(num_rows, dtype)

        self.num_prompt = zeros()
        self.num_known = zeros()
        """Prompt and output tokens, including those of frames in flight."""
        self.num_pending = zeros()
        """Number of last known tokens that the host has not read from the device."""
        self.num_computed = zeros()
        self.num_blocks = zeros()
        """Length of each of its block tables."""
        self.num_late = zeros()
        """Delivered output tokens that `Output.token_ids` does not have yet."""
        self.num_cached = zeros()
        """Prompt tokens from the prefix cache, of rows with late tokens."""
        self.adapter = zeros()
        self.slot = zeros()
        """Request index in the scheduler; -1 if unknown."""
        self.births = zeros()
        """Number of requests that have had this row."""
        self.has_logprobs = zeros(np.bool_)
        """Whether the request wants log probabilities."""
        self.temperature = zeros(np.float32)
        """0 for greedy. For this and the next four see `sample_tokens`."""
        self.top_p = zeros(np.float32)
        self.min_p = zeros(np.float32)
        self.top_k = zeros(np.int32)
        self.seeds = zeros()

    def start(self, index: int, num_prompt: int, adapter: int, wanted: Wanted) -> None:
        """Give a row to a new request."""
        birth, params = self.births[index] + 1, wanted.params
        for name in self.__slots__:
            getattr(self, name)[index] = 0
        self.num_prompt[index], self.adapter[index] = num_prompt, adapter
        self.slot[index], self.births[index] = -1, birth
        self.has_logprobs[index] = params.logprobs is not None
        if not params.is_greedy:
            self.temperature[index], self.seeds[index] = params.temperature, wanted.seed
            self.top_k[index], self.top_p[index] = params.top_k, params.top_p
            self.min_p[index] = params.min_p

    def grow(self) -> None:
        """Double the number of rows."""
        for name in self.__slots__:
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))

    def take(self, index: int) -> Columns:
        """Return a copy of one row."""
        taken = Columns(1)
        for name in self.__slots__:
            getattr(taken, name)[0] = getattr(self, name)[index]
        return taken


class RowArrays:
    """The arrays of the batch, which are replaced by longer ones when all rows are taken."""

    def __init__(self, config: Config, num_rows: int) -> None:
        self.block_size = config.block_size
        self.width = config.max_model_len + config.num_speculative_tokens + 1
        """Positions of a row; drafts may lie past the last token that is ever kept."""
        self.max_blocks = -(-self.width // config.block_size)
        self.token_ids: np.ndarray = np.zeros((num_rows, self.width), dtype=np.int32)
        """[num_rows, width]"""
        self.block_tables: np.ndarray = np.zeros(
            (len(config.kv_groups), num_rows, self.max_blocks), dtype=np.int32
        )
        """[num_groups, num_rows, max_blocks]"""
        self.columns = Columns(num_rows)

    def grow(self) -> None:
        """Double the number of rows."""
        self.token_ids = np.concatenate((self.token_ids, np.zeros_like(self.token_ids)))
        self.block_tables = np.concatenate(
            (self.block_tables, np.zeros_like(self.block_tables)), axis=1
        )
        self.columns.grow()
