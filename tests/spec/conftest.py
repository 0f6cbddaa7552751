"""Fixtures of the specification's tests: our engines follow each scene."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from followers import ENGINES, following


@pytest.fixture(autouse=True)
def _engines_follow(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run our engines in lockstep with each scene, long random walks on the host engine only.

    No engine follows a test marked `spec_alone`, since such a test breaks the specification.
    """
    if request.node.get_closest_marker("spec_alone") is not None:
        yield
        return
    is_walk = request.path.stem.endswith("_walks")
    with following({"host": ENGINES["host"]} if is_walk else ENGINES):
        yield
