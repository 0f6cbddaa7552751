"""Measure how often the first line of a failure names its cause in a vLLM release.

    PYTHONPATH=... .venv-vllm-0.19.1/bin/python -m benchmarks.headlines [NAME ...]

Plants each wrong decision by a subclass of a class of the release (`planted_support.in_vllm` and
the modules `planted_support.held_out_*` of the tests), runs `blockstep check` under the release's
profile, and prints whether the first line names the cause: whether it matches a pattern. The
patterns were written from the wrong decisions. Those of the held-out ones were committed, in six
sets, before any of the set was run. A wrong decision that no check of the release can meet is left
out, with the reason. The lines are put into benchmarks/results/headlines.json; those
of other wrong decisions stay there.

Exit codes: 0 at least 19 of 20 do; 1 fewer; 2 the release is not installed, or there is no such
name.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks._pages import get_commit

from blockstep.conformance.engines.adapters.vllm_releases import REFERENCE, get_installed_version

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
RESULTS = Path(__file__).with_name("results") / "headlines.json"


def main(names: list[str]) -> int:
    """Print a line for each wrong decision, and of how many the first line names the cause."""
    if get_installed_version() != REFERENCE:
        print(f"benchmarks.headlines: needs vLLM {REFERENCE} (make vllm VLLM={REFERENCE})")
        return 2
    sys.path.insert(0, str(SUPPORT))
    in_vllm = import_module("planted_support.in_vllm")  # it imports vLLM
    held_out = import_module("planted_support.held_out_in_vllm")
    later = import_module("planted_support.held_out_later")
    last = import_module("planted_support.held_out_last")
    fifth = import_module("planted_support.held_out_fifth")
    sixth = import_module("planted_support.held_out_sixth")

    sets = (in_vllm, held_out, later, last, fifth, sixth)
    planted = [entry for each in sets for entry in each.PLANTED]
    chosen = [entry for entry in planted if not names or entry.name in names]
    if len(chosen) < len(set(names)) or not chosen:
        print(f"benchmarks.headlines: known are {[entry.name for entry in planted]}")
        return 2
    for entry in chosen:
        if entry.unseen:
            print(f"UNSEEN {entry.name}: {entry.unseen}")
    chosen = [entry for entry in chosen if not entry.unseen]
    num_named = 0
    for entry in chosen:
        start = time.process_time()
        line = in_vllm.make_first_line(entry)
        is_named = entry.is_named_by(line)
        num_named += is_named
        seconds = time.process_time() - start
        print(f"{'named' if is_named else 'LOST '}  {entry.name} ({seconds:.0f} s): {line}")
        sys.stdout.flush()
        keep(entry.name, {"is_named": is_named, "first_line": line, "seconds": round(seconds)})
    print(f"the first line names the cause of {num_named} of {len(chosen)}")
    return int(num_named * 20 < len(chosen) * 19)


def keep(name: str, result: dict[str, Any]) -> None:
    """Put the result of one wrong decision into the file, with the day and the commit."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    run = {"day": f"{datetime.now(UTC):%Y-%m-%d}", "commit": get_commit()}
    kept[name] = {**result, "vllm": REFERENCE, **run}
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
