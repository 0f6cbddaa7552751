"""Ledger: what an engine was told and what it answered, up to now.

It follows events and answers only; it never decides. Checks compare a state with it, and what a
step may do with what it says was still open: drafts attached, frames in flight, tokens delivered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from blockstep.conformance.properties.step import PlannedRow, RowKind, Step
from blockstep.conformance.worker.names import Name, PrefixNames, item_starts
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    BlockId,
    Commit,
    Config,
    Drafts,
    DraftsTaken,
    FrameId,
    GrammarReady,
    Outputs,
    PauseState,
    Plan,
    Rejected,
    Request,
    RequestId,
    Reset,
    ResetDone,
    SetPause,
    Snapshot,
    Submit,
    TokenId,
    TokenIds,
)


class Life:
    """One unfinished request, from its submission on."""

    __slots__ = (
        "chain", "drafts", "grammar_ready", "items", "names", "num_cached_tokens", "num_prompt",
        "request", "root", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, names: PrefixNames) -> None:
        self.request = request
        self.names = names
        self.root = names.root(request.adapter, request.cache_salt)
        self.items = item_starts(request, names.block_size)
        self.tokens: list[TokenId] = list(request.prompt_token_ids)
        """Prompt and delivered outputs: all known tokens."""
        self.num_prompt = len(self.tokens)
        self.chain: list[Name] = []
        self.drafts: TokenIds = ()
        """Attached and not scheduled yet."""
        self.num_cached_tokens = -1
        """Tokens of the hit at its first admission; -1 before that."""
        self.grammar_ready = False

    @property
    def num_known(self) -> int:
        """Prompt and outputs, tokens."""
        return len(self.tokens)

    @property
    def output_token_ids(self) -> TokenIds:
        """What was delivered."""
        return tuple(self.tokens[self.num_prompt :])

    @property
    def order(self) -> tuple[int, int, RequestId]:
        """Its place under the priority policy: lower goes first."""
        request = self.request
        return (request.priority, request.arrival_time, request.request_id)

    def block_name(self, index: int) -> Name:
        """The name of the full block at `index` of its table, all of whose tokens are known."""
        end = (index + 1) * self.names.block_size
        start = len(self.chain)
        if start < end:
            tokens = self.tokens[start:end]
            self.names.extend(self.chain, self.root, tokens, self.items, start)
        return self.chain[end - 1]


@dataclass(frozen=True, slots=True)
class FlightRow:
    """What a dispatched plan does for one request."""

    request_id: RequestId
    end: int
    """One past the last position that runs."""
    drafts: TokenIds
    samples: bool
    """All known tokens are computed once it has run."""


@dataclass(slots=True)
class Ledger:
    """Everything learnt from events and answers. One object is one run."""

    config: Config
    lives: dict[RequestId, Life] = field(default_factory=dict)
    """Unfinished requests."""
    frames: dict[FrameId, tuple[FlightRow, ...]] = field(default_factory=dict)
    """In flight, rows in order of scheduling."""
    ended: set[RequestId] = field(default_factory=set)
    """Since the last plan."""
    scheduled: set[RequestId] = field(default_factory=set)
    """In the last plan, and not reset by force since."""
    pause_state: PauseState = PauseState.UNPAUSED
    num_ended: int = 0
    num_resets: int = 0
    names: PrefixNames = field(init=False)
    _named: tuple[object, dict[Name, tuple[BlockId, ...]]] = field(default=(None, {}), repr=False)

    def __post_init__(self) -> None:
        self.names = PrefixNames(self.config.block_size)

    def in_flight(self, request_id: RequestId) -> bool:
        """Whether a frame in flight has a row of this id."""
        return any(row.request_id == request_id for rows in self.frames.values() for row in rows)

    def named_blocks(self, snapshot: Snapshot) -> dict[Name, tuple[BlockId, ...]]:
        """The cache map of a snapshot by names instead of keys. The last one asked for is kept."""
        if self._named[0] is not snapshot:
            of_key = self.names.of_key
            named = {of_key(key)[-1]: blocks for key, blocks in snapshot.cached.items()}
            self._named = (snapshot, named)
        return self._named[1]

    def flight_row(self, row: PlannedRow) -> FlightRow:
        """What is in flight once `row` is dispatched."""
        samples = row.end >= self.lives[row.request_id].num_known
        return FlightRow(row.request_id, row.end, row.drafts, samples)

    def record(self, step: Step) -> None:
        """Learn from a step that has been judged."""
        match step.event, step.observation:
            case _, Rejected():
                return
            case Submit(request=request), _:
                self.lives[request.request_id] = Life(request, self.names)
            case _, Plan():
                self._record_plan(step)
            case Commit(frame_id=frame_id), Outputs(rows=rows):
                self.frames.pop(frame_id, None)
                for row in rows:
                    if row.request_id in self.lives:
                        self.lives[row.request_id].tokens.extend(row.new_token_ids)
                    if row.finish_reason is not None:
                        self._end(row.request_id)
            case Drafts(drafts=drafts), DraftsTaken(request_ids=taken):
                for proposal in drafts:
                    if proposal.request_id in taken and proposal.request_id in self.lives:
                        self.lives[proposal.request_id].drafts = proposal.token_ids
            case Abort(), Aborted(request_ids=request_ids):
                for request_id in request_ids:
                    self._end(request_id)
            case GrammarReady(request_id=request_id), _:
                if request_id in self.lives:
                    self.lives[request_id].grammar_ready = True
            case SetPause(pause_state=pause_state), _:
                self.pause_state = pause_state
            case Reset(reset_running_requests=forced), ResetDone(success=True):
                self._record_reset(forced)

    def _record_plan(self, step: Step) -> None:
        plan, known = step.plan, self.lives
        rows = [row for row in step.rows if row.request_id in known]
        for row in rows:
            life = known[row.request_id]
            life.drafts = ()
            if row.kind is not RowKind.RUNNING and life.num_cached_tokens < 0:
                life.num_cached_tokens = row.first
        for request_id in plan.preempted_req_ids:
            if request_id in known:
                known[request_id].drafts = ()
        if rows:
            self.frames[plan.frame_id] = tuple(self.flight_row(row) for row in rows)
        self.ended = set()
        self.scheduled = {row.request_id for row in rows}

    def _record_reset(self, forced: bool) -> None:
        self.num_resets += 1
        if forced:
            self.scheduled = set()
            for life in self.lives.values():
                life.drafts = ()

    def _end(self, request_id: RequestId) -> None:
        if self.lives.pop(request_id, None) is not None:
            self.ended.add(request_id)
            self.num_ended += 1
