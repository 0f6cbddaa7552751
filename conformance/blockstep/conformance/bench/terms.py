"""Terms: what an engine can be given here, and by whose decisions it is timed.

Whoever is held to the specification exactly is timed together with others of that kind, on traffic
that one engine of ours writes down, and must decide as that one does. Any other engine is timed by
itself: at `safety` it writes its own traffic down, for what it decides is its own business; in
between it must decide as ours does, but for the ids of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blockstep.conformance.engine import EXACT, Equivalence, Safety, get_capabilities, get_traits
from blockstep.conformance.protocol.features import find_lacking, get_missing
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.vocabulary import Config, Request

PILOT = "fastest"
"""The engine on which the traffic is written down. Where engines are asked in arrays it is one of
them: a plan of the protocol does not say how new and resumed rows mix."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Of engines that are timed together."""

    pilot: str = PILOT
    """On whom the traffic is written down."""
    weaker: Equivalence | None = None
    """The equivalence that the one engine declares; None: all are exact."""

    @property
    def equivalence(self) -> str:
        """By name."""
        return EXACT if self.weaker is None else self.weaker.name

    @property
    def sees_blocks(self) -> bool:
        """Whether the ids of blocks are part of what was decided."""
        return self.weaker is None or self.pilot != PILOT

    def fit_config(self, config: Config) -> Config:
        """The nearest config that can be given."""
        return config if self.weaker is None else self.weaker.fit_config(config)

    def fit_requests(self, requests: Iterable[Request], config: Config) -> Iterator[Request]:
        """The nearest requests that can be given; one that the engine declines is left out."""
        if self.weaker is None:
            yield from requests
            return
        for request in requests:
            fitting = self.weaker.fit_request(request, config)
            if fitting is not None:
                yield fitting


ALL_EXACT = Terms()


def get_terms(engines: Sequence[str]) -> Terms:
    """The terms of engines that are timed together: all exact, or one alone.

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
    """The engines that are timed together: those that are exact, then each other one."""
    others = [name for name in engines if get_terms([name]).weaker is not None]
    exact = tuple(name for name in engines if name not in others)
    return [*([exact] if exact else []), *((name,) for name in others)]


def find_obstacle(engine: str, config: Config) -> str | None:
    """What an engine lacks for a scenario's config, or None."""
    if engine == "vllm":
        return None
    lacking = find_lacking(get_capabilities(load_engine(engine)))
    missing = get_missing(config, lacking)
    return None if missing is None else str(missing)
