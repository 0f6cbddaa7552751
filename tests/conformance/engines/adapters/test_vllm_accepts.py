"""Requests and configs that vLLM 0.19.1 accepts, and the specification refuses: the effects."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
from vllm_support.installed import needs_reference, quiet

from blockstep.spec import Config, Oracle, Request
from blockstep.spec import vocabulary as v

ADAPTERS = "blockstep.conformance.engines.adapters"
pytestmark = quiet
CONFIG = Config(num_blocks=20, block_size=2, max_model_len=16)
HALF: Any = 0.5
"""A tick that is no integer."""
OVERLAPPING = (v.MultiModalItem("cat", 0, 3), v.MultiModalItem("dog", 1, 2))
NO_CHUNKS = replace(CONFIG, max_num_batched_tokens=4, enable_chunked_prefill=False)
DRAFTED = replace(CONFIG, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request("A", (1, 2), arrival_time=HALF), v.RejectCode.MALFORMED_EVENT),
        (Request("A", (1, 2, 3, 4), items=OVERLAPPING), v.RejectCode.BAD_REQUEST),
        (Request("A", (1, -2)), v.RejectCode.MALFORMED_EVENT),
    ],
    ids=["tick", "items", "token"],
)
def test_the_specification_refuses_the_request(request_: Request, code: v.RejectCode) -> None:
    refused = Oracle(CONFIG).apply(v.Submit(request_))
    assert isinstance(refused, v.Rejected)
    assert refused.code is code


def test_the_specification_refuses_a_config_in_which_a_prompt_never_fits_a_step() -> None:
    with pytest.raises(v.ConfigError, match="enable chunked prefill"):
        Oracle(NO_CHUNKS)


def test_the_specification_refuses_an_empty_output_of_a_row_that_samples() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(Request("A", (1, 2)))
    refused = oracle.apply(v.Commit(oracle.schedule().frame_id, (v.RowTokens("A", ()),)))
    assert isinstance(refused, v.Rejected)
    assert refused.code is v.RejectCode.BAD_RESULT


def build(config: Config) -> Any:
    return importlib.import_module(f"{ADAPTERS}.vllm").VllmEngine(config)


@needs_reference
def test_a_fractional_arrival_time_decides_the_order() -> None:
    engine = build(replace(CONFIG, policy=v.Policy.PRIORITY, max_num_seqs=1))
    engine.apply(v.Submit(Request("A", (1, 2), arrival_time=HALF)))
    engine.apply(v.Submit(Request("B", (1, 2), arrival_time=HALF / 2)))
    assert engine.scheduler.schedule().num_scheduled_tokens == {"B": 2}


@needs_reference
def test_a_block_key_may_lack_the_second_of_overlapping_items() -> None:
    engine = build(CONFIG)
    for name, item in (("A", "dog"), ("B", "cow")):
        items = (OVERLAPPING[0], replace(OVERLAPPING[1], identifier=item))
        engine.apply(v.Submit(Request(name, (1, 2, 3, 4), items=items)))
    first, second = (engine.scheduler.requests[name].block_hashes for name in "AB")
    assert first[0] == second[0], "the second item reaches into the first block, too"
    assert first[1] != second[1]


@needs_reference
def test_negative_tokens_are_computed_and_delivered() -> None:
    engine = build(CONFIG)
    engine.apply(v.Submit(Request("A", (-1, -7), max_tokens=2)))
    plan = engine.apply(v.Schedule())
    assert plan.new[0].request.prompt_token_ids == (-1, -7)
    (row,) = engine.apply(v.Commit(plan.frame_id, (v.RowTokens("A", (-5,)),))).rows
    assert row.new_token_ids == (-5,)


@needs_reference
def test_a_prompt_beyond_the_budget_blocks_the_queue_for_ever() -> None:
    engine = build(NO_CHUNKS)
    engine.apply(v.Submit(Request("A", (1,) * 6)))
    engine.apply(v.Submit(Request("B", (1,))))
    for _ in range(3):
        plan = engine.apply(v.Schedule())
        assert isinstance(plan, v.Plan)
        assert plan.rows == ()
    assert engine.snapshot().waiting == ("A", "B")


@needs_reference
@pytest.mark.parametrize(("config", "planned"), [(CONFIG, {}), (DRAFTED, {"A": -3})])
def test_after_an_empty_output_a_request_gets_no_or_negative_tokens(
    config: Config, planned: dict[str, int]
) -> None:
    engine = build(config)
    engine.apply(v.Submit(Request("A", (1, 2), max_tokens=9)))
    plan = engine.apply(v.Schedule())
    engine.apply(v.Commit(plan.frame_id, (v.RowTokens("A", (5,)),)))
    if config.num_speculative_tokens:
        engine.apply(v.Drafts((v.RowTokens("A", (6, 7, 8)),)))
    plan = engine.apply(v.Schedule())
    engine.apply(v.Commit(plan.frame_id, (v.RowTokens("A", ()),)))
    assert engine.scheduler.schedule().num_scheduled_tokens == planned
