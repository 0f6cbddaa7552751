"""Bench: how long a step of a scheduler takes, with others beside it deciding the same.

`scenarios` says what traffic there is, `sides` how one engine is timed, `player` plays clients and
worker for it, `measure` interleaves several and demands equal decisions, `profile` looks into one
of them, `report` shows the result.
"""
