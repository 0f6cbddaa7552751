"""Schema: the JSON Schema of the lines between Blockstep and an engine in a process of its own.

It is made from the classes that read and write these lines, so that neither can change alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from blockstep.conformance.protocol.codec import StateForm
from blockstep.conformance.protocol.kv_event_json import FORMS
from blockstep.conformance.protocol.sources import cite_all
from blockstep.spec import vocabulary as v

DIALECT = "https://json-schema.org/draft/2020-12/schema"
REF = "#/$defs/{name}"


def build_schema(hello: type, version: int) -> dict[str, Any]:
    """Return the schema: `$defs` holds every class, `asked` and `answered` the lines of each side.

    `hello` is the class of the first answer.
    """
    events, observations = v.EVENT_TYPES, get_args(v.Observation)
    forms = {cls.__name__: FORMS.get(cls, cls) for cls in (*events, *observations)}
    named, definitions = msgspec.json.schema_components(
        [*forms.values(), v.Config, StateForm, hello], ref_template=REF
    )
    refs: Mapping[str, Any] = dict(zip(forms, named[: len(forms)], strict=True))
    config, state, first = named[len(forms) :]
    schema = {
        "$schema": DIALECT,
        "title": f"blockstep-engine, version {version}",
        "$defs": definitions,
        "asked": {
            "oneOf": [
                _tagged("Hello", format={"const": "blockstep-engine"}, version={"const": version}),
                _tagged("Start", config=config),
                _tagged("Snapshot"),
                *(_typed(cls.__name__, refs, definitions) for cls in events),
            ]
        },
        "answered": {
            "oneOf": [
                first,
                _tagged("Started"),
                _tagged("Snapshot", state={"anyOf": [state, {"type": "null"}]}),
                _tagged("Fault", detail={"type": "string"}),
                *(_typed(cls.__name__, refs, definitions) for cls in observations),
            ]
        },
    }
    cited: dict[str, Any] = cite_all(schema)
    return cited


def _tagged(name: str, **fields: Any) -> dict[str, Any]:
    properties = {"type": {"const": name}, **fields}
    return {"type": "object", "properties": properties, "required": ["type", *fields]}


def _typed(name: str, refs: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object of the class, with the name of the class in `type`."""
    plain = definitions[refs[name]["$ref"].rpartition("/")[2]]
    return {
        **plain,
        "title": name,
        "properties": {"type": {"const": name}, **plain["properties"]},
        "required": ["type", *plain["required"]],
    }
