"""Legal: which cells of `judge.pairs` can be reached, and the reason for each that cannot.

No list of what goes together is kept. Each row and column has small examples; two are merged, and
the specification is asked. What it says against them is the reason, word for word. Only the reasons
of signals and moments are written here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from blockstep.conformance.judge.pairs import SETTINGS, SIGNALS, list_cells
from blockstep.conformance.protocol.feature import Example
from blockstep.conformance.protocol.features import (
    BY_NAME,
    FEATURES,
    HOSTILE,
)
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v

PLAIN_CONFIG = v.Config(
    num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64
)
PLAIN_REQUEST = v.Request("A", (1, 2, 3, 4, 5, 6), max_tokens=4)


EXAMPLES: Mapping[str, tuple[Example, ...]] = {
    **{feature.name: feature.examples or (Example(),) for feature in FEATURES},
    **{name: setting.examples for name, setting in SETTINGS.items()},
}
"""Examples of each feature and setting, one for each way that may go with others."""
VALUES: Mapping[str, Any] = {
    **{
        name: value
        for it in FEATURES
        for fields in it.goal_fields.values()
        for name, value in fields.items()
    },
    **{
        name: value for it in FEATURES for one in it.examples for name, value in one.request.items()
    },
    "max_tokens": 3,
    "min_tokens": 1,
    "repetition_detection": v.RepetitionDetection(2),
    "arrival_time": 1,
    "items": (v.MultiModalItem("cat", 0, 1),),
    "priority": 1,
    "skip_reading_prefix_cache": True,
}
"""A value of each field that a session or its chunk may set."""
TO_ALL = tuple([signal for feature in FEATURES for signal in feature.signals_to_all])
"""Signals that name no request."""
OWN_EVENT = "it is an event of its own, and no part of an answer"
NO_REQUEST = "it names no request"
A_PLAN = "it names a plan in flight, and so the requests that have rows in it"
IMPOSSIBLE: tuple[tuple[Collection[str], Collection[str], str], ...] = (
    (
        SIGNALS.keys() - {"load_ends", "load_fails", "read_ends"},
        {"in_its_last_answer"},
        OWN_EVENT,
    ),
    (TO_ALL, {"never_submitted"}, NO_REQUEST),
    (
        {"bitmask"},
        {"never_submitted", "before_its_plan", "between_answers"},
        A_PLAN,
    ),
    ({"abort"}, {"before_its_last_answer"}, "it ends the request itself"),
    ({"load_fails"}, {"never_submitted"}, "a block is of a load, and a load is of a request"),
)
"""Signals and moments at which they cannot come, and why."""


UNDRAWN: Mapping[str, str] = {
    "load_fails@before_its_last_answer": "Rows in flight behind a load that has failed are void. "
    "Only a request that was scheduled again from the start can end by one, not by that load.",
}
"""Cells that are legal and that no draw reaches, and why."""


def merge(one: Example, other: Example) -> Example | str:
    """Both at once, or the reason why one field would have two values. Groups are side by side."""
    asked: dict[str, Any] = {**one.config}
    for name, value in other.config.items():
        if name == "groups" and name in asked:
            asked[name] = tuple(dict.fromkeys((*asked[name], *value)))
        elif asked.setdefault(name, value) != value:
            return f"a config has one value of {name}"
    request = {**one.request, **other.request}
    return Example(asked, request)


def find_problem(example: Example) -> str:
    """The reason for which the specification rejects a config or a request; "" if it takes both."""
    config = replace(PLAIN_CONFIG, **example.config)
    problems = v.config_problems(config)
    if problems:
        return f"{problems[0].field}: {problems[0].rule}"
    request = replace(PLAIN_REQUEST, **example.request)
    seen = SpecEngine(config).apply(v.Submit(request))
    return seen.detail if isinstance(seen, v.Rejected) else ""


@cache
def find_reason_of_pair(one: str, other: str) -> str:
    """Why no run has both features or settings; "" if some run may."""
    problems: list[str] = []
    for first, second in product(EXAMPLES[one], EXAMPLES[other]):
        both = merge(first, second)
        problems.append(both if isinstance(both, str) else find_problem(both))
        if not problems[-1]:
            return ""
    return problems[0]


@cache
def find_reason_of_chunk(brings: str, has: str) -> str:
    """Why no session that has a field is given a chunk with another; "" if some may be."""
    engine = SpecEngine(PLAIN_CONFIG)
    session = replace(PLAIN_REQUEST, resumable=True, **_with_grammar({has: VALUES[has]}))
    if brings in v.SESSION_FIELDS:
        session = replace(session, **_with_grammar({brings: VALUES[brings]}))
    chunk = v.Request("A", (5, 6), max_tokens=2, resumable=True)
    chunk = replace(chunk, **_with_grammar({brings: VALUES[brings]}))
    for event in (v.Submit(session), v.StreamingUpdate(chunk)):
        seen = engine.apply(event)
        if isinstance(seen, v.Rejected):
            return seen.detail
    return ""


def _with_grammar(asked: dict[str, Any]) -> dict[str, Any]:
    return {"structured_output": True, **asked} if "grammar" in asked else asked


def find_reason_of_signal(signal: str, moment: str) -> str:
    """Why a signal cannot come at a moment; "" if it can."""
    reasons = (
        why for signals, moments, why in IMPOSSIBLE if signal in signals and moment in moments
    )
    return next(reasons, "")


OF_SETTINGS: Mapping[str, str] = {
    name: feature.name for feature in FEATURES for name in feature.settings
}
"""Settings that no run without a feature has, and that feature."""
OF_SIGNALS: Mapping[str, str] = {
    signal: feature.name
    for feature in FEATURES
    for signal in (*feature.signals, *feature.signals_to_all)
}
"""The feature of each signal."""
OF_FIELDS = {name: feature.name for feature in FEATURES for name in feature.request}
"""The feature of a request's fields, where they have one; the last of several."""
REFUSED_AT = ("never_submitted", "before_its_end_is_told", "after_its_end")
"""Moments at which a signal about one request is refused, or changes nothing."""


def list_features(cell: str) -> list[str]:
    """Names of the features without which a cell cannot be reached."""
    if "+" in cell:
        names = cell.split("+")
        return [OF_SETTINGS.get(name, name) for name in names if name in {**OF_SETTINGS, **BY_NAME}]
    if "@" in cell:
        signal, moment = cell.split("@")
        is_refused = moment in REFUSED_AT and signal not in TO_ALL
        return [OF_SIGNALS[signal], *([HOSTILE.name] if is_refused else [])]
    return ["sessions", *[OF_FIELDS[name] for name in cell.split(">") if name in OF_FIELDS]]


def list_legal(absent: Collection[str] = (), always: Collection[str] = ()) -> list[str]:
    """The cells that runs without some features, and all with some others, can reach."""
    found = []
    for cell in list_cells():
        if find_reason(cell):
            continue
        names = list_features(cell)
        if not {*names} & {*absent} and not any(
            find_reason_of_pair(*sorted((name, other)))
            for name in names
            for other in always
            if other != name
        ):
            found.append(cell)
    return found


def find_reason(cell: str) -> str:
    """Why a cell of the tables cannot be reached; "" if it can."""
    for sign, find in (
        ("+", find_reason_of_pair),
        ("@", find_reason_of_signal),
        (">", find_reason_of_chunk),
    ):
        one, found, other = cell.partition(sign)
        if found:
            return find(one, other)
    raise ValueError(f"no cell is called {cell!r}")
