"""Estimators of pin times: their estimates follow from tool times, by figures worked by hand."""

from __future__ import annotations

import pytest

from blockstep.impl.host import HostEngine
from blockstep.impl.serving import estimator
from blockstep.impl.serving.estimator import (
    Estimator,
    FixedRule,
    ToolTimes,
    TurnEnd,
    find_best_time,
)
from blockstep.spec.vocabulary import (
    Ack,
    Clock,
    Commit,
    Config,
    PinEstimate,
    Plan,
    Policy,
    Request,
    RowTokens,
    Schedule,
    Submit,
)


def take(rule: Estimator, job: str, tool: str | None, begin: int, ticks: int) -> int:
    """Run a tool for `ticks`. Return the estimate given when the turn before it ended."""
    given = rule.end(TurnEnd(job, tool, num_tokens=400, num_blocks=25), begin)
    rule.arrive(job, begin + ticks)
    assert given.job_id == job
    return given.ttl


# The rule of the seed.


def test_a_job_is_pinned_while_its_mean_tool_time_is_below_the_threshold() -> None:
    rule = FixedRule(threshold=2_000)
    assert rule.arrive("j", 0) == PinEstimate("j", 2_000)
    assert take(rule, "j", "t", begin=100, ticks=1_000) == 2_000
    assert take(rule, "j", "t", begin=2_000, ticks=3_001) == 2_000
    assert take(rule, "j", "t", begin=6_000, ticks=1_998) == 0  # a mean of 2000.5 before it
    assert take(rule, "j", "t", begin=9_000, ticks=1) == 2_000  # 1999.7
    assert take(rule, "k", "t", begin=9_000, ticks=9_000) == 2_000
    assert take(rule, "k", "t", begin=20_000, ticks=1) == 0


def test_a_job_is_pinned_if_its_mean_is_at_the_threshold() -> None:
    rule = FixedRule(threshold=2_000, ttl=10_000)
    take(rule, "j", None, begin=0, ticks=2_000)
    assert take(rule, "j", None, begin=5_000, ticks=2_001) == 10_000
    assert take(rule, "j", None, begin=9_000, ticks=1) == 0


def test_a_turn_that_arrives_early_is_not_a_tool_time() -> None:
    rule = FixedRule(threshold=2)
    rule.arrive("j", 0)
    rule.arrive("j", 50)
    assert rule.end(TurnEnd("j"), 60) == PinEstimate("j", 2)
    rule.forget("j")
    rule.arrive("j", 99)
    assert rule.end(TurnEnd("j"), 100) == PinEstimate("j", 2)


def test_the_oldest_job_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "MAX_JOBS", 2)
    rule = FixedRule(threshold=10)
    for job in "jkl":
        take(rule, job, None, begin=0, ticks=99)
    assert [take(rule, job, None, begin=200, ticks=0) for job in "lkj"] == [0, 0, 10]


# A time that pays.


@pytest.mark.parametrize(
    ("gain", "cost", "best", "why"),
    [
        (400, 0.5, 1_001, "400 - 400/2 is more than 300 - 225/2, and so on down"),
        (300, 0.5, 301, "225 - 225/2 is more than 300 - 400/2"),
        (90, 0.5, 0, "67.5 - 112.5, 45 - 87.5, 22.5 - 50: nothing is worth its cost"),
        (101, 0.25, 301, "75.75 - 56.25"),
        (400, 0.0, 1_001, "what costs nothing waits for all"),
        (0, 0.1, 0, "what gains nothing does not wait"),
    ],
)
def test_the_best_time_has_the_largest_gain_minus_cost(
    gain: float, cost: float, best: int, why: str
) -> None:
    """E[min(T, t)] of 100, 200, 300 and 1000 ticks is 100, 175, 225, 400 at these times."""
    assert find_best_time([1_000, 200, 100, 300], gain, cost) == best, why


def test_the_best_time_without_samples_is_0() -> None:
    assert find_best_time([], 9.0, 0.1) == 0


def test_a_tool_has_its_own_times_and_an_unknown_tool_those_of_all() -> None:
    """A turn keeps a tenth of the pool, which costs a tenth of a tick per tick.

    A hit of its 400 tokens gains 200 ticks, half a tick for each.
    """
    rule = ToolTimes(250, ticks_per_token=0.5, unknown=77, longest=5_000, num_enough=2)
    assert rule.arrive("j", 0) == PinEstimate("j", 77)
    given = [
        take(rule, "j", "slow", begin=0, ticks=4_000),
        take(rule, "j", "fast", begin=5_000, ticks=100),
        take(rule, "j", "slow", begin=6_000, ticks=3_000),
        take(rule, "j", "fast", begin=10_000, ticks=120),
        take(rule, "j", "slow", begin=11_000, ticks=1),
        take(rule, "j", "fast", begin=12_000, ticks=1),
        take(rule, "j", None, begin=13_000, ticks=1),
    ]
    assert given == [
        77,  # nothing is known
        77,  # of one time
        101,  # of all, 100 and 4000: 100 - 10, or 200 - 205
        101,  # of all, 100, 3000 and 4000: 66.7 - 10, or 133.3 - 203.3
        0,  # of its own, 3000 and 4000: 100 - 300, or 200 - 350
        121,  # of its own, 100 and 120: 100 - 10, or 200 - 11
        121,  # of all, 1, 1, 100, 120, 3000 and 4000: 133.3 - 7.7, or 166.7 - 103.7
    ]


def test_only_tokens_that_next_turns_hit_count_as_gain() -> None:
    """Hits of 100 and 60 of 400 tokens gain 40 ticks instead of 200; 100 ticks cost 10."""
    rule = ToolTimes(250, ticks_per_token=0.5, num_enough=2)
    turn = TurnEnd("j", "t", num_tokens=400, num_blocks=25)
    given = []
    for now, ticks, num_found in ((0, 100, 100), (5_000, 600, 60), (6_000, 1, None)):
        given.append(rule.end(turn, now).ttl)
        rule.arrive("j", now + ticks, num_found)
    assert given == [2_000, 2_000, 101]  # 20 - 10, or 40 - 35
    assert rule.end(turn, 9_000).ttl == 101  # 13.3 - 0.1, 26.7 - 6.7, or 40 - 23.4


@pytest.mark.parametrize(
    ("num_found", "ttl"), [(400, 900), (200, 900), (100, 500), (1, 5), (0, 1), (None, 77)]
)
def test_the_estimate_of_a_waiting_turn_is_the_value_of_its_hit(
    num_found: int | None, ttl: int
) -> None:
    """Ten ticks of a tenth of the pool cost one tick; computing a token takes half a tick."""
    rule = ToolTimes(250, ticks_per_token=0.5, unknown=77, longest=900)
    rule.end(TurnEnd("j", "t", num_tokens=400, num_blocks=25), 0)
    assert rule.arrive("j", 10, num_found) == PinEstimate("j", ttl)


def test_no_estimate_exceeds_the_limit() -> None:
    rule = ToolTimes(10**6, ticks_per_token=9.0, longest=50, num_enough=1)
    take(rule, "j", "t", begin=0, ticks=1_000)
    assert take(rule, "j", "t", begin=2_000, ticks=1_000) == 50


def test_old_times_and_tools_beyond_the_limit_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "MAX_TOOLS", 1)
    rule = ToolTimes(250, ticks_per_token=0.5, num_enough=1)
    for _ in range(estimator.MAX_TIMES):
        take(rule, "j", "old", begin=0, ticks=9_000)
    assert take(rule, "j", "old", begin=0, ticks=10) == 0
    for _ in range(estimator.MAX_TIMES - 1):
        take(rule, "j", "old", begin=0, ticks=10)
    assert take(rule, "j", "old", begin=0, ticks=10) == 11
    take(rule, "j", "new", begin=0, ticks=8_000)
    assert take(rule, "j", "new", begin=0, ticks=1) == 11  # of all together


def test_a_new_estimate_keeps_the_pin_of_a_waiting_turn() -> None:
    """The first pin would end at 50; the estimate for the waiting turn extends it."""
    rule = ToolTimes(8, ticks_per_token=50.0, unknown=40, longest=900)
    # Four tokens are worth 200 ticks, and a fourth of the pool for 800 costs as much.
    engine = HostEngine(Config(num_blocks=9, block_size=2, policy=Policy.CONTINUUM, max_num_seqs=1))

    def turn(name: str, now: int) -> None:
        engine.apply(Clock(now))
        request = Request(name, tuple(range(5)), max_tokens=1, job_id="j")
        assert engine.apply(Submit(request)) == Ack()
        engine.apply(rule.arrive("j", now, 4))

    def step() -> None:
        plan = engine.apply(Schedule())
        assert isinstance(plan, Plan)
        engine.apply(
            Commit(plan.frame_id, tuple(RowTokens(n, (7,)) for n in engine.frames[0].build_rows()))
        )

    turn("a", now=10)
    step()
    engine.apply(rule.end(TurnEnd("j", "t", num_tokens=4, num_blocks=2), 10))
    pins = engine.snapshot().pins
    assert pins is not None
    assert [pin.end for pin in pins.pins] == [50]
    turn("b", now=49)
    engine.apply(Clock(300))
    plan = engine.apply(Schedule())
    assert isinstance(plan, Plan)
    assert plan.new[0].num_computed_tokens == 4
    pins = engine.snapshot().pins
    assert pins is not None
    assert [pin.end for pin in pins.pins] == [849]
