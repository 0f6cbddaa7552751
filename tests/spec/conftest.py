"""What each test of the specification is played with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from followers import ENGINES, following


@pytest.fixture(autouse=True)
def _engines_follow(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let our engines follow each scene, and the host engine alone the long random walks.

    No engine follows a test marked `spec_alone`: there the specification is made wrong.
    """
    if request.node.get_closest_marker("spec_alone") is not None:
        yield
        return
    is_walk = request.path.stem.endswith("_walks")
    with following({"host": ENGINES["host"]} if is_walk else ENGINES):
        yield
