"""mini-sglang: an engine whose loop plans ahead, and programs that show its defects.

Set BLOCKSTEP_MINI_SGLANG to a checkout of mini-sglang to try the adapter itself.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import pytest

from blockstep.conformance.engine import EngineFault, EngineTraits, Safety
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.protocol.token_function import token_function
from blockstep.conformance.search.check import check
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

CHECKOUT = os.environ.get("BLOCKSTEP_MINI_SGLANG")
needs_mini_sglang = pytest.mark.skipif(
    CHECKOUT is None, reason="BLOCKSTEP_MINI_SGLANG names no checkout of mini-sglang"
)


# A loop that plans ahead.


def fit_config(config: v.Config) -> v.Config:
    return replace(config, async_scheduling=True, max_frames_in_flight=2)


class Turns(SpecEngine):
    """An engine that plans a step before it takes the last one's output, and raises otherwise."""

    traits = EngineTraits(equivalence=Safety(fit_config, plans_ahead=True))

    def __init__(self, config: v.Config) -> None:
        super().__init__(config)
        self.launched: int | None = None
        self.due: int | None = None

    def apply(self, event: v.Event) -> v.Observation:
        seen = super().apply(event)
        if isinstance(event, v.Schedule) and isinstance(seen, v.Plan):
            if self.due is not None:
                raise EngineFault("a turn is not over")
            self.due, self.launched = self.launched, seen.frame_id if seen.rows else None
        elif isinstance(event, v.Commit) and not isinstance(seen, v.Rejected):
            if self.due != event.frame_id:
                raise EngineFault("no turn is there to answer it")
            self.due = None
        return seen


class AnyOrder(Turns):
    traits = EngineTraits(equivalence=Safety(fit_config))


def test_an_engine_that_plans_ahead_is_answered_in_its_own_order() -> None:
    options = CheckOptions(preset="tiny", seed=3)
    num_events = 0
    for episode in range(30):
        run, _, findings = play_episode(options, episode, Turns)
        assert findings == []
        num_events += run.num_events
    assert num_events > 300
    assert any(play_episode(options, episode, AnyOrder)[2] for episode in range(30))


# mini-sglang.


@pytest.fixture(name="adapter")
def load_adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    assert CHECKOUT is not None
    monkeypatch.setattr(sys, "path", [CHECKOUT, *sys.path])
    load_engine("mini_sglang")
    return sys.modules["blockstep.conformance.engines.adapters.mini_sglang"]


NORMAL = v.Config(
    num_blocks=9, block_size=1, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=8
)
OVERLAP = replace(NORMAL, async_scheduling=True, max_frames_in_flight=2)
EOS = 1


def submit(name: str, prompt: tuple[int, ...], max_tokens: int, eos: int | None = None) -> v.Submit:
    return v.Submit(v.Request(name, prompt, max_tokens, eos_token_id=eos))


def find_seed(*texts: tuple[tuple[int, ...], bool]) -> int:
    """Return a seed with which each token sequence is followed by `EOS`, or is not, as asked."""
    functions = ((seed, token_function(seed, 2)) for seed in range(1000))
    return next(
        seed
        for seed, follow in functions
        if all((follow(text) == EOS) is is_eos for text, is_eos in texts)
    )


def play(make_engine: Any, config: v.Config, *actions: Action, seed: int = 0) -> list[str]:
    """Return the names of the checks that fail, or the exception."""
    _, findings = run_program(Program(config, actions, seed, 2), make_engine)
    return [
        found.differences[0].seen if found.kind is FindingKind.FAULT else found.sentence
        for found in findings
    ]


TURN = (v.Schedule(), Answer())
TWICE = (submit("A", (5, 6), 1), submit("D", (7, 8, 9), 1), *TURN, submit("B", (5, 6), 3), *TURN)


@needs_mini_sglang
def test_a_duplicate_block_is_freed_while_a_block_table_has_it(adapter: Any) -> None:
    class Quiet(adapter.MiniSglang):  # type: ignore[misc]
        def capabilities(self) -> frozenset[str]:
            return frozenset()

        def snapshot(self) -> None:
            return None

    assert play(adapter.MiniSglang, NORMAL, *TWICE) == ["every_block_is_free_or_held"]
    actions = (*TWICE, submit("C", (1, 2, 3), 1), *TURN, v.Schedule())
    assert play(Quiet, NORMAL, *actions) == ["attended_slot_holds_the_right_prefix"]


@needs_mini_sglang
def test_the_overlapping_loop_ends_a_request_one_token_early(adapter: Any) -> None:
    actions = (submit("A", (5,), 2), Drain())
    assert play(adapter.MiniSglang, NORMAL, *actions) == []
    assert play(adapter.MiniSglang, OVERLAP, *actions) == ["finish_reason_is_the_one_that_holds"]


@needs_mini_sglang
def test_each_declared_deviation_is_shown_by_its_program(adapter: Any) -> None:
    class Bare(adapter.MiniSglang):  # type: ignore[misc]
        traits = replace(adapter.MiniSglang.traits, deviations=())

    for deviation in adapter.DEVIATIONS:
        run, findings = run_program(deviation.program, adapter.MiniSglang)
        assert (findings, [*run.excuses.counts]) == ([], [deviation.name])
        _, findings = run_program(deviation.program, Bare)
        assert [found.sentence for found in findings] == [*deviation.sentences]
        config = replace(deviation.program.config, async_scheduling=False, max_frames_in_flight=1)
        assert run_program(replace(deviation.program, config=config), Bare)[1] == []


@needs_mini_sglang
def test_an_abort_in_flight_frees_blocks_twice(adapter: Any) -> None:
    prefill = (submit("A", (5, 6, 7), 2), v.Schedule(), v.Abort(("A",)))
    other = (submit("B", (8, 9, 10, 11), 1), v.Schedule(), Answer())
    config = replace(OVERLAP, num_blocks=6, max_model_len=5)
    sentences = play(adapter.MiniSglang, config, *prefill, *other)
    assert set(sentences) == {"published_block_holds_the_right_prefix"}
    idle = ["RuntimeError"]  # its own check of its counters
    assert play(adapter.MiniSglang, OVERLAP, *prefill, *TURN, v.Schedule()) == idle
    ends = (
        submit("A", (5, 6), 4, EOS),
        v.Schedule(),
        v.Schedule(),
        Answer(),
        v.Abort(("A",)),
        *TURN,
    )
    seed = find_seed(((5, 6), False), ((5, 6, 0), True))
    assert play(adapter.MiniSglang, OVERLAP, *ends, seed=seed) == ["AssertionError"]


@needs_mini_sglang
def test_pages_are_reserved_as_if_two_requests_could_share_one(adapter: Any) -> None:
    config = replace(NORMAL, num_blocks=4, block_size=4, max_num_batched_tokens=16)
    prompts = (submit("A", (3,) * 5, 1), submit("B", (4,) * 5, 1))
    assert play(adapter.MiniSglang, config, *prompts, v.Schedule()) == ["AssertionError"]


@needs_mini_sglang
def test_the_adapter_limits_the_model_length_to_the_pool(adapter: Any) -> None:
    def fit(config: v.Config) -> v.Config:
        fitting: v.Config = adapter.fit_config(config)
        return replace(fitting, max_model_len=config.max_model_len)

    class Longer(adapter.MiniSglang):  # type: ignore[misc]
        traits = EngineTraits(equivalence=Safety(fit, adapter.fit_request, plans_ahead=True))

    config = replace(NORMAL, num_blocks=4)
    actions = (submit("A", (5, 6), 2), Drain())
    assert play(Longer, config, *actions) == ["finish_reason_is_the_one_that_holds"]
    assert play(adapter.MiniSglang, replace(config, max_model_len=3), *actions) == []


@needs_mini_sglang
def test_the_normal_loop_conforms_if_duplicates_are_kept(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = sys.modules["minisgl.scheduler.cache"].CacheManager
    theirs = manager.cache_req

    def keep_duplicates(self: Any, req: Any, *, finished: bool) -> None:
        text = req.input_ids[: req.cached_len]
        found = self.prefix_cache.match_prefix(text).cuda_handle.cached_len
        if finished or found == req.cache_handle.cached_len:
            theirs(self, req, finished=finished)

    monkeypatch.setattr(manager, "cache_req", keep_duplicates)
    result = check(
        CheckOptions("mini_sglang", "tiny", max_events=3_000, without_features=("async",))
    )
    assert result.first is None, result.first
    assert result.witnesses["prefix_hit"] > 20
