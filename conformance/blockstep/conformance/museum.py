"""The museum: defects that released engines had, planted in ours, and how they were caught.

Each exhibit changes one method of the host engine. `check` must kill it, or the suite is blind to
a defect that is known to happen. The engine is loaded by name, as any foreign one would be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from blockstep.conformance.registry import load_engine
from blockstep.spec.vocabulary import Config, SpecMethod

Methods: TypeAlias = dict[str, Any]
Plant: TypeAlias = Callable[[Any], Methods]
"""From the clean engine class to the methods that the defect replaces. Typed loosely on purpose:
the museum reaches into an engine that it must not import (architecture D3)."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One planted defect."""

    name: str
    title: str
    upstream: str
    """Where it happened, or the rule that it breaks."""
    properties: tuple[str, ...]
    """Properties that speak of it; any of them, or a divergence, kills it."""
    plant: Plant


_EXHIBITS: list[Exhibit] = []


def exhibit(title: str, upstream: str, *properties: str) -> Callable[[Plant], Plant]:
    """Put a planted defect, named like its function, into the museum."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", "-")
        _EXHIBITS.append(Exhibit(name, title, upstream, properties, plant))
        return plant

    return register


def build(name: str) -> Callable[[Config], Any]:
    """The engine with the defect `name`. Raises KeyError for an unknown name."""
    chosen = EXHIBITS[name]
    clean: Any = load_engine("host")
    return type(f"Planted_{chosen.plant.__name__}", (clean,), chosen.plant(clean))


def _pool(clean: Any, **methods: Any) -> Methods:
    """The defect sits in the pool."""
    return {"pool_type": type("PlantedPool", (clean.pool_type,), methods)}


@exhibit("a table is freed from its head", "seed 003 section 2.2; seed 001 Deallocation", "P16")
def forward_frees(clean: Any) -> Methods:
    """The head of a prompt is evicted first, and with it every hit on the rest."""

    def free(self: Any, table: Any) -> None:
        clean.pool_type.free(self, tuple(reversed(table)))

    return _pool(clean, free=free)


@exhibit("a touched block stays in the free queue", "TensorRT-LLM #12667", "P1", "P2")
def touch_leaves_block_queued(clean: Any) -> Methods:
    """A block in use is handed out again."""

    def _unlink(self: Any, block: int) -> None:
        return None

    return _pool(clean, _unlink=_unlink)


@exhibit("a reused block keeps its old key", "SGLang #27586", "P3", "P4")
def stale_key_after_reuse(clean: Any) -> Methods:
    """A hit finds what somebody else has written since."""

    def _evict(self: Any, block: int) -> None:
        return None

    return _pool(clean, _evict=_evict)


@exhibit("a full hit leaves nothing to compute", "#30320, #11186; nano-vllm #117", "P10", "P15")
def full_hit(clean: Any) -> Methods:
    """There is no token to run, so no logits to sample from."""

    def _find_hits(self: Any, slot: int) -> list[int]:
        if not self._asks_cache(slot):
            return []
        limit = self.table.num_known[slot] // self.block_size
        hits: list[int] = self.prefix.hits(self.table.lineages[slot], limit)
        if self.config.drops_last_hit_block and hits:
            hits.pop()
        return hits

    return {"_find_hits": _find_hits}


@exhibit("blocks with draft tokens are published", "seed 001 Draft tokens are never cached", "P3")
def cached_drafts(clean: Any) -> Methods:
    """A rejected draft stays findable as if it had been said."""

    def _publish(self: Any, slot: int, num_computed: int, num_scheduled: int) -> None:
        table = self.table
        past = num_computed + num_scheduled - table.num_known[slot]
        drafts = table.spec_token_ids[slot][: max(past, 0)]
        if not drafts:
            clean._publish(self, slot, num_computed, num_scheduled)
            return
        honest, known = table.lineages[slot], table.num_known[slot]
        guessed = copy(honest)
        guessed.tokens = honest.tokens[:]
        guessed._digests, guessed._keys = honest._digests[:], honest._keys[:]
        for token in drafts:
            guessed.append(token)
        table.lineages[slot], table.num_known[slot] = guessed, known + len(drafts)
        clean._publish(self, slot, num_computed, num_scheduled)
        table.lineages[slot], table.num_known[slot] = honest, known

    return {"_publish": _publish}


@exhibit("rejected drafts stay computed", "seed 001 Rejection Clawback", "P14", "P12", "P4")
def lost_rollback(clean: Any) -> Methods:
    """The next step starts behind tokens that nobody computed."""

    def _roll_back(self: Any, slot: int, drafts: Any, tokens: Any) -> None:
        self.drafts_scheduled += len(drafts)
        self.drafts_accepted += len(tokens) - 1

    return {"_roll_back": _roll_back}


@exhibit("one draft too many is rolled back", "seed 001 Rejection Clawback", "P14")
def rollback_off_by_one(clean: Any) -> Methods:
    """The token of the model's own is taken for a rejected draft."""

    def _roll_back(self: Any, slot: int, drafts: Any, tokens: Any) -> None:
        clean._roll_back(self, slot, drafts, tokens)
        if len(tokens) <= len(drafts):
            self.table.num_computed[slot] -= 1

    return {"_roll_back": _roll_back}


@exhibit("the oldest request is preempted", "seed 001 Preemption Policy", "P16")
def oldest_preempted(clean: Any) -> Methods:
    """Whoever has waited longest loses most."""

    def _select_victim(self: Any) -> int:
        return 0

    return {"_select_victim": _select_victim}


@exhibit("equals preempt each other for ever", "vLLM 0.19.1, found here", "P10", "P16")
def equals_preempt_each_other(clean: Any) -> Methods:
    """Of two requests of one priority and arrival, each makes room for itself with the other."""

    def _select_victim(self: Any) -> int:
        requests, running = self.table.requests, self.running
        keys = [(requests[slot].priority, requests[slot].arrival_time) for slot in running]
        return len(running) - 1 if self.config.policy == "fcfs" else keys.index(max(keys))

    return {"_select_victim": _select_victim}


@exhibit("a victim's tokens do not return to the budget", "#23347, #23713", "P9", "P15")
def budget_not_restored(clean: Any) -> Methods:
    """The step ends early although there is work."""

    def _unschedule(self: Any, victim: int, step: Any) -> None:
        step.rows.pop(victim, None)

    return {"_unschedule": _unschedule}


@exhibit("a victim's row stays in the plan", "#23713, #28558", "P9", "P26", "P2", "P16")
def row_of_victim_stays(clean: Any) -> Methods:
    """The worker runs a request that has no blocks."""

    def _unschedule(self: Any, victim: int, step: Any) -> None:
        row = step.rows.get(victim)
        if row is not None:
            step.budget += row[0]

    return {"_unschedule": _unschedule}


@exhibit("the preempted go to the end of the queue", "seed 001 Preemption Policy", "P16")
def preempted_to_the_tail(clean: Any) -> Methods:
    """Newcomers overtake them, and preempt them again."""

    def _requeue_preempted(self: Any, slot: int) -> None:
        self.waiting.append(slot)

    return {"_requeue_preempted": _requeue_preempted}


@exhibit("requests are admitted in a step that preempted", "seed 001 Admission Gate", "P16")
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


@exhibit("a request gets one token too many", "seed 000 Request Completion", "P13")
def length_off_by_one(clean: Any) -> Methods:
    """The cap is checked with a token's delay."""

    def _accept(self: Any, slot: int, tokens: Any) -> Any:
        self.table.max_known[slot] += 1
        accepted = clean._accept(self, slot, tokens)
        if slot < len(self.table.max_known):
            self.table.max_known[slot] -= 1
        return accepted

    return {"_accept": _accept}


@exhibit("min_tokens holds off the length caps", "vLLM 0.19.1 check_stop", "P13", "P10")
def min_tokens_masks_length(clean: Any) -> Methods:
    """At the model length the request can neither stop nor go on."""

    def _stop_verdict(self: Any, slot: int, token: int) -> Any:
        if not self._has_min_tokens(slot):
            return clean._accept.__globals__["_GOES_ON"]
        return clean._stop_verdict(self, slot, token)

    return {"_stop_verdict": _stop_verdict}


@exhibit("an aborted request keeps its blocks", "#46283", "P1")
def leak_on_abort(clean: Any) -> Methods:
    """The pool shrinks with every client that gives up."""

    def _abort(self: Any, request_ids: Any) -> Any:
        for request_id in request_ids:
            slot = self.table.slot_of.get(request_id)
            if slot is not None:
                del self.table.block_tables[slot][:]
        return clean._abort(self, request_ids)

    return {"_abort": _abort}


@exhibit("keys of work that never ran stay published", "#43569 (open)", "P4", "P3")
def zombie_key(clean: Any) -> Methods:
    """The next request with this prefix reads KV that nobody wrote."""

    def _withdraw_unwritten(self: Any, slot: int) -> None:
        return None

    return {"_withdraw_unwritten": _withdraw_unwritten}


@exhibit("the capacity check forgets that a hit uses a free block", "#11562", "P8", "P1", "P2")
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


@exhibit("hits are held before the check, and not let go", "#11565; SGLang #16067", "P1", "P7")
def touch_before_check(clean: Any) -> Methods:
    """Every refused admission leaks the blocks of its prefix."""

    def _try_admit(self: Any, slot: int, queue: Any, step: Any) -> bool:
        hits = self._find_hits(slot)
        admitted: bool = clean._try_admit(self, slot, queue, step)
        if not admitted:
            self.pool.touch(hits)
        return admitted

    return {"_try_admit": _try_admit}


@exhibit("the null block is counted as usable", "#52520, #39734", "P11", "P10")
def null_block_counted(clean: Any) -> Methods:
    """A request is taken in that can never be served."""

    def _most_blocks(self: Any, request: Any) -> int:
        blocks: int = clean._most_blocks(self, request)
        return blocks - 1

    return {"_most_blocks": _most_blocks}


@exhibit("drafts survive a preemption", "#30916", "P24")
def stale_drafts(clean: Any) -> Methods:
    """They are verified at a position they were not made for."""

    def _preempt(self: Any, slot: int) -> None:
        drafts = self.table.spec_token_ids[slot] or (0,) * self.config.num_speculative_tokens
        clean._preempt(self, slot)
        if self.config.spec_method is not SpecMethod.NONE:
            self.table.spec_token_ids[slot] = drafts

    return {"_preempt": _preempt}


@exhibit("the newest of equal blocks is hit", "seed 003 section 2.3", "P16")
def newest_duplicate_hit(clean: Any) -> Methods:
    """Not wrong in itself; but the order of eviction is no longer the documented one."""

    def first(self: Any, lineage: Any, index: int) -> int | None:
        bucket = self._buckets.get(lineage.digest_of(index))
        return None if bucket is None else int(bucket[-1])

    return {"prefix_type": type("PlantedMap", (clean.prefix_type,), {"first": first})}


@exhibit("a reset leaves the cache as it is", "seed 001 Reset Prefix Cache", "P25")
def reset_keeps_keys(clean: Any) -> Methods:
    """Old weights answer for new ones."""

    def clear(self: Any) -> None:
        return None

    return {"prefix_type": type("PlantedMap", (clean.prefix_type,), {"clear": clear})}


@exhibit("a resumed request is announced as new", "#31583", "P26")
def resumed_as_new(clean: Any) -> Methods:
    """The worker forgets what it has said so far."""

    def _resumed_row(self: Any, slot: int, num_scheduled: int) -> Any:
        return self._new_row(slot, num_scheduled)

    def _issue_plan(self: Any, step: Any) -> Any:
        step.admitted = [(slot, count, False) for slot, count, _ in step.admitted]
        return clean._issue_plan(self, step)

    return {"_resumed_row": _resumed_row, "_issue_plan": _issue_plan}


@exhibit("tokens are not sent again after a step without the request", "#26385", "P26")
def gap_not_resent(clean: Any) -> Methods:
    """The worker goes on with the tokens it last heard of."""

    def _was_in_previous_plan(self: Any, slot: int) -> bool:
        return True

    return {"_was_in_previous_plan": _was_in_previous_plan}


@exhibit("the salt is not part of a block's identity", "P6; LMCache #690", "P6", "P3")
def salt_ignored(clean: Any) -> Methods:
    """One tenant is answered from another one's cache."""

    def _submit(self: Any, request: Any) -> Any:
        answer = clean._submit(self, request)
        slot = self.table.slot_of.get(request.request_id)
        if slot is not None:
            lineage = self.table.lineages[slot]
            lineage.request = replace(lineage.request, cache_salt=None)
        return answer

    return {"_submit": _submit}


@exhibit("an item's place is not part of a block's identity", "#36708", "P6", "P3")
def item_offset_ignored(clean: Any) -> Methods:
    """One image at two places reads as the same."""

    def _submit(self: Any, request: Any) -> Any:
        answer = clean._submit(self, request)
        slot = self.table.slot_of.get(request.request_id)
        if slot is not None and request.items:
            lineage = self.table.lineages[slot]
            unplaced = type("Unplaced", (type(lineage),), {"items_of": _unplaced, "__slots__": ()})
            lineage.__class__ = unplaced
        return answer

    return {"_submit": _submit}


def _unplaced(self: Any, index: int) -> tuple[tuple[str, int], ...]:
    clean = type(self).__mro__[1]
    return tuple((name, 0) for name, _ in clean.items_of(self, index))  # type: ignore[attr-defined]


EXHIBITS: Mapping[str, Exhibit] = {entry.name: entry for entry in _EXHIBITS}
"""All planted defects, by name."""
