"""Plans: the equivalence of an engine that runs the same tokens for the same requests at each step.

For simulators and ports that mimic a release and may have no blocks of their own. Compared are, by
request and in no order: whether a row is new, running or resumed, its computed and scheduled
tokens, and its drafts; encoded items, and whether a row has a bitmask; preempted requests; loads
and saves of the store; delivered tokens and finish reasons; rejected events. Not compared are
states, blocks, and what a plan repeats for the worker (finished requests, token lists, counts of
outputs and of cached tokens).

Plans that show block tables are checked by a worker with memory, others by one that only counts
tokens. Goals are counted on the specification's side, whose plans are equal.

    class Adapter:
        traits = EngineTraits(equivalence=SamePlans(shows_blocks=False))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Self, TypeVar

from blockstep.conformance.engine import EngineFactory, SamePlans, get_traits
from blockstep.conformance.judge.answers import judge_answer
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.judge.worker.blockless_worker import CountingWorker
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.scoped_run import ScopedRun
from blockstep.conformance.protocol.findings import Finding
from blockstep.spec import vocabulary as v

_request_id = attrgetter("request_id")
Record = TypeVar("Record", v.Plan, v.NewRow, v.CachedRow, v.KVLoad, v.KVSave, v.OutputRow,
                 v.Aborted, v.ResetDone)  # fmt: skip


NOT_COMPARED: Mapping[type, Mapping[str, Any]] = {
    # Block ids are not compared, so replaced tables are not either.
    v.NewRow: {"block_ids": ()},
    v.KVLoad: {"block_ids": ()},
    v.KVSave: {"block_ids": ()},
    # The worker checks what is sent again or counted for it.
    v.CachedRow: {"new_block_ids": (), "all_token_ids": None, "num_output_tokens": 0},
    v.Plan: {
        "finished_req_ids": (),
        "remapped_req_ids": (),
        "block_copies": (),
        "num_common_prefix_blocks": (),
        "new_block_ids_to_zero": (),
    },
    # The length of a hit is a policy; the time at which an aborted request ends is the engine's
    # choice.
    v.OutputRow: {"num_cached_tokens": 0, "num_external_tokens": None},
    v.Aborted: {"ending_req_ids": ()},
    # KV events depend on block ids.
    v.Outputs: {"kv_events": ()},
    v.ResetDone: {"kv_events": ()},
}
"""Fields of answers that are not compared, by type, with the value that replaces them."""


def only_plan(observation: v.Observation) -> v.Observation:
    """Return the compared part of an answer, sorted by request."""
    match observation:
        case v.Plan():
            return _blank(
                observation,
                new=tuple(map(_blank, sorted(observation.new, key=_request_id))),
                cached=tuple(map(_blank, sorted(observation.cached, key=_request_id))),
                preempted_req_ids=tuple(sorted(observation.preempted_req_ids)),
                kv_loads=tuple(map(_blank, sorted(observation.kv_loads, key=_request_id))),
                kv_saves=tuple(map(_blank, sorted(observation.kv_saves, key=_request_id))),
            )
        case v.Outputs(rows=rows):
            return v.Outputs(tuple(map(_blank, sorted(rows, key=_request_id))))
        case v.Aborted(request_ids=names):
            return _blank(observation, request_ids=tuple(sorted(names)))
        case v.ResetDone():
            return _blank(observation)
        case v.DraftsTaken(request_ids=names):
            return v.DraftsTaken(tuple(sorted(names)))
        case _:
            return observation


def _blank(record: Record, **fields: Any) -> Record:
    """Return a record with other fields, and without those that are not compared."""
    return replace(record, **{**NOT_COMPARED.get(type(record), {}), **fields})


def fit_worker(worker: Worker, make_engine: EngineFactory) -> Worker:
    """Return a worker for the plans of these engines: `worker`, or one without blocks."""
    traits = get_traits(make_engine)
    scope = traits.equivalence
    if not isinstance(scope, SamePlans) or scope.shows_blocks or traits.make_worker is not None:
        return worker
    return CountingWorker(worker.config, worker.next_token)


@dataclass(slots=True, kw_only=True)
class PlanRun(ScopedRun):
    """One run of one engine, compared by what it runs and delivers. Not reusable."""

    @classmethod
    def start(cls, config: v.Config, make_engine: EngineFactory, *args: Any, **kwargs: Any) -> Self:
        """Build both sides and the worker for the engine's plans.

        Raises:
            ConfigError: the engine cannot be built with this config.
        """
        run = super(PlanRun, cls).start(config, make_engine, *args, **kwargs)
        run.worker = fit_worker(run.worker, make_engine)
        return run

    def _comparable(self, _snapshot: v.Snapshot | None) -> None:
        """Return None: no state is compared, shown or not."""

    def _diverge(
        self, event: v.Event, expected: v.Observation, seen: object, after: v.Snapshot | None
    ) -> list[Finding]:
        if isinstance(expected, v.Plan) and isinstance(seen, v.Plan):
            self.loads.take(expected, seen)
        if isinstance(seen, type(expected)):
            expected, seen = only_plan(expected), only_plan(seen)
        return LockStep._diverge(self, event, expected, seen, after)

    def _check_answer(self, event: v.Event, seen: v.Observation) -> list[Finding]:
        """Return the findings of the checks that hold for any engine, and of the worker.

        The effect of a failed load is compared with the specification, and not checked here again.
        """
        findings: Iterable[Finding] = ()
        report = event.transfers if isinstance(event, v.Commit | v.TransfersReported) else None
        if report is None or not report.invalid_block_ids:
            findings = judge_answer(
                self.config, self.live, self.delivered, event, seen, self.dropped
            )
        return [*findings, *self.worker.observe(event, seen)]
