"""The compiled engine: the scheduler and its paged KV memory as machine code.

All state lies in arrays of integers (`state`), and functions that numba compiles change it:
`blocks` holds the pool and the contents, `queues` who waits, `lives` a request from submission to
end, `planning` one Schedule, `results` one Commit. `requests` and `names` keep what only Python can
name, `frames` the plans in flight; `engine` is the engine, `view` its snapshot, `jit` the compiler.

Importing it compiles: half a minute once, under a second from then on.
"""

from blockstep.impl.compiled.engine import CompiledEngine
from blockstep.impl.compiled.jit import IS_COMPILED, compile_entries

__all__ = ["IS_COMPILED", "CompiledEngine"]

compile_entries()
