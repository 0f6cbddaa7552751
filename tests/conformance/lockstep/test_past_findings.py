"""What requests bring: programs that found something once, and are right now."""

from __future__ import annotations

from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Answer, Hostile, Mask, Program, Propose
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v

FULL = v.KVGroup(v.GroupKind.FULL, 1)
STATES = v.KVGroup(v.GroupKind.RECURRENT, 2, mamba_cache_mode=v.MambaCacheMode.ALL)


def test_blocks_that_a_session_kept_are_not_zeroed() -> None:
    """Its row is one of a newcomer, and yet it has written some of its blocks."""
    config = v.Config(
        num_blocks=4, block_size=1, max_num_batched_tokens=8, max_model_len=8, groups=(FULL, STATES)
    )
    actions = (
        v.Submit(v.Request("A", (0,), max_tokens=1, resumable=True)),
        v.Schedule(),
        v.StreamingUpdate(v.Request("A", (2,), max_tokens=1, resumable=True)),
        Answer(),
        v.Schedule(),
    )
    run, findings = run_program(Program(config, actions), SpecEngine)
    assert findings == []
    assert run.num_events == len(actions)


def test_a_prompt_ends_before_an_item_that_cannot_be_made_yet_without_chunking() -> None:
    """One item is made a step: an unchunked prompt waits for the second as well."""
    config = v.Config(
        num_blocks=9,
        block_size=4,
        max_model_len=16,
        max_num_batched_tokens=16,
        enable_chunked_prefill=False,
        encoder_compute_budget=4,
        encoder_cache_size=8,
    )
    items = (v.MultiModalItem("cat", 0, 4), v.MultiModalItem("dog", 4, 4))
    actions = (
        v.Submit(v.Request("A", (0,) * 8, max_tokens=1, items=items)),
        v.Schedule(),
        Answer(),
    )
    run, findings = run_program(Program(config, actions), SpecEngine)
    assert findings == []
    assert run.num_events == len(actions)


def test_a_session_that_gave_its_blocks_away_waits_for_its_item_again() -> None:
    """What B leaves of the compute does not make it, though A had computed once."""
    config = v.Config(
        num_blocks=19,
        block_size=2,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        policy=v.Policy.PRIORITY,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        spec_method=v.SpecMethod.DRAFT_MODEL,
        num_speculative_tokens=4,
        max_frames_in_flight=2,
        async_scheduling=True,
        groups=(v.KVGroup(v.GroupKind.FULL, 2),) * 3,
        encoder_compute_budget=4,
        encoder_cache_size=4,
        disable_chunked_mm_input=True,
        is_encoder_decoder=True,
    )
    cat, dog = v.MultiModalItem("cat", 0, 4), v.MultiModalItem("dog", 0, 1)
    actions = (
        v.Submit(v.Request("A", (0, 0, 0), max_tokens=2, items=(cat,), resumable=True)),
        v.Schedule(),
        v.StreamingUpdate(v.Request("A", (0,), max_tokens=1, resumable=True)),
        Answer(),
        v.Schedule(),
        Answer(),
        v.Submit(v.Request("B", (0,), max_tokens=1, items=(dog,), priority=-13)),
        v.Schedule(),
    )
    run, findings = run_program(Program(config, actions), SpecEngine)
    assert findings == []
    assert run.num_events == len(actions)
    assert run.witnesses["encoder_beside_waits"] == 1


def test_a_request_that_ends_behind_a_mask_without_its_drafts_has_sampled_a_token() -> None:
    """No mask is made for it any more, so the drafts that were not told stay cut."""
    config = v.Config(
        num_blocks=20,
        block_size=1,
        max_model_len=16,
        max_num_batched_tokens=16,
        spec_method=v.SpecMethod.NGRAM,
        num_speculative_tokens=2,
        max_frames_in_flight=2,
        async_scheduling=True,
    )
    held = v.Request(
        "A", (0,), max_tokens=8, structured_output=True, grammar=v.Grammar((((1, 0),),))
    )
    actions = (
        v.Submit(held),
        v.GrammarReady("A"),
        Propose(((2, 2),)),
        v.Schedule(),
        v.Schedule(),
        Mask(0),
        Answer(),
        Hostile(v.GrammarBitmask(1)),
        v.Abort(("A",)),
        Answer(),
    )
    run, findings = run_program(Program(config, actions), SpecEngine)
    assert findings == []
    assert run.witnesses["rejected_bad_result"] == 0
    assert run.plans == []
