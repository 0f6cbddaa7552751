"""Layout: every tensor that the device's scheduler lives in, and the constants of its kernels.

A request has a *slot*, which the host gives it and takes back after it has read of its end. All
that is known of a request lies in columns and tables by slot; `run` has the slots in running order.
Contents of full blocks are *nodes* of a tree, as in the compiled engine: the same content is the
same node, and a hit is a node that some block carries.

    tokens  | node | node | node | ..|     paths[slot]: the node of each known full block
    blocks     7      3      9     4       tables[slot]; a block carries a node, or none

What nobody needs any more is swept from time to time, between steps, instead of being counted.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstep.impl.device.dims import Dims

NONE: Final = -1
"""No node, no block."""
FAR: Final = 1 << 62
"""The key of who does not wait: after all others."""

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
"""Passed over in the step that is being planned."""

# Verdicts on a row.
GOES_ON: Final = 0
BY_EOS: Final = 1
BY_STOP_TOKEN: Final = 2
BY_LENGTH: Final = 3
BY_REPETITION: Final = 4

# Commands, as [opcode, slot, birth, argument].
SUBMIT: Final = 1
"""The slot's rows of `inbox`, `extras`, `stops`, `ranks` and `tokens` (prompt) were written."""
ABORT: Final = 2
"""Nothing if the slot has another birth by now."""
GRAMMAR: Final = 3
"""Its grammar is ready."""
DRAFT: Final = 4
"""Its row of `offered` has as many drafts as the argument says."""
RESET: Final = 5
"""Forget cached blocks; argument: whether to preempt all that runs first."""
COMMAND_COLUMNS: Final = 4

# Columns of `inbox`.
IN_PROMPT: Final = 0
IN_MAX_TOKENS: Final = 1
IN_MIN_TOKENS: Final = 2
IN_EOS: Final = 3
"""NONE: it has none."""
IN_NUM_STOPS: Final = 4
IN_SKIPS_CACHE: Final = 5
IN_REPEATS_MIN: Final = 6
IN_REPEATS_MAX: Final = 7
IN_REPEATS_COUNT: Final = 8
"""0: it may repeat itself."""
IN_GRAMMAR: Final = 9
INBOX_COLUMNS: Final = 10

# Columns of a frame, each [rows].
ROW_SLOT: Final = 0
ROW_BIRTH: Final = 1
ROW_COMPUTED: Final = 2
ROW_TOKENS: Final = 3
ROW_OUTPUTS: Final = 4
"""Known and promised outputs before the step."""
ROW_SAMPLES: Final = 5
ROW_DRAFTS: Final = 6
ROW_MISSED: Final = 7
"""It ran before, and the plan before lacked it."""
ROW_COLUMNS: Final = 8

# Columns of the record of a commit, each [rows] in the order of the frame.
TOLD_DELIVERED: Final = 0
"""Tokens delivered; NONE where the row delivers nothing at all (ended before, or no sample)."""
TOLD_VERDICT: Final = 1
TOLD_CACHED: Final = 2
TOLD_COLUMNS: Final = 3

# Numbers of `control`, which say what a launch is to do.
FRAME_ID: Final = 0
PREVIOUS_ID: Final = 1
"""The last plan before; NONE before the first."""
OLDEST_ID: Final = 2
"""The oldest frame in flight; `FRAME_ID` if there is none."""
BUDGET: Final = 3
ADMITS: Final = 4
"""Whether waiting requests may be admitted."""
PLACE: Final = 5
"""Where the frame is written: its row of `plans`. Empty plans have an id too, and no place."""
COMMIT_PLACE: Final = 6
"""Where the frame lies that `answer_*` is for."""
CONTROL_COLUMNS: Final = 7

# Numbers of `steady`, which say whether the next step may go the short way; see `steady.py`.
STEADY_PLANS: Final = 0
"""Number of last plans with the same rows: all running requests, one sampled token each. It is at
most one more than the frames that can be in flight."""
STEADY_ROWS: Final = 1
"""Rows of each of these plans."""
STEPS_LEFT: Final = 2
"""Steps in which no request reaches a length that changes its plan."""
HAS_WAITING: Final = 3
"""Whether a request waits."""
MOST_STOPS: Final = 4
"""Most stop tokens of a running request."""
STEPS_BEHIND: Final = 5
"""Steps whose `computed`, `last_frame` and cached blocks are not written yet."""
NUM_PENDING: Final = 6
"""Entries of `pending`."""
LAST_ID: Final = 7
"""The last plan, if it went the short way."""
STEADY_COLUMNS: Final = 8

Int32s = NDArray[np.int32]


class State(NamedTuple):
    """All tensors, int32 where nothing else is said. Shapes name fields of `Dims`."""

    # The request of each slot, each [slots].
    birth: Any
    """A number for each request that ever was; 0 where the slot is unused."""
    status: Any
    queue: Any
    key: Any
    """int64; its place among those that wait, FAR if it does not."""
    known: Any
    """Prompt and verified output tokens."""
    computed: Any
    prompt: Any
    num_drafts: Any
    promised: Any
    """Outputs that frames in flight will sample; always 0 without asynchronous scheduling."""
    last_frame: Any
    is_prefill: Any
    cached: Any
    """Hit tokens of its first admission; NONE before."""
    preempted: Any
    """Times that it was."""
    grammar_ready: Any
    end_by_max_tokens: Any
    """Prompt and `max_tokens`, whatever the model length."""
    min_tokens: Any
    eos: Any
    num_stops: Any
    skips_cache: Any
    repeats_min: Any
    repeats_max: Any
    repeats_count: Any
    step_tokens: Any
    """Tokens that it has in the step that is being planned; 0 otherwise."""
    step_drafts: Any
    doubt: Any
    """Drafts in flight: computed tokens that may have to be computed again. Counted under
    asynchronous scheduling, where there are windows."""
    taken: Any
    """Whether its last DRAFT was taken."""

    # The request of each slot in each group, each [groups, slots]; a *line* is a place in them.
    held: Any
    """The length of its block table, null blocks included."""
    published: Any
    """Blocks of the request that were published, or hit."""
    left: Any
    """Null blocks at the beginning of its table: no token that is still to come reads them."""
    step_first: Any
    """The length of its table before the step."""

    # Tables by slot.
    tokens: Any
    """[slots, tokens]; the known ones."""
    tables: Any
    """[groups, slots, table]; blocks."""
    paths: Any
    """[slots, table]; nodes of known full blocks."""
    extras: Any
    """[slots, table]; what beside tokens names each block, by number. The host's."""
    drafts: Any
    """[slots, drafts]; token ids for the next step."""
    offered: Any
    """[slots, drafts]; of a DRAFT. The host's."""
    stops: Any
    """[slots, stops]. The host's."""
    ranks: Any
    """[slots] int64; compare like priority, arrival and id under PRIORITY (P16). The host's."""
    inbox: Any
    """[slots, INBOX_COLUMNS]. The host's."""

    # Running order: [rows] slots.
    run: Any

    # Blocks, each [num_blocks].
    ref_count: Any
    place: Any
    """Where it stands in the ring, if it is free."""
    node: Any
    """What it carries: `group * nodes + node`, or NONE."""
    next_same: Any
    """Blocks that carry one node in one group are a list, in order of publication."""
    previous_same: Any
    ring: Any
    """[ring]; the free queue between `head` and `tail`, NONE where a block was taken out."""

    # Nodes, each [nodes].
    parent: Any
    node_extras: Any
    node_hash: Any
    next_node: Any
    """Nodes of one bucket are a list."""
    mark: Any
    """Of the sweep."""
    node_tokens: Any
    """[nodes, size]"""
    free_nodes: Any
    """[nodes]; the first `num_free_nodes` are unused."""
    buckets: Any
    """[buckets]; first node of each."""
    first_block: Any
    """[groups, nodes]; the first block that carries each node."""
    last_block: Any
    """[groups, nodes]"""

    # The KV-cache groups, each [groups].
    windows: Any
    """Tokens of the sliding window; 0 under full attention."""
    spans: Any
    """Slots that a request holds at once, at most, behind the window; 0 under full attention."""

    # Numbers, each [1].
    num_running: Any
    head: Any
    tail: Any
    """Places of the ring, counted on and on; their remainder is an index."""
    num_free: Any
    num_free_nodes: Any
    back: Any
    """int64; the last place given at the end of a queue (FCFS)."""
    front: Any
    """int64; the last place given before all others."""
    num_passed: Any
    in_flight: Any
    """Frames, where the device runs its own loop."""
    num_rows: Any
    num_continued: Any
    """Of the rows of the last plan, those of its running phase."""
    num_preempted: Any
    """Requests that it preempted, in `victims`."""
    num_told: Any
    """Rows of the last record."""
    reset_done: Any
    """Whether the last RESET was possible."""
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
    """[commands, COMMAND_COLUMNS]; a ring."""
    command_end: Any
    """[1]; commands that the host ever wrote."""
    command_at: Any
    steady: Any
    """[STEADY_COLUMNS]"""
    pending: Any
    """[rows + chunk]; requests that have filled a block which is not cached yet, in order."""
    plans: Any
    """[frames, ROW_COLUMNS, rows]; by place."""
    plan_blocks: Any
    """[frames, groups, 2, rows]; by place: the length of each row's table before the step and
    after it. `tables[group, slot, before:after]` is new to the worker."""
    plan_rows: Any
    """[frames]; rows of each."""
    plan_ids: Any
    """[frames]; frames in flight by place, where the device runs its own loop."""
    positions: Any
    """[batch] int64; of the last plan, row after row,"""
    slot_mapping: Any
    """[groups, batch] int64; the slot of paged memory of each token,"""
    query_start_loc: Any
    """[1 + rows]; the first token of each row, and their number,"""
    seq_lens: Any
    """[rows]; tokens of each that have KV after the step."""
    victims: Any
    """[rows]; slots preempted by the last plan."""
    answer_counts: Any
    """[frames, rows]; by place: tokens of each row, 0 where it does not sample."""
    answer_tokens: Any
    """[frames, rows, 1 + drafts]; by place."""
    record: Any
    """[TOLD_COLUMNS, rows]; of the last commit."""

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
"""What tensors hold at first, where it is not 0."""


def shape_of(name: str, d: Dims) -> tuple[int, ...]:
    """The shape of a field of the state."""
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
        "record": (TOLD_COLUMNS, d.rows),
        "scratch": (max(d.rows, d.table, d.num_blocks),),
    }
    return shapes[name]


def make_state(d: Dims) -> State:
    """The state before the first event, as numpy arrays: block 0 is the null block (P5)."""
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
