"""The host engine: the scheduler and its paged KV memory as machine code.

All state is in arrays of integers (`state`), and functions that numba compiles change it: `blocks`
has the pool and the prefix cache, `groups` the block tables of several KV groups, `queues` the
waiting requests, `lives` a request from submission to finish, `planning` the event Schedule,
`results` the event Commit. `requests` and `names` keep Python objects such as ids, `frames` the
plans in flight; `grammar_bitmask`, `sessions`, `encoder_inputs`, `forks`, `agent_turns` and
`kv_transfers` are plain Python over the same arrays, each for what few rows need, and `steps` runs
them where machine code stops. `engine` is the engine, `view` its snapshot, `jit` the compiler.

The first engine compiles: most of a minute the first time, under a second later.
"""

from blockstep.impl.host.engine import HostEngine
from blockstep.impl.host.jit import IS_COMPILED

__all__ = ["IS_COMPILED", "HostEngine"]
