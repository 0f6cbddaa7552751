"""Feature: the row of a feature in the table (`protocol.features`), with all that is data about it.

A row says which capability an engine needs for a feature, what uses it in a config, in a request or
by an action, and which coverage goals and properties are about it. The rows decide what is drawn,
what an engine is not given, what a run must reach, and what `--with` and `--without` accept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from blockstep.conformance.engine import Capability
from blockstep.spec import vocabulary as v

T = TypeVar("T", v.Config, v.Request)
PLAIN_REQUEST = v.Request("", ())
SEVERAL_AT_ONCE = frozenset({"async", "pipeline"})
"""Names of the features that have several frames in flight; no run has both."""


@dataclass(frozen=True)
class Example:
    """Fields of a config and of a request that ask for a feature or a setting."""

    config: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of a config's fields that is no feature of its own."""

    is_set: Callable[[v.Config], bool]
    """Whether a config has it."""
    examples: tuple[Example, ...]
    """Examples of configs, one for each way that may go with other features."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Blocks that a feature keeps, and no request holds."""

    owner: str
    """The purpose, in words, such as the job."""
    block_tables: v.BlockTables
    entry: Hashable
    """The entry of the state."""
    is_due: bool
    """Whether the next plan gives them back."""


@dataclass(frozen=True, slots=True)
class PartOfSnapshot:
    """A part that a state has only with a feature."""

    name: str
    """The field of `Snapshot`, None without the feature."""
    setting: str
    """The field or property of a config that says whether a state has it."""
    list_kept: Callable[[Any], Iterable[Kept]]
    """Returns the blocks that the part keeps."""
    rename: Callable[[Any, Callable[[v.BlockTables], v.BlockTables]], Any]
    """Returns the part with its blocks renamed."""


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """A row of the table."""

    name: str
    """The name in `--with` and `--without`."""
    summary: str
    capability: Capability | None = None
    """The capability that an engine needs for it; None if every engine has the feature."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Fields of a config that use it, with the values that do not."""
    values: Mapping[str, object] = field(default_factory=dict)
    """The value that uses this feature, for fields that several features share."""
    request: tuple[str, ...] = ()
    """Fields of a request that use it if they differ from their defaults."""
    actions: tuple[type, ...] = ()
    """Actions and events that need it."""
    situations: tuple[str, ...] = ()
    """Coverage goals that need it, by prefixes of their names."""
    hides: tuple[str, ...] = ()
    """Coverage goals, by prefixes, that cannot be reached if every run has the feature."""
    properties: tuple[str, ...] = ()
    """The properties that are mainly about it."""
    part_of: str = ""
    """The feature of which this one is a part: every run with this one has that one, too."""
    switches: tuple[str, ...] = ()
    """Fields or properties of a config that are all false without it; none if a request alone asks
    for it. Where they are false, its checks, goals and gates are not asked."""
    needs: tuple[str, ...] = ()
    """Features without which this one cannot be."""
    apart: Mapping[str, str] = field(default_factory=dict)
    """Features that no run has together with this one, with the reason."""
    yields_to: tuple[str, ...] = ()
    """Features of which this one leaves some kinds out: it is drawn with them only on request."""
    is_late: bool = False
    """Whether it is drawn after everything else, and only for engines that have it, so that an
    engine without it gets the episodes that it would get if the feature did not exist."""
    examples: tuple[Example, ...] = ()
    """Examples of configs and requests, one for each way that may go with other features; the first
    one asks for nothing else."""
    limits: tuple[str, ...] = ()
    """Fields of a config with a number that is simpler if it is smaller, and not 0."""
    goal_fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of a request without which goals cannot be reached, by the beginnings of their names.
    """
    goals_need: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Goals, by the beginnings of their names, that need one of several features besides this one.
    """
    goals_apart: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Goals, by the beginnings of their names, that cannot be reached if every run has one of
    several features."""
    rare: tuple[str, ...] = ()
    """Goals, by the beginnings of their names, that are required only if every run has it."""
    rare_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Goals that are not required with a preset, since they are rare there, by its name."""
    rare_if_wished_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Goals that are not required with a preset if every run has the feature."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Values of the fields that are rows of their own in `judge.pairs`."""
    signals: Mapping[str, str] = field(default_factory=dict)
    """Signals about requests (`judge.pairs`), with what they mean."""
    signals_to_all: Mapping[str, str] = field(default_factory=dict)
    """Signals that name no request."""
    signal_of: Mapping[type, str] = field(default_factory=dict)
    """The signal of a type of event that names no request, and is always the same one."""
    part: PartOfSnapshot | None = None
    """A part of a state that keeps blocks for no request."""
    checks: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Checks without a function of their own: the property and an explanation."""
    headlines: Mapping[str, str] = field(default_factory=dict)
    """Headlines of findings, by the name of the check (`report.headlines`)."""

    def is_asked_by(self, thing: v.Config | v.Request) -> bool:
        """Whether a config or a request uses it."""
        if isinstance(thing, v.Request):
            plain = PLAIN_REQUEST
            return any(getattr(thing, name) != getattr(plain, name) for name in self.request)
        if any(getattr(thing, name) != value for name, value in self.values.items()):
            return False
        return any(getattr(thing, name) != value for name, value in self.config.items())

    def take_from(self, thing: T) -> T:
        """Return the config or request without it."""
        if not self.is_asked_by(thing):
            return thing
        if isinstance(thing, v.Request):
            return replace(thing, **{name: getattr(PLAIN_REQUEST, name) for name in self.request})
        return settle_states(replace(thing, **self.config))  # type: ignore[arg-type]


def without_states(config: v.Config) -> v.Config:
    """Return the config without its recurrent KV groups."""
    return without_kind(config, v.GroupKind.RECURRENT)


def without_kind(config: v.Config, kind: v.GroupKind) -> v.Config:
    """Return the config without its KV groups of one kind.

    The smallest remaining block size becomes the config's. Blocks of a size that is not a multiple
    get that size, too.
    """
    groups = [group for group in config.groups if group.kind is not kind]
    if len(groups) == len(config.groups):
        return config
    size = min([group.block_size for group in groups], default=config.block_size)
    fitting = [it if it.block_size % size == 0 else replace(it, block_size=size) for it in groups]
    return replace(config, groups=tuple(fitting), block_size=size)


def resize_blocks(config: v.Config, size: int) -> v.Config:
    """Return the config with this block size, in token slots, for all KV groups."""
    groups = tuple([replace(group, block_size=size) for group in config.groups])
    return replace(config, block_size=size, groups=groups)


def settle_states(config: v.Config) -> v.Config:
    """Return the config without settings that contradict others.

    Examples are recurrent groups whose mode contradicts prefix caching or that have too few blocks
    for drafts, cross attention without an encoder-decoder model, swap-out without a store, and a
    policy that cannot be without prefix caching.
    """
    if config.swap_min_tokens and (not config.kv_connector or config.has_states):
        config = replace(config, swap_min_tokens=0)
    if any(problem.field == "policy" for problem in v.config_problems(config)):
        config = replace(config, policy=v.Policy.FCFS)
    if not config.is_encoder_decoder:
        config = without_kind(config, v.GroupKind.CROSS_ATTENTION)
    return without_states(config) if v.config_problems(config) else config
