"""Prefill cadence: while requests decode, prompts are computed in every n-th step only.

    prefill_schedule_interval 3; steps without rows are not counted

    decodes   d d d d d d d .         the decodes finish
    prompts   p . . p . . p p p p     nothing decodes, so nothing is held

A step that computes a prompt takes longer, and so does each token that it decodes. A prompt is held
in a step if fewer than n - 1 steps have run since the last one that computed a prompt, and some
running request can decode. Held are running chunks, and waiting requests with more than one token
to compute: the first of them ends the waiting phase. A request that lacks one token only, because
of its hit, is admitted, and does not count as a prompt; a load over several steps begins.

Source: upstream #54627 for the interval, which begins with the last step that had a prompt (that of
#44558 is a grid, for several engines that wait for each other); vLLM 0.33.0 `schedule` for what is
held.

Ours: a prompt is held only if a request can decode in this very step; where every token to decode
after is in flight, the step would be empty. And the interval holds also while requests queue up, as
in SGLang and upstream #56848; upstream #44558 holds nothing then.

No prompt waits for ever (P10): each step that holds one has a row that decodes, or preempts, or
waits for a frame; each row that decodes brings its request nearer to its end, and counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.parts import Note, Part
from blockstep.spec.core.requests import FrameRow, RequestState
from blockstep.spec.core.schedule import get_num_running_tokens
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Scheduled, Step
from blockstep.spec.vocabulary import Config, Status

PREFILL_WAIT: Final = Part("prefill_wait", 0)
"""Steps with rows before the next one that may compute a prompt, in a state or a step."""
HOLDS_PREFILLS: Final = Note("holds_prefills", False)
"""Whether prompts are held in a step."""


def has_interval(config: Config) -> bool:
    """Whether prompts are held in some steps. Source: upstream #54627; P10."""
    return config.has_prefill_interval


def process_hold(step: Step) -> None:
    """Decide whether prompts are held in this step: it is none of their steps, and some request can
    decode. Source: upstream #54627; vLLM 0.33.0 `schedule`; P10, P15."""
    is_early = PREFILL_WAIT.of(step) > 0
    running = [step.requests[name] for name in step.running]
    HOLDS_PREFILLS.set(step, is_early and any(can_decode(step, request) for request in running))


def can_decode(step: Step, request: RequestState) -> bool:
    """Whether a running request has its prompt computed, and a next token that can be computed.

    Ours is the question for the token. Source: vLLM 0.33.0 `schedule`; P10.
    """
    return not request.is_prefill_chunk and get_num_running_tokens(step, request) > 0


def limit_to_decodes(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
    """Return the tokens of a row: none for a prompt that is held.

    A waiting request without tokens ends the waiting phase. Source: vLLM 0.33.0 `schedule`; P15,
    P16.
    """
    if not HOLDS_PREFILLS.of(step):
        return num_new
    return 0 if is_prompt(request, num_computed) else num_new


def is_prompt(request: RequestState, num_computed: int) -> bool:
    """Whether a row computes a prompt: of a running request its next chunk, of a waiting one more
    than the last of its known tokens. Source: vLLM 0.33.0 `schedule`."""
    if request.status is Status.RUNNING:
        return request.is_prefill_chunk
    return num_computed < request.num_known_tokens - 1


def process_interval(step: Step, frame_rows: Sequence[FrameRow]) -> None:
    """Count a step with rows; one that computes a prompt begins the interval again.

    Source: upstream #54627; P10.
    """
    del frame_rows
    if not step.rows:
        return
    num_left = max(PREFILL_WAIT.of(step) - 1, 0)
    if any(computes_prompt(step, row) for row in step.rows):
        num_left = step.state.config.prefill_schedule_interval - 1
    PREFILL_WAIT.set(step, num_left)


def computes_prompt(step: Step, row: Scheduled) -> bool:
    """Whether a row of a step computes a prompt. Source: vLLM 0.33.0 `schedule`."""
    return is_prompt(step.state.requests[row.request_id], row.num_computed)


def is_wait_within_interval(state: State) -> bool:
    """Prompts wait for fewer steps than the interval has. Source: P10."""
    return 0 <= PREFILL_WAIT.of(state) < state.config.prefill_schedule_interval


FEATURE: Final = Feature(
    "prefill_cadence",
    has_interval,
    Hooks(
        begins=(process_hold,),
        limits=(limit_to_decodes,),
        sent=(process_interval,),
    ),
    invariants=(is_wait_within_interval,),
)
