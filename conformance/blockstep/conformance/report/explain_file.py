"""Moment: a state of a recorded run as text, or the actions of a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blockstep.conformance.engine import Safety
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.protocol.compare import describe_block, name_key
from blockstep.conformance.protocol.program import (
    describe,
    describe_config,
    describe_event,
    describe_observation,
    describe_tables,
)
from blockstep.conformance.protocol.program_file import SUFFIX, read_program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.recorded.traces import TraceError, TraceStep, read_trace
from blockstep.spec.vocabulary import NULL_BLOCK, RequestSnapshot, Snapshot


def explain_file(path: Path, at: int | None) -> str:
    """Return the content of a file: the actions of a program, or a recorded run after `at` events.

    Raises:
        TraceError: it is neither, or has fewer events.
    """
    return explain_program(path) if path.suffix == SUFFIX else explain_moment(path, at)


def explain_program(path: Path) -> str:
    """Return the actions of a program, a line each. Raises `TraceError`."""
    program = read_program(path)
    actions = [f"  {number:>4}  {describe(each)}" for number, each in enumerate(program.actions, 1)]
    return "\n".join([f"  config    {describe_config(program.config)}", *actions]) + "\n"


def explain_moment(path: Path, at: int | None) -> str:
    """Return the state of the spec after the first `at` events of a recorded trace (all if None).

    For an engine under `safety` it is the last answers, and the unfinished requests.

    Raises:
        TraceError: if the file is no trace, or has fewer events.
    """
    trace = read_trace(path)
    count = len(trace.steps) if at is None else at
    if count > len(trace.steps):
        raise TraceError(
            path,
            0,
            f"{len(trace.steps)} events",
            f"--at {count} needs as many",
            f"use 0 to {len(trace.steps)}",
        )
    if trace.equivalence == Safety.name:
        return _explain_answers(trace.steps[:count])
    spec = SpecEngine(trace.config)
    lines = []
    for number, step in enumerate(trace.steps[:count], 1):
        answer = spec.apply(step.event)
        agrees = "" if answer == step.observation else "   <- the spec has another answer"
        lines.append(f"  {number:>4}  {describe_event(step.event)}{agrees}")
    return "\n".join([*lines[-5:], "", describe_state(spec.snapshot())])


def _explain_answers(steps: Sequence[TraceStep]) -> str:
    client, lines = Client(), []
    for number, step in enumerate(steps, 1):
        client.follow(*step)
        lines.append(f"  {number:>4}  {describe_event(step.event)}")
        lines.append(f"        -> {describe_observation(step.observation)}")
    live = [f"{name} ({len(client.delivered.get(name, ()))} outputs)" for name in client.live]
    return "\n".join([*lines[-10:], "", f"unfinished: {', '.join(live) or 'none'}"]) + "\n"


def describe_state(snapshot: Snapshot) -> str:
    """Return a state as text: running and waiting requests, and each block."""
    frames = ", ".join(map(str, snapshot.frames_in_flight)) or "none"
    lines = [
        f"scheduling is {snapshot.pause_state}; frames in flight: {frames}",
        f"running   {' '.join(snapshot.running) or 'none'}",
        f"waiting   {' '.join(snapshot.waiting) or 'none'}",
    ]
    if snapshot.skipped_waiting:
        lines.append(f"skipped   {' '.join(snapshot.skipped_waiting)}")
    lines += ["", *(_describe_request(request) for request in snapshot.requests), ""]
    lines += [
        f"block {block_id}: {describe_block(snapshot, block_id)}"
        for block_id in range(NULL_BLOCK + 1, len(snapshot.ref_counts))
    ]
    lines += ["", f"evicted next: {' '.join(map(str, snapshot.free_queue)) or 'no block is free'}"]
    lines += [
        f"cached {name_key(key)}: blocks {', '.join(map(str, blocks))}"
        for key, blocks in snapshot.cached.items()
    ]
    return "\n".join(lines) + "\n"


def _describe_request(request: RequestSnapshot) -> str:
    table = describe_tables(request.block_tables) if any(request.block_tables) else ""
    drafts = f", drafts {list(request.spec_token_ids)}" if request.spec_token_ids else ""
    preempted = f", preempted {request.num_preemptions} times" if request.num_preemptions else ""
    return (
        f"{request.request_id}: {request.status}, {request.num_computed_tokens} tokens computed, "
        f"{len(request.output_token_ids)} outputs{drafts}, blocks [{table}]{preempted}"
    )
