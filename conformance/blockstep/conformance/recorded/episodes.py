"""Episodes: those of a check, recorded."""

from __future__ import annotations

from pathlib import Path

from blockstep.conformance.engine import EngineFactory, get_equivalence_name
from blockstep.conformance.recorded.traces import write_trace
from blockstep.conformance.search.episodes import record_episode
from blockstep.conformance.search.options import CheckOptions, load


def write_episode(options: CheckOptions, make_engine: EngineFactory | None, path: Path) -> None:
    """Write the episode of the options as a trace; in a process of its own, `Isolation.call`s it.

    Raises:
        TraceError: if the file cannot be written.
    """
    make_engine = make_engine or load(options)
    equivalence = get_equivalence_name(make_engine)
    write_trace(path, *record_episode(options, make_engine), equivalence)
