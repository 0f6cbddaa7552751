"""Writing an adapter: the template, the steps of the tutorial and the toy of the how-to work."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import fit_depth, run_episode
from blockstep.conformance.search.options import CheckOptions

DOCS = Path(__file__).parents[3] / "docs"
TUTORIAL = (DOCS / "tutorial" / "your-engine.md").read_text()
HOW_TO = (DOCS / "how-to" / "hold-your-engine.md").read_text()
FENCE = re.compile(r"([^\n]*\n)\n```(\w+)\n(.*?)```", re.S)
EPISODES, EPISODES_MAX = 20, 150
NAMED = re.compile(r"`(\w+\.py)`")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; modules imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget(tmp_path)


def forget(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


def blockstep(*args: object) -> Result:
    """Run the command in this process; modules of the folder are imported again."""
    forget(Path.cwd())
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"})
    finally:
        sys.dont_write_bytecode = before


def shows(output: str, text: str) -> bool:
    """Return whether an output has these lines in this order; "..." matches any text."""
    parts = [" ".join(part.split()) for part in text.split("...")]
    return re.search(".*".join(map(re.escape, parts)), " ".join(output.split())) is not None


def play(page: str, folder: Path) -> list[int]:
    """Do all steps of a page in order. Return the exit codes of its commands."""
    codes, output = [], ""
    for before, kind, text in FENCE.findall(page):
        named = NAMED.findall(before)
        match kind:
            case "python" if named:
                (folder / named[-1]).write_text(text)
            case "diff":
                path = folder / NAMED.findall(before)[-1]
                old = "".join(f"{row[1:]}\n" for row in text.splitlines() if row[0] == "-")
                new = "".join(f"{row[1:]}\n" for row in text.splitlines() if row[0] == "+")
                assert path.read_text().count(old) == 1
                path.write_text(path.read_text().replace(old, new))
            case "console":
                for line in text.splitlines():
                    command = shlex.split(line.removeprefix("$ blockstep "))
                    here = ["--in-process"] if command[0] == "check" else []
                    result = blockstep(*command, *here)
                    assert result.exception is None or isinstance(result.exception, SystemExit)
                    codes.append(result.exit_code)
                    output = result.output
            case "text":
                assert shows(output, text), output
    return codes


def test_the_tutorial_leads_from_an_empty_file_to_a_verdict(folder: Path) -> None:
    """The test does all steps of the page: files, commands, their output, and the repair."""
    assert play(TUTORIAL, folder) == [0, 1, 1, 0, 0]
    assert 90 <= len((folder / "scheduler.py").read_text().splitlines()) <= 110


def get_toy() -> str:
    return next(str(text) for before, _, text in FENCE.findall(HOW_TO) if "toy.py" in before)


def test_the_toy_of_the_how_to_conforms_as_it_is(folder: Path) -> None:
    (folder / "toy.py").write_text(get_toy())
    budget = ("--budget", 5000, "--preset", "tiny", "--seed", 1)
    result = blockstep("check", "--engine", "toy:Toy", *budget, "--in-process")
    assert result.exit_code == 0, result.output
    assert "conforms: engine toy:Toy, equivalence safety" in result.output
    shown = next(text for before, kind, text in FENCE.findall(HOW_TO) if kind == "console")
    assert shown == "$ blockstep check --engine toy:Toy --budget 20000\n"


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("self.free += self.sequences.pop(name).blocks", "self.sequences.pop(name)", "P10"),
        ("self.ended.append(name)", "pass", "P26 plan_names_the_finished"),
        ("if seq is None or not token_ids", "if seq is None", "P13"),
        ("self.free[needed:]\n", "self.free[needed - 1 :]\n", "P2"),
        (" if name in self.sequences]", "]", " engine_raises_nothing"),
        ("(seq.end - 1)", "(seq.end - 2)", "P26 table_holds_the_scheduled_tokens"),
    ],
)
def test_a_mistake_in_the_toy_is_found(folder: Path, right: str, wrong: str, message: str) -> None:
    """Each mistake is found, so it means something that the toy conforms."""
    toy = get_toy()
    assert toy.count(right) == 1
    (folder / "toy.py").write_text(toy.replace(right, wrong))
    forget(folder)
    make_engine, options = load_engine("toy:Toy"), CheckOptions(preset="tiny", max_depth=1)
    episodes = (run_episode(options, index, make_engine) for index in range(60))
    found = {f"{it.first.property_id} {it.first.sentence}" for it in episodes if it.first}
    assert any(name.startswith(message) for name in found), found


def test_the_how_to_lists_every_capability() -> None:
    rows = re.findall(r"^\| `([a-z ]+)` \|", HOW_TO.split("### What a plan says")[0], re.M)
    assert sorted(rows) == sorted(Capability)


# new-adapter.


@pytest.mark.parametrize("safety", [[], ["--safety"]])
def test_a_new_adapter_can_be_checked_and_names_the_method_to_fill_in(
    folder: Path, safety: list[str]
) -> None:
    written = blockstep("new-adapter", "mine", *safety)
    assert written.exit_code == 0
    assert written.output.endswith("\n  blockstep check --engine mine:make\n")
    result = blockstep("check", "--engine", "mine:make", "--in-process")
    assert result.exit_code == 1
    assert re.search(r"EngineFault: (submit|schedule)\(\) is not filled in", result.output)
    assert ("equivalence safety" in result.output) == bool(safety)


def test_a_new_adapter_is_written_as_json(folder: Path) -> None:
    result = blockstep("new-adapter", "mine", "--json", "-")
    assert result.stdout == '{\n  "path": "mine.py",\n  "engine": "mine:make"\n}\n'


def test_an_adapter_in_a_package_is_written_into_its_folder(folder: Path) -> None:
    (folder / "pkg").mkdir()
    assert blockstep("new-adapter", "pkg.mine").exit_code == 0
    assert "--engine pkg.mine:make" in (folder / "pkg" / "mine.py").read_text()


def check_oracle_in_template(folder: Path, safety: list[str], *options: object) -> Result:
    """Fill in the template with the specification, and return the result of a check."""
    assert blockstep("new-adapter", "mine", *safety).exit_code == 0
    text = (folder / "mine.py").read_text()
    text = text.replace("self.config = config\n", "self.oracle = Oracle(config)\n")
    for name, event in (
        ("submit", "v.Submit(request)"),
        ("schedule", "v.Schedule()"),
        ("commit", "v.Commit(frame_id, sampled)"),
        ("abort", "v.Abort(request_ids)"),
    ):
        text, count = re.subn(
            rf'raise EngineFault\("{name}\(\) is not filled in: .*"\)',
            f"return self.oracle.apply({event})",
            text,
        )
        assert count == 1
    (folder / "mine.py").write_text(f"{text}\n\nfrom blockstep.spec import Oracle\n")
    return blockstep("check", "--engine", "mine:make", *options, "--in-process")


@pytest.mark.parametrize("safety", [[], ["--safety"]])
def test_the_template_filled_in_with_the_spec_has_no_finding(
    folder: Path, safety: list[str]
) -> None:
    """A check sends no event that needs a capability which the template lacks."""
    result = check_oracle_in_template(folder, safety, "--preset", "tiny", "--budget", 1500)
    assert result.exit_code in {0, 5}, result.output  # too few events for every coverage goal
    assert "canary      caught" in result.output


@pytest.mark.soak
@pytest.mark.parametrize("safety", [[], ["--safety"]])
def test_the_template_filled_in_with_the_spec_conforms(folder: Path, safety: list[str]) -> None:
    """Every required coverage goal can be reached without the capabilities that it lacks."""
    result = check_oracle_in_template(folder, safety, "--budget", 60_000)
    assert result.exit_code == 0, result.output


# new-adapter --like.

FILLED = """

from blockstep.spec import Oracle


class Filled(Adapter):
    \"\"\"The five functions, with the specification as the scheduler.\"\"\"

    ends_later = remaps = False

    def build(self):
        self.oracle, self.plans, self.tables, self.leaving = Oracle(self.config), {}, {}, []

    def add(self, request):
        if request.request_id in self.leaving:  # that one has ended, and this is another
            self.leaving.remove(request.request_id)
        self.oracle.apply(v.Submit(request))

    def step(self):
        self.oracle.apply(v.Abort(tuple(self.leaving)))
        self.leaving = []
        plan = self.plans[self.num_plans] = self.oracle.apply(v.Schedule())
        rows, remapped = [], []
        for row in (*plan.cached, *plan.new):
            name, is_new = row.request_id, isinstance(row, v.NewRow)
            (blocks,) = row.block_ids if is_new else row.new_block_ids
            is_whole = is_new or row.resumed
            self.tables[name] = table = blocks if is_whole else (*self.tables[name], *blocks)
            if self.remaps and not is_whole and (self.num_plans + len(rows)) % 3 == 0:
                remapped.append(name)
                blocks = table
            rows.append(Row(name, row.num_computed_tokens, row.num_scheduled_tokens, blocks))
        remaps = {"remapped": remapped} if remapped else {}
        return Step(rows, plan.preempted_req_ids, **remaps)

    def commit(self, frame_id, sampled):
        self.sampled = sampled
        return super().commit(frame_id, sampled)

    def take(self, frame_id, sampled):
        done = self.oracle.apply(v.Commit(self.plans[frame_id].frame_id, self.sampled))
        return {row.request_id: row.finish_reason for row in done.rows}

    def drop(self, request_ids):
        if self.ends_later:
            self.leaving += request_ids
            return ()
        return self.oracle.apply(v.Abort(tuple(request_ids))).request_ids

    def schedule(self):
        made = super().schedule()
        if not (self.ends_later or self.remaps):  # then it is the specification's own plan
            told = self.plans[made.frame_id]
            for name in ("new", "cached", "finished_req_ids", "preempted_req_ids"):
                assert getattr(made, name) == getattr(told, name), name
        return made


class Later(Filled):
    ends_later = True


class Remapping(Filled):
    remaps = True
"""


@pytest.mark.parametrize("like", ["plain", "async", "caching"])
def test_a_longer_template_names_the_method_to_fill_in(folder: Path, like: str) -> None:
    assert blockstep("new-adapter", "mine", "--like", like).exit_code == 0
    result = blockstep("check", "--engine", "mine:make", "--preset", "tiny", "--in-process")
    assert result.exit_code == 1
    assert re.search(r"EngineFault: (add|step)\(\) is not filled in", result.output)
    assert "# ---" not in (folder / "mine.py").read_text()


@pytest.mark.parametrize(
    ("like", "name", "shows"),
    [
        ("plain", "Filled", {"preempted_then_resumed", "several_ended_in_one_commit"}),
        ("plain", "Later", {"preempted_then_resumed"}),
        ("async", "Filled", {"several_frames_in_flight", "abort_in_flight"}),
        ("async", "Later", {"several_frames_in_flight"}),
        ("caching", "Filled", {"prefix_hit", "resumed_with_hit"}),
        ("caching", "Remapping", {"prefix_hit", "preempted_then_resumed"}),
    ],
)
def test_a_longer_template_needs_only_five_functions(
    folder: Path, like: str, name: str, shows: set[str]
) -> None:
    """Filled in with the specification, it makes the same plans, and a check finds nothing."""
    assert blockstep("new-adapter", "mine", "--like", like).exit_code == 0
    with (folder / "mine.py").open("a") as file:
        file.write(FILLED)
    forget(folder)
    make_engine, options = load_engine(f"mine:{name}"), CheckOptions(preset="tiny")
    options = fit_depth(options, make_engine)
    assert options.max_depth == (2 if like == "async" else 1)
    reached: set[str] = set()
    for index in range(EPISODES_MAX):
        episode = run_episode(options, index, make_engine)
        assert episode.first is None, (episode.first, episode.program)
        reached |= {witness for witness, count in episode.witnesses.items() if count}
        if index >= EPISODES and reached >= shows:
            break
    assert reached >= shows
