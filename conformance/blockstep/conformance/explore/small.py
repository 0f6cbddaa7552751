"""Parts of which small worlds are made: requests of equal tokens, and fields of configs.

A config begins with its five sizes: blocks, slots per block, running slots, tokens per step, model
length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from blockstep.spec import vocabulary as v

BOTH = (False, True)


def request(name: v.RequestId, num_tokens: int, max_tokens: int, **more: Any) -> v.Request:
    """Return a request with `num_tokens` equal tokens and `max_tokens`."""
    prompt = (more.pop("token", 0),) * num_tokens
    return v.Request(name, prompt, max_tokens=max_tokens, **more)


def item(name: str, offset: int, length: int = 1, **more: Any) -> v.MultiModalItem:
    """Return an item of a prompt."""
    return v.MultiModalItem(name, offset, length, **more)


def encoder(budget: int, size: int) -> dict[str, Any]:
    """Return the fields of a config with an encoder."""
    return {"encoder_compute_budget": budget, "encoder_cache_size": size}


def group(kind: str, block_size: int, **more: Any) -> v.KVGroup:
    """Return a KV group of a kind."""
    return v.KVGroup(v.GroupKind(kind), block_size, **more)


a, b, c = (partial(request, name) for name in "ABC")
RANKED: dict[str, Any] = {"policy": v.Policy.PRIORITY}
UNRESERVED: dict[str, Any] = {"scheduler_reserve_full_isl": False}
UNCACHED: dict[str, Any] = {"enable_prefix_caching": False}
AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}
FETCHED: dict[str, Any] = {"kv_connector": True}
COMPUTED: dict[str, Any] = FETCHED | {
    "kv_load_failure_policy": v.KVLoadFailurePolicy.RECOMPUTE,
}
WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 1, sliding_window=2)
FULL = v.KVGroup(v.GroupKind.FULL, 1)
FULL_OF_2 = v.KVGroup(v.GroupKind.FULL, 2)
ONE_TOKEN = v.Grammar((((0, 1),), ()))
ACROSS = v.KVGroup(v.GroupKind.CROSS_ATTENTION, 1)
CHUNKS = v.KVGroup(v.GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=4)
offer = v.KVOffer
GRAMMAR = v.Grammar((((0, 1),), ((1, 0), (2, 2)), ()))
"""The grammar allows 0, then 1 and again 0, or 2 and then any token."""


def states(block_size: int, mode: v.MambaCacheMode, num_speculative: int = 0) -> v.KVGroup:
    """Return a KV group of recurrent states."""
    return v.KVGroup(
        v.GroupKind.RECURRENT,
        block_size,
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative,
    )


HEAD: dict[str, Any] = {"spec_method": v.SpecMethod.EAGLE, "num_speculative_tokens": 1}
BESIDE: dict[str, Any] = {
    "enable_chunked_prefill": False,
    "disable_chunked_mm_input": True,
    "is_encoder_decoder": True,
}
NGRAM: dict[str, Any] = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 1}
