"""Sessions: requests that get further input, and the inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.feature import Draws, Situation
from blockstep.conformance.draw.items import draw_encoded, keep_items
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.draw.requests import draw_items, draw_request, get_room
from blockstep.conformance.draw.view import View, WeightedAction
from blockstep.conformance.features.encoder import FEATURE as ENCODER
from blockstep.conformance.features.sessions import FEATURE
from blockstep.conformance.protocol.features import HOSTILE
from blockstep.conformance.protocol.program import Action
from blockstep.spec import vocabulary as v

OF_A_SESSION: tuple[dict[str, Any], ...] = (
    {"priority": 9},
    {"adapter": "other"},
    {"cache_salt": "other"},
    {"skip_reading_prefix_cache": True},
    {"structured_output": True},
    {"structured_output": True, "grammar": v.Grammar(((),))},
    {"job_id": "other"},
    {"is_last_step": True},
)
"""Fields that a streaming update may not have, unless its session has them."""


def add_to_request(swarm: Swarm, draw: Draw, request: v.Request, _goes_on: bool) -> v.Request:
    """Return the request, most often as a session, with room for later inputs."""
    if not draw.chance(60):
        return request
    prompt = request.prompt_token_ids[: max(len(request.prompt_token_ids) // 2, 1)]
    return replace(
        request,
        resumable=True,
        prompt_embeds=(),
        prompt_token_ids=prompt,
        items=keep_items(swarm.config, request.items, len(prompt)),
        max_tokens=min(request.max_tokens, 4),
        min_tokens=min(request.min_tokens, 4),
    )


def streaming_update(view: View, draw: Draw) -> Action:
    """Continue a session, most often one without pending input; sometimes name a request that is
    none."""
    client, swarm, index = view.client, view.swarm, view.num_submitted
    if swarm.has(HOSTILE) and draw.chance(8):
        name = draw.choice([*client.live, *client.ended[-2:], "nobody"])
        return v.StreamingUpdate(replace(v.Request(name, (0, 0)), resumable=draw.chance(50)))
    open_ones = [name for name, one in client.sessions.items() if not one.is_closed]
    waiting = [name for name in open_ones if not client.sessions[name].updates]
    name = draw.choice((waiting if waiting and draw.chance(70) else open_ones) or ["nobody"])
    update = draw_update(swarm, draw, client.live.get(name, v.Request(name, (0,))), index)
    return v.StreamingUpdate(draw_foreign(update, draw) if swarm.has(HOSTILE) else update)


def _may_update(view: View) -> bool:
    return bool(view.client.sessions) or view.swarm.has(HOSTILE)


def draw_update(swarm: Swarm, draw: Draw, session: v.Request, index: int) -> v.Request:
    """Draw the next input of a session, or the end of its input."""
    if draw.chance(25):
        return v.Request(session.request_id, (0,))
    room = get_room(swarm, draw) - len(session.prompt_token_ids)
    most = min(2 * swarm.config.block_size, max(room // 2, 1))
    chunk = draw_request(swarm, draw, session.request_id, index)
    prompt = draw.tokens(draw.integer(1, most), swarm.vocabulary_size)
    count = min(chunk.max_tokens, draw.integer(1, 3))
    repeats = draw.chance(30)
    unsaid = session if repeats else v.Request("", ())
    return replace(
        chunk,
        **{name: getattr(unsaid, name) for name in v.SESSION_FIELDS},
        resumable=True,
        prompt_embeds=(),
        prompt_token_ids=prompt,
        items=draw_items_of_chunk(swarm, draw, chunk, len(prompt)),
        max_tokens=count,
        min_tokens=min(chunk.min_tokens, count),
    )


def draw_items_of_chunk(
    swarm: Swarm, draw: Draw, chunk: v.Request, num_prompt: int
) -> tuple[v.MultiModalItem, ...]:
    """Draw items within an input's own prompt; none for an encoder-decoder model."""
    if not swarm.has(ENCODER):
        return draw_items(draw, num_prompt) if chunk.items else ()
    if swarm.config.is_encoder_decoder or not draw.chance(60):
        return ()
    return draw_encoded(draw, num_prompt, swarm.config, swarm.token_seed, swarm.is_storm)


def draw_foreign(update: v.Request, draw: Draw) -> v.Request:
    """Return the update, sometimes with a field that only its session may set, and so rejected."""
    return replace(update, **draw.choice(OF_A_SESSION)) if draw.chance(8) else update


def list_mistakes(situation: Situation) -> list[v.Event]:
    """Return malformed updates, which name the first and the last of the names."""
    names, length = situation.names, situation.swarm.config.max_model_len
    events: list[v.Event] = []
    for name in {names[0]: None, names[-1]: None}:
        events += [
            v.StreamingUpdate(v.Request(name, ())),
            v.StreamingUpdate(v.Request(name, (0,) * length, resumable=True)),
            v.StreamingUpdate(v.Request(name, (0, 0), prompt_embeds=(1, 1), resumable=True)),
        ]
    return [*events, v.StreamingUpdate(v.Request("nobody", (0,)))]


DRAWS = Draws(
    waits=True,
    add_to_request=add_to_request,
    shortens=True,
    actions={
        "streaming_update": WeightedAction(streaming_update, 14, FEATURE, None, _may_update),
    },
    list_mistakes=list_mistakes,
)
