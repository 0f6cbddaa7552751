"""Treatment of each field of vLLM's plans, answers and events by the adapter, in any release (D16).

A field that is in neither table is unknown to the adapter; a run reports it once. This module does
not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from types import MappingProxyType

READ: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "SchedulerOutput": frozenset(
            {
                *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
                *("total_num_scheduled_tokens", "scheduled_spec_decode_tokens"),
                *("finished_req_ids", "preempted_req_ids", "num_common_prefix_blocks"),
                *("structured_output_request_ids", "has_structured_output_requests"),
                *("pending_structured_output_tokens", "num_spec_tokens_to_schedule"),
                *("scheduled_encoder_inputs", "free_encoder_mm_hashes", "ec_connector_metadata"),
                *("new_block_ids_to_zero", "kv_connector_metadata", "has_sync_kv_loads"),
                "skip_drafts",
            }
        ),
        "NewRequestData": frozenset(
            {
                *("req_id", "prompt_token_ids", "prompt_embeds", "sampling_params"),
                *("lora_request", "block_ids", "num_computed_tokens", "mm_features"),
                "prefill_token_ids",
            }
        ),
        "CachedRequestData": frozenset(
            {
                *("req_ids", "resumed_req_ids", "resumed_from_preemption", "new_token_ids"),
                *("all_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"),
            }
        ),
        "EngineCoreOutputs": frozenset({"outputs", "scheduler_stats", "timestamp"}),
        "EngineCoreOutput": frozenset(
            {
                *("request_id", "new_token_ids", "finish_reason", "stop_reason"),
                *("num_cached_tokens", "prefill_stats"),
                "events",  # when they happened is a reading of a clock
                "num_external_computed_tokens",
                "spec_decode_metrics",  # of one request; those of all requests are read
            }
        ),
        "SchedulerStats": frozenset(
            {
                *("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs"),
                *("kv_cache_usage", "prefix_cache_stats", "spec_decoding_stats"),
                *("encoder_cache_usage", "connector_prefix_cache_stats"),
                "num_kv_fetch_reqs_by_stage",
            }
        ),
        "BlockStored": frozenset(
            {
                *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
                *("medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
                "kv_cache_spec_sliding_window",
            }
        ),
        "BlockRemoved": frozenset({"block_hashes", "medium", "group_idx"}),
        "AllBlocksCleared": frozenset(),
    }
)
"""Fields that are translated, or checked against other fields."""

UNUSED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "SchedulerOutput": frozenset(
            {
                "encoder_input_updates",
                *("scheduled_encoder_input_stats", "grammar_bitmask", "num_invalid_spec_tokens"),
                "kv_connector_block_state",
                *("ec_manager_metadata", "partial_tail_offloads"),
                *("aux_output_connector_metadata", "kv_cache_block_copies"),
                "block_table_updates",
            }
        ),
        "NewRequestData": frozenset(
            {
                *("pooling_params", "prompt_is_token_ids"),
                "replay_start",
            }
        ),
        "CachedRequestData": frozenset(),
        "EngineCoreOutputs": frozenset(
            {
                *("engine_index", "utility_output", "finished_requests", "wave_complete"),
                *("start_wave", "weight_version"),
            }
        ),
        "EngineCoreOutput": frozenset(
            {
                *("new_logprobs", "new_prompt_logprobs_tensors", "prompt_token_id_logprobs"),
                *("pooling_output", "kv_transfer_params", "ec_transfer_params", "trace_headers"),
                *("routed_experts", "num_nans_in_logits"),
                *("mm_cache_miss_hashes", "new_sampling_mask", "error"),
            }
        ),
        "SchedulerStats": frozenset(
            {
                *("step_counter", "current_wave", "num_corrupted_reqs"),
                *("kv_cache_eviction_events", "kv_connector_stats", "ec_connector_stats"),
                *("waiting_lora_adapters", "running_lora_adapters", "cudagraph_stats"),
                *("perf_stats", "iteration_details"),
            }
        ),
        "BlockStored": frozenset({"locality", "ownership", "session_id", "lookahead_token_ids"}),
        "BlockRemoved": frozenset({"locality", "ownership"}),
        "AllBlocksCleared": frozenset(),
    }
)
"""Fields of features that no config here uses: they must be empty."""


def find_unknown(kind: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the fields of a class that are in neither table."""
    return tuple(f"{kind}.{name}" for name in names if name not in READ[kind] | UNUSED[kind])


def get_unknown_note(version: str, unknown: tuple[str, ...]) -> str | None:
    """Return the note of a run on fields that the adapter does not know; None without any."""
    if not unknown:
        return None
    return f"vLLM {version} has fields that are not looked at: {', '.join(unknown)}"


def is_empty(value: object) -> bool:
    """Return whether a field is empty: absent, zero, or a collection without elements."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, Sized):
        return len(value) == 0
    return value is None or (isinstance(value, int | float) and value == 0)
