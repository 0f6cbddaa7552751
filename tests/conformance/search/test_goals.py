"""Goals of a run: a goal that a config or a feature rules out is not required."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.engine import EngineTraits
from blockstep.conformance.features.transfers.draws import draw_report
from blockstep.conformance.judge.legal import PLAIN_CONFIG
from blockstep.conformance.lockstep.quirks import UNMET_WITH, name_spared
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Answer, Drain, Program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.protocol.transfer_tracker import Transfers
from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.verdict_requirements import missing_goals, read_engine_facts
from blockstep.spec import vocabulary as v
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.profiles import QUIRKS, Profile, Quirk

STATES = (v.KVGroup(v.GroupKind.FULL, 4), v.KVGroup(v.GroupKind.RECURRENT, 4))


class Declining(SpecEngine):
    """An engine that cannot reach a goal where every config has recurrent groups."""

    traits = EngineTraits(out_of_reach_with={"states": frozenset({"transfers_asked_anew"})})


def list_missing(*with_features: str) -> tuple[str, ...]:
    options = CheckOptions(with_features=with_features, profile="vllm-0.19.1")
    return missing_goals({}, options, read_engine_facts(options, Declining))


def test_a_goal_is_out_of_reach_only_with_its_feature() -> None:
    assert "transfers_asked_anew" not in list_missing("transfers", "states")
    assert "transfers_asked_anew" in list_missing("transfers")


def test_sides_of_quirks_that_a_feature_rules_out_are_not_required() -> None:
    late, last = (
        name_spared(quirk) for quirk in (Quirk.RESET_EVENT_IS_LATE, Quirk.LAST_TOKEN_IS_LOADED)
    )
    assert last in list_missing("transfers")
    assert last not in list_missing("transfers", "states")
    assert late in UNMET_WITH["events"]
    assert late not in list_missing("events")


def test_a_load_of_states_never_includes_the_last_token() -> None:
    change = next(it.change for it in QUIRKS if it.quirk is Quirk.LAST_TOKEN_IS_LOADED)
    config = replace(PLAIN_CONFIG, kv_connector=True)
    assert change(STRICT_RULES, config) is not STRICT_RULES
    with_states = replace(config, groups=STATES, enable_prefix_caching=False)
    assert change(STRICT_RULES, with_states) is STRICT_RULES


def test_a_drain_ends_where_a_commit_is_rejected() -> None:
    """The release keeps the grammar state of a session, so it rejects the sampled token."""
    grammar = v.Grammar((((1, 1),), ((2, 2),), ((1, 0),)))
    session = v.Request(
        "A", (0,), max_tokens=1, resumable=True, structured_output=True, grammar=grammar
    )
    update = v.Request("A", (0,), max_tokens=3, resumable=True)
    actions = (v.Submit(session), v.GrammarReady("A"), v.Schedule(), Answer())
    profile = Profile("one", frozenset({Quirk.SESSIONS_KEEP_THEIR_GRAMMAR}))
    program = Program(
        v.Config(8, 2, max_model_len=200), (*actions, v.StreamingUpdate(update), Drain())
    )
    run, findings = run_program(program, partial(SpecEngine, profile=profile), profile)
    assert findings == []
    assert run.plans, "its second plan is never answered"
    assert run.num_events < 20


def test_the_end_of_a_load_that_has_arrived_is_reported_again() -> None:
    load = v.KVLoad("A", ((1,),), 0, 1, is_async=True)
    under_way = Transfers(received={"A": load})
    draw = SeededDraw("reports")
    assert any(draw_report(under_way, draw).recving == ("A",) for _ in range(200))


def test_blocks_for_states_of_drafts_count_where_a_session_must_fit() -> None:
    """Blocks for the states of drafts are part of the table of a session, and of its need."""
    groups = (
        *(v.KVGroup(v.GroupKind.FULL, 4),) * 2,
        v.KVGroup(
            v.GroupKind.RECURRENT,
            8,
            mamba_cache_mode=v.MambaCacheMode.ALIGN,
            num_speculative_blocks=5,
        ),
    )
    config = v.Config(
        25,
        4,
        8,
        64,
        64,
        max_frames_in_flight=2,
        groups=groups,
        kv_connector=True,
        kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE,
    )
    session = v.Request("A", (0,) * 4, max_tokens=4, resumable=True)
    actions = (
        v.Submit(session),
        v.Submit(v.Request("B", (0,) * 5, max_tokens=3)),
        v.Submit(v.Request("C", (0,) * 3, max_tokens=3)),
        v.KVOffer("A", 1, is_async=True),
        v.StreamingUpdate(replace(session, prompt_token_ids=(0,) * 6, max_tokens=1)),
        Drain(),
    )
    run, findings = run_program(Program(config, actions, 800_874_214, 3), load_engine("host"))
    assert findings == []
    assert run.witnesses["sessions_stop_goes_on"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_state_hit_in_its_own_step_is_found_within_20_000_events(seed: int) -> None:
    options = CheckOptions("museum:state-hit-within-its-step", seed=seed, max_events=20_000)
    assert check(options, shrinks=False).first is not None
