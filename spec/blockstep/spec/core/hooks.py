"""Hooks: the moments at which features take part, as tuples of functions.

The tuples of a state are made once, from the features that its config asks for, in the order of
`features.FEATURES`. A feature that is not asked for has no function in them. A hook is called as
`rules[hook]`, so that a release can replace it like any other function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from blockstep.spec.vocabulary import (
    BlockId,
    Commit,
    Config,
    KVGroup,
    Plan,
    Rejected,
    Request,
    RequestId,
    TokenIds,
)

if TYPE_CHECKING:  # a state has rules, which have hooks, which are functions of a step of a state
    from blockstep.spec.core.block_pool import Changes, Pool
    from blockstep.spec.core.requests import Frame, FrameRow, Hit, Holding, RequestState
    from blockstep.spec.core.rules import Rules
    from blockstep.spec.core.state import State
    from blockstep.spec.core.work import Scheduled, Step, Verdict

Reject: TypeAlias = "Callable[[State, Request], Rejected | None]"
"""Returns why a request, or an input of a session, must be rejected."""
Arrive: TypeAlias = "Callable[[State, RequestState], RequestState]"
"""Returns a request that was just submitted."""
Accept: TypeAlias = "Callable[[State, RequestState, TokenIds], TokenIds]"
"""Returns the drafts of a request that may be verified, of those that are proposed."""
Dispute: TypeAlias = "Callable[[State, Frame, Commit], str]"
"""Returns why a model output is impossible; "" if it is not."""
Read: TypeAlias = "Callable[[State, FrameRow, RequestState, TokenIds], RequestState]"
"""Returns a request after a row delivered tokens, which are among its outputs already."""
Gate: TypeAlias = "Callable[[Step, RequestState], Verdict | None]"
"""A check that may stop a waiting request for a reason of its own; None lets it pass."""
Look: TypeAlias = "Callable[[Step, RequestState, Hit], tuple[RequestState, Hit] | Verdict]"
"""Returns a waiting request and its hit, which may be longer; or why it is not admitted now."""
Skip: TypeAlias = "Callable[[Step, Pool, RequestState], tuple[Pool, RequestState]]"
"""Returns pool and request without blocks that the request does not need any more."""
Spare: TypeAlias = "Callable[[Step], int]"
"""Returns the free blocks that an admission must leave."""
Reserve: TypeAlias = "Callable[[Step, Pool, RequestState, Hit, int], bool]"
"""Returns whether a waiting request may have slots: (.., blocks that must be left)."""
Name: TypeAlias = "Callable[[RequestState, int, int, int, Rules], Mapping[str, Any]]"
"""Returns fields of a block's key: (.., index of the block, its first position, its end, rules)."""
Need: TypeAlias = "Callable[[Pool, KVGroup, Holding, int], int]"
"""Returns the blocks that a request needs besides new ones to continue after computed tokens."""
Own: TypeAlias = "Callable[[Pool, KVGroup, Holding, int], tuple[Pool, Holding]]"
"""Returns pool and holding with a block of its own for the next token."""
Stuck: TypeAlias = "Callable[[Step, RequestId], None]"
"""Admits requests behind the head of the queue, which does not fit."""
Admit: TypeAlias = "Callable[[Step, RequestState, RequestState, Hit], None]"
"""Updates a step for an admitted request: (.., as it waited, with its slots, its hit)."""
Limit: TypeAlias = "Callable[[Step, RequestState, int, int], int]"
"""Returns how many tokens a row gets of those that it could have: (.., computed, that many)."""
OfRow: TypeAlias = "Callable[[Step, RequestState], None]"
"""Updates a step for a request that gets a row, or that does not get one."""
Giver: TypeAlias = "Callable[[Step, RequestId], bool]"
"""Reclaims blocks that no running request holds for this request; returns whether it found some."""
Begin: TypeAlias = "Callable[[Step], None]"
"""Prepares a step in which nothing is planned yet."""
Close: TypeAlias = "Callable[[Step], bool]"
"""Returns whether no request is admitted in a step, after its running phase."""
OfVictim: TypeAlias = "Callable[[Step, RequestState, bool], None]"
"""Updates a step for a request that it preempts, and whether it had a row in the step."""
AddFields: TypeAlias = "Callable[[Step, Sequence[FrameRow], Plan], Plan]"
"""Returns the plan with the fields of a feature."""
Fill: TypeAlias = "Callable[[Step, Scheduled, FrameRow], FrameRow]"
"""Returns a row of a frame with what a feature must know until its commit."""
FillFrame: TypeAlias = "Callable[[Step, Frame], Frame]"
"""Returns a frame with what a feature must know until its commit."""
Sent: TypeAlias = "Callable[[Step, Sequence[FrameRow]], None]"
"""Updates a step whose plan is made: its tokens count as computed."""
Publish: TypeAlias = "Callable[[Config, RequestState, int, Sequence[BlockId], int], Changes]"
"""Returns the journal's entries for blocks of a table: (.., group, blocks, index of the first)."""
Take: TypeAlias = "Callable[[State], tuple[State, Changes]]"
"""Returns the state without the entries of the journal, and these."""
Leave: TypeAlias = "Callable[[State, RequestState], State]"
"""Returns the state after a request has finished."""
Stop: TypeAlias = "Callable[[State, RequestId], State]"
"""Returns the state after an output has ended this request, which still has its blocks."""
Change: TypeAlias = "Callable[[State], State]"
"""Returns the state after requests have ended; or before a reset."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hooks:
    """The functions that take part, by moment, in the order in which they are called."""

    creates: tuple[Change, ...] = ()
    """A new scheduler, before the first event."""
    rejects: tuple[Reject, ...] = ()
    """Submission of a request, or of an input of a session."""
    arrives: tuple[Arrive, ...] = ()
    """Submission of a request that is not rejected."""
    accepts: tuple[Accept, ...] = ()
    """Proposal of drafts."""
    names: tuple[Name, ...] = ()
    """The key of a block."""
    publishes: tuple[Publish, ...] = ()
    """Blocks of a group that are published."""
    gates: tuple[Gate, ...] = ()
    """Admission, before budget and pool are considered: the first verdict decides."""
    hits: tuple[Look, ...] = ()
    """Admission, after the prefix cache: each extends what the one before it found."""
    spares: tuple[Spare, ...] = ()
    """Admission: blocks that must be left."""
    reserves: tuple[Reserve, ...] = ()
    """Admission of a request, before it has slots: all must agree."""
    skips: tuple[Skip, ...] = ()
    """A request, before it has slots: each frees blocks."""
    needs: tuple[Need, ...] = ()
    """Slots, before any block is taken."""
    owns: tuple[Own, ...] = ()
    """Slots of a group, if there are enough blocks."""
    stuck: tuple[Stuck, ...] = ()
    """Admission, at a head that does not fit: no later request is tried, except by these."""
    admits: tuple[Admit, ...] = ()
    """Admission of a request that has its slots."""
    limits: tuple[Limit, ...] = ()
    """A row, before it has slots: each limits what the one before it left."""
    shortages: tuple[OfRow, ...] = ()
    """Admission of a request for which the limits leave no token."""
    refusals: tuple[OfRow, ...] = ()
    """Admission of a request for which there are no slots."""
    grants: tuple[OfRow, ...] = ()
    """A row that has its slots: it takes what its limits counted on."""
    givers: tuple[Giver, ...] = ()
    """Slots, if blocks are short and no other request runs: the first that gives ends it."""
    begins: tuple[Begin, ...] = ()
    """A step, before anything is allocated."""
    closes: tuple[Close, ...] = ()
    """A step, between its two phases: all are asked."""
    victims: tuple[OfVictim, ...] = ()
    """A preemption, before the request loses its blocks."""
    rows: tuple[Fill, ...] = ()
    """A row of a step, once all are planned."""
    fields: tuple[AddFields, ...] = ()
    """A plan: all rows are in it."""
    frames: tuple[FillFrame, ...] = ()
    """A frame, once the plan is made."""
    sent: tuple[Sent, ...] = ()
    """A step, after its plan was made."""
    disputes: tuple[Dispute, ...] = ()
    """A commit, before it changes anything: the first reason rejects it."""
    reads: tuple[Read, ...] = ()
    """A commit, for each row that delivers."""
    stops: tuple[Stop, ...] = ()
    """A commit, for each request that it ends, in the order of the rows."""
    answers: tuple[Take, ...] = ()
    """The answer to a commit, a reset or a report."""
    leaves: tuple[Leave, ...] = ()
    """Each request that finishes for whatever reason."""
    ends: tuple[Change, ...] = ()
    """Requests, after some have finished and are gone."""
    clears: tuple[Begin, ...] = ()
    """A forced reset, in a step in which nothing runs any more."""
    resets: tuple[Change, ...] = ()
    """A reset of the prefix cache: what does not prevent it ends with it."""

    def with_hooks(self, others: Hooks) -> Hooks:
        """Return these hooks followed by the others. Source: architecture D11."""
        names = [field.name for field in fields(self)]
        return Hooks(**{name: getattr(self, name) + getattr(others, name) for name in names})


NO_HOOKS: Final = Hooks()
