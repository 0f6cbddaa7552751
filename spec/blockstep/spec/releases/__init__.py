"""Releases: the quirks of released engines, each with its story and its code.

The specification keeps every property. A quirk is a rule of some release that breaks one, or that
only behaves otherwise; it is off unless a profile turns it on. It replaces a function of the
specification by its name (`blockstep.spec.rules`): its docstring begins with "Modified" and that
name. The specification does not know any quirk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from blockstep.spec.core.rules import Rules
from blockstep.spec.features import get_config_rules
from blockstep.spec.releases import (
    block_keys,
    block_pool,
    drafts,
    encoder,
    finish,
    grammars,
    groups,
    in_flight,
    kv_events,
    lora,
    mamba_state,
    policy_order,
    sessions,
    transfers,
)
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import Config

__all__ = ["QUIRKS", "Quirk", "QuirkStory", "get_rules"]

_STORIES: Mapping[Quirk, QuirkStory] = {
    story.quirk: story
    for theme in (
        block_pool,
        groups,
        mamba_state,
        block_keys,
        policy_order,
        lora,
        encoder,
        drafts,
        in_flight,
        sessions,
        grammars,
        finish,
        transfers,
        kv_events,
    )
    for story in theme.STORIES
}
QUIRKS: tuple[QuirkStory, ...] = tuple(_STORIES[quirk] for quirk in Quirk)
"""All quirks, in the order in which they change the rules."""


def get_rules(quirks: frozenset[Quirk], config: Config) -> Rules:
    """Return the strict rules with these quirks in them, to be made once per run.

    Source: architecture D5.
    """
    rules = get_config_rules(config)
    if not quirks:
        return rules
    rules = replace(rules, changes=quirks, remake=(get_rules, (quirks, config)))
    for story in QUIRKS:
        if story.quirk in quirks:
            rules = story.change(rules, config)
    return rules
