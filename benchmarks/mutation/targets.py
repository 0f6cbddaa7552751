"""Targets: the mutated parts of the project, and the trials that should notice the mutants.

The specification is held to its tests, to laws and to lock-step with our engine; the engine to
its tests and to lock-step; the property checks to their tests and to seeded bugs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.prove.changes import Change, find_changes, find_marks

HOUSE = Path(__file__).resolve().parents[2]
Stage: TypeAlias = tuple[str, str, int]
"""An engine, a preset with the features of every run (`small groups`), and a number of events."""

_FEATURES = (
    *("tiers", "groups tiers", "forks", "groups forks", "pins", "groups pins", "transfers"),
    *("groups transfers", "events", "groups events", "groups", "groups sessions"),
    *("adapters masks sessions encoder", ""),
)
_HOST: tuple[Stage, ...] = (
    ("host", "tiny", 2_000),
    *(("host", f"small {features}".strip(), 2_000) for features in _FEATURES),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A part of the project that is mutated."""

    what: str
    folder: str
    """Folder of the modules, relative to the repository; modules are named relative to it."""
    modules: tuple[str, ...]
    """Prefixes of the mutated modules."""
    tests: tuple[str, ...]
    """Test files, or folders of them without the folders inside."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Modules that are not mutated, with the reason."""
    stages: tuple[Stage, ...] = ()
    """Runs in lock-step, in which no finding may be made."""
    has_laws: bool = False
    has_bugs: bool = False


_SPEC_TESTS = tuple(f"tests/spec{folder}" for folder in ("", "/core", "/features", "/releases"))

TARGETS: Mapping[str, Target] = {
    "spec": Target(
        "the specification",
        "spec/blockstep",
        ("spec/",),
        _SPEC_TESTS,
        {
            "spec/invariants.py": "predicates that the tests ask of states",
            "spec/features/groups/invariants.py": "predicates that the tests ask of states",
            "spec/oracle.py": "a wrapper for everyday use; it decides nothing",
            "spec/profiles.py": "names of releases and of their deviations; it decides nothing",
            "spec/releases/": "the rules of releases: only `strict` is played",
            "spec/vocabulary/": "both sides share it: a change to it changes both",
        },
        _HOST,
        has_laws=True,
    ),
    "host": Target(
        "the engine, run as the Python that it is, and the code that engines share",
        "impl/blockstep",
        (
            *("impl/host/", "impl/tiers/order.py", "impl/rejections.py", "impl/array_plans.py"),
            *("impl/encoder.py", "impl/grammars.py", "impl/chunks.py"),
        ),
        (*_SPEC_TESTS, "tests/impl", "tests/impl/host", "tests/impl/tiers"),
        {"impl/host/jit.py": "it hands functions to a compiler, and there is none here"},
        _HOST,
    ),
    "judges": Target(
        "the property checks, the witness worker and the lock-step",
        "conformance/blockstep/conformance",
        (
            *("judge/properties/", "judge/answers.py", "judge/worker/", "judge/dataplane/"),
            *("judge/checks.py", "lockstep/", "search/check.py"),
            *[f"features/{feature.name}/properties.py" for feature in FEATURES],
        ),
        tuple(
            f"tests/conformance/{folder}/test_{name}.py"
            for folder, names in {
                "judge": (
                    *("properties", "property_checks", "worker", "worker_complaints"),
                    *("dataplane", "coverage_goals"),
                ),
                "lockstep": ("wiring", "driver", "liveness", "equivalences", "deviations"),
                "protocol": ("compare", "type_check"),
            }.items()
            for name in names
        ),
        {
            "lockstep/score.py": "it counts and finds nothing",
            "lockstep/solo_run.py": "it counts and finds nothing",
        },
        has_bugs=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A module that is mutated."""

    module: str
    file: Path
    text: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of a module."""

    source: Source
    change: Change

    @property
    def title(self) -> str:
        """The name of the mutant, the same as long as the function is."""
        return f"{self.source.module} {self.change.function} {self.change.number}"


def read_sources(target: Target, only: Sequence[str] = ()) -> list[Source]:
    """Return the modules of a target whose names begin with one of `only`.

    Raises:
        LookupError: no module has such a name.
    """
    folder = HOUSE / target.folder
    found = [
        Source(module, file, file.read_text(encoding="utf-8"))
        for file in sorted(folder.rglob("*.py"))
        if (module := file.relative_to(folder).as_posix()).startswith(target.modules)
        if not module.startswith(tuple(target.left_out))
    ]
    chosen = [one for one in found if not only or one.module.startswith(tuple(only))]
    if not chosen:
        names = ", ".join(one.module for one in found)
        raise LookupError(f"no module begins with {' or '.join(only)}; there are {names}")
    return chosen


def find_mutants(sources: Sequence[Source]) -> list[Mutant]:
    """Return all mutants of some modules, without those of marked lines.

    Raises:
        ValueError: a mark has no reason.
    """
    return [Mutant(source, change) for source in sources for change in find_changes(source.text)]


def list_marks(sources: Sequence[Source]) -> list[tuple[str, int, str]]:
    """Return (module, line, reason) of all marked lines."""
    return [
        (source.module, line, reason)
        for source in sources
        for line, (_, reason) in find_marks(source.text).items()
    ]


def list_test_files(target: Target) -> list[str]:
    """Return the test files of a target, relative to the repository."""
    found: list[str] = []
    for place in target.tests:
        files = [place] if place.endswith(".py") else sorted((HOUSE / place).glob("test_*.py"))
        found += [str(Path(HOUSE / file).relative_to(HOUSE)) for file in files]
    return found
