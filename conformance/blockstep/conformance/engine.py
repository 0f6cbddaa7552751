"""Engine: what a system under test implements to be held to the spec (architecture section 4)."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

from blockstep.spec.vocabulary import Config, Event, Observation, RejectCode, Snapshot


class Capability(StrEnum):
    """What an engine implements. What it lacks is reported, never skipped in silence."""

    SNAPSHOT = "snapshot"
    """It can show its whole state; without it only observations are compared."""
    PRIORITY = "priority"
    DRAFTS = "drafts"
    PAUSE = "pause"
    RESET = "reset"
    GRAMMAR = "grammar"
    MULTIMODAL = "multimodal"
    REJECTION = "rejection"
    """It answers bad input with a typed `Rejected` instead of undefined behaviour. Without it, an
    engine is only given what the spec accepts."""
    ASYNC = "async"
    """It takes `async_scheduling`: several frames in flight, with placeholders for their tokens."""
    PIPELINE = "pipeline"
    """It takes `max_frames_in_flight` above 1 without `async_scheduling`."""
    EMBEDS = "embeds"
    """It takes requests with `prompt_embeds`."""
    STATISTICS = "statistics"
    """Its counters mean what `Stats` says."""
    CACHE_STATISTICS = "cache statistics"
    """Those of the prefix cache and of drafts do, even if it has none for preemptions."""
    LATE_DRAFTS = "late drafts"
    """It drops drafts that come when their request cannot take them (P24). Without it, and without
    REJECTION, an engine is only given drafts that the spec attaches."""


ALL_CAPABILITIES: frozenset[str] = frozenset(Capability)


class EngineFault(Exception):
    """The engine broke. The driver reports it as a finding, with the program that led to it."""


@runtime_checkable
class Engine(Protocol):
    """A system under test. One object is one run: it is built from a Config and never reused."""

    def apply(self, event: Event) -> Observation:
        """Take one event. May raise only `EngineFault`; anything else is a finding as well."""
        ...

    def snapshot(self) -> Snapshot | None:
        """The canonical state after the last event; None if it can only be observed."""
        ...

    def capabilities(self) -> frozenset[str]:
        """What it implements: values of `Capability`."""
        ...


@runtime_checkable
class Declining(Protocol):
    """An engine with defects so well known that it is spared what would end a run later on.

    Where an engine takes an event and breaks only some steps after it, lock-step could neither go
    on nor say anything new. What it declines is counted in the report, by the defect.
    """

    def declines(self, event: Event) -> str | None:
        """The known defect because of which the event must not be given to it now, or None.

        Asked before every event, and changes nothing.
        """
        ...


@runtime_checkable
class Judging(Protocol):
    """An engine that refuses nothing in general, but must see to some things itself.

    Without `Capability.REJECTION` an engine is given only what the spec accepts: bad input is its
    front end's business. What no front end can know, it is given all the same, and should refuse.
    """

    judges: frozenset[RejectCode]
    """Refusals that it is held to."""


EngineFactory: TypeAlias = Callable[[Config], Engine]


def is_async(make_engine: EngineFactory) -> bool:
    """Whether the engine can have several frames in flight. Asks one built for the purpose."""
    probe = make_engine(Config(num_blocks=8, max_model_len=64))
    return Capability.ASYNC in probe.capabilities()
