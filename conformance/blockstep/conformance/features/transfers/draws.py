"""Store: the answers of a KV store about requests, and the transfers that a worker reports.

The store is an adversary: its reports are late, repeated, missing, or about unknown requests, and
blocks fail to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw, list_ending
from blockstep.conformance.draw.feature import Draws, Late, Situation
from blockstep.conformance.draw.groups import make_full
from blockstep.conformance.draw.view import View, WeightedAction
from blockstep.conformance.features.groups.draws import list_kinds
from blockstep.conformance.features.transfers import FEATURE
from blockstep.conformance.protocol.feature import settle_states
from blockstep.conformance.protocol.features import HOSTILE
from blockstep.conformance.protocol.program import NO_REPORT, Action, Report
from blockstep.conformance.protocol.transfer_tracker import Transfers
from blockstep.spec import vocabulary as v


def add_to_config(late: Late) -> None:
    """Add a KV store."""
    add_store(late)


def add_store(late: Late) -> None:
    """Add a KV store; the groups keep the kinds that were wished for."""
    late.config = draw_store(late.config, late.draw, bool(list_kinds(late.wish.always)))


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


def kv_offer(view: View, draw: Draw) -> Action:
    """Draw the store's answer for a request, most often for one of the latest three."""
    client = view.client
    names = [*client.live][-3:] if draw.chance(70) else [*client.live]
    if draw.chance(60):
        names = [name for name in names if name not in client.transfers.offers] or names
    if view.swarm.has(HOSTILE) and draw.chance(5):
        names = [*client.ended[-1:] * 4, *client.ended[-2:], "nobody"]
        return draw_offer(draw.choice(names), 1, view.swarm.token_seed // 7, draw)
    if client.transfers.saved and draw.chance(60):
        return draw_kept(client.transfers.saved, draw)
    name = draw.choice(names or ["nobody"])
    request = client.live.get(name, v.Request(name, (0,)))
    seed, has_states = view.swarm.token_seed // 7, view.swarm.config.has_states
    return draw_offer(name, len(request.prompt_token_ids), seed, draw, has_states)


def report(view: View, draw: Draw) -> Action:
    """Draw a report of transfers without model output."""
    return draw_report(view.client.transfers, draw)


def draw_answer(view: View, draw: Draw) -> Report:
    """Draw the report of transfers that comes with the model output of the oldest frame."""
    now = view.client
    return draw_answered(now.plans[0], now.live, now.delivered, now.transfers, draw)


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


def draw_kept(saved: Mapping[v.RequestId, int], draw: Draw) -> v.KVOffer:
    """Draw an offer for a swapped-out request: most often all saved tokens; or half, none, not
    known yet."""
    name = draw.choice([*saved])
    num_saved = saved[name]
    num_tokens = draw.choice((num_saved, num_saved, num_saved, num_saved // 2, 0, None))
    return v.KVOffer(name, num_tokens, is_async=draw.chance(50), delays_free=draw.chance(20))


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


def list_read_at_end(
    plan: v.Plan,
    live: Mapping[v.RequestId, v.Request],
    delivered: Mapping[v.RequestId, v.TokenIds],
    transfers: Transfers,
) -> list[v.RequestId]:
    """Return the requests of a plan that finish with their next token, with a store that reads them
    then."""
    ending = list_ending(plan, live, delivered)
    return [name for name in ending if transfers.get_offer(name).delays_free]


def draw_answered(
    plan: v.Plan,
    live: Mapping[v.RequestId, v.Request],
    delivered: Mapping[v.RequestId, v.TokenIds],
    transfers: Transfers,
    draw: Draw,
) -> Report:
    """Draw the report that comes with the model output of a plan.

    For a request that this output finishes, and whose blocks the store reads then, the report may
    already contain the end of that read.
    """
    report = draw_report(transfers, draw) if draw.chance(30) else NO_REPORT
    ending = list_read_at_end(plan, live, delivered, transfers)
    read = tuple([name for name in ending if draw.chance(35)])
    report = replace(report, sending=(*report.sending, *read))
    failed = [load for load in transfers.at_once.get(plan.frame_id, ()) if _fails(load, draw)]
    return replace(report, invalid=(*report.invalid, *_draw_invalid(failed, draw)))


def _weigh_offers(weight: int, view: View) -> int:
    # The store answers before a new request is admitted.
    is_asked = next(reversed(view.client.live)) in view.client.transfers.offers
    return weight // 4 if is_asked else weight * 2


def _weigh_loads(weight: int, view: View) -> int:
    return weigh_reports(weight, view.client.transfers, view.swarm.token_seed)


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


def list_mistakes(situation: Situation) -> list[v.Event]:
    """Return malformed reports, and reports that name blocks of no load or beyond the pool."""
    names, num_blocks = situation.names, situation.swarm.config.num_blocks
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


def _has_requests(view: View) -> bool:
    return bool(view.client.live)


DRAWS = Draws(
    add_to_config=add_to_config,
    waits=True,
    answer=draw_answer,
    actions={
        "kv_offer": WeightedAction(kv_offer, 24, FEATURE, _weigh_offers, _has_requests),
        "report": WeightedAction(report, 6, FEATURE, _weigh_loads),
    },
    list_mistakes=list_mistakes,
)
