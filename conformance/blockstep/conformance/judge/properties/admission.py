"""Admission: P7 no trace of a refusal, P8 estimates, P15 work conservation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from blockstep.conformance.judge.attended import (
    count_across,
    is_aligned,
    is_recurrent,
    slots_of,
)
from blockstep.conformance.judge.properties.amounts import (
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
from blockstep.conformance.judge.properties.hits import find_offered, hit_now
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.queue_replay import (
    admits_nobody,
    begin_plan,
    find_waiting,
    freed_blocks,
    hides_a_rollback,
    left_behind,
    may_pass_over,
    next_in_line,
    replay_schedule,
    victims_of,
)
from blockstep.conformance.judge.properties.sentence import Complaint, Complaints, sentence, unequal
from blockstep.conformance.judge.properties.step import RowKind, Step, is_parked
from blockstep.conformance.protocol.findings import of_request
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    BlockTables,
    Config,
    PauseState,
    Policy,
    RequestId,
    Schedule,
    Snapshot,
    Status,
)


@sentence("P7", Schedule, fixes="what a step does for requests without a row")
def request_without_a_row_stays_the_same(step: Step, ledger: Ledger) -> Complaints:
    """Who is neither scheduled nor preempted is as before, also if its admission was tried.

    One thing may happen to it: at a queue's head a compiled grammar turns it into a waiting one,
    or, if it runs and drafts stay with the worker, its placeholders for them are gone. A running
    request that waits for blocks has given back what its windows left.
    """
    if step.after.requests is step.before.requests:
        return
    rows = {row.request_id for row in step.rows}
    for name, old in step.old.items():
        new = step.new.get(name)
        if name in rows or new is old or new == old:
            continue
        if new is None:
            yield Complaint(
                f"{name!r} is gone, though a plan ends nobody", subjects=of_request(name)
            )
        elif not (
            _only_promoted(step, ledger, name)
            or _only_lost_drafts(step, name)
            or _only_left_windows(step, ledger, name)
            or name in step.giving
            or name in step.preempted
            or name in step.loads  # judged by what it is loaded with
        ):
            yield unequal(
                f"{name!r} has no row but changed",
                f"request {name}",
                old,
                new,
                subjects=of_request(name),
            )
    if not step.new.keys() <= step.old.keys():
        yield Complaint(f"a plan made requests: {step.new.keys() - step.old.keys()}")


def _only_promoted(step: Step, ledger: Ledger, name: RequestId) -> bool:
    old, new = step.old[name], step.new[name]
    return (
        ledger.lives[name].grammar_ready
        and old.status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        and new == replace(old, status=Status.WAITING)
    )


def _only_lost_drafts(step: Step, name: RequestId) -> bool:
    old, new = step.old[name], step.new[name]
    return step.config.async_scheduling and new == replace(old, spec_token_ids=())


def _only_left_windows(step: Step, ledger: Ledger, name: RequestId) -> bool:
    old, new = step.old[name], step.new[name]
    if name != find_waiting(step, ledger):
        return False
    tables = zip(old.block_tables, new.block_tables, strict=True)
    kept = replace(new, block_tables=old.block_tables)
    if step.config.async_scheduling:
        kept = replace(kept, spec_token_ids=old.spec_token_ids)
    return kept == old and all(
        now in (block, NULL_BLOCK)
        for table, after in tables
        for block, now in zip(table, after)  # noqa: B905
    )


@sentence("P7", Schedule, fixes="what a step without rows clears away")
def plan_for_nobody_leaves_no_trace(step: Step, ledger: Ledger) -> Complaints:
    """When nobody is scheduled or preempted, pool, queues and statistics are as before.

    Who is passed over, though nothing outside is to come for it, may change from one queue to the
    other: for its tokens in flight, or its adapter. Pins end whose time is over, and others order
    the queue: what then is free and who then waits is judged by how it comes about.
    """
    if step.is_for_somebody:
        return
    if step.config.kv_connector and step.giving:
        return  # to one who did not fit all the same
    if step.config.groups and find_waiting(step, ledger) is not None:
        return  # what its windows left is free now, or soon
    before, after = step.before, step.after
    queues = () if may_pass_over(step.config) else ("waiting", "skipped_waiting")
    fields = ["ref_counts", "free_queue", "block_keys", "cached", *queues, "running", "stats"]
    if before.pins is not None and before.pins.pins:
        fields = [name for name in fields if name not in ("ref_counts", "free_queue", "waiting")]
    for name in fields:
        old, new = getattr(before, name), getattr(after, name)
        if old is not new and old != new:
            yield unequal(f"nobody was scheduled, but {name} changed", name, old, new)


@sentence("P8", Schedule, of="rows", fixes="when blocks are taken and given back")
def row_gains_exactly_the_blocks_it_needs(step: Step, ledger: Ledger) -> Complaints:
    """Blocks gained are those for the tokens of the step and the proposer's lookahead.

    At admission there is no lookahead: the proposer has nothing to look ahead from. Whether to
    reserve it earlier is a policy. Across it is those for the embeddings of its items, once.
    """
    config = step.config
    for row in step.rows:
        tables, slots = row.hit_tables, row.end
        if row.kind in (RowKind.RUNNING, RowKind.CONTINUED):
            tables = step.old[row.request_id].block_tables
        if row.kind is RowKind.RUNNING:
            slots = running_slots(config, row.end)
        if config.groups:
            num_across = count_across(config, ledger.lives[row.request_id].request)
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
            yield unequal(what, "blocks gained", due, seen, of_request(row.request_id))


def _counts(*counts: list[int]) -> list[int | list[int]]:
    """Counts of blocks per KV group; with one group, its count."""
    return [count[0] if len(count) == 1 else count for count in counts]


@sentence("P8", Schedule, of="askers", fixes="how much room an admission leaves")
def admission_leaves_room_for_the_whole_prompt(step: Step, ledger: Ledger) -> Complaints:
    """Under `scheduler_reserve_full_isl` all known tokens fit the blocks free at admission.

    A hit block that is free counts too: touching it takes it out of the free queue. What will be
    given back on the way, because nobody attends to it any more, does not.
    """
    reserves = step.config.scheduler_reserve_full_isl
    if not reserves or not step.askers or step.hides_what_was_given:
        return
    room = replay_schedule(step, ledger, ()).room
    for row in step.askers:
        life = ledger.lives[row.request_id]
        known, num_across = life.num_known, count_across(step.config, life.request)
        num_free, num_free_hits = room[row.request_id]
        need = num_free_hits + _reserve(step.config, row.first, known, num_across, row.hit_tables)
        is_beside = row in step.admitted_rows[1:] or bool(step.before.running)
        need += step.config.watermark_blocks * is_beside
        if need > num_free:
            what = f"{row.request_id!r} was admitted though its {known} tokens do not fit"
            yield unequal(
                what, "free blocks", f">= {need}", num_free, subjects=of_request(row.request_id)
            )


def _reserve(config: Config, first: int, end: int, num_across: int, hit_tables: BlockTables) -> int:
    """Blocks that are taken and held at once beside a hit, at least, to compute [first, end).

    Where not all is attended to, it is no less than what is held beside the hit at any time.
    """
    if not config.groups:
        return blocks_behind(config, end, hit_tables)
    pairs = zip(config.groups, hit_tables, strict=True)
    hit_tables = tuple([table for group, table in pairs if not is_recurrent(group)])
    return most_held(config, first, end, num_across) - sum(
        1 for block in chain(*hit_tables) if block != NULL_BLOCK
    )


@sentence("P15", Schedule, fixes="how the tokens of a step are shared out")
def running_request_gets_all_it_can(step: Step, ledger: Ledger) -> Complaints:
    """In running order, each gets what it asks for or what is left of the budget, no less.

    That nobody gets more is said by what bounds a row: budget, caps, known tokens and drafts. Left
    out are steps in which tokens were given back: how many is not seen.
    """
    config = step.config
    victims = victims_of(step, ledger)
    if hides_a_rollback(step, victims):
        return
    is_paused = ledger.pause_state is PauseState.PAUSED_ALL
    left = 0 if is_paused else config.max_num_batched_tokens
    rows = {row.request_id: row for row in step.running_rows}
    for name in step.before.running:
        if name in victims:
            # The last of them, which may have preempted itself: that stops the phase. If not, who
            # comes after it was not visited because the budget was gone; that much is let pass.
            return
        if name == find_waiting(step, ledger):
            return  # as if it had preempted itself
        expected = max(min(share_of(ledger, step.old[name]), left), 0)
        expected = least_share(step, ledger, name, expected)
        seen = rows[name].num_scheduled if name in rows else 0
        if seen < expected:
            what = f"{name!r} was not given what it could be"
            yield unequal(what, "num_scheduled_tokens", expected, seen, subjects=of_request(name))
        left -= seen


def has_items_ahead(step: Step, ledger: Ledger, name: RequestId) -> bool:
    """Whether a request has items that its encoder may have to make first."""
    if not step.config.encoder_cache_size:
        return False
    items = ledger.lives[name].request.items
    # A session that gave its blocks to another in this step begins anew.
    computed = min(it[name].num_computed_tokens for it in (step.old, step.new))
    if step.config.is_encoder_decoder:
        return bool(items) and not computed  # all are made with the first row
    return any(item.offset + item.length > computed for item in items)


def may_have_its_items(step: Step, ledger: Ledger, name: RequestId) -> bool:
    """Whether no item can keep a waiting request from a row.

    Beside the prompt what is left of the compute and of the room is known: nothing is kept there.
    """
    if not has_items_ahead(step, ledger, name):
        return True
    config = step.config
    if not config.is_encoder_decoder:
        return False
    num_made = sum(
        [
            ledger.lives[entry.request_id].request.items[index].num_embeds
            for entry in step.plan.scheduled_encoder_inputs
            for index in entry.item_indices
        ]
    )
    most = min(config.encoder_compute_budget, config.encoder_cache_size)
    return count_across(config, ledger.lives[name].request) <= most - num_made


def least_share(step: Step, ledger: Ledger, name: RequestId, expected: int) -> int:
    """The fewest tokens that a row may run of those that it could.

    Where chunks of a prompt end at states it may be fewer, but never none: rounded to nothing a
    request would wait for ever (upstream #40707).
    """
    if has_items_ahead(step, ledger, name):
        return 0  # a chunk stops before an item that does not fit
    if not is_aligned(step.config):
        return expected
    life, old = ledger.lives[name], step.old[name]
    is_decoding = old.num_computed_tokens >= max(life.num_prompt, life.num_known - 1)
    return expected if is_decoding else min(expected, 1)


@sentence(
    "P15",
    Schedule,
    needs="async_scheduling",
    of="rows",
    fixes="how far a plan runs ahead of its tokens",
)
def nobody_runs_past_its_last_token(step: Step, ledger: Ledger) -> Complaints:
    """No row for a request whose last output may be in flight: it would run for nothing.

    Where exactly to stop is a policy: upstream's, which counts on every draft being rejected.
    """
    for row in step.running_rows:
        if ends_in_flight(ledger, step.old[row.request_id]):
            promised = ledger.placeholders(row.request_id)
            yield Complaint(
                f"{row.request_id!r} runs position {row.first} with {promised} tokens promised",
                subjects=of_request(row.request_id),
            )


@sentence("P15", Schedule, of="preempted", fixes="how the tokens of a step are shared out")
def tokens_of_a_preempted_row_are_given_back(step: Step, ledger: Ledger) -> Complaints:
    """Who is visited after a row was taken back has the budget as if that row had never been.

    Preemptions are over once more blocks were gained than there are without the last of them, or
    behind the last row that gained any. Left out are steps in which the last victim may have
    preempted itself, and plans that hide no row.
    """
    victims, config = victims_of(step, ledger), step.config
    if not hides_a_rollback(step, victims):
        return
    place = step.place
    rows = {row.request_id: row for row in step.running_rows}
    if max(place[name] for name in victims) > max((place[name] for name in rows), default=-1):
        return
    last_gain = max((place[name] for name, row in rows.items() if row.gained), default=-1)
    # Blocks to be had before the last preemption, at most: what a victim took in this very step
    # it gave back as well.
    queue, _ = begin_plan(step, ledger)
    room = len(queue) + sum(map(len, freed_blocks(step, ledger, victims[:-1])))
    if config.groups:  # and what rows gave back because they attend to it no more
        for name in step.before.running:
            room += sum(map(len, left_behind(step, ledger, name)))
    left = config.max_num_batched_tokens
    for name in step.before.running:
        if name in victims:
            continue
        seen = rows[name].num_scheduled if name in rows else 0
        expected = max(min(share_of(ledger, step.old[name]), left), 0)
        expected = least_share(step, ledger, name, expected)
        if (room < 0 or place[name] > last_gain) and seen < expected:
            what = f"{name!r} was not given what {victims} gave back"
            yield unequal(what, "num_scheduled_tokens", expected, seen, subjects=of_request(name))
        left -= seen
        room -= len(rows[name].gained) if name in rows else 0


@sentence("P15", Schedule, of="admitted_rows", fixes="how the tokens of a step are shared out")
def admitted_request_gets_all_it_can(step: Step, ledger: Ledger) -> Complaints:
    """In order of admission, each gets what it asks for or what is left of the budget, no less."""
    config = step.config
    left = config.max_num_batched_tokens - sum(row.num_scheduled for row in step.running_rows)
    for row in step.admitted_rows:
        share = admitted_share(config, ledger.lives[row.request_id].num_known, row.first)
        expected = least_share(step, ledger, row.request_id, min(share, left))
        if row.num_scheduled < expected:
            what = f"{row.request_id!r} was not given what it could be"
            yield unequal(
                what,
                "num_scheduled_tokens",
                expected,
                row.num_scheduled,
                subjects=of_request(row.request_id),
            )
        left -= row.num_scheduled


@sentence("P15", Schedule, fixes="which request is admitted, and when")
def head_of_the_queue_is_admitted_when_it_fits(step: Step, ledger: Ledger) -> Complaints:
    """When a plan stops admitting, the next in line really does not fit.

    Judged on the state after the step, which is the state in which its admission was refused.
    """
    config, after = step.config, step.after
    left = config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if (
        left <= 0
        or ledger.pause_state is not PauseState.UNPAUSED
        or len(after.running) >= config.max_num_seqs
        or admits_nobody(step, ledger)
    ):
        return ()
    name = next_in_line(step, ledger)
    if name is None or not may_have_its_items(step, ledger, name):
        return ()
    life = ledger.lives[name]
    num_across = count_across(config, life.request)
    may_hold = life.request.resumable or life.is_branch or is_parked(step.new[name])
    if (may_hold and any(step.new[name].block_tables)) or _hides_a_return(step):
        return ()  # goes on behind what it kept, which is no hit
    num_hit, hits = hit_now(step, ledger, life)
    num_offered, is_async = find_offered(ledger, name, num_hit)
    start = num_hit + num_offered
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
    return [
        unequal(what, "free blocks", f"< {need}", len(after.free_queue), subjects=of_request(name))
    ]


def _hides_a_return(step: Step) -> bool:
    """Whether what was loaded was published in this step, maybe behind who is next in line, or one
    of whose load nothing came was loaded anew there: into blocks that the next in line would hit.
    """
    return any(is_parked(step.old[row.request_id]) for row in step.admitted_rows + step.parked)


def count_free(snapshot: Snapshot, table: Iterable[BlockId]) -> int:
    """Blocks of a table that nobody holds."""
    return sum(1 for block in table if block != NULL_BLOCK and not snapshot.ref_counts[block])


def _charge(
    config: Config,
    num_known: int,
    num_across: int,
    hits: Sequence[Sequence[BlockId]],
    nums_free: Sequence[int],
) -> int:
    """Blocks that all known tokens of a request may be charged behind its hit, at most."""
    if not config.groups:
        return blocks_behind(config, num_known, hits) + sum(nums_free)
    charged = 0
    for group, table, num_free in zip(config.groups, hits, nums_free, strict=True):
        num_slots = slots_of(group, num_known, num_across)
        num_new = blocks_for(num_slots, group.block_size) - len(table)
        charged += charge_at_most(config, group, num_new + num_free)
    return charged


@sentence("P15", Schedule, of="preempted", fixes="when a request is preempted")
def nobody_is_preempted_while_blocks_suffice(step: Step, ledger: Ledger) -> Complaints:
    """Without the last preemption of a step, somebody would have lacked blocks.

    Judged under FCFS, where all that a victim held is seen. Who lacked blocks was either given
    them, and then there were fewer without the last victim's; or was the last victim itself.
    """
    victims = victims_of(step, ledger)
    if not victims or step.hides_what_was_given or step.config.policy is not Policy.FCFS:
        return ()
    free = replay_schedule(step, ledger, victims).room_of_the_last
    last = step.old[victims[-1]]
    if any(step.before.ref_counts[it] > 1 for it in chain(*last.block_tables) if it):
        return ()  # what it shared, another need not copy any more
    own_end = last.num_computed_tokens + share_of(ledger, last)
    slots = running_slots(step.config, own_end)
    if free is None or free < blocks_behind(step.config, slots, last.block_tables):
        return ()
    return [
        Complaint(
            f"{last.request_id!r} was preempted, with {free} blocks free",
            subjects=of_request(last.request_id),
        )
    ]


@sentence("P26", Schedule, of="admitted_rows", said_by="new_row_is_new")
def admitted_row_kind_follows_its_status(step: Step, ledger: Ledger) -> Complaints:
    """A preempted request returns as a resumed row, anybody else as a new one.

    Behind a load it is what it was before that.
    """
    resumed = {row.request_id for row in step.plan.cached if row.resumed}
    for row in step.admitted_rows:
        status = step.old[row.request_id].status
        status = (
            ledger.store.parked_as.get(row.request_id, status)
            if is_parked(step.old[row.request_id])
            else status
        )
        if (status is Status.PREEMPTED) is not (row.request_id in resumed):
            yield Complaint(
                f"{row.request_id!r} was {status} and got a {row.kind} row",
                subjects=of_request(row.request_id),
            )
