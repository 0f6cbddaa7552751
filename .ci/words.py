"""Lint of the English: phrases that the glossary replaces, and habits that hide the meaning.

    python .ci/words.py [PATH]

Docstrings, messages, names and pages are read; code in backticks and code blocks are not.
A text that is right as it is contains `words: allow`. Exit code 1 if there is a hit. A clean lint
does not make a text clear: it finds about two thirds of the unclear ones.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from blockstep.conformance.report.glossary import get_terms

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"__pycache__", "_build", "build"}
QUOTING = ("glossary.md", "test_words.py")
"""Files that contain the phrases themselves."""
PEOPLE = ("user", "users", "client", "clients", "reader", "person", "people", "caller")
NO_PERSON = "".join(rf"(?<!\b{word} )" for word in PEOPLE)
PARTS = (
    *("all", "one", "both", "some", "any", "each", "none", "two", "first", "last", "part", "most"),
    *("several", "list", "view", "tuples", "`"),
)
A_PART = "".join(rf"(?<!{word} )" for word in PARTS)
"""What is a part of something that was named is named well enough: `one of them`."""
HABITS = {
    "who": NO_PERSON + r"\b(who|whoever|whom)\b",
    "of it": A_PART + r"\bof (it|them|these|those)\b(?=[.,;:)]|$)",
    "nobody": r"\b(nobody|somebody|everybody|anybody|no one)\b",
    "so many": r"\bso (many|much|long)\b(?! (that|as)\b)",
    "is told": r"\b(is|are|was|were|be|been|being|as|what) (told|said|spoken|owed|meant)\b"
    r"(?! apart)",
    "stands": r"\b(stands?|stood)\b(?![ -](in|for)\b)",
    "goes on": r"\b(goes|go|went) on\b",
    "comes of": r"\b(comes|come|came) (of|in between|to (?!a (stop|halt)|pass))\b",
    "beside": r"\bbeside\b",
    "let go": r"\blet(s|ting)? (it |them )?go\b",
    "aged": r"\b(anew|likewise|whereof|thereof|for want of|lest|dearer)\b|(?<=\. )Nor\b",
}
START = re.compile(
    r"(Of|From|Behind|Beside|Else|Neither|Those|Who|Whose|Whom|Whoever|What|Whatever|Where|How|As|"
    r"Nothing|Nobody|Somebody|None of|Into|Up to|Without|Before|After|Once|Here|There|Its|Theirs|"
    r"Such|So|That|For|By|To|In|At|With)\b"
)
"""A first sentence that begins like this has its subject or its verb late, or has none."""
MAIN_CLAUSE = re.compile(
    r"(To|In|For|At|By|With|After|Before|Once|Without)\b[^.]*, (the|a|an|it|each|every)\b"
)
CODE = re.compile(
    r"``.*?``|`[^`]*`|<[^>]+>|https?://\S+|(?<!\w)--[a-z][\w-]*"
    r"|\bmuseum( run\b|:\w*|\.json)|\b(benchmarks\.|blockstep )museum|\bexplain \w+s\b"
    r"|^[ ]+[a-z_]+(?=: )|^[a-z_]+(?= n: )",
    re.MULTILINE,
)
"""Names that a user types: code, options, parts of a command, arguments, settings in messages."""
NAME = re.compile(
    r"(^|_)(told|tells?|said|says?|who|whom|nobody|somebody|everybody|anybody)(_|$)",
    re.IGNORECASE,
)
"""Names that do not say what a thing is."""
SEEDED = "/museum/"
"""Functions there have the names of seeded bugs, which users type."""
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
WORDY = re.compile(r"[A-Za-z]{2,}[ ,]+[a-z]+ [a-z]+")
LABEL = re.compile(r"^\s*[A-Z][\w-]*( [\w-]+)?: (?=[a-z])")
"""`Module: what it is`, the first line of a module."""


class Text(NamedTuple):
    """A docstring, a message or a paragraph of a page."""

    path: str
    line: int
    kind: str
    text: str


class Hit(NamedTuple):
    """A place where a text breaks a rule."""

    path: str
    line: int
    rule: str
    excerpt: str

    def __str__(self) -> str:
        """Return it as a line that editors know how to open."""
        return f"{self.path}:{self.line}: [{self.rule}] {self.excerpt}"


def read_python(text: str, name: str) -> Iterator[Text]:
    """Yield docstrings, also those of attributes, and strings of three words or more."""
    seen: set[int] = set()
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str() as content) as value):
                seen.add(id(value))
                yield Text(name, node.lineno, "docstring", content)
            case ast.JoinedStr(values=parts):
                seen |= {id(part) for part in ast.walk(node)}
                content = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "n" for part in parts
                )
                if WORDY.search(content):
                    yield Text(name, node.lineno, "message", content)
    for node in nodes:
        match node:
            case ast.Constant(value=str() as content) if id(node) not in seen and WORDY.search(
                content
            ):
                yield Text(name, node.lineno, "message", content)


def read_names(text: str, path: str) -> Iterator[Text]:
    """Yield the functions, classes, arguments, variables and attributes that a module defines."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield Text(path, node.lineno, "name", name)
            case ast.ClassDef(name=name):
                yield Text(path, node.lineno, "name", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield Text(path, node.lineno, "name", name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield Text(path, node.lineno, "name", name)


def read_page(text: str, name: str) -> Iterator[Text]:
    """Yield the paragraphs of a page, without its code blocks."""
    text = FENCE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for part in re.finditer(r"(?:[^\n]*\S[^\n]*\n?)+", text):
        yield Text(name, 1 + text.count("\n", 0, part.start()), "page", part[0])


def read_texts(root: Path) -> Iterator[Text]:
    """Yield all texts of a checkout, hidden folders left out."""
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.md")]):
        parts = path.relative_to(root).parts
        name = "/".join(parts)
        if any(part.startswith(".") or part in LEFT_OUT for part in parts) or path.name in QUOTING:
            continue
        text = path.read_text(encoding="utf-8")
        yield from (read_python if path.suffix == ".py" else read_page)(text, name)
        if path.suffix == ".py" and SEEDED not in name:
            yield from read_names(text, name)


def make_phrases() -> dict[str, re.Pattern[str]]:
    """Return a pattern for each phrase of the glossary, the longest phrase first."""
    phrases = sorted((it for term in get_terms() for it in term.replaces), key=len, reverse=True)

    def compiled(phrase: str) -> re.Pattern[str]:
        pattern = re.escape(phrase).replace(r"\*", r"\w*").replace(r"\ ", r"\s+")
        return re.compile(rf"\b{pattern}\b", re.IGNORECASE)

    return {phrase: compiled(phrase) for phrase in phrases}


def find_hits(texts: Iterable[Text]) -> Iterator[Hit]:
    """Yield the hits of all rules; where two phrases overlap, the longer one counts."""
    habits = {rule: re.compile(pattern, re.IGNORECASE) for rule, pattern in HABITS.items()}
    phrases = make_phrases()
    names = {it: term.title for term in get_terms() for it in term.replaces}
    for one in texts:
        if one.kind == "name":
            if NAME.search(one.text):
                yield Hit(one.path, one.line, "name", one.text)
            continue
        if "words: allow" in one.text:
            continue
        text = CODE.sub(lambda code: "`" + "x" * (len(code[0]) - 2) + "`", one.text)
        text = LABEL.sub(lambda label: " " * len(label[0]), text)
        taken: set[int] = set()
        for rule, pattern in (*habits.items(), *phrases.items()):
            for hit in pattern.finditer(text):
                span = set(range(*hit.span()))
                if rule in phrases:
                    if taken & span:
                        continue
                    taken |= span
                around = " ".join(one.text[max(0, hit.start() - 60) : hit.end() + 60].split())
                line = one.line + text.count("\n", 0, hit.start())
                label = f"{rule}: say {names[rule]}" if rule in phrases else rule
                yield Hit(one.path, line, label, around)
        first = text.strip()
        if one.kind == "docstring" and START.match(first) and not MAIN_CLAUSE.match(first):
            yield Hit(one.path, one.line, "inverted", " ".join(one.text.split())[:120])


def main() -> int:
    """Print the hits. Return 1 if there are some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", nargs="?", default="", help="print the hits below this one only")
    path = parser.parse_args().path
    hits = [hit for hit in find_hits(read_texts(ROOT)) if hit.path.startswith(path)]
    print(*hits, sep="\n", end="\n" if hits else "")
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main())
