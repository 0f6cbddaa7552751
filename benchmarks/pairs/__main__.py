"""Which things that are legal together `blockstep check` draws together.

    python -m benchmarks.pairs [--events N] [--seed N]

Plays what `check` plays, the specification against itself, and writes
benchmarks/pairs/reached.json, of which `make docs` makes the page. Exit code 1: a legal cell was
not reached and has no reason, or one with a reason was.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from benchmarks._pages import get_commit, make_parser, play_episodes
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
    args = make_parser("pairs", __doc__, EVENTS).parse_args()
    played, counts = play(args.events, args.seed)
    empty, wrong = list_empty(counts), list_wrong(counts)
    for cell in empty:
        print(f"pairs: {cell}: legal, not drawn, and no reason says why")
    for cell in wrong:
        print(f"pairs: {cell}: reached, and a reason says that it cannot be")
    if args.events == EVENTS:
        run = {"day": datetime.now(tz=UTC).date().isoformat(), "commit": get_commit()}
        record = {"run": run, "played": played, "episodes": dict(sorted(counts.items()))}
        REACHED.write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")
    return 1 if empty or wrong else 0


def play(num_events: int, seed: int) -> tuple[dict[str, int], Counter[str]]:
    """Events played, by options, and the episodes that reached each cell."""
    played: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for names, part in PLAYED:
        options = CheckOptions(engine="spec", seed=seed, with_features=names)
        episodes = [*play_episodes(run_episode, options, load(options), num_events // part)]
        for episode in episodes:
            counts.update(episode.pairs)
        text = " ".join(["check", *[f"--with {name}" for name in names]])
        played[text] = sum(episode.num_events for episode in episodes)
    return played, counts


if __name__ == "__main__":
    raise SystemExit(main())
