"""Ledger: everything that an engine was given and answered up to now.

It follows events and answers only; it never decides. Checks compare a state with it, and look up
what is open: attached drafts, frames in flight, tokens not yet delivered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from blockstep.conformance.judge.grammar_automaton import Automaton, Place
from blockstep.conformance.judge.kv_event_follower import Follower
from blockstep.conformance.judge.properties.observed_step import PlannedRow, RowKind, Step
from blockstep.conformance.judge.properties.store_history import StoreHistory
from blockstep.conformance.judge.worker.prefix_names import Name, NamedText, PrefixNames, extras_of
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.session_tracker import Session
from blockstep.spec import vocabulary as v
from blockstep.spec.copies import wide_dataclass


def order_of(request: v.Request) -> tuple[int, int, v.RequestId]:
    """The sort key of a request under the priority policy: the lowest is served first."""
    return (request.priority, request.arrival_time, request.request_id)


class RequestHistory(NamedText):
    """One unfinished request since its submission."""

    __slots__ = (
        "admitted_in", "automaton", "drafts", "grammar_ready", "is_branch", "last_planned_in",
        "num_cached_tokens", "num_external_tokens", "num_known_at_load", "num_known_then",
        "preempted_at", "session",
    )  # fmt: skip

    def __init__(self, request: v.Request, names: PrefixNames) -> None:
        super().__init__(request, names)
        self.session: Session | None = Session() if request.resumable else None
        """The session's state between its inputs, if the request is a session."""
        self.automaton: Automaton | None = None
        """The automaton of its grammar, if it has one."""
        self.drafts: v.TokenIds = ()
        """Drafts that are attached and not scheduled; under asynchronous scheduling their
        placeholders."""
        self.num_cached_tokens = -1
        """Tokens of the prefix hit at its first admission; -1 before that."""
        self.num_external_tokens = 0
        """Tokens of that hit that a store loaded."""
        self.grammar_ready = False
        self.is_branch = False
        """Whether it is a branch of another request."""
        self.admitted_in: v.FrameId = -1
        """The plan of its last admission; -1 before that."""
        self.last_planned_in: v.FrameId = -1
        """The last plan with a row of this request."""
        self.preempted_at: int | None = None
        """The value of `History.num_progress` at its last preemption for lack of blocks."""
        self.num_known_at_load = -1
        """The number of known tokens when the end of its last load was reported; -1 before that."""
        self.num_known_then = 0
        """The number of known tokens at that preemption."""

    def begin_branch(self, fork: v.Fork) -> RequestHistory:
        """Return a branch of this request, with outputs of its own."""
        branch = RequestHistory(replace(self.request, request_id=fork.child_id), self.names)
        branch.tokens += fork.output_token_ids
        branch.is_branch, branch.automaton = True, self.automaton
        branch.grammar_ready, branch.num_cached_tokens = self.grammar_ready, self.num_cached_tokens
        return branch

    def go_on(self, request: v.Request | None) -> None:
        """Continue the session with the prompt of `request`; None changes nothing."""
        if request is None:
            return
        self.request, self.extras = request, extras_of(request, self.names.block_size)
        self.tokens, self.chain = list(request.prompt_token_ids), []
        self.num_prompt = len(self.tokens)

    @property
    def num_known(self) -> int:
        """Number of known tokens: prompt and outputs."""
        return len(self.tokens)

    @property
    def output_token_ids(self) -> v.TokenIds:
        """The tokens delivered so far."""
        return tuple(self.tokens[self.num_prompt :])

    def find_place(self, delivered: v.TokenIds = ()) -> Place | None:
        """The grammar state after its outputs and `delivered`; None if the grammar forbids one of
        them."""
        return (
            None
            if self.automaton is None
            else self.automaton.read(self.output_token_ids + delivered)
        )

    def accept(self, drafts: v.TokenIds) -> v.TokenIds:
        """The leading drafts that its grammar accepts; all of them without a grammar."""
        if self.automaton is None:
            return drafts
        place = self.find_place()
        return () if place is None else self.automaton.cut(place, drafts)

    @property
    def order(self) -> tuple[int, int, v.RequestId]:
        """The sort key under the priority policy: the lowest is served first."""
        return order_of(self.request)

    def block_name(self, index: int, size: int = 0) -> Name:
        """The name of the full block at `index` of its table; all tokens of the block must be
        known.

        `size` is the number of slots of a block, if it differs from `Config.block_size`.
        """
        end = (index + 1) * (size or self.names.block_size)
        start = len(self.chain)
        if start < end:
            tokens = self.tokens[start:end]
            self.names.extend(self.chain, self.root, tokens, self.extras, start)
        return self.chain[end - 1]

    def block_name_with(self, delivered: v.TokenIds, index: int, size: int) -> Name:
        """The same name, where `delivered` are outputs of a step that is not recorded yet."""
        count = len(self.tokens)
        if (index + 1) * size <= count:
            return self.block_name(index, size)
        self.tokens.extend(delivered)
        try:
            return self.block_name(index, size)
        finally:
            del self.tokens[count:], self.chain[count:]


def cut_at_placeholder(drafts: v.TokenIds) -> v.TokenIds:
    """Return the drafts before the first placeholder."""
    at = drafts.index(v.DRAFT_PLACEHOLDER) if v.DRAFT_PLACEHOLDER in drafts else len(drafts)
    return drafts[:at]


NEEDED = ("async_scheduling", *[switch for feature in FEATURES for switch in feature.switches])
"""Settings without which some checks are not made: see `Sentence.needs`."""
STATISTICS, SLOTS, WHOLE = "statistics", "slots", "whole state"
"""Abilities of an engine without which some checks are not made: counters with the meaning of
`Stats`, workers with a slot for each running request, and a whole state, not the part that
`show_state` makes. An engine has all three, except that at `safety` it may say that it lacks some.
"""


@wide_dataclass(frozen=True, slots=True)
class FlightRow:
    """The row of one request in a frame in flight."""

    request_id: v.RequestId
    end: int
    """One past the last position that runs."""
    drafts: v.TokenIds
    samples: bool
    """Whether the row computes the last known token or placeholder, so that it samples."""
    verifiable: v.TokenIds | None = None
    """The placeholder drafts that a bitmask kept; None before a bitmask."""
    is_dropped: bool = False
    """Whether its tokens are dropped, say because the session's input that it sampled for is over.
    """

    @property
    def num_promised(self) -> int:
        """Tokens that its commit may bring: the sampled one, and one for each draft."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def verified(self) -> v.TokenIds:
        """The drafts that its commit may accept."""
        return self.drafts if self.verifiable is None else self.verifiable


@dataclass(slots=True)
class History:
    """Everything learnt from events and answers of one run."""

    config: v.Config
    drops_tokens_in_flight: bool = False
    """Whether the engine drops what frames in flight sample for a request that it preempts."""
    lives: dict[v.RequestId, RequestHistory] = field(default_factory=dict)
    """Unfinished requests."""
    frames: dict[v.FrameId, tuple[FlightRow, ...]] = field(default_factory=dict)
    """Frames in flight, oldest first, with their rows in order of scheduling."""
    promised: dict[v.RequestId, int] = field(default_factory=dict)
    """Placeholders by request: tokens that its frames in flight may still bring. Only numbers above
    0."""
    ended: set[v.RequestId] = field(default_factory=set)
    """Requests that ended since the last plan."""
    ending: set[v.RequestId] = field(default_factory=set)
    """Requests whose abort takes effect with the next plan."""
    scheduled: set[v.RequestId] = field(default_factory=set)
    """Requests with a row in the last plan; empty after a forced reset."""
    stopped_in_flight: set[v.RequestId] = field(default_factory=set)
    """Requests that stopped while they had a row in flight."""
    pause_state: v.PauseState = v.PauseState.UNPAUSED
    first_frame_since_reset: v.FrameId = 0
    """Frames below this were dispatched before the last reset."""
    follower: Follower = field(default_factory=Follower)
    """The prefix cache as the KV event log describes it."""
    has_grammars: bool = False
    """Whether a request with a grammar was submitted."""
    has_sessions: bool = False
    """Whether a resumable request was submitted."""
    store: StoreHistory = field(init=False)
    """The state of transfers."""
    num_progress: int = 0
    """Number of events that delivered tokens or changed which requests compete for blocks: a
    submission, an end, a compiled grammar, the end of a transfer (`_count_transfers`), a reset."""
    num_plans_since_prompt: int = v.MAX_INT
    """Plans with rows since the last one that computed a prompt (`computes_prompt`)."""
    uncounted: frozenset[str] = frozenset()
    """Counters (fields of `Stats`) that the engine does not have; its state shows others there."""
    lacked: frozenset[str] = field(init=False)
    """Names of `NEEDED` that the config switches off, and abilities that the engine lacks."""
    names: PrefixNames = field(init=False)
    _flying: dict[v.RequestId, tuple[PlannedRow, FlightRow]] = field(
        default_factory=dict, repr=False
    )
    """Rows in flight that were computed for the plan which is not recorded yet."""
    _named: tuple[object, list[dict[Name, tuple[v.BlockId, ...]]]] = field(
        default=(None, []), repr=False
    )

    def __post_init__(self) -> None:
        self.names = PrefixNames(self.config.block_size, len(self.config.kv_groups))
        self.store = StoreHistory(self.config)
        self.lacked = frozenset([name for name in NEEDED if not getattr(self.config, name)])

    def in_flight(self, request_id: v.RequestId) -> bool:
        """Whether a frame in flight has a row of this request."""
        return any(row.request_id == request_id for rows in self.frames.values() for row in rows)

    def get_fence(self, name: v.RequestId, step: Step | None = None) -> v.FrameId | None:
        """The newest frame in flight with a row of a request, other than the frame that `step`
        commits.

        Blocks that the request frees become free with the commit of that frame. None if they become
        free at once, which is so without a store or with one frame in flight at most.
        """
        if not (self.config.kv_connector and self.config.max_frames_in_flight > 1):
            return None
        answered = step.event.frame_id if step and isinstance(step.event, v.Commit) else None
        found = [
            frame_id
            for frame_id, rows in self.frames.items()
            if frame_id != answered and any(row.request_id == name for row in rows)
        ]
        return max(found, default=None)

    def frame_of(self, step: Step) -> tuple[FlightRow, ...]:
        """The rows of the frame that is committed; () for an unknown frame."""
        return self.frames.get(step.commit.frame_id, ())

    def named_blocks(
        self, snapshot: v.Snapshot, group: int = 0
    ) -> dict[Name, tuple[v.BlockId, ...]]:
        """The prefix-cache map of a snapshot for one KV group, keyed by the names of the blocks'
        last slots.

        The result for the last snapshot is kept.
        """
        cached = snapshot.cached
        if self._named[0] is not cached:
            of_key = self.names.of_key
            if not self.config.groups:
                named = [{of_key(key)[-1]: blocks for key, blocks in cached.items()}]
            else:
                named = [{} for _ in self.config.groups]
                for key, blocks in cached.items():
                    named[key.group][of_key(key)[-1]] = blocks
            self._named = (cached, named)
        return self._named[1][group]

    def list_masked(self, frame_id: v.FrameId) -> list[FlightRow]:
        """Rows of a frame in flight whose requests sample under a grammar, are unfinished and get
        the token."""
        frame = self.frames.get(frame_id, ())
        rows = [row for row in frame if row.samples and not row.is_dropped]
        lives = self.lives
        return [
            row
            for row in rows
            if row.request_id in lives and lives[row.request_id].automaton is not None
        ]

    def count_drafts_in_flight(self, step: Step | None = None) -> dict[v.RequestId, int]:
        """The number of unverified computed tokens of each request that has any.

        Before `step`, or after one that is not recorded yet.
        """
        count: dict[v.RequestId, int] = {}
        if not self.config.num_speculative_tokens:
            return count
        answered = step.event.frame_id if step and isinstance(step.event, v.Commit) else None
        for frame_id, rows in self.frames.items():
            if frame_id != answered:
                for row in rows:
                    if row.drafts and not row.is_dropped:
                        count[row.request_id] = count.get(row.request_id, 0) + len(row.drafts)
        for planned in step.rows if step and isinstance(step.event, v.Schedule) else ():
            if planned.drafts:
                name = planned.request_id
                count[name] = count.get(name, 0) + len(planned.drafts)
        for name in (*self.list_stopped(step), *self.find_void(step)) if step and count else ():
            count.pop(name, None)
        return count

    def find_void(self, step: Step) -> dict[v.RequestId, int]:
        """Requests whose row in the committed frame is void because their load failed, with the
        number of leading tokens that are present. Their later rows are void, too."""
        if not self.store.transfers.at_once or not isinstance(step.event, v.Commit):
            return {}
        return self.store.find_void(step, self.promised)

    def list_lost(self, step: Step) -> list[v.RequestId]:
        """Requests that a commit preempts because nothing of their load is present."""
        void = self.find_void(step)
        return self.store.list_lost(step, void) if void else []

    def list_failing(self, step: Step) -> list[v.RequestId]:
        """Requests that an event ends because their load failed, in order."""
        if self.config.kv_load_failure_policy is not v.KVLoadFailurePolicy.FAIL:
            return []
        return [*self.store.find_failed(step), *self.find_void(step)]

    def flight_row(self, row: PlannedRow) -> FlightRow:
        """The row in flight that `row` becomes once it is dispatched; nothing may be recorded in
        between."""
        known = self._flying.get(row.request_id)
        if known is not None and known[0] is row:
            return known[1]
        due = self.lives[row.request_id].num_known + self.promised.get(row.request_id, 0)
        flight = FlightRow(row.request_id, row.end, row.drafts, row.end >= due)
        self._flying[row.request_id] = row, flight
        return flight

    def computes_prompt(self, step: Step, row: PlannedRow) -> bool:
        """Whether a row is a chunk of a running request, or admits a request with more than the
        last of its known tokens to compute."""
        if row.kind is RowKind.RUNNING:
            return step.old[row.request_id].is_prefill_chunk
        return row.first < self.lives[row.request_id].num_known - 1

    def placeholders(self, request_id: v.RequestId) -> int:
        """The placeholders of a request; 0 without asynchronous scheduling, where it waits for its
        token."""
        return self.promised.get(request_id, 0) if self.config.async_scheduling else 0

    def promised_after(self, step: Step) -> Mapping[v.RequestId, int]:
        """`promised` after a step that is not recorded yet."""
        if isinstance(step.event, v.Schedule) and step.rows:
            change = {row.request_id: self.flight_row(row).num_promised for row in step.rows}
        elif isinstance(step.event, v.Commit):
            change = {
                row.request_id: -row.num_promised
                for row in self.frame_of(step)
                if not row.is_dropped
            }
        else:
            return self.promised
        promised = dict(self.promised)
        for request_id, count in change.items():
            promised[request_id] = promised.get(request_id, 0) + count
        if isinstance(step.event, v.Commit):
            for request_id in (*self.list_stopped(step), *self.find_void(step)):
                promised[request_id] = 0
        return promised

    def record(self, step: Step) -> None:
        """Learn from a step after it was judged."""
        if isinstance(step.observation, v.Rejected):
            return
        if self.config.kv_connector:
            self._count_transfers(step)
        self._record(step)
        if self.config.kv_connector:
            self.store.record(step, self.lives)

    def _record(self, step: Step) -> None:
        """Learn from an accepted event: new requests, plans, model outputs and drafts."""
        match step.event, step.observation:
            case v.Submit(request=request), _:
                self.lives[request.request_id] = RequestHistory(request, self.names)
                self.has_sessions |= request.resumable
                if request.grammar is not None:
                    self.has_grammars = True
                    self.lives[request.request_id].automaton = Automaton(self.config, request)
                self.num_progress += 1
            case v.Fork(), _:
                self._fork(step.event)
            case _, v.Plan():
                self._record_plan(step)
            case v.Commit(frame_id=frame_id), v.Outputs(rows=rows, kv_events=kv_events):
                if self.store.transfers.at_once:
                    self._void(self.find_void(step))
                self._record_outputs(frame_id, rows)
                if kv_events:
                    self.follower.follow(kv_events)
            case v.Drafts(drafts=drafts), v.DraftsTaken(request_ids=taken):
                for proposal in drafts:
                    if proposal.request_id in taken and proposal.request_id in self.lives:
                        drafted = self.lives[proposal.request_id]
                        drafted.drafts = drafted.accept(proposal.token_ids)
            case v.GrammarReady(request_id=request_id), _:
                life = self.lives.get(request_id)
                if life is not None and not life.grammar_ready:
                    life.grammar_ready = True
                    self.num_progress += 1
            case v.SetPause(pause_state=pause_state), _:
                self.pause_state = pause_state
            case v.Reset(reset_running_requests=forced), v.ResetDone(success=True) as done:
                self._record_reset(forced, step.after.next_frame_id)
                self.follower.follow(done.kv_events)
            case v.GrammarBitmask(frame_id=frame_id), v.GrammarOutput(rows=masks):
                self._record_mask(frame_id, masks)
            case v.StreamingUpdate(request=request), v.Ack():
                self._update(request)
                self.num_progress += 1
            case _:
                self._record_ends(step)

    def _record_ends(self, step: Step) -> None:
        """Learn which requests an event other than a commit ends."""
        match step.event, step.observation:
            case v.TransfersReported(), v.Outputs(rows=rows, kv_events=kv_events):
                for row in rows:
                    self._end(row.request_id)
                self.follower.follow(kv_events)
            case v.GrammarFailed(), v.Outputs(rows=rows):
                for row in rows:
                    self._end(row.request_id)
            case _, v.Aborted(request_ids=request_ids, ending_req_ids=ending):
                for request_id in request_ids:
                    self._end(request_id)
                self.ending.update(ending)

    def _count_transfers(self, step: Step) -> None:
        """Count as progress the transfers whose end is reported.

        The end of a load counts once for each length of its request, since loads that fail or that
        a preemption undoes may be repeated for ever. The end of a store's read counts: a request
        has one at most.
        """
        for name in self.store.list_arrived(step):
            life = self.lives.get(name)
            if life is None or life.num_known != life.num_known_at_load:
                self.num_progress += 1
            if life is not None:
                life.num_known_at_load = life.num_known
        self.num_progress += len(self.store.list_read(step))

    def _fork(self, fork: v.Fork) -> None:
        """Begin a branch: a copy of its parent with another id and its own outputs."""
        self.lives[fork.child_id] = self.lives[fork.request_id].begin_branch(fork)
        self.num_progress += 1

    def _record_plan(self, step: Step) -> None:
        for request_id in sorted(self.ending):
            self._end(request_id)
        plan, known = step.plan, self.lives
        rows = [row for row in step.rows if row.request_id in known]
        # Drafts that only the worker knows are lost if the request has no row in the next plan.
        gone = self.scheduled if self.config.async_scheduling else ()
        for request_id in (*gone, *plan.preempted_req_ids):
            if request_id in known:
                known[request_id].drafts = ()
        for request_id in plan.preempted_req_ids:
            if request_id in known:
                known[request_id].preempted_at = self.num_progress
                known[request_id].num_known_then = known[request_id].num_known
        if self.drops_tokens_in_flight:
            self._void(plan.preempted_req_ids)
        frame, has_prompt, running = [self.flight_row(row) for row in rows], False, RowKind.RUNNING
        for row, flight in zip(rows, frame, strict=True):
            life = known[row.request_id]
            has_prompt = has_prompt or self.computes_prompt(step, row)
            life.drafts = self.drafts_after(flight)
            life.last_planned_in = plan.frame_id
            if row.kind is not running:
                life.admitted_in = plan.frame_id
                if life.num_cached_tokens < 0:
                    life.num_cached_tokens = row.first
                    if self.config.kv_connector:
                        life.num_external_tokens = self.store.count_loaded(step, row)
            if flight.samples:
                self._promise(row.request_id, flight.num_promised)
        if rows:
            self.num_plans_since_prompt = 0 if has_prompt else self.num_plans_since_prompt + 1
            self.frames[plan.frame_id] = tuple(frame)
        self.ended = set()
        self.scheduled = {row.request_id for row in rows}
        self._flying.clear()

    def _promise(self, request_id: v.RequestId, count: int) -> None:
        total = self.promised.pop(request_id, 0) + count
        if total:
            self.promised[request_id] = total

    def drafts_after(self, row: FlightRow) -> v.TokenIds:
        """Drafts attached to a request after its dispatch: placeholders for those that the worker
        proposes."""
        if not (self.config.async_scheduling and row.samples):
            return ()
        return (v.DRAFT_PLACEHOLDER,) * self.config.num_speculative_tokens

    def _record_outputs(self, frame_id: v.FrameId, rows: tuple[v.OutputRow, ...]) -> None:
        for flight in self.frames.pop(frame_id, ()):
            if flight.samples and not flight.is_dropped:
                self._promise(flight.request_id, -flight.num_promised)
        for row in rows:
            if row.request_id in self.lives:
                self.lives[row.request_id].tokens.extend(row.new_token_ids)
            if row.finish_reason is None:
                continue
            if row.finish_reason is v.FinishReason.ERROR:
                self._end(row.request_id)
            else:
                self._stop(row.request_id)
                self.stopped_in_flight.add(row.request_id)
        if self.stopped_in_flight:
            self.stopped_in_flight = set(filter(self.in_flight, self.stopped_in_flight))
        if rows:
            self.num_progress += 1

    def _update(self, update: v.Request) -> None:
        """A client sends the next input of a session."""
        life = self.lives[update.request_id]
        if life.session is not None:
            self._go_on(life, life.session.update(life.request, life.output_token_ids, update))

    def _stop(self, request_id: v.RequestId) -> None:
        """A request stopped: it ends, or it is a session that becomes idle or continues."""
        life = self.lives.get(request_id)
        if life is None or life.session is None or life.session.ends_at_its_stop:
            self._end(request_id)
            return
        self._go_on(life, life.session.stop(life.request, life.output_token_ids))
        self._void((request_id,))  # frames in flight sample for an input that is over

    def _void(self, names: Collection[v.RequestId]) -> None:
        """Drop the tokens that frames in flight bring for these requests."""
        for name in names:
            if name in self.lives:
                self.lives[name].drafts = ()
            self.promised.pop(name, None)
        for frame_id, rows in self.frames.items() if names else ():
            self.frames[frame_id] = tuple(
                replace(row, is_dropped=row.is_dropped or row.request_id in names) for row in rows
            )

    def _go_on(self, life: RequestHistory, request: v.Request | None) -> None:
        """Continue a session as `request`, with a new grammar state; None leaves it as it is."""
        life.go_on(request)
        if request is not None and life.automaton is not None:
            life.automaton = Automaton(self.config, request)

    def list_ended(self, step: Step) -> list[v.RequestId]:
        """Requests that a commit or an abort ended; not sessions that continue or become idle."""
        return [name for name in step.ended if not self.goes_on(name, step)]

    def list_stopped(self, step: Step) -> list[v.RequestId]:
        """Sessions that stopped in a commit and did not end."""
        if not self.has_sessions or not isinstance(step.event, v.Commit):
            return []
        return [name for name in step.ended if self.goes_on(name, step)]

    def list_going_on(self, step: Step) -> list[v.RequestId]:
        """Stopped sessions that continue with their next input at once."""
        sessions = [(name, self.lives[name].session) for name in self.list_stopped(step)]
        return [name for name, session in sessions if session is not None and session.updates]

    def goes_on(self, name: v.RequestId, step: Step) -> bool:
        """Whether a request that stopped in a commit is a session that does not end."""
        life = self.lives.get(name)
        if life is None or life.session is None or not isinstance(step.event, v.Commit):
            return False
        if name in step.failed:
            return False
        return not life.session.ends_at_its_stop

    def get_request_after(self, step: Step, name: v.RequestId) -> v.Request:
        """The request as it is after a step that is not recorded yet."""
        life = self.lives[name]
        return life.request if life.session is None else self.foresee(step, name)[0]

    def foresee(self, step: Step, name: v.RequestId) -> tuple[v.Request, Session]:
        """A session after a step that is not recorded yet: its request, and the state between its
        inputs."""
        life = self.lives[name]
        assert life.session is not None, "only a session continues"
        delivered = step.delivered.get(name, ()) if isinstance(step.event, v.Commit) else ()
        outputs = life.output_token_ids + delivered
        session, after = life.session.copy(), None
        if isinstance(step.event, v.StreamingUpdate) and step.event.request.request_id == name:
            after = session.update(life.request, outputs, step.event.request)
        elif name in self.list_stopped(step):
            after = session.stop(life.request, outputs)
        return after or life.request, session

    def _record_mask(self, frame_id: v.FrameId, masks: tuple[v.GrammarRow, ...]) -> None:
        """Note which placeholder drafts a bitmask kept: only these can be accepted."""
        left = {row.request_id: row.draft_token_ids for row in masks}
        if not self.config.async_scheduling or frame_id not in self.frames:
            return
        self.frames[frame_id] = tuple(
            replace(row, verifiable=cut_at_placeholder(left[row.request_id]))
            if row.request_id in left
            else row
            for row in self.frames[frame_id]
        )

    def _record_reset(self, forced: bool, next_frame_id: v.FrameId) -> None:
        self.num_progress += 1
        self.first_frame_since_reset = next_frame_id
        if forced:
            self.scheduled = set()
            for life in self.lives.values():
                life.drafts = ()
            if self.drops_tokens_in_flight:
                self._void(self.lives.keys())

    def _end(self, request_id: v.RequestId) -> None:
        self.ending.discard(request_id)
        self.store.end(request_id)
        if self.lives.pop(request_id, None) is not None:
            self.ended.add(request_id)
            self.num_progress += 1
