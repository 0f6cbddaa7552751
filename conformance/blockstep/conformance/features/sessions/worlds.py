"""Small worlds with sessions."""

from __future__ import annotations

from blockstep.conformance.explore.world import AHEAD, BOTH, ONE_TOKEN, Counts, World, a, b, item
from blockstep.spec import vocabulary as v

WORLDS = (
    World("session", "a session of two inputs, and a request that lacks its blocks; both resets",
        v.Config(4, 2, 2, 3, 6), (a(1, 1, resumable=True), b(3, 1)),
        vocabulary=(0, 1), aborts=True, resets=BOTH,
        updates=(a(1, 2, token=1, resumable=True), a(1, 1)),
        expected=Counts(7_898, 50_673, 36_484, 31)),
    World("overshot", "a session that stops within the drafts that it has accepted",
        v.Config(7, 1, 1, 4, 6, spec_method=v.SpecMethod.DRAFT_MODEL, num_speculative_tokens=2),
        (a(1, 2, resumable=True),), updates=(a(2, 1, resumable=True), a(1, 1)),
        expected=Counts(255, 944, 1_019, 21)),
    World("behind", "a session that stops while its next row is in flight",
        v.Config(5, 1, 1, 3, 5, **AHEAD), (a(1, 2, resumable=True, stop_token_ids=(1,)),),
        vocabulary=(0, 1), resets=(True,), updates=(a(1, 2, resumable=True), a(1, 1)),
        expected=Counts(1_306, 4_435, 5_718, 20)),
    World("anew", "a session whose inputs each begin a grammar",
        v.Config(6, 1, 1, 3, 5),
        (a(1, 1, structured_output=True, grammar=ONE_TOKEN, resumable=True),),
        vocabulary=(0, 1), updates=(a(1, 2, resumable=True), a(1, 1)),
        expected=Counts(1_674, 6_412, 6_374, 31)),
    World("further", "a session; one block holds both items of its second input",
        v.Config(4, 3, 1, 4, 5), (a(1, 1, resumable=True),),
        updates=(a(2, 1, items=(item("x", 0), item("y", 1)), resumable=True), a(1, 1)),
        expected=Counts(184, 332, 684, 25)),
)  # fmt: skip
