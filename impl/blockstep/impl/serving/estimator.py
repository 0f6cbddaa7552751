"""Estimators: how long to pin the blocks of an agent's turn, from the durations of its tool calls.

A turn ends with a tool call, and the next turn of its job brings the tool's result.

    turn | tool ...... | turn           inputs of an estimator: ends and arrivals, with their times
         ^ end         ^ arrival        its answers: `PinEstimate` events for the scheduler

An estimator is not part of the scheduler and has no clock. Apply each answer directly after the
event that it belongs to: the `Submit` of a turn, or the `Commit` that ends it. All times are ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from blockstep.spec.vocabulary import PinEstimate

T = TypeVar("T")
MAX_JOBS: Final = 10_000
"""Maximum number of jobs with recorded data; beyond it the oldest job is dropped."""
MAX_TOOLS: Final = 1_000
"""Maximum number of tools with times of their own; further tools count for all tools only."""
MAX_TIMES: Final = 256
"""Number of latest durations that are kept for each tool."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn at its end."""

    job_id: str
    tool: str | None = None
    """The tool that the turn calls; None if the client does not know."""
    num_tokens: int = 0
    """Tokens whose blocks would be pinned, so that the next turn need not compute them."""
    num_blocks: int = 0
    """Blocks that would be pinned."""


class Estimator(Protocol):
    """Decides how long the blocks of a job are pinned."""

    def arrive(self, job_id: str, now: int, num_found: int | None = None) -> PinEstimate:
        """Return the pin for a turn that was submitted.

        The pin lasts while the turn waits, and covers the turn's own blocks until `end` is called.
        `num_found` is the number of tokens that it shares with the turn before; None if unknown.
        """
        ...

    def end(self, turn: TurnEnd, now: int) -> PinEstimate:
        """Return the pin for a turn that has ended and was not the last of its job."""
        ...

    def forget(self, job_id: str) -> None:
        """Drop the data of a job that has no further turn."""
        ...


@dataclass(slots=True)
class _Tool:
    """The latest finished calls of a tool."""

    times: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """Duration of each call."""
    found: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """Tokens of each call's turn that the next turn shares, and all tokens of the turn."""

    def take(self, turn: TurnEnd, ticks: int, num_found: int | None) -> None:
        """Record that a call has finished."""
        self.times.append(ticks)
        if num_found is not None:
            self.found.append((min(num_found, turn.num_tokens), turn.num_tokens))

    @property
    def share(self) -> float:
        """Share of the pinned tokens that the next turns used; 1 if nothing is known."""
        num_tokens = sum(kept for _, kept in self.found)
        return sum(found for found, _ in self.found) / num_tokens if num_tokens else 1.0


class FixedRule:
    """A fixed rule: a job is pinned unless its tool calls took longer than a threshold on average.

    Source: seed 001 "Change 12". Its pins last ten seconds by default, although its estimator never
    returns more than the threshold of two seconds; here a pin lasts as long as the threshold,
    unless `ttl` is given. The prediction is the mean duration of the job's tool calls. A job
    without finished calls is pinned, since nothing would be learned about it otherwise.

    Args:
        threshold: the longest predicted duration for which blocks are pinned.
        ttl: the duration of a pin; None for the threshold.
    """

    def __init__(self, threshold: int = 2_000, ttl: int | None = None) -> None:
        self.threshold = threshold
        self.ttl = threshold if ttl is None else ttl
        self._ended: dict[str, int] = {}
        """When the last turn ended, by job whose tool is running."""
        self._taken: dict[str, tuple[int, int]] = {}
        """Number of finished tool calls and their total duration, by job."""

    def arrive(self, job_id: str, now: int, num_found: int | None = None) -> PinEstimate:
        """See `Estimator`. `num_found` is not used."""
        del num_found
        since = self._ended.pop(job_id, None)
        if since is not None:
            count, total = self._taken.pop(job_id, (0, 0))
            self._taken[job_id] = (count + 1, total + now - since)
            _forget_oldest(self._taken)
        return PinEstimate(job_id, self.ttl)

    def end(self, turn: TurnEnd, now: int) -> PinEstimate:
        """See `Estimator`."""
        self._ended.pop(turn.job_id, None)
        self._ended[turn.job_id] = now
        _forget_oldest(self._ended)
        count, total = self._taken.get(turn.job_id, (0, 0))
        return PinEstimate(turn.job_id, 0 if total > count * self.threshold else self.ttl)

    def forget(self, job_id: str) -> None:
        """See `Estimator`."""
        self._ended.pop(job_id, None)
        self._taken.pop(job_id, None)


class ToolTimes:
    """The pin that pays best, given the distribution of the tool's durations.

    For each duration t of the tool: a pin of t saves the prefill of those turns that arrive within
    t. Until the turn arrives or t is over, other requests cannot use that part of the pool.

        gain(t) = P(T <= t) * num_tokens * share * ticks_per_token
        cost(t) = E[min(T, t)] * num_blocks / num_usable_blocks

    The t with the largest difference of gain and cost is used, or 0 if no difference is positive.
    Both are times of the engine: a tick in which a hundredth of the pool is unused costs a
    hundredth of a tick. `share` is the share of tokens that next turns use, since some agents start
    with a new prompt each time. A tool with too few durations is treated as all tools together; if
    these have too few, a fixed time is used, in order to learn. For a turn that has arrived, the
    pin lasts until the cost of keeping its blocks reaches the gain from its hit. Source: the time
    to live of "Continuum" (arXiv 2511.02230), which adds the queueing time to the gain; here a
    returning job is served before others, which lose as much as it gains.

    Args:
        num_usable_blocks: blocks of the pool without the null block.
        ticks_per_token: time to compute one prompt token.
        unknown: the pin if too few durations are known.
        longest: the longest pin.
        num_enough: the number of durations from which a distribution is used.
    """

    def __init__(
        self,
        num_usable_blocks: int,
        ticks_per_token: float,
        unknown: int = 2_000,
        longest: int = 60_000,
        num_enough: int = 5,
    ) -> None:
        self.num_usable_blocks = num_usable_blocks
        self.ticks_per_token = ticks_per_token
        self.unknown = unknown
        self.longest = longest
        self.num_enough = num_enough
        self._ended: dict[str, tuple[TurnEnd, int]] = {}
        """The last turn and the time of its end, by job whose tool is running."""
        self._tools: dict[str, _Tool] = {}
        self._all = _Tool()

    def arrive(self, job_id: str, now: int, num_found: int | None = None) -> PinEstimate:
        """See `Estimator`."""
        ended = self._ended.pop(job_id, None)
        if ended is not None:
            turn, since = ended
            self._all.take(turn, now - since, num_found)
            if turn.tool is not None and (turn.tool in self._tools or len(self._tools) < MAX_TOOLS):
                self._tools.setdefault(turn.tool, _Tool()).take(turn, now - since, num_found)
            if num_found is not None and turn.num_blocks:
                return PinEstimate(job_id, self._find_time_in_line(turn, num_found))
        return PinEstimate(job_id, self.unknown)

    def _find_time_in_line(self, turn: TurnEnd, num_found: int) -> int:
        """Return how long the gain from a hit covers the cost of keeping the blocks.

        At least one tick: without a pin, nothing would be kept at the end of the turn either.
        """
        cost_per_tick = turn.num_blocks / self.num_usable_blocks
        worth = int(num_found * self.ticks_per_token / cost_per_tick)
        return max(min(worth, self.longest), 1)

    def end(self, turn: TurnEnd, now: int) -> PinEstimate:
        """See `Estimator`."""
        self._ended.pop(turn.job_id, None)
        self._ended[turn.job_id] = (turn, now)
        _forget_oldest(self._ended)
        known = self._all if turn.tool is None else self._tools.get(turn.tool, self._all)
        if len(known.times) < self.num_enough:
            known = self._all
        if len(known.times) < self.num_enough:
            return PinEstimate(turn.job_id, self.unknown)
        gain = turn.num_tokens * known.share * self.ticks_per_token
        best = find_best_time(known.times, gain, turn.num_blocks / self.num_usable_blocks)
        return PinEstimate(turn.job_id, min(best, self.longest))

    def forget(self, job_id: str) -> None:
        """See `Estimator`."""
        self._ended.pop(job_id, None)


def find_best_time(times: Iterable[int], gain: float, cost_per_tick: float) -> int:
    """Return how many ticks to wait for a call that took `times` before; 0 if waiting costs more.

    Args:
        times: earlier durations.
        gain: the gain if the wait is long enough.
        cost_per_tick: the cost of waiting.
    """
    line = sorted(times)
    best, most, waited = 0, 0.0, 0
    for place, time in enumerate(line):
        waited += time
        num_missed = len(line) - place - 1
        worth = gain * (place + 1) - cost_per_tick * (waited + num_missed * time)
        if worth > most:
            best, most = time + 1, worth  # a pin that ends when its turn arrives has expired
    return best


def _forget_oldest(kept: dict[str, T]) -> None:
    if len(kept) > MAX_JOBS:
        del kept[next(iter(kept))]
