"""A loop without a host: its tokens are right, and what it does between fences is found at them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine_support.models import MAX_TOKENS, Checkpoint, make_checkpoint, make_prompts
from engine_support.storms import SMALL

from blockstep.conformance.engines.fences import FenceChecker
from blockstep.conformance.engines.serving import CheckFailedError, ServingChecker
from blockstep.impl.device import engine as device_engine
from blockstep.impl.device.launch import FOLDER, Numpied
from blockstep.impl.engine import LLM, SamplingParams, SettingsError
from blockstep.impl.engine.resident import Resident

PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 400, "block_size": 4, "max_model_len": 84},
    "small": {**SMALL, "max_num_batched_tokens": 16},
}
NUM_PROMPTS = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def load(checkpoint: Checkpoint, pool: str, steps: int, **more: Any) -> tuple[LLM, Resident]:
    settings: dict[str, Any] = {"scheduler": "device", "check": FenceChecker, **POOLS[pool], **more}
    llm = LLM(checkpoint.folder, device="cpu", steps_per_fence=steps, **settings)
    assert llm._resident is not None
    return llm, llm._resident


def run_all(llm: LLM) -> None:
    while llm.has_unfinished_requests:
        llm.step()


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("pool", POOLS)
def test_tokens_are_those_of_transformers(checkpoint: Checkpoint, pool: str, steps: int) -> None:
    llm, resident = load(checkpoint, pool, steps)
    checker = llm.observer
    assert isinstance(checker, FenceChecker)
    made = llm.generate(make_prompts()[:NUM_PROMPTS], PARAMS)
    assert [one.token_ids for one in made] == checkpoint.expected.token_ids[:NUM_PROMPTS]
    host = LLM(checkpoint.folder, device="cpu", scheduler="host", **POOLS[pool])
    assert made == host.generate(make_prompts()[:NUM_PROMPTS], PARAMS)
    stats = llm.get_stats()
    assert stats.prefix_cache_hits
    assert bool(stats.preemptions) == (pool == "small")
    assert checker.num_fences == resident.num_bursts
    assert checker.num_fences >= resident.engine.next_frame_id / steps
    assert checker.num_events > 3 * NUM_PROMPTS


def test_pure_decode_reads_nothing_of_the_device(checkpoint: Checkpoint) -> None:
    llm, resident = load(checkpoint, "roomy", 4)
    names = [llm.add_request(prompt, PARAMS) for prompt in make_prompts()[:4]]
    while not resident._get_width():
        llm.step()
    reads, frames = resident.num_reads, resident.engine.next_frame_id
    assert reads == frames
    llm.step()
    assert (resident.num_reads, resident.engine.next_frame_id) == (reads, frames + 4)
    run_all(llm)
    assert llm.pop_completion(names[0]).token_ids == checkpoint.expected.token_ids[0]


@pytest.mark.parametrize("pool", POOLS)
def test_an_abort_between_bursts_takes_nobody_else_along(checkpoint: Checkpoint, pool: str) -> None:
    llm, _ = load(checkpoint, pool, 3)
    names = [llm.add_request(prompt, PARAMS) for prompt in make_prompts()[:6]]
    llm.step()
    llm.abort(names[1], names[4], "nobody")
    names += [llm.add_request(prompt, PARAMS) for prompt in make_prompts()[6:8]]
    run_all(llm)
    expected = checkpoint.expected.token_ids
    for number, name in enumerate(names):
        made = llm.pop_completion(name).token_ids
        if number in (1, 4):
            assert made == expected[number][: len(made)]
        else:
            assert made == expected[number]


@pytest.mark.parametrize("pool", POOLS)
def test_who_draws_is_served_among_others_step_by_step(checkpoint: Checkpoint, pool: str) -> None:
    drawn = replace(PARAMS, max_tokens=5, temperature=0.8, seed=3)
    prompts = make_prompts()[:NUM_PROMPTS]
    alone = LLM(checkpoint.folder, device="cpu", **POOLS[pool]).generate(prompts[3], drawn)
    llm, resident = load(checkpoint, pool, 3)
    names = [llm.add_request(prompt, PARAMS) for prompt in prompts[:5]]
    llm.step()
    bursts = resident.num_bursts
    among = llm.add_request(prompts[3], drawn)
    while llm.is_live(among):
        assert resident.num_bursts == bursts
        llm.step()
    assert llm.pop_completion(among).token_ids == alone[0].token_ids
    names += [llm.add_request(prompt, PARAMS) for prompt in prompts[5:]]
    run_all(llm)
    assert resident.num_bursts > bursts > 0
    made = [llm.pop_completion(name).token_ids for name in names]
    assert made == checkpoint.expected.token_ids[:NUM_PROMPTS]


def test_no_token_counts_behind_a_stop(checkpoint: Checkpoint) -> None:
    expected = checkpoint.expected.token_ids[0]
    params = replace(PARAMS, stop_token_ids=(expected[4],))
    llm, _ = load(checkpoint, "roomy", 8)
    made = llm.generate(make_prompts()[0], params)[0]
    assert made.token_ids == expected[: expected.index(expected[4]) + 1]
    assert made.finish_reason == "stop"


def test_who_looks_at_every_step_is_told_every_step(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint.folder, device="cpu", scheduler="device", check=ServingChecker)
    assert llm._resident is None


PLANTED = {
    "blocks are freed first block first": ("pool", "(held - 1 - step)", "step"),
    "a hit stays in the free queue": (
        "pool", "tl.store(s.ring + place, NONE, mask=is_hit & (refs == 0))", "free += 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new"), PLANTED.values(), ids=PLANTED.keys())
def test_a_mistake_is_found_at_the_next_fence(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, module: str, old: str, new: str
) -> None:
    text = (FOLDER / f"{module}.py").read_text()
    assert text.count(old) == 1
    launch = Numpied(changed={module: text.replace(old, new)})
    monkeypatch.setattr(device_engine, "get_numpied", lambda: launch)
    llm, _ = load(checkpoint, "small", 5)
    with pytest.raises(CheckFailedError, match="engine_equals_spec"):
        llm.generate(make_prompts()[:NUM_PROMPTS], PARAMS)


def test_what_it_lacks_goes_step_by_step(checkpoint: Checkpoint) -> None:
    llm, resident = load(checkpoint, "roomy", 4, max_frames_in_flight=2)
    made = llm.generate(make_prompts()[:3], PARAMS)
    assert [one.token_ids for one in made] == checkpoint.expected.token_ids[:3]
    assert not resident.num_bursts
    with pytest.raises(SettingsError, match="steps_per_fence = 0: must be an int of at least 1"):
        LLM(checkpoint.folder, steps_per_fence=0)
