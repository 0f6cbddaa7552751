"""Tables of the shortest program for each quirk and each seeded bug, over several worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from blockstep.conformance.explore.shard import MAX_STATES, Task
from blockstep.conformance.explore.walk import PathStep, get_obstacle, walk
from blockstep.conformance.explore.world import World
from blockstep.conformance.museum import EXHIBITS
from blockstep.conformance.protocol.program import describe, describe_event
from blockstep.conformance.protocol.registry import MUSEUM
from blockstep.spec.profiles import QUIRKS, Profile, get_smallest_profile
from blockstep.spec.vocabulary import Commit, Drafts, Event

NOWHERE = "-"
UNBROKEN = "none: it is only another behaviour"
FIRST_LIMITS = (200, 2_000)
"""Limits of the states of a walk while nothing has been found in any world."""


@dataclass(frozen=True, slots=True)
class Shortest:
    """The shortest program that shows something, if any world has one."""

    name: str
    world: str = NOWHERE
    path: tuple[PathStep, ...] = ()
    cycle: tuple[PathStep, ...] = ()
    found: tuple[str, ...] = ()

    @property
    def length(self) -> int | None:
        """Events until it shows; a cycle counts once."""
        return len(self.path) + len(self.cycle) if self.found else None


def find_shortest(name: str, tasks: Sequence[Task], jobs: int = 1) -> Shortest:
    """Return the shortest program over all tasks, the first of equal ones.

    All worlds are first walked a short way. Once one of them has a program, the others are walked
    only to a depth that would be shorter still.
    """
    best = Shortest(name)
    for limit in (*FIRST_LIMITS, MAX_STATES):
        best = _find_in_passing(best, tasks, jobs, limit)
        if best.found:
            return _find_in_passing(best, tasks, jobs, MAX_STATES)
    return best


def _find_in_passing(best: Shortest, tasks: Sequence[Task], jobs: int, limit: int) -> Shortest:
    """Return the shortest program after one walk for each task, of at most `limit` states."""
    for task in tasks:
        task = replace(task, max_states=min(task.max_states, limit))
        if best.length is not None:
            task = replace(task, max_depth=best.length - 2)
        walked = walk(task, jobs)
        here = Shortest(best.name, task.world.name, walked.path, walked.cycle, walked.found)
        if here.length is not None and (best.length is None or here.length < best.length):
            best = here
    return best


def format_event(event: Event) -> str:
    """Return an event as one line."""
    return describe_event(event) if isinstance(event, Commit | Drafts) else describe(event)


def format_program(path: Sequence[PathStep]) -> list[str]:
    """Return a line for each event."""
    return [format_event(step.event) for step in path]


def list_worlds(worlds: Iterable[World]) -> list[dict[str, object]]:
    """Return a row for each world: the counts that a complete walk must have, and what it is."""
    rows: list[dict[str, object]] = []
    for world in worlds:
        counts = None if world.expected is None else asdict(world.expected)
        fields = ("states", "transitions", "refused", "depth")
        shown = {name: f"{counts[name]:,}" if counts else "not counted" for name in fields}
        rows.append({"world": world.name, **shown, "what": world.summary})
    return rows


def quirk_rows(
    worlds: Sequence[World],
    max_states: int,
    jobs: int,
    names: Sequence[str],
    advance: Callable[[str], None],
) -> list[dict[str, object]]:
    """Return for each quirk when it first differs from the specification, and first breaks a
    property.
    """
    rows: list[dict[str, object]] = []
    for story in QUIRKS:
        quirk, profile = story.quirk, get_smallest_profile(story)
        if names and quirk not in names:
            continue
        advance(quirk)
        without = Profile("without", frozenset(story.upon))
        tasks = [Task(world, without, max_states=max_states) for world in worlds]
        differing = [replace(task, properties=False, quirk=quirk) for task in tasks]
        differs = find_shortest(quirk, differing, jobs)
        if story.upon:  # a property that breaks without the quirk is not its doing
            tasks = [task for task in tasks if not walk(task).found]
            worlds = [task.world for task in tasks]
        breaks = find_shortest(quirk, [replace(task, profile=profile) for task in tasks], jobs)
        rows.append(
            {
                "quirk": str(quirk),
                "differs after": differs.length or NOWHERE,
                "in": differs.world,
                "violates after": breaks.length or NOWHERE,
                "in world": breaks.world,
                "property": _broken(breaks, story.property_ids),
            }
        )
    return rows


def museum_rows(
    worlds: Sequence[World],
    max_states: int,
    jobs: int,
    names: Sequence[str],
    advance: Callable[[str], None],
) -> list[dict[str, object]]:
    """Return for each seeded bug the shortest program on which it differs.

    Raises:
        EngineNotFoundError: no seeded bug has a given name.
    """
    rows: list[dict[str, object]] = []
    for name in names or EXHIBITS:
        advance(name)
        task = Task(worlds[0], properties=False, engine=f"{MUSEUM}{name}", max_states=max_states)
        tasks = [replace(task, world=world) for world in worlds]
        tasks = [task for task in tasks if get_obstacle(task) is None]
        shortest = find_shortest(name, tasks, jobs)
        rows.append(
            {
                "defect": name,
                "events": shortest.length or NOWHERE,
                "world": shortest.world,
                "first difference": _sentence(shortest),
                "program": "; ".join(format_program(shortest.path)),
            }
        )
    return rows


def join_worlds(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return the rows of seeded bugs joined by world, as the page has them."""
    by_world: dict[object, list[str]] = {}
    for row in rows:
        defect = f"{row['defect']} {row['events']} ({row['first difference']})"
        by_world.setdefault(row["world"], []).append(defect)
    return [
        {"world": world, "defect, events, first difference": "; ".join(defects)}
        for world, defects in by_world.items()
    ]


def _sentence(shortest: Shortest) -> str:
    return shortest.found[0].split(":")[0] if shortest.found else NOWHERE


def _broken(shortest: Shortest, property_ids: Sequence[str]) -> str:
    """Return the check that fails; of several, one of the properties that the quirk's story
    names.
    """
    if not shortest.found and not property_ids:
        return UNBROKEN
    expected = (line for line in shortest.found if line.split()[0] in property_ids)
    return next(expected, "").split(":")[0] or _sentence(shortest)


def render_table(rows: Sequence[dict[str, object]], markdown: bool = False) -> str:
    """Return rows as a table with the keys as columns; programs are only in the JSON."""
    if not rows:
        return "nothing to show\n"
    columns = [name for name in rows[0] if name != "program"]
    cells = [columns, *([str(row[name]) for name in columns] for row in rows)]
    if markdown:
        cells.insert(1, ["---"] * len(columns))
        return "".join(f"| {' | '.join(c.replace('|', '/') for c in row)} |\n" for row in cells)
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    return "\n".join(lines) + "\n"
