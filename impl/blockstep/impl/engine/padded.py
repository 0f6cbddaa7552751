"""Padded: the rows of a padded decode step, as its forward pass reads them, in one tensor.

The scheduler's stream writes the rows of the next plan while the forward pass of the current one
reads its own. So there are two of them, and the launch that takes the sampled tokens of the current
one also copies the next into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import torch

from blockstep.impl.engine.slots import Sampling


class Answers(NamedTuple):
    """Destinations of the sampled tokens of a plan's rows, and sampling parameters."""

    slots: torch.Tensor
    """[n] int64: request indices."""
    indices: torch.Tensor
    """[n] int64: number of output tokens before each."""
    rows: torch.Tensor
    """[n] int64: rows of the state's model outputs, counted over all frames."""
    feeds: torch.Tensor
    """[n] int64: the request index whose next input token it is; an unused one if the row does not
    sample."""
    line: torch.Tensor
    """[1] int64: the plan's line of the journal."""
    sampling: Sampling


TOKEN, FED, POSITION, ADAPTER, SLOT, INDEX, ROW, FEED, LINE, SEED, SLOT_MAPPING = range(11)
"""Rows of `Padded.numbers`; the last is the first of the slot mappings, one per KV group.

FED is the row of the previous plan that samples this row's token, or KNOWN or ELSEWHERE."""
KNOWN: Final = -1
"""The token is known: TOKEN."""
ELSEWHERE: Final = -2
"""An earlier plan's pass sampled the token, and none since for this request."""


def count_words(groups: int, table: int) -> int:
    """Return 32-bit words per row: `groups` KV groups with a table of `table` blocks each."""
    return 2 * _count_numbers(groups) + groups * table + 5


def _count_numbers(groups: int) -> int:
    """Return the rows of numbers, rounded up to even so that later tensors are aligned to 16
    bytes."""
    return SLOT_MAPPING + groups + (SLOT_MAPPING + groups) % 2


@dataclass(frozen=True, slots=True)
class Padded:
    """The rows of a plan, padded to a fixed width; padding reads the null block and writes nothing.

    All tensors are views of `flat`.
    """

    flat: torch.Tensor
    """[words] int32"""
    numbers: torch.Tensor
    """[10 + groups, rounded up to even, width] int64: see `TOKEN` and its siblings"""
    tables: torch.Tensor
    """[groups, width, table] int32"""
    ints: torch.Tensor
    """[2, width] int32: sequence lengths, top-k."""
    floats: torch.Tensor
    """[3, width] float32: temperature, top-p, min-p."""

    @classmethod
    def view(cls, memory: torch.Tensor, width: int, groups: int, table: int) -> Padded:
        """Return a view of `width` rows at the beginning of `memory` [at least width *
        count_words]."""
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
        fed: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        adapters: torch.Tensor,
        answers: Answers,
        tables: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Write the rows of a plan.

        tokens, fed, positions, adapters: [width] int64. slot_mapping: [groups, width] int64;
        tables: [groups, width, table]; seq_lens: [width].
        """
        sampling, width = answers.sampling, len(tokens)
        numbers = (
            tokens, fed, positions, adapters, answers.slots, answers.indices, answers.rows,
            answers.feeds, answers.line.expand(width), sampling.seeds, *slot_mapping,
        )  # fmt: skip
        self.numbers[: len(numbers)].copy_(torch.stack(numbers))
        self.tables.copy_(tables)
        self.ints.copy_(torch.stack((seq_lens, sampling.top_k)))
        self.floats.copy_(torch.stack((sampling.temperature, sampling.top_p, sampling.min_p)))

    def get_slot_mapping(self) -> torch.Tensor:
        """Return the slot mapping of each KV group, [groups, width]."""
        return self.numbers[SLOT_MAPPING : SLOT_MAPPING + len(self.tables)]

    def copy_from(self, other: Padded) -> None:
        """Copy all rows from `other`, which has the same width."""
        self.flat.copy_(other.flat)

    def get_answers(self) -> Answers:
        """Return where the sampled tokens are written, and how they are sampled."""
        numbers, (temperature, top_p, min_p) = self.numbers, self.floats
        return Answers(
            numbers[SLOT],
            numbers[INDEX],
            numbers[ROW],
            numbers[FEED],
            numbers[LINE, :1],
            Sampling(temperature, self.ints[1], top_p, min_p, numbers[SEED]),
        )
