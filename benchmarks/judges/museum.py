"""Programs that a check at `safety` must find something in, and clean ones in which it must not.

Each seeded bug is checked at `safety`, with its state shown and hidden; its failure is shrunk, and
the program kept. A mutant under which such a program finds nothing is noticed; so is one under
which a clean engine fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from blockstep.conformance.engine import Capability, EngineTraits, Safety
from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.museum import EXHIBITS, build
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import read_program, write_program
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.shrink import shrink
from blockstep.spec.vocabulary import Config

CLEAN = "clean"
SHOWN, HIDDEN = "shown", "hidden"
NUM_CLEAN = 4
"""Number of clean programs of each kind."""
BUDGETS = {"tiny": 4_000, "small": 6_000}
"""Events for each seeded bug, by preset; a tenth finds most."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A program, and the engine that plays it."""

    engine: str
    """A seeded bug, or `clean`."""
    how: str
    """`shown` or `hidden`."""
    program: Program | None = None
    """None for a clean engine, which plays an episode."""
    episode: int = 0


Corpus: TypeAlias = Mapping[str, Entry]
"""Programs by name: `museum:zombie-key hidden`."""


def make_engine_of(engine: str, how: str) -> Callable[[Config], Any]:
    """Return an engine at `safety`: a seeded bug or the host."""
    made: Any = load_engine("host") if engine == CLEAN else build(engine)

    class Judged(made):  # type: ignore[misc]
        traits = EngineTraits(equivalence=Safety())

        def capabilities(self) -> frozenset[str]:
            has: frozenset[str] = super().capabilities()
            return has - {Capability.SNAPSHOT} if how == HIDDEN else has

        def snapshot(self) -> Any:
            return None if how == HIDDEN else super().snapshot()

    return Judged


def play_entry(entry: Entry) -> bool:
    """Whether a program has the right result: a finding, or none."""
    make_engine = make_engine_of(entry.engine, entry.how)
    if entry.program is None:
        return run_episode(CheckOptions(), entry.episode, make_engine).first is None
    return bool(run_program(entry.program, make_engine)[1])


def name_of(entry: Entry) -> str:
    """Return the name of an entry: `museum:zombie-key hidden`, `museum:clean shown 3`."""
    number = f" {entry.episode}" if entry.program is None else ""
    return f"museum:{entry.engine} {entry.how}{number}"


def make_corpus(
    folder: Path | None, seed: int, tell: Callable[[str, int, int], None] = lambda *_: None
) -> dict[str, Entry]:
    """Return the programs; those that are already in the folder are not searched again."""
    corpus: dict[str, Entry] = {}
    wanted = [(name, how) for name in EXHIBITS for how in (SHOWN, HIDDEN)]
    for done, (name, how) in enumerate(wanted, 1):
        file = None if folder is None else folder / f"{name}.{how}.program"
        program = _read(file)
        if program is None and not _is_known_to_live(file):
            program = find_program(name, how, seed)
            _keep(file, program)
        if program is not None:
            entry = Entry(name, how, program)
            if play_entry(entry):
                corpus[name_of(entry)] = entry
        tell("exhibits", done, len(wanted))
    for how in (SHOWN, HIDDEN):
        for number in range(NUM_CLEAN):
            entry = Entry(CLEAN, how, episode=seed + number)
            corpus[name_of(entry)] = entry
    return corpus


def find_program(exhibit: str, how: str, seed: int) -> Program | None:
    """Return the shrunk program that finds a seeded bug at `safety`; None if none does."""
    make_engine = make_engine_of(exhibit, how)
    for preset, num_events in BUDGETS.items():
        options = CheckOptions(engine=exhibit, preset=preset, seed=seed)
        played, index = 0, 0
        while played < num_events:
            episode = run_episode(options, index, make_engine)
            played, index = played + episode.num_events, index + 1
            if episode.first is not None and episode.program is not None:
                return shrink(episode.program, make_engine, episode.first).program
    return None


def _read(file: Path | None) -> Program | None:
    return None if file is None or not file.exists() else read_program(file)


def _is_known_to_live(file: Path | None) -> bool:
    return file is not None and file.with_suffix(".survives").exists()


def _keep(file: Path | None, program: Program | None) -> None:
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    if program is None:
        file.with_suffix(".survives").touch()
    else:
        file.write_text(write_program(program), encoding="utf-8")
