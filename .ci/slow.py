"""Make tests/slow.txt, the tests that `make quick` leaves out, from the times of a whole run.

    make test ARGS='--whole --durations=0 --durations-min=0.2' | python .ci/slow.py > tests/slow.txt

A test function is slow if its cases took half a second or more together. The rules of the house
stay in: a change breaks them more often than anything else, and CI refuses it then.
"""

from __future__ import annotations

import re
import sys
from collections import Counter

LINE = re.compile(r"^([\d.]+)s (?:call|setup|teardown)\s+(\S+?)(?:\[.*)?$")
SECONDS = 0.5
ALWAYS = "tests/test_house.py::"


def main() -> int:
    """Read the run from standard input, write the names; exit code 2 if it has no times."""
    seconds: Counter[str] = Counter()
    for text in sys.stdin:
        found = LINE.match(text.rstrip())
        if found is not None:
            seconds[found[2]] += float(found[1])  # type: ignore[assignment]
    if not seconds:
        print("slow: no times in the input; give pytest --durations=0", file=sys.stderr)
        return 2
    slow = {name for name, total in seconds.items() if total >= SECONDS}
    print("\n".join(sorted(name for name in slow if not name.startswith(ALWAYS))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
