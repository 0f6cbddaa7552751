"""A loop without a host: its tokens are right, and what it does between fences is found at them."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support.models import MAX_TOKENS, Checkpoint, make_checkpoint, make_prompts
from engine_support.storms import SMALL

from blockstep.conformance.engines.fences import FenceChecker
from blockstep.conformance.engines.serving import CheckFailedError
from blockstep.impl.device.launch import FOLDER, Launch, Numpied
from blockstep.impl.engine import RequestError, Settings, SettingsError
from blockstep.impl.engine.resident import Resident
from blockstep.spec.vocabulary import Request

POOLS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 400, "block_size": 4, "max_model_len": 84},
    "small": {**SMALL, "max_num_batched_tokens": 16},
}
NUM_PROMPTS = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def make(
    checkpoint: Checkpoint, pool: str, steps: int, launch: Launch | None = None
) -> tuple[Resident, FenceChecker]:
    checkers: list[FenceChecker] = []

    def watch(config: Any) -> FenceChecker:
        checkers.append(FenceChecker(config))
        return checkers[-1]

    settings = Settings(device="cpu", **POOLS[pool])
    return Resident(checkpoint.folder, settings, steps, watch, launch), checkers[-1]


def submit(resident: Resident, first: int, end: int) -> None:
    for number, prompt in enumerate(make_prompts()[first:end], first):
        resident.submit(Request(f"{number}", tuple(prompt), max_tokens=MAX_TOKENS))


def run_all(resident: Resident) -> None:
    while resident.has_unfinished_requests:
        resident.run()


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("pool", POOLS)
def test_tokens_are_those_of_transformers(checkpoint: Checkpoint, pool: str, steps: int) -> None:
    resident, checker = make(checkpoint, pool, steps)
    submit(resident, 0, NUM_PROMPTS // 2)
    resident.run()
    submit(resident, NUM_PROMPTS // 2, NUM_PROMPTS)
    run_all(resident)
    made = [resident.pop_outputs(f"{number}") for number in range(NUM_PROMPTS)]
    assert made == checkpoint.expected.token_ids[:NUM_PROMPTS]
    stats = resident.engine.stats()
    assert stats.prefix_cache_hits
    assert bool(stats.preemptions) == (pool == "small")
    assert checker.num_events > 3 * NUM_PROMPTS
    assert checker.num_fences >= resident.engine.next_frame_id / steps


def test_pure_decode_reads_nothing_of_the_device(checkpoint: Checkpoint) -> None:
    resident, _ = make(checkpoint, "roomy", 4)
    submit(resident, 0, 4)
    while not resident._is_decode():
        resident.run()
    reads, frames = resident.num_reads, resident.engine.next_frame_id
    assert reads == frames
    resident.run()
    assert (resident.num_reads, resident.engine.next_frame_id) == (reads, frames + 4)
    run_all(resident)
    assert resident.pop_outputs("0") == checkpoint.expected.token_ids[0]


@pytest.mark.parametrize("pool", POOLS)
def test_an_abort_between_bursts_takes_nobody_else_along(checkpoint: Checkpoint, pool: str) -> None:
    resident, _ = make(checkpoint, pool, 3)
    submit(resident, 0, 6)
    resident.run()
    resident.abort("1", "4", "nobody")
    submit(resident, 6, 8)
    run_all(resident)
    expected = checkpoint.expected.token_ids
    for number in range(8):
        made = resident.pop_outputs(f"{number}")
        if number in (1, 4):
            assert made == expected[number][: len(made)]
        else:
            assert made == expected[number]


PLANTED = {
    "blocks are freed first block first": ("pool", "(held - 1 - step)", "step"),
    "a hit stays in the free queue": (
        "pool", "tl.store(s.ring + place, NONE, mask=is_hit & (refs == 0))", "free += 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new"), PLANTED.values(), ids=PLANTED.keys())
def test_a_mistake_is_found_at_the_next_fence(
    checkpoint: Checkpoint, module: str, old: str, new: str
) -> None:
    text = (FOLDER / f"{module}.py").read_text()
    assert text.count(old) == 1
    launch = Numpied(changed={module: text.replace(old, new)})
    resident, _ = make(checkpoint, "small", 5, launch)
    submit(resident, 0, NUM_PROMPTS)
    with pytest.raises(CheckFailedError, match="engine_equals_spec"):
        run_all(resident)


def test_what_it_lacks_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(SettingsError, match="one frame in flight and no drafts"):
        Resident(checkpoint.folder, Settings(max_frames_in_flight=2))
    resident, _ = make(checkpoint, "small", 1)
    with pytest.raises(RequestError, match="at its longest it needs"):
        resident.submit(Request("long", (1,) * 80, max_tokens=400))
