"""Config: the constants of one scheduler and its block pool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

from blockstep.spec.copies import wide_dataclass
from blockstep.spec.vocabulary.request import TokenId


class Policy(StrEnum):
    """The order of the waiting queue, and the choice of victims (seed 001, "Queue Selection")."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    CONTINUUM = "continuum"
    """Like FCFS, but a job's blocks are pinned for a time between two of its turns, its next turn
    goes ahead of others, and its requests are preempted last (seed 001, "Feature A").

    At the beginning of a step `waiting` is sorted: preempted requests, then those whose job has a
    pin, then others; the sort is stable. The victim is the last running request whose job had no
    pin then; if all had one, the last running request."""


class PoolOrder(StrEnum):
    """Which free block is reused next."""

    LRU = "lru"
    """The one that has been free longest: blocks freed last stay cached longest."""
    LIFO = "lifo"
    """The one that was freed last (seed 002, "The Free Pool"): few different blocks are used, and
    the blocks that are overwritten are those most likely to be hit next."""


class SpecMethod(StrEnum):
    """The proposer of draft tokens; it decides lookahead slots and whether the last hit block is
    dropped."""

    NONE = "none"
    NGRAM = "ngram"
    """Drafts come from the token sequence: no KV of its own, so no lookahead slots."""
    DRAFT_MODEL = "draft_model"
    """A second model with its own KV: `num_speculative_tokens` lookahead slots."""
    EAGLE = "eagle"
    """A head that reads hidden states: lookahead slots, and the last hit block is computed again.
    """


KEEPING_KV: Final = (SpecMethod.DRAFT_MODEL, SpecMethod.EAGLE)
"""The proposers that keep KV, and so have lookahead slots."""


class GroupKind(StrEnum):
    """Which tokens a token attends to, in the layers of a KV group."""

    FULL = "full"
    """All tokens before it, and itself."""
    SLIDING_WINDOW = "sliding_window"
    """The last `sliding_window` tokens, including itself."""
    CHUNKED_LOCAL = "chunked_local"
    """The tokens of its own chunk up to itself; a chunk is `attention_chunk_size` tokens."""
    RECURRENT = "recurrent"
    """None: a layer continues from the state after the previous token (Mamba, linear attention). A
    block holds the state at one boundary: the end of the block, or the request's last computed
    token."""
    CROSS_ATTENTION = "cross_attention"
    """None: a layer attends to the encoder outputs of the request's items. Their KV is allocated at
    admission, and none is added later."""


class MambaCacheMode(StrEnum):
    """The boundaries at which a recurrent group keeps states."""

    NONE = "none"
    """No boundary: one state, overwritten by each step. For a run without prefix caching."""
    ALL = "all"
    """The end of each block: the kernel saves the states that it passes."""
    ALIGN = "align"
    """The end of each chunk of a prompt, and chunks end at block boundaries: the kernel saves its
    final state, and the worker copies it from block to block."""


class KVLoadFailurePolicy(StrEnum):
    """The treatment of a request whose KV a store could not load."""

    FAIL = "fail"
    """It finishes with an error. Its output row follows all others: first those of requests that
    wait for an asynchronous load, in the order of their queue, then those of the plan. No block of
    its load is published."""
    RECOMPUTE = "recompute"
    """It continues at the first block that was not loaded, and computes the rest; its row in the
    plan is void, and it keeps its blocks. A request whose asynchronous load ended with nothing
    loaded starts again if there is room, its own blocks counted as free: prefix cache and store are
    asked again."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with the same attention, whose KV is in blocks of one table per request."""

    kind: GroupKind
    block_size: int
    """Token slots per block: a multiple of the config's `block_size`."""
    sliding_window: int = 0
    """Tokens; 0 for every other kind."""
    attention_chunk_size: int = 0
    """Tokens; 0 for every other kind."""
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.NONE
    """The mode of a recurrent group; `none` for every other kind."""
    num_speculative_blocks: int = 0
    """Blocks of a recurrent group for states after drafts, one for each that may be rejected; 0 for
    every other kind."""


@cache
def _get_one_group(block_size: int) -> tuple[KVGroup, ...]:
    return (KVGroup(GroupKind.FULL, block_size),)


@wide_dataclass(frozen=True, slots=True)
class Config:
    """The constants of a run. Names are vLLM's; units come last in a name."""

    num_blocks: int
    """KV-cache blocks in the pool, including the null block (id 0)."""
    block_size: int = 16
    """Token slots per block. With `groups` it is the smallest of theirs, which determines block
    keys: the key of a larger block is that of its last tokens."""
    max_num_seqs: int = 256
    """Maximum number of running requests."""
    max_num_batched_tokens: int = 2048
    """Maximum of tokens scheduled per step: one budget for prefill and decode."""
    max_model_len: int = 8192
    """Maximum of prompt and output tokens of one request."""
    policy: Policy = Policy.FCFS
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    """False: a prompt is admitted only when all of its uncached tokens fit the remaining budget."""
    long_prefill_token_threshold: int = 0
    """Maximum of tokens of one request per step; 0: no such limit."""
    prefill_schedule_interval: int = 1
    """While requests decode, prompts get tokens in every n-th step only; 1: in every step."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only if all its known tokens fit the free blocks, not just a first chunk."""
    spec_method: SpecMethod = SpecMethod.NONE
    num_speculative_tokens: int = 0
    """Maximum of draft tokens per request and step."""
    max_frames_in_flight: int = 1
    """Maximum of plans scheduled but not yet committed: the pipeline depth. More than one without
    `async_scheduling` is for pipeline parallelism: a request then waits for its own token, while
    other requests, and further chunks of its prompt, are planned."""
    async_scheduling: bool = False
    """Whether a step is planned before the tokens of the one before are known.

    Placeholders then count the tokens that will be sampled, and drafts stay with the worker: a plan
    has their number, not their ids (seed 001, "Async scheduling skip-ahead")."""
    reasoning_end_token_id: TokenId | None = None
    """The token that ends reasoning, in a prompt or an output: a grammar applies only after it.
    None: a grammar applies from the first output."""
    enable_in_reasoning: bool = False
    """Whether a grammar applies from the first output although the model reasons."""
    max_loras: int = 0
    """Maximum number of different LoRA adapters among running requests; 0: unlimited."""
    groups: tuple[KVGroup, ...] = ()
    """KV groups, which take blocks of equal bytes from one pool; a request has a block table for
    each. Empty: one group under full attention, of `block_size`."""
    encoder_compute_budget: int = 0
    """Maximum of embeddings that the encoder computes per step."""
    encoder_cache_size: int = 0
    """Maximum of embeddings in the encoder cache; 0: no encoder is modelled, and items only
    contribute to block keys."""
    disable_chunked_mm_input: bool = False
    """Whether a chunk of a prompt never ends inside an item, because attention over the item is
    bidirectional. Not allowed with groups of `mamba_cache_mode` `ALIGN`, whose chunks end at
    blocks."""
    is_encoder_decoder: bool = False
    """Whether the model is an encoder-decoder: items are not part of the prompt, and the decoder
    uses cross attention. Only without chunked prefill and prefix caching: a prompt and its item are
    computed in one step."""
    enable_kv_cache_events: bool = False
    """Whether the engine reports which blocks are published and removed (`KVEvent`)."""
    kv_connector: bool = False
    """Whether there is a store outside the pool, from which KV is loaded, and which may read the
    blocks of finished requests (`KVOffer`)."""
    kv_load_failure_policy: KVLoadFailurePolicy = KVLoadFailurePolicy.FAIL
    enable_forks: bool = False
    """Whether requests may fork (`Fork`)."""
    watermark_blocks: int = 0
    """Free blocks that an admission must leave while other requests run."""
    pool_order: PoolOrder = PoolOrder.LRU
    swap_min_tokens: int = 0
    """Number of computed tokens from which a store saves the KV of a preempted request
    (`Plan.kv_saves`), so that it need not be computed again; only tokens whose KV is certain count.
    0: never."""
    admission_low_blocks: int = 0
    """Admission closes if fewer blocks are free; a step that preempts closes it, too. Counted once
    a step, after the running phase and before any admission, also while paused."""
    admission_high_blocks: int = 0
    """Admission opens with at least this many free blocks, or when no request runs. Not below the
    low threshold; 0: admission never closes."""

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """`groups`, or the single group if that is empty."""
        return self.groups or _get_one_group(self.block_size)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Token slots per block of each KV group."""
        if not self.groups:
            return (self.block_size,)
        return tuple([group.block_size for group in self.groups])

    @property
    def has_windows(self) -> bool:
        """Whether a group has skipped blocks, which no later token attends to."""
        whole = (GroupKind.FULL, GroupKind.CROSS_ATTENTION)
        return any(group.kind not in whole for group in self.groups)

    @property
    def has_states(self) -> bool:
        """Whether a group keeps states of recurrent layers instead of tokens' KV."""
        return any(group.kind is GroupKind.RECURRENT for group in self.groups)

    @property
    def has_pins(self) -> bool:
        """Whether blocks may be pinned between two turns of a job."""
        return self.policy is Policy.CONTINUUM

    @property
    def has_prefill_interval(self) -> bool:
        """Whether prompts are held in some steps while requests decode."""
        return self.prefill_schedule_interval > 1

    @property
    def num_encoder_lookahead_tokens(self) -> int:
        """Positions after a chunk whose embedding a draft head reads, too."""
        return int(self.spec_method is SpecMethod.EAGLE)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block (upstream #52520)."""
        return self.num_blocks - 1

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots reserved after the scheduled tokens for a proposer that keeps KV."""
        return self.num_speculative_tokens if self.spec_method in KEEPING_KV else 0

    @property
    def drops_last_hit_block(self) -> bool:
        """Whether the last block of a prefix hit is dropped (seed 001,
        "find_longest_cache_hit")."""
        return self.spec_method is SpecMethod.EAGLE
