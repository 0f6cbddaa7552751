"""Serve: a Python engine as a process that speaks lines of JSON, and ways to speak them wrongly.

    python serve.py ENGINE [WRONG]

`WRONG` is a key of `WRONGS`, done in answer to the first event of the kind it names.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.codec import build, build_tagged, get_fields, to_form
from blockstep.conformance.protocol.kv_event_json import to_forms
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import vocabulary as v

EVENTS = {cls.__name__: cls for cls in v.EVENT_TYPES}


def write(text: str) -> None:
    """Write text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def flood(_answer: str) -> None:
    """Write without an end and without a line feed."""
    while True:
        write("x" * 65536)


def close(_answer: str) -> None:
    """Close standard output, and stay."""
    os.close(1)
    time.sleep(600)


def print_and_end(_answer: str) -> None:
    """Say why on standard error, and end."""
    sys.stderr.write("\n".join(["loading", *"." * 5, "no block 7 (pool.cpp:12)\x1b[0m", ""]))
    sys.stderr.flush()
    os._exit(134)


def drip(answer: str) -> None:
    """Write an answer byte by byte, without a line feed and without an end."""
    write(answer)
    while True:
        write(" ")
        time.sleep(0.01)


def write_other_text(answer: str) -> None:
    """Write an answer with bytes that are no UTF-8."""
    sys.stdout.buffer.write(answer[:-1].encode() + b',"\xff":1}\n')
    sys.stdout.flush()


def stop_within(answer: str) -> None:
    """End in the middle of a line."""
    write(answer[:20])
    os._exit(0)


WRONGS: dict[str, tuple[str, Callable[[str], None]]] = {
    "no-json": ("Schedule", lambda _: write('{"type":\n')),
    "no-object": ("Schedule", lambda _: write("[1]\n")),
    "unknown-type": ("Schedule", lambda _: write('{"type":"Step"}\n')),
    "unknown-field": ("Schedule", lambda text: write(text[:-1] + ',"num_steps":1}\n')),
    "wrong-type": ("Schedule", lambda text: write(text.replace('_id":0,', '_id":"f",') + "\n")),
    "fault": ("Commit", lambda _: write('{"type":"Fault","detail":"lost a block"}\n')),
    "silence": ("Schedule", lambda _: time.sleep(600)),
    "exit": ("Commit", lambda _: os._exit(3)),
    "assertion": ("Commit", print_and_end),
    "drip": ("Schedule", drip),
    "no-utf-8": ("Schedule", write_other_text),
    "no-utf-8-hello": ("Hello", write_other_text),
    "signal": ("Commit", lambda _: os.kill(os.getpid(), signal.SIGSEGV)),
    "flood": ("Schedule", flood),
    "closed": ("Schedule", close),
    "twice": ("Schedule", lambda text: write(f"{text}\n{text}\n")),
    "half-a-line": ("Schedule", stop_within),
    "decision": (
        "Schedule",
        lambda text: write(text.replace('"frame_id":0', '"frame_id":7') + "\n"),
    ),
    "banner": ("Hello", lambda text: write(f"engine ready\n{text}\n")),
    "version": ("Hello", lambda text: write(text.replace('"version":1', '"version":2') + "\n")),
    "capability": ("Hello", lambda text: write(text.replace('"abort"', '"aborts"') + "\n")),
    "refusal": ("Start", lambda _: write('{"type":"Fault","detail":"no such block size"}\n')),
    "state": ("Snapshot", lambda _: write('{"type":"Snapshot","state":{"waiting":[]}}\n')),
}


def serve(name: str, wrong: str) -> None:
    """Answer the lines of standard input until it ends."""
    make_engine = load_engine(name)
    kind, do_wrong = WRONGS.get(wrong, ("", write))
    engine: Any = None
    for line in sys.stdin:
        raw = msgspec.json.decode(line)
        match raw.pop("type"):
            case "Hello":
                row = _hello(make_engine(v.Config(num_blocks=8)).capabilities())
            case "Start":
                engine, row = make_engine(build(raw["config"], v.Config, "$")), {"type": "Started"}
            case "Snapshot":
                row = {"type": "Snapshot", "state": to_form(engine.snapshot())}
            case event:
                row = _to_row(engine.apply(build_tagged({"type": event, **raw}, EVENTS, "$")))
        text = msgspec.json.encode(row).decode()
        if kind and msgspec.json.decode(line)["type"] == kind:
            do_wrong(text)
        else:
            write(text + "\n")


def _hello(capabilities: frozenset[str]) -> dict[str, Any]:
    names = sorted(capabilities & {*map(str, Capability)})
    hello = {"type": "Hello", "format": "blockstep-engine", "version": 1}
    return {**hello, "capabilities": names, "engine_version": "1.5"}


def _to_row(answer: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"type": type(answer).__name__, **get_fields(answer)}
    if row.get("kv_events"):
        row["kv_events"] = to_forms(row["kv_events"])
    return row


if __name__ == "__main__":
    serve(*[*sys.argv[1:], ""][:2])
