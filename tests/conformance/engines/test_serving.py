"""The serving checker: it finds nothing in a right engine, and it finds each seeded bug."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_support.models import MAX_TOKENS, Checkpoint, make_checkpoint, make_prompts
from engine_support.storms import STORMS

from blockstep.conformance.engines.serving import CheckFailedError, ServingChecker
from blockstep.conformance.report.failure import render_served
from blockstep.impl.engine import LLM, SamplingParams
from blockstep.impl.engine.input_batch import Batch, BatchRow
from blockstep.impl.engine.model import Inputs
from blockstep.impl.engine.runner import Runner
from blockstep.impl.engine.schedulers import Scheduler
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import CachedRow, Event, Observation, Plan, SpecMethod

PARAMS = SamplingParams(max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def serve(checkpoint: Checkpoint, name: str, num_prompts: int = 64) -> LLM:
    settings = STORMS[name].get_settings(checkpoint.family)
    if settings.get("spec_method") is SpecMethod.DRAFT_MODEL:
        settings["draft_model"] = checkpoint.draft_folder
    llm = LLM(checkpoint.folder, check=ServingChecker, **settings)
    made = llm.generate(make_prompts()[:num_prompts], PARAMS)
    assert [one.token_ids for one in made] == checkpoint.expected.token_ids[:num_prompts]
    return llm


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A layer with a window, and one without: two KV groups."""
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


SLOWEST = "async-draft-model"
"""It runs in `make soak` only: `async` and `draft-model` are storms of their own."""


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name == SLOWEST)) for name in STORMS]
)
def test_a_right_engine_has_no_finding(checkpoint: Checkpoint, name: str) -> None:
    llm = serve(checkpoint, name)
    assert STORMS[name].get_missing(llm.get_stats()) == []
    checker = llm.observer
    assert isinstance(checker, ServingChecker)
    counts = checker.counts()
    assert min(counts.values()) > 10
    assert f"{counts['num_slots_read']:,} read as tagged" in checker.describe()


@pytest.mark.parametrize(
    ("name", "num_prompts"),
    [
        ("async-ngram", 16),
        ("draft-model", 8),
        *(pytest.param(name, 64, marks=pytest.mark.soak) for name in STORMS),
    ],
)
def test_a_right_engine_with_windows_has_no_finding(
    windows: Checkpoint, name: str, num_prompts: int
) -> None:
    llm = serve(windows, name, num_prompts)
    assert len(llm.config.groups) == 2
    checker = llm.observer
    assert isinstance(checker, ServingChecker)
    counts = checker.counts()
    # Each token is written in both groups, and read in one of them within its window only.
    assert counts["num_slots_written"] % 2 == 0
    assert llm.get_stats().preemptions > 0 or num_prompts == 64


# Seeded bugs. Each changes what one part does; the plan and the specification stay.

Build: Any = Batch.build_inputs
Change = Callable[[Inputs, Sequence[BatchRow]], Inputs]


def plant_inputs(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    def build(self: Batch, rows: Any, first: Any, end: Any) -> Inputs:
        return change(Build(self, rows, first, end), rows)

    monkeypatch.setattr(Batch, "build_inputs", build)


def shift_slots(inputs: Inputs, rows: Sequence[BatchRow]) -> Inputs:
    return replace(inputs, slot_mapping=inputs.slot_mapping + 1)


def shift_one_slot(inputs: Inputs, rows: Sequence[BatchRow]) -> Inputs:
    slots = inputs.slot_mapping.clone()
    slots[:, -1] -= 1
    return replace(inputs, slot_mapping=slots)


def forget_to_write(inputs: Inputs, rows: Sequence[BatchRow]) -> Inputs:
    slots = inputs.slot_mapping.clone()
    slots[:, 0] = -1
    return replace(inputs, slot_mapping=slots)


def swap_tables(inputs: Inputs, rows: Sequence[BatchRow]) -> Inputs:
    return replace(inputs, block_tables=inputs.block_tables.flip(1))


def read_too_far(inputs: Inputs, rows: Sequence[BatchRow]) -> Inputs:
    size = inputs.block_tables.shape[2] * 4
    return replace(inputs, seq_lens=(inputs.seq_lens + 1).clamp(max=size))


def run_another_token(inputs: Inputs, rows: Sequence[BatchRow]) -> Inputs:
    tokens = inputs.token_ids.clone()
    tokens[-1] ^= 1
    return replace(inputs, token_ids=tokens)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (shift_slots, "token_is_written_to_its_slot"),
        (shift_one_slot, "token_is_written_to_its_slot"),
        (forget_to_write, "token_is_written_to_its_slot"),
        (swap_tables, "attended_slot"),
        (read_too_far, "pass_runs_the_rows_of_the_plan"),
        (run_another_token, "model_runs_the_tokens_of_the_plan"),
    ],
)
def test_a_bug_in_the_model_inputs_is_found(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, change: Change, sentence: str
) -> None:
    plant_inputs(monkeypatch, change)
    with pytest.raises(CheckFailedError, match=sentence) as caught:
        serve(checkpoint, "small-pool", 8)
    report = render_served(caught.value.findings, caught.value.num_events)
    assert "blockstep generate: VIOLATION at event" in report
    assert sentence in report


def swap_the_tables_of_groups(inputs: Inputs, rows: Sequence[BatchRow]) -> Inputs:
    return replace(inputs, block_tables=inputs.block_tables.flip(0))


def swap_the_slots_of_groups(inputs: Inputs, rows: Sequence[BatchRow]) -> Inputs:
    return replace(inputs, slot_mapping=inputs.slot_mapping.flip(0))


def write_one_group(inputs: Inputs, rows: Sequence[BatchRow]) -> Inputs:
    slots = inputs.slot_mapping.clone()
    slots[1] = -1
    return replace(inputs, slot_mapping=slots)


def null_what_a_window_left(inputs: Inputs, num_more: int) -> Inputs:
    """Replace the blocks before the window of the first token, and more, by null blocks."""
    tables, size = inputs.block_tables.clone(), 4
    counts = inputs.query_start_loc.diff()
    for row, first in enumerate((inputs.seq_lens - counts).tolist()):
        tables[1, row, : max(first - 6, 0) // size + num_more] = 0
    return replace(inputs, block_tables=tables)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (swap_the_tables_of_groups, "attended_slot_is_of_the_group_that_reads_it"),
        (swap_the_slots_of_groups, "token_is_written_to_its_slot"),
        (write_one_group, "token_is_written_to_its_slot"),
        (lambda inputs, _: null_what_a_window_left(inputs, 1), "attended_slot_was_written"),
    ],
)
def test_a_bug_in_tables_or_slots_of_kv_groups_is_found(
    windows: Checkpoint, monkeypatch: pytest.MonkeyPatch, change: Change, sentence: str
) -> None:
    plant_inputs(monkeypatch, change)
    with pytest.raises(CheckFailedError, match=sentence):
        serve(windows, "small-pool", 8)


def test_null_blocks_outside_the_window_are_no_finding(
    windows: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that a window has left may be replaced by any block."""
    plant_inputs(monkeypatch, lambda inputs, _: null_what_a_window_left(inputs, 0))
    serve(windows, "small-pool", 8)


def test_a_draft_model_that_skips_its_prompt_is_found(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model runs only the last token of a step, and never fills its own prompt KV."""
    propose = "blockstep.impl.engine.speculation.DraftModelProposer.propose"
    module = __import__("blockstep.impl.engine.speculation", fromlist=["DraftModelProposer"])
    original = module.DraftModelProposer.propose

    def lazy(self: Any, batch: Batch, step: Any, on_pass: Any) -> None:
        late = [replace(row, first=max(row.first, row.end - 1)) for row in step]
        original(self, batch, late, on_pass)

    monkeypatch.setattr(propose, lazy)
    with pytest.raises(CheckFailedError, match=r"P4 attended_slot_was_written"):
        serve(checkpoint, "draft-model", 8)


def test_a_stale_block_table_is_found(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed request keeps the block table that it had before it was preempted."""
    start: Any = Batch._start_cached

    def stale(self: Batch, cached: CachedRow) -> Any:
        row = self.rows[cached.request_id]
        before = self.arrays.block_tables[:, row.index].copy()
        made = start(self, cached)
        if cached.resumed:
            self.arrays.block_tables[:, row.index] = before
        return made

    monkeypatch.setattr(Batch, "_start_cached", stale)
    with pytest.raises(CheckFailedError, match=r"token_is_written_to_its_slot|attended_slot"):
        serve(checkpoint, "small-pool")


def test_rejected_drafts_that_stay_computed_are_found(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept: Any = Runner._accept

    def keep(self: Runner, scheduled: Any, tokens: list[int]) -> None:
        computed = scheduled.row.num_computed
        accept(self, scheduled, tokens)
        scheduled.row.num_computed = computed

    monkeypatch.setattr(Runner, "_accept", keep)
    with pytest.raises(CheckFailedError, match="pass_runs_the_rows_of_the_plan"):
        serve(checkpoint, "ngram")


def test_a_bug_in_the_scheduler_is_found(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply: Any = HostEngine.apply

    def hide(self: Scheduler, event: Event) -> Observation:
        seen = apply(self, event)
        return replace(seen, preempted_req_ids=()) if isinstance(seen, Plan) else seen

    monkeypatch.setattr(HostEngine, "apply", hide)
    with pytest.raises(CheckFailedError, match="preempted_req_ids") as caught:
        serve(checkpoint, "small-pool")
    assert {str(finding.kind) for finding in caught.value.findings} >= {"divergence"}


def test_an_abort_of_the_client_is_checked(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint.folder, check=ServingChecker, max_frames_in_flight=2)
    checker = llm.observer
    assert isinstance(checker, ServingChecker)
    names = [llm.add_request(prompt, PARAMS) for prompt in make_prompts()[:4]]
    llm.step()
    assert len(checker.snapshot().requests) == 4
    llm.abort(names[0])
    assert len(checker.snapshot().requests) == 3
    while llm.has_unfinished_requests:
        llm.step()
    made = [llm.pop_completion(name).token_ids for name in names[1:]]
    assert made == checkpoint.expected.token_ids[1:4]


def test_stop_strings_end_requests_under_check(tmp_path: Path) -> None:
    from engine_support.models import build_model, save_model, save_tokenizer

    folder = save_model(build_model("qwen3", vocab_size=260), tmp_path)
    save_tokenizer(folder)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=2, ignore_eos=True)
    (whole,) = LLM(folder).generate("abc", params)
    stop = whole.text[5:7]
    llm = LLM(folder, check=ServingChecker, max_frames_in_flight=2)
    (cut,) = llm.generate("abc", replace(params, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
