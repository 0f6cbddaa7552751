"""Worlds: the scopes that are walked by name, and what there is in each.

A config begins with its five sizes: blocks, slots of a block, seats, tokens of a step, tokens of
the model. Requests are greedy, their tokens equal. The first worlds are a handful of states each,
made for one thing; the others are as large as can be walked in minutes. Counts are committed: a
change of the specification shows as others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from blockstep.conformance.explore.world import Counts, World
from blockstep.spec import vocabulary as v

_LIKE_0 = 193
"""The first token whose block, alone, has a SHA-256 that begins like that of token 0."""
_BOTH = (False, True)


def _request(name: v.RequestId, num_tokens: int, max_tokens: int, **more: Any) -> v.Request:
    """So many equal tokens, and at most so many to sample."""
    prompt = (more.pop("token", 0),) * num_tokens
    return v.Request(name, prompt, max_tokens=max_tokens, **more)


def _item(name: str, offset: int, length: int = 1, **more: Any) -> v.MultiModalItem:
    return v.MultiModalItem(name, offset, length, **more)


def _encoder(budget: int, size: int) -> dict[str, Any]:
    return {"encoder_compute_budget": budget, "encoder_cache_size": size}


def _group(kind: str, block_size: int, **more: Any) -> v.KVGroup:
    return v.KVGroup(v.GroupKind(kind), block_size, **more)


_a, _b, _c = (partial(_request, name) for name in "ABC")
_RANKED: dict[str, Any] = {"policy": v.Policy.PRIORITY}
_UNRESERVED: dict[str, Any] = {"scheduler_reserve_full_isl": False}
_UNCACHED: dict[str, Any] = {"enable_prefix_caching": False}
_AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}
_WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 1, sliding_window=2)
_FULL = v.KVGroup(v.GroupKind.FULL, 1)
_FULL_OF_2 = v.KVGroup(v.GroupKind.FULL, 2)
_ONE_TOKEN = v.Grammar((((0, 1),), ()))
_ACROSS = v.KVGroup(v.GroupKind.CROSS_ATTENTION, 1)
_CHUNKS = v.KVGroup(v.GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=4)


_GRAMMAR = v.Grammar((((0, 1),), ((1, 0), (2, 2)), ()))
"""0, then 1 and once more, or 2 and whatever comes."""


def _states(block_size: int, mode: v.MambaCacheMode, num_speculative: int = 0) -> v.KVGroup:
    return v.KVGroup(
        v.GroupKind.RECURRENT,
        block_size,
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative,
    )


_HEAD: dict[str, Any] = {"spec_method": v.SpecMethod.EAGLE, "num_speculative_tokens": 1}
_BESIDE: dict[str, Any] = {
    "enable_chunked_prefill": False,
    "disable_chunked_mm_input": True,
    "is_encoder_decoder": True,
}
_NGRAM: dict[str, Any] = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 1}

_TABLE = (
    World("loop", "one request that finds its own first block again",
        v.Config(3, 1, 1, 2, 3), (_a(2, 1),), expected=Counts(8, 11, 21, 5)),
    World("pair", "two requests, three blocks, two tokens to sample, aborts",
        v.Config(4, 2, 2, 3, 6), (_a(3, 2), _b(2, 2)),
        vocabulary=(0, 1), aborts=True, expected=Counts(1_071, 4_265, 3_583, 21)),
    World("equals",
        "PRIORITY, no caching: two of one rank that do not both fit, one that never does",
        v.Config(4, 1, 2, 4, 5, **_RANKED, **_UNRESERVED, **_UNCACHED),
        (_a(1, 3), _b(1, 3), _c(3, 2)),
        aborts=True, expected=Counts(127, 576, 644, 11)),
    World("endings", "every way to end: eos, a stop token, both lengths, repetition; min_tokens",
        v.Config(5, 2, 2, 4, 4),
        (_a(2, 3, min_tokens=3, stop_token_ids=(1,)),
         _b(1, 3, min_tokens=1, eos_token_id=1, repetition_detection=v.RepetitionDetection(1)),
         _c(1, 1, stop_token_ids=(1,))),
        vocabulary=(0, 1), expected=Counts(1_705, 3_686, 6_611, 20)),
    World("items", "blocks of equal tokens that items keep apart: which, and where",
        v.Config(5, 3, 2, 4, 5),
        (_a(2, 2, items=(_item("x", 0), _item("z", 1))), _b(3, 2, items=(_item("z", 0),)),
         _c(3, 2, items=(_item("z", 1),))),
        expected=Counts(1_984, 3_637, 8_419, 24)),
    World("embeds",
        "blocks of equal tokens that embeddings keep apart: in the first block, and behind it",
        v.Config(5, 2, 2, 4, 5),
        (_a(3, 2, prompt_embeds=(1, 1, 1)), _b(4, 1, prompt_embeds=(1, 2, 1, 1)),
         _c(3, 1, prompt_embeds=(1, 1, 2))),
        expected=Counts(1_122, 2_099, 4_527, 19)),
    World("tail", "a second block that two items of the prompt and an output fill",
        v.Config(4, 3, 1, 5, 8), (_a(5, 2, items=(_item("x", 3), _item("z", 4))),),
        expected=Counts(16, 21, 43, 12)),
    World("names",
        "blocks of equal tokens that an adapter or a salt keeps apart, and who must not look",
        v.Config(4, 1, 2, 3, 3),
        (_a(2, 1, adapter="m"), _b(2, 1, cache_salt="m"), _c(2, 1, skip_reading_prefix_cache=True)),
        expected=Counts(480, 919, 1_801, 10)),
    World("whole",
        "no chunked prefill: a prompt waits for a budget that holds it; repetition, or none",
        v.Config(9, 1, 3, 4, 4, enable_chunked_prefill=False, **_UNCACHED),
        (_a(2, 2), _b(3, 1), _c(1, 3, repetition_detection=v.RepetitionDetection(1))),
        vocabulary=(0, 1), expected=Counts(317, 775, 1_427, 9)),
    World("seats", "PRIORITY, one seat; and two tokens whose digests begin with the same byte",
        v.Config(4, 1, 1, 3, 4, **_RANKED),
        (_a(1, 2, priority=1), _b(3, 1), _c(2, 1, token=_LIKE_0)),
        expected=Counts(184, 428, 700, 12)),
    World("shared", "a victim that shares a block, and one that finds its own after two chunks",
        v.Config(6, 1, 3, 5, 5, long_prefill_token_threshold=2, **_UNRESERVED),
        (_a(1, 2), _b(4, 1, token=1), _c(2, 2)),
        expected=Counts(1_500, 2_704, 6_446, 18)),
    World("rows", "PRIORITY, no caching: whose row is taken back, and who gets what it leaves",
        v.Config(7, 1, 3, 4, 6, long_prefill_token_threshold=2,
                 **_RANKED, **_UNRESERVED, **_UNCACHED),
        (_a(1, 4, priority=2), _b(3, 1, priority=1), _c(4, 1)),
        aborts=True, expected=Counts(1_437, 6_961, 7_287, 26)),
    World("signals", "a grammar, pauses, both resets",
        v.Config(4, 1, 2, 2, 4),
        (_a(1, 2, structured_output=True), _b(1, 2, structured_output=True), _c(1, 1)),
        aborts=True, resets=_BOTH, pauses=tuple(v.PauseState),
        expected=Counts(14_841, 168_507, 68_064, 23)),
    World("chunks", "a threshold of one token, a hit within a prompt, no reservation",
        v.Config(5, 1, 3, 3, 5, long_prefill_token_threshold=1, **_UNRESERVED),
        (_a(3, 2), _b(3, 2), _c(3, 2)),
        aborts=True, expected=Counts(1_632, 8_012, 6_829, 20)),
    World("storm", "PRIORITY: blocks so short that a step takes back what it has planned",
        v.Config(4, 2, 3, 3, 6, **_RANKED, **_UNRESERVED),
        (_a(1, 4, priority=2), _b(1, 3, priority=1), _c(1, 2)),
        aborts=True, resets=_BOTH, expected=Counts(9_770, 68_317, 45_523, 26)),
    World("victims", "PRIORITY, drafts: who is preempted was planned in this very step",
        v.Config(5, 2, 2, 4, 8, **_RANKED, **_UNRESERVED, **_NGRAM),
        (_a(2, 4, priority=1), _b(2, 4)),
        aborts=True, expected=Counts(3_467, 17_024, 12_114, 21)),
    World("guesses", "drafts of a head: lookahead slots, the last hit block given back",
        v.Config(5, 2, 2, 4, 6, spec_method=v.SpecMethod.EAGLE, num_speculative_tokens=1),
        (_a(3, 3), _b(2, 3)),
        vocabulary=(0, 1), aborts=True, expected=Counts(5_885, 39_078, 19_498, 22)),
    World("together", "full attention and a window, either of which would fit alone",
        v.Config(5, 1, 1, 1, 5, groups=(_FULL, _WINDOW)), (_a(3, 2), _b(1, 1)),
        expected=Counts(12, 17, 39, 8)),
    World("charged", "a window of two tokens, and a prompt that is longer than the pool",
        v.Config(4, 1, 1, 1, 6, groups=(_WINDOW,)), (_a(5, 1),), expected=Counts(20, 25, 55, 16)),
    World("snug", "a window of two tokens, and a pool of two blocks",
        v.Config(3, 1, 1, 1, 6, groups=(_WINDOW,)), (_a(5, 1),), expected=Counts(16, 19, 49, 13)),
    World("ragged", "chunks of five tokens, which begin and end inside blocks of three",
        v.Config(4, 3, 1, 1, 7, groups=(_group("chunked_local", 3, attention_chunk_size=5),)),
        (_a(6, 1),), expected=Counts(26, 31, 76, 22)),
    World("heads", "drafts of a head, full attention and a window in blocks of two sizes",
        v.Config(24, 1, 1, 1, 11, spec_method=v.SpecMethod.EAGLE, num_speculative_tokens=1,
                 groups=(_group("full", 3), _group("sliding_window", 1, sliding_window=3))),
        (_a(10, 1),), expected=Counts(51, 102, 158, 44)),
    World("repeated", "drafts of a head, full attention and a window: a prompt that comes again",
        v.Config(9, 1, 1, 3, 5, spec_method=v.SpecMethod.EAGLE, num_speculative_tokens=1,
                 groups=(_FULL, _WINDOW)),
        (_a(3, 1),), expected=Counts(12, 24, 27, 8)),
    World("narrow", "a window of one token, which needs nothing before it, beside full attention",
        v.Config(9, 1, 1, 4, 6, groups=(_FULL, _group("sliding_window", 1, sliding_window=1))),
        (_a(4, 1), _b(2, 1, token=1)), expected=Counts(389, 681, 1_131, 33)),
    World("uncut", "full attention in blocks of two sizes, and a window that lost its own",
        v.Config(11, 1, 1, 1, 6, groups=(_WINDOW, _FULL, _group("full", 2))),
        (_a(4, 1), _b(2, 1, token=1)), expected=Counts(121, 198, 410, 18)),
    World("doubts", "a window, two plans in flight: of two drafts in each some may be rejected",
        v.Config(8, 1, 1, 3, 7, **_AHEAD, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2,
                 groups=(_WINDOW,)),
        (_a(2, 4),), expected=Counts(202, 387, 647, 18)),
    World("starved", "a budget of half a block, at the end of which chunks leave a state",
        v.Config(6, 4, 1, 2, 6, groups=(_states(4, v.MambaCacheMode.ALIGN),)), (_a(5, 1),),
        expected=Counts(12, 15, 35, 9)),
    World("zeroed", "a window whose blocks may hold states of others",
        v.Config(8, 1, 1, 4, 4, groups=(_WINDOW, _states(1, v.MambaCacheMode.ALIGN))), (_a(2, 1),),
        expected=Counts(17, 24, 39, 11)),
    World("withdrawn", "PRIORITY, a state: who takes a block, and loses it in the same step",
        v.Config(8, 1, 2, 4, 5, **_RANKED, **_UNRESERVED, **_UNCACHED,
                 groups=(_FULL, _states(5, v.MambaCacheMode.NONE))),
        (_a(1, 4, priority=1), _b(2, 3)), expected=Counts(79, 109, 335, 21)),
    World("edge", "an item that ends where the blocks of the outputs begin",
        v.Config(5, 1, 1, 2, 4), (_a(1, 3, items=(_item("z", 0),)),),
        expected=Counts(20, 25, 59, 16)),
    World("seat", "two adapters and one seat, two plans in flight, forced resets",
        v.Config(5, 1, 3, 3, 3, max_frames_in_flight=2, max_loras=1),
        (_a(1, 2, adapter="x"), _b(1, 1, adapter="y")),
        aborts=True, resets=(True,), expected=Counts(3_149, 15_651, 11_589, 21)),
    World("free", "one seat for adapters, and a request that needs none",
        v.Config(3, 1, 2, 2, 2, max_loras=1, **_UNCACHED), (_a(1, 1, adapter="x"), _b(1, 1)),
        expected=Counts(26, 44, 84, 6)),
    World("session", "a session of two chunks, and one that lacks its blocks; both resets between",
        v.Config(4, 2, 2, 3, 6), (_a(1, 1, resumable=True), _b(3, 1)),
        vocabulary=(0, 1), aborts=True, resets=_BOTH,
        updates=(_a(1, 2, token=1, resumable=True), _a(1, 1)),
        expected=Counts(7_898, 50_673, 36_484, 31)),
    World("overshot", "a session that stops amid the drafts that it has accepted",
        v.Config(7, 1, 1, 4, 6, spec_method=v.SpecMethod.DRAFT_MODEL, num_speculative_tokens=2),
        (_a(1, 2, resumable=True),), updates=(_a(2, 1, resumable=True), _a(1, 1)),
        expected=Counts(255, 944, 1_019, 21)),
    World("behind", "a session that stops while its next row is in flight",
        v.Config(5, 1, 1, 3, 5, **_AHEAD), (_a(1, 2, resumable=True, stop_token_ids=(1,)),),
        vocabulary=(0, 1), resets=(True,), updates=(_a(1, 2, resumable=True), _a(1, 1)),
        expected=Counts(1_438, 4_847, 6_370, 20)),
    World("anew", "a session whose chunks each begin a grammar",
        v.Config(6, 1, 1, 3, 5),
        (_a(1, 1, structured_output=True, grammar=_ONE_TOKEN, resumable=True),),
        vocabulary=(0, 1), updates=(_a(1, 2, resumable=True), _a(1, 1)),
        expected=Counts(1_674, 6_412, 6_374, 31)),
    World("grammar", "a grammar of three tokens, drafts, forced resets",
        v.Config(6, 1, 1, 3, 6, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2),
        (_a(1, 4, structured_output=True, grammar=_GRAMMAR, eos_token_id=2, min_tokens=2),),
        vocabulary=(0, 1, 2), resets=(True,),
        expected=Counts(632, 8_291, 2_096, 30)),
    World("masks", "a grammar, two plans in flight, drafts with the worker: what a mask cuts off",
        v.Config(8, 1, 1, 3, 6, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2, **_AHEAD),
        (_a(1, 3, structured_output=True, grammar=_GRAMMAR),), vocabulary=(0, 1, 2),
        expected=Counts(1_530, 13_547, 8_049, 40)),
    World("reasoning", "a grammar that holds once reasoning has ended, drafts",
        v.Config(6, 1, 1, 4, 6, reasoning_end_token_id=2, **_NGRAM),
        (_a(1, 4, structured_output=True, grammar=_GRAMMAR),), vocabulary=(0, 1, 2),
        expected=Counts(4_688, 26_128, 13_403, 30)),
    World("chunked", "two grammars, two plans in flight, one prompt in two chunks",
        v.Config(6, 1, 2, 2, 4, max_frames_in_flight=2, **_UNCACHED),
        (_a(1, 1, structured_output=True, grammar=_GRAMMAR),
         _b(2, 1, structured_output=True, grammar=_GRAMMAR)),
        expected=Counts(218, 1_047, 1_223, 12)),
    World("alone", "one request with room for drafts that finds its own first block again",
        v.Config(4, 1, 1, 2, 5, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2),
        (_a(2, 1),), expected=Counts(12, 31, 27, 8)),
    World("brink", "two requests, and more drafts than the model length has room for",
        v.Config(5, 1, 2, 5, 3, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=3),
        (_a(1, 2), _b(1, 2)), expected=Counts(109, 673, 342, 11)),
    World("gap", "two plans in flight, drafts with the worker, a budget for one of two",
        v.Config(6, 2, 2, 2, 6, **_AHEAD, **_NGRAM), (_a(1, 4), _b(1, 4)),
        aborts=True, resets=(True,), expected=Counts(6_299, 31_902, 28_543, 29)),
    World("ahead", "PRIORITY, two plans in flight: preempted and reset while tokens are owed",
        v.Config(4, 2, 3, 4, 5, **_RANKED, **_AHEAD, **_UNRESERVED),
        (_a(1, 2, priority=2), _b(1, 3, priority=1), _c(2, 2)),
        aborts=True, resets=(True,), expected=Counts(19_364, 115_922, 124_945, 23)),
    World("pipeline",
        "two plans in flight, no placeholders: chunks in both, preempted and reset in flight",
        v.Config(4, 2, 2, 2, 6, max_frames_in_flight=2, **_UNRESERVED, **_NGRAM),
        (_a(3, 2), _b(2, 3)),
        aborts=True, resets=(True,), expected=Counts(3_374, 20_404, 17_153, 21)),
    World("window", "full attention and a window of two tokens: what is left, and what is hit",
        v.Config(10, 1, 2, 3, 5, **_UNRESERVED, groups=(_FULL, _WINDOW)), (_a(3, 2), _b(2, 2)),
        vocabulary=(0, 1), aborts=True, resets=(True,),
        expected=Counts(10_862, 53_623, 34_211, 36)),
    World("doubt", "a window, two plans in flight: a draft that may be rejected holds it back",
        v.Config(6, 1, 1, 3, 7, **_AHEAD, **_NGRAM, groups=(_WINDOW,)), (_a(3, 4),),
        vocabulary=(0, 1), aborts=True, expected=Counts(2_484, 7_817, 6_846, 27)),
    World("kinds", "full attention, a window and chunks, in blocks of one token and of two",
        v.Config(17, 1, 2, 3, 6, groups=(_WINDOW, _CHUNKS, _FULL)), (_a(5, 2), _b(4, 1)),
        vocabulary=(0, 1), aborts=True, expected=Counts(2_472, 9_830, 7_708, 38)),
    World("states", "full attention and states that chunks end at, in blocks of two tokens",
        v.Config(8, 2, 2, 3, 7, **_UNRESERVED,
                 groups=(_FULL_OF_2, _states(2, v.MambaCacheMode.ALIGN))),
        (_a(5, 2), _b(4, 1)), aborts=True, expected=Counts(3_220, 11_891, 10_133, 29)),
    World("marks", "full attention and a state behind each token, drafts",
        v.Config(13, 1, 2, 3, 5, **_NGRAM, groups=(_FULL, _states(1, v.MambaCacheMode.ALL, 1))),
        (_a(3, 2), _b(2, 1)), aborts=True, expected=Counts(3_337, 16_274, 10_398, 26)),
    World("copies", "states in larger blocks than the rest, two plans in flight, drafts",
        v.Config(9, 2, 1, 4, 8, **_AHEAD, **_NGRAM,
                 groups=(_FULL_OF_2, _states(4, v.MambaCacheMode.ALIGN, 1))), (_a(3, 5),),
        vocabulary=(0, 1), aborts=True, expected=Counts(1_355, 5_052, 4_241, 20)),
    World("rewritten", "no caching, so one state that is written over, drafts",
        v.Config(7, 2, 2, 3, 4, **_UNCACHED, **_NGRAM,
                 groups=(_states(4, v.MambaCacheMode.NONE, 1), _FULL_OF_2)),
        (_a(1, 3), _b(2, 2)),
        vocabulary=(0, 1), aborts=True, expected=Counts(580, 4_029, 2_074, 12)),
    World("cache", "a cache for one item, which two requests bring, and one each of their own",
        v.Config(6, 2, 2, 3, 5, **_encoder(1, 1)),
        (_a(3, 1, items=(_item("x", 0), _item("y", 2))), _b(3, 1, items=(_item("x", 1),))),
        aborts=True, resets=(True,), encoder_resets=True, offers=((), ("x",)),
        expected=Counts(2_754, 21_050, 9_878, 26)),
    World("twice", "one item at two places of a prompt, and a chunk that ends within the second",
        v.Config(6, 2, 2, 3, 6, **_encoder(2, 2)),
        (_a(4, 1, items=(_item("x", 0, 2), _item("x", 2, 2))), _b(2, 1, items=(_item("y", 0, 2),))),
        aborts=True, expected=Counts(1_838, 6_862, 5_702, 23)),
    World("lookahead", "a draft head that reads one token ahead: two items side by side, twice",
        v.Config(9, 1, 2, 2, 6, long_prefill_token_threshold=1, **_encoder(4, 4), **_HEAD),
        (_a(3, 1, items=(_item("x", 0, 2), _item("y", 2))),
         _b(3, 1, items=(_item("z", 0, 2), _item("w", 2)))),
        expected=Counts(299, 897, 1_025, 23)),
    World("parts", "whole items, a mask, and a head: what begins, and what is not read yet",
        v.Config(9, 1, 2, 3, 6, disable_chunked_mm_input=True, **_encoder(2, 2), **_HEAD),
        (_a(4, 1, items=(_item("x", 1, 3, is_embed=(False, True, True)),)),
         _b(2, 1, items=(_item("y", 0, 2),))),
        expected=Counts(263, 789, 801, 17)),
    World("compute", "PRIORITY, no caching: a row with an item is taken back for one with another",
        v.Config(8, 1, 3, 4, 5, long_prefill_token_threshold=1,
                 **_RANKED, **_UNRESERVED, **_UNCACHED, **_encoder(2, 3)),
        (_a(4, 1, priority=2, items=(_item("x", 3),)),
         _b(3, 1, priority=1, items=(_item("y", 2),)), _c(2, 1, items=(_item("z", 1),))),
        expected=Counts(2_609, 4_630, 11_947, 22)),
    World("beside", "an encoder-decoder model: an item has room in the step that makes it",
        v.Config(8, 2, 2, 4, 4, **_BESIDE, **_UNCACHED, **_encoder(2, 3)),
        (_a(1, 2, items=(_item("x", 0, 2),)), _b(2, 2, items=(_item("y", 0),)), _c(1, 1)),
        aborts=True, encoder_resets=True, expected=Counts(1_280, 7_454, 5_858, 13)),
    World("across", "an encoder-decoder model: blocks across come out of the pool that tokens need",
        v.Config(7, 1, 2, 4, 4, **_BESIDE, **_UNCACHED, **_UNRESERVED, **_encoder(2, 2),
                 groups=(_FULL, _ACROSS)),
        (_a(1, 3, items=(_item("x", 0, 2),)), _b(1, 3, items=(_item("y", 0),))),
        aborts=True, resets=(True,), expected=Counts(314, 1_422, 1_352, 11)),
    World("loaded", "two items, compute for one of them, and a connector that may hold the other",
        v.Config(5, 1, 1, 4, 5, **_encoder(1, 2)),
        (_a(3, 1, items=(_item("x", 0), _item("y", 2))),), offers=((), ("y",)),
        expected=Counts(28, 94, 68, 10)),
    World("tokens", "FCFS with caching: three tokens to sample, two of them alike, both resets",
        v.Config(5, 2, 3, 3, 6), (_a(3, 3), _b(2, 3)),
        vocabulary=(0, 1, 2), aborts=True, resets=_BOTH,
        expected=Counts(22_054, 140_008, 74_149, 26)),
    World("deep", "FCFS with caching, three plans in flight, forced resets",
        v.Config(5, 2, 2, 4, 6, **_AHEAD | {"max_frames_in_flight": 3}), (_a(3, 3), _b(2, 3)),
        vocabulary=(0, 1), aborts=True, resets=_BOTH,
        expected=Counts(39_657, 266_443, 211_252, 25)),
    World("fcfs", "FCFS with caching: three requests, two of them alike, aborts and both resets",
        v.Config(5, 2, 3, 3, 6), (_a(3, 3), _b(2, 3), _c(2, 3)),
        vocabulary=(0, 1), aborts=True, resets=_BOTH,
        expected=Counts(84_742, 614_543, 345_573, 32)),
    World("priority",
        "PRIORITY with caching: three requests of three ranks that do not all fit, aborts",
        v.Config(5, 2, 3, 4, 6, **_RANKED, **_UNRESERVED),
        (_a(3, 3, priority=2), _b(2, 3, priority=1), _c(1, 3)),
        vocabulary=(0, 1), aborts=True, expected=Counts(150_030, 834_490, 605_032, 34)),
    World("plain", "no caching, three alike, drafts with the worker, two plans in flight",
        v.Config(6, 2, 3, 4, 7, **_AHEAD, **_UNRESERVED, **_UNCACHED, **_NGRAM),
        (_a(3, 4), _b(3, 4), _c(3, 4)),
        aborts=True, resets=(True,), expected=Counts(10_950, 63_984, 78_558, 29)),
    World("async-priority", "PRIORITY, two plans in flight, drafts with the worker, forced resets",
        v.Config(5, 2, 3, 4, 6, **_RANKED, **_AHEAD, **_UNRESERVED, **_NGRAM),
        (_a(3, 3, priority=2), _b(2, 3, priority=1), _c(1, 3)),
        aborts=True, resets=(True,), expected=Counts(94_722, 598_238, 599_032, 38)),
    World("async", "FCFS with caching, two plans in flight, two tokens to sample, aborts",
        v.Config(5, 2, 3, 4, 6, **_AHEAD), (_a(3, 3), _b(2, 3), _c(2, 3)),
        vocabulary=(0, 1), aborts=True, expected=Counts(165_003, 1_003_091, 805_282, 28)),
    World("drafts", "FCFS with caching, drafts of a model with KV of its own, aborts",
        v.Config(6, 2, 3, 4, 6, spec_method=v.SpecMethod.DRAFT_MODEL, num_speculative_tokens=1),
        (_a(3, 3), _b(2, 3), _c(2, 3)),
        vocabulary=(0, 1), aborts=True, expected=Counts(391_979, 3_729_666, 1_554_063, 30)),
)  # fmt: skip
WORLDS: Mapping[str, World] = {world.name: world for world in _TABLE}
"""All worlds: those made for one thing, then the large ones."""
