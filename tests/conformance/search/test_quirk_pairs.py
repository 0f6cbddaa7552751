"""Pairs of quirks: under any two quirks of a release the specification agrees with itself.

A rule that wraps another may meet a state that only a second quirk makes. Then the specification
fails an assertion of its own, and a check of the release ends with exit 3.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import date
from itertools import combinations
from random import Random

import pytest
from episodes_support import play_episodes

from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.search.options import CheckOptions, get_wish, load
from blockstep.spec.profiles import QUIRKS, Quirk, get_profile

RELEASE = get_profile("vllm-0.19.1")
assert RELEASE is not None
PAIRS = tuple(combinations([quirk for quirk in Quirk if quirk in RELEASE.quirks], 2))
STORIES = {story.quirk: story for story in QUIRKS}
FEATURES_OF = {
    "adapters": ("adapters",),
    "drafts": ("drafts",),
    "encoder": ("encoder",),
    "flight": ("async",),
    "grammars": ("masks",),
    "groups": ("groups",),
    "sessions": ("sessions",),
    "states": ("groups",),
    "transfers": ("transfers",),
}
"""Features that a run needs for the quirks of a module, by module."""
SAMPLE_EVENTS = 150
SAMPLE_PAIRS = 16
SOAK_EVENTS = 5_000


def choose_options(pair: Iterable[Quirk], seed: int) -> CheckOptions:
    """Return options of a check under two quirks, with their features if a run can have all."""
    stories = [STORIES[quirk] for quirk in pair]
    quirks = {quirk for story in stories for quirk in (story.quirk, *story.upon)}
    profile = "+".join(sorted(quirks))
    themes = [story.change.__module__.rpartition(".")[2] for story in stories]
    features = {name for theme in themes for name in FEATURES_OF.get(theme, ())}
    plain = CheckOptions(engine="spec", profile=profile, seed=seed)
    asked = CheckOptions(
        engine="spec", profile=profile, seed=seed, with_features=tuple(sorted(features))
    )
    try:
        get_wish(asked)
    except UsageError:  # no run has both
        return plain
    return asked


def soak(pair: Iterable[Quirk], num_events: int, seed: int = 0) -> str:
    """Return the first finding in `num_events` events under two quirks, or ""."""
    options = choose_options(pair, seed)
    asked = {"profile": options.profile, "with_features": options.with_features}
    played = play_episodes(load(options), num_events, seed=seed, **asked)
    if played.first is None:
        return ""
    return f"{options.profile}, seed {seed}, episode {played.num_episodes - 1}: {played.first}"


def test_pairs_of_quirks_drawn_today() -> None:
    """Each day draws other pairs. `BLOCKSTEP_PAIRS_SEED` plays those of another day."""
    seed = int(os.environ.get("BLOCKSTEP_PAIRS_SEED", date.today().toordinal()))  # noqa: DTZ011
    drawn = Random(seed).sample(PAIRS, SAMPLE_PAIRS)
    failed = [text for pair in drawn if (text := soak(pair, SAMPLE_EVENTS, seed))]
    assert failed == [], f"BLOCKSTEP_PAIRS_SEED={seed}: {drawn}"


@pytest.mark.soak
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_every_pair_of_quirks(pair: tuple[Quirk, Quirk]) -> None:
    assert soak(pair, SOAK_EVENTS) == ""
