"""Replay: a workload runs on one engine, or in lock-step with the specification."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import cast

import pytest
from published_traces import find_trace
from rich.console import Console

from blockstep.conformance.draw.workloads import OUTPUT_TOKENS_START, Follows, WorkloadFormat, load
from blockstep.conformance.engine import (
    Capability,
    EngineFactory,
    EngineFault,
    EngineTraits,
    Safety,
)
from blockstep.conformance.lockstep.canary import SafetyCanary
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.recorded.arrival_rate import REPLAY_PRESETS, Arrivals, Pace
from blockstep.conformance.recorded.replay import DIFFERENCES_MAX, replay
from blockstep.conformance.recorded.replay_counts import ReplayReport
from blockstep.conformance.recorded.traces import read_trace, write_trace
from blockstep.conformance.report.replay import render_replay, replay_to_json
from blockstep.impl.host import HostEngine
from blockstep.spec import Oracle
from blockstep.spec import vocabulary as v

CONFIG = v.Config(
    num_blocks=30, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64
)


class Spec:
    """The specification as an engine, that may change its answers on the way out."""

    def __init__(
        self,
        config: v.Config,
        change: Callable[[v.Event, v.Observation], v.Observation] | None = None,
    ) -> None:
        self.oracle = Oracle(config)
        self.change = change
        self.events: list[v.Event] = []

    def apply(self, event: v.Event) -> v.Observation:
        self.events.append(event)
        seen = self.oracle.apply(event)
        return seen if self.change is None else self.change(event, seen)

    def snapshot(self) -> v.Snapshot | None:
        return self.oracle.snapshot()

    def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.SNAPSHOT})


def changing(change: Callable[[v.Event, v.Observation], v.Observation]) -> EngineFactory:
    return lambda config: Spec(config, change)


def requests(number: int = 6, prompt: int = 10, output: int = 7, gap: int = 0) -> list[v.Request]:
    """Requests in pairs of equal prompts."""
    return [
        v.Request(
            f"r{k}",
            tuple(range(k // 2 * 100, k // 2 * 100 + prompt)),
            max_tokens=output,
            arrival_time=k * gap,
        )
        for k in range(number)
    ]


def test_every_request_finishes_and_counts_are_right() -> None:
    ticking = count(100).__next__
    report = replay(requests(), CONFIG, Spec, clock=lambda: float(ticking()))
    assert report.finding is None
    assert (report.requests_submitted, report.requests_finished) == (6, 6)
    assert report.tokens_prompt == 60
    assert report.tokens_output == 42
    # Each second request of a pair hits the two full blocks that lie before its last token.
    assert report.tokens_prefix_hit == 3 * 8
    assert report.prefix_hit_rate == 24 / 60
    assert (report.blocks_prefix_hit, report.blocks_prompt) == (6, 18)
    assert report.block_hit_rate == 6 / 18
    # The last output is never computed.
    assert report.tokens_scheduled == 60 - 24 + 6 * (7 - 1)
    assert report.events == report.requests_submitted + 2 * report.steps
    assert report.requests_running_peak == 4
    assert 0 < report.pool_blocks_mean < report.pool_blocks_peak <= report.pool_blocks_usable == 29
    assert report.equivalence == "none"
    assert report.snapshots_taken == 0
    assert report.seconds == 1.0
    assert report.events_per_second == report.events


def test_the_blocks_in_use_equal_the_engine_s_ref_counts() -> None:
    """The count from plans alone equals that of ref counts, also under preemption."""
    held: list[int] = []

    class Looking(Spec):
        def apply(self, event: v.Event) -> v.Observation:
            seen = super().apply(event)
            if isinstance(event, v.Schedule):
                held.append(sum(refs > 0 for refs in self.oracle.snapshot().ref_counts))
            return seen

    report = replay(requests(8, output=30), replace(CONFIG, num_blocks=14), Looking)
    assert report.finding is None
    assert report.preemptions > 0
    assert report.tokens_resumed_hit > 0
    assert report.pool_blocks_peak == max(held)
    assert report.pool_blocks_mean == pytest.approx(sum(held) / len(held))


def test_counters_equal_those_of_the_specification() -> None:
    engines: list[Spec] = []

    def make(config: v.Config) -> Spec:
        engines.append(Spec(config))
        return engines[-1]

    report = replay(requests(8, output=30), replace(CONFIG, num_blocks=14), make)
    snapshot = engines[0].snapshot()
    assert snapshot is not None
    stats = snapshot.stats
    assert stats.preemptions == report.preemptions
    assert stats.prefix_cache_hits == report.tokens_prefix_hit + report.tokens_resumed_hit


@pytest.mark.parametrize("pace", [Pace(concurrency=3), Pace(Arrivals.OPEN, ticks_per_step=5)])
@pytest.mark.parametrize("num_blocks", [12, 30])
@pytest.mark.parametrize("threshold", [0, 5])
def test_spec_and_host_engine_agree(pace: Pace, num_blocks: int, threshold: int) -> None:
    config = replace(CONFIG, num_blocks=num_blocks, long_prefill_token_threshold=threshold)
    report = replay(requests(9, gap=7), config, HostEngine, with_spec=True, pace=pace)
    assert report.finding is None, report.finding
    assert report.requests_finished == 9
    assert report.equivalence == "exact"
    assert report.snapshots_taken == report.events


def test_snapshots_are_compared_at_the_given_cadence() -> None:
    def run(every: int) -> ReplayReport:
        return replay(requests(), CONFIG, Spec, with_spec=True, snapshot_every=every)

    assert run(7).snapshots_taken == -(-run(7).events // 7), "the last state is always compared"
    assert (run(7).equivalence, run(0).equivalence) == ("exact", "observations")
    assert run(0).snapshots_taken == 0
    with pytest.raises(ValueError, match="snapshot_every"):
        run(-1)


def test_closed_arrivals_keep_a_fixed_number_of_requests_unfinished() -> None:
    spelled_out = submitted = 0

    def source() -> Iterator[v.Request]:
        nonlocal spelled_out
        for request in requests(20):
            spelled_out += 1
            yield request

    class Looking(Spec):
        def apply(self, event: v.Event) -> v.Observation:
            nonlocal submitted
            seen = super().apply(event)
            assert len(self.oracle.snapshot().requests) <= 2
            submitted += isinstance(event, v.Submit)
            assert spelled_out <= submitted + 1, "prompts are not spelled out before their time"
            return seen

    report = replay(source(), CONFIG, Looking, pace=Pace(concurrency=2))
    assert report.finding is None
    assert report.requests_finished == 20
    assert report.requests_running_peak == 2


def test_open_arrivals_follow_the_clock_of_steps_and_skip_idle_time() -> None:
    engines: list[Spec] = []

    def make(config: v.Config) -> Spec:
        engines.append(Spec(config))
        return engines[-1]

    submissions = [replace(r, arrival_time=t) for r, t in zip(requests(3), (0, 25, 10**9))]  # noqa: B905
    report = replay(submissions, CONFIG, make, pace=Pace(Arrivals.OPEN, ticks_per_step=10))
    assert report.requests_finished == 3
    names = [type(event).__name__ for event in engines[0].events]
    first, second, third = (k for k, name in enumerate(names) if name == "Submit")
    assert names[first:second].count("Schedule") == 3, "ticks 0, 10 and 20"
    assert names[third - 1] == "Commit", "no step is spent on waiting"
    assert report.steps < 30


def test_refusals_are_counted_by_code() -> None:
    bad = [
        v.Request("empty", ()),
        v.Request("long", tuple(range(64))),
        v.Request("huge", tuple(range(60)), max_tokens=4),
        *requests(2),
        v.Request("more", (1,), max_tokens=0),
    ]
    report = replay(bad, replace(CONFIG, num_blocks=12), Spec)
    assert report.requests_refused == {
        v.RejectCode.BAD_REQUEST.value: 2,
        v.RejectCode.PROMPT_TOO_LONG.value: 1,
        v.RejectCode.NEVER_FITS.value: 1,
    }
    assert report.requests_finished == 2
    assert report.finding is None


def test_a_request_with_a_grammar_finishes() -> None:
    report = replay([replace(requests(1)[0], structured_output=True)], CONFIG, Spec)
    assert report.requests_finished == 1


def test_all_output_tokens_differ() -> None:
    engine = Spec(CONFIG)
    replay(requests(), CONFIG, lambda config: engine)
    commits = [event for event in engine.events if isinstance(event, v.Commit)]
    tokens = [token for c in commits for row in c.sampled for token in row.token_ids]
    assert len(set(tokens)) == len(tokens) == 42
    assert min(tokens) >= OUTPUT_TOKENS_START


def test_a_replay_without_requests_has_an_empty_report() -> None:
    report = replay([], CONFIG, Spec)
    assert report.events == report.steps == 0
    assert report.prefix_hit_rate == report.block_hit_rate == 0.0


# --- broken engines


def at_step(frame_id: int, change: Callable[[v.Plan], v.Plan]) -> EngineFactory:
    def changed(event: v.Event, seen: v.Observation) -> v.Observation:
        return change(seen) if isinstance(seen, v.Plan) and seen.frame_id == frame_id else seen

    return changing(changed)


def outputs(change: Callable[[v.Outputs], v.Outputs]) -> EngineFactory:
    return changing(lambda event, seen: change(seen) if isinstance(seen, v.Outputs) else seen)


def without_rows(event: v.Event, seen: v.Observation) -> v.Observation:
    return v.Plan(seen.frame_id) if isinstance(seen, v.Plan) else seen


BROKEN: list[tuple[str, EngineFactory, FindingKind, str]] = [
    ("a row more than it sampled",
     at_step(2, lambda p: replace(p, cached=(replace(p.cached[0], num_scheduled_tokens=2),))),
     FindingKind.PROPERTY, "P12"),
    ("an unknown request",
     at_step(2, lambda p: replace(p, cached=(replace(p.cached[0], request_id="zz"),))),
     FindingKind.PROPERTY, "P26"),
    ("an unknown victim", at_step(2, lambda p: replace(p, preempted_req_ids=("zz",))),
     FindingKind.PROPERTY, "P26"),
    ("a lost token", outputs(lambda o: v.Outputs(o.rows[1:])), FindingKind.PROPERTY, "P13"),
    ("a wrong token",
     outputs(lambda o: v.Outputs(tuple(replace(r, new_token_ids=(5,)) for r in o.rows))),
     FindingKind.PROPERTY, "P13"),
    ("an early end",
     outputs(lambda o: v.Outputs(tuple(replace(r,
     finish_reason=v.FinishReason.LENGTH) for r in o.rows))), FindingKind.PROPERTY, "P13"),
    ("no end", outputs(lambda o: v.Outputs(tuple(replace(r, finish_reason=None) for r in o.rows))),
     FindingKind.PROPERTY, "P13"),
    ("no plan", changing(lambda e, seen: v.Ack() if isinstance(seen, v.Plan) else seen),
     FindingKind.PROPERTY, "P26"),
    ("no outputs", changing(lambda e, seen: v.Ack() if isinstance(seen, v.Outputs) else seen),
     FindingKind.PROPERTY, "P13"),
    ("no answer to a submit",
     changing(lambda e, seen: v.Outputs() if isinstance(seen, v.Ack) else seen),
         FindingKind.PROPERTY,
     "P11"),
    ("nothing ever scheduled", changing(without_rows), FindingKind.LIVENESS, "P10"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("factory", "kind", "property_id"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_a_broken_engine_is_found_without_the_specification(
    factory: EngineFactory, kind: FindingKind, property_id: str
) -> None:
    report = replay(requests(1), CONFIG, factory)
    assert report.finding is not None
    assert (report.finding.kind, report.finding.property_id) == (kind, property_id)
    assert report.requests_finished == 0
    assert report.finding_event is not None


@pytest.mark.parametrize("factory", [b[1] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_broken_engine_diverges_in_lock_step(factory: EngineFactory) -> None:
    report = replay(requests(1), CONFIG, factory, with_spec=True)
    assert report.finding is not None
    assert report.finding.kind is FindingKind.DIVERGENCE
    assert report.finding.differences


def test_a_state_that_differs_is_a_divergence() -> None:
    report = replay(
        requests(2),
        CONFIG,
        lambda config: Spec(replace(config, num_blocks=100)),
        with_spec=True,
        snapshot_every=1,
    )
    assert report.finding is not None
    assert report.finding.kind is FindingKind.DIVERGENCE
    assert report.finding.sentence == "engine_equals_spec"
    assert {difference.field for difference in report.finding.differences} >= {"free_queue"}
    assert isinstance(report.finding_event, v.Submit)
    assert len(report.finding.differences) <= DIFFERENCES_MAX


def test_the_last_states_are_compared_at_any_cadence() -> None:
    class WrongAtTheEnd(Spec):
        def snapshot(self) -> v.Snapshot | None:
            seen = self.oracle.snapshot()
            return seen if seen.requests else replace(seen, free_queue=seen.free_queue[::-1])

    run, never = (
        replay(requests(2), CONFIG, WrongAtTheEnd, with_spec=True, snapshot_every=every)
        for every in (3, 0)
    )
    assert run.finding is not None
    assert [difference.field for difference in run.finding.differences] == ["free_queue"]
    assert isinstance(run.finding_event, v.Commit)
    assert run.requests_finished == 2
    assert never.finding is None


def test_an_exception_of_either_side_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> EngineFactory:
        def raise_it(event: v.Event, seen: v.Observation) -> v.Observation:
            raise error

        return changing(raise_it)

    for error in (EngineFault("broken"), KeyError("k")):
        for with_spec in (False, True):
            report = replay(requests(1), CONFIG, raising(error), with_spec=with_spec)
            assert report.finding is not None
            assert report.finding.kind is FindingKind.FAULT
            assert type(error).__name__ in report.finding.message

    def assert_nothing(spec: SpecEngine, event: v.Event) -> v.Observation:
        raise AssertionError("P1")

    monkeypatch.setattr(SpecEngine, "apply", assert_nothing)
    report = replay(requests(1), CONFIG, Spec, with_spec=True)
    assert report.finding is not None
    assert report.finding.kind is FindingKind.SPEC


def test_an_ill_typed_answer_of_an_engine_alone_is_a_fault() -> None:
    def no_rows(_event: v.Event, seen: v.Observation) -> v.Observation:
        return (
            replace(seen, new=cast("tuple[v.NewRow, ...]", None))
            if isinstance(seen, v.Plan)
            else seen
        )

    for with_spec in (False, True):
        report = replay(requests(1), CONFIG, changing(no_rows), with_spec=with_spec)
        assert report.finding is not None
        assert report.finding.sentence == "engine_answers_in_the_vocabulary"


def test_the_limit_of_steps_is_reported_as_liveness() -> None:
    report = replay(requests(), CONFIG, Spec, steps_max=4)
    assert report.finding is not None
    assert report.finding.kind is FindingKind.LIVENESS
    assert "4 steps" in report.finding.message
    assert report.steps == 4
    assert report.requests_finished < 6


def test_a_replay_that_delivers_nothing_is_stopped() -> None:
    """An engine that schedules the first chunk of a prompt over and over."""

    class Stuck(Spec):
        first: v.Plan | None = None

        def apply(self, event: v.Event) -> v.Observation:
            if isinstance(event, v.Commit):
                return v.Outputs()
            if isinstance(event, v.Schedule) and self.first is not None:
                return self.first
            seen = super().apply(event)
            if isinstance(seen, v.Plan):
                self.first = seen
            return seen

    report = replay([v.Request("a", tuple(range(40)))], CONFIG, Stuck)
    assert report.finding is not None
    assert report.finding.kind is FindingKind.LIVENESS
    assert "delivered nothing" in report.finding.message


# --- engines that decide by rules of their own, and engines that refuse nothing


class Judged(Spec):
    traits = EngineTraits(equivalence=Safety())


def test_an_engine_that_is_not_compared_is_judged_by_properties() -> None:
    report = replay([v.Request("empty", ()), *requests()], CONFIG, Judged, with_spec=True)
    assert report.finding is None, report.finding
    assert (report.equivalence, report.requests_finished) == ("safety", 6)
    assert report.requests_refused == {v.RejectCode.BAD_REQUEST.value: 1}
    assert report.snapshots_taken == 0
    broken = replay(requests(), CONFIG, SafetyCanary, with_spec=True)
    assert broken.finding is not None
    assert broken.finding.kind is FindingKind.PROPERTY


def test_requests_that_the_spec_refuses_are_not_sent_to_the_engine() -> None:
    engine = Spec(CONFIG)
    bad = [v.Request("empty", ()), *requests(2)]
    report = replay(bad, CONFIG, lambda config: engine, with_spec=True)
    assert report.finding is None
    assert report.requests_refused == {v.RejectCode.BAD_REQUEST.value: 1}
    submitted = [event for event in engine.events if isinstance(event, v.Submit)]
    assert len(submitted) == report.requests_finished == 2


# --- the report


def test_progress_is_reported_every_256_steps() -> None:
    reports: list[tuple[int, int, int]] = []

    def note(now: ReplayReport) -> None:
        reports.append((now.steps, now.requests_submitted, now.requests_finished))

    report = replay(
        requests(60, output=20), CONFIG, Spec, on_progress=note, pace=Pace(concurrency=1)
    )
    assert report.steps > 512
    assert [steps for steps, _, _ in reports] == [256, 512, 768, 1024, 1280][: len(reports)]
    assert all(submitted - finished <= 1 for _, submitted, finished in reports)
    assert reports[-1][2] > reports[0][2]


def test_a_report_is_plain_json_with_stable_keys() -> None:
    report = replay([v.Request("x", ()), *requests(2)], CONFIG, Spec, clock=lambda: 0.0)
    plain = json.loads(json.dumps(replay_to_json(report)))
    assert plain == replay_to_json(report)
    assert (plain["format"], plain["version"]) == ("blockstep-replay", 1)
    assert plain["requests_refused"] == {"bad_request": 1}
    assert plain["config"]["policy"] == "fcfs"
    assert plain["pace"]["arrivals"] == "closed"
    assert plain["finding"] is None
    assert set(plain) == {
        *("format", "version", "equivalence", "snapshot_every", "config", "pace", "finding"),
        *("finding_step", "finding_event", "requests_submitted", "requests_finished"),
        *("requests_refused", "requests_running_peak", "steps", "events", "snapshots_taken"),
        *("rows", "tokens_scheduled", "tokens_prompt", "tokens_prefix_hit", "blocks_prompt"),
        *("blocks_prefix_hit", "tokens_resumed_hit", "tokens_output", "preemptions"),
        *("pool_blocks_usable", "pool_blocks_peak", "pool_blocks_mean", "seconds"),
        *("prefix_hit_rate", "block_hit_rate", "events_per_second", "excused"),
    }
    found = replay_to_json(replay(requests(1), CONFIG, BROKEN[0][1], with_spec=True))
    assert json.loads(json.dumps(found))["finding"]["kind"] == "divergence"


def rendered(report: ReplayReport) -> str:
    console = Console(file=io.StringIO(), width=100)
    render_replay(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_report_is_shown_as_a_table() -> None:
    text = rendered(replay([v.Request("x", ()), *requests()], CONFIG, Spec, clock=lambda: 0.0))
    assert "requests finished" in text
    assert "1 bad_request" in text
    assert "40.0%" in text
    assert "DIVERGENCE" not in text
    assert ", at most 256 at once" in text
    by_time = replay(requests(), CONFIG, Spec, pace=Pace(Arrivals.OPEN))
    assert "at once" not in rendered(by_time)


def test_a_finding_is_shown_in_the_report() -> None:
    text = rendered(replay(requests(1), CONFIG, BROKEN[0][1], with_spec=True))
    assert "DIVERGENCE at step" in text
    assert "num_scheduled_tokens" in text
    assert "expected" in text


def test_a_replay_can_be_recorded_and_read_back(tmp_path: Path) -> None:
    steps: list[tuple[v.Event, v.Observation]] = []

    def record(event: v.Event, seen: v.Observation) -> v.Observation:
        steps.append((event, seen))
        return seen

    report = replay(requests(), CONFIG, changing(record))
    assert write_trace(tmp_path / "t.jsonl.gz", CONFIG, steps) == report.events
    assert read_trace(tmp_path / "t.jsonl.gz").steps == tuple(steps)


def test_presets_are_valid_and_wrong_paces_are_refused() -> None:
    assert set(REPLAY_PRESETS) == set(WorkloadFormat)
    for preset in REPLAY_PRESETS.values():
        assert v.config_problems(preset.config) == ()
    with pytest.raises(ValueError, match="at least 1"):
        Pace(concurrency=0)
    with pytest.raises(ValueError, match="at least 1"):
        Pace(ticks_per_step=0)


# --- the published traces


def hits_by_ids_alone(path: Path, limit: int | None = None) -> tuple[int, int, int, int]:
    """Return ids hit, ids, tokens hit and prompt tokens of Mooncake's trace with an endless cache.

    It is independent of the tested code: a set of the full blocks' ids seen so far. At least
    one token of a prompt is always computed, so floor((length - 1) / 512) blocks can hit.
    """
    seen: set[int] = set()
    ids_hit = ids = tokens = 0
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(lines):
            if number == limit:
                break
            row = json.loads(line)
            length, names = row["input_length"], row["hash_ids"]
            ids += len(names)
            tokens += length
            for name in names[: (length - 1) // 512]:
                if name not in seen:
                    break
                ids_hit += 1
            seen.update(names[: length // 512])
    return ids_hit, ids, ids_hit * 512, tokens


def test_the_hit_rate_of_mooncake_counted_by_ids_is_the_published_one() -> None:
    ids_hit, ids, tokens_hit, tokens = hits_by_ids_alone(
        find_trace("mooncake_conversation.jsonl.gz")
    )
    assert ids_hit / ids == pytest.approx(0.366, abs=0.003)
    assert tokens_hit / tokens == pytest.approx(0.373, abs=0.003)


@pytest.mark.parametrize(
    "pace", [Pace(), Pace(concurrency=7), Pace(Arrivals.OPEN, ticks_per_step=500)]
)
def test_without_eviction_hits_equal_those_counted_by_ids_at_any_pace(pace: Pace) -> None:
    path = find_trace("mooncake_conversation.jsonl.gz")
    config = REPLAY_PRESETS[WorkloadFormat.MOONCAKE].config
    report = replay(load(path, limit=150), config, HostEngine, pace=pace)
    assert report.finding is None
    expected = hits_by_ids_alone(path, limit=150)
    seen = (
        report.blocks_prefix_hit,
        report.blocks_prompt,
        report.tokens_prefix_hit,
        report.tokens_prompt,
    )
    assert seen == expected


@pytest.mark.parametrize(
    ("name", "limit", "block_size", "num_blocks", "snapshot_every"),
    [
        # Pools so small that there is preemption and eviction.
        ("mooncake_conversation.jsonl.gz", 300, 512, 3_000, 8),
        ("mooncake_conversation.jsonl.gz", 40, 16, 5_500, 128),
        pytest.param(
            "mooncake_conversation.jsonl.gz", 300, 16, 40_000, 128, marks=pytest.mark.soak
        ),
        ("azure_2023_code.csv", 40, 16, 2_000, 8),
        ("agent_blocks16.jsonl.gz", 40, 16, 1_500, 8),
    ],
)
def test_spec_and_host_engine_agree_on_published_traces(
    name: str, limit: int, block_size: int, num_blocks: int, snapshot_every: int
) -> None:
    workload = load(find_trace(name), limit=limit)
    preset = REPLAY_PRESETS[workload.format]
    report = replay(
        workload,
        replace(preset.config, num_blocks=num_blocks, block_size=block_size),
        HostEngine,
        with_spec=True,
        pace=preset.pace,
        snapshot_every=snapshot_every,
    )
    assert report.finding is None, report.finding
    assert report.equivalence == "exact"
    assert report.requests_finished == limit


@pytest.mark.soak
def test_the_hit_rate_of_the_whole_mooncake_trace_is_the_published_one() -> None:
    path = find_trace("mooncake_conversation.jsonl.gz")
    preset = REPLAY_PRESETS[WorkloadFormat.MOONCAKE]
    report = replay(load(path), preset.config, HostEngine, pace=preset.pace)
    assert report.finding is None
    assert report.requests_finished == report.requests_submitted == 12_031
    assert report.block_hit_rate == pytest.approx(0.366, abs=0.003)
    assert report.prefix_hit_rate == pytest.approx(0.373, abs=0.003)
    ids_hit, ids, tokens_hit, tokens = hits_by_ids_alone(path)
    assert (report.blocks_prefix_hit, report.blocks_prompt) == (ids_hit, ids)
    assert (report.tokens_prefix_hit, report.tokens_prompt) == (tokens_hit, tokens)


def test_a_request_waits_for_the_requests_that_it_follows() -> None:
    requests = [
        v.Request("A", (1, 2), 3),
        v.Request("B", (3,), 1),
        v.Request("C", (4,), 1, arrival_time=1),
    ]
    follows = {"B": Follows(("A",), 120), "C": Follows(("A", "B"), 0)}
    seen: list[tuple[int, str]] = []

    class Noted(SpecEngine):
        num_steps = 0

        def apply(self, event: v.Event) -> v.Observation:
            self.num_steps += isinstance(event, v.Schedule)
            if isinstance(event, v.Submit):
                seen.append((self.num_steps, event.request.request_id))
            return super().apply(event)

    config = v.Config(num_blocks=9, block_size=2)
    for pace, expected in (
        (Pace(Arrivals.OPEN, ticks_per_step=50), [(0, "A"), (3, "B"), (4, "C")]),
        (Pace(Arrivals.CLOSED), [(0, "A"), (3, "B"), (4, "C")]),
    ):
        seen.clear()
        report = replay(requests, config, Noted, pace=pace, follows=follows)
        assert (report.requests_finished, report.finding) == (3, None)
        assert seen == expected


def test_a_request_that_follows_a_refused_one_is_submitted() -> None:
    requests = [v.Request("A", (1,) * 99, 3), v.Request("B", (3,), 1)]
    config = v.Config(num_blocks=4, block_size=2)
    report = replay(requests, config, SpecEngine, follows={"B": Follows(("A",), 5)})
    assert (report.requests_finished, report.requests_refused) == (1, {"never_fits": 1})
