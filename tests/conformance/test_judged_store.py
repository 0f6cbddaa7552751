"""A store beside the pool: nobody right is accused, of programs in which somebody once was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.program import Action, Drain, Program
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import (
    Config,
    KVOffer,
    Policy,
    Request,
    StreamingUpdate,
    Submit,
)

SMALL = Config(num_blocks=4, block_size=3, max_model_len=64, kv_connector=True)
CHUNKED = replace(SMALL, policy=Policy.PRIORITY, long_prefill_token_threshold=2)
SESSION = Request("A", (0, 0), max_tokens=2, resumable=True)
NEXT = StreamingUpdate(Request("A", (0,), max_tokens=1, resumable=True))
LONG = Submit(Request("B", (0,) * 7, max_tokens=1))
LATER = KVOffer("B", 1, is_async=True)

GIVES_TO_WHO_IS_PARKED: tuple[Action, ...] = (Submit(SESSION), LONG, NEXT, LATER, Drain())
"""A session at rest gives its blocks to who is parked before it, and hits one of them again."""
GIVES_TO_WHO_COMES_BACK: tuple[Action, ...] = (
    *(Submit(replace(SESSION, priority=2)), NEXT, LONG, LATER, Drain()),
)
"""It gives them to one whose load has come."""
PROGRAMS = {
    "parked": Program(SMALL, GIVES_TO_WHO_IS_PARKED),
    "back": Program(CHUNKED, GIVES_TO_WHO_COMES_BACK),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nobody_right_is_accused(name: str) -> None:
    run, findings = run_program(PROGRAMS[name], HostEngine)
    assert findings == []
    assert not run.live
