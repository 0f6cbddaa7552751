"""The device scheduler: its kernels decide like the host engine, in numpy and interpreted."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_support
import pytest
import typer
from alike_support import apply_alike, step_alike
from tests.impl.host.test_host import draw_request
from typer.testing import CliRunner

from blockstep.conformance.command.explore import explore_command
from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.impl.capabilities import DEVICE
from blockstep.impl.device import layout
from blockstep.impl.device.dims import make_dims
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import Numpied
from blockstep.impl.host import HostEngine
from blockstep.kernels.numpied import HeldBack, Watched
from blockstep.spec.vocabulary import (
    MAX_INT,
    Abort,
    Ack,
    Commit,
    Config,
    ConfigError,
    Policy,
    RepetitionDetection,
    Request,
    Reset,
    RowTokens,
    Schedule,
    SpecMethod,
    Submit,
)

HELD_BACK = Numpied(HeldBack())
ASYNCHRONOUS = {
    "async_scheduling": True,
    "max_frames_in_flight": 2,
    "spec_method": SpecMethod.NGRAM,
    "num_speculative_tokens": 2,
}


def make_held_back(config: Config) -> DeviceEngine:
    """Return an engine whose stores are visible only after the next barrier."""
    return DeviceEngine(config, HELD_BACK)


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_the_device_engine_conforms(preset: str) -> None:
    options = CheckOptions("device", preset=preset, seed=11, max_events=700)
    assert check(options).first is None


def test_no_barrier_is_missing_between_a_store_and_its_load() -> None:
    options = CheckOptions(f"{__name__}:make_held_back", seed=12, max_events=500)
    assert check(options).first is None


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
def test_the_device_engine_conforms_in_long_runs(preset: str, policy: Policy) -> None:
    options = CheckOptions("device", preset=preset, policy=policy, seed=13, max_events=100_000)
    assert check(options).first is None


INTERPRETED = """
import sys
from kernel_support.interpreter import speed_up
speed_up()
from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.interpreted import get_interpreted
from blockstep.impl.device.launch import get_numpied
from blockstep.spec.vocabulary import Commit, Config, GroupKind, KVGroup, Request, RowTokens
from blockstep.spec.vocabulary import Schedule, Submit

interpreted, numpied = get_interpreted(), get_numpied()

def launch(kernel, state, dims):
    other = type(state)(*[tensor.copy() for tensor in state])
    numpied(kernel, other, dims)
    interpreted(kernel, state, dims)
    for name, here, there in zip(state._fields, state, other):
        assert (here == there).all(), (kernel, name)

def make(config):
    return DeviceEngine(config, launch)

if sys.argv[1] in ("short", "groups"):
    groups, num_blocks = (), 6
    if sys.argv[1] == "groups":
        window = KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=3)
        groups, num_blocks = (KVGroup(GroupKind.FULL, 2), window), 10
    config = Config(
        num_blocks=num_blocks, block_size=2, max_num_seqs=3, max_num_batched_tokens=6,
        groups=groups,
    )
    engine = make(config)
    for name in "abc":
        engine.apply(Submit(Request(name, (1, 2, 3, 4), max_tokens=4)))
    for frame_id in range(8):
        plan = engine.apply(Schedule())
        rows = engine.frames[frame_id].rows.items()
        answers = (RowTokens(name, () if drafts is None else (7,)) for name, drafts in rows)
        engine.apply(Commit(frame_id, tuple(answers)))
    assert engine.stats().preemptions and engine.stats().prefix_cache_hits
else:
    options = CheckOptions("__main__:make", preset="tiny", seed=2, max_events=3_000)
    assert check(options).first is None
"""


def play_interpreted(how_long: str) -> None:
    """Check that numpy and the interpreter leave equal tensors after every launch."""
    support = str(Path(kernel_support.__path__[0]).parent)
    paths = os.pathsep.join([support, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, how_long],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", ["short", "groups"])
def test_numpy_and_the_interpreter_agree_bit_for_bit(what: str) -> None:
    pytest.importorskip("triton")
    play_interpreted(what)


@pytest.mark.soak
def test_numpy_and_the_interpreter_agree_in_long_runs() -> None:
    pytest.importorskip("triton")
    play_interpreted("long")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")
def test_a_check_can_run_the_interpreted_engine() -> None:
    pytest.importorskip("triton")
    result = check(CheckOptions("device-interpreted", preset="tiny", episode=3))
    assert result.first is None
    assert result.num_events > 40


def test_importing_the_interpreted_engine_needs_triton_interpret() -> None:
    module = "blockstep.impl.device.interpreted"
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "ImportError: set TRITON_INTERPRET=1" in done.stderr


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
def test_tensors_grow_when_they_are_full(policy: Policy) -> None:
    """The test has more requests, stop tokens, nodes and commands than fit at first."""
    draw = random.Random(3)
    config = Config(
        num_blocks=40, block_size=3, max_num_seqs=12, max_num_batched_tokens=50, policy=policy
    )
    engine, other = DeviceEngine(config), HostEngine(config)
    first = engine.inbox.dims
    many = Request("many", (1, 2, 3), max_tokens=9, stop_token_ids=tuple(range(70, 90)))
    assert apply_alike(engine, other, Submit(many)) == Ack()
    for number in range(40):
        assert apply_alike(engine, other, Submit(draw_request(draw, number))) == Ack()
        if number % 5 == 0:
            step_alike(engine, other, draw)
    while other.requests.slot_of:
        step_alike(engine, other, draw)
        if draw.random() < 0.1:
            gone = draw.choice([*other.requests.slot_of, "nobody"])
            apply_alike(engine, other, Abort((gone,)))
    grown = engine.inbox.dims
    assert grown.slots > first.slots
    assert grown.stops > first.stops
    assert grown.nodes > first.nodes
    apply_alike(engine, other, Reset(reset_running_requests=False))


@pytest.mark.parametrize("fields", [{"policy": Policy.PRIORITY}, ASYNCHRONOUS])
def test_no_two_lanes_race_between_two_barriers(fields: dict[str, Any]) -> None:
    draw, watched = random.Random(6), Watched()
    config = Config(
        num_blocks=12, block_size=2, max_num_seqs=5, max_num_batched_tokens=12, **fields
    )
    engine, other = DeviceEngine(config, Numpied(watched)), HostEngine(config)
    for number in range(8):
        prompt = tuple(draw.choices(range(2), k=draw.randint(1, 9)))
        request = Request(f"{number}", prompt, max_tokens=6, priority=draw.randrange(2))
        apply_alike(engine, other, Submit(request))
        step_alike(engine, other, draw)
    apply_alike(engine, other, Reset(reset_running_requests=True))
    while other.requests.slot_of:
        step_alike(engine, other, draw)
    assert engine.stats().preemptions > 2
    assert watched.shadows
    assert watched.findings == []


@pytest.mark.parametrize("fields", [{}, ASYNCHRONOUS])
@pytest.mark.parametrize("below", [0, 1, 2, 3, 30])
def test_the_largest_numbers_of_a_request_do_not_overflow(
    fields: dict[str, Any], below: int
) -> None:
    config = Config(
        num_blocks=20, block_size=2, max_num_batched_tokens=8, max_model_len=20, **fields
    )
    engine, other = DeviceEngine(config), HostEngine(config)
    most, draw = MAX_INT - below, random.Random(1)
    repetition = RepetitionDetection(max_pattern_size=most, min_count=most)
    for number, more in enumerate(
        ({}, {"min_tokens": most}, {"stop_token_ids": (most,)}, {"eos_token_id": most},
         {"priority": -most}, {"arrival_time": most}, {"repetition_detection": repetition})
    ):  # fmt: skip
        request = Request(f"{number}", (1, 2, 3), max_tokens=most, **more)  # type: ignore[arg-type]
        assert apply_alike(engine, other, Submit(request)) == Ack()
    num_steps = 0
    while other.requests.slot_of:
        step_alike(engine, other, draw)
        num_steps += 1
    assert num_steps > 17


@pytest.mark.parametrize("fields", [{}, ASYNCHRONOUS])
def test_a_plan_has_the_positions_of_its_tokens(fields: dict[str, Any]) -> None:
    """The arrays equal those of the kernel that prepares steps of other schedulers."""
    torch = pytest.importorskip("torch")
    kernels = importlib.import_module("blockstep.kernels")
    config = Config(num_blocks=30, block_size=2, max_num_batched_tokens=24, **fields)
    engine, other, draw = DeviceEngine(config), HostEngine(config), random.Random(9)
    longest = 0
    for number in range(12):
        prompt = tuple(draw.choices(range(2), k=draw.randint(1, 30)))
        apply_alike(engine, other, Submit(Request(f"{number}", prompt, max_tokens=5)))
        step_alike(engine, other, draw)
        s, count = engine.inbox.state, int(engine.inbox.state.num_rows[0])
        frame = torch.from_numpy(s.plans[int(s.control[layout.PLACE]), :, :count].copy())
        tokens = frame[layout.ROW_TOKENS]
        tables = torch.from_numpy(s.tables[0])[frame[layout.ROW_SLOT].long()]
        total, longest = int(tokens.sum()), max(longest, int(tokens.max()))
        step = kernels.prepare_step(tables, frame[layout.ROW_COMPUTED], tokens, config.block_size)
        assert s.positions[:total].tolist() == step.positions.tolist()
        assert s.slot_mapping[0, :total].tolist() == step.slot_mapping.tolist()
        assert s.query_start_loc[: count + 1].tolist() == step.query_start_loc.tolist()
        assert s.seq_lens[:count].tolist() == step.seq_lens.tolist()
    assert longest > engine.inbox.dims.lanes


@pytest.mark.parametrize("fields", [{}, {"max_frames_in_flight": 3}, ASYNCHRONOUS])
def test_a_loop_without_the_host_decides_like_single_steps(fields: dict[str, Any]) -> None:
    """Each step is one launch; the host writes only requests and sampled tokens."""
    config = Config(num_blocks=8, block_size=2, max_num_batched_tokens=8, **fields)
    numpied = Numpied()  # it makes each kernel once
    alone, stepped, draw = DeviceEngine(config, numpied), DeviceEngine(config), random.Random(8)
    s, d = alone.inbox.state, alone.inbox.dims
    s.control[layout.BUDGET], s.control[layout.ADMITS] = config.max_num_batched_tokens, 1
    s.control[layout.PREVIOUS_ID] = layout.NONE
    num_rows, empty = -1, 0
    for step in range(60):
        if step % 2 == 0 and step < 24:
            prompt = tuple(draw.choices(range(2), k=draw.randint(1, 5)))
            for engine in (alone, stepped):
                engine.apply(Submit(Request(f"{step}", prompt, max_tokens=6)))
        ended: list[int] = []
        oldest = next(iter(stepped.frames), None)
        is_full = len(stepped.frames) == d.frames
        if oldest is not None and (is_full or num_rows == 0):
            rows = stepped.frames[oldest].rows.values()
            counts = [0 if drafts is None else 1 for drafts in rows]
            place = int(s.control[layout.COMMIT_PLACE])
            s.answer_counts[place, : len(counts)] = counts
            s.answer_tokens[place, : len(counts), 0] = 1
            names = stepped.frames[oldest].rows
            answers = ((name, (1,) * count) for name, count in zip(names, counts, strict=True))
            before = dict(stepped.inbox.slot_of)
            alone.inbox.reserve_nodes(sum(counts), len(counts))
            stepped.apply(Commit(oldest, tuple(RowTokens(*answer) for answer in answers)))
            ended = [slot for name, slot in before.items() if name not in stepped.inbox.slot_of]
        alone.inbox.launch("loop_kernel")
        for slot in ended:
            alone.inbox.remove(slot)
        stepped.apply(Schedule())
        num_rows = int(stepped.inbox.state.num_rows[0])
        empty += num_rows == 0
        assert int(s.num_rows[0]) == num_rows
        own = {"control", "plans", "plan_rows", "plan_ids", "in_flight", "scratch", "mark"}
        own |= {"answer_counts", "answer_tokens"}  # by place, which the two choose differently
        own |= {"steady", "pending", "step_first"}  # of a loop's short way, or scratch to it
        own |= {"plan_blocks"}
        caught_up = layout.State(*(array.copy() for array in s))
        numpied("commands_kernel", caught_up, d)
        for name in {*layout.State._fields} - own:
            same = getattr(caught_up, name) == getattr(stepped.inbox.state, name)
            assert same.all(), (step, name)
    assert empty
    assert stepped.stats().preemptions


def test_nodes_of_unused_block_keys_are_freed() -> None:
    config = Config(num_blocks=8, block_size=2, max_model_len=12)
    engine, other = DeviceEngine(config), HostEngine(config)
    swept, draw = 0, random.Random(5)
    for number in range(60):
        prompt = tuple(draw.choices(range(9), k=8))
        before = int(engine.inbox.state.num_free_nodes[0])
        apply_alike(engine, other, Submit(Request(f"{number}", prompt, max_tokens=2)))
        swept += int(engine.inbox.state.num_free_nodes[0]) > before
        step_alike(engine, other, draw)
        step_alike(engine, other, draw)
    assert swept > 2
    assert engine.inbox.dims.nodes == make_dims(config).nodes


def test_a_config_with_unsupported_features_is_rejected() -> None:
    assert DeviceEngine(Config(num_blocks=2)).capabilities() == DEVICE
    with pytest.raises(ConfigError, match=r"max_loras = 1: .* no cap on adapters"):
        DeviceEngine(Config(num_blocks=2, max_loras=1))


@pytest.mark.parametrize(
    "world",
    [
        *("loop", "alone"),
        *(
            pytest.param(world, marks=pytest.mark.soak)
            for world in ("pair", "equals", "seats", "whole", "brink", "endings", "chunks")
        ),
    ],
)
def test_all_transitions_of_small_worlds_agree_with_the_specification(world: str) -> None:
    app = typer.Typer()
    app.command()(explore_command)
    result = CliRunner().invoke(app, ["--preset", world, "--engine", "device"])
    assert result.exit_code == 0, result.output
    assert "device agrees on every event in every state" in " ".join(result.output.split())


def test_a_tensor_too_large_for_kernels_is_rejected_before_allocation() -> None:
    with pytest.raises(ValueError, match=r"^tokens would have 512 x 5000001 elements, .* fewer"):
        DeviceEngine(Config(num_blocks=1_000, max_num_seqs=512, max_model_len=5_000_000))
