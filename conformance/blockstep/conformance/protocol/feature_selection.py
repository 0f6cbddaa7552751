"""The features that a user wants in every run, and those in none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from blockstep.conformance.protocol.feature import SEVERAL_AT_ONCE, Feature
from blockstep.conformance.protocol.features import (
    APART,
    ASYNC,
    BY_NAME,
    FEATURES,
    PIPELINE,
    UsageError,
    list_wholes,
)


@dataclass(frozen=True, slots=True)
class FeatureSelection:
    """Names of the features of every run, and of those of none."""

    always: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()

    def decide(self, feature: Feature, is_drawn: bool) -> bool:
        """Whether a run has a feature: as drawn, unless the user decided."""
        return feature.name in self.always or (is_drawn and feature.name not in self.never)


NO_WISH = FeatureSelection()


def widen(wish: FeatureSelection) -> FeatureSelection:
    """Return the wish with the features that those of every run are part of."""
    wholes = {whole for name in wish.always for whole in list_wholes(name)}
    return replace(wish, always=wish.always | wholes)


def parse_features(names: Iterable[str]) -> tuple[str, ...]:
    """Return feature names, each once, from strings that may list several with commas.

    Raises:
        UsageError: a name is not in the table.
    """
    found = dict.fromkeys(name.strip() for text in names for name in text.split(","))
    for name in found:
        if name not in BY_NAME:
            raise UsageError(f"feature {name!r}: must be one of {', '.join(BY_NAME)}")
    return tuple(found)


def make_wish(with_features: Iterable[str], without_features: Iterable[str]) -> FeatureSelection:
    """Return the wish that `--with` and `--without` express.

    Raises:
        UsageError: a name is not in the table, or the features contradict each other.
    """
    wish = widen(
        FeatureSelection(
            frozenset(parse_features(with_features)), frozenset(parse_features(without_features))
        )
    )
    known = f"the features are {', '.join(BY_NAME)}"
    for name in sorted(wish.always & wish.never):
        raise UsageError(f"feature {name!r}: cannot be both with and without; {known}")
    if wish.always >= SEVERAL_AT_ONCE:
        raise UsageError(
            f"features {ASYNC.name!r} and {PIPELINE.name!r}: no run has both, for in a pipeline "
            f"each request waits for its own token; {known}"
        )
    for one, other, reason in APART:
        if wish.always >= {one.name, other.name}:
            raise UsageError(
                f"features {one.name!r} and {other.name!r}: no run has both, for {reason}; {known}"
            )
    for feature in FEATURES:
        for name in feature.needs if feature.name in wish.always else ():
            if name in wish.never:
                raise UsageError(f"feature {feature.name!r}: cannot be without {name!r}; {known}")
    return wish
