"""The journal of a burst as the host reads it, and memory of the rows of a padded step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blockstep.impl.device import layout
from blockstep.impl.engine.errors import EngineError
from blockstep.impl.engine.graphs import get_graph_sizes
from blockstep.impl.engine.journal import COLUMNS, CommitRan, JournalReader, PlanRan
from blockstep.impl.engine.padded import Padded, count_words
from blockstep.impl.engine.sampler import NO_TOKEN
from blockstep.spec.vocabulary import FinishReason

NAMES = {2: "a", 5: "b"}


def make_lines(
    *launches: tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]],
) -> np.ndarray:
    """Return lines of launches: rows (slot, tokens, samples, sampled) and records of commits.

    A record is (tokens delivered, verdict); no request has cached tokens.
    """
    lines = np.zeros((len(launches), COLUMNS, 3), np.int32)
    for line, (rows, records) in zip(lines, launches, strict=True):
        for number, row in enumerate(rows):
            line[:4, number] = row
        for number, record in enumerate(records):
            line[4:6, number] = record
    return lines


def test_two_frames_are_committed_one_plan_late() -> None:
    """Request a finishes by a token that the next plan did not know: its row there is dropped."""
    both = [(2, 1, 1, 7), (5, 1, 1, 8)]
    lines = make_lines(
        (both, []),
        ([(2, 1, 1, 9), (5, 1, 1, 10)], []),
        ([(5, 1, 1, 11)], [(1, layout.BY_EOS), (1, layout.GOES_ON)]),
        ([], [(layout.NONE, 0), (1, layout.GOES_ON)]),
        ([], [(1, layout.BY_LENGTH)]),
    )
    reader = JournalReader(lines, NAMES, num_frames=2)
    steps = reader.read(num_plans=3, first_frame_id=40)
    assert [(type(step), step.frame_id) for step in steps] == [
        (PlanRan, 40), (PlanRan, 41), (CommitRan, 40), (PlanRan, 42), (CommitRan, 41),
        (CommitRan, 42),
    ]  # fmt: skip
    rows = [
        [(row.request_id, row.new_token_ids, row.finish_reason) for row in step.outputs.rows]
        for step in steps
        if isinstance(step, CommitRan)
    ]
    assert rows == [
        [("a", (7,), FinishReason.STOP), ("b", (8,), None)],
        [("b", (10,), None)],
        [("b", (11,), FinishReason.LENGTH)],
    ]
    assert reader.ended == [(2, "a"), (5, "b")]
    assert reader.unreported == {"b"}  # the plan after the end of a has reported it
    assert reader.last_names == ("b",)


def test_an_empty_plan_is_followed_by_a_commit() -> None:
    lines = make_lines(
        ([(2, 3, 0, 99)], []),
        ([], []),
        ([(2, 2, 1, 6)], [(layout.NONE, 0)]),
        ([], [(1, layout.GOES_ON)]),
        ([], []),
    )
    steps = JournalReader(lines, NAMES, num_frames=2).read(num_plans=3, first_frame_id=0)
    kinds = [(type(step), step.frame_id) for step in steps]
    assert kinds == [
        (PlanRan, 0), (PlanRan, 1), (CommitRan, 0), (PlanRan, 2), (CommitRan, 2),
    ]  # fmt: skip
    first = steps[2]
    assert isinstance(first, CommitRan)
    assert [row.token_ids for row in first.sampled] == [()]
    assert first.outputs.rows == ()


@pytest.mark.parametrize("samples", [0, 1])
def test_a_row_that_samples_no_token_is_an_error(samples: int) -> None:
    lines = make_lines(([(2, 1, samples, NO_TOKEN)], []), ([], [(1, layout.GOES_ON)]))
    reader = JournalReader(lines, NAMES, num_frames=1)
    if samples:
        with pytest.raises(EngineError, match="logits are not finite"):
            reader.read(1, 0)
    else:
        assert len(reader.read(1, 0)) == 2


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("width", get_graph_sizes(40))
def test_every_tensor_of_padded_rows_is_aligned_and_its_own(width: int, groups: int) -> None:
    table = 16
    memory = torch.zeros(width * count_words(groups, table), dtype=torch.int32)
    rows = Padded.view(memory, width, groups, table)
    tensors = rows.numbers, rows.tables, rows.ints, rows.floats
    for number, tensor in enumerate(tensors, 1):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors, 1):
        assert bool((tensor == number).all())
    for tensor in tensors[:3]:
        assert (tensor.data_ptr() - memory.data_ptr()) % 16 == 0
    assert rows.flat.numel() == memory.numel()
