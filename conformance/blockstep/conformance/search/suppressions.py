"""Suppression of known defects of an engine, so that defects behind them are found.

Three kinds can be suppressed: a quirk that the specification can follow, an event that an adapter
declines (`Declining`), and a workaround of an adapter (`EngineTraits.workarounds`: flags of its
engines, true if a defect is worked around). All are off at first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from traceback import extract_tb

from blockstep.conformance.engine import Engine, EngineFactory, get_traits
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.search.engine_wrappers import Wrapped, Wrapping, unwrapped
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import SPARING, Profile, Quirk, get_profile


class SuppressionKind(StrEnum):
    """Way in which a defect is suppressed."""

    QUIRK = "quirk"
    WORKAROUND = "workaround"
    DECLINED = "declined"


@dataclass(frozen=True, slots=True, order=True)
class KnownCause:
    """Known defect that may explain a failure."""

    means: SuppressionKind
    name: str
    """Name of the quirk or of the engine's flag, or the reason why an event is declined."""

    def __str__(self) -> str:
        return f"{self.means}:{self.name}"


def read_cause(text: str) -> KnownCause:
    """Return the cause named `quirk:NAME`, `workaround:NAME` or `declined:TEXT`. Raises
    UsageError."""
    means, _, name = text.partition(":")
    if means not in list(SuppressionKind) or not name:
        kinds = ", ".join(f"{kind}:NAME" for kind in SuppressionKind)
        raise UsageError(f"forgive {text!r}: must be one of {kinds}")
    if means == SuppressionKind.QUIRK and name not in list(Quirk):
        raise UsageError(
            f"forgive {text!r}: there is no such quirk; `blockstep quirks --all` lists them"
        )
    return KnownCause(SuppressionKind(means), name)


class SuppressedEngine(Wrapped):
    """Engine some of whose known defects are suppressed."""

    def __init__(self, engine: Engine, forgives: Callable[[KnownCause], bool]) -> None:
        super().__init__(engine)
        self.raised_at = ""
        """Last place where it raised: the innermost function, its file and its line."""
        self._forgives = forgives

    def apply(self, event: v.Event) -> v.Observation:
        """Apply the event, and record where the engine raises."""
        try:
            return super().apply(event)
        except Exception as error:
            *_, frame = extract_tb(error.__traceback__)
            self.raised_at = f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
            raise

    def declines(self, event: v.Event) -> str | None:
        """Return why the engine declines an event, if that is suppressed."""
        reason = super().declines(event)
        if reason is None or not self._forgives(KnownCause(SuppressionKind.DECLINED, str(reason))):
            return None
        return reason


class SuppressingFactory(Wrapping):
    """Factory of engines with these defects suppressed; None: all known ones."""

    def __init__(self, make_engine: EngineFactory, forgiven: frozenset[KnownCause] | None) -> None:
        super().__init__(make_engine, self._forgive)
        self.forgiven = forgiven

    def _forgive(self, engine: Engine, _config: v.Config) -> SuppressedEngine:
        for name in self.traits.workarounds:
            setattr(
                unwrapped(engine),
                name,
                self._forgives(KnownCause(SuppressionKind.WORKAROUND, name)),
            )
        return SuppressedEngine(engine, self._forgives)

    def _forgives(self, cause: KnownCause) -> bool:
        return self.forgiven is None or cause in self.forgiven


def follow(forgiven: Iterable[KnownCause]) -> Profile:
    """Return the profile of the suppressed quirks, with a name that `--profile` accepts."""
    quirks = frozenset(
        Quirk(cause.name) for cause in forgiven if cause.means is SuppressionKind.QUIRK
    )
    return Profile("+".join((SPARING.name, *sorted(quirks))), quirks)


def find_causes(
    program: Program,
    make_engine: EngineFactory,
    forgiven: frozenset[KnownCause],
    quirks: Collection[Quirk],
) -> tuple[KnownCause, ...]:
    """Return a minimal set of known defects whose suppression lets the program pass; () if none
    does.

    Single causes are tried first, quirks before declined events, since these hide more. Quirks of
    this engine's release are tried before those of others, which may match by chance.

    Args:
        program: Program that fails.
        make_engine: Engine with which it fails.
        forgiven: Causes that are suppressed already.
        quirks: Possible causes, besides workarounds and declined events.
    """
    own = get_profile(get_traits(make_engine).profile)
    known = [quirk for quirk in quirks if own is None or quirk in own.quirks]
    others = [quirk for quirk in quirks if quirk not in known]
    found = _find_causes(program, make_engine, forgiven, known)
    return found or (_find_causes(program, make_engine, forgiven, others) if others else ())


def find_refuted(
    program: Program, make_engine: EngineFactory, forgiven: frozenset[KnownCause]
) -> tuple[KnownCause, ...]:
    """Return the quirks without which a failing program passes: the engine does not have them.

    Such a quirk explained another failure by chance: the engine deviates in the same way there, and
    is strict here.
    """
    quirks = sorted(cause for cause in forgiven if cause.means is SuppressionKind.QUIRK)
    return tuple(it for it in quirks if _passes(program, make_engine, forgiven - {it}))


def _find_causes(
    program: Program,
    make_engine: EngineFactory,
    forgiven: frozenset[KnownCause],
    quirks: list[Quirk],
) -> tuple[KnownCause, ...]:
    asked = [KnownCause(SuppressionKind.QUIRK, quirk) for quirk in quirks]
    asked += [
        KnownCause(SuppressionKind.WORKAROUND, name) for name in get_traits(make_engine).workarounds
    ]
    lenient = SuppressingFactory(make_engine, None)
    run, findings = run_program(program, lenient, follow([*forgiven, *asked]))
    asked += [KnownCause(SuppressionKind.DECLINED, str(reason)) for reason in run.skipped]
    asked = [cause for cause in asked if cause not in forgiven]
    for cause in asked:
        if _passes(program, make_engine, forgiven | {cause}):
            return (cause,)
    if findings:
        return ()
    for cause in tuple(reversed(asked)):
        fewer = [other for other in asked if other != cause]
        if _passes(program, make_engine, forgiven.union(fewer)):
            asked = fewer
    return tuple(asked)


def _passes(program: Program, make_engine: EngineFactory, forgiven: frozenset[KnownCause]) -> bool:
    return not run_program(program, SuppressingFactory(make_engine, forgiven), follow(forgiven))[1]
