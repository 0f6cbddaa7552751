"""Arms: answers do not depend on what must not matter; where they do, two configs say so."""

from __future__ import annotations

import pytest

from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.search.arms import ARMS, compare_arms, usable_arms
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import config_problems


@pytest.mark.parametrize("engine", ["host", "spec"])
def test_a_clean_engine_answers_alike_in_every_arm(engine: str) -> None:
    result = compare_arms(CheckOptions(seed=1), load_engine(engine), 40)
    assert result.contrast is None
    assert set(result.num_compared) == {arm.name for arm in ARMS}
    assert min(result.num_compared.values()) > 50


@pytest.mark.parametrize(
    ("exhibit", "arms"),
    [
        ("stale-key-after-reuse", {"caching", "chunks", "pool"}),
        ("lost-rollback", {"drafts", "async"}),
        ("salt-ignored", {"caching", "chunks", "pool"}),
    ],
)
def test_a_planted_defect_makes_two_arms_differ(exhibit: str, arms: set[str]) -> None:
    result = compare_arms(CheckOptions(), load_engine(f"museum:{exhibit}"), 300)
    assert result.contrast is not None
    assert result.contrast.arm in arms
    assert result.contrast.plain != result.contrast.other
    assert len(result.contrast.requests) <= 4


def test_what_an_engine_cannot_do_is_no_arm() -> None:
    class Plain(SpecEngine):
        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {"async", "drafts", "pipeline"}

    arms, not_tried = usable_arms(Plain)
    assert not_tried == ("drafts", "async", "pipeline")
    assert [arm.name for arm in arms] == ["caching", "pool", "chunks"]
    assert compare_arms(CheckOptions(), Plain, 5).contrast is None


def test_every_arm_makes_a_valid_config() -> None:
    from blockstep.conformance.search.arms import draw_workload

    for episode in range(50):
        swarm, _ = draw_workload(CheckOptions(), episode)
        for arm in ARMS:
            changed = arm.change(swarm.config)
            assert changed != swarm.config
            assert config_problems(changed) == ()
