"""The host engine: the scheduler and its paged KV memory in plain Python, one row at a time.

Data flows through the modules in this order: `digests` names contents, `lineage` holds one
request's tokens and names, `prefix` finds blocks by name, `pool` owns the blocks, `queues` and
`table` hold the requests, and `core` ties them together. `promises` counts the outputs that frames
in flight will sample. What a request may bring has machines of its own: `adapters`, `grammars` with
`masks`, `encoder` with `encodings`, and `sessions`; `groups`, `kinds` and `states` are several KV
groups. `transfers` is what is under way to and from a store: `loading` begins loads, `arrivals`
takes what is told of them. `step` is a plan in the making, `running` and `admission` are its two
phases, `planning` issues it; `results` and `drafts` take the answers. `scheduler` is the engine,
`view` its snapshot. Whatever a request asks for is here; what is fast is `blockstep.impl.compiled`.
"""

from blockstep.impl.host.digests import CRC32, DIGESTS, SHA256, Digest
from blockstep.impl.host.scheduler import HostEngine

__all__ = ["CRC32", "DIGESTS", "SHA256", "Digest", "HostEngine"]
