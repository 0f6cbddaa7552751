"""Type check: an ill-typed answer is a fault that names the field, at every equivalence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import (
    BadEngineError,
    EngineTraits,
    Renamed,
    Safety,
    SamePlans,
    build,
    get_capabilities,
    get_traits,
)
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.type_check import find_ill_typed
from blockstep.conformance.search.check import check
from blockstep.conformance.search.isolation import Isolation, RefusedError
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.shrink import conclude
from blockstep.spec import vocabulary as v

CONFIG = v.Config(num_blocks=9, block_size=2, max_model_len=16, max_num_batched_tokens=16)
PROGRAM = Program(
    CONFIG, (v.Submit(v.Request("A", (1, 2, 3), 4)), v.Schedule(), Answer(), v.Schedule())
)
EQUIVALENCES: dict[str, Any] = {
    "exact": None,
    "renamed": Renamed(),
    "plan": SamePlans(shows_blocks=True),
    "safety": Safety(),
}
Bend = Callable[[Any], Any]


def bend_new(**fields: Any) -> Bend:
    return lambda plan: replace(plan, new=tuple(replace(row, **fields) for row in plan.new))


def bend_outputs(**fields: Any) -> Bend:
    return lambda answer: v.Outputs(tuple(replace(row, **fields) for row in answer.rows))


def bend_request(**fields: Any) -> Bend:
    return lambda state: replace(
        state, requests=tuple(replace(request, **fields) for request in state.requests)
    )


ANSWERS: dict[str, tuple[type, Bend, str]] = {
    "none": (v.Schedule, lambda _: None, "the answer = None: must be an observation"),
    "a word": (v.Schedule, lambda _: "a plan", "the answer = 'a plan': must be"),
    "no rows": (v.Plan, lambda plan: replace(plan, new=None),
        "Plan.new = None: must be a tuple of NewRow"),
    "nan": (v.Plan, lambda plan: replace(plan, frame_id=float("nan")),
        "Plan.frame_id = nan: must be an int"),
    "a list": (v.Plan, lambda plan: replace(plan, new=list(plan.new)), "Plan.new = [NewRow("),
    "a foreign row": (v.Plan, lambda plan: replace(plan, cached=({},)),
        "Plan.cached[0] = {}: must be a CachedRow"),
    "no request": (v.Plan, bend_new(request=None), "Plan.new[0].request = None: must be a Request"),
    "one block": (v.Plan, bend_new(block_ids=(1, 2)),
        "Plan.new[0].block_ids[0] = 1: must be a tuple of int"),
    "text for blocks": (v.Plan, bend_new(block_ids=(("1", "2"),)),
        "Plan.new[0].block_ids[0][0] = '1': must be an int"),
    "no count": (v.Plan, bend_new(num_scheduled_tokens="all"),
        "num_scheduled_tokens = 'all': must be an int"),
    "no tokens": (v.Outputs, bend_outputs(new_token_ids=None),
        "Outputs.rows[0].new_token_ids = None"),
    "a bare reason": (v.Outputs, bend_outputs(finish_reason="soon"),
        "finish_reason = 'soon': must be a FinishReason"),
}  # fmt: skip
STATES: dict[str, tuple[Bend, str]] = {
    "a dict": (lambda _: {"running": ()},
        "the answer = {'running': ()}: must be None or a Snapshot"),
    "no queue": (lambda state: replace(state, waiting=None),
        "Snapshot.waiting = None: must be a tuple of str"),
    "nan": (lambda state: replace(state, ref_counts=(float("nan"),)),
        "Snapshot.ref_counts[0] = nan: must be an int"),
    "no counters": (lambda state: replace(state, stats=None),
        "Snapshot.stats = None: must be a Stats"),
    "a list of keys": (lambda state: replace(state, block_keys=[None]),
        "Snapshot.block_keys = [None]: must be"),
    "text for a key": (lambda state: replace(state, block_keys=("x",)),
        "block_keys[0] = 'x': must be a BlockKey or None"),
    "a bare status": (bend_request(status="runs"),
        "Snapshot.requests[0].status = 'runs': must be a Status"),
    "a flat table": (bend_request(block_tables=(1, 2)),
        "requests[0].block_tables[0] = 1: must be a tuple of int"),
    "no map": (lambda state: replace(state, cached=()),
        "Snapshot.cached = (): must be a mapping from BlockKey"),
}  # fmt: skip


def make(
    equivalence: str, bend_answer: tuple[type, Bend] | None, bend_state: Bend | None
) -> type[SpecEngine]:
    class Bent(SpecEngine):
        traits: ClassVar[EngineTraits] = EngineTraits(equivalence=EQUIVALENCES[equivalence])

        def apply(self, event: v.Event) -> Any:
            answer = super().apply(event)
            if bend_answer is None or not isinstance(
                event if bend_answer[0] is v.Schedule else answer, bend_answer[0]
            ):
                return answer
            return bend_answer[1](answer)

        def snapshot(self) -> Any:
            state = super().snapshot()
            return state if bend_state is None or not self.state.requests else bend_state(state)

    return Bent


def find(make_engine: type[SpecEngine]) -> str:
    """Return the message of the only finding, which is a fault that names a field."""
    run, findings = run_program(PROGRAM, make_engine)
    assert [(found.kind, found.sentence) for found in findings] == [
        (FindingKind.FAULT, "engine_answers_in_the_vocabulary")
    ]
    assert conclude(PROGRAM, run, findings).last is not None, "the run can be reported"
    assert findings[0].differences[0].field in findings[0].message
    return findings[0].message


@pytest.mark.parametrize("equivalence", EQUIVALENCES)
@pytest.mark.parametrize("name", ANSWERS)
def test_an_ill_typed_answer_is_a_fault_that_names_the_field(name: str, equivalence: str) -> None:
    kind, bend, message = ANSWERS[name]
    assert message in find(make(equivalence, (kind, bend), None))


@pytest.mark.parametrize("equivalence", EQUIVALENCES)
@pytest.mark.parametrize("name", STATES)
def test_an_ill_typed_state_is_a_fault_that_names_the_field(name: str, equivalence: str) -> None:
    bend, message = STATES[name]
    assert message in find(make(equivalence, None, bend))


@pytest.mark.parametrize("lacks", ["statistics", "rejection"])
def test_a_state_that_is_ill_typed_from_the_start_has_a_program(lacks: str) -> None:
    class Wrong(SpecEngine):
        def snapshot(self) -> Any:
            return {}

        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {lacks}

    assert "snapshot() after Submit: the answer = {}" in find(Wrong)


def test_well_typed_answers_and_states_are_not_accused() -> None:
    row = v.CachedRow("A", False, ((1,),), (1, 2), 1, 0, 1)
    request = v.RequestSnapshot("A", v.Status.RUNNING)
    for value in (
        v.Ack(),
        v.Plan(0, (v.NewRow(v.Request("A", (1,)), ((),), 0, 1),), (row,)),
        v.Outputs((v.OutputRow("A", (1,), v.FinishReason.STOP, 1),)),
        v.Rejected(v.RejectCode.BAD_REQUEST),
    ):
        assert find_ill_typed(value, v.Observation) is None
    state = replace(
        SpecEngine(CONFIG).snapshot(),
        requests=(request,),
        block_keys=(None, v.BlockKey(None, (1, 2))),
        cached={v.BlockKey(None, (1, 2)): (1,)},
    )
    assert find_ill_typed(state, v.Snapshot) is None


@pytest.mark.parametrize("number", [1.0, True, np.int64(1), "1", None])
def test_a_number_that_is_no_int_is_ill_typed(number: Any) -> None:
    found = find_ill_typed(v.Plan(number), v.Observation)
    assert found is not None
    assert (found.path, found.rule) == (".frame_id", "an int")


def test_an_answer_whose_repr_raises_is_shown_by_its_type() -> None:
    class RaisingRepr:
        def __repr__(self) -> str:
            raise RuntimeError

    message = find(make("exact", (v.Schedule, lambda _: RaisingRepr()), None))
    assert "the answer = <RaisingRepr>" in message


# Factories.


class Capable(SpecEngine):
    named: Any = None

    def capabilities(self) -> Any:
        return self.named


def make_none(_config: v.Config) -> Any:
    return None


def make_half(_config: v.Config) -> Any:
    return type("Half", (), {"apply": lambda *_: v.Ack(), "capabilities": frozenset})()


class NamesText(Capable):
    named = "snapshot"


class NamesUnknown(Capable):
    named = frozenset({"snapshot", "abrot"})


class TraitsOfText(SpecEngine):
    traits = "safety"


class EquivalenceOfText(SpecEngine):
    traits = EngineTraits(equivalence="safety")  # type: ignore[arg-type]


class FitsNothing(SpecEngine):
    traits = EngineTraits(equivalence=Safety(fit_config=lambda _config: None))  # type: ignore[arg-type, return-value]


FACTORIES = {
    "make_none": "returned None, which has no apply(); an engine has the methods",
    "make_half": "which has no snapshot()",
    "NamesText": "must be a set of names, not 'snapshot'",
    "NamesUnknown": "'abrot' is none of abort, adapters, async,",
    "TraitsOfText": "must be EngineTraits, not 'safety'",
    "EquivalenceOfText": "must be None (exact) or one of Renamed()",
    "FitsNothing": "must return a Config, not None",
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this module importable by its name, however it was imported."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[NamesText.__module__])


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_that_makes_no_valid_engine_is_bad_input(name: str) -> None:
    make_engine = globals()[name]
    with pytest.raises(BadEngineError) as caught:
        get_capabilities(make_engine)
    assert FACTORIES[name] in str(caught.value)
    assert "\n" not in str(caught.value)
    options = CheckOptions(f"{__name__}:{name}", max_events=10)
    with pytest.raises(BadEngineError):
        check(options)
    result = CliRunner().invoke(app, ["check", "--engine", options.engine, "--in-process"])
    assert result.exit_code == 2
    assert FACTORIES[name] in " ".join(result.output.split())


def test_a_factory_that_returns_none_is_bad_input_in_a_child_process(tmp_path: Any) -> None:
    (tmp_path / "made_of_nothing.py").write_text("def make(config):\n    return None\n")
    with (
        Isolation(path=[str(tmp_path)]) as isolation,
        pytest.raises(RefusedError, match="no apply"),
    ):
        isolation.check(CheckOptions("made_of_nothing:make", max_events=10))


def test_a_valid_engine_is_built() -> None:
    assert isinstance(build(SpecEngine, CONFIG), SpecEngine)
    assert get_traits(SpecEngine) == EngineTraits()
