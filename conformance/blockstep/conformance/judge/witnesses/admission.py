"""Goals of admitted requests, and of those left waiting."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.properties.hits import may_ask_the_cache
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.life import Life
from blockstep.conformance.judge.properties.queue_replay import admits_nobody, next_in_line
from blockstep.conformance.judge.properties.step import PlannedRow, RowKind, Step
from blockstep.spec.vocabulary import PauseState, Policy, RequestId, Status

ADMISSION = {
    "admitted": "a request was admitted",
    "prefix_hit": "an admitted request found its first blocks in the cache",
    "hit_on_freed_block": "a hit block was in the free queue, without a holder",
    "hit_on_shared_block": "a hit block was held by another request",
    "hit_within_the_step": "a hit block was published by another row of the same plan",
    "full_prompt_hit_recomputes_last_block": "all full blocks were cached, the last not taken",
    "head_drop": "a draft head made a hit drop its last block",
    "reading_skipped": "a request that must not read the cache could have had a hit",
    "same_tokens_other_adapter": "a first block was not shared because adapters differ",
    "same_tokens_other_salt": "a first block was not shared because salts differ",
    "same_tokens_other_items": "a first block was not shared because items differ",
    "same_tokens_other_embeds": "a first block was not shared because embeddings differ",
    "duplicate_key_published": "a second block was published under the same key",
    "eviction_of_cached_block": "a block was taken that could still have been hit",
    "admission_blocked_by_pool": "a request was left waiting for blocks, not for budget",
    "admission_blocked_by_max_num_seqs": (
        "a request was left waiting because max_num_seqs requests run"
    ),
    "admission_after_skip": "a request was admitted before one that waits for its grammar",
    "grammar_skipped": "a request whose grammar is not compiled was skipped",
    "grammar_promoted": "a request whose grammar had been compiled was admitted",
    "admission_overtakes": "PRIORITY admitted a request before one submitted earlier",
}


def of_admission(step: Step, ledger: Ledger, row: PlannedRow) -> Iterator[str]:
    """Yield the goals of an admitted row."""
    life = ledger.lives[row.request_id]
    yield "admitted"
    if step.old[row.request_id].status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        yield "grammar_promoted"
    if row.kind is RowKind.RESUMED:
        yield "preempted_then_resumed"
        if row.hits:
            yield "resumed_with_hit"
        if life.num_known > life.num_prompt:
            yield "resumed_with_outputs"
    yield from _of_hit(step, ledger, row)
    if step.config.policy is Policy.PRIORITY:
        submitted = list(ledger.lives)
        earlier = submitted[: submitted.index(row.request_id)]
        left = {*step.after.waiting, *step.after.skipped_waiting}
        if any(name in left and ledger.lives[name].order > life.order for name in earlier):
            yield "admission_overtakes"
    if step.config.enable_prefix_caching and life.num_prompt >= step.config.block_size:
        yield from _kept_apart(step, ledger, life)


def _of_hit(step: Step, ledger: Ledger, row: PlannedRow) -> Iterator[str]:
    life, before = ledger.lives[row.request_id], step.before
    size = step.block_sizes[0]
    if row.hits:
        yield "prefix_hit"
    for block in row.hits:
        if before.block_keys[block] is None:
            yield "hit_within_the_step"
        elif before.ref_counts[block]:
            yield "hit_on_shared_block"
        else:
            yield "hit_on_freed_block"
    if not before.cached:
        return
    met, index, following = "", row.first // size, row.first + size
    if not may_ask_the_cache(step, life):
        met, index = "reading_skipped" * (life.num_known > size), 0
    elif following == life.num_known:
        met = "full_prompt_hit_recomputes_last_block"
    elif following < life.num_known and step.config.drops_last_hit_block:
        # With several groups another may have had no block to drop.
        met = "head_drop" if row.first or not step.config.groups else ""
    if met and life.block_name(index, size) in ledger.named_blocks(before):
        yield met


def _kept_apart(step: Step, ledger: Ledger, life: Life) -> Iterator[str]:
    """Yield the goals of requests whose first block has the same tokens and is another block."""
    size, request = step.config.block_size, life.request
    for other in ledger.lives.values():
        told = other.request
        if other is life or told.prompt_token_ids[:size] != request.prompt_token_ids[:size]:
            continue
        new = step.new.get(told.request_id)
        if new is None or not any(new.block_tables):
            continue
        if told.adapter != request.adapter:
            yield "same_tokens_other_adapter"
        if told.cache_salt != request.cache_salt:
            yield "same_tokens_other_salt"
        if _first_items(other, size) != _first_items(life, size):
            yield "same_tokens_other_items"
        if told.prompt_embeds[:size] != request.prompt_embeds[:size]:
            yield "same_tokens_other_embeds"


def _first_items(life: Life, size: int) -> list[object]:
    extras = life.extras.items()
    return [(at, what[:2]) for at, what in extras if at < size and isinstance(what[0], str)]


def of_waiting(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of requests left waiting, if the plan reached its waiting phase."""
    after, config = step.after, step.config
    if not (after.waiting or after.skipped_waiting):
        return
    rest = config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if rest <= 0 and not after.skipped_waiting:
        return
    if ledger.pause_state is not PauseState.UNPAUSED or admits_nobody(step, ledger):
        return
    if rest > 0:
        if len(after.running) >= config.max_num_seqs:
            yield "admission_blocked_by_max_num_seqs"
        elif next_in_line(step, ledger) is not None and (
            # The rest of the budget cannot have been the reason.
            config.enable_chunked_prefill or rest >= config.max_model_len
        ):
            yield "admission_blocked_by_pool"
    skipped = [
        name
        for name in after.skipped_waiting
        if step.new[name].status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        and not ledger.lives[name].grammar_ready
    ]
    if skipped:
        yield from _of_passing_over(step, ledger, skipped, rest)


def _of_passing_over(
    step: Step, ledger: Ledger, skipped: list[RequestId], rest: int
) -> Iterator[str]:
    """Yield the goals of requests that wait for a grammar, and of those admitted before them."""
    first = min(ledger.lives[name].order for name in skipped)
    admitted = [ledger.lives[row.request_id].order for row in step.admitted_rows]
    is_fcfs = step.config.policy is Policy.FCFS
    if admitted and (is_fcfs or max(admitted) > first):
        yield "admission_after_skip"
        yield "grammar_skipped"
    elif rest > 0 and len(step.after.running) < step.config.max_num_seqs:
        following = next_in_line(step, ledger)
        if is_fcfs or following is None or ledger.lives[following].order > first:
            yield "grammar_skipped"
