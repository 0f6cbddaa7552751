"""Admission: who is let in, with which hits, and whether there is room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Methods, Page

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
    "a full hit leaves nothing to compute",
    "#30320, #11186; nano-vllm #117, #144",
    "P5",
    "P10",
    "P15",
)
def full_hit(clean: Any) -> Methods:
    """There is no token to run, so no logits to sample from."""
    return {"_find_hits": _unlimited_hits}


@PAGE.exhibit(
    "the capacity check forgets that a hit uses a free block",
    "#11562; TensorRT-LLM #11731",
    "P8",
    "P1",
    "P2",
)
def hit_counts_as_free(clean: Any) -> Methods:
    """More is promised than there is."""

    def _try_admit(self: Any, slot: int, queue: Any, step: Any) -> bool:
        honest = self.pool.is_free
        self.pool.is_free = lambda _block: False
        try:
            admitted: bool = clean._try_admit(self, slot, queue, step)
        finally:
            self.pool.is_free = honest
        return admitted

    return {"_try_admit": _try_admit}


@PAGE.exhibit("hits are held before the check, and not let go", "#11565; SGLang #16067", "P1", "P7")
def touch_before_check(clean: Any) -> Methods:
    """Every refused admission leaks the blocks of its prefix."""

    def _try_admit(self: Any, slot: int, queue: Any, step: Any) -> bool:
        hits = self._find_hits(slot)
        admitted: bool = clean._try_admit(self, slot, queue, step)
        if not admitted:
            self.pool.touch(hits)
        return admitted

    return {"_try_admit": _try_admit}


@PAGE.exhibit(
    "requests are admitted in a step that preempted", "seed 001 Admission Gate", "P16", "P15"
)
def admission_after_preemption(clean: Any) -> Methods:
    """What was just freed is given away, and the next step preempts again."""

    def _schedule_running(self: Any, step: Any) -> None:
        clean._schedule_running(self, step)
        self._hidden = step.preempted_req_ids[:]
        step.preempted_req_ids.clear()

    def _issue_plan(self: Any, step: Any) -> Any:
        step.preempted_req_ids.extend(self._hidden)
        return clean._issue_plan(self, step)

    return {"_schedule_running": _schedule_running, "_issue_plan": _issue_plan}


@PAGE.exhibit(
    "a full hit is cut to all but the last token",
    "#53706, #53514",
    "P5",
    "P2",
    "P10",
    "P16",
    wrong_fix_of="full-hit",
)
def hit_cut_inside_a_block(clean: Any) -> Methods:
    """A shared block is held whole and counted in part, so its last token is written again."""

    def _tokens_to_admit(self: Any, slot: int, num_hit: int, budget: int) -> int:
        self._cut = max(num_hit - self.table.num_known[slot] + 1, 0)
        tokens: int = clean._tokens_to_admit(self, slot, num_hit - self._cut, budget)
        return tokens

    def _blocks_to_admit(self: Any, num_tokens: int, num_hits: int) -> int:
        blocks: int = clean._blocks_to_admit(self, num_tokens - self._cut, num_hits)
        return blocks

    def _admit(self: Any, slot: int, hits: Any, needed: int, scheduled: int, step: Any) -> None:
        clean._admit(self, slot, hits, needed, scheduled, step)
        self.table.num_computed[slot] -= self._cut

    return {
        "_find_hits": _unlimited_hits,
        "_tokens_to_admit": _tokens_to_admit,
        "_blocks_to_admit": _blocks_to_admit,
        "_admit": _admit,
    }


@PAGE.exhibit(
    "a block is given up where a token was enough", "#52617", "P5", "P15", wrong_fix_of="full-hit"
)
def hit_limit_off_by_one(clean: Any) -> Methods:
    """The tail of the prompt would have left tokens to run anyway."""

    def _find_hits(self: Any, slot: int) -> list[int]:
        hits: list[int] = clean._find_hits(self, slot)
        return hits[: max(self.table.num_known[slot] // self.block_size - 1, 0)]

    return {"_find_hits": _find_hits}


@PAGE.exhibit(
    "at a block's end the check credits a hit too many", "TensorRT-LLM #12404", "P8", "P1", "P2"
)
def boundary_hit_credited(clean: Any) -> Methods:
    """A hit on the very last block is given up by the allocation, which then finds no block."""

    def _try_admit(self: Any, slot: int, queue: Any, step: Any) -> bool:
        surplus = len(_unlimited_hits(self, slot)) - len(self._find_hits(slot))
        self.pool.num_free += surplus
        admitted: bool = clean._try_admit(self, slot, queue, step)
        self.pool.num_free -= surplus
        return admitted

    return {"_try_admit": _try_admit}


@PAGE.exhibit(
    "hits that nobody holds are charged to the budget",
    "TensorRT-LLM #11731, #15066",
    "P15",
    wrong_fix_of="hit-counts-as-free",
)
def free_hits_charged(clean: Any) -> Methods:
    """They cost a free block each, and are taken to cost the tokens in them as well."""

    def _admit(self: Any, slot: int, hits: Any, needed: int, scheduled: int, step: Any) -> None:
        charged = self.block_size * sum(map(self.pool.is_free, hits))
        clean._admit(self, slot, hits, needed, scheduled, step)
        step.budget = max(step.budget - charged, 0)

    return {"_admit": _admit}


@PAGE.exhibit("hits are credited twice", "#11562, #11565", "P8", "P26")
def hits_credited_twice(clean: Any) -> Methods:
    """They lower the tokens to run, and once more the blocks to hold them."""

    def _blocks_to_admit(self: Any, num_tokens: int, num_hits: int) -> int:
        blocks: int = clean._blocks_to_admit(self, num_tokens, 2 * num_hits)
        return blocks

    return {"_blocks_to_admit": _blocks_to_admit}


@PAGE.exhibit("admission looks at the first chunk only", "#25538, #37307", "P15", "P10", "P8")
def gate_ignored(clean: Any) -> Methods:
    """Prompts are let in that cannot all stay, and preempt each other in turn."""

    def init(self: Any, config: Any) -> None:
        clean.__init__(self, replace(config, scheduler_reserve_full_isl=False))

    return {"__init__": init}


@PAGE.exhibit("the scheduler remembers that it was full", "SGLang #22518, #23284", "P15", "P10")
def sticky_full_flag(clean: Any) -> Methods:
    """What was refused once is refused for ever, for only a preemption asks again."""

    def _try_admit(self: Any, slot: int, queue: Any, step: Any) -> bool:
        self._is_full = getattr(self, "_is_full", False) or not clean._try_admit(
            self, slot, queue, step
        )
        return not self._is_full

    def _preempt(self: Any, slot: int) -> None:
        clean._preempt(self, slot)
        self._is_full = False

    return {"_try_admit": _try_admit, "_preempt": _preempt}


@PAGE.exhibit(
    "being full is forgotten only when a request ends",
    "SGLang #23138, #35537",
    "P15",
    wrong_fix_of="sticky-full-flag",
)
def full_until_someone_ends(clean: Any) -> Methods:
    """A budget spent on a long prompt leaves the next request waiting long after."""

    def _try_admit(self: Any, slot: int, queue: Any, step: Any) -> bool:
        self._is_full = getattr(self, "_is_full", False) or not clean._try_admit(
            self, slot, queue, step
        )
        return not self._is_full

    def _finish(self: Any, slot: int) -> None:
        clean._finish(self, slot)
        self._is_full = False

    def _schedule_waiting(self: Any, step: Any) -> None:
        self._is_full = getattr(self, "_is_full", False) and bool(self.running)
        clean._schedule_waiting(self, step)

    return {"_try_admit": _try_admit, "_finish": _finish, "_schedule_waiting": _schedule_waiting}


@PAGE.exhibit(
    "the share of a row is counted before its hits",
    "nano-vllm #207, #211",
    "P12",
    "P9",
    "P26",
    "P24",
)
def share_counted_before_hits(clean: Any) -> Methods:
    """A hit found since the first look raises what is computed, and the row runs past its end."""

    def _tokens_to_admit(self: Any, slot: int, num_hit: int, budget: int) -> int:
        first_looks = self.__dict__.setdefault("_first_looks", {})
        look = (self.table.requests[slot].request_id, self.table.num_known[slot])
        counted = min(first_looks.setdefault(look, num_hit), num_hit)
        tokens: int = clean._tokens_to_admit(self, slot, counted, budget)
        return tokens

    return {"_tokens_to_admit": _tokens_to_admit}


@PAGE.exhibit(
    "who is refused keeps the blocks of its attempt",
    "review of nano-vllm #207; Dynamo #11016",
    "P7",
    "P12",
    wrong_fix_of="share-counted-before-hits",
)
def refused_keeps_blocks(clean: Any) -> Methods:
    """Blocks are taken before the last check; two who wait can hold what the other one needs."""

    def _try_admit(self: Any, slot: int, queue: Any, step: Any) -> bool:
        admitted: bool = clean._try_admit(self, slot, queue, step)
        if not admitted:
            self._take_blocks(slot, min(self.pool.num_free, 1))
        return admitted

    return {"_try_admit": _try_admit}


@PAGE.exhibit("a chunk is admitted with the budget used up", "SGLang #30743", "P9")
def chunk_beyond_the_budget(clean: Any) -> Methods:
    """At least one token is always granted."""

    def _schedule_waiting(self: Any, step: Any) -> None:
        step.budget = max(step.budget, 1)
        clean._schedule_waiting(self, step)

    return {"_schedule_waiting": _schedule_waiting}


@PAGE.exhibit(
    "a request in chunks is also in the queue", "review of SGLang #26266", "P16", "P12", "P15"
)
def chunked_stays_queued(clean: Any) -> Methods:
    """It waits for its next chunk in one place, and runs it from another."""

    def _schedule_waiting(self: Any, step: Any) -> None:
        clean._schedule_waiting(self, step)
        known, computed = self.table.num_known, self.table.num_computed
        for slot, num_scheduled, _ in step.admitted:
            if computed[slot] + num_scheduled < known[slot]:
                self.waiting.prepend((slot,))

    return {"_schedule_waiting": _schedule_waiting}


@PAGE.exhibit("the cache is asked for the first chunk only", "Dynamo #13188, #13312", "P5")
def hits_within_a_chunk(clean: Any) -> Methods:
    """The prompt is cut before it is looked up, so no hit is longer than a chunk."""

    def _find_hits(self: Any, slot: int) -> list[int]:
        hits: list[int] = clean._find_hits(self, slot)
        chunk = min(self.max_tokens_per_row, self.config.max_num_batched_tokens)
        return hits[: chunk // self.block_size]

    return {"_find_hits": _find_hits}
