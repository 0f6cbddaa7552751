"""Copies of values: `replace`, `copy` and `pickle` behave as those of `dataclasses`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import pytest

from blockstep.spec.copies import replace, wide_dataclass
from blockstep.spec.core.requests import RequestState
from blockstep.spec.vocabulary import Config, Request, Status

REQUEST = RequestState(Request("A", (1, 2, 3)), Status.RUNNING, (7,), num_computed_tokens=3)


def test_replace_equals_that_of_the_standard_library() -> None:
    changed = {"status": Status.PREEMPTED, "num_computed_tokens": 0, "spec_token_ids": (4,)}
    assert replace(REQUEST, **changed) == dataclasses.replace(REQUEST, **changed)  # type: ignore[arg-type]
    assert replace(Config(8), max_loras=2) == dataclasses.replace(Config(8), max_loras=2)


def test_fields_that_are_not_replaced_are_the_same_objects() -> None:
    assert replace(REQUEST, num_preemptions=1).request is REQUEST.request
    assert replace(REQUEST) == REQUEST


def test_replacing_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="num_blocks"):
        replace(REQUEST, num_blocks=1)  # type: ignore[call-arg]


@wide_dataclass(frozen=True, slots=True)
class Wide:
    """A value of two fields."""

    name: str
    number: int = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """The same value as a plain dataclass."""

    name: str
    number: int = 7


@pytest.mark.parametrize(("args", "kwargs"), [(("a",), {}), (("a", 1), {}), ((), {"name": "b"})])
def test_a_wide_value_has_the_fields_of_a_plain_one(
    args: tuple[str, ...], kwargs: dict[str, str]
) -> None:
    wide, plain = Wide(*args, **kwargs), Plain(*args, **kwargs)  # type: ignore[arg-type]
    assert type(wide) is Wide
    assert dataclasses.asdict(wide) == dataclasses.asdict(plain)
    assert repr(wide) == repr(plain).replace("Plain", "Wide")
    assert hash(wide) == hash(Wide(wide.name, wide.number)) == hash(plain)
    assert wide != Wide("c")


def test_a_wide_value_is_frozen() -> None:
    for value in (Wide("a"), replace(Wide("a"), number=1), pickle.loads(pickle.dumps(REQUEST))):
        for name in [part.name for part in dataclasses.fields(value)]:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, name, 0)
            with pytest.raises(dataclasses.FrozenInstanceError):
                delattr(value, name)
        assert not hasattr(value, "__dict__")


def test_a_wide_value_survives_copies() -> None:
    for made in (copy.copy(REQUEST), copy.deepcopy(REQUEST), pickle.loads(pickle.dumps(REQUEST))):
        assert made == REQUEST
        assert type(made) is RequestState


def test_a_wide_class_has_the_signature_of_a_plain_one() -> None:
    assert inspect.signature(Wide).parameters == inspect.signature(Plain).parameters
    with pytest.raises(TypeError, match="name"):
        Wide()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="other"):
        Wide("a", other=1)  # type: ignore[call-arg]
