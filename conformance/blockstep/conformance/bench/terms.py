"""Terms: the inputs that engines can take, and the engine that records the workload.

Exact engines are timed together, on a workload recorded with one engine of ours, and must make the
same decisions. Any other engine is timed by itself: at `safety` it records the workload itself,
since its decisions are its own; at the equivalences in between it must decide as ours does, except
for block ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blockstep.conformance.engine import EXACT, Equivalence, Safety, get_capabilities, get_traits
from blockstep.conformance.protocol.features import find_lacking, get_missing
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.vocabulary import Config, Request

PILOT = "host"
"""The engine with which the workload is recorded. It returns arrays, as the engines that it is
compared with do: a plan of the protocol does not say how new and resumed rows mix."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of engines that are timed together."""

    pilot: str = PILOT
    """The engine with which the workload is recorded."""
    weaker: Equivalence | None = None
    """The equivalence of the one engine; None if all are exact."""

    @property
    def equivalence(self) -> str:
        """Name of the equivalence."""
        return EXACT if self.weaker is None else self.weaker.name

    @property
    def sees_blocks(self) -> bool:
        """Whether block ids are part of a decision."""
        return self.weaker is None or self.pilot != PILOT

    def fit_config(self, config: Config) -> Config:
        """Return the nearest config that the engines can take."""
        return config if self.weaker is None else self.weaker.fit_config(config)

    def fit_requests(self, requests: Iterable[Request], config: Config) -> Iterator[Request]:
        """Yield the nearest requests that the engines can take, without those that are declined."""
        if self.weaker is None:
            yield from requests
            return
        for request in requests:
            fitting = self.weaker.fit_request(request, config)
            if fitting is not None:
                yield fitting


ALL_EXACT = Terms()


def get_terms(engines: Sequence[str]) -> Terms:
    """Return the terms of engines that are timed together: all exact, or one alone.

    Raises:
        EngineNotFoundError: an engine cannot be loaded.
    """
    for name in engines:
        weaker = None if name == "vllm" else get_traits(load_engine(name)).equivalence
        if weaker is not None:
            assert len(engines) == 1, "engines that are not exact are timed by themselves"
            is_own = isinstance(weaker, Safety)
            return Terms(name if is_own else PILOT, weaker)
    return ALL_EXACT


def split(engines: Sequence[str]) -> list[tuple[str, ...]]:
    """Return groups of engines to be timed together: the exact ones, then each other one."""
    others = [name for name in engines if get_terms([name]).weaker is not None]
    exact = tuple(name for name in engines if name not in others)
    return [*([exact] if exact else []), *((name,) for name in others)]


def find_obstacle(engine: str, config: Config) -> str | None:
    """Return what an engine lacks for a config; None if nothing."""
    if engine == "vllm":
        return None
    lacking = find_lacking(get_capabilities(load_engine(engine)))
    missing = get_missing(config, lacking)
    return None if missing is None else str(missing)
