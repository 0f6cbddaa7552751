"""What a session of our engine takes of a chunk, and what it refuses."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import (
    SESSION_FIELDS,
    Ack,
    Commit,
    Config,
    Grammar,
    MultiModalItem,
    Plan,
    RejectCode,
    Rejected,
    RepetitionDetection,
    Request,
    RowTokens,
    Schedule,
    StreamingUpdate,
    Submit,
)

CHUNK = Request("S", (4, 5), max_tokens=3, resumable=True)
CHANGED = {
    "prompt_token_ids": (4, 6),
    "max_tokens": 2,
    "min_tokens": 1,
    "eos_token_id": 9,
    "stop_token_ids": (9,),
    "repetition_detection": RepetitionDetection(3, 1, 2),
    "arrival_time": 7,
    "items": (MultiModalItem("cat", 0, 1),),
    "prompt_embeds": (1, 2),
    "priority": 2,
    "adapter": "other",
    "cache_salt": "other",
    "skip_reading_prefix_cache": True,
    "structured_output": True,
    "grammar": Grammar((((1, 0),),)),
    "job_id": "other",
    "is_last_step": True,
}
REFUSED = (*SESSION_FIELDS, "prompt_embeds")


def resting() -> HostEngine:
    """A session that has stopped after a token."""
    engine = HostEngine(Config(num_blocks=20, block_size=2))
    engine.apply(Submit(Request("S", (1, 2, 3), max_tokens=1, resumable=True)))
    plan = engine.apply(Schedule())
    assert isinstance(plan, Plan)
    engine.apply(Commit(plan.frame_id, (RowTokens("S", (7,)),)))
    return engine


def going_on(engine: HostEngine) -> Request:
    """What the session asks for, as a plan tells its worker."""
    plan = engine.apply(Schedule())
    assert isinstance(plan, Plan)
    return plan.new[0].request


def test_every_field_of_a_chunk_is_tried() -> None:
    assert {part.name for part in fields(Request)} == {*CHANGED, "request_id", "resumable"}


@pytest.mark.parametrize("name", CHANGED)
def test_every_field_of_a_chunk_is_used_or_refused(name: str) -> None:
    plain, other = resting(), resting()
    assert plain.apply(StreamingUpdate(CHUNK)) == Ack()
    changed = replace(CHUNK, **{name: CHANGED[name]})  # type: ignore[arg-type]
    if name == "grammar":
        changed = replace(changed, structured_output=True)
    before = other.snapshot()
    answer = other.apply(StreamingUpdate(changed))
    if name in REFUSED:
        assert isinstance(answer, Rejected)
        assert answer.code is RejectCode.BAD_REQUEST
        assert other.snapshot() == before
    else:
        assert answer == Ack()
        assert going_on(other) != going_on(plain)
