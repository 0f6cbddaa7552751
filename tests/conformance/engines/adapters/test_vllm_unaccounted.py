"""Every field of vLLM's plans and outputs is checked: each seeded bug is found by its field."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from vllm_support.installed import PROFILE, RELEASE, VERSION, needs_vllm, quiet

from blockstep.conformance.engines.adapters.vllm_fields import (
    READ,
    UNUSED,
    find_unknown,
    get_unknown_note,
    is_empty,
)
from blockstep.conformance.engines.adapters.vllm_releases import TRIED
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Action, Answer, Program, Propose
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.vocabulary import Abort, Config, Policy, Request, Schedule, SpecMethod, Submit

ADAPTERS = "blockstep.conformance.engines.adapters"
pytestmark = quiet


# Without vLLM.


def test_a_field_is_read_or_unused() -> None:
    assert READ.keys() == UNUSED.keys()
    assert all(not READ[kind] & UNUSED[kind] for kind in READ)


def test_a_field_that_a_new_release_adds_is_reported_once() -> None:
    names = ("finished_req_ids", "scheduled_magic", "kv_connector_metadata")
    unknown = find_unknown("SchedulerOutput", names)
    assert unknown == ("SchedulerOutput.scheduled_magic",)
    note = "vLLM 9.9.9 has fields that are not looked at: SchedulerOutput.scheduled_magic"
    assert get_unknown_note("9.9.9", unknown) == note
    assert get_unknown_note("9.9.9", ()) is None


@pytest.mark.parametrize("value", [None, (), [], {}, set(), 0, 0.0, False, {"stage": 0}])
def test_an_empty_value_is_recognised(value: object) -> None:
    assert is_empty(value)


@pytest.mark.parametrize("value", [["x"], {"A": [0]}, {"stage": 1}, 1, True, object()])
def test_a_value_that_is_not_empty_is_recognised(value: object) -> None:
    assert not is_empty(value)


# With vLLM.

TIGHT = Config(
    num_blocks=6, block_size=1, max_model_len=8, policy=Policy.PRIORITY,
    spec_method=SpecMethod.NGRAM, num_speculative_tokens=1,
)  # fmt: skip
PREEMPTION: tuple[Action, ...] = (
    Submit(Request("A", (0,), max_tokens=4, priority=1)),
    Submit(Request("B", (0,), max_tokens=4, priority=0)),
    *(Schedule(), Answer(), Propose(((1, 1),))) * 3,
)
"""Two requests with a draft each: A, planned first, is preempted when B needs a block."""
END: tuple[Action, ...] = (
    Submit(Request("A", (1, 2), max_tokens=1)),
    Submit(Request("B", (3, 4), max_tokens=3)),
    *(Schedule(), Answer()) * 3,
)
"""A finishes with the first output, and B continues."""

Change: TypeAlias = Callable[[Any, Any], None]
"""A change that a planted scheduler makes to its plan or to its output."""


def play(
    monkeypatch: pytest.MonkeyPatch, plant: dict[str, Change], config: Config, *actions: Action
) -> list[Finding]:
    """Change `schedule` or `update_from_output` of the release, and return a program's findings."""
    build = importlib.import_module(f"{ADAPTERS}.vllm_build")
    names = {"plan": "schedule", "answer": "update_from_output"}

    def make_method(name: str, change: Change) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any) -> Any:
            answer = getattr(super(planted, self), name)(*arguments)
            change(self, answer)
            return answer

        return method

    methods = {names[when]: make_method(names[when], change) for when, change in plant.items()}
    planted = type("Planted", (build.Scheduler,), methods)
    monkeypatch.setattr(build, "Scheduler", planted)
    program = Program(config, actions, vocabulary_size=1)
    _, findings = run_program(program, load_engine("vllm"), PROFILE)
    return list(findings)


def leave_drafts(_scheduler: Any, plan: Any) -> None:
    """The drafts of preempted requests stay in the plan."""
    for name in plan.preempted_req_ids or ():
        plan.scheduled_spec_decode_tokens[name] = [0]


def leave_row(scheduler: Any, plan: Any) -> None:
    """A preempted request gets blocks."""
    for name in plan.preempted_req_ids or ():
        add_row(scheduler, plan, name)


def add_row(_scheduler: Any, plan: Any, name: str) -> None:
    """Add a request to every list of a plan, without tokens."""
    cached = plan.scheduled_cached_reqs
    cached.req_ids.append(name)
    cached.new_block_ids.append(([1],))
    cached.num_computed_tokens.append(0)
    if hasattr(cached, "num_output_tokens"):
        cached.num_output_tokens.append(0)
    else:  # 0.11.0
        cached.resumed_from_preemption.append(False)
        cached.new_token_ids.append([])


def give_blocks_to_the_finished(scheduler: Any, plan: Any) -> None:
    """A request that has just finished gets blocks."""
    for name in plan.finished_req_ids:
        plan.num_scheduled_tokens[name] = 1
        add_row(scheduler, plan, name)


def finish_again(scheduler: Any, plan: Any) -> None:
    """A finished request is named in every later plan."""
    ended = getattr(scheduler, "ended", set()) | plan.finished_req_ids
    scheduler.ended = plan.finished_req_ids = ended


def free_items(_scheduler: Any, plan: Any) -> None:
    """The encoder must free an item that it never had, twice."""
    plan.free_encoder_mm_hashes = ["cat", "cat"]


def keep_table(scheduler: Any, _plan: Any) -> None:
    """A block table outlives its request."""
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    manager.req_to_blocks["gone"] = [scheduler.kv_cache_manager.block_pool.blocks[1]]


def count_wrongly(_scheduler: Any, plan: Any) -> None:
    """The sum of scheduled tokens is wrong."""
    plan.total_num_scheduled_tokens += 1


def change_the_prompt(_scheduler: Any, plan: Any) -> None:
    """The worker gets another prompt than was submitted."""
    for new in plan.scheduled_new_reqs:
        new.prompt_token_ids = [9, *new.prompt_token_ids[1:]]


def ask_for_grammar(_scheduler: Any, plan: Any) -> None:
    """A plan wants bitmasks, though no request has a grammar."""
    plan.pending_structured_output_tokens = True


def load_inputs(_scheduler: Any, plan: Any) -> None:
    """A request without a row gets an encoder input."""
    plan.scheduled_encoder_inputs["gone"] = [0]


def drop_an_entry(_scheduler: Any, plan: Any) -> None:
    """One of the parallel lists is short."""
    del plan.scheduled_cached_reqs.num_computed_tokens[-1:]


def answer_an_unknown_request(_scheduler: Any, answer: Any) -> None:
    """An output has the id of a request that is not in the frame."""
    for core in answer.values():
        for row in core.outputs:
            row.request_id = "stranger"


def answer_twice(_scheduler: Any, answer: Any) -> None:
    """Two outputs of one request in one step."""
    for core in answer.values():
        core.outputs += core.outputs


def transfer_something(_scheduler: Any, answer: Any) -> None:
    """Outputs have transfer parameters, without a connector."""
    for core in answer.values():
        for row in core.outputs:
            row.kv_transfer_params = {"remote": 1}


def count_the_running(_scheduler: Any, answer: Any) -> None:
    """Statistics count a running request too many."""
    for core in answer.values():
        if core.scheduler_stats is not None:
            core.scheduler_stats.num_running_reqs += 1


def forget_an_event(_scheduler: Any, answer: Any) -> None:
    """The last event of a request is left out."""
    for core in answer.values():
        for row in core.outputs:
            row.events = row.events and row.events[:-1]


def count_the_drafts(_scheduler: Any, answer: Any) -> None:
    """Statistics count one row with drafts more than the frame had."""
    for core in answer.values():
        if core.scheduler_stats is not None and core.scheduler_stats.spec_decoding_stats:
            core.scheduler_stats.spec_decoding_stats.num_drafts += 1


def count_the_prompt(_scheduler: Any, answer: Any) -> None:
    """Statistics count a prompt token too many."""
    change_prefills(answer, num_prompt_tokens=1)


def count_the_published(_scheduler: Any, answer: Any) -> None:
    """Statistics count a published token too many."""
    change_prefills(answer, num_cache_creation_tokens=1)


def change_prefills(answer: Any, **more: int) -> None:
    """Increase the counts of prefills in an output."""
    for core in answer.values():
        for row in core.outputs:
            for field, number in more.items() if row.prefill_stats is not None else ():
                setattr(row.prefill_stats, field, getattr(row.prefill_stats, field) + number)


def repeat_the_prefill(scheduler: Any, answer: Any) -> None:
    """Every output has the counts of the prefill, and not only the first one."""
    for core in answer.values():
        for row in core.outputs:
            scheduler.first_prefills = getattr(scheduler, "first_prefills", {})
            row.prefill_stats = scheduler.first_prefills.setdefault(
                row.request_id, row.prefill_stats
            )


def keep_the_prefill(_scheduler: Any, answer: Any) -> None:
    """The counts of a prefill are never reported."""
    for core in answer.values():
        for row in core.outputs:
            row.prefill_stats = None


def count_a_load(_scheduler: Any, answer: Any) -> None:
    """Statistics count a load, without a store."""
    for core in answer.values():
        if core.scheduler_stats is not None:
            core.scheduler_stats.num_kv_fetch_reqs_by_stage["in_progress"] += 1


PLANTED: dict[str, tuple[str, Change, Config, tuple[Action, ...], str]] = {
    "a victim's drafts": (
        "plan", leave_drafts, TIGHT, PREEMPTION,
        "scheduled_spec_decode_tokens names 'A', which has no row in this plan",
    ),
    "blocks for a victim": (
        "plan", leave_row, TIGHT, PREEMPTION,
        "scheduled_cached_reqs names 'A', which has no tokens in this plan",
    ),
    "blocks for a finished request": (
        "plan", give_blocks_to_the_finished, Config(num_blocks=9), END,
        "scheduled_cached_reqs names 'A', which is not there",
    ),
    "an end reported twice": (
        "plan", finish_again, Config(num_blocks=9), END,
        "finished_req_ids names 'A', which has not ended since the last plan",
    ),
    "an item freed twice": (
        "plan", free_items, Config(num_blocks=9), END,
        "free_encoder_mm_hashes in this plan: ['cat', 'cat']",
    ),
    "a table of a request that is gone": (
        "plan", keep_table, Config(num_blocks=9), END, "req_to_blocks names 'gone', which is gone",
    ),
    "a wrong sum": (
        "plan", count_wrongly, Config(num_blocks=9), END,
        "total_num_scheduled_tokens is 5; its rows have 4",
    ),
    "another prompt": (
        "plan", change_the_prompt, Config(num_blocks=9), END,
        "prompt_token_ids of new row 'A' is (9, 2), not (1, 2)",
    ),
    "masks without a grammar": (
        "plan", ask_for_grammar, Config(num_blocks=9), END,
        "pending_structured_output_tokens in this plan: no row has a grammar",
    ),
    "inputs for a request without a row": (
        "plan", load_inputs, Config(num_blocks=9), END,
        "scheduled_encoder_inputs names 'gone', which has no row in this plan",
    ),
    "a short list": (
        "plan", drop_an_entry, Config(num_blocks=9), END,
        "scheduled_cached_reqs.num_computed_tokens has 0 entries for 1 requests",
    ),
    "an output of an unknown request": (
        "answer", answer_an_unknown_request, Config(num_blocks=9), END[1:],
        "outputs names 'stranger', which is not in this frame",
    ),
    "two outputs of one request": (
        "answer", answer_twice, Config(num_blocks=9), END[1:], "outputs name 'B' 2 times",
    ),
    "a transfer without a connector": (
        "answer", transfer_something, Config(num_blocks=9), END[1:],
        "kv_transfer_params in the output of 'B': {'remote': 1}",
    ),
    "wrong statistics": (
        "answer", count_the_running, Config(num_blocks=9), END[1:],
        "num_running_reqs in this answer is 2, and the state says 1",
    ),
    "an event left out": (
        "answer", forget_an_event, Config(num_blocks=9), END,
        "events in the output of 'A' are ['QUEUED'], not ['QUEUED', 'SCHEDULED']",
    ),
    "a row with drafts too many": (
        "answer", count_the_drafts, TIGHT, PREEMPTION,
        "spec_decoding_stats.num_drafts in this answer is 2, and its rows have 1",
    ),
    "a prompt too long": (
        "answer", count_the_prompt, Config(num_blocks=9), END,
        "prefill_stats.num_prompt_tokens in the output of 'A' is 3, and it follows that it is 2",
    ),
    "a token published too many": (
        "answer", count_the_published, Config(num_blocks=9, block_size=1), END,
        "prefill_stats.num_cache_creation_tokens in the output of 'A' is 3, and it follows",
    ),
    "a prefill reported twice": (
        "answer", repeat_the_prefill, Config(num_blocks=9), END,
        "num_cache_creation_tokens=0), and it is not its first output",
    ),
    "a prefill that is not reported": (
        "answer", keep_the_prefill, Config(num_blocks=9), END,
        "prefill_stats in the output of 'A' is missing, and it is its first output",
    ),
    "a load without a store": (
        "answer", count_a_load, Config(num_blocks=9), END,
        "'in_progress': 1, 'completed_waiting': 0}, and it was {'waiting_to_start': 0, ",
    ),
}  # fmt: skip
"""Defects of a release, and the message of the adapter about each."""
FIRST = {
    "an end reported twice": "plan_names_the_finished",
    "an output of an unknown request": "delivered_rows_are_those_that_sampled",
    "two outputs of one request": "delivered_rows_are_those_that_sampled",
}
"""The check that some defects fail, which is reported before the adapter's message."""
IS_REPORTED = {
    "a prompt too long": RELEASE.has_prefill_stats,
    "a token published too many": RELEASE.has_sound_counters,
    "a prefill reported twice": RELEASE.has_sound_counters,
    "a prefill that is not reported": RELEASE.has_prefill_stats,
    "a load without a store": TRIED[-1] == VERSION,
}
"""Whether the release has the field of a defect, for fields of newer releases."""


@needs_vllm
@pytest.mark.parametrize("name", PLANTED)
def test_a_seeded_bug_is_found_by_its_field(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not IS_REPORTED.get(name, True):
        pytest.skip(f"vLLM {VERSION} does not report this field")
    when, change, config, actions, message = PLANTED[name]
    config_lacks_drafts = config.num_speculative_tokens and not has_capability("drafts")
    if config_lacks_drafts:
        pytest.skip(f"vLLM {VERSION} is given no drafts")
    findings = play(monkeypatch, {when: change}, config, *actions)
    (fault,) = [found for found in findings if found.kind is FindingKind.FAULT]
    assert message in fault.message
    assert findings[0].sentence == FIRST.get(name, fault.sentence)


@needs_vllm
@pytest.mark.parametrize("actions", [PREEMPTION, END], ids=["preemption", "end"])
def test_an_unchanged_release_has_no_finding(
    actions: tuple[Action, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if actions is PREEMPTION and not has_capability("drafts"):
        pytest.skip(f"vLLM {VERSION} is given no drafts")
    config = TIGHT if actions is PREEMPTION else Config(num_blocks=9)
    assert play(monkeypatch, {"plan": lambda _scheduler, _plan: None}, config, *actions) == []


@needs_vllm
def test_a_block_that_is_freed_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def free_again(scheduler: Any, plan: Any) -> None:
        pool = scheduler.kv_cache_manager.block_pool
        if plan.finished_req_ids:
            pool.free_block_queue.append(pool.free_block_queue.get_all_free_blocks()[0])

    (found, *_) = play(monkeypatch, {"plan": free_again}, Config(num_blocks=9), *END)
    assert found.kind is FindingKind.FAULT
    assert "blocks are queued, but" in found.message


@needs_vllm
def test_a_request_id_may_be_used_and_finished_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = (Submit(Request("A", (1, 2), max_tokens=1)), Schedule(), Answer(), Abort(("B",)))
    actions = (*END, *again, Schedule(), *again[:3], Schedule())
    nothing: dict[str, Change] = {"plan": lambda _scheduler, _plan: None}
    assert play(monkeypatch, nothing, Config(num_blocks=9), *actions) == []


@needs_vllm
def test_every_field_of_a_tried_release_is_known() -> None:
    if VERSION not in TRIED:
        pytest.skip(f"vLLM {VERSION} was not tried")
    assert importlib.import_module(f"{ADAPTERS}.vllm_unaccounted").NOTE is None


def has_capability(name: str) -> bool:
    """Whether the release that is installed has it."""
    return name in load_engine("vllm")(Config(num_blocks=9)).capabilities()
