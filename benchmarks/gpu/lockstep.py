"""The device's scheduler, compiled, in lock-step with the same source run by numpy.

    python -m benchmarks.gpu.lockstep KIND [--seconds S] [--seed N] [--json FILE]
    python -m benchmarks.gpu.lockstep specification [...]

Random events go to both engines. Every answer must be equal, and the snapshots after every fourth
event and at the end of an episode. A kind fixes the feature that is looked at; sizes and the other
features are drawn for each episode. `specification` holds the host engine to the specification
instead, in programs as `blockstep check --preset small` draws them. Exit status: 0 equal, 1 a
difference or an exception, or too little was reached for that to say anything.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

from blockstep.impl.device.dims import Dims, count_gpu_lanes
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import launch_kernel
from blockstep.impl.device.layout import State
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    Drafts,
    DraftsTaken,
    Event,
    Observation,
    Plan,
    Policy,
    Request,
    Reset,
    RowTokens,
    Schedule,
    SpecMethod,
    Submit,
    config_problems,
)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "priority": {"policy": Policy.PRIORITY},
    "asynchronous": {"async_scheduling": True},
    "drafts": {"spec_method": SpecMethod.NGRAM},
    "uncached": {"enable_prefix_caching": False},
}
"""Config fields of each kind of run."""
SPECIFICATION = "specification"
NUM_ACTIONS = 60
"""Actions of an episode."""
NUM_EVENTS_MIN = 200
"""Least number of events of a run that counts."""


class Compiled:
    """Launches kernels compiled for the GPU; the state is copied there and back each time."""

    def __init__(self) -> None:
        self._torch: Any = import_module("torch")

    def __call__(self, kernel: str, state: State, dims: Dims) -> None:
        """Run one kernel on a state of numpy arrays."""
        arrays = [self._torch.from_numpy(array) for array in state]
        there = State(*(array.cuda() for array in arrays))
        launch_kernel(kernel, there, dims)
        for array, tensor in zip(arrays, there, strict=True):
            array.copy_(tensor)


class DifferenceError(Exception):
    """Both engines differ; the message says where and in what."""


def draw_config(kind: str, draw: random.Random) -> Config:
    """Return a config of a kind whose few blocks make requests be preempted."""
    fixed, size = KINDS[kind], draw.choice((1, 2, 4, 4, 16, 24))
    has_drafts = "spec_method" in fixed
    is_chunked = draw.random() < 0.8
    longest = draw.randint(24, 64)
    config = Config(
        num_blocks=draw.randint(longest // size + 2, 2 * longest // size + 4),
        block_size=size,
        max_num_seqs=draw.randint(2, 12),
        max_num_batched_tokens=draw.randint(8, 40) if is_chunked else 64,
        max_model_len=longest,
        enable_chunked_prefill=is_chunked,
        long_prefill_token_threshold=draw.choice((0, 0, 5)) if is_chunked else 0,
        scheduler_reserve_full_isl=draw.random() < 0.5,
        max_frames_in_flight=draw.randint(2, 3) if "async_scheduling" in fixed else 1,
        num_speculative_tokens=draw.randint(1, 4) if has_drafts else 0,
        **fixed,
    )
    problems = config_problems(config)
    assert not problems, problems
    return config


class Episode:
    """Two engines that get the same random events."""

    def __init__(self, config: Config, left: DeviceEngine, right: DeviceEngine, seed: int) -> None:
        self.config, self.left, self.right, self.seed = config, left, right, seed
        self.reached: Counter[str] = Counter()
        self._draw = random.Random(seed)  # noqa: S311  (the same events in every run)
        self._names: list[str] = []

    def play(self) -> None:
        """Apply some events.

        Raises:
            DifferenceError: an answer or a snapshot of the right engine is not the left's.
        """
        for _ in range(NUM_ACTIONS):
            self._act()
        self._compare_snapshots(None)

    def _act(self) -> None:
        kind, draw = self._draw.random(), self._draw
        in_flight = len(self.left.frames)
        if kind < 0.3:
            self._apply(Submit(self._draw_request()))
        elif kind < 0.35 and self._names:
            self._apply(Abort((draw.choice(self._names),)))
        elif kind < 0.36:
            self._apply(Reset(reset_running_requests=draw.random() < 0.5))
        elif kind < 0.7 and in_flight < self.config.max_frames_in_flight:
            plan = self._apply(Schedule())
            if isinstance(plan, Plan):
                self.reached["rows"] += len(plan.rows)
                self.reached["preempted"] += len(plan.preempted_req_ids)
        elif in_flight:
            self._commit()

    def _draw_request(self) -> Request:
        """Few stems and few tokens, so that prompts share blocks and outputs meet stop tokens."""
        draw, name = self._draw, f"r{len(self._names)}"
        self._names.append(name)
        stem = (1, 2, 3, 4, 5, 6, 7, 8)[: draw.randint(0, 8)]
        return Request(
            name,
            (*stem, *draw.choices(range(4), k=draw.randint(1, 24))),
            max_tokens=draw.randint(1, 20),
            min_tokens=draw.choice((0, 0, 2)),
            eos_token_id=draw.choice((None, 3)),
            stop_token_ids=draw.choice(((), (), (2,))),
            priority=draw.randint(0, 3),
            arrival_time=len(self._names),
        )

    def _commit(self) -> None:
        """Answer the oldest frame: a row gets some of its drafts and one token more."""
        draw = self._draw
        frame_id, frame = next(iter(self.left.frames.items()))
        answers = []
        for name, drafts in frame.rows.items():
            tokens: tuple[int, ...] = ()
            if drafts is not None:
                tokens = (*drafts[: draw.randint(0, len(drafts))], draw.randint(0, 3))
                self.reached["accepted"] += len(tokens) - 1
            answers.append(RowTokens(name, tokens))
        self._apply(Commit(frame_id, tuple(answers)))
        most = self.config.num_speculative_tokens
        if most and not self.config.async_scheduling:
            names = [name for name, drafts in frame.rows.items() if drafts is not None]
            rows = tuple(RowTokens(n, tuple(draw.choices(range(4), k=most))) for n in names)
            taken = self._apply(Drafts(rows))
            if isinstance(taken, DraftsTaken):
                self.reached["drafted"] += len(taken.request_ids)

    def _apply(self, event: Event) -> Observation:
        answer, other = self.left.apply(event), self.right.apply(event)
        self.reached["events"] += 1
        if answer != other:
            raise DifferenceError(
                f"{self._where(event)}:\n  numpy:    {answer}\n  other:    {other}"
            )
        if self.reached["events"] % 4 == 0:
            self._compare_snapshots(event)
        return answer

    def _compare_snapshots(self, event: Event | None) -> None:
        snapshot, other = self.left.snapshot(), self.right.snapshot()
        if snapshot != other:
            raise DifferenceError(
                f"{self._where(event)}: snapshots\n  numpy:    {snapshot}\n  other:    {other}"
            )

    def _where(self, event: Event | None) -> str:
        return f"episode {self.seed}, event {self.reached['events']}, {event}, {self.config}"


def make_compiled(config: Config) -> DeviceEngine:
    """Return the device's scheduler with kernels compiled for this GPU.

    Raises:
        ConfigError: `list_config_problems` has something against the config.
    """
    return DeviceEngine(config, Compiled(), count_gpu_lanes(config))


def list_lacks(kind: str, reached: Counter[str]) -> list[str]:
    """Return the counts of a run that are below what it must reach."""
    needed = {"events": NUM_EVENTS_MIN, "preempted": 1}
    if kind == "drafts":
        needed |= {"drafted": 1, "accepted": 1}
    if kind == SPECIFICATION:
        del needed["preempted"]
    return [f"{reached[name]} {name}" for name, count in needed.items() if reached[name] < count]


def play_episodes(kind: str, seed: int, seconds: float) -> tuple[Counter[str], str]:
    """Play episodes until one differs or time is over; what was reached, and the difference."""
    began, reached = time.monotonic(), Counter[str]()
    while time.monotonic() - began < seconds:
        config = draw_config(kind, random.Random(seed))  # noqa: S311  (the same in every run)
        left = DeviceEngine(config, lanes=count_gpu_lanes(config))
        episode = Episode(config, left, make_compiled(config), seed)
        try:
            episode.play()
        except DifferenceError as difference:
            return reached + episode.reached, f"{difference}"
        reached += episode.reached
        reached["episodes"] += 1
        seed += 1
    return reached, ""


def check_specification(seed: int, seconds: float) -> tuple[Counter[str], str]:
    """Hold the host engine to the specification; what was reached, and the first finding."""
    # The lock-step above needs nothing of the tools.
    check = import_module("blockstep.conformance.search.check").check
    options = import_module("blockstep.conformance.search.options").CheckOptions
    asked = options(
        "benchmarks.gpu.lockstep:make_compiled", preset="small", seed=seed, max_seconds=seconds
    )
    result = check(asked, shrinks=False)
    reached = Counter(events=result.num_events, episodes=result.num_episodes)
    return reached, "" if result.first is None else f"{result.first}"


def main() -> int:
    """Return the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=[*KINDS, SPECIFICATION])
    parser.add_argument("--seconds", type=float, default=60, help="no episode begins after them")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    began = time.monotonic()
    if options.kind == SPECIFICATION:
        reached, problem = check_specification(options.seed, options.seconds)
    else:
        reached, problem = play_episodes(options.kind, options.seed, options.seconds)
    if not problem:
        problem = ", ".join(f"reached only {lack}" for lack in list_lacks(options.kind, reached))
    figures = {
        "kind": options.kind, **reached, "problem": problem, "seconds": time.monotonic() - began,
    }  # fmt: skip
    print(
        f"{options.kind}: {reached['events']} events in {reached['episodes']} episodes, "
        f"{reached['preempted']} preempted: {problem or 'equal'}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
