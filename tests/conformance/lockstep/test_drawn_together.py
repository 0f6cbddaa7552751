"""Combinations of features that were once never drawn: a seeded bug in each of them is found.

A run of some thousand events finds the bug if only the features that it needs are asked for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from episodes_support import play_episodes

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Answer, Program, Report
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Profile, Quirk

BUDGET = 12_000
"""Largest number of events."""


class IgnoresReads(HostEngine):
    """An engine that ignores the end of a store's read if the commit reports it that finishes the
    request, so the blocks are held for ever."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Commit):
            transfers = event.transfers
            kept = tuple(
                name for name in transfers.finished_sending if name not in self.requests.slot_of
            )
            event = replace(event, transfers=replace(transfers, finished_sending=kept))
        return super().apply(event)


def keeps_its_grammar(config: v.Config) -> SpecEngine:
    """The next input of a session keeps the grammar state after the last outputs."""
    return SpecEngine(config, Profile("kept", frozenset({Quirk.SESSIONS_KEEP_THEIR_GRAMMAR})))


def forgets_the_watermark(config: v.Config) -> HostEngine:
    """An admission leaves no free blocks for running requests if there is a store."""
    watermark = 0 if config.kv_connector else config.watermark_blocks
    return HostEngine(replace(config, watermark_blocks=watermark))


def takes_the_oldest_block(config: v.Config) -> HostEngine:
    """With an encoder or pins, the pool reuses the oldest free block, whatever the config says."""
    has_either = config.encoder_cache_size > 0 or config.has_pins
    return HostEngine(replace(config, pool_order=v.PoolOrder.LRU) if has_either else config)


SEEDED: dict[str, tuple[EngineFactory, tuple[str, ...]]] = {
    "the end of a read in the commit that finishes its request": (IgnoresReads, ("transfers",)),
    "a session with a grammar": (keeps_its_grammar, ("sessions", "masks")),
    "a watermark with a store": (forgets_the_watermark, ("transfers",)),
    "a LIFO pool with an encoder": (takes_the_oldest_block, ("encoder",)),
    "a LIFO pool with pins": (takes_the_oldest_block, ("pins",)),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
@pytest.mark.parametrize("name", SEEDED)
def test_a_bug_that_needs_several_features_together_is_found(name: str, seed: int) -> None:
    make_engine, with_features = SEEDED[name]
    assert play_episodes(make_engine, BUDGET, seed=seed, with_features=with_features).first


# False findings of the judges, once these combinations were drawn.


def test_a_loaded_request_waits_for_the_blocks_of_the_watermark() -> None:
    """One block is free, and A runs: B needs it, and the watermark is one."""
    full = v.GroupKind.FULL
    config = v.Config(
        num_blocks=7,
        block_size=1,
        max_model_len=64,
        enable_prefix_caching=False,
        max_frames_in_flight=2,
        async_scheduling=True,
        groups=(v.KVGroup(full, 4), v.KVGroup(full, 1)),
        kv_connector=True,
        kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE,
        watermark_blocks=1,
    )
    actions = (
        v.Submit(v.Request("A", (0,), max_tokens=2)),
        v.Submit(v.Request("B", (0, 0), max_tokens=1)),
        v.KVOffer("B", 1, is_async=True),
        v.Schedule(),
        Report(recving=("B",)),
        v.Schedule(),
    )
    run, findings = run_program(Program(config, actions), SpecEngine)
    assert findings == []
    assert run.num_events == len(actions)


def test_no_mask_is_due_for_rows_in_flight_after_a_session_stopped() -> None:
    """The session has continued, and a plan has a row of its next input."""
    config = v.Config(
        num_blocks=3,
        block_size=2,
        max_model_len=64,
        enable_prefix_caching=False,
        max_frames_in_flight=3,
        async_scheduling=True,
    )
    grammar = v.Grammar(((),))
    first = v.Request(
        "A", (0,), max_tokens=2, resumable=True, structured_output=True, grammar=grammar
    )
    actions = (
        v.Submit(first),
        v.StreamingUpdate(v.Request("A", (0,), max_tokens=1, resumable=True)),
        v.GrammarReady("A"),
        *(v.Schedule(),) * 3,
        *(Answer(),) * 2,
        v.Schedule(),
        Answer(),
    )
    run, findings = run_program(Program(config, actions), SpecEngine)
    assert findings == []
    assert not run.worker.list_masked(2)
