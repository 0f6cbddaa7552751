"""State: all state of the compiled functions, as arrays of integers.

A request has an index, its `slot`; a running one also has a batch row, called `seat` in the code,
in the tables that grow with its length. Contents of full blocks are *nodes* of a tree, each with
one block's tokens and the node of the content before it; equal contents are one node. So a
request's tokens are a path of nodes and a tail that fills no block yet, and a prefix hit is a node
under which some block is cached (the block *carries* the node). Hashes cannot collide, because
nodes are compared by their content (P3, P6).

    tokens  | node | node | node | tail ..|       last node of a request: its whole path
    blocks     7      3      9      4             a cached block carries a node

Columns come first, as positions in the rows of the arrays.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockstep.spec.vocabulary import Config, Policy

NONE: Final = -1
"""No node, no block, no batch row, no slot."""

# Scalars: the config,
BLOCK_SIZE: Final = 0
MAX_MODEL_LEN: Final = 1
MAX_NUM_SEQS: Final = 2
MAX_TOKENS_PER_ROW: Final = 3
NUM_LOOKAHEAD: Final = 4
NUM_PLACEHOLDERS: Final = 5
"""Drafts of a row that samples, under asynchronous scheduling; 0 otherwise."""
IS_ASYNC: Final = 6
IS_PRIORITY: Final = 7
HAS_CACHE: Final = 8
HAS_CHUNKS: Final = 9
RESERVES_WHOLE: Final = 10
DROPS_LAST_HIT: Final = 11
# the pool and the nodes,
NUM_FREE: Final = 12
FREE_NODE: Final = 13
"""Unused nodes are a list, linked by `NEXT_NODE`."""
NUM_FREE_NODES: Final = 14
NUM_NODES_BORN: Final = 15
FREE_SEAT: Final = 16
"""Unused batch rows are a list, linked by `NEXT_SEAT`."""
# the queues: waiting, skipped, and skipped in this step; the first and the last of each,
QUEUES: Final = 17
WAITING: Final = 0
SKIPPED: Final = 1
PASSED: Final = 2
# the step,
NUM_RUNNING: Final = 26
NUM_ROWS: Final = 27
NUM_PREEMPTED: Final = 28
BUDGET: Final = 29
# the counters (P21), and the number of unfinished requests with `MORE_STOPS`.
QUERIES: Final = 30
HITS: Final = 31
PREEMPTIONS: Final = 32
DRAFTS_SCHEDULED: Final = 33
DRAFTS_ACCEPTED: Final = 34
NUM_MORE_STOPS: Final = 35
NUM_SCALARS: Final = 36

# Requests: columns that each step reads come first, so that they share few cache lines;
BIRTH: Final = 0
"""A number for each request ever submitted; 0 if the slot is unused."""
NUM_KNOWN: Final = 1
"""Prompt and verified output tokens."""
NUM_COMPUTED: Final = 2
NUM_PROMPT: Final = 3
MAX_KNOWN: Final = 4
"""Known tokens at which it finishes for its length."""
NUM_HELD: Final = 5
"""Length of its block table."""
NUM_PUBLISHED: Final = 6
"""Blocks of the request that were published, or hit."""
SEAT: Final = 7
LAST_FRAME: Final = 8
NUM_DRAFTS: Final = 9
NUM_PROMISED: Final = 10
"""Placeholders: outputs that frames in flight will sample; 0 without asynchronous scheduling."""
NUM_FULL: Final = 11
"""Number of blocks that its known tokens fill."""
IS_PREFILL: Final = 12
ROW: Final = 13
"""Row in the step that is being planned."""
STATUS: Final = 14
NUM_CACHED_TOKENS: Final = 15
MIN_TOKENS: Final = 16
HAS_STOPS: Final = 17
"""Whether a token can end it."""
REPEATS_COUNT: Final = 18
"""0: repetitions do not end it."""
END_BY_MAX_TOKENS: Final = 19
"""Prompt length plus `max_tokens`, whatever the model length."""
LAST_NODE: Final = 20
EOS: Final = 21
"""NONE if it has none; no token equals that."""
STOPS: Final = 22
"""The first stop tokens; NONE if there are fewer."""
STOPS_END: Final = 26
# the other columns follow.
MORE_STOPS: Final = 26
"""Whether it has more stop tokens than there are columns; then Python looks each token up."""
SKIPS_CACHE: Final = 27
REPEATS_MIN: Final = 28
REPEATS_MAX: Final = 29
PRIORITY: Final = 30
ARRIVAL: Final = 31
LABEL: Final = 32
"""Number that compares like its id; under `Policy.PRIORITY` only."""
EXTRAS: Final = 33
"""Number of the extras of its blocks' keys (adapter and so on)."""
FIRST_EXTRAS: Final = 34
"""Number of the extras of the block in which the prompt ends."""
TIMES_PREEMPTED: Final = 35
GRAMMAR_READY: Final = 36
NEXT: Final = 37
PREVIOUS: Final = 38
QUEUE: Final = 39
"""The queue that it is in, between `PREVIOUS` and `NEXT`."""
REQUEST_COLUMNS: Final = 40

# Statuses.
IS_WAITING: Final = 0
AWAITS_GRAMMAR: Final = 1
IS_RUNNING: Final = 2
IS_PREEMPTED: Final = 3

# Blocks; the null block is never free, so it closes the free queue to a ring.
REF_COUNT: Final = 0
NEXT_FREE: Final = 1
PREVIOUS_FREE: Final = 2
NODE: Final = 3
NEXT_SAME: Final = 4
"""Blocks that carry one node are a list, in order of publication."""
PREVIOUS_SAME: Final = 5
BLOCK_COLUMNS: Final = 8

# Nodes.
PARENT: Final = 0
NODE_EXTRAS: Final = 1
HASH: Final = 2
NEXT_NODE: Final = 3
"""Nodes of one bucket are a list."""
NUM_USES: Final = 4
"""Number of uses: by blocks, by requests whose last node it is, and by child nodes."""
FIRST_BLOCK: Final = 5
LAST_BLOCK: Final = 6
SERIAL: Final = 7
"""Distinguishes it from other nodes that had the same index."""
BUCKET: Final = 8
"""Not of this node: the first node of the hash bucket with the number of this row."""
NODE_COLUMNS: Final = 9

# Lines: three independent lists, none longer than the number of batch rows.
RUNNING: Final = 0
"""Slots in running order."""
ROW_SLOT: Final = 1
"""Rows of the step, from this column on."""
ROW_TOKENS: Final = 2
ROW_FIRST_BLOCK: Final = 3
"""Blocks that the worker knows already."""
ROW_LAST_BLOCK: Final = 4
"""Blocks that it has."""
ROW_DRAFTS: Final = 5
NEXT_SEAT: Final = 6
LINE_COLUMNS: Final = 7

# Data of each row of a plan, in int32.
TOLD_COMPUTED: Final = 0
TOLD_SCHEDULED: Final = 1
TOLD_OUTPUTS: Final = 2
TOLD_SAMPLES: Final = 3
TOLD_DRAFTS: Final = 4
TOLD_COLUMNS: Final = 5

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
A = TypeVar("A", Int64s, Int32s)


class State(NamedTuple):
    """All arrays. Compiled functions change their contents; only growth replaces some."""

    scalars: Int64s
    """[NUM_SCALARS]"""
    requests: Int64s
    """[slots, REQUEST_COLUMNS]"""
    tails: Int32s
    """[slots, block size]: known tokens that fill no block yet."""
    block_tables: Int32s
    """[seats, blocks of the longest request]"""
    node_tables: Int32s
    """[seats, blocks of the longest request]: nodes of known full blocks."""
    drafts: Int32s
    """[seats, drafts]: draft tokens for the next step."""
    blocks: Int32s
    """[blocks, BLOCK_COLUMNS]"""
    nodes: Int32s
    """[nodes, NODE_COLUMNS]; the number of nodes is a power of two."""
    node_tokens: Int32s
    """[nodes, block size]"""
    extras_uses: Int64s
    """[extras]: number of nodes and requests that use each."""
    lines: Int64s
    """[seats, LINE_COLUMNS]"""
    scratch: Int32s
    """[twice the seats, or a block table]"""


_SLOTS: Final = 8
TABLE_ENTRIES = 1 << 26
"""Most entries of a table allocated for all batch rows at once: unwritten memory is not used."""


def make_state(config: Config) -> State:
    """Return the state before the first event."""
    size = config.block_size
    longest = min(-(-config.max_model_len // size), config.num_blocks) + 1
    scalars = np.zeros(NUM_SCALARS, np.int64)
    num_placeholders = config.num_speculative_tokens if config.async_scheduling else 0
    scalars[: DROPS_LAST_HIT + 1] = (
        size,
        config.max_model_len,
        config.max_num_seqs,
        config.long_prefill_token_threshold or config.max_model_len,
        config.num_lookahead_tokens,
        num_placeholders,
        config.async_scheduling,
        config.policy is Policy.PRIORITY,
        config.enable_prefix_caching,
        config.enable_chunked_prefill,
        config.scheduler_reserve_full_isl,
        config.drops_last_hit_block,
    )
    scalars[NUM_FREE] = config.num_blocks - 1
    scalars[FREE_NODE] = scalars[FREE_SEAT] = NONE
    for queue in (WAITING, SKIPPED, PASSED):
        scalars[QUEUES + 2 * queue : QUEUES + 2 * queue + 2] = NONE
    blocks = np.full((config.num_blocks, BLOCK_COLUMNS), NONE, np.int32)
    blocks[:, REF_COUNT] = 0
    ring = np.arange(config.num_blocks, dtype=np.int32)
    blocks[:, NEXT_FREE], blocks[:, PREVIOUS_FREE] = np.roll(ring, -1), np.roll(ring, 1)
    state = State(
        scalars,
        np.zeros((0, REQUEST_COLUMNS), np.int64),
        np.zeros((0, size), np.int32),
        np.zeros((0, longest), np.int32),
        np.zeros((0, longest), np.int32),
        np.zeros((0, max(config.num_speculative_tokens, 1)), np.int32),
        blocks,
        np.zeros((0, NODE_COLUMNS), np.int32),
        np.zeros((0, size), np.int32),
        np.zeros(1, np.int64),
        np.zeros((0, LINE_COLUMNS), np.int64),
        np.zeros(0, np.int32),
    )
    seats = min(config.max_num_seqs, config.num_usable_blocks)
    seats = max(min(seats, TABLE_ENTRIES // longest), 1)
    num_nodes = 1 << config.num_blocks.bit_length()
    return grow_nodes(grow_seats(grow_slots(state, _SLOTS), seats), num_nodes)


def grow_slots(state: State, count: int) -> State:
    """Return the state with room for `count` unfinished requests."""
    return state._replace(
        requests=_longer(state.requests, count), tails=_longer(state.tails, count)
    )


def grow_seats(state: State, count: int) -> State:
    """Return the state with room for `count` running requests."""
    first = len(state.lines)
    used = int(state.requests[:, [NUM_HELD, NUM_FULL]].max(initial=0))
    lines = _longer(state.lines, count)
    lines[first:-1, NEXT_SEAT] = np.arange(first + 1, count)
    lines[-1, NEXT_SEAT] = state.scalars[FREE_SEAT]
    state.scalars[FREE_SEAT] = first
    return state._replace(
        block_tables=_longer_table(state.block_tables, count, used),
        node_tables=_longer_table(state.node_tables, count, used),
        drafts=_longer(state.drafts, count),
        lines=lines,
        scratch=np.zeros(max(2 * count, state.block_tables.shape[1]), np.int32),
    )


def grow_nodes(state: State, count: int) -> State:
    """Return the state with room for `count` nodes, whose buckets are rebuilt."""
    first = len(state.nodes)
    nodes = _longer(state.nodes, count)
    nodes[first:] = NONE
    nodes[first:-1, NEXT_NODE] = np.arange(first + 1, count)
    nodes[-1, NEXT_NODE] = state.scalars[FREE_NODE]
    state.scalars[FREE_NODE] = first
    state.scalars[NUM_FREE_NODES] += count - first
    nodes[:, BUCKET] = NONE
    for node in (nodes[:first, NUM_USES] > 0).nonzero()[0].tolist():
        bucket = int(nodes[node, HASH]) & (count - 1)
        nodes[node, NEXT_NODE], nodes[bucket, BUCKET] = nodes[bucket, BUCKET], node
    return state._replace(nodes=nodes, node_tokens=_longer(state.node_tokens, count))


def grow_extras(state: State, count: int) -> State:
    """Return the state with room for `count` different extras."""
    return state._replace(extras_uses=_longer(state.extras_uses, count))


def _longer(array: A, count: int) -> A:
    """Return the array with `count` rows; new ones are zeros, and use no memory until written."""
    longer: A = np.zeros((count, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def _longer_table(table: Int32s, count: int, used: int) -> Int32s:
    """Return a longer table of which the first `used` columns are in use."""
    longer = np.zeros((count, table.shape[1]), np.int32)
    longer[: len(table), :used] = table[:, :used]
    return longer
