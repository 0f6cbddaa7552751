"""Admission: P7 a failed admission leaves no trace, P8 estimates, P15 work conservation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from blockstep.conformance.judge.attention_ranges import (
    count_across,
    is_aligned,
    is_recurrent,
    slots_of,
)
from blockstep.conformance.judge.gates import is_held
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.hits import find_offered, hit_now
from blockstep.conformance.judge.properties.observed_step import RowKind, Step, is_parked
from blockstep.conformance.judge.properties.property_check import (
    Complaint,
    Complaints,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.queue_replay import (
    admits_no_request,
    begin_plan,
    find_waiting,
    freed_blocks,
    hides_a_rollback,
    left_behind,
    may_pass_over,
    next_in_line,
    preempted_in_order,
    replay_schedule,
)
from blockstep.conformance.judge.properties.token_amounts import (
    admitted_share,
    blocks_behind,
    blocks_for,
    blocks_to_begin,
    charge_at_most,
    ends_in_flight,
    most_held,
    running_slots,
    share_of,
    table_length,
)
from blockstep.conformance.protocol.features import list_kept
from blockstep.spec import vocabulary as v


@sentence("P7", v.Schedule, fixes="what a step does for requests without a row")
def request_without_a_row_stays_the_same(step: Step, history: History) -> Complaints:
    """A request that is neither scheduled nor preempted does not change, even if its admission
    failed.

    Exceptions: a compiled grammar makes a request at the head of a queue WAITING; a running request
    without a row loses the placeholders of its drafts; and a running request that waits for blocks
    has given back its skipped blocks.
    """
    if step.after.requests is step.before.requests:
        return
    rows = {row.request_id for row in step.rows}
    for name, old in step.old.items():
        new = step.new.get(name)
        if name in rows or new is old or new == old:
            continue
        if new is None:
            yield Complaint(f"{name!r} is gone, though a plan ends no request", subjects=name)
        elif not (
            _only_promoted(step, history, name)
            or _only_lost_drafts(step, name)
            or _only_left_windows(step, history, name)
            or name in step.giving
            or name in step.preempted
            or name in step.loads  # another check judges its load
        ):
            yield unequal(
                f"{name!r} has no row but changed", f"request {name}", old, new, subjects=name
            )
    if not step.new.keys() <= step.old.keys():
        yield Complaint(f"a plan made requests: {step.new.keys() - step.old.keys()}")


def _only_promoted(step: Step, history: History, name: v.RequestId) -> bool:
    old, new = step.old[name], step.new[name]
    return (
        history.lives[name].grammar_ready
        and old.status is v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        and new == replace(old, status=v.Status.WAITING)
    )


def _only_lost_drafts(step: Step, name: v.RequestId) -> bool:
    old, new = step.old[name], step.new[name]
    return step.config.async_scheduling and new == replace(old, spec_token_ids=())


def _only_left_windows(step: Step, history: History, name: v.RequestId) -> bool:
    old, new = step.old[name], step.new[name]
    if name != find_waiting(step, history):
        return False
    tables = zip(old.block_tables, new.block_tables, strict=True)
    kept = replace(new, block_tables=old.block_tables)
    if step.config.async_scheduling:
        kept = replace(kept, spec_token_ids=old.spec_token_ids)
    return kept == old and all(
        now in (block, v.NULL_BLOCK)
        for table, after in tables
        for block, now in zip(table, after)  # noqa: B905
    )


@sentence("P7", v.Schedule, fixes="what a step without rows clears away")
def empty_plan_changes_nothing(step: Step, history: History) -> Complaints:
    """A plan without rows, loads and preemptions leaves pool, queues and statistics as they are.

    A skipped request may move between the queues for its tokens in flight or its adapter. Kept
    blocks that are due are freed and order the queue; other checks are about that.
    """
    if step.concerns_requests:
        return
    if step.config.kv_connector and step.giving:
        return  # blocks were reclaimed, and did not suffice
    if step.config.groups and find_waiting(step, history) is not None:
        return  # its skipped blocks are free now, or soon
    before, after = step.before, step.after
    queues = () if may_pass_over(history) else ("waiting", "skipped_waiting")
    fields = ["ref_counts", "free_queue", "block_keys", "cached", *queues, "running", "stats"]
    if list_kept(before):
        fields = [name for name in fields if name not in ("ref_counts", "free_queue", "waiting")]
    for name in fields:
        old, new = getattr(before, name), getattr(after, name)
        if old is not new and old != new:
            yield unequal(f"nothing was scheduled, but {name} changed", name, old, new)


@sentence("P8", v.Schedule, of="rows", fixes="when blocks are taken and given back")
def row_gains_exactly_the_blocks_it_needs(step: Step, history: History) -> Complaints:
    """A row gains the blocks for the tokens of the step and the lookahead slots of the proposer.

    An admission has no lookahead, since the proposer has nothing to continue; to reserve it earlier
    is a policy. Cross-attention blocks are gained once, for all embeddings of the request's items.
    """
    config = step.config
    for row in step.rows:
        tables, slots = row.hit_tables, row.end
        if row.kind in (RowKind.RUNNING, RowKind.CONTINUED):
            tables = step.old[row.request_id].block_tables
        if row.kind is RowKind.RUNNING:
            slots = running_slots(config, row.end)
        if config.groups:
            num_across = count_across(config, history.lives[row.request_id].request)
            nums_slots = [slots_of(group, slots, num_across) for group in config.groups]
            need = [
                max(table_length(group, row.end, slots) - len(table), 0)
                for group, table, slots in zip(config.groups, tables, nums_slots, strict=True)
            ]
        else:
            need = [blocks_behind(config, slots, tables)]
        gained = [*map(len, row.gained_tables)]
        if gained != need:
            what = f"{row.request_id!r} runs positions {row.first} to {row.end - 1}"
            due, seen = _counts(need, gained)
            yield unequal(what, "blocks gained", due, seen, row.request_id)


def _counts(*counts: list[int]) -> list[int | list[int]]:
    """Counts of blocks per KV group; with one group, its count."""
    return [count[0] if len(count) == 1 else count for count in counts]


@sentence("P8", v.Schedule, of="askers", fixes="how much room an admission leaves")
def admission_leaves_room_for_the_whole_prompt(step: Step, history: History) -> Complaints:
    """All known tokens of an admitted request fit the free blocks, under
    `scheduler_reserve_full_isl`.

    A hit block that is free counts as well, since the hit takes it out of the free queue. Blocks
    that the request will skip on the way do not count.
    """
    reserves = step.config.scheduler_reserve_full_isl
    if not reserves or not step.askers or step.hides_what_was_given:
        return
    room = replay_schedule(step, history, ()).room
    for row in step.askers:
        life = history.lives[row.request_id]
        known, num_across = life.num_known, count_across(step.config, life.request)
        num_free, num_free_hits = room[row.request_id]
        need = num_free_hits + _reserve(step.config, row.first, known, num_across, row.hit_tables)
        is_beside = row in step.admitted_rows[1:] or bool(step.before.running)
        need += step.config.watermark_blocks * is_beside
        if need > num_free:
            what = f"{row.request_id!r} was admitted though its {known} tokens do not fit"
            yield unequal(what, "free blocks", f">= {need}", num_free, subjects=row.request_id)


def _reserve(
    config: v.Config, first: int, end: int, num_across: int, hit_tables: v.BlockTables
) -> int:
    """The least number of blocks that are taken and held at once, beyond a hit, to compute [first,
    end).

    With windows or chunks this is the most that the request holds at once beyond its hit.
    """
    if not config.groups:
        return blocks_behind(config, end, hit_tables)
    pairs = zip(config.groups, hit_tables, strict=True)
    hit_tables = tuple([table for group, table in pairs if not is_recurrent(group)])
    return most_held(config, first, end, num_across) - sum(
        1 for block in chain(*hit_tables) if block != v.NULL_BLOCK
    )


@sentence("P15", v.Schedule, fixes="how the tokens of a step are shared out")
def running_request_gets_all_it_can(step: Step, history: History) -> Complaints:
    """Each running request in order gets the tokens that it asks for or the rest of the budget, no
    less.

    Budget, caps, known tokens and drafts bound a row from above. Steps that withdraw rows are left
    out, since the number of their tokens is not visible.
    """
    config = step.config
    victims = preempted_in_order(step, history)
    if hides_a_rollback(step, victims):
        return
    is_paused = history.pause_state is v.PauseState.PAUSED_ALL
    left = 0 if is_paused else config.max_num_batched_tokens
    rows = {row.request_id: row for row in step.running_rows}
    for name in step.before.running:
        if name in victims:
            # The last victim may have preempted itself, which ends the phase. Otherwise later
            # requests were not visited for lack of budget; that case is not checked.
            return
        if name == find_waiting(step, history):
            return  # as if it had preempted itself
        expected = max(min(share_of(history, step.old[name]), left), 0)
        expected = least_share(step, history, name, expected)
        seen = rows[name].num_scheduled if name in rows else 0
        if seen < expected:
            what = f"{name!r} was not given what it could be"
            yield unequal(what, "num_scheduled_tokens", expected, seen, subjects=name)
        left -= seen


def has_items_ahead(step: Step, history: History, name: v.RequestId) -> bool:
    """Whether a request has items that the encoder may have to compute first."""
    if not step.config.encoder_cache_size:
        return False
    items = history.lives[name].request.items
    # A session whose blocks were reclaimed in this step restarts.
    computed = min(it[name].num_computed_tokens for it in (step.old, step.new))
    if step.config.is_encoder_decoder:
        return bool(items) and not computed  # all are computed with the first row
    return any(item.offset + item.length > computed for item in items)


def may_have_its_items(step: Step, history: History, name: v.RequestId) -> bool:
    """Whether no item can keep a waiting request from a row.

    For encoder-decoder inputs the rest of budget and cache is known, since nothing is kept there.
    """
    if not has_items_ahead(step, history, name):
        return True
    config = step.config
    if not config.is_encoder_decoder:
        return False
    num_made = sum(
        [
            history.lives[entry.request_id].request.items[index].num_embeds
            for entry in step.plan.scheduled_encoder_inputs
            for index in entry.item_indices
        ]
    )
    most = min(config.encoder_compute_budget, config.encoder_cache_size)
    return count_across(config, history.lives[name].request) <= most - num_made


def least_share(step: Step, history: History, name: v.RequestId, expected: int) -> int:
    """The fewest tokens that a row may run of those that it could run.

    Chunks that end at recurrent states may be shorter, but never empty: a request whose chunk is
    rounded to nothing would wait for ever (upstream #40707).
    """
    if is_held(step, history, name, step.old[name].num_computed_tokens):
        return 0
    if has_items_ahead(step, history, name):
        return 0  # a chunk stops before an item that does not fit
    if not is_aligned(step.config):
        return expected
    life, old = history.lives[name], step.old[name]
    is_decoding = old.num_computed_tokens >= max(life.num_prompt, life.num_known - 1)
    return expected if is_decoding else min(expected, 1)


@sentence(
    "P15",
    v.Schedule,
    needs="async_scheduling",
    of="rows",
    fixes="how far a plan runs ahead of its tokens",
)
def no_row_after_the_last_token(step: Step, history: History) -> Complaints:
    """No request gets a row if a frame in flight may bring its last output.

    Where exactly to stop is a policy: here upstream's, which assumes that every draft is rejected.
    """
    for row in step.running_rows:
        if ends_in_flight(history, step.old[row.request_id]):
            promised = history.placeholders(row.request_id)
            yield Complaint(
                f"{row.request_id!r} runs position {row.first} with {promised} tokens in flight",
                subjects=row.request_id,
            )


@sentence("P15", v.Schedule, of="preempted", fixes="how the tokens of a step are shared out")
def tokens_of_a_preempted_row_are_given_back(step: Step, history: History) -> Complaints:
    """After a row was withdrawn, the requests scheduled later have the budget as if it had never
    been.

    Preemptions are over once rows gained more blocks than there were without the last victim, or
    after the last row that gained any. Left out are steps in which the last victim may have
    preempted itself, and plans in which no row was withdrawn.
    """
    victims, config = preempted_in_order(step, history), step.config
    if not hides_a_rollback(step, victims):
        return
    place = step.place
    rows = {row.request_id: row for row in step.running_rows}
    if max(place[name] for name in victims) > max((place[name] for name in rows), default=-1):
        return
    last_gain = max((place[name] for name, row in rows.items() if row.gained), default=-1)
    # The most blocks available before the last preemption: a victim also gave back the blocks
    # that it took in this step.
    queue, _ = begin_plan(step, history)
    room = len(queue) + sum(map(len, freed_blocks(step, history, victims[:-1])))
    if config.groups:  # and the skipped blocks that rows gave back
        for name in step.before.running:
            room += sum(map(len, left_behind(step, history, name)))
    left = config.max_num_batched_tokens
    for name in step.before.running:
        if name in victims:
            continue
        seen = rows[name].num_scheduled if name in rows else 0
        expected = max(min(share_of(history, step.old[name]), left), 0)
        expected = least_share(step, history, name, expected)
        if (room < 0 or place[name] > last_gain) and seen < expected:
            what = f"{name!r} was not given what {victims} gave back"
            yield unequal(what, "num_scheduled_tokens", expected, seen, subjects=name)
        left -= seen
        room -= len(rows[name].gained) if name in rows else 0


@sentence("P15", v.Schedule, fixes="which request is admitted, and when")
def head_of_the_queue_is_admitted_when_it_fits(step: Step, history: History) -> Complaints:
    """When a plan stops admitting, the next waiting request does not fit.

    It is judged on the state after the step, which is the state in which the admission failed.
    """
    config, after = step.config, step.after
    left = config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if (
        left <= 0
        or history.pause_state is not v.PauseState.UNPAUSED
        or len(after.running) >= config.max_num_seqs
        or admits_no_request(step, history)
    ):
        return ()
    name = next_in_line(step, history)
    if name is None or not may_have_its_items(step, history, name):
        return ()
    life = history.lives[name]
    num_across = count_across(config, life.request)
    may_hold = life.request.resumable or life.is_branch or is_parked(step.new[name])
    if (may_hold and any(step.new[name].block_tables)) or _hides_a_return(step):
        return ()  # it continues with kept blocks, which are no hit
    num_hit, hits = hit_now(step, history, life)
    num_offered, is_async = find_offered(history, name, num_hit)
    start = num_hit + num_offered
    if is_held(step, history, name, start) and not is_async:
        return ()
    share = 0 if is_async else admitted_share(config, life.num_known, start)
    if not config.enable_chunked_prefill and share > left:
        return ()
    nums_free = [count_free(after, table) for table in hits]
    end, is_loaded = start + min(share, left), num_offered > 0
    need = blocks_to_begin(config, end, hits, num_across, is_loaded) + sum(nums_free)
    if config.scheduler_reserve_full_isl:
        need = max(need, _charge(config, life.num_known, num_across, hits, nums_free))
    if need + config.watermark_blocks * bool(after.running) > len(after.free_queue):
        return ()
    what = f"{name!r} was left waiting with {left} tokens of budget"
    return [unequal(what, "free blocks", f"< {need}", len(after.free_queue), subjects=name)]


def _hides_a_return(step: Step) -> bool:
    """Whether the step published or restarted an asynchronous load, perhaps after it tried the next
    waiting request, which could hit those blocks now."""
    return any(is_parked(step.old[row.request_id]) for row in step.admitted_rows + step.parked)


def count_free(snapshot: v.Snapshot, table: Iterable[v.BlockId]) -> int:
    """Blocks of a table that have no holder."""
    return sum(1 for block in table if block != v.NULL_BLOCK and not snapshot.ref_counts[block])


def _charge(
    config: v.Config,
    num_known: int,
    num_across: int,
    hits: Sequence[Sequence[v.BlockId]],
    nums_free: Sequence[int],
) -> int:
    """The most blocks that an admission may be charged for all known tokens after its hit."""
    if not config.groups:
        return blocks_behind(config, num_known, hits) + sum(nums_free)
    charged = 0
    for group, table, num_free in zip(config.groups, hits, nums_free, strict=True):
        num_slots = slots_of(group, num_known, num_across)
        num_new = blocks_for(num_slots, group.block_size) - len(table)
        charged += charge_at_most(config, group, num_new + num_free)
    return charged
