"""Measure how often the first line of a failure names its cause in a vLLM release.

    PYTHONPATH=... .venv-vllm-0.19.1/bin/python -m benchmarks.headlines [NAME ...]

Plants each wrong decision by a subclass of a class of the release (`planted_support.in_vllm` of the
tests), runs `blockstep check` under the release's profile, and prints whether the first line names
the cause: whether it matches a pattern that was written from the wrong decision.

Exit codes: 0 at least 19 of 20 do; 1 fewer; 2 the release is not installed, or there is no such
name.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path

from blockstep.conformance.engines.adapters.vllm_releases import REFERENCE, get_installed_version

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"


def main(names: list[str]) -> int:
    """Print a line for each wrong decision, and of how many the first line names the cause."""
    if get_installed_version() != REFERENCE:
        print(f"benchmarks.headlines: needs vLLM {REFERENCE} (make vllm VLLM={REFERENCE})")
        return 2
    sys.path.insert(0, str(SUPPORT))
    in_vllm = import_module("planted_support.in_vllm")  # it imports vLLM

    chosen = [entry for entry in in_vllm.PLANTED if not names or entry.name in names]
    if len(chosen) < len(set(names)) or not chosen:
        print(f"benchmarks.headlines: known are {[entry.name for entry in in_vllm.PLANTED]}")
        return 2
    num_named = 0
    for entry in chosen:
        start = time.process_time()
        line = in_vllm.tell_first_line(entry)
        is_named = entry.is_named_by(line)
        num_named += is_named
        seconds = time.process_time() - start
        print(f"{'named' if is_named else 'LOST '}  {entry.name} ({seconds:.0f} s): {line}")
        sys.stdout.flush()
    print(f"the first line names the cause of {num_named} of {len(chosen)}")
    return int(num_named * 20 < len(chosen) * 19)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
