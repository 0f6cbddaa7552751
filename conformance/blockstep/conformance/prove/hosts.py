"""Hosts: the engine on the host in the states of `harness`.

The engine is looked up by name, as always, and built by its own constructor; only its columns are
lists here, because an array holds no symbolic number. A law about it runs a method of the engine
and the specification's function on the same symbolic counters, and demands one answer.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.requests import RequestState
from blockstep.spec.vocabulary import Config, Status

HOST: Any = load_engine("host")
LINEAGE: Any = load_engine("blockstep.impl.host.lineage:Lineage")
COLUMNS = (
    "num_prompt", "num_known", "num_output_placeholders", "num_computed", "num_cached_blocks",
    "num_cached_tokens", "num_preemptions", "max_known", "last_frame", "is_watched",
    "is_prefill_chunk", "grammar_ready",
)  # fmt: skip


def build_empty_host(config: Config) -> Any:
    """The engine, with lists for columns."""
    host = HOST(config)
    for column in COLUMNS:
        setattr(host.table, column, list(getattr(host.table, column)))
    return host


def build_host(config: Config, *requests: RequestState) -> Any:
    """The engine with these requests in its slots 0, 1 and so on; the running ones run."""
    host = build_empty_host(config)
    table = host.table
    for slot, request in enumerate(requests):
        lineage = LINEAGE(request.request, config.block_size, host.digest)
        table.add(request.request, lineage, request.status, config.max_model_len)
        table.num_known[slot] = request.num_known_tokens
        table.num_computed[slot] = request.num_computed_tokens
        table.num_output_placeholders[slot] = request.num_output_placeholders
        table.spec_token_ids[slot] = request.spec_token_ids
        table.is_prefill_chunk[slot] = request.is_prefill_chunk
        (held,) = request.holdings
        table.num_cached_blocks[slot] = held.num_cached_blocks
        table.last_frame[slot] = host.next_frame_id
        if request.status is Status.RUNNING:
            host.running.append(slot)
            table.block_tables[slot].extend(held.block_table)
            host.pool.touch(held.block_table)
        else:
            host.waiting.append(slot)
    return host
