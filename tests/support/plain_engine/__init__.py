"""plain: how small a conforming scheduler can be.

One KV group and one plan at a time; prefix caching, chunks, priority, preemption, resets, forks and
related options, pins between the turns of jobs, a store with loads and swap-out, and admission
thresholds. Written from the documents and the property checks, by an author without knowledge of
the rules of the specification or the host engine; `blockstep check` compares it with the
specification.
"""

from plain_engine.engine import PlainEngine

__all__ = ["PlainEngine"]
