"""The installed vLLM release, if there is one, and marks of tests that need it."""

from __future__ import annotations

import pytest

from blockstep.conformance.engines.adapters.vllm_releases import (
    REFERENCE,
    TRIED,
    Release,
    get_installed_version,
    get_release,
    get_release_problem,
)
from blockstep.conformance.search.options import find_profile

PROBLEM = get_release_problem(get_installed_version())
"""Why no release can be tested here; None if one can."""
VERSION = (get_installed_version() or REFERENCE).split("+")[0]
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
"""Importing vLLM imports torch, which warns of itself."""


def get_known(version: str) -> Release:
    """Return what the adapter knows of a release."""
    release = get_release(version)
    assert release is not None
    return release


RELEASE = get_known(VERSION if PROBLEM is None else REFERENCE)
"""The installed release; the reference, where tests with vLLM are skipped."""
PROFILE = find_profile(RELEASE.profile)


def needs(is_met: bool, reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs vLLM, and something that not every release meets."""
    return pytest.mark.skipif(PROBLEM is not None or not is_met, reason=PROBLEM or reason)


needs_vllm = needs(True, "")
needs_reference = needs(VERSION == REFERENCE, f"tells what vLLM {REFERENCE} does")
needs_newest = needs(TRIED[-1] == VERSION, f"tells what vLLM {TRIED[-1]} does")
