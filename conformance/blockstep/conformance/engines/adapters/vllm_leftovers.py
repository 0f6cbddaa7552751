"""What vLLM said, held to itself: each field is used up, or a finding that names it (D16).

A plan may hold something for somebody without a row, an answer something for somebody who was not
asked, the state something of somebody who is gone. Translating would pass over all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_build import RELEASE
from blockstep.conformance.engines.adapters.vllm_fields import (
    UNUSED,
    find_unknown,
    get_unknown_note,
    is_empty,
)
from blockstep.conformance.engines.adapters.vllm_items import read_features
from blockstep.conformance.engines.adapters.vllm_names import get_lora_name
from blockstep.conformance.engines.adapters.vllm_state import Run
from blockstep.spec import vocabulary as v

SAID = (
    *(SchedulerOutput, NewRequestData, CachedRequestData),
    *(EngineCoreOutputs, EngineCoreOutput, SchedulerStats),
)
UNUSED_HERE = {
    kind: tuple(name for name in kind.__annotations__ if name in UNUSED[kind.__name__])
    for kind in SAID
}
"""Fields of this release in which nothing may be."""
PARKED = v.Status.WAITING_FOR_REMOTE_KVS.name
NOTE = get_unknown_note(
    RELEASE.version,
    tuple(name for kind in SAID for name in find_unknown(kind.__name__, kind.__annotations__)),
)
"""What a run says of fields that this release has and the adapter does not know."""


def check_plan(run: Run, output: SchedulerOutput, separate_names: bool) -> None:
    """See that everything in a plan belongs to a row of it, and that rows are told as one.

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
    _check_parallel(cached)
    rows = output.num_scheduled_tokens.keys()
    told = {
        "scheduled_spec_decode_tokens": output.scheduled_spec_decode_tokens,
        "structured_output_request_ids": getattr(output, "structured_output_request_ids", None),
    }
    for field, names in told.items():
        _check_known(field, names or (), rows, "who has no row in this plan")
    if RELEASE.has_told_rows:
        for field in ("resumed_req_ids", "all_token_ids"):
            names = getattr(cached, field)
            _check_known(
                f"scheduled_cached_reqs.{field}", names, cached.req_ids, "who is not there"
            )
    if RELEASE.has_told_preemptions:
        _check_known(
            "preempted_req_ids", output.preempted_req_ids or (), run.known, "who is unknown"
        )
    _check_encoder_inputs(run, output)
    if run.store is None:
        _check_no_store(output, "kv_connector_metadata", "this plan")
    _check_loads(run, output)
    _check_finished(run, output.finished_req_ids)
    _check_hints(run, output)


def check_answer(
    run: Run, answer: dict[int, EngineCoreOutputs], asked: Collection[v.RequestId]
) -> None:
    """See that an answer speaks of those whom its frame had, once each, and of the state as it is.

    Raises:
        EngineFault: naming the field.
    """
    for client, core in answer.items():
        if client != 0:
            raise EngineFault(f"outputs for client {client}; all requests are of client 0")
        _check_unused(core, "this answer")
        _check_once("outputs", [row.request_id for row in core.outputs])
        for row in core.outputs:
            _check_known("outputs", (row.request_id,), asked, "whom this frame did not have")
            _check_unused(row, f"the output of {row.request_id!r}")
            if run.store is None:
                where = f"the output of {row.request_id!r}"
                _check_no_store(row, "num_external_computed_tokens", where)
            if not run.known[row.request_id].request.resumable:  # a session keeps its last one
                _check_stop_reason(row)
        if core.scheduler_stats is not None:
            _check_unused(core.scheduler_stats, "this answer")
            if run.store is None:
                _check_no_store(core.scheduler_stats, "connector_prefix_cache_stats", "this answer")
            _check_stats(run, core.scheduler_stats)


def check_state(run: Run) -> None:
    """See that nobody is remembered who is gone.

    Raises:
        EngineFault: naming the field.
    """
    scheduler = run.scheduler
    for manager in run.managers:
        tables = (name for name, blocks in manager.req_to_blocks.items() if blocks)
        settled = manager.num_cached_block
        _check_known("req_to_blocks", tables, scheduler.requests, "who is gone")
        _check_known("num_cached_block", settled, scheduler.requests, "who is gone")
        for field in ("last_state_block_idx", "_allocated_block_reqs"):  # of recurrent groups
            names = getattr(manager, field, ())
            _check_known(field, names, scheduler.requests, "who is gone")
    for identifier, holders in getattr(scheduler.encoder_cache_manager, "cached", {}).items():
        _check_known(
            f"encoder cache entry {identifier!r}", holders, scheduler.requests, "who is gone"
        )
    pool = scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    _check_once("free_block_queue", free)
    queued = [*scheduler.waiting, *run.get_skipped(), *scheduler.running]
    names = [request.request_id for request in queued]
    _check_once("waiting, skipped_waiting and running", names)
    _check_known("waiting, skipped_waiting or running", names, scheduler.requests, "who is gone")


def _check_unused(said: Any, where: str) -> None:
    for field in UNUSED_HERE[type(said)]:
        value = getattr(said, field)
        if not is_empty(value):
            raise EngineFault(f"{field} in {where}: {value!r}, for nobody who asked for it")


def _check_no_store(said: Any, field: str, where: str) -> None:
    value = getattr(said, field, None)
    if not is_empty(value):
        raise EngineFault(f"{field} in {where}: {value!r}, and there is no connector")


def _check_rows(run: Run, output: SchedulerOutput, new_ids: list[v.RequestId]) -> None:
    cached_ids = output.scheduled_cached_reqs.req_ids
    names, counts = [*new_ids, *cached_ids], output.num_scheduled_tokens
    _check_once("scheduled_new_reqs and scheduled_cached_reqs", names)
    _check_known("scheduled_new_reqs", new_ids, run.scheduler.requests, "who is not there")
    _check_known("scheduled_cached_reqs", cached_ids, run.scheduler.requests, "who is not there")
    _check_known("scheduled_new_reqs", new_ids, counts, "who has no tokens in this plan")
    _check_known("scheduled_cached_reqs", cached_ids, counts, "who has no tokens in this plan")
    _check_known("num_scheduled_tokens", counts, names, "who has no row in this plan")
    total = output.total_num_scheduled_tokens
    if total != sum(counts.values()):
        raise EngineFault(
            f"total_num_scheduled_tokens is {total}; its rows have {sum(counts.values())}"
        )


def _check_new_row(run: Run, new: NewRequestData, separate_names: bool) -> None:
    """What the worker is told of a newcomer is what was submitted."""
    request = run.known[new.req_id].request
    items = request.items if run.config.encoder_cache_size else ()
    lora = None if request.adapter is None else get_lora_name(request.adapter, separate_names)
    told = None if new.lora_request is None else new.lora_request.lora_name
    for field, seen, expected in (
        ("prompt_token_ids", tuple(new.prompt_token_ids or ()), request.prompt_token_ids),
        ("lora_request", told, lora),
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
    """What is to be encoded is of a row, and is an item of it; without an encoder there is none."""
    inputs = output.scheduled_encoder_inputs
    _check_known(
        "scheduled_encoder_inputs",
        inputs,
        output.num_scheduled_tokens if run.config.encoder_cache_size else (),
        "who has no row in this plan, or no encoder",
    )
    for name, indices in inputs.items():
        _check_once(f"scheduled_encoder_inputs of {name!r}", indices)
        of_request = range(len(run.known[name].request.items))
        _check_known(f"scheduled_encoder_inputs of {name!r}", indices, of_request, "no item of it")
    if not run.config.encoder_cache_size:
        for field in ("free_encoder_mm_hashes", "ec_connector_metadata"):
            value = getattr(output, field, None)
            if not is_empty(value):
                raise EngineFault(f"{field} in this plan: {value!r}, and there is no encoder")


def _check_parallel(cached: CachedRequestData) -> None:
    """Source: `CachedRequestData`: an entry for each of its requests in each of its lists."""
    for field in CachedRequestData.__annotations__:
        value, count = getattr(cached, field), len(cached.req_ids)
        if not isinstance(value, list) or (field == "new_token_ids" and not value):
            continue  # outside of a pipeline nobody is told new tokens
        if len(value) != count:
            raise EngineFault(
                f"scheduled_cached_reqs.{field} has {len(value)} entries for {count} requests"
            )


def _check_finished(run: Run, finished: Iterable[v.RequestId]) -> None:
    names = list(finished)
    _check_once("finished_req_ids", names)
    _check_known("finished_req_ids", names, run.ended, "who has not ended since the last plan")
    run.ended.clear()


def _check_hints(run: Run, output: SchedulerOutput) -> None:
    """Flags and numbers that follow from the rows."""
    has_grammar = any(
        run.known[name].request.structured_output for name in output.num_scheduled_tokens
    )
    for field in ("has_structured_output_requests", "pending_structured_output_tokens"):
        if getattr(output, field, False) and not has_grammar:
            raise EngineFault(f"{field} in this plan: no row has a grammar")
    num_drafts = getattr(output, "num_spec_tokens_to_schedule", None)
    if num_drafts not in (None, run.config.num_speculative_tokens):
        raise EngineFault(
            f"num_spec_tokens_to_schedule is {num_drafts}, "
            f"not {run.config.num_speculative_tokens} as in the config"
        )


def _check_stop_reason(row: EngineCoreOutput) -> None:
    """A reason is the token that stopped it, or the word for a repetition."""
    reason, is_told = row.stop_reason, row.finish_reason is not None
    if reason is not None and not (is_told and isinstance(reason, int | str)):
        raise EngineFault(f"stop_reason of {row.request_id!r} is {reason!r}, and it has not ended")


def _check_loads(run: Run, output: SchedulerOutput) -> None:
    """A newer release tells whether a row waits for a load that comes at once."""
    if not hasattr(output, "has_sync_kv_loads"):
        return
    loads = () if run.store is None else output.kv_connector_metadata.loads
    is_sync = any(not load.is_async for load in loads)
    if output.has_sync_kv_loads != is_sync:
        raise EngineFault(
            f"has_sync_kv_loads in this plan is {output.has_sync_kv_loads}, and the connector was "
            f"told of {list(loads)}"
        )


def _check_fetches(run: Run, stages: Mapping[str, int] | None) -> None:
    """A newer release counts who waits for a load, by what the load has come to."""
    scheduler = run.scheduler
    if stages is None:
        return
    parked = {one.request_id for one in run.get_skipped() if one.status.name == PARKED}
    num_under_way = len(parked - scheduler.finished_recving_kv_req_ids)
    if stages.get("in_progress", 0) != num_under_way:
        raise EngineFault(
            f"num_kv_fetch_reqs_by_stage in this answer is {dict(stages)}, and {num_under_way} "
            f"loads are under way"
        )
    num_waiting = len(scheduler.waiting) + len(run.get_skipped())
    if sum(stages.values()) > num_waiting:
        raise EngineFault(
            f"num_kv_fetch_reqs_by_stage in this answer is {dict(stages)}, and {num_waiting} wait"
        )


def _check_stats(run: Run, stats: SchedulerStats) -> None:
    scheduler = run.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    cache = scheduler.encoder_cache_manager
    num_kept = cache.cache_size - cache.num_free_slots
    num_usable = pool.num_gpu_blocks - 1  # the null block is nobody's
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


def _check_known(field: str, names: Iterable[Any], known: Collection[Any], who: str) -> None:
    for name in names:
        if name not in known:
            raise EngineFault(f"{field} names {name!r}, {who}")


def _check_once(field: str, names: Sequence[Any]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise EngineFault(f"{field} name {name!r} {count} times")
