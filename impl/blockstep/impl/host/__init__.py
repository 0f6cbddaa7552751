"""The host engine: the scheduler and its paged KV memory on the CPU, as a struct of arrays.

Data flows through the modules in this order: `digests` names contents, `lineage` holds one
request's tokens and names, `prefix` finds blocks by name, `pool` owns the blocks, `queues` and
`table` hold the requests, and `core` ties them together. `promises` counts the outputs that frames
in flight will sample. `step` is a plan in the making, `running` and `admission` are its two phases,
`planning` issues it; `results` and `drafts` take the answers. Many rows at once go through numpy:
`batches` plans them, `issuing` makes `arrays` of a plan, `batch_results` takes the answer to it.
`scheduler` is the engine, `view` its snapshot.
"""

from blockstep.impl.host.digests import CRC32, DIGESTS, SHA256, Digest
from blockstep.impl.host.scheduler import HostEngine, make_vector_engine

__all__ = ["CRC32", "DIGESTS", "SHA256", "Digest", "HostEngine", "make_vector_engine"]
