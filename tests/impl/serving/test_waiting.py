"""Waiting: the reason that is told of a request is the one that keeps it from running."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from blockstep.impl.host import HostEngine
from blockstep.impl.serving.waiting import count_waiting, explain_waiting
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    GrammarReady,
    GroupKind,
    KVGroup,
    PauseState,
    Plan,
    Policy,
    Request,
    RequestId,
    Reset,
    RowTokens,
    Schedule,
    SetPause,
    StreamingUpdate,
    Submit,
    WaitingReason,
)

CONFIG = Config(num_blocks=9, block_size=2, max_num_seqs=2, max_model_len=16)
AHEAD = {"async_scheduling": True, "max_frames_in_flight": 2}


class Told:
    """An engine, and what its clients have asked of it."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.config = config
        self.engine = HostEngine(config)
        self.requests: dict[RequestId, Request] = {}
        self.plans: list[Plan] = []

    def submit(self, name: str, *tokens: int, **more: object) -> None:
        request = Request(name, tokens, **{"max_tokens": 3, **more})  # type: ignore[arg-type]
        self.requests[name] = request
        self.engine.apply(Submit(request))

    def schedule(self) -> Plan:
        plan = self.engine.apply(Schedule())
        assert isinstance(plan, Plan)
        if plan.rows:
            self.plans.append(plan)
        return plan

    def commit(self, token: int = 7) -> None:
        plan = self.plans.pop(0)
        drafts = self.engine.frames[plan.frame_id]
        rows = [RowTokens(n, () if d is None else (token,)) for n, d in drafts.items()]
        self.engine.apply(Commit(plan.frame_id, tuple(rows)))

    def why(self) -> dict[RequestId, str]:
        return {
            name: str(reason)
            for name, reason in explain_waiting(
                self.config, self.engine.snapshot(), self.requests
            ).items()
        }


def test_who_has_room_is_next_and_others_are_behind() -> None:
    told = Told()
    told.submit("A", 1, 2, 3)
    told.submit("B", 1, 2, 3)
    assert told.why() == {"A": "next", "B": "behind"}
    assert [row.request_id for row in told.schedule().new] == ["A", "B"]
    told.submit("C", 1)
    assert told.why() == {"C": "seats"}


def test_a_pause_holds_all() -> None:
    told = Told()
    told.submit("A", 1, structured_output=True)
    told.submit("B", 1)
    assert told.why() == {"A": "grammar", "B": "next"}
    told.engine.apply(SetPause(PauseState.PAUSED_NEW))
    assert told.why() == {"A": "paused", "B": "paused"}


def test_a_grammar_that_is_ready_is_no_reason() -> None:
    told = Told()
    told.submit("A", 1, structured_output=True)
    told.engine.apply(GrammarReady("A"))
    assert told.why() == {"A": "next"}


def test_blocks_lack_for_a_chunk_or_for_the_whole() -> None:
    told = Told(replace(CONFIG, max_num_batched_tokens=4))
    told.submit("A", *range(11))
    for _ in range(3):
        told.schedule()
        told.commit()
    told.submit("B", *range(20, 27))
    assert told.why() == {"B": "gate"}
    assert Told(replace(CONFIG, num_blocks=8)).why() == {}
    tight = Told(replace(CONFIG, num_blocks=8, max_num_batched_tokens=4))
    tight.submit("A", *range(11))
    for _ in range(3):
        tight.schedule()
        tight.commit()
    tight.submit("B", *range(20, 27))
    assert tight.why() == {"B": "capacity"}


def test_a_hit_that_others_hold_needs_no_room() -> None:
    told = Told(replace(CONFIG, num_blocks=8))
    told.submit("A", *range(11))
    told.schedule()
    told.commit()
    told.submit("B", *range(11), 50)
    assert told.why() == {"B": "next"}
    told.requests["B"] = replace(told.requests["B"], adapter="x")
    assert told.why() == {"B": "capacity"}


def test_an_adapter_is_one_too_many() -> None:
    told = Told(replace(CONFIG, max_loras=1, max_num_seqs=4))
    told.submit("A", 1, adapter="x")
    told.schedule()
    told.submit("B", 1, adapter="y")
    told.submit("C", 1, adapter="x")
    assert told.why() == {"B": "adapter", "C": "next"}


def test_a_session_rests_until_input_comes() -> None:
    told = Told()
    told.submit("A", 1, 2, 3, max_tokens=1, resumable=True)
    told.schedule()
    told.commit()
    assert told.why() == {"A": "input"}
    told.engine.apply(StreamingUpdate(Request("A", (4, 5), resumable=True)))
    told.requests["A"] = replace(told.requests["A"], prompt_token_ids=(1, 2, 3, 4, 5))
    assert told.why() == {"A": "next"}


def test_who_was_preempted_in_flight_waits_for_its_tokens() -> None:
    told = Told(replace(CONFIG, **AHEAD))  # type: ignore[arg-type]
    told.submit("A", 1, 2, 3)
    told.schedule()
    told.engine.apply(Reset(reset_running_requests=True))
    assert told.why() == {"A": "in_flight"}
    told.commit()
    assert told.why() == {"A": "next"}


def test_each_reason_has_its_count() -> None:
    counts = count_waiting({"A": WaitingReason.NEXT, "B": WaitingReason.BEHIND})
    assert set(counts) == set(WaitingReason)
    assert sum(counts.values()) == 2


def test_several_groups_are_refused_in_a_sentence() -> None:
    config = replace(CONFIG, groups=(KVGroup(GroupKind.FULL, 2),))
    with pytest.raises(ValueError, match=r"groups = .* not reckoned; give a state of one group"):
        explain_waiting(config, HostEngine(config).snapshot(), {})


@pytest.mark.parametrize("seed", range(6))
def test_who_is_kept_out_is_not_admitted_and_who_is_next_is(seed: int) -> None:
    """Under both policies and with plans in flight: nobody but the next and who is behind goes."""
    draw, seen = random.Random(seed), Counter[str]()
    told = Told(
        replace(
            CONFIG,
            num_blocks=draw.randint(9, 11),
            max_num_seqs=3,
            max_num_batched_tokens=draw.choice((3, 8)),
            policy=draw.choice(tuple(Policy)),
            scheduler_reserve_full_isl=draw.random() < 0.7,
            long_prefill_token_threshold=draw.choice((0, 2)),
            **(AHEAD if draw.random() < 0.5 else {}),  # type: ignore[arg-type]
        )
    )
    for number in range(150):
        if draw.random() < 0.4:
            prompt = [draw.choice((1, 2)) for _ in range(draw.randint(1, 11))]
            told.submit(f"r{number}", *prompt, priority=draw.randint(0, 2), arrival_time=number)
        if draw.random() < 0.1 and told.requests:
            told.engine.apply(Abort((draw.choice(sorted(told.requests)),)))
        if len(told.plans) == told.config.max_frames_in_flight or draw.random() < 0.3:
            if told.plans:
                told.commit(draw.choice((1, 2)))
            continue
        why, is_idle = told.why(), not told.engine.snapshot().running
        seen.update(why.values())
        plan = told.schedule()
        admitted = {row.request_id for row in plan.rows} & why.keys()
        assert {why[name] for name in admitted} <= {"next", "behind"}
        first = next((name for name, reason in why.items() if reason == "next"), None)
        if is_idle and first is not None:
            assert first in admitted
    assert seen["next"]
    assert seen["behind"]
    assert seen["gate"] + seen["capacity"] + seen["seats"]
