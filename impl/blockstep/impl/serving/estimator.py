"""Estimators: for how long the blocks of a turn stay, from what the tools of agents have taken.

A turn ends with the call of a tool, and the next turn of its job brings what the tool said.

    turn | tool ...... | turn           ends, arrivals: what an estimator is told, with their times
         ^ end         ^ arrival        the estimates: what it answers, events for the scheduler

They stand outside of the scheduler and hold no time of their own. Each answer is to be applied
right behind what it answers: the `Submit` of a turn, the `Commit` that ends it. All times are
ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from blockstep.spec.vocabulary import PinEstimate

T = TypeVar("T")
MAX_JOBS: Final = 10_000
"""Jobs of which something is remembered: of more than these the oldest is forgotten."""
MAX_TOOLS: Final = 1_000
"""Tools told apart; what further ones take counts for all of them together."""
MAX_TIMES: Final = 256
"""Times kept of a tool: the latest."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What is known of a turn as it ends."""

    job_id: str
    tool: str | None = None
    """What it calls, as far as its client can tell."""
    num_tokens: int = 0
    """Those whose blocks would stay: the next turn need not compute them."""
    num_blocks: int = 0
    """These blocks."""


class Estimator(Protocol):
    """Says of a job for how long its blocks stay."""

    def arrive(self, job_id: str, now: int, num_found: int | None = None) -> PinEstimate:
        """A turn has been submitted, which begins with so many tokens of the one before, if known.

        What was kept for it stays while it waits, and so does what it leaves, until its end is
        told.
        """
        ...

    def end(self, turn: TurnEnd, now: int) -> PinEstimate:
        """A turn has ended, which was not the last one."""
        ...

    def forget(self, job_id: str) -> None:
        """No turn of this job comes any more."""
        ...


@dataclass(slots=True)
class _Tool:
    """What is known of a tool: the latest calls of it that have come back."""

    times: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """What it has taken."""
    found: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """Tokens of the turn behind it that stood in the one before it, and those of that one."""

    def take(self, turn: TurnEnd, ticks: int, num_found: int | None) -> None:
        """It has come back."""
        self.times.append(ticks)
        if num_found is not None:
            self.found.append((min(num_found, turn.num_tokens), turn.num_tokens))

    @property
    def share(self) -> float:
        """Of the tokens that would stay, those that are found; all, if nobody has told."""
        num_tokens = sum(kept for _, kept in self.found)
        return sum(found for found, _ in self.found) / num_tokens if num_tokens else 1.0


class FixedRule:
    """The rule of the seed: a job whose tools have taken longer than a threshold keeps nothing.

    Source: seed 001 "Change 12". Its pins would last ten seconds by default, and its estimator
    never gives more than the threshold of two: here they last as long as the threshold, unless
    `ttl` says otherwise. What is predicted is the mean of what tools have taken in this job; a job
    without such times is kept, for else nothing would be learned of it.

    Args:
        threshold: the longest prediction that is waited for.
        ttl: for how long then; the threshold if it is left out.
    """

    def __init__(self, threshold: int = 2_000, ttl: int | None = None) -> None:
        self.threshold = threshold
        self.ttl = threshold if ttl is None else ttl
        self._ended: dict[str, int] = {}
        """By job whose tool runs: since when."""
        self._taken: dict[str, tuple[int, int]] = {}
        """By job: tools that have come back, and ticks that they took together."""

    def arrive(self, job_id: str, now: int, num_found: int | None = None) -> PinEstimate:
        """See `Estimator`. It has no use for what is found."""
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
    """A time that pays, from the distribution of what the tool has taken before.

    Of each time t that the tool has taken: blocks that stay for t are there for as many turns as
    came within t, and save them the computation. Meanwhile, until the turn comes or t is over,
    nobody else has that part of the pool.

        gain(t) = P(T <= t) * num_tokens * share * ticks_per_token
        cost(t) = E[min(T, t)] * num_blocks / num_usable_blocks

    The t with the most gain beside its cost is given, or 0 if none is worth its cost. Both sides
    are the engine's time: a tick in which a hundredth of the pool serves nobody is a hundredth of a
    tick. `share` of the tokens is found by next turns: some agents begin anew with each of them. A
    tool of which too little is known is taken for all tools together; if of these too little is
    known, a fixed time is given, to learn. A turn that has come is given the time at which what it
    finds is used up by what it costs to keep all of it. Source: the time to live of "Continuum"
    (arXiv 2511.02230), which adds the waiting in line to the gain; here who comes back goes ahead
    of others, and what they lose by that is as much.

    Args:
        num_usable_blocks: of the pool.
        ticks_per_token: of a prompt, to compute one.
        unknown: given where too little is known.
        longest: given at most.
        num_enough: times from which on a distribution is one.
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
        """By job whose tool runs: how its turn ended, and when."""
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
        """For how long what is found is worth that all of it stays: a tick at least, for of a turn
        that has no time at all nothing is kept at its end, either."""
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
    """Ticks to wait for something that has taken so long before; 0 if that does not pay.

    Args:
        times: what it has taken.
        gain: of being there when it comes.
        cost_per_tick: of waiting.
    """
    line = sorted(times)
    best, most, waited = 0, 0.0, 0
    for place, time in enumerate(line):
        waited += time
        num_missed = len(line) - place - 1
        worth = gain * (place + 1) - cost_per_tick * (waited + num_missed * time)
        if worth > most:
            best, most = time + 1, worth  # a pin that ends as its turn comes is gone
    return best


def _forget_oldest(kept: dict[str, T]) -> None:
    if len(kept) > MAX_JOBS:
        del kept[next(iter(kept))]
