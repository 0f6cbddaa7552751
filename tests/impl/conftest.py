"""A session: an engine, and the few words that its tests are written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from blockstep.impl.compiled import IS_COMPILED, CompiledEngine
from blockstep.impl.compiled.jit import warn_if_slow
from blockstep.impl.host import Digest, HostEngine
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    Event,
    Observation,
    Outputs,
    Plan,
    Request,
    RequestSnapshot,
    RowTokens,
    Schedule,
    Snapshot,
    Status,
    Submit,
)

OpenSession: TypeAlias = "Callable[..., Session]"

if not IS_COMPILED:  # numba is switched off: the compiled engine is tested as Python, and says so
    with pytest.warns(RuntimeWarning, match="plain Python"):
        warn_if_slow()


class Session:
    """Applies events to one engine and checks the pool after each of them."""

    def __init__(self, engine: HostEngine | CompiledEngine) -> None:
        self.engine: Any = engine

    def apply(self, event: Event) -> Observation:
        observation: Observation = self.engine.apply(event)
        check_state(self.engine.snapshot())
        if isinstance(self.engine, HostEngine):
            check_promises(self.engine)
        return observation

    def submit(
        self, request_id: str, tokens: range | tuple[int, ...], **fields: Any
    ) -> Observation:
        return self.apply(Submit(Request(request_id, tuple(tokens), **fields)))

    def plan(self) -> Plan:
        plan = self.apply(Schedule())
        assert isinstance(plan, Plan)
        return plan

    def commit(self, plan: Plan, **tokens: tuple[int, ...]) -> Outputs:
        """Answer a plan; a row that is not named gets no tokens."""
        ids = [row.request_id for row in plan.new] + [row.request_id for row in plan.cached]
        rows = tuple(RowTokens(name, tokens.get(name, ())) for name in ids)
        outputs = self.apply(Commit(plan.frame_id, rows))
        assert isinstance(outputs, Outputs), outputs
        return outputs

    def step(self, **tokens: tuple[int, ...]) -> tuple[Plan, Outputs]:
        plan = self.plan()
        return plan, self.commit(plan, **tokens)

    def state(self) -> Snapshot:
        snapshot: Snapshot = self.engine.snapshot()
        return snapshot

    def request(self, request_id: str) -> RequestSnapshot:
        found = self.state().request(request_id)
        assert found is not None
        return found


def check_state(state: Snapshot) -> None:
    """P1 and P3, and that each request is in exactly one place."""
    blocks = range(1, len(state.ref_counts))
    tables = [table for r in state.requests for table in r.block_tables]
    if state.transfers is not None:
        tables += [table for held in state.transfers.held for table in held.block_tables]
        tables += [deferred.block_ids for deferred in state.transfers.deferred_frees]
    if state.pins is not None:
        tables += [table for pin in state.pins.pins for table in pin.block_tables]
    holders = Counter(block for table in tables for block in table if block)
    assert state.ref_counts == (0, *(holders[block] for block in blocks))
    assert sorted(state.free_queue) == [block for block in blocks if not holders[block]]
    found = {block: key for key, ids in state.cached.items() for block in ids}
    carried = {block: key for block, key in enumerate(state.block_keys) if key is not None}
    assert found == carried
    assert sum(map(len, state.cached.values())) == len(carried)
    places = (*state.waiting, *state.skipped_waiting, *state.running)
    assert sorted(places) == [r.request_id for r in state.requests]


def check_promises(engine: HostEngine) -> None:
    """P12: what frames in flight owe, and where that leaves a running request."""
    owed: Counter[str] = Counter()
    if engine.config.async_scheduling:
        for frame in engine.frames.values():
            owed.update({name: 1 + len(row) for name, row in frame.items() if row is not None})
    for request in engine.snapshot().requests:
        promised = request.num_output_placeholders
        assert promised == owed[request.request_id]
        if promised and request.status is Status.RUNNING:
            prompt = engine.table.num_prompt[engine.table.slot_of[request.request_id]]
            known = prompt + len(request.output_token_ids)
            assert request.num_computed_tokens == known + promised - 1
            assert not request.is_prefill_chunk


@pytest.fixture
def session() -> OpenSession:
    """Opens a session: the fields of its Config, and perhaps a digest."""

    def open_session(digest: str | Digest = "sha256", **fields: Any) -> Session:
        return Session(HostEngine(Config(**fields), digest))

    return open_session


@pytest.fixture(params=[HostEngine, CompiledEngine])
def either(request: pytest.FixtureRequest) -> OpenSession:
    """The same with either engine: what few tests tell apart from the soak of both."""

    def open_session(**fields: Any) -> Session:
        return Session(request.param(Config(**fields)))

    return open_session
