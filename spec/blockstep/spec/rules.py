"""Rules: the decisions that some release takes otherwise, as one value.

A state carries its rules. Each field is a function or a plain value that the rooms ask at the one
place where the decision is made. The specification's own is the default of the field where there is
nothing to reckon, and else stands in `strict.STRICT_RULES`; what a release does instead wraps one
of them (architecture D5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from blockstep.spec.beside.encoder import Encoder, Holder
from blockstep.spec.beside.grammar import Follow, Stand
from blockstep.spec.pool import Pool
from blockstep.spec.requests import Frame, Hit, Holding, RequestState
from blockstep.spec.vocabulary import (
    BlockId,
    BlockStored,
    BlockTables,
    Config,
    FinishReason,
    FrameId,
    KVGroup,
    MultiModalItem,
    OutputRow,
    Request,
    RequestId,
    TokenId,
    TokenIds,
)

T = TypeVar("T")
Stop: TypeAlias = tuple[FinishReason | None, int | None]
"""Why a request ends, and the stop token that it ended by; (None, None) while it goes on."""


def as_is(what: T, *_: object) -> T:
    """What is asked about, as it is. Source: architecture D5."""
    return what


def never(*_: object) -> bool:
    """No, whatever is asked about. Source: architecture D5."""
    return False


def none(*_: object) -> int:
    """Not one, whatever is asked about. Source: architecture D5."""
    return 0


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Rules:
    """How each such decision is made.

    Two are equal if they follow the same quirks; hash, pickle and text are by them alone, too.
    """

    quirks: frozenset[str]
    """Names of the deviations in it (`releases.Quirk`); none in the specification proper."""
    remake: tuple[Callable[..., Rules], tuple[Any, ...]]
    """A function and the arguments from which it makes these very rules, to be pickled by."""

    # identity
    get_item_keys: Callable[[Request, int, int], tuple[tuple[str, int], ...]]
    """The items that name the block at token positions [start, end)."""
    get_request_behind_outputs: Callable[[Request], Request] = as_is
    """The request as blocks see it that outputs complete: with all of its items (P6)."""

    # memory
    free_blocks: Callable[[Pool, Sequence[BlockId]], Pool]
    """Give up a table: the order in which its blocks are queued."""
    revoke_slots: Callable[..., Pool]
    """Free what a preempted request holds: (pool, request, the block size of each group, rules, the
    frame in flight whose answer its blocks wait for, or None)."""
    reserves_full_isl: bool = True
    """Whether `scheduler_reserve_full_isl` is known."""
    get_num_lookahead_at_admission: Callable[[Config, RequestState], int] = none
    """Slots for a proposer's lookahead that an admission asks for: none, nothing is drafted yet."""
    publishes_at_commit: Callable[[bool, Config], bool] = as_is
    """Whether a commit publishes the blocks that it fills: where the next plan, which would, may
    come long before (P4); (whether scheduling is asynchronous, ..)."""

    # groups
    get_joint_hit: Callable[[Config, Pool, RequestState], Hit]
    """What a waiting request shares, where there are KV groups."""
    count_reserved_blocks: Callable[
        [Config, Pool, KVGroup, int, tuple[BlockId, ...], Holding, int], int
    ]
    """Free blocks of one group that the gate wants: (.., slots, its hit, what it holds)."""
    count_skipped_blocks: Callable[[int, KVGroup, Holding], int] = as_is
    """Leading blocks of one group that are given back: all that are skipped (P8); (those, .., what
    is held)."""
    get_num_in_doubt: Callable[[int, int], int] = as_is
    """Computed tokens of a row that may have to be computed again, so that a window is read before
    them: its drafts (P14); (drafts, scheduled tokens)."""
    count_in_doubt: Callable[[Sequence[Frame], RequestId], int]
    """Those of all rows of a request in flight; of rows that deliver nothing there are none."""
    compute_num_certain: Callable[[KVGroup, int, int], int]
    """Computed tokens that a group may count on: (.., computed, tokens in doubt)."""

    get_aligned_share: Callable[[Config, RequestState, int, int], int]
    """Tokens of a row where states are kept: (.., computed, tokens that it could have)."""
    hide_states: Callable[[Pool, Sequence[BlockId]], Pool]
    """The pool to look for a hit in, given the states that this very step writes."""
    waits_for_states: Callable[[Pool, Pool, Sequence[BlockId], Hit], bool] = never
    """Whether who has this hit waits for the next step: (pool before this one, pool now, states
    that this one writes, hit). Never, the hit is there (P15)."""
    is_zeroed: Callable[[KVGroup], bool]
    """Whether its new blocks are zeroed beside recurrent groups."""
    zeroes_withdrawn: bool = False
    """Whether blocks are zeroed of rows that the step took back."""

    # order
    get_victim_rank: Callable[[RequestState], tuple[int | str, ...]]
    """PRIORITY preempts the first of greatest rank."""
    compute_next_index: Callable[[int, int, bool], int] = as_is
    """Whose turn it is after a preemption: whose it was, whether or not the victim had a row (seed
    001 "Preemption in the Running Loop"; P15); (its index now, before, whether it had one)."""
    goes_on_after_self_victim: Callable[[Config], bool] = never
    """Whether the running phase goes on behind a request that preempted itself: never. It lacked
    blocks, and so would whoever comes after it (seed 001 "Preemption in the Running Loop"; P15)."""
    get_threshold: Callable[[int, int], int] = as_is
    """The cap of a long prefill, 0 for none: that of the config, however many requests there are
    (seed 001 "For Running Requests"); (that, unfinished requests)."""
    waits_apart: Callable[[bool, RequestState], bool] = as_is
    """Whether who joins a queue waits in `skipped_waiting`: if, for now, it is not its turn that it
    waits for (vLLM 0.19.1 `_enqueue_waiting_request`; P16); (that, request)."""
    get_open_queue: Callable[..., list[RequestId]] = as_is
    """Whose head may be admitted next: that of the queue whose turn it is, and nobody's while all
    is paused for newcomers (P16); (that, whether it is, `waiting`, `skipped_waiting`)."""
    count_seats: Callable[[int, Mapping[RequestId, RequestState]], int] = as_is
    """Seats that are taken: of those that run (P9); (their number, requests)."""
    get_order_of_return: Callable[[list[RequestId]], list[RequestId]] = as_is
    """In which order those that a step passed over stand in their queue again: as before (P7)."""
    passes_over_too_long: bool = False
    """Whether a prompt beyond the rest of the budget is passed over, without chunked prefill."""
    counts_adapters_of_rows_only: bool = False
    """Whether who runs without a row in the step leaves its adapter's seat to others."""
    get_num_cached_tokens: Callable[[int, RequestState, int], int] = as_is
    """What is told as cached once a request is admitted: the hit of the first admission (seed 001;
    P21); (that, request, its hit now)."""

    # encoder
    get_item_holder: Callable[[Holder, Request], Holder] = as_is
    """As whom a request holds an item of its: each place of it counts (P22); (that place, ..)."""
    is_item_needed: Callable[[MultiModalItem, int, int, int], bool]
    """Whether a chunk reads of an item: (.., computed, tokens, tokens read ahead)."""
    compute_end_between_items: Callable[[Sequence[MultiModalItem], int, int], int]
    """Where a chunk ends that must not end inside of an item: (.., computed, end)."""
    stops_before_item: Callable[[MultiModalItem, bool, int, int], bool] = never
    """Whether a chunk ends before an item that it reads, whether or not there is room for it: no,
    it ends between items; (.., whether it is in the cache, computed, tokens)."""
    ends_before_the_head: bool = True
    """Whether a chunk that ends before an item without room has no draft head read of it."""
    passes_over_without_items: bool = False
    """Whether who waits and gets no token for want of an item is passed over."""
    free_read_items: Callable[[Encoder, RequestState, int | None], Encoder] = as_is
    """Let items go with a row of an answer: a plan has done so, and who ends lets go behind all
    rows; (.., request, rejected drafts, or None where it ends)."""
    aligns_before_items: bool = False
    """Whether a chunk is cut where states are kept before, not after, it is cut where items are."""
    asks_room_first: bool = False
    """Whether room is made for an item before it is seen whether the chunk reads of it."""
    external_costs_compute: bool = False
    """Whether what is loaded needs the compute of what is encoded."""
    get_encoder_once_asked: Callable[[Encoder, Encoder], Encoder] = as_is
    """The encoder when a row was asked for that may still not be: as it was (P7, P22); (as it was,
    as it would be with the row)."""
    keeps_items_without_row: bool = False
    """Whether who gets no row for want of an item holds others."""
    forgets_restored_compute: bool = False
    """Whether compute that a victim gives back is lost when the row that preempted it has items."""
    withdraw_items: Callable[[Encoder, Request, Sequence[RequestId]], Encoder]
    """Take back what a request planned in this step: (.., whose rows are left, in order)."""
    free_items: Callable[[Encoder, Request, int | None], Encoder]
    """Let a request's items go that end within its computed tokens; None: all of them."""
    drops_remade_items: bool = False
    """Whether the worker is to drop what was evicted though the step makes it anew."""

    # drafts
    get_num_padding: Callable[[Config, int, int, int, Iterable[RequestState]], int | None] = none
    """Drafts that a request is admitted with: 0, for nobody has proposed any (P24); (config, known
    tokens, hit tokens, budget, planned running requests). `None` has it wait for their sake."""
    keeps_drafts: Callable[[bool, bool], bool] = never
    """Whether a running request's drafts outlive a plan: (is in it, samples in it). Only until it,
    so never (P24)."""
    get_preempted: Callable[[RequestState], RequestState]
    """The request after it lost its blocks."""

    # frames in flight
    get_fence: Callable[[Config, Sequence[Frame], RequestId], FrameId | None]
    """The frame in flight whose answer the blocks of a request wait for, before they are free: the
    newest that names it, beside a store (P17). None: they are free at once."""
    is_held_by_frames: Callable[[Sequence[Frame], RequestState], bool]
    """Whether a preempted request waits for frames in flight before it is admitted again."""
    get_frames_after_reset: Callable[
        [tuple[Frame, ...], Sequence[RequestId]], tuple[Frame, ...]
    ] = as_is
    """Frames in flight after a reset preempted these requests: what they sampled counts (P13)."""
    get_reset_request: Callable[[RequestState], RequestState] = as_is
    """A preempted request as a forced reset leaves it: like all others that were preempted. Its
    tokens in flight still come (upstream #42043, #48245; P13)."""
    names_victims_of_resets: bool = False
    """Whether the next plan names those that a forced reset preempted."""

    # sessions
    get_num_kept: Callable[[RequestState], int]
    """Leading tokens that a session keeps of a chunk that has stopped."""
    get_stand_of_chunk: Callable[[Stand, RequestState], Stand] = as_is
    """Where the outputs of a new chunk stand in its grammar: at the beginning (P23); (that, ..)."""
    get_num_kept_keys: Callable[[RequestState, int], int]
    """Leading block keys that it keeps: (.., full blocks of kept tokens)."""
    get_chunk_request: Callable[[Request, Request], Request] = as_is
    """What a session asks for with its next chunk: (that, what it asked for before)."""
    get_stopped: Callable[..., tuple[Pool, RequestState]]
    """A session at its stop: what it has computed, and holds; (config, pool, request, rules, the
    frame in flight whose answer its blocks wait for, or None)."""
    hint_is_of_all_holders: bool = False
    """Whether blocks that all have in common are in the tables of who does not run, too."""
    skips_before_the_gate: bool = True
    """Whether one that goes on is asked for with what fell out of its windows given back; else it
    gives that back behind the gate, refused or not."""
    drops_rows_behind_stops: bool = True
    """Whether what frames in flight sample for a session that has stopped is dropped."""
    takes_back_from_sessions: bool = True
    """Whether sessions that do not run give their blocks up where they are needed."""

    # transfers
    asks_who_skips_reading: bool = False
    """Whether a store is asked also for who may not take what others have computed."""
    counts_who_skips_reading: bool = False
    """Whether it counts as a question to a store that somebody was admitted who asks none (P21)."""
    compute_num_external: Callable[[int, int, int, bool], int]
    """Tokens to load: (tokens that are offered, known, of the local hit, whether they come later
    than the step)."""
    get_parked: Callable[[RequestState], RequestState] = as_is
    """Who is parked for a load: nothing of it is told as cached before it is admitted (P21)."""
    get_returned: Callable[[RequestState], RequestState] = as_is
    """Who comes back once its load has come: with all of that computed."""
    publishes_loads_at_once: bool = False
    """Whether blocks are findable that a store is still to load for the very step (P19)."""
    returns_for_good: bool = False
    """Whether who comes back and is then refused has come back all the same (P7)."""
    looks_behind_the_head: bool = True
    """Whether those whose load has come are admitted past a head that does not fit (P10)."""
    takes_back_from_parked: bool = True
    """Whether those whose load has come give their blocks up where they are needed (P10)."""
    take_hit: Callable[[Config, Pool, RequestState, Hit], tuple[Pool, BlockTables]]
    """Hold what a hit has, and take blocks with it: (.., hit). Per group: those (P2)."""
    count_settled: Callable[[int, Sequence[BlockId]], int] = as_is
    """Leading blocks of one group behind a load whose key is settled: those of the local hit (P19);
    (that, what the group has before the blocks that it takes)."""
    get_failures: Callable[..., tuple[Any, tuple[RequestId, ...]]]
    """What blocks do that could not be loaded: (state, those, the frame that is answered or None).
    The state, whose oldest frame has dropped the rows that deliver nothing, and who fails by
    policy (P19)."""
    remembers_num_scheduled: bool = False
    """Whether a frame in flight knows how many tokens each row of it has."""
    get_failed_row: Callable[[OutputRow, RequestState], OutputRow] = as_is
    """What is delivered of a request that fails by policy: 0 cached tokens, if it never ran."""
    holds_are_one: bool = False
    """Whether any end of a transfer ends all that hold the blocks of an ended request (P17)."""
    let_go_at_end: Callable[..., tuple[Pool, RequestState]] = as_is
    """What is freed of who ends beside a store before the store sees its tables: nothing, it holds
    all of them (P17); ((pool, request), the state before)."""
    waits_for_empty_transfers: bool = True
    """Whether a reset waits for transfers of which no block is held, as of any (P25)."""
    resets_apart: bool = False
    """Whether a store is reset though the pool was not, and the pool though there is no store."""

    # events
    get_stored: Callable[
        [Config, RequestState, int, Sequence[BlockId], int], tuple[BlockStored, ...]
    ]
    """How it is told that blocks of a group become findable: (.., group, blocks, first index)."""
    tells_resets_at_once: bool = True
    """Whether a reset tells what it cleared, and does not leave it to the next commit."""

    # grammars
    get_next_stand: Follow
    """Where a token leads in a grammar, within one step."""
    get_settled: Callable[[RequestState, Stand, Config, TokenIds], RequestState] = as_is
    """A request with a grammar behind a step: as its tokens led it (P23); (the request, where it
    stood before, .., tokens). Once more, without a token, where its drafts are told with a mask."""
    masks_behind_placeholders: bool = True
    """Whether a mask says anything of positions behind a draft that is a placeholder."""
    has_mask_row: Callable[[bool, Frame, RequestState], bool] = as_is
    """Whether a mask that is made now has rows of it: if it was planned so (P23); (that, its frame,
    its request)."""

    # endings
    get_told_stop: Callable[[TokenId | None, RequestState, FinishReason | None], TokenId | None] = (
        as_is
    )
    """The stop token that a client is told: the one that ended its request now (P13); (.., why)."""
    compute_stop: Callable[[RequestState, TokenIds, int, int], Stop]
    """Why a request ends: (request, outputs, known tokens, max_model_len)."""

    # the loop
    has_work: Callable[..., bool]
    """Whether the loop must go on planning, of a state (P10)."""

    def __eq__(self, other: object) -> bool:
        return self.quirks == other.quirks if isinstance(other, Rules) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.quirks)

    def __repr__(self) -> str:
        return f"Rules({', '.join(sorted(self.quirks))})"

    def __reduce__(self) -> tuple[Callable[..., Rules], tuple[Any, ...]]:
        return self.remake
