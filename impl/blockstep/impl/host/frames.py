"""Frames: plans in flight, and the errors of a model output that does not fit one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from blockstep.impl.array_plans import RowDrafts, SlotNames
from blockstep.impl.host import state as c
from blockstep.impl.host.results import NEGATIVE_TOKEN, WRONG_COUNTS, WRONG_NUMBER, WRONG_ROW
from blockstep.impl.host.state import Int32s, Int64s
from blockstep.spec.vocabulary import MAX_INT, RequestId, RowTokens, TokenIds


@dataclass(slots=True, eq=False)
class Frame:
    """A plan in flight."""

    owners: Int64s
    """[2, rows]: request indices, and the births of their requests at the time."""
    names: SlotNames
    """[rows]: request ids."""
    planned: Int32s
    """[PLAN_COLUMNS, rows]"""
    ids: Int32s
    """Draft token ids, row after row, at the end of the array."""

    def build_rows(self) -> dict[RequestId, TokenIds | None]:
        """Return the drafts of each row, None if it does not sample."""
        drafts = RowDrafts(self.planned[c.PLAN_DRAFTS], self.ids)
        return {
            request_id: drafts.get(row, ()) if samples else None
            for row, (request_id, samples) in enumerate(
                zip(self.names.tolist(), self.planned[c.PLAN_SAMPLES].tolist(), strict=True)
            )
        }

    def read_answer(
        self, sampled: tuple[RowTokens, ...]
    ) -> tuple[list[TokenIds], Int32s, Int32s | None] | None:
        """Return the tokens of the rows, as they are and in an array, and their numbers (None: one
        each); None if they are not rows of this frame, in its order, with valid tokens."""
        if type(sampled) is not tuple or {*map(type, sampled)} != {RowTokens}:
            return None
        tokens, names = [row.token_ids for row in sampled], self.names.tolist()
        if {*map(type, tokens)} != {tuple} or [row.request_id for row in sampled] != names:
            return None
        lengths: Int32s | None = None
        try:
            flat = [token for (token,) in tokens]
        except ValueError:  # some row has no token, or several
            flat = [*chain.from_iterable(tokens)]
            lengths = np.fromiter(map(len, tokens), np.int32, len(tokens))
        if not {*map(type, flat)} <= {int} or (flat and (min(flat) < 0 or max(flat) > MAX_INT)):
            return None
        return tokens, np.fromiter(flat, np.int32, len(flat)), lengths

    def describe(self, code: int, detail: int, token_ids: Int32s) -> str:
        """Return what is wrong with a model output in arrays, and the rule."""
        rows, rule = len(self.names), "a row that samples has one token, and one per accepted draft"
        texts = {
            NEGATIVE_TOKEN: "token ids must not be negative",
            WRONG_NUMBER: f"must have {detail} tokens, not {len(token_ids)}",
            WRONG_COUNTS: f"must have {rows} counts, which add up to the number of tokens",
            WRONG_ROW: f"row {detail}: {rule}; any other has none",
        }
        return texts.get(code, f"row {detail} accepts tokens that are not a prefix of its drafts")
