"""P17: a store does not write what a frame in flight reads or writes, and no frame holds for ever.

Held to the specification, or to the properties alone with the state shown or hidden, an engine that
gives such a block to a load is named, and one whose blocks wait for the answer is right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockstep.conformance.engine import EngineFactory, EngineTraits, Safety
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program, Report
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.engine_wrappers import hide_state
from blockstep.spec.vocabulary import Abort, Config, KVOffer, Request, Schedule, Submit

AHEAD = Config(
    num_blocks=4,
    block_size=2,
    kv_connector=True,
    max_frames_in_flight=2,
    async_scheduling=True,
    enable_prefix_caching=False,
)


def abort_in_flight(prompt: int, offered: int, is_async: bool) -> tuple[Action, ...]:
    """A is aborted while its plan is in flight; a store has of B what would fit its blocks."""
    tokens = tuple(range(11, 11 + offered + 1))
    return (
        *(Submit(Request("A", tuple(range(1, prompt + 1)), max_tokens=1)), Schedule()),
        *(Abort(("A",)), Submit(Request("B", tokens, max_tokens=1))),
        *(KVOffer("B", offered, is_async=is_async), Schedule(), Report(recving=("B",))),
        *(Schedule(), Answer(), Answer(), Drain()),
    )


PROGRAMS = {
    "one block": Program(replace(AHEAD, num_blocks=2), abort_in_flight(2, 1, True)),
    "later": Program(AHEAD, abort_in_flight(4, 4, True)),
    "at once": Program(AHEAD, abort_in_flight(4, 4, False)),
}
STANDINGS = ("exact", "shown", "hidden")


def hold_to(name: str, standing: str) -> EngineFactory:
    """An engine, held to the specification or to the properties alone."""
    made = load_engine(name)
    if standing == "exact":
        return made

    class Held:
        traits = EngineTraits(equivalence=Safety())

        def __new__(cls, config: Config) -> Any:
            return made(config)

    return hide_state(Held) if standing == "hidden" else Held


@pytest.mark.parametrize("standing", STANDINGS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_an_engine_that_holds_blocks_until_the_answer_is_right(
    program: Program, standing: str
) -> None:
    _, findings = run_program(program, hold_to("host", standing))
    assert findings == []


NAMED = {
    "exact": "block_of_a_frame_in_flight_is_free_behind_its_answer",
    "shown": "loaded_block_is_of_no_plan_in_flight",
    "hidden": "loaded_block_is_of_no_plan_in_flight",
}


@pytest.mark.parametrize("standing", STANDINGS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_one_that_frees_blocks_before_it_is_named(program: Program, standing: str) -> None:
    _, findings = run_program(program, hold_to("museum:blocks-freed-while-frames-write", standing))
    assert (findings[0].property_id, findings[0].sentence) == ("P17", NAMED[standing])


def test_what_a_frame_has_answered_may_be_loaded_into() -> None:
    """Behind the answer the very same load goes into the very same blocks."""
    *before, report, _, _, _, drain = abort_in_flight(4, 4, True)
    actions = (*before[:-1], Answer(), before[-1], report, drain)
    for standing in STANDINGS:
        for engine in ("host", "museum:blocks-freed-while-frames-write"):
            _, findings = run_program(Program(AHEAD, actions), hold_to(engine, standing))
            found = [one.sentence for one in findings]
            assert found == [] or (engine, standing) == (
                "museum:blocks-freed-while-frames-write",
                "exact",
            )


@pytest.mark.parametrize("standing", ["exact", "shown"])
def test_a_hold_without_an_end_is_named(standing: str) -> None:
    _, findings = run_program(
        Program(AHEAD, abort_in_flight(4, 4, True)),
        hold_to("museum:frame-holds-for-ever", standing),
    )
    assert findings[0].sentence == "deferred_free_ends_with_the_answer_to_its_frame"


def test_a_hold_without_an_end_is_no_progress_where_the_state_is_hidden() -> None:
    _, findings = run_program(
        Program(AHEAD, abort_in_flight(4, 4, True)),
        hold_to("museum:frame-holds-for-ever", "hidden"),
    )
    assert [found.property_id for found in findings] == ["P10"]
