"""Wrong events: the specification and the host engine refuse each, and keep their states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.draw.presets import SMALL
from blockstep.conformance.draw.swarms import draw_swarm
from blockstep.conformance.draw.wrong_inputs import list_bad_events
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.feature_selection import FeatureSelection
from blockstep.conformance.protocol.program import (
    Action,
    Answer,
    Misanswer,
    Mistake,
    Propose,
    describe,
)
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.spec import Config, Request, Schedule, SpecMethod, Submit
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import initial_state
from blockstep.spec.transition import Accepted, transition

CONFIG = Config(
    num_blocks=12,
    block_size=2,
    max_model_len=16,
    max_num_batched_tokens=6,
    spec_method=SpecMethod.NGRAM,
    num_speculative_tokens=2,
)
CODES = {
    Mistake.TOO_EARLY: v.RejectCode.FRAME_OUT_OF_ORDER,
    Mistake.AGAIN: v.RejectCode.UNKNOWN_FRAME,
}


def started(depth: int) -> LockStep:
    """Start a run in which A decodes with drafts and B is in the middle of its prompt."""
    config = replace(CONFIG, max_frames_in_flight=depth, async_scheduling=depth > 1)
    run = LockStep.start(config, load_engine("host"), keep_exchanges=True)
    actions: list[Action] = [
        Submit(Request("A", (1, 2), max_tokens=9)),
        Schedule(),
        Answer(),
        Propose(((2, 1),)),
        Submit(Request("B", (3, 4, 5, 6, 7, 8, 9), max_tokens=2)),
        *[Schedule()] * depth,
    ]
    for action in actions:
        assert run.perform(action) == []
    return run


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mistake", Mistake)
def test_every_wrong_commit_is_refused(mistake: Mistake, depth: int) -> None:
    run = started(depth)
    before = run.engine.snapshot()
    num_events = run.num_events
    assert run.perform(Misanswer(mistake)) == []
    impossible = (
        (mistake is Mistake.TOO_EARLY and depth == 1)
        or (mistake is Mistake.WRONG_DRAFT and depth == 2)
        or mistake is Mistake.FORBIDDEN_TOKEN  # no request has a grammar
    )
    assert run.num_events == num_events + (not impossible)
    assert run.engine.snapshot() == before
    if not impossible:
        answer = run.exchanges[-1].expected
        assert getattr(answer, "code", None) is CODES.get(mistake, v.RejectCode.BAD_RESULT)


def test_a_token_that_a_grammar_forbids_is_refused() -> None:
    run = LockStep.start(CONFIG, SpecEngine, keep_exchanges=True)
    grammar = v.Grammar((((0, 0), (1, 0)),))
    request = Request("A", (1, 2), max_tokens=9, structured_output=True, grammar=grammar)
    for action in (Submit(request), v.GrammarReady("A"), Schedule()):
        assert run.perform(action) == []
    assert run.perform(Misanswer(Mistake.FORBIDDEN_TOKEN)) == []
    commit, answer = run.exchanges[-1].event, run.exchanges[-1].expected
    assert isinstance(commit, v.Commit)
    assert commit.sampled[0].token_ids == (2,)
    assert getattr(answer, "code", None) is v.RejectCode.BAD_RESULT


def test_wrong_commits_are_skipped_without_a_frame_in_flight() -> None:
    run = LockStep.start(CONFIG, load_engine("host"))
    for mistake in Mistake:
        assert run.perform(Misanswer(mistake)) == []
        assert describe(Misanswer(mistake)).startswith("commit    ")
    assert run.num_events == 0


BROUGHT = frozenset({"encoder", "masks", "grammar", "sessions"})


def test_both_engines_refuse_bad_events_with_the_same_code() -> None:
    seen: set[v.RejectCode] = set()
    for seed in range(12):
        draw = SeededDraw(f"bad/{seed}")
        swarm = draw_swarm(SMALL, draw, wish=FeatureSelection(always=BROUGHT))
        config, item = swarm.config, v.MultiModalItem("cat", 0, 1)
        state, host = initial_state(config), load_engine("host")(config)
        asked = [
            Request("A", (0, 1), max_tokens=1, resumable=True),
            Request("B", (0, 1), max_tokens=1, items=(item,)),
            Request(
                "C", (1,), max_tokens=1, structured_output=True, grammar=v.Grammar((((1, 0),),))
            ),
        ]
        closing = v.StreamingUpdate(Request("A", (0,)))
        taken: list[v.Event] = [*map(Submit, asked), v.GrammarReady("C"), Schedule(), closing]
        for event in taken:
            answer = transition(state, event)
            if isinstance(answer, v.Rejected):  # it never fits so small a pool
                continue
            assert host.apply(event) == answer.observation
            state = answer.state
        live = {name: one.request for name, one in state.requests.items()}
        frames = [frame.frame_id for frame in state.frames] or [0]
        for event in list_bad_events(swarm, live, [*live, "nobody"], frames):
            refused, by_host = transition(state, event), host.apply(event)
            if isinstance(refused, Accepted):  # it names an unknown request (P18), or is a mask
                if not isinstance(event, v.GrammarBitmask):
                    assert isinstance(event, v.KVOffer | v.TransfersReported | v.PinEstimate), event
                    after = refused.state
                    if isinstance(refused.observation, v.Outputs) and refused.observation.kv_events:
                        after = replace(after, pool=state.pool)  # it has the pending KV events
                    assert after == state, event
                assert refused.observation == by_host, event
                state = refused.state
                continue
            assert isinstance(refused, v.Rejected), event
            assert isinstance(by_host, v.Rejected), event
            assert refused.code is by_host.code, event
            seen.add(refused.code)
    assert seen >= {
        *(v.RejectCode.MALFORMED_EVENT, v.RejectCode.BAD_REQUEST, v.RejectCode.BAD_DRAFTS),
        *(v.RejectCode.UNKNOWN_REQUEST, v.RejectCode.UNKNOWN_FRAME, v.RejectCode.NOT_RESUMABLE),
        v.RejectCode.NEVER_FITS,
    }
