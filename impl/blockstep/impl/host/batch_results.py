"""Results for many rows at once: the same as `results`, through numpy.

Most rows of a commit gain tokens and go on. Those that may end are picked out by comparisons of
whole arrays, and `results` has the last word on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockstep.impl.arrays import ArrayOutputs, Int32s, make_outputs
from blockstep.impl.host.frames import Frame
from blockstep.impl.host.results import Results
from blockstep.impl.host.table import BY_REPETITION, STOP_BITS, TAIL
from blockstep.impl.refusals import bad_result
from blockstep.spec.vocabulary import (
    Commit,
    FinishReason,
    FrameId,
    Outputs,
    Rejected,
    RequestId,
    TokenIds,
)

_SETTLE: Final = TAIL // 2
"""Tokens that come in arrays are settled each time a request has so many more."""
_LAG: Final = 8
"""So many tokens later, in fact: the last block before has been published by then."""


class BatchedResults(Results):
    """Takes Commit, oldest frame first, and the answer to a plan in arrays."""

    def _commit(self, event: Commit) -> Outputs | Rejected:
        frame_id = event.frame_id
        frame = self._find_frame(frame_id)
        if isinstance(frame, Rejected):
            return frame
        answers = {row.request_id: row.token_ids for row in event.sampled}
        problem = self._result_problem(frame_id, len(event.sampled), frame, answers)
        if problem is not None:
            return problem
        if isinstance(frame, Frame):
            tokens = [answers[name] for name in frame]
            flat = np.fromiter((token for row in tokens for token in row), np.int32)
            counts = np.fromiter(map(len, tokens), np.int32) if frame.drafts else None
            return self._commit_each(frame_id, frame, flat, counts).build_outputs()
        rows = self._deliver_rows(frame, answers)
        self._close_frame(frame_id)
        return Outputs(tuple(rows))

    def _commit_few(
        self,
        frame_id: FrameId,
        frame: Mapping[RequestId, TokenIds | None],
        token_ids: Int32s,
        counts: Int32s | None,
    ) -> ArrayOutputs | Rejected:
        """An answer in arrays, taken row by row."""
        flat, lengths = token_ids.tolist(), None if counts is None else counts.tolist()
        answers: dict[RequestId, TokenIds] = {}
        start = 0
        if lengths is None:
            lengths = [drafts is not None for drafts in frame.values()]
        for name, length in zip(frame, lengths, strict=False):
            answers[name] = tuple(flat[start : start + length])
            start += length
        if start != len(flat) or min(flat, default=0) < 0:
            return bad_result(frame_id, f"must have {start} tokens, none negative; see counts")
        problem = self._result_problem(frame_id, len(lengths), frame, answers)
        if problem is not None:
            return problem
        rows = self._deliver_rows(frame, answers)
        self._close_frame(frame_id)
        return make_outputs(rows)

    def _array_problem(
        self, frame_id: FrameId, frame: Frame, token_ids: Int32s, counts: Int32s | None
    ) -> Rejected | None:
        """Why the arrays do not answer the frame, or None."""
        num_rows = len(frame)
        if len(token_ids) and int(token_ids.min()) < 0:
            return bad_result(frame_id, "token ids must not be negative")
        samples = frame.samples
        if counts is None:
            due = num_rows if samples is None else int(np.count_nonzero(samples))
            if len(token_ids) != due:
                return bad_result(frame_id, f"must have {due} tokens, not {len(token_ids)}")
            return None
        if len(counts) != num_rows or int(counts.sum()) != len(token_ids):
            return bad_result(
                frame_id, f"must have {num_rows} counts, which add up to the number of tokens"
            )
        most = np.ones(num_rows, np.int32) if samples is None else samples.astype(np.int32)
        for row, drafts in frame.drafts.items():
            most[row] += len(drafts) if most[row] else 0
        if ((counts > most) | ((counts < 1) & (most > 0))).any():
            return bad_result(
                frame_id,
                "a row that samples has one token, and one per accepted "
                "draft; any other row has none",
            )
        if self.async_scheduling:
            return None
        ends = np.cumsum(counts).tolist()
        flat = token_ids.tolist()
        for row, drafts in frame.drafts.items():
            accepted = tuple(flat[ends[row] - int(counts[row]) : max(ends[row] - 1, 0)])
            if counts[row] and accepted != drafts[: len(accepted)]:
                return bad_result(frame_id, f"row {row} accepts {accepted}, not among {drafts}")
        return None

    def _commit_each(
        self, frame_id: FrameId, frame: Frame, token_ids: Int32s, counts: Int32s | None
    ) -> ArrayOutputs:
        """Store, deliver and end; the answer has been found to fit the frame."""
        columns = self.table.columns
        slots, births, names, places = frame.slots, frame.births, frame.names, None
        if frame.samples is not None:
            places = frame.samples.nonzero()[0]
            slots, births, names = slots[places], births[places], names[places]
            counts = counts if counts is None else counts[places]
        lives = columns.births.take(slots) == births
        drafts = frame.drafts
        if np.count_nonzero(lives) < len(slots):  # aborted meanwhile
            token_ids = token_ids[lives if counts is None else np.repeat(lives, counts)]
            counts = counts if counts is None else counts[lives]
            slots, names = slots[lives], names[lives]
            places = lives.nonzero()[0] if places is None else places[lives]
        if self.async_scheduling:
            columns.num_output_placeholders[slots] -= 1
        if drafts:
            row_of = range(len(slots)) if places is None else places.tolist()
            self._roll_back_each(slots, counts, [drafts.get(row, ()) for row in row_of])
        outputs = ArrayOutputs(names, token_ids, counts, columns.num_cached_tokens.take(slots), {})
        self._store_each(slots, outputs)
        self._close_frame(frame_id)
        return outputs

    def _roll_back_each(
        self, slots: NDArray[np.int64], counts: Int32s | None, drafts: list[TokenIds]
    ) -> None:
        """`_keep_promise` and `_roll_back` for all rows."""
        columns = self.table.columns
        offered = np.fromiter(map(len, drafts), np.int32, len(drafts))
        accepted = np.zeros(len(slots), np.int32) if counts is None else counts - 1
        if self.async_scheduling:
            columns.num_output_placeholders[slots] -= offered
        runs = columns.num_held_blocks.take(slots) > 0  # it may have been preempted meanwhile
        columns.num_computed[slots[runs]] -= (offered - accepted)[runs]
        self.drafts_scheduled += int(offered.sum())
        self.drafts_accepted += int(accepted[offered > 0].sum())

    def _store_each(self, slots: NDArray[np.int64], outputs: ArrayOutputs) -> None:
        """Store the tokens of all rows, and end who ends, in the order of the rows."""
        columns, tokens, counts = self.table.columns, outputs.token_ids, outputs.counts
        known = columns.num_known.take(slots)
        after: Int32s = known + 1 if counts is None else known + counts
        special = self._may_end(slots, after, tokens, counts)
        if self.async_scheduling:
            special |= columns.num_held_blocks.take(slots) == 0  # preempted: no tail
        is_plain = not np.count_nonzero(special)
        if counts is None:
            kept = slice(None) if is_plain else ~special
            at, starts = known[kept], slots[kept]
            columns.tails[starts * TAIL + (at & (TAIL - 1))] = tokens[kept]
            columns.num_known[starts] = after[kept]
        else:
            self._store_several(slots[~special], known[~special], tokens, counts, special)
        crossing = ((known - _LAG) ^ (after - _LAG)) >= _SETTLE
        if np.count_nonzero(crossing):
            # A block that is not full yet stays in one piece.
            size = self.block_size if self.block_size <= _SETTLE // 2 else 1
            for slot in slots[crossing & ~special].tolist():
                self.table.settle(slot, self.table.num_known[slot] % size)
        if self.async_scheduling and self.config.enable_prefix_caching:
            settled = columns.num_cached_blocks.take(slots)
            special |= (after - 1) >= (settled + 1) * self.block_size
        elif is_plain:
            return
        self._deliver_special(slots, special, known, outputs)

    def _may_end(
        self, slots: NDArray[np.int64], after: Int32s, tokens: Int32s, counts: Int32s | None
    ) -> NDArray[np.bool_]:
        """Which rows `_accept` must look at: no other can end with these tokens."""
        columns = self.table.columns
        found: NDArray[np.bool_] = after >= columns.max_known.take(slots)
        if self.table.num_watched:
            watched = columns.is_watched.take(slots)
            stops = columns.may_stop.take(tokens & STOP_BITS)
            if counts is not None and len(counts):
                stops = np.logical_or.reduceat(stops, np.cumsum(counts) - counts)
            found |= (stops & (watched > 0)) | (watched >= BY_REPETITION)
        if counts is not None:
            found |= counts > _SETTLE // 2  # a tail has no room for more beside what is left in it
        return found

    def _store_several(
        self,
        slots: NDArray[np.int64],
        known: Int32s,
        tokens: Int32s,
        counts: Int32s,
        special: NDArray[np.bool_],
    ) -> None:
        """Several tokens of each row into the tails; `tokens` and `counts` are of all rows."""
        kept = ~special
        tokens, counts = tokens[np.repeat(kept, counts)], counts[kept]
        ends = np.cumsum(counts)
        within = np.arange(len(tokens)) - np.repeat(ends - counts, counts)
        at = np.repeat(known, counts) + within
        columns = self.table.columns
        columns.tails[np.repeat(slots * TAIL, counts) + (at & (TAIL - 1))] = tokens
        columns.num_known[slots] = known + counts

    def _deliver_special(
        self,
        slots: NDArray[np.int64],
        special: NDArray[np.bool_],
        known: Int32s,
        outputs: ArrayOutputs,
    ) -> None:
        """Rows one at a time: those that may end, and those that publish with this commit."""
        counts = outputs.counts
        ends = np.arange(1, len(slots) + 1) if counts is None else np.cumsum(counts)
        starts = ends - (1 if counts is None else counts)
        cut: dict[int, int] = {}
        for row in special.nonzero()[0].tolist():
            slot = int(slots[row])
            if self.table.num_known[slot] > known[row]:
                self._publish_verified(slot)  # stored already
                continue
            tokens = tuple(outputs.token_ids[starts[row] : ends[row]].tolist())
            delivered, reason, stop_token_id = self._accept_and_end(slot, tokens)
            if len(delivered) < len(tokens):
                cut[row] = len(delivered)
            if reason is not None:
                outputs.ended[row] = (reason, stop_token_id)
        if cut:
            self._cut_outputs(outputs, cut)

    def _accept_and_end(
        self, slot: int, tokens: TokenIds
    ) -> tuple[TokenIds, FinishReason | None, int | None]:
        row = self._deliver(slot, tokens)
        return row.new_token_ids, row.finish_reason, row.stop_token_id

    def _cut_outputs(self, outputs: ArrayOutputs, cut: dict[int, int]) -> None:
        """Rows that ended within their tokens deliver so many only."""
        assert outputs.counts is not None, "one token of a row is delivered"
        counts = outputs.counts.copy()
        starts = np.cumsum(counts) - counts
        kept = np.ones(len(outputs.token_ids), np.bool_)
        for row, count in cut.items():
            kept[starts[row] + count : starts[row] + counts[row]] = False
            counts[row] = count
        outputs.token_ids, outputs.counts = outputs.token_ids[kept], counts
