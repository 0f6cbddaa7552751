"""Several KV groups in the device's scheduler: full attention and sliding windows."""

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
    """Its stores are seen only behind the next barrier."""
    return DeviceEngine(config, HELD_BACK)


def play(engine: DeviceEngine, other: HostEngine, seed: int, num_requests: int) -> None:
    """Requests that share prefixes, of which some are aborted; all has ended afterwards."""
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
def test_groups_conform(preset: str) -> None:
    options = CheckOptions(
        "device", preset=preset, seed=21, max_events=900, with_features=("groups",)
    )
    assert check(options).first is None


def test_no_barrier_of_groups_lacks_where_a_store_is_read() -> None:
    engine = f"{__name__}:make_held_back"
    options = CheckOptions(engine, seed=22, max_events=700, with_features=("groups",))
    assert check(options).first is None


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("others", [(), ("async", "drafts")])
def test_groups_conform_for_long(preset: str, others: tuple[str, ...]) -> None:
    options = CheckOptions(
        "device", preset=preset, seed=23, max_events=60_000, with_features=("groups", *others)
    )
    assert check(options).first is None


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("groups", MIXES)
@pytest.mark.parametrize("fields", [{"policy": Policy.PRIORITY}, ASYNCHRONOUS, DRAFT_HEAD])
def test_groups_read_and_write_nothing_between_two_barriers(
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


def test_groups_of_other_kinds_and_sizes_are_refused_in_a_sentence() -> None:
    chunks = KVGroup(GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=4)
    for other in (chunks, KVGroup(GroupKind.FULL, 4)):
        config = Config(num_blocks=40, block_size=2, groups=(FULL, other))
        with pytest.raises(ConfigError, match="must be full attention and sliding windows in bl"):
            DeviceEngine(config)


def test_a_request_that_never_fits_all_groups_is_refused() -> None:
    """A window holds a part of a long request, full attention all of it."""
    for groups, fits in (((FULL, NARROW), False), ((NARROW, NARROW), True)):
        config = Config(
            num_blocks=25, block_size=2, max_num_batched_tokens=12, max_model_len=60, groups=groups
        )
        engine, other = DeviceEngine(config), HostEngine(config)
        answer = apply_alike(engine, other, Submit(Request("a", (1,) * 30, max_tokens=12)))
        assert isinstance(answer, Rejected) is not fits
        if isinstance(answer, Rejected):
            assert answer.code is RejectCode.NEVER_FITS


def test_tensors_with_groups_grow() -> None:
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
