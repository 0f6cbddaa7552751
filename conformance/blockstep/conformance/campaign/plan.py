"""Plan: the TOML file that says what a campaign searches.

::

    name = "nightly"
    budget = "2000000"
    presets = ["tiny", "small"]
    features = [[], ["adapters"], ["sessions", "groups"]]
    known = "known"

    [[engines]]
    engine = "vllm"
    profiles = ["vllm-0.19.1"]
    python = "/opt/vllm-0.19.1/bin/python"

Folders and interpreters are relative to the file. Nothing in it is executed but the interpreters
and engines that it names.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.program_file import write_program
from blockstep.conformance.protocol.registry import EngineNotFoundError, get_target
from blockstep.conformance.search.known import read_known
from blockstep.conformance.search.options import CheckOptions, find_profile, get_wish, read_budget
from blockstep.spec.profiles import STRICT

PLAN_BYTES_MAX = 1 << 20
LEFT_OUT = ("lease_seconds", "event_seconds", "environments")
"""Keys of a plan that decide no result."""
Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$")]


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `engines`: one engine, in one environment, under one or several profiles."""

    engine: str
    name: str = ""
    """Name in reports; the engine's, if empty."""
    profiles: tuple[str, ...] = (STRICT.name,)
    python: str = ""
    """Interpreter of the engine's environment, in which blockstep is installed, too; "": the
    campaign's own."""
    path: str = ""
    """Folder that is searched first when the engine is imported."""
    lines: tuple[str, ...] = ()
    """Modules and packages of the engine whose lines steer the search (Python 3.12)."""


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a plan with their defaults."""

    name: Name
    engines: tuple[EngineEntry, ...]
    presets: tuple[str, ...] = ("tiny", "small")
    features: tuple[tuple[str, ...], ...] = ((),)
    """Sets of features; every run of a cell has all features of its set."""
    without: tuple[str, ...] = ()
    seeds: tuple[Natural, ...] = (0,)
    budget: str | Positive = 1_000_000
    depth: Annotated[int, msgspec.Meta(ge=1, le=MAX_DEPTH)] = MAX_DEPTH
    known: str = ""
    """File or folder of known findings."""
    episodes: Positive = 8
    """Episodes of a unit."""
    round: Positive = 16
    """Units of a round; at least twice the number of workers, so that none waits."""
    lease_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Time after which a unit is given to another worker, unless its lease is renewed."""
    event_seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    environments: Positive = 4
    """Interpreters of which a worker keeps a process, 0.5 GB for one that has imported vLLM."""


@dataclass(frozen=True, slots=True)
class Target:
    """One engine under one profile, in one environment."""

    name: str
    engine: str
    profile: str
    python: str | None
    path: str | None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """A target, a preset and a set of features; without a preset, mutants of kept programs."""

    target: int
    preset: str | None
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan with its engines expanded into targets and cells."""

    file: PlanFile
    targets: tuple[Target, ...]
    known: dict[str, str]
    """Contents of the known programs, by the name of their file."""
    max_events: int | None
    max_seconds: float | None

    @property
    def key(self) -> str:
        """Return the name of the campaign in a store.

        It follows from all that decides the results. With another budget, interpreter or time, or
        more processes, the campaign is continued.
        """
        decides = [(it.name, it.engine, it.profile, *it.lines) for it in self.targets]
        file, left_out = self.file, {"engines", "budget", "known", *LEFT_OUT}
        fields = [
            (key, getattr(file, key)) for key in file.__struct_fields__ if key not in left_out
        ]
        text = msgspec.json.encode([decides, fields, sorted(self.known.items())])
        return f"{file.name}-{hashlib.sha256(text).hexdigest()[:8]}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Return the cells: for each target every preset and set of features, then its mutants."""
        drawn = [(preset, names) for preset in self.file.presets for names in self.file.features]
        return tuple(
            cell
            for number in range(len(self.targets))
            for cell in (*(Cell(number, *it) for it in drawn), Cell(number, None))
        )

    def make_options(self, cell: Cell, seed: int = 0, max_depth: int | None = None) -> CheckOptions:
        """Return the options with which episodes of a cell are played."""
        target = self.targets[cell.target]
        return CheckOptions(
            engine=target.engine,
            preset=cell.preset or self.file.presets[0],
            seed=seed,
            max_depth=max_depth or self.file.depth,
            profile=target.profile,
            path=target.path,
            with_features=cell.features,
            without_features=self.file.without,
        )


def read_plan(path: Path, budget: str | None = None) -> Plan:
    """Return the plan in a file, with another budget if one is given.

    Raises:
        UsageError: the file or a value in it cannot be used.
        TraceError: a known finding cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(PLAN_BYTES_MAX + 1)
        if len(text) > PLAN_BYTES_MAX:
            raise UsageError(f"plan {path}: longer than {PLAN_BYTES_MAX} bytes")
        read = msgspec.convert(tomllib.loads(text.decode()), PlanFile)
    except OSError as error:
        raise UsageError(f"plan {path}: cannot read: {error.strerror}") from None
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"plan {path}: {error}") from None
    known = {}
    if read.known:
        folder = path.parent / read.known
        for name, program in read_known(folder).items():
            known[str(Path(name).relative_to(path.parent))] = write_program(program)
    try:
        limits = read_budget(str(budget or read.budget))
        plan = Plan(read, tuple(_list_targets(read, path.parent)), known, *limits)
        _require_sense(plan)
    except (EngineNotFoundError, ValueError) as error:  # a UsageError is a ValueError
        raise UsageError(f"plan {path}: {error}") from None
    return plan


def _list_targets(file: PlanFile, folder: Path) -> list[Target]:
    targets = []
    for entry in file.engines:
        if not entry.python:
            get_target(entry.engine)
        for profile in entry.profiles:
            name = entry.name or entry.engine
            name = name if profile == STRICT.name else f"{name} {profile}"
            python = str(folder / Path(entry.python).expanduser()) if entry.python else None
            path = str((folder / entry.path).resolve()) if entry.path else None
            profile = find_profile(profile).name
            targets.append(Target(name, entry.engine, profile, python, path, entry.lines))
    return targets


def _require_sense(plan: Plan) -> None:
    """Raise UsageError for a value that has the right type and cannot be used."""
    file, names = plan.file, [target.name for target in plan.targets]
    for key in ("engines", "presets", "features", "seeds"):
        if not getattr(file, key):
            raise UsageError(f"{key}: must have an entry")
    for target in plan.targets:
        if names.count(target.name) > 1:
            raise UsageError(f"engines: two are called {target.name!r}; give them names")
        if target.python and not Path(target.python).is_file():
            raise UsageError(f"engines: {target.name}: there is no interpreter {target.python}")
    for preset in file.presets:
        if preset not in PRESETS:
            raise UsageError(f"presets: {preset!r}: must be one of {', '.join(PRESETS)}")
    for cell in plan.cells:
        get_wish(plan.make_options(cell))
