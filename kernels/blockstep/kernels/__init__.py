"""The data plane: Triton kernels over paged KV memory, each with a torch reference.

They know no scheduler. Tensors on the CPU go to the torch reference, tensors on a CUDA device to
Triton; `use_backend` overrides that. Every argument is checked before anything runs: a wrong shape,
dtype, device or layout is a ValueError or TypeError that names the argument, the rule and the fix.

Terms used throughout: a *block* holds `block_size` tokens of one layer; a *slot* is the place of
one token, `slot = block_id * block_size + offset`. Ids, slots and positions are int64 (block ids
inside a block table int32), counts and offsets of a step int32.
"""

from blockstep.kernels.attention import (
    AttentionPlan,
    AttentionWorkspace,
    make_attention_workspace,
    paged_attention,
    plan_attention,
)
from blockstep.kernels.blocks import copy_blocks, gather_blocks, scatter_blocks
from blockstep.kernels.cache import reshape_and_cache
from blockstep.kernels.dispatch import use_backend
from blockstep.kernels.layers import add_rms_norm, rms_norm, rotate_and_cache, silu_and_mul
from blockstep.kernels.products import (
    is_product_of_few,
    multiply_in_parts,
    multiply_silu_and_mul,
)
from blockstep.kernels.rejection import rejection_sample
from blockstep.kernels.sampling import NO_TOKEN, sample_tokens
from blockstep.kernels.step import (
    commit_step,
    keep_tokens,
    merge_drafts,
    prepare_step,
    stage_step,
)

__all__ = [
    "NO_TOKEN",
    "AttentionPlan",
    "AttentionWorkspace",
    "add_rms_norm",
    "commit_step",
    "copy_blocks",
    "gather_blocks",
    "is_product_of_few",
    "keep_tokens",
    "make_attention_workspace",
    "merge_drafts",
    "multiply_in_parts",
    "multiply_silu_and_mul",
    "paged_attention",
    "plan_attention",
    "prepare_step",
    "rejection_sample",
    "reshape_and_cache",
    "rms_norm",
    "rotate_and_cache",
    "sample_tokens",
    "scatter_blocks",
    "silu_and_mul",
    "stage_step",
    "use_backend",
]
