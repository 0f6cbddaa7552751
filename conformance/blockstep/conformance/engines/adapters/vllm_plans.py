"""The plans and outputs of vLLM, translated into the vocabulary without repair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_build import RELEASE, read_embeds
from blockstep.conformance.engines.adapters.vllm_grammars import read_allowed
from blockstep.conformance.engines.adapters.vllm_runner import (
    Entering,
    read_resumed_rows,
    split_new_rows,
)
from blockstep.conformance.engines.adapters.vllm_state import Run
from blockstep.spec import vocabulary as v

if RELEASE.has_encoder:
    from blockstep.conformance.engines.adapters.vllm_encoder import read_inputs
if RELEASE.has_offers:
    from blockstep.conformance.engines.adapters.vllm_ec_connector import read_loads
if RELEASE.has_store:
    from blockstep.conformance.engines.adapters.vllm_store import read_kv_loads


def read_plan(
    run: Run,
    frame_id: v.FrameId,
    output: SchedulerOutput,
    preempted: set[v.RequestId],
    entering: Entering,
) -> v.Plan:
    """Return the plan in our words, the same for either model runner.

    Source: `SchedulerOutput`.
    """
    new, resumed = split_new_rows(run, output, entering)
    has_masks, is_pending = _read_mask_flags(run, output)
    inputs: tuple[v.EncoderInputs, ...] = ()
    loads: tuple[v.EncoderInputs, ...] = ()
    if run.config.encoder_cache_size:
        inputs = read_inputs(output.scheduled_encoder_inputs)
        loads = read_loads(output.ec_connector_metadata) if RELEASE.has_offers else ()
    return v.Plan(
        frame_id=frame_id,
        new=_read_new_rows(run, output, new),
        cached=_read_cached_rows(run, output) + read_resumed_rows(output, resumed),
        finished_req_ids=tuple(sorted(output.finished_req_ids)),
        preempted_req_ids=tuple(sorted(preempted)),
        num_common_prefix_blocks=tuple(output.num_common_prefix_blocks),
        new_block_ids_to_zero=tuple(getattr(output, "new_block_ids_to_zero", None) or ()),
        scheduled_encoder_inputs=inputs,
        external_encoder_inputs=loads,
        free_encoder_mm_hashes=tuple(output.free_encoder_mm_hashes),
        kv_loads=() if run.store is None else read_kv_loads(output.kv_connector_metadata),
        has_structured_output_requests=has_masks,
        pending_structured_output_tokens=is_pending,
    )


def _read_mask_flags(run: Run, output: SchedulerOutput) -> tuple[bool, bool]:
    """Return whether a mask is needed, and whether it must wait, considering requests with a
    grammar.

    A request without a grammar of its own may have structured output that allows every token; vLLM
    has no such request, but its flags count it.
    """
    requests = run.scheduler.requests
    masked = [
        name
        for name in output.num_scheduled_tokens
        if run.known[name].request.grammar is not None and not requests[name].is_prefill_chunk
    ]
    if not masked:
        return False, False
    is_pending = any(
        requests[name].num_output_placeholders > 1 + len(_get_drafts(output, name))
        for name in masked
    )
    return (
        output.has_structured_output_requests,
        is_pending and output.pending_structured_output_tokens,
    )


def _read_new_rows(
    run: Run, output: SchedulerOutput, entered: list[NewRequestData]
) -> tuple[v.NewRow, ...]:
    """Return the rows of requests that the worker does not have. Source: `NewRequestData`."""
    rows = []
    for new in entered:
        request, embeds = run.known[new.req_id].request, read_embeds(new.prompt_embeds)
        row = v.NewRow(
            request=request
            if embeds == request.prompt_embeds
            else replace(request, prompt_embeds=embeds),
            block_ids=tuple(map(tuple, new.block_ids)),
            num_computed_tokens=new.num_computed_tokens,
            num_scheduled_tokens=output.num_scheduled_tokens[new.req_id],
        )
        drafts = _get_drafts(output, new.req_id)
        if drafts != row.draft_token_ids:
            raise EngineFault(
                f"new request {new.req_id!r} is planned with {row.num_scheduled_tokens} tokens "
                f"from position {row.num_computed_tokens}, the last of them drafts: {drafts}"
            )
        rows.append(row)
    return tuple(rows)


def _read_cached_rows(run: Run, output: SchedulerOutput) -> tuple[v.CachedRow, ...]:
    """Return the rows of requests that the worker has already.

    Source: `CachedRequestData`, whose parallel lists become rows.
    """
    rows = []
    cached = output.scheduled_cached_reqs
    no_blocks = ((),) * len(run.managers)
    for index, name in enumerate(cached.req_ids):
        block_ids = cached.new_block_ids[index]
        start, drafts = cached.num_computed_tokens[index], _get_drafts(output, name)
        num_scheduled = output.num_scheduled_tokens[name]
        if cached.new_token_ids:
            # In a pipeline its first stage is told which tokens were sampled in the last one.
            sampled = cached.new_token_ids[index]
            known = run.scheduler.requests[name].all_token_ids[start : start + num_scheduled]
            if sampled != known:
                raise EngineFault(
                    f"{name!r} is to run {sampled} from position {start}, not {known}"
                )
        resumed, token_ids, num_outputs = _get_late_outputs(run, output, index)
        rows.append(
            v.CachedRow(
                request_id=name,
                resumed=resumed,
                new_block_ids=no_blocks if block_ids is None else tuple(map(tuple, block_ids)),
                all_token_ids=None if token_ids is None else tuple(token_ids),
                num_computed_tokens=start,
                num_output_tokens=num_outputs,
                num_scheduled_tokens=num_scheduled,
                draft_token_ids=drafts,
            )
        )
    return tuple(rows)


def _get_drafts(output: SchedulerOutput, name: v.RequestId) -> v.TokenIds:
    return tuple(output.scheduled_spec_decode_tokens.get(name, ()))


def _get_late_outputs(
    run: Run, output: SchedulerOutput, index: int
) -> tuple[bool, list[int] | None, int]:
    """Return whether a row is resumed, its tokens if the worker may lack some, and its number of
    outputs.

    If a plan does not contain the tokens or the outputs, the worker uses what it has seen before;
    both follow from the request and from the last plan.
    """
    cached = output.scheduled_cached_reqs
    name = cached.req_ids[index]
    request = run.scheduler.requests[name]
    token_ids = None if name in run.planned else list(request.all_token_ids)
    if run.has_second_runner:
        return False, token_ids, cached.num_output_tokens[index]
    if RELEASE.has_row_outputs:
        resumed = name in cached.resumed_req_ids
        return resumed, cached.all_token_ids.get(name), cached.num_output_tokens[index]
    return cached.resumed_from_preemption[index], token_ids, request.num_output_tokens


def read_outputs(run: Run, core: EngineCoreOutputs) -> list[v.OutputRow]:
    """Return what one client gets in a step. Source: `EngineCoreOutput`."""
    return [
        v.OutputRow(
            request_id=row.request_id,
            new_token_ids=tuple(row.new_token_ids),
            finish_reason=None
            if row.finish_reason is None
            else v.FinishReason(str(row.finish_reason)),
            stop_token_id=row.stop_reason if isinstance(row.stop_reason, int) else None,
            num_cached_tokens=_get_cached_tokens(run, row),
            num_external_tokens=_get_external_tokens(run, row),
        )
        for row in core.outputs
    ]


def _get_cached_tokens(run: Run, row: EngineCoreOutput) -> int:
    """Return the cached tokens of a row: from the row itself, or from the first row of its
    request; 0 if the row is of no request, which `check_answer` reports.
    """
    if not RELEASE.has_prefill_stats:
        return int(row.num_cached_tokens)
    known = run.known.get(row.request_id)
    if known is None:
        return 0
    if row.prefill_stats is not None:
        known.has_reported_prefill = True
        known.num_cached_tokens = row.prefill_stats.num_cached_tokens
    # A request that fails before it ever ran has no such count.
    return max(known.num_cached_tokens, 0)


def _get_external_tokens(run: Run, row: EngineCoreOutput) -> int | None:
    """Return the tokens of a row that were loaded from a store: from the row itself, or from the
    first row of its request; None without a store. Of no request: as `_get_cached_tokens`.
    """
    if run.store is None:
        return None
    if not RELEASE.has_prefill_stats:
        return int(row.num_external_computed_tokens)
    known = run.known.get(row.request_id)
    if known is None:
        return 0
    if row.prefill_stats is not None:
        known.num_external_tokens = row.prefill_stats.num_external_cached_tokens
    return known.num_external_tokens


def read_mask(run: Run, frame: SchedulerOutput, output: Any) -> v.GrammarOutput:
    """Return the mask of a frame: for each request one row per draft, and one more.

    A request whose grammar allows every token has rows in vLLM and none here; these rows must be
    full. Source: `GrammarOutput`.

    Raises:
        EngineFault: rows are missing or left over, or not full where all is allowed, or the counts
            of drafts are others than the frame's.
    """
    if output is None:
        return v.GrammarOutput()
    masks = list(map(read_allowed, output.grammar_bitmask.tolist()))
    rows = []
    for name in output.structured_output_request_ids:
        drafts = _get_drafts(frame, name)
        used = 1 + len(drafts)
        # Unused rows may hold anything.
        held = 1 + run.config.num_speculative_tokens if RELEASE.has_fixed_mask_rows else used
        allowed, masks = tuple(masks[:held][:used]), masks[held:]
        if len(allowed) < used:
            raise EngineFault(f"grammar_bitmask has {len(allowed)} rows of {name!r}, not {used}")
        if run.known[name].request.grammar is not None:
            rows.append(v.GrammarRow(name, allowed, drafts))
        elif any(row is not None for row in allowed):
            raise EngineFault(f"grammar_bitmask forbids {name!r} something; it has no grammar")
    if masks:
        raise EngineFault(f"grammar_bitmask has {len(masks)} rows more than its requests ask for")
    _check_acceptable_drafts(frame, output)
    return v.GrammarOutput(tuple(rows))


def _check_acceptable_drafts(frame: SchedulerOutput, output: Any) -> None:
    """Check the number of drafts of each request that its grammar took, which are those before the
    first -1; newer releases count them for the sampler.
    """
    if not hasattr(output, "num_acceptable_drafts"):
        return
    counts = []
    for name in output.structured_output_request_ids:
        drafts = _get_drafts(frame, name)
        counts.append(next((place for place, it in enumerate(drafts) if it < 0), len(drafts)))
    if output.num_acceptable_drafts != counts:
        raise EngineFault(
            f"num_acceptable_drafts in this mask is {output.num_acceptable_drafts}, and the frame "
            f"has {counts}"
        )
