"""Small worlds with grammars."""

from __future__ import annotations

from blockstep.conformance.explore.world import AHEAD, GRAMMAR, NGRAM, UNCACHED, Counts, World, a, b
from blockstep.spec import vocabulary as v

WORLDS = (
    World("grammar", "a grammar of three tokens, drafts, forced resets",
        v.Config(6, 1, 1, 3, 6, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2),
        (a(1, 4, structured_output=True, grammar=GRAMMAR, eos_token_id=2, min_tokens=2),),
        vocabulary=(0, 1, 2), resets=(True,),
        expected=Counts(632, 8_291, 2_096, 30)),
    World("masks", "a grammar, two plans in flight, drafts at the worker: what a bitmask cuts off",
        v.Config(8, 1, 1, 3, 6, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2, **AHEAD),
        (a(1, 3, structured_output=True, grammar=GRAMMAR),), vocabulary=(0, 1, 2),
        expected=Counts(1_530, 13_547, 8_049, 40)),
    World("stages", "a grammar, three plans in flight: bitmasks that wait for two frames",
        v.Config(6, 1, 1, 3, 4, **AHEAD | {"max_frames_in_flight": 3}),
        (a(1, 3, structured_output=True, grammar=GRAMMAR),), vocabulary=(0, 1),
        expected=Counts(930, 3_354, 4_392, 30)),
    World("reasoning", "a grammar that applies once reasoning has ended, drafts",
        v.Config(6, 1, 1, 4, 6, reasoning_end_token_id=2, **NGRAM),
        (a(1, 4, structured_output=True, grammar=GRAMMAR),), vocabulary=(0, 1, 2),
        expected=Counts(4_688, 26_128, 13_403, 30)),
    World("chunked", "two grammars, two plans in flight, one prompt in two chunks",
        v.Config(6, 1, 2, 2, 4, max_frames_in_flight=2, **UNCACHED),
        (a(1, 1, structured_output=True, grammar=GRAMMAR),
         b(2, 1, structured_output=True, grammar=GRAMMAR)),
        expected=Counts(218, 1_047, 1_223, 12)),
)  # fmt: skip
