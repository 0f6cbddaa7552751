"""Actions: what may be done next, and how its details are drawn.

One table serves the seeded generator and the Hypothesis machine; they differ only in where a `Draw`
takes its decisions from. Who draws an action sees a `View`: what any client could know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any, Protocol, TypeAlias, TypeVar

from blockstep.conformance.draw.presets import Draw, Habit, Swarm
from blockstep.conformance.protocol.features import (
    ABORTS,
    DRAFTS,
    EMBEDS,
    GRAMMAR,
    HOSTILE,
    KEYS,
    MULTIMODAL,
    PAUSE,
    PRIORITY,
    RESET,
    STOPS,
    Feature,
)
from blockstep.conformance.protocol.program import (
    Action,
    Answer,
    Hostile,
    Misanswer,
    Mistake,
    Propose,
)
from blockstep.spec import vocabulary as v

T = TypeVar("T")


class SeededDraw:
    """Decisions from a seeded generator: `Draw` for long runs."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)  # noqa: S311 - tests, not secrets

    def integer(self, low: int, high: int) -> int:
        """An int between `low` and `high`, both included."""
        return low + int(self._random.random() * (high - low + 1)) if high > low else low

    def choice(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return options[int(self._random.random() * len(options))]

    def chance(self, percent: int) -> bool:
        """True in about `percent` of a hundred cases."""
        return self._random.random() * 100 < percent

    def tokens(self, count: int, vocabulary_size: int) -> tuple[int, ...]:
        """So many token ids below `vocabulary_size`."""
        return tuple(int(self._random.random() * vocabulary_size) for _ in range(count))


class Memory(Protocol):
    """What a client remembers of a run (see `lockstep.client`)."""

    @property
    def live(self) -> dict[v.RequestId, v.Request]:
        """Accepted and not ended, in order of submission."""
        ...

    @property
    def ended(self) -> list[v.RequestId]:
        """Lately ended ids, to be named again by mistake."""
        ...

    @property
    def texts(self) -> Sequence[v.TokenIds]:
        """What ended requests came to: the next turn of a talk begins with it."""
        ...

    @property
    def lost(self) -> Sequence[tuple[v.Request, v.TokenIds]]:
        """Requests of which something was taken back, and their texts: no key may be left of it."""
        ...

    @property
    def plans(self) -> list[v.Plan]:
        """In flight, oldest first."""
        ...

    @property
    def last_plan(self) -> v.Plan | None:
        """In flight or answered."""
        ...


@dataclass(slots=True)
class View:
    """What a client knows of a run so far."""

    swarm: Swarm
    client: Memory
    num_submitted: int = 0
    seeks_aborts: bool = False
    """Nobody compares, so aborts are tried often, and of those in flight above all: what they leave
    behind shows in nothing else."""

    def note(self, action: Action) -> None:
        """An action was done."""
        self.num_submitted += isinstance(action, v.Submit)


Drawing: TypeAlias = Callable[[View, Draw], Action]
"""Draws the details of one kind of action."""


def submit(view: View, draw: Draw) -> Action:
    """A new request, most often with a prompt that shares a prefix with others."""
    client = view.client
    if view.swarm.has(HOSTILE) and client.live and draw.chance(4):
        return v.Submit(draw.choice(list(client.live.values())))
    name = request_name(shuffled(view.num_submitted))
    if client.ended and draw.chance(8):
        name = draw.choice(client.ended)
    elif client.ended and client.plans and draw.chance(8):
        name = client.ended[-1]  # a frame may still name it
    latest = len(client.last_plan.preempted_req_ids) if client.last_plan else 0
    if client.lost and draw.chance(60 if latest else 25):
        lost = [*client.lost][-latest:]  # 0: all of them
        return v.Submit(draw_twin(view.swarm, draw, name, view.num_submitted, lost))
    return v.Submit(draw_request(view.swarm, draw, name, view.num_submitted, client.texts))


def request_name(index: int) -> v.RequestId:
    """A, B, ... Z, A1, B1, ..."""
    letter = chr(ord("A") + index % 26)
    return letter if index < 26 else f"{letter}{index // 26}"


def shuffled(index: int) -> int:
    """The index of a name: each 26 in no order, so that no order can follow from names unseen."""
    return index - index % 26 + index * 11 % 26


def draw_twin(
    swarm: Swarm,
    draw: Draw,
    name: v.RequestId,
    index: int,
    lost: Sequence[tuple[v.Request, v.TokenIds]],
) -> v.Request:
    """A request that goes on from a text of another, most often under the same keys.

    Else one of its keys differs. Nothing computed for the other one may be read then.
    """
    other, text = draw.choice(lost)
    if other.prompt_embeds:
        text = other.prompt_token_ids  # no prompt has the embeddings of outputs
    twin = draw_request(swarm, draw, name, index, going_on_from=text)
    length = len(twin.prompt_token_ids)
    keys: dict[str, Any] = {
        "adapter": other.adapter,
        "cache_salt": other.cache_salt,
        "items": tuple(item for item in other.items if item.offset + item.length <= length),
        "prompt_embeds": (*other.prompt_embeds, 0)[:length],
    }
    if draw.chance(25):
        keys["items"] = tuple(
            replace(item, identifier="cat" if item.identifier == "dog" else "dog")
            for item in keys["items"]
        )
        changed = draw.choice([key for key, value in keys.items() if value] or ["adapter"])
        keys[changed] = getattr(twin, changed)
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
    """A request within the swarm's bounds, now and then beyond them.

    Its prompt may be one of `texts` and a token, and is `going_on_from` and a token if that is any.
    """
    room = get_room(swarm, draw)
    is_short = swarm.is_storm and not (swarm.has_long_prompts and index % 2)
    most = 2 * swarm.config.block_size if is_short else room  # many fit, and then they grow
    if going_on_from:
        prompt = (*going_on_from[: max(room - 2, 1)], *draw.tokens(1, swarm.vocabulary_size))
    else:
        prompt = draw_prompt(swarm, draw, max(min(room - 1, most), 1), texts)
    stops, keyed = swarm.has(STOPS), swarm.has(KEYS)
    least, most = swarm.preset.max_output
    max_tokens = draw.integer(least, max(min(most, room - len(prompt)), least))
    if draw.chance(6):
        max_tokens = swarm.config.max_model_len  # the model length will end it
    token = draw.integer(0, swarm.vocabulary_size - 1)
    priorities = swarm.has(PRIORITY) or swarm.config.policy is v.Policy.PRIORITY
    return v.Request(
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
        arrival_time=index // 2 if draw.chance(20) else index,
        adapter=draw.choice(("x", "y")) if keyed and draw.chance(30) else None,
        cache_salt=draw.choice(("x", "y")) if keyed and draw.chance(30) else None,
        items=draw_items(draw, len(prompt)) if swarm.has(MULTIMODAL) and draw.chance(30) else (),
        prompt_embeds=draw_embeds(draw, len(prompt))
        if swarm.has(EMBEDS) and draw.chance(40)
        else (),
        skip_reading_prefix_cache=draw.chance(5),
        structured_output=swarm.has(GRAMMAR) and draw.chance(40),
    )


def among_others(stop: int, swarm: Swarm, index: int) -> v.TokenIds:
    """A stop token before or, more often, after up to seven that are never sampled."""
    others = range(swarm.vocabulary_size, swarm.vocabulary_size + index % 8)
    return (*others, stop) if index % 3 else (stop, *others)


def draw_repetition(draw: Draw) -> v.RepetitionDetection:
    """Patterns of one to three tokens; single ones left out now and then, or they come first."""
    least = draw.integer(1, 2)
    return v.RepetitionDetection(draw.integer(least, 3), least, draw.integer(2, 3))


def draw_priority(swarm: Swarm, draw: Draw, index: int) -> int:
    """Often the later the more urgent: then victims stand ahead of those who need their blocks."""
    if swarm.is_storm and draw.chance(70):
        return -index
    return 3 - index % 4 if draw.chance(60) else draw.integer(0, 2)


def get_room(swarm: Swarm, draw: Draw) -> int:
    """Prompt and output tokens that a request may come to; most of the time it can be served."""
    config = swarm.config
    if draw.chance(5):
        return config.max_model_len + 2
    slots = config.num_usable_blocks * config.block_size
    reserve = config.num_speculative_tokens + config.num_lookahead_tokens - 1
    if draw.chance(10):
        reserve = draw.integer(-2, reserve)  # about to fit, or just not
    return max(min(slots - reserve, config.max_model_len), 2)


def draw_prompt(
    swarm: Swarm, draw: Draw, limit: int, texts: Sequence[v.TokenIds] = ()
) -> tuple[int, ...]:
    """Part of a hot sequence and a tail of its own, lengths around block boundaries.

    Or the text of an earlier request with its outputs, whose blocks may still be cached.
    """
    if texts and draw.chance(15):
        said = draw.choice(texts)[: limit - 1]
        return said + draw.tokens(1, swarm.vocabulary_size)
    config = swarm.config
    length = draw.integer(1, limit)
    if draw.chance(60):
        blocks = draw.integer(1, max(limit // config.block_size, 1))
        length = min(max(blocks * config.block_size + draw.integer(-1, 1), 1), limit)
    hot = draw.choice(swarm.hot_prefixes)
    shared = length if draw.chance(50) else draw.integer(0, length)
    prompt = hot[:shared]
    return prompt + draw.tokens(length - len(prompt), swarm.vocabulary_size)


def draw_items(draw: Draw, num_prompt: int) -> tuple[v.MultiModalItem, ...]:
    """One or two images somewhere in the prompt."""
    items: list[v.MultiModalItem] = []
    start = 0
    for _ in range(2 if draw.chance(40) else 1):
        if start < num_prompt:
            offset = draw.integer(start, num_prompt - 1)
            length = draw.integer(1, num_prompt - offset)
            items.append(v.MultiModalItem(draw.choice(("cat", "dog")), offset, length))
            start = offset + length
    return tuple(items)


def draw_embeds(draw: Draw, num_prompt: int) -> v.TokenIds:
    """Embeddings of a prompt: all alike, or one of them another, so that prefixes are shared."""
    embeds = [0] * num_prompt
    if draw.chance(60):
        embeds[draw.integer(0, num_prompt - 1)] = draw.integer(1, 2)
    return tuple(embeds)


def schedule(_view: View, _draw: Draw) -> Action:
    """Plan a step; with a frame in flight this is one step too many, and refused."""
    return v.Schedule()


def answer(_view: View, _draw: Draw) -> Action:
    """The worker answers."""
    return Answer()


def misanswer(view: View, draw: Draw) -> Action:
    """The worker answers wrongly; with drafts about, often in what it accepts."""
    if view.swarm.config.num_speculative_tokens and draw.chance(30):
        return Misanswer(Mistake.WRONG_DRAFT)
    return Misanswer(draw.choice(tuple(Mistake)))


def propose(view: View, draw: Draw) -> Action:
    """Drafts, some right and some wrong, now and then none or one too many."""
    limit = view.swarm.config.num_speculative_tokens
    if view.swarm.has(HOSTILE) and draw.chance(5):
        limit += 1
    counts = []
    for _ in range(draw.integer(1, 3)):
        count = draw.integer(0 if draw.chance(10) else min(1, limit), limit)
        counts.append((count, count if draw.chance(40) else draw.integer(0, count)))
    return Propose(tuple(counts))


def abort(view: View, draw: Draw) -> Action:
    """One or more requests give up; some ids may be unknown or ended."""
    client = view.client
    known = [*client.live, *client.ended[-2:], "nobody"]
    if view.seeks_aborts and client.last_plan and _has_preempted(view) and draw.chance(70):
        # Then the preempted return at once, to what they left.
        return v.Abort(tuple(row.request_id for row in client.last_plan.rows))
    if view.seeks_aborts and draw.chance(60):
        flying = {row.request_id for plan in client.plans for row in plan.rows}
        known = [name for name in client.live if name in flying] or known
    count = 1 if draw.chance(80) else draw.integer(1, 3)
    return v.Abort(tuple(draw.choice(known) for _ in range(count)))


def grammar_ready(view: View, draw: Draw) -> Action:
    """A grammar is compiled, of one that waits for it if there is one."""
    live = view.client.live
    waiting = [name for name, request in live.items() if request.structured_output]
    return v.GrammarReady(draw.choice(waiting or [*live, "nobody"]))


def pause(_view: View, draw: Draw) -> Action:
    """Pause or resume; resume more often, so that runs get somewhere."""
    states = tuple(v.PauseState)
    return v.SetPause(v.PauseState.UNPAUSED if draw.chance(70) else draw.choice(states))


def reset(_view: View, draw: Draw) -> Action:
    """Empty the cache, politely or by force."""
    return v.Reset(draw.chance(50))


def hostile(view: View, draw: Draw) -> Action:
    """What a broken client or a late worker might send."""
    client = view.client
    names = [*client.live, *client.ended[-2:], "nobody"]
    frames = [*(plan.frame_id for plan in client.plans), 0, 10**6]
    token = draw.integer(0, view.swarm.vocabulary_size - 1)
    row = v.RowTokens(draw.choice(names), (token,) * draw.integer(0, 3))
    return draw.choice(
        (
            Hostile(v.Commit(-1, ())),
            Hostile(v.Commit(draw.choice(frames), ())),
            Hostile(v.Commit(draw.choice(frames), (row,))),
            Hostile(v.Commit(draw.choice(frames), (row, row))),
            Hostile(v.Drafts((row,))),
            Hostile(v.Drafts((row, row))),
            Hostile(v.Drafts(tuple(v.RowTokens(name, (token,)) for name in client.live))),
            Hostile(v.Drafts((v.RowTokens(row.request_id, (token,) * 9),))),
            Hostile(v.GrammarReady("nobody")),
            Hostile(v.Submit(v.Request("bad", ()))),
            Hostile(v.Submit(v.Request("bad", (1,), max_tokens=0))),
            Hostile(v.Submit(v.Request("bad", (1,), max_tokens=10**6))),
            Hostile(
                v.Submit(v.Request("bad", (token,) * 4, items=(v.MultiModalItem("cat", 3, 9),)))
            ),
        )
    )


@dataclass(frozen=True, slots=True)
class WeightedAction:
    """How an action is drawn, how often it is tried, and the feature that it is part of."""

    draw: Drawing
    weight: int
    feature: Feature | None = None


ACTIONS: Mapping[str, WeightedAction] = {
    "submit": WeightedAction(submit, 22),
    "schedule": WeightedAction(schedule, 36),
    "answer": WeightedAction(answer, 36),
    "propose": WeightedAction(propose, 24, DRAFTS),
    "abort": WeightedAction(abort, 3, ABORTS),
    "grammar_ready": WeightedAction(grammar_ready, 8, GRAMMAR),
    "pause": WeightedAction(pause, 3, PAUSE),
    "reset": WeightedAction(reset, 2, RESET),
    "hostile": WeightedAction(hostile, 4, HOSTILE),
    "misanswer": WeightedAction(misanswer, 5, HOSTILE),
}


def is_enabled(name: str, view: View) -> bool:
    """Whether an action makes sense now. Pointless ones are left to `hostile`."""
    swarm, feature = view.swarm, ACTIONS[name].feature
    if feature is not None and not swarm.has(feature):
        return False
    if name == "submit":
        room_for_twins = 3 if view.client.lost and _has_preempted(view) else 0
        return len(view.client.live) < swarm.preset.num_requests_max + room_for_twins
    if name == "answer":
        return bool(view.client.plans)
    if name == "schedule":
        return not _is_pipeline_full(view) or swarm.has(HOSTILE)
    if name == "grammar_ready":
        return bool(view.client.live)
    return True


def next_action(view: View, draw: Draw) -> Action:
    """Draw an action by weight, and its details."""
    names = [name for name in ACTIONS if is_enabled(name, view)]
    weights = [_weight(name, view) for name in names]
    ticket = draw.integer(1, sum(weights))
    chosen = next(index for index, total in enumerate(accumulate(weights)) if ticket <= total)
    return ACTIONS[names[chosen]].draw(view, draw)


def _is_pipeline_full(view: View) -> bool:
    return len(view.client.plans) >= view.swarm.config.max_frames_in_flight


def _has_preempted(view: View) -> bool:
    """Whether the last plan preempted anybody."""
    plan = view.client.last_plan
    return plan is not None and bool(plan.preempted_req_ids)


def _weight(name: str, view: View) -> int:
    """Without late commits an answer follows a full pipeline closely, as in real runs."""
    weight, habits = ACTIONS[name].weight, view.swarm.habits
    if name == "schedule" and not view.client.live:
        return 4
    if name == "schedule" and _is_pipeline_full(view):
        return 2
    if name == "answer" and _is_pipeline_full(view):
        return weight if Habit.LATE_COMMIT in habits else weight * 6
    if name == "answer" and Habit.FULL_PIPELINE in habits:
        return 4
    if name == "propose" and view.swarm.config.async_scheduling:
        return 4  # it is no event there, it sets how many drafts will be right
    if name == "submit" and view.client.lost and _has_preempted(view):
        return weight * 2
    if name == "abort" and view.seeks_aborts and _has_preempted(view):
        return weight * 50 if view.swarm.token_seed % 2 else weight
    if name == "abort" and view.seeks_aborts:
        return weight * 6 if view.client.plans else weight
    return weight
