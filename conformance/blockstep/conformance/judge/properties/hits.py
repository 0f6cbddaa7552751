"""Hits (P5, P16): how much of its prefix a request finds, and in which blocks."""

from __future__ import annotations

from blockstep.conformance.judge.properties.ledger import Ledger, Life
from blockstep.conformance.judge.properties.sentence import Complaint, Complaints, sentence, unequal
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec.vocabulary import Schedule


def may_ask_the_cache(step: Step, life: Life) -> bool:
    """Whether a request may take a prefix hit at all."""
    return step.config.enable_prefix_caching and not life.request.skip_reading_prefix_cache


@sentence("P5", Schedule)
def hit_is_whole_blocks_and_leaves_a_token(step: Step, ledger: Ledger) -> Complaints:
    """A hit is whole blocks, and leaves a known token to compute: its logits are needed.

    With a draft head the block after the hit is recomputed too, so it must be there.
    """
    size = step.config.block_size
    for row in step.admitted_rows:
        life = ledger.lives[row.request_id]
        most = (life.num_known - 1) // size * size if may_ask_the_cache(step, life) else 0
        if step.config.drops_last_hit_block:
            most = max(most - size, 0)
        if row.first % size or not 0 <= row.first <= most:
            yield Complaint(
                f"{row.request_id!r} has a hit of {row.first} tokens; "
                f"it knows {life.num_known}, and a block is {size}"
            )


@sentence("P5", Schedule)
def hit_is_the_longest_there_is(step: Step, ledger: Ledger) -> Complaints:
    """Every block that was cached before the step and still is could be hit, so it was.

    Blocks that a row of this step took are left out: when they were evicted is not seen.
    """
    if not step.admitted_rows or not step.before.cached:
        return
    for row in step.admitted_rows:
        life = ledger.lives[row.request_id]
        if not may_ask_the_cache(step, life):
            continue
        most = (life.num_known - 1) // step.config.block_size
        length = 0
        while length < most and _lasting(step, ledger, life.block_name(length)):
            length += 1
        if step.config.drops_last_hit_block and length:
            length -= 1
        if len(row.hits) < length:
            what = f"{row.request_id!r} took a shorter hit than was there"
            yield unequal(what, "hit blocks", length, len(row.hits))


@sentence("P16", Schedule)
def hit_takes_the_oldest_copy(step: Step, ledger: Ledger) -> Complaints:
    """Of several blocks of one key a hit takes the one published first.

    A policy choice: any copy would do. It is pinned because eviction order depends on it.
    """
    if not step.before.cached:
        return
    for row in step.admitted_rows:
        life = ledger.lives[row.request_id]
        for index, block in enumerate(row.hits):
            name = life.block_name(index)
            oldest = ledger.named_blocks(step.before).get(name, (block,))[0]
            if oldest != block and oldest in _lasting(step, ledger, name):
                what = f"{row.request_id!r} hit another copy than the oldest"
                yield unequal(what, f"block table[{index}]", oldest, block)


def _lasting(step: Step, ledger: Ledger, name: int) -> list[int]:
    """Blocks that carried a name throughout the step."""
    before, after = step.before.block_keys, step.after.block_keys
    gained = step.all_gained
    return [
        block
        for block in ledger.named_blocks(step.before).get(name, ())
        if block not in gained and after[block] is not None and after[block] == before[block]
    ]


def hits_now(step: Step, ledger: Ledger, life: Life) -> list[int]:
    """The longest prefix hit in the state after the step."""
    hits: list[int] = []
    if not may_ask_the_cache(step, life) or not step.after.cached:
        return hits
    named = ledger.named_blocks(step.after)
    for index in range((life.num_known - 1) // step.config.block_size):
        blocks = named.get(life.block_name(index))
        if not blocks:
            break
        hits.append(blocks[0])
    if step.config.drops_last_hit_block and hits:
        hits.pop()
    return hits
