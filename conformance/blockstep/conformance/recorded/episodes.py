"""Recording of one episode of a check."""

from __future__ import annotations

from pathlib import Path

from blockstep.conformance.engine import EngineFactory, get_equivalence_name, get_traits
from blockstep.conformance.recorded.traces import Excuse, write_trace
from blockstep.conformance.search.episodes import record_episode
from blockstep.conformance.search.options import CheckOptions, load


def write_episode(options: CheckOptions, make_engine: EngineFactory | None, path: Path) -> None:
    """Write the episode of the options as a trace.

    `Isolation.call` runs this in a child process.

    Raises:
        TraceError: if the file cannot be written.
    """
    make_engine = make_engine or load(options)
    run, exchanges = record_episode(options, make_engine)
    excuses = tuple(
        Excuse(one.name, one.summary, one.sentences, one.fields)
        for one in get_traits(make_engine).deviations
        if run.excuses.counts[one.name]
    )
    write_trace(path, run.config, exchanges, get_equivalence_name(make_engine), excuses)
