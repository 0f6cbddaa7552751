"""States: the blocks of a recurrent group, and where the worker reads and writes them.

    |  skipped   | read  |    written    | after drafts  |       a chunk; with `align` only the last
    |            | first |          base |   one each    |

The name of a state is that of the prefix it includes. A row starts from the state after the token
before it. It writes the state after its last known token to the block of its last token, its base;
the state after its n-th draft goes n blocks further. States are read before any row of the plan
writes, since a kernel computes all rows of a layer at once. Once drafts are accepted, states at the
boundaries passed are copied to the blocks that end there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from blockstep.conformance.judge.attended import is_recurrent
from blockstep.conformance.judge.worker.view import FrameRow, RequestView
from blockstep.spec.vocabulary import KVGroup, MambaCacheMode


def list_recurrent(groups: Sequence[KVGroup]) -> tuple[int, ...]:
    """Indices of the groups that hold states."""
    return tuple(at for at, group in enumerate(groups) if is_recurrent(group))


def list_written(group: KVGroup, row: FrameRow) -> Iterator[tuple[int, int]]:
    """Yield the states that a row writes: the number of tokens they include, and their table
    index."""
    size, known = group.block_size, _end_of_known(row)
    if row.end <= row.first or known < 1:
        return
    base = (row.end - 1) // size
    if group.mamba_cache_mode is MambaCacheMode.ALL:
        for index in range(row.first // size, min(known // size, base)):
            yield (index + 1) * size, index
    for boundary in range(known, row.end + 1):
        yield boundary, base + boundary - known


def get_read_index(group: KVGroup, view: RequestView, at: int, first: int) -> int:
    """Index of the block with the state after `first` tokens, from which a row starts."""
    return view.state_indices.get(at, (first - 1) // group.block_size)


def list_touched(group: KVGroup, row: FrameRow, at: int) -> set[int]:
    """Indices of the blocks from which a row reads a state, or to which it writes one."""
    touched = {index for _, index in list_written(group, row)}
    if row.first:
        touched.add(get_read_index(group, row.view, at, row.first))
    return touched


def list_copied(group: KVGroup, row: FrameRow) -> Iterator[tuple[int, int]]:
    """Yield source and target index of each state that is copied once its row has sampled."""
    if group.mamba_cache_mode is MambaCacheMode.NONE or row.end <= row.first:
        return
    size, known, base = group.block_size, _end_of_known(row), (row.end - 1) // group.block_size
    for boundary in range(-(-known // size) * size, known + count_accepted(row) + 1, size):
        source, target = base + boundary - known, boundary // size - 1
        if source != target and boundary:
            yield source, target


def move_on(groups: Iterable[tuple[int, KVGroup]], row: FrameRow) -> None:
    """Note in which block of each of these groups the request's state now is."""
    if row.end > row.first:
        for at, group in groups:
            base = (row.end - 1) // group.block_size
            row.view.state_indices[at] = base + count_accepted(row)


def count_accepted(row: FrameRow) -> int:
    """Number of accepted drafts of a row, as far as the worker knows."""
    return max(len(row.sampled) - 1, 0)


def _end_of_known(row: FrameRow) -> int:
    """One past the last position of a row that is not a draft."""
    return row.end - len(row.drafts)
