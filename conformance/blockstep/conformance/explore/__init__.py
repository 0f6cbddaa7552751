"""Small worlds: every state of a small scope, visited by breadth-first search over spec
transitions.

`world` says which events are possible and `worlds` lists the scopes; `canonical` identifies equal
states, `probe` checks one transition, `shard` expands the states of one process, `walk` visits all
states, `cycles` finds cycles without progress, and `copies` restores an engine to a state.
`pictures` draws a walk; `cover` and `vectors` make programs that cover it.
"""
