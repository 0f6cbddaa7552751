"""Event: everything that may happen to a scheduler. Time enters only as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from blockstep.spec.vocabulary.forks import Fork
from blockstep.spec.vocabulary.pins import Clock, PinEstimate
from blockstep.spec.vocabulary.request import FrameId, Request, RequestId, TokenIds
from blockstep.spec.vocabulary.transfers import NO_TRANSFERS, KVTransfers


class PauseState(StrEnum):
    """What Schedule may schedule."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    """Running requests go on; nobody is admitted."""
    PAUSED_ALL = "paused_all"
    """Nobody is scheduled."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A client hands in a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Schedule:
    """Plan one step. Observation: `Plan`."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Token ids of one request: sampled ones in a Commit, proposed ones in Drafts."""

    request_id: RequestId
    token_ids: TokenIds = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """The worker answers a plan: one row per request of the frame, in any order.

    A row that sampled holds its accepted drafts, then one token more. A row still in prefill
    holds nothing. Observation: `Outputs`.
    """

    frame_id: FrameId
    sampled: tuple[RowTokens, ...]
    transfers: KVTransfers = NO_TRANSFERS
    """What its worker reports with it."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The proposer hands in draft tokens for the next step. Observation: `DraftsTaken`."""

    drafts: tuple[RowTokens, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Clients give up; ids that are not (or no longer) known change nothing (P18)."""

    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a request with `structured_output` is compiled."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """The grammar of a request with `structured_output` could not be compiled, or broke later.

    The request ends, wherever it is. Observation: `Outputs` with one row of it, without tokens.
    """

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """Which tokens may be sampled at each position of a frame? Observation: `GrammarOutput`.

    Asked at any time between the plan and its Commit, if at all.
    """

    frame_id: FrameId
    drafts: tuple[RowTokens, ...] = ()
    """Under asynchronous scheduling only: what the placeholders of that frame stand for. Of a row
    none is verified from then on but those that its grammar accepts."""


@dataclass(frozen=True, slots=True)
class StreamingUpdate:
    """A client goes on with a session, or ends it.

    A resumable request brings the next chunk: its prompt stands behind what there is, and from the
    stop before it on `max_tokens`, `min_tokens`, how it stops, `arrival_time` and `items` are its
    own. `SESSION_FIELDS` are the session's: the chunk leaves them out or repeats them, and another
    value is refused. One that is not resumable says that no more comes, and all of its fields but
    the id are ignored. Observation: `Ack`, or `Aborted` where the session rests and so ends here.
    """

    request: Request
    """Of the same id."""


@dataclass(frozen=True, slots=True)
class SetPause:
    """Pause or resume scheduling."""

    pause_state: PauseState


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget every cached block (weights changed, say). Observation: `ResetDone`.

    Without `reset_running_requests` it succeeds only if no request holds a block; with it,
    everything that runs is preempted first, and who waits gives its blocks up, the last in line
    first. Nothing can take the blocks of a transfer that is under way: while there is one, or a
    hold without an end, no reset succeeds.
    """

    reset_running_requests: bool = False
    reset_connector: bool = False
    """Whether the store forgets as well: it offers nothing from now on. Without a store there is
    none to forget, and the reset does not succeed."""


@dataclass(frozen=True, slots=True)
class EncoderReset:
    """Forget every encoded item, those in use as well (weights changed, say). Observation: `Ack`.

    The worker forgets them, too, behind the frames in flight."""


@dataclass(frozen=True, slots=True)
class EncoderOffer:
    """What a connector holds of encoded items from now on, instead of what it held before.

    An item of these is loaded, not encoded: it takes room in the cache, and no compute. It says
    nothing without an encoder, and to an encoder-decoder model, for which nothing is loaded.
    Observation: `Ack`.
    """

    identifiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KVOffer:
    """What the store answers from now on when it is asked about a request, instead of before.

    It is asked when a waiting request that has computed nothing is looked at, behind its local hit;
    not about one that skips reading the cache. Whom it does not know yet joins those that were
    passed over, in the order in which they were met. Of a request that is not known it says
    nothing. Observation: `Ack`.
    """

    request_id: RequestId
    num_tokens: int | None = 0
    """Leading tokens of the request of which the store has the KV: those behind the local hit are
    loaded, but not the last known token: something must be sampled. None: it does not know yet,
    ask again."""
    is_async: bool = False
    """Whether a load takes longer than a step: the request is parked until it has come.

    It takes no seat and no tokens of the step, but is looked at only while there are both; under
    `scheduler_reserve_full_isl` all of it must fit. Once its load has come it is tried even behind
    one that does not fit, and what was loaded can be found with its admission. Until then it may
    have to give its blocks to who lacks them while nobody else runs, who is last in line first;
    then it is what it was before, and asks again."""
    delays_free: bool = False
    """Whether the store reads the request's blocks when it ends: they are held until it has."""


@dataclass(frozen=True, slots=True)
class TransfersReported:
    """A worker reports transfers without an answer to a plan. Observation: `Outputs`, with rows of
    those that it ends."""

    transfers: KVTransfers


Event: TypeAlias = (
    Submit
    | Schedule
    | Commit
    | Drafts
    | Abort
    | GrammarReady
    | GrammarFailed
    | GrammarBitmask
    | StreamingUpdate
    | SetPause
    | Reset
    | EncoderReset
    | EncoderOffer
    | KVOffer
    | TransfersReported
    | Clock
    | PinEstimate
    | Fork
)
EVENT_TYPES: tuple[type, ...] = (
    *(Submit, Schedule, Commit, Drafts, Abort, GrammarReady, GrammarFailed, GrammarBitmask),
    *(StreamingUpdate, SetPause, Reset, EncoderReset, EncoderOffer, KVOffer, TransfersReported),
    *(Clock, PinEstimate, Fork),
)
