"""Worlds: scopes so small that every state can be visited.

A world is a config, the few requests that may be submitted, the tokens that may be sampled, and the
outside events that may come. An id can be used again once its request has finished, so a run never
ends, but the number of states is finite. The last part of this module has what worlds are made of:
requests of equal tokens, and fields of configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property, partial
from itertools import product, repeat
from typing import Any

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.protocol.features import FEATURES, HOSTILE, load_parts
from blockstep.spec import vocabulary as v
from blockstep.spec.core.requests import Frame
from blockstep.spec.core.state import State
from blockstep.spec.features.kv_transfer.transfers import FRAME_LOADS, TRANSFERS
from blockstep.spec.features.structured_output import HAS_MASK, get_verifiable_drafts


@dataclass(frozen=True, slots=True)
class Counts:
    """The size of a world that was visited completely."""

    states: int
    """Distinct states after symmetry reduction, with the initial one."""
    transitions: int
    """Accepted events over all states."""
    refused: int
    """Rejected events over all states."""
    depth: int
    """Events on the shortest path to the farthest state."""


@dataclass(frozen=True)
class World:
    """A named scope. Every event that its fields allow is tried in every state."""

    name: str
    summary: str
    config: v.Config
    requests: tuple[v.Request, ...]
    """Requests that may be submitted, each again once it has finished."""
    vocabulary: tuple[v.TokenId, ...] = (0,)
    """Tokens that may be sampled or proposed as a draft."""
    aborts: bool = False
    resets: tuple[bool, ...] = ()
    """Values of `reset_running_requests` that are tried."""
    pauses: tuple[v.PauseState, ...] = ()
    encoder_resets: bool = False
    offers: tuple[tuple[str, ...], ...] = ()
    """Encoded items that a connector may hold."""
    kv_offers: tuple[v.KVOffer, ...] = ()
    """Offers that a store may make. If there are any, loads complete, fail or stay in flight, and
    resets are also tried with the store's reset."""
    also: tuple[v.Event, ...] = ()
    """Further events that do not depend on the state."""
    updates: tuple[v.Request, ...] = ()
    """Inputs with which sessions may continue or end."""
    forks: bool = False
    """Whether a request may be forked into any other that differs only in its id."""
    expected: Counts | None = None
    """The counts of a complete walk; a change of the specification shows here."""

    @cached_property
    def classes(self) -> dict[v.RequestId, int]:
        """Return the class of each request; requests of one class are interchangeable.

        They differ only in their ids, and the events of the world treat them alike: a store that
        offers KV to one of two equal requests makes them different. Ids matter under PRIORITY, too,
        where they break ties.
        """
        names = [request.request_id for request in self.requests]
        if self.config.policy is v.Policy.PRIORITY or self.updates:
            return {name: rank for rank, name in enumerate(names)}
        firsts = {
            name: next((it for it in names[:rank] if self._are_alike(it, name)), name)
            for rank, name in enumerate(names)
        }
        distinct = list(dict.fromkeys(firsts.values()))
        return {name: distinct.index(first) for name, first in firsts.items()}

    def _are_alike(self, name: v.RequestId, other: v.RequestId) -> bool:
        """Whether the world stays the same if two requests exchange their ids."""
        exchanged = {name: other, other: name}
        return self._models[name] == self._models[other] and {*self.signals} == {
            rename(event, exchanged) for event in self.signals
        }

    @cached_property
    def _models(self) -> dict[v.RequestId, v.Request]:
        """Return each request without its id."""
        return {r.request_id: replace(r, request_id="") for r in self.requests}

    def list_alike(self, name: v.RequestId) -> list[v.RequestId]:
        """Return the other requests that differ only in their ids, into which this one may be
        forked.
        """
        mine = self._models[name]
        return [other for other, model in self._models.items() if model == mine and other != name]

    @cached_property
    def free_tokens(self) -> frozenset[v.TokenId]:
        """Return the interchangeable tokens: those that no request names.

        Empty if there is only one.
        """
        if self.updates:
            return frozenset()
        named: set[v.TokenId | None] = {self.config.reasoning_end_token_id}
        for request in self.requests:
            named |= {*request.prompt_token_ids, *request.stop_token_ids, request.eos_token_id}
            states = () if request.grammar is None else request.grammar.edges
            named |= {token for edges in states for token, _ in edges}
        free = frozenset(self.vocabulary).difference(named)
        return free if len(free) > 1 else frozenset()

    @cached_property
    def signals(self) -> tuple[v.Event, ...]:
        """Return the events that do not depend on the state: those of clients and operators."""
        return (
            *map(v.Submit, self.requests),
            *(v.GrammarReady(r.request_id) for r in self.requests if r.structured_output),
            *(v.GrammarFailed(r.request_id) for r in self.requests if r.grammar is not None),
            *(v.Abort((r.request_id,)) for r in self.requests if self.aborts),
            *map(v.StreamingUpdate, self.updates),
            *map(v.Reset, self.resets),
            *(v.Reset(forced, True) for forced in self.resets if self.config.kv_connector),
            *map(v.SetPause, self.pauses),
            *((v.EncoderReset(),) if self.encoder_resets else ()),
            *map(v.EncoderOffer, self.offers),
            *self.kv_offers,
            *self.also,
        )

    @cached_property
    def features(self) -> frozenset[str]:
        """Return the names of its features (`features.FEATURES`); events that must be rejected are
        tried in every world.
        """
        kinds = {type(event) for event in self.signals}
        things: tuple[v.Config | v.Request, ...] = (self.config, *self.requests)
        return frozenset(
            feature.name
            for feature in FEATURES
            if feature is HOSTILE
            or any(feature.is_asked_by(thing) for thing in things)
            or not kinds.isdisjoint(feature.actions)
        )

    @cached_property
    def mistakes(self) -> tuple[v.Event, ...]:
        """Return a program of events that must be rejected, for vectors.

        The only accepted event submits the first request, so that later events can be wrong about
        it.
        """
        longest = (0,) * self.config.max_model_len
        too_many = (0,) * (self.config.num_speculative_tokens + 1)
        known = self.requests[0]
        ready = v.GrammarReady(known.request_id)
        return (
            v.Submit(v.Request("X", longest)),
            v.Submit(v.Request("X", ())),
            v.Submit(v.Request("X", (0,), max_tokens=0)),
            v.Commit(-1, ()),
            v.GrammarReady("X"),
            v.Drafts((v.RowTokens("X", too_many),)),
            v.Drafts((v.RowTokens("X", ()), v.RowTokens("X", ()))),
            v.Submit(known),
            v.Submit(known),
            *(() if known.structured_output else (ready,)),
        )

    @cached_property
    def proposals(self) -> tuple[v.TokenIds, ...]:
        """Return the drafts that may be proposed for one request."""
        config = self.config
        if config.spec_method is v.SpecMethod.NONE or config.async_scheduling:
            return ()
        counts = range(1, config.num_speculative_tokens + 1)
        return tuple(tokens for n in counts for tokens in product(self.vocabulary, repeat=n))


def rename(value: Any, names: Mapping[str, str]) -> Any:
    """Return an event, or a part of one, with each string replaced that `names` has."""
    if isinstance(value, tuple):
        return tuple([rename(part, names) for part in value])
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        return replace(value, **{name: rename(part, names) for name, part in parts.items()})
    return names.get(value, value) if type(value) is str else value


@dataclass(frozen=True, slots=True)
class Scope:
    """Events and state of a feature in worlds: `SCOPE` in its module `worlds`."""

    is_on: Callable[[v.Config], bool]
    """Whether a config has the feature."""
    list_events: Callable[[State], Iterable[v.Event]]
    """Returns events to try in a state, besides those that do not depend on it (`World.also`)."""
    list_tables: Callable[[State], Iterable[Sequence[v.BlockId]]]
    """Returns the tables of blocks that the feature keeps."""
    get_form: Callable[[State, Mapping[v.BlockId, int]], tuple[Any, ...]]
    """Returns all that matters of the feature, with blocks as numbers."""
    recall: Callable[[State, History], None] = lambda *_: None
    """Gives a history what it would have learnt about the feature before a state."""


@cache
def get_scopes() -> tuple[Scope, ...]:
    """Return the scopes of features."""
    return tuple([it.SCOPE for it in load_parts("worlds").values() if hasattr(it, "SCOPE")])


def get_events(world: World, state: State) -> Iterator[v.Event]:
    """Yield all events to try in `state`, always in the same order."""
    yield from world.signals
    yield v.Schedule()
    if world.proposals:
        for request_id in state.requests:
            for tokens in world.proposals:
                yield v.Drafts((v.RowTokens(request_id, tokens),))
    if world.forks:
        delivered = {name: request.output_token_ids for name, request in state.requests.items()}
        yield from get_forks(world, delivered)
    if any(request.grammar is not None for request in world.requests):
        for frame in state.frames:
            yield from get_masks(world, frame)
    if world.config.kv_connector:
        yield from get_reports(state)
    for scope in get_scopes():
        if scope.is_on(world.config):
            yield from scope.list_events(state)
    if state.frames:
        yield from get_answers(world, state.frames[0])
        yield from get_failed_answers(world, state)
        yield from get_wrong_answers(state)
    yield v.Commit(state.next_frame_id, ())


def get_forks(world: World, delivered: Mapping[v.RequestId, v.TokenIds]) -> Iterator[v.Fork]:
    """Yield forks of each unfinished request: after each of its outputs, or with another token
    there.

    `delivered` has the outputs of the unfinished requests. For an id in use there is one fork,
    which must be rejected.
    """
    for name, outputs in delivered.items():
        kept = [outputs[:count] for count in range(len(outputs) + 1)]
        others = [(*head, token) for head in kept for token in world.vocabulary]
        for child_id in world.list_alike(name):
            for branch in ((),) if child_id in delivered else dict.fromkeys((*kept, *others)):
                yield v.Fork(name, child_id, branch)
    yield v.Fork("nobody", world.requests[0].request_id)


def get_masks(world: World, frame: Frame) -> Iterator[v.GrammarBitmask]:
    """Yield the bitmask requests of a frame, with each choice of drafts if only the worker knows
    them.
    """
    yield v.GrammarBitmask(frame.frame_id)
    if not world.config.async_scheduling:
        return
    held = [row for row in frame.rows if HAS_MASK.of(row) and row.draft_token_ids]
    choices = [product(world.vocabulary, repeat=len(row.draft_token_ids)) for row in held]
    for drafts in product(*choices) if held else ():
        rows = zip(held, drafts, strict=True)
        row_drafts = tuple(v.RowTokens(row.request_id, tokens) for row, tokens in rows)
        yield v.GrammarBitmask(frame.frame_id, row_drafts)


def get_answers(world: World, frame: Frame) -> Iterator[v.Commit]:
    """Yield every model output of a frame that a grammar may allow: each number of accepted drafts,
    and each token after them.
    """
    choices: list[list[v.TokenIds]] = []
    for row in frame.rows:
        drafts = [world.vocabulary if d < 0 else (d,) for d in get_verifiable_drafts(row)]
        choices.append(
            [
                tokens
                for accepted in range(len(drafts) + 1)
                for tokens in product(*drafts[:accepted], world.vocabulary)
            ]
            if row.samples
            else [()]
        )
    for answer in product(*choices):
        yield _answer(frame, answer)


def get_reports(state: State) -> Iterator[v.TransfersReported]:
    """Yield the possible reports of each transfer in flight, and of an unknown request; a failed
    load lacks its first or its last block.
    """
    for name in (*sorted({*TRANSFERS.of(state).parked, *TRANSFERS.of(state).held}), "nobody"):
        yield v.TransfersReported(v.KVTransfers(finished_recving=(name,)))
        yield v.TransfersReported(v.KVTransfers(finished_sending=(name,)))
    for name in sorted(TRANSFERS.of(state).parked):
        request = state.requests[name]
        firsts = [holding.num_cached_blocks for holding in request.holdings]
        for block_id in list_ends(request.block_tables, firsts):
            yield v.TransfersReported(v.KVTransfers(invalid_block_ids=(block_id,)))


def get_failed_answers(world: World, state: State) -> Iterator[v.Commit]:
    """Yield every model output of the oldest frame with each of its loads failed in its first or
    last block.
    """
    frame = state.frames[0]
    for load in FRAME_LOADS.of(frame):
        firsts = [load.num_computed_tokens // size for size in world.config.block_sizes]
        for block_id in list_ends(load.block_ids, firsts):
            for commit in get_answers(world, frame):
                failed = v.KVTransfers(invalid_block_ids=(block_id,))
                yield replace(commit, transfers=failed)


def list_ends(tables: v.BlockTables, firsts: Iterable[int]) -> list[v.BlockId]:
    """Return the first and the last block of each table from an index on, without null blocks."""
    parts = [table[first:] for table, first in zip(tables, firsts, strict=True)]
    ends = {block_id for part in parts for block_id in (*part[:1], *part[-1:])}
    return sorted(ends - {v.NULL_BLOCK})


def get_wrong_answers(state: State) -> Iterator[v.Commit]:
    """Yield model outputs that must be rejected: of a later frame, with too few rows, too long, too
    short.
    """
    frame, *others = state.frames
    for later in others:
        yield _answer(later, repeat((0,)))
    yield v.Commit(frame.frame_id, ())
    longest = max(len(row.draft_token_ids) for row in frame.rows) + 2
    yield _answer(frame, repeat((0,) * longest))
    if any(row.samples for row in frame.rows):
        yield _answer(frame, repeat(()))


def _answer(frame: Frame, tokens: Iterable[v.TokenIds]) -> v.Commit:
    rows = zip(frame.rows, tokens, strict=False)
    return v.Commit(frame.frame_id, tuple(v.RowTokens(row.request_id, got) for row, got in rows))


BOTH = (False, True)


def request(name: v.RequestId, num_tokens: int, max_tokens: int, **more: Any) -> v.Request:
    """Return a request with `num_tokens` equal tokens and `max_tokens`."""
    prompt = (more.pop("token", 0),) * num_tokens
    return v.Request(name, prompt, max_tokens=max_tokens, **more)


def item(name: str, offset: int, length: int = 1, **more: Any) -> v.MultiModalItem:
    """Return an item of a prompt."""
    return v.MultiModalItem(name, offset, length, **more)


def encoder(budget: int, size: int) -> dict[str, Any]:
    """Return the fields of a config with an encoder."""
    return {"encoder_compute_budget": budget, "encoder_cache_size": size}


def group(kind: str, block_size: int, **more: Any) -> v.KVGroup:
    """Return a KV group of a kind."""
    return v.KVGroup(v.GroupKind(kind), block_size, **more)


a, b, c = (partial(request, name) for name in "ABC")
RANKED: dict[str, Any] = {"policy": v.Policy.PRIORITY}
UNRESERVED: dict[str, Any] = {"scheduler_reserve_full_isl": False}
UNCACHED: dict[str, Any] = {"enable_prefix_caching": False}
AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}
FETCHED: dict[str, Any] = {"kv_connector": True}
COMPUTED: dict[str, Any] = FETCHED | {
    "kv_load_failure_policy": v.KVLoadFailurePolicy.RECOMPUTE,
}
WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 1, sliding_window=2)
FULL = v.KVGroup(v.GroupKind.FULL, 1)
FULL_OF_2 = v.KVGroup(v.GroupKind.FULL, 2)
ONE_TOKEN = v.Grammar((((0, 1),), ()))
ACROSS = v.KVGroup(v.GroupKind.CROSS_ATTENTION, 1)
CHUNKS = v.KVGroup(v.GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=4)
offer = v.KVOffer
GRAMMAR = v.Grammar((((0, 1),), ((1, 0), (2, 2)), ()))
"""The grammar allows 0, then 1 and again 0, or 2 and then any token."""


def states(block_size: int, mode: v.MambaCacheMode, num_speculative: int = 0) -> v.KVGroup:
    """Return a KV group of recurrent states."""
    return v.KVGroup(
        v.GroupKind.RECURRENT,
        block_size,
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative,
    )


HEAD: dict[str, Any] = {"spec_method": v.SpecMethod.EAGLE, "num_speculative_tokens": 1}
BESIDE: dict[str, Any] = {
    "enable_chunked_prefill": False,
    "disable_chunked_mm_input": True,
    "is_encoder_decoder": True,
}
NGRAM: dict[str, Any] = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 1}
