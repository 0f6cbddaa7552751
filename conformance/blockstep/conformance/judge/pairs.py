"""Pairs: what is legal together, and which of it a run has had together (architecture D9).

There are three tables of cells. Cells are counted from events and answers alone, so that
every run can count its cells, whatever its engine shows:

* features and settings x the same: a plan had a row of a request with both. The request itself asks
  for a feature of requests; features of actions came up while such a request was there.
* signals x moments: an event about a request came at this moment of the request's life.
* fields of a session's chunk x fields of its session: a chunk that sets the one was accepted by a
  session that sets the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import combinations, compress
from operator import attrgetter, ne
from typing import Protocol

from blockstep.conformance.features import forks
from blockstep.conformance.protocol.feature import Example, Feature, Setting
from blockstep.conformance.protocol.features import (
    ABORTS,
    FEATURES,
    HOSTILE,
    PAUSE,
    RESET,
    SIGNAL_OF,
)
from blockstep.conformance.protocol.transfer_tracker import Transfers, list_failed
from blockstep.spec import vocabulary as v

SIGNALS: Mapping[str, str] = {
    **{signal: text for feature in FEATURES for signal, text in feature.signals.items()},
    **{signal: text for feature in FEATURES for signal, text in feature.signals_to_all.items()},
}
MOMENTS: Mapping[str, str] = {
    "never_submitted": "no request of this name was ever submitted",
    "before_its_plan": "it waits, and was in no plan",
    "before_its_first_answer": "a plan in flight has its first row",
    "between_answers": "it was answered, and is in no plan in flight",
    "in_flight_again": "it was answered, and is in a plan in flight",
    "before_its_last_answer": "a plan in flight has the row whose answer ends it",
    "in_its_last_answer": "the signal is part of the answer that ends it",
    "before_its_end_is_told": "it has ended, and no plan was made since",
    "after_its_end": "it has ended, and a plan was made since",
}
CHUNK_FIELDS = (
    *("max_tokens", "min_tokens", "eos_token_id", "stop_token_ids", "repetition_detection"),
    *("arrival_time", "items", *v.SESSION_FIELDS),
)
"""Fields that a chunk may bring with its prompt; of `max_tokens`, another value than before."""
SESSION_HAS = tuple(
    [
        field.name
        for field in fields(v.Request)
        if field.name not in ("request_id", "prompt_token_ids", "max_tokens", "resumable")
    ]
)
"""Fields that a session may have set."""
ENDED_MAX = 8
"""Requests that ended lately, at most, to which a signal to all requests counts."""
_PLAIN = v.Request("", ())

SETTINGS: Mapping[str, Setting] = {
    "whole_prompts": Setting(
        lambda config: not config.enable_chunked_prefill,
        (Example({"enable_chunked_prefill": False}),),
    ),
    "long_prefill_cap": Setting(
        lambda config: config.long_prefill_token_threshold > 0,
        (Example({"long_prefill_token_threshold": 8}),),
    ),
    "no_reserve": Setting(
        lambda config: not config.scheduler_reserve_full_isl,
        (Example({"scheduler_reserve_full_isl": False}),),
    ),
    **{name: setting for feature in FEATURES for name, setting in feature.settings.items()},
}
"""Values of a config's fields that are no feature of their own, and may be of any config."""
NAMES = (*[feature.name for feature in FEATURES], *SETTINGS)
"""Rows and columns of the first table."""


def name_pair(one: str, other: str) -> str:
    """The name of a cell of the first table."""
    return "+".join(sorted((one, other)))


def list_feature_cells() -> list[str]:
    """The cells of features and settings x features and settings."""
    return [name_pair(one, other) for one, other in combinations(NAMES, 2)]


def list_signal_cells() -> list[str]:
    """The cells of signals x moments."""
    return [f"{signal}@{moment}" for signal in SIGNALS for moment in MOMENTS]


def list_chunk_cells() -> list[str]:
    """The cells of a chunk's fields x its session's fields."""
    return [f"{field}>{has}" for field in CHUNK_FIELDS for has in SESSION_HAS]


def list_cells() -> tuple[str, ...]:
    """All cells, legal or not, in the order of the three tables."""
    return (*list_feature_cells(), *list_signal_cells(), *list_chunk_cells())


OF_ACTIONS: tuple[Feature, ...] = (PAUSE, RESET, ABORTS, HOSTILE)
"""Features that neither a config nor a request asks for."""


def is_of_request(feature: Feature) -> bool:
    """Whether a request asks for a feature, and not its config: one of a policy is its config's."""
    return bool(feature.request) and not feature.values


OF_REQUESTS = tuple([feature for feature in FEATURES if is_of_request(feature)])
_ASKING = tuple([name for feature in OF_REQUESTS for name in feature.request])
"""Fields of a request that ask for features."""
_get_asking = attrgetter(*_ASKING)
_PLAIN_ASKING = _get_asking(_PLAIN)
NO_SIGNALS = (v.Submit, v.Schedule)
"""Events that are no signal."""


@cache
def _list_asking(are_set: tuple[bool, ...]) -> frozenset[str]:
    """The features of a request that sets these of the fields `_ASKING`."""
    asking = frozenset(compress(_ASKING, are_set))
    return frozenset([it.name for it in OF_REQUESTS if not asking.isdisjoint(it.request)])


@cache
def _list_acts(kind: type) -> tuple[Feature, ...]:
    """The features of actions that an event of this type is."""
    return tuple([feature for feature in OF_ACTIONS if issubclass(kind, feature.actions)])


def list_of_config(config: v.Config) -> frozenset[str]:
    """Names of the features and settings that a config asks for."""
    asked = [one for one in FEATURES if not is_of_request(one) and one.is_asked_by(config)]
    names = [one.name for one in asked if one is not forks.FEATURE or config.enable_forks]
    return frozenset((*names, *[name for name, it in SETTINGS.items() if it.is_set(config)]))


class Known(Protocol):
    """A run, as far as its events and answers show it (see `lockstep.client`)."""

    @property
    def live(self) -> dict[v.RequestId, v.Request]:
        """Accepted and not ended."""
        ...

    @property
    def plans(self) -> list[v.Plan]:
        """Plans in flight, oldest first."""
        ...

    @property
    def transfers(self) -> Transfers:
        """Transfers under way."""
        ...


class PairCounter:
    """Counts the cells of one run."""

    def __init__(self, config: v.Config) -> None:
        self.config = config
        self.reached: set[str] = set()
        """Names of the cells that were reached."""
        self._of_config = list_of_config(config)
        self._acted: set[str] = set()
        self._rowed: set[v.RequestId] = set()
        """Live requests of which a plan has had a row."""
        self._answered: set[v.RequestId] = set()
        """Live requests of which a row was answered."""
        self._submitted: set[v.RequestId] = set()
        self._ended: dict[v.RequestId, bool] = {}
        """Requests that have ended lately: whether a plan was made since."""
        self._in_flight: dict[v.RequestId, list[tuple[str, tuple[v.FrameId, ...]]]] = {}
        """Signals that came while plans in flight had rows of a request, with those plans."""
        self._counted: set[tuple[str, frozenset[str]]] = set()
        """Sets of features whose pairs were counted, with the feature of an action or ""."""
        self._carried: list[tuple[str, v.RequestId]] = []
        """Signals that the answer at hand carries, about requests of the plan that it answers."""

    def note(self, event: v.Event, seen: v.Observation, known: Known) -> None:
        """Count what an event and its answer show. `known` is as it was before the event."""
        if isinstance(seen, v.Plan):
            self._note_plan(seen, known)
        elif isinstance(event, v.StreamingUpdate) and not isinstance(seen, v.Rejected):
            self._note_chunk(known.live[event.request.request_id], event.request)
        kind: type = type(event)
        acts = _list_acts(kind)
        if isinstance(seen, v.Rejected):
            acts = (HOSTILE, *acts)
        if acts:
            self._note_acts(acts, known)
        self._carried = []
        if isinstance(event, NO_SIGNALS):
            return
        if isinstance(event, v.Commit) and event.transfers is v.NO_TRANSFERS:
            return
        for signal, names in list_signals(event, known, self.config, [*known.live, *self._ended]):
            for name in names:
                self._note_signal(signal, name, event, known)

    def settle(self, event: v.Event, before: Collection[v.RequestId], known: Known) -> None:
        """Note which requests an event has ended. `before` are those that were live before it."""
        if isinstance(event, v.Commit):
            self._answered |= {row.request_id for row in event.sampled} & self._rowed
        elif isinstance(event, v.Submit):
            self._ended.pop(event.request.request_id, None)
            self._submitted.update(known.live)
        elif isinstance(event, v.Fork):
            self._submitted.update(known.live)
        if len(known.live) < len(before):  # no event begins requests and ends others
            self._settle_ended(event, [name for name in before if name not in known.live])

    def _settle_ended(self, event: v.Event, over: Sequence[v.RequestId]) -> None:
        frame_id = event.frame_id if isinstance(event, v.Commit) else None
        for name in over:
            for signal, frames in self._in_flight.pop(name, ()):
                if frame_id in frames:
                    self.reached.add(f"{signal}@before_its_last_answer")
            self._ended[name] = False
        self.reached |= {
            f"{signal}@in_its_last_answer" for signal, name in self._carried if name in over
        }
        self._rowed.difference_update(over)
        self._answered.difference_update(over)
        while len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _note_plan(self, plan: v.Plan, known: Known) -> None:
        self._ended = dict.fromkeys(self._ended, True)
        for row in plan.rows:
            request = known.live.get(row.request_id)
            if request is None or row.request_id in self._rowed:
                continue
            self._rowed.add(row.request_id)
            self._add_features(self._list_asked(request))

    def _list_asked(self, request: v.Request) -> frozenset[str]:
        """Features of a request and of its config."""
        return self._of_config | _list_asking(tuple(map(ne, _get_asking(request), _PLAIN_ASKING)))

    def _add_features(self, names: frozenset[str]) -> None:
        if ("", names) not in self._counted:
            self._counted.add(("", names))
            # Named as by `name_pair`; the names are sorted once, not for each pair.
            self.reached.update(map("+".join, combinations(sorted(names), 2)))

    def _note_acts(self, acts: Iterable[Feature], known: Known) -> None:
        """Count features of actions with those of each live request that has had a row."""
        for feature in acts:
            self._acted.add(feature.name)
            asked = [self._list_asked(known.live[name]) for name in self._rowed & known.live.keys()]
            names = frozenset(self._acted).union(self._of_config if self._rowed else (), *asked)
            if (feature.name, names) not in self._counted:
                self._counted.add((feature.name, names))
                others = names - {feature.name}
                self.reached |= {name_pair(feature.name, name) for name in others}

    def _note_chunk(self, session: v.Request, update: v.Request) -> None:
        if not update.resumable:
            return
        has = [name for name in SESSION_HAS if getattr(session, name) != getattr(_PLAIN, name)]
        brings = [name for name in CHUNK_FIELDS if getattr(update, name) != getattr(_PLAIN, name)]
        if update.max_tokens == session.max_tokens and "max_tokens" in brings:
            brings.remove("max_tokens")
        self.reached |= {f"{field}>{name}" for field in brings for name in has}

    def _note_signal(self, signal: str, name: v.RequestId, event: v.Event, known: Known) -> None:
        if name not in known.live:
            moment = "after_its_end" if name in self._submitted else "never_submitted"
            if self._ended.get(name) is False:
                moment = "before_its_end_is_told"
            self.reached.add(f"{signal}@{moment}")
            return
        frames = [
            plan.frame_id for plan in known.plans if any(r.request_id == name for r in plan.rows)
        ]
        if isinstance(event, v.Commit) and event.frame_id in frames:
            self._carried.append((signal, name))
            frames.remove(event.frame_id)
        moment = "between_answers" if name in self._answered else "before_its_plan"
        if frames:
            self._in_flight.setdefault(name, []).append((signal, tuple(frames)))
            is_first = name not in self._answered
            moment = "before_its_first_answer" if is_first else "in_flight_again"
        if moment != "before_its_plan" or name not in self._rowed:
            self.reached.add(f"{signal}@{moment}")


def list_signals(
    event: v.Event, known: Known, config: v.Config, all_ids: Collection[v.RequestId]
) -> Iterator[tuple[str, Collection[v.RequestId]]]:
    """The signals that an event is, each with the requests that it is about.

    What names no request is about `all_ids`: those that live, and those that have ended lately.
    """
    match event:
        case v.Abort(request_ids=names):
            yield "abort", names
        case v.GrammarReady(request_id=name):
            yield "grammar_ready", (name,)
        case v.GrammarFailed(request_id=name):
            yield "grammar_failed", (name,)
        case v.GrammarBitmask(frame_id=frame_id):
            plans = [plan for plan in known.plans if plan.frame_id == frame_id]
            yield "bitmask", [row.request_id for plan in plans for row in plan.rows]
        case v.Drafts(drafts=rows):
            yield "drafts", [row.request_id for row in rows]
        case v.StreamingUpdate(request=update):
            yield "chunk" if update.resumable else "end_of_input", (update.request_id,)
        case v.Fork(request_id=name):
            yield "fork", (name,)
        case v.KVOffer(request_id=name):
            yield "offer", (name,)
        case v.Commit(transfers=report) | v.TransfersReported(transfers=report):
            yield from _list_reported(event, report, known.transfers, config)
        case v.Reset(reset_running_requests=is_forced):
            yield "forced_reset" if is_forced else "reset", all_ids
        case _ if type(event) in SIGNAL_OF:
            yield SIGNAL_OF[type(event)], all_ids


def _list_reported(
    event: v.Commit | v.TransfersReported,
    report: v.KVTransfers,
    transfers: Transfers,
    config: v.Config,
) -> Iterator[tuple[str, Collection[v.RequestId]]]:
    """The signals of a worker's report."""
    if report is v.NO_TRANSFERS:
        return
    yield "load_ends", report.finished_recving
    yield "read_ends", report.finished_sending
    loads = [*transfers.loading.values(), *transfers.received.values()]
    if isinstance(event, v.Commit):
        loads += transfers.at_once.get(event.frame_id, ())
    yield "load_fails", [*list_failed(loads, config.block_sizes, report)]
