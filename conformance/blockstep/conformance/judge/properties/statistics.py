"""Statistics (P21): each counter has grown by exactly what happened in the step."""

from __future__ import annotations

from blockstep.conformance.judge.properties.hits import may_ask_the_cache
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.sentence import Complaints, sentence, unequal
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec.vocabulary import EVENT_TYPES, Commit, Reset, Schedule, Stats


@sentence("P21", *EVENT_TYPES)
def counters_grow_by_what_happened(step: Step, ledger: Ledger) -> Complaints:
    """Queries and hits of the admitted, preemptions, drafts scheduled and accepted; once each."""
    expected = _after(step.before.stats, step, ledger)
    if step.after.stats != expected:
        yield unequal("the counters are not what happened", "stats", expected, step.after.stats)


def _after(stats: Stats, step: Step, ledger: Ledger) -> Stats:
    queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
    preemptions = stats.preemptions
    scheduled, accepted = stats.drafts_scheduled, stats.drafts_accepted
    if isinstance(step.event, Schedule):
        preemptions += len(step.plan.preempted_req_ids)
        for row in step.admitted_rows:
            life = ledger.lives[row.request_id]
            if may_ask_the_cache(step, life):
                queries += life.num_known
                hits += row.first
    elif isinstance(step.event, Commit):
        for flight in ledger.frame_of(step):
            tokens = step.sampled.get(flight.request_id, ())
            if flight.drafts and tokens and flight.request_id in ledger.lives:
                scheduled += len(flight.drafts)
                accepted += len(tokens) - 1
    elif isinstance(step.event, Reset):
        if step.event.reset_running_requests:
            preemptions += len(step.before.running)
    else:
        return stats
    return Stats(queries, hits, preemptions, scheduled, accepted)


@sentence("P21", Schedule)
def first_hit_is_remembered(step: Step, ledger: Ledger) -> Complaints:
    """The length of the hit at the first admission is kept, whatever a later admission hits."""
    for row in step.rows:
        old, new = step.old[row.request_id], step.new[row.request_id]
        first = ledger.lives[row.request_id].num_cached_tokens
        expected = row.first if first < 0 else first
        if (new.num_cached_tokens, new.num_preemptions) != (expected, old.num_preemptions):
            what = f"{row.request_id!r} was scheduled at position {row.first}"
            yield unequal(what, "num_cached_tokens", expected, new.num_cached_tokens)
