"""Scenarios: named traffic for N running requests, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from blockstep.conformance.draw.workloads import load
from blockstep.conformance.recorded.arrival_rate import REPLAY_PRESETS
from blockstep.spec.vocabulary import (
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    Policy,
    Request,
    SpecMethod,
    TokenIds,
)

BLOCK_SIZE = 16
VOCABULARY = 30_000
"""Tokens of prompts and outputs are drawn below."""
TRACE = "trace"
"""Name of the scenario of a published trace."""
FOREVER = 1500
"""A number of output tokens that no measurement reaches and the smallest pool can hold."""
FULL = KVGroup(GroupKind.FULL, BLOCK_SIZE)
WINDOW = KVGroup(GroupKind.SLIDING_WINDOW, BLOCK_SIZE, sliding_window=128)
STATES = KVGroup(GroupKind.RECURRENT, BLOCK_SIZE, mamba_cache_mode=MambaCacheMode.ALL)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A config, and a workload that keeps `get_concurrency` requests unfinished."""

    name: str
    summary: str
    get_config: Callable[[int], Config]
    """Returns the config for a number of running requests."""
    get_requests: Callable[[int], Iterator[Request]]
    get_concurrency: Callable[[int], int] = lambda num_running: num_running
    """Requests unfinished at once."""
    num_warmup: int = 40
    """Steps before the measured ones, after enough requests run."""
    num_running_max: int = 4096
    counts_every_step: bool = False
    """Whether the first step of a turn is counted, too: the times of a trace are summed."""
    steps_per_turn: int = 16
    """Steps of one side before the next side's turn; in the first, processor caches are cold."""
    min_running: float = 1.0
    """Share of N that must run before the first steps are played; a storm never runs all N."""


def get_token(number: int, position: int) -> int:
    """Return the model's token at `position` (from the start of the prompt) of a request."""
    return (number * 7919 + position * 104_729 + 17) % VOCABULARY


def _get_tokens(number: int, length: int) -> TokenIds:
    return tuple(get_token(number, position) for position in range(length))


def _request(number: int, prompt_length: int, max_tokens: int) -> Request:
    prompt = _get_tokens(number + 1_000_000, prompt_length)
    return Request(f"r{number}", prompt, max_tokens=max_tokens)


def _config(num_running: int, tokens_each: int, **fields: object) -> Config:
    """A pool in which `tokens_each` tokens of every request fit."""
    base = Config(
        num_blocks=num_running * -(-tokens_each // BLOCK_SIZE) + 64,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, 2 * num_running),
        max_model_len=131_072,
        # The gate asks for all known tokens of a request at each admission: not what is measured.
        scheduler_reserve_full_isl=False,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def _decoding(num_running: int) -> Iterator[Request]:
    """Prompts of one length and up to a block more, so that each step fills N / 16 blocks."""
    for number in range(num_running):
        yield _request(number, 496 + number % BLOCK_SIZE, FOREVER)


def _waves(_num_running: int) -> Iterator[Request]:
    """Prompts of two blocks and one output token, so that each step admits and ends all."""
    for number in count():
        yield _request(number, 2 * BLOCK_SIZE, 1)


def _one_long(num_running: int) -> Iterator[Request]:
    """The first request has 100,000 tokens of context, the others 512."""
    yield _request(0, 100_000, FOREVER)
    yield from islice(_decoding(num_running), 1, None)


def _mixed(_num_running: int) -> Iterator[Request]:
    """Prompts of 1,024 tokens in chunks, 128 to 255 outputs: prefill and decode in one step."""
    for number in count():
        yield _request(number, 960 + number * 37 % 128, 128 + number * 53 % 128)


def _agent_turns(num_running: int) -> Iterator[Request]:
    """Sessions that grow by 6 % of 4,096 tokens a turn: 16 are new, the rest was there before."""
    for number in count():
        turn, session = divmod(number, num_running)
        stem = _get_tokens(session + 1_000_000, 3840 + 256 * (turn % 8))
        fresh = _get_tokens(number + 2_000_000, 240)
        yield Request(f"r{number}", (*stem, *fresh), max_tokens=96 + number * 29 % 64)


def _storm(_num_running: int) -> Iterator[Request]:
    """Short prompts whose outputs outgrow the pool."""
    for number in count():
        yield _request(number, 64 + number * 7 % 64, 384 + number * 53 % 128)


def _priorities(_num_running: int) -> Iterator[Request]:
    """Yield the requests of `mixed` with five priorities."""
    for number, request in enumerate(_mixed(0)):
        yield replace(request, priority=number * 31 % 5, arrival_time=number)


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "decode", "all of them decode; a sixteenth fill a block in each step",
            lambda n: _config(n, 1024), _decoding,
        ),
        Scenario(
            "window", "as decode, with groups of full attention and of a window of 128 tokens",
            lambda n: _config(n, 2048, groups=(FULL, WINDOW)), _decoding,
        ),
        Scenario(
            "recurrent", "as decode, with groups of full attention and of recurrent states",
            lambda n: _config(n, 2048, groups=(FULL, STATES)), _decoding,
        ),
        Scenario(
            "waves", "a storm of admissions and of ends: each step admits all, and all end in it",
            lambda n: _config(n, 64, max_num_batched_tokens=max(8192, 2 * BLOCK_SIZE * n)),
            _waves, min_running=0.0,
        ),
        Scenario(
            "mixed", "chunked prefill with decode; requests finish and arrive all the time",
            # For each that decodes there are six tokens of prompts of others, or N never run.
            lambda n: _config(n, 1536, max_num_batched_tokens=max(2048, 8 * n)), _mixed,
            num_warmup=400,
        ),
        Scenario(
            "hits", "agent turns of 4,096 tokens, 94 % of them hit",
            lambda n: _config(n, 3 * 6144, max_num_batched_tokens=max(8192, 4 * n)), _agent_turns,
            num_warmup=300, num_running_max=1024,
        ),
        Scenario(
            "storm",
            "a pool for less than half of what would run: requests are preempted again and again",
            lambda n: _config(n, 512, num_blocks=max(int(n * 0.45 * 36), 48)), _storm,
            num_warmup=500, min_running=0.4,
        ),
        Scenario(
            "priority", "as mixed, in order of five priorities, as many waiting as running",
            lambda n: replace(SCENARIOS["mixed"].get_config(n), policy=Policy.PRIORITY),
            _priorities, get_concurrency=lambda n: 2 * n, num_warmup=400,
        ),
        Scenario(
            "drafts", "three drafts for each request and step; zero to three are accepted",
            lambda n: _config(
                n, 2048, spec_method=SpecMethod.NGRAM, num_speculative_tokens=3,
                max_num_batched_tokens=max(8192, 8 * n),  # four for each that runs, and prompts
            ),
            _decoding,
        ),
        Scenario(
            "async", "as decode, two plans in flight",
            lambda n: _config(n, 1024, max_frames_in_flight=2, async_scheduling=True), _decoding,
        ),
        Scenario(
            "long", "as decode, one of them with 100,000 tokens of context",
            lambda n: _config(n, 1024, num_blocks=n * 64 + 6400), _one_long,
        ),
        Scenario(
            "pool", "as mixed, in a pool of 100,000 blocks that is full of old contents",
            lambda n: _config(n, 1536, num_blocks=100_000), _mixed,
            num_warmup=400, num_running_max=1024,
        ),
    )
}  # fmt: skip
"""Scenarios by name."""


def get_trace_scenario(path: Path, limit: int) -> Scenario:
    """The first `limit` requests of a published trace, as `blockstep replay` plays them.

    Raises:
        TraceError: the file is no workload.
    """
    workload = load(path, limit=limit)
    preset = REPLAY_PRESETS[workload.format]
    return Scenario(
        TRACE, f"the first {limit:,} requests of {path.name}",
        lambda _n: preset.config, lambda _n: islice(iter(workload), limit),
        get_concurrency=lambda _n: preset.pace.concurrency,
        num_warmup=0, counts_every_step=True, steps_per_turn=64, min_running=0.0,
    )  # fmt: skip
