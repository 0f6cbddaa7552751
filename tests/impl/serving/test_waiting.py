"""Waiting reasons: the reported reason is the one that keeps a request from running."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from blockstep.impl.host import HostEngine
from blockstep.impl.serving.meter import Meter
from blockstep.impl.serving.waiting import count_waiting, explain_waiting
from blockstep.spec.vocabulary import (
    Abort,
    Ack,
    Clock,
    Commit,
    Config,
    Event,
    Fork,
    GrammarReady,
    GroupKind,
    KVGroup,
    KVLoadFailurePolicy,
    KVOffer,
    KVTransfers,
    MambaCacheMode,
    Observation,
    PauseState,
    PinEstimate,
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
    TransfersReported,
    WaitingReason,
)

CONFIG = Config(num_blocks=9, block_size=2, max_num_seqs=2, max_model_len=16)
AHEAD = {"async_scheduling": True, "max_frames_in_flight": 2}


class Run:
    """An engine, and the requests of its clients."""

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
        drafts = self.engine.frames[plan.frame_id].build_rows()
        rows = [RowTokens(n, () if d is None else (token,)) for n, d in drafts.items()]
        self.engine.apply(Commit(plan.frame_id, tuple(rows)))

    def why(self) -> dict[RequestId, str]:
        return {
            name: str(reason)
            for name, reason in explain_waiting(
                self.config, self.engine.snapshot(), self.requests
            ).items()
        }


def test_the_first_request_that_fits_is_next_and_others_are_behind() -> None:
    run = Run()
    run.submit("A", 1, 2, 3)
    run.submit("B", 1, 2, 3)
    assert run.why() == {"A": "next", "B": "behind"}
    assert [row.request_id for row in run.schedule().new] == ["A", "B"]
    run.submit("C", 1)
    assert run.why() == {"C": "seats"}


def test_all_requests_are_paused_during_a_pause() -> None:
    run = Run()
    run.submit("A", 1, structured_output=True)
    run.submit("B", 1)
    assert run.why() == {"A": "grammar", "B": "next"}
    run.engine.apply(SetPause(PauseState.PAUSED_NEW))
    assert run.why() == {"A": "paused", "B": "paused"}


def test_the_reason_is_closed_while_admission_is_closed() -> None:
    run = Run(replace(CONFIG, admission_low_blocks=3, admission_high_blocks=6))
    run.submit("A", *range(11), max_tokens=2)
    run.schedule()
    run.submit("B", 1)
    assert run.why() == {"B": "closed"}, "two blocks are free"
    run.commit()
    assert not run.schedule().new
    run.commit()
    assert run.why() == {"B": "next"}, "A has ended"
    assert run.schedule().new


def test_a_request_with_a_pin_is_next_and_others_reclaim_pins() -> None:
    run = Run(replace(CONFIG, policy=Policy.CONTINUUM, max_num_seqs=1))
    run.submit("A", *range(9), max_tokens=1, job_id="j")
    run.engine.apply(PinEstimate("j", 4))
    run.schedule()
    run.commit()
    run.submit("B", *range(20, 31))
    run.submit("C", *range(9), job_id="j")
    assert run.why() == {"C": "next", "B": "behind"}
    run.engine.apply(Clock(4))
    assert run.why() == {"B": "next", "C": "behind"}
    run.engine.apply(PinEstimate("j", 4))
    run.engine.apply(Abort(("C",)))
    assert run.why() == {"B": "next"}
    run.submit("D", *range(40, 43))
    run.engine.apply(Abort(("B",)))
    run.schedule()
    run.commit()
    run.config = replace(run.config, max_num_seqs=2)  # as if there were a seat
    run.submit("E", *range(50, 57))
    assert run.why() == {"E": "capacity"}
    run.engine.apply(Clock(8))
    assert run.why() == {"E": "next"}


def test_a_request_with_a_compiled_grammar_is_next() -> None:
    run = Run()
    run.submit("A", 1, structured_output=True)
    run.engine.apply(GrammarReady("A"))
    assert run.why() == {"A": "next"}


def test_blocks_are_short_for_the_prompt_or_for_its_first_chunk() -> None:
    run = Run(replace(CONFIG, max_num_batched_tokens=4))
    run.submit("A", *range(11))
    for _ in range(3):
        run.schedule()
        run.commit()
    run.submit("B", *range(20, 27))
    assert run.why() == {"B": "gate"}
    assert Run(replace(CONFIG, num_blocks=8)).why() == {}
    tight = Run(replace(CONFIG, num_blocks=8, max_num_batched_tokens=4))
    tight.submit("A", *range(11))
    for _ in range(3):
        tight.schedule()
        tight.commit()
    tight.submit("B", *range(20, 27))
    assert tight.why() == {"B": "capacity"}


def test_blocks_of_a_hit_that_others_hold_need_no_free_blocks() -> None:
    run = Run(replace(CONFIG, num_blocks=8))
    run.submit("A", *range(11))
    run.schedule()
    run.commit()
    run.submit("B", *range(11), 50)
    assert run.why() == {"B": "next"}
    run.requests["B"] = replace(run.requests["B"], adapter="x")
    assert run.why() == {"B": "capacity"}


def test_a_request_waits_for_a_lora_slot() -> None:
    run = Run(replace(CONFIG, max_loras=1, max_num_seqs=4))
    run.submit("A", 1, adapter="x")
    run.schedule()
    run.submit("B", 1, adapter="y")
    run.submit("C", 1, adapter="x")
    assert run.why() == {"B": "adapter", "C": "next"}


def test_an_idle_session_waits_for_input() -> None:
    run = Run()
    run.submit("A", 1, 2, 3, max_tokens=1, resumable=True)
    run.schedule()
    run.commit()
    assert run.why() == {"A": "input"}
    run.engine.apply(StreamingUpdate(Request("A", (4, 5), resumable=True)))
    run.requests["A"] = replace(run.requests["A"], prompt_token_ids=(1, 2, 3, 4, 5))
    assert run.why() == {"A": "next"}


def test_a_request_preempted_in_flight_waits_for_its_tokens() -> None:
    run = Run(replace(CONFIG, **AHEAD))  # type: ignore[arg-type]
    run.submit("A", 1, 2, 3)
    run.schedule()
    run.engine.apply(Reset(reset_running_requests=True))
    assert run.why() == {"A": "in_flight"}
    run.commit()
    assert run.why() == {"A": "next"}


def test_each_reason_has_its_count() -> None:
    counts = count_waiting({"A": WaitingReason.NEXT, "B": WaitingReason.BEHIND})
    assert set(counts) == set(WaitingReason)
    assert sum(counts.values()) == 2


STORE: Any = {
    "kv_connector": True,
    "kv_load_failure_policy": KVLoadFailurePolicy.RECOMPUTE,
}


def test_a_request_waits_for_its_offer_and_its_load() -> None:
    run = Run(replace(CONFIG, **STORE))
    run.submit("A", *range(7))
    run.engine.apply(KVOffer("A", None))
    assert run.why() == {"A": "store"}
    run.submit("B", 1)
    assert run.why() == {"A": "store", "B": "next"}
    run.requests["A"] = replace(run.requests["A"], skip_reading_prefix_cache=True)
    assert run.why() == {"A": "next", "B": "behind"}  # A skips the prefix cache and the store
    del run.requests["A"]
    run.submit("A", *range(7))
    run.engine.apply(KVOffer("A", 6, is_async=True))
    assert run.why() == {"A": "next", "B": "behind"}
    run.schedule()
    assert run.why() == {"A": "remote_kv"}
    run.engine.apply(TransfersReported(KVTransfers(finished_recving=("A",))))
    assert run.why() == {"A": "next"}


def test_a_request_after_a_failed_load_waits_for_a_new_offer() -> None:
    run = Run(replace(CONFIG, num_blocks=7, **STORE))
    run.submit("A", *range(9))
    run.engine.apply(KVOffer("A", 8, is_async=True))
    (load,) = run.schedule().kv_loads
    report = KVTransfers(finished_recving=("A",), invalid_block_ids=load.block_ids[0])
    run.engine.apply(TransfersReported(report))
    assert len(run.engine.snapshot().free_queue) == 2
    assert run.why() == {"A": "next"}
    run.engine.apply(KVOffer("A", None))
    assert run.why() == {"A": "store"}


@pytest.mark.parametrize(
    ("num_tokens", "is_async", "reason"),
    [
        (0, False, "next"),
        (8, True, "capacity"),
        (6, True, "next"),
        (6, False, "capacity"),
        (4, False, "next"),
    ],
)
def test_loaded_tokens_need_blocks_like_computed_ones(
    num_tokens: int, is_async: bool, reason: str
) -> None:
    tight = {"num_blocks": 7, "scheduler_reserve_full_isl": False, "max_num_batched_tokens": 2}
    run = Run(replace(CONFIG, **{**tight, **STORE}))
    run.submit("A", *range(6), max_tokens=5)
    for _ in range(3):
        run.schedule()
        run.commit()
    run.submit("B", *range(20, 29))
    run.engine.apply(KVOffer("B", num_tokens, is_async))
    assert run.why() == {"B": reason}


def test_the_watermark_applies_only_while_a_request_runs() -> None:
    run = Run(replace(CONFIG, num_blocks=7, watermark_blocks=3))
    run.submit("A", 1, 2, 3, 4)
    assert run.why() == {"A": "next"}, "A takes two of six blocks, and no request runs"
    run.schedule()
    run.submit("B", 5, 6, 7, 8)
    assert run.why() == {"B": "capacity"}
    run.engine.apply(Abort(("A",)))
    run.requests.pop("A")
    assert run.why() == {"B": "next"}


@pytest.mark.parametrize(("num_free", "reason"), [(0, "capacity"), (1, "next")])
def test_a_branch_needs_a_block_for_copy_on_write(num_free: int, reason: str) -> None:
    run = Run(replace(CONFIG, num_blocks=3 + num_free, enable_forks=True))
    run.submit("A", 1, 2, 3, max_tokens=2)
    run.schedule()
    run.commit()
    assert run.engine.apply(Fork("A", "B", (0,))) == Ack()
    run.requests["B"] = replace(run.requests["A"], request_id="B")
    assert run.why() == {"B": reason}


WINDOWS = (
    KVGroup(GroupKind.FULL, 2),
    KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=4),
)
SHARED = {"max_num_batched_tokens": 8, "long_prefill_token_threshold": 2}
"""Limits by which running requests leave enough budget for a chunk of another request."""
WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": WINDOWS, "num_blocks": 19},
    "states": {
        "groups": (
            KVGroup(GroupKind.FULL, 2),
            KVGroup(GroupKind.RECURRENT, 2, mamba_cache_mode=MambaCacheMode.ALIGN),
        ),
        "num_blocks": 15,
    },
    "store": STORE,
    "pins": {},
    "watermark": {"watermark_blocks": 2, **SHARED},
    "forks": {"enable_forks": True, "watermark_blocks": 1, **SHARED},
    "forks of windows": {"enable_forks": True, "groups": WINDOWS, "num_blocks": 19, **SHARED},
}


class Storm:
    """Random requests, sessions and offers of a store."""

    def __init__(self, draw: random.Random, world: str) -> None:
        blocks = WORLDS[world].get("num_blocks", 9)
        config = replace(
            CONFIG,
            **{
                **WORLDS[world],
                "num_blocks": draw.randint(blocks, blocks + 2),
                "max_num_seqs": 3,
                "max_num_batched_tokens": draw.choice((3, 8)),
                "policy": draw.choice((Policy.FCFS, Policy.PRIORITY)),
                "enable_prefix_caching": world in ("states", "pins") or draw.random() < 0.5,
                "scheduler_reserve_full_isl": draw.random() < 0.7,
                "long_prefill_token_threshold": draw.choice((0, 2)),
                **(AHEAD if draw.random() < 0.5 else {}),
                **({"policy": Policy.CONTINUUM} if world == "pins" else {}),
                **{name: it for name, it in WORLDS[world].items() if name in SHARED},
            },
        )
        self.draw, self.run = draw, Run(config)
        self.meter = Meter(config)
        self.seen = Counter[str]()

    def apply(self, event: Event) -> Observation:
        """Apply an event and show it to a meter, which keeps the request of each session."""
        engine = self.run.engine
        before = engine.snapshot()
        answer = engine.apply(event)
        self.meter.observe(before, event, answer, engine.snapshot(), 0.0)
        self.run.requests = {n: life.request for n, life in self.meter._lives.items()}
        return answer

    def act(self, number: int) -> None:
        """Apply random events of clients and the store, as they occur between two steps."""
        draw, live = self.draw, sorted(self.run.requests)
        prompt = tuple(draw.choice((1, 2)) for _ in range(draw.randint(1, 9)))
        is_session = draw.random() < 0.3
        if draw.random() < 0.4:
            name, priority = f"r{number}", draw.randint(0, 2)
            job_id = draw.choice((None, "j", "k")) if self.run.config.has_pins else None
            self.apply(
                Submit(
                    Request(
                        name,
                        prompt,
                        3,
                        priority=priority,
                        arrival_time=number,
                        resumable=is_session,
                        job_id=job_id,
                    )
                )
            )
            live.append(name)
            if job_id is not None:
                self.apply(PinEstimate(job_id, draw.choice((0, 4, 40))))
                self.apply(Clock(number))
        if live and draw.random() < 0.3:
            name = draw.choice(live)
            self.apply(StreamingUpdate(Request(name, prompt[:3], 2, resumable=draw.random() < 0.7)))
        if live and draw.random() < 0.1:
            self.apply(Abort((draw.choice(live),)))
        running = self.run.engine.snapshot().running
        if running and self.run.config.enable_forks and draw.random() < 0.4:
            self.fork(draw.choice(running), f"b{number}")
        if live and self.run.config.kv_connector:
            count = draw.choice((None, 0, 2, 5, 9))
            self.apply(KVOffer(draw.choice(live), count, draw.random() < 0.6))
            if draw.random() < 0.5:
                invalid = tuple(block for block in range(1, 9) if draw.random() < 0.2)
                come = tuple(name for name in live if draw.random() < 0.5)
                self.apply(TransfersReported(KVTransfers(come, (), invalid)))

    def step(self) -> None:
        """Plan or commit a step; before a plan, compute which requests it may schedule."""
        run, draw = self.run, self.draw
        if len(run.plans) == run.config.max_frames_in_flight or draw.random() < 0.3:
            if run.plans:
                self.commit()
            return
        why, before = run.why(), run.engine.snapshot()
        self.check_requests()
        plan = self.apply(Schedule())
        assert isinstance(plan, Plan)
        if plan.rows:
            run.plans.append(plan)
        given = {load.request_id for load in plan.kv_loads}
        given |= {row.request_id for row in plan.rows} & why.keys()
        after = run.engine.snapshot()
        held = {r.request_id: len(r.block_tables[0]) for r in before.requests}
        has_given = any(len(r.block_tables[0]) < held[r.request_id] for r in after.requests)
        config, is_idle = run.config, not before.running
        # A running request may publish blocks and free skipped ones in the same step.
        may_make_room = not is_idle and (config.enable_prefix_caching or config.groups)
        has_room = bool(may_make_room) or has_given
        self.check(why, given, is_idle, has_room)

    def commit(self) -> None:
        """Commit the oldest plan."""
        run, token = self.run, self.draw.choice((1, 2))
        oldest = run.plans.pop(0)
        drafts = run.engine.frames[oldest.frame_id].build_rows()
        rows = [RowTokens(n, () if d is None else (token,)) for n, d in drafts.items()]
        self.apply(Commit(oldest.frame_id, tuple(rows)))

    def fork(self, parent: str, child: str) -> None:
        """Fork a request after committing all plans, since none may name the parent."""
        while self.run.plans:
            self.commit()
        outputs = self.draw.choice(((), (1,), (2,)))
        self.seen["forked"] += self.apply(Fork(parent, child, outputs)) == Ack()

    def check(
        self, why: dict[RequestId, str], given: set[RequestId], is_idle: bool, has_room: bool
    ) -> None:
        """Check that a plan admits only requests that were next or behind.

        Others may be admitted if blocks were freed in the same step.
        """
        self.seen.update(why.values())
        may_go = {"next", "behind"} | ({"capacity", "gate"} if has_room else set())
        assert {why[name] for name in given} <= may_go
        first = next((name for name, reason in why.items() if reason == "next"), None)
        if is_idle and first is not None:
            assert first in given

    def check_requests(self) -> None:
        """Check that the meter knows the current request of each session."""
        table = self.run.engine.requests
        for name, request in self.run.requests.items():
            assert request == table.requests[table.slot_of[name]]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 12))]
)
@pytest.mark.parametrize("world", WORLDS)
def test_a_waiting_request_is_admitted_if_and_only_if_it_is_next(world: str, seed: int) -> None:
    """Both policies, plans in flight, several groups, sessions and a store are drawn."""
    storm = Storm(random.Random(f"{world} {seed}"), world)
    for number in range(200):
        storm.act(number)
        storm.step()
    assert storm.seen["next"] > 5
    assert storm.seen["behind"]
    assert storm.seen["gate"] + storm.seen["capacity"] + storm.seen["seats"]
    assert (storm.seen["remote_kv"] > 5) == (storm.seen["store"] > 5) == (world == "store")
    assert (storm.seen["forked"] > 5) == ("forks" in world)
