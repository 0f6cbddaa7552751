"""KV groups: several block tables of a request, for kinds of attention and of state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import (
    Example,
    Feature,
    resize_blocks,
    without_kind,
    without_states,
)
from blockstep.spec import vocabulary as v

T = TypeVar("T", v.Config, v.Request)
FULL, LARGER = (v.KVGroup(v.GroupKind.FULL, size) for size in (4, 8))


def _states(mode: v.MambaCacheMode, block_size: int, caching: bool) -> Example:
    group = v.KVGroup(
        v.GroupKind.RECURRENT, block_size, mamba_cache_mode=mode, num_speculative_blocks=2
    )
    return Example({"groups": (FULL, group), "enable_prefix_caching": caching})


CHUNKED = Example({"groups": (v.KVGroup(v.GroupKind.CHUNKED_LOCAL, 4, attention_chunk_size=8),)})
WITH_STATES = (
    _states(v.MambaCacheMode.NONE, 64, caching=False),
    _states(v.MambaCacheMode.ALIGN, 4, caching=True),
    _states(v.MambaCacheMode.ALL, 4, caching=True),
)
SAVES = (*("tiers_victim_", "tiers_several_saved", "tiers_too_little_to_save", "tiers_saved_"),)
"""Prefixes of the coverage goals of swapped-out victims."""


@dataclass(frozen=True, slots=True, eq=False)
class KindsOfGroups(Feature):
    """The row of KV groups other than full attention and sliding window, and of larger blocks."""

    def is_asked_by(self, thing: v.Config | v.Request) -> bool:
        """Whether a config has such groups; see `Feature`."""
        return isinstance(thing, v.Config) and any(
            group.kind not in (v.GroupKind.FULL, v.GroupKind.SLIDING_WINDOW)
            or group.block_size != thing.block_size
            for group in thing.groups
        )

    def take_from(self, thing: T) -> T:
        """Return the config without them: chunked groups become windows, recurrent and cross ones
        go.
        """
        if isinstance(thing, v.Request) or not self.is_asked_by(thing):
            return thing
        config = without_kind(without_states(thing), v.GroupKind.CROSS_ATTENTION)
        groups = [
            replace(
                group,
                kind=v.GroupKind.SLIDING_WINDOW,
                sliding_window=group.attention_chunk_size,
                attention_chunk_size=0,
            )
            if group.kind is v.GroupKind.CHUNKED_LOCAL
            else group
            for group in config.groups
        ]
        return resize_blocks(replace(config, groups=tuple(groups)), config.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class GroupsOfKind(Feature):
    """The row of KV groups of one kind, which can be selected by name."""

    kind: v.GroupKind = v.GroupKind.FULL

    def is_asked_by(self, thing: v.Config | v.Request) -> bool:
        """Whether a config has groups of the kind; see `Feature`."""
        return isinstance(thing, v.Config) and self.kind in [it.kind for it in thing.groups]

    def take_from(self, thing: T) -> T:
        """Return the config without the kind: recurrent groups go, others become full attention."""
        if isinstance(thing, v.Request) or not self.is_asked_by(thing):
            return thing
        if self.kind is v.GroupKind.RECURRENT:
            return without_states(thing)
        full = [v.KVGroup(v.GroupKind.FULL, group.block_size) for group in thing.groups]
        pairs = zip(thing.groups, full, strict=True)
        return replace(
            thing, groups=tuple([new if it.kind is self.kind else it for it, new in pairs])
        )


FEATURE = Feature(
    "groups",
    "several KV groups, each with a block table, of full attention or a sliding window",
    Capability.GROUPS,
    config={"groups": ()},
    situations=("groups_",),
    properties=("P5", "P8"),
    goals_need={"groups_block_in_doubt": frozenset({"drafts"})},
    switches=("groups",),
    is_late=True,
    examples=(Example({"groups": (FULL,)}),),
    rare=(
        *("groups_block_in_doubt", "groups_hit_cut_by_a_window", "groups_admitted_past_its_room"),
        *("groups_preempted_with_nulls", "groups_preempted_about_to_slide"),
        *("groups_resumed_behind_nulls", "groups_hit_of_a_state", "groups_state_left"),
    ),
    # A draft head needs a block after the hit in every group, and few states are kept.
    rare_if_wished_for={
        "tiny": ("head_drop", "groups_hit_of_a_state"),
        "real": ("head_drop", "groups_hit_of_a_state"),
    },
    rare_with={
        "tiny": ("groups_block_in_doubt",),
        "real": (
            *("groups_block_in_doubt", "groups_last_block_to_another"),
            *("groups_admitted_past_its_room", "groups_preempted_with_nulls"),
            "groups_preempted_about_to_slide",
        ),
    },
)
KINDS = KindsOfGroups(
    "kinds",
    "KV groups of every kind (chunked local, recurrent, cross attention), and of several "
    "block sizes",
    Capability.KINDS,
    config={"groups": ()},
    situations=(
        *("groups_of_three_kinds", "groups_larger_block_filled", "groups_chunk_left"),
        *("groups_state_left", "groups_hit_of_a_state"),
    ),
    properties=("P5", "P8"),
    part_of="groups",
    examples=(Example({"groups": (FULL, LARGER)}), CHUNKED, *WITH_STATES),
)
WINDOW = GroupsOfKind(
    "window",
    "KV groups of sliding-window attention",
    config={"groups": ()},
    situations=("groups_window_slid",),
    properties=("P5", "P8"),
    part_of="groups",
    kind=v.GroupKind.SLIDING_WINDOW,
    examples=(Example({"groups": (v.KVGroup(v.GroupKind.SLIDING_WINDOW, 4, sliding_window=6),)}),),
)
CHUNKS = GroupsOfKind(
    "chunks",
    "KV groups of chunked local attention",
    config={"groups": ()},
    situations=("groups_chunk_left",),
    properties=("P5", "P8"),
    part_of="kinds",
    kind=v.GroupKind.CHUNKED_LOCAL,
    examples=(CHUNKED,),
)
STATES = GroupsOfKind(
    "states",
    "KV groups of recurrent layers, which keep states instead of tokens",
    config={"groups": ()},
    situations=("groups_state_left", "groups_hit_of_a_state"),
    hides=SAVES,  # no victim with states is saved
    properties=("P5", "P8"),
    part_of="kinds",
    kind=v.GroupKind.RECURRENT,
    examples=WITH_STATES,
)
PARTS = (WINDOW, CHUNKS, STATES)
"""Features that are KV groups of one kind each."""
