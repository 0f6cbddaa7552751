"""ITF: the specification's states in a run of a program, as a trace that tools of TLA+ and Quint
read (Informal Trace Format of Apalache)."""

from __future__ import annotations

import json
from typing import Any

from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Program, describe_event
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Profile

VARS = (
    *("action", "running", "waiting", "skipped_waiting", "requests", "ref_counts", "free_queue"),
    *("cached_blocks", "frames_in_flight"),
)


def make_itf(program: Program, profile: Profile) -> str:
    """Return the trace of a program: the first state, and one after each event.

    The specification is played alone: the trace is one of its behaviours.
    """
    run, findings = run_program(program, lambda config: SpecEngine(config, profile), profile)
    assert not findings, "the specification conforms to itself"
    spec = SpecEngine(program.config, profile)
    states = [_show(spec.snapshot(), "init", 0)]
    for number, exchange in enumerate(run.exchanges, 1):
        spec.apply(exchange.event)
        states.append(_show(spec.snapshot(), describe_event(exchange.event), number))
    meta = {"format": "ITF", "description": "made by blockstep check --itf"}
    return json.dumps({"#meta": meta, "vars": VARS, "states": states}, indent=1) + "\n"


def _show(state: v.Snapshot, action: str, number: int) -> dict[str, Any]:
    """Return a state of the trace: sequences are lists, other values as the format has them."""
    cached = [block for block, key in enumerate(state.block_keys) if key is not None]
    return {
        "#meta": {"index": number},
        "action": action,
        "running": [*state.running],
        "waiting": [*state.waiting],
        "skipped_waiting": [*state.skipped_waiting],
        "requests": {"#map": [[one.request_id, _show_request(one)] for one in state.requests]},
        "ref_counts": [*state.ref_counts],
        "free_queue": [*state.free_queue],
        "cached_blocks": {"#set": cached},
        "frames_in_flight": [*state.frames_in_flight],
    }


def _show_request(one: v.RequestSnapshot) -> dict[str, Any]:
    return {
        "status": one.status.value,
        "num_computed_tokens": one.num_computed_tokens,
        "output_token_ids": [*one.output_token_ids],
        "block_tables": [[*table] for table in one.block_tables],
        "num_preemptions": one.num_preemptions,
    }
