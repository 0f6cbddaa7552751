"""State: everything that the compiled functions know, as arrays of integers.

Requests are named by slots, and those that run have a seat too: a row of the tables that grow with
their length. Contents of full blocks are *nodes* of a tree, each with one block's tokens and the
node of the content before it, and equal contents are one node. So a request's tokens are a path of
nodes and a tail that fills no block yet; a hit is a node that some block carries; and no digest
can collide, as nodes are told apart by what they hold (P3, P6).

    tokens  | node | node | node | tail ..|       last node of a request: its whole path
    blocks     7      3      9      4             a block carries a node, or none

Columns come first, as positions in the rows of the arrays.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockstep.spec.vocabulary import Config, Policy

NONE: Final = -1
"""No node, no block, no seat, no slot."""

# Scalars: the config,
BLOCK_SIZE: Final = 0
MAX_MODEL_LEN: Final = 1
MAX_NUM_SEQS: Final = 2
MAX_TOKENS_PER_ROW: Final = 3
NUM_LOOKAHEAD: Final = 4
NUM_PLACEHOLDERS: Final = 5
"""Drafts of a row that samples, under asynchronous scheduling."""
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
"""Unused seats are a list, linked by `NEXT_SEAT`."""
# the queues: waiting, skipped, and those passed over in this step; the first and the last of each,
QUEUES: Final = 17
WAITING: Final = 0
SKIPPED: Final = 1
PASSED: Final = 2
# the step,
NUM_RUNNING: Final = 26
NUM_ROWS: Final = 27
NUM_PREEMPTED: Final = 28
BUDGET: Final = 29
# the counters (P21), and how many unfinished requests have `MORE_STOPS`.
QUERIES: Final = 30
HITS: Final = 31
PREEMPTIONS: Final = 32
DRAFTS_SCHEDULED: Final = 33
DRAFTS_ACCEPTED: Final = 34
NUM_MORE_STOPS: Final = 35
NUM_SCALARS: Final = 36

# Requests: what is looked at in every step comes first, in as few lines of the cache as it can be;
BIRTH: Final = 0
"""A number for each request that ever was; 0 where the slot is unused."""
NUM_KNOWN: Final = 1
"""Prompt and verified output tokens."""
NUM_COMPUTED: Final = 2
NUM_PROMPT: Final = 3
MAX_KNOWN: Final = 4
"""Known tokens at which it ends for its length."""
NUM_HELD: Final = 5
"""The length of its block table."""
NUM_PUBLISHED: Final = 6
"""Blocks of it that were made findable, or hit."""
SEAT: Final = 7
LAST_FRAME: Final = 8
NUM_DRAFTS: Final = 9
NUM_PROMISED: Final = 10
"""Outputs that frames in flight will sample; always 0 without asynchronous scheduling."""
NUM_FULL: Final = 11
"""Blocks that its known tokens fill."""
IS_PREFILL: Final = 12
ROW: Final = 13
"""Its row in the step that is being planned."""
STATUS: Final = 14
NUM_CACHED_TOKENS: Final = 15
MIN_TOKENS: Final = 16
HAS_STOPS: Final = 17
"""Whether a token can end it."""
REPEATS_COUNT: Final = 18
"""0: it may repeat itself."""
END_BY_MAX_TOKENS: Final = 19
"""Prompt and `max_tokens`, whatever the model length."""
LAST_NODE: Final = 20
EOS: Final = 21
"""NONE: it has none; nor does a token equal it."""
STOPS: Final = 22
"""The first stop tokens; NONE where there is none."""
STOPS_END: Final = 26
# the rest after it.
MORE_STOPS: Final = 26
"""Whether it has more stop tokens than there are columns; then Python looks each token up."""
SKIPS_CACHE: Final = 27
REPEATS_MIN: Final = 28
REPEATS_MAX: Final = 29
PRIORITY: Final = 30
ARRIVAL: Final = 31
LABEL: Final = 32
"""Stands for its id in comparisons; under `Policy.PRIORITY` only."""
EXTRAS: Final = 33
"""What beside tokens names its blocks, by number."""
FIRST_EXTRAS: Final = 34
"""The same of the block in which the prompt ends."""
TIMES_PREEMPTED: Final = 35
GRAMMAR_READY: Final = 36
NEXT: Final = 37
PREVIOUS: Final = 38
QUEUE: Final = 39
"""The queue that it stands in, between `PREVIOUS` and `NEXT`."""
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
"""By blocks, by requests whose last node it is, and by nodes that continue it."""
FIRST_BLOCK: Final = 5
LAST_BLOCK: Final = 6
SERIAL: Final = 7
"""Tells it from others that were in the same place."""
BUCKET: Final = 8
"""Not of this node: the first of those whose hash ends in the number of this row."""
NODE_COLUMNS: Final = 9

# Lines: three lists side by side, none longer than there are seats.
RUNNING: Final = 0
"""Slots in running order."""
ROW_SLOT: Final = 1
"""Rows of the step; from here on."""
ROW_TOKENS: Final = 2
ROW_FIRST_BLOCK: Final = 3
"""Blocks that the worker knows of already."""
ROW_LAST_BLOCK: Final = 4
"""Blocks that it has."""
ROW_DRAFTS: Final = 5
NEXT_SEAT: Final = 6
LINE_COLUMNS: Final = 7

# What a plan tells of each row, in int32.
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
    """All arrays. Compiled functions change what they hold; only growth replaces some."""

    scalars: Int64s
    """[NUM_SCALARS]"""
    requests: Int64s
    """[slots, REQUEST_COLUMNS]"""
    tails: Int32s
    """[slots, block size]; known tokens that fill no block yet."""
    block_tables: Int32s
    """[seats, blocks of the longest request]"""
    node_tables: Int32s
    """[seats, blocks of the longest request]; nodes of known full blocks."""
    drafts: Int32s
    """[seats, drafts]; token ids for the next step."""
    blocks: Int32s
    """[blocks, BLOCK_COLUMNS]"""
    nodes: Int32s
    """[nodes, NODE_COLUMNS]; a power of two."""
    node_tokens: Int32s
    """[nodes, block size]"""
    extras_uses: Int64s
    """[extras]; nodes and requests that need each."""
    lines: Int64s
    """[seats, LINE_COLUMNS]"""
    scratch: Int32s
    """[twice the seats, or a block table]"""


_SLOTS: Final = 8
TABLE_ENTRIES = 1 << 26
"""Of a table that has all seats at once: no memory is used before it is written to."""


def make_state(config: Config) -> State:
    """The state before the first event."""
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
    """Room for `count` unfinished requests."""
    return state._replace(
        requests=_longer(state.requests, count), tails=_longer(state.tails, count)
    )


def grow_seats(state: State, count: int) -> State:
    """Room for `count` running requests."""
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
    """Room for `count` nodes; they are found in other buckets then."""
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
    """Room for `count` different extras."""
    return state._replace(extras_uses=_longer(state.extras_uses, count))


def _longer(array: A, count: int) -> A:
    """The same with `count` rows; the new ones are zeros, and cost nothing until they are used."""
    longer: A = np.zeros((count, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def _longer_table(table: Int32s, count: int, used: int) -> Int32s:
    """The same of a table of which the first `used` columns are in use."""
    longer = np.zeros((count, table.shape[1]), np.int32)
    longer[: len(table), :used] = table[:, :used]
    return longer
