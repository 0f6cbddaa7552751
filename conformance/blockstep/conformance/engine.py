"""The protocol that a system under test implements to be checked against the spec.

An engine is one object for one run, made by a factory, often its class. What is true of all
engines of a factory is in its attribute `traits`; what depends on a run, an engine says by methods
of its own (`Declining`, `Judging`). Both are optional: an engine without them is compared with
the specification after every event.

    class Adapter:
        traits = EngineTraits(max_depth=2, version="1.4")
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import NoneType
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from blockstep.spec.profiles import get_profile
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
    """A part that an engine may implement. What it lacks is reported, never skipped silently."""

    SNAPSHOT = "snapshot"
    """It can show its whole state; without it only observations are compared."""
    PRIORITY = "priority"
    DRAFTS = "drafts"
    PAUSE = "pause"
    RESET = "reset"
    GRAMMAR = "grammar"
    MASKS = "masks"
    """It takes a `grammar` and `GrammarFailed`, and returns bitmasks (`GrammarBitmask`); needs
    GRAMMAR."""
    MULTIMODAL = "multimodal"
    ABORT = "abort"
    """It takes `Abort`, at any time and for any id (P18)."""
    REJECTION = "rejection"
    """It answers bad input with a typed `Rejected`. Without it, behaviour may be undefined, and an
    engine gets only events that the spec accepts."""
    ASYNC = "async"
    """It takes `async_scheduling`: several frames in flight, with placeholders for their tokens."""
    PIPELINE = "pipeline"
    """It takes `max_frames_in_flight` above 1 without `async_scheduling`."""
    EMBEDS = "embeds"
    """It takes requests with `prompt_embeds`."""
    GROUPS = "groups"
    """It takes `groups`: several KV groups, of full attention or a sliding window, with one block
    size."""
    KINDS = "kinds"
    """It takes groups of every kind, and of several block sizes; needs GROUPS."""
    ADAPTERS = "adapters"
    """It takes `max_loras`: a limit on the different LoRA adapters among running requests."""
    CADENCE = "cadence"
    """It takes `prefill_schedule_interval`: prompts are held while requests decode."""
    SESSIONS = "sessions"
    """It takes `resumable` requests and `StreamingUpdate`."""
    ENCODER = "encoder"
    """It takes `encoder_cache_size`: encoder outputs of items, with a budget per step and a cache.
    """
    EVENTS = "events"
    """It takes `enable_kv_cache_events`, and returns `kv_events`."""
    TRANSFERS = "transfers"
    """It takes `kv_connector`: loads from a store, and blocks held for transfers."""
    PINS = "pins"
    """It takes `Policy.CONTINUUM`: blocks are pinned between two turns of a job, for a time."""
    FORKS = "forks"
    """It takes `enable_forks`, `Fork`, `watermark_blocks` and `pool_order`."""
    TIERS = "tiers"
    """It takes `swap_min_tokens`, `admission_low_blocks` and `admission_high_blocks`."""
    STATISTICS = "statistics"
    """The engine's counters have the meaning that `Stats` says."""
    CACHE_STATISTICS = "cache statistics"
    """The counters of the prefix cache and of drafts have it, even if that of preemptions does not.
    """
    COMMON_PREFIX = "common prefix"
    """The engine's plans have `num_common_prefix_blocks`."""
    LATE_DRAFTS = "late drafts"
    """It drops drafts for a request that cannot take them (P24). Without it, and without REJECTION,
    an engine gets only drafts that the spec attaches, and those of chunks where plans are compared.
    """

    WORK = "work"
    """The engine's state has `has_work`: whether the engine loop must continue planning."""


ALL_CAPABILITIES: frozenset[str] = frozenset(Capability)


class BadEngineError(TypeError):
    """A factory, or its engine, does not follow the protocol; the text says how."""


class EngineFault(Exception):
    """The engine failed. The driver reports this as a finding, with the program that led to it."""

    state: Snapshot | None = None
    """The result of `snapshot`, if the fault is that the state contradicts itself. The properties
    are then checked on it, and name the cause."""
    answer: Observation | None = None
    """The result of `apply`, if the fault is that the answer contradicts itself. It is compared and
    checked like any other."""
    last_words: tuple[str, ...] = ()
    """The last lines on standard error of an engine in a process of its own that has ended."""


@runtime_checkable
class Engine(Protocol):
    """A system under test. One object is one run: it is built from a Config and never reused."""

    def apply(self, event: Event) -> Observation:
        """Take one event.

        May raise only `EngineFault`; any other exception is a finding as well.
        """
        ...

    def snapshot(self) -> Snapshot | None:
        """Return the canonical state after the last event; None if the engine cannot show it."""
        ...

    def capabilities(self) -> frozenset[str]:
        """Return what the engine implements: values of `Capability`."""
        ...


EngineFactory: TypeAlias = Callable[[Config], Engine]
METHODS = ("apply", "snapshot", "capabilities")


# Protocols of one engine.


@runtime_checkable
class Declining(Protocol):
    """An engine with known defects that must not be given the events that trigger them.

    If an engine takes an event and fails only some steps later, lock-step can neither continue nor
    report anything new. Declined events are counted in the report, by the defect.
    """

    def declines(self, event: Event) -> str | None:
        """Return the known defect for which the event must not be given now, or None.

        Called before every event; must not change the engine.
        """
        ...


@runtime_checkable
class Judging(Protocol):
    """An engine that in general rejects nothing, but must reject some events.

    Without `Capability.REJECTION` an engine gets only events that the spec accepts, since a front
    end checks the input. Events that no front end can check are given all the same, and must be
    rejected.
    """

    judges: frozenset[RejectCode]
    """Reject codes that it must return."""


def get_judged(engine: Engine) -> frozenset[RejectCode]:
    """Return the reject codes of events that an engine gets although the spec rejects them."""
    if Capability.REJECTION in engine.capabilities():
        return frozenset(RejectCode)
    return engine.judges if isinstance(engine, Judging) else frozenset()


def get_declines(engine: Engine) -> Callable[[Event], str | None] | None:
    """Return the function that says why an engine must not get an event; None if it takes all."""
    return engine.declines if isinstance(engine, Declining) else None


# Traits of a factory, and so of all its engines.


@dataclass(frozen=True, slots=True)
class Equivalence:
    """The rule by which an engine is compared with the spec; without one everything is (`exact`).

    Not to be used itself: see `EQUIVALENCES` (and docs/explanation/equivalences.md).
    """

    name: ClassVar[str] = ""
    fit_config: Callable[[Config], Config] = lambda config: config
    """Returns the nearest config that the engine can be built with."""
    fit_request: Callable[[Request, Config], Request | None] = lambda request, _config: request
    """Returns the nearest request that the engine takes; None if it takes none, and then nothing is
    submitted. Both are counted in the verdict."""
    situations: tuple[str, ...] | None = field(default=None, kw_only=True)
    """The coverage goals that a run must reach for a pass to count; names of `witnesses.WITNESSES`.
    None: all that the capabilities of the engine make reachable."""
    plans_ahead: bool = field(default=False, kw_only=True)
    """Whether its loop commits a plan only once the most plans are in flight, or nothing can be
    planned: with two frames in flight the order of every run is plan, plan, commit, plan, commit.
    """

    @property
    def not_asked(self) -> tuple[str, ...]:
        """Parts that a check at this equivalence leaves out, in words for its verdict."""
        return ()


@dataclass(frozen=True, slots=True)
class Renamed(Equivalence):
    """Equal up to a bijection of block ids and the order of the free queue
    (`lockstep.renamed_equivalence`)."""

    name: ClassVar[str] = "renamed"

    @property
    def not_asked(self) -> tuple[str, ...]:
        """Parts that a check at this equivalence leaves out, in words for its verdict."""
        return ("block ids, and the order of the free queue",)


@dataclass(frozen=True, slots=True)
class SamePlans(Equivalence):
    """Equal in the tokens of each request in each step (see `lockstep.plan_equivalence`)."""

    name: ClassVar[str] = "plan"
    shows_blocks: bool = field(default=False, kw_only=True)
    """Whether plans name blocks. If not, each `block_ids` and `new_block_ids` is `()`, and the
    content of slots is not checked."""

    @property
    def not_asked(self) -> tuple[str, ...]:
        """Parts that a check at this equivalence leaves out, in words for its verdict."""
        states = "states, and properties of states"
        return (
            (states,) if self.shows_blocks else (states, "the content of slots, and block tables")
        )


@dataclass(frozen=True, slots=True)
class Safety(Equivalence):
    """Compared with nothing, and checked by the properties (see `lockstep.safety_equivalence`).

    `blockstep properties --all` lists what is checked, with the reason for each check that is not.
    """

    name: ClassVar[str] = "safety"
    has_slots: bool = field(default=True, kw_only=True)
    """Whether its worker has a slot for each running request, `max_num_seqs` in all. If not, that
    is the most rows of a plan, and more requests may run."""

    @property
    def not_asked(self) -> tuple[str, ...]:
        """Parts that a check at this equivalence leaves out, in words for its verdict."""
        return () if self.has_slots else ("how many requests run at once",)


EQUIVALENCES: tuple[type[Equivalence], ...] = (Renamed, SamePlans, Safety)
"""Equivalences weaker than `exact`, the strongest first."""
EXACT = "exact"
"""The name of the equivalence of an engine that declares none."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A known difference of an engine, declared by its adapter.

    The findings that it explains are counted and shown in every verdict; no others are let pass. If
    neither side can continue after it, the episode ends there.
    """

    name: str
    summary: str
    """The difference in one line: what the engine does."""
    program: Any
    """A `protocol.program.Program` that shows it. If it no longer does, the verdict says so."""
    sentences: tuple[str, ...] = ()
    """Names of the checks whose findings it explains."""
    fields: tuple[str, ...] = ()
    """Fields in which spec and engine may differ, as reports name them, with `*` for any part:
    `rows * num_cached_tokens`."""
    when: Callable[[Event, Observation | None], bool] = lambda _event, _answer: True
    """The steps in which it counts: a function of the event and the engine's observation, which is
    None if the engine raised or hung."""


@dataclass(frozen=True, slots=True)
class PartOfState(Snapshot):
    """A partial state, of what `show_state` takes."""


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
    """Return a snapshot of what every engine can show; other parts of a `Snapshot` are not checked.

    `requests` are sorted by id, and need only an id, status, outputs, computed tokens and block
    tables: a field at its default is not compared. Queues must have their true order, since a state
    that returns is taken for a cycle. A block has a key if it can be hit now. `has_work` is what
    the engine's own loop asks before it sleeps, if it does.
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
    """An option of the system under test that a check sets to another value than its default."""

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
    """The traits of all engines of a factory, besides their capabilities."""

    equivalence: Equivalence | None = None
    """The equivalence at which they are compared with the spec; None: `exact`."""
    fit_config: Callable[[Config], tuple[Config, str | None]] = lambda config: (config, None)
    """Returns the nearest config that they can be built with, and the reason for a change or None.
    It is for limits that no capability expresses, for example two features that exclude each other.
    """
    make_worker: Callable[..., Any] | None = None
    """Makes the worker for their plans from a config and a token function; None: `Worker`."""
    drops_tokens_in_flight: bool = False
    """Whether a preempted request loses the tokens that frames in flight sample for it: no client
    gets them, and their positions are computed again. Otherwise a request waits for its tokens
    before it is resumed, and gets them. Only at the equivalence `safety`: the specification drops
    none."""
    max_depth: int | None = None
    """The most frames in flight of a run; None: no limit."""
    deviations: tuple[Deviation, ...] = ()
    """Known differences, whose findings are let pass."""
    out_of_reach: frozenset[str] = frozenset()
    """Coverage goals that cannot be reached, and are not required."""
    out_of_reach_with: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The same where every config has a feature, by the name of the feature."""
    workarounds: Mapping[str, str] = field(default_factory=dict)
    """Options of theirs that hide a defect, each with that defect in words: `blockstep hunt`
    switches them off."""
    version: str = ""
    """Version of the system under test."""
    profile: str = ""
    """The profile of that version (`--profile`): a hunt asks it before any other."""
    notes: tuple[str, ...] = ()
    """Notes for the verdict, one line each."""
    settings: tuple[Setting, ...] = ()
    """Settings that differ from their defaults; every verdict names these."""
    write_script: Callable[[Any], Any] | None = None
    """Returns a finding (`protocol.story.Story`) as a `Script` of the engine alone, for an issue;
    None: the adapter has no such scripts."""


NO_TRAITS = EngineTraits()


def get_traits(make_engine: EngineFactory) -> EngineTraits:
    """Return the traits of a factory.

    Raises:
        BadEngineError: its attribute `traits` is something else, or has an unknown equivalence.
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
            "an engine that does is checked at Safety()"
        )
    if traits.max_depth is not None and traits.max_depth < 1:
        raise BadEngineError(
            f"max_depth of {make_engine!r:.80}: must be at least 1, not {traits.max_depth}; "
            "without it, as many plans are in flight as the capabilities allow"
        )
    if traits.profile and get_profile(traits.profile) is None:
        raise BadEngineError(
            f"profile of {make_engine!r:.80}: {traits.profile!r} is no profile; "
            "`blockstep quirks` lists them"
        )
    for one in traits.deviations:
        if not isinstance(one, Deviation) or not (one.sentences or one.fields):
            raise BadEngineError(
                f"deviations of {make_engine!r:.80}: each must be a Deviation that names the "
                f"checks or fields that it explains, not {one!r:.80}"
            )
    return traits


def get_equivalence_name(make_engine: EngineFactory) -> str:
    """Return the name of the equivalence of a factory's engines. Raises as `get_traits`."""
    weaker = get_traits(make_engine).equivalence
    return EXACT if weaker is None else weaker.name


def get_capabilities(make_engine: EngineFactory) -> frozenset[str]:
    """Return the capabilities of the engines of a factory; builds one to ask it, once for each of
    the last factories."""
    return (_ask_once if isinstance(make_engine, Hashable) else _ask)(make_engine)


def _ask(make_engine: EngineFactory) -> frozenset[str]:
    config, weaker = Config(num_blocks=8, max_model_len=64), get_traits(make_engine).equivalence
    if weaker is not None:
        config = weaker.fit_config(config)
        if not isinstance(config, Config):
            raise BadEngineError(
                f"fit_config of {make_engine!r:.80}: must return a Config, not {config!r:.80}"
            )
    return build(make_engine, config).capabilities()


_ask_once = lru_cache(maxsize=8)(_ask)


def build(make_engine: EngineFactory, config: Config) -> Engine:
    """Return an engine for one run.

    Exceptions of the factory pass through.

    Raises:
        BadEngineError: it returned something else, or an engine without valid capabilities,
            or one that shows a state without the capability.
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
