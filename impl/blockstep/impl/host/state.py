"""State: all state of the compiled functions, as arrays of integers.

A request has an index, its `slot`; a running one also has a batch row (`BATCH_ROW`)
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

from functools import cached_property
from itertools import chain
from math import gcd, lcm, prod
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, MambaCacheMode, Policy, PoolOrder

NONE: Final = -1
"""No node, no block, no batch row, no slot."""

# Scalars: the config,
BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_TOKENS_PER_ROW, NUM_LOOKAHEAD = range(5)
NUM_PLACEHOLDERS: Final = 5
"""Drafts of a row that samples, under asynchronous scheduling; 0 otherwise."""
IS_ASYNC, IS_PRIORITY, HAS_CACHE, HAS_CHUNKS, RESERVES_WHOLE, HAS_EVENTS = range(6, 12)
# the pool and the nodes,
NUM_FREE: Final = 12
FREE_NODE: Final = 13
"""Unused nodes are a list, linked by `NEXT_NODE`."""
NUM_FREE_NODES, NUM_NODES_BORN = range(14, 16)
FREE_BATCH_ROW: Final = 16
"""Unused batch rows are a list, linked by `NEXT_BATCH_ROW`."""
# the queues: waiting, skipped, and skipped in this step; the first and the last of each,
QUEUES: Final = 17
WAITING, SKIPPED, PASSED = range(3)
# the step,
NUM_RUNNING, NUM_ROWS, NUM_PREEMPTED, BUDGET = range(26, 30)
# the counters (P21).
QUERIES, HITS, PREEMPTIONS, DRAFTS_SCHEDULED, DRAFTS_ACCEPTED = range(30, 35)
# the KV groups, and what they have in common.
NUM_GROUPS: Final = 35
UNIT: Final = 36
"""Length of every hit, in tokens: a multiple of this, whole blocks of every group."""
SKIPS_BLOCKS: Final = 37
"""Whether some group frees blocks that no later token reads."""
HAS_STATES, HAS_ALIGNED = range(38, 40)
MOST_DROPPED: Final = 40
"""The most tokens that some group recomputes after a hit."""
STEP: Final = 41
"""Id of the plan that is being made."""
NUM_MOVES: Final = 42
"""Times that a request began or ceased to hold blocks."""
NUM_LOGGED: Final = 43
MAX_LORAS: Final = 44
NUM_ADAPTERS: Final = 45
"""Different adapters of running requests, if there is a limit."""
NUM_BORN: Final = 46
NUM_SESSIONS: Final = 47
"""Unfinished sessions: they hold blocks while they do not run."""
STOP_START: Final = 48
"""Computed tokens, hits included, of the request at which machine code has stopped, and its new
tokens."""
STOP_TOKENS: Final = 49
HAS_FORKS: Final = 50
NUM_KEPT_FREE: Final = 51
"""Free blocks that an admission leaves while any request runs."""
IS_LIFO: Final = 52
"""Whether freed blocks go before the head of the free queue."""
NUM_COPIES: Final = 53
HAS_ITEMS: Final = 54
"""Whether the config models an encoder, so that items may be due."""
STOP_POSITION: Final = 55
"""Position of the running request at which machine code has stopped; NONE if there is none."""
STOP_SLOT: Final = 56
"""The same at the head of a queue."""
STOPPED: Final = 57
"""Why machine code has stopped."""
NUM_HOLDERS: Final = 58
"""Number of ended turns of jobs that still hold blocks: the holders besides requests."""
# A commit that stops at a row continues behind it: the next row and token, and the numbers of rows
# that deliver, of tokens delivered and of requests that finish.
AT_ROW, AT_TOKEN, NUM_DELIVERING, NUM_DELIVERED, NUM_ENDED = range(59, 64)
HAS_STORE: Final = 64
HAS_FENCES: Final = 65
"""Whether blocks that a frame in flight accesses wait for its commit, as a store could load into
them (P17)."""
LAST_ANSWERED: Final = 66
"""The last frame that was committed, or is being committed."""
NUM_DEFERRED, NUM_LOADS = range(67, 69)
NUM_RECEIVED: Final = 69
"""Number of requests that wait for admission after a finished asynchronous load."""
EXTERNAL_QUERIES, EXTERNAL_HITS = range(70, 72)
AWAITS_ANSWER: Final = 72
"""Whether a running request waits for blocks that are free behind a commit."""
SWAP_MIN: Final = 73
"""The fewest tokens of a preempted request that a store saves; 0: none."""
NUM_SAVES: Final = 74
LOW_FREE: Final = 75
"""Admission closes below this number of free blocks, and opens at `HIGH_FREE`; 0: it stays open."""
HIGH_FREE, IS_CLOSED = range(76, 78)
PREFILL_INTERVAL: Final = 78
"""Prompts get tokens in every step of this number, while requests decode; 1: in every step."""
PREFILL_WAIT: Final = 79
"""Steps with rows until prompts get tokens again."""
HOLDS_PREFILLS: Final = 80
"""Whether prompts get no tokens in this step."""
NUM_SCALARS: Final = 81

# Why machine code stops and returns to Python.
GOES_ON: Final = 0
IS_DUE: Final = 1
"""The next item of a request is due."""
IS_SHORT: Final = 2
"""A request lacks blocks while no other one runs, and another holder has some."""
BEGINS_ANEW: Final = 3
"""The load of a request has brought no block."""
IS_REFUSED: Final = 4
"""A request does not fit, and others whose loads have finished may."""

# Requests: columns that most steps read come first, in two cache lines:
BIRTH: Final = 0
"""A number for each life: of a request, or of an input of a session; 0 if the slot is unused."""
NUM_KNOWN: Final = 1
"""Prompt and verified output tokens."""
NUM_COMPUTED: Final = 2
QUIET: Final = 3
"""A row that ends at most at this slot takes, publishes and leaves no block; 0: look."""
NUM_DRAFTS: Final = 4
NUM_PROMISED: Final = 5
"""Placeholders: outputs that frames in flight will sample; 0 without asynchronous scheduling."""
LAST_FRAME: Final = 6
"""The last plan that had a row of the request."""
LAST_SAMPLE: Final = 7
"""The last plan with a row that samples, in this life."""
NUM_PROMPT, IS_PREFILL = range(8, 10)
NUM_FULL: Final = 10
"""Number of blocks that its known tokens fill."""
NUM_CERTAIN: Final = 11
"""Known tokens up to which only `EOS` can end it."""
NUM_CACHED_TOKENS, BATCH_ROW, STATUS = range(12, 15)
EOS: Final = 15
"""NONE if it has none; no token equals that."""
# then those that some steps read.
MIN_TOKENS: Final = 16
HAS_STOPS: Final = 17
"""Whether a token can end it."""
REPEATS_COUNT: Final = 18
"""0: repetitions do not end it."""
END_BY_MAX_TOKENS: Final = 19
"""Prompt length plus `max_tokens`, whatever the model length."""
LAST_NODE: Final = 20
NUM_IN_DOUBT: Final = 21
"""Number of its drafts in flight; commits may reject all."""
NUM_STOPS: Final = 22
MAX_KNOWN: Final = 23
"""Known tokens at which it finishes for its length."""
SKIPS_CACHE, REPEATS_MIN, REPEATS_MAX, PRIORITY, ARRIVAL = range(24, 29)
LABEL: Final = 29
"""Number that compares like its id; under `Policy.PRIORITY` only."""
EXTRAS: Final = 30
"""Number of the extras of its blocks' keys (adapter and so on)."""
FIRST_EXTRAS: Final = 31
"""Number of the extras of the block in which the prompt ends."""
TIMES_PREEMPTED, GRAMMAR_READY, NEXT, PREVIOUS = range(32, 36)
QUEUE: Final = 36
"""The queue that it is in, between `PREVIOUS` and `NEXT`."""
ADAPTER: Final = 37
"""Number of its adapter if running adapters are limited; 0 for none."""
HAS_GRAMMAR: Final = 38
IS_SESSION: Final = 39
"""0 for a request that ends at its stop; also for a session whose end is the next input."""
WAS_PREEMPTED: Final = 40
"""Whether its last admission resumed it."""
NUM_BESIDE: Final = 41
"""Embeddings of its items, in an encoder-decoder model."""
FIRST_ITEM: Final = 42
NEXT_ITEM: Final = 43
"""If more tokens than this are computed after a step, the first item that is not behind is due in
that step."""
MAY_SHARE: Final = 44
"""Whether another request may hold the block that its next token is written to."""
MAY_KEEP: Final = 45
"""Why its blocks may be held behind its end: `KEEPS_TURN`, `IS_SENT`, or both."""
IS_WARM: Final = 46
"""Whether its job's previous turn holds blocks."""
OFFERED: Final = 47
"""Leading tokens that a store has for it, if it asks; NONE if the store has no answer yet."""
IS_OFFER_ASYNC: Final = 48
"""Whether their load takes longer than a step."""
PARKED_AS: Final = 49
"""The status that it had before it waited for a load."""
UNSETTLED: Final = 50
"""1 plus the frame that confirms the load; until then no block is published (P19)."""
REQUEST_COLUMNS: Final = 51
STOPS: Final = 51
"""The first stop token; the others follow, and the rows are as long as any request needs."""

KEEPS_TURN: Final = 1
"""It is a turn of a job, which may hold blocks behind its end."""
IS_SENT: Final = 2
"""A store reads its blocks behind its end."""

# Statuses.
IS_WAITING, AWAITS_GRAMMAR, IS_RUNNING, IS_PREEMPTED = range(4)
IS_RESTING: Final = 4
"""A session that awaits its next input."""
IS_LOADING: Final = 5
"""It has blocks, and waits for a load over several steps."""
HAS_LOADED, HAS_ENDED = range(6, 8)
"""It has finished a load over several steps; it has ended."""

# Blocks; the null block is never free, so it closes the free queue to a ring.
REF_COUNT, NEXT_FREE, PREVIOUS_FREE, NODE = range(4)
NEXT_SAME: Final = 4
"""Blocks that carry one node are a list, in order of publication."""
PREVIOUS_SAME: Final = 5
GROUP: Final = 6
"""Group of the node that it carries."""
STATE_STEP: Final = 7
"""The step that published it, if it holds a state: rows of one step run side by side, so no row of
that step can hit it (P4)."""
BLOCK_COLUMNS: Final = 8

# Nodes.
PARENT, NODE_EXTRAS, HASH = range(3)
NEXT_NODE: Final = 3
"""Nodes of one bucket are a list."""
NUM_USES: Final = 4
"""Number of uses: by blocks, by requests whose last node it is, and by child nodes."""
SERIAL: Final = 5
"""Distinguishes it from other nodes that had the same index."""
BUCKET: Final = 6
"""Not of this node: the first node of the hash bucket with the number of this row."""
NODE_COLUMNS: Final = 7

# Carriers of a node in a group: the ends of the list of blocks that carry it.
FIRST_BLOCK, LAST_BLOCK = range(2)

# Groups.
KIND: Final = 0
SIZE: Final = 1
"""Token slots of a block."""
LINKS: Final = 2
"""Blocks of the smallest size in one of its blocks; the last of their nodes names it."""
SPAN: Final = 3
"""Tokens of the window or of a chunk."""
SPARE: Final = 4
"""Blocks for states after drafts."""
DROPPED: Final = 5
"""Blocks at the end of a hit that are recomputed."""
MOST_SLOTS: Final = 6
"""The most slots of a request that are in its blocks at once."""
MOST_BLOCKS: Final = 7
"""The most blocks that a request holds at once."""
COMMON: Final = 8
"""Leading blocks that all running requests share, and what they were counted for: the number of
running requests and that of moves."""
COMMON_RUNNING, COMMON_MOVES, GROUP_COLUMNS = range(9, 12)

# Kinds of groups.
IS_FULL: Final = 0
IS_CROSS: Final = 1
"""It holds the cross-attention KV of items, and no KV of the text."""
IS_WINDOW, IS_CHUNKED, IS_STATE = range(2, 5)
IS_ALIGNED: Final = 5
"""States are kept at the ends of chunks only."""

# Holdings of a request in a group.
HELD: Final = 0
"""Length of its block table."""
PUBLISHED: Final = 1
"""Leading blocks that were published, or hit."""
LEFT: Final = 2
"""Leading blocks that no later token reads: null."""
HAS_SPARE: Final = 3
"""Whether it has a state with spare blocks after it; of aligned groups only."""
HOLDING_COLUMNS: Final = 4

# Lines: three independent lists, none longer than the number of batch rows.
RUNNING: Final = 0
"""Slots in running order."""
NEXT_BATCH_ROW: Final = 1
ROW_SLOT: Final = 2
"""Rows of the step, from this column on."""
ROW_TOKENS, ROW_DRAFTS = range(3, 5)
ROW_LOOKS: Final = 5
"""Whether the row may have new blocks, so that the numbers that follow are valid."""
ROW_BLOCKS: Final = 6
"""By group: the number of blocks that the worker knows already, that of all blocks of the request,
and that of those which it had before this row took new ones."""
ROW_NUMBERS: Final = 3
"""These numbers of one group."""

# Entries of the log of KV events: kind, node and group.
STORED: Final = 0
"""A block was published, and does not continue the entry before."""
STORED_NEXT: Final = 1
"""A block was published behind that of the entry before, in the same table."""
REMOVED, CLEARED = range(2, 4)
LOG_COLUMNS: Final = 3

# Data of each row of a plan, in int32.
PLAN_COMPUTED, PLAN_SCHEDULED, PLAN_OUTPUTS, PLAN_SAMPLES, PLAN_DRAFTS, PLAN_COLUMNS = range(6)

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
A = TypeVar("A", Int64s, Int32s)


class Arrays(NamedTuple):
    """The arrays of a state."""

    scalars: Int64s
    """[NUM_SCALARS]"""
    requests: Int64s
    """[slots, REQUEST_COLUMNS + most stop tokens]"""
    tails: Int32s
    """[slots, block size]: known tokens that fill no block yet."""
    groups: Int64s
    """[groups, GROUP_COLUMNS]"""
    holdings: Int64s
    """[slots, groups, HOLDING_COLUMNS]"""
    block_tables: Int32s
    """[groups, running slots, blocks of the longest table]"""
    node_tables: Int32s
    """[running slots, blocks of the longest table]: nodes of known full blocks of the smallest
    size."""
    drafts: Int32s
    """[running slots, drafts]: draft tokens for the next step."""
    blocks: Int32s
    """[blocks, BLOCK_COLUMNS]"""
    nodes: Int32s
    """[nodes, NODE_COLUMNS]; the number of nodes is a power of two."""
    node_tokens: Int32s
    """[nodes, block size]"""
    carriers: Int32s
    """[nodes, groups, 2]: first and last block that carries each node in each group."""
    extras_uses: Int64s
    """[extras]: number of nodes and requests that use each."""
    adapters: Int64s
    """[adapters]: number of running requests with each, if running adapters are limited."""
    lines: Int64s
    """[running slots, ROW_BLOCKS + ROW_NUMBERS * groups]"""
    copies: Int32s
    """[entries, 3], with forks: request (NONE if it was preempted since), source and copy of a
    shared block. With a store, which excludes forks: a frame, a block that is free behind its
    commit, and whether the block is the first of those that are freed together."""
    log: Int32s
    """[entries, LOG_COLUMNS]: KV events that were not told yet."""
    loads: Int64s
    """[slots, 4], with a store: request, tokens of the hit, tokens to load, and whether that takes
    longer than a step. In a step that preempts, which loads nothing and gives out no batch row: the
    preempted request, its batch row until then, and the tokens to save."""
    scratch: Int32s
    """[twice the running slots, or a block table]"""


class State(Arrays):
    """All arrays. Compiled functions change their contents; only growth replaces some."""

    @cached_property
    def places(self) -> Int64s:
        """The address and the shape of each array: what Python passes to machine code."""
        pairs = [(array.ctypes.data, *array.shape) for array in self]
        return np.array([*chain.from_iterable(pairs)], np.int64)

    def __getstate__(self) -> None:
        """Leave the places out of a copy, which has arrays of its own."""


_SLOTS: Final = 8
_UNLIMITED: Final = 1 << 40
_KINDS: Final = {
    GroupKind.FULL: IS_FULL,
    GroupKind.CROSS_ATTENTION: IS_CROSS,
    GroupKind.SLIDING_WINDOW: IS_WINDOW,
    GroupKind.CHUNKED_LOCAL: IS_CHUNKED,
    GroupKind.RECURRENT: IS_STATE,
}
TABLE_BLOCKS = 64
"""Blocks of a table as long as no request may need more: rows that are close together use few
pages of memory."""
LINE_BYTES: Final = 64
"""Bytes of a cache line."""
TABLE_ENTRIES = 1 << 26
"""Most entries of a table allocated for all batch rows at once: unwritten memory is not used."""


def make_state(config: Config) -> State:
    """Return the state before the first event."""
    size, groups = config.block_size, make_groups(config)
    longest = count_longest(config, config.max_model_len)
    width = longest if config.is_encoder_decoder else min(longest, TABLE_BLOCKS)
    scalars = _make_scalars(config, groups)
    blocks = lengthen(np.zeros((0, BLOCK_COLUMNS), np.int32), config.num_blocks)
    blocks[:, NODE:] = NONE
    ring = np.arange(config.num_blocks, dtype=np.int32)
    blocks[:-1, NEXT_FREE], blocks[1:, PREVIOUS_FREE] = ring[1:], ring[:-1]  # else 0: a ring
    blocks[0, PREVIOUS_FREE] = ring[-1]
    state = State(
        scalars,
        np.zeros((0, _fill_lines(REQUEST_COLUMNS)), np.int64),
        np.zeros((0, size), np.int32),
        groups,
        np.zeros((0, len(groups), HOLDING_COLUMNS), np.int64),
        np.zeros((len(groups), 0, width), np.int32),
        np.zeros((0, width), np.int32),
        np.zeros((0, max(config.num_speculative_tokens, 1)), np.int32),
        blocks,
        np.zeros((0, NODE_COLUMNS), np.int32),
        np.zeros((0, size), np.int32),
        np.zeros((0, len(groups), 2), np.int32),
        np.zeros(1, np.int64),
        np.zeros(_SLOTS, np.int64),
        np.zeros((0, ROW_BLOCKS + ROW_NUMBERS * len(groups)), np.int64),
        np.zeros((0, 3), np.int32),
        np.zeros((0, LOG_COLUMNS), np.int32),
        np.zeros((0, 4), np.int64),
        np.zeros(0, np.int32),
    )
    num_rows = min(config.max_num_seqs, config.num_usable_blocks)
    num_rows = max(min(num_rows, TABLE_ENTRIES // (len(groups) * longest)), 1)
    num_nodes = 1 << config.num_blocks.bit_length()
    return grow_nodes(grow_batch(grow_slots(state, _SLOTS), num_rows), num_nodes)


def count_longest(config: Config, num_tokens: int) -> int:
    """Return the most blocks in a table of a request that ends with `num_tokens` tokens, and with
    drafts behind them."""
    ahead = (config.max_frames_in_flight + 1) * (1 + config.num_speculative_tokens)
    slots = min(num_tokens + ahead + config.num_lookahead_tokens, config.max_model_len)
    longest = -(-slots // config.block_size)
    if not config.has_windows:  # every block of a table is held
        longest = min(longest, config.num_blocks)
    longest += 1 + max([group.num_speculative_blocks for group in config.kv_groups])
    return max(longest, config.num_blocks * config.is_encoder_decoder)


def _make_scalars(config: Config, groups: Int64s) -> Int64s:
    """Return [NUM_SCALARS]."""
    scalars = np.zeros(NUM_SCALARS, np.int64)
    num_placeholders = config.num_speculative_tokens if config.async_scheduling else 0
    scalars[: HAS_EVENTS + 1] = (
        config.block_size,
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
        config.enable_kv_cache_events,
    )
    scalars[NUM_GROUPS : MOST_DROPPED + 1] = (
        len(groups),
        lcm(*groups[:, SIZE].tolist()),
        (groups[:, KIND] > IS_CROSS).any(),
        (groups[:, KIND] >= IS_STATE).any(),
        (groups[:, KIND] == IS_ALIGNED).any(),
        (groups[:, DROPPED] * groups[:, SIZE]).max(),
    )
    scalars[MAX_LORAS] = config.max_loras
    scalars[PREFILL_INTERVAL] = config.prefill_schedule_interval
    scalars[HAS_ITEMS] = config.encoder_cache_size > 0
    scalars[HAS_STORE] = config.kv_connector
    scalars[HAS_FENCES] = config.kv_connector and config.max_frames_in_flight > 1
    scalars[LAST_ANSWERED], scalars[SWAP_MIN] = NONE, config.swap_min_tokens
    scalars[LOW_FREE] = config.admission_low_blocks
    scalars[HIGH_FREE] = config.admission_high_blocks
    scalars[HAS_FORKS], scalars[NUM_KEPT_FREE] = config.enable_forks, config.watermark_blocks
    scalars[IS_LIFO] = config.pool_order is PoolOrder.LIFO
    scalars[NUM_FREE] = config.num_blocks - 1
    scalars[FREE_NODE] = scalars[FREE_BATCH_ROW] = NONE
    for queue in (WAITING, SKIPPED, PASSED):
        scalars[QUEUES + 2 * queue : QUEUES + 2 * queue + 2] = NONE
    return scalars


def make_groups(config: Config) -> Int64s:
    """Return [groups, GROUP_COLUMNS]."""
    groups = np.zeros((len(config.kv_groups), GROUP_COLUMNS), np.int64)
    for number, group in enumerate(config.kv_groups):
        kind = _KINDS[group.kind]
        if group.mamba_cache_mode is MambaCacheMode.ALIGN:
            kind = IS_ALIGNED
        most_slots, most_blocks = _count_most(config, group, kind)
        groups[number, : MOST_BLOCKS + 1] = (
            kind,
            group.block_size,
            group.block_size // config.block_size,
            group.sliding_window or group.attention_chunk_size,
            group.num_speculative_blocks,
            # A draft head reads hidden states beside KV, and a state holds no KV of a single token.
            config.drops_last_hit_block and kind < IS_STATE,
            most_slots,
            most_blocks,
        )
    return groups


def _count_most(config: Config, group: KVGroup, kind: int) -> tuple[int, int]:
    """Return the most slots in blocks that a request holds at once in a group, and the most such
    blocks (P11)."""
    if kind <= IS_CROSS:
        return _UNLIMITED, _UNLIMITED
    row = config.max_num_batched_tokens
    row = min(row, config.long_prefill_token_threshold or row)
    # A row of drafts has a known token before them, so a small threshold leaves out some drafts.
    ahead = config.max_frames_in_flight - 1 if config.async_scheduling else 0
    in_doubt = ahead * min(config.num_speculative_tokens, row - 1)
    size, spare = group.block_size, group.num_speculative_blocks
    if kind >= IS_STATE:
        in_doubt = max(in_doubt, spare)
    if kind == IS_ALIGNED:  # states from the last certain token to the last draft of a step
        span = in_doubt + 1 + 1 + spare
        return _UNLIMITED, -(-(size - 1 + span) // size) + spare
    step = group.attention_chunk_size or 1
    num_read = (group.sliding_window or group.attention_chunk_size or 2) - 1
    before = size - gcd(step, size)
    return before + num_read + in_doubt + row + config.num_lookahead_tokens, _UNLIMITED


def count_most_blocks(groups: Int64s, num_slots: int, num_beside: int) -> int:
    """Return the most blocks that a request holds at once until it has `num_slots` slots (P11).

    `num_beside`: embeddings of its items, in an encoder-decoder model.
    """
    total = 0
    for group in groups.tolist():
        num_own = num_beside if group[KIND] == IS_CROSS else num_slots
        slots = min(num_own, group[MOST_SLOTS])
        total += min(-(-slots // group[SIZE]) + group[SPARE], group[MOST_BLOCKS])
    return total


def grow_slots(state: State, count: int) -> State:
    """Return the state with room for `count` unfinished requests."""
    return state._replace(
        requests=lengthen(state.requests, count),
        tails=lengthen(state.tails, count),
        holdings=lengthen(state.holdings, count),
        loads=np.zeros((count * int(state.scalars[HAS_STORE]), 4), np.int64),
    )


def grow_stops(state: State, count: int) -> State:
    """Return the state with room for `count` stop tokens of each request."""
    requests = np.zeros((0, _fill_lines(STOPS + count)), np.int64)
    requests = lengthen(requests, len(state.requests))
    requests[:, : state.requests.shape[1]] = state.requests
    return state._replace(requests=requests)


def _fill_lines(num_columns: int) -> int:
    """Return a number of columns of int64 that fills whole cache lines."""
    return -(-num_columns * 8 // LINE_BYTES) * LINE_BYTES // 8


def grow_batch(state: State, count: int) -> State:
    """Return the state with room for `count` running requests."""
    first = len(state.lines)
    lines, copies = lengthen(state.lines, count), state.copies
    if state.scalars[HAS_FORKS]:
        copies = np.zeros((count * len(state.groups), 3), np.int32)
    lines[first:-1, NEXT_BATCH_ROW] = np.arange(first + 1, count)
    lines[-1, NEXT_BATCH_ROW] = state.scalars[FREE_BATCH_ROW]
    state.scalars[FREE_BATCH_ROW] = first
    state = state._replace(drafts=lengthen(state.drafts, count), lines=lines, copies=copies)
    return resize_tables(state, count, state.node_tables.shape[1])


def resize_tables(state: State, count: int, width: int) -> State:
    """Return the state with tables of `count` running requests and `width` blocks; memory that is
    not in use stays unwritten."""
    used = max(int(state.requests[:, NUM_FULL].max(initial=0)), int(state.holdings.max(initial=0)))

    def resize(table: Int32s) -> Int32s:
        new = np.zeros((*table.shape[:-2], count, width), np.int32)
        new[..., : table.shape[-2], :used] = table[..., :used]
        return new

    return state._replace(
        block_tables=resize(state.block_tables),
        node_tables=resize(state.node_tables),
        scratch=np.zeros(max(2 * count, width), np.int32),
    )


def grow_nodes(state: State, count: int) -> State:
    """Return the state with room for `count` nodes, whose buckets are rebuilt."""
    first = len(state.nodes)
    nodes = lengthen(state.nodes, count)
    nodes[first:] = NONE
    nodes[first:-1, NEXT_NODE] = np.arange(first + 1, count)
    nodes[-1, NEXT_NODE] = state.scalars[FREE_NODE]
    state.scalars[FREE_NODE] = first
    state.scalars[NUM_FREE_NODES] += count - first
    nodes[:, BUCKET] = NONE
    for node in (nodes[:first, NUM_USES] > 0).nonzero()[0].tolist():
        bucket = int(nodes[node, HASH]) & (count - 1)
        nodes[node, NEXT_NODE], nodes[bucket, BUCKET] = nodes[bucket, BUCKET], node
    return state._replace(
        nodes=nodes,
        node_tokens=lengthen(state.node_tokens, count),
        carriers=lengthen(state.carriers, count),
    )


def reserve_log(state: State) -> State:
    """Return the state with room for all KV events of one step."""
    needed = int(state.scalars[NUM_LOGGED]) + 3 * state.block_tables.size + len(state.blocks) + 1
    if needed <= len(state.log):
        return state
    return state._replace(log=lengthen(state.log, 2 * needed))


def reserve_deferred(state: State, num_more: int = 0) -> State:
    """Return the state with room for all blocks that one event frees later, and `num_more`."""
    if not state.scalars[HAS_FENCES]:
        return state
    needed = int(state.scalars[NUM_DEFERRED]) + 2 * state.block_tables.size + num_more
    if needed <= len(state.copies):
        return state
    return state._replace(copies=lengthen(state.copies, 2 * needed))


def lengthen(array: A, count: int) -> A:
    """Return the array with `count` rows, from the begin of a cache line on; new ones are zeros,
    and use no memory until written."""
    shape = (count, *array.shape[1:])
    memory = np.zeros(prod(shape) + LINE_BYTES // array.itemsize, array.dtype)
    first = -memory.ctypes.data % LINE_BYTES // array.itemsize
    longer: A = memory[first : first + prod(shape)].reshape(shape)
    longer[: len(array)] = array
    return longer
