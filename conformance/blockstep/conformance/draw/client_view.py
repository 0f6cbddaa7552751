"""Memory: the interfaces through which drawing functions choose, and see what a client knows of a
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from blockstep.conformance.protocol.session_tracker import Session
from blockstep.conformance.protocol.transfer_tracker import Transfers
from blockstep.spec import vocabulary as v

T = TypeVar("T")


class Draw(Protocol):
    """Source of decisions: a seeded generator, or Hypothesis."""

    def integer(self, low: int, high: int) -> int:
        """Return an int between `low` and `high`, both included."""
        ...

    def choice(self, options: Sequence[T]) -> T:
        """Return one of `options`, which are not empty."""
        ...

    def chance(self, percent: int) -> bool:
        """Return True with a probability of `percent` in a hundred."""
        ...

    def tokens(self, count: int, vocabulary_size: int) -> tuple[int, ...]:
        """Return `count` token ids below `vocabulary_size`."""
        ...


Text: TypeAlias = tuple[v.Request, v.TokenIds]
"""Request, and the tokens that were known or drafted for it."""


class Memory(Protocol):
    """Knowledge of a client about a run (see `lockstep.client`)."""

    @property
    def live(self) -> dict[v.RequestId, v.Request]:
        """Return the accepted, unfinished requests by id, in order of submission."""
        ...

    @property
    def delivered(self) -> dict[v.RequestId, v.TokenIds]:
        """Return the outputs delivered to unfinished requests."""
        ...

    @property
    def sessions(self) -> dict[v.RequestId, Session]:
        """Return the state of each unfinished resumable request."""
        ...

    @property
    def ended(self) -> list[v.RequestId]:
        """Return the ids of requests that finished lately, which are named again by mistake."""
        ...

    @property
    def texts(self) -> Sequence[v.TokenIds]:
        """Return the token sequences of finished requests: the next turn of a conversation begins
        with one."""
        ...

    @property
    def turns(self) -> Sequence[Text]:
        """Return the token sequences of turns of jobs that finished lately."""
        ...

    @property
    def now(self) -> int:
        """Return the latest time that was reported."""
        ...

    @property
    def preempted_texts(self) -> Sequence[Text]:
        """Return the token sequences of requests preempted lately, whose block keys may be hit."""
        ...

    @property
    def rejected_texts(self) -> Sequence[Text]:
        """Return the token sequences of requests with lately rejected drafts, these drafts
        included."""
        ...

    @property
    def transfers(self) -> Transfers:
        """Return the transfers under way."""
        ...

    @property
    def plans(self) -> list[v.Plan]:
        """Return the plans in flight, oldest first."""
        ...

    @property
    def last_commit(self) -> v.Commit | None:
        """Return the last accepted commit."""
        ...

    @property
    def last_plan(self) -> v.Plan | None:
        """Return the last plan, in flight or committed."""
        ...

    def list_sharing(self) -> list[v.RequestId]:
        """Return the requests whose first block another request has as well, as far as plans show
        it."""
        ...


def list_frames(client: Memory) -> list[v.FrameId]:
    """Return the ids of frames in flight, of the first frame, of the last committed one, and an
    unknown id."""
    last = client.last_commit
    answered = [] if last is None else [last.frame_id]
    return [*(plan.frame_id for plan in client.plans), 0, *answered, 10**6]


def list_ending(
    plan: v.Plan,
    live: Mapping[v.RequestId, v.Request],
    delivered: Mapping[v.RequestId, v.TokenIds],
) -> list[v.RequestId]:
    """Return the requests of a plan in flight that finish with their next token."""
    names = [row.request_id for row in plan.rows if row.request_id in live]
    return [name for name in names if len(delivered.get(name, ())) + 1 >= live[name].max_tokens]
