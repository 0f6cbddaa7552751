"""Memory: what a client knows of a run, as those see it who draw what is done next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from blockstep.conformance.draw.requests import Text
from blockstep.conformance.protocol.sessions import Session
from blockstep.conformance.protocol.transfers import Transfers
from blockstep.spec import vocabulary as v


class Memory(Protocol):
    """What a client remembers of a run (see `lockstep.client`)."""

    @property
    def live(self) -> dict[v.RequestId, v.Request]:
        """Accepted and not ended, in order of submission."""
        ...

    @property
    def said(self) -> dict[v.RequestId, v.TokenIds]:
        """Outputs delivered to those."""
        ...

    @property
    def sessions(self) -> dict[v.RequestId, Session]:
        """Where those among them stand that are resumable."""
        ...

    @property
    def ended(self) -> list[v.RequestId]:
        """Lately ended ids, to be named again by mistake."""
        ...

    @property
    def texts(self) -> Sequence[v.TokenIds]:
        """What ended requests came to: the next turn of a talk begins with it."""
        ...

    @property
    def turns(self) -> Sequence[Text]:
        """What turns of jobs came to that ended lately."""
        ...

    @property
    def now(self) -> int:
        """The latest time that was told."""
        ...

    @property
    def preempted_texts(self) -> Sequence[Text]:
        """Of requests preempted lately, where keys of theirs may be looked for."""
        ...

    @property
    def rejected_texts(self) -> Sequence[Text]:
        """With drafts that were rejected lately, likewise."""
        ...

    @property
    def transfers(self) -> Transfers:
        """Those that are under way."""
        ...

    @property
    def plans(self) -> list[v.Plan]:
        """In flight, oldest first."""
        ...

    @property
    def last_commit(self) -> v.Commit | None:
        """The last one that was taken."""
        ...

    @property
    def last_plan(self) -> v.Plan | None:
        """In flight or answered."""
        ...

    def list_sharing(self) -> list[v.RequestId]:
        """Those whose first block another has as well, as far as plans tell."""
        ...


def list_frames(client: Memory) -> list[v.FrameId]:
    """Those in flight, the first of all, the one that was answered last, and none."""
    last = client.last_commit
    answered = [] if last is None else [last.frame_id]
    return [*(plan.frame_id for plan in client.plans), 0, *answered, 10**6]
