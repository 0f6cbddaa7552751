"""Items of an encoder, where rows are taken back and sessions begin anew."""

from __future__ import annotations

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.program import Answer
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    Event,
    MultiModalItem,
    NewRow,
    Plan,
    Policy,
    Request,
    RowTokens,
    Schedule,
    SpecMethod,
    StreamingUpdate,
    Submit,
)

CONFIG = Config(
    num_blocks=4,
    block_size=4,
    max_num_seqs=2,
    max_num_batched_tokens=7,
    max_model_len=32,
    enable_prefix_caching=False,
    long_prefill_token_threshold=4,
    scheduler_reserve_full_isl=False,
    encoder_compute_budget=5,
    encoder_cache_size=5,
)
CAT, DOG, OWL = "cat", "dog", "owl"


def apply(run: LockStep, event: Event) -> Plan | None:
    assert run.apply(event) == []
    assert run.last is not None
    return run.last.seen if isinstance(run.last.seen, Plan) else None


def test_who_gave_its_blocks_up_may_stop_before_an_item_that_it_had() -> None:
    run = LockStep.start(CONFIG, load_engine("host"))
    items = (MultiModalItem(CAT, 1, 2), MultiModalItem(DOG, 4, 1))
    session = Request("D", (1,) * 8, max_tokens=1, items=items, resumable=True)
    apply(run, Submit(session))
    for tokens in ((), (5,)):
        plan = apply(run, Schedule())
        assert plan is not None
        apply(run, Commit(plan.frame_id, (RowTokens("D", tokens),)))
    others = (MultiModalItem(DOG, 1, 1), MultiModalItem(OWL, 2, 3), MultiModalItem(DOG, 5, 1))
    apply(run, Submit(Request("G", (1,) * 11, max_tokens=1, items=others)))
    plan = apply(run, Schedule())
    assert plan is not None
    apply(run, Commit(plan.frame_id, (RowTokens("G", ()),)))
    apply(run, StreamingUpdate(Request("D", (1,), max_tokens=1, resumable=True)))
    plan = apply(run, Schedule())
    assert plan is not None
    (row,) = plan.new
    assert isinstance(row, NewRow)
    assert (row.request_id, row.num_computed_tokens, row.num_scheduled_tokens) == ("D", 0, 1)


def test_what_made_room_for_a_row_that_was_taken_back_returns() -> None:
    config = Config(
        num_blocks=5,
        block_size=2,
        policy=Policy.PRIORITY,
        max_model_len=64,
        enable_prefix_caching=False,
        spec_method=SpecMethod.DRAFT_MODEL,
        num_speculative_tokens=1,
        max_frames_in_flight=3,
        async_scheduling=True,
        encoder_compute_budget=1,
        encoder_cache_size=1,
    )
    run = LockStep.start(config, load_engine("host"))
    items = (MultiModalItem(CAT, 0, 1), MultiModalItem(DOG, 1, 1), MultiModalItem(OWL, 2, 1))
    apply(run, Submit(Request("A", (0,) * 4, max_tokens=1, items=items)))
    apply(run, Schedule())
    apply(run, Submit(Request("B", (0,), max_tokens=2, priority=-1)))
    apply(run, Schedule())
    plan = apply(run, Schedule())
    assert plan is not None
    assert (plan.preempted_req_ids, plan.free_encoder_mm_hashes) == (("A",), ())
    encoder = run.spec.snapshot().encoder
    assert encoder is not None
    assert encoder.freeable == (DOG,)


def test_who_has_found_an_item_that_is_taken_back_brings_it_in() -> None:
    """A row before it has found another one, which stays as it is."""
    config = Config(
        num_blocks=12,
        block_size=1,
        policy=Policy.PRIORITY,
        max_model_len=32,
        enable_prefix_caching=False,
        long_prefill_token_threshold=1,
        scheduler_reserve_full_isl=False,
        encoder_compute_budget=1,
        encoder_cache_size=3,
    )
    run = LockStep.start(config, load_engine("host"))

    def come(name: str, length: int, item: str = "", priority: int = 0) -> None:
        items = (MultiModalItem(item, length - 1, 1),) if item else ()
        request = Request(name, (1,) * length, 1, priority=priority, items=items)
        assert run.perform(Submit(request)) == []

    def step() -> Plan:
        assert run.perform(Schedule()) == []
        assert run.last is not None
        plan = run.last.seen
        assert isinstance(plan, Plan)
        assert run.perform(Answer()) == []
        return plan

    come("Z", 1, DOG)
    step()
    come("A", 4, CAT, priority=2)
    step()
    come("G", 3, DOG)
    come("H", 3, CAT)
    step()
    come("B", 2, priority=1)
    step()
    plan = step()
    assert plan.preempted_req_ids == ("A",)
    made = {one.request_id: one.item_indices for one in plan.scheduled_encoder_inputs}
    assert made == {"H": (0,)}
