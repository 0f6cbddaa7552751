"""Seeded bugs in the encoder cache: items that are freed, held or kept wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.parts import Note, Part
from blockstep.spec.core.requests import FrameRow, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.work import Step
from blockstep.spec.features.encoder import (
    CLAIM,
    add_items,
    limit_to_items,
    process_items_of_victim,
    process_items_refused,
)
from blockstep.spec.features.encoder.cache import ENCODER, Encoder, free_items, hold_entry
from blockstep.spec.releases.encoder import reencoded_items_are_dropped
from blockstep.spec.vocabulary import Config, EncoderInputs, Plan, Request, Status

PAGE = Page(takes="encoder")


@PAGE.exhibit(
    "an item that is evicted and encoded again in one step is freed by the worker",
    "#52482",
    "P22",
)
def evicted_and_made_is_dropped(rules: Rules, config: Config) -> Rules:
    """An item stays in the plan's list of freed items although the same plan encodes it."""
    return reencoded_items_are_dropped(rules, config)


_LATE: Final = Part[tuple[str, ...]]("late", ())
"""The items that the last step freed."""


@PAGE.exhibit(
    "the plan lists freed items one step too late",
    "#52482",
    "P22 P9",
    wrong_fix_of="evicted-and-made-is-dropped",
)
@instead(add_items)
def drops_told_late(right: Right[Plan], step: Step, plan: Plan) -> Plan:
    """The items of this step are safe, but the next plan frees an item that it encodes."""
    plan = right()
    late = _LATE.of(step)
    _LATE.set(step, plan.free_encoder_mm_hashes)
    return replace(plan, free_encoder_mm_hashes=late)


def hold_what_is_found(rules: Rules) -> Rules:
    """Return rules by which a waiting request holds cached items that it would read."""

    def limit(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
        num_new = rules[limit_to_items](step, request, num_computed, num_new)
        for index in CLAIM.of(step).items if request.status is not Status.RUNNING else ():
            identifier, encoder = request.request.items[index].identifier, ENCODER.of(step)
            if identifier in encoder.entries:  # else it would be encoded for this row
                holder = (request.request_id, index)
                ENCODER.set(step, hold_entry(encoder, identifier, holder))
        return num_new

    return rules.replacing(limit_to_items, limit)


@PAGE.exhibit(
    "a waiting request keeps references to the cached items that it found", "#31857", "P22 P10"
)
def waiter_keeps_what_it_found(rules: Rules, _config: Config) -> Rules:
    """It takes references before it is known whether there are blocks for it."""
    return hold_what_is_found(rules).replacing(process_items_refused, lambda _step, _request: None)


@PAGE.exhibit(
    "a request with too few blocks drops its items, but not one that fails the whole-prompt check",
    "#31857",
    "P22 P10",
    wrong_fix_of="waiter-keeps-what-it-found",
)
def waiter_at_the_gate_keeps_them(rules: Rules, config: Config) -> Rules:
    """The repair handles one way to fail an admission and forgets the other."""
    if config.scheduler_reserve_full_isl:
        return waiter_keeps_what_it_found(rules, config)
    return hold_what_is_found(rules)


@PAGE.exhibit(
    "an item is freed again in every step after its last token",
    "#55733",
    "P22 P9",
)
@instead(free_items)
def freed_with_each_step(
    right: Right[Encoder], encoder: Encoder, request: Request, num_computed: int | None
) -> Encoder:
    """The counter of free encoder-cache slots grows beyond the size of the cache."""
    after, num_again = right(), 0
    for index, item in enumerate(request.items if encoder.is_shared else ()):
        entry, holder = encoder.entries.get(item.identifier), (request.request_id, index)
        is_read = num_computed is None or item.offset + item.length <= num_computed
        if is_read and (entry is None or holder not in entry.holders):
            num_again += item.num_embeds
    return replace(after, size=after.size + num_again)


_OF_VICTIMS: Final = Note[tuple[EncoderInputs, ...]]("of_victims", ())
"""The items that withdrawn rows would have encoded."""


@PAGE.exhibit("items of a withdrawn row are still encoded", "#23713", "P26 P22 P9")
def items_of_victim_are_made(rules: Rules, _config: Config) -> Rules:
    """A victim's row leaves the plan, but its encoder inputs stay in the plan."""

    def withdraw(step: Step, victim: RequestState, had_row: bool) -> None:
        name = victim.request_id
        planned = [one for one in ENCODER.of(step).planned if one.holder[0] == name]
        indices = tuple(sorted([one.holder[1] for one in planned if not one.is_external]))
        if indices:
            _OF_VICTIMS.set(step, (*_OF_VICTIMS.of(step), EncoderInputs(name, indices)))
        rules[process_items_of_victim](step, victim, had_row)

    def add_items_of_victims(step: Step, rows: Sequence[FrameRow], plan: Plan) -> Plan:
        plan = rules[add_items](step, rows, plan)
        inputs = plan.scheduled_encoder_inputs + _OF_VICTIMS.of(step)
        return replace(plan, scheduled_encoder_inputs=inputs)

    return rules.replacing(process_items_of_victim, withdraw).replacing(
        add_items, add_items_of_victims
    )
