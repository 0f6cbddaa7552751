"""Padded: the rows of a decode step, as its forward pass takes them, in one piece of memory.

The scheduler's stream writes the rows of a plan while the pass of the plan before reads its own, so
that there are two of them, and one copy brings one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from blockstep.impl.engine.slots import Sampling


class Answers(NamedTuple):
    """Where the tokens of a plan's rows go, and how they are sampled."""

    slots: torch.Tensor
    """[n] int64; the requests that they are for."""
    indices: torch.Tensor
    """[n] int64; output tokens before each."""
    rows: torch.Tensor
    """[n] int64; rows of the state's answers, counted over all places."""
    feeds: torch.Tensor
    """[n] int64; the slot whose next input it is; one that is not used if the row samples none."""
    line: torch.Tensor
    """[1] int64; the plan's line of the journal."""
    sampling: Sampling


TOKEN, IS_FED, POSITION, ADAPTER, SLOT, INDEX, ROW, FEED, LINE, SEED, SLOT_MAPPING = range(11)
"""Rows of `Padded.numbers`; the last is the first of those by KV group."""


def count_words(groups: int, table: int) -> int:
    """Words of 32 bits in a row, with a table of `table` blocks in each of `groups` KV groups."""
    return 2 * _count_numbers(groups) + groups * table + 5


def _count_numbers(groups: int) -> int:
    """Rows of numbers; an even count, so that the tensors behind them are aligned to 16 bytes."""
    return SLOT_MAPPING + groups + (SLOT_MAPPING + groups) % 2


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows of a plan; padding reads the null block, and writes nothing.

    All tensors are views of `flat`.
    """

    flat: torch.Tensor
    """[words] int32"""
    numbers: torch.Tensor
    """[10 + groups, width] int64, or one more"""
    tables: torch.Tensor
    """[groups, width, table] int32"""
    ints: torch.Tensor
    """[2, width] int32: lengths of sequences, top-k."""
    floats: torch.Tensor
    """[3, width] float32: temperature, top-p, min-p."""

    @classmethod
    def view(cls, memory: torch.Tensor, width: int, groups: int, table: int) -> Padded:
        """`width` rows at the beginning of `memory` [at least width * count_words]."""
        ends, count = [0], _count_numbers(groups)
        for words in (2 * count, groups * table, 2, 3):
            ends.append(ends[-1] + words * width)
        numbers, tables, ints, floats = (memory[first:end] for first, end in pairwise(ends))
        return cls(
            memory[: ends[-1]],
            numbers.view(torch.int64).view(count, width),
            tables.view(groups, width, table),
            ints.view(2, width),
            floats.view(torch.float32).view(3, width),
        )

    def fill(
        self,
        tokens: torch.Tensor,
        is_fed: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        adapters: torch.Tensor,
        answers: Answers,
        tables: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Write the rows of a plan.

        tokens, is_fed, positions, adapters: [width] int64. `is_fed` is 1 where the pass before
        samples the token. slot_mapping: [groups, width] int64; tables: [groups, width, table];
        seq_lens: [width].
        """
        sampling, width = answers.sampling, len(tokens)
        numbers = (
            tokens, is_fed, positions, adapters, answers.slots, answers.indices, answers.rows,
            answers.feeds, answers.line.expand(width), sampling.seeds, *slot_mapping,
        )  # fmt: skip
        self.numbers[: len(numbers)].copy_(torch.stack(numbers))
        self.tables.copy_(tables)
        self.ints.copy_(torch.stack((seq_lens, sampling.top_k)))
        self.floats.copy_(torch.stack((sampling.temperature, sampling.top_p, sampling.min_p)))

    def get_slot_mapping(self) -> torch.Tensor:
        """[groups, width]"""
        return self.numbers[SLOT_MAPPING : SLOT_MAPPING + len(self.tables)]

    def copy_from(self, other: Padded) -> None:
        """Become equal to rows of the same width."""
        self.flat.copy_(other.flat)

    def get_answers(self) -> Answers:
        """Where the tokens go."""
        numbers, (temperature, top_p, min_p) = self.numbers, self.floats
        return Answers(
            numbers[SLOT],
            numbers[INDEX],
            numbers[ROW],
            numbers[FEED],
            numbers[LINE, :1],
            Sampling(temperature, self.ints[1], top_p, min_p, numbers[SEED]),
        )
