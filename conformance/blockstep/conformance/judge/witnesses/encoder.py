"""Situations that there are only with an encoder: what is made, shared, evicted and waited for."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.attended import count_across, is_across
from blockstep.conformance.judge.properties.admission import may_have_its_items
from blockstep.conformance.judge.properties.amounts import blocks_across, blocks_behind
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.queue_replay import admits_nobody, next_in_line
from blockstep.conformance.judge.properties.step import RowKind, Step
from blockstep.spec.vocabulary import Config, EncoderSnapshot, PauseState, RequestSnapshot

ENCODER = {
    "encoder_item_made": "an item was encoded",
    "encoder_item_loaded": "an item was loaded from a connector",
    "encoder_item_of_two": "two requests held one item",
    "encoder_item_twice_in_one": "a row read one item at two places of its prompt",
    "encoder_item_evicted": "an item was evicted to make room for another",
    "encoder_item_dropped_and_made": "a step evicted an item, and had it made anew",
    "encoder_chunk_stops_before_an_item": "a chunk ended before an item that did not fit",
    "encoder_row_waits_for_an_item": "one who runs got no row for want of an item",
    "encoder_preempted_holding_an_item": "a request was preempted that held an item",
    "encoder_reset_in_use": "all was forgotten while somebody held an item",
    "encoder_beside_made_for_two": "one item was made for two requests, for it is read but once",
    "encoder_beside_waits": "one was not admitted for want of compute, or of room, for its item",
    "encoder_across_read": "a row read across what the encoder had made for a row before",
    "encoder_across_waits": "one was not admitted whose tokens fit, for want of blocks across",
    "encoder_across_preempted": "a request was preempted with blocks across",
    "encoder_across_made_again": "a preempted request came back, and its item was made again",
    "encoder_across_freed": "a request ended, and gave back blocks across",
}
"""Nothing is beside prompts, or read across, but in an encoder-decoder model."""


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
    for entry in after.entries:
        if len(set(entry.holders)) > 1:
            yield "encoder_item_of_two"
    if any(name in entry.holders for entry in before.entries for name in step.preempted):
        yield "encoder_preempted_holding_an_item"
    if step.config.is_encoder_decoder:
        yield from _of_what_is_beside(step, ledger)
        return
    for row in step.rows:
        read = [
            item.identifier
            for item in ledger.lives[row.request_id].request.items
            if item.offset < row.end and item.offset + item.length > row.first
        ]
        if len(set(read)) < len(read):
            yield "encoder_item_twice_in_one"
    yield from _of_missing_items(step, ledger, after)


def _of_what_is_beside(step: Step, ledger: Ledger) -> Iterator[str]:
    """What a plan of an encoder-decoder model shows of items, and of blocks across."""
    config, plan = step.config, step.plan
    made = {entry.request_id for entry in plan.scheduled_encoder_inputs}
    names = [item.identifier for name in made for item in ledger.lives[name].request.items]
    if len(set(names)) < len(names):
        yield "encoder_beside_made_for_two"
    for row in step.running_rows:
        if row.first and has_blocks_across(config, step.old[row.request_id]):
            yield "encoder_across_read"
    for row in step.admitted_rows:
        is_back = row.kind is RowKind.RESUMED and row.request_id in made
        if is_back and has_blocks_across(config, step.new[row.request_id]):
            yield "encoder_across_made_again"
    if any(has_blocks_across(config, step.old[name]) for name in step.preempted):
        yield "encoder_across_preempted"
    yield from _of_waiting_beside(step, ledger)


def _of_waiting_beside(step: Step, ledger: Ledger) -> Iterator[str]:
    """For want of what the next in line was not admitted, if its tokens are within the budget."""
    config, name = step.config, next_in_line(step, ledger)
    left = config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if (
        name is None
        or admits_nobody(step, ledger)
        or any(step.new[name].block_tables)  # a session that goes on
        or ledger.pause_state is not PauseState.UNPAUSED
        or len(step.after.running) >= config.max_num_seqs
        or ledger.lives[name].num_known > left
    ):
        return
    life, num_free = ledger.lives[name], len(step.after.free_queue)
    num_across = count_across(config, life.request)
    need = blocks_behind(config, life.num_known, ((),) * len(step.groups))
    if need <= num_free and not may_have_its_items(step, ledger, name):
        yield "encoder_beside_waits"
    elif need <= num_free < need + blocks_across(config, num_across):
        yield "encoder_across_waits"


def has_blocks_across(config: Config, request: RequestSnapshot) -> bool:
    """Whether a request holds blocks of what its items became."""
    pairs = zip(config.kv_groups, request.block_tables, strict=True)
    return any(table and is_across(group) for group, table in pairs)


def of_ends_across(step: Step) -> Iterator[str]:
    """Whom a commit ends that held blocks across."""
    for name in step.ended:
        if name in step.old and has_blocks_across(step.config, step.old[name]):
            yield "encoder_across_freed"


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
