"""Each field that the adapter reads from a release of vLLM is changed, and the run must fail.

For each feature of the release, one program is drawn and played. Then each value that the scheduler
returns is changed, one at a time, in a copy that only the adapter sees; the release keeps its own
values. The count of changes is printed (`pytest -m soak -s`).
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
"""Fields that may be changed without a finding, and why."""
WITH_STORE = f"{ADAPTERS}.vllm:VllmWithStore"
"""The engine that has a store also where no profile follows it."""
OF_A_STORE = {
    "SchedulerOutput.kv_connector_metadata.loads",
    "SchedulerOutput.has_sync_kv_loads",
    "EngineCoreOutputs.outputs.prefill_stats.num_external_cached_tokens",
    "EngineCoreOutputs.scheduler_stats.connector_prefix_cache_stats.hits",
    "EngineCoreOutputs.scheduler_stats.num_kv_fetch_reqs_by_stage",
}
"""Fields that a release has for its store."""
NUM_PLACES = 2
"""Calls in which each value is changed, at most, for each feature."""
NUM_CALLS = 100
"""Calls that the program of a feature has, at least."""
NUM_DRAWN = 20
"""Programs that are drawn with a feature, at most."""


class Interceptor:
    """It records what a scheduler returns, call by call, or changes one value of one call."""

    def __init__(self, call: int = -1, path: str = "") -> None:
        from foreign_support.changed_records import change_each

        self._change_each = change_each
        self.call, self.path = call, path
        self.places: list[tuple[int, str]] = []
        """Calls, and the paths of the values that could be changed in what they returned."""
        self.is_changed = False
        self.num_calls = 0
        self._own: dict[int, tuple[Any, Any]] = {}

    def receive(self, value: Any) -> Any:
        """Return what the adapter gets for a value that the scheduler returned."""
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
        """Return the release's own value for one that the adapter hands back."""
        return self._own.get(id(value), (value,))[0]


class CallCounter(Interceptor):
    """An interceptor that counts the calls, and does not look for values to change."""

    def receive(self, value: Any) -> Any:
        self.num_calls += 1
        return value


@pytest.fixture
def intercept(monkeypatch: pytest.MonkeyPatch) -> Callable[[Interceptor], None]:
    """Send what the release returns from now on through an interceptor."""
    build = importlib.import_module(f"{ADAPTERS}.vllm_build")
    events = importlib.import_module(f"{ADAPTERS}.vllm_events")
    plain = {name: getattr(build, name) for name in ("Scheduler", "AsyncScheduler")}
    take = events.Recorder.take

    def start(interceptor: Interceptor) -> None:
        for name, kind in plain.items():
            monkeypatch.setattr(build, name, plant(kind, interceptor))
        monkeypatch.setattr(
            events.Recorder,
            "take",
            lambda self: [interceptor.receive(event) for event in take(self)],
        )

    return start


def plant(kind: Any, interceptor: Interceptor) -> Any:
    """Return a scheduler class whose plans and outputs go through an interceptor."""

    class Planted(kind):  # type: ignore[misc]
        def schedule(self, *arguments: Any) -> Any:
            return interceptor.receive(super().schedule(*arguments))

        def update_from_output(self, frame: Any, result: Any) -> Any:
            outputs = super().update_from_output(interceptor.get_own(frame), result)
            return {client: interceptor.receive(core) for client, core in outputs.items()}

        def get_grammar_bitmask(self, frame: Any) -> Any:
            mask = super().get_grammar_bitmask(interceptor.get_own(frame))
            return mask if mask is None else interceptor.receive(mask)

        def update_draft_token_ids_in_output(self, drafts: Any, frame: Any) -> None:
            super().update_draft_token_ids_in_output(drafts, interceptor.get_own(frame))

    return Planted


def list_features() -> tuple[str, ...]:
    """Names of the features that the release has."""
    if PROBLEM is not None:
        return ()
    has = get_capabilities(load_engine("vllm"))
    return tuple(one.name for one in FEATURES if one.capability is None or one.capability in has)


def draw_program(
    feature: str,
    intercept: Callable[[Interceptor], None],
    engine: str = "vllm",
    without: tuple[str, ...] = (),
) -> Program:
    """Return the first drawn program of a feature with enough calls of the scheduler: in many drawn
    programs the adapter declines events, and few plans or none are left."""
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
        interceptor = CallCounter()
        intercept(interceptor)
        _, program, findings = play_episode(options, index, make_engine)
        assert findings == [] or engine == WITH_STORE
        if interceptor.num_calls >= NUM_CALLS and not findings:
            return program
    raise AssertionError(f"no program with {feature}")


def list_changes(interceptor: Interceptor) -> Iterator[tuple[int, str]]:
    """Yield the first calls in which each value can be changed."""
    counts = Counter[str]()
    for call, path in interceptor.places:
        counts[path] += 1
        if counts[path] <= NUM_PLACES:
            yield call, path


def change_each_value(
    program: Program, intercept: Callable[[Interceptor], None], engine: str = "vllm"
) -> tuple[Counter[str], list[str]]:
    """Return how often each value was changed, and the changes that were not noticed."""
    make_engine = load_engine(engine)
    changed, unnoticed = Counter[str](), []
    interceptor = Interceptor()
    intercept(interceptor)
    assert run_program(program, make_engine, PROFILE)[1] == []
    for call, path in list_changes(interceptor):
        one = Interceptor(call, path)
        intercept(one)
        _, findings = run_program(program, make_engine, PROFILE)
        assert one.is_changed
        changed[path] += 1
        if not findings and path not in FREE:
            unnoticed.append(f"{path} in call {call}")
    return changed, unnoticed


def print_counts(changed: Counter[str], unnoticed: list[str], where: str) -> None:
    """Print the counts."""
    text = f"{changed.total()} changes of {len(changed)} values of vLLM {VERSION}{where}"
    sys.stdout.write(f"{text}, unnoticed: {len(unnoticed)}\n")


def test_each_changed_value_is_noticed(intercept: Callable[[Interceptor], None]) -> None:
    changed, unnoticed = Counter[str](), []
    for feature in list_features():
        more, missed = change_each_value(draw_program(feature, intercept), intercept)
        changed += more
        unnoticed += [f"{one} with {feature}" for one in missed]
    print_counts(changed, unnoticed, "")
    assert unnoticed == []
    assert len(changed) >= sum(map(len, READ.values()))


@needs(RELEASE.has_store and not RELEASE.follows_store, "no store, or one of the features")
def test_each_value_is_noticed_with_a_store_that_no_profile_follows(
    intercept: Callable[[Interceptor], None],
) -> None:
    program = draw_program("transfers", intercept, WITH_STORE, ("groups",))
    changed, unnoticed = change_each_value(program, intercept, WITH_STORE)
    print_counts(changed, unnoticed, " with a store")
    assert unnoticed == []
    assert {path.split(" (")[0] for path in changed} >= OF_A_STORE
