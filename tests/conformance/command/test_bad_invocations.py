"""Bad invocations and broken engines end with a documented exit code and a short message.

They leave no file and no process behind.
"""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.findings import ERROR_CHARS_MAX
from blockstep.conformance.search.isolation import process

COMMAND = typer.main.get_command(app)
"""Made once, as making it takes longer than most of these tests."""
LINES_MAX = 5
REPORT_LINES_MAX = 30
"""Most lines of a finding without --brief: what was seen, the config and a short program."""

INVOCATIONS = {
    "": """
        nothing | No such command
        --nothing | No such option
        --version=3 | does not take a value
    """,
    "check": """
        extra | unexpected extra argument
        --engine '' | neither one of
        --engine nowhere | neither one of
        --engine : | neither one of
        --engine a: | neither one of
        --engine :b | neither one of
        --engine no.such.module:make | cannot load
        --in-process --engine json:nothing | cannot load
        --in-process --engine json:__name__ | not callable
        --in-process --engine ..a:b | cannot load
        --in-process --engine 'a b:c' | cannot load
        --in-process --engine json.:x | cannot load
        --engine museum: | no such seeded bug
        --engine museum:nothing | no such seeded bug
        --preset '' | tiny, small, real
        --preset huge | tiny, small, real
        --policy random | policy
        --profile vllm-0.0.0 | must be one of strict
        --profile '' | must be one of strict
        --depth 0 | depth
        --depth -1 | depth
        --depth x | depth
        --depth 1.5 | depth
        --depth 100000 | depth
        --with magic | feature 'magic'
        --without magic | feature 'magic'
        --with pause --without pause | cannot be both
        --with async --depth 1 | needs 2 plans in flight
        --with pipeline --with async | no run has
        --policy fcfs --with priority | cannot be with policy
        --policy priority --without priority | the policy cannot be
        --seed -1 | seed
        --seed x | seed
        --seed 1.5 | seed
        --budget '' | 60s
        --budget 0 | 60s
        --budget -5 | 60s
        --budget soon | 60s
        --budget 0s | 60s
        --budget -1s | 60s
        --budget 1e9 | 60s
        --budget nans | 60s
        --budget infs | 60s
        --budget 5mm | 60s
        --budget 1h30 | 60s
        --episode -1 | episode
        --episode x | episode
        --jobs -1 | jobs
        --jobs x | jobs
        --jobs 5000 | at most
        --record x.jsonl | needs --episode
        --episode 0 --record /no/such/x | there is no folder
        --episode 0 --record . | it is a folder
        --event-seconds 0 | must be above 0
        --event-seconds -1 | must be above 0
        --event-seconds nan | must be above 0
        --event-seconds x | event-seconds
        --json . | it is a folder
        --json /no/such/x | there is no folder
        --path /no/such | does not exist
        --path EMPTY | is a file
        --program /no/such | /no/such
        --program EMPTY | EMPTY
        --program GARBAGE | a program is a JSON object
        --program BINARY | BINARY
        --program OTHER | OTHER
        --corpus /no/such | there is no such folder
        --corpus empty | a corpus is a folder of programs
        --program EMPTY --episode 1 | give only one
        --sentence no_such | blockstep explain sentences
        --sentence table_holds_the_scheduled_tokens --program EMPTY | leave --sentence
        --save /no/such/x.json | there is no folder
    """,
    "campaign": """
        nothing | No such command
        run | Missing argument
        run nowhere.toml | does not exist
        replay nowhere.toml 0 | does not exist
        status --store | requires an argument
    """,
    "hunt": """
        --engine nowhere | neither one of
        --in-process --engine no.such:x | cannot load
        --engine museum:x | no such seeded bug
        --preset huge | tiny, small, real
        --profile x | must be one of
        --depth 0 | depth
        --budget 0 | budget
        --budget x | budget
        --budget -1 | budget
        --seed -1 | seed
        --markdown /no/such/x | there is no folder
        --json . | it is a folder
        --with magic | feature 'magic'
        --with async --depth 1 | needs 2 plans in flight
        --event-seconds 0 | must be above 0
        --save EMPTY | is a file; name a folder
        --save no/such/folder | there is no folder
        --forgive nonsense | nonsense
        --forgive quirk:nowhere | quirk:nowhere
        --forgive magic:x | magic:x
        --forgive declined | declined
    """,
    "explore": """
        --preset x | must be one of
        --preset '' | must be one of
        --preset loop --engine nowhere | neither one of
        --preset loop --engine museum:x | no such seeded bug
        --profile x | must be one of
        --preset loop --witness x | must be one of
        --preset loop --witness ended_while_stale | depends on earlier ones
        --preset loop --museum --name x | no such seeded bug
        --preset loop --quirks --name x | no such quirk
        --preset loop --name x | needs --quirks or --museum
        --quirks --museum | ask for one
        --max-states 0 | max-states
        --jobs 5000 | at most
        --jobs -1 | jobs
        --dot x.dot | name one world
        --preset pair --svg x.svg | too many to draw
        --preset loop --dot /no/such/x | there is no folder
        --with magic | feature 'magic'
        --with embeds --without embeds | no world has these features
        --list --markdown . | it is a folder
    """,
    "vectors": """
        nothing | No such command
        fill | Missing argument
        fill . | it is a folder
        fill /no/such/x | there is no folder
        fill x --preset nothing | must be one of
        fill x --max-states 0 | max-states
        consume | Missing argument
        consume /no/such | /no/such
        consume . | cannot be read
        consume EMPTY | EMPTY
        consume GARBAGE | GARBAGE
        consume BINARY | BINARY
        consume CUT.gz | CUT.gz
        consume OTHER | OTHER
        consume TRACE | TRACE
        consume VECTORS --engine nowhere | neither one of
        consume HALF-VECTORS | HALF-VECTORS
    """,
    "score": """
        --engine nowhere | neither one of
        --preset huge | tiny, small, real
        --profile x | must be one of
        --budget soon | 60s
        --depth 0 | depth
        --least 101 | least
        --least x | least
        --save EMPTY | is a file; name a folder
        --save no/such/folder | there is no folder
        --event-seconds 0 | must be above 0
        --with magic | feature 'magic'
        --path /no/such | does not exist
        --json . | it is a folder
    """,
    "bisect": """
        one | Missing argument
        one two | Missing option
        one two --engine host --path . | is one of ours
        one two --engine a:b --path /no/such | does not exist
        one two --engine a:b --path empty | empty
        one two --engine a:b --path . --program EMPTY | EMPTY
        one two --engine a:b --path . --budget soon | 60s
        one two --engine a:b --path . --save /no/such/x.json | there is no folder
        one two --engine a:b --path . --jobs 5000 | at most
    """,
    "new-adapter": """
        '' | must be the name of a Python module
        3d | must be the name of a Python module
        class | must be the name of a Python module
        a/b | must be the name of a Python module
        broken_engines | the file exists
        json | can be imported already
        no.such.folder | there is no folder
    """,
    "arms": """
        --engine nowhere | neither one of
        --preset x | tiny, small, real
        --seed -1 | seed
        --workloads 0 | workloads
        --workloads x | workloads
        --json /no/such/x | there is no folder
    """,
    "replay": """
        --limit 3 | Missing argument
        /no/such | /no/such
        . | cannot be read
        EMPTY | EMPTY
        GARBAGE | GARBAGE
        BINARY | BINARY
        CUT.gz | CUT.gz
        OTHER | OTHER
        TRACE | TRACE
        NEGATIVE | NEGATIVE:2
        MOONCAKE --num-blocks 0 | num-blocks
        MOONCAKE --num-blocks 1 | num-blocks
        MOONCAKE --block-size 0 | block-size
        MOONCAKE --block-size -1 | block-size
        MOONCAKE --max-num-seqs 0 | max-num-seqs
        MOONCAKE --max-num-batched-tokens 0 | max-num-batched-tokens
        MOONCAKE --max-model-len 0 | max-model-len
        MOONCAKE --limit 0 | limit
        MOONCAKE --policy x | policy
        MOONCAKE --with drafts | not in a replay
        MOONCAKE --with magic | feature 'magic'
        MOONCAKE --with priority --policy fcfs | policy is to be fcfs
        MOONCAKE --caching --without caching | enable_prefix_caching is to be True
        MOONCAKE --snapshot-every -1 | snapshot-every
        MOONCAKE --engine nowhere | neither one of
        MOONCAKE --json /no/such/x | there is no folder
    """,
    "validate": """
        --json x.json | Missing argument
        /no/such | /no/such
        . | cannot be read
        EMPTY | EMPTY
        GARBAGE | GARBAGE
        BINARY | BINARY
        CUT.gz | CUT.gz
        OTHER | OTHER
        NEWER | NEWER
        HALF-TRACE | HALF-TRACE
        MOONCAKE | MOONCAKE
    """,
    "explain": """
        --at 3 | Missing argument
        nothing-of-that-name | no
        Q999 | no
        '' | no
        slots.nothing | no
        P4 --at 3 | needs a trace
        TRACE --at 1000000 | 1000000
        TRACE --at -1 | at
        EMPTY | EMPTY
        GARBAGE | GARBAGE
    """,
    "museum": """
        nothing | No such command
        --json x run | belongs behind the command
        run nothing | no such seeded bug
        run forward-frees --seed -1 | seed
        run --budget 0 | 60s
        run --jobs 5000 | at most
        run --markdown /no/such/x | there is no folder
        run --hidden | the state is compared at exact
        run --equivalence plan | must be one of exact, safety
        run --beside EMPTY | name a file of `blockstep museum run --json`
        run --beside LISTED | not a file of `blockstep museum run --json`
    """,
    "prove": """
        --law nothing | no law begins with this
        --law '' | no law begins with this
        --jobs 5000 | at most
        --jobs -1 | jobs
        --markdown /no/such/x | there is no folder
    """,
    "generate": """
        hi | Missing option
        --model /no/such hi | no such folder
        --model empty hi | empty
        --model EMPTY hi | EMPTY
        --model empty | nothing to continue
        --model empty --token-ids x | token-ids
        --model empty hi --temperature -1 | temperature
        --model empty hi --top-p 2 | top_p
        --model empty hi --max-tokens 0 | max_tokens
        --model empty hi --cache-gib nan | cache-gib
        --model empty hi --depth 0 | depth
        --model empty hi --speculate x | speculate
    """,
    "bench": """
        nothing | No such command
        scheduler --engine nowhere | neither one of
        scheduler --scenario x | must be one of
        scheduler -n 0 | -n
        scheduler -n 1000000000 | more than these scenarios
        scheduler --steps 0 | steps
        scheduler --limit 0 | limit
        scheduler --trace /no/such | /no/such
        scheduler --trace EMPTY | EMPTY
        scheduler --plot /no/such/x.svg | there is no folder
        scheduler --plot x.txt | .svg or .png
        scheduler --markdown . | it is a folder
        profile --engine nowhere | neither one of
        profile --scenario x | must be one of
        profile -n 0 | -n
        profile --lines 0 | lines
    """,
    "properties": "extra | unexpected extra argument",
    "engines": "--json . | it is a folder",
    "quirks": "--json /no/such/x | there is no folder",
}
"""Arguments of each command, and a part of the error message. All end with exit code 2."""


def list_invocations() -> Iterator[tuple[str, str]]:
    for command, lines in INVOCATIONS.items():
        for line in filter(None, map(str.strip, lines.splitlines())):
            args, _, message = line.rpartition(" | ")
            yield f"{command} {args}".strip(), message


CASES = list(list_invocations())
MOONCAKE = '{"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1]}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files that commands must refuse, and a few that they accept."""
    root = tmp_path_factory.mktemp("bad")
    (root / "empty").mkdir()
    (root / "EMPTY").touch()
    (root / "GARBAGE").write_text("not json\n")
    (root / "BINARY").write_bytes(bytes(range(256)))
    (root / "CUT.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    (root / "OTHER").write_text('{"format": "something-else", "version": 1}\n')
    (root / "LISTED").write_text('[{"exhibit": "zombie-key"}]')
    (root / "MOONCAKE").write_text(MOONCAKE)
    (root / "NEGATIVE").write_text(MOONCAKE + '{"timestamp": 0, "input_length": -3}\n')
    trace, vectors = root / "TRACE", root / "VECTORS"
    record = ("check", "--preset", "tiny", "--episode", "0", "--record", str(trace))
    assert CliRunner().invoke(app, record).exit_code == 0
    assert (
        CliRunner().invoke(app, ("vectors", "fill", str(vectors), "--preset", "loop")).exit_code
        == 0
    )
    text = trace.read_text()
    (root / "HALF-TRACE").write_text(text[: len(text) // 2])
    (root / "HALF-VECTORS").write_text(vectors.read_text()[: len(text) // 2])
    head, _, rest = text.partition("\n")
    (root / "NEWER").write_text(json.dumps({**json.loads(head), "version": 999}) + "\n" + rest)
    (root / "broken_engines.py").write_text(ENGINES)
    for name, code in MODULES.items():
        (root / f"{name}.py").write_text(code)
    return root


@dataclass(frozen=True)
class Ended:
    exit_code: object
    output: str


def run(folder: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Run a command, which must exit, raise nothing else and leave no file and no process."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("COLUMNS", "100")
    before, stream = list_files(folder), io.StringIO()
    with redirect_stdout(stream), redirect_stderr(stream), pytest.raises(SystemExit) as ended:
        COMMAND(shlex.split(line), prog_name="blockstep")
    assert "Traceback" not in stream.getvalue()
    assert list_files(folder) == before
    assert not multiprocessing.active_children()
    assert not process._living
    return Ended(ended.value.code, stream.getvalue())


def list_files(folder: Path) -> dict[Path, int]:
    """Return when each file was written, without caches of Python."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.stat().st_mtime_ns for path in files if path.suffix != ".pyc"}


def test_invocations_are_many_and_distinct() -> None:
    lines = [line for line, _ in CASES]
    assert len(set(lines)) == len(lines)
    assert len(lines) + len(BROKEN) >= 150


@pytest.mark.parametrize(("line", "message"), CASES)
def test_a_bad_invocation_is_a_usage_error_in_few_lines(
    folder: Path, line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(folder, line, monkeypatch)
    assert result.exit_code == 2, result.output
    assert len(result.output.splitlines()) <= LINES_MAX
    assert message in " ".join(result.output.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("line", ["check", "hunt", "museum run", "quirks", "explore --list"])
def test_a_full_device_is_reported_before_the_work(
    folder: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(folder, f"{line} --json /dev/full", monkeypatch)
    assert result.exit_code == 2
    assert result.output == "blockstep: /dev/full: cannot write: No space left on device\n"


MODULES = {
    "raises_error": "raise RuntimeError('no licence')",
    "raises_text": "raise ImportError('x' * 100_000)",
    "raises_lines": "raise ImportError('one\\n' * 1000)",
    "is_no_python": "def make(",
    "exits": "import sys; sys.exit(0)",
    "exits_with_text": "import sys; sys.exit('no GPU here')",
    "stops": "raise StopIteration",
    "asserts": "assert False, 'not here'",
    "needs_more": "import no_such_framework",
    "has_no_text": (
        "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd"
    ),
    "recurses": "def f():\n    f()\nf()",
    "leaves": "import os; os._exit(0)",
    "kills_itself": "import os; os.kill(os.getpid(), 9)",
    "is_interrupted": "raise KeyboardInterrupt",
}
"""Modules that cannot be imported, each for another reason."""
ALONE = ("leaves", "kills_itself", "is_interrupted")
"""Modules that end the process that imports them."""

ENGINES = """
import os, resource, signal, sys, time
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import *

class RaisesBuilt(SpecEngine):
    def __init__(self, config): raise RuntimeError("no device")

class ExitsBuilt(SpecEngine):
    def __init__(self, config): sys.exit(3)

class RaisesCapabilities(SpecEngine):
    def capabilities(self): raise RuntimeError("no idea")

class NoCapabilities(SpecEngine):
    def capabilities(self): return None

class OddCapabilities(SpecEngine):
    def capabilities(self): return frozenset({"magic"})

class RaisesApply(SpecEngine):
    def apply(self, event): raise RuntimeError("x" * 100_000)

class RaisesLines(SpecEngine):
    def apply(self, event): raise RuntimeError("line\\n" * 1000)

class HasNoText(SpecEngine):
    class Odd(Exception):
        def __str__(self): raise ValueError
    def apply(self, event): raise self.Odd

class Recurses(SpecEngine):
    def apply(self, event): return self.apply(event)

class ExitsApply(SpecEngine):
    def apply(self, event): sys.exit(0)

class AnswersNone(SpecEngine):
    def apply(self, event): return None

class AnswersNumber(SpecEngine):
    def apply(self, event): return 31337

class PlansNothing(SpecEngine):
    def apply(self, event):
        seen = super().apply(event)
        return Plan(None, None, None, None) if isinstance(seen, Plan) else seen

class RaisesSnapshot(SpecEngine):
    def snapshot(self): raise RuntimeError("no state")

class OddSnapshot(SpecEngine):
    def snapshot(self): return 3

class NoEngine:
    def __init__(self, config): pass

def makes_nothing(config): return None

def takes_nothing(): return None

class Leaves(SpecEngine):
    def apply(self, event): os._exit(0)

class Kills(SpecEngine):
    def apply(self, event): os.kill(os.getpid(), signal.SIGKILL)

class Hangs(SpecEngine):
    def apply(self, event): time.sleep(1000)

class Eats(SpecEngine):
    '''All the memory that it may have.'''
    def __init__(self, config):
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        super().__init__(config)
    def apply(self, event):
        bytearray(8 << 30)
        return super().apply(event)

class Prints(SpecEngine):
    def apply(self, event):
        print("x" * 100_000)
        raise RuntimeError("enough said")
"""

BUILDING = {  # exit code and message of an engine that fails while it is built
    "RaisesBuilt": (1, "RuntimeError: no device while built"),
    "ExitsBuilt": (1, "SystemExit: 3 while built"),
    "RaisesCapabilities": (1, "RuntimeError: no idea while built"),
    "NoCapabilities": (2, "must be a set of names"),
    "OddCapabilities": (2, "'magic' is none of"),
    "NoEngine": (2, "has no apply()"),
    "makes_nothing": (2, "returned None"),
    "takes_nothing": (1, "TypeError: takes_nothing()"),
}
ANSWERING = {
    "RaisesApply": f"RuntimeError: {'x' * 20}",
    "RaisesLines": "RuntimeError: line line",
    "HasNoText": "Odd: no text, since",
    "Recurses": "RecursionError",
    "ExitsApply": "SystemExit: 0",
    "AnswersNone": "None",
    "AnswersNumber": "31337",
    "PlansNothing": "None",
    "RaisesSnapshot": "RuntimeError: no state",
    "OddSnapshot": "3",
}
HERE = (
    "check --in-process --preset tiny --episode 0",
    "arms --workloads 3 --preset tiny",
    "explore --preset loop",
    "vectors consume VECTORS",
    "replay MOONCAKE",
)
SEES_NO_STATE = "arms"
BRIEFLY = (*HERE, *(f"{line} --brief" for line in HERE))
BROKEN = [
    *(
        (f"{line} --engine broken_engines:{name}", *end)
        for line in HERE
        for name, end in BUILDING.items()
    ),
    *(
        (f"{line} --engine broken_engines:{name}", 1, message)
        for line in BRIEFLY
        for name, message in ANSWERING.items()
        if not (line.startswith(SEES_NO_STATE) and name.endswith("Snapshot"))
    ),
]


@pytest.mark.parametrize(("line", "code", "message"), BROKEN)
def test_a_broken_engine_in_this_process_gets_a_short_report(
    folder: Path, line: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(folder, line, monkeypatch)
    assert result.exit_code == code, result.output
    assert message in "".join(result.output.split()) or message in " ".join(result.output.split())
    assert max(map(len, result.output.splitlines())) < 2 * ERROR_CHARS_MAX
    is_report = line.rpartition(":")[2] in ANSWERING and "--brief" not in line
    assert len(result.output.splitlines()) <= (REPORT_LINES_MAX if is_report else LINES_MAX)
    *others, last = result.output.splitlines()
    if "--brief" in line and others:
        assert last.split()[:2] == ["reproduce", "blockstep"], "and nothing is wrapped"


@pytest.mark.parametrize("command", ["arms", "check --in-process", "explore --preset loop"])
@pytest.mark.parametrize("module", [name for name in MODULES if name not in ALONE])
def test_an_engine_that_cannot_be_imported_is_bad_input(
    folder: Path, command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(folder, f"{command} --engine {module}:make", monkeypatch)
    assert result.exit_code == 2, result.output
    assert len(result.output.splitlines()) == 1
    assert len(result.output) < 2 * ERROR_CHARS_MAX
    assert f"engine '{module}:make': cannot load {module}:make: " in result.output


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("importing:make", "No module named 'no_such'; raised in {folder}/deeper.py, line 2"),
        ("nowhere:make", "No module named 'nowhere'; is it installed and importable?"),
        ("json:nothing", "no attribute 'nothing'; name a factory in it"),
        ("deeper.py:make", "name the module, not a file: deeper:make"),
        ("./deeper:make", "name the module, not a file: deeper:make"),
        ("src/deeper.py:make", "a file: deeper:make, and its folder with --path src"),
    ],
)
def test_a_failed_import_names_its_place_and_a_fix(
    folder: Path, engine: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "importing.py").write_text("import deeper\n")
    (folder / "deeper.py").write_text("\nimport no_such\n")
    result = run(folder, f"check --in-process --engine {engine}", monkeypatch)
    assert result.exit_code == 2, result.output
    assert result.output.rstrip().endswith(message.format(folder=folder))


@pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")
@pytest.mark.parametrize(
    ("engine", "code", "message"),
    [
        ("kills_itself:make", 2, "was ended by SIGKILL while being imported"),
        ("broken_engines:Prints", 1, "the engine raised RuntimeError: enough said"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("leaves:make", 2,
            "ended with exit code 0 while being imported"), ("is_interrupted:make", 2,
            "while being imported"), ("exits:make", 2, "cannot load exits:make: SystemExit: 0"),
            ("has_no_text:make", 2, "cannot load has_no_text:make"), ("broken_engines:RaisesBuilt",
            1, "RuntimeError: no device while being built"), ("broken_engines:makes_nothing", 2,
            "returned None"), ("broken_engines:Leaves", 1, "ended with exit code 0 at: "),
            ("broken_engines:Kills", 1, "was ended by SIGKILL at: "), ("broken_engines:Hangs", 1,
            "gave no answer within 0.5 s at: "), ("broken_engines:Eats", 1, "MemoryError"),
            ("broken_engines:OddSnapshot", 1, "snapshot() after"))),
    ],
)  # fmt: skip
def test_a_broken_engine_in_its_own_process_gets_a_short_report(
    folder: Path, engine: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--preset tiny --budget 300 --jobs 1 --event-seconds 0.5 --brief"
    result = run(folder, f"check {options} --engine {engine}", monkeypatch)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())
    assert len(result.output.splitlines()) <= LINES_MAX
