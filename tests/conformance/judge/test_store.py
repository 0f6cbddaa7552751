"""A store beside the pool: nobody right is accused, of programs in which somebody once was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groups_support import chunks, full, window

from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program, Report
from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v

SMALL = v.Config(num_blocks=4, block_size=3, max_model_len=64, kv_connector=True)
CHUNKED = replace(SMALL, policy=v.Policy.PRIORITY, long_prefill_token_threshold=2)
SESSION = v.Request("A", (0, 0), max_tokens=2, resumable=True)
NEXT = v.StreamingUpdate(v.Request("A", (0,), max_tokens=1, resumable=True))
LONG = v.Submit(v.Request("B", (0,) * 7, max_tokens=1))
LATER = v.KVOffer("B", 1, is_async=True)

GIVES_TO_A_PARKED_REQUEST: tuple[Action, ...] = (v.Submit(SESSION), LONG, NEXT, LATER, Drain())
"""A session at rest gives its blocks to who is parked before it, and hits one of them again."""
GIVES_TO_A_LOADED_REQUEST: tuple[Action, ...] = (
    *(v.Submit(replace(SESSION, priority=2)), NEXT, LONG, LATER, Drain()),
)
"""It gives them to one whose load has come."""
EVICTS_THE_HIT_OF_THE_HEAD: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0,), max_tokens=3, priority=3)), v.Submit(v.Request("C", (0,), 4))),
    *(v.Submit(v.Request("B", (0, 0, 0), 3)), v.Submit(v.Request("D", (0, 0), 1))),
    *(v.KVOffer("D", 1, is_async=True), v.Schedule(), Answer(Report(recving=("D",)))),
    *(v.Schedule(), Answer(), v.Schedule(), Answer(), v.Schedule()),
    *(Answer(Report(invalid=(("D", 0),))), v.Schedule(), Drain()),
)
"""C does not fit behind a hit; D behind it, of whose load nothing came, is loaded into that hit."""
NARROW = v.Config(num_blocks=4, block_size=1, max_model_len=64, kv_connector=True)
ANEW = v.KVLoadFailurePolicy.RECOMPUTE
RESERVED: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0), 1)), v.Submit(v.Request("B", (0, 0), 1)), v.KVOffer("B", 9)),
    *(v.Schedule(), Drain()),
)
"""B needs no block for what is loaded behind its chunk: two chunks more fit the pool."""
READ: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0), 2)), v.KVOffer("A", 0, delays_free=True)),
    *(v.Submit(v.Request("B", (0, 0), 1)), v.Schedule(), Answer(), v.Schedule(), Answer()),
    *(v.KVOffer("B", 9), v.Schedule(), Drain()),
)
"""A store reads what A held at its end, which is not what its window has passed."""
LOST: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0, 0), 2)), v.KVOffer("A", 2), v.Submit(v.Request("B", (0,), 1))),
    *(v.Schedule(), Answer(Report(invalid=(("A", -1),))), Drain()),
)
"""What was loaded for A is not there: it begins anew, while B ends."""
LOST_BESIDE_A_SESSION: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0), 1)), v.KVOffer("A", 1)),
    *(v.Submit(v.Request("B", (0,), 1, resumable=True)), v.Schedule()),
    *(Answer(Report(invalid=(("A", 0),))), Drain()),
)
"""While a session comes to rest."""
LOST_LATER: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0, 0, 0), 1)), v.KVOffer("A", 3, is_async=True), v.Schedule()),
    *(Report(invalid=(("A", -1),)), v.Schedule(), Drain()),
)
"""While A is parked: what it hit stays settled until it is given back."""
HELD_WITHOUT_A_BLOCK: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0), 1)), v.KVOffer("A", 1, is_async=True), v.Schedule()),
    *(v.Abort(("A",)), Drain()),
)
"""A window has passed what is loaded: nothing is held but the id, until the load has ended."""

LOADED_ANEW: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0,) * 6, 2)), v.KVOffer("A", 1), v.Schedule()),
    *(v.Submit(v.Request("B", (0, 0, 0), 1)), v.KVOffer("B", 2, is_async=True), v.Schedule()),
    *(Report(recving=("B",)), v.Schedule(), Drain()),
)
"""What A may have read wrongly its window has passed, and the store writes it for B."""


def of(*groups: v.KVGroup, **changes: object) -> v.Config:
    return replace(NARROW, groups=groups, **changes)  # type: ignore[arg-type]


PROGRAMS = {
    "reserved": Program(of(chunks(1, 1), enable_prefix_caching=False), RESERVED),
    "read": Program(of(full(1), window(1, 1), num_blocks=8, enable_prefix_caching=False), READ),
    "lost": Program(of(full(1), window(1, 2), num_blocks=9, kv_load_failure_policy=ANEW), LOST),
    "lost-async": Program(of(*(full(1), window(1, 2)), num_blocks=9, kv_load_failure_policy=ANEW,
        async_scheduling=True, max_frames_in_flight=2), LOST),
    "loaded-anew": Program(of(*(full(1), window(1, 1)), num_blocks=15, enable_prefix_caching=False,
        async_scheduling=True, max_frames_in_flight=3), LOADED_ANEW),
    "lost-beside": Program(of(window(1, 2), policy=v.Policy.PRIORITY, kv_load_failure_policy=ANEW),
        LOST_BESIDE_A_SESSION),
    "lost-later": Program(of(window(2, 1), num_blocks=3, block_size=2, kv_load_failure_policy=ANEW),
        LOST_LATER),
    "no-block": Program(of(window(1, 1), enable_prefix_caching=False), HELD_WITHOUT_A_BLOCK),
    "parked": Program(SMALL, GIVES_TO_A_PARKED_REQUEST),
    "evicts": Program(replace(CHUNKED, num_blocks=9, max_num_seqs=3, long_prefill_token_threshold=1,
        scheduler_reserve_full_isl=False, groups=(full(3), full(3)),
        kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE), EVICTS_THE_HIT_OF_THE_HEAD),
    "back": Program(CHUNKED, GIVES_TO_A_LOADED_REQUEST),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_right_engine_is_accused(name: str) -> None:
    run, findings = run_program(PROGRAMS[name], HostEngine)
    assert findings == []
    assert not run.live
