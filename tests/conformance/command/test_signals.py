"""Commands that end early: by a signal, with a closed pipe or on a full disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockstep.conformance.command import signals
from blockstep.conformance.protocol.program_file import read_program

SECONDS_MAX = 5.0
"""The limit for users is 2 seconds; the rest is for a machine with other work."""
ENGINES = """
import os, time
from blockstep.conformance.protocol.registry import SpecEngine

def mark():
    with open(os.environ["MARKS"], "a") as file:
        file.write(f"{os.getpid()}\\n")

class Slow(SpecEngine):
    def __init__(self, config):
        mark()
        super().__init__(config)

    def apply(self, event):
        time.sleep(0.001)
        return super().apply(event)

class Stuck(SpecEngine):
    def apply(self, event):
        mark()
        while True:
            try:
                time.sleep(100)
            except BaseException:
                pass

class Leaving(SpecEngine):
    '''Each event leaves a process behind.'''
    def apply(self, event):
        if os.fork() == 0:
            mark()
            time.sleep(100)
        return super().apply(event)

class Forking(SpecEngine):
    '''Each event makes two processes of one, and both come back.'''
    def apply(self, event):
        os.fork()
        return super().apply(event)
"""


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file in which engines note the ids of their processes."""
    (tmp_path / "ending_engines.py").write_text(ENGINES)
    path = tmp_path / "marks"
    path.touch()
    monkeypatch.setenv("MARKS", str(path))
    yield path
    for pid in map(int, path.read_text().split()):  # also if the test failed
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(folder: Path, *args: object) -> subprocess.Popen[str]:
    """Start the command in a process group of its own, as a shell does in the foreground.

    A process in the background ignores Ctrl-C, and the command would inherit this of the tests.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "blockstep", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def require_no_process(marks: Path) -> None:
    pids = [int(pid) for pid in marks.read_text().split()]
    assert pids
    deadline = time.monotonic() + SECONDS_MAX
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a process outlived its command"
        time.sleep(0.02)


def check(folder: Path, name: str, *args: object) -> subprocess.Popen[str]:
    engine = ("check", "--engine", f"ending_engines:{name}", "--preset", "tiny")
    return start(folder, *engine, *args)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("name", "args", "number", "is_to_all"),
    [
        ("Slow", ("--jobs", 2), signal.SIGINT, True),  # as a terminal sends it
        pytest.param("Slow", ("--jobs", 1), signal.SIGTERM, False, marks=pytest.mark.soak),
        ("Stuck", ("--jobs", 2), signal.SIGTERM, False),
        ("Stuck", ("--in-process",), signal.SIGINT, False),
    ],
)
def test_a_signal_ends_a_check_with_all_its_processes(
    tmp_path: Path,
    marks: Path,
    name: str,
    args: tuple[object, ...],
    number: signal.Signals,
    is_to_all: bool,
) -> None:
    command = check(tmp_path, name, *args)
    wait_for(marks)
    started = time.monotonic()
    (os.killpg if is_to_all else os.kill)(command.pid, number)
    out, errors = command.communicate(timeout=30)
    assert time.monotonic() - started < SECONDS_MAX
    assert command.returncode == 128 + number
    assert out == ""
    assert re.fullmatch(rf"blockstep: ended by {number.name}; .*seen.*\n", errors)
    require_no_process(marks)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupted_hunt_keeps_what_it_has_found(tmp_path: Path) -> None:
    folder, json_path = tmp_path / "found", tmp_path / "hunt.json"
    folder.mkdir()
    engine = ("--engine", "museum:leak-on-abort", "--jobs", 1, "--preset", "tiny")
    command = start(
        *(tmp_path, "hunt", *engine, "--budget", 10_000_000, "--save", folder, "--json", json_path)
    )
    assert command.stderr is not None
    while not re.search(r"[1-9]\d* defects", command.stderr.readline()):
        assert command.poll() is None
    started = time.monotonic()
    os.kill(command.pid, signal.SIGTERM)
    out, errors = command.communicate(timeout=30)
    assert time.monotonic() - started < SECONDS_MAX
    assert command.returncode == 128 + signal.SIGTERM
    assert "ended early: it was interrupted" in out
    assert "P1 every_block_is_free_or_held" in out
    assert "blockstep: ended by SIGTERM" in errors
    assert json.loads(json_path.read_text())["stopped"] == "it was interrupted"
    assert read_program(folder / "defect-1.json").actions


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_interrupted_while_it_shrinks_keeps_the_program(
    tmp_path: Path, number: signal.Signals
) -> None:
    saved, json_path = tmp_path / "found.json", tmp_path / "check.json"
    command = start(
        *(tmp_path, "check", "--engine", "museum:leak-on-abort", "--jobs", 1, "--seed", 1),
        *("--budget", 10_000, "--save", saved, "--json", json_path),
    )
    assert command.stderr is not None
    while "it is being shrunk" not in command.stderr.readline():
        assert command.poll() is None
    time.sleep(0.5)  # it shrinks for seconds
    started = time.monotonic()
    os.kill(command.pid, number)
    out, errors = command.communicate(timeout=30)
    assert time.monotonic() - started < SECONDS_MAX
    assert command.returncode == 128 + number
    assert out.startswith("blockstep check: ")
    assert "note       it was interrupted before" in out
    assert f"blockstep: ended by {number.name}" in errors
    failure = json.loads(json_path.read_text())["failure"]
    assert len(read_program(saved).actions) == len(failure["program"])


def list_children(pid: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(child) for child in listing.stdout.split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for children in Linux")
@pytest.mark.parametrize(
    ("args", "number"),
    [
        (("museum", "run", "--jobs", 2), signal.SIGINT),
        *(pytest.param(args, number, marks=pytest.mark.soak) for args in (("museum", "run",
            "--jobs", 2), ("prove", "--jobs", 2), ("explore", "--jobs", 2), ("check", "--jobs",
            2)) for number in (signal.SIGTERM, signal.SIGKILL)),
    ],
)  # fmt: skip
def test_worker_processes_end_with_their_command(
    tmp_path: Path, args: tuple[object, ...], number: signal.Signals
) -> None:
    command = start(tmp_path, *args)
    deadline = time.monotonic() + 60
    while len(children := list_children(command.pid)) < 3:  # two, and multiprocessing's tracker
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = time.monotonic()
    os.kill(command.pid, number)
    _, errors = command.communicate(timeout=30)
    while any(map(is_running, children)):
        assert time.monotonic() - started < SECONDS_MAX
        time.sleep(0.02)
    if number is not signal.SIGKILL:
        assert command.returncode == 128 + number
        assert re.match(rf"blockstep: ended by {number.name}; .*seen.*\n", errors)
        assert "Traceback" not in errors


@pytest.mark.soak
def test_an_interrupt_ends_prove_although_the_solver_handles_signals(tmp_path: Path) -> None:
    pytest.importorskip("z3")
    command = start(tmp_path, "prove", "--all", "--jobs", 1)
    time.sleep(8)
    os.kill(command.pid, signal.SIGINT)
    assert command.communicate(timeout=SECONDS_MAX)[0] == ""
    assert command.returncode == 130


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize("name", ["Leaving", "Forking"])
def test_an_engine_that_forks_gives_one_report_and_leaves_no_process(
    tmp_path: Path, marks: Path, name: str
) -> None:
    command = check(tmp_path, name, "--budget", 60, "--jobs", 1, "--episode", 0)
    out, errors = command.communicate(timeout=60)
    assert (command.returncode, errors) == (0, "")
    assert out.startswith(f"conforms: engine ending_engines:{name}")
    if name == "Leaving":
        require_no_process(marks)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize(
    "args",
    [
        ("quirks",),
        *(pytest.param(args, marks=pytest.mark.soak) for args in [("--help",), ("nothing",)]),
    ],
)
def test_a_closed_pipe_ends_with_code_141(tmp_path: Path, args: tuple[str, ...]) -> None:
    command = start(tmp_path, *args)
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.close()
    command.stderr.close()
    assert command.wait(timeout=60) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_before_the_work(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = subprocess.run(
            [sys.executable, "-m", "blockstep", "check", "--budget", "100h"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert command.returncode == 2
    message = "blockstep: standard output: cannot write: No space left on device\n"
    assert command.stderr == message


def test_an_unexpected_error_of_a_command_ends_with_code_5(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected exception is shown with its traceback; the exit code is the harness's."""
    monkeypatch.setattr(signals, "_listen", lambda: None)
    with pytest.raises(SystemExit) as ended:
        signals.run(lambda: 1 // 0)
    assert ended.value.code == 5
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert "blockstep: the command itself failed: ZeroDivisionError: " in text.splitlines()[-1]


def test_the_module_prints_its_version(tmp_path: Path) -> None:
    out, errors = start(tmp_path, "--version").communicate(timeout=60)
    assert re.fullmatch(r"blockstep \d\S* \(Python 3\.\S+\)\n", out)
    assert errors == ""
