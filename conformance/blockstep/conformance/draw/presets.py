"""Presets: the same actions at three sizes, and the swarm of a run.

A run never uses a preset as it is. It draws a configuration from its seed and switches whole
features off: some states are reached only if other features are absent (`draw.swarms`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from blockstep.conformance.protocol.feature import Feature
from blockstep.conformance.protocol.features import DRAFTS
from blockstep.spec.vocabulary import Config, SpecMethod


class Habit(StrEnum):
    """Habit of the simulated model runner of a swarm."""

    LATE_COMMIT = "late_commit"
    FULL_PIPELINE = "full_pipeline"
    """Commits wait until no further plan may be in flight."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Bounds within which a swarm is drawn; every pair is (least, most)."""

    name: str
    block_size: tuple[int, int]
    usable_blocks: tuple[int, int]
    max_num_seqs: tuple[int, int]
    max_num_batched_tokens: tuple[int, int]
    max_model_len: tuple[int, int]
    max_output: tuple[int, int]
    num_requests_max: int
    """Most unfinished requests at once."""
    num_actions: int
    """Actions of one episode before it is drained."""
    num_hot_prefixes: int
    """Base sequences from which prompts are cut, so that they share prefixes."""


TINY = Preset("tiny", (1, 2), (2, 5), (1, 3), (1, 6), (3, 10), (1, 4), 3, 40, 2)
SMALL = Preset("small", (1, 4), (4, 20), (1, 6), (2, 24), (8, 48), (1, 12), 8, 120, 3)
REAL = Preset("real", (16, 16), (24, 400), (4, 32), (32, 1024), (128, 1024), (4, 32), 24, 200, 8)
DEPTHS = (1, 1, 1, 2, 2, 3, 4)
"""Values of `max_frames_in_flight`. Some defects need three frames (#47900)."""
MAX_DEPTH = max(DEPTHS)
PROPOSERS = tuple(method for method in SpecMethod if method is not SpecMethod.NONE)
PRESETS = {preset.name: preset for preset in (TINY, SMALL, REAL)}


@dataclass(frozen=True, slots=True)
class Swarm:
    """One drawn configuration, and the features that may be used in the run."""

    preset: Preset
    config: Config
    features: frozenset[str]
    """Names of the features that may be used."""
    habits: frozenset[Habit]
    token_seed: int
    hot_prefixes: tuple[tuple[int, ...], ...]
    vocabulary_size: int
    """Token ids are below this; small, so that prefixes collide."""
    is_storm: bool = False
    """Whether requests compete for scarce blocks and tokens (`draw_storm`)."""
    has_long_prompts: bool = False
    """Whether every other request of a storm has a long prompt, so that it is preempted amid its
    chunks."""
    is_crowded: bool = False
    """Whether the storm consists of many short requests, most of them more urgent than the running
    ones (`draw_crowd`): a request that needs a block preempts one with a row in the same plan."""
    has_equals: bool = False
    """Whether all requests have the same priority and arrival time, and long prompts."""
    left_out: tuple[Feature, ...] = ()
    """Features of `LATE` that were drawn but that the engine does not take."""

    def has(self, feature: Feature) -> bool:
        """Return whether a feature may be used."""
        return feature.name in self.features

    def fit(self, config: Config) -> Swarm:
        """Return the swarm with another config, without features that this config cannot use."""
        useless = () if DRAFTS.is_asked_by(config) else (DRAFTS.name,)
        return replace(self, config=config, features=self.features.difference(useless))
