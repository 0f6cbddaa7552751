"""A shard: the states of a walk that one process owns, and what it finds in them.

The digest decides which shard owns a state. A shard records the states that it has seen, tries
every event in the new ones, and sends states of other shards to them (see `walk`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from blockstep.conformance.engine import (
    ALL_CAPABILITIES,
    Capability,
    Engine,
    Equivalence,
    get_traits,
)
from blockstep.conformance.explore import transition_checks as probe
from blockstep.conformance.explore.canonical import Canonicaliser, Digest
from blockstep.conformance.explore.cover import Tracer
from blockstep.conformance.explore.cycles import get_no_progress
from blockstep.conformance.explore.packing import Copies, Kept, Packer, get_constants
from blockstep.conformance.explore.transition_checks import Hits, Moment, get_moment
from blockstep.conformance.explore.world import World, get_events
from blockstep.conformance.protocol.features import find_lacking, get_missing
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.core.state import State
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.profiles import STRICT, Profile, Quirk, initial_state
from blockstep.spec.vocabulary import Event, Rejected, Submit

OUT_OF_NOTHING = "only after events in this state that must change nothing"
SPEC_IS_WRONG = "the specification failed an assertion of its own"
MAX_STATES = 3_000_000
"""Each takes about a quarter of a kilobyte; the limit is for all shards together."""


@dataclass(frozen=True)
class Task:
    """The settings of a walk."""

    world: World
    profile: Profile = STRICT
    """The quirks that the spec follows."""
    properties: bool = True
    """Whether every transition is checked by the properties, and cycles without progress are
    sought."""
    stalls: bool = False
    """Whether such cycles are sought even without the properties."""
    witness: str = ""
    """A coverage goal at which the walk stops."""
    quirk: Quirk | None = None
    """A quirk; the walk stops where the specification with it differs."""
    engine: str = ""
    """An engine that gets every event in every state, and is compared."""
    edges: bool = False
    """Whether the graph is kept."""
    deeds: bool = False
    """Whether the first transitions that do something new are kept (see `cover`); slow."""
    max_states: int = MAX_STATES
    max_depth: int = 1_000_000
    """The longest path to a state that is still expanded, in events."""


class Candidate(NamedTuple):
    """A state that may be new."""

    digest: Digest
    parent: Digest
    number: int
    """Number of the event among those of its parent."""
    state: State | bytes
    """The state; bytes on the way to another shard."""
    kept: Kept
    """An engine in this state, in its kept form."""


class Hit(NamedTuple):
    """Findings at one event of a state, with the state as a digest."""

    parent: Digest
    number: int
    lines: Hits


class Edge(NamedTuple):
    """One transition between two states."""

    source: Digest
    event: Event
    target: Digest
    sketch: str
    """The target in a few words."""


@dataclass(slots=True)
class Level:
    """The states and findings of one shard at one depth."""

    outboxes: list[list[Candidate]]
    """States of other shards; its own are kept."""
    transitions: int = 0
    refused: int = 0
    left_out: int = 0
    """Events that the engine cannot be given."""
    hits: list[Hit] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    novelties: list[tuple[Digest, int]] = field(default_factory=list)
    """Transitions that do something new: the parent, and the number of the event."""


class Shard:
    """The states whose digests have one remainder; called once per level."""

    def __init__(self, task: Task, index: int, num_shards: int) -> None:
        self._task = task
        self._index = index
        self._num_shards = num_shards
        self._digest = Canonicaliser(task.world).digest
        self._memo = probe.StateMemo()
        self._capabilities = ALL_CAPABILITIES
        self._copies: Copies | None = None
        self._scope: Equivalence | None = None
        if task.engine:
            make_engine = load_engine(task.engine)
            self._scope = get_traits(make_engine).equivalence
            self._copies = Copies(make_engine, task.world)
            self._capabilities = make_engine(task.world.config).capabilities()
        self._lacking = find_lacking(self._capabilities)
        self._is_spared = Capability.REJECTION not in self._capabilities
        """Whether the engine is not given events that the specification rejects."""
        self._tracer = Tracer() if task.deeds else None
        self._done: set[str] = set()
        self._parents: dict[Digest, Digest] = {}
        self._packer = Packer(get_constants(task.world))
        self._frontier: list[Candidate] = []
        self._found: list[Candidate] = []
        """States of this shard for the next level."""
        self._sent: set[Digest] = set()
        """States of other shards that were already sent to them."""
        self._stalls = array("Q")
        """Transitions without progress, sources and targets alternating."""

    def start(self) -> None:
        """Add the initial state, if this shard owns it."""
        state = initial_state(self._task.world.config, self._task.profile)
        digest = self._digest(state)
        if digest % self._num_shards == self._index:
            kept = () if self._copies is None else self._copies.start()
            self.absorb([Candidate(digest, digest, -1, state, kept)])

    def absorb(self, candidates: list[Candidate]) -> int:
        """Make the new ones among these states the next level, and return their number."""
        new: dict[Digest, Candidate] = {}
        for candidate in sorted([*self._found, *candidates], key=lambda found: found[:3]):
            if candidate.digest not in self._parents:
                new.setdefault(candidate.digest, candidate)
        for digest, candidate in new.items():
            self._parents[digest] = candidate.parent
        self._frontier, self._found = list(new.values()), []
        return len(new)

    def expand(self) -> Level:
        """Try every event in every state of the level."""
        level = Level([[] for _ in range(self._num_shards)])
        sent: set[Digest] = set()
        for digest, _, _, state, kept in self._frontier:
            known = self._packer.unpack(state) if isinstance(state, bytes) else state
            self._expand_state(level, sent, digest, known, kept)
        self._frontier = []
        return level

    def _expand_state(
        self, level: Level, sent: set[Digest], digest: Digest, state: State, kept: Kept
    ) -> None:
        engine: Engine | None = None
        for number, event in enumerate(get_events(self._task.world, state)):
            if self._is_left_out(event):
                level.left_out += 1
                continue
            try:
                moment = self._apply(level, state, event, (digest, number))
            except AssertionError as error:
                level.hits.append(Hit(digest, number, [f"{SPEC_IS_WRONG}: {error}"]))
                continue
            lines = self._probe(moment)
            is_refused = isinstance(moment.observation, Rejected)
            if self._copies is not None and not (is_refused and self._is_spared):
                is_fresh = engine is None
                engine = engine or self._copies.revive(kept)
                differences = self._compare(engine, moment)
                if differences and not is_fresh:
                    fresh = self._compare(self._copies.revive(kept), moment)
                    differences = fresh or [f"{OUT_OF_NOTHING}: {line}" for line in differences]
                lines += differences
            if is_refused:
                level.refused += 1  # `engine` is still in this state and is used again
            else:
                level.transitions += 1
                target = digest if moment.after is state else self._digest(moment.after)
                self._record(level, moment, digest, target)
                if self._is_new(sent, target):
                    if self._task.properties:
                        lines += [
                            f"invariant {name}" for name in get_broken_invariants(moment.after)
                        ]
                    after: Kept = ()
                    if self._copies is not None and engine is not None:
                        after = self._copies.keep(engine, kept, event)
                    self._send(level, Candidate(target, digest, number, moment.after, after))
                engine = None
            if lines:
                level.hits.append(Hit(digest, number, lines))

    def _is_left_out(self, event: Event) -> bool:
        """Whether the engine lacks a capability for an event, or cannot take its request."""
        if self._scope is not None and isinstance(event, Submit):
            config = self._task.world.config
            if self._scope.fit_request(event.request, config) != event.request:
                return True
        return bool(self._lacking) and get_missing(event, self._lacking) is not None

    def _probe(self, moment: Moment) -> Hits:
        """Return what was found in a transition, one line each."""
        task, memo = self._task, self._memo
        lines = probe.broken_properties(memo, moment) if task.properties else []
        if task.witness and task.witness in probe.get_witnesses(memo, moment):
            lines.append(task.witness)
        return lines if task.quirk is None else lines + probe.compare_with(task.quirk, moment)

    def _record(self, level: Level, moment: Moment, source: Digest, target: Digest) -> None:
        if self._task.edges:
            level.edges.append(Edge(source, moment.event, target, sketch(moment.after)))
        looks = self._task.properties or self._task.stalls
        if looks and get_no_progress(moment, target == source):
            self._stalls.extend((source, target))

    def _is_new(self, sent: set[Digest], target: Digest) -> bool:
        """Whether this shard has not seen a state before, on this level or an earlier one."""
        if target in self._parents or target in sent or target in self._sent:
            return False
        (sent if target % self._num_shards == self._index else self._sent).add(target)
        return True

    def _send(self, level: Level, found: Candidate) -> None:
        owner = found.digest % self._num_shards
        if owner == self._index:
            self._found.append(found)
        else:
            assert isinstance(found.state, State), "it has just been found"
            packed = self._packer.pack(found.state)
            level.outboxes[owner].append(found._replace(state=packed))

    def _compare(self, engine: Engine, moment: Moment) -> Hits:
        """Give the event to an engine in the state before, and return how it differs afterwards."""
        after = self._memo.snapshot_after(moment)
        given = (engine, moment.event, moment.observation, after)
        found = probe.differ(*given, self._capabilities, self._scope)
        return [
            f"the engine raised {d.seen}"
            if d.field == probe.RAISED
            else f"{d.field}: spec {d.expected}, engine {d.seen}"
            for d in found
        ]

    def _apply(self, level: Level, state: State, event: Event, place: tuple[Digest, int]) -> Moment:
        if self._tracer is None:
            return get_moment(state, event)
        moment, deeds = self._tracer.apply(state, event)
        if not deeds <= self._done:
            self._done |= deeds
            level.novelties.append(place)
        return moment

    def parent(self, digest: Digest) -> Digest | None:
        """Return the state before on the shortest path to a state; itself for the initial state."""
        return self._parents.get(digest)

    def stalls(self) -> array[int]:
        """Return the transitions without progress, sources and targets alternating."""
        return self._stalls


def sketch(state: State) -> str:
    """Return a state in a few words: requests with their progress, frames and cached blocks."""
    words = []
    for name, request in state.requests.items():
        runs = f"runs {request.num_computed_tokens}/{request.num_known_tokens}"
        words.append(f"{name} {runs if name in state.running else request.status}")
    words += [f"{len(state.frames)} in flight"] if state.frames else []
    words += [f"{' '.join(state.finished_req_ids)} ended"] if state.finished_req_ids else []
    words += [f"{len(state.pool.cached)} cached"] if state.pool.cached else []
    return "\n".join(words) or "empty"
