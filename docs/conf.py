"""Configuration of Sphinx, which builds the documentation with MyST and furo.

Sphinx has autodoc, so the docstrings of the specification are the reference itself. MyST reads the
pages, which are Markdown. All warnings are errors (`make docs`), a dangling reference included.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from pkgutil import ModuleInfo, walk_packages

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import blockstep.spec
from blockstep.conformance.protocol.sources import cite

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from docs.generated import put_pages

project = "Blockstep"
author = "The Blockstep authors"
project_copyright = author
version = release = version_of("blockstep")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True}
# Annotations name things as their module imported them, and the standard library is documented
# elsewhere: types are not linked, while a reference that a writer makes must resolve.
nitpick_ignore_regex = [("py:(class|obj|exc|data)", r"(?!blockstep\.).*|.*\.[A-Z]")]

smartquotes = False  # it makes a dash of the two of an option
html_theme = "furo"
html_title = f"Blockstep {release}"

ROOMS = "<!-- rooms of the specification -->"
ROOM = """
## {name}

```{{eval-rst}}
.. automodule:: {module}
   {members}
```
"""
CODE = re.compile(r"(?<![`:\w])`([^`]+)`(?!`)")
DIAGRAM = re.compile(r"^    |\|--|\S {3,}\S", re.MULTILINE)


def only_reexports(module: ModuleInfo) -> bool:
    """Return whether a module is a package whose names are documented where they are defined."""
    return module.ispkg and hasattr(import_module(module.name), "__all__")


def put_generated(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put in what is read from the code and from data: see generated.py."""
    source[0] = put_pages(source[0])
    rooms = [
        ROOM.format(
            name=module.name.removeprefix("blockstep.spec."),
            module=module.name,
            members=":no-members:" if only_reexports(module) else ":members:",
        )
        for module in walk_packages(blockstep.spec.__path__, "blockstep.spec.")
    ]
    source[0] = source[0].replace(ROOMS, "".join(rooms))


def put_markup(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Our docstrings are plain text: what is in backticks is code, and diagrams stay as drawn.

    Sources are named, not numbered.
    """
    paragraphs = cite("\n".join(lines)).strip("\n").split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        if DIAGRAM.search(paragraph) and not paragraph.startswith((":", "..")):
            drawn = "\n".join(f"    {line}" for line in paragraph.split("\n"))
            paragraphs[number] = f"::\n\n{drawn}"
        else:
            paragraphs[number] = CODE.sub(r"``\1``", paragraph)
    lines[:] = [*"\n\n".join(paragraphs).split("\n"), ""]


def leave_out_of_search(app: Sphinx, env: BuildEnvironment) -> None:
    """Leave the pages for maintainers out of the text search, so that users find theirs."""
    pages = ["maintainers"]
    for page in pages:
        env.metadata[page]["nosearch"] = ""
        pages += env.toctree_includes.get(page, [])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("env-updated", leave_out_of_search)
    app.connect("source-read", put_generated)
    app.connect("autodoc-process-docstring", put_markup, priority=900)
