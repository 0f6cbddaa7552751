"""Telling: what a release tells of blocks, and when."""

from __future__ import annotations

from dataclasses import replace

from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import Config


def resets_are_told_late(rules: Rules, _config: Config) -> Rules:
    """What a reset cleared is told with the next commit, whenever that comes."""
    return replace(rules, tells_resets_at_once=False)


STORIES = (
    QuirkStory(
        Quirk.RESETS_ARE_TOLD_LATE,
        resets_are_told_late,
        "what a reset cleared is told with the next commit, whenever that comes",
        ("P20",),
        "noticed in AIBrix #2287",
        "0.19.1, 0.33.0",
        "events on; one request of a block, and a reset behind its end: nothing is told, until "
        "somebody else is served, so whoever follows the log goes on sending prompts there",
    ),
)
