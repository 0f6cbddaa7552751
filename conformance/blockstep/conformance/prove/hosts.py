"""The host engine in the states of `harness`.

The engine is loaded by name and built by its own constructor. A law about it runs a method of the
engine and the specification's function on the same symbolic counters, and asserts equal results.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.core.requests import RequestState
from blockstep.spec.vocabulary import Config, Status

HOST: Any = load_engine("blockstep.impl.host:HostEngine")
LINEAGE: Any = load_engine("blockstep.impl.host.lineage:Lineage")
LOG: Any = load_engine("blockstep.impl.host.telling:EventLog")


def build_host(config: Config, *requests: RequestState) -> Any:
    """Return the engine with these requests at indices 0, 1 and so on, running or waiting as they
    say.
    """
    host = HOST(config)
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
        table.holdings[slot][0].num_cached = held.num_cached_blocks
        table.last_frame[slot] = host.next_frame_id
        if request.status is Status.RUNNING:
            host.running.append(slot)
            table.holdings[slot][0].blocks.extend(held.block_table)
            host.pool.touch(held.block_table)
        else:
            host.waiting.append(slot)
    return host
