"""Reports of `explore`: the walk through a small world, as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from blockstep.conformance.engine import EXACT, Safety
from blockstep.conformance.explore.shard import SPEC_IS_WRONG
from blockstep.conformance.explore.tables import Shortest, format_program
from blockstep.conformance.explore.walk import PathStep, Walked
from blockstep.conformance.search.options import ExitCode


def get_exit_code(walked: Walked) -> ExitCode:
    """Return the exit code of a command with this result."""
    if walked.cycle or (walked.found and walked.found[0].startswith("P10 ")):
        return ExitCode.LIVENESS
    if walked.found:
        is_spec = any(line.startswith(SPEC_IS_WRONG) for line in walked.found)
        return ExitCode.SPEC if is_spec else ExitCode.FAILED
    if not walked.is_complete and not walked.is_blind:
        return ExitCode.HARNESS
    return ExitCode.CONFORMS if is_as_expected(walked) else ExitCode.FAILED


def is_as_expected(walked: Walked) -> bool:
    """Return whether the counts equal the committed ones, if there are any for this task."""
    task = walked.task
    expected = task.world.expected
    if walked.left_out or walked.equivalence == Safety.name:
        return True  # it is another walk
    return task.profile.quirks != frozenset() or expected is None or walked.counts == expected


def render_walked(walked: Walked) -> str:
    """Return the verdict, or the shortest program to a finding."""
    task, counts = walked.task, walked.counts
    name = task.world.name
    size = (
        f"{counts.states:,} states, {counts.transitions:,} transitions, "
        f"{counts.refused:,} rejections, depth {counts.depth}, {walked.seconds:.0f} s"
    )
    if walked.found:
        lines = [f"blockstep explore: {name}: found after {len(walked.path)} events ({size})"]
        lines += [f"  {line}" for line in walked.found]
        lines += ["  program", *_numbered(walked.path)]
        if walked.cycle:
            lines += ["  and then for ever", *_numbered(walked.cycle)]
        return "\n".join(lines) + "\n"
    if walked.equivalence == Safety.name:
        size += _describe_states(walked)
    if not walked.is_complete and not walked.is_blind:
        return (
            f"{name}: stopped after {size}: the next level would pass --max-states "
            f"{task.max_states:,}; raise it if the memory allows (250 bytes a state)\n"
        )
    conclusions = ["every property holds in every state, no cycle without progress"]
    conclusions = conclusions if task.properties else []
    if walked.equivalence == Safety.name:
        conclusions = [
            "no property that is judged at safety is broken, and from each all requests end"
        ]
    elif task.engine:
        conclusions += [f"{task.engine} agrees on every event in every state"]
        conclusions[-1] += f" (equivalence {walked.equivalence})" * (walked.equivalence != EXACT)
    if walked.left_out:
        conclusions.append(f"{walked.left_out:,} events left out that {task.engine} does not take")
    if walked.excused:
        conclusions.append(f"and what its adapter declares: {', '.join(sorted(walked.excused))}")
    if not is_as_expected(walked):
        conclusions.append(f"NOT AS COMMITTED: {task.world.expected}")
    return "; ".join([f"{name}: {size}", *conclusions]) + "\n"


def _describe_states(walked: Walked) -> str:
    """Return whose states were counted."""
    changes = f", built with {', '.join(walked.notes)}" if walked.notes else ""
    if walked.is_blind:
        which = f"{walked.task.engine} shows no state, so these are all its programs"
        return f" ({which} of this length{changes})"
    return f" ({walked.task.engine}'s own, equivalence {walked.equivalence}{changes})"


def summarize_walks(results: Sequence[Walked], num_worlds: int) -> str:
    """Return one line for all worlds."""
    codes = [get_exit_code(walked) for walked in results]
    counts = [walked.counts for walked in results]
    states, transitions = sum(it.states for it in counts), sum(it.transitions for it in counts)
    num_stopped = codes.count(ExitCode.HARNESS)
    num_wrong = len(codes) - codes.count(ExitCode.CONFORMS) - num_stopped
    parts = [f"{codes.count(ExitCode.CONFORMS)} of {num_worlds} worlds as they should be"]
    parts += [f"{num_wrong} WRONG"] if num_wrong else []
    parts += [f"{num_stopped} stopped before the end"] if num_stopped else []
    parts += [f"{num_worlds - len(results)} not walked"] if len(results) < num_worlds else []
    seconds = sum(walked.seconds for walked in results)
    text = f"{', '.join(parts)}; {states:,} states, {transitions:,} transitions, {seconds:.0f} s"
    return f"summary: {text}\n"


def _numbered(path: Sequence[PathStep]) -> list[str]:
    return [f"    {n:2}  {line}" for n, line in enumerate(format_program(path), 1)]


def walked_to_json(walked: Walked) -> dict[str, object]:
    """Return the result as JSON types (docs/reference/json.md)."""
    task = walked.task
    return {
        "format": "blockstep-explore",
        "version": 1,
        "preset": task.world.name,
        "engine": task.engine or None,
        "equivalence": walked.equivalence if task.engine else None,
        "left_out": walked.left_out,
        "excused": sorted(walked.excused),
        "profile": task.profile.name,
        "exit_code": int(get_exit_code(walked)),
        "is_complete": walked.is_complete,
        "counts": asdict(walked.counts),
        "expected": None if task.world.expected is None else asdict(task.world.expected),
        "seconds": walked.seconds,
        "found": list(walked.found),
        "program": format_program(walked.path),
        "cycle": format_program(walked.cycle),
    }


def render_shortest(shortest: Shortest) -> str:
    """Return the program, or a line that there is none."""
    if not shortest.found:
        return f"{shortest.name}: not reached in these worlds\n"
    head = f"{shortest.name}: after {len(shortest.path)} events (preset {shortest.world})"
    return "\n".join([head, *_numbered(shortest.path)]) + "\n"
