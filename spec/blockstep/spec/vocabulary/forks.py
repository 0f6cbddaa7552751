"""Forks: a request that goes on as several, and the blocks that are copied for it."""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.spec.vocabulary.request import BlockId, RequestId, TokenIds


@dataclass(frozen=True, slots=True)
class Fork:
    """A branch begins: a request like another one, its parent, with outputs of its own.

    As far as its tokens are its parent's it shares the KV that there is, a block that is not full
    as well; whoever writes in such a block is given a copy of it before. It stands at the front of
    the queue with what it shares, and is a request like others from then on: neither the end of its
    parent nor a preemption of either concerns the other. Source: seed 002 "Fork: Creating New
    Beams", made sound. Observation: `Ack`.
    """

    request_id: RequestId
    """The parent: it runs or was preempted, is no session, and no frame in flight names it."""
    child_id: RequestId
    output_token_ids: TokenIds = ()
    """The branch's outputs until now, instead of its parent's. None of them ends it."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block that is to be copied, all groups' layers alike, before the step touches any.

    Source: seed 002 "The COW Mechanism".
    """

    source: BlockId
    destination: BlockId
