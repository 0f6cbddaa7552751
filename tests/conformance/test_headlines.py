"""Headlines: what is said first of a wrong decision in a release names it.

The engine follows a release past its quirks, and so does the specification. What a quirk does in
the step in which the wrong decision shows is known, and not said of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from planted_support import Planted, in_spec

from blockstep.conformance.engine import Capability, EngineFactory, EngineTraits
from blockstep.conformance.engines.adapters.vllm_releases import (
    REFERENCE,
    get_installed_version,
)
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep.driver import put_causes_first, tell_divergence
from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.findings import (
    Difference,
    Finding,
    FindingKind,
    violated,
)
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.report.failure import tell_failure
from blockstep.conformance.search.check import InProcess, check, play_program
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.conformance.search.shrink import shrink
from blockstep.spec import vocabulary as v
from blockstep.spec.maps import FrozenMap
from blockstep.spec.profiles import STRICT, get_profile

EPISODES = 600
PROFILE = get_profile(in_spec.PROFILE)
assert PROFILE is not None


def find_first(entry: Planted, make_engine: EngineFactory, seed: int = 0) -> Finding:
    """What is found first of a wrong decision, in the first tiny episode that shows it."""
    options = CheckOptions(
        preset="tiny", profile=in_spec.PROFILE, seed=seed, with_features=entry.features
    )
    for index in range(EPISODES):
        found = run_episode(options, index, make_engine).first
        if found is not None:
            return found
    raise AssertionError(f"{entry.name} is not found in {EPISODES} tiny episodes")


def tell(finding: Finding) -> str:
    """The first lines of a finding in one: its name, what was seen, and where sides differ."""
    differences: Iterable[Difference] = finding.differences[:2]
    told = [f"{one.field}: expected {one.expected}, seen {one.seen}" for one in differences]
    return " ".join([finding.property_id, finding.sentence, finding.message, *told])


@pytest.mark.parametrize("entry", in_spec.PLANTED, ids=lambda entry: entry.name)
def test_first_finding_names_the_wrong_decision(entry: Planted) -> None:
    told = tell(find_first(entry, in_spec.build_factory(entry)))
    assert re.search(entry.says, told), told


def test_at_least_twenty_wrong_decisions_are_planted() -> None:
    assert len({entry.name for entry in in_spec.PLANTED}) >= 20


def give(make_engine: EngineFactory) -> InProcess:
    """The place of a check of this engine, whatever the options name."""
    return InProcess(load=lambda _options: make_engine)


@pytest.mark.soak
@pytest.mark.skipif(get_installed_version() != REFERENCE, reason=f"needs vLLM {REFERENCE}")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_headlines_name_nineteen_of_twenty_wrong_decisions_in_a_release() -> None:
    from planted_support import in_vllm

    lost = {}
    for entry in in_vllm.PLANTED:
        options = CheckOptions(
            engine="vllm", profile=in_spec.PROFILE, max_events=40_000, with_features=entry.features
        )
        factory = in_vllm.build_factory(entry)
        result = check(options, place=give(factory))
        assert result.failure is not None, entry.name
        headline = tell_failure(result).splitlines()[0]
        if not re.search(entry.says, headline):
            lost[entry.name] = headline
    assert len(lost) <= len(in_vllm.PLANTED) // 20, lost


# What a quirk accounts for, though the engine diverges.


class Lost(in_spec.Release):
    """A release that forgets who was aborted; here, behind a quirk of its encoder cache."""

    def apply(self, event: v.Event) -> v.Observation:
        before = self.state.finished_req_ids
        answer = super().apply(event)
        if isinstance(event, v.Abort):
            self.state = replace(self.state, finished_req_ids=before)
        return answer


CONFIG_BESIDE = v.Config(
    num_blocks=3,
    block_size=1,
    max_model_len=8,
    enable_prefix_caching=False,
    encoder_compute_budget=1,
    encoder_cache_size=1,
    is_encoder_decoder=True,
    disable_chunked_mm_input=True,
    enable_chunked_prefill=False,
)
ITEM = (v.MultiModalItem("x", 0, 1),)


def play(program: Program, make_engine: EngineFactory, profile: Any = PROFILE) -> list[Finding]:
    """What is wrong with an engine under a profile."""
    return run_program(program, make_engine, profile)[1]


def test_what_the_specification_has_as_well_is_known_where_they_diverge() -> None:
    actions = (v.Submit(v.Request("A", (0,), max_tokens=2, items=ITEM)), v.Schedule(), Answer())
    program = Program(CONFIG_BESIDE, (*actions, v.Abort(("A",))))
    assert play(program, in_spec.Release) == []
    assert {it.property_id for it in play(program, in_spec.Release, STRICT)} >= {"P22"}
    found = play(program, Lost)
    assert [it.property_id or it.kind for it in found] == ["P26", FindingKind.DIVERGENCE]
    assert found[1].message.startswith("after abort, finished_req_ids is [], the spec has [A]")


def test_a_worker_that_was_told_another_answer_is_as_it_was() -> None:
    config = v.Config(num_blocks=4, block_size=1, max_model_len=8)
    spec = SpecEngine(config)
    worker = Worker(config, lambda _text: 7)
    for event in (v.Submit(v.Request("A", (1, 2), max_tokens=2)), v.Schedule()):
        worker.observe(event, spec.apply(event))
    fork = worker.fork()
    commit = v.Commit(0, worker.answer(0))
    outputs = spec.apply(commit)
    assert fork.observe(commit, outputs) == []
    assert fork.answer(0) != worker.answer(0)
    assert worker.observe(commit, outputs) == []
    assert fork.kv == worker.kv


# Counters that an engine does not have.


class Stubborn(SpecEngine):
    """It admits nobody, and has no counters."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Schedule):
            self.state = replace(self.state, pause_state=v.PauseState.PAUSED_NEW)
        answer = super().apply(event)
        self.state = replace(self.state, pause_state=v.PauseState.UNPAUSED)
        return answer

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.STATISTICS, Capability.CACHE_STATISTICS}


def test_counters_that_are_not_there_are_not_judged() -> None:
    program = Program(
        v.Config(4, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule())
    )
    found = play(program, Stubborn, STRICT)
    assert {it.kind for it in found} == {FindingKind.PROPERTY, FindingKind.DIVERGENCE}
    assert not any("stats" in str(it) for it in found)
    assert "P21" not in {it.property_id for it in found}


# The order of findings, and their words.


def test_free_queue_comes_behind_what_a_store_lost() -> None:
    order = violated("P16", "freed_tail_is_evicted_first", "")
    held = violated("P17", "every_hold_has_an_owner_and_an_end", "")
    budget = violated("P9", "row_stays_within_its_caps", "")
    differs = Finding(FindingKind.DIVERGENCE, "", "engine_equals_spec", "")
    assert put_causes_first([order, held, differs]) == [held, order, differs]
    assert put_causes_first([order, budget]) == [order, budget]


def test_divergence_is_told_by_its_first_field() -> None:
    one = Difference("rows A num_scheduled_tokens", "2", "1")
    told = "after schedule, rows A num_scheduled_tokens is 1, the spec has 2"
    assert tell_divergence(v.Schedule(), [one]) == told
    assert tell_divergence(v.Schedule(), [one, one]) == f"{told}, and 1 more field differs"
    assert tell_divergence(v.Schedule(), [one] * 3) == f"{told}, and 2 more fields differ"


class Ahead(SpecEngine):
    """It counts a token more as computed than was."""

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if isinstance(event, v.Commit):
            requests = self.state.requests
            one = replace(requests["A"], num_computed_tokens=requests["A"].num_known_tokens)
            self.state = replace(self.state, requests=FrozenMap({**requests, "A": one}))
        return answer


def test_counters_that_cannot_be_are_told_by_field() -> None:
    program = Program(
        v.Config(8, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule(), Answer())
    )
    found = play(program, Ahead, STRICT)
    counters = next(it for it in found if it.sentence == "counters_stay_within_what_is_known")
    assert Difference("num_computed_tokens", "0 to 2", "3") in counters.differences
    assert not any("Snapshot(" in it.expected + it.seen for one in found for it in one.differences)


# An engine that cannot be built, and a specification that fails.


class Unbuildable(SpecEngine):
    """Its constructor raises for some configs."""

    traits = EngineTraits()

    def __init__(self, config: v.Config, *_: Any) -> None:
        if config.max_num_seqs == 1:
            raise IndexError("no room for one")
        super().__init__(config)


def test_constructor_that_raises_is_a_fault_with_the_config_as_its_program() -> None:
    options = CheckOptions(engine=f"{__name__}:Unbuildable", preset="tiny", max_events=20_000)
    result = check(options, shrinks=False)
    assert result.exit_code is ExitCode.FAILED
    assert result.first is not None
    assert result.failing_program is not None
    result.failure = shrink(result.failing_program, Unbuildable, result.first)
    assert result.failure.program.actions == ()
    assert result.failure.program.config.max_num_seqs == 1
    (fault,) = result.failure.findings
    assert fault.message == "the engine raised IndexError: no room for one while being built"
    assert fault.frames[-1].startswith("__init__ (test_headlines.py:")
    assert "FAULT at event 0: the engine raised IndexError" in tell_failure(result)


def test_program_with_such_a_config_is_a_fault() -> None:
    program = Program(v.Config(4, 1, max_num_seqs=1), (v.Schedule(),))
    result = play_program(CheckOptions(), program, Unbuildable)
    assert result.exit_code is ExitCode.FAILED


def test_both_sides_are_told_where_the_specification_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Program(
        v.Config(4, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule())
    )

    class Fine(SpecEngine):
        """Another copy, which does not fail."""

    right = SpecEngine.apply

    def fail(self: SpecEngine, event: v.Event) -> v.Observation:
        if isinstance(event, v.Schedule) and type(self) is SpecEngine:
            raise AssertionError("an amount is negative")
        return right(self, event)

    monkeypatch.setattr(SpecEngine, "apply", fail, raising=False)
    result = play_program(CheckOptions(), program, Fine)
    assert result.exit_code is ExitCode.SPEC
    told = tell_failure(result)
    assert "the spec is wrong: an amount is negative" in told
    assert "spec's answer to schedule: it failed an assertion" in told
    assert "engine's answer: plan 0: A new" in told


def test_what_is_wrong_with_the_engine_is_told_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(
        v.Config(8, 1), (v.Submit(v.Request("A", (0, 0), max_tokens=2)), v.Schedule(), Answer())
    )
    right = SpecEngine.apply

    def fail(self: SpecEngine, event: v.Event) -> v.Observation:
        if isinstance(event, v.Commit) and type(self) is SpecEngine:
            raise AssertionError("an amount is negative")
        return right(self, event)

    monkeypatch.setattr(SpecEngine, "apply", fail, raising=False)
    first, *others = play(program, Ahead, STRICT)
    assert first.kind is FindingKind.SPEC
    assert "counters_stay_within_what_is_known" in {it.sentence for it in others}
