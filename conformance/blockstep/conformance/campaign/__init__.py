"""Campaigns: many workers search one plan's engines and share a store.

    plan      what is searched: engines, presets, features, seeds, budget
    records   what is stored: rounds of units, results, findings, totals
    leases    what every store does: leases of units, results that are committed once
    store     opens a store: a folder (`folder`), or Redis (`redis_store`)
    steering  which units a round has, decided from the totals of an earlier round
    play      one unit: episodes with an engine, failures made short, programs kept
    worker    takes units by lease and commits their results; opens the next round
    executor  where workers run: threads with child processes, or Ray
    summary   defects, coverage and verdict, from what is stored

A *unit* is a few episodes of one cell (target, preset, features). A *round* is a fixed number of
units. The units of round n follow from the plan and from the totals of all rounds up to n - 2, so
the results do not depend on the number of workers, on their speed, or on which of them died.
"""
