"""Prove: laws of the specification's arithmetic, decided for all integers.

`law` says what a law is, `laws` has them by room, `harness` builds the states that they speak of,
`runner` asks CrossHair and gives one verdict for each, `smallest` makes a counterexample small,
`table` shows the verdicts, `command` is the command line.

CrossHair and z3 come with the extra `[symbolic]`; only `runner` imports them, when it runs.
"""
