"""Engine: what a system under test implements to be held to the spec (architecture section 4).

An engine is one object for one run, made by a factory: often its class. What is true of all its
engines, the factory says by an attribute `traits`; what depends on a run, an engine says by methods
of its own (`Declining`, `Judging`). Neither is owed: an engine that says nothing is compared with
the specification after every event.

    class Adapter:
        traits = EngineTraits(max_depth=2, version="1.4")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import NoneType
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from blockstep.spec.vocabulary import (
    BlockId,
    BlockKey,
    Config,
    Event,
    Observation,
    PauseState,
    RejectCode,
    Request,
    RequestId,
    RequestSnapshot,
    Snapshot,
    Stats,
)


class Capability(StrEnum):
    """What an engine implements. What it lacks is reported, never skipped in silence."""

    SNAPSHOT = "snapshot"
    """It can show its whole state; without it only observations are compared."""
    PRIORITY = "priority"
    DRAFTS = "drafts"
    PAUSE = "pause"
    RESET = "reset"
    GRAMMAR = "grammar"
    MASKS = "masks"
    """It takes a `grammar`, `GrammarFailed`, and says masks (`GrammarBitmask`); with GRAMMAR."""
    MULTIMODAL = "multimodal"
    ABORT = "abort"
    """It takes `Abort`, at any time and for any id (P18)."""
    REJECTION = "rejection"
    """It answers bad input with a typed `Rejected` instead of undefined behaviour. Without it, an
    engine is only given what the spec accepts."""
    ASYNC = "async"
    """It takes `async_scheduling`: several frames in flight, with placeholders for their tokens."""
    PIPELINE = "pipeline"
    """It takes `max_frames_in_flight` above 1 without `async_scheduling`."""
    EMBEDS = "embeds"
    """It takes requests with `prompt_embeds`."""
    GROUPS = "groups"
    """It takes `groups`: several KV-cache groups, under full attention or a sliding window, in
    blocks of one size."""
    KINDS = "kinds"
    """It takes groups of every kind, and of several block sizes; with GROUPS."""
    ADAPTERS = "adapters"
    """It takes `max_loras`: a cap on the different adapters among the requests that run."""
    SESSIONS = "sessions"
    """It takes requests that are `resumable`, and `StreamingUpdate`."""
    ENCODER = "encoder"
    """It takes `encoder_cache_size`: what an encoder makes of items has a budget and a cache."""
    EVENTS = "events"
    """It takes `enable_kv_cache_events`, and tells `kv_events`."""
    TRANSFERS = "transfers"
    """It takes `kv_connector`: loads from a store, and blocks that outlive their request."""
    PINS = "pins"
    """It takes `Policy.CONTINUUM`: blocks stay between two turns of a job, for a time."""
    FORKS = "forks"
    """It takes `enable_forks`, `Fork`, `watermark_blocks` and `pool_order`."""
    TIERS = "tiers"
    """It takes `swap_min_tokens`, `admission_low_blocks` and `admission_high_blocks`."""
    STATISTICS = "statistics"
    """Its counters mean what `Stats` says."""
    CACHE_STATISTICS = "cache statistics"
    """Those of the prefix cache and of drafts do, even if it has none for preemptions."""
    COMMON_PREFIX = "common prefix"
    """Its plans tell `num_common_prefix_blocks`."""
    LATE_DRAFTS = "late drafts"
    """It drops drafts that come when their request cannot take them (P24). Without it, and without
    REJECTION, an engine is only given drafts that the spec attaches."""

    WORK = "work"
    """Its state says `has_work`: whether the loop that drives it must go on planning."""


ALL_CAPABILITIES: frozenset[str] = frozenset(Capability)


class BadEngineError(TypeError):
    """A factory, or what it makes, is not what the protocol asks for; the text names what."""


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


EngineFactory: TypeAlias = Callable[[Config], Engine]
METHODS = ("apply", "snapshot", "capabilities")


# Of one engine.


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


def get_judged(engine: Engine) -> frozenset[RejectCode]:
    """What an engine is given although the spec refuses it so, for it should do likewise."""
    if Capability.REJECTION in engine.capabilities():
        return frozenset(RejectCode)
    return engine.judges if isinstance(engine, Judging) else frozenset()


def get_declines(engine: Engine) -> Callable[[Event], str | None] | None:
    """What says why an engine is not to be given an event; None: it takes all."""
    return engine.declines if isinstance(engine, Declining) else None


# Of a factory, and so of all its engines.


@dataclass(frozen=True, slots=True)
class Equivalence:
    """By what engines are held to the spec; one that names none is `exact`: equal in everything.

    Not to be used by itself: see `EQUIVALENCES` (and docs/explanation/equivalences.md).
    """

    name: ClassVar[str] = ""
    fit_config: Callable[[Config], Config] = lambda config: config
    """The nearest config that the engine can be built with."""
    fit_request: Callable[[Request, Config], Request | None] = lambda request, _config: request
    """The nearest request that it understands; None if the request is not for it, and then it is
    not submitted. Either is counted: what is dropped on the way, and how many are not for it."""
    situations: tuple[str, ...] | None = field(default=None, kw_only=True)
    """What a run must have reached to mean anything; names of `witnesses.WITNESSES`. None: all
    that the capabilities of the engine make possible."""
    plans_ahead: bool = field(default=False, kw_only=True)
    """Its loop answers a plan only once as many as may be are in flight, or nothing can be planned:
    with two frames in flight, the order of every run is plan, plan, answer, plan, answer."""

    @property
    def not_asked(self) -> tuple[str, ...]:
        """What a check by it leaves out, in words for its verdict."""
        return ()


@dataclass(frozen=True, slots=True)
class Renamed(Equivalence):
    """Equal up to a bijection of block ids and the order of the free queue (`lockstep.renamed`)."""

    name: ClassVar[str] = "renamed"

    @property
    def not_asked(self) -> tuple[str, ...]:
        """What a check by it leaves out, in words for its verdict."""
        return ("block ids, and the order of the free queue",)


@dataclass(frozen=True, slots=True)
class SamePlans(Equivalence):
    """The same tokens for the same requests in the same steps (see `lockstep.plans`)."""

    name: ClassVar[str] = "plan"
    shows_blocks: bool = field(default=False, kw_only=True)
    """Whether plans name blocks. Without, each `block_ids` and `new_block_ids` is `()`, and what is
    in a slot is not asked."""

    @property
    def not_asked(self) -> tuple[str, ...]:
        """What a check by it leaves out, in words for its verdict."""
        states = "states, and properties that speak of them"
        return (states,) if self.shows_blocks else (states, "what is in a slot, and block tables")


@dataclass(frozen=True, slots=True)
class Safety(Equivalence):
    """To be held to the properties, and compared with nothing (see `lockstep.safety`).

    What is asked: `blockstep properties` lists it, with the reason for each sentence that is not.
    """

    name: ClassVar[str] = "safety"
    has_slots: bool = field(default=True, kw_only=True)
    """Whether its worker has a slot for each request that runs, `max_num_seqs` in all. If not, that
    is the most rows of a plan, and more requests may run."""

    @property
    def not_asked(self) -> tuple[str, ...]:
        """What a check by it leaves out, in words for its verdict."""
        return () if self.has_slots else ("how many requests run at once",)


EQUIVALENCES: tuple[type[Equivalence], ...] = (Renamed, SamePlans, Safety)
"""Weaker ones than `exact`, the strongest first."""
EXACT = "exact"
"""The name of the equivalence that an engine has that names none."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Something that an engine is known to do otherwise, said by its adapter (D14).

    What it excuses is counted and shown in every verdict, and nothing else is excused. Where
    neither side can go on from it, an episode ends there.
    """

    name: str
    summary: str
    """What the engine does, in a sentence."""
    program: Any
    """A `protocol.program.Program` that shows it. If it does no more, the verdict says so."""
    sentences: tuple[str, ...] = ()
    """Those that may complain of it, by name, as findings name them."""
    fields: tuple[str, ...] = ()
    """Fields in which spec and engine may differ, as reports name them, with `*` for any part:
    `rows * num_cached_tokens`."""
    when: Callable[[Event, Observation | None], bool] = lambda _event, _answer: True
    """In which steps: of the event and the engine's answer; None if it raised or stands still."""


@dataclass(frozen=True, slots=True)
class PartOfState(Snapshot):
    """A state of which an engine shows what `show_state` takes, and no more."""


def show_state(
    requests: Sequence[RequestSnapshot],
    waiting: Sequence[RequestId],
    running: Sequence[RequestId],
    ref_counts: tuple[int, ...],
    free_queue: tuple[BlockId, ...],
    block_keys: tuple[BlockKey | None, ...],
    num_frames_in_flight: int,
    has_work: bool | None = None,
) -> PartOfState:
    """A snapshot of what every engine can show; what else a `Snapshot` has is not judged.

    `requests` are sorted by id, and need name their id, status, outputs, computed tokens and block
    tables only: a field at its default is not compared. Queues are in their true order, for a state
    that returns is taken for a cycle. A block has a key if it can be hit now. `has_work` is what
    the engine's own loop asks before it sleeps, if it asks anything.
    """
    cached: dict[BlockKey, tuple[BlockId, ...]] = {}
    for block, key in enumerate(block_keys):
        if key is not None:
            cached[key] = (*cached.get(key, ()), block)
    return PartOfState(
        pause_state=PauseState.UNPAUSED,
        waiting=tuple(waiting),
        skipped_waiting=(),
        running=tuple(running),
        requests=tuple(requests),
        ref_counts=ref_counts,
        free_queue=free_queue,
        block_keys=block_keys,
        cached=cached,
        frames_in_flight=tuple(range(num_frames_in_flight)),
        next_frame_id=num_frames_in_flight,
        finished_req_ids=(),
        prev_scheduled_req_ids=(),
        stats=Stats(),
        has_work=has_work,
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """A knob of what is under test that a check sets to another value than its default (D19)."""

    name: str
    """A few words for the verdict."""
    knob: str
    default: str
    checked: str
    where: str
    """The configs in which it makes a difference."""
    reason: str


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What a factory says of its engines, besides what they can do (`Engine.capabilities`)."""

    equivalence: Equivalence | None = None
    """By what they are held to the spec; None: `exact`."""
    fit_config: Callable[[Config], tuple[Config, str | None]] = lambda config: (config, None)
    """The nearest config that they can be built with, and why it is another one; None if it is
    not. For what follows from no capability: they have each of two features, and not both."""
    make_worker: Callable[..., Any] | None = None
    """From a config and a token function to the worker that runs their plans; None: `Worker`."""
    drops_tokens_in_flight: bool = False
    """Whether a preempted request loses the tokens that frames in flight sample for it: no client
    gets them, and their positions run again. Otherwise a request waits for its tokens before it is
    resumed, and gets them. Only at the equivalence `safety`: the specification drops none."""
    max_depth: int | None = None
    """Frames in flight that a run may have, at most; None: as many as are wanted."""
    deviations: tuple[Deviation, ...] = ()
    """What is known of them and passed over."""
    out_of_reach: frozenset[str] = frozenset()
    """Situations that cannot come up, and are not required."""
    workarounds: Mapping[str, str] = field(default_factory=dict)
    """Flags of theirs that keep a defect from showing, each with that defect in words:
    `blockstep hunt` switches them off."""
    version: str = ""
    """Of what is under test."""
    profile: str = ""
    """What is known of that version, by name (`--profile`): a hunt asks it before any other."""
    notes: tuple[str, ...] = ()
    """What a run has to say of it beside its verdict, a sentence each."""
    settings: tuple[Setting, ...] = ()
    """Where it is checked away from its defaults; every verdict names these."""


NO_TRAITS = EngineTraits()


def get_traits(make_engine: EngineFactory) -> EngineTraits:
    """What a factory says of its engines.

    Raises:
        BadEngineError: its attribute `traits` is something else, or its equivalence is none.
    """
    traits = getattr(make_engine, "traits", NO_TRAITS)
    if not isinstance(traits, EngineTraits):
        raise BadEngineError(
            f"traits of {make_engine!r:.80}: must be EngineTraits, not {traits!r:.80}"
        )
    if not isinstance(traits.equivalence, (*EQUIVALENCES, NoneType)):
        known = ", ".join(f"{kind.__name__}()" for kind in EQUIVALENCES)
        raise BadEngineError(
            f"equivalence of {make_engine!r:.80}: must be None (exact) or one of {known}, "
            f"not {traits.equivalence!r:.80}"
        )
    if traits.drops_tokens_in_flight and not isinstance(traits.equivalence, Safety):
        raise BadEngineError(
            f"drops_tokens_in_flight of {make_engine!r:.80}: the specification drops no token, so "
            "an engine that does is held to Safety()"
        )
    for one in traits.deviations:
        if not isinstance(one, Deviation) or not (one.sentences or one.fields):
            raise BadEngineError(
                f"deviations of {make_engine!r:.80}: each must be a Deviation that names the "
                f"sentences or fields that it excuses, not {one!r:.80}"
            )
    return traits


def get_equivalence_name(make_engine: EngineFactory) -> str:
    """By what a factory's engines are held to the spec. Raises as `get_traits`."""
    weaker = get_traits(make_engine).equivalence
    return EXACT if weaker is None else weaker.name


def get_capabilities(make_engine: EngineFactory) -> frozenset[str]:
    """What the engines of a factory implement. Asks one built for the purpose."""
    config, weaker = Config(num_blocks=8, max_model_len=64), get_traits(make_engine).equivalence
    if weaker is not None:
        config = weaker.fit_config(config)
        if not isinstance(config, Config):
            raise BadEngineError(
                f"fit_config of {make_engine!r:.80}: must return a Config, not {config!r:.80}"
            )
    return build(make_engine, config).capabilities()


def build(make_engine: EngineFactory, config: Config) -> Engine:
    """An engine for one run. What the factory raises passes through.

    Raises:
        BadEngineError: it made something else, or something that cannot say what it implements,
            or that returns a state without naming the capability.
    """
    engine = make_engine(config)
    lacks = [name for name in METHODS if not callable(getattr(engine, name, None))]
    if lacks:
        raise BadEngineError(
            f"factory {make_engine!r:.80}: returned {engine!r:.80}, which has no {lacks[0]}(); "
            f"an engine has the methods {', '.join(METHODS)}"
        )
    named = engine.capabilities()
    if not isinstance(named, frozenset | set):
        raise BadEngineError(
            f"capabilities() of {engine!r:.80}: must be a set of names, not {named!r:.80}"
        )
    for name in sorted(map(str, named - ALL_CAPABILITIES)):
        known = ", ".join(sorted(ALL_CAPABILITIES))
        raise BadEngineError(f"capabilities() of {engine!r:.80}: {name!r} is none of {known}")
    if Capability.SNAPSHOT not in named and _shows_state(engine):
        raise BadEngineError(
            f"snapshot() of {type(engine).__name__}: returned a state, and capabilities() "
            f"does not name {Capability.SNAPSHOT.value!r}; name it, or return None"
        )
    return engine


def _shows_state(engine: Engine) -> bool:
    """Return whether a new engine shows a state; if it raises, the first event reports that."""
    try:
        return engine.snapshot() is not None
    except Exception:
        return False
