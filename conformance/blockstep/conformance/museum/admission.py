"""Seeded bugs in admission: prefix hits, the capacity check and the first row of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


def _unlimited_hits(self: Any, slot: int) -> list[int]:
    """Return all cached blocks of the prompt, even if they leave no token to compute."""
    if not self._asks_cache(slot):
        return []
    limit = self.table.num_known[slot] // self.block_size
    hits: list[int] = self.prefix.hits(self.table.lineages[slot], limit)
    if self.config.drops_last_hit_block and hits:
        hits.pop()
    return hits


@PAGE.exhibit(
    "a prefix hit on the whole prompt leaves no token to compute",
    "#30320, #11186; nano-vllm #117, #144",
    "P5 P10 P15",
)
class FullHit(Defect):
    """No token runs, so there are no logits to sample from."""

    _find_hits = _unlimited_hits


@PAGE.exhibit(
    "the capacity check forgets that a hit uses a free block",
    "#11562; TensorRT-LLM #11731",
    "P8 P1 P2",
)
class HitCountsAsFree(Defect):
    """The check treats hit blocks as held, so the admission needs more blocks than are free."""

    def _try_admit(self, slot: int, queue: Any, step: Any) -> Any:
        self.pool.is_free = lambda _block: False
        try:
            return super()._try_admit(slot, queue, step)
        finally:
            del self.pool.is_free


@PAGE.exhibit(
    "hits are touched before the capacity check and leak if it fails",
    "#11565; SGLang #16067",
    "P1 P7",
)
class TouchBeforeCheck(Defect):
    """Each failed admission leaks a reference to every block of the request's prefix hit."""

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
    invisible="policy: which request is admitted when",
)
class AdmissionAfterPreemption(Defect):
    """The admission takes the blocks that a preemption freed, and the next step preempts again."""

    def _schedule_running(self, step: Any) -> None:
        super()._schedule_running(step)
        self._hidden = step.preempted_req_ids[:]
        step.preempted_req_ids.clear()

    def _issue_plan(self, step: Any) -> Any:
        step.preempted_req_ids.extend(self._hidden)
        return super()._issue_plan(step)


@PAGE.exhibit(
    "a hit on the whole prompt is shortened by one token instead of one block",
    "#53706, #53514",
    "P5 P2 P10 P16",
    wrong_fix_of="full-hit",
)
class HitCutInsideABlock(Defect):
    """A shared block is held whole but counted in part, so its last slot is written again."""

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
    "the last block of a hit is always dropped, even if tokens are left to compute",
    "#52617",
    "P5 P15",
    wrong_fix_of="full-hit",
    invisible="efficiency: a block is computed again",
)
class HitLimitOffByOne(Defect):
    """A partly filled last block would have left tokens to compute anyway."""

    def _find_hits(self, slot: int) -> Any:
        most = max(self.table.num_known[slot] // self.block_size - 1, 0)
        return super()._find_hits(slot)[:most]


@PAGE.exhibit(
    "the capacity check credits a hit block that the allocation then drops",
    "TensorRT-LLM #12404",
    "P8 P1 P2",
)
class BoundaryHitCredited(Defect):
    """If a hit ends with the prompt, its last block is dropped, and then one block is missing."""

    def _try_admit(self, slot: int, queue: Any, step: Any) -> bool:
        surplus = len(_unlimited_hits(self, slot)) - len(self._find_hits(slot))
        self.pool.num_free += surplus
        admitted: bool = super()._try_admit(slot, queue, step)
        self.pool.num_free -= surplus
        return admitted


@PAGE.exhibit(
    "hit blocks that were free are charged to the token budget",
    "TensorRT-LLM #11731, #15066",
    "P15",
    wrong_fix_of="hit-counts-as-free",
    invisible="efficiency: a step schedules fewer tokens than it could",
)
class FreeHitsCharged(Defect):
    """A hit on a free block uses it up; here its tokens are charged to the budget as well."""

    def _admit(self, slot: int, hits: Any, needed: int, scheduled: int, step: Any) -> None:
        charged = self.block_size * sum(map(self.pool.is_free, hits))
        super()._admit(slot, hits, needed, scheduled, step)
        step.budget = max(step.budget - charged, 0)


@PAGE.exhibit(
    "hit blocks are subtracted twice from the blocks to allocate", "#11562, #11565", "P8 P26"
)
class HitsCreditedTwice(Defect):
    """Hits reduce the tokens to compute, and then once more the blocks that hold these."""

    def _blocks_to_admit(self, num_tokens: int, num_hits: int) -> Any:
        return super()._blocks_to_admit(num_tokens, 2 * num_hits)


@PAGE.exhibit(
    "admission checks blocks for the first chunk only, not for the whole prompt",
    "#25538, #37307",
    "P15 P10 P8",
    invisible="efficiency: there are more preemptions, but all requests finish",
)
class GateIgnored(Defect):
    """The admitted prompts do not all fit, so they preempt each other in turn."""

    def __init__(self, config: Any) -> None:
        super().__init__(replace(config, scheduler_reserve_full_isl=False))


class _RemembersFull(Defect):
    """Once an admission has failed, every later admission fails, too."""

    _is_full = False

    def _try_admit(self, slot: int, queue: Any, step: Any) -> bool:
        self._is_full = self._is_full or not super()._try_admit(slot, queue, step)
        return not self._is_full


@PAGE.exhibit(
    "a flag that the pool is full is cleared only by a preemption",
    "SGLang #22518, #23284",
    "P15 P10",
)
class StickyFullFlag(_RemembersFull):
    """One failed admission stops all others until a running request is preempted."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        self._is_full = False


@PAGE.exhibit(
    "a flag that the pool is full is cleared only when a request finishes",
    "SGLang #23138, #35537",
    "P15",
    wrong_fix_of="sticky-full-flag",
    invisible="efficiency: a request waits longer than needed, but not for ever",
)
class FullUntilSomeoneEnds(_RemembersFull):
    """A long prompt that used up the token budget makes the next request wait long after it."""

    def _finish(self, slot: int) -> None:
        super()._finish(slot)
        self._is_full = False

    def _schedule_waiting(self, step: Any) -> None:
        self._is_full = self._is_full and bool(self.running)
        super()._schedule_waiting(step)


@PAGE.exhibit(
    "the tokens of a row are counted before its prefix hit is known",
    "nano-vllm #207, #211",
    "P12 P9 P26 P24",
)
class ShareCountedBeforeHits(Defect):
    """A hit found after the first look raises the computed tokens; the row is then too long."""

    def _tokens_to_admit(self, slot: int, num_hit: int, budget: int) -> Any:
        first_looks = self.__dict__.setdefault("_first_looks", {})
        look = (self.table.requests[slot].request_id, self.table.num_known[slot])
        counted = min(first_looks.setdefault(look, num_hit), num_hit)
        return super()._tokens_to_admit(slot, counted, budget)


@PAGE.exhibit(
    "a request whose admission fails keeps a block that was taken for it",
    "review of nano-vllm #207; Dynamo #11016",
    "P7 P12",
    wrong_fix_of="share-counted-before-hits",
)
class RefusedKeepsBlocks(Defect):
    """Blocks are taken before the last check, so two waiting requests can block each other."""

    def _try_admit(self, slot: int, queue: Any, step: Any) -> bool:
        admitted: bool = super()._try_admit(slot, queue, step)
        if not admitted:
            self.table.holdings[slot][0].blocks += self.pool.take(min(self.pool.num_free, 1))
        return admitted


@PAGE.exhibit("a chunk is admitted although the token budget is used up", "SGLang #30743", "P9")
class ChunkBeyondTheBudget(Defect):
    """Every admission gets at least one token."""

    def _schedule_waiting(self, step: Any) -> None:
        step.budget = max(step.budget, 1)
        super()._schedule_waiting(step)


@PAGE.exhibit(
    "a request between two chunks is running and in the waiting queue as well",
    "review of SGLang #26266",
    "P16 P12 P15",
)
class ChunkedStaysQueued(Defect):
    """The request waits in the queue for its next chunk, although it is in the running list."""

    def _schedule_waiting(self, step: Any) -> None:
        super()._schedule_waiting(step)
        known, computed = self.table.num_known, self.table.num_computed
        for slot, num_scheduled, _ in step.admitted:
            if computed[slot] + num_scheduled < known[slot]:
                self.waiting.prepend((slot,))


@PAGE.exhibit(
    "the prefix cache is searched for the first chunk only",
    "Dynamo #13188, #13312",
    "P5",
    invisible="efficiency: blocks are computed again",
)
class HitsWithinAChunk(Defect):
    """The prompt is cut to a chunk before the lookup, so no hit is longer than a chunk."""

    def _find_hits(self, slot: int) -> Any:
        chunk = min(self.max_tokens_per_row, self.config.max_num_batched_tokens)
        return super()._find_hits(slot)[: chunk // self.block_size]
