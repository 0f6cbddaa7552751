"""Pins: plays in which blocks stay between the turns of a job, and the checks of pins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec.core.preemption import get_victim_index, process_giving_way
from blockstep.spec.core.rules import Rules
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    Abort,
    Clock,
    Config,
    EncoderOffer,
    EncoderReset,
    GrammarFailed,
    GrammarReady,
    KVOffer,
    KVTransfers,
    PauseState,
    Pin,
    PinEstimate,
    Policy,
    Reset,
    Schedule,
    SetPause,
    SpecMethod,
    StreamingUpdate,
    Submit,
    TransfersReported,
)
from play_support.plants import answering, becoming
from play_support.play import CONFIG, Bend, C, Case, Play, after, counted, nothing, request, same

PINNED = replace(CONFIG, policy=Policy.CONTINUUM)
X = replace(request("X", 1, 2, 3, 4, 5, max_tokens=1), job_id="x")
"""A turn of two full blocks and a partial one."""


def estimated() -> Play:
    """Blocks of job x are pinned for five ticks."""
    return Play(PINNED).do(Submit(X), PinEstimate("x", 5))


def pinned() -> Play:
    """The turn of job x has ended, and its blocks are pinned."""
    return estimated().do(Schedule()).commit()


def planned() -> Play:
    return pinned().do(Submit(C), Schedule())


def two_run() -> Play:
    play = planned().commit().do(Submit(request("D", 9, 9, 9)))
    return play.do(Schedule()).commit().do(Schedule())


def none_left() -> Play:
    """No request runs, and D needs the blocks of the pin."""
    play = pinned()
    return play.do(Submit(request("D", *[9] * 14, max_tokens=2)), Schedule())


def one_has_to_go() -> Play:
    """E runs, then F, the next turn of job x; then the pool has no free block."""
    play = Play(replace(PINNED, num_blocks=6, scheduler_reserve_full_isl=False))
    play.do(Submit(X), PinEstimate("x", 5), Schedule()).commit()
    turn = replace(request("F", 1, 2, 3, 4, 6, max_tokens=6), job_id="x")
    play.do(Submit(request("E", 7, 8, max_tokens=6)), Schedule()).commit()
    play.do(Submit(turn), Schedule()).commit()
    while not play.step.after.requests or not play.do(Schedule()).step.preempted:
        play.commit()
    return play


def aborted() -> Play:
    return estimated().do(Schedule(), Abort(("X",)))


def reset() -> Play:
    return pinned().do(Reset())


def reset_refused() -> Play:
    return planned().do(Reset())


def clocked() -> Play:
    return pinned().do(Clock(3))


def estimated_anew() -> Play:
    return pinned().do(Clock(3), PinEstimate("x", 1))


def submitted() -> Play:
    return pinned().do(Submit(C))


def drafted() -> Play:
    config = replace(PINNED, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    return Play(config).do(Submit(replace(X, max_tokens=4))).run(1).propose("X", 1, 1)


def compiled() -> Play:
    return Play(PINNED).do(Submit(replace(X, structured_output=True)), GrammarReady("X"))


def failed() -> Play:
    return Play(PINNED).do(Submit(replace(X, structured_output=True)), GrammarFailed("X"))


def paused() -> Play:
    return pinned().do(SetPause(PauseState.PAUSED_NEW))


def encoder_reset() -> Play:
    return pinned().do(EncoderReset())


def encoder_offered() -> Play:
    return pinned().do(EncoderOffer(()))


def offered() -> Play:
    return pinned().do(KVOffer("X"))


def reported() -> Play:
    return pinned().do(TransfersReported(KVTransfers()))


def went_on() -> Play:
    session = replace(X, resumable=True)
    update = replace(X, prompt_token_ids=(7,), resumable=True)
    return Play(PINNED).do(Submit(session), StreamingUpdate(update))


def with_pins(step: Step, **fields: Any) -> Step:
    """Return the step with other fields in the state of pins after it."""
    assert step.after.pins is not None
    return after(step, pins=replace(step.after.pins, **fields))


def another_time(step: Step) -> Step:
    return with_pins(step, now=77)


def another_pin(step: Step) -> Step:
    assert step.after.pins is not None
    return with_pins(step, pins=(*step.after.pins.pins, Pin("q", ((1,),), 9)))


def longer(step: Step) -> Step:
    """Return the step with a pin that ends later than its estimate says."""
    assert step.after.pins is not None
    (pin,) = step.after.pins.pins
    return with_pins(step, pins=(replace(pin, end=pin.end + 1),))


def let_go(step: Step) -> Step:
    """Return the step without the pin, its blocks in the free queue."""
    assert step.after.pins is not None
    (pin,) = step.after.pins.pins
    blocks = [block for block in chain(*pin.block_tables) if block != NULL_BLOCK]
    counts = [count - (at in blocks) for at, count in enumerate(step.after.ref_counts)]
    queue = (*step.after.free_queue, *reversed(blocks))
    step = after(step, ref_counts=tuple(counts), free_queue=queue)
    return with_pins(step, pins=(), estimates=())


def forgotten(step: Step) -> Step:
    """Return the step with a pinned block that has no key."""
    assert step.after.pins is not None
    (pin,) = step.after.pins.pins
    block = pin.block_tables[0][-1]
    keys = [None if at == block else key for at, key in enumerate(step.after.block_keys)]
    cached = {key: found for key, found in step.after.cached.items() if block not in found}
    return after(step, block_keys=tuple(keys), cached=cached)


def preempt_the_last(rules: Rules, _config: Config) -> Rules:
    return rules.replacing(get_victim_index, lambda step: len(step.running) - 1)


def malformed(step: Step) -> Step:
    """Return the step with an accepted event that had to be refused."""
    is_clock = isinstance(step.event, Clock)
    return replace(step, event=Clock(-1) if is_clock else PinEstimate("", 1))


ALONE: list[Case] = [
    ("pins_are_of_turns_that_ended", pinned, nothing, longer),
    ("pins_end_in_time", planned, nothing, longer),
    ("pins_hold_cached_blocks", planned, nothing, forgotten),
    ("pins_are_reclaimed_only_as_last_resort", two_run, nothing, let_go),
    ("pins_do_not_block_admission", none_left, answering(process_giving_way, by=False), same),
    (
        "requests_of_pinned_jobs_are_preempted_last",
        one_has_to_go,
        becoming(preempt_the_last),
        same,
    ),
    ("clock_and_estimates_follow_events", clocked, nothing, another_time),
]
OF_EACH = (
    *(submitted, planned, pinned, drafted, aborted, compiled, failed, paused, reset),
    *(encoder_reset, encoder_offered, offered, reported, went_on, clocked, estimated_anew),
)
"""A play for each kind of event."""
EACH_KIND: list[tuple[str, Callable[[], Play], Bend]] = [
    *[("clock_and_estimates_follow_events", play, another_time) for play in OF_EACH],
    *[
        ("pins_are_of_turns_that_ended", play, another_pin)
        for play in (pinned, aborted, failed, reported, went_on, submitted, estimated_anew, clocked)
    ],
    ("pins_are_of_turns_that_ended", reset, another_pin),
    *[
        ("pins_hold_cached_blocks", play, lambda s: with_pins(s, pins=(Pin("q", ((8,),), 9),)))
        for play in (pinned, aborted, failed, reported, reset)
    ],
    *[
        ("pins_hold_cached_blocks", play, lambda s: with_pins(s, pins=2 * s.after.pins.pins))
        for play in (pinned, planned)
    ],
    *[
        (name, play, bend)
        for play in (clocked, estimated_anew)
        for name, bend in (
            ("counters_grow_by_what_happened", counted),
            ("stale_or_wrong_event_is_rejected", malformed),
        )
    ],
]
"""Wrong steps of each kind of event."""
