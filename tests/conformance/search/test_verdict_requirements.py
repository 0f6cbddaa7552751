"""Goals of a check at `safety`: they follow from the capabilities that the engine claims."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from missing_capabilities import make_lacking

from blockstep.conformance.engine import (
    ALL_CAPABILITIES,
    BadEngineError,
    EngineTraits,
    Equivalence,
    Renamed,
    Safety,
    SamePlans,
)
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.judge.coverage_goals.answers import ANSWERED
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.features import BY_NAME, FEATURES
from blockstep.conformance.protocol.program import Action, Answer, Program, Propose
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.report.verdict import list_unasked, verdict_word
from blockstep.conformance.search.check import check
from blockstep.conformance.search.episodes import fit_depth, run_episode
from blockstep.conformance.search.feature_probe import (
    OWED_AT_SAFETY,
    STOPS,
    find_declined_features,
    find_unreachable_goals,
)
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.conformance.search.verdict_requirements import missing_goals, read_engine_facts
from blockstep.spec.vocabulary import (
    Abort,
    Config,
    GrammarReady,
    PauseState,
    Policy,
    Request,
    Reset,
    Schedule,
    SetPause,
    SpecMethod,
    Submit,
)

SAFETY = EngineTraits(equivalence=Safety())
PLAIN = Request("", ())
EVERYTHING = OWED_AT_SAFETY - {"dropped_token_runs_again"}
"""Goals of an engine that drops no tokens in flight (see `test_dropped_tokens`)."""


def list_required(
    *lacks: str, fit_config: Any = None, fit_request: Any = None, out_of_reach: tuple[str, ...] = ()
) -> set[str]:
    """Return the goals that are required in a check of such an engine."""
    fits = {"fit_config": fit_config, "fit_request": fit_request}
    scope = Safety(**{name: fit for name, fit in fits.items() if fit is not None})
    traits = EngineTraits(equivalence=scope, out_of_reach=frozenset(out_of_reach))
    make_engine = make_lacking(SpecEngine, lacks, traits)
    options = fit_depth(CheckOptions(), make_engine)
    return set(missing_goals({}, options, read_engine_facts(options, make_engine)))


def test_all_goals_are_required_of_an_engine_with_all_capabilities() -> None:
    assert list_required() == EVERYTHING
    assert OWED_AT_SAFETY <= ANSWERED <= WITNESSES.keys()


TAKEN_ALONG = {
    "caching": {"pins"},
    "grammar": {"masks"},
    "groups": {"kinds", "window", "chunks", "states"},
    "kinds": {"chunks", "states"},
    "transfers": {"tiers"},
}
"""Features that an engine does not have without another one."""


@pytest.mark.parametrize("name", sorted(it.name for it in FEATURES if it.examples))
def test_a_feature_that_an_adapter_removes_counts_as_declined(name: str) -> None:
    feature = BY_NAME[name]
    scope = Safety(feature.take_from, lambda request, _config: feature.take_from(request))
    declined = find_declined_features(scope)
    assert name in declined
    assert declined <= {name, *TAKEN_ALONG.get(name, ())}
    assert find_declined_features(Safety()) == frozenset()


def test_every_feature_that_is_asked_for_has_an_example() -> None:
    for feature in FEATURES:
        asked = [it.config or it.request for it in feature.examples]
        assert all(asked)
        assert bool(asked) is bool(feature.config or feature.request), feature.name


def _in_order(names: Collection[str]) -> str:
    """Return a test id that is the same in each process, although sets have no order."""
    return ",".join(sorted(names))


@pytest.mark.parametrize(
    ("lacks", "not_required"),
    [
        (("abort",), {"abort_waiting", "abort_in_flight"}),
        (("grammar",), {"grammar_promoted"}),
        (("pause",), {"paused_new", "paused_all"}),
        (("reset",), {"reset_done", "reset_forced"}),
        (("async",), {"planned_before_its_token", "draft_placeholders_scheduled"}),
        (("pipeline",), set()),
        (("async", "pipeline"), {*("planned_before_its_token", "draft_placeholders_scheduled"),
         "several_frames_in_flight"}),
        (("drafts",), {name for name in OWED_AT_SAFETY if name.startswith("draft")}),
        (("rejection", "snapshot", "statistics", "late drafts"), set()),
    ],
    ids=_in_order,
)  # fmt: skip
def test_goals_of_missing_capabilities_are_not_required(
    lacks: tuple[str, ...], not_required: set[str]
) -> None:
    assert EVERYTHING - list_required(*lacks) == not_required


@pytest.mark.parametrize(
    ("fields", "not_required"),
    [
        ({"enable_prefix_caching": False}, {"prefix_hit", "resumed_with_hit", "reset_done"}),
        ({"enable_chunked_prefill": True}, set()),
        ({"max_frames_in_flight": 1, "async_scheduling": False},
         {*("planned_before_its_token", "draft_placeholders_scheduled"),
         "several_frames_in_flight"}),
    ],
    ids=_in_order,
)  # fmt: skip
def test_goals_that_fit_config_rules_out_are_not_required(
    fields: dict[str, Any], not_required: set[str]
) -> None:
    assert (
        EVERYTHING - list_required(fit_config=lambda config: replace(config, **fields))
        == not_required
    )


@pytest.mark.parametrize("name", STOPS)
def test_goals_that_fit_request_rules_out_are_not_required(name: str) -> None:
    plain = Request("", ())
    fields = {field: getattr(plain, field) for field in STOPS[name]}
    assert EVERYTHING - list_required(
        fit_request=lambda request, _config: replace(request, **fields)
    ) == {name}
    assert list_required(fit_request=lambda _request, _config: None) == EVERYTHING


@pytest.mark.parametrize(
    ("field", "beginnings"),
    [
        ("min_tokens", ("min_tokens_held_back_a_stop",)),
        ("adapter", ("same_tokens_other_adapter", "adapters_")),
        ("cache_salt", ("same_tokens_other_salt",)),
        ("items", ("same_tokens_other_items", "encoder_")),
        ("prompt_embeds", ("same_tokens_other_embeds",)),
        ("skip_reading_prefix_cache", ("reading_skipped",)),
        ("job_id", ("pins_",)),
        ("is_last_step", ("pins_last_step",)),
        ("priority", ()),
        ("arrival_time", ()),
    ],
)
@pytest.mark.parametrize("scope", [Renamed, SamePlans])
def test_goals_of_a_removed_field_are_required_at_no_equivalence(
    scope: type[Equivalence], field: str, beginnings: tuple[str, ...]
) -> None:
    def drop(request: Request, _config: Config) -> Request:
        return replace(request, **{field: getattr(Request("", ()), field)})

    required = []
    for fit_request in (lambda request, _config: request, drop):
        traits = EngineTraits(equivalence=scope(fit_request=fit_request))
        engine = make_lacking(SpecEngine, (), traits)
        options = CheckOptions(with_features=("encoder",) if field == "items" else ())
        required.append(set(missing_goals({}, options, read_engine_facts(options, engine))))
    assert required[0] - required[1] == {
        it for it in required[0] if it.startswith(beginnings or "-")
    }
    assert bool(required[0] - required[1]) is bool(beginnings) or field == "is_last_step"


@pytest.mark.parametrize("field", ["adapter", "items", "job_id"])
def test_goals_of_a_field_removed_only_where_it_is_unused_are_required(field: str) -> None:
    def drop(request: Request, config: Config) -> Request:
        uses = {
            "adapter": config.max_loras,
            "items": config.encoder_cache_size,
            "job_id": config.policy is Policy.CONTINUUM,
        }
        return request if uses[field] else replace(request, **{field: getattr(PLAIN, field)})

    scope = Renamed(fit_request=drop)
    assert find_unreachable_goals(scope, frozenset()) == find_unreachable_goals(
        Renamed(), frozenset()
    )


def test_goals_of_resumption_are_not_required_without_preemption() -> None:
    returns = {"preempted", "preempted_then_resumed", "resumed_with_hit", "resumed_with_outputs"}
    assert EVERYTHING - list_required(out_of_reach=("preempted",)) == returns
    assert EVERYTHING - list_required(out_of_reach=("prefix_hit",)) == {"prefix_hit"}


# How goals are counted.

CONFIG = Config(num_blocks=17, block_size=2, max_model_len=32, max_num_batched_tokens=32)


def count(config: Config, *actions: Action) -> Counter[str]:
    run, findings = run_program(
        Program(config, actions), make_lacking(SpecEngine, ("snapshot",), SAFETY)
    )
    assert findings == []
    return run.witnesses


def submit(name: str, **fields: Any) -> Submit:
    return Submit(Request(name, (1, 2, 3), 4, **fields))


def test_aborts_are_counted_by_the_status_of_the_request() -> None:
    config = replace(CONFIG, max_frames_in_flight=2, async_scheduling=True, max_num_seqs=2)
    seen = count(
        config,
        *(submit("A"), submit("B"), submit("C"), Schedule(), Schedule(), Abort(("A", "A", "x"))),
        *(Abort(("C",)), Answer(), Answer(), Abort(("B", "C"))),
    )
    assert {name: seen[name] for name in seen if "abort" in name} == {
        "abort_in_flight": 1,
        "abort_with_two_frames_in_flight": 1,
        "abort_unknown": 2,
        "abort_waiting": 1,
        "abort_running": 1,
        "commit_for_aborted": 2,
    }
    assert (seen["several_frames_in_flight"], seen["planned_before_its_token"]) == (1, 2)


def test_pauses_grammars_and_resets_are_counted() -> None:
    seen = count(
        CONFIG,
        *(submit("A", structured_output=True), GrammarReady("A"), GrammarReady("A"), submit("B")),
        *(SetPause(PauseState.PAUSED_NEW), Schedule(), SetPause(PauseState.UNPAUSED), Schedule()),
        *(Reset(False), SetPause(PauseState.PAUSED_ALL), Reset(True), Schedule(), Answer()),
        *(Abort(("A", "B")), Reset(False)),
    )
    for name in ("grammar_promoted", "grammar_ready_twice", "paused_new", "reset_refused"):
        assert seen[name] == 1, name
    for name in ("reset_forced", "reset_forced_in_flight", "reset_done"):
        assert seen[name] == 1, name
    assert seen["abort_preempted"] == 2
    assert seen["paused_all"] == 0, "no request ran any more"


def test_drafts_are_counted_by_how_many_were_right() -> None:
    config = replace(CONFIG, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    steps: list[Action] = [
        Propose(((2, 1),)),
        Schedule(),
        Answer(),
        Propose(((1, 0),)),
        Schedule(),
        Answer(),
    ]
    seen = count(config, Submit(Request("A", (1, 2, 3), 9)), Schedule(), Answer(), *steps)
    counts = {name: seen[name] for name in seen if name.startswith("draft")}
    assert counts == {
        "drafts_taken": 2,
        "drafts_scheduled": 2,
        "drafts_some_accepted": 1,
        "drafts_none_accepted": 1,
    }


def test_stops_at_max_model_len_are_counted_apart() -> None:
    config = replace(CONFIG, max_model_len=4)
    seen = count(config, Submit(Request("A", (1, 2, 3), 4)), Schedule(), Answer())
    assert (seen["stop_model_length"], seen["stop_length"]) == (1, 0)


# What is drawn.


def test_aborts_in_flight_are_drawn_often_at_safety() -> None:
    counts: Counter[str] = Counter()
    lacks = ALL_CAPABILITIES - {"abort", "snapshot"}
    make_engine = make_lacking(SpecEngine, lacks, SAFETY)
    options = fit_depth(CheckOptions(seed=3), make_engine)
    num_events = 0
    for index in range(6):
        episode = run_episode(options, index, make_engine)
        counts.update(episode.witnesses)
        num_events += episode.num_events
    assert counts["abort_in_flight"] > num_events / 100


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this module importable by its name, however it was imported."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[AtSafety.__module__])


class AtSafety(SpecEngine):
    """A correct engine that claims all capabilities and is judged by the properties alone."""

    traits = EngineTraits(equivalence=Safety())


def test_a_check_that_misses_goals_lists_them_and_what_to_do() -> None:
    result = check(CheckOptions(f"{__name__}:AtSafety", preset="tiny", max_events=1))
    assert {"paused_all", "stop_repetition"} <= set(result.missing)
    assert result.exit_code is ExitCode.HARNESS
    assert verdict_word(result).endswith(
        "or declare unreachable goals in out_of_reach of its traits)"
    )


def test_the_verdict_proposes_to_leave_out_features_not_asked_for() -> None:
    """An adapter may have to leave out configs with a feature that was not asked for."""
    result = check(CheckOptions("host", preset="tiny", max_events=1, with_features=("events",)))
    assert list_unasked(result) == []
    result = replace(result, missing=("groups_evicted_by_another", "groups_state_left"))
    assert list_unasked(result) == ["groups"]
    assert "or leave out: --without groups" in verdict_word(result)
    assert list_unasked(replace(result, missing=(*result.missing, "stop_eos"))) == []
    assert list_unasked(replace(result, options=replace(result.options, with_features=()))) == []


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["tiny", "small", "real"])
def test_a_check_of_the_usual_length_reaches_all_goals(preset: str) -> None:
    result = check(CheckOptions(f"{__name__}:AtSafety", preset=preset, max_events=150_000))
    assert result.missing == ()


@pytest.mark.parametrize(
    ("traits", "text"),
    [
        (
            {"out_of_reach": frozenset({"skip_ahed"})},
            "out_of_reach of its traits: 'skip_ahed' is no coverage goal; close: skip_ahead; ",
        ),
        ({"out_of_reach": frozenset({"zz"})}, "'zz' is no coverage goal; `blockstep explain"),
        ({"out_of_reach_with": {"groups": frozenset({"preemptd"})}}, "close: preempted, "),
        ({"out_of_reach_with": {"group": frozenset()}}, "'group' is no feature; "),
        ({"equivalence": Safety(situations=("preemptd",))}, "of its traits: 'preemptd'"),
    ],
)
def test_an_unknown_goal_of_an_adapter_is_refused(traits: dict[str, Any], text: str) -> None:
    def make(config: Config) -> SpecEngine:
        return SpecEngine(config)

    make.traits = EngineTraits(**traits)  # type: ignore[attr-defined]
    with pytest.raises(BadEngineError, match=re.escape(text)):
        read_engine_facts(CheckOptions(), make)
