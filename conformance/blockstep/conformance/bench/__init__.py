"""Bench: the time of a scheduler step, for engines that make the same decisions.

`scenarios` has the workloads, `sides` times one engine, `player` plays clients and worker,
`measure` interleaves several engines and demands equal decisions, `profile` finds the functions
that take the time, and `report` shows the result.
"""
