"""Pool: P1 conservation, P2 exclusive writing, P3 sound cache map, P4 and P6 of held blocks.

Each check is about the state after a step; `policy_order` and `rejections` check what a step may
change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import gt
from typing import NamedTuple

from blockstep.conformance.judge.attention_ranges import is_across
from blockstep.conformance.judge.properties.history import History, RequestHistory
from blockstep.conformance.judge.properties.observed_step import PlannedRow, RowKind, Step
from blockstep.conformance.judge.properties.property_check import (
    ENDINGS,
    Complaint,
    Complaints,
    once_a_step,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.store_history import has_lost_all
from blockstep.conformance.protocol.features import list_kept
from blockstep.conformance.protocol.findings import (
    CACHED_TOO_EARLY,
    EVICTED_TOO_EARLY,
    SUBJECTS_MAX,
    Subjects,
    of_block,
)
from blockstep.spec import vocabulary as v


@sentence("P1", *ENDINGS, v.Schedule, v.Reset, v.Fork, of="changes")
def pool_keeps_its_size(step: Step, _history: History) -> Complaints:
    """A state has one ref count and one entry for the key of each block of the pool."""
    after, num_blocks = step.after, step.config.num_blocks
    for what, values in (("ref counts", after.ref_counts), ("keys", after.block_keys)):
        if len(values) != num_blocks:
            pool = f"a pool of {num_blocks} blocks, the null block among them"
            yield Complaint(f"{len(values)} {what} for {pool}")


@sentence("P1", *ENDINGS, v.Schedule, v.Reset, v.Fork, of="changes")
def every_block_is_free_or_held(step: Step, _history: History) -> Complaints:
    """The ref count of a block is the number of its holders; a block without holders is in the free
    queue, once.

    Holders are requests, transfers of ended requests, features that keep blocks, and frames in
    flight: a commit frees the blocks that its frame holds. The null block has no holder and is not
    in the queue. In a table it takes the place of a skipped block; with one KV group there is none.
    """
    after, num_blocks = step.after, step.config.num_blocks
    least = v.NULL_BLOCK if step.config.groups else 1
    holders = [0] * num_blocks
    tables = [(it.request_id, it.block_tables) for it in after.requests]
    if after.transfers is not None:
        tables += [(it.request_id, it.block_tables) for it in after.transfers.held]
        deferred = after.transfers.deferred_frees
        tables += [(f"frame {it.frame_id}", (it.block_ids,)) for it in deferred]
    tables += [(kept.owner, kept.block_tables) for kept in list_kept(after)]
    for name, block_tables in tables:
        for table in block_tables:
            for block in table:
                if not least <= block < num_blocks:
                    what = f"{name!r} holds block {block}, of {num_blocks}"
                    return [Complaint(what, subjects=Subjects((name,), (block,)))]
                holders[block] += 1
    holders[v.NULL_BLOCK] = 0
    if tuple(holders) != after.ref_counts:
        return [
            unequal(
                f"block {block} is held {holders[block]} times",
                f"ref_counts[{block}]",
                holders[block],
                count,
                subjects=of_block(block),
            )
            for block, count in enumerate(after.ref_counts[:num_blocks])
            if holders[block] != count
        ]
    free = {block for block in range(1, num_blocks) if not holders[block]}
    if len(after.free_queue) != len(free) or set(after.free_queue) != free:
        what = "the free queue is not the blocks without holders, each once"
        counts = Counter(after.free_queue)
        wrong = tuple(it for it in sorted(free | counts.keys()) if counts[it] != (it in free))
        subjects = Subjects((), wrong[:SUBJECTS_MAX])
        return [unequal(what, "free_queue", sorted(free), after.free_queue, subjects)]
    return ()


@sentence("P2", v.Schedule, v.Commit, of="changes")
def block_still_to_be_written_has_one_holder(step: Step, history: History) -> Complaints:
    """A block that is not yet full of known, computed tokens has one holder.

    Exceptions: a partly filled block that is shared with a branch, since the writer gets a copy;
    and a block that all holders fill with the same known tokens, since they write equal content.
    """
    ref_counts = step.after.ref_counts
    for request, block in _unfinished_blocks(step, history):
        if ref_counts[block] == 1 or _is_begun(step, history, request, block):
            continue
        if not _is_filled_alike(step, history, block):
            what = f"{request.request_id!r} will write block {block}, which it does not own alone"
            yield unequal(
                what,
                f"ref_counts[{block}]",
                1,
                ref_counts[block],
                subjects=Subjects((request.request_id,), (block,)),
            )


def _is_filled_alike(step: Step, history: History, block: v.BlockId) -> bool:
    """Whether all holders of a block have it at the same place of their tables and know the same
    tokens up to its end."""
    places: set[tuple[int, int]] = set()
    lives: list[RequestHistory] = []
    for request in step.after.requests:
        for at, table in enumerate(request.block_tables):
            if block in table and request.request_id in history.lives:
                places.add((at, table.index(block)))
                lives.append(history.lives[request.request_id])
    if len(places) != 1 or len(lives) != step.after.ref_counts[block]:
        return False
    ((at, index),) = places
    if step.groups[at].kind is v.GroupKind.RECURRENT or is_across(step.groups[at]):
        return False
    size = step.block_sizes[at]
    if any(life.num_known < (index + 1) * size for life in lives):
        return False
    return len({life.block_name(index, size) for life in lives}) == 1


def _is_begun(step: Step, history: History, request: v.RequestSnapshot, block: v.BlockId) -> bool:
    """Whether a block is the partly filled one of a request, which a branch may share."""
    if not step.config.enable_forks:
        return False
    filled = min(request.num_computed_tokens, history.lives[request.request_id].num_known)
    return any(
        filled % size and table[filled // size : filled // size + 1] == (block,)
        for table, size in zip(request.block_tables, step.block_sizes, strict=True)
    )


@sentence("P4", v.Schedule, v.Commit, of="changes")
def block_still_to_be_written_is_not_published(step: Step, history: History) -> Complaints:
    """A block that a later step will write is not in the prefix cache."""
    block_keys = step.after.block_keys
    for request, block in _unfinished_blocks(step, history):
        if block_keys[block] is not None:
            yield Complaint(
                f"{request.request_id!r} will write block {block}, which has a key",
                subjects=Subjects((request.request_id,), (block,)),
            )


@once_a_step
def _unfinished_blocks(step: Step, history: History) -> list[tuple[v.RequestSnapshot, v.BlockId]]:
    """Pairs of a request and a block that it has still to write.

    All cross-attention blocks are among them, since no other request may hit these.
    """
    found: list[tuple[v.RequestSnapshot, v.BlockId]] = []
    sizes: Sequence[int] = step.block_sizes
    if step.config.is_encoder_decoder:
        sizes = [0 if is_across(group) else group.block_size for group in step.config.groups]
    may_lose_all = step.config.kv_connector and bool(step.config.groups)
    for request in step.after.requests:
        tables, life = request.block_tables, history.lives.get(request.request_id)
        if life is None or not any(tables):
            continue
        if may_lose_all and has_lost_all(step.config, request):
            continue
        if life.session is not None and not request.prompt_token_ids:
            continue  # the engine does not show its present prompt
        known = (len(request.prompt_token_ids) or life.num_prompt) + len(request.output_token_ids)
        filled = min(request.num_computed_tokens, known)
        for table, size in zip(tables, sizes):  # noqa: B905 - tables are counted elsewhere
            first = filled // size if size else 0
            if first < len(table):
                found += [(request, block) for block in table[first:]]
    if step.config.groups:  # a frame in flight may have filled skipped blocks
        return [(request, block) for request, block in found if block != v.NULL_BLOCK]
    return found


@sentence("P3", *ENDINGS, v.Schedule, v.Reset, v.Fork, of="changes")
def cache_map_and_blocks_agree(step: Step, _history: History) -> Complaints:
    """The cache map has a block under a key exactly if the block carries the key, and once."""
    after = step.after
    if after.cached is step.before.cached and after.block_keys is step.before.block_keys:
        return ()
    cached = after.cached
    num_keyed = 0
    for block, key in enumerate(after.block_keys):
        if key is not None:
            num_keyed += 1
            if block not in cached.get(key, ()):
                return [
                    Complaint(
                        f"block {block} cannot be found under its key {key!r}",
                        subjects=of_block(block),
                    )
                ]
    if sum(map(len, cached.values())) != num_keyed or not all(cached.values()):
        what = "the cache map has a block twice, a foreign block, or a key without blocks"
        return [unequal(what, "blocks", num_keyed, list(cached.values()))]
    return ()


@sentence("P3", v.Schedule, of="changes")
def nothing_is_cached_without_caching(step: Step, _history: History) -> Complaints:
    """No block carries a key with prefix caching off."""
    if step.config.enable_prefix_caching or not step.after.cached:
        return ()
    return [Complaint("a block is cached although prefix caching is off")]


@sentence("P3", v.Schedule, of="rows", fixes="when a full block is published")
def computed_full_blocks_are_published(step: Step, history: History) -> Complaints:
    """The blocks of a dispatched row that are full of known tokens are in the prefix cache.

    A block of an unconfirmed load is not (P19). When to publish is a policy: an engine could wait.
    It is fixed because hits depend on it.
    """
    if not step.config.enable_prefix_caching:
        return
    for row in step.rows:
        new, ends = step.new[row.request_id], []
        filled = _fill_of(step, history, row)
        for first, size, table in zip(
            _settled_before(step, row), step.block_sizes, new.block_tables, strict=True
        ):
            end = filled // size
            if end > first:
                yield from _unpublished(step, row.request_id, table[first:end])
            ends.append(max(first, end))
        if new.num_cached_blocks != (*ends,):
            yield _unsettled(new, (*ends,))


class Stretch(NamedTuple):
    """Adjacent blocks in one table of a request."""

    request_id: v.RequestId
    group: int
    first: int
    """Index of the first block."""
    blocks: tuple[v.BlockId, ...]

    @property
    def end(self) -> int:
        """One past the index of the last block."""
        return self.first + len(self.blocks)


def _fill_of(step: Step, history: History, row: PlannedRow) -> int:
    """Leading tokens of a request whose blocks are published once its row is dispatched; 0 for no
    more than before, because its load is unconfirmed."""
    if history.store.is_unsettled_after(step, row.request_id):
        return 0
    return min(row.end, history.lives[row.request_id].num_known)


def _unpublished(step: Step, name: str, blocks: Iterable[v.BlockId]) -> Complaints:
    """Complain about blocks without a key; skipped blocks, which were given back, need none."""
    for block in blocks:
        if step.after.block_keys[block] is None and block != v.NULL_BLOCK:
            yield Complaint(
                f"{name!r} filled block {block}, which has no key",
                subjects=Subjects((name,), (block,)),
            )


def _unsettled(new: v.RequestSnapshot, ends: tuple[int, ...]) -> Complaint:
    """Complain that a request counts other cached blocks than those up to `ends`, one per group."""
    has_more = any(map(gt, new.num_cached_blocks, ends))
    counts = CACHED_TOO_EARLY if has_more else "counts too few cached blocks"
    what = f"{new.request_id!r} {counts}"
    return unequal(what, "num_cached_blocks", ends, new.num_cached_blocks, subjects=new.request_id)


def _settled_before(step: Step, row: PlannedRow) -> Sequence[int]:
    """Per group: blocks of a row's table that were cached before the step, or that its hit took."""
    if row.kind in (RowKind.RUNNING, RowKind.CONTINUED):
        return step.old[row.request_id].num_cached_blocks
    return [len(table) for table in row.hit_tables]


def _published(step: Step, history: History, row: PlannedRow) -> list[Stretch]:
    """The blocks of each table of a row that this step publishes, as the state shows it."""
    name = row.request_id
    filled = min(row.end, history.lives[name].num_known)
    return _filled(step, name, _settled_before(step, row), step.new[name].block_tables, filled)


def _filled(
    step: Step, name: v.RequestId, firsts: Iterable[int], tables: v.BlockTables, filled: int
) -> list[Stretch]:
    """Per table of a request: the blocks from `firsts` on that `filled` tokens fill."""
    held = zip(firsts, step.block_sizes, tables, strict=True)
    return [
        Stretch(name, group, first, table[first : max(filled // size, first)])
        for group, (first, size, table) in enumerate(held)
    ]


@sentence("P4", v.Schedule, of="acts", covered_by="published_block_was_written")
def only_computed_blocks_are_published(step: Step, history: History) -> Complaints:
    """A block gets a key only if it was full before, or if a row of the plan fills it.

    A block that was full before gets one where a request is preempted after this step had published
    the block. What this step would have filled is withdrawn.
    """
    before, after = step.before.block_keys, step.after.block_keys
    if after is before:
        return ()
    changed = [
        block
        for block, (old, new) in enumerate(zip(before, after, strict=True))
        if new is not old and new is not None and new != old
    ]
    if not changed:
        return ()
    allowed: set[v.BlockId] = set()
    for row in step.rows:
        for stretch in _published(step, history, row):
            allowed.update(stretch.blocks)
    for name in step.preempted:
        old_request = step.old[name]
        filled = min(old_request.num_computed_tokens, history.lives[name].num_known)
        filled = 0 if name in history.store.unsettled else filled
        for table, size in zip(old_request.block_tables, step.block_sizes, strict=True):
            allowed.update(table[: filled // size])
    return [
        Complaint(
            f"block {block} got a key, but no row fills it in this step", subjects=of_block(block)
        )
        for block in changed
        if block not in allowed
    ]


@once_a_step
def verified_blocks(step: Step, history: History) -> list[Stretch]:
    """The blocks that a commit publishes, per group of each request.

    First the blocks that the frame loaded or computed on its load, up to the first that failed.
    Under asynchronous scheduling also the blocks of running requests that sampled, even if they end
    now, without the last token, which is not computed yet.
    """
    config = step.config
    if not config.enable_prefix_caching:
        return []
    found = _settled_blocks(step, history) if history.store.unsettled else []
    if not config.async_scheduling:
        return found
    ends = {(stretch.request_id, stretch.group): stretch.end for stretch in found}
    for flight in history.frame_of(step):
        old, tokens = step.old.get(flight.request_id), step.delivered.get(flight.request_id)
        if old is None or old.status is not v.Status.RUNNING or not tokens:
            continue
        name, settled = flight.request_id, old.num_cached_blocks
        if ends:
            settled = tuple([ends.get((name, at), end) for at, end in enumerate(settled)])
        filled = history.lives[name].num_known + len(tokens) - 1
        found += _filled(step, name, settled, old.block_tables, filled)
    return found


def _settled_blocks(step: Step, history: History) -> list[Stretch]:
    """Blocks of running requests whose load the commit confirms."""
    store, void, lost = history.store, history.find_void(step), history.list_lost(step)
    found = []
    for load in store.transfers.at_once.get(step.commit.frame_id, ()):
        name = load.request_id
        if store.unsettled.get(name) != step.commit.frame_id:
            continue
        if name in lost or (name in void and name not in step.new):
            continue  # it restarts or ends, and nothing of it is published
        old = step.old[name]
        filled = min(old.num_computed_tokens, history.lives[name].num_known)
        filled = void.get(name, filled)
        found += _filled(step, name, old.num_cached_blocks, old.block_tables, filled)
    return found


@sentence("P3", v.Commit, fixes="when a full block is published")
def verified_full_blocks_are_published(step: Step, history: History) -> Complaints:
    """Under asynchronous scheduling a commit publishes the blocks that its verified tokens fill.

    When to publish is a policy, as for `computed_full_blocks_are_published`: here a plan is made
    before its tokens are known.
    """
    ends: dict[v.RequestId, dict[int, int]] = {}
    for stretch in verified_blocks(step, history):
        name = stretch.request_id
        yield from _unpublished(step, name, stretch.blocks)
        ends.setdefault(name, {})[stretch.group] = stretch.end
    stopped = history.list_stopped(step)
    for name, by_group in ends.items():
        settled = tuple(by_group.values())
        new = step.new.get(name)
        if name in stopped and new is not None and not any(new.block_tables):
            continue  # a session that cannot roll back computes everything again
        if new is not None and new.num_cached_blocks != settled:
            yield _unsettled(new, settled)


@sentence("P4", v.Commit, fixes="when a full block is published, and when it is evicted")
def only_verified_blocks_are_published(step: Step, history: History) -> Complaints:
    """A commit changes keys only of the blocks that it verified, and removes none.

    It publishes nothing for a request that was preempted or ended since, which has lost its blocks.
    """
    before, after = step.before.block_keys, step.after.block_keys
    if after is before and step.after.cached is step.before.cached:
        return
    cached, published = dict(step.before.cached), set()
    for stretch in verified_blocks(step, history):
        for block in stretch.blocks:
            key = after[block]
            if before[block] is None and key is not None:
                published.add(block)
                cached[key] = (*cached.get(key, ()), block)
    for block, (old, new) in enumerate(zip(before, after, strict=True)):
        if new is not old and new != old and block not in published:
            what = f"the commit did not verify block {block}, but changed its key"
            if new is None:
                what = f"block {block} {EVICTED_TOO_EARLY}"
            yield unequal(what, f"block_keys[{block}]", old, new, subjects=of_block(block))
    if cached != step.after.cached:
        yield Complaint("the cache map holds something else than was published, in order")


@sentence(
    "P3", v.Schedule, v.Commit, of="changes", covered_by="published_block_holds_the_right_prefix"
)
def held_block_key_matches_its_tokens(step: Step, history: History) -> Complaints:
    """The key of a held block names the tokens of its holder."""
    names = history.names
    for request_id, block, expected, seen in _misnamed(step, history):
        if not names.same_tokens(expected, seen):
            what = f"{request_id!r} holds block {block}, whose key is of other tokens"
            yield unequal(
                what,
                f"block {block}",
                names.show(expected),
                names.show(seen),
                subjects=Subjects((request_id,), (block,)),
            )


@sentence(
    "P6",
    v.Schedule,
    v.Commit,
    of="changes",
    covered_by="published_block_is_of_the_same_adapter_salt_and_items",
)
def held_block_key_has_adapter_salt_and_items(step: Step, history: History) -> Complaints:
    """The key of a held block names the adapter, salt and items of its holder."""
    for request_id, block, expected, seen in _misnamed(step, history):
        if history.names.same_tokens(expected, seen):
            key = step.after.block_keys[block]
            what = f"{request_id!r} holds block {block}, whose key has other extra keys: {key!r}"
            yield Complaint(what, subjects=Subjects((request_id,), (block,)))


@once_a_step
def _misnamed(step: Step, history: History) -> list[tuple[str, v.BlockId, int, int]]:
    """Held blocks whose key is not their holder's, among the blocks that this step touched.

    The others were right before; `only_computed_blocks_are_published` checks that they did not
    change.
    """
    found = []
    for name, group, first, blocks in _touched(step, history):
        life, size = history.lives[name], step.block_sizes[group]
        delivered = step.delivered.get(name, ()) if isinstance(step.event, v.Commit) else ()
        for index, block in enumerate(blocks, first):
            key = step.after.block_keys[block]
            if key is not None and block != v.NULL_BLOCK:
                expected = life.block_name_with(delivered, index, size)
                seen = history.names.of_key(key)[-1]
                if expected != seen or key.group != group:
                    found.append((name, block, expected, seen))
    return found


def _touched(step: Step, history: History) -> list[Stretch]:
    """The full blocks that a step may have published."""
    if isinstance(step.event, v.Commit):
        return verified_blocks(step, history)
    found: list[Stretch] = []
    for row in step.rows:
        name, firsts = row.request_id, (0,) * len(step.block_sizes)
        if row.kind in (RowKind.RUNNING, RowKind.CONTINUED):
            firsts = step.old[name].num_cached_blocks
        known, tables = history.lives[name].num_known, step.new[name].block_tables
        for group, size in enumerate(step.block_sizes):
            first, blocks = firsts[group], tables[group][: known // size]
            if len(blocks) > first:
                found.append(Stretch(name, group, first, blocks[first:]))
    return found
