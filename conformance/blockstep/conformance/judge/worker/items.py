"""Items: the worker's encoder cache, and whether each row finds there the items that it reads.

    plan -> drop what it names -> compute, or load, what it names -> each row reads its embeddings

The drops come first: an item that a plan drops and computes is present (upstream #52482).

Encoder-decoder inputs are not kept: the first rows of their requests read what the plan computes
and write it to their cross-attention blocks; the next plan drops it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blockstep.conformance.judge.worker.request_view import FrameRow
from blockstep.conformance.judge.worker.sampling import NextToken, Sampling
from blockstep.spec import vocabulary as v


class Items(Sampling):
    """A worker's cache of encoded items."""

    def __init__(self, config: v.Config, next_token: NextToken) -> None:
        super().__init__(config, next_token)
        self.encoded: dict[str, int] = {}
        """The number of embeddings of each cached item, by identifier."""

    def forget_items(self) -> None:
        """Note a reset of the encoder: the cache is empty."""
        self.encoded.clear()

    def encode(self, plan: v.Plan, rows: Sequence[FrameRow]) -> None:
        """Drop, compute and load what a plan names; then let every row read."""
        for identifier in plan.free_encoder_mm_hashes:
            self.encoded.pop(identifier, None)
        filled: set[str] = set()
        self.made_for = {entry.request_id for entry in plan.scheduled_encoder_inputs}
        made = self._fill(plan.scheduled_encoder_inputs, filled)
        self._fill(plan.external_encoder_inputs, filled)
        budget, size = self.config.encoder_compute_budget, self.config.encoder_cache_size
        if made > budget:
            what = f"{made} embeddings are made in one step, {budget} may be"
            self._complain("P9", "plan_stays_within_encoder_compute_budget", what)
        is_beside = self.config.is_encoder_decoder
        held = made if is_beside else sum(self.encoded.values())
        if held > size:
            what = f"{held} embeddings of {sorted(self.encoded)} are kept, {size} may be"
            self._complain("P9", "items_stay_within_encoder_cache_size", what)
        kept = sorted(self.encoded.keys() - filled) if is_beside else ()
        if kept:
            what = f"{kept} were made by a plan before, and this one does not drop them"
            self._complain("P22", "encoder_decoder_items_are_dropped_with_the_next_plan", what)
        for row in rows:
            self._gather(row)

    def _fill(self, inputs: Sequence[v.EncoderInputs], filled: set[str]) -> int:
        """Add items to the cache and to `filled`, those that this plan added; return their
        embeddings.

        A cached item may be computed again: it was evicted and needed in one step.
        """
        total = 0
        for entry in inputs:
            view = self.views.get(entry.request_id)
            items = () if view is None else view.request.items
            for index in entry.item_indices:
                if not 0 <= index < len(items):
                    what = f"{entry.request_id!r} has no item {index}"
                    self._complain(
                        "P22", "encoded_item_is_of_its_request", what, subjects=entry.request_id
                    )
                    continue
                identifier, count = items[index].identifier, items[index].num_embeds
                if identifier in filled and not self.config.is_encoder_decoder:
                    what = f"{identifier!r} is made for {entry.request_id!r} and for another"
                    self._complain(
                        "P22", "item_is_made_once_in_a_plan", what, subjects=entry.request_id
                    )
                filled.add(identifier)
                self.encoded[identifier] = count
                total += count
        return total

    def _gather(self, row: FrameRow) -> None:
        """Check that the embeddings at the positions of a row are cached, for a draft head one
        more.

        An encoder-decoder request reads all its embeddings with its first row, computed for this
        request. Where items must be whole, as for bidirectional attention, a row may not end inside
        one (upstream #52306).
        """
        if self.config.is_encoder_decoder:
            name = row.view.request.request_id
            if row.view.across and not row.first and name not in self.made_for:
                what = f"{name!r} begins, and its items are not made for it"
                self._complain("P22", "item_that_a_row_reads_is_there", what, subjects=name)
            return
        end = row.end + self.config.num_encoder_lookahead_tokens
        for identifier in self._list_read(row, end):
            if identifier not in self.encoded:
                name = row.view.request.request_id
                what = f"{name!r} reads {identifier!r} at positions {row.first} to {end - 1}"
                self._complain("P22", "item_that_a_row_reads_is_there", what, subjects=name)
        for item in row.view.request.items if self.config.disable_chunked_mm_input else ():
            if item.offset < row.end < item.offset + item.length:
                name = row.view.request.request_id
                what = f"{name!r} ends at {row.end}, inside of {item.identifier!r} at {item.offset}"
                self._complain("P22", "row_ends_inside_of_no_whole_item", what, subjects=name)

    def _list_read(self, row: FrameRow, end: int) -> Iterator[str]:
        """Yield the items of which a row reads an embedding."""
        for item in row.view.request.items:
            first, last = max(row.first - item.offset, 0), min(end - item.offset, item.length)
            if first < last and (not item.is_embed or any(item.is_embed[first:last])):
                yield item.identifier
