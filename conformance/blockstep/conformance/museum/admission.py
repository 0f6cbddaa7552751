"""Admission: who is let in, with which hits, and whether there is room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


def _unlimited_hits(self: Any, slot: int) -> list[int]:
    """All cached blocks, without leaving a token to run."""
    if not self._asks_cache(slot):
        return []
    limit = self.table.num_known[slot] // self.block_size
    hits: list[int] = self.prefix.hits(self.table.lineages[slot], limit)
    if self.config.drops_last_hit_block and hits:
        hits.pop()
    return hits


@PAGE.exhibit(
    "a full hit leaves nothing to compute", "#30320, #11186; nano-vllm #117, #144", "P5 P10 P15"
)
class FullHit(Defect):
    """There is no token to run, so no logits to sample from."""

    _find_hits = _unlimited_hits


@PAGE.exhibit(
    "the capacity check forgets that a hit uses a free block",
    "#11562; TensorRT-LLM #11731",
    "P8 P1 P2",
)
class HitCountsAsFree(Defect):
    """More is promised than there is."""

    def _try_admit(self, slot: int, queue: Any, step: Any) -> Any:
        self.pool.is_free = lambda _block: False
        try:
            return super()._try_admit(slot, queue, step)
        finally:
            del self.pool.is_free


@PAGE.exhibit("hits are held before the check, and not let go", "#11565; SGLang #16067", "P1 P7")
class TouchBeforeCheck(Defect):
    """Every refused admission leaks the blocks of its prefix."""

    def _try_admit(self, slot: int, queue: Any, step: Any) -> bool:
        hits = self._find_hits(slot)
        admitted: bool = super()._try_admit(slot, queue, step)
        if not admitted:
            self.pool.touch(hits)
        return admitted


@PAGE.exhibit(
    "requests are admitted in a step that preempted",
    "vLLM V1: Admission Gate",
    "P16 P15",
    invisible="policy: who is admitted when",
)
class AdmissionAfterPreemption(Defect):
    """What was just freed is given away, and the next step preempts again."""

    def _schedule_running(self, step: Any) -> None:
        super()._schedule_running(step)
        self._hidden = step.preempted_req_ids[:]
        step.preempted_req_ids.clear()

    def _issue_plan(self, step: Any) -> Any:
        step.preempted_req_ids.extend(self._hidden)
        return super()._issue_plan(step)


@PAGE.exhibit(
    "a full hit is cut to all but the last token",
    "#53706, #53514",
    "P5 P2 P10 P16",
    wrong_fix_of="full-hit",
)
class HitCutInsideABlock(Defect):
    """A shared block is held whole and counted in part, so its last token is written again."""

    _find_hits = _unlimited_hits

    def _tokens_to_admit(self, slot: int, num_hit: int, budget: int) -> Any:
        self._cut = max(num_hit - self.table.num_known[slot] + 1, 0)
        return super()._tokens_to_admit(slot, num_hit - self._cut, budget)

    def _blocks_to_admit(self, num_tokens: int, num_hits: int) -> Any:
        return super()._blocks_to_admit(num_tokens - self._cut, num_hits)

    def _admit(self, slot: int, hits: Any, needed: int, scheduled: int, step: Any) -> None:
        super()._admit(slot, hits, needed, scheduled, step)
        self.table.num_computed[slot] -= self._cut


@PAGE.exhibit(
    "a block is given up where a token was enough",
    "#52617",
    "P5 P15",
    wrong_fix_of="full-hit",
    invisible="efficiency: a block is computed again",
)
class HitLimitOffByOne(Defect):
    """The tail of the prompt would have left tokens to run anyway."""

    def _find_hits(self, slot: int) -> Any:
        most = max(self.table.num_known[slot] // self.block_size - 1, 0)
        return super()._find_hits(slot)[:most]


@PAGE.exhibit(
    "at a block's end the check credits a hit too many", "TensorRT-LLM #12404", "P8 P1 P2"
)
class BoundaryHitCredited(Defect):
    """A hit on the very last block is given up by the allocation, which then finds no block."""

    def _try_admit(self, slot: int, queue: Any, step: Any) -> bool:
        surplus = len(_unlimited_hits(self, slot)) - len(self._find_hits(slot))
        self.pool.num_free += surplus
        admitted: bool = super()._try_admit(slot, queue, step)
        self.pool.num_free -= surplus
        return admitted


@PAGE.exhibit(
    "hits that nobody holds are charged to the budget",
    "TensorRT-LLM #11731, #15066",
    "P15",
    wrong_fix_of="hit-counts-as-free",
    invisible="efficiency: a step runs fewer tokens than it might",
)
class FreeHitsCharged(Defect):
    """They cost a free block each, and are taken to cost the tokens in them as well."""

    def _admit(self, slot: int, hits: Any, needed: int, scheduled: int, step: Any) -> None:
        charged = self.block_size * sum(map(self.pool.is_free, hits))
        super()._admit(slot, hits, needed, scheduled, step)
        step.budget = max(step.budget - charged, 0)


@PAGE.exhibit("hits are credited twice", "#11562, #11565", "P8 P26")
class HitsCreditedTwice(Defect):
    """They lower the tokens to run, and once more the blocks to hold them."""

    def _blocks_to_admit(self, num_tokens: int, num_hits: int) -> Any:
        return super()._blocks_to_admit(num_tokens, 2 * num_hits)


@PAGE.exhibit(
    "admission looks at the first chunk only",
    "#25538, #37307",
    "P15 P10 P8",
    invisible="efficiency: there are more preemptions, and all requests end",
)
class GateIgnored(Defect):
    """Prompts are let in that cannot all stay, and preempt each other in turn."""

    def __init__(self, config: Any) -> None:
        super().__init__(replace(config, scheduler_reserve_full_isl=False))


class _RemembersFull(Defect):
    """Once somebody was refused, so is everybody."""

    _is_full = False

    def _try_admit(self, slot: int, queue: Any, step: Any) -> bool:
        self._is_full = self._is_full or not super()._try_admit(slot, queue, step)
        return not self._is_full


@PAGE.exhibit("the scheduler remembers that it was full", "SGLang #22518, #23284", "P15 P10")
class StickyFullFlag(_RemembersFull):
    """What was refused once is refused for ever, for only a preemption asks again."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        self._is_full = False


@PAGE.exhibit(
    "being full is forgotten only when a request ends",
    "SGLang #23138, #35537",
    "P15",
    wrong_fix_of="sticky-full-flag",
    invisible="efficiency: somebody waits longer than needed, not for ever",
)
class FullUntilSomeoneEnds(_RemembersFull):
    """A budget spent on a long prompt leaves the next request waiting long after."""

    def _finish(self, slot: int) -> None:
        super()._finish(slot)
        self._is_full = False

    def _schedule_waiting(self, step: Any) -> None:
        self._is_full = self._is_full and bool(self.running)
        super()._schedule_waiting(step)


@PAGE.exhibit(
    "the share of a row is counted before its hits", "nano-vllm #207, #211", "P12 P9 P26 P24"
)
class ShareCountedBeforeHits(Defect):
    """A hit found since the first look raises what is computed, and the row runs past its end."""

    def _tokens_to_admit(self, slot: int, num_hit: int, budget: int) -> Any:
        first_looks = self.__dict__.setdefault("_first_looks", {})
        look = (self.table.requests[slot].request_id, self.table.num_known[slot])
        counted = min(first_looks.setdefault(look, num_hit), num_hit)
        return super()._tokens_to_admit(slot, counted, budget)


@PAGE.exhibit(
    "who is refused keeps the blocks of its attempt",
    "review of nano-vllm #207; Dynamo #11016",
    "P7 P12",
    wrong_fix_of="share-counted-before-hits",
)
class RefusedKeepsBlocks(Defect):
    """Blocks are taken before the last check; two who wait can hold what the other one needs."""

    def _try_admit(self, slot: int, queue: Any, step: Any) -> bool:
        admitted: bool = super()._try_admit(slot, queue, step)
        if not admitted:
            self.table.holdings[slot][0].blocks += self.pool.take(min(self.pool.num_free, 1))
        return admitted


@PAGE.exhibit("a chunk is admitted with the budget used up", "SGLang #30743", "P9")
class ChunkBeyondTheBudget(Defect):
    """At least one token is always granted."""

    def _schedule_waiting(self, step: Any) -> None:
        step.budget = max(step.budget, 1)
        super()._schedule_waiting(step)


@PAGE.exhibit("a request in chunks is also in the queue", "review of SGLang #26266", "P16 P12 P15")
class ChunkedStaysQueued(Defect):
    """It waits for its next chunk in one place, and runs it from another."""

    def _schedule_waiting(self, step: Any) -> None:
        super()._schedule_waiting(step)
        known, computed = self.table.num_known, self.table.num_computed
        for slot, num_scheduled, _ in step.admitted:
            if computed[slot] + num_scheduled < known[slot]:
                self.waiting.prepend((slot,))


@PAGE.exhibit(
    "the cache is asked for the first chunk only",
    "Dynamo #13188, #13312",
    "P5",
    invisible="efficiency: blocks are computed again",
)
class HitsWithinAChunk(Defect):
    """The prompt is cut before it is looked up, so no hit is longer than a chunk."""

    def _find_hits(self, slot: int) -> Any:
        chunk = min(self.max_tokens_per_row, self.config.max_num_batched_tokens)
        return super()._find_hits(slot)[: chunk // self.block_size]
