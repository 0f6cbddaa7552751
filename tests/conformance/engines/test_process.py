"""Engines in processes of their own, driven by lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from process_support.serve import WRONGS
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import BadEngineError, EngineFault, Safety, SamePlans, get_traits
from blockstep.conformance.engines.process import Hello, ProcessFactory
from blockstep.conformance.protocol.codec import from_form, to_form
from blockstep.conformance.protocol.link import Link
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.program_file import write_program
from blockstep.conformance.protocol.registry import (
    EngineNotFoundError,
    SpecEngine,
    load_engine,
    split_name,
)
from blockstep.conformance.protocol.schema import build_schema
from blockstep.conformance.report.failure import reproduce
from blockstep.conformance.search.check import CheckResult, play_program
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

ROOT = Path(__file__).resolve().parents[3]
SERVE = ROOT / "tests" / "support" / "process_support" / "serve.py"
EXAMPLE = ROOT / "docs" / "how-to" / "process-engine.cpp"
CONFIG = v.Config(num_blocks=6, block_size=2)
HELLO = {"type": "Hello", "format": "blockstep-engine", "version": 1, "capabilities": ["abort"]}


def command_of(name: str, wrong: str = "") -> str:
    """The command line of a process that serves an engine of ours."""
    return f"{sys.executable} {SERVE} {name} {wrong}".strip()


def answer_hello(**fields: object) -> str:
    """A command that answers every line with this Hello."""
    line = json.dumps({**HELLO, **fields})
    return f"{sys.executable} -u -c 'import sys\nfor _ in sys.stdin: print({line!r})'".replace(
        repr(line), json.dumps(line)
    )


def check(engine: str, *options: str) -> Result:
    given = ("check", "--engine", engine, "--preset", "tiny", "--budget", "300", *options)
    return CliRunner().invoke(app, given)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The engine of the docs, compiled."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    target = tmp_path_factory.mktemp("cpp") / "process-engine"
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run([compiler, *flags, "-o", str(target), str(EXAMPLE)], check=True)
    return f"cmd:{target}"


def test_the_example_in_cpp_decides_as_the_specification(example: str) -> None:
    result = check(example, "--budget", "3000", "--preset", "small")
    assert "conforms" in result.output, result.output
    assert result.exit_code == 0


PROGRAM = Program(
    v.Config(num_blocks=6, block_size=2),
    (v.Submit(v.Request("A", (1, 2, 3), 2)), v.Schedule(), Answer(), v.Schedule(), Answer()),
)


def play(engine: str) -> CheckResult:
    """Play a short program on an engine in this process."""
    return play_program(CheckOptions(engine=engine), PROGRAM, load_engine(engine))


def test_an_engine_of_ours_in_a_process_agrees_with_the_specification() -> None:
    result = play(f"cmd:{command_of('host')}")
    assert result.first is None
    assert (result.num_events, result.has_snapshot) == (5, True)


def test_an_exact_engine_agrees_if_only_plans_are_compared() -> None:
    for engine in ("host@plan", f"cmd:{command_of('host')}@plan"):
        assert play(engine).first is None
    assert play(f"cmd:{command_of('host', 'decision')}@plan").first is not None


FAULT, DIVERGENCE = "FAULT at event", "DIVERGENCE at event"


@pytest.mark.parametrize(
    ("wrong", "headline", "words"),
    [
        ("no-json", FAULT, "Input data was truncated"),
        ("no-object", FAULT, "Expected `object`, got `array`"),
        ("no-utf-8", FAULT, "can't decode byte 0xff"),
        ("unknown-type", FAULT, "Invalid value 'Step' - at `$.type`; it must be one of Plan,"),
        ("unknown-field", FAULT, "unknown field `num_steps`"),
        ("wrong-type", FAULT, "Expected `int`, got `str` - at `$.frame_id`"),
        ("fault", FAULT, "lost a block"),
        ("exit", FAULT, "ended with exit code 3"),
        ("signal", FAULT, "ended by SIGSEGV"),
        ("assertion", FAULT, ". | . | . | . | no block 7 (pool.cpp:12)\\x1b[0m"),
        ("half-a-line", FAULT, "ended with exit code 0 after"),
        ("twice", FAULT, "write one line for each line read"),
        ("flood", FAULT, "more than 1048576 bytes in one line"),
        ("decision", DIVERGENCE, "frame_id is 7, the spec has 0"),
        ("state", FAULT, "missing required field `pause_state`"),
        ("closed", FAULT, "closed its standard output"),
    ],
)
def test_a_wrong_process_gives_exit_code_1_and_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, headline: str, words: str
) -> None:
    monkeypatch.setattr("blockstep.conformance.protocol.link.LINE_BYTES_MAX", 1 << 20)
    path = tmp_path / "program.json"
    path.write_text(write_program(PROGRAM, ""))
    engine = f"cmd:{command_of('spec', wrong)}"
    given = ("check", "--engine", engine, "--program", str(path), "--in-process")
    result = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    text = " ".join(result.output.split())
    assert result.exit_code == 1, text
    assert words in text
    assert (text.count(headline), text.count(FAULT) + text.count(DIVERGENCE)) == (1, 1)
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("banner", "'engine ready' is not a Hello"),
        ("version", "speaks 'blockstep-engine' version 1"),
        ("no-utf-8-hello", "is not a Hello: 'utf-8' codec can't decode byte 0xff"),
        ("capability", "`$.capabilities[0]`; it must be one of snapshot, priority,"),
    ],
)
def test_a_wrong_hello_is_a_usage_error(wrong: str, words: str) -> None:
    with pytest.raises(EngineNotFoundError) as caught:
        load_engine(f"cmd:{command_of('spec', wrong)}")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [("fault", 1, "lost a block"), ("banner", 2, "is not a Hello"), ("silence", 1, "within 1 s")],
)
def test_a_check_ends_with_its_exit_code(wrong: str, code: int, words: str) -> None:
    result = check(f"cmd:{command_of('spec', wrong)}", "--brief", "--event-seconds", "1")
    assert result.exit_code == code, result.output
    assert words in " ".join(result.output.split())


def test_an_engine_that_refuses_a_config_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="no such block size"):
        load_engine(f"cmd:{command_of('spec', 'refusal')}")(CONFIG)


def test_every_mistake_of_the_wrong_process_is_tested() -> None:
    text = Path(__file__).read_text()
    assert [
        wrong for wrong in WRONGS if f'"{wrong}"' not in text and f"'{wrong}'" not in text
    ] == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"equivalence": "near"}, "equivalence of its Hello names 'near'"),
        ({"config": {"blocks": 3}}, "config of its Hello names 'blocks'"),
        ({"config": {"block_size": "x"}}, "Expected `int`, got `str`"),
        ({"config_fields": ["speed"]}, "config_fields of its Hello names 'speed'"),
        ({"request_fields": ["max_tokens"]}, "for the equivalences renamed, plan, safety"),
        ({"shows_blocks": True}, "shows_blocks of its Hello is for the equivalence 'plan'"),
        ({"has_slots": False}, "has_slots of its Hello is for the equivalence 'safety'"),
        ({"speed": 1}, "unknown field `speed`"),
        ({"judges": ["cost"]}, "`$.judges[0]`; it must be one of "),
        ({"format": "engine"}, "says 'engine' version 1"),
    ],
)
def test_a_contradictory_hello_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadEngineError) as caught:
        ProcessFactory(answer_hello(**fields))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_depth": 0}, "must be at least 1, not 0"),
        ({"profile": "vllm-9"}, "'vllm-9' is no profile"),
    ],
)
def test_traits_that_cannot_be_meant_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadEngineError) as caught:
        get_traits(ProcessFactory(answer_hello(**fields)))
    assert words in str(caught.value)


def test_a_hello_sets_the_traits_of_the_engine() -> None:
    fields = {
        "equivalence": "plan",
        "shows_blocks": True,
        "max_depth": 1,
        "engine_version": "2.1",
        "config": {"block_size": 4},
        "config_fields": ["max_num_seqs"],
        "request_fields": ["min_tokens"],
        "judges": ["never_fits"],
    }
    factory = ProcessFactory(answer_hello(**fields))
    traits = get_traits(factory)
    weaker = traits.equivalence
    assert isinstance(weaker, SamePlans)
    assert weaker.shows_blocks
    assert (traits.max_depth, traits.version) == (1, "2.1")
    config = v.Config(num_blocks=9, block_size=2, max_num_seqs=3, max_model_len=50)
    assert weaker.fit_config(config) == v.Config(num_blocks=9, block_size=4, max_num_seqs=3)
    request = v.Request("A", (1, 2), 3, min_tokens=2, priority=4)
    assert weaker.fit_request(request, config) == v.Request("A", (1, 2), 3, min_tokens=2)
    assert factory.hello.judges == (v.RejectCode.NEVER_FITS,)


def test_a_process_without_slots_is_held_to_safety() -> None:
    factory = ProcessFactory(answer_hello(equivalence="safety", has_slots=False))
    weaker = get_traits(factory).equivalence
    assert isinstance(weaker, Safety)
    assert not weaker.has_slots


def test_a_process_serves_one_run_after_another() -> None:
    factory = ProcessFactory(command_of("spec"))
    first = factory(CONFIG)
    link = first._link
    assert first.apply(v.Schedule()) == v.Plan(frame_id=0)
    second = factory(CONFIG)  # while the first is in use
    assert second._link is not link
    assert second.apply(v.Schedule()) == v.Plan(frame_id=0)
    assert first.apply(v.Schedule()) == v.Plan(frame_id=1)
    del first
    third = factory(CONFIG)
    assert third._link is link
    assert third.apply(v.Schedule()) == v.Plan(frame_id=0)


def test_a_new_run_follows_one_in_which_the_process_died() -> None:
    factory = ProcessFactory(command_of("spec", "exit"))
    for _ in range(2):
        engine = factory(CONFIG)
        engine.apply(v.Submit(v.Request("A", (1,), 1)))
        engine.apply(v.Schedule())
        with pytest.raises(EngineFault, match="exit code 3"):
            engine.apply(v.Commit(0, (v.RowTokens("A", (1,)),)))
        with pytest.raises(EngineFault, match="has ended"):
            engine.apply(v.Schedule())


def test_processes_end_with_their_factory() -> None:
    factory = ProcessFactory(command_of("spec"))
    process = factory(CONFIG)._link._process
    del factory
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is not None


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
@pytest.mark.parametrize("engine", ["spec", "spec exit"])
def test_children_of_an_engine_process_end_with_it(tmp_path: Path, engine: str) -> None:
    script, started = tmp_path / "engine.sh", tmp_path / "pid"
    script.write_text(f"sleep 600 & echo $! > {started}\nexec {command_of(engine)}\n")
    factory = ProcessFactory(f"sh {script}")
    run = factory(CONFIG)
    assert is_running(int(started.read_text()))
    if "exit" in engine:
        with pytest.raises(EngineFault, match="exit code 3"):
            run.apply(v.Commit(0, ()))
    del run, factory
    deadline = time.monotonic() + 10
    while is_running(int(started.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int(started.read_text()))


def test_a_link_times_out() -> None:
    link = Link([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(EngineFault, match=r"line 1 was not answered within 0\.2 s"):
        link.ask(b"{}", 0.2)
    assert link.is_lost


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("input()", "write a line feed after each answer, and flush"),
        ("print(1, end='', flush=True)", "'1' has no line feed"),
    ],
)
def test_the_message_of_a_silence_names_what_may_be_missing(code: str, words: str) -> None:
    link = Link([sys.executable, "-c", f"import time; {code}; time.sleep(60)"])
    with pytest.raises(EngineFault, match=words):
        link.ask(b"{}", 2)


def test_an_answer_without_an_end_times_out() -> None:
    link = Link([sys.executable, str(SERVE), "spec", "drip"])
    for row in (
        {"type": "Hello", "format": "blockstep-engine", "version": 1},
        {"type": "Start", "config": {"num_blocks": 4}},
    ):
        link.ask(json.dumps(row).encode())
    with pytest.raises(EngineFault, match=r"within 1 s; .* has no line feed"):
        link.ask(b'{"type":"Schedule"}', 1)


def test_a_malformed_answer_is_shown_where_it_is_malformed() -> None:
    pad = "x" * 200
    for line, shown in ((f'{{"a":"{pad}" oops', " oops'"), (f'{{"a":"{pad}",', "xxx\",'")):
        link = Link([sys.executable, "-c", f"input(); print({line!r})"])
        with pytest.raises(EngineFault, match=re.escape(shown)):
            link.ask_row({}, dict)
        link.end()


def test_standard_error_is_passed_on_and_blocks_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; input(); sys.stderr.write('e' * 300000); print(1)"
    link = Link([sys.executable, "-c", code])
    assert link.ask(b"{}") == b"1"
    link.end()
    assert capfd.readouterr().err.count("e") == 300000


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cmd:", "names no command"),
        ("cmd:./no-such-engine --flag", "./no-such-engine cannot be started (No such file"),
        ("cmd:'open", "No closing quotation"),
        ("cmd:true", "no Hello: the engine's process ended with exit code 0"),
    ],
)
def test_a_command_that_cannot_run_is_a_usage_error(name: str, words: str) -> None:
    with pytest.raises(EngineNotFoundError) as caught:
        load_engine(name)
    assert words in str(caught.value)


def test_an_equivalence_can_follow_a_command_with_an_at_sign() -> None:
    assert split_name("cmd:./a@b --x") == ("cmd:./a@b --x", "")
    assert split_name("cmd:./a@b --x@plan") == ("cmd:./a@b --x", "plan")
    held = load_engine(f"cmd:{command_of('spec')}@safety")
    assert isinstance(get_traits(held).equivalence, Safety)


def test_a_failure_is_reproduced_by_a_quoted_command() -> None:
    line = reproduce(CheckOptions(engine="cmd:./a --b", preset="tiny"), 3)
    assert line.startswith("blockstep check --engine 'cmd:./a --b' --preset tiny")


def test_the_schema_describes_every_kind_of_line() -> None:
    schema = build_schema(Hello, 1)
    asked = [one["properties"]["type"]["const"] for one in schema["asked"]["oneOf"]]
    assert asked == ["Hello", "Start", "Snapshot", *(cls.__name__ for cls in v.EVENT_TYPES)]
    answered = schema["answered"]["oneOf"]
    plan = next(one for one in answered if one.get("title") == "Plan")
    assert plan["required"] == ["type", "frame_id"]
    assert set(plan["properties"]) == {"type", *(f.name for f in dataclasses.fields(v.Plan))}
    text = json.dumps(schema)
    missing = [
        name for name in re.findall(r'"#/\$defs/(\w+)"', text) if name not in schema["$defs"]
    ]
    assert missing == []
    result = CliRunner().invoke(app, ["schema"])
    assert json.loads(result.stdout) == json.loads(text)


def test_a_state_has_the_blocks_of_a_key_once() -> None:
    engine = load_engine("spec")(v.Config(num_blocks=4, block_size=1))
    engine.apply(v.Submit(v.Request("A", (1, 2), max_tokens=2)))
    engine.apply(v.Schedule())
    state = engine.snapshot()
    assert state is not None
    form = to_form(state)
    form.cached = (form.cached[0], *form.cached)
    with pytest.raises(msgspec.ValidationError, match="have one key"):
        from_form(form)


def test_a_state_is_unchanged_after_encoding_and_decoding() -> None:
    config = v.Config(
        num_blocks=8,
        block_size=2,
        kv_connector=True,
        encoder_cache_size=4,
        encoder_compute_budget=4,
    )
    engine = SpecEngine(config)
    item = v.MultiModalItem("picture", 1, 2)
    engine.apply(v.Submit(v.Request("A", (1, 2, 3, 4), 2, adapter="x", items=(item,))))
    engine.apply(v.Schedule())
    state = engine.snapshot()
    assert state.cached
    assert from_form(to_form(state)) == state


def test_the_fields_of_a_hello_are_on_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "hold-any-language.md").read_text()
    for name in Hello.__struct_fields__:
        assert f"`{name}`" in page, name
