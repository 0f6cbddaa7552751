"""Layout of `--help`: commands by group and options by subject, as plain text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

ENGINE, RUNS, PROGRAMS, OUTPUT = "Engine", "Runs", "Programs", "Output"
"""Sections of options, in the order in which they are shown."""
REST = "Options"
"""The section of options that name none; `--help` alone is part of the last section."""


def option(section: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option of a section, with this help; `more` as of `typer.Option`."""
    return typer.Option(*names, help=text, rich_help_panel=section, **more)


engine = partial(option, ENGINE)
runs = partial(option, RUNS)
programs = partial(option, PROGRAMS)
output = partial(option, OUTPUT)


class Command(TyperCommand):
    """A command whose options are shown in the sections that they name."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then the sections of options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {name: [] for name in (ENGINE, RUNS, PROGRAMS, OUTPUT)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            named = getattr(param, "rich_help_panel", None)
            is_help = param.name == "help" and bool(sections[OUTPUT])
            name = "Arguments" if param.param_type_name == "argument" else named or REST
            sections.setdefault(OUTPUT if is_help else name, []).append(record)
        _write(formatter, sections.items())


class Group(TyperGroup):
    """Commands that are shown in the groups that they name, each with its whole summary."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - of the base
        """Write the groups, in the order in which their first commands were added."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            group = getattr(command, "rich_help_panel", None)
            title = group if isinstance(group, str) else "Commands"
            groups.setdefault(title, []).append((name, first_sentence(command.help or "")))
        _write(formatter, groups.items())


def first_sentence(text: str) -> str:
    """Return the summary of a help text, in one line."""
    paragraph = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def _write(formatter: Any, sections: Iterable[tuple[str, list[tuple[str, str]]]]) -> None:
    for name, records in sections:
        if records:
            with formatter.section(name):
                formatter.write_dl(records)
