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

from blockstep.conformance.bench import timed_engines as s
from blockstep.spec.vocabulary import Config, Request


class VllmSide(s.TimedEngine):
    """vLLM's scheduler. It is timed as `objects` only, since its plans are no arrays."""

    readings: tuple[str, ...] = ("objects",)

    def __init__(self, config: Config) -> None:
        run = VllmEngine(config).run
        super().__init__(run.scheduler)
        self.hasher = run.hasher

    def submit(self, request: Request) -> bool:
        """See `Side`."""
        self.engine.add_request(build_request(request, self.hasher, {}, separate_names=True))
        return True

    def propose(self, drafts: s.Answer) -> None:
        """See `Side`."""
        names = [name for name, _ in drafts]
        self.engine.update_draft_token_ids(DraftTokenIds(names, [list(t) for _, t in drafts]))

    def prepare(self, answer: s.Answer) -> Any:
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

    def schedule(self) -> tuple[Any, float]:
        """See `Side`."""
        return self.ask(self.engine.schedule)

    def commit(self, prepared: Any) -> tuple[Any, float]:
        """See `Side`."""
        return self.ask(self.engine.update_from_output, self.frames.popleft(), prepared)

    def read_plan(self, plan: Any) -> s.Decision:
        """See `Side`."""
        cached = plan.scheduled_cached_reqs
        by_name = {
            new.req_id: (new.num_computed_tokens, new.block_ids, True)
            for new in plan.scheduled_new_reqs
        }
        for index, name in enumerate(cached.req_ids):
            by_name[name] = (cached.num_computed_tokens[index], cached.new_block_ids[index], False)
        rows = []
        for name, num_scheduled in plan.num_scheduled_tokens.items():
            computed, groups, is_new = by_name[name]
            blocks = tuple(block for group in groups or () for block in group)
            drafts = plan.scheduled_spec_decode_tokens.get(name, ())
            rows.append(s.PlannedRow(name, computed, num_scheduled, blocks, len(drafts), is_new))
        preempted = tuple(sorted(plan.preempted_req_ids or ()))
        return s.Decision(tuple(rows), preempted, tuple(sorted(plan.finished_req_ids)))

    def read_outputs(self, outputs: Any) -> s.Delivered:
        """See `Side`."""
        return s.read_rows(row for core in outputs.values() for row in core.outputs)
