"""The setting of each knob of a vLLM release in a check, with the reason if it is not the default.

A knob is a field of one of the scheduler's config classes, a value of another config that the
scheduler's code reads, or a variable of the environment. Each is in one of three tables:

    FOLLOWS      set from the `Config` of the run, so a check has it at many values
    LEFT         at the release's own default
    DEVIATIONS   at another value, with a reason; every verdict names these (D19)

A knob that is in no table fails a test, so each new one is examined. This module imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from blockstep.conformance.engine import Setting
from blockstep.spec.profiles import read_release_number

FOLLOWS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "SchedulerConfig": frozenset(
            {
                *("max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens"),
                *("max_model_len", "is_encoder_decoder", "disable_chunked_mm_input"),
                *("enable_chunked_prefill", "chunked_prefill_enabled"),
                *("long_prefill_token_threshold", "policy", "async_scheduling"),
                *("scheduler_reserve_full_isl", "encoder_cache_size"),
                *("max_num_encoder_input_tokens", "cuda_graph_sizes"),
            }
        ),
        "CacheConfig": frozenset(
            {
                *("block_size", "user_specified_block_size", "_block_size_resolved"),
                *("enable_prefix_caching", "num_gpu_blocks", "mamba_cache_mode"),
            }
        ),
        "KVCacheConfig": frozenset({"num_blocks", "kv_cache_groups"}),
        "SpeculativeConfig": frozenset({"method", "num_speculative_tokens"}),
        "LoRAConfig": frozenset({"max_loras"}),
        "KVTransferConfig": frozenset(
            {
                *("kv_connector", "kv_connector_module_path", "kv_role", "engine_id"),
                "kv_load_failure_policy",
            }
        ),
        "KVEventsConfig": frozenset({"enable_kv_cache_events", "publisher"}),
        "ECTransferConfig": frozenset(
            {"ec_connector", "ec_connector_module_path", "ec_role", "engine_id"}
        ),
        "StructuredOutputsConfig": frozenset({"reasoning_parser", "enable_in_reasoning"}),
        "model_config": frozenset({"max_model_len", "is_encoder_decoder"}),
        "parallel_config": frozenset({"pipeline_parallel_size"}),
    }
)
"""Knobs that are set from the `Config` of a run, by the class or the name of their config."""

LEFT: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "SchedulerConfig": frozenset(
            {
                *("runner_type", "is_multimodal_model", "scheduler_cls", "stream_interval"),
                *("watermark", "prefill_schedule_interval", "max_num_queued_reqs"),
                *("max_num_queued_tokens", "max_num_active_seqs"),
                *("long_prefill_token_threshold_adaptive", "max_num_partial_prefills"),
                *("max_long_partial_prefills", "num_lookahead_slots", "send_delta_data"),
            }
        ),
        "CacheConfig": frozenset(
            {
                *("cache_dtype", "cache_hit_alignment_tokens", "calculate_kv_scales"),
                *("cpu_kvcache_space_bytes", "cpu_offload_gb", "cpu_offload_params"),
                *("effective_attention_block_size", "enable_mamba_fine_grained_prefix_cache"),
                *("enable_mamba_shared_prefix_checkpoint", "gpu_memory_utilization"),
                *("hash_block_size", "is_attention_free", "kv_cache_dtype_skip_layers"),
                *("kv_cache_layout", "kv_cache_max_concurrency", "kv_cache_memory_bytes"),
                *("kv_cache_size_tokens", "kv_offloading_backend", "kv_offloading_size"),
                *("kv_sharing_fast_prefill", "mamba_block_size", "mamba_cache_dtype"),
                *("mamba_page_size_padded", "mamba_ssm_cache_dtype", "num_cpu_blocks"),
                *("num_gpu_blocks_override", "prefix_cache_retention_interval"),
                *("prefix_caching_hash_algo", "prefix_match_unit", "replayssm_buffer_len"),
                *("simple_cpu_offload_num_blocks", "skip_page_size_padded", "sliding_window"),
                *("swa_bounded_replay", "swap_space", "use_kda_recoverssm", "use_replayssm"),
                "user_specified_mamba_block_size",
            }
        ),
        "KVCacheConfig": frozenset(
            {
                *("cache_hit_alignment_tokens", "hash_block_size", "hisparse_host_block_stride"),
                *("hisparse_host_num_blocks", "hisparse_shared_host_pool", "kv_cache_layout"),
                *("kv_cache_tensors", "kv_tp_replicas"),
            }
        ),
        "SpeculativeConfig": frozenset(
            {
                *("attention_backend", "code_revision", "disable_by_batch_size"),
                *("disable_eagle_block_drop", "disable_log_stats", "disable_logprobs"),
                *("disable_padded_drafter_batch", "draft_lm_head_quantization"),
                *("draft_load_config", "draft_model_config", "draft_parallel_config"),
                *("draft_sample_method", "draft_tensor_parallel_size", "dspark_draft_topk"),
                *("enable_adaptive_verification", "enable_chunked_prefill", "enforce_eager"),
                *("fly_entropy_threshold", "fly_entropy_top_k", "fly_window_size"),
                *("index_share_for_mtp_iteration", "kv_cache_dtype", "max_model_len", "model"),
                *("moe_backend", "num_speculative_tokens_per_batch_size", "parallel_drafting"),
                *("prompt_lookup_max", "prompt_lookup_min", "quantization", "revision"),
                *("rejection_sample_method", "speculative_token_tree", "target_model_config"),
                *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
                *("suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob"),
                *("synthetic_acceptance_length", "synthetic_acceptance_rate"),
                *("synthetic_acceptance_rates", "target_parallel_config"),
                *("tensor_parallel_size", "use_heterogeneous_vocab"),
                *("use_local_argmax_reduction", "xpress_topc"),
            }
        ),
        "LoRAConfig": frozenset(
            {
                *("bias_enabled", "default_mm_loras", "enable_mixed_moe_lora_format"),
                *("enable_moe_shared_loras", "enable_tower_connector_lora", "lora_dtype"),
                *("fully_sharded_loras", "lora_extra_vocab_size", "max_cpu_loras"),
                *("max_lora_cls_labels", "max_lora_rank", "specialize_active_lora"),
                "target_modules",
            }
        ),
        "KVTransferConfig": frozenset(
            {
                *("enable_permute_local_kv", "kv_buffer_device", "kv_buffer_size"),
                *("kv_connector_extra_config", "kv_ip", "kv_parallel_size", "kv_port"),
                "kv_rank",
            }
        ),
        "KVEventsConfig": frozenset(
            {"buffer_steps", "endpoint", "hwm", "max_queue_size", "replay_endpoint", "topic"}
        ),
        "ECTransferConfig": frozenset(
            {
                *("ec_buffer_device", "ec_buffer_size", "ec_connector_extra_config", "ec_ip"),
                *("ec_parallel_size", "ec_port", "ec_rank", "mm_encoder_output_widths"),
            }
        ),
        "StructuredOutputsConfig": frozenset(
            {
                *("disable_additional_properties", "disable_any_whitespace"),
                *("disable_fallback", "reasoning_parser_plugin"),
            }
        ),
        "model_config": frozenset(
            {
                *("architectures", "enable_return_routed_experts", "get_vocab_size"),
                *("get_total_num_hidden_layers", "is_diffusion", "original_max_model_len"),
                *("registry", "return_sampling_mask", "runner_type", "uses_mrope", "uses_xdrope"),
                *("supports_kv_cache_grouping", "supports_multimodal_inputs"),
            }
        ),
        "hf_config": frozenset({"model_type"}),
        "extra_config": frozenset({"get"}),
        "aux_output_config": frozenset({"enabled"}),
        "ec_manager_config": frozenset({"get_encoder_cache_manager_obj"}),
        "observability_config": frozenset(
            {
                *("enable_logging_iteration_details", "enable_mfu_metrics"),
                *("kv_cache_metrics", "kv_cache_metrics_sample"),
                "per_request_spec_decode_metrics",
            }
        ),
        "parallel_config": frozenset(
            {
                *("data_parallel_index", "data_parallel_rank", "data_parallel_size"),
                *("decode_context_parallel_size", "distributed_executor_backend"),
                *("prefill_context_parallel_size", "tensor_parallel_size"),
            }
        ),
        # What the release works out from its other settings.
        "vllm_config": frozenset(
            {
                *("instance_id", "is_encoder_only", "is_mm_encoder_only", "use_v2_model_runner"),
                *("max_concurrent_batches", "max_in_flight_tokens", "num_hash_lookahead_tokens"),
                *("num_lookahead_tokens", "num_prefill_lookahead_tokens"),
                "num_speculative_tokens",
            }
        ),
        "environment": frozenset(
            {
                *("VLLM_USE_V2_MODEL_RUNNER", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"),
                "VLLM_XPU_PP_MICROBATCH",
            }
        ),
    }
)
"""Knobs that a check leaves at the release's default, by the class or name of their config."""


@dataclass(frozen=True, slots=True)
class NotDefault:
    """A knob that a check sets to another value than the release's default."""

    name: str
    """A few words for the verdict: how the release is checked."""
    knob: str
    defaults: tuple[tuple[str, str | None], ...]
    """The default by the release since which it is this one; None where a check has it, too."""
    checked: str
    where: str
    """The configs in which it makes a difference."""
    reason: str

    def get_default(self, version: str) -> str | None:
        """Return the default in a release; None if that has no such knob, or is checked at it."""
        number = read_release_number(version) or ()
        known = [
            default
            for since, default in self.defaults
            if (read_release_number(since) or ()) <= number
        ]
        return known[-1] if known else None


DEVIATIONS: tuple[NotDefault, ...] = (
    NotDefault(
        "retention dense",
        "KVCacheConfig.prefix_cache_retention_interval",
        (("0.29.0", "0 (from CacheConfig)"),),
        "None",
        "prefix caching with sliding windows or recurrent groups",
        "sparse retention, which publishes some blocks of such groups only, is not specified yet",
    ),
    NotDefault(
        "lookahead hashes off",
        "SpeculativeConfig.disable_lookahead_block_hashes",
        (("0.33.0", "False"),),
        "True",
        "prefix caching with a draft head, without a KV connector",
        "keys of blocks that name the tokens behind the block are not specified yet",
    ),
    NotDefault(
        "no input slots for a draft model",
        "SpeculativeConfig.max_num_new_slots_for_drafting",
        (("0.28.0", "1 for each row"),),
        "0",
        "drafts of a draft model",
        "a row that takes more of a step's budget than its tokens is not specified yet",
    ),
    NotDefault(
        "events by whole digests",
        "environment.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
        (("0.11.0", "1"),),
        "0",
        "KV events",
        "what a digest stands for is looked up, and 64 bits of it could stand for two contents",
    ),
    NotDefault(
        "several groups with KV events",
        "SchedulerConfig.disable_hybrid_kv_cache_manager",
        (("0.11.0", "True with KV events"), ("0.20.0", None)),
        "False",
        "KV events with several KV groups",
        "the release would make one group of full attention of all (#37688), which is another run",
    ),
    NotDefault(
        "seeded hashes",
        "environment.PYTHONHASHSEED",
        (("0.11.0", "random"),),
        "0",
        "prefix caching",
        "the root of the hash chain is random without it, and a run could not be repeated",
    ),
    NotDefault(
        "grammars of automata",
        "StructuredOutputsConfig.backend",
        (("0.11.0", "auto"),),
        "automata over tokens, compiled when an event says so",
        "grammars",
        "the state of a grammar is compared; `vllm_xgrammar` has the release's own backend",
    ),
    NotDefault(
        "no tokenizer",
        "model_config.skip_tokenizer_init",
        (("0.11.0", "False"),),
        "True",
        "grammars",
        "there is no text: a program and its grammars are of token numbers",
    ),
    NotDefault(
        "no GPU",
        "device_config.device_type",
        (("0.30.0", "cuda, where there is one"),),
        "cpu",
        "none that a check has: HiSparse alone reads it",
        "the scheduler runs without a worker",
    ),
    NotDefault(
        "Triton taken as installed",
        "vllm.config.vllm.HAS_TRITON",
        (("0.22.0", "whether there is a GPU with a driver for it"),),
        "True",
        "all configs: the release chooses its model runner by it",
        "a CPU has no Triton; a release up to 0.32 would then take the older model runner, which "
        "its users on a GPU do not get",
    ),
)
"""Each deviation from a release's defaults, the weightiest first."""

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The variable with which a user overrides the release's choice of a model runner."""


def list_settings(version: str, environment: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return what deviates from the defaults when a release is checked.

    Args:
        version: The release.
        environment: Variables of the process; the verdict names those that change the release.
    """
    found = [
        Setting(one.name, one.knob, default, one.checked, one.where, one.reason)
        for one in DEVIATIONS
        if (default := one.get_default(version)) is not None
    ]
    chosen = environment.get(RUNNER)
    if chosen is not None:
        name = f"{RUNNER}={chosen}"
        reason = "the environment of this run says so"
        setting = Setting(name, f"environment.{RUNNER}", "unset", chosen, "all configs", reason)
        found.insert(0, setting)
    return tuple(found)


def format_table(versions: Sequence[str]) -> str:
    """Return the Markdown table of deviations: default and checked value, by release.

    Args:
        versions: The releases that were tried, oldest first.
    """
    lines = [
        "| checked at | knob | releases: default | checked | makes a difference in | why |",
        "|---|---|---|---|---|---|",
    ]
    for one in DEVIATIONS:
        spans: list[list[str]] = []
        for version in versions:
            default = one.get_default(version)
            if default is None:
                continue
            if spans and spans[-1][0] == default:
                spans[-1][2] = version
            else:
                spans.append([default, version, version])
        values = "; ".join(f"{first} to {last}: {default}" for default, first, last in spans)
        lines.append(
            f"| {one.name} | `{one.knob}` | {values} | {one.checked} | {one.where} | {one.reason} |"
        )
    return "\n".join(lines)


def is_known(knob: str) -> bool:
    """Return whether a knob, `Class.field` or `environment.VARIABLE`, is in one of the tables."""
    owner, _, name = knob.partition(".")
    nothing: frozenset[str] = frozenset()
    return (
        name in FOLLOWS.get(owner, nothing)
        or name in LEFT.get(owner, nothing)
        or any(one.knob == knob for one in DEVIATIONS)
    )
