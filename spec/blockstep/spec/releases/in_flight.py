"""Flight: quirks of releases with requests that have rows in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core import async_, block_pool, plans
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import Frame, RequestState, list_rows_in_flight
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features import resets
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import Config, FrameId, RequestId


def preempted_wait_for_all_their_frames(rules: Rules, _config: Config) -> Rules:
    """A preempted request waits for all frames with rows of its own, even if they do not sample."""

    def is_held_by_frames(frames: Sequence[Frame], request: RequestState) -> bool:
        rows = list_rows_in_flight(frames, request.request_id)
        return bool(rows) or rules[async_.is_held_by_frames](frames, request)

    return rules.replacing(async_.is_held_by_frames, is_held_by_frames)


def resumed_with_token_in_flight(rules: Rules, _config: Config) -> Rules:
    """A preempted request is resumed while its token is in flight, in a pipeline without
    placeholders."""

    def is_held_by_frames(frames: Sequence[Frame], request: RequestState) -> bool:
        is_held = rules[async_.is_held_by_frames](frames, request)
        return is_held and request.num_output_placeholders > 0

    return rules.replacing(async_.is_held_by_frames, is_held_by_frames)


def blocks_freed_while_frames_write(rules: Rules, _config: Config) -> Rules:
    """Blocks are free while a frame in flight writes them, and a store loads KV into them."""
    return rules.replacing(block_pool.get_fence, block_pool.get_fence)  # that of the core


def reset_drops_tokens(rules: Rules, _config: Config) -> Rules:
    """A forced reset discards the tokens of frames in flight; they are sampled again."""

    def process_forced_preemption(state: State) -> State:
        after = rules[resets.process_forced_preemption](state)
        frames, requests = after.frames, after.requests
        for name in state.running:
            frames = tuple([_without_answer(frame, name) for frame in frames])
            request = replace(requests[name], num_output_placeholders=0)
            requests = requests.having(name, request)
        return replace(after, frames=frames, requests=requests)

    return rules.replacing(resets.process_forced_preemption, process_forced_preemption)


def _without_answer(frame: Frame, request_id: RequestId) -> Frame:
    """Return the frame in which the rows of a request deliver nothing."""
    rows = [
        replace(row, is_dropped=row.is_dropped or row.request_id == request_id)
        for row in frame.rows
    ]
    return replace(frame, rows=tuple(rows))


def next_plan_names_victims_of_a_reset(rules: Rules, _config: Config) -> Rules:
    """The plan after a forced reset names the requests that the reset preempted."""

    def process_forced_preemption(state: State) -> State:
        after = rules[resets.process_forced_preemption](state)
        names = (*list_reset_victims(state), *state.running)
        return _VICTIMS.put(after, (state.next_frame_id, names) if names else _NO_VICTIMS)

    def list_preempted(step: Step) -> tuple[RequestId, ...]:
        preempted = rules[plans.list_preempted](step)
        return tuple(sorted({*preempted, *list_reset_victims(step.state)}))

    return rules.replacing(resets.process_forced_preemption, process_forced_preemption).replacing(
        plans.list_preempted, list_preempted
    )


def list_reset_victims(state: State) -> tuple[RequestId, ...]:
    """Return the requests that resets preempted since the last plan."""
    frame_id, names = _VICTIMS.of(state)
    return names if frame_id == state.next_frame_id else ()


_NO_VICTIMS: Final[tuple[FrameId, tuple[RequestId, ...]]] = (-1, ())
_VICTIMS: Final = Part("reset_victims", _NO_VICTIMS)
"""The id of the next frame at the last reset, and the requests to name in it; in a state."""


STORIES = (
    QuirkStory(
        Quirk.PREEMPTED_WAIT_FOR_ALL_THEIR_FRAMES,
        preempted_wait_for_all_their_frames,
        "a preempted request waits for all frames with rows of its own, even if they do not sample",
        ("P15", "P16"),
        "#48245 (merged)",
        "0.27.0",
        "asynchronous; a request is preempted while a chunk of its prompt is in flight: it is "
        "skipped until that frame is committed",
    ),
    QuirkStory(
        Quirk.RESUMED_WITH_TOKEN_IN_FLIGHT,
        resumed_with_token_in_flight,
        "in a pipeline without placeholders a preempted request is resumed while its token is in "
        "flight",
        ("P12", "P13", "P15", "P16", "P21", "P26"),
        "#48245 (merged, for 0.27.0)",
        "0.11.0 0.19.1",
        "two frames, not asynchronous; one request, its first plan in flight, a forced reset: the "
        "next plan runs it again, and both commits deliver a token of the same position",
    ),
    QuirkStory(
        Quirk.BLOCKS_FREED_WHILE_FRAMES_WRITE,
        blocks_freed_while_frames_write,
        "with a store, blocks are free while a frame in flight writes them, and KV is loaded into "
        "them",
        ("P15", "P16", "P17"),
        "#45357 (merged), #47728, #48481",
        "0.19.1",
        "two frames, a store; a request is aborted while its first plan is in flight: the next "
        "plan has the store load KV of another request into its blocks",
    ),
    QuirkStory(
        Quirk.RESET_DROPS_TOKENS,
        reset_drops_tokens,
        "a forced reset discards the tokens of frames in flight; they are sampled again",
        ("P12", "P13", "P14", "P26"),
        "#42043, #42117, #48245 (merged)",
        "0.27.0 0.33.0",
        "one request, its first plan in flight, a forced reset: the commit delivers nothing",
    ),
    QuirkStory(
        Quirk.NEXT_PLAN_NAMES_VICTIMS_OF_A_RESET,
        next_plan_names_victims_of_a_reset,
        "the plan after a forced reset names the requests that the reset preempted",
        ("P21", "P26"),
        "#46974 (merged)",
        "0.27.0 0.33.0",
        "one request runs, a forced reset: the next plan resumes it, and names it as preempted",
    ),
)
