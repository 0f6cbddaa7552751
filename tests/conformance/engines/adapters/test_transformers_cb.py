"""The continuous batching of transformers: its four known defects are found, and nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers.generation.continuous_batching")

from foreign_support import transformers_repaired as repaired

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.engines.adapters import transformers_cb
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program
from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Abort, Config, Request, Schedule, Submit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SYNC, ASYNC = transformers_cb.Synchronous, transformers_cb.Asynchronous
REPAIRED: dict[type[transformers_cb.Synchronous], type[transformers_cb.Synchronous]] = {
    SYNC: repaired.Synchronous,
    ASYNC: repaired.Asynchronous,
}


def submit(name: str, num_tokens: int, max_tokens: int) -> Submit:
    return Submit(Request(name, (0,) * num_tokens, max_tokens))


def make_program(num_blocks: int, *actions: Action, is_async: bool = False) -> Program:
    config = Config(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        async_scheduling=is_async,
        max_frames_in_flight=2 if is_async else 1,
    )
    return Program(config, actions)


AFTER_AN_OFFLOAD = make_program(
    3,
    submit("A", 1, 3),
    submit("B", 4, 2),
    Schedule(),
    Answer(),
    Schedule(),
    Abort(("A",)),
    Drain(),
)
"""B is offloaded, which blocks new requests until one finishes; A is canceled, none finishes."""
A_LATE_CANCEL = make_program(
    2,
    submit("A", 1, 1),
    Schedule(),
    Abort(("A",)),
    Answer(),
    submit("A", 1, 1),
    Drain(),
)
"""A finishes before its cancel is read, which then cancels the next request with its id."""
A_FULL_POOL = make_program(2, submit("A", 4, 1), Schedule(), Schedule(), is_async=True)
"""The next batch wants a slot for a token after A's last one, and there is no other request."""
A_BLOCK_IN_FLIGHT = make_program(
    3,
    submit("A", 4, 2),
    submit("B", 1, 5),
    Schedule(),
    Abort(("A",)),
    Schedule(),
    Answer(),
    is_async=True,
)
"""A is canceled while the batch that fills its block is in flight."""


@pytest.mark.parametrize(
    ("engine", "program", "found"),
    [
        (SYNC, AFTER_AN_OFFLOAD, "every_request_finishes_after_faults_stop"),
        (SYNC, A_LATE_CANCEL, "every_request_finishes_after_faults_stop"),
        (ASYNC, A_FULL_POOL, "RuntimeError: No requests can be scheduled"),
        (ASYNC, A_BLOCK_IN_FLIGHT, "KeyError: 'A'"),
    ],
)
def test_a_known_defect_is_found_and_its_repair_conforms(
    engine: type[transformers_cb.Synchronous], program: Program, found: str
) -> None:
    finding = run_program(program, engine)[1][0]
    assert found in f"{finding.sentence} {finding.message}"
    assert not run_program(program, REPAIRED[engine])[1]


@pytest.mark.parametrize("engine", REPAIRED.values(), ids=["sync", "async"])
def test_a_repaired_engine_has_no_finding(engine: EngineFactory) -> None:
    name = f"{engine.__module__}:{engine.__name__}"
    assert check(CheckOptions(engine=name, preset="tiny", max_events=600)).first is None


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("engine", REPAIRED.values(), ids=["sync", "async"])
def test_a_repaired_engine_has_no_finding_for_long(engine: EngineFactory, seed: int) -> None:
    name = f"{engine.__module__}:{engine.__name__}"
    options = CheckOptions(engine=name, seed=seed, max_events=100_000)
    assert check(options).first is None
