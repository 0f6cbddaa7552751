"""KV store: programs in which a correct engine was once accused have no finding now."""

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

RECLAIMED_FOR_A_LOADING_REQUEST: tuple[Action, ...] = (
    v.Submit(SESSION),
    LONG,
    NEXT,
    LATER,
    Drain(),
)
"""A loading request reclaims the blocks of an idle session, which hits one of them later."""
RECLAIMED_FOR_A_LOADED_REQUEST: tuple[Action, ...] = (
    *(v.Submit(replace(SESSION, priority=2)), NEXT, LONG, LATER, Drain()),
)
"""A request with a confirmed load reclaims the blocks of an idle session."""
EVICTS_THE_HIT_OF_THE_HEAD: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0,), max_tokens=3, priority=3)), v.Submit(v.Request("C", (0,), 4))),
    *(v.Submit(v.Request("B", (0, 0, 0), 3)), v.Submit(v.Request("D", (0, 0), 1))),
    *(v.KVOffer("D", 1, is_async=True), v.Schedule(), Answer(Report(recving=("D",)))),
    *(v.Schedule(), Answer(), v.Schedule(), Answer(), v.Schedule()),
    *(Answer(Report(invalid=(("D", 0),))), v.Schedule(), Drain()),
)
"""C has a hit and does not fit. The load of D failed, and D loads again into those hit blocks."""
NARROW = v.Config(num_blocks=4, block_size=1, max_model_len=64, kv_connector=True)
RETRY = v.KVLoadFailurePolicy.RECOMPUTE
RESERVED: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0), 1)), v.Submit(v.Request("B", (0, 0), 1)), v.KVOffer("B", 9)),
    *(v.Schedule(), Drain()),
)
"""B needs no block for loaded tokens before its attention chunk, so two more chunks fit."""
READ: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0), 2)), v.KVOffer("A", 0, delays_free=True)),
    *(v.Submit(v.Request("B", (0, 0), 1)), v.Schedule(), Answer(), v.Schedule(), Answer()),
    *(v.KVOffer("B", 9), v.Schedule(), Drain()),
)
"""The store reads the blocks that A has when it finishes, without those its window skipped."""
FAILED: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0, 0), 2)), v.KVOffer("A", 2), v.Submit(v.Request("B", (0,), 1))),
    *(v.Schedule(), Answer(Report(invalid=(("A", -1),))), Drain()),
)
"""The load of A fails: A starts again from its first token, while B finishes."""
FAILED_WITH_A_SESSION: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0), 1)), v.KVOffer("A", 1)),
    *(v.Submit(v.Request("B", (0,), 1, resumable=True)), v.Schedule()),
    *(Answer(Report(invalid=(("A", 0),))), Drain()),
)
"""The load of A fails while the session B becomes idle."""
FAILED_LATER: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0, 0, 0), 1)), v.KVOffer("A", 3, is_async=True), v.Schedule()),
    *(Report(invalid=(("A", -1),)), v.Schedule(), Drain()),
)
"""The asynchronous load of A fails at its last block while A waits for it."""
HELD_WITHOUT_A_BLOCK: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0, 0), 1)), v.KVOffer("A", 1, is_async=True), v.Schedule()),
    *(v.Abort(("A",)), Drain()),
)
"""The window skips all loaded tokens: only the request id is held until the load ends."""

LOADED_AGAIN: tuple[Action, ...] = (
    *(v.Submit(v.Request("A", (0,) * 6, 2)), v.KVOffer("A", 1), v.Schedule()),
    *(v.Submit(v.Request("B", (0, 0, 0), 1)), v.KVOffer("B", 2, is_async=True), v.Schedule()),
    *(Report(recving=("B",)), v.Schedule(), Drain()),
)
"""The window of A skips a block with an unconfirmed load, and the store loads that KV for B."""


def of(*groups: v.KVGroup, **changes: object) -> v.Config:
    return replace(NARROW, groups=groups, **changes)  # type: ignore[arg-type]


PROGRAMS = {
    "reserved": Program(of(chunks(1, 1), enable_prefix_caching=False), RESERVED),
    "read": Program(of(full(1), window(1, 1), num_blocks=8, enable_prefix_caching=False), READ),
    "failed": Program(of(full(1), window(1, 2), num_blocks=9, kv_load_failure_policy=RETRY),
        FAILED),
    "failed-async": Program(of(*(full(1), window(1, 2)), num_blocks=9, async_scheduling=True,
        kv_load_failure_policy=RETRY, max_frames_in_flight=2), FAILED),
    "loaded-again": Program(of(*(full(1), window(1, 1)), num_blocks=15, enable_prefix_caching=False,
        async_scheduling=True, max_frames_in_flight=3), LOADED_AGAIN),
    "failed-with-session": Program(of(window(1, 2), policy=v.Policy.PRIORITY,
        kv_load_failure_policy=RETRY), FAILED_WITH_A_SESSION),
    "failed-later": Program(of(window(2, 1), num_blocks=3, block_size=2,
        kv_load_failure_policy=RETRY), FAILED_LATER),
    "no-block": Program(of(window(1, 1), enable_prefix_caching=False), HELD_WITHOUT_A_BLOCK),
    "loading": Program(SMALL, RECLAIMED_FOR_A_LOADING_REQUEST),
    "evicts": Program(replace(CHUNKED, num_blocks=9, max_num_seqs=3, long_prefill_token_threshold=1,
        scheduler_reserve_full_isl=False, groups=(full(3), full(3)),
        kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE), EVICTS_THE_HIT_OF_THE_HEAD),
    "loaded": Program(CHUNKED, RECLAIMED_FOR_A_LOADED_REQUEST),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_right_engine_is_accused(name: str) -> None:
    run, findings = run_program(PROGRAMS[name], HostEngine)
    assert findings == []
    assert not run.live
