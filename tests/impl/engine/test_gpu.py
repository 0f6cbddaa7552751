"""The GPU side of the engine on a stand-in: tokens, waits of the host, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.adapters import ADAPTERS
from engine_support.models import Checkpoint, generate

pytest.importorskip("triton", reason="Triton has no wheels but for Linux")
if torch.cuda.is_available():
    pytest.skip("there is a real one", allow_module_level=True)

from engine_support.standin import GPU, standin
from kernel_support.interpreter import speed_up

from blockstep.conformance.engines.sync_points import SyncPointChecker
from blockstep.impl.device import layout
from blockstep.impl.engine import LLM, SamplingParams
from blockstep.impl.engine.bursts import Summary
from blockstep.impl.engine.graphs import NUM_WARM_UPS, GraphedModel
from blockstep.impl.engine.host_to_device import send, to_device
from blockstep.impl.engine.journal import COLUMNS
from blockstep.impl.engine.model import Inputs, Model
from blockstep.kernels import stage_step

speed_up()
pytestmark = pytest.mark.sampled(one_in=5)  # an interpreted model: seconds each
NUM_TOKENS = 5
SETTINGS: dict[str, Any] = {
    "block_size": 4, "num_blocks": 60, "max_model_len": 84, "max_num_seqs": 5,
}  # fmt: skip
DRAWN = [
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=1),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.2, top_k=20, min_p=0.01, seed=2),
    SamplingParams(max_tokens=NUM_TOKENS),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.9, seed=3),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.5, logprobs=2, seed=4),
]
WAYS: dict[str, dict[str, Any]] = {
    "one after the other": {},
    "one ahead": {"max_frames_in_flight": 2},
    "in chunks": {"max_frames_in_flight": 2, "max_num_batched_tokens": 7},
    "n-gram drafts": {
        "max_frames_in_flight": 2, "spec_method": "ngram", "num_speculative_tokens": 2,
    },
    "draft model": {"spec_method": "draft_model", "num_speculative_tokens": 2},
}  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[GPU]:
    with standin() as gpu:
        yield gpu


@pytest.fixture
def short(prompts: list[list[int]]) -> list[int]:
    """Return the indices of the five shortest prompts of more than one token."""
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    return [row for row in by_length if len(prompts[row]) > 1][:5]


def serve(
    checkpoint: Checkpoint, prompts: list[list[int]], params: Any, **settings: Any
) -> tuple[LLM, list[tuple[int, ...]]]:
    if settings.get("spec_method") == "draft_model":
        settings["draft_model"] = checkpoint.draft_folder
    llm = LLM(checkpoint.folder, **{**SETTINGS, **settings})
    return llm, [one.token_ids for one in llm.generate(prompts, params)]


IN_CI = ("one after the other", "one ahead", "n-gram drafts")
"""The others take a minute on the stand-in; test_equality.py runs them without it."""


@pytest.mark.parametrize(
    "way", [way if way in IN_CI else pytest.param(way, marks=pytest.mark.soak) for way in WAYS]
)
def test_tokens_on_the_stand_in_equal_those_of_transformers(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int], way: str
) -> None:
    llm, made = serve(
        qwen3, [prompts[row] for row in short], SamplingParams(max_tokens=NUM_TOKENS),
        device="cuda", **WAYS[way],
    )  # fmt: skip
    assert made == [qwen3.expected.token_ids[row][:NUM_TOKENS] for row in short]
    # What n-gram drafts follow is more than a token; of a draft model the second pass is a decode.
    assert ("replay" in gpu.events) == (way != "n-gram drafts")
    for layer in llm._runner.model.cache.layers:
        assert not any(bool(half[0].any()) for half in layer), "a write to the null block"


def test_a_graph_has_the_tables_of_every_group(
    gpu: GPU, windows: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    llm, made = serve(
        windows, [prompts[row] for row in short], SamplingParams(max_tokens=NUM_TOKENS),
        device="cuda", **WAYS["one ahead"],
    )  # fmt: skip
    assert made == [windows.expected.token_ids[row][:NUM_TOKENS] for row in short]
    assert len(llm.config.groups) == 2
    assert "replay" in gpu.events


@pytest.mark.soak
def test_steps_on_the_device_have_the_tables_of_every_group(
    gpu: GPU, windows: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    llm, made = serve(
        windows, [prompts[row] for row in short[:3]], SamplingParams(max_tokens=NUM_TOKENS),
        device="cuda", scheduler="device", steps_per_fence=6, check=SyncPointChecker,
    )  # fmt: skip
    assert made == [windows.expected.token_ids[row][:NUM_TOKENS] for row in short[:3]]
    assert len(llm.config.groups) == 2
    assert "replay" in gpu.events


@pytest.mark.parametrize("frames", [1, 2])
def test_steps_on_the_device_are_replayed_as_whole_graphs(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int], frames: int
) -> None:
    llm = LLM(
        qwen3.folder, device="cuda", scheduler="device", steps_per_fence=6, check=SyncPointChecker,
        max_frames_in_flight=frames, **{**SETTINGS, "max_num_seqs": 3},
    )  # fmt: skip
    resident, params = llm._resident, SamplingParams(max_tokens=14)
    assert resident is not None
    # A step and the end of a burst have a graph per width; with two frames, its first plan too.
    phases = ["step", "end"] if frames == 1 else ["first", "step", "end"]
    assert {key.phase for key in resident._graphs} == set(phases)
    assert len(resident._graphs) == 3 * len(phases)
    # A step forks and joins: while it warms up, and once for all in its graph.
    forks = 3 * 2 * (NUM_WARM_UPS + 1) if frames == 2 else 0
    assert gpu.events.count("wait for a stream") == forks
    for row in short[:3]:
        llm.add_request(prompts[row], params)
    while not resident.width:
        llm.step()
    gpu.events.clear()
    planned, bursts = resident.engine.next_frame_id, resident.num_bursts
    while llm.has_unfinished_requests:
        llm.step()
    planned, bursts = resident.engine.next_frame_id - planned, resident.num_bursts - bursts
    made = [llm.pop_completion(f"request-{number}").token_ids for number in range(3)]
    assert made == [qwen3.expected.token_ids[row][:14] for row in short[:3]]
    runs = planned + bursts  # of two frames, the last is run by the end
    assert gpu.events.count("replay") == runs > 10
    assert not {"capture", "wait for a stream"} & {*gpu.events}


@pytest.mark.parametrize("frames", [1, 2])
def test_a_burst_of_decodes_waits_once_and_copies_only_new_tokens(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int], frames: int
) -> None:
    llm = LLM(
        qwen3.folder, device="cuda", scheduler="device", steps_per_fence=3,
        max_frames_in_flight=frames, **{**SETTINGS, "max_num_seqs": 2},
    )  # fmt: skip
    resident, params = llm._resident, SamplingParams(max_tokens=20)
    assert resident is not None
    mirror = resident.mirror
    for row in short[:2]:
        llm.add_request(prompts[row], params)
    while resident.num_bursts < 4:  # the next one was launched ahead of the reading of the third
        llm.step()
    whole = sum(array.nbytes for array in resident.engine.inbox.arrays)
    assert 2 * whole < mirror.num_bytes_sent < 2.1 * whole  # once for the capture, once after it
    assert mirror.num_bytes_read < whole / 10
    gpu.waits.clear()
    sent, read, bursts = mirror.num_bytes_sent, mirror.num_bytes_read, resident.num_bursts
    llm.step()
    llm.step()
    assert gpu.waits == ["synchronize"] * 2
    assert resident.num_bursts == bursts + 2
    control = 4 * layout.CONTROL_COLUMNS
    assert mirror.num_bytes_sent - sent == 2 * control
    lines = (3 + frames) * COLUMNS * resident.width
    assert mirror.num_bytes_read - read == 2 * 4 * (lines + len(Summary._fields))
    # A new request brings its own rows, and an abort a command.
    sent = mirror.num_bytes_sent
    llm.add_request(prompts[short[2]], params)
    llm.abort("request-0")
    while llm.has_unfinished_requests:
        llm.step()
    assert mirror.num_bytes_sent - sent < whole / 20
    for number in (1, 2):
        made = llm.pop_completion(f"request-{number}").token_ids
        expected = qwen3.expected.token_ids[short[number]]
        assert made[: len(expected)] == expected
    # The host's arrays are behind, until something asks for them.
    read = mirror.num_bytes_read
    assert llm.get_stats().prefix_cache_queries
    assert mirror.num_bytes_read - read == whole


@pytest.mark.parametrize("frames", [1, 2])
def test_bursts_generate_the_tokens_of_the_host_on_a_cpu(
    qwen3: Checkpoint, prompts: list[list[int]], short: list[int], tmp_path: Path, frames: int
) -> None:
    """Tokens are drawn, requests have adapters, and the pool is too small for all requests."""
    modules = {
        name: ADAPTERS[name].save(qwen3.model, tmp_path / name) for name in ("some", "whole")
    }
    chosen = [prompts[row] for row in (*short, *short[:3])]
    params = [replace(one, logprobs=None, max_tokens=9) for one in (*DRAWN, *DRAWN[:3])]
    adapters = ["some", None, None, "whole", None, None, "whole", None]
    settings = {
        **SETTINGS, "num_blocks": 14, "max_model_len": 48,
        "lora_modules": modules,
    }  # fmt: skip
    host = LLM(qwen3.folder, device="cpu", scheduler="host", **settings)
    expected = host.generate(chosen, params, adapters)
    with standin() as gpu:
        llm = LLM(
            qwen3.folder, device="cuda", scheduler="device", steps_per_fence=4,
            max_frames_in_flight=frames, check=SyncPointChecker, **settings,
        )  # fmt: skip
        made = llm.generate(chosen, params, adapters)
        stats = llm.get_stats()
        assert "replay" in gpu.events
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]
    assert stats.preemptions
    assert stats.prefix_cache_hits


def test_adapters_have_graphs_of_their_own(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int], tmp_path: Path
) -> None:
    modules = {
        name: ADAPTERS[name].save(qwen3.model, tmp_path / name) for name in ("some", "whole")
    }
    llm = LLM(qwen3.folder, device="cuda", lora_modules=modules, **SETTINGS)
    chosen = [prompts[row] for row in short[:3]]
    params = SamplingParams(max_tokens=NUM_TOKENS)
    gpu.waits.clear()
    made = [
        [one.token_ids for one in llm.generate(chosen, params, adapters)]
        for adapters in ([None] * 3, ["whole", None, "some"], [None] * 3)
    ]
    assert gpu.waits == ["synchronize"] * 3 * NUM_TOKENS
    expected = [qwen3.expected.token_ids[row][:NUM_TOKENS] for row in short[:3]]
    assert made[0] == made[2] == expected
    for place, name in ((0, "whole"), (2, "some")):
        with ADAPTERS[name].merged(qwen3.model) as model:
            (expected[place],) = generate(model, [chosen[place]], NUM_TOKENS).token_ids
    assert made[1] == expected
    model = llm._runner.model
    assert isinstance(model, GraphedModel)
    assert [*model.graphs] == [(size, has) for has in (False, True) for size in (8, 4, 2, 1)]


def test_drawn_tokens_equal_those_on_the_cpu(
    qwen3: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    chosen = [prompts[row] for row in short]
    _, expected = serve(qwen3, chosen, DRAWN, device="cpu")
    with standin():
        assert serve(qwen3, chosen, DRAWN, device="cuda", max_frames_in_flight=2)[1] == expected


def test_the_host_waits_only_for_tokens(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, top_k=9, top_p=0.9)] * 5
    llm = LLM(qwen3.folder, device="cuda", **SETTINGS)
    gpu.waits.clear()
    llm.generate([prompts[row] for row in short], params)
    assert gpu.waits == ["synchronize"] * NUM_TOKENS  # once per step: none ended early


def test_a_step_is_launched_before_the_previous_tokens_are_read(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    llm = LLM(qwen3.folder, device="cuda", **SETTINGS)
    assert llm.config.max_frames_in_flight == 2
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    gpu.events.clear()
    (made,) = llm.generate(prompts[short[0]], params)
    assert made.token_ids == qwen3.expected.token_ids[short[0]][:NUM_TOKENS]
    order = [event for event in gpu.events if event != "launch"]
    assert order == ["replay", *["wait", "replay"] * (NUM_TOKENS - 2), "wait", "wait"]


@pytest.mark.parametrize(
    "settings",
    [{"enable_forks": True}, WAYS["n-gram drafts"], {"device": "cpu"}],
)
def test_only_one_frame_is_in_flight_if_a_second_would_wait(
    gpu: GPU, qwen3: Checkpoint, settings: dict[str, Any]
) -> None:
    settings = {"device": "cuda", **SETTINGS, **settings, "max_frames_in_flight": None}
    assert LLM(qwen3.folder, **settings).config.max_frames_in_flight == 1


def test_graphs_stay_valid_when_device_tables_grow(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint
) -> None:
    """More rows run than at the start, and some requests are preempted."""
    monkeypatch.setattr("blockstep.impl.engine.input_batch.NUM_ROWS_FIRST", 4)
    prompts = [[2 + number, 3 * number + 2] for number in range(7)]
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    settings = {**SETTINGS, "num_blocks": 14, "max_model_len": 12, "max_num_seqs": 8}
    llm, made = serve(qwen3, prompts, params, device="cuda", **settings)
    assert llm.config.max_frames_in_flight == 2
    assert llm.get_stats().preemptions
    assert len(llm._runner.batch.arrays.token_ids) == 8
    assert made == serve(qwen3, prompts, params, device="cpu", **settings)[1]


def test_new_blocks_and_tokens_go_with_one_copy(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, prompts: list[list[int]],
    short: list[int],
) -> None:  # fmt: skip
    sent: list[int] = []

    def count(arrays: Any, device: Any, into: Any = None) -> Any:
        sent.append(len(arrays))
        return send(arrays, device, into)

    monkeypatch.setattr("blockstep.impl.engine.staging.send", count)
    llm = LLM(qwen3.folder, device="cuda", **SETTINGS)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    chosen = [prompts[row] for row in short]
    made = [one.token_ids for one in llm.generate(chosen, params)]
    assert len(sent) == 9
    assert max(sent) > min(sent)  # some steps have new blocks
    assert made == serve(qwen3, chosen, params, device="cpu")[1]


def test_all_graphs_are_captured_at_load_after_warm_up_in_one_pool(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "blockstep.impl.engine.graphs")
    llm = LLM(qwen3.folder, device="cuda", enable_prefix_caching=False, **SETTINGS)
    model = llm._runner.model
    assert isinstance(model, GraphedModel)
    assert [*model.graphs] == [(size, False) for size in (8, 4, 2, 1)]
    recorded = [graph.recorded for graph in model.graphs.values() if graph.recorded is not None]
    assert len(recorded) == 4
    assert len({one.pool() for one in recorded}) == 1
    warm_up = gpu.events[: gpu.events.index("capture")]
    assert set(warm_up) == {"launch"}
    assert gpu.events == [*warm_up, "capture"] * 4
    assert caplog.messages[-1] == "captured graph 4 of 4: 1 rows"
    gpu.events.clear()
    for count in (1, 3, 4, 1):
        made = llm.generate([prompts[row] for row in short[:count]], SamplingParams(max_tokens=3))
        assert [one.token_ids for one in made] == [
            qwen3.expected.token_ids[row][:3] for row in short[:count]
        ]
    assert gpu.events.count("replay") == 8
    assert "capture" not in gpu.events


def test_a_step_outside_of_a_burst_has_wider_tables_than_a_graph(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    """Device tables are padded to its lanes; the pool is too small for a burst."""
    prompt = prompts[short[0]]
    llm = LLM(
        qwen3.folder, device="cuda", scheduler="device", steps_per_fence=30,
        **{**SETTINGS, "num_blocks": 9, "max_num_seqs": 1},
    )  # fmt: skip
    gpu.events.clear()
    (made,) = llm.generate(prompt, SamplingParams(max_tokens=NUM_TOKENS))
    assert made.token_ids == qwen3.expected.token_ids[short[0]][:NUM_TOKENS]
    assert gpu.events.count("replay") == NUM_TOKENS - 1


def test_the_thread_of_a_store_does_not_spoil_a_capture(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint
) -> None:
    forward = Model.forward

    def disturb(model: Model, inputs: Inputs) -> Any:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(model.cache.kv.sum).result().shape == ()
        return forward(model, inputs)

    monkeypatch.setattr(Model, "forward", disturb)
    LLM(qwen3.folder, device="cuda", **SETTINGS)
    assert gpu.events.count("capture") == 4


# The stand-in itself: mistakes that it must not let pass.


def read_a_number(forward: Callable[[Model, Inputs], Any]) -> Callable[[Model, Inputs], Any]:
    def wrong(model: Model, inputs: Inputs) -> Any:
        assert inputs.seq_lens[0].item() > 0
        return forward(model, inputs)

    return wrong


def choose_by_a_mask(forward: Callable[[Model, Inputs], Any]) -> Callable[[Model, Inputs], Any]:
    def wrong(model: Model, inputs: Inputs) -> Any:
        assert len(inputs.slot_mapping[inputs.slot_mapping >= 0]) >= 0
        return forward(model, inputs)

    return wrong


def bring_a_number(forward: Callable[[Model, Inputs], Any]) -> Callable[[Model, Inputs], Any]:
    def wrong(model: Model, inputs: Inputs) -> Any:
        torch.tensor([1], device=inputs.positions.device)
        return forward(model, inputs)

    return wrong


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (read_a_number, "capturing: item"),
        (choose_by_a_mask, "capturing: __getitem__"),
        (bring_a_number, "capturing: tensor from pageable"),
    ],
)
def test_a_wait_inside_of_a_graph_is_an_error(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, plant: Any, found: str
) -> None:
    monkeypatch.setattr(Model, "forward", plant(Model.forward))
    with pytest.raises(RuntimeError, match=found):
        LLM(qwen3.folder, device="cuda", **SETTINGS)


def test_a_call_of_another_thread_spoils_a_global_capture(gpu: GPU) -> None:
    kept = torch.zeros(3, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        for mode in ("thread_local", "global"):
            with (
                (
                    pytest.raises(RuntimeError, match="CaptureInvalidated")
                    if mode == "global"
                    else nullcontext()
                ),
                torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode),
            ):
                error = pool.submit(kept.sum).exception()
                assert (error is not None) == (mode == "global")


@pytest.mark.parametrize("buffer", ["token_ids", "out_block_tables"])
def test_a_graph_buffer_that_is_not_filled_changes_tokens(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, prompts: list[list[int]],
    short: list[int], buffer: str,
) -> None:  # fmt: skip
    def fill_without_graph(tables: Any, given: Any, rows: Any, **named: Any) -> None:
        if len(rows) > 5:  # a decode, padded to 8
            if buffer == "token_ids":
                named = {name: named[name] for name in named if "new" in name}
            else:
                tables = tables.clone()
        stage_step(tables, given, rows, **named)

    monkeypatch.setattr("blockstep.impl.engine.staging.stage_step", fill_without_graph)
    chosen = [prompts[row] for row in short]
    _, made = serve(qwen3, chosen, SamplingParams(max_tokens=NUM_TOKENS), device="cuda")
    assert made != [qwen3.expected.token_ids[row][:NUM_TOKENS] for row in short]


def test_a_copy_from_pageable_memory_is_noticed(gpu: GPU) -> None:
    host = torch.arange(3)
    host.to("cuda", non_blocking=True)
    assert gpu.waits == ["to from pageable memory"]
    assert to_device(host.numpy(), "cuda").tolist() == [0, 1, 2]
    assert gpu.waits == ["to from pageable memory", "tolist"]


def test_mixing_host_and_device_tensors_is_an_error(gpu: GPU) -> None:
    host = torch.arange(3)
    device = host.to("cuda")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device: add"):
        host + device
    with pytest.raises(TypeError, match="copy it to the host first"):
        device.numpy()
    assert device.cpu().numpy().tolist() == [0, 1, 2]
    gpu.waits.clear()
    assert device[torch.tensor([1])].is_cuda
    assert gpu.waits == ["__getitem__ of host and device"]
