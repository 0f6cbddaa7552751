"""Store: the answers of a KV store about requests, and the transfers that a worker reports.

The store is an adversary: its reports are late, repeated, missing, or about unknown requests, and
blocks fail to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockstep.conformance.draw.decisions import Draw
from blockstep.conformance.draw.groups import make_full
from blockstep.conformance.protocol.features import settle_states
from blockstep.conformance.protocol.program import NO_REPORT, Report
from blockstep.conformance.protocol.transfers import Transfers
from blockstep.spec import vocabulary as v


def draw_store(config: v.Config, draw: Draw, keeps_kinds: bool = False) -> v.Config:
    """Return the config with a KV store.

    Tokens loaded before a failed block are kept only with full attention in every group. Many
    configs with groups are made so, unless the kinds of groups were wished for (`keeps_kinds`).
    """
    if config.is_encoder_decoder:
        config = settle_states(replace(config, is_encoder_decoder=False))
    if len(config.groups) > 1 and not keeps_kinds and draw.chance(50):
        config = make_full(config)
    policy = draw.choice(tuple(v.KVLoadFailurePolicy))
    if len(config.groups) > 1 and draw.chance(60):
        policy = v.KVLoadFailurePolicy.RECOMPUTE  # no other one shows how much of a load is left
    return replace(config, kv_connector=True, kv_load_failure_policy=policy)


def draw_offer(
    name: v.RequestId, num_prompt: int, seed: int, draw: Draw, has_states: bool = False
) -> v.KVOffer:
    """Draw an offer: nothing, part of a prompt, all of it or more, or "not known yet".

    The seed decides whether most loads of a store are asynchronous or synchronous. With recurrent
    states (`has_states`) most offers end before the last token of the prompt, since only these are
    of use.
    """
    few = (0, None, 1, draw.integer(1, num_prompt), draw.integer(1, num_prompt))
    whole = (num_prompt, num_prompt, 10**6, 10**6)
    if has_states:
        whole = (num_prompt - 1, num_prompt - 1, num_prompt, 10**6)
    num_tokens = draw.choice((*few, *whole))
    is_async = draw.chance((90, 60, 25)[seed % 3])
    return v.KVOffer(name, num_tokens, is_async=is_async, delays_free=draw.chance(35))


def draw_report(transfers: Transfers, draw: Draw) -> Report:
    """Draw a report that completes some transfers; sometimes it repeats one or names an unknown
    request."""
    recving = [name for name in transfers.loading if draw.chance(60)]
    sending = [name for name in transfers.sending if draw.chance(60)]
    if draw.chance(10):
        recving += draw.choice((recving, [*transfers.received], transfers.over, ["nobody"]))
        sending += draw.choice((sending, transfers.over, ["nobody"]))
    if draw.chance(5):
        recving, sending = sending, recving
    loads = [load for load in transfers.loading.values() if _fails(load, draw)]
    loads += [load for load in transfers.received.values() if draw.chance(5)]
    return Report(tuple(recving), tuple(sending), _draw_invalid(loads, draw))


def list_ending(
    plan: v.Plan,
    live: Mapping[v.RequestId, v.Request],
    said: Mapping[v.RequestId, v.TokenIds],
) -> list[v.RequestId]:
    """Return the requests of a plan in flight that finish with their next token."""
    names = [row.request_id for row in plan.rows if row.request_id in live]
    return [name for name in names if len(said.get(name, ())) + 1 >= live[name].max_tokens]


def list_read_at_end(
    plan: v.Plan,
    live: Mapping[v.RequestId, v.Request],
    said: Mapping[v.RequestId, v.TokenIds],
    transfers: Transfers,
) -> list[v.RequestId]:
    """Return the requests of a plan that finish with their next token, with a store that reads them
    then."""
    ending = list_ending(plan, live, said)
    return [name for name in ending if transfers.get_offer(name).delays_free]


def draw_answered(
    plan: v.Plan,
    live: Mapping[v.RequestId, v.Request],
    said: Mapping[v.RequestId, v.TokenIds],
    transfers: Transfers,
    draw: Draw,
) -> Report:
    """Draw the report that comes with the model output of a plan.

    For a request that this output finishes, and whose blocks the store reads then, the report may
    already contain the end of that read.
    """
    report = draw_report(transfers, draw) if draw.chance(30) else NO_REPORT
    ending = list_read_at_end(plan, live, said, transfers)
    read = tuple([name for name in ending if draw.chance(35)])
    report = replace(report, sending=(*report.sending, *read))
    failed = [load for load in transfers.at_once.get(plan.frame_id, ()) if _fails(load, draw)]
    return replace(report, invalid=(*report.invalid, *_draw_invalid(failed, draw)))


def weigh_reports(weight: int, transfers: Transfers, seed: int) -> int:
    """Return the weight of reports: one store in seven reports nothing before the drain."""
    if seed % 7 == 0:
        return 1
    return weight * 3 if transfers.loading or transfers.sending else weight


def _fails(load: v.KVLoad, draw: Draw) -> bool:
    """Return whether blocks of a load are reported as invalid; more often with several groups."""
    return draw.chance(60 if len(load.block_ids) > 1 else 35)


def _draw_invalid(loads: Sequence[v.KVLoad], draw: Draw) -> tuple[tuple[v.RequestId, int], ...]:
    """Draw failed blocks for each load: one or two, more with several groups; the first, the last,
    or any."""
    return tuple(
        (load.request_id, draw.choice((0, -1, -1, draw.integer(0, 5))))
        for load in loads
        for _ in range(draw.integer(2, 4) if len(load.block_ids) > 1 else 1 + draw.chance(15))
    )


def list_strange_reports(num_blocks: int, names: Sequence[v.RequestId]) -> list[v.Event]:
    """Return malformed reports, and reports that name blocks of no load or beyond the pool."""
    return [
        v.KVOffer(""),
        v.KVOffer(names[0], -1),
        v.TransfersReported(v.KVTransfers(("",))),
        v.TransfersReported(v.KVTransfers(invalid_block_ids=(-1,))),
        v.TransfersReported(v.KVTransfers(invalid_block_ids=(v.NULL_BLOCK, num_blocks, 10**6))),
        v.TransfersReported(v.KVTransfers(invalid_block_ids=(num_blocks // 2,))),
        v.TransfersReported(v.KVTransfers((names[-1],), (names[-1],))),
        v.TransfersReported(v.KVTransfers((names[0],), (names[0],))),
    ]
