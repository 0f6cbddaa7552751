"""Published traces of real workloads, which the repository does not contain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def find_trace(name: str) -> Path:
    """Return a published trace in the folder of BLOCKSTEP_TRACES; skip the test without it."""
    folder = os.environ.get("BLOCKSTEP_TRACES")
    path = Path(folder or "", name)
    if folder is None or not path.is_file():
        pytest.skip(f"set BLOCKSTEP_TRACES to a folder that contains the published trace {name}")
    return path
