"""Layout: all tensors of the device's scheduler, and the constants of its kernels.

An unfinished request has an index, called `slot` here, which the host assigns, and reuses after it
has read that the request finished. Its data are in columns and tables by slot; `run` has the slots
in running order. Contents of full blocks are *nodes* of a tree, as in the host engine: the same
content is the same node, and a prefix hit is a node under which some block is cached (the block
*carries* the node).

    tokens  | node | node | node | ..|     paths[slot]: the node of each known full block
    blocks     7      3      9     4       tables[slot]; a cached block carries a node

Nodes have no reference counts: those that are no longer needed are swept from time to time, between
steps.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstep.impl.device.dims import Dims

NONE: Final = -1
"""No node, no block."""
FAR: Final = 1 << 62
"""The key of a request that does not wait: after all others."""

# Statuses.
IS_WAITING: Final = 0
AWAITS_GRAMMAR: Final = 1
IS_RUNNING: Final = 2
IS_PREEMPTED: Final = 3

# Queues.
NOWHERE: Final = 0
"""Running, or unused."""
SKIPPED: Final = 1
WAITING: Final = 2
PASSED: Final = 3
"""Skipped in the step that is being planned."""

# Finish reasons of a row.
GOES_ON: Final = 0
BY_EOS: Final = 1
BY_STOP_TOKEN: Final = 2
BY_LENGTH: Final = 3
BY_REPETITION: Final = 4

# Commands, as [opcode, slot, birth, argument].
SUBMIT: Final = 1
"""Submit: the slot's rows of `inbox`, `extras`, `stops`, `ranks` and `tokens` were written."""
ABORT: Final = 2
"""Abort the request; ignored if the slot has another birth by now."""
GRAMMAR: Final = 3
"""The request's grammar is ready."""
DRAFT: Final = 4
"""The request's row of `offered` has as many drafts as the argument says."""
RESET: Final = 5
"""Forget cached blocks; argument: whether to preempt all running requests first."""
COMMAND_COLUMNS: Final = 4

# Columns of `inbox`.
IN_PROMPT: Final = 0
IN_MAX_TOKENS: Final = 1
IN_MIN_TOKENS: Final = 2
IN_EOS: Final = 3
"""NONE if it has none."""
IN_NUM_STOPS: Final = 4
IN_SKIPS_CACHE: Final = 5
IN_REPEATS_MIN: Final = 6
IN_REPEATS_MAX: Final = 7
IN_REPEATS_COUNT: Final = 8
"""0: repetitions do not end it."""
IN_GRAMMAR: Final = 9
INBOX_COLUMNS: Final = 10

# Columns of a frame, each [rows].
ROW_SLOT: Final = 0
ROW_BIRTH: Final = 1
ROW_COMPUTED: Final = 2
ROW_TOKENS: Final = 3
ROW_OUTPUTS: Final = 4
"""Known outputs and placeholders before the step."""
ROW_SAMPLES: Final = 5
ROW_DRAFTS: Final = 6
ROW_MISSED: Final = 7
"""Whether it ran before and was not in the previous plan."""
ROW_COLUMNS: Final = 8

# Columns of the record of a commit, each [rows] in the order of the frame.
RECORD_DELIVERED: Final = 0
"""Tokens delivered; NONE if the row delivers nothing at all (finished before, or no sample)."""
RECORD_VERDICT: Final = 1
RECORD_CACHED: Final = 2
NUM_RECORD_COLUMNS: Final = 3

# Numbers of `control`, the arguments of a launch.
FRAME_ID: Final = 0
PREVIOUS_ID: Final = 1
"""Id of the previous plan; NONE before the first."""
OLDEST_ID: Final = 2
"""Id of the oldest frame in flight; `FRAME_ID` if there is none."""
BUDGET: Final = 3
ADMITS: Final = 4
"""Whether waiting requests may be admitted."""
PLACE: Final = 5
"""The row of `plans` for this frame. An empty plan has an id, too, but uses no row."""
COMMIT_PLACE: Final = 6
"""The row of `plans` of the frame that `answer_*` is for."""
FIRST_ID: Final = 7
"""Id of the first plan of a loop without a host; no kernel of the scheduler reads it."""
CONTROL_COLUMNS: Final = 8

# Numbers of `steady`: whether the next step may take the fast path; see `steady.py`.
STEADY_PLANS: Final = 0
"""Number of last plans with the same rows: all running requests, one sampled token each. It is at
most one more than the frames that can be in flight."""
STEADY_ROWS: Final = 1
"""Rows of each of these plans."""
STEPS_LEFT: Final = 2
"""Number of steps in which no request reaches a length that changes its plan."""
HAS_WAITING: Final = 3
"""Whether a request waits."""
MOST_STOPS: Final = 4
"""Most stop tokens of a running request."""
STEPS_BEHIND: Final = 5
"""Steps whose `computed`, `last_frame` and cached blocks are not written yet."""
NUM_PENDING: Final = 6
"""Entries of `pending`."""
LAST_ID: Final = 7
"""Id of the last plan, if it took the fast path."""
STEADY_COLUMNS: Final = 8

Int32s = NDArray[np.int32]


class State(NamedTuple):
    """All tensors, int32 unless noted. Shapes name fields of `Dims`."""

    # By request, each [slots].
    birth: Any
    """A number for each request ever submitted; 0 if the slot is unused."""
    status: Any
    queue: Any
    key: Any
    """int64; rank among waiting requests, FAR if it does not wait."""
    known: Any
    """Prompt and verified output tokens."""
    computed: Any
    prompt: Any
    num_drafts: Any
    promised: Any
    """Placeholders: outputs that frames in flight will sample; 0 without asynchronous scheduling.
    """
    last_frame: Any
    is_prefill: Any
    cached: Any
    """Hit tokens of its first admission; NONE before."""
    preempted: Any
    """Number of preemptions."""
    grammar_ready: Any
    end_by_max_tokens: Any
    """Prompt length plus `max_tokens`, whatever the model length; at most MAX_INT."""
    min_tokens: Any
    eos: Any
    num_stops: Any
    skips_cache: Any
    repeats_min: Any
    repeats_max: Any
    repeats_count: Any
    step_tokens: Any
    """Tokens scheduled in the step that is being planned; 0 otherwise."""
    step_drafts: Any
    doubt: Any
    """Drafts in flight: computed tokens that may have to be computed again. Counted only under
    asynchronous scheduling with windows."""
    taken: Any
    """Whether its last DRAFT was accepted."""

    # By request and group, each [groups, slots]; a *line* is an index into them, flattened.
    held: Any
    """Length of its block table, including null blocks."""
    published: Any
    """Blocks of the request that were published, or hit."""
    left: Any
    """Leading null blocks of its table: no later token reads them."""
    step_first: Any
    """Length of its table before the step."""

    # Tables by request.
    tokens: Any
    """[slots, tokens]: the known tokens."""
    tables: Any
    """[groups, slots, table]: blocks."""
    paths: Any
    """[slots, table]: nodes of known full blocks."""
    extras: Any
    """[slots, table]: extras of each block's key (adapter, salt, items), by number. Written by the
    host."""
    drafts: Any
    """[slots, drafts]: draft tokens for the next step."""
    offered: Any
    """[slots, drafts]: drafts of a DRAFT command. Written by the host."""
    stops: Any
    """[slots, stops]. Written by the host."""
    ranks: Any
    """[slots] int64: order of priority, arrival and id under PRIORITY (P16). Written by the host.
    """
    inbox: Any
    """[slots, INBOX_COLUMNS]. Written by the host."""

    # Running list: [rows] slots.
    run: Any

    # Blocks, each [num_blocks].
    ref_count: Any
    place: Any
    """The place in the ring, if it is free."""
    node: Any
    """The node that it carries, as `group * nodes + node`, or NONE."""
    next_same: Any
    """Blocks that carry one node in one group are a list, in order of publication."""
    previous_same: Any
    ring: Any
    """[ring]: the free queue between `head` and `tail`, NONE if a block was taken out."""

    # Nodes, each [nodes].
    parent: Any
    node_extras: Any
    node_hash: Any
    next_node: Any
    """Nodes of one bucket are a list."""
    mark: Any
    """Used by the sweep."""
    node_tokens: Any
    """[nodes, size]"""
    free_nodes: Any
    """[nodes]: the first `num_free_nodes` are unused."""
    buckets: Any
    """[buckets]: first node of each."""
    first_block: Any
    """[groups, nodes]: the first block that carries each node."""
    last_block: Any
    """[groups, nodes]"""

    # By KV group, each [groups].
    windows: Any
    """Tokens of the sliding window; 0 under full attention."""
    spans: Any
    """Most slots that a request holds at once in a windowed group; 0 under full attention."""

    # Numbers, each [1].
    num_running: Any
    head: Any
    tail: Any
    """Ever-growing places in the ring; the index is the remainder."""
    num_free: Any
    num_free_nodes: Any
    back: Any
    """int64; the last key given at the end of a queue (FCFS)."""
    front: Any
    """int64; the last key given at the front of a queue."""
    num_passed: Any
    in_flight: Any
    """Frames in flight, if the device runs its own loop."""
    num_rows: Any
    num_continued: Any
    """Rows of the last plan whose requests were running before it."""
    num_preempted: Any
    """Number of requests that the last plan preempted, in `victims`."""
    num_record_rows: Any
    """Rows of the last record."""
    reset_done: Any
    """Whether the last RESET succeeded."""
    queries: Any
    """int64, like all counters (P21)."""
    hits: Any
    preemptions: Any
    drafts_scheduled: Any
    drafts_accepted: Any

    # Between host and device.
    control: Any
    """[CONTROL_COLUMNS]"""
    commands: Any
    """[commands, COMMAND_COLUMNS]: a ring."""
    command_end: Any
    """[1]: number of commands that the host has written."""
    command_at: Any
    steady: Any
    """[STEADY_COLUMNS]"""
    pending: Any
    """[rows + chunk]: requests that have filled a block which is not cached yet, in order."""
    plans: Any
    """[frames, ROW_COLUMNS, rows], by place."""
    plan_blocks: Any
    """[frames, groups, 2, rows], by place: length of each row's table before the step and after it.
    `tables[group, slot, before:after]` is new to the worker."""
    plan_rows: Any
    """[frames]: number of rows."""
    plan_ids: Any
    """[frames]: ids of frames in flight by place, if the device runs its own loop."""
    positions: Any
    """[batch] int64: positions of the last plan's tokens, row after row."""
    slot_mapping: Any
    """[groups, batch] int64: the slot of paged memory of each token."""
    query_start_loc: Any
    """[1 + rows]: index of each row's first token, then the number of tokens."""
    seq_lens: Any
    """[rows]: tokens of each that have KV after the step."""
    victims: Any
    """[rows]: slots preempted by the last plan."""
    answer_counts: Any
    """[frames, rows], by place: tokens of each row, 0 if it does not sample."""
    answer_tokens: Any
    """[frames, rows, 1 + drafts], by place."""
    record: Any
    """[NUM_RECORD_COLUMNS, rows]: of the last commit."""

    scratch: Any
    """[the longest of rows, table and num_blocks]"""


_COUNTERS: Final = ("queries", "hits", "preemptions", "drafts_scheduled", "drafts_accepted")
INT64S: Final = frozenset(
    ("key", "ranks", "back", "front", "positions", "slot_mapping", *_COUNTERS)
)
_OF_SLOTS: Final = State._fields[: State._fields.index("held")]
_OF_LINES: Final = State._fields[State._fields.index("held") : State._fields.index("tokens")]
_OF_BLOCKS: Final = ("ref_count", "place", "node", "next_same", "previous_same")
_OF_NODES: Final = State._fields[State._fields.index("parent") : State._fields.index("node_tokens")]
_NUMBERS: Final = (
    *State._fields[State._fields.index("num_running") : State._fields.index("control")],
    *("command_end", "command_at"),
)
_FILLED: Final = {
    **dict.fromkeys(("cached", "last_frame", "eos", "node", "next_same", "previous_same"), NONE),
    **dict.fromkeys(("ring", "first_block", "last_block", "next_node", "parent", "buckets"), NONE),
    "key": FAR,
}
"""Initial values of tensors, where not 0."""


def shape_of(name: str, d: Dims) -> tuple[int, ...]:
    """Return the shape of a field of the state."""
    if name in _OF_SLOTS:
        return (d.slots,)
    if name in _OF_LINES:
        return (d.groups, d.slots)
    if name in _OF_BLOCKS:
        return (d.num_blocks,)
    if name in _OF_NODES or name == "free_nodes":
        return (d.nodes,)
    if name in _NUMBERS:
        return (1,)
    if name in ("first_block", "last_block"):
        return (d.groups, d.nodes)
    if name in ("windows", "spans"):
        return (d.groups,)
    if name in ("paths", "extras"):
        return (d.slots, d.table)
    if name in ("run", "victims", "seq_lens"):
        return (d.rows,)
    if name in ("drafts", "offered"):
        return (d.slots, d.drafts)
    shapes = {
        "tokens": (d.slots, d.tokens),
        "tables": (d.groups, d.slots, d.table),
        "stops": (d.slots, d.stops),
        "ranks": (d.slots,),
        "inbox": (d.slots, INBOX_COLUMNS),
        "ring": (d.ring,),
        "node_tokens": (d.nodes, d.size),
        "buckets": (d.buckets,),
        "positions": (d.batch,),
        "slot_mapping": (d.groups, d.batch),
        "query_start_loc": (1 + d.rows,),
        "control": (CONTROL_COLUMNS,),
        "steady": (STEADY_COLUMNS,),
        "pending": (d.rows + d.chunk,),
        "commands": (d.commands, COMMAND_COLUMNS),
        "plans": (d.frames, ROW_COLUMNS, d.rows),
        "plan_blocks": (d.frames, d.groups, 2, d.rows),
        "plan_rows": (d.frames,),
        "plan_ids": (d.frames,),
        "answer_counts": (d.frames, d.rows),
        "answer_tokens": (d.frames, d.rows, 1 + d.drafts),
        "record": (NUM_RECORD_COLUMNS, d.rows),
        "scratch": (max(d.rows, d.table, d.num_blocks),),
    }
    return shapes[name]


def make_state(d: Dims) -> State:
    """Return the state before the first event, as numpy arrays: block 0 is the null block (P5)."""
    made = {}
    for name in State._fields:
        element = np.int64 if name in INT64S else np.int32
        made[name] = np.full(shape_of(name, d), _FILLED.get(name, 0), element)
    blocks = np.arange(1, d.num_blocks, dtype=np.int32)
    made["ring"][: len(blocks)], made["place"][1:] = blocks, blocks - 1
    made["tail"][:] = made["num_free"][:] = len(blocks)
    made["free_nodes"][:] = np.arange(d.nodes, dtype=np.int32)
    made["num_free_nodes"][:] = d.nodes
    return State(**made)
