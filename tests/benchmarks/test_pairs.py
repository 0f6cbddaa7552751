"""The page of feature pairs: legal pairs are drawn together, and each cell shows how often."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from benchmarks.pairs.__main__ import REACHED, play
from benchmarks.pairs.page import list_empty, list_wrong

from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.draw.presets import SMALL
from blockstep.conformance.draw.requests import draw_request
from blockstep.conformance.draw.swarms import draw_swarm
from blockstep.conformance.judge.legal import (
    EXAMPLES,
    UNDRAWN,
    find_problem,
    find_reason,
    list_legal,
)
from blockstep.conformance.judge.pairs import (
    NAMES,
    is_of_request,
    list_cells,
    list_of_config,
    name_pair,
)
from blockstep.conformance.protocol.feature_selection import FeatureSelection, make_wish
from blockstep.conformance.protocol.features import BY_NAME, UsageError

DRAWS_MAX = 60
"""Runs, at most, until two features that were both asked for are drawn together."""
ACTED = {"pause", "reset", "aborts", "hostile"}
"""Features of actions alone: a swarm has them, or does not."""
KEPT = json.loads(REACHED.read_text())


def test_no_legal_cell_of_the_page_is_empty() -> None:
    """If a cell is empty: draw the pair, run `make pairs`, or give a reason in `judge.legal`."""
    counts = KEPT["episodes"]
    assert list_empty(counts) == []
    assert list_wrong(counts) == []
    assert counts.keys() <= {*list_cells()}


def test_every_row_has_examples_that_the_specification_accepts() -> None:
    assert {*EXAMPLES} == {*NAMES}
    for name, examples in EXAMPLES.items():
        for example in examples:
            assert find_problem(example) == "", name


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("pins+priority", "a config has one value of policy"),
        ("forks+transfers", "enable_forks: cannot be used with kv_connector"),
        ("embeds+sessions",
         "request 'A': prompt_embeds must be left out of a session: it grows by"),
        ("abort@in_its_last_answer", "it is an event of its own, and no part of an answer"),
        ("items>prompt_embeds",
         "request 'A': prompt_embeds must be left out of a session: it grows"),
        ("grammar+sessions", ""),
        ("watermark+transfers", ""),
        ("read_ends@in_its_last_answer", ""),
        ("items>grammar", ""),
    ],
)  # fmt: skip
def test_the_specification_decides_what_is_legal(cell: str, reason: str) -> None:
    assert find_reason(cell).startswith(reason)
    assert bool(find_reason(cell)) is bool(reason)


def test_reasons_for_pairs_that_are_not_drawn_name_legal_cells() -> None:
    assert {*UNDRAWN} <= {*list_legal()}


def test_a_feature_that_an_engine_lacks_is_not_expected() -> None:
    legal = list_legal(absent={"sessions"}, always={"forks"})
    assert not [cell for cell in legal if "sessions" in cell or ">" in cell or "chunk@" in cell]
    assert not [cell for cell in legal if cell.startswith("offer@") or "transfers" in cell]
    assert "drafts+forks" in legal


def draws_both(one: str, other: str, wish: FeatureSelection, index: int) -> bool:
    """Return whether a run is drawn where one request can have both features at once."""
    draw = SeededDraw(f"pairs/{one}/{other}/{index}")
    swarm = draw_swarm(SMALL, draw, wish=wish)
    asked = list_of_config(swarm.config) | (ACTED & swarm.features)
    wanted = {one, other} - asked
    if not all(is_of_request(BY_NAME[name]) for name in wanted):
        return False
    requests = (draw_request(swarm, draw, f"R{number}", number) for number in range(12))
    return not wanted or any(
        all(BY_NAME[name].is_asked_by(request) for name in wanted) for request in requests
    )


def test_every_requested_legal_pair_of_features_is_drawn_together() -> None:
    apart = []
    for one, other in combinations(BY_NAME, 2):
        if find_reason(name_pair(one, other)):
            continue
        try:
            wish = make_wish((one, other), ())
        except UsageError as error:
            apart.append(f"{one}+{other}: {error}")
            continue
        if not any(draws_both(one, other, wish, index) for index in range(DRAWS_MAX)):
            apart.append(f"{one}+{other}")
    assert apart == []


@pytest.mark.soak
def test_a_run_leaves_no_legal_cell_empty() -> None:
    _, counts = play(150_000, seed=1)
    assert list_empty(counts) == []
    assert list_wrong(counts) == []
