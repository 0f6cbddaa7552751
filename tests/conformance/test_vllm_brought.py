"""What requests bring to a vLLM release: adapters, sessions, grammars and encoder inputs.

Each test hands events to the adapter alone, and looks at what the release plans, answers and shows.
"""

from __future__ import annotations

from typing import Any

import pytest

from blockstep.conformance.engines.adapters.vllm_releases import (
    REFERENCE,
    get_installed_version,
    get_release,
    get_release_problem,
)
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import vocabulary as v

PROBLEM = get_release_problem(get_installed_version())
# Importing vLLM imports torch, which warns of itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]
RELEASE = get_release(get_installed_version() or REFERENCE)
assert RELEASE is not None
needs_reference = pytest.mark.skipif(
    RELEASE.version != REFERENCE, reason=f"tells what vLLM {REFERENCE} does"
)
needs_sessions = pytest.mark.skipif(not RELEASE.has_sessions, reason="the release has no sessions")


class Told:
    """An engine, and what it is asked in a line."""

    def __init__(self, config: v.Config) -> None:
        engine: Any = load_engine("vllm")(config)
        self.engine = engine
        self.scheduler = engine.run.scheduler

    def submit(self, name: str, *tokens: int, **fields: Any) -> None:
        """Hand in a request."""
        self.engine.apply(v.Submit(v.Request(name, tokens, **fields)))

    def update(self, name: str, *tokens: int, **fields: Any) -> v.Observation:
        """Go on with a session; without tokens: end it."""
        fields.setdefault("resumable", bool(tokens))
        answer: v.Observation = self.engine.apply(
            v.StreamingUpdate(v.Request(name, tokens or (0,), **fields))
        )
        return answer

    def plan(self) -> v.Plan:
        """Plan a step."""
        plan: v.Plan = self.engine.apply(v.Schedule())
        return plan

    def commit(self, frame_id: int, **sampled: tuple[int, ...]) -> tuple[v.OutputRow, ...]:
        """Answer a plan."""
        rows = tuple(v.RowTokens(name, tokens) for name, tokens in sampled.items())
        outputs: v.Outputs = self.engine.apply(v.Commit(frame_id, rows))
        return outputs.rows

    @property
    def state(self) -> v.Snapshot:
        """All of it now."""
        shown: v.Snapshot = self.engine.snapshot()
        return shown

    def request(self, name: str) -> v.RequestSnapshot:
        """A request as it stands."""
        found = self.state.request(name)
        assert found is not None
        return found


def rows_of(plan: v.Plan) -> dict[str, int]:
    """Who has how many tokens in a plan."""
    return {row.request_id: row.num_scheduled_tokens for row in plan.rows}


# Adapters.


@pytest.mark.parametrize(("max_loras", "planned"), [(0, "ABCD"), (1, "ACD"), (2, "ABCD")])
def test_who_is_beyond_the_cap_is_passed_over(max_loras: int, planned: str) -> None:
    told = Told(v.Config(num_blocks=20, max_loras=max_loras))
    for name, adapter in (("A", "x"), ("B", "y"), ("C", None), ("D", "x")):
        told.submit(name, 1, 2, adapter=adapter)
    assert "".join(rows_of(told.plan())) == planned
    if max_loras == 1:
        told.commit(0, A=(5,), C=(5,), D=(5,))
        told.engine.apply(v.Abort(("A", "D")))
        assert sorted(rows_of(told.plan())) == ["B", "C"]


def test_one_adapter_has_one_number_in_all_of_a_run() -> None:
    told = Told(v.Config(num_blocks=20, max_loras=2))
    for name, adapter in (("A", "x"), ("B", "y"), ("C", "x")):
        told.submit(name, 1, 2, adapter=adapter)
    numbers = [told.scheduler.requests[name].lora_request.lora_int_id for name in "ABC"]
    assert numbers == [1, 2, 1]


# Sessions.


@needs_sessions
def test_a_session_rests_with_its_blocks_and_goes_on_behind_what_it_computed() -> None:
    told = Told(v.Config(num_blocks=20, block_size=2))
    told.submit("A", 1, 2, 3, max_tokens=2, resumable=True)
    assert rows_of(told.plan()) == {"A": 3}
    told.commit(0, A=(7,))
    assert rows_of(told.plan()) == {"A": 1}
    (row,) = told.commit(1, A=(8,))
    assert (row.new_token_ids, row.finish_reason) == ((8,), v.FinishReason.LENGTH)
    resting = told.request("A")
    assert resting.status is v.Status.WAITING_FOR_STREAMING_REQ
    assert (resting.block_tables, resting.num_computed_tokens) == (((1, 2),), 4)
    assert told.state.finished_req_ids == ()
    assert told.update("A", 4, 5) == v.Ack()
    awake = told.request("A")
    assert (awake.status, awake.prompt_token_ids) == (v.Status.WAITING, (1, 2, 3, 7, 4, 5))
    assert awake.output_token_ids == ()
    plan = told.plan()
    (new,) = plan.new
    assert new.request.prompt_token_ids == (1, 2, 3, 7, 4, 5)
    assert (new.block_ids, new.num_computed_tokens) == (((1, 2, 3),), 4)
    assert new.num_scheduled_tokens == 2


@needs_sessions
def test_chunks_wait_for_the_stop_and_the_end_comes_last() -> None:
    told = Told(v.Config(num_blocks=20, block_size=2))
    told.submit("A", 1, 2, max_tokens=1, resumable=True)
    told.update("A", 3)
    told.update("A")
    assert told.request("A").num_streaming_updates == 2
    told.plan()
    (row,) = told.commit(0, A=(9,))
    assert row.finish_reason is v.FinishReason.LENGTH
    again = told.request("A")
    assert (again.status, again.num_streaming_updates) == (v.Status.WAITING, 1)
    assert again.prompt_token_ids == (1, 2, 3)
    plan = told.plan()
    assert rows_of(plan) == {"A": 1}
    assert plan.finished_req_ids == ()
    (row,) = told.commit(1, A=(9,))
    assert row.finish_reason is v.FinishReason.LENGTH
    assert told.state.request("A") is None
    assert told.plan().finished_req_ids == ("A",)


@needs_sessions
def test_the_end_finds_a_session_at_rest() -> None:
    told = Told(v.Config(num_blocks=20, block_size=2))
    told.submit("A", 1, 2, max_tokens=1, resumable=True)
    told.plan()
    told.commit(0, A=(9,))
    assert told.update("A") == v.Aborted(("A",))
    assert told.state.finished_req_ids == ("A",)


@needs_reference
def test_a_block_keeps_the_name_of_a_token_that_its_session_lost() -> None:
    told = Told(v.Config(num_blocks=20, block_size=2))
    told.submit("A", 1, 2, 3, max_tokens=1, resumable=True)
    told.plan()
    told.commit(0, A=(9,))
    told.update("A", 4, 5)
    told.plan()
    told.commit(1, A=(9,))
    named = [key.token_ids for key in told.state.block_keys if key is not None]
    assert named == [(1, 2), (3, 9)]  # and in it is 3, 4


@needs_sessions
def test_items_of_a_chunk_count_from_its_start() -> None:
    told = Told(v.Config(num_blocks=20, block_size=2))
    item = v.MultiModalItem("cat", 0, 1)
    told.submit("A", 1, 2, max_tokens=1, items=(item,), resumable=True)
    told.update("A", 3, 4, items=(item,))
    told.plan()
    told.commit(0, A=(9,))
    (new,) = told.plan().new
    assert new.request.items == (item, v.MultiModalItem("cat", 2, 1))
    told.commit(1, A=(9,))
    named = [key.items for key in told.state.block_keys if key is not None]
    assert named == [(("cat", 0),), (("cat", 0),)]
