"""Scenarios: named traffic for N running requests, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from blockstep.conformance.draw.workloads import load
from blockstep.conformance.recorded.pace import REPLAY_PRESETS
from blockstep.spec.vocabulary import Config, Policy, Request, SpecMethod, TokenIds

BLOCK_SIZE = 16
VOCABULARY = 30_000
"""Tokens of prompts and outputs are drawn below."""
TRACE = "trace"
"""The name of what a published trace becomes."""
FOREVER = 1500
"""Output tokens that no measurement reaches, and that even the smallest pool would hold."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is measured: a config, and requests that keep `concurrency` of them unfinished."""

    name: str
    summary: str
    get_config: Callable[[int], Config]
    """By the number of running requests."""
    get_requests: Callable[[int], Iterator[Request]]
    get_concurrency: Callable[[int], int] = lambda num_running: num_running
    """Requests unfinished at once."""
    num_warmup: int = 40
    """Steps before the measured ones, once as many run as shall."""
    num_running_max: int = 4096
    counts_every_step: bool = False
    """Whether also the first step of a turn is counted: the times of a trace are added up."""
    steps_per_turn: int = 16
    """Steps of one side before the next has its turn; nobody's caches are warm in the first."""
    min_running: float = 1.0
    """Share of N that must run before the warm-up begins; a storm never has all of them."""


def get_token(number: int, position: int) -> int:
    """What the model says at `position` (counted from the prompt's start) of a request."""
    return (number * 7919 + position * 104_729 + 17) % VOCABULARY


def get_tokens(number: int, start: int, end: int) -> TokenIds:
    """What it says from `start` to before `end`."""
    return tuple(get_token(number, position) for position in range(start, end))


def _request(number: int, prompt: TokenIds, max_tokens: int, **fields: int) -> Request:
    return Request(f"r{number}", prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def _config(num_running: int, tokens_each: int, **fields: object) -> Config:
    """A pool in which `tokens_each` tokens of every request fit."""
    blocks = num_running * -(-tokens_each // BLOCK_SIZE) + 64
    base = Config(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max(num_running, 1),
        max_num_batched_tokens=max(8192, 2 * num_running),
        max_model_len=131_072,
        # The gate asks for all known tokens of a request at each admission: not what is measured.
        scheduler_reserve_full_isl=False,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def _decoding(num_running: int, length: int = 496) -> Iterator[Request]:
    """Prompts of one length and up to a block more, so that each step fills N / 16 blocks."""
    for number in range(num_running):
        prompt = get_tokens(number + 1_000_000, 0, length + number % BLOCK_SIZE)
        yield _request(number, prompt, FOREVER)


def _one_long(num_running: int) -> Iterator[Request]:
    """The first request has 100,000 tokens of context, the others 512."""
    for request in _decoding(num_running):
        long = request.request_id == "r0"
        prompt = get_tokens(1_000_000, 0, 100_000) if long else request.prompt_token_ids
        yield replace(request, prompt_token_ids=prompt)


def _mixed(_num_running: int) -> Iterator[Request]:
    """Prompts of 1,024 tokens in chunks, 128 to 255 outputs: prefill and decode in one step."""
    for number in count():
        prompt = get_tokens(number + 1_000_000, 0, 960 + number * 37 % 128)
        yield _request(number, prompt, 128 + number * 53 % 128)


def _agent_turns(num_running: int) -> Iterator[Request]:
    """Sessions that grow by 6 % of 4,096 tokens a turn: 16 are new, the rest was there before."""
    number = 0
    for turn in count():
        for session in range(num_running):
            stem = get_tokens(session + 1_000_000, 0, 3840 + 256 * (turn % 8))
            fresh = get_tokens(number + 2_000_000, 0, 240)
            yield _request(number, (*stem, *fresh), 96 + number * 29 % 64)
            number += 1


def _storm(_num_running: int) -> Iterator[Request]:
    """Short prompts whose outputs outgrow the pool."""
    for number in count():
        prompt = get_tokens(number + 1_000_000, 0, 64 + number * 7 % 64)
        yield _request(number, prompt, 384 + number * 53 % 128)


def _priorities(_num_running: int) -> Iterator[Request]:
    """As in `mixed`, with five priorities and more waiting than running."""
    for request in _mixed(0):
        number = int(request.request_id[1:])
        yield replace(request, priority=number * 31 % 5, arrival_time=number)


def _config_storm(num_running: int) -> Config:
    """Room for less than half of what all of them come to hold."""
    blocks = max(int(num_running * 0.45 * 36), 48)
    return replace(_config(num_running, 512), num_blocks=blocks)


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "decode",
            "all of them decode; a sixteenth fill a block in each step",
            lambda n: _config(n, 1024),
            _decoding,
        ),
        Scenario(
            "mixed",
            "chunked prefill beside decode; requests end and come all the time",
            lambda n: _config(n, 1536, max_num_batched_tokens=max(2048, 2 * n)),
            _mixed,
            num_warmup=400,
        ),
        Scenario(
            "hits",
            "agent turns of 4,096 tokens, 94 % of them hit",
            lambda n: _config(n, 3 * 6144, max_num_batched_tokens=max(8192, 4 * n)),
            _agent_turns,
            num_warmup=300,
            num_running_max=1024,
        ),
        Scenario(
            "storm",
            "a pool for less than half of what would run: somebody is preempted again and again",
            _config_storm,
            _storm,
            num_warmup=500,
            min_running=0.4,
        ),
        Scenario(
            "priority",
            "as mixed, in order of five priorities, as many waiting as running",
            lambda n: _config(
                n, 1536, policy=Policy.PRIORITY, max_num_batched_tokens=max(2048, 2 * n)
            ),
            _priorities,
            get_concurrency=lambda n: 2 * n,
            num_warmup=400,
        ),
        Scenario(
            "drafts",
            "three drafts for each request and step; zero to three are accepted",
            lambda n: _config(
                n,
                2048,
                spec_method=SpecMethod.NGRAM,
                num_speculative_tokens=3,
                max_num_batched_tokens=max(8192, 8 * n),  # four for each that runs, and prompts
            ),
            _decoding,
        ),
        Scenario(
            "async",
            "as decode, two plans in flight",
            lambda n: _config(n, 1024, max_frames_in_flight=2, async_scheduling=True),
            _decoding,
        ),
        Scenario(
            "long",
            "as decode, one of them with 100,000 tokens of context",
            lambda n: replace(_config(n, 1024), num_blocks=n * 64 + 6400),
            _one_long,
        ),
        Scenario(
            "pool",
            "as mixed, in a pool of 100,000 blocks that is full of old contents",
            lambda n: _config(n, 1536, num_blocks=100_000),
            _mixed,
            num_warmup=400,
            num_running_max=1024,
        ),
    )
}
"""By name."""


def get_trace_scenario(path: Path, limit: int) -> Scenario:
    """The first `limit` requests of a published trace, as `blockstep replay` plays them.

    Raises:
        TraceError: the file is no workload.
    """
    workload = load(path, limit=limit)
    preset = REPLAY_PRESETS[workload.format]
    return Scenario(
        TRACE,
        f"the first {limit:,} requests of {path.name}",
        lambda _n: preset.config,
        lambda _n: islice(iter(workload), limit),
        get_concurrency=lambda _n: preset.pace.concurrency,
        num_warmup=0,
        counts_every_step=True,
        steps_per_turn=64,
        min_running=0.0,
    )
