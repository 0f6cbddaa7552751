"""The short path of a device step decides like the long path and leaves the same state."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from blockstep.impl.device import launch, layout
from blockstep.impl.device.engine import DeviceEngine
from blockstep.kernels.numpied import HeldBack, Memory, Watched
from blockstep.spec.vocabulary import (
    Abort,
    Config,
    Policy,
    RepetitionDetection,
    Request,
    Snapshot,
    SpecMethod,
    Submit,
)

LONG = (launch.FOLDER / "step.py").read_text()
assert LONG.count("step_steadily(s, d) == 0") == 1
LONG = LONG.replace("step_steadily(s, d) == 0", "d.rows > 0")
"""Source of a loop that always takes the long path."""
ASYNCHRONOUS = {"async_scheduling": True, "max_frames_in_flight": 2}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "recycled blocks": {"num_blocks": 70},
    "asynchronous": ASYNCHRONOUS,
    "asynchronous, three frames": {"async_scheduling": True, "max_frames_in_flight": 3},
    "two frames": {"max_frames_in_flight": 2},
    "priority": {"policy": Policy.PRIORITY, "num_blocks": 70},
    "places run short": {"max_num_seqs": 3},
    "budget runs short": {"max_num_batched_tokens": 4},
    "budget runs short, asynchronous": {"max_num_batched_tokens": 4, **ASYNCHRONOUS},
    "placeholders": {
        "spec_method": SpecMethod.NGRAM,
        "num_speculative_tokens": 2,
        "max_model_len": 30,
        **ASYNCHRONOUS,
    },
    "long blocks": {"block_size": 7},
    "blocks of one token": {"block_size": 1, "num_blocks": 400},
    "no cache": {"enable_prefix_caching": False},
}
NEVER_SHORT = ("two frames", "placeholders")
NAMED = (
    "num_rows", "num_continued", "num_preempted", "num_record_rows", "plan_rows", "record", "known",
    "query_start_loc", "in_flight", "num_running", "num_free", "is_prefill", "promised", "key",
    "control",
)  # fmt: skip
"""Tensors that a host may read after any step."""


def open_loop(run: launch.Numpied, config: Config, lanes: int) -> DeviceEngine:
    """Return an engine whose device runs a loop."""
    engine = DeviceEngine(config, run, lanes=lanes)
    control = engine.inbox.state.control
    control[layout.BUDGET], control[layout.ADMITS] = config.max_num_batched_tokens, 1
    control[layout.PREVIOUS_ID] = layout.NONE
    return engine


def look(engine: DeviceEngine) -> Snapshot:
    """Return the snapshot of a copy, so that postponed work stays postponed."""
    inbox = engine.inbox
    kept = inbox.arrays
    inbox.arrays = layout.State(*(array.copy() for array in kept))
    taken = engine.snapshot()
    inbox.arrays = kept
    return taken


def read_plan(engine: DeviceEngine) -> list[Any]:
    """Return all fields of the last plan."""
    s, count = engine.inbox.state, int(engine.inbox.state.num_rows[0])
    place = (int(s.control[layout.PLACE]) - (count > 0)) % engine.inbox.dims.frames
    total = int(s.query_start_loc[count])
    victims = s.victims[: int(s.num_preempted[0])].tolist()
    return [
        s.plans[place, :, :count].tolist(), s.positions[:total].tolist(),
        s.slot_mapping[:, :total].tolist(), s.seq_lens[:count].tolist(), victims,
        s.plan_ids.tolist(),
    ]  # fmt: skip


class Loops:
    """Two loops that get the same events; only the first may take the short path."""

    def __init__(self, run: launch.Numpied, config: Config, seed: int) -> None:
        self.draw = random.Random(seed)
        lanes = self.draw.choice((2, 16))
        long = launch.Numpied(Memory(), {"step": LONG})
        self.engines = [open_loop(one, config, lanes) for one in (run, long)]
        self.config, self.number, self.counts = config, 0, Counter[str]()

    def add(self) -> None:
        """Submit one more request."""
        draw = self.draw
        kind = draw.randrange(8)
        request = Request(
            f"{self.number}",
            tuple(draw.choices(range(2), k=draw.randint(1, 6))),
            max_tokens=draw.choice((9, 40, 90)),
            priority=draw.randrange(2),
            min_tokens=draw.choice((0, 2)),
            eos_token_id=5 if kind < 3 else None,
            stop_token_ids=((6,), (6, 4, 7), (), ())[kind % 4],
            repetition_detection=RepetitionDetection(2, min_count=6) if kind == 7 else None,
        )
        self.submit(request)

    def submit(self, request: Request) -> None:
        """Send both engines a request."""
        self.number += 1
        for engine in self.engines:
            engine.apply(Submit(request))

    def set_admits(self, admits: int) -> None:
        """Set whether the loops admit waiting requests."""
        for engine in self.engines:
            engine.inbox.state.control[layout.ADMITS] = admits

    def abort(self) -> None:
        """End a request."""
        names = [*self.engines[0].inbox.slot_of]
        if names:
            name = self.draw.choice(names)
            for engine in self.engines:
                engine.apply(Abort((name,)))

    def step(self) -> None:
        """Launch one step of each loop and compare everything that a host can read."""
        self.answer()
        self.launch("loop_kernel")
        self.forget()
        self.compare()

    def answer(self) -> None:
        """Sample tokens for the oldest frame."""
        tokens = self.draw.choices(range(1, 4), (8, 1, 1), k=64)
        if self.draw.random() < 0.2:
            tokens[self.draw.randrange(6)] = self.draw.choice((5, 6, 7))
        for engine in self.engines:
            s = engine.inbox.state
            place = int(s.control[layout.COMMIT_PLACE])
            s.answer_counts[place] = s.plans[place, layout.ROW_SAMPLES]
            s.answer_tokens[place, :, 0] = tokens[: len(s.run)]

    def forget(self) -> None:
        """Free the slots of finished requests on both hosts."""
        for engine in self.engines:
            s, requests = engine.inbox.state, engine.inbox.requests
            if engine.inbox.has_commands:
                continue  # a new request has no birth yet
            for slot in [slot for slot in requests if s.birth[slot] == 0]:
                engine.inbox.remove(slot)

    def compare(self) -> None:
        """Compare what a host may read, and the state after all postponed work is done."""
        first, second = self.engines
        s, other = first.inbox.state, second.inbox.state
        for name in NAMED:
            same = getattr(s, name) == getattr(other, name)
            if name == "control":  # the long way alone writes the oldest frame, for itself
                same = same | (np.arange(len(same)) == layout.OLDEST_ID)
            assert same.all(), name
        assert read_plan(first) == read_plan(second)
        assert look(first) == look(second)
        is_short = int(s.steady[layout.STEADY_PLANS]) > first.inbox.dims.frames
        self.counts["short"] += is_short
        self.counts["behind"] += int(s.steady[layout.STEPS_BEHIND]) > 0
        self.counts["pending"] += int(s.steady[layout.NUM_PENDING]) > 0
        self.counts["steps"] += 1

    def launch(self, kernel: str) -> None:
        """Launch another kernel on both."""
        for engine in self.engines:
            engine.inbox.launch(kernel)

    def disturb(self) -> None:
        """Do something that a host may do between two steps, but rarely does."""
        match self.draw.randrange(4):
            case 0:
                for _ in range(self.draw.randint(1, self.config.max_frames_in_flight)):
                    self.answer()
                    self.launch("settle_kernel")
            case 1:
                self.launch("commands_kernel")
            case 2:
                budget = self.draw.choice((2, self.config.max_num_batched_tokens))
                for engine in self.engines:
                    engine.inbox.state.control[layout.BUDGET] = budget
            case 3:
                self.set_admits(self.draw.randrange(2))
        self.forget()

    def play(self, steps: int) -> None:
        """Run steps in series, some of them long, with arrivals and aborts in between."""
        quiet = 0
        for step in range(steps):
            if step % 10 == 0:
                for engine in self.engines:
                    engine.inbox.reserve_nodes(400, 50)
            if quiet == 0:
                while len(self.engines[0].inbox.slot_of) < self.draw.randint(0, 8):
                    self.add()
                if self.draw.random() < 0.3:
                    self.abort()
                if self.draw.random() < 0.3:
                    self.disturb()
                quiet = self.draw.choice((1, 3, 12, 30))
            quiet -= 1
            self.step()


def make_config(fields: Mapping[str, Any]) -> Config:
    whole = {"num_blocks": 200, "block_size": 2, "max_num_batched_tokens": 16, "max_num_seqs": 6}
    return Config(**{**whole, "max_model_len": 80, **fields})


@pytest.mark.parametrize("name", CONFIGS)
def test_the_short_path_decides_like_the_long_path(name: str) -> None:
    loops = Loops(launch.Numpied(Memory()), make_config(CONFIGS[name]), seed=1)
    loops.play(120)
    assert (loops.counts["short"] > 30) == (name not in NEVER_SHORT)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", CONFIGS)
def test_the_short_path_decides_like_the_long_path_in_long_runs(name: str, seed: int) -> None:
    loops = Loops(launch.Numpied(Memory()), make_config(CONFIGS[name]), 100 + seed)
    loops.play(400)


def run_short_of_blocks(run: launch.Numpied, admits: int) -> Loops:
    """Run two requests that need more blocks than there are.

    The ring has blocks that were taken before after its free blocks, as if it had wrapped around.
    """
    loops = Loops(run, make_config({"num_blocks": 12}), seed=1)
    for engine in loops.engines:
        s = engine.inbox.state
        s.ring[int(s.tail[0]) :] = 1
    for number in range(2):
        loops.submit(Request(f"{number}", (1,), max_tokens=20))
    loops.step()
    loops.set_admits(admits)
    for _ in range(15):
        loops.step()
    return loops


def open_admission_late(run: launch.Numpied) -> Loops:
    """Run a request that waits until the host lets the loops admit again."""
    loops = Loops(run, make_config({}), seed=1)
    loops.submit(Request("first", (1, 2), max_tokens=60))
    loops.step()
    loops.set_admits(0)
    loops.submit(Request("second", (1, 1), max_tokens=60))
    for _ in range(6):
        loops.step()
    loops.set_admits(1)
    for _ in range(6):
        loops.step()
    return loops


def settle_once(run: launch.Numpied, fields: Mapping[str, Any]) -> Loops:
    """Run steps after the host has committed a frame and planned none."""
    loops = Loops(run, make_config(fields), seed=1)
    for number in range(2):
        loops.submit(Request(f"{number}", (1, 2), max_tokens=60))
    for _ in range(8):
        loops.step()
    loops.answer()
    loops.launch("settle_kernel")
    loops.forget()
    for _ in range(4):
        loops.step()
    return loops


@pytest.mark.parametrize("admits", [0, 1])
def test_the_long_path_is_taken_when_blocks_run_short(admits: int) -> None:
    loops = run_short_of_blocks(launch.Numpied(Memory()), admits)
    assert loops.counts["short"] > 5
    assert loops.engines[0].stats().preemptions


def test_the_long_path_is_taken_when_a_request_can_be_admitted() -> None:
    loops = open_admission_late(launch.Numpied(Memory()))
    assert loops.counts["short"] > 5
    assert int(loops.engines[0].inbox.state.num_running[0]) == 2


@pytest.mark.parametrize("fields", [{}, ASYNCHRONOUS])
def test_the_long_path_is_taken_after_a_commit_without_a_plan(fields: dict[str, Any]) -> None:
    assert settle_once(launch.Numpied(Memory()), fields).counts["short"] > 5


@pytest.mark.parametrize("name", ["recycled blocks", "asynchronous", "long blocks"])
def test_no_barrier_is_missing_on_the_short_path(name: str) -> None:
    for memory in (Watched(), HeldBack()):
        loops = Loops(launch.Numpied(memory), make_config(CONFIGS[name]), seed=1)
        loops.play(60)
        assert loops.counts["short"] > 10
        assert memory.findings == []


MISTAKES = {
    "filled blocks are never cached": (
        "steady", "        publish_pending(s, tl.load(s.steady + NUM_PENDING), 1, d)\n", "",
    ),
    "the long path does not catch up": (
        "step", "        catch_up(s, d)\n        commit_oldest", "        commit_oldest",
    ),
    "commands do not catch up": (
        "step", "host's commands.\"\"\"\n    catch_up(s, d)", "host's commands.\"\"\"",
    ),
    "the settle kernel does not catch up": (
        "step", "    catch_up(s, d)\n    commit_oldest(s, 1, d)", "    commit_oldest(s, 1, d)",
    ),
    "filled blocks are cached in another order": (
        "steady", "(rank >> 16), slot",
        "((total >> 16) & FIELD).to(tl.int32) - 1 - (rank >> 16), slot",
    ),
    "filled blocks wait for too long": (
        "steady", "    if steps_behind >= d.size:", "    if steps_behind < 0:",
    ),
    "what remains of the filled blocks is dropped": (
        "steady", "tl.maximum(num_pending - at, 0)", "0 * num_pending",
    ),
    "a length is not seen": ("steady", "(steps_left > 0) & may_be", "may_be"),
    "the longest request counts": (
        "steady", "tl.min(tl.where(live, tl.where(is_plain, left, 0), d.max_model_len), 0)",
        "tl.max(tl.where(live, tl.where(is_plain, left, 0), 0), 0)",
    ),
    "the model length is not seen": (
        "steady", "left = tl.minimum(left, d.max_model_len - computed - 1)", "left += 0",
    ),
    "a row that placeholders will finish is planned": (
        "steady", "tl.where(promised > 1, tl.minimum(left, skipped), left)", "left + 0 * skipped",
    ),
    "an end of sequence is not seen": (
        "steady", "(live & (eos == token)).to(tl.int32)", "(live & (eos != eos)).to(tl.int32)",
    ),
    "a stop token is not seen": ("steady", "tl.where(has_stop & (stop == token), 1, ends)", "ends"),
    "only one stop token is seen": ("steady", "while index < most_stops", "while index < 1"),
    "repetition is not seen": (
        "steady", "tl.load(s.repeats_count + slot, mask=live, other=0)", "known * 0",
    ),
    "commands are not seen": (
        "steady", "may & (tl.load(s.command_at) == tl.load(s.command_end))", "may",
    ),
    "what commands change is not seen": (
        "commands", "    tl.store(s.steady + STEADY_PLANS, 0, mask=at < last)\n", "",
    ),
    "a budget is not seen": ("steady", " & (budget >= count)", ""),
    "one plain plan is taken for all in flight": ("steady", "(plans >= d.frames)", "(plans > 0)"),
    "a plan with a new row is plain": (
        "steady", " & (tl.load(s.num_continued) == num_rows)", "",
    ),
    "a prompt with more chunks counts as a decode": ("steady", " & (samples == 1)", ""),
    "a row that missed a plan is plain": (
        "steady",
        "    special += tl.load(s.plans + first + ROW_MISSED * d.rows, mask=live, other=0)\n", "",
    ),
    "fewer rows are the same rows": (
        "steady", "tl.where(num_rows == rows_before, tl.minimum(before + 1, d.frames), 1)",
        "tl.minimum(before + 1, d.frames) + 0 * rows_before",
    ),
    "a hole in the free queue is a block": (
        "steady", " + (block < 0).to(tl.int32)", "",
    ),
    "a recycled block is still found": ("steady", "(total >> 48) > 0", "(total >> 48) < 0"),
    "a recycled block is found among others": (
        "steady", "has_node & ((before >= 0) | (after >= 0))", "has_node & (before == after)",
    ),
    "blocks may run short": ("steady", " & (num_taken <= free)", ""),
    "a plan after a preemption is plain": (
        "steady", "may & (tl.load(s.num_preempted) == 0) &", "may &",
    ),
    "waiting requests are not seen": (
        "steady", "is_closed | (tl.load(s.steady + HAS_WAITING) == 0)", "is_closed | (count > 0)",
    ),
    "frames in flight are not counted": ("steady", " & (tl.load(s.in_flight) == d.frames)", ""),
    "a record is left as it was": ("steady", "if plans == d.frames", "if plans < 0"),
}  # fmt: skip


@pytest.mark.sampled(one_in=9)  # some are found by the last of many runs only
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_the_short_path_is_found(name: str) -> None:
    """The runs above find it: a value differs, or an access is out of bounds."""
    module, old, new = MISTAKES[name]
    text = (launch.FOLDER / f"{module}.py").read_text()
    assert text.count(old) == 1
    run = launch.Numpied(Memory(), {module: text.replace(old, new)})
    with pytest.raises((AssertionError, IndexError, KeyError)):
        play_all(run)


def play_all(run: launch.Numpied) -> None:
    """Run the scenes, then loops of every config that takes the short path."""
    open_admission_late(run)
    run_short_of_blocks(run, 0)
    run_short_of_blocks(run, 1)
    settle_once(run, {})
    for seed in range(5):
        for name, fields in CONFIGS.items():
            if name not in NEVER_SHORT:
                Loops(run, make_config(fields), seed).play(150)
