"""Values of the vocabulary from Hypothesis, by their annotations: new fields come by themselves."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from blockstep.spec.vocabulary.keys import BlockKey, Link, chain_from_links


def strategy_for(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    args = get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return st.builds(
            hint, **{f.name: strategy_for(hints[f.name]) for f in dataclasses.fields(hint)}
        )
    if get_origin(hint) is tuple and args[-1] is not Ellipsis:
        return st.tuples(*(strategy_for(arg) for arg in args))
    if get_origin(hint) is tuple:
        return st.lists(strategy_for(args[0]), max_size=3).map(tuple)
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*(strategy_for(arg) for arg in args))
    if hint is BlockKey:
        links = st.lists(strategy_for(Link), min_size=1, max_size=3)
        return links.map(tuple).map(chain_from_links)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return {
        int: st.integers(-(2**40), 2**40),
        bool: st.booleans(),
        str: st.text(max_size=8),
        type(None): st.none(),
    }[hint]
