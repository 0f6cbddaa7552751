"""Goals that need an encoder: items computed, shared, evicted and waited for."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.attention_ranges import count_across, is_across
from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.admission import may_have_its_items
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import RowKind, Step
from blockstep.conformance.judge.properties.queue_replay import admits_no_request, next_in_line
from blockstep.conformance.judge.properties.token_amounts import blocks_across, blocks_behind
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    EncoderReset,
    EncoderSnapshot,
    PauseState,
    RequestSnapshot,
    Schedule,
)

TEXTS = {
    "encoder_item_made": "an item was encoded",
    "encoder_item_loaded": "an item was loaded from a connector",
    "encoder_item_of_two": "two requests held one item",
    "encoder_item_twice_in_one": "a row read one item at two places of its prompt",
    "encoder_item_evicted": "an item was evicted to make room for another",
    "encoder_item_dropped_and_made": "a step evicted an item and computed it again",
    "encoder_chunk_stops_before_an_item": "a chunk ended before an item that did not fit",
    "encoder_row_waits_for_an_item": "a running request got no row because it lacks an item",
    "encoder_preempted_holding_an_item": "a request was preempted that held an item",
    "encoder_reset_in_use": "the encoder cache was reset while a request held an item",
    "encoder_beside_made_for_two": (
        "one encoder-decoder input was computed for two requests, since it is not kept"
    ),
    "encoder_beside_waits": (
        "a request was not admitted because compute or cache did not suffice for its item"
    ),
    "encoder_across_read": (
        "a row attended to embeddings computed for an earlier row of its request"
    ),
    "encoder_across_waits": (
        "a request whose tokens fit was not admitted for lack of cross-attention blocks"
    ),
    "encoder_across_preempted": "a request with cross-attention blocks was preempted",
    "encoder_across_made_again": "a preempted request was resumed, and its item was computed again",
    "encoder_across_freed": "a request ended and freed cross-attention blocks",
}
"""Goals by name. Encoder-decoder inputs and cross attention exist in encoder-decoder models only.
"""


def of_items(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan with an encoder."""
    before, after, plan = step.before.encoder, step.after.encoder, step.plan
    if before is None or after is None:
        return
    made = {
        history.lives[entry.request_id].request.items[index].identifier
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
        yield from _of_what_is_beside(step, history)
        return
    for row in step.rows:
        read = [
            item.identifier
            for item in history.lives[row.request_id].request.items
            if item.offset < row.end and item.offset + item.length > row.first
        ]
        if len(set(read)) < len(read):
            yield "encoder_item_twice_in_one"
    yield from _of_missing_items(step, history, after)


def _of_what_is_beside(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan of an encoder-decoder model."""
    config, plan = step.config, step.plan
    made = {entry.request_id for entry in plan.scheduled_encoder_inputs}
    names = [item.identifier for name in made for item in history.lives[name].request.items]
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
    yield from _of_waiting_beside(step, history)


def _of_waiting_beside(step: Step, history: History) -> Iterator[str]:
    """Yield the goal of the next waiting request, if it lacks an item or cross-attention blocks
    only."""
    config, name = step.config, next_in_line(step, history)
    left = config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if (
        name is None
        or admits_no_request(step, history)
        or any(step.new[name].block_tables)  # a session that continues
        or history.pause_state is not PauseState.UNPAUSED
        or len(step.after.running) >= config.max_num_seqs
        or history.lives[name].num_known > left
    ):
        return
    life, num_free = history.lives[name], len(step.after.free_queue)
    num_across = count_across(config, life.request)
    need = blocks_behind(config, life.num_known, ((),) * len(step.groups))
    if need <= num_free and not may_have_its_items(step, history, name):
        yield "encoder_beside_waits"
    elif need <= num_free < need + blocks_across(config, num_across):
        yield "encoder_across_waits"


def has_blocks_across(config: Config, request: RequestSnapshot) -> bool:
    """Whether a request holds cross-attention blocks."""
    pairs = zip(config.kv_groups, request.block_tables, strict=True)
    return any(table and is_across(group) for group, table in pairs)


def of_ends_across(step: Step, _history: History) -> Iterator[str]:
    """Yield the goals of requests that end with cross-attention blocks."""
    for name in step.ended if step.config.groups else ():
        if name in step.old and has_blocks_across(step.config, step.old[name]):
            yield "encoder_across_freed"


def _of_missing_items(step: Step, history: History, encoder: EncoderSnapshot) -> Iterator[str]:
    """Yield the goals of running requests that lack an item."""
    there = {entry.identifier for entry in encoder.entries}
    ahead = step.config.num_encoder_lookahead_tokens
    rows = {row.request_id: row for row in step.rows}
    left = step.config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    for name in step.after.running if left > 0 else ():
        position = rows[name].end if name in rows else step.new[name].num_computed_tokens
        for item in history.lives[name].request.items:
            is_next = item.offset - ahead <= position < item.offset + item.length
            if is_next and item.identifier not in there:
                yield (
                    "encoder_chunk_stops_before_an_item"
                    if name in rows
                    else "encoder_row_waits_for_an_item"
                )


def of_encoder_reset(step: Step, _history: History) -> Iterator[str]:
    """Yield a goal if a request held an item at the reset."""
    encoder = step.before.encoder
    if encoder is not None and any(entry.holders for entry in encoder.entries):
        yield "encoder_reset_in_use"


GOALS = Goals(TEXTS, {Schedule: of_items, Commit: of_ends_across, EncoderReset: of_encoder_reset})
