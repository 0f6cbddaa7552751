"""Legal together, and once never drawn together: each planted defect falls within some thousand
events of a run that is asked for nothing but the features that it needs."""

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
"""Events, at most."""


class OverlooksReads(HostEngine):
    """It knows only ended requests as being read: the end of a read that comes in the answer which
    ends its request is overlooked, and the blocks are held for ever."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Commit):
            transfers = event.transfers
            kept = tuple(
                name for name in transfers.finished_sending if name not in self.requests.slot_of
            )
            event = replace(event, transfers=replace(transfers, finished_sending=kept))
        return super().apply(event)


def keeps_its_grammar(config: v.Config) -> SpecEngine:
    """A session's chunk goes on in the grammar behind the outputs of the chunk before."""
    return SpecEngine(config, Profile("kept", frozenset({Quirk.SESSIONS_KEEP_THEIR_GRAMMAR})))


def forgets_the_watermark(config: v.Config) -> HostEngine:
    """Beside a store an admission leaves no free blocks to those that run."""
    watermark = 0 if config.kv_connector else config.watermark_blocks
    return HostEngine(replace(config, watermark_blocks=watermark))


def takes_the_oldest_block(config: v.Config) -> HostEngine:
    """Beside an encoder or pins the pool gives what was freed first, whatever the config says."""
    is_beside = config.encoder_cache_size > 0 or config.has_pins
    return HostEngine(replace(config, pool_order=v.PoolOrder.LRU) if is_beside else config)


PLANTED: dict[str, tuple[EngineFactory, tuple[str, ...]]] = {
    "the end of a read in the answer that ends its request": (OverlooksReads, ("transfers",)),
    "a session with a grammar": (keeps_its_grammar, ("sessions", "masks")),
    "a watermark beside a store": (forgets_the_watermark, ("transfers",)),
    "a stack beside an encoder": (takes_the_oldest_block, ("encoder",)),
    "a stack beside pins": (takes_the_oldest_block, ("pins",)),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
@pytest.mark.parametrize("name", PLANTED)
def test_what_is_legal_together_is_drawn_together(name: str, seed: int) -> None:
    make_engine, with_features = PLANTED[name]
    assert play_episodes(make_engine, BUDGET, seed=seed, with_features=with_features).first


# What the judges said that was wrong, once these were drawn.


def test_a_received_request_waits_for_the_blocks_that_a_watermark_leaves() -> None:
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


def test_no_mask_speaks_of_rows_in_flight_behind_the_stop_of_a_session() -> None:
    """The session has gone on, and a plan has a row of its next chunk."""
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
