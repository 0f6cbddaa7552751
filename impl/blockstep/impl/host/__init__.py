"""The host engine: the scheduler and its paged KV memory in plain Python, one row at a time.

Data flows through the modules in this order: `digests` hashes contents, `lineage` holds one
request's tokens and digests, `prefix` finds blocks by digest, `pool` owns the blocks, `queues` and
`table` hold the requests, and `core` connects them. `promises` counts the outputs that frames in
flight will sample. Optional features have modules of their own: `adapters`, `masks`, `encodings`
and `sessions`; `groups`, `kinds` and `states` implement several KV groups. `transfers` keeps the
transfers with a store: `loading` starts loads, `arrivals` takes reports about them. `step` is a
plan under construction, `running` and `admission` are its two phases, `planning` issues it;
`results` and `drafts` take the answers. `scheduler` is the engine, `view` makes its snapshot.
`blockstep.impl.compiled` decides the same, faster.
"""

from blockstep.impl.digests import CRC32, DIGESTS, SHA256, Digest
from blockstep.impl.host.scheduler import HostEngine

__all__ = ["CRC32", "DIGESTS", "SHA256", "Digest", "HostEngine"]
