"""A session that gives its blocks up begins anew, with its items ahead of it."""

from __future__ import annotations

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    Event,
    MultiModalItem,
    NewRow,
    Plan,
    Request,
    RowTokens,
    Schedule,
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
    items = (MultiModalItem(DOG, 1, 1), MultiModalItem(OWL, 2, 3), MultiModalItem(DOG, 5, 1))
    apply(run, Submit(Request("G", (1,) * 11, max_tokens=1, items=items)))
    plan = apply(run, Schedule())
    assert plan is not None
    apply(run, Commit(plan.frame_id, (RowTokens("G", ()),)))
    apply(run, StreamingUpdate(Request("D", (1,), max_tokens=1, resumable=True)))
    plan = apply(run, Schedule())
    assert plan is not None
    (row,) = plan.new
    assert isinstance(row, NewRow)
    assert (row.request_id, row.num_computed_tokens, row.num_scheduled_tokens) == ("D", 0, 1)
