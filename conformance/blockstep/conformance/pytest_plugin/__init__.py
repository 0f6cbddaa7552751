"""The pytest plugin: checks an engine, as one test per property and preset.

PYTEST_DONT_REWRITE: it has no assertions, and pytest would warn if it was imported before.

The engine is that of `--blockstep-engine`, or of the project's table `[tool.blockstep]` (see
`protocol.settings`). `--blockstep`, `--blockstep-engine` or `--blockstep-corpus` adds the tests;
the table alone serves the fixture. Without an engine no other module of the tools is imported.

A preset is checked once per session, in a child process (see `isolation`), when its first test is
set up. With xdist any worker may be the first, whatever `--dist` is: it holds a file lock while it
checks, and writes the outcome to a folder of the controller, where the others find it. A worker
that would have to wait checks another preset meanwhile. Grouping the tests of a preset would be
simpler, but `--dist loadgroup` is not the default, and pytest 9 with xdist 3.8 does not group.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from blockstep.conformance.protocol.program import Program
    from blockstep.conformance.protocol.settings import Settings
    from blockstep.conformance.pytest_plugin.fixture import Bench
    from blockstep.conformance.search.isolation import Isolation
    from blockstep.conformance.search.options import CheckOptions

NAME = "blockstep"
PRESETS_DEFAULT = ("tiny", "small")
BUDGET = "150000"
FOLDER = "blockstep_folder"
"""Key under which an xdist worker gets the folder of the outcomes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; all but `--blockstep` need an engine."""
    group = parser.getgroup(NAME, "blockstep: hold a scheduler to its specification")
    add = group.addoption
    text = "Make tests of the engine that pyproject.toml names ([tool.blockstep])."
    add("--blockstep", action="store_true", help=text)
    add("--blockstep-engine", metavar="ENGINE", help="module:attribute of a factory, or a name.")
    add("--blockstep-path", metavar="FOLDER", help="A folder to look in first for the engine.")
    add("--blockstep-profile", metavar="NAME", help="Release to follow (default: strict).")
    add("--blockstep-budget", metavar="N|60s|5m", help=f"How long, per preset (default: {BUDGET}).")
    add(
        "--blockstep-preset",
        metavar="NAME",
        action="append",
        help="Scope of the runs; repeatable (default: tiny and small).",
    )
    add("--blockstep-seed", metavar="N", type=int, default=0, help="Seed of all random choices.")
    add("--blockstep-depth", metavar="N", type=int, help="Plans in flight at once, at most.")
    add("--blockstep-with", metavar="NAME", action="append", help="A feature of every run.")
    add("--blockstep-without", metavar="NAME", action="append", help="A feature of no run.")
    add("--blockstep-corpus", metavar="FOLDER", help="Programs of check --save: a test for each.")
    add("--blockstep-known", metavar="PATH", help="Programs whose failures are suppressed.")
    add("--blockstep-json", metavar="FILE", help="Write the results of the checks, as JSON.")
    add(
        "--blockstep-event-seconds",
        metavar="N",
        type=float,
        default=10.0,
        help="An engine that takes longer for one event hangs (default: 10).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the options and the project's table, and nothing else yet."""
    asked: str | None = config.getoption("blockstep_engine")
    settings = _find_settings(config)
    if settings is not None and asked and not settings.is_about(asked):
        settings = None  # the table is about another engine
    engine = asked if settings is None else settings.engine
    if not engine:
        if config.getoption("blockstep"):
            raise pytest.UsageError("--blockstep: no pyproject.toml has a table [tool.blockstep]")
        return
    config.addinivalue_line("markers", f"{NAME}: made by --blockstep, not from a file")
    config.stash[CAMPAIGN] = Campaign(config, engine, settings)


def _find_settings(config: pytest.Config) -> Settings | None:
    """Return the table of the project in whose folder pytest was started, or None."""
    from blockstep.conformance.protocol import settings  # noqa: PLC0415 - it imports nothing of ours

    try:
        return settings.find_settings(config.invocation_params.dir)
    except settings.SettingsError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the child process, and delete the outcomes."""
    campaign = config.stash.get(CAMPAIGN, None)
    if campaign is not None:
        campaign.close()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the folder of the outcomes to an xdist worker."""
    campaign = node.config.stash.get(CAMPAIGN, None)
    if campaign is not None:
        node.workerinput[FOLDER] = str(campaign.folder)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Add our tests to those of the session's files."""
    report = yield
    campaign = collector.config.stash.get(CAMPAIGN, None)
    asking = ("blockstep", "blockstep_engine", "blockstep_corpus")
    is_asked = any(collector.config.getoption(name) for name in asking)
    is_root = isinstance(collector, pytest.Session) and report.passed
    if campaign is not None and is_asked and is_root:
        assert report.result is not None
        report.result.append(EngineNode.from_parent(collector, name=NAME, nodeid=NAME))
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record which presets are left after tests were deselected."""
    campaign = session.config.stash.get(CAMPAIGN, None)
    if campaign is not None:
        items = (item for item in session.items if isinstance(item, SubjectItem))
        campaign.wanted = tuple(dict.fromkeys(item.preset for item in items))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line or two for every checked preset, so that a pass says what was checked."""
    campaign = terminalreporter.config.stash.get(CAMPAIGN, None)
    lines = [] if campaign is None else [*campaign.sum_up()]
    if lines:
        terminalreporter.section(NAME)
    for line in lines:
        terminalreporter.line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write `--blockstep-json`; with xdist only the controller does."""
    campaign = session.config.stash.get(CAMPAIGN, None)
    path = session.config.getoption("blockstep_json")
    if campaign is None or path is None or hasattr(session.config, "workerinput"):
        return
    runs = [
        {"preset": preset, "check": outcome["check"]} for preset, outcome in campaign.get_outcomes()
    ]
    value = {"format": "blockstep-pytest", "version": 1, "runs": runs}
    Path(path).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class Campaign:
    """The checks of a session: options, outcomes, and the child process in which they run."""

    def __init__(self, config: pytest.Config, engine: str, settings: Settings | None) -> None:
        from blockstep.conformance.search.isolation import Isolation  # noqa: PLC0415 - only if wanted

        self.engine = engine
        self.profile = _read_profile(config, settings)
        own_presets = [settings.preset] if settings is not None and settings.preset else []
        self.presets: Sequence[str] = tuple(
            dict.fromkeys(config.getoption("blockstep_preset") or own_presets or PRESETS_DEFAULT)
        )
        self.wanted: Sequence[str] = ()
        """Presets whose tests will be run."""
        self._options = _read_options(config, engine, self.presets, settings)
        seconds: float = config.getoption("blockstep_event_seconds")
        if seconds <= 0:
            raise pytest.UsageError(f"--blockstep-event-seconds {seconds:g}: must be above 0")
        json_path: str | None = config.getoption("blockstep_json")
        if json_path is not None and not Path(json_path).parent.is_dir():
            raise pytest.UsageError(f"--blockstep-json {json_path!r}: there is no such folder")
        corpus: str | Path | None = config.getoption("blockstep_corpus")
        if corpus is None and settings is not None:
            corpus = settings.corpus
        self.known: Mapping[str, Program] = _read_known(config, settings)
        """Programs whose failures are suppressed."""
        self.programs = _find_programs(corpus, self.known)
        """The programs of the corpus, by name."""
        folder: str | None = config.getoption("blockstep_path")
        if folder is not None and not Path(folder).is_dir():
            raise pytest.UsageError(f"--blockstep-path {folder!r}: there is no such folder")
        self.engine_path = None if folder is None else str(Path(folder).resolve())
        """The folder that is searched before all others."""
        self.folders = [str(config.invocation_params.dir)]
        """Folders that are searched first for the engine, as the command line searches its folder.
        """
        self.folders += [] if settings is None else [str(settings.folder)]
        self.isolation: Isolation = Isolation(seconds, self.folders)
        workerinput = getattr(config, "workerinput", None)
        self._is_controller = workerinput is None
        self.folder = Path(
            tempfile.mkdtemp(prefix="blockstep-") if workerinput is None else workerinput[FOLDER]
        )
        self.folder.mkdir(parents=True, exist_ok=True)  # a worker may be on another machine

    def close(self) -> None:
        """End the child process; the controller also deletes the outcomes."""
        self.isolation.close()
        if self._is_controller:
            shutil.rmtree(self.folder, ignore_errors=True)

    def get_outcome(self, preset: str) -> dict[str, Any]:
        """Return the outcome of a preset's check: `check` and `text`, or `error`. Runs it once."""
        for other in (preset, *self.wanted):
            if (self.folder / f"{preset}.json").exists():
                break
            self._ensure(other, wait=False)
        self._ensure(preset)
        return self._load(preset)

    def _ensure(self, preset: str, wait: bool = True) -> None:
        """Check a preset unless it is done; without `wait`, also unless another worker is checking
        it.
        """
        from blockstep.conformance.search.isolation.process import locked  # noqa: PLC0415 - only if wanted

        path = self.folder / f"{preset}.json"
        with locked(self.folder / f"{preset}.lock", wait) as is_held:
            if is_held and not path.exists():
                draft = path.with_suffix(".draft")
                draft.write_text(json.dumps(self._check(preset)), encoding="utf-8")
                draft.rename(path)

    def _load(self, preset: str) -> dict[str, Any]:
        text = (self.folder / f"{preset}.json").read_text(encoding="utf-8")
        return cast("dict[str, Any]", json.loads(text))

    def _check(self, preset: str) -> dict[str, Any]:
        from blockstep.conformance.protocol import registry  # noqa: PLC0415
        from blockstep.conformance.report.failure import render_first_failure  # noqa: PLC0415
        from blockstep.conformance.report.jsonform import check_to_json  # noqa: PLC0415
        from blockstep.conformance.report.verdict import verdict_text  # noqa: PLC0415
        from blockstep.conformance.search import isolation  # noqa: PLC0415
        from blockstep.conformance.search.known import KnownFindings  # noqa: PLC0415

        try:
            options, known = self._options[preset], None
            if self.known:
                known = KnownFindings(options, self.isolation.call, self.known)
            result = self.isolation.check(options, known=known)
        except (registry.EngineNotFoundError, isolation.HarnessError, ValueError) as error:
            return {"error": f"blockstep: {error}"}
        text = verdict_text(result) if result.first is None else render_first_failure(result)
        return {"check": check_to_json(result), "text": text}

    def play(self, path: Path) -> tuple[str, str]:
        """Return what is wrong with a program of the corpus, and what was not tried; "" if nothing.

        A program that cannot be played counts as wrong, except if the engine lacks its config.
        """
        from blockstep.conformance.protocol import program_file, registry  # noqa: PLC0415
        from blockstep.conformance.protocol import trace_lines as lines  # noqa: PLC0415
        from blockstep.conformance.report.failure import render_first_failure  # noqa: PLC0415
        from blockstep.conformance.search import isolation  # noqa: PLC0415

        options = replace(self._options[self.presets[0]], program=str(path))
        try:
            result = self.isolation.run(options, program_file.read_program(path))
        except isolation.RefusedError as error:
            return "", str(error)
        except (lines.TraceError, registry.EngineNotFoundError) as error:
            return f"blockstep: {error}", ""
        text = "" if result.first is None else render_first_failure(result)
        return text, "; ".join(result.skipped)

    def get_outcomes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the available outcomes by preset; a preset that could not be checked has none."""
        for preset in self.presets:
            if (self.folder / f"{preset}.json").exists():
                outcome = self._load(preset)
                if "error" not in outcome:
                    yield preset, outcome

    def sum_up(self) -> Iterator[str]:
        """Yield for every preset the verdict, or how to reproduce the failure."""
        for preset, outcome in self.get_outcomes():
            lines = outcome["text"].splitlines()
            if outcome["check"]["failure"] is not None:
                yield f"{preset}: {lines[0]}"
                yield f"{preset}: {outcome['check']['failure']['reproduce']}"
            else:
                notes = [line for line in lines if line.startswith(("not tried", "known", "gone"))]
                yield from (f"{preset}: {line}" for line in (*notes, lines[-1]))


CAMPAIGN = pytest.StashKey[Campaign]()


def _read_known(config: pytest.Config, settings: Settings | None) -> Mapping[str, Program]:
    """Return the known programs, if any are named. Raises UsageError if they cannot be read."""
    from blockstep.conformance.protocol.trace_lines import TraceError  # noqa: PLC0415
    from blockstep.conformance.search.known import read_known  # noqa: PLC0415

    path: str | Path | None = config.getoption("blockstep_known")
    if path is None and settings is not None:
        path = settings.known
    try:
        return {} if path is None else read_known(Path(path))
    except TraceError as error:
        raise pytest.UsageError(f"--blockstep-known {error}") from None


def _find_programs(corpus: str | Path | None, known: Collection[str]) -> dict[str, Path]:
    """Return the programs of a corpus that are not known. Raises UsageError if there are none."""
    from blockstep.conformance.protocol.trace_lines import TraceError  # noqa: PLC0415
    from blockstep.conformance.search.known import find_programs  # noqa: PLC0415

    if corpus is None:
        return {}
    try:
        left_out = {Path(name).resolve() for name in known}
        found = [path for path in find_programs(Path(corpus)) if path.resolve() not in left_out]
    except TraceError as error:
        raise pytest.UsageError(f"--blockstep-corpus {error}") from None
    return {path.relative_to(corpus).with_suffix("").as_posix(): path for path in found}


def _read_profile(config: pytest.Config, settings: Settings | None) -> str:
    """Return the profile of the options, or of the project's table."""
    asked: str | None = config.getoption("blockstep_profile")
    own = None if settings is None else settings.profile
    return asked or own or "strict"


def _read_options(
    config: pytest.Config, engine: str, presets: Sequence[str], settings: Settings | None
) -> dict[str, CheckOptions]:
    """Return the options of each check. Raises UsageError with the messages of the command line."""
    from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS  # noqa: PLC0415
    from blockstep.conformance.protocol.feature_selection import parse_features  # noqa: PLC0415
    from blockstep.conformance.search import options as checking  # noqa: PLC0415
    from blockstep.conformance.search.options import read_budget  # noqa: PLC0415

    try:
        if settings is not None:
            checking.check_settings(settings)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    for preset in presets:
        if preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise pytest.UsageError(f"--blockstep-preset {preset!r}: must be one of {known}")
    profile = _read_profile(config, settings)
    seed: int = config.getoption("blockstep_seed")
    depth: int | None = config.getoption("blockstep_depth")
    folder: str | None = config.getoption("blockstep_path")
    if seed < 0:
        raise pytest.UsageError(f"--blockstep-seed {seed}: must be 0 or above")
    if depth is not None and depth < 1:
        raise pytest.UsageError(f"--blockstep-depth {depth}: must be 1 or above")
    own: str | None = None if settings is None else settings.budget
    try:
        checking.find_profile(profile)
        max_events, max_seconds = read_budget(config.getoption("blockstep_budget") or own or BUDGET)
    except ValueError as error:
        raise pytest.UsageError(f"--blockstep-{error}") from None
    try:
        options = checking.CheckOptions(
            engine=engine,
            seed=seed,
            max_events=max_events,
            max_seconds=max_seconds,
            max_depth=depth or MAX_DEPTH,
            profile=profile,
            path=None if folder is None else str(Path(folder).resolve()),
            with_features=parse_features(config.getoption("blockstep_with") or ()),
            without_features=parse_features(config.getoption("blockstep_without") or ()),
        )
        checking.get_wish(options)
    except ValueError as error:
        raise pytest.UsageError(f"--blockstep-with, --blockstep-without: {error}") from None
    return {preset: replace(options, preset=preset) for preset in presets}


# The tests.


class EngineNode(pytest.Collector):
    """The tests of the engine: a node for the corpus, and one for each preset."""

    def collect(self) -> Iterator[CorpusNode | PresetNode]:
        """Yield the corpus, then the presets in the order of the options."""
        if self.config.stash[CAMPAIGN].programs:
            yield CorpusNode.from_parent(self, name="corpus")
        for preset in self.config.stash[CAMPAIGN].presets:
            yield PresetNode.from_parent(self, name=preset)


class PresetNode(pytest.Collector):
    """One preset: a test for each property, and those of `ASPECTS`."""

    def collect(self) -> Iterator[SubjectItem]:
        """Yield the tests, in the order of the properties."""
        from blockstep.conformance.judge.checks import PROPERTIES  # noqa: PLC0415 - only if wanted
        from blockstep.conformance.report.per_property import ASPECTS  # noqa: PLC0415

        for entry in PROPERTIES:
            name = f"{entry.id} {entry.name}"
            yield SubjectItem.from_parent(self, name=name, subject=entry.id)
        for aspect in ASPECTS:
            yield SubjectItem.from_parent(self, name=aspect, subject=aspect)


class CorpusNode(pytest.Collector):
    """A folder of programs: a test for each."""

    def collect(self) -> Iterator[ProgramItem]:
        """Yield the programs, in the order of their names."""
        for name, path in self.config.stash[CAMPAIGN].programs.items():
            yield ProgramItem.from_parent(self, name=name, program_path=path)


class FailedCheckError(Exception):
    """A failed check; its message is the whole report, without a traceback."""


class EngineItem(pytest.Item):
    """A test of the engine, which is in no file."""

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the text of a failed check as it is."""
        if isinstance(excinfo.value, FailedCheckError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the location without a line, since the test is in no file."""
        return self.path, None, self.nodeid


class ProgramItem(EngineItem):
    """One program of the corpus."""

    def __init__(self, *, program_path: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._program_path = program_path
        self.add_marker(NAME)

    def runtest(self) -> None:
        """Pass, fail with the report of the failure, or be skipped for what the engine lacks."""
        text, reasons = self.config.stash[CAMPAIGN].play(self._program_path)
        if text:
            raise FailedCheckError(text.rstrip("\n"))
        if reasons:
            pytest.skip(f"not tried: {reasons}")


class SubjectItem(EngineItem):
    """One property, or one aspect, of an engine in one preset."""

    def __init__(self, *, subject: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._subject = subject
        self._outcome: dict[str, Any] = {}
        self.add_marker(NAME)

    @property
    def preset(self) -> str:
        """The preset in which the engine is checked."""
        assert self.parent is not None
        return self.parent.name

    def setup(self) -> None:
        """Have the preset checked. If it cannot be checked, every test of it fails."""
        self._outcome = self.config.stash[CAMPAIGN].get_outcome(self.preset)
        if "error" in self._outcome:
            pytest.fail(self._outcome["error"], pytrace=False)

    def runtest(self) -> None:
        """Pass, fail with the report of the failure, or be skipped if nothing was checked."""
        from blockstep.conformance.report.per_property import verdict_on  # noqa: PLC0415 - only if wanted

        check, text = self._outcome["check"], self._outcome["text"]
        known = check["findings_known"].get(self._subject, 0)
        if known:
            self.user_properties.append(("blockstep_findings_known", known))
        if self._subject == "verdict":
            for name in ("seed", "num_events", "num_episodes", "equivalence"):
                self.user_properties.append((f"blockstep_{name}", check[name]))
        word, reason = verdict_on(self._subject, check)
        if word == "failed":
            raise FailedCheckError(text.rstrip("\n"))
        if word == "skipped":
            pytest.skip(reason)


# The fixture.


@pytest.fixture
def blockstep(request: pytest.FixtureRequest) -> Bench:
    """Return a bench for own programs: `blockstep.run(...)`, `blockstep.lockstep(config)`."""
    campaign = request.config.stash.get(CAMPAIGN, None)
    if campaign is None:
        pytest.skip("no engine: name one with --blockstep-engine, or in [tool.blockstep]")
    from blockstep.conformance.pytest_plugin.fixture import Bench  # noqa: PLC0415 - only if wanted
    from blockstep.conformance.search.options import CheckOptions  # noqa: PLC0415 - only if wanted

    path = campaign.engine_path
    options = CheckOptions(campaign.engine, profile=campaign.profile, path=path)
    return Bench(options, campaign.isolation, campaign.folders, request.node.nodeid)
