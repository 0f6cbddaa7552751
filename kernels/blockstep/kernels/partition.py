"""The partition of a request's keys into splits, and of the splits among programs.

Plain integer arithmetic, which runs in Python and which Triton compiles: the kernels and the
figures of `benchmarks/attention.py` follow the same rule. No function calls another, and arguments
have no types, since Triton would compile neither; they are integers or tensors.

    request         query tiles, each of `block_q` tokens, for each part of the heads of a KV head
    keys of one     first ... | split 0 | split 1 | ... | the key of its last token

The begin of a split depends only on the lengths of its request, so that the bits of a result do not
depend on the batch. Which program computes a split depends on all lengths.
"""

from __future__ import annotations

from typing import NamedTuple


class Splits(NamedTuple):
    """Numbers that determine how many tiles of keys make a split."""

    wanted: int
    """Splits of a query tile that sees few keys, so that this many programs work on a short
    request."""
    tiles: int
    """Tiles of a split, unless there would be fewer than `wanted` splits."""
    enough: int
    """Number of splits above which they get larger, up to `large` tiles."""
    large: int
    """Tiles of a split, unless there would be more than `most` splits."""
    most: int
    """Most splits of all query tiles of a request together, for a part of the heads."""
    whole: int = 0
    """A query tile that sees at most this many tiles of keys is one split, which nothing merges."""


FEW = Splits(wanted=8, tiles=8, enough=32, large=16, most=128, whole=4)
"""The splits of requests whose query is one tile of few rows: decodes, and short drafts."""
MANY = Splits(wanted=1, tiles=8, enough=32, large=8, most=32)
"""The splits of all other requests. Their results are larger, so merging costs more."""


def find_first_key(position, window, has_window, has_chunks):
    """Return the first key that a token at `position` sees."""
    first = position * 0
    if has_window:
        first = (position - window + 1) * (position >= window)
    if has_chunks:
        first = position - position % window
    return first


def choose_split_tiles(num_tiles, num_query_tiles, splits):
    """Return the tiles of each split of a query tile that sees `num_tiles` tiles of keys.

    All splits but the last have this many.
    """
    short = (num_tiles + splits.wanted - 1) // splits.wanted
    size = splits.tiles - (splits.tiles - short) * (short < splits.tiles)
    grown = (num_tiles + splits.enough - 1) // splits.enough
    grown = splits.large - (splits.large - grown) * (grown < splits.large)
    size = size + (grown - size) * (grown > size)
    capped = (num_tiles * num_query_tiles + splits.most - 1) // splits.most
    size = size + (capped - size) * (capped > size)
    size = size + (num_tiles - size) * (num_tiles <= splits.whole)
    size += size == 0
    num_splits = (num_tiles + size - 1) // size
    num_splits += num_splits == 0
    equal = (num_tiles + num_splits - 1) // num_splits
    return equal + (equal == 0)


def weigh_query_tile(
    query_len,
    seq_len,
    first,
    window,
    block_q,
    tile,
    is_few,
    has_limit,
):
    """Return the key tiles that a query tile of a request sees: exact for few rows, else the mean.

    first: the first key that the request's first token sees. window: with `has_limit`, the most
    keys that a token sees. The mean is that of a line that rises to `window` and then is constant.
    """
    if is_few:
        tiles = (seq_len + tile - 1) // tile - first // tile
    else:
        queries = query_len + (query_len == 0)
        context = seq_len - query_len
        bend = seq_len
        if has_limit:
            bend = window + (seq_len - window) * (seq_len < window)
            bend = bend + (context - bend) * (bend < context)
        keys = (bend - context) * (bend + context) // 2
        if has_limit:
            keys = keys + (seq_len - bend) * window
        tiles = 1 + (keys // queries + block_q // 2) // tile
    return tiles


def has_program_for_each(num_query_tiles, num_tiles, num_programs, splits):
    """Return whether each query tile is computed by a program of its own.

    This is so if there are enough programs, and if all query tiles are single splits because they
    see few tiles of keys, at most `num_tiles`. Each then counts as one tile of keys.
    """
    return (num_query_tiles <= num_programs) & (num_tiles <= splits.whole)


def find_query_tile(index, num_query_tiles):
    """Return the query tile at `index` of the order: last, first, last but one, second, and so on.

    Later query tiles see more keys. Two in this order have about twice the mean.
    """
    half = index // 2
    return half + (num_query_tiles - 1 - 2 * half) * (1 - index % 2)


def count_splits_before(
    program,
    first_tile,
    weight,
    num_splits,
    num_tiles_all,
    num_programs,
):
    """Return the splits of a query tile that programs before `program` compute.

    first_tile: number of the query tile's first tile of keys among `num_tiles_all`. Programs have
    equal ranges, and compute the splits that begin in their range. A short query tile is
    not cut at the end of a range, unless it is much longer than the ranges: merging would take
    longer.
    """
    stop = (program * num_splits * num_tiles_all + num_programs - 1) // num_programs
    share = stop - first_tile * num_splits
    share = share * (share > 0)
    count = (share + weight - 1) // weight
    count = count + (num_splits - count) * (count > num_splits)
    is_whole = (weight <= 8) & (weight * num_programs <= 2 * num_tiles_all)
    is_before = first_tile * num_programs // num_tiles_all < program
    return count + (num_splits * is_before - count) * is_whole


def count_splits_max(num_tiles: int, splits: Splits) -> int:
    """Return the most splits of a query tile that sees at most `num_tiles` tiles of keys."""
    return max(1, min(splits.most, max(splits.wanted, -(-num_tiles // splits.tiles))))
