"""Each field that the adapter reads of a release of vLLM is changed by one, and the run fails.

For each feature of the release one program is drawn and played. What the scheduler tells in it is
then changed, one value at a time, in a copy that only the adapter sees: the release goes on with
its own. The count of changes is printed (`pytest -m soak -s`).
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm_support.installed import PROBLEM, PROFILE, RELEASE, VERSION, needs, needs_vllm, quiet

from blockstep.conformance.engine import get_capabilities
from blockstep.conformance.engines.adapters.vllm_fields import READ
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import fit_depth, play_episode
from blockstep.conformance.search.options import CheckOptions

ADAPTERS = "blockstep.conformance.engines.adapters"
pytestmark = [quiet, needs_vllm, pytest.mark.soak]

CLOCK = "a reading of a clock"
FREE = {
    "EngineCoreOutputs.timestamp": CLOCK,
    "EngineCoreOutputs.outputs.events.timestamp": CLOCK,
}
"""What may be told otherwise, and why."""
WITH_STORE = f"{ADAPTERS}.vllm:VllmWithStore"
"""The engine that has a store also where no profile follows it."""
OF_A_STORE = {
    "SchedulerOutput.kv_connector_metadata.loads",
    "SchedulerOutput.has_sync_kv_loads",
    "EngineCoreOutputs.outputs.prefill_stats.num_external_cached_tokens",
    "EngineCoreOutputs.scheduler_stats.connector_prefix_cache_stats.hits",
    "EngineCoreOutputs.scheduler_stats.num_kv_fetch_reqs_by_stage",
}
"""Values that a release answers about its store."""
NUM_PLACES = 2
"""Calls in which each value is changed, at most, for each feature."""
NUM_CALLS = 100
"""Calls that the program of a feature has, at least."""
NUM_DRAWN = 20
"""Programs that are drawn with a feature, at most."""


class Ear:
    """What a scheduler tells, call by call: listened to, or changed in one place."""

    def __init__(self, call: int = -1, path: str = "") -> None:
        from foreign_support.changed_records import change_each

        self._change_each = change_each
        self.call, self.path = call, path
        self.places: list[tuple[int, str]] = []
        """Calls, and the paths of what could be changed in what they told."""
        self.is_changed = False
        self.num_calls = 0
        self._own: dict[int, tuple[Any, Any]] = {}

    def receive(self, value: Any) -> Any:
        """What the adapter is given of what a call told."""
        call, self.num_calls = self.num_calls, self.num_calls + 1
        if not self.path:
            self.places += [(call, path) for path, _ in self._change_each(value)]
        elif call == self.call:
            changed = next(other for path, other in self._change_each(value) if path == self.path)
            self.is_changed = True
            self._own[id(changed)] = (value, changed)
            return changed
        return value

    def get_own(self, value: Any) -> Any:
        """What the release told, of what the adapter hands back."""
        return self._own.get(id(value), (value,))[0]


class Counting(Ear):
    """An ear that counts the calls, and does not look for what could be changed."""

    def receive(self, value: Any) -> Any:
        self.num_calls += 1
        return value


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ear], None]:
    """Has what the release tells from now on go through an ear."""
    build = importlib.import_module(f"{ADAPTERS}.vllm_build")
    events = importlib.import_module(f"{ADAPTERS}.vllm_events")
    plain = {name: getattr(build, name) for name in ("Scheduler", "AsyncScheduler")}
    take = events.Recorder.take

    def start(ear: Ear) -> None:
        for name, kind in plain.items():
            monkeypatch.setattr(build, name, plant(kind, ear))
        monkeypatch.setattr(
            events.Recorder, "take", lambda self: [ear.receive(event) for event in take(self)]
        )

    return start


def plant(kind: Any, ear: Ear) -> Any:
    """A scheduler whose plans and answers go through an ear."""

    class Planted(kind):  # type: ignore[misc]
        def schedule(self, *arguments: Any) -> Any:
            return ear.receive(super().schedule(*arguments))

        def update_from_output(self, frame: Any, result: Any) -> Any:
            outputs = super().update_from_output(ear.get_own(frame), result)
            return {client: ear.receive(core) for client, core in outputs.items()}

        def get_grammar_bitmask(self, frame: Any) -> Any:
            mask = super().get_grammar_bitmask(ear.get_own(frame))
            return mask if mask is None else ear.receive(mask)

        def update_draft_token_ids_in_output(self, drafts: Any, frame: Any) -> None:
            super().update_draft_token_ids_in_output(drafts, ear.get_own(frame))

    return Planted


def list_features() -> tuple[str, ...]:
    """Names of the features that the release has."""
    if PROBLEM is not None:
        return ()
    has = get_capabilities(load_engine("vllm"))
    return tuple(one.name for one in FEATURES if one.capability is None or one.capability in has)


def draw_program(
    feature: str, listen: Callable[[Ear], None], engine: str = "vllm", without: tuple[str, ...] = ()
) -> Program:
    """The first program with a feature in which the scheduler tells enough: many a drawn program
    has events that are kept away from a release, and few plans or none."""
    make_engine = load_engine(engine)
    options = CheckOptions(
        engine=engine,
        preset="small",
        seed=5,
        profile=PROFILE.name,
        with_features=(feature,),
        without_features=without,
    )
    options = fit_depth(options, make_engine)
    for index in range(NUM_DRAWN):
        ear = Counting()
        listen(ear)
        _, program, findings = play_episode(options, index, make_engine)
        assert findings == [] or engine == WITH_STORE
        if ear.num_calls >= NUM_CALLS and not findings:
            return program
    raise AssertionError(f"no program with {feature}")


def list_changes(ear: Ear) -> Iterator[tuple[int, str]]:
    """The first calls in which each value can be changed."""
    counts = Counter[str]()
    for call, path in ear.places:
        counts[path] += 1
        if counts[path] <= NUM_PLACES:
            yield call, path


def change_each_value(
    program: Program, listen: Callable[[Ear], None], engine: str = "vllm"
) -> tuple[Counter[str], list[str]]:
    """How often each value was changed, and the changes that were passed over."""
    make_engine = load_engine(engine)
    changed, passed_over = Counter[str](), []
    ear = Ear()
    listen(ear)
    assert run_program(program, make_engine, PROFILE)[1] == []
    for call, path in list_changes(ear):
        one = Ear(call, path)
        listen(one)
        _, findings = run_program(program, make_engine, PROFILE)
        assert one.is_changed
        changed[path] += 1
        if not findings and path not in FREE:
            passed_over.append(f"{path} in call {call}")
    return changed, passed_over


def print_counts(changed: Counter[str], passed_over: list[str], where: str) -> None:
    """Print the counts."""
    text = f"{changed.total()} changes of {len(changed)} values of vLLM {VERSION}{where}"
    sys.stdout.write(f"{text}, passed over: {len(passed_over)}\n")


def test_each_changed_value_is_noticed(listen: Callable[[Ear], None]) -> None:
    changed, passed_over = Counter[str](), []
    for feature in list_features():
        more, missed = change_each_value(draw_program(feature, listen), listen)
        changed += more
        passed_over += [f"{one} with {feature}" for one in missed]
    print_counts(changed, passed_over, "")
    assert passed_over == []
    assert len(changed) >= sum(map(len, READ.values()))


@needs(RELEASE.has_store and not RELEASE.follows_store, "no store, or one of the features")
def test_each_value_is_noticed_with_a_store_that_no_profile_follows(
    listen: Callable[[Ear], None],
) -> None:
    program = draw_program("transfers", listen, WITH_STORE, ("groups",))
    changed, passed_over = change_each_value(program, listen, WITH_STORE)
    print_counts(changed, passed_over, " with a store")
    assert passed_over == []
    assert {path.split(" (")[0] for path in changed} >= OF_A_STORE
