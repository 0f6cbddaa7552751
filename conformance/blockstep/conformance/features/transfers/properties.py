"""Transfers: P17 holds have an owner and an end, P18 reports change what they are about, P19
nothing computes on, shares or hits KV that was not loaded, P15 finished loads are admitted.

    | local hit |     loaded from a store      | computed |
    | published | unconfirmed: of this request |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from blockstep.conformance.judge.attention_ranges import count_across
from blockstep.conformance.judge.gates import is_held
from blockstep.conformance.judge.properties.admission import may_have_its_items
from blockstep.conformance.judge.properties.budgets import nothing_held
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.hits import find_offered
from blockstep.conformance.judge.properties.observed_step import Step, is_parked
from blockstep.conformance.judge.properties.output import make_error_row
from blockstep.conformance.judge.properties.policy_order import follow_holds
from blockstep.conformance.judge.properties.property_check import (
    ENDINGS,
    NO_FORKS,
    Complaint,
    Complaints,
    differing_requests,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.queue_replay import (
    admits_no_request,
    begin_admission,
    must_wait,
)
from blockstep.conformance.judge.properties.token_amounts import (
    admitted_share,
    blocks_behind,
)
from blockstep.conformance.protocol.findings import Subjects
from blockstep.spec import vocabulary as v

_NOTHING = v.TransfersSnapshot()


@sentence("P19", v.Schedule, needs="kv_connector", fixes="how much of an offer is loaded")
def load_is_what_the_store_offers(step: Step, history: History) -> Complaints:
    """A request that gets blocks after a prefix hit loads all tokens that the store offers after
    the hit, except the last known token; no other request loads anything."""
    for row in step.askers:
        name = row.request_id
        load = step.loads.get(name)
        due = find_offered(history, name, row.num_hit)
        seen = (0, False) if load is None else (load.num_external_tokens, load.is_async)
        if seen != due:
            what = f"{name!r} has a hit of {row.num_hit} tokens, and is loaded otherwise"
            yield unequal(what, "tokens, whether later", due, seen, subjects=name)
    strange = step.loads.keys() - {row.request_id for row in step.askers}
    if strange:
        what = f"{sorted(strange)} are loaded, and were not given blocks behind a hit"
        yield Complaint(what, subjects=Subjects(tuple(sorted(strange))))


@sentence(
    "P19",
    v.Schedule,
    v.TransfersReported,
    needs="kv_connector",
    fixes="what counts as computed while a load is under way",
)
def loading_request_matches_its_load(step: Step, history: History) -> Complaints:
    """A request with an asynchronous load holds the blocks of the load, counts its tokens as
    computed, and has published no block after its hit. It has no row and no running slot. The end
    of a load that did not fail changes nothing of this."""
    if isinstance(step.event, v.TransfersReported):
        failed = history.store.find_failed(step)
        for name in history.store.list_arrived(step):
            waiting, new = step.old.get(name), step.new.get(name)
            if waiting is not None and new != waiting and name not in failed:
                yield unequal(
                    f"a report changed {name!r}", f"request {name}", waiting, new, subjects=name
                )
        return
    for row in step.parked:
        name = row.request_id
        old, new = step.old[name], step.new[name]
        expected = replace(
            old,
            status=v.Status.WAITING_FOR_REMOTE_KVS,
            num_computed_tokens=row.first,
            block_tables=_list_loaded_tables(step, name),
            num_cached_blocks=tuple([len(table) for table in row.hit_tables]),
        )
        if new != expected:
            yield unequal(f"{name!r} is parked", f"request {name}", expected, new, subjects=name)


def _list_loaded_tables(step: Step, name: v.RequestId) -> v.BlockTables:
    """Block tables of a request that waits for a load: blocks of the load, and state blocks of
    drafts."""
    groups, planned, seen = (
        step.config.groups,
        step.loads[name].block_ids,
        step.new[name].block_tables,
    )
    if not groups:
        return planned
    tables = []
    for group, loaded, table in zip(groups, planned, seen, strict=True):
        end = len(loaded) + group.num_speculative_blocks
        tables.append(loaded + table[len(loaded) : end])
    return tuple(tables)


@sentence(
    "P19",
    v.Schedule,
    v.Commit,
    v.TransfersReported,
    v.Reset,
    needs="kv_connector",
    covered_by="block_is_shared_once_its_load_has_come",
)
def unconfirmed_blocks_are_not_shared(step: Step, history: History) -> Complaints:
    """No block after the local hit of a request is published or shared before its load is
    confirmed, by its admission or by the commit of the plan that loads it."""
    if not step.config.kv_connector:
        return
    for request, load in _list_uncertain(step, history):
        for table, size in zip(request.block_tables, step.block_sizes, strict=True):
            for block in table[load.num_computed_tokens // size :]:
                seen = (step.after.ref_counts[block], step.after.block_keys[block])
                if block != v.NULL_BLOCK and seen != (1, None):
                    what = f"block {block} of {request.request_id!r} is of an unconfirmed load"
                    yield unequal(
                        what,
                        "ref count, key",
                        (1, None),
                        seen,
                        subjects=Subjects((request.request_id,), (block,)),
                    )


def _list_uncertain(step: Step, history: History) -> Iterator[tuple[v.RequestSnapshot, v.KVLoad]]:
    """Yield the requests whose load is unconfirmed after a step, with that load."""
    store = history.store
    begun = step.loads if isinstance(step.observation, v.Plan) else {}
    at_once = {
        load.request_id: load for loads in store.transfers.at_once.values() for load in loads
    }
    unsettled = _list_unsettled(step, history)
    for request in step.after.requests:
        name = request.request_id
        load = None
        if is_parked(request):
            load = begun.get(name) or store.parked.get(name)
        elif name in unsettled:
            load = begun.get(name) or at_once.get(name)
        if load is not None:
            yield request, load


def _list_unsettled(step: Step, history: History) -> set[v.RequestId]:
    """Running requests whose load is unconfirmed after a step."""
    unsettled = history.store.unsettled
    left = {name for name in unsettled if name in step.new}
    if isinstance(step.observation, v.Plan):
        left -= {*step.preempted}
        return left | {load.request_id for load in step.plan.kv_loads if not load.is_async}
    if isinstance(step.event, v.Commit):
        return {name for name in left if unsettled[name] != step.event.frame_id}
    if isinstance(step.event, v.Reset) and step.event.reset_running_requests:
        is_done = isinstance(step.observation, v.ResetDone) and step.observation.success
        return set() if is_done else left
    return left


@sentence(
    "P19", *NO_FORKS, needs="kv_connector", covered_by="block_is_shared_once_its_load_has_come"
)
def unconfirmed_loads_are_those_in_flight(step: Step, history: History) -> Complaints:
    """The state lists exactly the running requests whose load is unconfirmed."""
    if step.config.kv_connector:
        shown = step.after.transfers or _NOTHING
        due = sorted(_list_unsettled(step, history))
        yield from differing_requests("unsettled", due, list(shown.unsettled))


@sentence("P18", *NO_FORKS, needs="kv_connector", fixes="how long an offer is remembered")
def offers_are_those_made_last(step: Step, history: History) -> Complaints:
    """The state has the last offer for each unfinished request, and no other."""
    shown = step.after.transfers
    if shown is None:
        return
    offers = dict(history.store.transfers.offers)
    if isinstance(step.event, v.KVOffer) and step.event.request_id in history.lives:
        offers[step.event.request_id] = step.event
    if isinstance(step.event, v.Reset) and step.event.reset_connector:
        is_done = isinstance(step.observation, v.ResetDone) and step.observation.success
        offers = {} if is_done else offers
    due = [
        offer
        for name, offer in sorted(offers.items())
        # An empty offer is the same as no offer.
        if name in step.new and (offer.num_tokens != 0 or offer != v.KVOffer(name))
    ]
    if due != [*shown.offers]:
        yield from differing_requests("offers", due, [*shown.offers])


@sentence("P18", *NO_FORKS, needs="kv_connector")
def received_are_those_reported(step: Step, history: History) -> Complaints:
    """An asynchronous load counts as done from the report of its end until its request is admitted
    or ends. A late, repeated or unknown report changes nothing."""
    before, after = step.before.transfers, step.after.transfers
    if before is None or after is None:
        return
    begun = step.loads if isinstance(step.observation, v.Plan) else {}
    report = history.store.get_report(step)
    due = {name for name in before.received if name not in begun}
    due |= history.store.transfers.loading.keys() & {*report.finished_recving}
    due = {name for name in due if name in step.new and is_parked(step.new[name])}
    yield from differing_requests("received", sorted(due), list(after.received))


@sentence("P17", *[it for it in NO_FORKS if it is not v.Schedule], needs="kv_connector")
def every_hold_has_an_owner_and_an_end(step: Step, history: History) -> Complaints:
    """Blocks of a request that ends are held for its load and for the read by the store, until the
    end of each is reported."""
    after = step.after.transfers
    if after is None:
        return
    held = history.store.held
    if isinstance(step.event, (*ENDINGS, v.StreamingUpdate)):
        held = follow_holds(step, history).held
    if held or after.held:
        yield from differing_requests(
            "held", [held[name] for name in sorted(held)], list(after.held)
        )


@sentence("P17", v.Schedule, needs="kv_connector")
def block_in_transfer_is_not_reused(step: Step, history: History) -> Complaints:
    """A plan ends no hold, and gives no request a block that is held or being loaded.

    It begins a hold for a request whose abort takes effect with it.
    """
    before, after = step.before.transfers, step.after.transfers
    if before is None or after is None:
        return
    due = {hold.request_id: hold for hold in before.held}
    for name in history.ending & step.old.keys():
        hold = history.store.find_hold(step.old[name])
        due |= {} if hold is None else {name: hold}
    yield from differing_requests("held", [due[name] for name in sorted(due)], list(after.held))
    kept = [table for held in before.held for table in held.block_tables]
    for old in step.before.requests:
        kept += old.block_tables if history.store.is_under_way(old) else ()
    blocks = {block for table in kept for block in table}
    for row in (*step.rows, *step.parked) if blocks else ():
        taken = blocks.intersection(row.gained)
        if taken:
            yield Complaint(
                f"{row.request_id!r} is given blocks {sorted(taken)}, in transfer",
                subjects=Subjects((row.request_id,), tuple(sorted(taken))),
            )


@sentence("P17", v.Schedule, v.Reset, *ENDINGS, needs="kv_connector")
def deferred_free_ends_with_the_answer_to_its_frame(step: Step, _history: History) -> Complaints:
    """Blocks that wait for a frame wait for one that is in flight and will be committed."""
    after = step.after.transfers
    for entry in () if after is None else after.deferred_frees:
        if entry.frame_id not in step.after.frames_in_flight:
            what = f"blocks {entry.block_ids} wait for frame {entry.frame_id}"
            in_flight = step.after.frames_in_flight
            yield unequal(what, "frame_id", f"one of {in_flight}", entry.frame_id)


@sentence(
    "P17",
    *NO_FORKS,
    needs="kv_connector",
    fixes="which blocks wait for the answers to frames in flight",
)
def block_of_a_frame_in_flight_is_free_behind_its_answer(
    step: Step, history: History
) -> Complaints:
    """Blocks that a request with a row in flight frees wait for the newest such frame, and no
    others wait. Earlier a store could write them while the frame reads or writes them."""
    before, after = step.before.transfers, step.after.transfers
    if before is None or after is None:
        return
    is_same = step.after.requests is step.before.requests and before.held == after.held
    if is_same and not (before.deferred_frees or after.deferred_frees):
        return
    answered = step.event.frame_id if isinstance(step.event, v.Commit) else None
    due = Counter(pair for pair in _list_deferred(before) if pair[0] != answered)
    for name, blocks in _list_given_up(step, before, after):
        fence = history.get_fence(name, step)
        if fence is not None:
            due.update((fence, block) for block in blocks)
    seen = Counter(_list_deferred(after))
    if due != seen:
        pairs = sorted((due - seen).elements()), sorted((seen - due).elements())
        what = "the blocks that wait for frames in flight are others"
        yield unequal(what, "missing, too many (frame, block)", ([], []), pairs)


def _list_deferred(transfers: v.TransfersSnapshot) -> Iterator[tuple[v.FrameId, v.BlockId]]:
    for entry in transfers.deferred_frees:
        yield from ((entry.frame_id, block) for block in entry.block_ids)


def _list_given_up(
    step: Step, before: v.TransfersSnapshot, after: v.TransfersSnapshot
) -> Iterator[tuple[v.RequestId, Iterable[v.BlockId]]]:
    """Yield each request with the blocks that it held before a step and holds no more."""
    begun_anew = step.giving if isinstance(step.observation, v.Plan) else ()
    held = {it.request_id: it.block_tables for it in before.held}
    kept = {it.request_id: it.block_tables for it in after.held}
    for name, tables in [
        *held.items(),
        *((it.request_id, it.block_tables) for it in step.before.requests),
    ]:
        new = step.new.get(name)
        left = kept.get(name, ()) if new is None else new.block_tables
        old_blocks = Counter(filter(None, chain(*tables)))
        yield name, (old_blocks - Counter(() if name in begun_anew else chain(*left))).elements()


@sentence(
    "P16",
    v.Schedule,
    needs="kv_connector",
    of="preempted",
    fixes="which request is preempted",
)
def preempted_request_has_no_row_in_flight(step: Step, history: History) -> Complaints:
    """No request is preempted whose blocks would be free only after the commit of a frame in
    flight: the request that lacks blocks waits for that commit instead. This is a policy."""
    for name in step.preempted:
        fence = history.get_fence(name)
        if fence is not None:
            yield Complaint(f"{name!r} was preempted while frame {fence} names it", subjects=name)


@sentence("P18", v.TransfersReported)
def report_changes_only_what_it_is_about(step: Step, history: History) -> Complaints:
    """A report of transfers changes no request but those that it ends and those whose load it is
    about."""
    concerned = {*history.store.find_failed(step), *history.store.list_arrived(step)}
    for name, old in step.old.items():
        new = step.new.get(name)
        if name not in concerned and new is not old and new != old:
            yield unequal(f"a report changed {name!r}", f"request {name}", old, new, subjects=name)


@sentence(
    "P19",
    v.Commit,
    v.TransfersReported,
    needs="kv_connector",
    covered_by="attended_slot_was_loaded",
)
def failed_load_counts_no_further_than_it_came(step: Step, history: History) -> Complaints:
    """Under the policy RECOMPUTE a request counts as computed only the leading tokens of its load
    that are present; tokens computed after them are void."""
    if history.config.kv_load_failure_policy is not v.KVLoadFailurePolicy.RECOMPUTE:
        return
    for name, valid in history.store.find_failed(step).items():
        old, new = step.old[name], step.new.get(name)
        due = replace(old, num_computed_tokens=min(old.num_computed_tokens, valid))
        if new != due:
            yield unequal(
                f"{name!r} has {valid} tokens", f"request {name}", due, new, subjects=name
            )
    void = history.find_void(step)
    lost = history.list_lost(step)
    no_tables, nothing_settled = nothing_held(step)
    for name, valid in void.items():
        old, new = step.old[name], step.new.get(name)
        due = replace(old, num_output_placeholders=0)
        if name in lost:
            due = replace(
                due,
                status=v.Status.PREEMPTED,
                num_computed_tokens=0,
                spec_token_ids=(),
                block_tables=no_tables,
                num_cached_blocks=nothing_settled,
                num_preemptions=old.num_preemptions + 1,
            )
        elif history.store.unsettled.get(name) == step.commit.frame_id:
            due = replace(
                due,
                num_computed_tokens=valid,
                spec_token_ids=(),
                is_prefill_chunk=True,
                # Another check compares them.
                num_cached_blocks=due.num_cached_blocks if new is None else new.num_cached_blocks,
            )
        if new != due:
            yield unequal(
                f"{name!r} has {valid} tokens", f"request {name}", due, new, subjects=name
            )


@sentence("P19", v.TransfersReported, v.Commit, covered_by="delivered_rows_are_those_that_sampled")
def failed_loads_finish_exactly_their_requests(step: Step, history: History) -> Complaints:
    """Under the policy FAIL exactly the requests whose load failed end with an error.

    A commit may report that a load of its own frame failed.
    """
    failing = history.list_failing(step)
    if isinstance(step.event, v.Commit):
        ends = [(row.request_id, row.finish_reason) for row in step.output_rows]
        seen_names = [name for name, reason in ends if reason is v.FinishReason.ERROR]
        yield from differing_requests("ended by an error", sorted(failing), sorted(seen_names))
        return
    # Another check compares the cached tokens.
    due = [replace(make_error_row(history, name), num_cached_tokens=0) for name in failing]
    seen = [replace(row, num_cached_tokens=0) for row in step.output_rows]
    yield from differing_requests("rows", due, seen)
    left = step.old.keys() - {*failing}
    yield from differing_requests("unfinished", sorted(left), sorted(step.new))


@sentence("P15", v.Schedule, needs="kv_connector", fixes="which request is admitted, and when")
def loaded_request_passes_a_blocked_head(step: Step, history: History) -> Complaints:
    """A request with a finished load is admitted once the blocks that it still needs fit, even if
    one before it does not: it holds the blocks of its load while it waits."""
    config, after = step.config, step.after
    received = () if after.transfers is None else after.transfers.received
    left = config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if (
        not received
        or left <= 0
        or history.pause_state is not v.PauseState.UNPAUSED
        or len(after.running) >= config.max_num_seqs
        or admits_no_request(step, history)
        or step.giving
    ):
        return
    gates, num_free = begin_admission(step, history), len(after.free_queue)
    for row in step.admitted_rows:
        gates.take(row.request_id)
    for name in received:
        request, life = step.new[name], history.lives[name]
        if must_wait(history, gates, request) or not may_have_its_items(step, history, name):
            continue
        share = admitted_share(config, life.num_known, request.num_computed_tokens)
        if is_held(step, history, name, request.num_computed_tokens):
            continue
        if not request.num_computed_tokens or (share > left and not config.enable_chunked_prefill):
            continue
        end = request.num_computed_tokens + share
        end = life.num_known if config.scheduler_reserve_full_isl else end
        num_across = count_across(config, life.request)
        need = blocks_behind(config, end, request.block_tables, num_across)
        need += config.watermark_blocks * bool(after.running)
        if need <= num_free:
            what = f"{name!r} was left waiting, and its load is done"
            yield unequal(what, "free blocks", f"< {need}", num_free, subjects=name)
