"""Fixtures: four tiny checkpoints, and 64 prompts that share prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_support.models import (
    FAMILIES,
    Checkpoint,
    build_model,
    make_checkpoint,
    make_prompts,
    save_model,
    save_tokenizer,
)

SAMPLE = ("async-ngram",)
"""Storms that every family has as tests."""


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a checkpoint with one window layer and one full layer: two KV groups."""
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with a tokenizer; every byte is a token."""
    folder = save_model(build_model("qwen3", vocab_size=260), tmp_path_factory.mktemp("speaking"))
    save_tokenizer(folder)
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark storms with a draft model as a soak in all families but the first.

    Most storms of the last family are a soak too, since it differs from the first only in windows.
    """
    first, *_, last = FAMILIES
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        family, name = params.get("checkpoint", first), str(params.get("name", ""))
        is_like_another = family == last and name and name not in SAMPLE
        if is_like_another or (family != first and "draft-model" in name):
            item.add_marker(pytest.mark.soak)
