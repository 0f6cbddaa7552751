"""Config: the constants of one scheduler and its block pool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from blockstep.spec.copies import wide_dataclass
from blockstep.spec.vocabulary.request import TokenId


class Policy(StrEnum):
    """How waiting requests are ordered, and who is preempted (seed 001, "Queue Selection")."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    CONTINUUM = "continuum"
    """As FCFS, but between two turns of a job its blocks stay for a time, its next turn goes ahead
    of others, and who is of such a job is preempted last (seed 001, "Feature A").

    As a step begins, `waiting` is ordered: who was preempted, then whose job has a pin, then
    others; equals stay as they were. Preempted is the last of those that run whose job had no pin
    then; if all had one, the last."""


class PoolOrder(StrEnum):
    """Which free block is taken next."""

    LRU = "lru"
    """The one that has been free longest: what was freed last stays findable longest."""
    LIFO = "lifo"
    """The one that was freed last (seed 002, "The Free Pool"): few blocks are in use, and what is
    overwritten is what would be hit next."""


class SpecMethod(StrEnum):
    """Who proposes draft tokens; it decides lookahead slots and the head-drop on hits."""

    NONE = "none"
    NGRAM = "ngram"
    """Drafts come from the text: no KV of its own, so no lookahead slots."""
    DRAFT_MODEL = "draft_model"
    """A second model with its own KV: `num_speculative_tokens` lookahead slots."""
    EAGLE = "eagle"
    """A head fed with hidden states: lookahead slots, and the last hit block is recomputed."""


class GroupKind(StrEnum):
    """Which tokens a token attends to, in the layers whose KV a group holds."""

    FULL = "full"
    """All before it, and itself."""
    SLIDING_WINDOW = "sliding_window"
    """The last `sliding_window`, itself included."""
    CHUNKED_LOCAL = "chunked_local"
    """Those of its own chunk: chunks of `attention_chunk_size` tokens stand side by side."""
    RECURRENT = "recurrent"
    """None: a layer goes on from the state behind the token before (Mamba, linear attention). A
    block holds the state at one boundary, the end of the block or where the request stands."""
    CROSS_ATTENTION = "cross_attention"
    """None: a layer attends to what the encoder made of the request's items. Their KV is held from
    admission on, and none is added."""


class MambaCacheMode(StrEnum):
    """At which boundaries a recurrent group keeps states."""

    NONE = "none"
    """At none: one state, written over and over. For a run without prefix caching."""
    ALL = "all"
    """At the end of each block: the kernel saves those that it passes."""
    ALIGN = "align"
    """At the end of each chunk of a prompt, and chunks end where blocks do: the kernel saves the
    state that it ends with, and the worker copies it on from block to block."""


class KVLoadFailurePolicy(StrEnum):
    """What becomes of a request whose KV a store could not load."""

    FAIL = "fail"
    """It ends with an error, told behind all rows: parked ones first, in the order of their queue,
    then those of the plan. Nothing of its load can be found."""
    RECOMPUTE = "recompute"
    """It goes on at the first block that did not come, and computes the rest; its row in the plan
    is void, and it keeps its blocks. Of whom nothing has come, when its load has ended, begins anew
    if there is room, its own blocks counted as free: hit and store are asked again."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that attend alike, and so hold their KV in blocks of one table per request."""

    kind: GroupKind
    block_size: int
    """Token slots per block: a multiple of the config's `block_size`."""
    sliding_window: int = 0
    """Tokens; 0 for every other kind."""
    attention_chunk_size: int = 0
    """Tokens; 0 for every other kind."""
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.NONE
    """Of a recurrent group; `none` for every other kind."""
    num_speculative_blocks: int = 0
    """Blocks of a recurrent group for states behind drafts, one for each that may be rejected; 0
    for every other kind."""


@cache
def _get_one_group(block_size: int) -> tuple[KVGroup, ...]:
    return (KVGroup(GroupKind.FULL, block_size),)


@wide_dataclass(frozen=True, slots=True)
class Config:
    """What never changes during a run. Names are vLLM's; units come last in a name."""

    num_blocks: int
    """KV-cache blocks in the pool, the null block (id 0) included."""
    block_size: int = 16
    """Token slots per block. With `groups` it is the smallest of theirs, by which blocks are named:
    the key of a larger one is that of the last tokens in it."""
    max_num_seqs: int = 256
    """Requests running at once, at most."""
    max_num_batched_tokens: int = 2048
    """Tokens scheduled per step, at most: one budget for prefill and decode."""
    max_model_len: int = 8192
    """Tokens of prompt and output of one request, at most."""
    policy: Policy = Policy.FCFS
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    """False: a prompt is admitted only when all of its uncached tokens fit the budget left."""
    long_prefill_token_threshold: int = 0
    """Tokens of one request per step, at most; 0 switches the cap off."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only if all its known tokens fit the free blocks, not just a first chunk."""
    spec_method: SpecMethod = SpecMethod.NONE
    num_speculative_tokens: int = 0
    """Draft tokens per request and step, at most."""
    max_frames_in_flight: int = 1
    """Plans scheduled but not yet committed, at most: the pipeline depth. Several without
    `async_scheduling` are what pipeline parallelism needs: a request then waits for its own token,
    while others, and further chunks of its prompt, are planned behind it."""
    async_scheduling: bool = False
    """Whether a step is planned before the tokens of the one before are known.

    What it will sample is then promised by placeholders, and drafts stay with the worker: a plan
    says how many, not which (seed 001, "Async scheduling skip-ahead")."""
    reasoning_end_token_id: TokenId | None = None
    """The token that ends reasoning, in a prompt or an output: a grammar holds from the token after
    it on. None: from the first output on."""
    enable_in_reasoning: bool = False
    """Whether a grammar holds from the first output on all the same."""
    max_loras: int = 0
    """Different adapters among the requests that run, at most; 0: as many as there are."""
    groups: tuple[KVGroup, ...] = ()
    """KV-cache groups, which take blocks of equal bytes from one pool; a request has a block table
    for each. Empty: one group under full attention, of `block_size`."""
    encoder_compute_budget: int = 0
    """Embeddings that the encoder makes per step, at most."""
    encoder_cache_size: int = 0
    """Embeddings kept of encoded items, at most; 0: no encoder is modelled, items are but names."""
    disable_chunked_mm_input: bool = False
    """Whether a chunk of a prompt never ends inside of an item, as bidirectional attention over the
    item needs. Without groups of `mamba_cache_mode` `ALIGN`, whose chunks end at blocks."""
    is_encoder_decoder: bool = False
    """Whether the encoder's tokens stand beside the prompt, and the decoder attends across. Without
    chunked prefill and prefix caching: a prompt and its item are taken in one step."""
    enable_kv_cache_events: bool = False
    """Whether it is told which blocks become findable, and which are no longer (`KVEvent`)."""
    kv_connector: bool = False
    """Whether there is a store beside the pool, from which KV is loaded, and which may read the
    blocks of requests that have ended (`KVOffer`)."""
    kv_load_failure_policy: KVLoadFailurePolicy = KVLoadFailurePolicy.FAIL
    enable_forks: bool = False
    """Whether a request may go on as several (`Fork`)."""
    watermark_blocks: int = 0
    """Free blocks that an admission leaves for those that run already, if any do."""
    pool_order: PoolOrder = PoolOrder.LRU
    swap_min_tokens: int = 0
    """With a store: who is preempted with at least so many settled tokens has their KV saved there
    (`Plan.kv_saves`), instead of computing all of it again. 0: nobody has."""
    admission_low_blocks: int = 0
    """Below so many free blocks admission closes; a step that preempts closes it, too. Counted once
    a step, behind those that run and before anybody is admitted, also while paused."""
    admission_high_blocks: int = 0
    """It opens again with at least so many, or when nobody runs. No less than the low one; 0: it
    never closes."""

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """`groups`, or the one that there is without."""
        return self.groups or _get_one_group(self.block_size)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Token slots per block of each KV-cache group."""
        if not self.groups:
            return (self.block_size,)
        return tuple([group.block_size for group in self.groups])

    @property
    def has_windows(self) -> bool:
        """Whether a group leaves blocks behind that no token attends to any more."""
        whole = (GroupKind.FULL, GroupKind.CROSS_ATTENTION)
        return any(group.kind not in whole for group in self.groups)

    @property
    def has_pins(self) -> bool:
        """Whether blocks may stay between two turns of a job."""
        return self.policy is Policy.CONTINUUM

    @property
    def num_encoder_lookahead_tokens(self) -> int:
        """Positions behind a chunk of which a draft head reads the embedding, too."""
        return int(self.spec_method is SpecMethod.EAGLE)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block (upstream #52520)."""
        return self.num_blocks - 1

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots reserved past the scheduled tokens for a proposer that keeps KV."""
        with_kv = self.spec_method in (SpecMethod.DRAFT_MODEL, SpecMethod.EAGLE)
        return self.num_speculative_tokens if with_kv else 0

    @property
    def drops_last_hit_block(self) -> bool:
        """Whether a prefix hit gives back its last block (seed 001, "find_longest_cache_hit")."""
        return self.spec_method is SpecMethod.EAGLE
