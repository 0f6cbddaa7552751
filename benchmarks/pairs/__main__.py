"""Which things that are legal together `blockstep check` draws together.

    python -m benchmarks.pairs [--events N] [--seed N]

Plays what `check` plays, the specification against itself, and writes
benchmarks/pairs/reached.json, of which `make docs` makes the page. Exit code 1: a legal cell was
not reached and has no reason, or one with a reason was.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from benchmarks._pages import get_commit
from benchmarks.pairs.page import list_empty, list_wrong

from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions, load

REACHED = Path(__file__).with_name("reached.json")
EVENTS = 150_000
"""Events with default draws, as many as `blockstep check` plays by default."""
PLAYED: tuple[tuple[tuple[str, ...], int], ...] = (
    ((), 1),
    (("sessions", "pins", "keys"), 6),
    (("sessions", "transfers", "stops"), 6),
    (("sessions", "encoder", "masks"), 6),
)
"""Features of every run, and the part of EVENTS that is played with them."""


def main() -> int:
    """Play, and write the counts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pairs",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--events", type=int, default=EVENTS, help="of default draws")
    parser.add_argument("--seed", type=int, default=0, help="of the episodes")
    args = parser.parse_args()
    played, counts = play(args.events, args.seed)
    empty, wrong = list_empty(counts), list_wrong(counts)
    for cell in empty:
        print(f"pairs: {cell}: legal, not drawn, and no reason says why")
    for cell in wrong:
        print(f"pairs: {cell}: reached, and a reason says that it cannot be")
    if args.events == EVENTS:
        run = {"day": datetime.now(tz=UTC).date().isoformat(), "commit": get_commit()}
        told = {"run": run, "played": played, "episodes": dict(sorted(counts.items()))}
        REACHED.write_text(json.dumps(told, indent=0) + "\n", encoding="utf-8")
    return 1 if empty or wrong else 0


def play(num_events: int, seed: int) -> tuple[dict[str, int], Counter[str]]:
    """Events played, by options, and the episodes that reached each cell."""
    played: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for names, part in PLAYED:
        options = CheckOptions(engine="spec", seed=seed, with_features=names)
        text = " ".join(["check", *[f"--with {name}" for name in names]])
        played[text] = play_options(options, num_events // part, counts)
    return played, counts


def play_options(options: CheckOptions, num_events: int, counts: Counter[str]) -> int:
    """Play episodes up to a number of events, and count their cells; returns the events played."""
    make_engine, num_played, index = load(options), 0, 0
    while num_played < num_events:
        episode = run_episode(options, index, make_engine)
        assert episode.first is None, f"episode {index} of {options}: {episode.first}"
        counts.update(episode.pairs)
        num_played += episode.num_events
        index += 1
    return num_played


if __name__ == "__main__":
    raise SystemExit(main())
