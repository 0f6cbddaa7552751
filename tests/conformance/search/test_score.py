"""Score: a run continues after each difference, counts what agrees, and shows the first ones."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from equivalent_engines import (
    RENAMED,
    HitOneShort,
    Lazy,
    MoodyHits,
    OtherIds,
    OtherVictim,
    ShortSimulator,
    Simulator,
    Spec,
    Twice,
    held_to,
)
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import EngineTraits, Safety
from blockstep.conformance.lockstep.score import Aspect, ScoreRun, score_program
from blockstep.conformance.protocol.findings import Difference
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program, Propose
from blockstep.conformance.protocol.program_file import read_program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.report.score import (
    make_score_page,
    rank_profiles,
    render_score,
    reproduce,
    score_to_json,
)
from blockstep.conformance.search.episodes import Loss
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.conformance.search.score import ScoreResult, find_kind, play_scored, score
from blockstep.impl.host import HostEngine
from blockstep.spec import Config, Request, Schedule, SpecMethod, Submit
from blockstep.spec.profiles import SPARING
from blockstep.spec.vocabulary import (
    Ack,
    Commit,
    Event,
    Grammar,
    GrammarBitmask,
    GrammarReady,
    Observation,
    Outputs,
    Plan,
    Rejected,
    StreamingUpdate,
)

SHORT, BROKEN, HANGING = (
    f"equivalent_engines:{name}" for name in ("ShortSimulator", "Broken", "Hanging")
)
PAGE = (Path(__file__).parents[3] / "docs/explanation/equivalences.md").read_text()
Judged = held_to(Spec, EngineTraits(equivalence=Safety()))


def scored(engine: str, num_events: int = 700, **options: Any) -> ScoreResult:
    return score(CheckOptions(engine=engine, max_events=num_events, **options))


@pytest.mark.parametrize("engine", [HostEngine, SpecEngine, OtherIds, Simulator, Judged])
def test_an_engine_with_equal_decisions_agrees_in_everything(engine: Any) -> None:
    """A score compares with the specification even if the engine is held to less."""
    totals = dict.fromkeys(Aspect, 0)
    for index in range(5):
        run, _, findings = play_scored(CheckOptions(), index, engine)
        assert findings == []
        assert not run.reference.live
        for aspect, tally in run.tallies().items():
            assert tally.agreed == tally.total, tally.first
            totals[aspect] += tally.total
    assert all(totals.values())


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["tiny", "small", "real"])
@pytest.mark.parametrize("engine", [HostEngine, Simulator, Judged])
def test_an_engine_with_equal_decisions_agrees_in_many_events(engine: Any, preset: str) -> None:
    for index in range(20):
        run, _, findings = play_scored(CheckOptions(preset=preset, seed=3), index, engine)
        assert findings == []
        assert all(tally.first is None for tally in run.tallies().values()), (preset, index)


@pytest.fixture(scope="module")
def result() -> ScoreResult:
    """Return the score of a simulator whose hits are a block short."""
    return scored(SHORT, preset="tiny", without_features=("transfers",))


def test_a_score_continues_after_a_difference_and_shows_the_first_ones(
    result: ScoreResult,
) -> None:
    assert result.num_events >= 700
    assert 0 < result.agreed[Aspect.STEPS] < result.total[Aspect.STEPS]
    assert result.exit_code() is ExitCode.CONFORMS, "a score fails only if a least share is given"
    assert result.exit_code(least=0.999) is ExitCode.FAILED
    hits = result.firsts[Aspect.HITS].shrunk
    assert hits is not None
    assert len(hits.program.actions) <= 7
    (difference,) = hits.findings[0].differences
    assert difference.field.startswith("hit at admission ")
    assert difference.expected != difference.seen
    text = render_score(result)
    for aspect in result.firsts:
        assert f"  {aspect}: first in episode " in text
    assert "blockstep score --engine " in text


def test_the_shrunk_program_differs_again(result: ScoreResult) -> None:
    for aspect, first in result.firsts.items():
        assert first.shrunk is not None
        run, _ = score_program(first.shrunk.program, ShortSimulator)
        assert run.differing(aspect) == list(first.shrunk.findings)


class DropsOutputs(Spec):
    """An engine that delivers nothing at the commit of every third plan."""

    def apply(self, event: Event) -> Any:
        answer = super().apply(event)
        is_lost = isinstance(event, Commit) and event.frame_id % 3 == 2
        return Outputs() if is_lost else answer


def test_a_token_that_is_sampled_and_not_delivered_is_counted() -> None:
    config = Config(num_blocks=9)
    program = Program(config, (Submit(Request("A", (1, 2), max_tokens=5)), Drain()))
    run, _ = score_program(program, DropsOutputs)
    tally = run.tallies()[Aspect.TOKENS]
    assert (tally.agreed, tally.total) == (4, 5)
    assert tally.first == Difference("token of A in plan 3", "delivered", "not delivered")


def test_a_difference_that_needs_another_config_is_a_kind_of_its_own(result: ScoreResult) -> None:
    first, shrunk = result.firsts[Aspect.STEPS], result.firsts[Aspect.STEPS].shrunk
    assert shrunk is not None
    assert first.kind == find_kind(Aspect.STEPS, "", shrunk.program.config)
    pipelined = replace(shrunk.program.config, max_frames_in_flight=2)
    other = replace(first, kind=find_kind(Aspect.STEPS, "", pipelined))
    both = replace(result, others=[other])
    assert both.list_firsts()[:2] == [first, other]
    assert "  steps: another in episode" in render_score(both)
    assert len(score_to_json(both)["scores"]["steps"]["others"]) == 1


def test_profiles_with_equal_shares_are_named_together(result: ScoreResult) -> None:
    compared = replace(result, nearest={"a": (4, 1), "b": (8, 6), "c": (4, 3), "d": (0, 0)})
    assert rank_profiles(compared) == [("b, c", 0.75), ("a", 0.25)]
    text = render_score(compared)
    assert "  nearest     b, c: 75.00 % of steps\n" in text
    page = make_score_page(replace(compared, engine_version="<1>"))
    assert "&lt;1&gt;" in page
    assert "<th>b, c</th>" in page
    assert "<script" not in page
    assert all(f"  {aspect}: first in episode" in page for aspect in result.firsts)


class RecordsEvents(SpecEngine):
    """Records the kinds of events that it gets."""

    asked: set[str] = set()  # noqa: RUF012

    def apply(self, event: Event) -> Observation:
        self.asked.add(type(event).__name__)
        return super().apply(event)


@pytest.mark.parametrize(
    ("feature", "events"),
    [
        ("masks", {"GrammarBitmask", "GrammarFailed"}),
        ("sessions", {"StreamingUpdate"}),
        ("encoder", {"EncoderOffer", "EncoderReset"}),
    ],
)
def test_the_events_of_a_feature_are_given_to_both_sides(feature: str, events: set[str]) -> None:
    RecordsEvents.asked.clear()
    for index in range(4):
        others = tuple(name for name in ("sessions", "encoder", "events") if name != feature)
        options = CheckOptions(preset="tiny", with_features=(feature,), without_features=others)
        run, _, findings = play_scored(options, index, RecordsEvents)
        assert findings == []
        assert not run.reference.live
        assert all(it.agreed == it.total for it in run.tallies().values())
    assert events <= RecordsEvents.asked


@pytest.mark.parametrize(
    ("defect", "aspect"),
    [(HitOneShort, Aspect.HITS), (OtherVictim, Aspect.PREEMPTIONS), (Twice, Aspect.ENDINGS)],
)
def test_each_kind_of_defect_shows_in_its_own_count(defect: type, aspect: Aspect) -> None:
    engine = held_to(OtherIds, RENAMED, defect)
    runs = (play_scored(CheckOptions(), index, engine)[0] for index in range(20))
    assert any(run.tallies()[aspect].first is not None for run in runs)


def test_a_step_that_is_left_out_shifts_later_steps_and_loses_no_token() -> None:
    """Steps rarely agree after it; the outputs of a request agree, but come later."""
    config = Config(num_blocks=30, block_size=2, max_model_len=32)
    program = Program(config, (Submit(Request("A", (1, 2, 3), max_tokens=6)), Drain()))
    run, findings = score_program(program, Lazy)
    assert findings == []
    tallies = run.tallies()
    assert tallies[Aspect.ADMISSIONS].agreed == tallies[Aspect.ADMISSIONS].total == 1
    assert tallies[Aspect.STEPS].agreed == 3
    mine, theirs = run.reference.endings["A"], run.engine.endings["A"]
    assert (mine.outputs, mine.reason) == (theirs.outputs, theirs.reason)
    assert mine.step < theirs.step
    first = tallies[Aspect.STEPS].first
    assert first is not None
    assert first.seen == "no request runs"


def test_drafts_are_the_same_for_a_request_whatever_the_order_of_rows() -> None:
    config = Config(
        num_blocks=30, block_size=2, max_model_len=32,
        spec_method=SpecMethod.NGRAM, num_speculative_tokens=2,
    )  # fmt: skip
    submits = tuple(Submit(Request(name, (1, 2, 3), max_tokens=6)) for name in "AB")
    rest: tuple[Action, ...] = (Answer(), Propose(((2, 1), (1, 0))), Schedule(), Drain())
    actions = (*submits, Schedule(), *rest)
    run, findings = score_program(Program(config, actions), Simulator)
    assert findings == []
    assert run.engine.steps[1].rows["A"].num_drafts == 2
    assert all(tally.first is None for tally in run.tallies().values())


def test_an_event_that_cannot_be_given_to_both_sides_is_left_out() -> None:
    """A request that never fits, an id used twice and an unknown grammar go to neither side."""
    config = Config(num_blocks=4, block_size=2, max_model_len=32)
    run = ScoreRun.start(config, HostEngine)
    big, small = Request("A", tuple(range(20))), Request("B", (1, 2), max_tokens=2)
    for action in (Submit(big), Submit(small), Submit(small), GrammarReady("nobody")):
        assert run.perform(action) == []
    assert run.skipped == {"requests that the specification rejects": 1}
    assert run.engine.live.keys() == run.reference.live.keys() == {"B"}


def test_an_event_that_the_specification_rejects_is_not_given_to_the_engine() -> None:
    """An engine without typed rejections took it, and did something else from then on."""

    class Engine(SpecEngine):
        def apply(self, event: Event) -> Observation:
            answer = super().apply(event)
            assert not isinstance(answer, Rejected)
            return answer

    config = Config(num_blocks=9, block_size=2)
    run = ScoreRun.start(config, Engine)
    session = Request("A", (1,), max_tokens=1, resumable=True)
    assert run.perform(Submit(session)) == []
    assert run.perform(StreamingUpdate(replace(session, priority=1))) == []
    assert run.skipped == {"events that the specification rejects": 1}


def test_a_declined_event_is_given_to_neither_side() -> None:
    """A step that only one side leaves out would be no difference between decisions."""

    class Engine(SpecEngine):
        def declines(self, event: Event) -> str | None:
            is_known = isinstance(event, Schedule) and self.state.next_frame_id == 1
            self.num_asked = getattr(self, "num_asked", 0) + is_known
            return "a known defect" if is_known and self.num_asked < 3 else None

    config = Config(num_blocks=30, block_size=2, max_model_len=32)
    program = Program(config, (Submit(Request("A", (1, 2, 3), max_tokens=6)), Drain()))
    run, findings = score_program(program, Engine, SPARING)
    assert findings == []
    assert run.skipped == {"a known defect": 2}
    assert all(tally.first is None for tally in run.tallies().values())
    strict, _ = score_program(program, Engine)
    assert strict.skipped == {}, "under strict nothing is left out"


def test_an_engine_that_raises_is_reported_and_the_score_continues() -> None:
    result = scored(BROKEN, 300)
    assert result.num_stuck > 1
    assert result.stuck is not None
    assert "ZeroDivisionError: inside" in result.stuck.message
    assert result.exit_code() is ExitCode.FAILED
    page = make_score_page(replace(result, skipped=Counter(drafts=3)))
    for text in (render_score(result), page):
        assert "the engine could not continue; the first:" in text
        assert "reproduce  blockstep score --engine equivalent_engines:Broken" in text
    assert "left out    drafts: 3 times" in page


@pytest.mark.parametrize("wrong", [None, "a plan"])
def test_an_answer_that_is_no_observation_ends_the_program(wrong: object) -> None:
    class Engine(SpecEngine):
        def apply(self, event: Event) -> Any:
            return wrong if isinstance(event, Schedule) else super().apply(event)

    program = Program(Config(num_blocks=9), (Submit(Request("A", (1,))), Schedule(), Answer()))
    run, (finding,) = score_program(program, Engine)
    assert finding.sentence == "engine_answers_in_the_vocabulary"
    assert run.num_events == 2


def test_an_answer_of_wrong_types_is_named_by_its_field() -> None:
    class Engine(SpecEngine):
        def apply(self, event: Event) -> Any:
            answer = super().apply(event)
            return replace(answer, new=None) if isinstance(answer, Plan) else answer  # type: ignore[arg-type]

    program = Program(Config(num_blocks=9), (Submit(Request("A", (1,))), Schedule()))
    _, findings = score_program(program, Engine)
    assert "Plan.new = None: must be a tuple of NewRow" in findings[0].message


@pytest.mark.parametrize(
    ("of", "answer", "sentence"),
    [
        (Schedule, None, "engine_answers_in_the_vocabulary"),
        (Schedule, Ack(), "answer_is_of_the_kind_of_the_event"),
        (Submit, None, "engine_answers_in_the_vocabulary"),
        (Submit, Outputs(), "answer_is_of_the_kind_of_the_event"),
        (Commit, Ack(), "answer_is_of_the_kind_of_the_event"),
        (GrammarBitmask, None, "engine_answers_in_the_vocabulary"),
    ],
)
def test_an_answer_of_a_wrong_kind_ends_the_program(of: type, answer: Any, sentence: str) -> None:
    """The step counted as one in which no request runs, because no check raised."""

    class Engine(SpecEngine):
        def apply(self, event: Event) -> Any:
            seen = super().apply(event)
            return answer if isinstance(event, of) else seen

    grammar = Grammar((((1, 0),),))
    request = Request("A", (1,), max_tokens=2, structured_output=True, grammar=grammar)
    actions = (Submit(request), GrammarReady("A"), Schedule(), Answer())
    _, (finding,) = score_program(Program(Config(num_blocks=9), actions), Engine)
    assert finding.sentence == sentence


def test_a_difference_that_is_not_repeated_is_marked() -> None:
    MoodyHits.was_short = False
    result = scored("equivalent_engines:Moody", 800, preset="tiny", without_features=("groups",))
    assert any(first.shrunk is None for first in result.firsts.values())
    assert "the engine is not deterministic" in render_score(result)


# The command.


def blockstep(*args: object) -> Any:
    return CliRunner().invoke(app, ["score", *map(str, args)])


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    """The JSON has the same numbers."""
    block = re.search(r"```console\n\$ blockstep score (.*?)\n(.*?)```", PAGE, re.S)
    assert block is not None
    path = tmp_path / "score.json"
    kept = tmp_path / "kept"
    result = blockstep(*block[1].split(), "--json", path, "--save", kept)
    assert result.exit_code == 0
    assert _timeless(block[2]) in _timeless(result.output)
    (program,) = re.findall(r"```text\n(  hits: .*?)```", PAGE, re.S)
    assert program in result.output
    record = json.loads(path.read_text())
    assert (record["format"], record["version"], record["contract"]) == (
        "blockstep-score",
        1,
        "plan/2",
    )
    assert record["against"].endswith(", profile strict")
    hits = record["scores"]["hits"]
    assert hits["share"] == hits["agreed"] / hits["total"] < 1
    assert hits["first"]["program"]
    assert {file.stem for file in kept.iterdir()} == set(Aspect) - {Aspect.TOKENS}
    again, _ = score_program(read_program(kept / "hits.json"), load_engine("museum:forward-frees"))
    assert again.tallies()[Aspect.HITS].first is not None
    assert hits["first"]["reproduce"] == program.splitlines()[-1].removeprefix("  reproduce  ")


def _timeless(text: str) -> str:
    return re.sub(r"[\d.]+ s\n", "SECONDS\n", text)


def test_a_score_is_measured_against_a_release(tmp_path: Path) -> None:
    path = tmp_path / "score.json"
    assert blockstep("--budget", 60, "--profile", "vllm-0.19.1", "--json", path).exit_code == 0
    record = json.loads(path.read_text())
    assert record["against"].endswith(", profile vllm-0.19.1")


@pytest.mark.soak
def test_the_line_to_reproduce_shows_the_difference_again(result: ScoreResult) -> None:
    for aspect, first in result.firsts.items():
        again = blockstep(*reproduce(result.options, first.episode).split()[2:])
        assert f"  {aspect}: first in episode {first.episode} " in again.output


def test_too_low_a_score_fails_if_a_least_share_is_given(result: ScoreResult) -> None:
    assert blockstep("--budget", 200, "--least", 100).exit_code == 0
    assert result.exit_code(0.995) is ExitCode.FAILED
    assert "less than 99.50% agree: steps" in render_score(result, 0.995)
    assert "less than" not in render_score(result)


def test_an_engine_that_hangs_ends_the_score() -> None:
    result = blockstep("--engine", HANGING, "--budget", 200, "--event-seconds", 1)
    assert result.exit_code == 1
    assert "the score ends early: the engine gave no answer within 1 s" in result.output
    lost = ScoreResult(CheckOptions(HANGING), loss=Loss("no answer"))
    assert "the score ends early: no answer" in make_score_page(lost)


def test_a_line_to_reproduce_quotes_a_folder_for_the_shell() -> None:
    line = reproduce(CheckOptions("mine:Engine", path="/a folder"), 3)
    assert "--path '/a folder' --preset" in line
