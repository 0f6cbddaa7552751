"""Checks of one transition of a walk.

Properties are checked as on any step, except that a walk has no past: it visits each state once.
What the `History` would remember is derived from the state before, so checks about older history
find nothing: which request was preempted since when, and what came before a reset.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TypeAlias

from blockstep.conformance.engine import Capability, Engine, Equivalence, Renamed, SamePlans
from blockstep.conformance.explore.world import get_scopes
from blockstep.conformance.judge.checks import check_step
from blockstep.conformance.judge.coverage_goals import WITNESSES, situations
from blockstep.conformance.judge.grammar_automaton import Automaton
from blockstep.conformance.judge.kv_event_follower import Follower
from blockstep.conformance.judge.properties.history import FlightRow, History, RequestHistory
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.store_history import StoreHistory
from blockstep.conformance.lockstep.plan_equivalence import only_plan
from blockstep.conformance.protocol.compare import observation_differences, snapshot_differences
from blockstep.conformance.protocol.findings import Difference, describe_error, leave_out_raised
from blockstep.conformance.protocol.renaming import pair_states, rename_plan, rename_snapshot
from blockstep.conformance.protocol.type_check import fault_of_types
from blockstep.spec import vocabulary as v
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.features.kv_transfer.transfers import FRAME_LOADS, TRANSFERS
from blockstep.spec.features.sessions import UPDATES
from blockstep.spec.features.structured_output import GRAMMAR_READY, IS_CUT, get_verifiable_drafts
from blockstep.spec.idle import has_work
from blockstep.spec.releases import Quirk, get_rules
from blockstep.spec.snapshots import get_request_snapshot, get_request_snapshots, get_snapshot
from blockstep.spec.transition import transition

Hits: TypeAlias = list[str]
"""The results of the checks of a transition, one line each."""

RAISED = "exception"
"""The field of a difference that is an exception."""

OF_THE_PAST = frozenset(
    {
        "commit_for_preempted",
        "ended_while_preempted",
        "ended_while_stale",
        "resumed_after_stale_tokens",
        "row_of_an_ended_request_ignored",
        "commit_for_aborted",
        "stale_tokens_delivered",
        "forks_branch_preempted",
        "dropped_token_runs_again",
    }
)
"""Coverage goals that no single step can show, since they depend on earlier steps."""
JUDGED_WITNESSES = tuple(name for name in WITNESSES if name not in OF_THE_PAST)


@dataclass(frozen=True, slots=True)
class Moment:
    """One transition of the spec."""

    before: State
    event: v.Event
    after: State
    """`before` itself if the event was rejected."""
    observation: v.Observation


def get_moment(state: State, event: v.Event) -> Moment:
    """Return the transition of this event."""
    result = transition(state, event)
    if isinstance(result, v.Rejected):
        return Moment(state, event, state, result)
    return Moment(state, event, result.state, result.observation)


def get_history(state: State) -> History:
    """Return what a history would contain in this state, as far as the state shows it."""
    history = History(state.config)
    for name, request in state.requests.items():
        life = history.lives[name] = RequestHistory(request.request, history.names)
        life.tokens.extend(request.output_token_ids)
        life.drafts = request.spec_token_ids
        life.num_cached_tokens = request.num_cached_tokens
        life.grammar_ready = GRAMMAR_READY.of(request)
        has_begun = request.status in (v.Status.RUNNING, v.Status.PREEMPTED)
        life.admitted_in = 0 if has_begun else -1
        is_new = request.status is v.Status.WAITING and not request.request.resumable
        life.is_branch = is_new and request.num_cached_tokens >= 0
        if request.request.grammar is not None:
            history.has_grammars = True
            life.automaton = Automaton(state.config, request.request)
        if life.session is not None:
            history.has_sessions = True
            life.session.updates = [*UPDATES.of(request)]
            life.session.is_resting = request.status is v.Status.WAITING_FOR_STREAMING_REQ
    behind: dict[v.RequestId, int] = {}
    for frame in reversed(state.frames):
        rows = []
        for row in frame.rows:
            known = state.requests.get(row.request_id)
            computed = 0 if known is None else known.num_computed_tokens
            end = max(computed - behind.get(row.request_id, 0), 0)
            drafts, verifiable = row.draft_token_ids, None
            if IS_CUT.of(row):
                drafts, verifiable = (
                    (v.DRAFT_PLACEHOLDER,) * len(drafts),
                    get_verifiable_drafts(row),
                )
            is_over = row.is_dropped and known is not None
            flight = FlightRow(row.request_id, end, drafts, row.samples, verifiable, is_over)
            if not is_over:
                behind[row.request_id] = behind.get(row.request_id, 0) + flight.num_promised
            rows.append(flight)
        history.frames[frame.frame_id] = tuple(rows)
    history.frames = dict(reversed(history.frames.items()))
    history.promised = {name: count for name, count in behind.items() if count}
    history.ended = set(state.finished_req_ids)
    history.scheduled = set(state.prev_scheduled_req_ids)
    history.pause_state = state.pause_state
    history.follower = _get_follower(state)
    if state.config.kv_connector:
        _recall_transfers(history.store, state)
    for scope in get_scopes():
        if scope.is_on(state.config):
            scope.recall(state, history)
    return history


def _recall_transfers(store: StoreHistory, state: State) -> None:
    """Record the transfers that the state shows: a load comprises all blocks that are not
    published.
    """
    moving, known = TRANSFERS.of(state), store.transfers
    known.offers = dict(moving.offers)
    loads = [(frame.frame_id, FRAME_LOADS.of(frame)) for frame in state.frames]
    known.at_once = {frame_id: of_frame for frame_id, of_frame in loads if of_frame}
    for frame in state.frames:
        for load in FRAME_LOADS.of(frame):
            request = state.requests.get(load.request_id)
            if request is not None and request.has_unconfirmed_kv:
                store.unsettled[load.request_id] = frame.frame_id
    for name, parked in moving.parked.items():
        request = state.requests[name]
        num_local = request.holdings[0].num_cached_blocks * state.config.block_sizes[0]
        num_external = max(request.num_computed_tokens - num_local, 1)
        load = v.KVLoad(name, request.block_tables, num_local, num_external, is_async=True)
        (known.received if parked.is_received else known.loading)[name] = load
        store.parked[name], store.parked_as[name] = load, parked.status
    store.held = dict(moving.held)
    for name, entry in moving.held.items():
        if entry.is_recving:
            known.loading[name] = v.KVLoad(name, entry.block_tables, 0, 1, is_async=True)
        if entry.is_sending:
            known.sending[name] = None


def _get_follower(state: State) -> Follower:
    """Return a follower of the event log so far: the cached blocks, without the events not yet
    sent.
    """
    cached, untold = state.pool.cached, state.pool.journal
    copies = Counter[v.BlockKey]()
    if untold is not None:
        copies.update({key: len(blocks) for key, blocks in cached.items()})
    for event in untold or ():
        if isinstance(event, v.BlockStored):
            copies.subtract(event.keys)
        elif isinstance(event, v.BlockRemoved):
            copies.update(event.keys)
        else:
            copies = Counter()  # this happens with a quirk only
    return Follower(+copies)


class StateMemo:
    """Caches for the state that is being expanded, and for the transition that is being checked.

    Requests that a transition does not change are the same objects in both snapshots, so that they
    need not be compared field by field.
    """

    def __init__(self) -> None:
        self._state: State | None = None
        self._requests: dict[int, v.RequestSnapshot] = {}
        """Snapshots of the state's requests, by `id`; the state keeps the requests alive."""
        self._history: History | None = None
        self._moment: Moment | None = None
        self._before: v.Snapshot | None = None
        self._after: v.Snapshot | None = None

    def snapshot_after(self, moment: Moment) -> v.Snapshot:
        """Return the snapshot after a transition."""
        if self._moment is not moment or self._after is None:
            before = self._snapshot_before(moment.before)
            is_same = moment.after is moment.before
            self._after = before if is_same else self._snapshot_after(moment, before)
            self._moment = moment
        return self._after

    def step(self, moment: Moment) -> tuple[Step, History]:
        """Return the transition as a step, and the history before it."""
        state = moment.before
        after = self.snapshot_after(moment)
        before = self._snapshot_before(state)
        self._history = self._history or get_history(state)
        return Step(state.config, 1, moment.event, moment.observation, before, after), self._history

    def _snapshot_before(self, state: State) -> v.Snapshot:
        if self._state is not state or self._before is None:
            self._state, self._history, self._moment = state, None, None
            self._before = get_snapshot(state)
            shown = {request.request_id: request for request in self._before.requests}
            self._requests = {id(request): shown[name] for name, request in state.requests.items()}
        return self._before

    def _snapshot_after(self, moment: Moment, before: v.Snapshot) -> v.Snapshot:
        state, shown = moment.after, before.requests
        if state.requests is not moment.before.requests:
            shown = get_request_snapshots(state, self._show)
        return get_snapshot(state, shown)

    def _show(self, request: RequestState) -> v.RequestSnapshot:
        return self._requests.get(id(request)) or get_request_snapshot(request)


def broken_properties(memo: StateMemo, moment: Moment) -> Hits:
    """Return the properties that do not hold."""
    return [
        f"{finding.property_id} {finding.sentence}: {finding.message}"
        for finding in leave_out_raised(check_step(*memo.step(moment)))
    ]


def get_witnesses(memo: StateMemo, moment: Moment) -> Hits:
    """Return the coverage goals that a transition reaches, without those that need the past."""
    return [name for name in situations(*memo.step(moment)) if name not in OF_THE_PAST]


def compare_with(quirk: Quirk, moment: Moment) -> Hits:
    """Return where the specification with a quirk differs in its observation or its state.

    Both have the same path so far, so the quirk is switched on in the state before.
    """
    before = moment.before
    quirks = frozenset({*map(Quirk, before.rules.changes), quirk})
    rules = get_rules(quirks, before.config)
    other = get_moment(replace(before, rules=rules), moment.event)
    is_another_state = replace(other.after, rules=before.rules) != moment.after
    differences = list(observation_differences(moment.observation, other.observation))
    if is_another_state or rules[has_work] is not before.rules[has_work]:
        shown = get_snapshot(moment.after), get_snapshot(other.after)  # each by its own rules
        differences += snapshot_differences(*shown)
    if is_another_state and not differences:
        differences = [Difference("state", "of the spec", "of the quirk")]
    return [f"{d.field}: spec {d.expected}, quirk {d.seen}" for d in differences]


def _without_saved_blocks(plan: v.Plan) -> v.Plan:
    """Return a plan whose swap-outs name no blocks, which belong to a state that is not shown
    here.
    """
    return replace(plan, kv_saves=tuple([replace(it, block_ids=()) for it in plan.kv_saves]))


def differ(
    engine: Engine,
    event: v.Event,
    observation: v.Observation,
    expected: v.Snapshot,
    capabilities: frozenset[str],
    scope: Equivalence | None = None,
) -> tuple[Difference, ...]:
    """Give an event to an engine, and return how its observation and state differ from the right
    ones.

    Compared is what its equivalence says; None means `exact`. If the engine shows no state at
    `renamed`, plans are compared without block ids.
    """
    try:
        seen = engine.apply(event)
        after = None if isinstance(scope, SamePlans) else engine.snapshot()
    except Exception as error:
        return (Difference(RAISED, "none", describe_error(error)),)
    if (fault := fault_of_types(event, seen, after)) is not None:
        return fault.differences
    if isinstance(scope, SamePlans) or (isinstance(scope, Renamed) and after is None):
        observation, seen = only_plan(observation), only_plan(seen)
    elif isinstance(scope, Renamed) and after is not None:
        if isinstance(seen, v.Plan) and isinstance(observation, v.Plan):
            seen = rename_plan(seen, pair_states(expected, after))
            observation, seen = map(_without_saved_blocks, (observation, seen))
        after = rename_snapshot(expected, after)
    with_hints = Capability.COMMON_PREFIX in capabilities
    differences = observation_differences(observation, seen, with_hints)
    if after is not None:
        if Capability.STATISTICS not in capabilities:
            after = replace(after, stats=expected.stats)
        if expected.has_work is None or Capability.WORK not in capabilities:
            after = replace(after, has_work=expected.has_work)
        differences += snapshot_differences(expected, after)
    return differences
