"""Actions: what a client may do next, and how the details of an action are drawn.

One table serves the seeded generator and the Hypothesis machine; they differ only in the source of
their decisions, a `Draw`. A drawing function sees a `View`: what any client could know. Late
features bring actions of their own (`draw.feature`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import TypeVar

from blockstep.conformance.draw.client_view import Draw, list_ending, list_frames
from blockstep.conformance.draw.feature import get_draws, list_draws
from blockstep.conformance.draw.presets import Habit
from blockstep.conformance.draw.requests import (
    draw_continuation,
    draw_request,
    request_name,
    shuffled,
)
from blockstep.conformance.draw.view import View, WeightedAction
from blockstep.conformance.draw.wrong_inputs import draw_bad_event
from blockstep.conformance.features.masks import FEATURE as MASKS
from blockstep.conformance.features.sessions import FEATURE as SESSIONS
from blockstep.conformance.features.transfers import FEATURE as TRANSFERS
from blockstep.conformance.protocol.features import (
    ABORTS,
    DRAFTS,
    GRAMMAR,
    HOSTILE,
    PAUSE,
    RESET,
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
PLAIN_MISTAKES = tuple(mistake for mistake in Mistake if mistake is not Mistake.FORBIDDEN_TOKEN)
"""Mistakes that need no grammar."""


class SeededDraw:
    """Decisions from a seeded generator: the `Draw` of long runs."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)  # noqa: S311 - tests, not secrets

    def integer(self, low: int, high: int) -> int:
        """Return an int between `low` and `high`, both included."""
        return low + int(self._random.random() * (high - low + 1)) if high > low else low

    def choice(self, options: Sequence[T]) -> T:
        """Return one of `options`."""
        return options[int(self._random.random() * len(options))]

    def chance(self, percent: int) -> bool:
        """Return True with a probability of `percent` in a hundred."""
        return self._random.random() * 100 < percent

    def tokens(self, count: int, vocabulary_size: int) -> tuple[int, ...]:
        """Return `count` token ids below `vocabulary_size`."""
        return tuple(int(self._random.random() * vocabulary_size) for _ in range(count))


def submit(view: View, draw: Draw) -> Action:
    """Draw a new request, most often with a prompt that shares a prefix with others."""
    client, swarm, index = view.client, view.swarm, view.num_submitted
    if swarm.has(HOSTILE) and client.live and draw.chance(4):
        return v.Submit(draw.choice(list(client.live.values())))
    name = request_name(shuffled(index))
    if client.ended and draw.chance(8):
        name = draw.choice(client.ended)
    elif client.ended and client.plans and draw.chance(8):
        name = client.ended[-1]  # a frame may still name it
    if swarm.is_crowded and draw.chance(85):  # continuing a victim takes a long prompt
        return v.Submit(draw_request(swarm, draw, name, index))
    if client.rejected_texts and draw.chance(40):
        return v.Submit(draw_continuation(swarm, draw, name, index, client.rejected_texts))
    if client.preempted_texts and draw.chance(80 if _has_preempted(view) else 25):
        return v.Submit(draw_continuation(swarm, draw, name, index, client.preempted_texts))
    for draws in list_draws(swarm.features):
        request = None if draws.go_on is None else draws.go_on(view, draw, name)
        if request is not None:
            return v.Submit(request)
    if client.live and draw.chance(_chance_of_twins(view)):
        is_side_by_side = swarm.config.has_windows and _is_newest_unplanned(view)
        end = -1 if is_side_by_side and draw.chance(80) else None
        others = [(it, it.prompt_token_ids[:end]) for it in client.live.values()]
        return v.Submit(draw_continuation(swarm, draw, name, index, others))
    return v.Submit(draw_request(swarm, draw, name, index, client.texts))


def _chance_of_twins(view: View) -> int:
    """Return how often, in percent, a request has the keys of another one, so that they share
    blocks.

    A state can be shared after few of the tokens. Two requests leave a block of a window
    in one step only if they are admitted together, with prompts of one length.
    """
    if view.swarm.config.has_states:
        return 70
    return 60 if view.swarm.config.has_windows and _is_newest_unplanned(view) else 12


def schedule(_view: View, _draw: Draw) -> Action:
    """Plan a step; with a full pipeline this is one step too many, and is rejected."""
    return v.Schedule()


def answer(view: View, draw: Draw) -> Action:
    """Return the model output of the oldest frame, with what a feature's worker reports."""
    for draws in list_draws(view.swarm.features):
        if draws.answer is not None:
            return Answer(draws.answer(view, draw))
    return Answer()


def misanswer(view: View, draw: Draw) -> Action:
    """Draw a wrong model output; with drafts, often one that accepts a wrong draft."""
    if view.swarm.config.num_speculative_tokens and draw.chance(30):
        return Misanswer(Mistake.WRONG_DRAFT)
    return Misanswer(draw.choice(tuple(Mistake) if view.swarm.has(MASKS) else PLAIN_MISTAKES))


def propose(view: View, draw: Draw) -> Action:
    """Draw draft tokens, some right and some wrong; sometimes none or one too many."""
    limit = view.swarm.config.num_speculative_tokens
    if view.swarm.has(HOSTILE) and draw.chance(5):
        limit += 1
    counts = []
    for _ in range(draw.integer(1, 3)):
        count = draw.integer(0 if draw.chance(10) else min(1, limit), limit)
        counts.append((count, count if draw.chance(40) else draw.integer(0, count)))
    return Propose(tuple(counts), for_chunks=len(counts) == 2)


def abort(view: View, draw: Draw) -> Action:
    """Abort one or more requests; some ids may be unknown or finished."""
    client = view.client
    known = [*client.live, *client.ended[-2:], "nobody"]
    if view.seeks_aborts and _is_ambush(view) and draw.chance(90):
        # Spare the preempted requests: they, or requests with equal prefixes, are then admitted at
        # once to the blocks that they left.
        gone = client.last_plan.preempted_req_ids if client.last_plan and draw.chance(40) else ()
        return v.Abort(tuple(name for name in client.live if name not in gone))
    if view.seeks_aborts and draw.chance(60):
        flying = {row.request_id for plan in client.plans for row in plan.rows}
        known = [name for name in client.live if name in flying] or known
    if client.live and view.swarm.has(RESET) and draw.chance(10):
        return v.Abort(tuple(client.live))  # a reset without preemption then succeeds
    loaded = [name for name in client.transfers.loading if name in client.live]
    sharing = client.list_sharing()
    if sharing and draw.chance(80):
        known = sharing
    elif loaded and draw.chance(60):
        known = loaded
    count = 1 if draw.chance(80) else draw.integer(1, 3)
    return v.Abort(tuple(draw.choice(known) for _ in range(count)))


def grammar_ready(view: View, draw: Draw) -> Action:
    """Report a grammar as compiled, preferably of a waiting request; sometimes of a finished id."""
    live, ended = view.client.live, view.client.ended
    if view.swarm.has(HOSTILE) and ended and draw.chance(6):
        return v.GrammarReady(draw.choice(ended[-2:]))
    waiting = [name for name, request in live.items() if request.structured_output]
    if view.swarm.has(MASKS) and draw.chance(85):
        waiting = [name for name in waiting if name not in view.ready] or waiting
    return v.GrammarReady(draw.choice(waiting or [*live, "nobody"]))


def pause(_view: View, draw: Draw) -> Action:
    """Pause or resume; resume more often, so that runs make progress."""
    states = tuple(v.PauseState)
    return v.SetPause(v.PauseState.UNPAUSED if draw.chance(70) else draw.choice(states))


def reset(view: View, draw: Draw) -> Action:
    """Reset the prefix cache, with or without preemption of running requests; sometimes the store
    as well."""
    is_forced = draw.chance(90 if _weigh_rare_resets(1, view) else 50)
    return v.Reset(is_forced, view.swarm.has(TRANSFERS) and draw.chance(60))


def hostile(view: View, draw: Draw) -> Action:
    """Draw an event of a broken client or a late worker."""
    client = view.client
    names = [*client.live, *client.ended[-2:], "nobody"]
    return Hostile(draw_bad_event(view.swarm, client.live, names, list_frames(client), draw))


def _may_submit(view: View) -> bool:
    swarm = view.swarm
    most = swarm.preset.num_requests_max * (2 if swarm.is_crowded else 1)
    room_for_twins = 3 if view.client.preempted_texts and _has_preempted(view) else 0
    return len(view.client.live) < most + room_for_twins


def _may_plan(view: View) -> bool:
    return not _is_pipeline_full(view) or view.swarm.has(HOSTILE)


def _has_plans(view: View) -> bool:
    return bool(view.client.plans)


def _has_requests(view: View) -> bool:
    return bool(view.client.live)


def _is_pipeline_full(view: View) -> bool:
    return len(view.client.plans) >= view.swarm.config.max_frames_in_flight


def _has_preempted(view: View) -> bool:
    """Return whether the last plan preempted any request."""
    plan = view.client.last_plan
    return plan is not None and bool(plan.preempted_req_ids)


def _weigh_rare_resets(weight: int, view: View) -> int:
    """Return the weight of a reset that would meet frames in flight as it rarely does; else 0.

    They have loads, are not asynchronous, and the store has nothing else under way; or there may be
    sessions, and there is none. Several releases take a forced reset in flight only then.
    """
    now, may_have_sessions = view.client, view.swarm.has(SESSIONS)
    is_moving = now.transfers.loading or now.transfers.sending
    if not now.plans or is_moving or (may_have_sessions and now.sessions):
        return 0
    has_loads = any(not load.is_async for plan in now.plans for load in plan.kv_loads)
    if has_loads and not view.swarm.config.async_scheduling:
        return weight * 40
    if not may_have_sessions:
        return 0
    is_last = any(list_ending(plan, now.live, now.delivered) for plan in now.plans)
    return weight * (16 if is_last else 4)


def _is_newest_unplanned(view: View) -> bool:
    """Whether the newest unfinished request has no row in the last plan."""
    plan, newest = view.client.last_plan, next(reversed(view.client.live), None)
    rows = () if plan is None else plan.rows
    return newest is not None and all(row.request_id != newest for row in rows)


def _is_ambush(view: View) -> bool:
    """Return whether the last plan preempted a request and has a row of a request that is still
    live.

    If all other requests are aborted now, the next admission gets the blocks that the victims left.
    """
    plan, live = view.client.last_plan, view.client.live
    return (
        plan is not None
        and bool(plan.preempted_req_ids)
        and view.swarm.token_seed % 3 > 0
        and not view.swarm.has_equals
        and any(row.request_id in live for row in plan.rows)
    )


def _weigh_aborts(weight: int, view: View) -> int:
    """Return the weight of aborts: higher while a request loads blocks or shares a block."""
    client = view.client
    if view.seeks_aborts and _is_ambush(view):
        return weight * 50
    if view.seeks_aborts:
        return weight * 6 if client.plans else weight
    if client.list_sharing():
        return weight * 10
    return weight * 5 if any(name in client.live for name in client.transfers.loading) else weight


def _weigh_submissions(weight: int, view: View) -> int:
    swarm = view.swarm
    if swarm.is_crowded:
        return weight * 3
    if swarm.config.has_windows and _is_newest_unplanned(view):
        # two requests with equal states, or with equal windows, in one step
        return weight * (5 if swarm.config.has_states else 3)
    return weight * (2 if view.client.preempted_texts and _has_preempted(view) else 1)


def _weigh_plans(weight: int, view: View) -> int:
    if not view.client.live:
        return 4
    return 2 if _is_pipeline_full(view) else weight


def _weigh_answers(weight: int, view: View) -> int:
    """Return the weight of commits: without late ones, one closely follows a full pipeline."""
    habits = view.swarm.habits
    if _is_pipeline_full(view):
        return weight if Habit.LATE_COMMIT in habits else weight * 6
    return 4 if Habit.FULL_PIPELINE in habits else weight


def _weigh_proposals(weight: int, view: View) -> int:
    # Asynchronous scheduling has no event for it: it sets how many drafts will be accepted.
    return 4 if view.swarm.config.async_scheduling else weight


def _weigh_resets(weight: int, view: View) -> int:
    usual = weight * (1 + 5 * (not view.client.live) + view.swarm.has(TRANSFERS))
    return _weigh_rare_resets(weight, view) or usual


def _weigh_grammars(weight: int, view: View) -> int:
    return weight * 3 if view.swarm.has(MASKS) else weight


ACTIONS: Mapping[str, WeightedAction] = {
    "submit": WeightedAction(submit, 22, None, _weigh_submissions, _may_submit),
    "schedule": WeightedAction(schedule, 36, None, _weigh_plans, _may_plan),
    "answer": WeightedAction(answer, 36, None, _weigh_answers, _has_plans),
    "propose": WeightedAction(propose, 24, DRAFTS, _weigh_proposals),
    "abort": WeightedAction(abort, 3, ABORTS, _weigh_aborts),
    "grammar_ready": WeightedAction(grammar_ready, 8, GRAMMAR, _weigh_grammars, _has_requests),
    "pause": WeightedAction(pause, 3, PAUSE),
    "reset": WeightedAction(reset, 2, RESET, _weigh_resets),
    "hostile": WeightedAction(hostile, 4, HOSTILE),
    "misanswer": WeightedAction(misanswer, 5, HOSTILE),
}
"""Actions that are no late feature's, by name."""


@cache
def list_actions() -> Mapping[str, WeightedAction]:
    """Return all actions by name, those of late features last."""
    return {
        **ACTIONS,
        **{k: it for draws in get_draws().values() for k, it in draws.actions.items()},
    }


def _find_actions(view: View) -> Mapping[str, WeightedAction]:
    """Return the actions that the features of the swarm allow, by name."""
    if not view.actions:
        view.actions = {
            name: action
            for name, action in list_actions().items()
            if action.feature is None or view.swarm.has(action.feature)
        }
    return view.actions


def is_enabled(name: str, view: View) -> bool:
    """Return whether an action makes sense now. Pointless ones are left to `hostile`."""
    action = _find_actions(view).get(name)
    return action is not None and (action.has_point is None or action.has_point(view))


def next_action(view: View, draw: Draw) -> Action:
    """Draw an action by weight, and its details."""
    found, totals, total = [], [], 0
    for action in _find_actions(view).values():
        if action.has_point is None or action.has_point(view):
            weigh, weight = action.weigh, action.weight
            total += weight if weigh is None else weigh(weight, view)
            found.append(action)
            totals.append(total)
    return found[bisect_left(totals, draw.integer(1, total))].draw(view, draw)
