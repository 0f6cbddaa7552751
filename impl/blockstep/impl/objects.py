"""Objects: the rows of plans and outputs, a column at a time.

A constructor of a frozen dataclass is called for each row. Here rows are made by one loop: a row
has a class with the same slots and without checks while its fields are set. It takes two thirds of
the time, and rows are most of what a step costs through `apply`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from blockstep.spec.vocabulary import BlockTables, CachedRow, OutputRow, RequestId, TokenIds


def _open(row_class: Any) -> Any:
    """Return a class with the slots of `row_class`, whose instances may become its instances."""
    return type(f"Open{row_class.__name__}", (), {"__slots__": row_class.__match_args__})


_OPEN_CACHED: Final = _open(CachedRow)
_OPEN_OUTPUT: Final = _open(OutputRow)


def make_cached_rows(
    request_ids: Iterable[RequestId],
    new_block_ids: Iterable[BlockTables],
    all_token_ids: Iterable[TokenIds | None],
    num_computed_tokens: Iterable[int],
    num_output_tokens: Iterable[int],
    num_scheduled_tokens: Iterable[int],
    drafts: Iterable[TokenIds],
) -> list[CachedRow]:
    """Return the rows of requests that were running before."""
    made, make = list[CachedRow](), _OPEN_CACHED
    columns = (num_computed_tokens, num_output_tokens, num_scheduled_tokens, drafts)
    for name, blocks, tokens, computed, outputs, scheduled, spec in zip(
        request_ids, new_block_ids, all_token_ids, *columns, strict=False
    ):
        row = make()
        row.request_id = name
        row.resumed = False
        row.new_block_ids = blocks
        row.all_token_ids = tokens
        row.num_computed_tokens = computed
        row.num_output_tokens = outputs
        row.num_scheduled_tokens = scheduled
        row.draft_token_ids = spec
        row.__class__ = CachedRow
        made.append(row)
    return made


def make_output_rows(
    request_ids: Iterable[RequestId],
    new_token_ids: Iterable[TokenIds],
    num_cached_tokens: Iterable[int],
) -> list[OutputRow]:
    """Return the rows of requests that do not finish."""
    made, make = list[OutputRow](), _OPEN_OUTPUT
    for name, tokens, cached in zip(request_ids, new_token_ids, num_cached_tokens, strict=True):
        row = make()
        row.request_id = name
        row.new_token_ids = tokens
        row.finish_reason = row.stop_token_id = row.num_external_tokens = None
        row.num_cached_tokens = cached
        row.__class__ = OutputRow
        made.append(row)
    return made
