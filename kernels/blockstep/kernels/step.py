"""The metadata of one step: built before the model runs, and updated after tokens were accepted.

The batch is persistent: row `r` of the block table and of the counters belongs to one request for
as long as it runs. A step schedules some rows, in any order: sequence `s` of the step is the row
`row_indices[s]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockstep.kernels.arguments import Arguments, check_offsets, check_range, check_together
from blockstep.kernels.dispatch import find_kernels


class StepInputs(NamedTuple):
    """Positions and slots of the tokens of a step, and lengths of its sequences."""

    positions: Tensor
    """`[num_tokens]` int64: position of each token in its sequence; 0 for padding."""
    slot_mapping: Tensor
    """`[num_tokens]` int64: slot of each token; -1 for padding."""
    query_start_loc: Tensor
    """`[num_seqs + 1]` int32: index of each sequence's first token, then the number of tokens."""
    seq_lens: Tensor
    """`[num_seqs]` int32: computed tokens and those of this step."""


def prepare_step(
    block_tables: Tensor,
    num_computed_tokens: Tensor,
    num_scheduled_tokens: Tensor,
    block_size: int,
    *,
    row_indices: Tensor | None = None,
    num_tokens: int | None = None,
    out_block_tables: Tensor | None = None,
) -> StepInputs:
    """Return positions, slots, offsets and lengths of a step, from rows of the persistent batch.

        sequence s, row r:  | computed tokens | scheduled tokens |
        positions                             c .. c + n - 1
        slot of position p  block_tables[r, p // block_size] * block_size + p % block_size

    block_tables: `[num_rows, max_blocks]` int32. num_computed_tokens: `[num_rows]` int32.
    num_scheduled_tokens: `[num_seqs]` int32, may be 0. row_indices: `[num_seqs]` int64, the row of
    each sequence; without it, sequence `s` is row `s` and `num_seqs` is `num_rows`. num_tokens: how
    many tokens the outputs have room for, at least those scheduled; the rest is padding. Without it
    the sum is used, which on a GPU waits for the device. out_block_tables: `[num_seqs, max_blocks]`
    int32, receives the rows of the block table in the order of the step, for `paged_attention`: the
    blocks of each sequence's `seq_len` tokens; entries after them are unchanged.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; on the CPU also a row outside
            the batch, counts below 0, tokens past the end of a row, and too small a `num_tokens`.
    """
    arguments = Arguments()
    arguments.check("block_tables", block_tables, "num_rows max_blocks", torch.int32, rows=True)
    arguments.check("num_computed_tokens", num_computed_tokens, "num_rows", torch.int32, rows=True)
    named = "num_rows" if row_indices is None else "num_seqs"
    arguments.check("num_scheduled_tokens", num_scheduled_tokens, named, torch.int32, rows=True)
    if row_indices is not None:
        arguments.check("row_indices", row_indices, "num_seqs", torch.int64, rows=True)
        check_range("row_indices", row_indices, 0, arguments["num_rows"], "rows of block_tables")
    if out_block_tables is not None:
        dims = f"{named} max_blocks"
        arguments.check("out_block_tables", out_block_tables, dims, torch.int32, rows=True)
    if block_size < 1:
        raise ValueError(f"block_size: must be at least 1, but is {block_size}")
    check_range("num_scheduled_tokens", num_scheduled_tokens, 0, 1 << 31, "counts")
    check_range("num_computed_tokens", num_computed_tokens, 0, 1 << 31, "counts")
    if num_tokens is None or not block_tables.is_cuda:
        total = int(num_scheduled_tokens.sum())
        num_tokens = total if num_tokens is None else num_tokens
        if num_tokens < total:
            raise ValueError(
                f"num_tokens: must be at least {total}, the sum of num_scheduled_tokens, but is "
                f"{num_tokens}; leave it out"
            )
    if kernels := find_kernels("step", block_tables):
        made: StepInputs = kernels.launch_prepare_step(
            block_tables, num_computed_tokens, num_scheduled_tokens, block_size, row_indices,
            num_tokens, out_block_tables,
        )  # fmt: skip
        return made
    if row_indices is not None:
        block_tables = block_tables[row_indices]
        num_computed_tokens = num_computed_tokens[row_indices]
    if out_block_tables is not None:
        ends = num_computed_tokens + num_scheduled_tokens + block_size - 1
        used = (
            torch.arange(block_tables.shape[1], device=ends.device) < (ends // block_size)[:, None]
        )
        out_block_tables.copy_(torch.where(used, block_tables, out_block_tables))
    return compute_step(
        block_tables, num_computed_tokens, num_scheduled_tokens, block_size, num_tokens
    )


def compute_step(
    block_tables: Tensor,
    num_computed_tokens: Tensor,
    num_scheduled_tokens: Tensor,
    block_size: int,
    num_tokens: int,
) -> StepInputs:
    """Compute the torch reference of `prepare_step`, with rows already in the order of the step."""
    query_start_loc = torch.zeros(
        len(num_scheduled_tokens) + 1, dtype=torch.int32, device=block_tables.device
    )
    query_start_loc[1:] = num_scheduled_tokens.cumsum(0)
    seq_lens = num_computed_tokens + num_scheduled_tokens
    capacity = block_tables.shape[1] * block_size
    ends = torch.where(num_scheduled_tokens > 0, seq_lens, 0)
    check_range("num_scheduled_tokens", ends, 0, capacity + 1, "tokens whose row has blocks: ends")
    sequences = torch.arange(len(num_scheduled_tokens), device=block_tables.device)
    sequence = sequences.repeat_interleave(num_scheduled_tokens)
    begin = (num_computed_tokens - query_start_loc[:-1]).long()
    at = begin[sequence] + torch.arange(len(sequence), device=block_tables.device)
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=block_tables.device)
    slot_mapping = torch.full_like(positions, -1)
    positions[: len(at)] = at
    block = block_tables[sequence, at // block_size].long()
    slot_mapping[: len(at)] = block * block_size + at % block_size
    return StepInputs(positions, slot_mapping, query_start_loc, seq_lens)


def merge_drafts(
    input_ids: Tensor,
    query_start_loc: Tensor,
    last_token_ids: Tensor,
    draft_token_ids: Tensor,
    cu_num_drafts: Tensor,
) -> Tensor:
    """Write the last sampled token and the drafts of each sequence into the inputs, in place.

        a sequence's tokens of the step:  | prompt or other known tokens | last | drafts |

    The last `1 + num_drafts` tokens of a sequence become `last_token_ids[s]` and its drafts. If
    `last_token_ids[s]` is -1 the sequence is still in its prompt, and its tokens are unchanged; it
    must not have drafts then. input_ids: `[num_tokens]` int64. query_start_loc: `[num_seqs + 1]`
    int32. last_token_ids: `[num_seqs]` int64. draft_token_ids: `[num_drafts]` int64, those of all
    sequences one after the other, and cu_num_drafts: `[num_seqs + 1]` int32, where each begins.

    Returns `[num_drafts + num_seqs]` int64: the rows of the step whose logits are needed, the last
    `1 + num_drafts` of each sequence, in the order of `rejection_sample`. A sequence without tokens
    in this step has no such row: leave it out of the step.

    Raises:
        TypeError, ValueError: a wrong dtype, shape or device; on the CPU also offsets that do not
            ascend and sequences with fewer tokens than `1 + num_drafts`.
    """
    arguments = Arguments()
    arguments.check("input_ids", input_ids, "num_tokens", torch.int64, rows=True)
    arguments.check("query_start_loc", query_start_loc, "num_seqs+1", torch.int32, rows=True)
    arguments.check("last_token_ids", last_token_ids, "num_seqs", torch.int64, rows=True)
    arguments.check("draft_token_ids", draft_token_ids, "num_drafts", torch.int64, rows=True)
    arguments.check("cu_num_drafts", cu_num_drafts, "num_seqs+1", torch.int32, rows=True)
    num_seqs, num_drafts = arguments["num_seqs"], arguments["num_drafts"]
    check_offsets("cu_num_drafts", cu_num_drafts, num_drafts, "the drafts")
    if not input_ids.is_cuda:
        total = min(int(query_start_loc[-1]), len(input_ids))
        check_offsets("query_start_loc", query_start_loc, total, "the tokens")
        short = query_start_loc.diff() <= cu_num_drafts.diff()
        if bool(short.any()):
            raise ValueError(
                f"query_start_loc: each sequence needs 1 + num_drafts tokens, but sequence "
                f"{int(short.nonzero()[0])} has fewer; schedule its drafts or drop them"
            )
        if bool(((last_token_ids < 0) & (cu_num_drafts.diff() > 0)).any()):
            raise ValueError(
                "last_token_ids: is -1 for a sequence with drafts; give the token they follow"
            )
    if kernels := find_kernels("step", input_ids):
        merged: Tensor = kernels.launch_merge_drafts(
            input_ids, query_start_loc, last_token_ids, draft_token_ids, cu_num_drafts
        )
        return merged
    sequences = torch.arange(num_seqs, device=input_ids.device)
    counts = cu_num_drafts.diff().long() + 1
    sequence = sequences.repeat_interleave(counts)
    first = cu_num_drafts[:-1].long() + sequences
    step = torch.arange(num_drafts + num_seqs, device=input_ids.device) - first[sequence]
    rows = (query_start_loc[1:].long() - counts)[sequence] + step
    tokens = torch.empty_like(rows)
    tokens[step == 0] = last_token_ids
    tokens[step > 0] = draft_token_ids
    known = last_token_ids[sequence] >= 0
    input_ids[rows[known]] = tokens[known]
    return rows


def commit_step(
    num_computed_tokens: Tensor,
    last_token_ids: Tensor,
    num_scheduled_tokens: Tensor,
    token_ids: Tensor,
    num_sampled: Tensor,
    cu_num_drafts: Tensor,
    *,
    row_indices: Tensor | None = None,
) -> None:
    """Advance the rows of the persistent batch past a step, in place.

    Scheduled tokens count as computed, except for rejected drafts, whose slots hold keys of tokens
    that the sequence does not have: `scheduled - (num_drafts - (num_sampled - 1))`. The last
    sampled token becomes the row's `last_token_ids`. `num_sampled[s] = 0` means that the sequence
    is still in its prompt and its sample is dropped: all scheduled tokens are computed, and
    `last_token_ids` is unchanged.

    num_computed_tokens: `[num_rows]` int32 and last_token_ids: `[num_rows]` int64, both updated.
    num_scheduled_tokens, num_sampled: `[num_seqs]` int32. token_ids: `[num_seqs, width]` int64 and
    num_sampled as `rejection_sample` returns them. cu_num_drafts: `[num_seqs + 1]` int32.
    row_indices: as in `prepare_step`, no row twice.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; on the CPU also a row outside
            the batch and more sampled tokens than drafts + 1.
    """
    arguments = Arguments()
    arguments.check("num_computed_tokens", num_computed_tokens, "num_rows", torch.int32, rows=True)
    arguments.check("last_token_ids", last_token_ids, "num_rows", torch.int64, rows=True)
    named = "num_rows" if row_indices is None else "num_seqs"
    arguments.check("num_scheduled_tokens", num_scheduled_tokens, named, torch.int32, rows=True)
    arguments.check("token_ids", token_ids, f"{named} width", torch.int64, rows=True)
    arguments.check("num_sampled", num_sampled, named, torch.int32, rows=True)
    arguments.check("cu_num_drafts", cu_num_drafts, f"{named}+1", torch.int32, rows=True)
    if row_indices is not None:
        arguments.check("row_indices", row_indices, "num_seqs", torch.int64, rows=True)
        check_range("row_indices", row_indices, 0, arguments["num_rows"], "rows of the batch")
    if num_scheduled_tokens.numel() == 0:
        return
    check_range("num_sampled", num_sampled, 0, arguments["width"] + 1, "counts of tokens")
    if not num_sampled.is_cuda and bool((num_sampled > cu_num_drafts.diff() + 1).any()):
        raise ValueError("num_sampled: is more than drafts + 1 for a sequence; pass that step's")
    if kernels := find_kernels("step", num_computed_tokens):
        kernels.launch_commit_step(
            num_computed_tokens, last_token_ids, num_scheduled_tokens, token_ids, num_sampled,
            cu_num_drafts, row_indices,
        )  # fmt: skip
        return
    if row_indices is None:
        row_indices = torch.arange(len(num_scheduled_tokens), device=num_sampled.device)
    sampled = num_sampled > 0
    rejected = torch.where(sampled, cu_num_drafts.diff() + 1 - num_sampled, 0)
    num_computed_tokens[row_indices] += num_scheduled_tokens - rejected
    last = token_ids.gather(1, (num_sampled.long() - 1).clamp(min=0)[:, None])[:, 0]
    last_token_ids[row_indices[sampled]] = last[sampled]


def stage_step(
    out_block_tables: Tensor,
    block_tables: Tensor,
    row_indices: Tensor,
    *,
    new_blocks: Tensor | None = None,
    new_places: Tensor | None = None,
    token_ids: Tensor | None = None,
    fed_at: Tensor | None = None,
    last_token_ids: Tensor | None = None,
) -> None:
    """Write new blocks into the persistent block tables, gather the rows of a step, and feed it the
    tokens that the host does not know.

        host     new blocks ---+
                               v
        device   block_tables -----------> out_block_tables     by row_indices
                 last_token_ids ---------> token_ids            where fed_at >= 0

    out_block_tables: `[num_groups, num_seqs, num_columns]` int32, receives the first `num_columns`
    blocks of each sequence in each KV group. block_tables: `[num_groups, num_rows, max_blocks]`
    int32. row_indices: `[num_seqs]` int64, the row of each sequence; a row that gets new blocks is
    there once. new_blocks: `[num_groups, num_new]` int32 and new_places: `[2, num_new]` int64, the
    sequence of each new block and its index in the table. token_ids: `[num_tokens]` int64, fed_at:
    `[num_seqs]` int64 and last_token_ids: `[num_rows]` int64: `token_ids[fed_at[s]]` becomes the
    last token of the row of sequence `s`, unless `fed_at[s]` is -1.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout, or only some of the arguments
            that belong together; on the CPU also an index outside its tensor.
    """
    arguments = Arguments()
    dims = "num_groups num_seqs num_columns"
    arguments.check("out_block_tables", out_block_tables, dims, torch.int32, rows=True)
    dims = "num_groups num_rows max_blocks"
    arguments.check("block_tables", block_tables, dims, torch.int32, rows=True)
    arguments.check("row_indices", row_indices, "num_seqs", torch.int64, rows=True)
    num_seqs, num_columns = arguments["num_seqs"], arguments["num_columns"]
    if num_columns > arguments["max_blocks"]:
        raise ValueError(
            f"out_block_tables: must have at most {arguments['max_blocks']} columns, as "
            f"block_tables has, but has {num_columns}"
        )
    check_range("row_indices", row_indices, 0, arguments["num_rows"], "rows of block_tables")
    check_together(new_blocks=new_blocks, new_places=new_places)
    check_together(token_ids=token_ids, fed_at=fed_at, last_token_ids=last_token_ids)
    if new_blocks is not None and new_places is not None:
        arguments.check("new_blocks", new_blocks, "num_groups num_new", torch.int32, rows=True)
        arguments.check("new_places", new_places, "2 num_new", torch.int64, rows=True)
        check_range("new_places[0]", new_places[0], 0, num_seqs, "sequences of the step")
        check_range("new_places[1]", new_places[1], 0, arguments["max_blocks"], "indices of blocks")
    if token_ids is not None and fed_at is not None and last_token_ids is not None:
        arguments.check("token_ids", token_ids, "num_tokens", torch.int64, rows=True)
        arguments.check("fed_at", fed_at, "num_seqs", torch.int64, rows=True)
        arguments.check("last_token_ids", last_token_ids, "num_rows", torch.int64, rows=True)
        check_range("fed_at", fed_at, -1, arguments["num_tokens"], "indices of token_ids")
    if num_seqs == 0 or len(block_tables) == 0:
        return
    if kernels := find_kernels("step", out_block_tables):
        kernels.launch_stage_step(
            out_block_tables, block_tables, row_indices, new_blocks, new_places, token_ids, fed_at,
            last_token_ids,
        )  # fmt: skip
        return
    if new_blocks is not None and new_places is not None:
        block_tables[:, row_indices[new_places[0]], new_places[1]] = new_blocks
    torch.index_select(block_tables[:, :, :num_columns], 1, row_indices, out=out_block_tables)
    if token_ids is not None and fed_at is not None and last_token_ids is not None:
        is_fed = fed_at >= 0
        token_ids[fed_at[is_fed]] = last_token_ids[row_indices[is_fed]]


def keep_tokens(last_token_ids: Tensor, row_indices: Tensor, token_ids: Tensor) -> None:
    """Write sampled tokens to `last_token_ids`, where the next step takes them from.

    `NO_TOKEN` becomes 0: the host raises an error when it reads the token, and until then the model
    needs a valid index. last_token_ids: `[num_rows]` int64, updated. row_indices and token_ids:
    `[num_seqs]` int64, no row twice.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; on the CPU also a row outside
            the batch.
    """
    arguments = Arguments()
    arguments.check("last_token_ids", last_token_ids, "num_rows", torch.int64, rows=True)
    arguments.check("row_indices", row_indices, "num_seqs", torch.int64, rows=True)
    arguments.check("token_ids", token_ids, "num_seqs", torch.int64, rows=True)
    check_range("row_indices", row_indices, 0, arguments["num_rows"], "rows of last_token_ids")
    if row_indices.numel() == 0:
        return
    if kernels := find_kernels("step", last_token_ids):
        kernels.launch_keep_tokens(last_token_ids, row_indices, token_ids)
        return
    last_token_ids.index_copy_(0, row_indices, token_ids.clamp(min=0))
