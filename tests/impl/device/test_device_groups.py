"""Several KV groups in the device scheduler: full attention and sliding windows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from alike_support import apply_alike, step_alike

from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.impl.device import layout
from blockstep.impl.device.dims import count_most_blocks
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import Numpied
from blockstep.impl.host import HostEngine
from blockstep.kernels.numpied import HeldBack, Watched
from blockstep.spec.vocabulary import (
    Abort,
    Config,
    ConfigError,
    GroupKind,
    KVGroup,
    Policy,
    RejectCode,
    Rejected,
    Request,
    Reset,
    SpecMethod,
    Submit,
)

HELD_BACK = Numpied(HeldBack())
FULL = KVGroup(GroupKind.FULL, 2)
NARROW, WIDE = (KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=w) for w in (3, 6))
MIXES = [(FULL, NARROW), (NARROW, WIDE), (WIDE, FULL, NARROW), (FULL, FULL), (WIDE,)]
ASYNCHRONOUS = {
    "async_scheduling": True,
    "max_frames_in_flight": 2,
    "spec_method": SpecMethod.NGRAM,
    "num_speculative_tokens": 2,
}
DRAFT_HEAD = {"spec_method": SpecMethod.EAGLE, "num_speculative_tokens": 1}


def make_held_back(config: Config) -> DeviceEngine:
    """Return an engine whose stores are visible only after the next barrier."""
    return DeviceEngine(config, HELD_BACK)


def play(engine: DeviceEngine, other: HostEngine, seed: int, num_requests: int) -> None:
    """Run requests that share prefixes and abort some of them, until all have finished."""
    draw = random.Random(seed)
    starts = [tuple(draw.choices(range(3), k=14)) for _ in range(2)]
    for number in range(num_requests):
        prompt = draw.choice(starts)[: draw.randint(1, 14)] + tuple(draw.choices(range(3), k=2))
        request = Request(f"{number}", prompt, max_tokens=7, priority=draw.randrange(2))
        apply_alike(engine, other, Submit(request))
        if number % 4 > 1:
            step_alike(engine, other, draw)
        if number % 4 == 3:
            apply_alike(engine, other, Abort((f"{number - 2}",)))
    apply_alike(engine, other, Reset(reset_running_requests=False))
    while other.requests.slot_of:
        step_alike(engine, other, draw)


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_the_device_engine_conforms_with_groups(preset: str) -> None:
    options = CheckOptions(
        "device", preset=preset, seed=21, max_events=900, with_features=("groups",)
    )
    assert check(options).first is None


def test_no_barrier_is_missing_in_code_of_groups() -> None:
    engine = f"{__name__}:make_held_back"
    options = CheckOptions(engine, seed=22, max_events=700, with_features=("groups",))
    assert check(options).first is None


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("others", [(), ("async", "drafts")])
def test_the_device_engine_conforms_with_groups_in_long_runs(
    preset: str, others: tuple[str, ...]
) -> None:
    options = CheckOptions(
        "device", preset=preset, seed=23, max_events=60_000, with_features=("groups", *others)
    )
    assert check(options).first is None


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("groups", MIXES)
@pytest.mark.parametrize("fields", [{"policy": Policy.PRIORITY}, ASYNCHRONOUS, DRAFT_HEAD])
def test_no_two_lanes_race_in_code_of_groups(
    groups: tuple[KVGroup, ...], fields: dict[str, Any]
) -> None:
    watched = Watched()
    config = Config(
        num_blocks=2, block_size=2, max_num_seqs=8, max_model_len=30,
        max_num_batched_tokens=12, groups=groups, **fields,
    )  # fmt: skip
    config = replace(config, num_blocks=1 + count_most_blocks(config, 25))
    engine, other = DeviceEngine(config, Numpied(watched)), HostEngine(config)
    play(engine, other, 6, 14)
    assert engine.stats().prefix_cache_hits > 0
    assert engine.stats().preemptions > 0
    assert watched.shadows
    assert watched.findings == []


def test_groups_of_unsupported_kinds_and_sizes_are_rejected() -> None:
    chunks = KVGroup(GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=4)
    for other in (chunks, KVGroup(GroupKind.FULL, 4)):
        config = Config(num_blocks=40, block_size=2, groups=(FULL, other))
        with pytest.raises(ConfigError, match="must be full attention and sliding windows in bl"):
            DeviceEngine(config)


def test_a_request_that_never_fits_all_groups_is_rejected() -> None:
    """A window needs blocks for a part of a long request, full attention for all tokens."""
    for groups, fits in (((FULL, NARROW), False), ((NARROW, NARROW), True)):
        config = Config(
            num_blocks=25, block_size=2, max_num_batched_tokens=12, max_model_len=60, groups=groups
        )
        engine, other = DeviceEngine(config), HostEngine(config)
        answer = apply_alike(engine, other, Submit(Request("a", (1,) * 30, max_tokens=12)))
        assert isinstance(answer, Rejected) is not fits
        if isinstance(answer, Rejected):
            assert answer.code is RejectCode.NEVER_FITS


def test_tensors_of_groups_grow_when_they_are_full() -> None:
    config = Config(num_blocks=60, block_size=2, max_num_seqs=12, groups=(FULL, NARROW))
    engine, other, draw = DeviceEngine(config), HostEngine(config), random.Random(3)
    first = engine.inbox.dims
    for number in range(40):
        prompt = tuple(draw.choices(range(40), k=draw.randint(18, 30)))
        apply_alike(engine, other, Submit(Request(f"{number}", prompt, max_tokens=6)))
        if number % 5 == 0:
            step_alike(engine, other, draw)
    while other.requests.slot_of:
        step_alike(engine, other, draw)
    grown = engine.inbox.dims
    assert grown.slots > first.slots
    assert grown.nodes > first.nodes


@pytest.mark.parametrize("groups", MIXES)
def test_a_plan_has_the_positions_of_its_tokens_in_each_group(groups: tuple[KVGroup, ...]) -> None:
    config = Config(num_blocks=60, block_size=2, max_num_batched_tokens=24, groups=groups)
    engine, other, draw = DeviceEngine(config), HostEngine(config), random.Random(9)
    for number in range(8):
        prompt = tuple(draw.choices(range(2), k=draw.randint(1, 30)))
        apply_alike(engine, other, Submit(Request(f"{number}", prompt, max_tokens=5)))
        step_alike(engine, other, draw)
        s, count = engine.inbox.state, int(engine.inbox.state.num_rows[0])
        starts = s.query_start_loc[: count + 1].tolist()
        slots = s.plans[int(s.control[layout.PLACE]), layout.ROW_SLOT, :count].tolist()
        for row, slot in enumerate(slots):
            at = slice(starts[row], starts[row + 1])
            positions = s.positions[at]
            for table, mapping in zip(s.tables, s.slot_mapping, strict=True):
                blocks = table[slot, positions // 2]
                assert (blocks > 0).all()
                assert mapping[at].tolist() == (blocks * 2 + positions % 2).tolist()
