"""Drawn requests that continue the tokens of preempted requests and of rejected drafts.

Such a request would hit a block that should not be cached any more.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockstep.conformance.draw.actions import SeededDraw, abort, next_action
from blockstep.conformance.draw.presets import SMALL, Swarm
from blockstep.conformance.draw.requests import change_items, draw_continuation
from blockstep.conformance.draw.swarms import draw_swarm
from blockstep.conformance.draw.view import View
from blockstep.conformance.engine import EngineTraits, Safety
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Action, Answer, Program, Propose
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

CAT, DOG = v.MultiModalItem("cat", 1, 2), v.MultiModalItem("dog", 4, 1)
OTHER = v.Request("A", (1, 2, 3, 4, 5), adapter="x", cache_salt="y", items=(CAT, DOG))
TEXT = (*OTHER.prompt_token_ids, 6, 7)


class AtSafety(SpecEngine):
    traits = EngineTraits(equivalence=Safety())


def a_swarm(seed: str) -> Swarm:
    swarm = draw_swarm(SMALL, SeededDraw(seed), is_judged_alone=True)
    config = replace(swarm.config, num_blocks=40, block_size=2, max_model_len=40)
    return replace(swarm, config=config)


def test_a_continuation_differs_from_its_original_in_one_key_at_most() -> None:
    alike = 0
    for seed in range(60):
        draw = SeededDraw(f"twin {seed}")
        twin = draw_continuation(a_swarm(str(seed)), draw, "B", 3, [(OTHER, TEXT)])
        length = len(twin.prompt_token_ids)
        assert twin.request_id == "B"
        assert twin.prompt_token_ids[: length - 1] == TEXT[: length - 1]
        items = tuple(item for item in OTHER.items if item.offset + item.length <= length)
        different = [
            (twin.adapter, OTHER.adapter),
            (twin.cache_salt, OTHER.cache_salt),
            (twin.items, items),
        ]
        num_different = sum(mine != theirs for mine, theirs in different)
        assert num_different <= 1
        alike += not num_different
    assert 30 < alike < 60


def test_a_continuation_has_embeddings_if_the_original_has() -> None:
    other = replace(OTHER, items=(), prompt_embeds=(0, 1, 0, 0, 2))
    for seed in range(20):
        twin = draw_continuation(a_swarm(str(seed)), SeededDraw(str(seed)), "B", 3, [(other, TEXT)])
        assert twin.prompt_token_ids[:5] == OTHER.prompt_token_ids[: len(twin.prompt_token_ids)]
        assert len(twin.prompt_embeds) in (0, len(twin.prompt_token_ids))


def test_changed_items_are_swapped_or_moved() -> None:
    drawn = {change_items(SeededDraw(str(seed)), (CAT, DOG), 7) for seed in range(20)}
    moved = (CAT, v.MultiModalItem("dog", 5, 1))
    assert drawn == {moved, (v.MultiModalItem("dog", 1, 2), v.MultiModalItem("cat", 4, 1))}
    assert change_items(SeededDraw("1"), (), 7) == ()


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_an_exact_engine_gets_no_continuations(preset: str) -> None:
    for index in range(20):
        run, _, _ = play_episode(CheckOptions(preset=preset, seed=1), index, load_engine("host"))
        assert not run.preempted_texts
        assert not run.rejected_texts


CONFIG = v.Config(num_blocks=5, block_size=2, max_model_len=8, max_num_batched_tokens=8)
DRAFTING = replace(CONFIG, num_blocks=9, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2)


def test_tokens_of_preempted_requests_are_noted() -> None:
    first, second = v.Request("A", (1, 2, 3), 5), v.Request("B", (4, 5, 6), 5)
    step: tuple[Action, ...] = (v.Schedule(), Answer())
    actions = (v.Submit(first), v.Submit(second), *step, *step, *step)
    run, findings = run_program(Program(CONFIG, actions), AtSafety)
    assert findings == []
    ((request, text),) = run.preempted_texts
    assert request == second
    assert text[:3] == second.prompt_token_ids
    assert len(text) > 3  # with output tokens


@pytest.mark.parametrize(("num_right", "is_noted"), [(0, True), (1, True), (2, False)])
def test_tokens_with_rejected_drafts_are_noted_if_they_fill_a_block(
    num_right: int, is_noted: bool
) -> None:
    actions = (
        v.Submit(v.Request("A", (1, 2), 5)),
        v.Schedule(),
        Answer(),
        Propose(((2, num_right),)),
    )
    run, findings = run_program(Program(DRAFTING, (*actions, v.Schedule(), Answer())), AtSafety)
    assert findings == []
    assert len(run.rejected_texts) == is_noted
    for request, text in run.rejected_texts:
        row = run.last_plan.cached[0] if run.last_plan else None
        assert isinstance(row, v.CachedRow)
        assert text[:2] == request.prompt_token_ids
        assert text[3:] == row.draft_token_ids


def test_after_a_preemption_all_other_requests_are_sometimes_aborted() -> None:
    client = Client()
    client.live = {name: v.Request(name, (1, 2)) for name in "ABC"}
    rows = (v.CachedRow("A", False, ((),), None, 1, 1, 1),)
    client.last_plan = v.Plan(0, cached=rows, preempted_req_ids=("B",))
    swarm = replace(a_swarm("1"), token_seed=1, has_equals=False)
    # Without resets, since all requests are aborted for their sake, too.
    swarm = replace(swarm, features=swarm.features - {"reset"})
    view = View(swarm, client, seeks_aborts=True)
    drawn = [abort(view, SeededDraw(str(seed))) for seed in range(60)]
    assert v.Abort(("A", "C")) in drawn
    assert v.Abort(("A", "B", "C")) in drawn
    for other in (replace(swarm, token_seed=3), replace(swarm, has_equals=True)):
        kept = View(other, client, seeks_aborts=True)
        assert v.Abort(("A", "B", "C")) not in [abort(kept, SeededDraw(str(n))) for n in range(60)]
    assert next_action(view, SeededDraw("1"))
