"""Random walks with a store of victims' KV: what comes back is what was there.

The worker of the walk knows no rule of saving: it keeps what it is told to keep, and looks at every
slot that it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from saving_support import SavingWalk, SavingWorker

from blockstep.spec import Config
from blockstep.spec.copies import replace
from blockstep.spec.profiles import STRICT, Profile, Quirk
from blockstep.spec.requests import RequestState
from blockstep.spec.step import preemption, saving
from blockstep.spec.vocabulary import KVSave, Plan, RequestId, TokenIds

SITUATIONS = ("preempted", "saved", "saved with nulls", "not saved", "loaded", "lost", "closed")


@pytest.mark.parametrize("part", range(4))
def test_what_comes_back_is_what_was_there_and_everything_ends(part: int) -> None:
    seen = Counter[str]()
    for seed in range(part * 60, part * 60 + 60):
        walk = SavingWalk(seed)
        walk.run(90)
        seen += walk.seen
    assert [name for name in SITUATIONS if not seen[name]] == []


get_save, compute_num_saved = saving.get_save, saving.compute_num_saved


def saves_what_is_promised(computed: int, known: int, sizes: Sequence[int], least: int) -> int:
    return compute_num_saved(computed, max(computed, known), sizes, least)


def saves_begun_blocks(computed: int, known: int, sizes: Sequence[int], least: int) -> int:
    unit = max(sizes)
    return compute_num_saved(-(-computed // unit) * unit, -(-known // unit) * unit, sizes, least)


def saves_the_step_too(config: Config, victim: RequestState) -> KVSave | None:
    computed = max(victim.num_computed_tokens, victim.num_known_tokens)
    return get_save(config, replace(victim, num_computed_tokens=computed))


def saves_what_may_not_have_come(config: Config, victim: RequestState) -> KVSave | None:
    return get_save(config, replace(victim, is_unsettled=False))


def saves_the_last_blocks(config: Config, victim: RequestState) -> KVSave | None:
    save = get_save(config, victim)
    if save is None:
        return None
    counts = [*zip(victim.block_tables, map(len, save.block_ids), strict=True)]
    return replace(save, block_ids=tuple([table[-n:] if n else () for table, n in counts]))


UNFENCED = Profile("unfenced", frozenset({Quirk.FRAMES_HOLD_NO_BLOCKS}))
"""Victims may have rows in flight; without the quirk they wait for the answers."""
MISTAKES = (
    (saving, "compute_num_saved", saves_what_is_promised, UNFENCED),
    (saving, "compute_num_saved", saves_begun_blocks, STRICT),
    (preemption, "get_save", saves_the_step_too, STRICT),
    (preemption, "get_save", saves_what_may_not_have_come, UNFENCED),
    (preemption, "get_save", saves_the_last_blocks, STRICT),
)


def run_many(num_walks: int, profile: Profile = STRICT) -> None:
    for seed in range(num_walks):
        SavingWalk(seed, profile).run(90)


@pytest.mark.parametrize(("room", "name", "wrong", "profile"), MISTAKES)
def test_a_specification_that_saves_wrongly_is_seen_by_whoever_reads(
    monkeypatch: pytest.MonkeyPatch, room: Any, name: str, wrong: Any, profile: Profile
) -> None:
    monkeypatch.setattr(room, name, wrong)
    monkeypatch.setattr(SavingWalk, "check_plan", lambda *_: None)
    with pytest.raises((AssertionError, IndexError)):
        run_many(120, profile)


def test_who_saves_behind_the_rest_of_the_plan_saves_what_is_somebody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_late(worker: SavingWorker, plan: Plan) -> dict[RequestId, TokenIds]:
        sampled = run_in_order(worker, replace(plan, kv_saves=()))
        for save in plan.kv_saves:
            worker.save(save)
        return sampled

    run_in_order = SavingWorker.run
    monkeypatch.setattr(SavingWorker, "run", run_late)
    with pytest.raises(AssertionError):
        run_many(120)
