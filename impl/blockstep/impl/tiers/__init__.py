"""Tiers: memory below the cache, and what it costs to move blocks there and back."""

from blockstep.impl.tiers.costs import Costs, KVShape, Link, Prefill, Way

__all__ = ["Costs", "KVShape", "Link", "Prefill", "Way"]
