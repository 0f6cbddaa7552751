"""Situations that there are only with an encoder: what is made, shared, evicted and waited for."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import PlannedRow, Step
from blockstep.spec.vocabulary import EncoderSnapshot

ENCODER = {
    "encoder_item_made": "an item was encoded",
    "encoder_item_loaded": "an item was loaded from a connector",
    "encoder_item_of_two": "two requests held one item",
    "encoder_item_twice_in_one": "a chunk ended behind one place of an item, and within the next",
    "encoder_item_evicted": "an item was evicted to make room for another",
    "encoder_item_dropped_and_made": "a step evicted an item, and had it made anew",
    "encoder_chunk_stops_before_an_item": "a chunk ended before an item that did not fit",
    "encoder_row_waits_for_an_item": "one who runs got no row for want of an item",
    "encoder_preempted_holding_an_item": "a request was preempted that held an item",
    "encoder_reset_in_use": "all was forgotten while somebody held an item",
}


def of_items(step: Step, ledger: Ledger) -> Iterator[str]:
    """What a plan shows of an encoder."""
    before, after, plan = step.before.encoder, step.after.encoder, step.plan
    if before is None or after is None:
        return
    made = {
        ledger.lives[entry.request_id].request.items[index].identifier
        for entry in plan.scheduled_encoder_inputs
        for index in entry.item_indices
    }
    if made:
        yield "encoder_item_made"
    if plan.external_encoder_inputs:
        yield "encoder_item_loaded"
    if plan.free_encoder_mm_hashes:
        yield "encoder_item_evicted"
    if made.intersection(entry.identifier for entry in before.entries):
        yield "encoder_item_dropped_and_made"
    if any(len(set(entry.holders)) > 1 for entry in after.entries):
        yield "encoder_item_of_two"
    if any(_is_amid_the_second(row, ledger) for row in step.rows):
        yield "encoder_item_twice_in_one"
    if any(name in entry.holders for entry in before.entries for name in step.preempted):
        yield "encoder_preempted_holding_an_item"
    yield from _of_missing_items(step, ledger, after)


def _is_amid_the_second(row: PlannedRow, ledger: Ledger) -> bool:
    """Whether a chunk ends within an item that it has read of at a place before."""
    items = ledger.lives[row.request_id].request.items
    read = [item for item in items if row.first < item.offset + item.length <= row.end]
    within = [item for item in items if item.offset < row.end < item.offset + item.length]
    return any(one.identifier == other.identifier for one in read for other in within)


def _of_missing_items(step: Step, ledger: Ledger, encoder: EncoderSnapshot) -> Iterator[str]:
    """Whom the lack of an item has stopped."""
    there = {entry.identifier for entry in encoder.entries}
    ahead = step.config.num_encoder_lookahead_tokens
    rows = {row.request_id: row for row in step.rows}
    left = step.config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    for name in step.after.running if left > 0 else ():
        stands = rows[name].end if name in rows else step.new[name].num_computed_tokens
        for item in ledger.lives[name].request.items:
            is_next = item.offset - ahead <= stands < item.offset + item.length
            if is_next and item.identifier not in there:
                yield (
                    "encoder_chunk_stops_before_an_item"
                    if name in rows
                    else "encoder_row_waits_for_an_item"
                )


def of_encoder_reset(step: Step) -> Iterator[str]:
    """Whether somebody held what is forgotten."""
    encoder = step.before.encoder
    if encoder is not None and any(entry.holders for entry in encoder.entries):
        yield "encoder_reset_in_use"
