"""Encoders, requests with items that are encoded, and what a connector offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.feature import Draws, Late, Situation
from blockstep.conformance.draw.items import IDENTIFIERS, draw_beside, draw_encoded, draw_encoder
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.draw.view import View, WeightedAction
from blockstep.conformance.features.encoder import FEATURE
from blockstep.conformance.features.groups import FEATURE as GROUPS
from blockstep.conformance.features.groups import KINDS, STATES
from blockstep.conformance.protocol.features import CACHING, HOSTILE, MULTIMODAL
from blockstep.conformance.protocol.program import Action
from blockstep.spec import vocabulary as v


def add_to_config(late: Late) -> None:
    """Add an encoder, sometimes that of an encoder-decoder model with cross attention.

    In a crowd all requests run small chunks of their prompts, so that victims are preempted amid
    items. Victims of a storm have long prompts for the same reason.
    """
    draw, wish, swarm = late.draw, late.wish, late.swarm
    has_groups = late.takes(GROUPS) and not wish.never & {GROUPS.name, KINDS.name}
    config = late.config
    if swarm.is_crowded:
        crowd = config.max_num_seqs
        config = replace(
            config,
            max_num_batched_tokens=draw.integer(crowd, 2 * crowd),
            long_prefill_token_threshold=draw.integer(1, 3),
        )
    config = draw_encoder(config, draw, swarm.is_storm)
    goes_beside = not (STATES.name in wish.always and config.enable_prefix_caching)
    if goes_beside and CACHING.name not in wish.always and draw.chance(20):
        config = draw_beside(config, draw, has_groups)
    late.config = config
    late.drawn |= {GROUPS.name} if config.is_encoder_decoder and has_groups else set()
    late.swarm = replace(swarm, has_long_prompts=swarm.has_long_prompts or swarm.is_storm)


def goes_with(late: Late) -> bool:
    """Return whether requests may have items, which are what it encodes."""
    return MULTIMODAL.name not in late.wish.never


def add_to_request(swarm: Swarm, draw: Draw, request: v.Request, _goes_on: bool) -> v.Request:
    """Return the request, most often with items to encode in its prompt."""
    length = len(request.prompt_token_ids)
    drawn = draw.chance(70) and not request.prompt_embeds
    seed, is_storm = swarm.token_seed, swarm.is_storm
    items = draw_encoded(draw, length, swarm.config, seed, is_storm) if drawn else ()
    return replace(request, items=items)


def encoder_reset(_view: View, _draw: Draw) -> Action:
    """Empty the encoder cache."""
    return v.EncoderReset()


def encoder_offer(view: View, draw: Draw) -> Action:
    """Let a connector offer some items; sometimes with an unknown identifier."""
    names = tuple(name for name in IDENTIFIERS if draw.chance(35))
    strange = ("nobody", *names) if view.swarm.has(HOSTILE) and draw.chance(10) else ()
    return v.EncoderOffer((*names, *strange))


def list_mistakes(situation: Situation) -> list[v.Event]:
    """Return an offer of nothing, and requests with items that no encoder accepts."""
    swarm, length = situation.swarm, situation.swarm.config.max_model_len
    return [
        v.EncoderOffer(("",)),
        *[
            v.Submit(v.Request("bad", (0,) * (length - 1), items=items))
            for items in _list_bad_items(swarm, situation.live)
        ],
    ]


def _list_bad_items(
    swarm: Swarm, live: Mapping[v.RequestId, v.Request]
) -> list[tuple[v.MultiModalItem, ...]]:
    """Return items that no encoder accepts: too large, overlapping, without embeddings, or with
    another size than the same identifier has elsewhere."""
    config = swarm.config
    large = max(config.encoder_compute_budget, config.encoder_cache_size) + 1
    return [
        (v.MultiModalItem("elk", 0, large),),
        (v.MultiModalItem("elk", 0, 1), v.MultiModalItem("elk", 1, 2)),
        (v.MultiModalItem("elk", 0, 2), v.MultiModalItem("fox", 1, 1)),
        (v.MultiModalItem("elk", 0, 2, (False, False)),),
        (v.MultiModalItem("elk", 0, 1, (True, True)),),
        *[
            (v.MultiModalItem(item.identifier, 0, item.num_embeds + 1),)
            for request in live.values()
            for item in request.items[:1]
        ],
    ]


DRAWS = Draws(
    add_to_config=add_to_config,
    goes_with=goes_with,
    add_to_request=add_to_request,
    actions={
        "encoder_reset": WeightedAction(encoder_reset, 2, FEATURE),
        "encoder_offer": WeightedAction(encoder_offer, 3, FEATURE),
    },
    list_mistakes=list_mistakes,
)
