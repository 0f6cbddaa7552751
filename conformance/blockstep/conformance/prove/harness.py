"""States for laws, in which token sequences are replaced by their lengths.

Planning a step needs the number of tokens, not their values. `Tokens` is a tuple whose length can
be any integer, so the counters of a state can be symbolic while its shape (which requests run,
which blocks they hold) is concrete.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.spec import vocabulary as v
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.requests import Holding, RequestState
from blockstep.spec.core.schedule import process_schedule
from blockstep.spec.core.state import State
from blockstep.spec.features import get_config_rules
from blockstep.spec.frozen_map import FrozenMap

MANY = 1_000_000
"""A number of output tokens that no request reaches."""


class Tokens(tuple[int, ...]):
    """A token sequence of which only the length matters, and the last token if it is read."""

    number: int

    def __new__(cls, number: int, last: int = 1) -> Tokens:
        """Return `number` tokens, each of which reads as `last`."""
        self = super().__new__(cls, (last,))
        self.number = number
        return self

    def __len__(self) -> int:
        return self.number


def key_of(block_id: v.BlockId) -> v.BlockKey:
    """Return a different key for each block."""
    return v.BlockKey(None, (block_id,))


def build_pool(
    ref_counts: tuple[int, ...], free_queue: tuple[v.BlockId, ...], published: tuple[v.BlockId, ...]
) -> Pool:
    """Return a pool whose published blocks have a key each."""
    return Pool(
        ref_counts=ref_counts,
        block_keys=tuple(key_of(b) if b in published else None for b in range(len(ref_counts))),
        free_queue=free_queue,
        cached=FrozenMap({key_of(block_id): (block_id,) for block_id in published}),
    )


def is_conserved(pool: Pool) -> bool:
    """Whether each block but the null block is either in the free queue once, or held."""
    return sorted(pool.free_queue) == [
        block_id for block_id in range(1, len(pool.ref_counts)) if pool.ref_counts[block_id] == 0
    ]


def build_request(
    name: str, num_prompt: int, num_outputs: int = 0, max_tokens: int = MANY, **fields: Any
) -> RequestState:
    """Return a waiting request with these numbers of tokens; `fields` are fields of its
    `Request`.
    """
    asked = v.Request(name, Tokens(num_prompt), max_tokens=max_tokens, **fields)
    return RequestState(asked, v.Status.WAITING, output_token_ids=Tokens(num_outputs))


def build_runner(
    name: str,
    num_known: int,
    num_computed: int,
    block_table: tuple[v.BlockId, ...] = (),
    num_settled: int = 0,
    **fields: Any,
) -> RequestState:
    """Return a running request whose known tokens are all in its prompt; `fields` as in
    `build_request`.
    """
    return replace(
        build_request(name, num_known, **fields),
        status=v.Status.RUNNING,
        output_token_ids=(),
        num_computed_tokens=num_computed,
        holdings=(Holding(block_table, num_settled),),
    )


def table_of(request: RequestState) -> tuple[v.BlockId, ...]:
    """Return the block table of a request with one KV group."""
    (table,) = request.block_tables
    return table


def build_config(
    block_size: int = 16,
    max_model_len: int = 8192,
    num_speculative_tokens: int = 0,
    max_frames_in_flight: int = 1,
    **changes: Any,
) -> v.Config:
    """Return a config with five usable blocks and no prefix caching.

    Drafts come from a draft model; with several frames in flight, scheduling is asynchronous.
    """
    fields = {"num_blocks": 6, "enable_prefix_caching": False} | changes
    return v.Config(
        block_size=block_size,
        max_model_len=max_model_len,
        spec_method=v.SpecMethod.DRAFT_MODEL if num_speculative_tokens else v.SpecMethod.NONE,
        num_speculative_tokens=num_speculative_tokens,
        max_frames_in_flight=max_frames_in_flight,
        async_scheduling=max_frames_in_flight > 1,
        **fields,
    )


def build_state(
    config: v.Config, running: tuple[RequestState, ...], waiting: tuple[RequestState, ...] = ()
) -> State:
    """Return a state of these requests; blocks that none of them holds are free, in order of their
    ids.
    """
    holders = [0] * config.num_blocks
    for block_id in (b for request in running for table in request.block_tables for b in table):
        holders[block_id] += 1
    free = tuple(block_id for block_id in range(1, config.num_blocks) if not holders[block_id])
    return State(
        config,
        get_config_rules(config),
        build_pool(tuple(holders), free, published=()),
        FrozenMap({request.request_id: request for request in (*running, *waiting)}),
        waiting=tuple(request.request_id for request in waiting),
        running=tuple(request.request_id for request in running),
    )


def schedule(state: State) -> tuple[State, v.Plan]:
    """Plan one step with the specification."""
    result = process_schedule(state)
    assert not isinstance(result, v.Rejected), "the pipeline has room"
    return result
