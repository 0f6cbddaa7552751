"""Engines that are played beside `host`, because some of its code runs only in them."""

from __future__ import annotations

import importlib
import zlib
from typing import Any

import numpy as np

from blockstep.spec.vocabulary import (
    CachedRow,
    Commit,
    Config,
    Event,
    FrameId,
    Observation,
    OutputRow,
    Outputs,
    Plan,
    Rejected,
    Schedule,
    Snapshot,
    TokenIds,
    event_problem,
)

COLLIDING = f"{__name__}:make_colliding"
ARRAYS = f"{__name__}:Arrays"
"""As `blockstep check --engine` takes them."""
SMALL = {"TAIL": 8, "_SETTLE": 4, "_LAG": 2, "_MANY": 2}
"""For 256, 128, 8 and 24, which is more than preset small has; for the whole process."""


def make_colliding(config: Config) -> Any:
    """The host engine with a digest of two bits, so that every hit must be verified.

    Imported here and not above: a mutant's process imports the engine again.
    """
    host = importlib.import_module("blockstep.impl.host")
    return host.HostEngine(config, host.Digest("two bits", False, _digest_in_two_bits))


def _digest_in_two_bits(message: bytes) -> bytes:
    return bytes((zlib.crc32(message) & 3,))


class Arrays:
    """The host engine, asked for its plans and given its answers as arrays.

    One row at a time is handled alone, more of them through numpy. What it says is read out of
    arrays in one frame, and out of the objects that they make in the next. Its tails are so short
    that a dozen outputs go round them, and two blocks are many.
    """

    def __init__(self, config: Config) -> None:
        host = importlib.import_module("blockstep.impl.host")
        for name in ("table", "core", "batch_results", "pool"):
            constants = vars(importlib.import_module(f"blockstep.impl.host.{name}"))
            constants.update({key: SMALL[key] for key in SMALL if key in constants})
        self.engine = host.HostEngine(config, vector_at=2)
        self._plans: dict[FrameId, Any] = {}
        """Those in flight."""

    def apply(self, event: Event) -> Observation:
        """Take one event; only a plan and the answer to one can be in arrays."""
        match event:
            case Schedule():
                plan = self.engine.schedule_arrays()
                if isinstance(plan, Rejected):
                    return plan
                self._plans[plan.frame_id] = plan
                assert not any(plan.num_output_tokens[row] for row in plan.new_rows)
                return _read_objects(plan) if plan.frame_id % 2 else plan.build_plan()
            case Commit() if event_problem(event) is None:
                return self._commit(event)
        answer: Observation = self.engine.apply(event)
        return answer

    def snapshot(self) -> Snapshot:
        """That of the engine."""
        snapshot: Snapshot = self.engine.snapshot()
        return snapshot

    def capabilities(self) -> frozenset[str]:
        """Those of the engine."""
        capabilities: frozenset[str] = self.engine.capabilities()
        return capabilities

    def _commit(self, event: Commit) -> Observation:
        plan = self._plans.get(event.frame_id)
        if plan is None:
            unknown: Rejected = self.engine.commit_arrays(event.frame_id, np.zeros(1, np.int32))
            return unknown
        answers = {row.request_id: row.token_ids for row in event.sampled}
        if len(event.sampled) != len(plan) or answers.keys() != set(plan.request_ids):
            refusal: Observation = self.engine.apply(event)  # arrays name nobody
            return refusal
        rows = [answers[name] for name in plan.request_ids]
        outputs = self._commit_rows(event.frame_id, plan, rows)
        if isinstance(outputs, Rejected):
            return outputs
        del self._plans[event.frame_id]
        samples = [True] * len(rows) if plan.samples is None else plan.samples.tolist()
        assert samples == [len(tokens) > 0 for tokens in rows]
        if event.frame_id % 2 == 0:
            built: Outputs = outputs.build_outputs()
            return built
        return Outputs(tuple(map(_read_object, outputs.build_objects())))

    def _commit_rows(self, frame_id: FrameId, plan: Any, rows: list[TokenIds]) -> Any:
        """Without counts where they are not needed, or where it must be refused without them."""
        tokens, counts = plan.pack_answer(rows)
        due = np.ones(len(rows), np.int32) if plan.samples is None else plan.samples
        if counts is not None:
            if len(tokens) != due.sum():
                assert isinstance(self.engine.commit_arrays(frame_id, tokens), Rejected)
            return self.engine.commit_arrays(frame_id, tokens, counts)
        lengths = np.array([len(row) for row in rows], np.int32)
        if lengths.sum() == due.sum() and (lengths != due).any():
            return self.engine.commit_arrays(frame_id, tokens, lengths)
        return self.engine.commit_arrays(frame_id, tokens)


def _read_object(row: Any) -> OutputRow:
    return OutputRow(
        row.request_id,
        row.new_token_ids,
        row.finish_reason,
        row.stop_token_id,
        row.num_cached_tokens,
    )


def _read_objects(plan: Any) -> Plan:
    """The plan that its objects tell of."""
    objects = plan.build_objects()
    scheduled = objects.num_scheduled_tokens
    assert objects.total_num_scheduled_tokens == sum(scheduled.values())
    cached = (
        CachedRow(
            name,
            name in objects.resumed_req_ids,
            objects.new_block_ids[row] or ((),),
            objects.all_token_ids.get(name),
            objects.num_computed_tokens[row],
            objects.num_output_tokens[row],
            scheduled[name],
            objects.scheduled_spec_decode_tokens.get(name, ()),
        )
        for row, name in enumerate(objects.req_ids)
    )
    return Plan(
        plan.frame_id,
        tuple(objects.new),
        tuple(cached),
        tuple(sorted(objects.finished_req_ids)),
        tuple(sorted(objects.preempted_req_ids)),
    )
