"""The released scheduler of vLLM under the clock: its bare `schedule` and `update_from_output`.

Scheduler and requests are built as the adapter builds them (`vllm_build`). What a worker would
answer is built before the clock runs. Block hashing of a prompt is part of building a request here,
as in vLLM, and so is not timed; what fills later is hashed inside `update_from_output`.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.conformance.adapters.vllm import VllmEngine
from blockstep.conformance.adapters.vllm_build import build_request
from blockstep.conformance.bench.sides import Decision, Delivered, PlannedRow, clock
from blockstep.spec.vocabulary import Config, Request, RequestId, TokenIds

try:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
except ImportError as error:  # pragma: no cover - the adapter has said so already
    raise ImportError("vllm: not installed") from error


class VllmSide:
    """vLLM's scheduler; what it builds are objects, so there is one reading."""

    readings: tuple[str, ...] = ("objects",)

    def __init__(self, config: Config) -> None:
        engine = VllmEngine(config)
        self.scheduler = engine.scheduler
        self.hasher = engine.hasher
        self._frames: list[SchedulerOutput] = []

    def submit(self, request: Request) -> None:
        """See `Side`."""
        self.scheduler.add_request(build_request(request, self.hasher, {}, separate_names=True))

    def schedule(self) -> tuple[tuple[float, ...], Decision]:
        """See `Side`."""
        start = clock()
        output = self.scheduler.schedule()
        seconds = clock() - start
        if output.num_scheduled_tokens:
            self._frames.append(output)
        return (seconds,), _decision_of(output)

    def commit(self, tokens: Sequence[TokenIds]) -> tuple[tuple[float, ...], Delivered]:
        """See `Side`."""
        output = self._frames.pop(0)
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(map(list, tokens)),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        start = clock()
        answer = self.scheduler.update_from_output(output, result)
        seconds = clock() - start
        delivered = tuple(
            (
                row.request_id,
                tuple(row.new_token_ids),
                None if row.finish_reason is None else str(row.finish_reason),
            )
            for core in answer.values()
            for row in core.outputs
        )
        return (seconds,), delivered

    def propose(self, drafts: Sequence[tuple[RequestId, TokenIds]]) -> None:
        """See `Side`."""
        names = [name for name, _ in drafts]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, [list(t) for _, t in drafts]))


def _decision_of(output: SchedulerOutput) -> Decision:
    cached = output.scheduled_cached_reqs
    told = {
        new.req_id: (new.num_computed_tokens, new.block_ids, True)
        for new in output.scheduled_new_reqs
    }
    for index, name in enumerate(cached.req_ids):
        told[name] = (cached.num_computed_tokens[index], cached.new_block_ids[index], False)
    rows = []
    for name, num_scheduled in output.num_scheduled_tokens.items():
        computed, groups, is_new = told[name]
        blocks = () if groups is None else tuple(block for group in groups for block in group)
        drafts = output.scheduled_spec_decode_tokens.get(name, ())
        rows.append(PlannedRow(name, computed, num_scheduled, blocks, len(drafts), is_new))
    preempted = tuple(sorted(output.preempted_req_ids or ()))
    return Decision(tuple(rows), preempted, tuple(sorted(output.finished_req_ids)))
