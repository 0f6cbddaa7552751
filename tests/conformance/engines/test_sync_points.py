"""The device loop: its tokens are right, and bugs are found at the next sync point."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.adapters import ADAPTERS
from engine_support.models import (
    EOS,
    MAX_TOKENS,
    Checkpoint,
    build_model,
    make_checkpoint,
    make_prompts,
    save_model,
    save_tokenizer,
)
from engine_support.storms import SMALL

from blockstep.conformance.engines.serving import CheckFailedError, ServingChecker
from blockstep.conformance.engines.sync_points import SyncPointChecker
from blockstep.impl.device import engine as device_engine
from blockstep.impl.device.launch import FOLDER, Numpied
from blockstep.impl.engine import LLM, SamplingParams, SettingsError
from blockstep.impl.engine.device_loop import Key, Resident
from blockstep.impl.engine.errors import EngineError
from blockstep.impl.engine.mirror import Mirror
from blockstep.impl.engine.model import Model
from blockstep.spec.vocabulary import FinishReason

PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 400, "block_size": 4, "max_model_len": 84},
    "small": {**SMALL, "max_num_batched_tokens": 16},
}
NUM_PROMPTS = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A layer with a window, and one without: two KV groups."""
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer: every byte is a token."""
    folder = save_model(build_model("qwen3", vocab_size=260), tmp_path_factory.mktemp("speaking"))
    save_tokenizer(folder)
    return folder


def load(checkpoint: Checkpoint, pool: str, steps: int, **more: Any) -> tuple[LLM, Resident]:
    settings: dict[str, Any] = {
        "scheduler": "device",
        "check": SyncPointChecker,
        **POOLS[pool],
        **more,
    }
    llm = LLM(checkpoint.folder, device="cpu", steps_per_fence=steps, **settings)
    assert llm._resident is not None
    return llm, llm._resident


def run_all(llm: LLM) -> None:
    while llm.has_unfinished_requests:
        llm.step()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("pool", POOLS)
def test_tokens_are_those_of_transformers(
    checkpoint: Checkpoint, pool: str, steps: int, frames: int
) -> None:
    more: dict[str, Any] = {"max_frames_in_flight": frames}
    llm, resident = load(checkpoint, pool, steps, **more)
    checker = llm.observer
    assert isinstance(checker, SyncPointChecker)
    made = llm.generate(make_prompts()[:NUM_PROMPTS], PARAMS)
    assert [one.token_ids for one in made] == checkpoint.expected.token_ids[:NUM_PROMPTS]
    host = LLM(checkpoint.folder, device="cpu", scheduler="host", **POOLS[pool], **more)
    assert made == host.generate(make_prompts()[:NUM_PROMPTS], PARAMS)
    stats = llm.get_stats()
    assert stats.prefix_cache_hits
    assert bool(stats.preemptions) == (pool == "small")
    assert checker.num_fences == resident.num_bursts
    assert checker.num_fences >= resident.engine.next_frame_id / steps
    assert checker.num_events > 3 * NUM_PROMPTS


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("pool", POOLS)
def test_layers_with_windows_have_block_tables_of_their_own(
    windows: Checkpoint, pool: str, frames: int
) -> None:
    more: dict[str, Any] = {"max_frames_in_flight": frames}
    if pool == "small":
        more["num_blocks"] = 24
    llm, resident = load(windows, pool, 4, **more)
    made = llm.generate(make_prompts()[:NUM_PROMPTS], PARAMS)
    assert [one.token_ids for one in made] == windows.expected.token_ids[:NUM_PROMPTS]
    assert len(llm.config.groups) == 2
    stats = llm.get_stats()
    assert stats.prefix_cache_hits
    assert bool(stats.preemptions) == (pool == "small")
    if pool == "roomy":
        assert any(key.phase == "step" for key in resident._graphs)


@pytest.mark.parametrize("frames", [1, 2])
def test_pure_decode_reads_nothing_from_the_device(checkpoint: Checkpoint, frames: int) -> None:
    llm, resident = load(checkpoint, "roomy", 4, max_frames_in_flight=frames)
    names = [llm.add_request(prompt, PARAMS) for prompt in make_prompts()[:4]]
    while not resident.width:
        llm.step()
    reads, planned = resident.num_reads, resident.engine.next_frame_id
    assert reads == planned
    llm.step()
    assert (resident.num_reads, resident.engine.next_frame_id) == (reads, planned + 4)
    run_all(llm)
    assert llm.pop_completion(names[0]).token_ids == checkpoint.expected.token_ids[0]


def test_a_plan_does_not_need_the_tokens_of_the_concurrent_pass(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU both run at once; here the plan comes first, and the other order gives the same."""
    params, more = replace(PARAMS, temperature=0.9), {"max_frames_in_flight": 2}
    prompts = make_prompts()[:NUM_PROMPTS]
    first, _ = load(checkpoint, "roomy", 7, **more)
    made = first.generate(prompts, params)
    num_steps = 0

    def run_pass_first(self: Resident, key: Key) -> None:
        nonlocal num_steps
        num_steps += 1
        now, following = self._memory.get_rows(key.width)
        tokens = self._pass(now, key)
        self._plan(following)
        self._take(tokens, now, following)

    monkeypatch.setattr(Resident, "_run_step", run_pass_first)
    second, _ = load(checkpoint, "roomy", 7, **more)
    assert second.generate(prompts, params) == made
    assert num_steps > 5


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("pool", POOLS)
def test_an_abort_between_bursts_changes_no_other_request(
    checkpoint: Checkpoint, pool: str, frames: int
) -> None:
    llm, _ = load(checkpoint, pool, 3, max_frames_in_flight=frames)
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


@pytest.fixture(scope="module")
def modules(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: ADAPTERS[name].save(checkpoint.model, root / name) for name in ("some", "whole")}


def draw_params() -> list[SamplingParams]:
    """Return greedy and sampled parameters, with each cut, with and without seeds and stops."""
    return [
        PARAMS,
        replace(PARAMS, temperature=8.0),
        replace(PARAMS, temperature=1.3, top_k=20, seed=7, max_tokens=5),
        replace(PARAMS, temperature=0.8, top_p=0.8, stop_token_ids=(3, 40, 41, 42, 43, 44)),
        replace(PARAMS, temperature=1.1, min_p=0.02, ignore_eos=True),
        replace(PARAMS, max_tokens=3),
        replace(PARAMS, temperature=1.0, top_k=30, top_p=0.95, min_p=0.01, seed=2**63 - 1),
    ]


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("pool", POOLS)
def test_every_output_equals_that_of_the_host(
    checkpoint: Checkpoint, modules: dict[str, Path], pool: str, frames: int
) -> None:
    prompts = make_prompts()[:28]
    params = [draw_params()[number % 7] for number in range(28)]
    adapter_names = [(None, "some", None, "whole")[number % 4] for number in range(28)]
    more: dict[str, Any] = {"max_frames_in_flight": frames, "lora_modules": modules}
    llm, resident = load(checkpoint, pool, 5, **more)
    made = llm.generate(prompts, params, adapter_names)
    host = LLM(checkpoint.folder, device="cpu", scheduler="host", **POOLS[pool], **more)
    assert made == host.generate(prompts, params, adapter_names)
    stats = llm.get_stats()
    assert stats.prefix_cache_hits
    assert bool(stats.preemptions) == (pool == "small")
    # Nothing was served step by step: plans and commits are those of bursts.
    assert resident.num_bursts > 3
    assert not llm._runner.batch.rows
    reasons = [one.finish_reason for one in made]
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(reasons)
    assert {EOS} < {one.token_ids[-1] for one in made if one.finish_reason is FinishReason.STOP}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts run on a copy of the state, as on a GPU."""
    monkeypatch.setattr(Mirror, "is_shared", False)


@pytest.mark.sampled(one_in=4)
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_bursts_on_a_copy_of_the_state_give_the_outputs_of_the_host(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    is_checked: bool,
    frames: int,
) -> None:
    """Requests arrive and leave between bursts, more than the first arrays have room for."""
    prompts, every = make_prompts(), draw_params()
    settings: dict[str, Any] = {
        **POOLS["small"], "max_frames_in_flight": frames, "device": "cpu", "max_num_seqs": 6,
        "policy": policy, "num_blocks": 30,
    }  # fmt: skip
    asked = [(prompts[number % 24], every[number % 7]) for number in range(72)]
    asked[40] = (asked[40][0], replace(PARAMS, stop_token_ids=tuple(range(90, 128))))
    host = LLM(checkpoint.folder, scheduler="host", **settings)
    llm = LLM(
        checkpoint.folder, scheduler="device", steps_per_fence=3,
        check=SyncPointChecker if is_checked else None, **settings,
    )  # fmt: skip
    resident = llm._resident
    assert resident is not None
    resident.runs_ahead = not is_checked
    first, names = resident.engine.inbox.dims, []
    launches: list[str] = []
    launch = resident._launch

    def note(kernel: str) -> None:
        launches.append(kernel)
        launch(kernel)

    monkeypatch.setattr(resident, "_launch", note)
    for number, (prompt, params) in enumerate(asked):
        names.append(llm.add_request(prompt, params, priority=number % 3))
        host.add_request(prompt, params, priority=number % 3)
        if number % 10 == 9:
            llm.abort(names[number - 2])
        if number < 12 or number > 50:
            llm.step()
    run_all(llm)
    run_all(host)
    for number, name in enumerate(names):
        made, expected = llm.pop_completion(name), host.pop_completion(name)
        is_gone = number % 10 == 7
        assert made.token_ids == expected.token_ids[: len(made.token_ids) if is_gone else None]
    grown = resident.engine.inbox.dims
    assert grown.slots > first.slots
    assert grown.stops > first.stops
    assert "sweep_kernel" in launches
    stats = llm.get_stats()
    assert stats.prefix_cache_hits
    assert stats.preemptions


def test_logits_that_are_not_finite_end_all_requests(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = load(checkpoint, "roomy", 3, max_frames_in_flight=2)
    compute = Model.compute_logits
    with monkeypatch.context() as patched:
        patched.setattr(Model, "compute_logits", lambda *args: compute(*args) * torch.nan)
        with pytest.raises(EngineError, match="logits are not finite"):
            llm.generate(make_prompts()[:3], PARAMS)
    made = llm.generate(make_prompts()[:3], PARAMS)
    assert [one.token_ids for one in made] == checkpoint.expected.token_ids[:3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("pool", POOLS)
def test_a_gpu_generates_in_bursts_what_it_generates_step_by_step(
    checkpoint: Checkpoint, modules: dict[str, Path], pool: str, frames: int, is_checked: bool
) -> None:
    prompts = make_prompts()[:28]
    params = [replace(draw_params()[number % 7], seed=number) for number in range(28)]
    adapter_names = [(None, "some", None, "whole")[number % 4] for number in range(28)]
    settings: dict[str, Any] = {
        **POOLS[pool], "device": "cuda", "max_frames_in_flight": frames, "lora_modules": modules,
        "max_num_seqs": 32,
    }  # fmt: skip
    host = LLM(checkpoint.folder, scheduler="host", **settings)
    expected = host.generate(prompts, params, adapter_names)
    llm = LLM(
        checkpoint.folder, scheduler="device", steps_per_fence=5,
        check=SyncPointChecker if is_checked else None, **settings,
    )  # fmt: skip
    for _ in range(2):  # the second time prefixes are cached, and graphs are there
        made = llm.generate(prompts, params, adapter_names)
        assert [one.token_ids for one in made] == [one.token_ids for one in expected]


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("fields", [{"logprobs": 2}, {"regex": "[ab]{5}"}])
def test_logprobs_and_grammars_are_served_step_by_step(
    speaking: Path, caplog: pytest.LogCaptureFixture, frames: int, fields: dict[str, Any]
) -> None:
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    params = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.8, seed=3)]
    params.append(SamplingParams(max_tokens=6, **fields))
    settings: dict[str, Any] = {"device": "cpu", "max_frames_in_flight": frames, "block_size": 4}
    host = LLM(speaking, scheduler="host", **settings)
    expected = host.generate(prompts, params)
    llm = LLM(speaking, scheduler="device", steps_per_fence=4, check=SyncPointChecker, **settings)
    resident = llm._resident
    assert resident is not None
    names = [llm.add_request(prompts[0], params[0])]
    llm.step()
    names += [llm.add_request(*asked) for asked in zip(prompts[1:], params[1:], strict=True)]
    bursts = resident.num_bursts
    while llm.is_live(names[2]):
        assert resident.num_bursts == bursts
        llm.step()
    run_all(llm)
    assert resident.num_bursts > bursts > 0
    made = [llm.pop_completion(name) for name in names]
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]
    # Products of other batches may round otherwise, on some processors.
    assert replace(made[2], logprobs=None) == replace(expected[2], logprobs=None)
    for one, other in zip(made[2].logprobs or (), expected[2].logprobs or (), strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    llm.generate(prompts[2], params[2])
    (record,) = caplog.records
    what = "log probabilities" if "logprobs" in fields else "a grammar"
    assert f"a request asks for {what}, so all requests are served step by step" in record.message


@pytest.mark.parametrize("frames", [1, 2])
def test_a_burst_launched_ahead_changes_no_output(checkpoint: Checkpoint, frames: int) -> None:
    """Requests arrive and are aborted while a burst runs, before the host reads its output."""
    prompts, params = make_prompts()[:16], [draw_params()[number % 7] for number in range(16)]
    settings: dict[str, Any] = {**POOLS["roomy"], "max_frames_in_flight": frames, "device": "cpu"}
    expected = LLM(checkpoint.folder, scheduler="host", **settings).generate(prompts, params)
    llm = LLM(checkpoint.folder, scheduler="device", steps_per_fence=2, **settings)
    resident = llm._resident
    assert resident is not None
    resident.runs_ahead = True
    names, num_ahead, looks = [], 0, 0
    waiting = [*zip(prompts, params, strict=True)]
    gone = None
    while waiting or llm.has_unfinished_requests:
        is_ahead = resident._ahead is not None
        num_ahead += is_ahead
        if waiting and (is_ahead or not llm.has_unfinished_requests):
            names.append(llm.add_request(*waiting.pop(0)))
            if is_ahead and gone is None:
                gone = names[-2]
                llm.abort(gone)
        elif is_ahead and num_ahead % 3 == 0:
            looks += llm.get_stats().prefix_cache_queries > 0
        llm.step()
    assert num_ahead > 5
    assert looks
    for name, one in zip(names, expected, strict=True):
        tokens = llm.pop_completion(name).token_ids
        assert tokens == (one.token_ids[: len(tokens)] if name == gone else one.token_ids)


def test_tokens_after_a_stop_token_are_dropped(checkpoint: Checkpoint) -> None:
    expected = checkpoint.expected.token_ids[0]
    params = replace(PARAMS, stop_token_ids=(expected[4],))
    llm, _ = load(checkpoint, "roomy", 8)
    made = llm.generate(make_prompts()[0], params)[0]
    assert made.token_ids == expected[: expected.index(expected[4]) + 1]
    assert made.finish_reason == "stop"


@pytest.mark.parametrize("frames", [1, 2])
def test_a_stop_string_ends_the_text_in_the_middle_of_a_burst(speaking: Path, frames: int) -> None:
    settings: dict[str, Any] = {"device": "cpu", "max_frames_in_flight": frames}
    host = LLM(speaking, scheduler="host", **settings)
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=5)
    text = host.generate("abc", params)[0].text
    params = replace(params, stop=(text[9:11],))
    prompts = ["abc", "another", "abc"]
    expected = host.generate(prompts, params)
    llm = LLM(speaking, scheduler="device", steps_per_fence=16, check=SyncPointChecker, **settings)
    made = llm.generate(prompts, params)
    for one, other in zip(made, expected, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert one.finish_reason == other.finish_reason
    assert len(made[0].text) == text.index(text[9:11]) < len(text)
    chunks = [*llm.stream("abc", params)]
    assert "".join(chunk.text for chunk in chunks) == made[0].text
    assert chunks[-1].finish_reason is FinishReason.STOP


def test_a_checker_of_every_step_disables_bursts(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint.folder, device="cpu", scheduler="device", check=ServingChecker)
    assert llm._resident is None


PLANTED = {
    "blocks are freed first block first": ("pool", "(last - 1 - step)", "step"),
    "a hit stays in the free queue": (
        "pool", "tl.store(s.ring + place, NONE, mask=is_read & (refs == 0))", "touched += 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new"), PLANTED.values(), ids=PLANTED.keys())
def test_a_bug_in_a_kernel_is_found_at_the_next_sync_point(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, module: str, old: str, new: str
) -> None:
    text = (FOLDER / f"{module}.py").read_text()
    assert text.count(old) == 1
    launch = Numpied(changed={module: text.replace(old, new)})
    monkeypatch.setattr(device_engine, "get_numpied", lambda: launch)
    llm, _ = load(checkpoint, "small", 5)
    with pytest.raises(CheckFailedError, match="engine_equals_spec"):
        llm.generate(make_prompts()[:NUM_PROMPTS], PARAMS)


def test_speculation_is_served_step_by_step(checkpoint: Checkpoint) -> None:
    drafts = {"spec_method": "ngram", "num_speculative_tokens": 2}
    llm, resident = load(checkpoint, "roomy", 4, **drafts)
    made = llm.generate(make_prompts()[:3], PARAMS)
    assert [one.token_ids for one in made] == checkpoint.expected.token_ids[:3]
    assert not resident.num_bursts


def test_steps_per_fence_must_be_at_least_1(checkpoint: Checkpoint) -> None:
    with pytest.raises(SettingsError, match="steps_per_fence = 0: must be an int of at least 1"):
        LLM(checkpoint.folder, steps_per_fence=0)
