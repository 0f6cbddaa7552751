"""P17: a store does not write blocks of a frame in flight, and these are freed after the commit.

Each engine is compared with the specification, or held to the properties alone with its state shown
or hidden. One that gives such a block to a load is found, and one that waits is not accused.
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
    """A is aborted while its plan is in flight; the store has tokens of B for its blocks."""
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
MODES = ("exact", "shown", "hidden")


def hold_to(name: str, mode: str) -> EngineFactory:
    """Return an engine that is compared with the specification or held to the properties alone."""
    made = load_engine(name)
    if mode == "exact":
        return made

    class Held:
        traits = EngineTraits(equivalence=Safety())

        def __new__(cls, config: Config) -> Any:
            return made(config)

    return hide_state(Held) if mode == "hidden" else Held


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_an_engine_that_holds_blocks_until_the_commit_is_not_accused(
    program: Program, mode: str
) -> None:
    _, findings = run_program(program, hold_to("host", mode))
    assert findings == []


CHECK_OF = {
    "exact": "block_of_a_frame_in_flight_is_free_behind_its_answer",
    "shown": "loaded_block_is_of_no_plan_in_flight",
    "hidden": "loaded_block_is_of_no_plan_in_flight",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_an_engine_that_frees_blocks_before_the_commit_is_found(
    program: Program, mode: str
) -> None:
    _, findings = run_program(program, hold_to("museum:blocks-freed-while-frames-write", mode))
    assert (findings[0].property_id, findings[0].sentence) == ("P17", CHECK_OF[mode])


def test_blocks_of_a_committed_frame_may_be_loaded_into() -> None:
    """The same load may go into the same blocks after the commit."""
    *before, report, _, _, _, drain = abort_in_flight(4, 4, True)
    actions = (*before[:-1], Answer(), before[-1], report, drain)
    for mode in MODES:
        for engine in ("host", "museum:blocks-freed-while-frames-write"):
            _, findings = run_program(Program(AHEAD, actions), hold_to(engine, mode))
            found = [one.sentence for one in findings]
            assert found == [] or (engine, mode) == (
                "museum:blocks-freed-while-frames-write",
                "exact",
            )


@pytest.mark.parametrize("mode", ["exact", "shown"])
def test_a_hold_that_never_ends_is_found(mode: str) -> None:
    _, findings = run_program(
        Program(AHEAD, abort_in_flight(4, 4, True)),
        hold_to("museum:frame-holds-for-ever", mode),
    )
    assert findings[0].sentence == "deferred_free_ends_with_the_answer_to_its_frame"


def test_a_hold_that_never_ends_is_a_stall_where_the_state_is_hidden() -> None:
    _, findings = run_program(
        Program(AHEAD, abort_in_flight(4, 4, True)),
        hold_to("museum:frame-holds-for-ever", "hidden"),
    )
    assert [found.property_id for found in findings] == ["P10"]
