"""Checks that every field of vLLM's plans, answers and state agrees with the others (D16).

A plan may have data of a request without a row, an answer may have data of a request that was not
in the frame, and the state may have data of a request that is gone. The translation into the
vocabulary would ignore all such data. Here each is an `EngineFault` that names the field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_build import RELEASE, build_lora
from blockstep.conformance.engines.adapters.vllm_fields import (
    UNUSED,
    find_unknown,
    get_unknown_note,
    is_empty,
)
from blockstep.conformance.engines.adapters.vllm_items import read_features
from blockstep.conformance.engines.adapters.vllm_state import Run
from blockstep.spec import vocabulary as v

CHECKED_TYPES = (
    *(SchedulerOutput, NewRequestData, CachedRequestData),
    *(EngineCoreOutputs, EngineCoreOutput, SchedulerStats),
)
UNUSED_HERE = {
    kind: tuple(name for name in kind.__annotations__ if name in UNUSED[kind.__name__])
    for kind in CHECKED_TYPES
}
"""Fields of this release that must be empty."""
REPETITION = "repetition_detected"
"""The stop reason of a request that repeats itself."""
COUNTED_AS = {"num_draft_tokens": "drafts_scheduled", "num_accepted_tokens": "drafts_accepted"}
"""The counters of `Stats` that fields of vLLM's statistics of drafts are added to."""
COUNTS_OF_DRAFTS = SpecDecodingStats.__annotations__.keys()
"""The fields of vLLM's statistics of drafts in this release."""
PARKED = v.Status.WAITING_FOR_REMOTE_KVS.name
STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
"""The stages of an asynchronous load, as newer releases count them."""
NOTE = get_unknown_note(
    RELEASE.version,
    tuple(
        name for kind in CHECKED_TYPES for name in find_unknown(kind.__name__, kind.__annotations__)
    ),
)
"""The note of a run on fields of this release that the adapter does not know."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A request that has had no output yet, when the release is given an answer."""

    num_prompt_tokens: int
    tables: tuple[tuple[Any, ...], ...]
    """The blocks of the request in each group that publishes blocks."""

    @classmethod
    def now(cls, run: Run, name: v.RequestId) -> Prefill:
        """Return that of the request with this id."""
        return cls(
            len(run.known[name].request.prompt_token_ids),
            tuple(
                tuple(manager.req_to_blocks.get(name, ()))
                for manager, group in zip(run.managers, run.config.kv_groups, strict=True)
                if group.kind is not v.GroupKind.CROSS_ATTENTION
            ),
        )

    def count_published(self, run: Run) -> int:
        """Return the number of tokens up to the end of the last block that every group has
        published.

        A block keeps its key until it is allocated again, so this can be asked after the request
        was freed.
        """
        size = run.config.block_size
        ends = [
            max((_get_end(run, block, size) for block in table), default=0) for table in self.tables
        ]
        return min(ends, default=0)


@dataclass(slots=True)
class Asked:
    """State and counters of the release when it was given an answer."""

    frame: SchedulerOutput
    nums_sampled: Mapping[v.RequestId, int]
    """The number of tokens that each row sampled: the release cuts their lists where a request
    stops."""
    requests: dict[v.RequestId, VllmRequest]
    """The release's unfinished requests."""
    names: Collection[v.RequestId]
    """Requests that the answer may have outputs of."""
    counts: Mapping[str, Any]
    """Counters of the caches that come with the answer, by field of the statistics."""
    num_drafts_max: int
    """The largest number of drafts in a row."""
    dropped: Collection[v.RequestId]
    """Requests of the frame whose tokens are dropped: a forced reset came after the frame."""
    prefills: Mapping[v.RequestId, Prefill]
    """Prefills of the frame's requests that have had no output yet."""
    has_failures: bool = False
    """Whether a load failed: the release then leaves out rows of the frame."""

    @classmethod
    def now(cls, run: Run, frame: SchedulerOutput, result: ModelRunnerOutput) -> Asked:
        """Return what the release has before it is given the answer to `frame`."""
        scheduler, requests = run.scheduler, dict(run.get_unfinished())
        counts = {"prefix_cache_stats": copy(scheduler.kv_cache_manager.prefix_cache_stats)}
        if run.store is not None:
            counts["connector_prefix_cache_stats"] = copy(scheduler.connector_prefix_cache_stats)
        names = [name for name in frame.num_scheduled_tokens if name in requests]
        return cls(
            frame,
            dict(zip(result.req_ids, map(len, result.sampled_token_ids), strict=True)),
            requests,
            requests.keys() if run.store else frame.num_scheduled_tokens.keys(),
            counts,
            run.config.num_speculative_tokens,
            dropped=[name for name in names if _is_dropped(requests[name])],
            prefills={
                name: Prefill.now(run, name)
                for name in names
                if RELEASE.has_prefill_stats and not run.known[name].has_reported_prefill
            },
        )

    def count_drafts(self) -> dict[str, Any]:
        """Return the counts of the frame's drafts over the rows that sampled, by field of the
        statistics.
        """
        accepted, proposed = [0] * self.num_drafts_max, [0] * self.num_drafts_max
        invalid = getattr(self.frame, "num_invalid_spec_tokens", None) or {}
        num_rows = 0
        for name, drafts in self.frame.scheduled_spec_decode_tokens.items():
            is_counted = name in self.requests and name not in self.dropped
            if is_counted and drafts and (num_sampled := self.nums_sampled[name]):
                num_rows += 1
                for place in range(num_sampled - 1):
                    accepted[place] += 1
                for place in range(len(drafts) - invalid.get(name, 0)):
                    proposed[place] += 1
        if not num_rows:
            return {"num_draft_tokens": 0, "num_accepted_tokens": 0, "num_drafts": 0}
        counts = {
            "num_draft_tokens": sum(proposed),
            "num_accepted_tokens": sum(accepted),
            "num_accepted_tokens_per_pos": accepted,
            "num_draft_tokens_per_pos": proposed,
            "num_drafts": num_rows,
            "num_spec_tokens": self.num_drafts_max,
        }
        return {field: count for field, count in counts.items() if field in COUNTS_OF_DRAFTS}


def check_plan(run: Run, output: SchedulerOutput, separate_names: bool) -> None:
    """Check that every entry of a plan belongs to a row of the plan, and that its rows agree.

    Raises:
        EngineFault: naming the field.
    """
    _check_unused(output, "this plan")
    for new in output.scheduled_new_reqs:
        _check_unused(new, f"the row of {new.req_id!r}")
    cached = output.scheduled_cached_reqs
    new_ids = [new.req_id for new in output.scheduled_new_reqs]
    _check_rows(run, output, new_ids)
    for new in output.scheduled_new_reqs:
        _check_new_row(run, new, separate_names)
    _check_parallel(cached, run.config)
    rows = output.num_scheduled_tokens.keys()
    named = {
        "scheduled_spec_decode_tokens": output.scheduled_spec_decode_tokens,
        "structured_output_request_ids": getattr(output, "structured_output_request_ids", None),
    }
    for field, names in named.items():
        _check_known(field, names or (), rows, "which has no row in this plan")
    if RELEASE.has_row_outputs:
        for field in ("resumed_req_ids", "all_token_ids"):
            names = getattr(cached, field)
            _check_known(
                f"scheduled_cached_reqs.{field}", names, cached.req_ids, "which is not there"
            )
    if RELEASE.has_preemption_list:
        _check_known(
            "preempted_req_ids", output.preempted_req_ids or (), run.known, "which is unknown"
        )
    _check_encoder_inputs(run, output)
    if run.store is None:
        _check_no_store(output, "kv_connector_metadata", "this plan")
    _check_loads(run, output)
    _check_finished(run, output.finished_req_ids)
    _check_hints(run, output)


def check_answer(run: Run, answer: dict[int, EngineCoreOutputs], asked: Asked) -> None:
    """Check that an answer has outputs of requests of its frame only, once each, and agrees with
    the state.

    Raises:
        EngineFault: naming the field.
    """
    for client, core in answer.items():
        if client != 0:
            raise EngineFault(f"outputs for client {client}; all requests are of client 0")
        _check_unused(core, "this answer")
        _check_once("outputs", [row.request_id for row in core.outputs])
        for row in core.outputs:
            _check_known("outputs", (row.request_id,), asked.names, "which is not in this frame")
            _check_unused(row, f"the output of {row.request_id!r}")
            if run.store is None:
                where = f"the output of {row.request_id!r}"
                _check_no_store(row, "num_external_computed_tokens", where)
            _check_moments(run, row)
            _check_sources(run, row, asked)
            if not run.known[row.request_id].request.resumable:  # a session keeps its last one
                _check_stop_reason(row)
        if core.scheduler_stats is not None:
            _check_unused(core.scheduler_stats, "this answer")
            if run.store is None:
                _check_no_store(core.scheduler_stats, "connector_prefix_cache_stats", "this answer")
            _check_stats(run, core.scheduler_stats)
            _check_counts(core.scheduler_stats, asked)


def check_state(run: Run) -> None:
    """Check that the state holds nothing of requests that are gone.

    Raises:
        EngineFault: naming the field.
    """
    scheduler = run.scheduler
    for manager in run.managers:
        tables = (name for name, blocks in manager.req_to_blocks.items() if blocks)
        settled = manager.num_cached_block
        _check_known("req_to_blocks", tables, scheduler.requests, "which is gone")
        _check_known("num_cached_block", settled, scheduler.requests, "which is gone")
        for field in ("last_state_block_idx", "_allocated_block_reqs"):  # of recurrent groups
            names = getattr(manager, field, ())
            _check_known(field, names, scheduler.requests, "which is gone")
    for identifier, holders in getattr(scheduler.encoder_cache_manager, "cached", {}).items():
        _check_known(
            f"encoder cache entry {identifier!r}", holders, scheduler.requests, "which is gone"
        )
    pool = scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    _check_once("free_block_queue", free)
    queued = [*scheduler.waiting, *run.get_skipped(), *scheduler.running]
    names = [request.request_id for request in queued]
    _check_once("waiting, skipped_waiting and running", names)
    _check_known("waiting, skipped_waiting or running", names, scheduler.requests, "which is gone")


def _check_unused(record: Any, where: str) -> None:
    for field in UNUSED_HERE[type(record)]:
        value = getattr(record, field)
        if not is_empty(value):
            raise EngineFault(f"{field} in {where}: {value!r}, although no config here uses it")


def _check_no_store(record: Any, field: str, where: str) -> None:
    value = getattr(record, field, None)
    if not is_empty(value):
        raise EngineFault(f"{field} in {where}: {value!r}, and there is no connector")


def _check_rows(run: Run, output: SchedulerOutput, new_ids: list[v.RequestId]) -> None:
    cached_ids = output.scheduled_cached_reqs.req_ids
    names, counts = [*new_ids, *cached_ids], output.num_scheduled_tokens
    _check_once("scheduled_new_reqs and scheduled_cached_reqs", names)
    _check_known("scheduled_new_reqs", new_ids, run.scheduler.requests, "which is not there")
    _check_known("scheduled_cached_reqs", cached_ids, run.scheduler.requests, "which is not there")
    _check_known("scheduled_new_reqs", new_ids, counts, "which has no tokens in this plan")
    _check_known("scheduled_cached_reqs", cached_ids, counts, "which has no tokens in this plan")
    _check_known("num_scheduled_tokens", counts, names, "which has no row in this plan")
    total = output.total_num_scheduled_tokens
    if total != sum(counts.values()):
        raise EngineFault(
            f"total_num_scheduled_tokens is {total}; its rows have {sum(counts.values())}"
        )


def _check_new_row(run: Run, new: NewRequestData, separate_names: bool) -> None:
    """Check that the worker gets a new request as it was submitted."""
    request = run.known[new.req_id].request
    items = request.items if run.config.encoder_cache_size else ()
    lora = build_lora(request.adapter, run.lora_ids, separate_names)
    seen_lora = new.lora_request and asdict(new.lora_request)
    for field, seen, expected in (
        ("prompt_token_ids", tuple(new.prompt_token_ids or ()), request.prompt_token_ids),
        ("lora_request", seen_lora, lora and asdict(lora)),
        ("mm_features", read_features(new.mm_features), items),
        (
            "sampling_params",
            new.sampling_params,
            run.scheduler.requests[new.req_id].sampling_params,
        ),
    ):
        if seen != expected:
            raise EngineFault(f"{field} of new row {new.req_id!r} is {seen!r}, not {expected!r}")


def _check_encoder_inputs(run: Run, output: SchedulerOutput) -> None:
    """Check that each item to encode is an item of a request with a row; without an encoder there
    must be none.
    """
    inputs = output.scheduled_encoder_inputs
    _check_known(
        "scheduled_encoder_inputs",
        inputs,
        output.num_scheduled_tokens if run.config.encoder_cache_size else (),
        "which has no row in this plan, or no encoder",
    )
    for name, indices in inputs.items():
        _check_once(f"scheduled_encoder_inputs of {name!r}", indices)
        of_request = range(len(run.known[name].request.items))
        _check_known(
            f"scheduled_encoder_inputs of {name!r}",
            indices,
            of_request,
            "which the request does not have",
        )
    if not run.config.encoder_cache_size:
        for field in ("free_encoder_mm_hashes", "ec_connector_metadata"):
            value = getattr(output, field, None)
            if not is_empty(value):
                raise EngineFault(f"{field} in this plan: {value!r}, and there is no encoder")


def _check_parallel(cached: CachedRequestData, config: v.Config) -> None:
    """Check that each list of the cached rows has one entry for each row.

    Source: `CachedRequestData`.

    Sampled tokens are listed in a pipeline only: its first stage does not know them.
    """
    lists_tokens = config.max_frames_in_flight > 1 and not config.async_scheduling
    for field in CachedRequestData.__annotations__:
        value, count = getattr(cached, field), len(cached.req_ids)
        if not isinstance(value, list) or (field == "new_token_ids" and not lists_tokens):
            continue
        if len(value) != count:
            raise EngineFault(
                f"scheduled_cached_reqs.{field} has {len(value)} entries for {count} requests"
            )


def _check_finished(run: Run, finished: Iterable[v.RequestId]) -> None:
    names = list(finished)
    _check_once("finished_req_ids", names)
    _check_known("finished_req_ids", names, run.ended, "which has not ended since the last plan")
    run.ended.clear()


def _check_hints(run: Run, output: SchedulerOutput) -> None:
    """Check the flags and numbers of a plan that follow from its rows."""
    constrained = [
        name for name in output.num_scheduled_tokens if run.known[name].request.structured_output
    ]
    sampling, pending = _list_sampling(run, output, constrained)
    for field, names in (
        ("has_structured_output_requests", sampling),
        ("pending_structured_output_tokens", pending),
    ):
        seen = getattr(output, field, False)
        if seen and not constrained:
            raise EngineFault(f"{field} in this plan: no row has a grammar")
        if RELEASE.has_frame_masks and seen != bool(names):
            raise EngineFault(f"{field} in this plan is {seen}, and it is so of {names}")
    num_drafts = getattr(output, "num_spec_tokens_to_schedule", None)
    if num_drafts not in (None, run.config.num_speculative_tokens):
        raise EngineFault(
            f"num_spec_tokens_to_schedule is {num_drafts}, "
            f"not {run.config.num_speculative_tokens} as in the config"
        )


def _list_sampling(
    run: Run, output: SchedulerOutput, names: Iterable[v.RequestId]
) -> tuple[list[v.RequestId], list[v.RequestId]]:
    """Return those of these requests whose row samples, and among them those for which older
    frames still deliver tokens.

    Both are empty for a release without `is_prefill_chunk`.
    """
    if not RELEASE.has_chunk_flag:
        return [], []
    requests, drafts = run.scheduler.requests, output.scheduled_spec_decode_tokens
    sampling = [name for name in names if not requests[name].is_prefill_chunk]
    pending = [
        name
        for name in sampling
        if requests[name].num_output_placeholders > 1 + len(drafts.get(name, ()))
    ]
    return sampling, pending


def _check_stop_reason(row: EngineCoreOutput) -> None:
    """Check that a stop reason is the token that stopped the request, or the word for a
    repetition.
    """
    reason, has_ended = row.stop_reason, row.finish_reason is not None
    if reason is not None and not (has_ended and isinstance(reason, int | str)):
        raise EngineFault(f"stop_reason of {row.request_id!r} is {reason!r}, and it has not ended")
    if isinstance(reason, str) and reason != REPETITION:
        raise EngineFault(f"stop_reason of {row.request_id!r} is {reason!r}, not {REPETITION!r}")


def _check_moments(run: Run, row: EngineCoreOutput) -> None:
    """Check that an output row names what has happened to its request since the row before.

    When it happened is a reading of a clock, and not checked.
    """
    known = run.known[row.request_id]
    seen = [event.type.name for event in row.events or ()]
    expected, known.moments = known.moments, []
    if seen != expected:
        raise EngineFault(f"events in the output of {row.request_id!r} are {seen}, not {expected}")


def _check_sources(run: Run, row: EngineCoreOutput, asked: Asked) -> None:
    """Check the counts of an output row that say where the tokens of its prompt came from.

    Older releases keep them in the request. The output of a request that fails lacks the tokens
    that a store loaded for it.
    """
    if RELEASE.has_prefill_stats:
        _check_prefill(run, row, asked.prefills.get(row.request_id))
        return
    request = asked.requests[row.request_id]
    for field in ("num_cached_tokens", "num_external_computed_tokens"):
        seen, kept = getattr(row, field, 0), getattr(request, field, 0)
        is_error = str(row.finish_reason) == v.FinishReason.ERROR.value
        if seen != kept and not (is_error and not seen and field != "num_cached_tokens"):
            raise EngineFault(
                f"{field} in the output of {row.request_id!r} is {seen}, and its request has {kept}"
            )


def _check_prefill(run: Run, row: EngineCoreOutput, prefill: Prefill | None) -> None:
    """Check that the first output of a request, and no other, has counts of its prefill, and that
    these agree with one another, with its prompt and with its published blocks.

    Cached and external tokens are compared with the specification's. Source: `PrefillStats`.
    """
    stats, where = row.prefill_stats, f"the output of {row.request_id!r}"
    is_failure = not row.new_token_ids and str(row.finish_reason) == v.FinishReason.ERROR.value
    if prefill is None or is_failure:
        if stats is not None:
            raise EngineFault(
                f"prefill_stats in {where}: {stats!r}, and it is not its first output"
            )
        return
    if stats is None:
        raise EngineFault(f"prefill_stats in {where} is missing, and it is its first output")
    if run.store is None:
        _check_no_store(stats, "num_external_cached_tokens", f"prefill_stats of {where}")
    num_cached, num_prompt = stats.num_cached_tokens, prefill.num_prompt_tokens
    num_published = min(prefill.count_published(run), num_prompt)
    for field, expected in (
        ("num_prompt_tokens", num_prompt),
        ("num_computed_tokens", num_prompt - num_cached),
        ("num_local_cached_tokens", num_cached - stats.num_external_cached_tokens),
        ("num_cache_creation_tokens", max(num_published - num_cached, 0)),
    ):
        seen = getattr(stats, field, expected)  # older releases do not count what is published
        if seen != expected:
            raise EngineFault(
                f"prefill_stats.{field} in {where} is {seen}, and it follows that it is {expected}"
            )


def _get_end(run: Run, block: Any, size: int) -> int:
    """Return the number of tokens from the start of a prompt to the end of a block; 0 if the block
    has no key.
    """
    return 0 if block.block_hash is None else (run.get_key(block.block_hash).index + 1) * size


def _is_dropped(request: VllmRequest) -> bool:
    """Return whether the tokens of a request's next frame are dropped; newer releases know."""
    return bool(
        RELEASE.has_sound_preemption
        and request.num_stale_output_tokens
        and request.drop_stale_output
    )


def _check_loads(run: Run, output: SchedulerOutput) -> None:
    """Check that a plan says whether one of its rows needs a synchronous load; newer releases have
    the flag.
    """
    if not hasattr(output, "has_sync_kv_loads"):
        return
    loads = () if run.store is None else output.kv_connector_metadata.loads
    is_sync = any(not load.is_async for load in loads)
    if output.has_sync_kv_loads != is_sync:
        raise EngineFault(
            f"has_sync_kv_loads in this plan is {output.has_sync_kv_loads}, and its loads are "
            f"{list(loads)}"
        )


def _check_fetches(run: Run, stages: Mapping[str, int] | None) -> None:
    """Check the number of requests in each stage of an asynchronous load; newer releases count
    them.
    """
    if stages is None:
        return
    counts = dict.fromkeys(STAGES, 0)
    known = {} if run.store is None else run.store.stages
    for name, request in run.get_unfinished().items():
        is_parked = request.status.name == PARKED
        is_under_way = is_parked and name not in run.scheduler.finished_recving_kv_req_ids
        stage = "in_progress" if is_under_way else known.get(name)
        if stage is not None:
            counts[stage] += 1
    if stages != counts:
        raise EngineFault(
            f"num_kv_fetch_reqs_by_stage in this answer is {dict(stages)}, and it was {counts}"
        )


def _check_stats(run: Run, stats: SchedulerStats) -> None:
    scheduler = run.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    cache = scheduler.encoder_cache_manager
    num_kept = cache.cache_size - cache.num_free_slots
    num_usable = pool.num_gpu_blocks - 1  # the null block belongs to no request
    _check_fetches(run, getattr(stats, "num_kv_fetch_reqs_by_stage", None))
    num_waiting = stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0)
    for field, seen, expected in (
        ("num_running_reqs", stats.num_running_reqs, len(scheduler.running)),
        ("num_waiting_reqs", num_waiting, len(scheduler.waiting) + len(run.get_skipped())),
        (
            "encoder_cache_usage",
            getattr(stats, "encoder_cache_usage", 0.0),
            num_kept / cache.cache_size
            if hasattr(stats, "encoder_cache_usage") and num_kept
            else 0,
        ),
        ("kv_cache_usage", stats.kv_cache_usage, 1 - pool.get_num_free_blocks() / num_usable),
    ):
        if abs(seen - expected) > 1e-9:
            raise EngineFault(f"{field} in this answer is {seen}, and the state says {expected}")


def _check_counts(stats: SchedulerStats, asked: Asked) -> None:
    """Check that the counters in an answer are those of the caches, and those of the frame's rows.

    The number of drafts and of accepted ones is compared with the specification's as well, in
    releases that leave out rows whose tokens are dropped. After a failed load counters of drafts
    are not checked here: the release leaves out rows of the load's blocks.
    """
    for field, kept in asked.counts.items():
        if getattr(stats, field) != kept:
            raise EngineFault(
                f"{field} in this answer is {getattr(stats, field)}, and {kept} was counted"
            )
    draft_stats, due = stats.spec_decoding_stats, {} if asked.has_failures else asked.count_drafts()
    for field, expected in due.items():
        seen = getattr(draft_stats, field, 0)  # without statistics nothing was counted
        if seen != expected:
            name = f"spec_decoding_stats.{field}"
            name = f"{COUNTED_AS[field]} ({name})" if field in COUNTED_AS else name
            raise EngineFault(f"{name} in this answer is {seen}, and its rows have {expected}")


def _check_known(field: str, names: Iterable[Any], known: Collection[Any], problem: str) -> None:
    for name in names:
        if name not in known:
            raise EngineFault(f"{field} names {name!r}, {problem}")


def _check_once(field: str, names: Sequence[Any]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise EngineFault(f"{field} name {name!r} {count} times")
