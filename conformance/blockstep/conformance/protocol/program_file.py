"""Files of programs, which can be stored, sent and replayed on any engine.

::

    {
     "format": "blockstep-program",
     "version": 1,
     "note": "P1 freed_blocks_return: ...",
     "config": {"num_blocks": 4, "block_size": 2},
     "token_seed": 0,
     "vocabulary_size": 50,
     "actions": [
      {"type": "Submit", "request": {"request_id": "A", "prompt_token_ids": [0, 0]}},
      {"type": "Schedule"},
      {"type": "Answer"}
     ]
    }

One JSON object, one action a line so that a change of one shows as one. A field at its default may
be left out, for defaults are part of the format; what is not known is refused, so that a newer
program is never half understood. Described in docs/reference/json.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from blockstep.conformance.protocol.codec import build, build_tagged, to_plain, to_tagged
from blockstep.conformance.protocol.program import Action, Hostile, Program, Propose
from blockstep.conformance.protocol.trace_lines import TraceError, read_lines, shown
from blockstep.spec.vocabulary import EVENT_TYPES, Config, config_problems

PROGRAM_FORMAT = "blockstep-program"
PROGRAM_VERSION = 1
SUFFIX = ".json"
"""Suffix of the programs in a corpus."""

_ACTIONS = {cls.__name__: cls for cls in get_args(Action) if cls is not Hostile}
_EVENTS = {cls.__name__: cls for cls in EVENT_TYPES}


class _AnyHeader(msgspec.Struct):
    """The fields that tell whether the rest of a program can be read."""

    format: str
    version: int


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    config: dict[str, Any]
    actions: list[dict[str, Any]]
    note: str = ""
    token_seed: int = 0
    vocabulary_size: int = 50


def write_program(program: Program, note: str = "") -> str:
    """Return the text of a program file; `note` describes it to readers.

    Raises:
        ValueError: a value in it is of a wrong type, which the file could not hold exactly.
    """
    head = {
        "format": PROGRAM_FORMAT,
        "version": PROGRAM_VERSION,
        "note": note,
        "config": to_plain(program.config),
        "token_seed": program.token_seed,
        "vocabulary_size": program.vocabulary_size,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(head[name])}," for name in head if head[name] != ""]
    actions = ",\n".join(f"  {_write_action(action)}" for action in program.actions)
    return "\n".join(["{", *lines, ' "actions": [', actions, " ]", "}", ""])


def _write_action(action: Action) -> str:
    try:
        text = json.dumps(_action_to_json(action))
        again = repr(_build_action(msgspec.json.decode(text)))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        again = str(error)
    if again != repr(action):  # unlike ==, this tells 1 from True
        rule = "a program file holds well-typed values of the vocabulary only"
        raise ValueError(f"{shown(action)}: cannot be kept: {rule}; leave it out of the program")
    return text


def _action_to_json(action: Action) -> dict[str, Any]:
    if isinstance(action, Hostile):
        return {"type": Hostile.__name__, "event": to_tagged(action.event)}
    return to_tagged(action)


def read_program(path: Path) -> Program:
    """Return the program in a file. Raises `TraceError`."""
    return parse_program("\n".join(text for _, text in read_lines(path, "program")), path)


def parse_program(text: str, path: Path) -> Program:
    """Return the program in a text; errors call it `path`. Raises `TraceError`."""
    rule = f'a program is a JSON object {{"format": "{PROGRAM_FORMAT}", ...}}'
    try:
        found = msgspec.json.decode(text, type=_AnyHeader)
        raw = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        reason = f"{shown(text)} ({error})" if text.strip() else "nothing"
        raise TraceError(path, 0, reason, rule, "give a file of check --save") from None
    if found.format != PROGRAM_FORMAT:
        fix = "give a file of check --save"
        raise TraceError(path, 0, f"format is {shown(found.format)}", rule, fix)
    if found.version != PROGRAM_VERSION:
        readable = f"this blockstep reads version {PROGRAM_VERSION}"
        raise TraceError(path, 0, f"version {found.version}", readable, "upgrade blockstep")
    try:
        return _build_program(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        rule = "a program contains values of the vocabulary (docs/reference/json.md)"
        is_newer = "unknown field" in str(error) or "type`" in str(error)
        fix = "correct it" if not is_newer else "correct it, or upgrade blockstep if it is newer"
        raise TraceError(path, 0, str(error), rule, fix) from None


def _build_program(raw: dict[str, Any]) -> Program:
    header = msgspec.convert(raw, _Header)
    config = build(header.config, Config, "$.config")
    problems = config_problems(config)
    if problems:
        raise msgspec.ValidationError("; ".join(map(str, problems)))
    if header.vocabulary_size < 1:
        found = f"Invalid value {header.vocabulary_size}: must be 1 or above"
        raise msgspec.ValidationError(f"{found} - at `$.vocabulary_size`")
    return Program(
        config, tuple(_build_actions(header.actions)), header.token_seed, header.vocabulary_size
    )


def _build_actions(rows: list[dict[str, Any]]) -> Iterator[Action]:
    for number, row in enumerate(rows, 1):
        try:
            yield _build_action(row)
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(f"action {number}: {error}") from None


def _build_action(row: dict[str, Any]) -> Action:
    if row.get("type") == Hostile.__name__:
        if row.keys() != {"type", "event"} or not isinstance(row["event"], dict):
            raise msgspec.ValidationError("Hostile has one field, an object `event` - at `$`")
        return Hostile(build_tagged(row["event"], _EVENTS, "$.event"))
    action: Action = build_tagged(row, _ACTIONS, "$")
    if isinstance(action, Propose) and not action.counts:
        raise msgspec.ValidationError("Invalid value []: names a count at least - at `$.counts`")
    return action
