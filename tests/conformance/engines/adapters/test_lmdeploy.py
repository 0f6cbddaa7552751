"""lmdeploy's PyTorch engine: its three known defects are found, and nothing else.

Set BLOCKSTEP_LMDEPLOY to a checkout of lmdeploy to run these tests.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Action, Answer, Program
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Abort, Config, Request, Schedule, Submit

CHECKOUT = os.environ.get("BLOCKSTEP_LMDEPLOY")
pytestmark = pytest.mark.skipif(
    CHECKOUT is None, reason="BLOCKSTEP_LMDEPLOY names no checkout of lmdeploy"
)


@pytest.fixture(name="adapter")
def load_adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    assert CHECKOUT is not None
    monkeypatch.setattr(sys, "path", [CHECKOUT, *sys.path])
    return load_engine("lmdeploy")


def submit(name: str, tokens: tuple[int, ...], max_tokens: int) -> Submit:
    return Submit(Request(name, tokens, max_tokens))


def make_program(
    num_blocks: int, block_size: int, num_tokens: int, length: int, *actions: Action, **more: Any
) -> Program:
    config = Config(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=min(8, num_tokens),
        max_num_batched_tokens=num_tokens,
        max_model_len=length,
        async_scheduling=True,
        max_frames_in_flight=2,
        **more,
    )
    return Program(config, actions, vocabulary_size=2)


TURN = (Answer(), Schedule())
A_CANCELED_CHUNK = make_program(
    6,
    2,
    5,
    8,
    submit("A", (0,) * 6, 1),
    Schedule(),
    Abort(("A",)),
    submit("B", (0,), 1),
    Schedule(),
    enable_prefix_caching=False,
)
"""A is canceled while its first chunk is in flight; the next batch is launched for B."""
A_HIT_BEHIND_BLOCKS = make_program(
    10,
    3,
    64,
    16,
    submit("A", (0, 1), 5),
    *(Schedule(), Schedule(), *TURN),
    submit("B", (0,), 3),
    *(*TURN, *TURN),
    submit("C", (0,), 1),
    submit("D", (0, 1, 1, 0), 2),
    *(*TURN, *TURN, *TURN),
)
"""A is preempted and keeps two blocks; D has published A's first block meanwhile."""

A_DECODE_TOO_EARLY = make_program(
    9,
    1,
    2,
    7,
    submit("A", (0,), 6),
    *(Schedule(), Schedule(), *TURN),
    submit("B", (1,) * 5, 1),
    *(*TURN, *TURN, *TURN, *TURN, *TURN, *TURN),
    Abort(("B",)),
    *(*TURN, *TURN),
    enable_prefix_caching=False,
)
"""A is preempted, and no request is left to decode; B, in chunks, is canceled; A is resumed."""


@pytest.mark.parametrize(
    ("program", "flag", "found"),
    [
        (A_CANCELED_CHUNK, "keep_chunks_apart", "has no attribute 'is_decoding'"),
        (A_HIT_BEHIND_BLOCKS, "free_preempted", "block_still_to_be_written_has_one_holder"),
        (A_DECODE_TOO_EARLY, "forget_preempted", "plan_counts_the_computed_tokens_of_the_worker"),
    ],
)
def test_a_known_defect_is_found_and_its_repair_conforms(
    adapter: Any, program: Program, flag: str, found: str
) -> None:
    broken = type("Broken", (adapter,), {flag: False})
    finding = run_program(program, broken)[1][0]
    assert found in f"{finding.sentence} {finding.message}"
    assert not run_program(program, adapter)[1]


def test_lmdeploy_conforms_apart_from_known_defects(adapter: Any) -> None:
    assert check(CheckOptions(engine="lmdeploy", preset="tiny", max_events=600)).first is None


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lmdeploy_conforms_apart_from_known_defects_for_long(adapter: Any, seed: int) -> None:
    options = CheckOptions(engine="lmdeploy", seed=seed, max_events=100_000)
    assert check(options).first is None
