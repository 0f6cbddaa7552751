"""The equivalence safety judges engines by properties alone. One engine is nano-vllm.

The engines here are toys (`foreign_support.toys`), right ones and wrong ones. Set
BLOCKSTEP_NANO_VLLM to a checkout of nano-vllm to try the adapter itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from foreign_support.toys import AbortingToy, Life, PlainToy, fit_config, fit_request

from blockstep.conformance.engine import Capability, EngineTraits, Safety
from blockstep.conformance.lockstep.safety_equivalence import SafetyRun
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program
from blockstep.conformance.protocol.registry import EngineNotFoundError
from blockstep.conformance.search.call import call_here
from blockstep.conformance.search.check import InProcess, check
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.hunt import hunt
from blockstep.conformance.search.metamorphic import compare_pair
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.conformance.search.verdict_requirements import SAFETY_CANARY, run_canary
from blockstep.spec import vocabulary as v

ROOT = Path(__file__).parents[4]
ADAPTER = ROOT / "conformance/blockstep/conformance/engines/adapters/nano_vllm.py"
CHECKOUT = os.environ.get("BLOCKSTEP_NANO_VLLM")
needs_nano_vllm = pytest.mark.skipif(
    CHECKOUT is None, reason="BLOCKSTEP_NANO_VLLM names no checkout of nano-vllm"
)


class Toy(AbortingToy):
    """A right engine that shows its state and takes no aborts."""

    def capabilities(self) -> frozenset[str]:
        return frozenset({Capability.SNAPSHOT})


class Silent(PlainToy):
    """A right engine that shows no state."""


class Leaks(Toy):
    def end(self, life: Life) -> None:
        super().end(life)
        del self.free[-len(life.blocks) :]


class LeaksSilently(Silent):
    """It leaks blocks and shows no state: requests stop fitting."""

    def end(self, life: Life) -> None:
        super().end(life)
        del self.free[-len(life.blocks) :]


class Repeats(Silent):
    def take(self, life: Life, sampled: v.TokenIds) -> v.OutputRow | None:
        row = super().take(life, sampled)
        return row and replace(row, new_token_ids=(*row.new_token_ids, 0))


class NoFinishReason(Silent):
    """It reports no finish reason."""

    def take(self, life: Life, sampled: v.TokenIds) -> v.OutputRow | None:
        row = super().take(life, sampled)
        return row and replace(row, finish_reason=None)


class Keeps(Silent):
    """It delivers no tokens."""

    def take(self, life: Life, sampled: v.TokenIds) -> v.OutputRow | None:
        super().take(life, sampled)
        return None


class Skips(Silent):
    """It claims the first token of a prompt as computed."""

    def plan(self) -> v.Plan:
        plan = super().plan()
        rows = [
            replace(row, num_computed_tokens=1, num_scheduled_tokens=row.num_scheduled_tokens - 1)
            if row.num_scheduled_tokens > 1
            else row
            for row in plan.new
        ]
        return replace(plan, new=tuple(rows))


class Overspends(Silent):
    """It plans with a larger token budget than its config has."""

    traits = EngineTraits(
        equivalence=Safety(
            lambda config: replace(fit_config(config), max_num_batched_tokens=2), fit_request
        )
    )

    def plan(self) -> v.Plan:
        self.config = replace(self.config, max_num_batched_tokens=64)
        return super().plan()


class Stalls(Silent):
    """It plans nothing after it has served one request."""

    has_served = False

    def plan(self) -> v.Plan:
        if not self.has_served:
            return super().plan()
        ended, self.ended, self.num_plans = self.ended, [], self.num_plans + 1
        return v.Plan(self.num_plans - 1, finished_req_ids=tuple(ended))

    def end(self, life: Life) -> None:
        super().end(life)
        self.has_served = True


class Raises(Silent):
    def take(self, life: Life, sampled: v.TokenIds) -> v.OutputRow | None:
        raise IndexError("list index out of range")


class AnswersAck(Silent):
    def apply(self, event: v.Event) -> v.Observation:
        seen = super().apply(event)
        return v.Ack() if isinstance(event, v.Commit) else seen


class Refuses(Silent):
    """It takes prompts of up to two tokens only."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Submit) and len(event.request.prompt_token_ids) > 2:
            return v.Rejected(v.RejectCode.BAD_REQUEST, "too long for me")
        return super().apply(event)


def options(name: str, **changes: Any) -> CheckOptions:
    plain = CheckOptions(engine=f"{__name__}:{name}", preset="tiny", seed=1, max_events=1500)
    return replace(plain, **changes)


def run(make_engine: Any, *actions: Action) -> tuple[SafetyRun, list[Any]]:
    config = v.Config(num_blocks=6, block_size=2, max_model_len=8, enable_prefix_caching=False)
    config = replace(config, max_num_batched_tokens=64, max_num_seqs=4)
    result, findings = run_program(Program(config, actions), make_engine)
    assert isinstance(result, SafetyRun)
    return result, findings


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register this module under its name, so that engines are loaded from it."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Toy.__module__])


@pytest.mark.parametrize("name", ["Toy", "Silent", "Refuses"])
def test_a_right_engine_conforms_at_safety(name: str) -> None:
    result = check(options(name))
    assert result.first is None, result.first
    assert result.exit_code is ExitCode.CONFORMS
    assert result.equivalence == "safety"
    assert result.canary_killed_after


def test_hunt_and_arms_run_at_safety() -> None:
    assert hunt(options("Toy", max_events=300), call_here(Toy)).defects == []
    assert hunt(options("Leaks", max_events=300), call_here(Leaks)).defects
    arms = compare_pair(options("Toy"), Toy, 20)
    assert arms.contrast is None
    assert arms.num_compared["pool"] > 20
    assert "async" in arms.not_tried


def test_an_engine_that_decides_differently_diverges_at_exact() -> None:
    class Compared(Toy):
        traits = EngineTraits()

    _, _, findings = play_episode(CheckOptions(preset="tiny", max_depth=1), 0, Compared)
    assert findings


@pytest.mark.parametrize(
    ("name", "kind", "property_id"),
    [
        ("Leaks", FindingKind.PROPERTY, "P1"),
        ("LeaksSilently", FindingKind.LIVENESS, "P10"),
        ("Repeats", FindingKind.PROPERTY, "P13"),
        ("NoFinishReason", FindingKind.PROPERTY, "P13"),
        ("Keeps", FindingKind.PROPERTY, "P13"),
        ("Skips", FindingKind.PROPERTY, "P5"),
        ("Overspends", FindingKind.PROPERTY, "P9"),
        ("Stalls", FindingKind.LIVENESS, "P10"),
        ("Raises", FindingKind.FAULT, ""),
        ("AnswersAck", FindingKind.PROPERTY, "P18"),
    ],
)
def test_a_wrong_engine_is_caught_at_safety(name: str, kind: FindingKind, property_id: str) -> None:
    result = check(options(name))
    assert result.failure is not None
    kinds = {(found.kind, found.property_id) for found in result.failure.findings}
    assert (kind, property_id) in kinds
    assert len(result.failure.program.actions) <= 8
    assert result.exit_code is (
        ExitCode.LIVENESS if kind is FindingKind.LIVENESS else ExitCode.FAILED
    )


def test_fields_left_out_of_requests_are_reported() -> None:
    result = check(options("Silent"))
    assert {"stop_token_ids", "adapter", Capability.PAUSE} <= result.skipped.keys()


def test_a_refused_request_is_counted_and_not_waited_for() -> None:
    first, findings = run(Refuses, v.Submit(v.Request("A", (1, 2, 3), 2)), Drain())
    assert (findings, first.live) == ([], {})
    assert first.skipped["requests refused as bad_request"] == 1


def test_an_engine_at_safety_gets_only_valid_events() -> None:
    submit = v.Submit(v.Request("A", (1, 2), 2))
    first, findings = run(
        Toy,
        submit,
        submit,  # its id is in use
        v.Submit(v.Request("B", (1,) * 8, 2)),  # longer than the model
        v.Submit(v.Request("C", (1,), 2, cache_salt="x")),  # more than it understands
        v.Schedule(),
        v.Schedule(),  # one too many
        Answer(),
    )
    assert findings == []
    assert (first.num_events, list(first.live)) == (3, ["A"])


def test_a_config_that_does_not_fit_is_refused() -> None:
    config = v.Config(num_blocks=6, max_num_batched_tokens=8192)
    with pytest.raises(
        v.ConfigError, match="enable_prefix_caching = True: is not a config of this"
    ):
        run_program(Program(config, ()), Toy)


def test_a_run_that_misses_a_required_goal_has_no_verdict() -> None:
    class Picky(Toy):
        traits = EngineTraits(
            equivalence=Safety(fit_config, fit_request, situations=("prefix_hit",))
        )

    globals()["Picky"] = Picky
    result = check(options("Picky", max_events=200))
    assert result.missing == ("prefix_hit",)
    assert result.exit_code is ExitCode.HARNESS


def test_the_canary_of_safety_is_caught() -> None:
    assert run_canary(CheckOptions(), SAFETY_CANARY)


# The folder of an engine.


def test_an_engine_is_found_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from blockstep.conformance.protocol.registry import SpecEngine as Engine\n"
    (tmp_path / "engine_in_a_folder.py").write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path])
    there = CheckOptions(engine="engine_in_a_folder:Engine", preset="tiny", path=str(tmp_path))
    with pytest.raises(EngineNotFoundError):
        InProcess().run_batch(replace(there, path=None), 0, 1)
    (episode,) = InProcess().run_batch(there, 0, 1)
    assert episode.first is None


def test_worker_processes_find_the_folder_of_the_engine(tmp_path: Path) -> None:
    source = "from blockstep.conformance.protocol.registry import SpecEngine as Engine\n"
    (tmp_path / "engine_in_a_folder.py").write_text(source)
    command = [
        *(
            sys.executable,
            "-c",
            "from blockstep.conformance.command.main import main; main()",
            "check",
        ),
        *("--engine", "engine_in_a_folder:Engine", "--path", str(tmp_path)),
        *("--preset", "tiny", "--budget", "300", "--jobs", "2"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "engine engine_in_a_folder:Engine" in done.stdout, done.stderr


# nano-vllm.


def test_the_adapter_is_one_short_file() -> None:
    assert len(ADAPTER.read_text().splitlines()) <= 220


def nano(budget: int, seed: int, **changes: Any) -> Any:
    return check(
        CheckOptions(engine="nano_vllm", path=CHECKOUT, max_events=budget, seed=seed, **changes)
    )


@needs_nano_vllm
def test_nano_vllm_conforms() -> None:
    result = nano(8_000, 0, preset="tiny")
    assert result.equivalence == "safety"
    assert result.first is None, result.first
    assert result.missing == ()


@needs_nano_vllm
def test_decoding_rows_of_nano_vllm_may_exceed_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    nano(1, 0, preset="tiny", episode=0)  # puts the folder on the path
    from blockstep.conformance.engines.adapters.nano_vllm import NanoVllm

    declared = cast("Safety", NanoVllm.traits.equivalence)

    def fit_to_any_budget(config: v.Config) -> v.Config:
        return replace(declared.fit_config(config), max_num_seqs=config.max_num_seqs)

    class AnyBudget(NanoVllm):
        traits = EngineTraits(equivalence=replace(declared, fit_config=fit_to_any_budget))

    config = v.Config(num_blocks=6, block_size=2, max_num_batched_tokens=1, max_num_seqs=2)
    submits = [v.Submit(v.Request(name, (0,), 2)) for name in "AB"]
    steps = (v.Schedule(), Answer()) * 2
    _, findings = run_program(Program(config, (*submits, *steps, v.Schedule())), AnyBudget)
    assert [found.sentence for found in findings] == ["plan_stays_within_token_budget"]
