"""Building a scheduler of vLLM, and its requests, without a model, weights or tokenizer.

Every setting is the release's own default, or follows the `Config`, or is named with a reason in
`vllm_defaults`. No code of vLLM is patched; what it takes from a model is given to it as plain
values:

* without an encoder, items shape block hashes only: the real block hasher sees them, and the
  scheduler does not. With one (`vllm_encoder`) it has them, and fixed budgets.
* speculation is the release's `SpeculativeConfig` with its defaults, made without a proposer's
  weights (`Speculation`); grammars have a backend of ours (`vllm_grammars`).
* adapters are LoRA names; an embedding is a vector of one element, its number;
* a pipeline is a number: as many stages as frames may be in flight, where that is not
  asynchronous scheduling.

Importing this module imports vLLM, which takes seconds, and sets variables of the environment
unless they are set: `VLLM_LOGGING_LEVEL`, `PYTHONHASHSEED`, from which vLLM seeds the root of
its hash chain (at random if there is none), and `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import lcm
from pathlib import Path
from typing import Any, TypeAlias

from blockstep.conformance.engines.adapters.vllm_block_keys import get_lora_name, get_text
from blockstep.conformance.engines.adapters.vllm_groups import require_groups
from blockstep.conformance.engines.adapters.vllm_releases import require_release
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, Request, SpecMethod, TokenIds

RELEASE = require_release()

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")
# events then name blocks by whole digests
os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")

try:
    import numpy as np
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoRAConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request as VllmRequest

    from blockstep.conformance.engines.adapters.vllm_grammars import (
        BACKEND,
        build_manager,
        describe_grammar,
    )
    from blockstep.conformance.engines.adapters.vllm_items import build_features

    if RELEASE.has_encoder:
        from blockstep.conformance.engines.adapters.vllm_encoder import install_encoder
    if RELEASE.has_events:
        from blockstep.conformance.engines.adapters.vllm_events import ask_for_events
    if RELEASE.has_offers:
        from blockstep.conformance.engines.adapters.vllm_ec_connector import ask_for_offers
    if RELEASE.has_store:
        from blockstep.conformance.engines.adapters.vllm_store import ask_for_store
    if RELEASE.has_repetition_detection:
        from vllm.sampling_params import RepetitionDetectionParams
    if RELEASE.has_hashing_module:
        from vllm.utils.hashing import sha256
    else:
        from vllm.utils import sha256
except ImportError as error:
    require_release(error)
    raise

VOCABULARY_SIZE = 1024
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": 1 << 30,
}
"""`config.json` of a two-layer Llama. The scheduler takes only the model length from it."""

HASH: Callable[[Any], bytes] = sha256
"""The function with which vLLM makes the digest of a block."""
Hasher: TypeAlias = Callable[[VllmRequest], list[bytes]]
"""vLLM's `block_hasher`: returns digests of the full blocks of a request that have none yet."""


class Speculation(SpeculativeConfig):  # type: ignore[misc]
    """The release's own `SpeculativeConfig` with its defaults, made without a proposer's weights.

    The real constructor loads the proposer's model config; everything that a scheduler reads from
    the object follows from its method and its number of drafts.
    """

    max_num_new_slots_for_drafting = 0
    """Differs from the default of a draft model, which is 1 (see `vllm_defaults`)."""

    def __init__(self, method: str, num_speculative_tokens: int) -> None:
        for name, default in SpeculativeConfig.__pydantic_fields__.items():
            value = default.get_default(call_default_factory=True)
            object.__setattr__(self, name, value)
        self.__dict__ |= {"method": method, "num_speculative_tokens": num_speculative_tokens}
        if "disable_lookahead_block_hashes" in self.__dict__:
            self.__dict__["disable_lookahead_block_hashes"] = True


def fit_keywords(function: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
    """Return those of the keywords that this release of `function` has.

    What the release is then not given must be in its profile, or declined (`VllmEngine.declines`).
    """
    known = inspect.signature(function).parameters
    return {name: value for name, value in keywords.items() if name in known}


@cache
def get_model_config() -> ModelConfig:
    """Return a two-layer Llama without weights or tokenizer; built once, since it takes a while."""
    # vLLM keeps the root of its hash chain in a global; without a root it hashes nothing
    init_none_hash(HASH)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        return ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=1 << 20
        )


def build_scheduler(config: Config) -> Scheduler:
    """Return the scheduler of vLLM for `config`.

    It is the asynchronous one if several frames may be in flight, as in vLLM itself
    (`SchedulerConfig.get_scheduler_cls`).

    Raises:
        ConfigError: the release has no such mix of groups.
    """
    require_groups(RELEASE, config)
    vllm_config = build_vllm_config(config)
    retention = {}
    if config.enable_prefix_caching and not any(map(is_sparse, config.groups)):
        interval = getattr(vllm_config.cache_config, "prefix_cache_retention_interval", None)
        retention = fit_keywords(KVCacheConfig, prefix_cache_retention_interval=interval)
    make_scheduler = AsyncScheduler if config.async_scheduling else Scheduler
    # a release that takes the hash block size takes the hit size as `block_size`
    takes_hash_block_size = "hash_block_size" in inspect.signature(Scheduler).parameters
    keywords = fit_keywords(
        Scheduler,
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(config.num_blocks, [], build_groups(config), **retention),
        structured_output_manager=build_manager(vllm_config, config),
        block_size=lcm(*config.block_sizes) if takes_hash_block_size else config.block_size,
        hash_block_size=config.block_size,
        log_stats=True,
    )
    with triton_as_on_a_gpu():
        scheduler = make_scheduler(**keywords)
    if config.encoder_cache_size:
        install_encoder(scheduler, config)
    return scheduler


@contextmanager
def triton_as_on_a_gpu() -> Iterator[None]:
    """Let the release choose its model runner as on a machine with a GPU, which has Triton.

    Without Triton a release up to 0.32 takes the older runner whatever the other settings are, so a
    CPU would never see the plans that its users get. `VLLM_USE_V2_MODEL_RUNNER` overrides the
    choice.
    """
    settings: Any = sys.modules.get("vllm.config.vllm")
    is_there = getattr(settings, "HAS_TRITON", None)
    if is_there is not None:
        settings.HAS_TRITON = True
    try:
        yield
    finally:
        if is_there is not None:
            settings.HAS_TRITON = is_there


def is_sparse(group: KVGroup) -> bool:
    """Return whether newer releases may publish some blocks of such a group only (sparse
    retention)."""
    return group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT)


def build_groups(config: Config) -> list[KVCacheGroupSpec]:
    """Return the KV groups of `config`, each of one layer.

    Blocks have equal bytes, as in vLLM: larger blocks have fewer heads. vLLM finds hits of groups
    with equal specs together, so equal groups of ours stay equal.
    """
    unit = lcm(*config.block_sizes)
    return [
        KVCacheGroupSpec([f"layer.{index}"], _build_layer(group, unit // group.block_size))
        for index, group in enumerate(config.kv_groups)
    ]


def _build_layer(group: KVGroup, num_heads: int) -> KVCacheSpec:
    """Return the spec of a layer: KV of each token, or a state after the last one."""
    if group.kind is GroupKind.RECURRENT:
        return MambaSpec(
            block_size=group.block_size,
            shapes=((1, 1),),
            dtypes=(torch.float32,),
            page_size_padded=4 * group.block_size * num_heads,  # two of float16 in each slot
            mamba_cache_mode=group.mamba_cache_mode.value,
            num_speculative_blocks=group.num_speculative_blocks,
        )
    kinds: dict[GroupKind, tuple[type[KVCacheSpec], dict[str, int]]] = {
        GroupKind.FULL: (FullAttentionSpec, {}),
        GroupKind.SLIDING_WINDOW: (SlidingWindowSpec, {"sliding_window": group.sliding_window}),
        GroupKind.CHUNKED_LOCAL: (
            ChunkedLocalAttentionSpec,
            {"attention_chunk_size": group.attention_chunk_size},
        ),
        GroupKind.CROSS_ATTENTION: (CrossAttentionSpec, {}),
    }
    kind, sizes = kinds[group.kind]
    shape = {"block_size": group.block_size, "num_kv_heads": num_heads, "head_size": 1}
    return kind(**shape, dtype=torch.float16, **sizes)


def build_vllm_config(config: Config) -> VllmConfig:
    """Return `config` as vLLM's config."""
    model = copy.copy(get_model_config())
    model.max_model_len = config.max_model_len
    budget = config.max_num_batched_tokens
    keywords = fit_keywords(
        SchedulerConfig,
        max_num_seqs=config.max_num_seqs,
        # vLLM rejects a budget below the model length or `max_num_seqs`. It reads the real limit of
        # a step from `max_num_scheduled_tokens`, if it has that field.
        max_num_batched_tokens=max(budget, config.max_model_len, config.max_num_seqs),
        max_num_scheduled_tokens=budget,
        max_model_len=config.max_model_len,
        is_encoder_decoder=config.is_encoder_decoder,
        disable_chunked_mm_input=config.disable_chunked_mm_input,
        enable_chunked_prefill=config.enable_chunked_prefill,
        # newer releases reject a value above the model length, which means the same
        long_prefill_token_threshold=min(config.long_prefill_token_threshold, config.max_model_len),
        policy=config.policy.value,
        async_scheduling=config.async_scheduling,
        scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
    )
    scheduling = SchedulerConfig(**keywords)
    caching = CacheConfig(
        block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    caching.num_gpu_blocks = config.num_blocks
    for group in config.groups:
        if group.kind is GroupKind.RECURRENT:  # all of one mode
            caching.mamba_cache_mode = group.mamba_cache_mode.value
    built = VllmConfig(
        model_config=model,
        scheduler_config=scheduling,
        cache_config=caching,
        device_config=DeviceConfig("cpu"),
    )
    if config.max_frames_in_flight > 1 and not config.async_scheduling:
        # set afterwards: a real pipeline needs as many devices
        built.parallel_config.pipeline_parallel_size = config.max_frames_in_flight
    # set again: without chunked prefill 0.11.1 drops it when the config is built
    threshold = keywords["long_prefill_token_threshold"]
    built.scheduler_config.long_prefill_token_threshold = threshold
    if not RELEASE.has_step_budget or RELEASE.has_group_gate:
        built.scheduler_config.max_num_batched_tokens = budget  # after it was validated
    if config.spec_method is not SpecMethod.NONE:
        # set afterwards: validating it again would need the weights of a proposer
        method = config.spec_method.value
        built.speculative_config = Speculation(method, config.num_speculative_tokens)
    if config.encoder_cache_size and RELEASE.has_offers:
        ask_for_offers(built)
    if config.enable_kv_cache_events:
        ask_for_events(built)
    if config.kv_connector:
        ask_for_store(built, config.kv_load_failure_policy)
    if config.max_loras:
        built.lora_config = LoRAConfig(
            max_loras=config.max_loras
        )  # without this config there is no limit
    return built


def build_hasher(config: Config) -> Hasher | None:
    """Return the hasher of full blocks; None without prefix caching."""
    if not config.enable_prefix_caching:
        return None
    hasher: Hasher = get_request_block_hasher(config.block_size, HASH)
    return hasher


def build_request(
    request: Request,
    hasher: Hasher | None,
    lora_ids: dict[str, int],
    separate_names: bool,
    has_items: bool = False,
) -> VllmRequest:
    """Return the request as vLLM's front end would hand it to the scheduler.

    Args:
        request: The submitted request.
        hasher: The hasher of its full blocks; None without prefix caching.
        lora_ids: Number of each adapter seen in this run, from 1; a new one is added.
        separate_names: See `VllmEngine.separate_names`.
        has_items: Whether it has its items, because they are encoded or hashed.
    """
    sampling = _build_sampling(request)
    keywords = fit_keywords(
        VllmRequest,
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        prompt_embeds=build_embeds(request.prompt_embeds),
        sampling_params=sampling,
        pooling_params=None,
        eos_token_id=request.eos_token_id,
        arrival_time=float(request.arrival_time),
        lora_request=build_lora(request.adapter, lora_ids, separate_names),
        cache_salt=request.cache_salt and get_text(request.cache_salt),
        priority=request.priority,
        block_hasher=hasher,
        mm_features=build_features(request.items) if has_items else None,
        resumable=request.resumable,
    )
    return VllmRequest(**keywords)


def build_lora(
    adapter: str | None, lora_ids: dict[str, int], separate_names: bool
) -> LoRARequest | None:
    """Build vLLM's request for an adapter. Arguments are those of `build_request`."""
    if adapter is None:
        return None
    number = lora_ids.setdefault(adapter, len(lora_ids) + 1)
    return LoRARequest(get_lora_name(adapter, separate_names), number, "-")


def build_embeds(numbers: TokenIds) -> torch.Tensor | None:
    """Return a vector of one element for each number; the request has its tokens as well."""
    # float64, so that every number has a vector of its own
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1) if numbers else None


def build_samples(token_ids: TokenIds) -> Any:
    """Return what a row sampled, as the release's worker hands it over."""
    return np.array(token_ids, dtype=np.int64) if RELEASE.takes_arrays else list(token_ids)


def read_embeds(embeds: torch.Tensor | None) -> TokenIds:
    """Return the numbers of these vectors."""
    return () if embeds is None else tuple(map(int, embeds[:, 0].tolist()))


def _build_constraint(request: Request) -> StructuredOutputsParams | None:
    """Return the constraint of a request's output; the front end has chosen a backend by then."""
    if not request.structured_output:
        return None
    constraint = StructuredOutputsParams(grammar=describe_grammar(request.grammar))
    constraint._backend = BACKEND
    return constraint


def _build_sampling(request: Request) -> SamplingParams:
    detection = request.repetition_detection
    keywords = fit_keywords(
        SamplingParams,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=list(request.stop_token_ids),
        repetition_detection=RepetitionDetectionParams(
            detection.max_pattern_size, detection.min_pattern_size, detection.min_count
        )
        if detection is not None
        else None,
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
        structured_outputs=_build_constraint(request),
    )
    sampling = SamplingParams(**keywords)
    # the front end does the same: `Request` has no end-of-sequence token in some releases
    sampling.update_from_generation_config({}, request.eos_token_id)
    return sampling
