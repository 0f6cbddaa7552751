"""Requests: drawn so that prompts share prefixes and block keys are put to the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blockstep.conformance.draw.client_view import Draw, Text
from blockstep.conformance.draw.feature import list_draws
from blockstep.conformance.draw.groups import count_slots, list_boundaries
from blockstep.conformance.draw.items import keep_items
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.features.encoder import FEATURE as ENCODER
from blockstep.conformance.protocol.features import (
    EMBEDS,
    GRAMMAR,
    KEYS,
    MULTIMODAL,
    PRIORITY,
    STOPS,
)
from blockstep.spec import vocabulary as v


def request_name(index: int) -> v.RequestId:
    """Return a name by number: A, B, ... Z, A1, B1, ..."""
    letter = chr(ord("A") + index % 26)
    return letter if index < 26 else f"{letter}{index // 26}"


def shuffled(index: int) -> int:
    """Return a permutation within each 26 numbers, so that names do not follow the order of
    arrival."""
    return index - index % 26 + index * 11 % 26


def draw_continuation(
    swarm: Swarm, draw: Draw, name: v.RequestId, index: int, texts: Sequence[Text]
) -> v.Request:
    """Draw a request whose prompt continues the tokens of another, most often under the same keys.

    Otherwise one of the keys differs, and nothing computed for the other request may be read.
    """
    other, text = texts[-1] if draw.chance(50) else draw.choice(texts)
    if other.prompt_embeds:
        text = other.prompt_token_ids  # outputs have no prompt embeddings
    twin = draw_request(swarm, draw, name, index, going_on_from=text)
    length = len(twin.prompt_token_ids)
    kept = keep_items(swarm.config, other.items, length)
    keys: dict[str, Any] = {
        "adapter": other.adapter,
        "cache_salt": other.cache_salt,
        "items": kept,
        "prompt_embeds": (*other.prompt_embeds, 0)[:length] if other.prompt_embeds else (),
    }
    if swarm.has(ENCODER):
        del keys["items"]  # an identifier has one length
        twin = replace(twin, items=kept)
    if draw.chance(25):
        changed = draw.choice([key for key, value in keys.items() if value] or ["adapter"])
        keys[changed] = getattr(twin, changed)
        if changed == "items":
            keys["items"] = change_items(draw, kept, length)
    if len(keys["prompt_embeds"]) < length:
        keys["prompt_embeds"] = ()
    return replace(twin, **keys)


def draw_request(
    swarm: Swarm,
    draw: Draw,
    name: v.RequestId,
    index: int,
    texts: Sequence[v.TokenIds] = (),
    going_on_from: v.TokenIds = (),
) -> v.Request:
    """Draw a request within the swarm's bounds, sometimes beyond them.

    Its prompt may be one of `texts` and a token. If `going_on_from` is not empty, the prompt is its
    beginning and a token.
    """
    room = get_room(swarm, draw)
    is_short = swarm.is_storm and not (
        swarm.has_equals or (swarm.has_long_prompts and (swarm.has(ENCODER) or not index % 3))
    )
    # Many fit the pool at first, and then grow beyond it.
    num_blocks = (1 if index % 3 else 3) if swarm.is_crowded else 2
    most = num_blocks * swarm.config.block_size if is_short else room
    if going_on_from:
        prompt = (*going_on_from[: max(room - 2, 1)], *draw.tokens(1, swarm.vocabulary_size))
    else:
        prompt = draw_prompt(swarm, draw, max(min(room - 1, most), 1), texts)
    stops, keyed = swarm.has(STOPS), swarm.has(KEYS)
    least, most = swarm.preset.max_output
    if swarm.is_crowded:
        least, most = swarm.config.block_size, 2 * swarm.config.block_size + 1
    max_tokens = draw.integer(least, max(min(most, room - len(prompt)), least))
    if draw.chance(6):
        max_tokens = swarm.config.max_model_len  # it finishes at the model length
    token = draw.integer(0, swarm.vocabulary_size - 1)
    priorities = swarm.has(PRIORITY) or swarm.config.policy is v.Policy.PRIORITY
    request = v.Request(
        request_id=name,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        min_tokens=draw.choice((draw.integer(0, max_tokens), max_tokens))
        if stops and draw.chance(30)
        else 0,
        eos_token_id=token if stops and draw.chance(30) else None,
        stop_token_ids=among_others(draw.integer(0, swarm.vocabulary_size - 1), swarm, index)
        if stops and draw.chance(20)
        else (),
        repetition_detection=draw_repetition(draw) if stops and draw.chance(30) else None,
        priority=draw_priority(swarm, draw, index) if priorities else 0,
        arrival_time=draw_arrival(swarm, draw, index),
        adapter=draw.choice(("x", "y")) if keyed and draw.chance(30) else None,
        cache_salt=draw.choice(("x", "y")) if keyed and draw.chance(30) else None,
        items=draw_items(draw, len(prompt)) if swarm.has(MULTIMODAL) and draw.chance(30) else (),
        prompt_embeds=draw_embeds(draw, len(prompt))
        if swarm.has(EMBEDS) and draw.chance(40)
        else (),
        skip_reading_prefix_cache=draw.chance(5),
        structured_output=swarm.has(GRAMMAR) and draw.chance(40),
    )
    for draws in list_draws(swarm.features):
        if draws.add_to_request is not None:
            request = draws.add_to_request(swarm, draw, request, bool(going_on_from))
    return request


def among_others(stop: int, swarm: Swarm, index: int) -> v.TokenIds:
    """Return a stop token before or, more often, after up to seven that are never sampled."""
    others = range(swarm.vocabulary_size, swarm.vocabulary_size + index % 8)
    return (*others, stop) if index % 3 else (stop, *others)


def draw_repetition(draw: Draw) -> v.RepetitionDetection:
    """Draw patterns of one to three tokens; sometimes patterns of one token are left out."""
    least = draw.integer(1, 2)
    return v.RepetitionDetection(draw.integer(least, 3), least, draw.integer(2, 3))


def draw_arrival(swarm: Swarm, draw: Draw, index: int) -> int:
    """Draw an arrival time, sometimes equal to that of another request."""
    if swarm.has_equals:
        return 0
    return index // 2 if draw.chance(20) else index


def draw_priority(swarm: Swarm, draw: Draw, index: int) -> int:
    """Draw a priority; often later requests are more urgent, so that victims precede them in the
    list."""
    if swarm.has_equals:
        return 0
    if swarm.is_storm and draw.chance(90 if swarm.is_crowded else 70):
        return -index
    return 3 - index % 4 if draw.chance(60) else draw.integer(0, 2)


def get_room(swarm: Swarm, draw: Draw) -> int:
    """Draw the limit of prompt and output tokens; most of the time such a request fits the pool."""
    config = swarm.config
    if draw.chance(5):
        return config.max_model_len + 2
    slots = count_slots(config)
    reserve = config.num_speculative_tokens + config.num_lookahead_tokens - 1
    if draw.chance(10):
        reserve = draw.integer(-2, reserve)  # around the limit of the pool
    return max(min(slots - reserve, config.max_model_len), 2)


def draw_prompt(
    swarm: Swarm, draw: Draw, limit: int, texts: Sequence[v.TokenIds] = ()
) -> tuple[int, ...]:
    """Draw part of a hot prefix and new tokens, with lengths around block boundaries.

    Or continue the tokens of an earlier request, whose blocks may still be cached.
    """
    if texts and draw.chance(15):
        text = draw.choice(texts)[: limit - 1]
        return text + draw.tokens(1, swarm.vocabulary_size)
    config = swarm.config
    length = draw.integer(1, limit)
    if draw.chance(60):
        size = config.block_size
        if config.groups:
            size = draw.choice(list_boundaries(config))
        blocks = draw.integer(1, max(limit // size, 1))
        length = min(max(blocks * size + draw.integer(-1, 1), 1), limit)
    hot = draw.choice(swarm.hot_prefixes)
    shared = length if draw.chance(50) else draw.integer(0, length)
    prompt = hot[:shared]
    return prompt + draw.tokens(length - len(prompt), swarm.vocabulary_size)


def draw_items(draw: Draw, num_prompt: int) -> tuple[v.MultiModalItem, ...]:
    """Draw one or two images in the prompt."""
    items: list[v.MultiModalItem] = []
    start = 0
    for _ in range(2 if draw.chance(40) else 1):
        if start < num_prompt:
            offset = draw.integer(start, num_prompt - 1)
            length = draw.integer(1, num_prompt - offset)
            items.append(v.MultiModalItem(draw.choice(("cat", "dog")), offset, length))
            start = offset + length
    return tuple(items)


def change_items(
    draw: Draw, items: tuple[v.MultiModalItem, ...], num_prompt: int
) -> tuple[v.MultiModalItem, ...]:
    """Return other items at the same places, or the last item one position later."""
    last = items[-1] if items else None
    if last is not None and last.offset + last.length < num_prompt and draw.chance(50):
        return (*items[:-1], replace(last, offset=last.offset + 1))
    return tuple(
        replace(item, identifier="cat" if item.identifier == "dog" else "dog") for item in items
    )


def draw_embeds(draw: Draw, num_prompt: int) -> v.TokenIds:
    """Draw embeddings of a prompt: all equal, or one of them different, so that prefixes are
    shared."""
    embeds = [0] * num_prompt
    if draw.chance(60):
        embeds[draw.integer(0, num_prompt - 1)] = draw.integer(1, 2)
    return tuple(embeds)
