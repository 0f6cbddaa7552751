"""What requests bring: programs that found something once, and are right now."""

from __future__ import annotations

from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import (
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    MultiModalItem,
    Request,
    Schedule,
    StreamingUpdate,
    Submit,
)

FULL = KVGroup(GroupKind.FULL, 1)
STATES = KVGroup(GroupKind.RECURRENT, 2, mamba_cache_mode=MambaCacheMode.ALL)


def test_blocks_that_a_session_kept_are_not_zeroed() -> None:
    """Its row is one of a newcomer, and yet it has written some of its blocks."""
    config = Config(
        num_blocks=4, block_size=1, max_num_batched_tokens=8, max_model_len=8, groups=(FULL, STATES)
    )
    actions = (
        Submit(Request("A", (0,), max_tokens=1, resumable=True)),
        Schedule(),
        StreamingUpdate(Request("A", (2,), max_tokens=1, resumable=True)),
        Answer(),
        Schedule(),
    )
    run, findings = run_program(Program(config, actions), SpecEngine)
    assert findings == []
    assert run.num_events == len(actions)


def test_a_prompt_ends_before_an_item_that_cannot_be_made_yet_without_chunking() -> None:
    """One item is made a step: an unchunked prompt waits for the second as well."""
    config = Config(
        num_blocks=9,
        block_size=4,
        max_model_len=16,
        max_num_batched_tokens=16,
        enable_chunked_prefill=False,
        encoder_compute_budget=4,
        encoder_cache_size=8,
    )
    items = (MultiModalItem("cat", 0, 4), MultiModalItem("dog", 4, 4))
    actions = (Submit(Request("A", (0,) * 8, max_tokens=1, items=items)), Schedule(), Answer())
    run, findings = run_program(Program(config, actions), SpecEngine)
    assert findings == []
    assert run.num_events == len(actions)
