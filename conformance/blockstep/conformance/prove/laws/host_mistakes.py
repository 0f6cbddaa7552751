"""Mutants of methods of the host engine, for laws about it.

Loosely typed, since the tools must not import an engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.prove.hosts import HOST, LINEAGE, LOG
from blockstep.conformance.prove.law import Right, instead_in
from blockstep.spec.vocabulary import FinishReason, Policy, Request


@instead_in(HOST, "_tokens_to_run")
def plain_decode_is_not_held_to_the_model_length(right: Right[Any], self: Any, slot: int) -> Any:
    """The shortcut for one missing token ignores the model length."""
    num_wanted = self.table.num_known[slot] + len(self.table.spec_token_ids[slot])
    return 1 if num_wanted - self.table.num_computed[slot] == 1 else right()


@instead_in(HOST, "_tokens_to_run")
def threshold_is_for_newcomers_only(self: Any, slot: int, budget: int) -> Any:
    """A running request is not limited by the threshold."""
    computed = self.table.num_computed[slot]
    gap = self.table.num_known[slot] - computed
    return min(gap, budget, self.max_model_len - 1 - computed)


@instead_in(HOST, "_blocks_needed")
def exact_multiples_take_a_block_more(self: Any, slot: int, num_scheduled: int) -> Any:
    """One block more than the quotient is taken, even if nothing is left over."""
    end = self.table.num_computed[slot] + num_scheduled
    return end // self.block_size + 1 - len(self.table.holdings[slot][0].blocks)


@instead_in(HOST, "_tokens_to_run")
def promised_tokens_are_no_gap(self: Any, slot: int, budget: int) -> Any:
    """Placeholders are not counted as tokens to compute."""
    table = self.table
    computed = table.num_computed[slot]
    if table.num_output_placeholders[slot] and self._is_past_max_tokens(slot):
        return 0
    gap = table.num_known[slot] + len(table.spec_token_ids[slot]) - computed
    return min(gap, self.max_tokens_per_row, budget, self.max_model_len - 1 - computed)


@instead_in(HOST, "_is_past_max_tokens")
def one_frame_ahead_is_enough(self: Any, slot: int) -> Any:
    """Known tokens and placeholders are compared instead of computed tokens."""
    table = self.table
    sure = table.num_known[slot] + table.num_output_placeholders[slot]
    return sure >= table.num_prompt[slot] + table.requests[slot].max_tokens


@instead_in(HOST, "_blocks_needed")
def lookahead_passes_the_model_length(self: Any, slot: int, num_scheduled: int) -> Any:
    """Lookahead slots are not capped at the model length."""
    end = self.table.num_computed[slot] + num_scheduled + self.num_lookahead_tokens
    missing = -(-end // self.block_size) - len(self.table.holdings[slot][0].blocks)
    return max(missing, 0)


@instead_in(HOST, "_blocks_needed")
def missing_blocks_may_be_negative(self: Any, slot: int, num_scheduled: int) -> Any:
    """The number of missing blocks may be negative."""
    end = self.table.num_computed[slot] + num_scheduled + self.num_lookahead_tokens
    extent = -(-min(end, self.max_model_len) // self.block_size)
    return extent - len(self.table.holdings[slot][0].blocks)


@instead_in(HOST, "_tokens_to_admit")
def whole_prompt_must_fit_always(self: Any, slot: int, num_hit: int, budget: int) -> Any:
    """A prompt is never cut into chunks."""
    wanted = min(self.table.num_known[slot] - num_hit, self.max_tokens_per_row)
    return wanted if wanted <= budget else 0


@instead_in(HOST, "_tokens_to_admit")
def prompt_is_cut_always(self: Any, slot: int, num_hit: int, budget: int) -> Any:
    """A prompt is always cut into chunks."""
    return min(self.table.num_known[slot] - num_hit, self.max_tokens_per_row, budget)


@instead_in(HOST, "_blocks_to_admit")
def hits_are_taken_off_as_tokens(right: Right[Any], num_tokens: int, num_hits: int) -> Any:
    """A hit block counts as one token."""
    return right(num_tokens=num_tokens - num_hits, num_hits=0)


@instead_in(HOST, "_blocks_to_admit")
def newcomer_is_charged_for_its_first_chunk_only(
    right: Right[Any], self: Any, num_tokens: int
) -> Any:
    """Admission checks blocks for the first chunk only."""
    return right(num_tokens=min(num_tokens, self._step_budget()))


@instead_in(HOST, "_most_blocks")
def last_output_is_computed_too(self: Any, request: Request) -> Any:
    """The KV of the last output is counted, too, although no token reads it."""
    longest = len(request.prompt_token_ids) + request.max_tokens
    if request.max_tokens > 1:
        longest += self.config.num_speculative_tokens
    written = min(longest, self.config.max_model_len - 1)
    extent = min(written + self.config.num_lookahead_tokens, self.config.max_model_len)
    return -(-extent // self.block_size)


@instead_in(HOST, "_take_drafts")
def cut_drafts_are_dispatched(self: Any, slot: int) -> Any:
    """All attached drafts are dispatched, even those that the budget has cut."""
    spec = self.table.spec_token_ids[slot]
    self.table.spec_token_ids[slot] = ()
    return spec


@instead_in(HOST, "_roll_back")
def own_token_counts_as_accepted(self: Any, slot: int, drafts: Any, tokens: Any) -> None:
    """One rejected token too few is rolled back."""
    self.table.num_computed[slot] -= len(drafts) - len(tokens)


@instead_in(HOST, "_stop_verdict")
def min_tokens_hold_off_the_length(right: Right[Any], self: Any, slot: int) -> Any:
    """No length cap finishes a request before min_tokens."""
    return right() if self._has_min_tokens(slot) else (None, None)


@instead_in(HOST, "_stop_verdict")
def stop_tokens_come_before_the_end_of_sequence(
    right: Right[Any], self: Any, slot: int, token: int
) -> Any:
    """A token that is both end of sequence and stop token is reported as a stop token."""
    if self._has_min_tokens(slot) and token in self.table.requests[slot].stop_token_ids:
        return (FinishReason.STOP, token)
    return right()


@instead_in(HOST, "_may_draft")
def drafts_are_taken_in_mid_prefill(self: Any, slot: int) -> Any:
    """A request takes drafts in the middle of its prefill, too."""
    return bool(self.table.num_computed[slot] <= self.table.num_known[slot] - 1)


@instead_in(HOST, "_publish")
def drafts_are_published(self: Any, slot: int, num_computed: int, num_scheduled: int) -> None:
    """Drafts are published like known tokens, although they may be rejected."""
    full = (num_computed + num_scheduled) // self.block_size
    for holding in self.table.holdings[slot]:
        holding.num_cached = max(full, holding.num_cached)


@instead_in(HOST, "_publish_verified")
def last_token_counts_as_computed(self: Any, slot: int) -> None:
    """A block is published although its last token is not computed."""
    self._publish(slot, self.table.num_known[slot], 0)


@instead_in(HOST, "_withdraw_unwritten")
def partly_computed_block_stays_published(self: Any, slot: int) -> None:
    """A block that the victim had begun keeps its key, since the division rounds up."""
    first = -(-self.table.num_computed[slot] // self.block_size)
    for holding in self.table.holdings[slot]:
        for block in holding.blocks[first:]:
            self.prefix.withdraw(block)


@instead_in(HOST.pool_type, "take")
def ring_is_not_closed_behind_the_taken(self: Any, count: int) -> Any:
    """The head of the ring does not move, so the next allocation takes the same blocks."""
    taken = self.free_queue()[:count]
    for block in taken:
        self.ref_counts[block] = 1
    self.num_free -= count
    return taken


@instead_in(HOST.pool_type, "touch")
def touched_block_stays_in_the_ring(self: Any, blocks: Any) -> None:
    """A held block can be allocated to another request."""
    for block in blocks:
        self.ref_counts[block] += 1


@instead_in(HOST.pool_type, "free")
def table_is_freed_from_its_head(right: Right[None], table: Any) -> None:
    """The tail of a table is evicted last."""
    right(table=table[::-1])


@instead_in(HOST, "_select_victim")
def first_of_equals_goes(self: Any) -> Any:
    """The request id does not decide between requests of equal priority and arrival."""
    if self.config.policy is Policy.FCFS:
        return len(self.running) - 1
    rank_of, running = self.table.rank_of, self.running
    return max(range(len(running)), key=lambda position: rank_of(running[position])[:2])


@instead_in(LINEAGE, "items_of")
def item_that_ends_at_the_block_is_named(self: Any, index: int) -> Any:
    """An item that ends where the block begins counts as overlapping."""
    start = index * self._block_size
    return tuple(
        (item.identifier, item.offset - start)
        for item in self.request.items
        if item.offset < start + self._block_size and start <= item.offset + item.length
    )


@instead_in(HOST, "_repeats")
def only_the_last_token_is_compared(self: Any, slot: int) -> Any:
    """Only the last tokens are compared, which is the shortcut before the full comparison."""
    detection = self.table.requests[slot].repetition_detection
    tokens, num_outputs = self.table.lineages[slot].tokens, self.table.num_outputs(slot)
    longest = min(detection.max_pattern_size, num_outputs // detection.min_count)
    sizes = range(detection.min_pattern_size, longest + 1)
    return any(tokens[-1] == tokens[-1 - size] for size in sizes)


@instead_in(HOST, "_make_room")
def victim_before_the_asker_does_not_shift_it(
    self: Any, slot: int, needed: int, position: int, step: Any
) -> Any:
    """The running list gets shorter before the position, so the next request is left out."""
    while needed > self.pool.num_free:
        victim = self.running.pop(self._select_victim())
        self._preempt(victim)
        step.preempted_req_ids.append(self.table.requests[victim].request_id)
        if victim == slot:
            return -1
    return position


@instead_in(LOG, "_store")
def log_forgets_parents(right: Right[None], self: Any) -> None:
    """Each run of blocks is logged without its parent."""
    right()
    self._pending[-1] = replace(self._pending[-1], parent=None)


@instead_in(LOG, "stored")
def log_runs_over_gaps(self: Any, lineage: Any, indices: Any, group: int, per: int) -> None:
    """Blocks are logged in one event although others between them are left out."""
    if indices:
        self._store(lineage, indices, group, per)
