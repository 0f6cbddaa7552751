"""Encoder: P22 the counters of its cache add up. The worker checks which items are computed and
read."""

from __future__ import annotations

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import (
    ENDINGS,
    Complaints,
    differing,
    differing_requests,
    sentence,
)
from blockstep.spec import vocabulary as v

_CHANGING = (*ENDINGS, v.Schedule, v.Reset, v.StreamingUpdate, v.EncoderReset)
"""Events that may change the encoder cache."""


@sentence("P22", *_CHANGING, needs="encoder_cache_size")
def encoder_cache_adds_up(step: Step, history: History) -> Complaints:
    """The free embeddings are those that no entry takes; the freeable items are those without a
    holder.

    An item to be dropped was in the cache. With encoder-decoder inputs all that a plan computed is
    to be dropped.
    """
    encoder, size = step.after.encoder, step.config.encoder_cache_size
    if encoder is None:
        return
    unheld = [entry for entry in encoder.entries if not entry.holders]
    free = size - sum(entry.num_embeds for entry in encoder.entries)
    freeable = free + sum(entry.num_embeds for entry in unheld)
    yield from differing("num_free", free, encoder.num_free)
    yield from differing("num_freeable", freeable, encoder.num_freeable)
    names = sorted(entry.identifier for entry in unheld)
    yield from differing("freeable", names, sorted(encoder.freeable))
    if step.config.is_encoder_decoder and isinstance(step.observation, v.Plan):
        made = [
            history.lives[entry.request_id].request.items[index].identifier
            for entry in step.plan.scheduled_encoder_inputs
            for index in entry.item_indices
        ]
        yield from differing("to be dropped", sorted(made), sorted(encoder.freed))
        return
    old = step.before.encoder
    known = {*old.freed, *[entry.identifier for entry in old.entries]} if old else set()
    yield from differing("dropped and never there", [], sorted({*encoder.freed} - known))


@sentence("P9", v.Schedule, needs="encoder_cache_size")
def encoder_cache_stays_within_its_size(step: Step, _history: History) -> Complaints:
    """The cache holds at most `encoder_cache_size` embeddings."""
    encoder, size = step.after.encoder, step.config.encoder_cache_size
    if encoder is not None:
        held = sum(entry.num_embeds for entry in encoder.entries)
        yield from differing("embeddings kept", min(held, size), held)


@sentence(
    "P22",
    *ENDINGS,
    v.Schedule,
    v.Reset,
    needs="encoder_cache_size",
    fixes="what a request keeps that does not run",
)
def only_running_requests_hold_items(step: Step, _history: History) -> Complaints:
    """A request that ended or was preempted holds no item."""
    encoder = step.after.encoder
    if encoder is None:
        return
    running = set(step.after.running)
    held = {name for entry in encoder.entries for name in entry.holders}
    kept = {one.request_id for one in step.after.requests if one.prompt_token_ids}  # sessions
    yield from differing_requests("holders that do not run", [], sorted(held - running - kept))
