"""Invariants: each holds in a state of the specification, and fails in a changed one.

Without this test, an invariant that is always true would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from groups_support import full, window

from blockstep.spec import Config, Grammar, MultiModalItem, Oracle, Policy, Request, State
from blockstep.spec.core.requests import NOTHING_HELD
from blockstep.spec.features.admission_control import ADMISSION_CLOSED
from blockstep.spec.features.encoder.cache import ENCODER
from blockstep.spec.features.kv_transfer.transfers import TRANSFERS
from blockstep.spec.features.pins import PINS
from blockstep.spec.features.prefill_cadence import PREFILL_WAIT
from blockstep.spec.features.structured_output.grammar import GRAMMAR, GrammarState
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.invariants import INVARIANTS, get_broken_invariants
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    Commit,
    DeferredFree,
    KVOffer,
    Pin,
    PinEstimate,
    RowTokens,
)

Bend = Callable[[State], State]
CONFIG = Config(num_blocks=10, block_size=2, max_model_len=16, max_num_seqs=2)
A, B, C = (Request(name, (1, 2, 3), max_tokens=4) for name in "ABC")


def run(config: Config, *requests: Request, commits: int = 0, **offers: Any) -> State:
    """Submit requests and plan a step, then commit it and plan another, `commits` times."""
    oracle = Oracle(config)
    for request in requests:
        oracle.submit(request)
        if request.structured_output:
            oracle.grammar_ready(request.request_id)
        if request.job_id is not None:
            oracle.apply(PinEstimate(request.job_id, 5))
        if offers:
            oracle.apply(KVOffer(request.request_id, **offers))
    oracle.schedule()
    for _ in range(commits):
        frame = oracle.state.frames[0]
        rows = [RowTokens(row.request_id, (7,) if row.samples else ()) for row in frame.rows]
        oracle.apply(Commit(frame.frame_id, tuple(rows)))
        oracle.schedule()
    return oracle.state


def bend_pool(**change: Callable[[Any], Any]) -> Bend:
    """Change fields of the pool."""

    def bend(state: State) -> State:
        changed = {name: by(getattr(state.pool, name)) for name, by in change.items()}
        return replace(state, pool=replace(state.pool, **changed))

    return bend


def bend_request(**change: Any) -> Bend:
    """Change fields of request A; a function gets the old value."""

    def bend(state: State) -> State:
        request = state.requests["A"]
        changed = {
            name: by(getattr(request, name)) if callable(by) else by for name, by in change.items()
        }
        return replace(state, requests=state.requests.having("A", replace(request, **changed)))

    return bend


def bend_table(bend: Callable[[tuple[int, ...]], tuple[int, ...]], group: int = 0) -> Bend:
    """Change the block table of request A in one group."""

    def of_group(holdings: tuple[Any, ...]) -> tuple[Any, ...]:
        held = replace(holdings[group], block_table=bend(holdings[group].block_table))
        return (*holdings[:group], held, *holdings[group + 1 :])

    return bend_request(holdings=of_group)


def bend_part(part: Any, **change: Any) -> Bend:
    """Change fields of the part of a feature; a function gets the old value."""

    def bend(state: State) -> State:
        value = part.of(state)
        changed = {
            name: by(getattr(value, name)) if callable(by) else by for name, by in change.items()
        }
        return part.put(state, replace(value, **changed))  # type: ignore[no-any-return]

    return bend


def bend_grammar_state(state: State) -> State:
    """Put the grammar of A into another state."""
    request = GRAMMAR.put(state.requests["A"], GrammarState(1))
    return replace(state, requests=state.requests.having("A", request))


def count_up(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([value + (value > 0) for value in values])


ONE = run(CONFIG, A, B, C)
RANKED = run(replace(CONFIG, policy=Policy.PRIORITY, max_num_seqs=1), A, B, C)
ADAPTED = run(
    replace(CONFIG, max_loras=2), replace(A, adapter="x"), replace(B, adapter="y"), commits=1
)
PACED = run(replace(CONFIG, prefill_schedule_interval=3), A)
WITH_GRAMMAR = run(
    CONFIG,
    replace(A, structured_output=True, grammar=Grammar((((7, 0),), ()))),
    commits=1,
)
SEEING = run(
    replace(CONFIG, encoder_compute_budget=4, encoder_cache_size=4, long_prefill_token_threshold=1),
    replace(A, items=(MultiModalItem("x", 0, 2),)),
)
GROUPED = run(
    replace(CONFIG, num_blocks=30, max_num_batched_tokens=2, groups=(full(2), window(2, 2))),
    replace(A, prompt_token_ids=tuple(range(10))),
    commits=3,
)
STORED = replace(CONFIG, kv_connector=True)
LOADING = run(STORED, A, num_tokens=2)
PARKED = run(STORED, A, num_tokens=2, is_async=True)
READ = run(STORED, replace(A, max_tokens=1), commits=1, delays_free=True)
PINNED = run(
    replace(CONFIG, policy=Policy.CONTINUUM), replace(A, max_tokens=1, job_id="j"), commits=1
)
RESTING = run(CONFIG, replace(A, max_tokens=1, resumable=True), commits=1)
DEFERRED = (DeferredFree(99, (1,)),)


def without_a_slot(state: State) -> State:
    return replace(state, config=replace(state.config, max_loras=1))


def pin_twice(pins: tuple[Pin, ...]) -> tuple[Pin, ...]:
    return pins * 2


BENT: dict[str, tuple[State, Bend]] = {
    "is_every_block_free_or_held": (ONE, bend_pool(free_queue=lambda queue: queue[1:])),
    "is_every_unpublished_block_held_once": (ONE, bend_pool(ref_counts=count_up)),
    "is_cache_map_exact": (ONE, bend_pool(cached=lambda _: FrozenMap())),
    "is_every_settled_block_keyed": (ONE, bend_table(lambda table: (table[1], table[0]))),
    "is_every_request_in_one_place": (ONE, lambda state: replace(state, waiting=())),
    "is_token_accounting_sound": (ONE, bend_request(num_computed_tokens=4)),
    "is_every_placeholder_in_flight": (ONE, bend_request(num_output_placeholders=1)),
    "is_within_limits": (ONE, lambda state: replace(state, frames=state.frames * 2)),
    "is_priority_queue_sorted": (
        RANKED,
        lambda state: replace(state, waiting=state.waiting[::-1]),
    ),
    "is_every_grammar_in_step": (WITH_GRAMMAR, bend_grammar_state),
    "is_every_running_adapter_in_a_slot": (ADAPTED, without_a_slot),
    "is_wait_within_interval": (PACED, lambda state: PREFILL_WAIT.put(state, 3)),
    "is_encoder_cache_exact": (SEEING, bend_part(ENCODER, budget=3)),
    "is_every_held_item_needed": (SEEING, bend_request(num_computed_tokens=2)),
    "is_every_attended_block_held": (
        GROUPED,
        bend_table(lambda table: (*table[:-1], NULL_BLOCK), 1),
    ),
    "is_every_window_as_small_as_charged": (
        GROUPED,
        bend_table(lambda table: tuple([20 + at for at in range(len(table))]), 1),
    ),
    "is_every_table_begun": (GROUPED, bend_request(holdings=NOTHING_HELD * 2)),
    "is_every_load_of_a_parked_request": (PARKED, bend_part(TRANSFERS, parked=FrozenMap())),
    "is_every_load_unpublished": (
        LOADING,
        bend_request(holdings=lambda held: (replace(held[0], num_cached_blocks=1),)),
    ),
    "is_every_hold_of_a_finished_request": (
        READ,
        bend_part(
            TRANSFERS,
            held=lambda held: held.having("A", replace(held["A"], is_sending=False)),
        ),
    ),
    "is_every_offer_of_an_unfinished_request": (
        PARKED,
        bend_part(TRANSFERS, offers=FrozenMap({"X": KVOffer("X", 1)})),
    ),
    "is_every_deferred_free_of_a_frame_in_flight": (
        LOADING,
        bend_pool(deferred_frees=lambda _: DEFERRED),
    ),
    "is_closed_only_with_a_limit": (ONE, lambda state: ADMISSION_CLOSED.put(state, True)),
    "is_every_pin_of_a_job_and_findable": (PINNED, bend_part(PINS, pins=pin_twice)),
    "is_every_rest_behind_a_stop": (RESTING, bend_request(spec_token_ids=(1,))),
}


def test_each_invariant_has_a_state_that_breaks_it() -> None:
    assert [*BENT] == [holds.__name__ for holds in INVARIANTS]


@pytest.mark.parametrize("name", BENT)
def test_a_changed_state_breaks_its_invariant(name: str) -> None:
    state, bend = BENT[name]
    assert get_broken_invariants(state) == ()
    assert name in get_broken_invariants(bend(state))
