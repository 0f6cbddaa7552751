"""Past findings: programs about sessions, items and grammars that fail no check any more."""

from __future__ import annotations

from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Answer, Hostile, Mask, Program, Propose
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v

FULL = v.KVGroup(v.GroupKind.FULL, 1)
STATES = v.KVGroup(v.GroupKind.RECURRENT, 2, mamba_cache_mode=v.MambaCacheMode.ALL)


def test_blocks_that_a_session_kept_are_not_zeroed() -> None:
    """The session has the row of a new request, although it has written some of its blocks."""
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


def test_an_unchunked_prompt_waits_for_an_item_that_is_encoded_later() -> None:
    """One item is encoded per step, so the prompt waits for the second as well."""
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


def test_a_session_whose_blocks_were_reclaimed_waits_for_its_item() -> None:
    """The compute budget left by B is too small to encode the item of A again."""
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


def test_an_aborted_request_with_a_mask_without_drafts_has_sampled_one_token() -> None:
    """The request gets no further mask, so drafts that the mask left out stay cut."""
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
