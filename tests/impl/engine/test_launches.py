"""Number of launches of a decode, counted on a stand-in for a GPU: kernels and torch operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_support.models import Checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton", reason="Triton has no wheels but for Linux")
if torch.cuda.is_available():
    pytest.skip("the stand-in is for machines without a GPU", allow_module_level=True)

from engine_support import standin
from kernel_support.interpreter import speed_up

from blockstep.impl.engine import LLM, SamplingParams
from blockstep.impl.engine.device_loop import Key
from blockstep.impl.engine.model import Model

speed_up()


class Launches(TorchDispatchMode):  # type: ignore[misc]
    """The names of operations that would run on the device, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and not func.name().startswith("aten::empty"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def count_launches() -> Iterator[list[str]]:
    """Yield a list that each launch inside the `with` extends."""
    launch = standin.launch

    def named(call: Any, executor: Any, *args: Any, **named: Any) -> None:
        launches.names.append(executor.fn.__name__)
        with _disable_current_modes():  # the interpreter works on tensors, too
            launch(call, executor, *args, **named)

    with patch.object(standin, "launch", named), Launches() as launches:
        yield launches.names


LAYER = [
    "norm_kernel", "aten::mm", "rotate_kernel", "attention_kernel", "aten::mm",
    "norm_kernel", "aten::mm", "gate_kernel", "aten::mm",
]  # fmt: skip


LAYER_OF_FEW = [
    "norm_kernel", "product_kernel", "rotate_kernel", "attention_kernel", "product_kernel",
    "norm_kernel", "product_kernel", "product_kernel",
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "layer"), [("float32", LAYER), ("float16", LAYER_OF_FEW)], ids=["nine", "eight"]
)
@pytest.mark.parametrize("name", ["qwen3", "windows"])
def test_a_layer_is_nine_launches_or_eight_for_few_16_bit_rows(
    request: pytest.FixtureRequest, name: str, dtype: str, layer: list[str]
) -> None:
    """One model has norms of heads, the other has biases and two KV groups.

    Attention is planned once per window.
    """
    checkpoint: Checkpoint = request.getfixturevalue(name)
    with standin.standin():
        llm = LLM(
            checkpoint.folder, device="cuda", block_size=4, num_blocks=30, max_model_len=84,
            max_num_seqs=4, dtype=dtype,
        )  # fmt: skip
        llm.generate([[2, 3, 4, 5, 6], [7, 8]], SamplingParams(max_tokens=2, ignore_eos=True))
        batch, model = llm._runner.batch, llm._runner.model
        inputs = batch.build_inputs(list(batch.rows.values()), [5, 2], [6, 3])
        with count_launches() as names:
            Model.forward(model, inputs)
    products = [one.replace("aten::addmm", "aten::mm") for one in names]
    assert products.count("plan_kernel") == len(set(model.config.sliding_windows))
    others = [one for one in products if one != "plan_kernel"]
    assert others == ["aten::index.Tensor", *layer * model.config.num_layers, "norm_kernel"]


def test_a_copy_is_counted() -> None:
    """A negative control: extra copies and conversions are counted."""
    with standin.standin(), count_launches() as names:
        tensor = torch.zeros(2, 4, device="cuda")
        torch.cat((tensor, tensor[:, ::2].contiguous()), dim=1).float().add_(1)
    assert names == ["aten::zeros", "aten::clone", "aten::cat", "aten::add_.Tensor"]


def load(checkpoint: Checkpoint, **settings: Any) -> LLM:
    """Return an engine for at most four requests that has served two."""
    llm = LLM(
        checkpoint.folder, device="cuda", block_size=4, num_blocks=30, max_model_len=84,
        max_num_seqs=4, **settings,
    )  # fmt: skip
    llm.generate([[2, 3, 4, 5, 6], [7, 8]], SamplingParams(max_tokens=2, ignore_eos=True))
    return llm


SAMPLING = ["aten::linear", "scan_kernel", "choose_kernel"]


@pytest.mark.parametrize("frames", [1, 2])
def test_a_device_step_is_three_launches_besides_model_and_sampler(
    monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, frames: int
) -> None:
    """With two frames in flight, the first two run during the pass, on another stream."""
    with standin.standin():
        llm = load(qwen3, scheduler="device", max_frames_in_flight=frames)
        resident = llm._resident
        assert resident is not None
        hidden = torch.zeros(4, llm._runner.model.config.hidden_size, device="cuda")
        monkeypatch.setattr(Model, "forward", lambda model, inputs: hidden)
        with torch.inference_mode():
            resident._run_first(Key("first", 4, False))
            with count_launches() as names:
                resident._run_step(Key("step", 4, False))
    assert names == ["loop_kernel", "rows_kernel", *SAMPLING, "tokens_kernel"]


def test_a_burst_ends_with_two_launches_per_frame(
    monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint
) -> None:
    with standin.standin():
        llm = load(qwen3, scheduler="device", max_frames_in_flight=2)
        resident = llm._resident
        assert resident is not None
        hidden = torch.zeros(4, llm._runner.model.config.hidden_size, device="cuda")
        monkeypatch.setattr(Model, "forward", lambda model, inputs: hidden)
        with count_launches() as names, torch.inference_mode():
            resident._run_first(Key("first", 4, False))
            resident._run_end(Key("end", 4, False))
    first, end = ["loop_kernel", "rows_kernel"], ["settle_kernel", "end_kernel"]
    assert names == [*first, *SAMPLING, "tokens_kernel", *end, *end]


def test_a_host_decode_is_two_launches_besides_the_model(
    monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint
) -> None:
    """The step also has two copies: of numbers to the device, and of tokens to the host."""
    replay, names = standin.Graph.replay, list[str]()

    def named(graph: standin.Graph) -> None:
        names.append("replay")
        with _disable_current_modes():
            replay(graph)

    monkeypatch.setattr(standin.Graph, "replay", named)
    with standin.standin():
        llm = load(qwen3, scheduler="host", max_frames_in_flight=2)
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        for prompt in ([2, 3, 4, 5, 6], [7, 8, 9]):  # one of them fills a block in the second step
            llm.add_request(prompt, params)
        llm.step()
        for _ in range(3):
            with count_launches() as names:
                llm.step()
            kept = names.index("keep_kernel") + 1
            assert names[:kept] == [
                "aten::copy_",
                "stage_kernel",
                "replay",
                *SAMPLING,
                "keep_kernel",
            ]
            home = {"aten::clone", "aten::fill_.Scalar", "aten::copy_"}  # one copy of the stand-in
            assert {*names[kept:]} == home
