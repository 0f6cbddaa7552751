"""Forks: requests that branch off another one, and blocks that are copied for them."""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.spec.vocabulary.request import BlockId, RequestId, TokenIds


@dataclass(frozen=True, slots=True)
class Fork:
    """A branch starts: a request like its parent, with outputs of its own.

    It shares the KV of the tokens that it has in common with its parent, including a block that is
    not full; before one of them writes to such a block, it gets a copy. The branch starts at the
    front of the waiting queue with the shared blocks, and is a request like others from then on:
    neither the end of its parent nor a preemption of one affects the other. Source: seed 002 "Fork:
    Creating New Beams", corrected. Observation: `Ack`.
    """

    request_id: RequestId
    """The parent: it is running or preempted, is not a session, and has no row in a frame in
    flight."""
    child_id: RequestId
    output_token_ids: TokenIds = ()
    """The branch's outputs so far, instead of its parent's. None of them ends it."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block to be copied, in the layers of all groups, before the step accesses any block.

    Source: seed 002 "The COW Mechanism".
    """

    source: BlockId
    destination: BlockId
