"""Episodes of a check, played one after another until one satisfies a condition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import EpisodeResult, fit_depth, run_episode
from blockstep.conformance.search.options import CheckOptions


class Played:
    """Totals of episodes: their events, the coverage goals that they reached, the last episode."""

    def __init__(self) -> None:
        self.num_events = self.num_episodes = 0
        self.witnesses: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.last: EpisodeResult | None = None

    def add(self, episode: EpisodeResult) -> None:
        """Count an episode."""
        self.num_events += episode.num_events
        self.num_episodes += 1
        self.witnesses.update(episode.witnesses)
        self.skipped.update(episode.skipped)
        self.last = episode

    @property
    def first(self) -> Finding | None:
        """The first finding of the last episode, if it has one."""
        return None if self.last is None else self.last.first

    @property
    def sentence(self) -> str:
        """Return the name of the check of that finding; "" without a finding."""
        return "" if self.first is None else self.first.sentence


def play_episodes(make_engine: EngineFactory, num_events: int, **options: Any) -> Played:
    """Play episodes until `num_events` events are played or one episode has a finding."""
    played = Played()
    fitted = fit_depth(CheckOptions("mine", **options), make_engine)
    while played.num_events < num_events and played.first is None:
        assert played.num_episodes <= num_events, "episodes in which nothing happens"
        played.add(run_episode(fitted, played.num_episodes, make_engine))
    return played


def find_episode(
    make_engine: EngineFactory, holds: Callable[[EpisodeResult], bool], **options: Any
) -> int:
    """Return the index of the first episode whose result satisfies `holds`.

    A test that needs an episode of some kind looks for it: which episode that is changes with
    whatever is drawn otherwise.
    """
    fitted = fit_depth(CheckOptions("mine", **options), make_engine)
    return next(index for index in range(5_000) if holds(run_episode(fitted, index, make_engine)))


@cache
def find_failing(engine: str = "museum:leak-on-abort", preset: str = "tiny", seed: int = 0) -> int:
    """Return the index of the first episode in which an engine fails."""
    make_engine = load_engine(engine)
    return find_episode(
        make_engine, lambda result: result.first is not None, preset=preset, seed=seed
    )
