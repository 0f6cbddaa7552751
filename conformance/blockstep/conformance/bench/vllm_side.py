"""The released scheduler of vLLM under the clock: its bare `schedule` and `update_from_output`.

Scheduler and requests are built as the adapter builds them (`vllm_build`). What a worker would
answer is built before the clock runs. Block hashing of a prompt is part of building a request here,
as in vLLM, and so is not timed; what fills later is hashed inside `update_from_output`.
"""

from __future__ import annotations

from typing import Any

# First, because it says what to do where vLLM cannot be imported.
from blockstep.conformance.engines.adapters.vllm import VllmEngine
from blockstep.conformance.engines.adapters.vllm_build import build_request

# isort: split
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from blockstep.conformance.bench.sides import (
    Answer,
    Decision,
    Delivered,
    PlannedRow,
    Side,
    Times,
    read_rows,
)
from blockstep.spec.vocabulary import Config, Request


class VllmSide(Side):
    """vLLM's scheduler; what it builds are objects, so there is one reading."""

    readings: tuple[str, ...] = ("objects",)

    def __init__(self, config: Config) -> None:
        run = VllmEngine(config).run
        super().__init__(run.scheduler)
        self.hasher = run.hasher

    def submit(self, request: Request) -> None:
        """See `Side`."""
        self.engine.add_request(build_request(request, self.hasher, {}, separate_names=True))

    def propose(self, drafts: Answer) -> None:
        """See `Side`."""
        names = [name for name, _ in drafts]
        self.engine.update_draft_token_ids(DraftTokenIds(names, [list(t) for _, t in drafts]))

    def prepare(self, answer: Answer) -> Any:
        """See `Side`."""
        names = [name for name, _ in answer]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[list(tokens) for _, tokens in answer],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def schedule(self) -> tuple[Times, Any]:
        """See `Side`."""
        output, seconds = self.ask(self.engine.schedule)
        return (seconds,), output

    def commit(self, prepared: Any) -> tuple[Times, Any]:
        """See `Side`."""
        outputs, seconds = self.ask(self.engine.update_from_output, self.frames.popleft(), prepared)
        return (seconds,), outputs

    def read_plan(self, plan: Any) -> Decision:
        """See `Side`."""
        cached = plan.scheduled_cached_reqs
        told = {
            new.req_id: (new.num_computed_tokens, new.block_ids, True)
            for new in plan.scheduled_new_reqs
        }
        for index, name in enumerate(cached.req_ids):
            told[name] = (cached.num_computed_tokens[index], cached.new_block_ids[index], False)
        rows = []
        for name, num_scheduled in plan.num_scheduled_tokens.items():
            computed, groups, is_new = told[name]
            blocks = tuple(block for group in groups or () for block in group)
            drafts = plan.scheduled_spec_decode_tokens.get(name, ())
            rows.append(PlannedRow(name, computed, num_scheduled, blocks, len(drafts), is_new))
        preempted = tuple(sorted(plan.preempted_req_ids or ()))
        return Decision(tuple(rows), preempted, tuple(sorted(plan.finished_req_ids)))

    def read_outputs(self, outputs: Any) -> Delivered:
        """See `Side`."""
        return read_rows(row for core in outputs.values() for row in core.outputs)
