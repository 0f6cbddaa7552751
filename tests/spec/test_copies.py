"""A copy has the fields that were named, and otherwise those of the original."""

from __future__ import annotations

import dataclasses

import pytest

from blockstep.spec.copies import replace
from blockstep.spec.requests import RequestState
from blockstep.spec.vocabulary import Config, Request, Status

REQUEST = RequestState(Request("A", (1, 2, 3)), Status.RUNNING, (7,), num_computed_tokens=3)


def test_a_copy_is_what_the_standard_library_makes() -> None:
    changed = {"status": Status.PREEMPTED, "num_computed_tokens": 0, "spec_token_ids": (4,)}
    assert replace(REQUEST, **changed) == dataclasses.replace(REQUEST, **changed)  # type: ignore[arg-type]
    assert replace(Config(8), max_loras=2) == dataclasses.replace(Config(8), max_loras=2)


def test_what_is_not_named_is_the_same_object() -> None:
    assert replace(REQUEST, num_preemptions=1).request is REQUEST.request
    assert replace(REQUEST) == REQUEST


def test_a_field_that_there_is_not_is_an_error() -> None:
    with pytest.raises(TypeError, match="num_blocks"):
        replace(REQUEST, num_blocks=1)  # type: ignore[call-arg]
