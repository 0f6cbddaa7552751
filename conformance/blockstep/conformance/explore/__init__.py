"""Explore: every state at small scope, by breadth-first search over the transitions of the spec.

`world` says what may happen and `worlds` has all of them, `canonical` says which states are the
same, `probe` judges one transition, `shard` expands the states of one process, `walk` visits them
all, `cycles` looks for those without progress; `copies` brings an engine to where the walk is. From
a walk come `pictures`, and programs that cover it (`cover`, `vectors`).
"""
