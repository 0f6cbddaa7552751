"""Items that the vLLM adapter builds are copies, which a scheduler may change in place.

The tests run without vLLM.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blockstep.spec.vocabulary import MultiModalItem

pytest.importorskip("torch")
NAME = "blockstep.conformance.engines.adapters.vllm_items"
ITEMS = (MultiModalItem("cat", 1, 3), MultiModalItem("owl", 4, 2, (True, False)))


@dataclass
class Place:
    """A substitute for vLLM's `PlaceholderRange`."""

    offset: int
    length: int
    is_embed: Any


@dataclass
class Feature:
    """A substitute for vLLM's `MultiModalFeatureSpec`."""

    data: Any
    modality: str
    identifier: str
    mm_position: Place


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter's module, with these classes for those of vLLM."""
    inputs = ModuleType("vllm.multimodal.inputs")
    inputs.MultiModalFeatureSpec = Feature  # type: ignore[attr-defined]
    inputs.PlaceholderRange = Place  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.multimodal"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, inputs.__name__, inputs)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("counts_once", [False, True])
def test_hidden_features_are_not_counted(adapter: Any, counts_once: bool) -> None:
    """vLLM 0.12.0 counts the features of a request when it is made, and 0.16.0 when it is asked."""
    request = SimpleNamespace(mm_features=adapter.build_features(ITEMS))
    if counts_once:
        request.num_encoder_inputs, request.has_encoder_inputs = len(ITEMS), True
    adapter.hide_features(request)
    expected = {"num_encoder_inputs": 0, "has_encoder_inputs": False} if counts_once else {}
    assert vars(request) == {"mm_features": [], **expected}


def scribble(features: list[Any]) -> None:
    """Change everything that a scheduler may change in its items."""
    for feature in features:
        feature.identifier = "scribbled"
        feature.mm_position.offset += 7
        feature.mm_position.length += 7
        if feature.mm_position.is_embed is not None:
            feature.mm_position.is_embed.fill_(False)
    features.clear()


def test_a_scheduler_that_changes_items_affects_no_other_request(adapter: Any) -> None:
    """A session's chunk has its items shifted in place (upstream `_update_request_as_session`)."""
    scribble(adapter.build_features(ITEMS))
    assert adapter.read_features(adapter.build_features(ITEMS)) == ITEMS


def test_each_call_builds_its_own_copies_of_items(adapter: Any) -> None:
    first, second = adapter.build_features(ITEMS), adapter.build_features(ITEMS)
    scribble(first)
    assert adapter.read_features(second) == ITEMS
