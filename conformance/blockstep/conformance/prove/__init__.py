"""Laws: rules of the specification's arithmetic, proved for all integers.

`law` defines what a law is, `laws` lists them by theme, `harness` builds the states that they use,
`runner` asks CrossHair and gives one verdict per law, `smallest` makes a counterexample small, and
`table` prints the verdicts.

CrossHair and z3 come with the extra `[symbolic]`; only `runner` imports them, when it runs.
"""
