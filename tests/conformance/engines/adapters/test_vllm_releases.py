"""Releases of vLLM: each is known by the entry before it, and an untried release gets a note."""

from __future__ import annotations

from itertools import pairwise

import pytest

from blockstep.conformance.engines.adapters.vllm_releases import (
    REFERENCE,
    RELEASES,
    TRIED,
    get_release,
    get_release_note,
    get_release_problem,
)
from blockstep.conformance.search.options import find_profile
from blockstep.spec import profiles
from blockstep.spec.profiles import get_profile, read_release_number


def test_entries_are_of_tried_releases_oldest_first() -> None:
    for versions in (TRIED, tuple(RELEASES), tuple(one.name[5:] for one in profiles.RELEASES)):
        numbers = [read_release_number(version) or () for version in versions]
        assert all(older < newer for older, newer in pairwise(numbers))
        assert set(versions) <= set(TRIED)
    assert all(version == release.version for version, release in RELEASES.items())
    assert REFERENCE in TRIED
    assert TRIED[0] == next(iter(RELEASES)) == profiles.RELEASES[0].name[5:]


@pytest.mark.parametrize(
    ("version", "entry"),
    [
        ("0.11.0", "0.11.0"),
        ("0.13.0", "0.12.0"),
        ("0.19.1+cpu", "0.19.0"),
        ("0.19.1rc1", "0.19.0"),
        ("0.24.1.dev5+g1a2b3c", "0.24.0"),
        ("1.0.0", [*RELEASES][-1]),
    ],
)
def test_a_release_is_known_by_the_entry_before_it(version: str, entry: str) -> None:
    assert get_release_problem(version) is None
    release = get_release(version)
    assert release is not None
    assert release.version == version.partition("+")[0]
    assert release.packages == RELEASES[entry].packages
    assert [getattr(release, name) for name in release.__slots__ if name.startswith("has_")] == [
        getattr(RELEASES[entry], name) for name in release.__slots__ if name.startswith("has_")
    ]
    assert find_profile(release.profile).quirks


def test_a_profile_is_that_of_the_release_before_it() -> None:
    newest = profiles.RELEASES[-1]
    for name in ("vllm-99.0.0", "vllm-99.0.0rc1"):
        found = get_profile(name)
        assert found is not None
        assert (found.name, found.quirks, found.spares) == (name, newest.quirks, True)
    older, newer = get_profile("vllm-0.15.1"), get_profile("vllm-0.14.1")
    assert older is not None
    assert newer is not None
    assert older.quirks == newer.quirks
    for name in ("vllm-0.10.2", "vllm-0.9.0", "vllm-", "vllm-new", "0.19.1"):
        assert get_profile(name) is None


def test_quirks_are_added_to_a_release_that_has_no_entry() -> None:
    found = get_profile("vllm-0.19.1+no_full_isl_reserve")
    assert found is not None
    assert found.quirks == find_profile("vllm-0.19.1").quirks | {profiles.Quirk.NO_FULL_ISL_RESERVE}
    assert found.spares


def test_an_untried_release_gets_a_note() -> None:
    assert all(get_release_note(version) is None for version in TRIED)
    assert get_release_note("0.19.1+cpu") is None
    note = f"vLLM 99.0.0 was not tried; it is held to what is known of {TRIED[-1]}"
    assert get_release_note("99.0.0") == note
    assert get_release_note("0.19.1rc1") is not None


@pytest.mark.parametrize("version", ["0.10.2", "0.9.0.1", "main"])
def test_a_release_before_the_first_entry_is_refused(version: str) -> None:
    assert get_release(version) is None
    assert f"vLLM {version} is not supported" in str(get_release_problem(version))


@pytest.mark.parametrize("version", ["0.1.dev1+g1a2b3c4", "0.1.dev15234", "dev"])
def test_a_fork_built_without_tags_is_shown_how_to_name_its_release(version: str) -> None:
    problem = str(get_release_problem(version))
    assert f"vLLM {version} is not supported" in problem
    assert "`SETUPTOOLS_SCM_PRETEND_VERSION=0.19.1+fork pip install .`" in problem
    assert get_release_problem("0.19.1+fork") is None
    assert get_release_note("0.19.1+fork") is None
