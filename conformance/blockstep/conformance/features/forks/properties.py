"""Forks: the tokens and blocks of a new branch, writes to shared blocks, room left by admissions.

parent   [ 4 ][ 7 ][ 9 . ]        9 is not full: the first writer gets a copy, branch   [ 4 ][ 7 ][
9 . ]        the last holder writes in place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from blockstep.conformance.judge.attention_ranges import count_unattended
from blockstep.conformance.judge.grammar_automaton import Automaton
from blockstep.conformance.judge.properties.history import History, order_of
from blockstep.conformance.judge.properties.observed_step import PlannedRow, Step
from blockstep.conformance.judge.properties.output import stop_of
from blockstep.conformance.judge.properties.property_check import (
    Complaint,
    Complaints,
    differing,
    differing_requests,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.token_amounts import blocks_for
from blockstep.conformance.protocol.findings import Subjects
from blockstep.spec import vocabulary as v


def problem_of_fork(config: v.Config, fork: v.Fork, history: History) -> v.RejectCode | None:
    """The code with which a fork must be rejected; None if it must be accepted."""
    parent, child_id = history.lives.get(fork.request_id), fork.child_id
    if not config.enable_forks:
        return v.RejectCode.BAD_FORK
    if parent is None:
        return v.RejectCode.UNKNOWN_REQUEST
    if child_id in history.lives:
        return v.RejectCode.DUPLICATE_REQUEST
    if history.in_flight(child_id):
        return v.RejectCode.REQUEST_IN_FLIGHT
    if parent.session is not None or parent.admitted_in < 0:
        return v.RejectCode.BAD_FORK
    if history.in_flight(fork.request_id):
        return v.RejectCode.FORK_IN_FLIGHT
    is_wrong = may_not_output(config, parent.request, fork.output_token_ids)
    return v.RejectCode.BAD_FORK if is_wrong else None


def may_not_output(config: v.Config, request: v.Request, outputs: v.TokenIds) -> bool:
    """Whether one of these outputs would end the request, or is forbidden by its grammar."""
    for count in range(1, len(outputs) + 1):
        if stop_of(config, request, outputs[:count]) is not None:
            return True
    return request.grammar is not None and Automaton(config, request).read(outputs) is None


def count_settled(step: Step, history: History, request: v.RequestSnapshot) -> tuple[int, ...]:
    """Per KV group: leading cached blocks of a parent after a fork."""
    if not step.config.enable_prefix_caching:
        return request.num_cached_blocks
    filled = min(request.num_computed_tokens, history.lives[request.request_id].num_known)
    pairs = zip(request.num_cached_blocks, step.block_sizes, strict=True)
    if not any(request.block_tables):
        return request.num_cached_blocks
    return tuple([max(count, filled // size) for count, size in pairs])


def count_in_common(step: Step, history: History, fork: v.Fork) -> int:
    """Computed tokens that a branch and its parent have in common; one token is left to compute."""
    parent, life = step.old[fork.request_id], history.lives[fork.request_id]
    tokens = (*life.request.prompt_token_ids, *fork.output_token_ids)
    pairs = enumerate(zip(life.tokens, tokens, strict=False))
    least = min(len(tokens), len(life.tokens))
    common = next((at for at, (mine, theirs) in pairs if mine != theirs), least)
    return min(parent.num_computed_tokens, common, len(tokens) - 1)


def count_shared(step: Step, history: History, fork: v.Fork) -> int:
    """The most of these tokens whose KV a branch can share.

    The branch does not continue within a cached block, and all blocks that it attends to are held.
    """
    parent, most = step.old[fork.request_id], count_in_common(step, history, fork)
    settled = count_settled(step, history, parent)
    held = [*zip(step.groups, parent.block_tables, settled, strict=True)]
    return next(
        count for count in range(most, -1, -1) if all(_goes_on(count, *group) for group in held)
    )


def _goes_on(count: int, group: v.KVGroup, table: Sequence[v.BlockId], num_settled: int) -> bool:
    size = group.block_size
    attended = table[count_unattended(group, count) : blocks_for(count, size)]
    return (count % size == 0 or count // size >= num_settled) and v.NULL_BLOCK not in attended


@sentence("P5", v.Fork, fixes="how much a branch shares")
def branch_shares_all_common_blocks(step: Step, history: History) -> Complaints:
    """A branch waits with its own outputs, and shares with its parent as many tokens as it can and
    nothing else."""
    fork = step.event
    assert isinstance(fork, v.Fork)
    life, parent = history.lives[fork.request_id], step.old[fork.request_id]
    count, settled = count_shared(step, history, fork), count_settled(step, history, parent)
    held = [*zip(parent.block_tables, settled, step.block_sizes, strict=True)]
    expected = v.RequestSnapshot(
        fork.child_id,
        v.Status.WAITING,
        output_token_ids=fork.output_token_ids,
        num_computed_tokens=count,
        block_tables=tuple([table[: blocks_for(count, size)] for table, _, size in held]),
        num_cached_blocks=tuple([min(num, count // size) for _, num, size in held]),
        num_cached_tokens=parent.num_cached_tokens,
        grammar_ready=parent.grammar_ready,
    )
    if life.request.grammar is not None:
        automaton = Automaton(step.config, life.request)
        place = automaton.read(fork.output_token_ids)
        if place is not None:
            is_over = automaton.is_reasoning_over(place)
            expected = replace(expected, grammar_state=place.state, reasoning_ended=is_over)
    seen = step.new.get(fork.child_id)
    if seen != expected:
        what = f"{fork.child_id!r} is a branch of {fork.request_id!r}"
        yield unequal(
            what,
            f"request {fork.child_id}",
            expected,
            seen,
            subjects=Subjects((fork.child_id, fork.request_id)),
        )


@sentence("P7", v.Fork)
def fork_changes_no_other_request(step: Step, _history: History) -> Complaints:
    """A fork adds its branch and changes no other request, except that more blocks of its parent
    may be cached."""
    fork = step.event
    assert isinstance(fork, v.Fork)
    parent = step.old[fork.request_id]
    after = step.new.get(fork.request_id, parent)
    named = replace(parent, num_cached_blocks=after.num_cached_blocks)
    expected = {**step.old, fork.request_id: named}
    seen = {name: new for name, new in step.new.items() if name != fork.child_id}
    for name in sorted(expected.keys() | seen.keys()):
        if expected.get(name) != seen.get(name):
            what = f"{name!r} changed although only a branch was added"
            yield unequal(
                what, f"request {name}", expected.get(name), seen.get(name), subjects=name
            )


@sentence("P3", v.Fork, fixes="when a full block is published")
def full_blocks_of_a_parent_are_published(step: Step, history: History) -> Complaints:
    """A fork publishes the full, computed blocks of the parent, and no others."""
    fork = step.event
    assert isinstance(fork, v.Fork)
    parent, life, keys = step.old[fork.request_id], history.lives[fork.request_id], step.after
    before = list(step.before.block_keys)
    settled = zip(parent.num_cached_blocks, count_settled(step, history, parent), strict=True)
    for group, (first, end) in enumerate(settled):
        size = step.block_sizes[group]
        for index in range(first, end):
            block = parent.block_tables[group][index]
            key = keys.block_keys[block]
            if block == v.NULL_BLOCK:
                continue
            expected = life.block_name(index, size)
            if key is None or key.group != group or history.names.of_key(key)[-1] != expected:
                yield Complaint(
                    f"block {block} of {fork.request_id!r} is shared, and has no key",
                    subjects=Subjects((fork.request_id,), (block,)),
                )
            before[block] = key
    yield from differing("block_keys", tuple(before), keys.block_keys)
    counts = count_settled(step, history, parent)
    if fork.request_id in step.new:  # another check finds a missing parent
        seen = step.new[fork.request_id].num_cached_blocks
        yield from differing(f"num_cached_blocks of {fork.request_id}", counts, seen)


@sentence("P16", v.Fork, fixes="the order of a queue")
def branch_goes_to_the_front_of_the_queue(step: Step, history: History) -> Complaints:
    """FCFS puts a branch at the front. PRIORITY puts it at its parent's place, ties by its own
    id."""
    fork = step.event
    assert isinstance(fork, v.Fork)
    waiting = [fork.child_id, *step.before.waiting]
    if step.config.policy is v.Policy.PRIORITY:
        requests = {name: life.request for name, life in history.lives.items()}
        mine = replace(requests[fork.request_id], request_id=fork.child_id)
        requests[fork.child_id] = mine
        waiting.sort(key=lambda name: order_of(requests[name]))
    return differing_requests("waiting", tuple(waiting), step.after.waiting)


def get_written(step: Step, row: PlannedRow) -> list[tuple[int, v.BlockId]]:
    """Per KV group: index and block in which a row continues a partly filled block; the null block
    where it begins a new one."""
    if row.kind not in _GOING_ON:
        return []
    tables, found = step.old[row.request_id].block_tables, []
    for table, size in zip(tables, step.block_sizes, strict=True):
        index = row.first // size
        is_within = row.first % size > 0 and index < len(table)
        found.append((index, table[index] if is_within else v.NULL_BLOCK))
    return found


_GOING_ON = ("running", "continued")


@sentence("P2", v.Schedule, needs="enable_forks", of="rows")
def shared_block_is_not_written(step: Step, _history: History) -> Complaints:
    """A row writes into a partly filled block only if no other request has held it since before the
    step and it is not cached."""
    for row in step.rows:
        name, tables = row.request_id, step.new[row.request_id].block_tables
        for table, (index, before) in zip(tables, get_written(step, row), strict=False):
            block = table[index]
            if before == v.NULL_BLOCK or block != before:
                continue
            others = [
                other
                for other, new in step.new.items()
                if other != name
                and other in step.old
                and block in chain(*new.block_tables)
                and block in chain(*step.old[other].block_tables)
            ]
            if others:
                what = f"{name!r} writes at position {row.first} in block {block}"
                message = f"{what}, which {others} hold, too"
                yield Complaint(message, subjects=Subjects((name, *others), (block,)))
            if step.before.block_keys[block] is not None:
                yield Complaint(
                    f"{name!r} writes in block {block}, which was cached",
                    subjects=Subjects((name,), (block,)),
                )


@sentence("P8", v.Schedule, needs="enable_forks", fixes="when a shared block is copied")
def shared_blocks_are_copied_where_they_are_written(step: Step, _history: History) -> Complaints:
    """A row gets a copy of the partly filled block that it writes, in each KV group, if another
    request holds the block at that time. The plan lists these copies and no others in order of
    scheduling, and the requests whose table changes by one."""
    holders: dict[v.BlockId, set[v.RequestId]] = {}
    for request in step.before.requests:
        for block in filter(None, chain(*request.block_tables)):
            holders.setdefault(block, set()).add(request.request_id)
    holders.pop(v.NULL_BLOCK, None)
    expected: list[v.BlockCopy] = []
    remapped = []
    for row in step.rows:
        name, copies = row.request_id, row.copies or ((),) * len(step.block_sizes)
        for (_, block), of_group in zip(get_written(step, row), copies, strict=False):
            others = holders.get(block, set()) - {name}
            if [it.source for it in of_group] not in ([], [block]) or (of_group and not others):
                yield Complaint(
                    f"{name!r} writes in block {block}, and has copied {of_group}",
                    subjects=Subjects((name,), (block,)),
                )
            for it in of_group:
                expected.append(it)
                holders.get(it.source, set()).discard(name)
        if any(copies) and row.kind == "running":
            remapped.append(name)
    yield from differing("block_copies", tuple(expected), step.plan.block_copies)
    yield from differing_requests(
        "remapped_req_ids", tuple(sorted(remapped)), step.plan.remapped_req_ids
    )


@sentence(
    "P10",
    v.Schedule,
    needs="watermark_blocks",
    of="admitted_rows",
    fixes="how much room an admission leaves",
)
def admission_leaves_the_watermark(step: Step, _history: History) -> Complaints:
    """An admission leaves `watermark_blocks` free blocks for the requests that run already."""
    num_free, watermark = len(step.after.free_queue), step.config.watermark_blocks
    if not step.admitted_rows or len(step.after.running) < 2 or num_free >= watermark:
        return ()
    name = step.admitted_rows[-1].request_id
    what = f"{name!r} was admitted while others run"
    return [unequal(what, "free blocks", f">= {watermark}", num_free, subjects=name)]
