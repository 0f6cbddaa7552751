"""Configs with several KV groups, of the kinds that were wished for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.feature import LATE_ONE_IN, Draws, Late
from blockstep.conformance.draw.groups import draw_groups
from blockstep.conformance.features.groups import FEATURE, KINDS, PARTS
from blockstep.conformance.features.transfers import FEATURE as TRANSFERS
from blockstep.conformance.protocol.feature_selection import FeatureSelection
from blockstep.conformance.protocol.features import DRAFTS
from blockstep.spec.vocabulary import Config, GroupKind, SpecMethod


def add_to_config(late: Late) -> None:
    """Draw several groups, and sometimes a draft head, with which hits drop a block in each."""
    config = _draw_head(late.config, late.draw, late.wish)
    late.drawn |= {DRAFTS.name} if config.drops_last_hit_block else set()
    late.config = _draw_wished_groups(config, late.draw, late.swarm.is_storm, late.wish)


def one_in(wish: FeatureSelection) -> int:
    """Return the number of runs of which one has groups: two if all have a store, since windows
    give blocks away that a store may load into."""
    return 2 if TRANSFERS.name in wish.always else LATE_ONE_IN


def list_kinds(names: Collection[str]) -> list[GroupKind]:
    """Return the kinds of KV groups of the features with these names."""
    return [feature.kind for feature in PARTS if feature.name in names]


def _draw_head(config: Config, draw: Draw, wish: FeatureSelection) -> Config:
    """Return the config, sometimes with a draft head if several groups are wished for."""
    if FEATURE.name not in wish.always or DRAFTS.name in wish.never or not draw.chance(25):
        return config
    count = config.num_speculative_tokens or draw.integer(1, 4)
    return replace(config, spec_method=SpecMethod.EAGLE, num_speculative_tokens=count)


def _draw_wished_groups(
    config: Config, draw: Draw, is_storm: bool, wish: FeatureSelection
) -> Config:
    """Return the config with several groups, of the wished kinds."""
    wanted, unwanted = list_kinds(wish.always), list_kinds(wish.never)
    if KINDS.name in wish.never:
        unwanted += [GroupKind.CHUNKED_LOCAL, GroupKind.RECURRENT]
        return KINDS.take_from(draw_groups(config, draw, is_storm, wanted, unwanted))
    drawn = draw_groups(config, draw, is_storm, wanted, unwanted)
    while KINDS.name in wish.always and not KINDS.is_asked_by(drawn):
        drawn = draw_groups(config, draw, is_storm, wanted, unwanted)
    return drawn


DRAWS = Draws(add_to_config=add_to_config, one_in=one_in)
