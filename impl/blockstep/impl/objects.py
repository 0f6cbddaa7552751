"""Objects: the rows of plans and outputs, a column at a time.

A constructor of a frozen dataclass is called for each row. Here rows are made by one loop: a row
has a class with the same slots and without checks while its fields are set. It takes two thirds of
the time, and rows are most of what a step costs through `apply`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat, starmap
from typing import Any, Final

from blockstep.spec.vocabulary import BlockTables, CachedRow, OutputRow, RequestId, TokenIds

_OPEN_CACHED: Final[Any] = CachedRow.__base__
_OPEN_OUTPUT: Final[Any] = OutputRow.__base__
"""The bases of wide classes have their slots and no checks: see `spec.copies`."""


def make_cached_rows(
    request_ids: Sequence[RequestId],
    new_block_ids: Iterable[BlockTables],
    all_token_ids: Iterable[TokenIds | None],
    num_computed_tokens: Iterable[int],
    num_output_tokens: Iterable[int],
    num_scheduled_tokens: Iterable[int],
    drafts: Iterable[TokenIds],
) -> list[CachedRow]:
    """Return the rows of requests that were running before."""
    made = [*starmap(_OPEN_CACHED, repeat((), len(request_ids)))]
    columns = (num_computed_tokens, num_output_tokens, num_scheduled_tokens, drafts)
    for row, name, blocks, tokens, computed, outputs, scheduled, spec in zip(
        made, request_ids, new_block_ids, all_token_ids, *columns, strict=False
    ):
        row.request_id = name
        row.resumed = False
        row.new_block_ids = blocks
        row.all_token_ids = tokens
        row.num_computed_tokens = computed
        row.num_output_tokens = outputs
        row.num_scheduled_tokens = scheduled
        row.draft_token_ids = spec
        row.__class__ = CachedRow
    return made


def make_output_rows(
    request_ids: Sequence[RequestId],
    new_token_ids: Iterable[TokenIds],
    num_cached_tokens: Iterable[int],
) -> list[OutputRow]:
    """Return the rows of requests that do not finish."""
    made = [*starmap(_OPEN_OUTPUT, repeat((), len(request_ids)))]
    columns = (request_ids, new_token_ids, num_cached_tokens)
    for row, name, tokens, cached in zip(made, *columns, strict=True):
        row.request_id = name
        row.new_token_ids = tokens
        row.finish_reason = row.stop_token_id = row.num_external_tokens = None
        row.num_cached_tokens = cached
        row.__class__ = OutputRow
    return made
