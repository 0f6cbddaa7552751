"""Benefit of pins and tiers: agents through the host engine, with and without them.

    python -m benchmarks.pins [--trace agent_blocks16.jsonl.gz] [--agents N] [--blocks N ...]
        [--suite NAME ...] [--step-ms MS] [--token-us US] [--block-kib KIB] [--host-blocks N]
        [--file-blocks N] [--json FILE]

`--agents` agents work at once, each on one session of the trace after the other: a turn, a tool,
the next turn. The engine is real, and so is every decision; the time is a model, the same for all
sides: a step takes --step-ms, and for each token in it --token-us.

The trace has the times at which turns came, not at which they ended. Its gaps grow by 5.4 to 6.3 ms
with each token of the turn before, by suite, so a tool has taken the rest of the gap after 6 ms for
each token. It does not distinguish tools either: each suite counts as one tool. The output of a
turn is the part of the next prompt that follows it. Without a trace sessions are made up.

Tiers have no content: which blocks go where, and what is loaded, is `TierOrder`, and each copy
takes what `benchmarks/links.py` measured (the quickest rounds: host memory 5.7 GB/s both ways and
0.2 ms a copy; a file 0.75 GB/s there and 1.3 GB/s back, cold, and 2.3 ms).
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import Final

from benchmarks._pages import get_commit, make_table
from benchmarks._tiers import Tier, Tiers

from blockstep.conformance.draw.workloads import OUTPUT_TOKENS_START, load
from blockstep.impl.host import HostEngine
from blockstep.impl.serving.estimator import Estimator, FixedRule, ToolTimes, TurnEnd
from blockstep.impl.tiers import Link, Prefill, SwapSpeeds
from blockstep.spec.vocabulary import (
    Ack,
    Clock,
    Commit,
    Config,
    KVLoadFailurePolicy,
    Outputs,
    PinEstimate,
    Plan,
    Policy,
    Request,
    RowTokens,
    Schedule,
    Submit,
    TokenIds,
)

BLOCK_SIZE: Final = 16
TRACE_TOKEN_MS: Final = 6.0
SIDES: Final = (
    *("no pins", "fixed, 2 s", "fixed, 10 s", "tool times"),
    *("tiers: host", "tiers: host, file"),
)
HOST: Final = Link(5_700_000_000, 200_000), Link(5_700_000_000)
FILE: Final = Link(750_000_000, 330_000), Link(1_300_000_000, 2_300_000)
"""The ways there and back."""
MADE_UP_SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt: TokenIds
    outputs: TokenIds
    num_found: int | None
    """Leading tokens of the turn before, its outputs included; None for the first."""
    tool_ms: float | None
    """Until the next one comes; None for the last."""


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one agent."""

    name: str
    suite: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one side."""

    num_blocks: int
    side: str
    hit_rate: float
    """Share of prompt tokens found in the pool or in a tier."""
    mean_wait_ms: float
    """Time from the arrival of a turn to its first token."""
    p95_wait_ms: float
    longest_wait_ms: float
    mean_turn_ms: float
    """Time from the arrival of a turn to its last token."""
    whole_s: float
    """Time until all sessions were done."""
    preemptions: int


def read_sessions(path: Path, suites: list[str]) -> list[Session]:
    """Return the sessions of a trace, one of each suite in turn.

    Turns without a prompt, which no engine accepts, are left out; their tools still take time.
    """
    workload = load(path)
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    records = [json.loads(line) for line in text.splitlines()]
    by_session: dict[tuple[str, str], list[tuple[int, Request]]] = {}
    for row in workload.rows:
        suite, name = records[row.row]["suite"], records[row.row]["session"]
        if row.input_length and (not suites or suite in suites):
            turns = by_session.setdefault((suite, name), [])
            turns.append((row.arrival_time, workload.request(row)))
    by_suite: dict[str, list[Session]] = {}
    for (suite, name), turns in by_session.items():
        line = tuple(_list_turns(turns))
        by_suite.setdefault(suite, []).append(Session(f"{suite}/{name}", suite, line))
    mixed = chain.from_iterable(zip_longest(*by_suite.values()))
    return [session for session in mixed if session is not None]


def _list_turns(turns: list[tuple[int, Request]]) -> Iterator[Turn]:
    before: TokenIds = ()
    for number, (arrival, request) in enumerate(turns):
        prompt, size = request.prompt_token_ids, request.max_tokens
        tool_ms: float | None = None
        known: TokenIds = ()
        alike = (pair[0] == pair[1] for pair in zip(before, prompt, strict=False))
        num_found = len([*takewhile(bool, alike)]) if number else None
        if number + 1 < len(turns):
            next_arrival, following = turns[number + 1]
            tool_ms = max(next_arrival - arrival - TRACE_TOKEN_MS * size, 0.0)
            known = following.prompt_token_ids[len(prompt) : len(prompt) + size]
        outputs = (*known, *[OUTPUT_TOKENS_START] * (size - len(known)))
        yield Turn(prompt, outputs, num_found, tool_ms)
        before = (*prompt, *outputs)


def make_sessions(seed: int) -> list[Session]:
    """Return drawn sessions: prompts grow by the output of the turn before and the result of its
    tool."""
    draw = random.Random(seed)  # noqa: S311
    sessions = []
    for number in range(48):
        turns, prompt = list[Turn](), tuple(draw.choices(range(1_000), k=draw.randint(500, 4_000)))
        num_found: int | None = None
        for left in reversed(range(draw.randint(4, 12))):
            outputs = tuple(draw.choices(range(1_000), k=draw.randint(20, 200)))
            tool_ms = draw.expovariate(1 / 1_500) if left else None
            turns.append(Turn(prompt, outputs, num_found, tool_ms))
            num_found = len(prompt) + len(outputs)
            prompt += (*outputs, *draw.choices(range(1_000), k=draw.randint(50, 800)))
        sessions.append(Session(f"made up/{number}", "made up", tuple(turns)))
    return sessions


@dataclass(slots=True)
class Running:
    """A turn that has been submitted."""

    session: Session
    number: int
    arrival: float
    num_outputs: int = 0

    @property
    def turn(self) -> Turn:
        """Return its current turn."""
        return self.session.turns[self.number]


@dataclass(slots=True)
class Run:
    """A run of all sessions on one side."""

    config: Config
    estimator: Estimator | None
    store: Tiers | None
    line: list[Session]
    step_ms: float
    token_ms: float
    now: float = 0.0
    engine: HostEngine = field(init=False)
    coming: list[tuple[float, int, Session, int]] = field(default_factory=list)
    """Arrival, tie, session and number of the turns that are to come."""
    live: dict[str, Running] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    num_turns: int = 0

    def __post_init__(self) -> None:
        self.engine = HostEngine(self.config)
        self.line = self.line[::-1]

    def play(self, num_agents: int) -> None:
        """All sessions to their end."""
        for agent in range(num_agents):
            self._begin_session(100.0 * agent)
        while self.coming or self.live:
            if not self.live:
                self.now = max(self.now, self.coming[0][0])
            while self.coming and self.coming[0][0] <= self.now:
                self._submit()
            self._step()

    def _begin_session(self, at: float) -> None:
        if self.line:
            self._bring(at, self.line.pop(), 0)

    def _bring(self, at: float, session: Session, number: int) -> None:
        self.num_turns += 1
        heapq.heappush(self.coming, (at, self.num_turns, session, number))

    def _submit(self) -> None:
        arrival, tie, session, number = heapq.heappop(self.coming)
        name, turn = f"t{tie}", session.turns[number]
        request = Request(name, turn.prompt, max_tokens=len(turn.outputs), job_id=session.name)
        answer = self.engine.apply(Submit(request))
        assert isinstance(answer, Ack), answer
        self.live[name] = Running(session, number, arrival)
        if self.store is not None:
            self.engine.apply(self.store.begin(request))
        if self.estimator is not None:
            self.engine.apply(Clock(int(self.now)))
            self.engine.apply(self.estimator.arrive(session.name, int(arrival), turn.num_found))

    def _step(self) -> None:
        self.engine.apply(Clock(int(self.now)))
        for event in () if self.store is None else self.store.list_events(self.now):
            self.engine.apply(event)
        plan = self.engine.apply(Schedule())
        assert isinstance(plan, Plan)
        if self.store is not None:
            self._move(self.store, plan)
        num_tokens = sum(row.num_scheduled_tokens for row in plan.rows)
        self.now += self.step_ms + self.token_ms * num_tokens
        self.engine.apply(Clock(int(self.now)))
        if not plan.rows:  # the first in line was preempted, or all wait for what is loaded
            if self.store is not None:
                self.now = self.store.find_next_end(self.now)
            return
        rows = []
        for name, drafts in self.engine.frames[plan.frame_id].build_rows().items():
            one = self.live[name]
            tokens = () if drafts is None else (one.turn.outputs[one.num_outputs],)
            rows.append(RowTokens(name, tokens))
        outputs = self.engine.apply(Commit(plan.frame_id, tuple(rows)))
        assert isinstance(outputs, Outputs)
        for row in outputs.rows:
            one = self.live[row.request_id]
            one.num_outputs += 1
            if one.num_outputs == 1:
                self.waits.append(self.now - one.arrival)
            if row.finish_reason is not None:
                self.lengths.append(self.now - one.arrival)
                self._end(row.request_id)

    def _move(self, store: Tiers, plan: Plan) -> None:
        for save in plan.kv_saves:
            victim = self.live[save.request_id]
            outputs = victim.turn.outputs[: victim.num_outputs]
            self.engine.apply(store.swap(save, outputs, self.now))
        for asked in plan.kv_loads:
            store.load(asked, self.now)

    def _end(self, name: str) -> None:
        one = self.live.pop(name)
        session, turn = one.session, one.turn
        if self.store is not None:
            self.store.end(name, (*turn.prompt, *turn.outputs)[:-1], self.now)
        if turn.tool_ms is None:
            self._begin_session(self.now)
            estimate = PinEstimate(session.name, 0)  # its output calls no tool
        else:
            self._bring(self.now + turn.tool_ms, session, one.number + 1)
            num_blocks = (len(turn.prompt) + len(turn.outputs) - 1) // BLOCK_SIZE
            kept = TurnEnd(session.name, session.suite, num_blocks * BLOCK_SIZE, num_blocks)
            if self.estimator is None:
                return
            estimate = self.estimator.end(kept, int(self.now))
        if self.estimator is not None:
            self.engine.apply(estimate)


def measure(
    side: str, num_blocks: int, sessions: list[Session], args: argparse.Namespace
) -> Figures:
    """Return one side over all sessions."""
    estimators: dict[str, Estimator] = {
        SIDES[1]: FixedRule(2_000),
        SIDES[2]: FixedRule(2_000, ttl=10_000),
        SIDES[3]: ToolTimes(num_blocks, args.token_us / 1e3),
    }
    config = Config(
        num_blocks=num_blocks + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=40_960,
        policy=Policy.CONTINUUM if side in estimators else Policy.FCFS,
    )
    store = None
    if side in SIDES[4:]:
        block_bytes, prefill = args.block_kib << 10, Prefill(round(1e6 / args.token_us))
        tiers = [Tier(args.host_blocks, *HOST), Tier(args.file_blocks, *FILE)]
        store = Tiers(tiers[: 1 + (side == SIDES[5])], BLOCK_SIZE, block_bytes)
        config = replace(
            config,
            kv_connector=True,
            kv_load_failure_policy=KVLoadFailurePolicy.RECOMPUTE,
            swap_min_tokens=SwapSpeeds(*HOST, prefill).get_break_even(block_bytes, BLOCK_SIZE) or 0,
        )
    run = Run(config, estimators.get(side), store, sessions, args.step_ms, args.token_us / 1e3)
    run.play(args.agents)
    stats = run.engine.snapshot().stats
    return Figures(
        num_blocks,
        side,
        (stats.prefix_cache_hits + stats.external_prefix_cache_hits) / stats.prefix_cache_queries,
        sum(run.waits) / len(run.waits),
        sorted(run.waits)[int(0.95 * len(run.waits))],
        max(run.waits),
        sum(run.lengths) / len(run.lengths),
        run.now / 1e3,
        stats.preemptions,
    )


def make_page(figures: list[Figures]) -> str:
    """Return the table of the docs."""
    heads = (
        *("blocks", "side", "hit rate", "wait, mean", "p95", "longest"),
        *("turn, mean", "all sessions", "preemptions"),
    )
    rows = [
        (
            f"{row.num_blocks:,}",
            row.side,
            f"{100 * row.hit_rate:.1f} %",
            f"{row.mean_wait_ms:,.0f} ms",
            f"{row.p95_wait_ms:,.0f} ms",
            f"{row.longest_wait_ms:,.0f} ms",
            f"{row.mean_turn_ms / 1e3:,.2f} s",
            f"{row.whole_s:,.0f} s",
            f"{row.preemptions:,}",
        )
        for row in figures
    ]
    return make_table(heads, rows)


def main() -> None:
    """Measure every side in every pool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--blocks", type=int, nargs="+", default=[3_000, 6_000, 12_000])
    parser.add_argument("--suite", dest="suites", action="append", default=[])
    parser.add_argument("--step-ms", type=float, default=6.0)
    parser.add_argument("--token-us", type=float, default=50.0)
    parser.add_argument("--block-kib", type=int, default=2_048)
    parser.add_argument("--host-blocks", type=int, default=12_000)
    parser.add_argument("--file-blocks", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.trace is None:
        print(f"sessions are made up, seed {MADE_UP_SEED}: give a --trace for those of agents")
        sessions = make_sessions(MADE_UP_SEED)
    else:
        sessions = read_sessions(args.trace, args.suites)
    num_turns = sum(len(session.turns) for session in sessions)
    print(f"{len(sessions)} sessions, {num_turns:,} turns, {args.agents} agents at once")
    start, figures = time.process_time(), []
    for num_blocks in args.blocks:
        for side in SIDES:
            figures.append(measure(side, num_blocks, sessions, args))
            print(make_page(figures[-1:]).splitlines()[-1], flush=True)
    seconds = time.process_time() - start
    print(f"\n{make_page(figures)}\n{seconds:.0f} s of processor time, {get_commit()}")
    if args.json:
        arguments = {name: str(value) for name, value in vars(args).items() if name != "json"}
        arguments["trace"] = args.trace.name if args.trace else f"made up, seed {MADE_UP_SEED}"
        found = {
            "python": platform.python_version(),
            "commit": get_commit(),
            "arguments": arguments,
            "figures": [asdict(row) for row in figures],
        }
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
