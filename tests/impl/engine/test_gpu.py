"""The GPU side of the engine on a stand-in: what it says, when it waits, and what graphs keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

from blockstep.conformance.engines.fences import FenceChecker
from blockstep.impl.engine import LLM, SamplingParams
from blockstep.impl.engine.graphs import NUM_WARM_UPS, GraphedModel
from blockstep.impl.engine.model import Inputs, Model
from blockstep.impl.engine.transfer import to_device

speed_up()
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
    """Which prompts are served: the five shortest that are no decode already."""
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    return [row for row in by_length if len(prompts[row]) > 1][:5]


def serve(
    checkpoint: Checkpoint, prompts: list[list[int]], params: Any, **settings: Any
) -> tuple[LLM, list[tuple[int, ...]]]:
    if settings.get("spec_method") == "draft_model":
        settings["draft_model"] = checkpoint.draft_folder
    llm = LLM(checkpoint.folder, **{**SETTINGS, **settings})
    return llm, [one.token_ids for one in llm.generate(prompts, params)]


@pytest.mark.parametrize("way", WAYS)
def test_it_says_what_transformers_says(
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
        assert not any(bool(half[0].any()) for half in layer), "somebody wrote to the null block"


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


def test_steps_stay_on_the_device_and_are_replayed_as_a_whole(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    llm = LLM(
        qwen3.folder, device="cuda", scheduler="device", steps_per_fence=6, check=FenceChecker,
        **SETTINGS,
    )  # fmt: skip
    resident, params = llm._resident, SamplingParams(max_tokens=14)
    assert resident is not None
    for row in short[:3]:
        llm.add_request(prompts[row], params)
    while not resident._get_width():
        llm.step()
    gpu.waits.clear()
    gpu.events.clear()
    frames = resident.engine.next_frame_id
    while llm.has_unfinished_requests:
        llm.step()
    steps = resident.engine.next_frame_id - frames
    made = [llm.pop_completion(f"request-{number}").token_ids for number in range(3)]
    assert made == [qwen3.expected.token_ids[row][:14] for row in short[:3]]
    assert gpu.events.count("capture") == 1
    assert gpu.events.count("replay") == steps - NUM_WARM_UPS > 5


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
        [one.token_ids for one in llm.generate(chosen, params, whose)]
        for whose in ([None] * 3, ["whole", None, "some"], [None] * 3)
    ]
    assert gpu.waits == ["tolist"] * 3 * NUM_TOKENS
    expected = [qwen3.expected.token_ids[row][:NUM_TOKENS] for row in short[:3]]
    assert made[0] == made[2] == expected
    for place, name in ((0, "whole"), (2, "some")):
        with ADAPTERS[name].merged(qwen3.model) as model:
            (expected[place],) = generate(model, [chosen[place]], NUM_TOKENS).token_ids
    assert made[1] == expected
    model = llm._runner.model
    assert isinstance(model, GraphedModel)
    assert [*model._graphs] == [(4, False), (4, True)]


def test_it_draws_what_the_cpu_draws(
    qwen3: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    chosen = [prompts[row] for row in short]
    _, expected = serve(qwen3, chosen, DRAWN, device="cpu")
    with standin():
        assert serve(qwen3, chosen, DRAWN, device="cuda", max_frames_in_flight=2)[1] == expected


def test_the_host_waits_for_tokens_and_for_nothing_else(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, top_k=9, top_p=0.9)] * 5
    llm = LLM(qwen3.folder, device="cuda", max_frames_in_flight=2, **SETTINGS)
    gpu.waits.clear()
    llm.generate([prompts[row] for row in short], params)
    assert gpu.waits == ["tolist"] * NUM_TOKENS  # once per step: none ended early


def test_a_graph_is_made_once_per_size_after_a_warm_up_and_in_one_memory(
    gpu: GPU, qwen3: Checkpoint, prompts: list[list[int]], short: list[int]
) -> None:
    llm = LLM(qwen3.folder, device="cuda", enable_prefix_caching=False, **SETTINGS)
    for count in (1, 3, 4, 1):
        made = llm.generate([prompts[row] for row in short[:count]], SamplingParams(max_tokens=3))
        assert [one.token_ids for one in made] == [
            qwen3.expected.token_ids[row][:3] for row in short[:count]
        ]
    model = llm._runner.model
    assert isinstance(model, GraphedModel)
    assert sorted(model._graphs) == [(1, False), (4, False)]
    assert len({graph.pool() for graph, _ in model._graphs.values()}) == 1
    beside = [event for event in gpu.events if event != "launch"]
    assert beside == ["capture", "replay", "replay", "capture", *["replay"] * 6]
    metadata, forward = 1, 2 * model.config.num_layers
    launches = gpu.events[: gpu.events.index("capture")].count("launch")
    assert launches == 2 * metadata + (1 + NUM_WARM_UPS) * forward


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
def test_a_wait_inside_of_a_graph_is_refused(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, plant: Any, found: str
) -> None:
    monkeypatch.setattr(Model, "forward", plant(Model.forward))
    llm = LLM(qwen3.folder, device="cuda", **SETTINGS)
    with pytest.raises(RuntimeError, match=found):
        llm.generate([[2, 3, 4]], SamplingParams(max_tokens=3))


def test_a_buffer_that_is_not_filled_shows(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, prompts: list[list[int]],
    short: list[int],
) -> None:  # fmt: skip
    fill = GraphedModel._fill

    def fill_once(model: GraphedModel, inputs: Inputs, size: int) -> None:
        if (size, False) not in model._graphs:
            fill(model, inputs, size)

    monkeypatch.setattr(GraphedModel, "_fill", fill_once)
    chosen = [prompts[row] for row in short]
    _, made = serve(qwen3, chosen, SamplingParams(max_tokens=NUM_TOKENS), device="cuda")
    assert made != [qwen3.expected.token_ids[row][:NUM_TOKENS] for row in short]


def test_a_copy_from_pageable_memory_is_noticed(gpu: GPU) -> None:
    host = torch.arange(3)
    host.to("cuda", non_blocking=True)
    assert gpu.waits == ["to from pageable memory"]
    assert to_device(host.numpy(), "cuda").tolist() == [0, 1, 2]
    assert gpu.waits == ["to from pageable memory", "tolist"]


def test_host_and_device_do_not_meet(gpu: GPU) -> None:
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
