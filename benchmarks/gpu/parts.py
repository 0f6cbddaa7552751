"""Parts: what `make gpu` runs, in the order of their worth.

Neighbours that are not timed run side by side; a timed part has the machine for itself. In a
command, `{json}` is the file that gets its figures, `{raw}` the folder for raw output, and
`{python}` the interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Command:
    """One process of a part."""

    name: str
    """Name of its output file, PART-NAME.txt, and of its figures, PART-NAME.json."""
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that run in parallel, and pass or fail together."""

    name: str
    about: str
    limit: float
    """Seconds after which its processes are ended."""
    commands: Sequence[Command]
    is_timed: bool = False
    tool: str = ""
    """Program that it needs besides Python."""
    is_required: bool = True
    """Whether the whole fails if the tool is missing."""
    faults: str = ""
    """Pattern that no output may contain, for tools whose exit status does not tell."""
    lines: str = r"\b(FAILED|ERROR) |\d (passed|failed)"
    """A pattern of the lines of output that are worth showing."""


ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
PYTEST: Final = (
    "{python}", "-m", "pytest", "-v", "-o", "filterwarnings=default",
)  # fmt: skip
"""Command with a filter: packages have other versions than ours, whose warnings are no failures.

Each test has a line, so that a failure has its name even if the part is stopped."""
SIDE_BY_SIDE: Final = ("-p", "xdist", "-n", "12", "--dist", "worksteal")
TESTED: Final = ("tests/kernels", "tests/impl/engine")
"""Tests of the device scheduler run it by numpy; on a GPU `lockstep` plays it."""
KINDS: Final = ("plain", "priority", "asynchronous", "drafts", "uncached", "specification")
"""Kinds of `lockstep`, repeated here because importing it would take long."""
SIZES: Final = (64, 1_024)
"""Running requests in a step of the device's scheduler."""
KERNEL_TESTS: Final = Path(__file__).parents[2] / "tests" / "kernels"
WITHOUT_LAUNCHES: Final = ("compiled", "dispatch", "interpreter", "numpied", "sanitizers")
"""Files of tests that launch no kernel on a GPU."""
SANITIZED: Final = (
    "not million and not law and not pairs_of and not compiled and not torch- and not [torch]"
)
"""Tests that are run under the sanitizer: not those with millions of draws, nor torch's kernels."""


def _lockstep() -> Part:
    return Part(
        "lockstep",
        "the device's scheduler, compiled, compared with its numpy run and the specification",
        limit=115,
        commands=[
            Command(
                kind,
                ("{python}", "-m", "benchmarks.gpu.lockstep", kind, "--seconds", "85",
                 "--json", "{json}"),
                ONE_THREAD,
            )
            for kind in KINDS
        ],
        lines="events",
    )  # fmt: skip


def _tests(options: Sequence[str], has_xdist: bool) -> Part:
    beside = SIDE_BY_SIDE if has_xdist else ()
    skipped = (f"--ignore=tests/kernels/test_{name}.py" for name in WITHOUT_LAUNCHES)
    argv = (*PYTEST, *beside, *TESTED, *skipped, *options)
    return Part(
        "tests", "tests of kernels and engine, compiled",
        limit=115, commands=[Command("pytest", argv, ONE_THREAD)],
    )  # fmt: skip


def _warm() -> Part:
    """Return the part that compiles what timed parts need; it runs in parallel with tests."""
    step = ("{python}", "-m", "benchmarks.device", "--no-host", "--replays", "8")
    engine = ("{python}", "-m", "benchmarks.engine", "--warm", "--json", "{json}", "--only")
    return Part(
        "warm",
        "compile what the timed parts launch; time to the first token",
        limit=115,
        commands=[
            *(Command(f"step-{n}", (*step, "-n", f"{n}"), ONE_THREAD) for n in SIZES),
            Command("engine-host", (*engine, "host", "--only", "two frames"), ONE_THREAD),
            Command(
                "engine-device", (*engine, "device", "--only", "device, two frames"), ONE_THREAD
            ),
        ],
        lines="first token",
    )


def _times() -> list[Part]:
    """Return the timed parts, which run alone."""

    def time(name: str, about: str, limit: float, lines: str, *options: str) -> Part:
        argv = ("{python}", "-m", f"benchmarks.{name}", "--json", "{json}", *options)
        return Part(
            name, about, limit, [Command(name, argv, ONE_THREAD)], is_timed=True, lines=lines
        )

    sizes = [word for n in SIZES for word in ("-n", f"{n}")]
    return [
        time("attention", "paged attention: share of the copy rate, prefill against torch's", 75,
             r"% of| us\b"),
        time("device", "a step of the device's scheduler, replayed from a graph", 40, "running",
             "--no-host", *sizes),
        time("engine", "decode steps of the model engine by scheduler, with a bound and peers",
             105, r"running,|first token", "--seconds", "80"),
        time("kernels", "the other kernels: share of the copy rate, against torch's own", 75,
             r"% of| us\b"),
    ]  # fmt: skip


def _profiles(ncu: str) -> list[Part]:
    """Return the parts that profile one launch by hardware counters, with filled caches."""
    script = (
        'report=$1 kernel=$2; shift 2; '
        '"$NCU" -f -o "$report" --set full --import-source yes --clock-control none '
        '--cache-control none -k "regex:$kernel" --launch-skip 8 --launch-count 1 "$@" && '
        '"$NCU" --import "$report.ncu-rep" --page details && '
        '"$NCU" --import "$report.ncu-rep" --page source --csv > "$report.csv"'
    )  # fmt: skip

    def profile(name: str, about: str, kernel: str, *command: str) -> Part:
        argv = ("sh", "-c", script, "sh", "{raw}/" + name, kernel, "{python}", "-m", *command)
        return Part(
            name, f"ncu of {about}", limit=40, is_timed=True, tool=ncu, is_required=False,
            commands=[Command("ncu", argv, {**ONE_THREAD, "NCU": ncu})],
            lines=r"Duration |Ipc Active|No Eligible|Registers Per|Hit Rate|(DRAM|L2 Cache) Thr",
        )  # fmt: skip

    step = ("benchmarks.device", "--no-host", "--replays", "16", "-n")
    attention, layers = ("benchmarks.attention", "--only"), ("benchmarks.kernels", "--only")
    return [
        profile("profile-attention", "attention at 8 x 4,096", "attention",
                *attention, "decode 8 x 4096"),
        profile("profile-short", "attention at 1 x 500", "attention", *attention, "decode 1 x 500"),
        profile("profile-gate-64", "gate and up of 64 rows", "product", *layers, "gate_up: 64 x"),
        profile("profile-gate-1", "gate and up of one row", "vector", *layers, "gate_up: 1 x"),
        *(profile(f"profile-{n}", f"a step of the device's scheduler at {n}", "loop_kernel",
                  *step, f"{n}") for n in SIZES),
    ]  # fmt: skip


def _sanitizer(tool: str) -> Part:
    """Return the part with each tensor in memory of its own, so that an access past its end is
    noticed.

    Errors of calls are left to the tests, which see them as exceptions.
    """

    def check(file: Path) -> Command:
        return Command(file.stem.removeprefix("test_"), (
            tool, "--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all",
            "--error-exitcode", "3", *PYTEST, f"{file}", "-k", SANITIZED,
        ), {**ONE_THREAD, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})  # fmt: skip

    return Part(
        "sanitizer", "tests of the kernels under compute-sanitizer", limit=115, tool=tool,
        commands=[
            check(file)
            for file in sorted(KERNEL_TESTS.glob("test_*.py"))
            if file.stem.removeprefix("test_") not in WITHOUT_LAUNCHES
        ],
        faults=r"ERROR SUMMARY: [1-9]",
        lines=r"\b(FAILED|ERROR) |\d (passed|failed)|ERROR SUMMARY",
    )  # fmt: skip


def list_parts(
    options: Sequence[str] = (), sanitizer: str = "compute-sanitizer", ncu: str = "ncu",
    has_xdist: bool = True,
) -> list[Part]:  # fmt: skip
    """Return all parts, in the order of their worth.

    Args:
        options: further ones of the tests' pytest.
        sanitizer: the program; empty: its part is left out.
        ncu: the program.
        has_xdist: whether tests can run in several processes.
    """
    checks = [_sanitizer(sanitizer)] if sanitizer else []
    return [_lockstep(), _tests(options, has_xdist), _warm(), *_times(), *_profiles(ncu), *checks]
