"""Package: a folder of vectors that any language can use without Blockstep.

It has a file of vectors for each world, `index.json` with digests and what each file needs of an
engine, the JSON Schema of events, answers and states, a README, and `check.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias, get_args

import msgspec

from blockstep.conformance.explore import checker
from blockstep.conformance.explore.vectors import VECTORS_VERSION, Vectors, fill, read_vectors
from blockstep.conformance.explore.world import World
from blockstep.conformance.protocol.codec import StateForm
from blockstep.conformance.protocol.features import find_lacking, get_missing
from blockstep.conformance.protocol.kv_event_json import FORMS
from blockstep.conformance.recorded.traces import TraceError
from blockstep.spec.vocabulary import Observation, Rejected

OnProgress: TypeAlias = Callable[[int, int, int], None]
FORMAT = "blockstep-vectors-package"
VERSION = 1
README = """# Vectors of Blockstep {version}

Short programs with the specification's answer and state after each event, for a scheduler of LLM
inference with a paged KV cache (vLLM V1). No Python is needed to use them.

- `vectors/*.jsonl`: line 1 says the format and its version, line 2 the config; then
  `{{"program":N,"steps":K}}` and K pairs of lines: an event with its answer, and the state after
  it. Each program starts with a new engine.
- `index.json`: for each file its SHA-256 and the capabilities that it needs of an engine.
  `defaults` has the values of fields that an engine may leave out.
- `schema.json`: the JSON Schema of events (`asked`), answers (`answered`), states (`StateForm`).
- `check.py`: `python check.py` checks the digests, `python check.py ./my-engine` plays the vectors
  on a process that reads and writes these lines. It needs the standard library only.

Not compared: `detail` of a rejection, `num_external_tokens`, and what an engine lacks the
capability for: `num_common_prefix_blocks` (`common prefix`), `stats` (`statistics`), `has_work`
(`work`). An engine without `rejection` skips events that are answered with `Rejected`: they change
nothing.

Versions: package {package}, vectors {vectors}. A reader refuses those that it does not know.
"""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file of vectors of a package."""

    path: str
    preset: str
    programs: int
    events: int
    sha256: str
    needs: tuple[str, ...]
    """Capabilities that an engine must have to play it."""


def pack(
    folder: Path,
    worlds: Sequence[World],
    max_states: int,
    schema: object,
    get_on_progress: Callable[[World], OnProgress] = lambda _world: lambda *_: None,
) -> tuple[PackedFile, ...]:
    """Write the package of these worlds into a folder, which is made, and return its files.

    Raises:
        TraceError: a file cannot be written.
    """
    try:
        (folder / "vectors").mkdir(parents=True, exist_ok=True)
        files = tuple(_fill(folder, worlds, max_states, get_on_progress))
        index = {
            "format": FORMAT,
            "version": VERSION,
            "spec": version("blockstep"),
            "vectors": VECTORS_VERSION,
            "defaults": {
                "answer": list_defaults([FORMS.get(it, it) for it in get_args(Observation)]),
                "state": list_defaults([StateForm]),
            },
            "files": files,
        }
        for name, value in (("index.json", index), ("schema.json", schema)):
            text = msgspec.json.format(msgspec.json.encode(value), indent=1)
            (folder / name).write_bytes(text + b"\n")
        values = {"version": version("blockstep"), "package": VERSION, "vectors": VECTORS_VERSION}
        (folder / "README.md").write_text(README.format(**values), "utf-8")
        (folder / "check.py").write_bytes(Path(checker.__file__).read_bytes())
    except OSError as error:
        found = f"cannot be written ({error.strerror or error})"
        raise TraceError(folder, 0, found, "a package needs a folder", "check the path") from None
    return files


def _fill(
    folder: Path,
    worlds: Sequence[World],
    max_states: int,
    get_on_progress: Callable[[World], OnProgress],
) -> Iterator[PackedFile]:
    for world in worlds:
        path = folder / "vectors" / f"{world.name}.jsonl"
        filled = fill(path, world, max_states, get_on_progress(world))
        yield PackedFile(
            f"vectors/{path.name}",
            world.name,
            filled.manifest.programs,
            filled.num_events,
            sha256(path.read_bytes()).hexdigest(),
            list_needs(read_vectors(path)),
        )


def list_needs(vectors: Vectors) -> tuple[str, ...]:
    """Return the capabilities that the config and the accepted events need, sorted."""
    steps = [step for program in vectors.programs for step in program]
    accepted = [step.event for step in steps if not isinstance(step.observation, Rejected)]
    things = [vectors.config, *accepted]
    needed = set()
    for feature in find_lacking(frozenset()):
        for thing in things:
            needed |= {get_missing(thing, [feature])} - {None}
    return tuple(sorted(map(str, needed)))


def list_defaults(kinds: Sequence[type]) -> dict[str, Any]:
    """Return the defaults of fields by name; null for a name that has several."""
    found: dict[str, Any] = {}
    for part in msgspec.json.schema_components(kinds)[1].values():
        for name, field in part.get("properties", {}).items():
            if "default" in field:
                default = field["default"]
                found[name] = default if found.get(name, default) == default else None
    return dict(sorted(found.items()))
