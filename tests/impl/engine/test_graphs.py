"""CUDA graphs: batch sizes and padding, tested without a GPU as far as possible."""

from __future__ import annotations

import pytest
import torch
from engine_support.models import MAX_TOKENS, Checkpoint

from blockstep.impl.engine import LLM, SamplingParams
from blockstep.impl.engine.graphs import GraphedModel, get_graph_sizes
from blockstep.impl.engine.model import Model


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 16]),
        (24, [1, 2, 4, 8, 16, 24]),
        (65, [1, 2, 4, *range(8, 65, 8), 80]),
        (130, [1, 2, 4, *range(8, 65, 8), 80, 96, 112, 128, 160]),
    ],
)
def test_graph_sizes_cover_every_batch_size(max_num_seqs: int, sizes: list[int]) -> None:
    assert get_graph_sizes(max_num_seqs) == sizes
    assert sizes[-1] >= max_num_seqs


def with_graphs(model: Model) -> GraphedModel:
    num_groups = 1 + max(model.cache.group_of_layer)
    return GraphedModel(model.config, model.weights, model.cache, 64, 8, num_groups)


@pytest.mark.parametrize("name", ["qwen3", "windows"])
def test_padding_rows_read_the_null_block_and_write_nothing(
    request: pytest.FixtureRequest, name: str
) -> None:
    folder = request.getfixturevalue(name).folder
    llm = LLM(folder, block_size=4, max_model_len=64)
    model = llm._runner.model
    graphs = with_graphs(model)
    graph = graphs.find_graph(3, has_adapters=False)
    assert graph is not None
    assert graph.size == 4
    filled = graph.inputs
    filled.slot_mapping.fill_(77)
    filled.block_tables.fill_(9)
    filled.seq_lens.fill_(33)
    llm.generate([[2, 3, 4, 5, 6], [7, 8]], SamplingParams(max_tokens=2, ignore_eos=True))
    rows = list(llm._runner.batch.rows.values())
    inputs = llm._runner.batch.build_inputs(rows, [5, 2], [6, 3])
    graphs._fill(inputs, filled)
    assert len(filled.slot_mapping) == len(llm.config.kv_groups)
    for slots, given in zip(filled.slot_mapping, inputs.slot_mapping, strict=True):
        assert slots.tolist() == [*given.tolist(), -1, -1]
    assert filled.seq_lens.tolist() == [6, 3, 1, 1]
    assert filled.block_tables[:, 2:].unique().tolist() == [0]
    assert filled.token_ids.tolist() == [*inputs.token_ids.tolist(), 0, 0]
    padded = Model.forward(model, filled)
    alone = Model.forward(model, inputs)
    torch.testing.assert_close(padded[:2], alone, rtol=1e-4, atol=1e-4)


def test_only_batches_up_to_the_largest_size_have_a_graph(qwen3: Checkpoint) -> None:
    graphs = with_graphs(LLM(qwen3.folder, block_size=4, max_model_len=64)._runner.model)
    found = [graphs.find_graph(count, has_adapters=True) for count in (3, 8, 9)]
    assert [None if one is None else one.size for one in found] == [4, 8, None]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_generates_the_tokens_of_the_cpu(
    checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    llm = LLM(checkpoint.folder, device="cuda")
    made = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    assert [one.token_ids for one in made] == checkpoint.expected.token_ids
