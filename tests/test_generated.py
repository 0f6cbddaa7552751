"""Pages that are built from data: each is built and shows its data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs import generated
from docs.tour import list_order

from blockstep.conformance.museum import EXHIBITS
from blockstep.spec import core

DOCS = Path(__file__).resolve().parents[1] / "docs"


FACTS = {
    "commands": ("### blockstep check\n", "### blockstep vectors fill\n", "- `--engine <str>`: "),
    "commands and engines": ("| `blockstep validate TRACE` | works |",),
    "coverage": ("| **all** |", "Run: `python -m benchmarks.coverage` on 20"),
    "findings": ("| *events played* |", "#43569", "config    num_blocks="),
    "laws": ("Run of 20", "## Rules of vLLM 0.19.1", "crosshair-tool"),
    "scheduler churn": ("**mixed**",),
    "scheduler groups": ("**window**", "**recurrent**"),
    "scheduler other": ("**decode**",),
    "scheduler goals": ("| decode, 1,024 running, arrays | at least 100x |",),
    "scheduler profile-churn": ("a step under the profiler",),
    "scheduler profile-steady": ("a step under the profiler",),
    "scheduler steady": ("**decode**",),
    "scheduler trace": ("all 4,677 steps",),
    "seeded bugs": (
        "| leak-on-abort | an aborted request",
        "| exact | safety | safety, state",
    ),
    "mutation": ("## Scores", "| the specification |", "## Survivors"),
    "pairs": ("Run of 20", "## Features and settings"),
    "picture of a block": ("<svg ", "free, cached"),
    "picture of a step": ("<svg ", "Commit: tokens"),
    "picture of steps": ("<svg ", "ours, apply", "vLLM 0.33.0"),
    "picture of equivalences": ("<svg ", "renamed"),
    "quirks": ("### unwritten_keys_stay", "## Profiles", "- vllm-0.11.0: "),
    "tour": ("## core.requests", "Features: `begins`, `closes`.", "- lora: `gates`."),
    "worlds": (
        "| loop | 8 | 11 | 21 | 5 |",
        "| unwritten_keys_stay |",
        "forward-frees 3 (free_queue)",
    ),
    "vocabulary": ("# Vocabulary", "max_num_batched_tokens"),
}
"""Some text that each page must contain."""


@pytest.mark.parametrize("name", FACTS)
def test_a_page_is_built_and_has_its_data(name: str) -> None:
    page = generated.PAGES[name]()
    assert [fact for fact in FACTS[name] if fact not in page] == []


def test_each_generator_has_one_stub_and_fills_all_marks() -> None:
    assert generated.PAGES.keys() - FACTS.keys() == {"fields"}  # in test_each_field.py
    marks = [
        mark for path in DOCS.rglob("*.md") for mark in generated.MARK.findall(path.read_text())
    ]
    assert sorted(marks) == sorted(generated.PAGES)
    assert "generated:" not in generated.put_pages("# A\n\n<!-- generated: pairs -->\n")
    with pytest.raises(KeyError):
        generated.put_pages("<!-- generated: nothing -->")


def test_every_seeded_bug_is_on_the_page() -> None:
    rows = re.findall(r"^\| ([\w-]+) \|", generated.PAGES["seeded bugs"](), re.MULTILINE)
    assert rows[1:] == list(EXHIBITS)


def test_the_tour_has_every_module_of_the_core_once() -> None:
    names = [file.stem for file in Path(core.__path__[0]).glob("[!_]*.py")]
    assert sorted(list_order()) == sorted(names)
