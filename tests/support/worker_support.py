"""Workers in the middle of a run, and rows for their next plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Answer, Program, Report
from blockstep.conformance.protocol.token_function import token_function
from blockstep.spec import vocabulary as v
from blockstep.spec.vocabulary import CachedRow, Commit, Config, NewRow, Plan, Request

CONFIG = Config(num_blocks=10, block_size=2, max_model_len=16)
A = Request("A", (1, 2, 3, 4, 5))

ROW_BEHIND_A_FAILED_LOAD = Program(
    Config(
        num_blocks=3,
        block_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=16,
        enable_prefix_caching=False,
        kv_connector=True,
        kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE,
        spec_method=v.SpecMethod.NGRAM,
        num_speculative_tokens=1,
        async_scheduling=True,
        max_frames_in_flight=2,
        groups=(v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=1),),
    ),
    (
        v.Submit(
            Request("A", (0, 0), max_tokens=2, structured_output=True, grammar=v.Grammar(((),)))
        ),
        v.KVOffer("A", num_tokens=1),
        v.GrammarReady("A"),
        v.Schedule(),
        v.Schedule(),
        Answer(report=Report(invalid=(("A", -1),))),
    ),
)
"""A load of A fails while a later plan has a row of A with a draft, which no grammar accepts."""


def make_worker(**fields: Any) -> Worker:
    """Return a worker that has executed nothing; `fields`: fields of its config."""
    return Worker(replace(CONFIG, **fields), token_function(3, 50))


def cached(request_id: str, computed: int, outputs: int, **fields: Any) -> CachedRow:
    """Return a row with one more token."""
    row = CachedRow(
        request_id=request_id,
        resumed=False,
        new_block_ids=((),),
        all_token_ids=None,
        num_computed_tokens=computed,
        num_output_tokens=outputs,
        num_scheduled_tokens=1,
    )
    return replace(row, **fields)


def started(request: Request = A, **fields: Any) -> Worker:
    """The request has run its whole prompt in blocks 1, 2, ... and sampled one token."""
    worker = make_worker(**fields)
    num_tokens = len(request.prompt_token_ids)
    blocks = tuple(range(1, 1 + -(-num_tokens // worker.config.block_size)))
    assert worker.execute(Plan(0, new=(NewRow(request, (blocks,), 0, num_tokens),))) == []
    worker.commit(Commit(0, worker.answer(0)))
    return worker


def pipelined(**fields: Any) -> Worker:
    """A has run its prompt and the next position, and no answer has been committed."""
    worker = make_worker(max_frames_in_flight=3, async_scheduling=True, **fields)
    assert worker.execute(Plan(0, new=(NewRow(A, ((1, 2, 3),), 0, 5),))) == []
    assert worker.execute(Plan(1, cached=(cached("A", 5, 1),))) == []
    return worker


def waiting_for_its_token() -> Worker:
    """A has run its prompt in a pipeline of plans, and its token is in flight."""
    worker = make_worker(max_frames_in_flight=3)
    assert worker.execute(Plan(0, new=(NewRow(A, ((1, 2, 3),), 0, 5),))) == []
    assert worker.execute(Plan(1)) == []
    return worker


def summarize(findings: list[Finding]) -> list[tuple[str, str]]:
    """Return the property and the check of each finding."""
    return [(finding.property_id, finding.sentence) for finding in findings]
