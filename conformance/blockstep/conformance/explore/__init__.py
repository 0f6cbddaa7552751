"""Explore: every state at small scope, by breadth-first search over the transitions of the spec.

`world` says what may happen, `canonical` which states are the same, `probe` judges one transition,
`walk` visits them all, `liveness` looks for cycles without progress; `copies` brings an engine to
where the walk is. From a walk come `pictures`, and programs that cover it (`cover`, `vectors`).
"""
