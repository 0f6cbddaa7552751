"""Laws about the number of different LoRA adapters, in a step and over steps.

PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.admission import process_waiting_phase
from blockstep.spec.core.work import Step
from blockstep.spec.features.lora import is_within_max_loras, list_seated
from blockstep.spec.releases.lora import list_seated as list_seated_by_rows

ROOM = LawModule("lora")


# Mistakes.


@instead(process_waiting_phase, theirs="not found upstream")
def lora_slots_of_rows_only(right: Right[None], step: Step) -> None:
    """A running request without a row frees its LoRA slot for others, as in vLLM."""
    before = step.state
    step.state = replace(before, rules=before.rules.replacing(list_seated, list_seated_by_rows))
    right()
    step.state = before


# Laws.


@ROOM.law("P9", (1, 0, 2))
def check_admission_stays_within_max_loras(num_in_use: int, is_in_use: int, max_loras: int) -> None:
    """An admission never leads from within `max_loras` to beyond it."""
    assert 1 <= max_loras and 0 <= is_in_use <= 1 and is_in_use <= num_in_use <= max_loras
    if is_within_max_loras(num_in_use, is_in_use == 1, max_loras):
        assert num_in_use + 1 - is_in_use <= max_loras


@ROOM.law("P15", (2, 2))
def check_request_of_an_active_adapter_is_never_skipped(num_in_use: int, max_loras: int) -> None:
    """A request is also admitted if a LoRA slot is free."""
    assert 1 <= num_in_use <= max_loras
    may_share = is_within_max_loras(num_in_use, True, max_loras)
    assert may_share
    assert is_within_max_loras(num_in_use, False, max_loras) == (num_in_use < max_loras)


@ROOM.law("P9", (5, 5, 3, 4), lora_slots_of_rows_only)
def check_running_request_keeps_its_lora_slot_without_a_row(
    known_a: int, computed_a: int, known_b: int, budget: int
) -> None:
    """Two plans are in flight, without placeholders; `a` has a row if it has tokens to compute."""
    assert 0 <= computed_a <= known_a and 1 <= known_a < 8000 and 1 <= known_b < 8000
    assert 1 <= budget
    config = h.build_config(8192, max_num_batched_tokens=budget, max_loras=1)
    config = replace(config, max_frames_in_flight=2)
    running = (h.build_runner("a", known_a, computed_a, (1,), adapter="x"),)
    waiting = (h.build_request("b", known_b, adapter="y"),)
    after, _ = h.schedule(h.build_state(config, running, waiting))
    assert after.running == ("a",)
    assert "b" in after.requests


@ROOM.law("P9 P16", (5, 3, 20))
def check_last_lora_slot_goes_to_the_first_waiting_request(
    known_a: int, known_b: int, budget: int
) -> None:
    """A waiting request holds no LoRA slot before the step, whether it is new or preempted."""
    assert 1 <= known_a < 8000 and 1 <= known_b < 8000 and 1 <= budget
    config = h.build_config(8192, max_num_batched_tokens=budget, max_loras=1)
    waiting = (
        h.build_request("a", known_a, adapter="x"),
        h.build_request("b", known_b, adapter="y"),
    )
    after, _ = h.schedule(h.build_state(config, (), waiting))
    assert after.running == ("a",)
