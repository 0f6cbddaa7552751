"""Event: everything that may happen to a scheduler. Time is a value in an event."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from blockstep.spec.vocabulary.forks import Fork
from blockstep.spec.vocabulary.pins import Clock, PinEstimate
from blockstep.spec.vocabulary.request import FrameId, Request, RequestId, TokenIds
from blockstep.spec.vocabulary.transfers import NO_TRANSFERS, KVTransfers


class PauseState(StrEnum):
    """The requests that Schedule may schedule."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    """Running requests continue; no request is admitted."""
    PAUSED_ALL = "paused_all"
    """No request is scheduled."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A client submits a request. Observation: `Ack`."""

    request: Request


@dataclass(frozen=True, slots=True)
class Schedule:
    """The scheduler plans one step. Observation: `Plan`."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Token ids of one request: sampled ones in a Commit, proposed ones in Drafts."""

    request_id: RequestId
    token_ids: TokenIds = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """The worker returns the model output of a plan: one row per request of the frame, in any
    order.

    A row that sampled has its accepted drafts, then one token more. A row still in prefill has no
    tokens. Observation: `Outputs`.
    """

    frame_id: FrameId
    sampled: tuple[RowTokens, ...]
    transfers: KVTransfers = NO_TRANSFERS
    """Reports about transfers with the same model output."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The proposer provides draft tokens for the next step. Observation: `DraftsTaken`."""

    drafts: tuple[RowTokens, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Clients abort requests; unknown and finished ids change nothing (P18).

    Observation: `Aborted`.
    """

    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a request with `structured_output` is compiled. Observation: `Ack`."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """The grammar of a request with `structured_output` could not be compiled, or broke later.

    The request finishes, whatever its status. Observation: `Outputs` with its row, without tokens.
    """

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """Asks which tokens may be sampled at each position of a frame. Observation: `GrammarOutput`.

    Optional, at any time between the plan and its Commit.
    """

    frame_id: FrameId
    drafts: tuple[RowTokens, ...] = ()
    """Under asynchronous scheduling only: the drafts that the frame's placeholders represent. From
    then on only the drafts of a row that its grammar accepts can be verified."""


@dataclass(frozen=True, slots=True)
class StreamingUpdate:
    """A client continues a session, or ends it.

    A resumable request brings further input: its prompt is appended to the session's tokens, and
    from the preceding stop on its `max_tokens`, `min_tokens`, stop conditions, `arrival_time` and
    `items` apply. `SESSION_FIELDS` belong to the session: the input leaves them out or repeats
    them, and another value is rejected. A request that is not resumable ends the input, and all of
    its fields but the id are ignored. Observation: `Ack`, or `Aborted` if the session is idle and
    so ends here.
    """

    request: Request
    """The input, with the id of the session."""


@dataclass(frozen=True, slots=True)
class SetPause:
    """Pause or resume scheduling. Observation: `Ack`."""

    pause_state: PauseState


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget every cached block (weights changed, say). Observation: `ResetDone`.

    Without `reset_running_requests` it succeeds only if no request holds a block. With it, all
    running requests are preempted first, and waiting requests release their blocks, the last one
    first. The blocks of a transfer under way cannot be released: while there is one, or a hold
    without an end, no reset succeeds.
    """

    reset_running_requests: bool = False
    reset_connector: bool = False
    """Whether the store is emptied as well: it offers nothing from then on. Without a store the
    reset does not succeed."""


@dataclass(frozen=True, slots=True)
class EncoderReset:
    """Forget every encoded item, also those in use (weights changed, say). Observation: `Ack`.

    The worker forgets them, too, after the frames in flight.
    """


@dataclass(frozen=True, slots=True)
class EncoderOffer:
    """The encoded items that a connector has from now on, replacing the previous offer.

    An item among these is loaded, not encoded: it takes room in the cache, and no compute budget.
    Ignored without an encoder, and for an encoder-decoder model, which loads nothing. Observation:
    `Ack`.
    """

    identifiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KVOffer:
    """The store's answer about a request from now on, replacing the previous one.

    The store is asked when a waiting request with no computed tokens is tried, after its local hit;
    not for a request that skips reading the cache. A request about which the store has no answer
    yet is skipped. Ignored for an unknown request. Observation: `Ack`.
    """

    request_id: RequestId
    num_tokens: int | None = 0
    """Leading tokens of the request whose KV the store has. Those after the local hit are loaded,
    except for the last known token: a token must be sampled. None: the store has no answer yet; ask
    again.

    Of recurrent groups the store has only the states after the last of these tokens. If that token
    is not known, or is the last known one, its state cannot be used, and nothing is loaded."""
    is_async: bool = False
    """Whether a load takes longer than a step: the request waits until it has ended.

    The request takes no running slot and no tokens of the step, but is tried only while both are
    available; under `scheduler_reserve_full_isl` all of it must fit. When its load has ended it is
    tried even after another request did not fit, and the loaded blocks are published at its
    admission. Until then its blocks may be reclaimed for a request that lacks blocks while no other
    one runs, the last waiting request first; then it is as before, and the store is asked again."""
    delays_free: bool = False
    """Whether the store reads the request's blocks when it finishes: they are held until it has."""


@dataclass(frozen=True, slots=True)
class TransfersReported:
    """A worker reports transfers without a model output.

    Observation: `Outputs`, with a row of each request that finishes by it.
    """

    transfers: KVTransfers


Message: TypeAlias = EncoderReset | EncoderOffer | KVOffer | Clock | PinEstimate
"""An event that is always answered with `Ack`, also where the config models nothing that it is
about."""
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
    | TransfersReported
    | Fork
    | Message
)
EVENT_TYPES: tuple[type, ...] = (
    *(Submit, Schedule, Commit, Drafts, Abort, GrammarReady, GrammarFailed, GrammarBitmask),
    *(StreamingUpdate, SetPause, Reset, EncoderReset, EncoderOffer, KVOffer, TransfersReported),
    *(Clock, PinEstimate, Fork),
)
