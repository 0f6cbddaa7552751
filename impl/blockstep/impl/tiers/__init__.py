"""Tiers: memory below the cache, and what it costs to move blocks there and back.

`costs` is what it costs; `order` says what goes where, `files` keeps blocks in a folder, and
`store` is both and host memory. (Whoever wants a store imports it from `blockstep.impl.engine`.)
"""

from blockstep.impl.tiers.costs import Costs, KVShape, Link, Prefill, SwapSpeeds, Way

__all__ = ["Costs", "KVShape", "Link", "Prefill", "SwapSpeeds", "Way"]
