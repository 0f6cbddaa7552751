"""KV groups of a model: which layers share a block table, and which share memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_support.models import build_model, save_model

from blockstep.impl.engine.cache import PagedCache, get_block_bytes
from blockstep.impl.engine.config import ModelConfig, load_config
from blockstep.impl.engine.groups import LayerGroup, get_kv_groups, group_layers
from blockstep.spec.vocabulary import GroupKind, KVGroup

F, W = None, 7
LONG = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_config(save_model(build_model("llama"), tmp_path_factory.mktemp("llama")))


def with_windows(model: ModelConfig, *windows: int | None) -> ModelConfig:
    return replace(model, num_layers=len(windows), sliding_windows=windows)


def layers_of(groups: tuple[LayerGroup, ...]) -> list[tuple[int | None, tuple[int, ...]]]:
    return [(group.sliding_window, group.layers[0]) for group in groups]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((F, F, F), [(F, (0, 1, 2))]),
        ((W, W), [(W, (0, 1))]),
        ((F, W, F, W), [(F, (0, 2)), (W, (1, 3))]),
        ((W, F, F, F, F), [(W, (0,)), (F, (1,)), (F, (2,)), (F, (3,)), (F, (4,))]),
        ((W, W, F, W, W, F), [(W, (0, 3)), (W, (1, 4)), (F, (2, 5))]),
        ((F, F, W, W, W, W, W), [(F, (0, 1)), (W, (2, 5)), (W, (3, 6)), (W, (4,))]),
        ((F, F, F, W, W, W, W), [(F, (0, 1, 2)), (W, (3, 4, 5, 6))]),  # nearly as many of each
        ((5, W, F), [(5, (0,)), (W, (1,)), (F, (2,))]),
        ((F, LONG, LONG - 1), [(F, (0,)), (F, (1,)), (LONG - 1, (2,))]),  # as long as any text
    ],
)
def test_groups_have_as_many_layers_as_the_kind_with_the_fewest(
    model: ModelConfig,
    windows: tuple[int | None, ...],
    expected: list[tuple[int | None, tuple[int, ...]]],
) -> None:
    assert layers_of(group_layers([with_windows(model, *windows)], LONG)) == expected


def test_layers_may_all_share_one_table(model: ModelConfig) -> None:
    groups = group_layers([with_windows(model, F, W, 3)], LONG, one_for_all=True)
    assert layers_of(groups) == [(F, (0, 1, 2))]
    assert get_kv_groups(groups, 4) == ()


def test_a_draft_model_has_its_layers_in_the_same_groups(model: ModelConfig) -> None:
    draft = with_windows(model, F, W, F, 3)
    groups = group_layers([with_windows(model, F, W), draft], LONG)
    assert [(group.sliding_window, group.layers) for group in groups] == [
        (F, ((0,), (0, 2))),
        (W, ((1,), (1,))),
        (3, ((), (3,))),
    ]
    one = model.num_kv_heads * model.head_size * 2 * 4
    assert get_block_bytes([model, draft], groups, 4, torch.float32) == (1 + 2) * 4 * one


def test_the_scheduler_gets_the_windows(model: ModelConfig) -> None:
    groups = group_layers([with_windows(model, W, F)], LONG)
    assert get_kv_groups(groups, 4) == (
        KVGroup(GroupKind.SLIDING_WINDOW, 4, sliding_window=W),
        KVGroup(GroupKind.FULL, 4),
    )
    alone = group_layers([with_windows(model, W)], LONG)
    assert get_kv_groups(alone, 4) == (KVGroup(GroupKind.SLIDING_WINDOW, 4, sliding_window=W),)
    assert get_kv_groups(group_layers([with_windows(model, F)], LONG), 4) == ()


def test_layers_of_one_group_never_share_memory(model: ModelConfig) -> None:
    shape = with_windows(model, W, W, F, W, W, F)
    groups = [group.layers[0] for group in group_layers([shape], LONG)]
    cache = PagedCache(shape, groups, 3, 4, torch.float32, "cpu")
    keys = [layer[0].data_ptr() for layer in cache.layers]
    assert keys[:3] == keys[:1] * 3
    assert keys[3:] == keys[3:4] * 3
    assert keys[0] != keys[3]
    assert cache.group_of_layer == (0, 1, 2, 0, 1, 2)
    assert len({half.data_ptr() for layer in cache.layers for half in layer}) == 4
