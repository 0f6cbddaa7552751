"""Jobs: agents whose requests come in turns, and the estimates of the time until the next turn.

A next turn comes early, late, twice or never; estimates are short, so that a pin ends between any
two events; the clock advances, repeats a time, and sometimes goes back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw, Text
from blockstep.conformance.draw.feature import Draws, Late, Situation
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.draw.requests import draw_continuation
from blockstep.conformance.draw.view import View, WeightedAction
from blockstep.conformance.features.pins import FEATURE
from blockstep.conformance.protocol.features import PRIORITY
from blockstep.conformance.protocol.program import Action
from blockstep.spec import vocabulary as v

JOBS = ("x", "y", "z")


def add_to_config(late: Late) -> None:
    """Take the policy that pins blocks; the config has prefix caching."""
    late.config = replace(late.config, policy=v.Policy.CONTINUUM)


def goes_with(late: Late) -> bool:
    """Return whether no other policy was wished for, and blocks are cached."""
    is_free = not late.has_policy and PRIORITY.name not in late.wish.always
    return is_free and late.config.enable_prefix_caching


def add_to_request(_swarm: Swarm, draw: Draw, request: v.Request, _goes_on: bool) -> v.Request:
    """Return the request as a turn of a job, or of none."""
    return draw_job(request, draw)


def go_on(view: View, draw: Draw, name: v.RequestId) -> v.Request | None:
    """Draw the next turn of a job, in every other case where there is one."""
    turns = view.client.turns
    return draw_turn(view, draw, name, turns) if turns and draw.chance(50) else None


def draw_turn(view: View, draw: Draw, name: v.RequestId, turns: Sequence[Text]) -> v.Request:
    """Draw the next turn of a job: the tokens of one of its turns, most often the last, and a new
    token."""
    turn = draw_continuation(view.swarm, draw, name, view.num_submitted, turns)
    before = next((it for it, text in reversed(turns) if _goes_on(turn, text)), turns[-1][0])
    return draw_job(turn, draw, before.job_id)


def _goes_on(turn: v.Request, text: v.TokenIds) -> bool:
    """Return whether the prompt, without its last token, is a prefix of `text`."""
    return turn.prompt_token_ids[:-1] == text[: len(turn.prompt_token_ids) - 1]


def draw_job(request: v.Request, draw: Draw, job_id: str | None = None) -> v.Request:
    """Return the request as a turn of `job_id`, of any job, or of none; sometimes as the last
    turn."""
    job_id = job_id or draw.choice((None, *JOBS, *JOBS))
    return replace(request, job_id=job_id, is_last_step=draw.chance(12))


def draw_estimate(jobs: Collection[str], draw: Draw) -> v.PinEstimate:
    """Draw for how long a job's blocks are pinned: not at all, for some ticks, or for ever."""
    job_id = draw.choice((*jobs, *jobs, *JOBS))
    return v.PinEstimate(job_id, draw.choice((0, 1, 2, 3, 6, 20, 20, v.MAX_INT)))


def draw_clock(now: int, draw: Draw) -> v.Clock:
    """Draw a clock event: a later time, the same one, or sometimes an earlier one."""
    return v.Clock(max(now + draw.choice((-3, 0, 1, 1, 1, 2, 3, 8)), 0))


def clock(view: View, draw: Draw) -> Action:
    """Draw a clock event, at a later, equal or earlier time."""
    return draw_clock(view.client.now, draw)


def pin_estimate(view: View, draw: Draw) -> Action:
    """Draw a pin estimate for a job, most often for one with a live or finished turn."""
    client = view.client
    jobs = [it.job_id for it in client.live.values() if it.job_id is not None]
    jobs += [it.job_id for it, _ in client.turns if it.job_id is not None]
    return draw_estimate(jobs, draw)


def list_mistakes(situation: Situation) -> list[v.Event]:
    """Return malformed events, and estimates for unknown jobs."""
    return [
        v.Clock(-1),
        v.PinEstimate("", 1),
        v.PinEstimate("x", -1),
        v.PinEstimate("nobody", 5),
        v.Submit(v.Request(situation.names[-1], (0,), job_id="")),
    ]


DRAWS = Draws(
    add_to_config=add_to_config,
    goes_with=goes_with,
    waits=True,
    add_to_request=add_to_request,
    go_on=go_on,
    actions={
        "clock": WeightedAction(clock, 8, FEATURE),
        "pin_estimate": WeightedAction(pin_estimate, 12, FEATURE),
    },
    list_mistakes=list_mistakes,
)
