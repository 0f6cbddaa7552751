"""`blockstep events`: reads a stream of KV events, and holds an index to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import typer

from blockstep.conformance.command import console, options
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.recorded.index import IndexJudge, Lie, ProcessIndex, load_index
from blockstep.conformance.recorded.listen import listen
from blockstep.conformance.recorded.stream import (
    Batch,
    Follower,
    StreamError,
    read_dump,
    write_line,
)
from blockstep.conformance.search.options import ExitCode

SHOWN_MAX = 5
"""Gaps and contradictions in the text; `--json` has all that are kept."""


def events_command(
    source: Annotated[
        str, typer.Argument(help="A dump (JSON lines, gz or plain), or tcp://host:port.")
    ],
    index: Annotated[
        str | None,
        typer.Option(help="A router's index to be held to it: module:attribute or cmd:COMMAND."),
    ] = None,
    lookups: Annotated[
        int, typer.Option(min=1, help="Chains that an index is asked for after each batch.")
    ] = 4,
    seed: options.Seed = 0,
    rank: Annotated[
        int | None, typer.Option(help="Only the batches of this data-parallel rank.")
    ] = None,
    replay: Annotated[
        str | None, typer.Option(help="Where missed batches are asked for: tcp://host:port.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Of the live stream.")] = "",
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Of a live stream; without it, until Ctrl-C.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write what is read to this dump.")] = None,
    path: options.Folder = None,
    json_path: options.Json = None,
) -> None:
    """Read a stream of KV events, and hold a router's index to it.

    Gaps, restarts, unknown types and contradictions are named. Exit codes: 0 nothing is wrong,
    1 a contradiction or a wrong answer of the index, 2 bad input, 5 the stream is empty.

    Example: blockstep events tcp://localhost:5557 --index myrouter.index:BlockIndex --seconds 60
    """
    options.look_in(path)
    with console.input_errors():
        judged = load_index(index) if index else None
        try:
            follower, lie, num_lookups = _follow(
                _save(_open(source, replay, topic, seconds, rank), save),
                judged,
                lookups,
                seed,
            )
        finally:
            if isinstance(judged, ProcessIndex):
                judged.close()
    code = ExitCode.CONFORMS
    if not follower.num_batches:
        code = ExitCode.HARNESS
    elif lie is not None or follower.num_contradictions:
        code = ExitCode.FAILED
    console.write_json(json_path, _to_json(source, follower, lie, num_lookups, code))
    lines = _make_lines(source, follower, index, lie, num_lookups)
    console.print_text("".join(f"{line}\n" for line in lines), json_path)
    raise typer.Exit(code)


def _open(
    source: str, replay: str | None, topic: str, seconds: float | None, rank: int | None
) -> Iterator[Batch]:
    """Yield the batches of the source. Raises TraceError, UsageError."""
    try:
        if "://" in source:
            batches = listen(source, replay, topic, seconds)
        else:
            batches = read_dump(Path(source))
        seen: set[int | None] = set()
        for batch in batches:
            if rank is not None and batch.rank != rank:
                continue
            seen.add(batch.rank)
            if len(seen) > 1:
                raise UsageError(
                    f"{source}: batches of several data-parallel ranks, each with numbers of its "
                    f"own; choose one with --rank"
                )
            yield batch
    except StreamError as error:
        raise UsageError(f"{source}: {error}") from None


def _save(batches: Iterator[Batch], path: Path | None) -> Iterator[Batch]:
    """Pass batches on, and write each to a dump first."""
    if path is None:
        yield from batches
        return
    try:
        file: IO[bytes] = path.open("wb")
    except OSError as error:
        raise UsageError(f"--save {path}: cannot be written ({error.strerror or error})") from None
    with file:
        for batch in batches:
            file.write(write_line(batch))
            yield batch


def _follow(
    batches: Iterator[Batch], index: object, num_lookups: int, seed: int
) -> tuple[Follower, Lie | None, int]:
    follower = Follower()
    if index is None:
        for batch in batches:
            follower.take(batch)
        return follower, None, 0
    judge = IndexJudge(index, follower, num_lookups, seed)  # type: ignore[arg-type]
    for batch in batches:
        lie = judge.take(batch)
        if lie is not None:
            return follower, lie, judge.num_lookups
    return follower, None, judge.num_lookups


def _make_lines(
    source: str, follower: Follower, index: str | None, lie: Lie | None, num_lookups: int
) -> Iterator[str]:
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(follower.num_events.items()))
    yield f"batches     {follower.num_batches:,}: {counts or 'no event'}"
    yield f"cached      {len(follower.blocks):,} blocks, {follower.num_cached_peak:,} at most"
    for first, last in follower.gaps[:SHOWN_MAX]:
        yield f"gap         messages {first} to {last} are missing"
    if len(follower.gaps) > SHOWN_MAX:
        yield f"gap         and {len(follower.gaps) - SHOWN_MAX} more"
    for seq in follower.restarts[:SHOWN_MAX]:
        yield f"restart     message {seq} is numbered as an earlier one"
    for name, count in sorted(follower.unknown.items()):
        events = "event" if count == 1 else "events"
        yield f"unknown     {count:,} {events} of the type {name}, without effect here"
    for one in follower.contradictions[:SHOWN_MAX]:
        yield f"contradiction  message {one.seq}: {one.name}: {one.message}"
    if follower.num_contradictions > SHOWN_MAX:
        yield f"contradiction  and {follower.num_contradictions - SHOWN_MAX} more"
    if lie is not None:
        yield f"WRONG INDEX {index} after message {lie.seq}: {lie.why}"
        if lie.block_hashes:
            yield f"  chain     {', '.join(map(str, lie.block_hashes))}"
            yield f"  expected  {lie.expected} leading blocks, seen {lie.seen}"
    elif index is not None:
        yield f"index       {index} agrees in {num_lookups:,} lookups"
    if not follower.num_batches:
        yield f"NO VERDICT: {source} has no batch"


def _to_json(
    source: str, follower: Follower, lie: Lie | None, num_lookups: int, code: ExitCode
) -> dict[str, object]:
    return {
        "format": "blockstep-events",
        "version": 1,
        "source": source,
        "exit_code": int(code),
        "batches": follower.num_batches,
        "events": dict(sorted(follower.num_events.items())),
        "unknown": dict(sorted(follower.unknown.items())),
        "cached": len(follower.blocks),
        "cached_peak": follower.num_cached_peak,
        "gaps": [list(gap) for gap in follower.gaps],
        "restarts": follower.restarts,
        "num_contradictions": follower.num_contradictions,
        "contradictions": [
            {"seq": one.seq, "name": one.name, "message": one.message}
            for one in follower.contradictions
        ],
        "lookups": num_lookups,
        "wrong_lookup": None
        if lie is None
        else {
            "seq": lie.seq,
            "block_hashes": list(lie.block_hashes),
            "expected": lie.expected,
            "seen": lie.seen if isinstance(lie.seen, int | str) else repr(lie.seen),
            "why": lie.why,
        },
    }
