"""Staging: from the rows of the batch to the inputs of a forward pass, and back.

    host    token_ids, block_tables, columns --one copy--+         +--> tokens, when asked for
                                                         v         |
    device  tables, last_tokens -----------------> inputs -> pass -> tokens -> last_tokens

Block tables are kept on the device and receive only the new blocks of a step. The last token of
each row is kept there, too: the token that a frame in flight samples is an input of the next step
on the device, and the host need not know it to launch that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from blockstep.impl.engine.adapters import NO_ADAPTER
from blockstep.impl.engine.graphs import PADDING, DecodeGraph, GraphedModel
from blockstep.impl.engine.host_to_device import Layout, send
from blockstep.impl.engine.model import Inputs, Model
from blockstep.impl.engine.rows import RowArrays
from blockstep.kernels import keep_tokens, stage_step


@dataclass(frozen=True, slots=True)
class ArrayStep:
    """The requests of a step, and the tokens that each computes."""

    index: np.ndarray
    """[num_seqs] int64: rows of the batch, in the order of the plan."""
    starts: np.ndarray
    """[num_seqs] int64: position of the first token that runs."""
    counts: np.ndarray
    """[num_seqs] int64: tokens that run, at least 1 each."""
    sampling: np.ndarray | None
    """[num_samples] int64: which of the rows sample a token after their last one; None: all."""

    @property
    def sampling_index(self) -> np.ndarray:
        """[num_samples] int64: rows of the batch that sample."""
        return self.index if self.sampling is None else self.index[self.sampling]


class _Flat(NamedTuple):
    """The tokens of a step, concatenated request by request; see `Inputs`."""

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    adapters: np.ndarray
    has_adapters: bool
    max_query_len: int
    max_seq_len: int


DRAWS = ("temperature", "top_k", "top_p", "min_p", "seeds", "indices")
"""Parameters of `sample_tokens`."""


@dataclass(slots=True)
class Staged:
    """A step that is ready to run."""

    inputs: Inputs
    asking: torch.Tensor | None
    """[num_samples] int64: index of the tokens after which one is sampled; None: after each."""
    rows: torch.Tensor
    """[num_samples] int64: rows of the batch that sample."""
    draws: Mapping[str, torch.Tensor]
    """[num_samples] each: the parameters of `sample_tokens`."""
    graph: DecodeGraph | None
    """The graph whose buffers the inputs are; None: the step runs without a graph."""


class Staging:
    """The device's copy of the batch, and the inputs of each pass."""

    def __init__(self, arrays: RowArrays, device: str) -> None:
        self._arrays = arrays
        self._device = torch.device(device)
        self._is_on_host = self._device.type == "cpu"
        self._changed: list[tuple[np.ndarray, np.ndarray]] = []
        """Rows and places of blocks that `_tables` does not have yet."""
        shape = len(arrays.block_tables), 0, arrays.max_blocks
        self._tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        """[num_groups, num_rows, max_blocks]; empty on a CPU, which uses the batch's own tables."""
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=self._device)
        """[num_rows]: the token that each row sampled last."""
        self._greedy: dict[int, Mapping[str, torch.Tensor]] = {}
        """Parameters by number of rows; see `_take_greedy`."""

    def note_blocks(self, rows: np.ndarray, places: np.ndarray) -> None:
        """Note that blocks were written to the batch's tables, in each group."""
        if not self._is_on_host:
            self._changed.append((rows, places))

    def keep_tokens(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep the tokens that `rows` have sampled, for the next step."""
        self._grow()
        if self._is_on_host:
            self._last_tokens.index_copy_(0, rows, tokens.clamp(min=0))
        else:
            keep_tokens(self._last_tokens, rows, tokens)

    def build(self, step: ArrayStep, model: Model | None = None) -> Staged:
        """Return the inputs of a pass over `step`, on the device.

        If a graph of `model` can run the pass, they are the buffers of that graph, and the rows up
        to its size are padding.
        """
        index, counts, sampling = step.index, step.counts, step.sampling
        num_seqs, made = len(index), self._flatten(step)
        graph = None
        if made.max_query_len == 1 and isinstance(model, GraphedModel):
            graph = model.find_graph(num_seqs, made.has_adapters)
        if graph is None:
            size, into = num_seqs, None
            arrays = [*made[:4], made.query_start_loc]
            arrays += [made.adapters] if made.has_adapters else []
        else:
            size, into = graph.size, graph.flat
            arrays = [_pad(getattr(made, name), size, PADDING[name]) for name in made._fields[:4]]
            arrays += (
                [_pad(made.adapters, size, PADDING["adapters"])] if graph.lays_out_adapters else []
            )
        num_base = len(arrays)
        more: dict[str, np.ndarray] = {"rows": _pad(index, size, 0)}
        if sampling is not None:
            more["sampling"] = index[sampling]
        if sampling is not None or made.max_query_len > 1:
            lasts = np.cumsum(counts) - 1
            more["asking"] = lasts if sampling is None else lasts[sampling]
        self._add_fed(more, step, size)
        self._add_draws(more, step)
        new = self._take_new_blocks(index)
        has_room = True
        if new and into is not None:
            layout = Layout.of([*arrays, *more.values(), *new.values()])
            has_room = layout.num_bytes <= len(into)
        if has_room:
            more |= new
        sent = send([*arrays, *more.values()], self._device, into)
        named = dict(zip(more, sent[num_base:], strict=True))
        if not has_room:
            named |= zip(new, send([*new.values()], self._device), strict=True)
        tables = self._fill(named, sent[0], made.max_seq_len, graph)
        if graph is not None:
            inputs = graph.inputs
        else:
            inputs = Inputs(
                token_ids=sent[0],
                positions=sent[1],
                slot_mapping=sent[2],
                block_tables=tables,
                query_start_loc=sent[4],
                seq_lens=sent[3],
                max_query_len=made.max_query_len,
                adapters=sent[5] if made.has_adapters else None,
            )
        rows = named.get("sampling", named["rows"][:num_seqs])
        if "seeds" in named:
            draws: Mapping[str, torch.Tensor] = {name: named[name] for name in DRAWS}
        else:
            draws = self._take_greedy(len(rows))
        return Staged(inputs, named.get("asking"), rows, draws, graph)

    def _flatten(self, step: ArrayStep) -> _Flat:
        """Return tokens, positions and slots of a step, in the order of the rows."""
        arrays = self._arrays
        index, starts, counts = step.index, step.starts, step.counts
        ends = starts + counts
        max_query_len = int(counts.max())
        adapters = arrays.columns.adapter[index]
        has_adapters = bool((adapters != NO_ADAPTER).any())
        query_start_loc = np.zeros(len(index) + 1, np.int32)
        counts.cumsum(out=query_start_loc[1:], dtype=np.int32)
        of_token, positions = index, starts
        if max_query_len > 1:
            of_token, adapters = index.repeat(counts), adapters.repeat(counts)
            offsets = (starts - query_start_loc[:-1]).repeat(counts)
            positions = np.arange(len(offsets)) + offsets
        tokens = arrays.token_ids.reshape(-1).take(of_token * arrays.width + positions)
        size = arrays.block_size
        places = of_token * arrays.max_blocks + positions // size
        blocks = arrays.block_tables.reshape(len(arrays.block_tables), -1).take(places, 1)
        return _Flat(
            tokens.astype(np.int64),
            positions,
            blocks * np.int64(size) + positions % size,
            ends.astype(np.int32),
            query_start_loc,
            adapters,
            has_adapters,
            max_query_len,
            int(ends.max()),
        )

    def _add_fed(self, more: dict[str, np.ndarray], step: ArrayStep, size: int) -> None:
        """Add `fed_at` if the host does not know all tokens: a frame in flight samples the last one
        of some rows.

        For each row, and padding up to `size`: the index of this token in the step, or -1.
        """
        columns, index = self._arrays.columns, step.index
        lasts = columns.num_known[index] - 1
        is_fed = (columns.num_pending[index] > 0) & (lasts < step.starts + step.counts)
        if is_fed.any():
            before = step.counts.cumsum() - step.counts
            more["fed_at"] = _pad(np.where(is_fed, before + lasts - step.starts, -1), size, -1)

    def _add_draws(self, more: dict[str, np.ndarray], step: ArrayStep) -> None:
        """Add the parameters of `sample_tokens`, if any row is not greedy."""
        columns, index = self._arrays.columns, step.sampling_index
        temperature = columns.temperature[index]
        if temperature.any():
            more["temperature"] = temperature
            for name in ("top_k", "top_p", "min_p", "seeds"):
                more[name] = getattr(columns, name)[index]
            more["indices"] = columns.num_known[index] - columns.num_prompt[index]

    def _take_greedy(self, num_rows: int) -> Mapping[str, torch.Tensor]:
        """Return the parameters of `sample_tokens` for greedy rows: zeros."""
        if num_rows not in self._greedy:
            zeros = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
            dtypes = {"seeds": torch.int64, "indices": torch.int64, "top_k": torch.int32}
            self._greedy[num_rows] = {
                name: zeros.view(dtypes.get(name, torch.float32))[:num_rows] for name in DRAWS
            }
        return self._greedy[num_rows]

    def lacks_tokens(self, step: ArrayStep) -> bool:
        """Whether a step needs tokens of frames in flight that only the host could provide.

        The device passes on only the last token of a row. This step computes further pending
        tokens.
        """
        columns, index = self._arrays.columns, step.index
        is_behind = step.starts < columns.num_known[index] - 1
        return bool((is_behind & (columns.num_pending[index] > 1)).any())

    def _take_new_blocks(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """Return blocks that the device's tables lack: `new_blocks` and `new_places` of rows of a
        step, as `stage_step` wants them.

        Those of other rows are written to the tables at once.
        """
        if not self._changed:
            return {}
        self._grow()
        tables = self._arrays.block_tables
        rows = np.concatenate([rows for rows, _ in self._changed])
        columns = np.concatenate([columns for _, columns in self._changed])
        self._changed.clear()
        sequence = np.full(tables.shape[1], -1, np.int64)
        sequence[index] = np.arange(len(index))
        sequence = sequence[rows]
        is_here = sequence >= 0
        if not is_here.all():
            away = rows[~is_here], columns[~is_here]
            places = away[0] * tables.shape[2] + away[1]
            places = np.arange(len(tables))[:, None] * tables[0].size + places
            sent = send([places.reshape(-1), tables[:, *away].reshape(-1)], self._device)
            self._tables.view(-1).index_copy_(0, *sent)
            rows, columns, sequence = rows[is_here], columns[is_here], sequence[is_here]
        if not len(rows):
            return {}
        return {
            "new_blocks": tables[:, rows, columns],
            "new_places": np.stack((sequence, columns)),
        }

    def _fill(
        self,
        named: Mapping[str, torch.Tensor],
        token_ids: torch.Tensor,
        max_seq_len: int,
        graph: DecodeGraph | None,
    ) -> torch.Tensor:
        """Put the tokens kept on the device at their places among `token_ids`; return the block
        tables of the rows, [num_groups, num_rows, blocks of the longest row].
        """
        self._grow()
        arrays, rows, kept = self._arrays, named["rows"], self._last_tokens
        num_blocks = -(-max_seq_len // arrays.block_size)
        if self._is_on_host:  # the batch's own arrays, without the checks of `stage_step`
            index = rows.numpy()
            if "fed_at" in named:
                at = named["fed_at"].numpy()
                is_fed = at >= 0
                token_ids.numpy()[at[is_fed]] = kept.numpy()[index[is_fed]]
            return torch.from_numpy(arrays.block_tables[:, :, :num_blocks].take(index, 1))
        if graph is None:
            shape = len(self._tables), len(rows), num_blocks
            tables = torch.empty(shape, dtype=torch.int32, device=self._device)
        else:
            tables = graph.inputs.block_tables[:, :, :num_blocks]
        fed: dict[str, torch.Tensor] = {}
        if "fed_at" in named:
            fed = {"token_ids": token_ids, "fed_at": named["fed_at"], "last_token_ids": kept}
        new = {name: named[name] for name in ("new_blocks", "new_places") if name in named}
        stage_step(tables, self._tables, rows, **new, **fed)
        return tables

    def _grow(self) -> None:
        """Grow to as many rows as the batch has."""
        shape = self._arrays.block_tables.shape
        if len(self._last_tokens) < shape[1]:
            kept = self._last_tokens
            self._last_tokens = torch.zeros(shape[1], dtype=torch.int64, device=self._device)
            self._last_tokens[: len(kept)].copy_(kept)
            if not self._is_on_host:
                tables = self._tables
                self._tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
                self._tables[:, : tables.shape[1]].copy_(tables)


def _pad(values: np.ndarray, size: int, value: int) -> np.ndarray:
    """Return an array [..., num_rows], padded with `value` to [..., size]."""
    num_rows = values.shape[-1]
    if num_rows == size:
        return values
    padded = np.full((*values.shape[:-1], size), value, values.dtype)
    padded[..., :num_rows] = values
    return padded
