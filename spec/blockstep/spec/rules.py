"""Rules: the decisions that some release takes differently, as one value.

A state carries its rules. Each field is a function or a plain value that is used at the one place
where the decision is made. The specification's own decision is the default of the field if it is
trivial, and otherwise in `strict.STRICT_RULES`; a release's deviation wraps one of them
(architecture D5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from blockstep.spec.beside.encoder import Encoder, Holder
from blockstep.spec.pool import Pool
from blockstep.spec.requests import Frame, Hit, Holding, RequestState
from blockstep.spec.vocabulary import (
    BlockId,
    BlockStored,
    BlockTables,
    Config,
    KVEvent,
    KVGroup,
    MultiModalItem,
    OutputRow,
    Request,
    RequestId,
)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def as_is(what: T, *_: object) -> T:
    """Return the first argument: the strict decision. Source: architecture D5."""
    return what


def never(*_: object) -> bool:
    """Return False. Source: architecture D5."""
    return False


def none(*_: object) -> int:
    """Return 0. Source: architecture D5."""
    return 0


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Rules:
    """The decisions, one per field.

    Docstrings name arguments in parentheses; `..` leaves out those that their types explain, and
    "that" is the strict decision. Two values are equal if they follow the same quirks; hash, pickle
    and repr depend only on these, too.
    """

    quirks: frozenset[str]
    """Names of the quirks in it (`releases.Quirk`); empty for the specification proper."""
    remake: tuple[Callable[..., Rules], tuple[Any, ...]]
    """A function and its arguments that make these very rules again, for pickling."""
    replaced: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    """For each function of the specification that is replaced: what is called instead."""

    # identity
    get_item_keys: Callable[[Request, int, int], tuple[tuple[str, int], ...]]
    """Items that are part of the key of the block at token positions [start, end)."""
    get_request_behind_outputs: Callable[[Request], Request] = as_is
    """The request used for keys of blocks that outputs complete: the same, with all of its items
    (P6)."""

    # memory
    free_blocks: Callable[[Pool, Sequence[BlockId]], Pool]
    """Release a table: the order in which its blocks are queued."""
    revoke_slots: Callable[..., Pool]
    """Free what a preempted request holds: (pool, request, the block size of each group, rules, the
    frame in flight whose commit its blocks wait for, or None)."""
    reserves_full_isl: bool = True
    """Whether `scheduler_reserve_full_isl` is supported."""
    get_num_lookahead_at_admission: Callable[[Config, RequestState], int] = none
    """Lookahead slots for the proposer at an admission: none, nothing is drafted yet."""
    publishes_at_commit: Callable[[bool, Config], bool] = as_is
    """Whether a commit publishes the blocks that it fills: if the next plan, which otherwise would,
    may be made long before (P4); (whether scheduling is asynchronous, ..)."""

    # groups
    get_joint_hit: Callable[[Config, Pool, RequestState], Hit]
    """The prefix hit of a waiting request, with KV groups."""
    count_reserved_blocks: Callable[
        [Config, Pool, KVGroup, int, tuple[BlockId, ...], Holding, int], int
    ]
    """Free blocks of one group that the admission gate requires: (.., slots, its hit, what it
    holds)."""
    count_skipped_blocks: Callable[[int, KVGroup, Holding], int] = as_is
    """Leading blocks of one group that are freed: all skipped ones (P8); (those, .., what is held).
    """
    get_num_in_doubt: Callable[[int, int], int] = as_is
    """Computed tokens of a row that may have to be computed again, so that the window before them
    is kept: its drafts (P14); (drafts, scheduled tokens)."""
    count_in_doubt: Callable[[Sequence[Frame], RequestId], int]
    """The sum of these over all rows in flight of a request that will deliver."""
    compute_num_certain: Callable[[KVGroup, int, int], int]
    """Computed tokens that are certain for a group: (.., computed, drafts in flight)."""

    get_aligned_share: Callable[[Config, RequestState, int, int], int]
    """Tokens of a row with recurrent groups: (.., computed, tokens that it could have)."""
    hide_states: Callable[[Pool, Sequence[BlockId]], Pool]
    """The pool in which a hit is looked for, given the states that this very step writes."""
    waits_for_states: Callable[[Pool, Pool, Sequence[BlockId], Hit], bool] = never
    """Whether a request with this hit waits for the next step: (pool before this one, pool now,
    states that this one writes, hit). Never, the hit is available (P15)."""
    is_zeroed: Callable[[KVGroup], bool]
    """Whether the group's new blocks are zeroed in a pool with recurrent groups."""
    zeroes_withdrawn: bool = False
    """Whether blocks of withdrawn rows are zeroed."""
    zeroes_loads: bool = False
    """Whether the plan of an asynchronous load zeroes its blocks."""

    # encoder
    get_item_holder: Callable[[Holder, Request], Holder] = as_is
    """The holder of a request's item: each occurrence counts (P22); (that occurrence, ..)."""
    is_item_needed: Callable[[MultiModalItem, int, int, int], bool]
    """Whether a chunk reads an item: (.., computed, tokens, tokens read ahead)."""
    compute_end_between_items: Callable[[Sequence[MultiModalItem], int, int], int]
    """The end of a chunk that must not end inside an item: (.., computed, end)."""
    stops_before_item: Callable[[MultiModalItem, bool, int, int], bool] = never
    """Whether a chunk ends before an item that it reads, with or without room for it: no, it ends
    between items; (.., whether it is in the cache, computed, tokens)."""
    ends_before_the_head: bool = True
    """Whether a chunk that ends before an item without room also keeps the draft head from reading
    it."""
    passes_over_without_items: bool = False
    """Whether a waiting request is skipped if an item without room leaves it no tokens."""
    free_read_items: Callable[[Encoder, RequestState, int | None], Encoder] = as_is
    """Release items with a row of a commit: no, a plan has done so, and a finished request releases
    them after all rows; (.., request, rejected drafts, or None if it finishes)."""
    aligns_before_items: bool = False
    """Whether a chunk is cut at boundaries of states before, not after, it is cut at items."""
    asks_room_first: bool = False
    """Whether room is made for an item before it is known whether the chunk reads it."""
    external_costs_compute: bool = False
    """Whether a loaded item needs the compute budget of an encoded one."""
    get_encoder_once_asked: Callable[[Encoder, Encoder], Encoder] = as_is
    """The encoder after items were checked for a row that may still fail: unchanged (P7, P22);
    (that, as it would be with the row)."""
    keeps_items_without_row: bool = False
    """Whether a request without a row, because an item has no room, holds other items."""
    forgets_restored_compute: bool = False
    """Whether compute that a victim returns is lost when the row that preempted it has items."""
    withdraw_items: Callable[[Encoder, Request, Sequence[RequestId]], Encoder]
    """Withdraw what a request planned in this step: (.., requests with remaining rows, in order).
    """
    free_items: Callable[[Encoder, Request, int | None], Encoder]
    """Release a request's items that end within its computed tokens; None: all of them."""
    drops_remade_items: bool = False
    """Whether the worker drops evicted items that the step encodes again."""

    # drafts
    get_num_padding: Callable[[Config, int, int, int, Iterable[RequestState]], int | None] = none
    """Drafts that a request is admitted with: 0, none are proposed yet (P24); (config, known
    tokens, hit tokens, budget, planned running requests). None: the request waits because of them.
    """
    keeps_drafts: Callable[[bool, bool], bool] = never
    """Whether a running request's drafts outlive a plan: (is in it, samples in it). Never (P24)."""
    get_preempted: Callable[[RequestState], RequestState]
    """The request after it lost its blocks."""

    # sessions
    hint_is_of_all_holders: bool = False
    """Whether the common prefix counts tables of requests that do not run, too."""
    skips_before_the_gate: bool = True
    """Whether an admission of a session frees its skipped blocks before the gate; otherwise after
    it, even if the admission fails."""
    takes_back_from_sessions: bool = True
    """Whether blocks are reclaimed from sessions that do not run."""

    # transfers
    asks_who_skips_reading: bool = False
    """Whether a store is also asked about requests that skip reading the cache."""
    counts_who_skips_reading: bool = False
    """Whether the admission of a request that does not ask counts as a query of the store (P21)."""
    compute_num_external: Callable[[int, int, int, bool], int]
    """Tokens to load: (tokens that are offered, known, of the local hit, whether the load is
    asynchronous)."""
    get_parked: Callable[[RequestState], RequestState] = as_is
    """A request with an asynchronous load: nothing is reported as cached before it is admitted
    (P21)."""
    get_returned: Callable[[RequestState], RequestState] = as_is
    """A request after its asynchronous load: with all loaded tokens computed."""
    publishes_loads_at_once: bool = False
    """Whether blocks are published that a store is still to load for the very step (P19)."""
    returns_for_good: bool = False
    """Whether the end of an asynchronous load takes effect even if the admission fails (P7)."""
    looks_behind_the_head: bool = True
    """Whether requests with an ended load are admitted past a head that does not fit (P10)."""
    takes_back_from_parked: bool = True
    """Whether blocks are reclaimed from requests with an ended load (P10)."""
    take_hit: Callable[[Config, Pool, RequestState, Hit], tuple[Pool, BlockTables]]
    """Hold the blocks of a hit, and take blocks with it: (.., hit). Returns those per group (P2).
    """
    count_settled: Callable[[int, Sequence[BlockId]], int] = as_is
    """Leading blocks of one group, with a load, that count as published: those of the local hit
    (P19); (that, the blocks that the group has before it takes some)."""
    get_failures: Callable[..., tuple[Any, tuple[RequestId, ...]]]
    """Process blocks that could not be loaded: (state, those, the frame being committed or None).
    Returns the state, whose oldest frame has dropped the rows that deliver nothing, and the
    requests that fail by policy (P19)."""
    remembers_num_scheduled: bool = False
    """Whether a frame in flight records the number of tokens of each row."""
    get_failed_row: Callable[[OutputRow, RequestState], OutputRow] = as_is
    """The output row of a request that fails by policy: 0 cached tokens, if it never ran."""
    holds_are_one: bool = False
    """Whether the end of any transfer ends all holds on the blocks of a finished request (P17)."""
    let_go_at_end: Callable[..., tuple[Pool, RequestState]] = as_is
    """What is freed of a finishing request before the store sees its tables: nothing, it holds all
    of them (P17); ((pool, request), the state before)."""
    waits_for_empty_transfers: bool = True
    """Whether a reset also waits for transfers that hold no block (P25)."""
    resets_apart: bool = False
    """Whether a store is reset although the pool was not, and the pool although there is no store.
    """

    # events
    get_stored: Callable[
        [Config, RequestState, int, Sequence[BlockId], int], tuple[BlockStored, ...]
    ]
    """The KV events when blocks of a group are published: (.., group, blocks, first index)."""
    take_events: Callable[[Pool], tuple[Pool, tuple[KVEvent, ...]]]
    """The pool without its pending KV events, and the events as an observation has them (P20)."""
    tells_resets_at_once: bool = True
    """Whether a reset returns its KV events, and does not leave them to the next commit."""

    # the loop
    has_work: Callable[..., bool]
    """Whether the loop must continue planning, in a state (P10)."""

    def __getitem__(self, function: F) -> F:
        """Return the function to call where the specification calls `function`."""
        found: F = self.replaced.get(function, function)  # type: ignore[assignment]
        return found

    def replacing(self, function: F, by: F) -> Rules:
        """Return the rules with `by` in the place of `function`, which `rules[function]` returns.

        `by` may call what it replaces: `rules[function]` of the rules before. Source: architecture
        D5.
        """
        return replace(self, replaced={**self.replaced, function: by})

    def __eq__(self, other: object) -> bool:
        return self.quirks == other.quirks if isinstance(other, Rules) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.quirks)

    def __repr__(self) -> str:
        return f"Rules({', '.join(sorted(self.quirks))})"

    def __reduce__(self) -> tuple[Callable[..., Rules], tuple[Any, ...]]:
        return self.remake
