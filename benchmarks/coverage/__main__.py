"""Branches of the specification that `blockstep check` reaches, without any test.

    python -m benchmarks.coverage [--events N] [--seed N] [--only spec/core/slots.py] [--json FILE]

Plays what `check` plays, in this process and under coverage.py, and writes
benchmarks/coverage/reached.json: per module what was reached, and every line and branch that was
not. `make docs` makes the page from it, with the reasons of benchmarks/coverage/unreached.toml.
Exit code 1: something unreached has no reason, or an episode failed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import sys
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks._pages import get_commit, make_parser, play_episodes
from benchmarks.coverage.page import (
    WHOLE_MODULES,
    Module,
    Reason,
    find_module,
    get_unexplained,
    read_reasons,
    to_json,
)

REACHED = Path(__file__).with_name("reached.json")
REASONS = Path(__file__).with_name("unreached.toml")
EVENTS = 150_000
"""Events with preset small: the default budget of `blockstep check`."""
RELEASES = ("0.11.0", "0.12.0", "0.19.1", "0.23.0", "0.27.0", "0.33.0")
"""These have all quirks between them; nothing of the spec may be imported yet to list them."""
FEATURES = (("encoder",), ("groups", "drafts"), ("states", "drafts"), ("transfers", "states"))
"""Features of every config of a run: together they are rare in default draws."""
PLAYED = (
    ("host", "strict", "tiny", 3, ()),
    ("host", "strict", "small", 1, ()),
    *(("host", "strict", "small", 15, features) for features in FEATURES),
    *(
        ("spec", f"vllm-{release}", preset, 15, ())
        for release in RELEASES
        for preset in ("tiny", "small")
    ),
    *(
        ("spec", f"vllm-{release}", "small", 15, features)
        for release in ("0.11.0", "0.19.1", "0.33.0")
        for features in (*FEATURES[1:3], ("sessions", "masks"))
        if release != "0.11.0" or features == ("groups", "drafts")
    ),
)
"""Runs as (engine, profile, preset, divisor of EVENTS, features of every config). The release of a
profile is not installed here (`make vllm` installs it), so the spec with its quirks is compared
with itself."""


def main() -> int:
    """Play, read what was reached, and write it."""
    parser = make_parser("coverage", __doc__, EVENTS)
    parser.add_argument("--only", help="report on modules beginning so; writes nothing")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    args = parser.parse_args()
    reasons = read_reasons(REASONS)
    try:
        modules, num_events = measure(args.events, args.seed)
    except (AssertionError, ImportError) as error:
        print(f"coverage: {error}", file=sys.stderr)
        return 2
    if args.only:
        modules = [module for module in modules if module.name.startswith(args.only)]
    command = " ".join(["python -m benchmarks.coverage", *sys.argv[1:]])
    results = to_json(modules, num_events, {"command": command, **get_versions()})
    file = args.json
    if file is None and args.events == EVENTS and not args.only:
        file = REACHED
    if file is not None:
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return report(modules, reasons)


def measure(num_events: int, seed: int) -> tuple[list[Module], dict[str, int]]:
    """Play under coverage.py; what each module shows, and the events played, by what was played.

    Raises:
        AssertionError: an episode has a finding.
        ImportError: coverage.py is not installed.
    """
    assert "blockstep.spec" not in sys.modules, "the spec is imported already, unseen"
    coverage: Any = importlib.import_module("coverage")
    folder = find_spec_folder()
    tracer = coverage.Coverage(
        data_file=None, config_file=False, branch=True, include=[f"{folder}/**/*.py"]
    )
    tracer.start()
    check: Any = importlib.import_module("blockstep.conformance.search.check")
    counts: dict[str, int] = {}
    for engine, profile, preset, part, features in PLAYED:
        options = check.CheckOptions(
            engine=engine, profile=profile, preset=preset, seed=seed, with_features=features
        )
        label = f"engine {engine}, profile {profile}, preset {preset}"
        label += f", with {' and '.join(features)}" * bool(features)
        counts[label] = play(check, options, max(num_events // part, 1))
    tracer.stop()
    files = sorted(folder.rglob("*.py"))
    names = {f"spec/{file.relative_to(folder).as_posix()}": file for file in files}
    modules = [
        find_module(tracer, file, name)
        for name, file in names.items()
        if file.name not in ("__init__.py", "invariants.py")
        and not name.startswith(tuple(WHOLE_MODULES))
    ]
    return modules, counts


def find_spec_folder() -> Path:
    """Return the folder of the spec, found without importing it."""
    namespace = importlib.util.find_spec("blockstep")
    assert namespace is not None, "blockstep is not installed"
    folders = [Path(one) / "spec" for one in namespace.submodule_search_locations or ()]
    return next(folder for folder in folders if folder.is_dir())


def play(check: Any, options: Any, num_events: int) -> int:
    """Play episodes as `check` does; the events played."""
    make_engine = check.load(options)
    if options.engine == "spec":
        profile = check.find_profile(options.profile)
        make_engine = partial(make_engine, profile=profile)
    episodes = play_episodes(check.run_episode, options, make_engine, num_events)
    return sum(episode.num_events for episode in episodes)


def get_versions() -> dict[str, str]:
    """Return the day of the run and the versions that its numbers depend on."""
    versions = {name: version(name) for name in ("blockstep", "coverage")}
    day = datetime.now(tz=UTC).date().isoformat()
    return {"day": day, "commit": get_commit(), "python": platform.python_version(), **versions}


def report(modules: list[Module], reasons: list[Reason]) -> int:
    """Say what came out; the exit code of the process."""
    for module in modules:
        reached, total = module.num_branches_reached, module.num_branches
        print(f"{module.name:<24} {reached:>4} of {total:<4} branches")
    unexplained = get_unexplained(modules, reasons)
    for module_name, one in unexplained:
        print(f"UNEXPLAINED {module_name}:{one.line} {one.function}: {one.code}  ->  {one.to}")
    print(f"{sum(len(module.unreached) for module in modules)} not reached, ", end="")
    print(f"{len(unexplained)} of them without a reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
