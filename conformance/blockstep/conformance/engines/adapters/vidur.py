"""The `vllm` replica scheduler of a checkout of Vidur, behind the Engine protocol.

Vidur models the scheduler of vLLM before V1: whole prompts first, no prefix cache, and one batch at
a time. Its blocks have no ids. Its modules are imported as they are; what models time and memory is
replaced when it is imported.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from blockstep.conformance.engine import EngineFault, EngineTraits, SamePlans
from blockstep.spec import vocabulary as v

NAMES = {
    "config": ("BaseReplicaSchedulerConfig", "BaseRequestGeneratorConfig", "ReplicaConfig"),
    "execution_time_predictor": ("BaseExecutionTimePredictor",),
    "logger": ("init_logger",),
    "scheduler.replica_stage_scheduler": ("ReplicaStageScheduler",),
    "scheduler.utils.memory_planner": ("MemoryPlanner",),
}
"""Names that the scheduler imports from modules that it does not need."""


class Unlimited:
    """Replacement for Vidur's memory planner: the pool and the slots are those of the config."""

    def __init__(self, *_args: Any, **_keywords: Any) -> None: ...

    def get_max_batch_size(self) -> int:
        """Return a number beyond every config."""
        return v.MAX_INT


def _import() -> Any:
    """Import the scheduler without the packages around it."""
    found = find_spec("vidur") if "vidur" not in sys.modules else None
    if found is None or found.submodule_search_locations is None:
        raise ImportError("no module named 'vidur': give --path CHECKOUT")
    (root,) = map(Path, found.submodule_search_locations)
    for part in ("", "entities", "scheduler", "scheduler.replica_scheduler", "scheduler.utils"):
        package = ModuleType(f"vidur.{part}".rstrip("."))
        package.__path__ = [str(root.joinpath(*part.split(".")))]
        sys.modules[package.__name__] = package
    for part, names in NAMES.items():
        module: Any = ModuleType(f"vidur.{part}")
        module.__dict__.update(dict.fromkeys(names, Unlimited))
        module.init_logger = logging.getLogger
        sys.modules[module.__name__] = module
    entities: Any = sys.modules["vidur.entities"]
    entities.Request = import_module("vidur.entities.request").Request
    entities.Batch = import_module("vidur.entities.batch").Batch
    entities.Replica = Unlimited
    return import_module("vidur.scheduler.replica_scheduler.vllm_replica_scheduler")


Scheduler: Any = _import().VLLMReplicaScheduler
VidurRequest: Any = sys.modules["vidur.entities.request"].Request


def fit_config(config: v.Config) -> v.Config:
    """Return the nearest config: no prefix cache, and prompts that fit a step."""
    budget = config.max_num_batched_tokens
    return v.Config(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=min(config.max_model_len, budget),
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )


def fit_request(request: v.Request, config: v.Config) -> v.Request | None:
    """Return a request that ends by its length, or None if its prompt is too long."""
    room = config.max_model_len - len(request.prompt_token_ids)
    if room < 1:
        return None
    return v.Request(request.request_id, request.prompt_token_ids, min(request.max_tokens, room))


class Vidur:
    """Vidur's replica scheduler as a system under test."""

    traits = EngineTraits(equivalence=SamePlans(fit_config, fit_request), max_depth=1)

    def __init__(self, config: v.Config) -> None:
        settings = SimpleNamespace(
            block_size=config.block_size,
            num_blocks=config.num_usable_blocks,
            batch_size_cap=config.max_num_seqs,
            watermark_blocks_fraction=0,
            max_tokens_in_batch=config.max_num_batched_tokens,
        )
        lengths = SimpleNamespace(max_tokens=config.max_model_len)
        replica = SimpleNamespace(id=0)
        self.scheduler = Scheduler(None, settings, lengths, replica, 1, None)
        self.known: dict[int, SimpleNamespace] = {}
        self.batch: Any = None
        self.ended: list[v.RequestId] = []
        self.last: set[v.RequestId] = set()
        self.num_plans = 0

    def capabilities(self) -> frozenset[str]:
        """Return what it implements: nothing but the core."""
        return frozenset()

    def snapshot(self) -> None:
        """Return None: at this equivalence no state is compared."""

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event."""
        match event:
            case v.Submit(request=request):
                theirs = VidurRequest(0, len(request.prompt_token_ids), request.max_tokens)
                known = SimpleNamespace(request=request, outputs=(), has_run=False, num_restarts=0)
                known.theirs, self.known[theirs.id] = theirs, known
                self.scheduler.add_request(theirs)
                return v.Ack()
            case v.Schedule():
                return self._schedule()
            case v.Commit(sampled=sampled):
                return self._commit({row.request_id: row.token_ids for row in sampled})
        raise EngineFault(f"not for Vidur: {event!r}")

    def _schedule(self) -> v.Plan:
        batches = self.scheduler.on_schedule()
        self.batch = batches[0] if batches else None
        preempted = []
        for known in self.known.values():
            if known.theirs.num_restarts > known.num_restarts:
                known.num_restarts = known.theirs.num_restarts
                preempted.append(known.request.request_id)
        rows = [self._make_row(it) for it in (self.batch.requests if batches else ())]
        ended, self.ended, self.num_plans = self.ended, [], self.num_plans + 1
        self.last = {row.request_id for row in rows}
        return v.Plan(
            self.num_plans - 1,
            new=tuple(row for row in rows if isinstance(row, v.NewRow)),
            cached=tuple(row for row in rows if isinstance(row, v.CachedRow)),
            finished_req_ids=tuple(sorted(ended)),
            preempted_req_ids=tuple(sorted(preempted)),
        )

    def _make_row(self, theirs: Any) -> v.NewRow | v.CachedRow:
        known, has_prefilled = self.known[theirs.id], theirs.is_prefill_complete
        # it counts a sampled token as processed
        start = theirs.num_processed_tokens - 1 if has_prefilled else 0
        count = 1 if has_prefilled else theirs.num_prefill_tokens
        had_run, known.has_run, name = known.has_run, True, known.request.request_id
        if not had_run:
            return v.NewRow(known.request, (), start, count)
        tokens = None if name in self.last else (*known.request.prompt_token_ids, *known.outputs)
        return v.CachedRow(name, not has_prefilled, (), tokens, start, len(known.outputs), count)

    def _commit(self, sampled: dict[v.RequestId, v.TokenIds]) -> v.Outputs:
        batch, self.batch = self.batch, None
        batch.on_batch_end(0)
        self.scheduler.on_batch_end(batch)
        rows = []
        for theirs in batch.requests:
            known = self.known[theirs.id]
            name = known.request.request_id
            tokens = sampled[name]
            known.outputs += tokens
            reason = v.FinishReason.LENGTH if theirs.completed else None
            rows.append(v.OutputRow(name, tokens, reason))
            if reason is not None:
                del self.known[theirs.id]
                self.ended.append(name)
        return v.Outputs(tuple(rows))
