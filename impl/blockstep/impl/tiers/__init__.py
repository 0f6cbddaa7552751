"""Tiers: memory below the prefix cache, and the cost of moving blocks there and back.

`costs` computes the cost; `order` decides which tier keeps which block, `files` keeps blocks in a
folder, and `store` joins the two with host memory. Import a store from `blockstep.impl.engine`.
"""

from blockstep.impl.tiers.costs import Costs, KVShape, Link, Prefill, SwapSpeeds, Way

__all__ = ["Costs", "KVShape", "Link", "Prefill", "SwapSpeeds", "Way"]
