"""Deviations: findings that an adapter declares are counted and suppressed, and no others are."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from blockstep.conformance.engine import BadEngineError, Deviation, EngineTraits, Safety, get_traits
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.report.finding_text import make_stale_line
from blockstep.conformance.report.hunt import render_hunt
from blockstep.conformance.report.jsonform import check_to_json
from blockstep.conformance.report.verdict import verdict_text
from blockstep.conformance.search.call import call_here
from blockstep.conformance.search.check import check
from blockstep.conformance.search.hunt import hunt
from blockstep.conformance.search.isolation import Isolation
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.conformance.search.verdict_requirements import read_engine_facts
from blockstep.spec import vocabulary as v

CONFIG = v.Config(num_blocks=9, block_size=2, max_model_len=16, max_num_batched_tokens=16)
START: tuple[Action, ...] = (v.Submit(v.Request("A", (1, 2, 3), 3)), v.Schedule(), Answer())
SHOWN = Program(CONFIG, START)
MISCOUNTS = Deviation(
    "miscounts_hits",
    "it tells clients of one cached token too many",
    SHOWN,
    fields=("rows * num_cached_tokens",),
    sentences=("reported_cached_tokens_are_of_the_first_hit",),
)


class Miscounts(SpecEngine):
    """An engine that reports one cached token too many, compared with the specification."""

    traits: ClassVar[EngineTraits] = EngineTraits(deviations=(MISCOUNTS,))

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if not isinstance(answer, v.Outputs):
            return answer
        rows = [replace(row, num_cached_tokens=row.num_cached_tokens + 1) for row in answer.rows]
        return replace(answer, rows=tuple(rows))


class MiscountsAndLeaks(Miscounts):
    """`Miscounts`, which also loses a block."""

    def snapshot(self) -> v.Snapshot:
        return replace(super().snapshot(), free_queue=super().snapshot().free_queue[1:])


class Mended(SpecEngine):
    traits = Miscounts.traits


class Undeclared(Miscounts):
    traits = EngineTraits()


OVERSPENDS = Deviation(
    "overspends",
    "it counts a new request's tokens as one",
    SHOWN,
    sentences=("plan_stays_within_token_budget",),
)


class Overspends(SpecEngine):
    """An engine that plans more tokens than its budget, judged at safety."""

    traits: ClassVar[EngineTraits] = EngineTraits(
        equivalence=Safety(
            fit_config=lambda config: replace(
                config, max_num_batched_tokens=2, enable_chunked_prefill=True
            )
        ),
        deviations=(
            replace(OVERSPENDS, program=Program(replace(CONFIG, max_num_batched_tokens=2), START)),
        ),
    )

    def __init__(self, config: v.Config) -> None:
        super().__init__(replace(config, max_num_batched_tokens=64))


class Dies(SpecEngine):
    """An engine that raises when a request finishes, as its adapter declares."""

    traits = EngineTraits(
        equivalence=Safety(),
        deviations=(
            Deviation(
                "dies",
                "it does not survive the end of a request",
                Program(CONFIG, (*START, Drain())),
                sentences=("engine_raises_nothing",),
                when=lambda event, answer: (
                    isinstance(event, v.Commit | v.GrammarFailed | v.TransfersReported)
                    and answer is None
                ),
            ),
        ),
    )

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if isinstance(answer, v.Outputs) and any(row.finish_reason for row in answer.rows):
            raise IndexError("list index out of range")
        return answer


def options(name: str, **changes: Any) -> CheckOptions:
    plain = CheckOptions(f"{__name__}:{name}", preset="tiny", seed=1, max_events=1500)
    return replace(plain, **changes)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this module importable by its name, however it was imported."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Miscounts.__module__])


def test_a_declared_deviation_is_counted_and_shown() -> None:
    result = check(options("Miscounts"))
    assert result.first is None
    assert result.num_events >= 1500
    assert result.excused["miscounts_hits"] > 100, "and episodes continue after it"
    text = verdict_text(result)
    count = result.excused["miscounts_hits"]
    assert f"known       miscounts_hits: {count} findings that the adapter declares: it te" in text
    assert "stale    " not in text
    shown = check_to_json(result)
    assert (shown["deviations"], shown["deviations_stale"]) == ({"miscounts_hits": count}, [])


def test_an_undeclared_deviation_is_found() -> None:
    _, findings = run_program(SHOWN, Undeclared)
    assert "num_cached_tokens" in str(findings)
    _, findings = run_program(SHOWN, MiscountsAndLeaks)
    assert findings
    assert "free_queue" in str(findings[0].differences)


def test_a_deviation_that_is_gone_is_reported() -> None:
    result = check(options("Mended", max_events=200))
    assert (result.first, result.stale) == (None, ("miscounts_hits",))
    text = verdict_text(result)
    assert "miscounts_hits: 0 findings" in text
    assert "stale       miscounts_hits: its program does not show it" in text


def test_a_deviation_that_still_matches_findings_is_to_be_mended() -> None:
    """The program of the deviation does not show it, although findings do."""
    gone = "m: its program does not show it, and no finding does; the adapter can drop it"
    assert make_stale_line("m", 0) == gone
    line = make_stale_line("m", 1875)
    assert line == "m: its program does not show it, and 1,875 findings do: mend that"


def test_at_safety_an_episode_continues_after_a_deviation() -> None:
    # It switches chunked prefill on, which no encoder-decoder model has.
    result = check(options("Overspends", without_features=("encoder",)))
    assert result.first is None, result.first
    assert result.excused["overspends"] > 20
    assert result.stale == ()


def test_a_deviation_is_suppressed_only_at_the_steps_it_describes() -> None:
    class Never(Overspends):
        traits = replace(
            Overspends.traits,
            deviations=(
                replace(OVERSPENDS, when=lambda event, _answer: isinstance(event, v.Commit)),
            ),
        )

    config = replace(CONFIG, max_num_batched_tokens=2)
    _, findings = run_program(Program(config, START), Never)
    assert [found.sentence for found in findings] == ["plan_stays_within_token_budget"]


def test_an_episode_ends_where_the_engine_cannot_continue() -> None:
    program = Program(CONFIG, (*START, *(v.Schedule(), Answer()) * 4, Drain()))
    run, findings = run_program(program, Dies)
    assert findings == []
    assert run.excuses.counts == {"dies": 1}
    assert run.excuses.is_over
    assert run.live != {}, "nothing was done afterwards"
    result = check(options("Dies", max_events=300))
    assert result.first is None
    assert result.num_episodes >= result.excused["dies"] > 10


def test_a_check_in_a_child_process_counts_deviations(tmp_path: Any) -> None:
    (tmp_path / "deviant.py").write_text(
        "from dataclasses import replace\n"
        "from blockstep.conformance.engine import Deviation, EngineTraits\n"
        "from blockstep.conformance.protocol.program import Program\n"
        "from blockstep.conformance.protocol.registry import SpecEngine\n"
        "from blockstep.spec.vocabulary import Config, Request, Submit\n"
        "SHOWN = Program(Config(num_blocks=8), (Submit(Request('A', (1,), 2)),))\n"
        "class Engine(SpecEngine):\n"
        "    traits = EngineTraits(deviations=(\n"
        "        Deviation('ahead', 'it counts from one', SHOWN, fields=('next_frame_id',)),))\n"
        "    def snapshot(self):\n"
        "        state = super().snapshot()\n"
        "        return replace(state, next_frame_id=state.next_frame_id + 1)\n"
    )
    with Isolation(path=[str(tmp_path)]) as isolation:
        result = isolation.check(CheckOptions("deviant:Engine", preset="tiny", max_events=100))
    assert result.first is None
    assert result.excused["ahead"] > 50
    assert result.exit_code is ExitCode.HARNESS, "with so few events"


@pytest.mark.parametrize("deviation", ["miscounts", replace(MISCOUNTS, sentences=(), fields=())])
def test_a_deviation_must_name_the_checks_or_fields_it_covers(deviation: Any) -> None:
    class Vague(SpecEngine):
        traits = EngineTraits(deviations=(deviation,))

    with pytest.raises(BadEngineError, match="each must be a Deviation that names the checks"):
        get_traits(Vague)


def test_a_hunt_counts_a_deviation_and_lists_no_defect() -> None:
    result = hunt(options("Miscounts", max_events=300), call_here(Miscounts))
    assert result.defects == []
    assert result.excused["miscounts_hits"] > 30
    assert "miscounts_hits" in render_hunt(result)


def test_a_deviation_without_a_program_is_bad_input() -> None:
    class Unshown(SpecEngine):
        traits = EngineTraits(deviations=(replace(MISCOUNTS, program=None),))

    with pytest.raises(BadEngineError, match="'miscounts_hits': its program must be a Program, no"):
        read_engine_facts(CheckOptions(), Unshown)
