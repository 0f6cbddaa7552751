"""`blockstep schema`: the JSON Schema of the protocol for engines in any language."""

from __future__ import annotations

import json

import typer

from blockstep.conformance.engines.process import VERSION, Hello
from blockstep.conformance.protocol.schema import build_schema


def schema_command() -> None:
    """Print the JSON Schema of the lines that an engine in any language speaks.

    `asked` holds the lines that Blockstep writes, `answered` those that it reads. How to use it:
    docs/how-to/hold-any-language.md. Exit codes: 0.

    Example: blockstep schema > blockstep-engine.schema.json
    """
    typer.echo(json.dumps(build_schema(Hello, VERSION), indent=1))
