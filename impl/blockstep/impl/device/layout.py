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

from blockstep.spec.vocabulary import Config, Policy

NONE: Final = -1
"""No node, no block."""
FAR: Final = 1 << 62
"""The key of who does not wait: after all others."""
LANES: Final = 16
"""Slots, blocks or tokens that are looked at together where nobody says: enough for a CPU."""

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
ROW_FIRST_BLOCK: Final = 7
"""Blocks that the worker knows of already: `tables[slot, first:last]` are new."""
ROW_LAST_BLOCK: Final = 8
ROW_MISSED: Final = 9
"""It ran before, and the plan before lacked it."""
ROW_COLUMNS: Final = 10

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

Int32s = NDArray[np.int32]


class Dims(NamedTuple):
    """Constants of the kernels: the config, and how long the tensors are."""

    size: int
    """Tokens of a block."""
    max_model_len: int
    max_num_seqs: int
    max_tokens_per_row: int
    num_lookahead: int
    num_placeholders: int
    """Drafts of a row that samples, under asynchronous scheduling."""
    is_async: int
    is_priority: int
    has_cache: int
    has_chunks: int
    reserves_whole: int
    drops_last_hit: int
    num_blocks: int
    rows: int
    """Requests that can run at once, rounded up to a power of two: one lane for each."""
    lanes: int
    """A power of two: how many slots, blocks or tokens are looked at together."""
    chunk: int
    """The same where each is compared with each."""
    width: int
    """A block's tokens, rounded up to a power of two."""
    slots: int
    """A multiple of `lanes`."""
    table: int
    """Blocks of the longest request, rounded up to a multiple of `lanes`."""
    ring: int
    """A power of two, twice the blocks at least."""
    nodes: int
    """A multiple of `lanes`."""
    buckets: int
    """A power of two."""
    tokens: int
    """Tokens of the longest request."""
    drafts: int
    """Most drafts of a request; 1 at least."""
    stops: int
    """Most stop tokens of a request; 1 at least."""
    frames: int
    """Plans that can be in flight."""
    commands: int
    """A power of two."""
    batch: int
    """Most tokens of a step."""


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
    held: Any
    """The length of its block table."""
    published: Any
    """Blocks of it that were made findable, or hit."""
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
    step_first: Any
    """Blocks that it held before the step."""
    taken: Any
    """Whether its last DRAFT was taken."""

    # Tables by slot.
    tokens: Any
    """[slots, tokens]; the known ones."""
    tables: Any
    """[slots, table]; blocks."""
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
    """The node that it carries, or NONE."""
    next_same: Any
    """Blocks that carry one node are a list, in order of publication."""
    previous_same: Any
    ring: Any
    """[ring]; the free queue between `head` and `tail`, NONE where a block was taken out."""

    # Nodes, each [nodes].
    parent: Any
    node_extras: Any
    node_hash: Any
    next_node: Any
    """Nodes of one bucket are a list."""
    first_block: Any
    last_block: Any
    mark: Any
    """Of the sweep."""
    node_tokens: Any
    """[nodes, size]"""
    free_nodes: Any
    """[nodes]; the first `num_free_nodes` are unused."""
    buckets: Any
    """[buckets]; first node of each."""

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
    plans: Any
    """[frames, ROW_COLUMNS, rows]; by place."""
    plan_rows: Any
    """[frames]; rows of each."""
    plan_ids: Any
    """[frames]; frames in flight by place, where the device runs its own loop."""
    positions: Any
    """[batch] int64; of the last plan, row after row,"""
    slot_mapping: Any
    """[batch] int64; the slot of paged memory of each token,"""
    query_start_loc: Any
    """[1 + rows]; the first token of each row, and their number,"""
    seq_lens: Any
    """[rows]; tokens of each that have KV after the step."""
    victims: Any
    """[rows]; slots preempted by the last plan."""
    answer_counts: Any
    """[rows]; tokens of each row, 0 where it does not sample."""
    answer_tokens: Any
    """[rows, 1 + drafts]"""
    record: Any
    """[TOLD_COLUMNS, rows]; of the last commit."""

    scratch: Any
    """[the longest of rows, table and num_blocks]"""


_COUNTERS: Final = ("queries", "hits", "preemptions", "drafts_scheduled", "drafts_accepted")
INT64S: Final = frozenset(
    ("key", "ranks", "back", "front", "positions", "slot_mapping", *_COUNTERS)
)
_OF_SLOTS: Final = State._fields[: State._fields.index("tokens")]
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


def make_dims(
    config: Config, slots: int = 16, stops: int = 4, lanes: int = LANES, nodes: int = 0
) -> Dims:
    """The constants for a config, with room for so many unfinished requests and nodes."""
    size = config.block_size
    rows = _power_of_two(min(config.max_num_seqs, config.num_usable_blocks))
    longest = min(-(-config.max_model_len // size), config.num_blocks) + 1
    slots, table = _multiple(max(slots, rows), lanes), _multiple(longest, lanes)
    nodes = _multiple(max(nodes, 4 * config.num_blocks), lanes)
    return Dims(
        size,
        config.max_model_len,
        config.max_num_seqs,
        config.long_prefill_token_threshold or config.max_model_len,
        config.num_lookahead_tokens,
        config.num_speculative_tokens if config.async_scheduling else 0,
        int(config.async_scheduling),
        int(config.policy is Policy.PRIORITY),
        int(config.enable_prefix_caching),
        int(config.enable_chunked_prefill),
        int(config.scheduler_reserve_full_isl),
        int(config.drops_last_hit_block),
        config.num_blocks,
        rows,
        lanes,
        min(lanes, 64),
        _power_of_two(size),
        slots,
        table,
        _power_of_two(2 * config.num_blocks),
        nodes,
        _power_of_two(nodes),
        config.max_model_len + 1,
        max(config.num_speculative_tokens, 1),
        max(stops, 1),
        config.max_frames_in_flight,
        _power_of_two(2 * slots),
        config.max_num_batched_tokens,
    )


def shape_of(name: str, d: Dims) -> tuple[int, ...]:
    """The shape of a field of the state."""
    if name in _OF_SLOTS:
        return (d.slots,)
    if name in _OF_BLOCKS:
        return (d.num_blocks,)
    if name in _OF_NODES or name == "free_nodes":
        return (d.nodes,)
    if name in _NUMBERS:
        return (1,)
    if name in ("tables", "paths", "extras"):
        return (d.slots, d.table)
    if name in ("run", "victims", "answer_counts", "seq_lens"):
        return (d.rows,)
    if name in ("drafts", "offered"):
        return (d.slots, d.drafts)
    shapes = {
        "tokens": (d.slots, d.tokens),
        "stops": (d.slots, d.stops),
        "ranks": (d.slots,),
        "inbox": (d.slots, INBOX_COLUMNS),
        "ring": (d.ring,),
        "node_tokens": (d.nodes, d.size),
        "buckets": (d.buckets,),
        "positions": (d.batch,),
        "slot_mapping": (d.batch,),
        "query_start_loc": (1 + d.rows,),
        "control": (CONTROL_COLUMNS,),
        "commands": (d.commands, COMMAND_COLUMNS),
        "plans": (d.frames, ROW_COLUMNS, d.rows),
        "plan_rows": (d.frames,),
        "plan_ids": (d.frames,),
        "answer_tokens": (d.rows, 1 + d.drafts),
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


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of
