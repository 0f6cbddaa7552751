"""The knobs of a release of vLLM, read from its source, which is not imported.

A knob is a field of a config class that is the scheduler's, a value of any other config that the
scheduler's code reads, or a variable of the environment that it reads. `knobs.json` holds those of
one release of each minor version, with their defaults:

    PYTHONPATH=spec:tests/support python -m vllm_support.knobs 0.34.0=SITE_PACKAGES/vllm
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from blockstep.spec.profiles import read_release_number

Knobs: TypeAlias = dict[str, str]
"""The default of each knob, by `Class.field` or `environment.VARIABLE`."""
STORED = Path(__file__).with_name("knobs.json")
WHOLE = (
    *("SchedulerConfig", "CacheConfig", "KVCacheConfig", "SpeculativeConfig", "LoRAConfig"),
    *("KVTransferConfig", "KVEventsConfig", "ECTransferConfig", "StructuredOutputsConfig"),
)
"""Classes of which each field is a knob, read or not: properties of theirs read the others."""
WHOLE_PARTS = frozenset(
    {
        *("scheduler_config", "cache_config", "kv_cache_config", "lora_config"),
        *("speculative_config", "spec_config", "kv_transfer_config", "kv_events_config"),
        *("ec_transfer_config", "structured_outputs_config"),
    }
)
"""The names under which the scheduler's code has objects of these classes."""
READERS = ("v1/core/**/*.py", "v1/request.py", "v1/outputs.py", "v1/structured_output/__init__.py")
"""The code whose reads count."""
READ = re.compile(r"(\w+_config)\.(\w+)$")
NO_DEFAULT = "-"
"""The default of what is worked out, or must be given."""


def read_knobs(package: Path) -> Knobs:
    """Return the knobs of the release whose package is in a folder."""
    found = dict(_list_fields(package))
    for reader in READERS:
        for path in sorted(package.glob(reader)):
            for name in _list_reads(ast.parse(path.read_text())):
                found.setdefault(name, NO_DEFAULT)
    if '"VLLM_USE_V2_MODEL_RUNNER"' in (package / "envs.py").read_text():
        found.setdefault("environment.VLLM_USE_V2_MODEL_RUNNER", NO_DEFAULT)
    return dict(sorted(found.items()))


def _list_fields(package: Path) -> Iterator[tuple[str, str]]:
    for path in (*(package / "config").glob("*.py"), package / "v1/kv_cache_interface.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name not in WHOLE:
                continue
            for one in node.body:
                if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
                    continue
                if "ClassVar" not in ast.unparse(one.annotation):
                    yield f"{node.name}.{one.target.id}", _format_default(one.value)


def _format_default(value: ast.expr | None) -> str:
    """Return the default as it is written, without what only validates it."""
    if value is None:
        return NO_DEFAULT
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Field", "field"):
        given = {word.arg: ast.unparse(word.value) for word in value.keywords}
        if "default_factory" in given:
            return f"{given['default_factory']}()"
        return given.get("default", NO_DEFAULT)
    return ast.unparse(value)


def _list_reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        text = ast.unparse(node)
        if text.startswith("envs."):
            yield f"environment.{node.attr}"
        read = READ.search(text)
        # A config that is read as a whole is no knob; what is read from it is.
        if read and not read[2].endswith("_config") and read[1].lstrip("_") not in WHOLE_PARTS:
            yield f"{read[1].lstrip('_')}.{read[2]}"


def get_stored() -> dict[str, Knobs]:
    """Return the stored knobs, by release, oldest first."""
    stored = json.loads(STORED.read_text())
    found: dict[str, Knobs] = {version: {} for version in stored["releases"]}
    for name, history in stored["knobs"].items():
        for version in found:
            known = [default for since, default in history if _is_older(since, version)]
            if known and known[-1] is not None:
                found[version][name] = known[-1]
    return found


def _is_older(version: str, other: str) -> bool:
    """Whether a release is the other one or came before it."""
    return (read_release_number(version) or ()) <= (read_release_number(other) or ())


def store(releases: Mapping[str, Knobs]) -> None:
    """Write the knobs of releases, oldest first: for each knob where its default changed."""
    histories: dict[str, list[tuple[str, str | None]]] = {}
    for version, knobs in releases.items():
        for name in sorted({*knobs, *histories}):
            history, default = histories.setdefault(name, []), knobs.get(name)
            if (history[-1][1] if history else None) != default:
                history.append((version, default))
    lines = [
        f"    {json.dumps(name)}: {json.dumps(history)}"
        for name, history in sorted(histories.items())
    ]
    text = ",\n".join(lines)
    versions = json.dumps([*releases])
    STORED.write_text(f'{{\n  "releases": {versions},\n  "knobs": {{\n{text}\n  }}\n}}\n')


if __name__ == "__main__":
    merged = get_stored() if STORED.exists() else {}
    for argument in sys.argv[1:]:
        given, _, folder = argument.partition("=")
        merged[given] = read_knobs(Path(folder))
    store(dict(sorted(merged.items(), key=lambda one: read_release_number(one[0]) or ())))
