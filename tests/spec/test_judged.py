"""The specification checked alone: random programs of each feature violate no property.

Both sides of a check are the specification, so there are no divergences. A mistake in a rule is
found by a property check or by the witness worker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.copies import replace
from blockstep.spec.features import forks, offload, pins, prefill_cadence
from blockstep.spec.features.encoder import cache
from blockstep.spec.features.groups.kinds import compute_num_skipped_blocks
from blockstep.spec.features.kv_transfer import transfers
from blockstep.spec.vocabulary import NULL_BLOCK, Status

pytestmark = pytest.mark.spec_alone
FEATURES = (
    "cadence",
    "encoder",
    "forks",
    "groups",
    "masks",
    "pins",
    "sessions",
    "states",
    "tiers",
    "transfers",
)


@pytest.fixture(autouse=True)
def _asks_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every property check at every step, although no divergence occurs."""
    always = property(lambda _run: True, lambda _run, _value: None)
    monkeypatch.setattr(LockStep, "asks_all", always)


def judge(preset: str, seed: int, max_events: int, *features: str) -> str:
    """Return the name of the check of the first finding, or ""."""
    options = CheckOptions(
        "spec", preset=preset, seed=seed, max_events=max_events, with_features=features
    )
    first = check(options, shrinks=False).first
    return "" if first is None else first.sentence


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_the_specification_keeps_every_property(preset: str, feature: str) -> None:
    assert judge(preset, 3, 1_500, feature) == ""


@pytest.mark.soak
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_the_specification_keeps_every_property_in_long_runs(preset: str, feature: str) -> None:
    assert judge(preset, 4, 20_000, feature) == ""


# Functions with a mistake, and the originals that they call.

get_save, compute_num_saved = offload.get_save, offload.compute_num_saved
hold_ended = transfers.hold_ended


def shares_in_findable_blocks(group: Any, holding: Any, num_shared: int) -> bool:
    first, end = compute_num_skipped_blocks(group, num_shared), -(-num_shared // group.block_size)
    return NULL_BLOCK not in holding.block_table[first:end]


def shares_what_windows_left(group: Any, holding: Any, num_shared: int) -> bool:
    is_within = num_shared % group.block_size > 0
    return not is_within or num_shared // group.block_size >= holding.num_cached_blocks


def takes_all_for_common(mine: Any, theirs: Any) -> int:
    return min(len(mine), len(theirs))


def saves_begun_blocks(computed: int, known: int, sizes: Any, least: int) -> int:
    unit = max(sizes)
    return compute_num_saved(-(-computed // unit) * unit, -(-known // unit) * unit, sizes, least)


def saves_the_step_too(config: Any, victim: Any) -> Any:
    computed = max(victim.num_computed_tokens, victim.num_known_tokens)
    return get_save(config, replace(victim, num_computed_tokens=computed))


def saves_the_last_blocks(config: Any, victim: Any) -> Any:
    save = get_save(config, victim)
    if save is None:
        return None
    counts = [*zip(victim.block_tables, map(len, save.block_ids), strict=True)]
    return replace(save, block_ids=tuple([table[-n:] if n else () for table, n in counts]))


def holds_nothing(before: Any, request_id: str, tables: Any) -> Any:
    del tables
    return hold_ended(before, request_id, ())


def asks_no_token(step: Any, request: Any) -> bool:
    del step
    return not request.is_prefill_chunk


def is_waiting_prompt(request: Any, num_computed: int) -> bool:
    is_running = request.status is Status.RUNNING
    return not is_running and num_computed < request.num_known_tokens - 1


MISTAKES: list[tuple[Any, str, Callable[..., Any], str, int, tuple[str, ...]]] = [
    (forks, "compute_num_copies", lambda *_: 0, "tiny", 3, ("forks",)),
    (forks, "is_shareable", shares_in_findable_blocks, "tiny", 3, ("forks",)),
    (forks, "is_shareable", shares_what_windows_left, "tiny", 1, ("forks", "window")),
    (forks, "count_common_tokens", takes_all_for_common, "small", 3, ("forks",)),
    (offload, "compute_num_saved", saves_begun_blocks, "tiny", 3, ("tiers",)),
    (offload, "get_save", saves_the_step_too, "tiny", 3, ("tiers",)),
    (offload, "get_save", saves_the_last_blocks, "tiny", 3, ("tiers",)),
    (transfers, "compute_num_valid", lambda *_: None, "tiny", 3, ("transfers",)),
    (transfers, "hold_ended", holds_nothing, "tiny", 3, ("transfers",)),
    (pins, "is_expired", lambda *_: False, "tiny", 3, ("pins",)),
    (pins, "get_findable_tables", lambda request: request.block_tables, "tiny", 3, ("pins",)),
    (cache, "let_go", lambda kept, *_: kept, "tiny", 3, ("encoder",)),
    (cache, "evict_for", lambda kept, _: kept, "tiny", 3, ("encoder",)),
    (prefill_cadence, "can_decode", lambda *_: False, "tiny", 3, ("cadence",)),
    (prefill_cadence, "can_decode", lambda *_: True, "tiny", 3, ("cadence",)),
    (prefill_cadence, "can_decode", asks_no_token, "tiny", 3, ("cadence", "async")),
    (prefill_cadence, "is_prompt", is_waiting_prompt, "tiny", 3, ("cadence",)),
    (prefill_cadence, "computes_prompt", lambda *_: False, "tiny", 3, ("cadence",)),
]
"""Module, function, its replacement, and preset, seed and features of a run that finds it."""


def find_users(original: object, name: str) -> Iterator[Any]:
    """Yield the modules of the specification that import this function."""
    for module_name, module in [*sys.modules.items()]:
        if module_name.startswith("blockstep.spec") and getattr(module, name, None) is original:
            yield module


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("room", "name", "wrong", "preset", "seed", "features"),
    MISTAKES,
    ids=[f"{number}-{name}" for number, (_, name, *_) in enumerate(MISTAKES)],
)
def test_a_mistake_in_a_rule_is_found(
    monkeypatch: pytest.MonkeyPatch,
    room: Any,
    name: str,
    wrong: Callable[..., Any],
    preset: str,
    seed: int,
    features: tuple[str, ...],
) -> None:
    for user in find_users(getattr(room, name), name):
        monkeypatch.setattr(user, name, wrong)
    assert judge(preset, seed, 20_000, *features) not in ("", "engine_equals_spec")
