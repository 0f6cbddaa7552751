"""Mistakes planted in the kernels' source: the check or the watched memory finds each one.

A check sees what the engine decides. A missing barrier or bound changes no decision on a CPU, so
only a memory that watches every access can find it.
"""

from __future__ import annotations

from functools import partial

import pytest
from benchmarks.barriers import Separating, list_barriers, separate

from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.impl.device import launch
from blockstep.impl.device.engine import DeviceEngine
from blockstep.kernels.numpied import Memory, Watched
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    Policy,
    Request,
    Reset,
    RowTokens,
    Schedule,
    Submit,
)

BARRIER = "    tl.debug_barrier()\n"
PLANTED: list[launch.Numpied] = []
"""The last one is used by the engine that is checked."""


def make_planted(config: Config) -> DeviceEngine:
    """Return an engine with the latest planted mistake."""
    return DeviceEngine(config, PLANTED[-1])


def plant(memory: Memory, module: str, old: str, new: str) -> None:
    """Replace one place in a kernel's source."""
    text = (launch.FOLDER / f"{module}.py").read_text()
    assert text.count(old) == 1, (module, old, text.count(old))
    PLANTED.append(launch.Numpied(memory, {module: text.replace(old, new)}))


play = partial(CheckOptions, f"{__name__}:make_planted", preset="small")

DECISIONS = {
    "blocks are freed first block first": (
        "pool", "(last - 1 - step)", "step",
        "freed_tail_is_evicted_first",
    ),
    "a hit stays in the free queue": (
        "pool", "tl.store(s.ring + place, NONE, mask=is_read & (refs == 0))", "touched += 0",
        "every_block_is_free_or_held",
    ),
    "a prompt that is all cached has nothing to run": (
        "prefix_cache", "limit = (known - 1) // d.size", "limit = known // d.size",
        "running_request_is_known",
    ),
    "an evicted block is still found": (
        "prefix_cache", "        tl.store(s.first_block + node, NONE, mask=is_alone)\n", "",
        "attended_slot_holds_the_right_prefix",
    ),
    "the first is preempted, not the last": (
        "running", "found = tl.load(s.run + (count - 1))", "found = tl.load(s.run + 0 * count)",
        "preempted_fcfs_are_the_youngest",
    ),
    "what a victim had in the step is lost": (
        "running", "        budget += tl.load(s.step_tokens + victim)\n", "",
        "tokens_of_a_preempted_row_are_given_back",
    ),
    "a preempted request waits behind all others": (
        "queues", "place = tl.load(s.front) - 1", "place = tl.load(s.front) + 1_000",
        "queues_keep_their_order",
    ),
    "no lookahead after the tokens of a step": (
        "running", " + tokens + d.num_lookahead", " + tokens",
        "row_gains_exactly_the_blocks_it_needs",
    ),
    "a request is admitted after a preemption": (
        "step", " & (tl.load(s.num_preempted) == 0)", "",
        "no_admission_after_a_preemption",
    ),
    "a drained budget is shared out once more": (
        "running", "tl.maximum(budget - before, 0), wanted)\n    needed",
        "tl.maximum(budget, 0), wanted)\n    needed",
        "engine_raises_nothing",  # its tokens go beyond the tensor of a plan
    ),
    "rejected drafts stay computed": (
        "results", "computed - drafts + counts - 1, mask", "computed, mask",
        "counters_stay_within_what_is_known",
    ),
    "a placeholder is replaced twice": (
        "results", "promised - 1 - drafts, mask=live", "promised - 2 - drafts, mask=live",
        "counters_stay_within_what_is_known",
    ),
    "the last sampled token is published before it has run": (
        "results", "full = (tl.load(s.known + slot, mask=live, other=0) - 1) // d.size",
        "full = tl.load(s.known + slot, mask=live, other=0) // d.size",
        "published_block_was_written",
    ),
    "a request that waits for its grammar is admitted": (
        "waiting", "((awaits == 0) | has_grammar)", "(slot >= 0)",
        "admissions_follow_the_policy",
    ),
}  # fmt: skip


SEEDS = {"what a victim had in the step is lost": 1}
"""Seeds for mistakes that the default seed finds only after thousands of events."""


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", DECISIONS)
def test_a_wrong_decision_is_found(name: str) -> None:
    module, old, new, sentence = DECISIONS[name]
    plant(Memory(), module, old, new)
    options = play(seed=SEEDS.get(name, 2), max_events=6_000, without_features=("groups",))
    first = check(options, shrinks=False).first
    assert first is not None
    assert first.sentence == sentence


GROUPED = {
    "a window is left while drafts in flight may be rejected": (
        "groups", " - tl.load(s.doubt + slot, mask=live, other=0)", "",
        "attended_blocks_are_held",
    ),
    "a block is left that the next token reads": (
        "pool", "tl.maximum(computed - window + 1, 0)", "tl.maximum(computed - window + 2, 0)",
        "engine_equals_spec",
    ),
    "a hit need not be there behind a window": (
        "prefix_cache", "goes = (length > 0).to(tl.int32)", "goes = (length < 0).to(tl.int32)",
        "engine_raises_nothing",  # a block that no node has lies outside of all tensors
    ),
    "a content is found in whichever group": (
        "prefix_cache",
        "link_listed(s, block, node + group * d.nodes", "link_listed(s, block, node",
        "published_block_is_of_the_group_that_reads_it",
    ),
    "blocks that are left are queued first block first": (
        "groups", "at = line * d.table + (last - 1 - index)", "at = line * d.table + first + index",
        "new_blocks_come_from_the_head_of_the_free_queue",
    ),
    "a window is charged the whole request": (
        "waiting", "tl.where(most > 0, tl.minimum(of_group, most), of_group)", "of_group",
        "head_of_the_queue_is_admitted_when_it_fits",
    ),
    "two requests leave one block side by side": (
        "running", " | (shared > 0)", "",
        "every_block_is_free_or_held",
    ),
    "all groups take the same blocks": (
        "groups", "        start += lacking\n", "",
        "written_block_is_in_one_place",
    ),
    "null blocks are freed": (
        "pool", "left = tl.load(s.left + line)", "left = 0 * tl.load(s.left + line)",
        "every_block_is_free_or_held",
    ),
}  # fmt: skip


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", GROUPED)
def test_a_wrong_decision_in_groups_is_found(name: str) -> None:
    module, old, new, sentence = GROUPED[name]
    plant(Memory(), module, old, new)
    features = ("groups", "async", "drafts") if "drafts" in name else ("groups",)
    options = play(seed=2, max_events=6_000, with_features=features)
    first = check(options, shrinks=False).first
    assert first is not None
    assert first.sentence == sentence


def play_some(run: launch.Numpied) -> None:
    """Run hits, evictions, preemptions and a reset with both policies; shorter than a check."""
    for policy in (Policy.FCFS, Policy.PRIORITY):
        config = Config(
            num_blocks=6, block_size=2, max_num_seqs=3, max_num_batched_tokens=6, policy=policy
        )
        engine = DeviceEngine(config, run)
        for number, name in enumerate("abcd"):
            request = Request(name, (1, 2, 3, 4), max_tokens=4, priority=number % 2)
            engine.apply(Submit(request))
        for frame_id in range(20):
            engine.apply(Schedule())
            if frame_id == 9:
                engine.apply(Submit(Request("e", (1, 2, 3, 5), max_tokens=3)))
            frame = engine.frames.get(frame_id)
            if frame is not None:
                rows = frame.rows.items()
                answers = (RowTokens(name, () if x is None else (7,)) for name, x in rows)
                engine.apply(Commit(frame_id, tuple(answers)))
            if frame_id == 12:
                engine.apply(Reset(reset_running_requests=True))
        assert engine.stats().preemptions
        assert engine.stats().prefix_cache_hits


UNORDERED = {
    "taken blocks are read before they are seen": (
        "pool", "    tl.store(s.num_free, free - count)\n" + BARRIER,
        "STORE-LOAD pop_free",
    ),
    "blocks are taken while others look where the queue starts": (
        "pool", BARRIER + "    got = 0\n", "LOAD-STORE pop_free",
    ),
    "running order is closed up while others read it": (
        "queues", BARRIER + "    stays", "LOAD-STORE leave_running",
    ),
    "a victim is noted while others count the victims": (
        "running", BARRIER.replace("    ", "        ", 1) + "        tl.store(s.victims",
        "LOAD-STORE make_room",
    ),
    "a request gets blocks before others see that it holds its hits": (
        "waiting", BARRIER + "    group = 0\n    while group < d.groups:\n        take_blocks",
        "STORE-LOAD admit",
    ),
    "tokens are counted before they are seen": (
        "results", "    tl.store(s.known + slot, known, mask=live)\n" + BARRIER,
        "STORE-LOAD store_tokens",
    ),
}  # fmt: skip


def test_no_barrier_is_missing_in_unchanged_kernels() -> None:
    memory = Watched()
    play_some(launch.Numpied(memory))
    assert memory.findings == []


def test_removing_a_barrier_that_alone_orders_a_pair_is_found() -> None:
    memory = Separating()
    play_some(launch.Numpied(memory))
    assert memory.findings == []
    assert set(memory.needed) <= set(memory.passed)
    assert set(memory.needed) <= set(list_barriers())
    for barrier, pair in [*memory.needed.items()][::16]:
        module, line = barrier.split()[0], int(barrier.rsplit(":", 1)[1])
        lines = (launch.FOLDER / f"{module}.py").read_text().splitlines()
        lines[line - 1] = lines[line - 1].replace("tl.debug_barrier()", "pass")
        watched = Watched()
        play_some(launch.Numpied(watched, {module: "\n".join(lines)}))
        assert pair in watched.findings, barrier


@pytest.mark.soak
def test_every_barrier_is_needed() -> None:
    """Each barrier is the only one that orders some pair of accesses.

    `separate` raises if all barriers together leave a pair without an order.
    """
    assert set(separate(4_000).needed) == set(list_barriers())


@pytest.mark.parametrize(("module", "old", "finding"), UNORDERED.values(), ids=UNORDERED.keys())
def test_a_missing_barrier_is_found(module: str, old: str, finding: str) -> None:
    """All decisions stay right, so only the watched memory can find it."""
    memory = Watched()
    plant(memory, module, old, old.replace("tl.debug_barrier()", "pass"))
    play_some(PLANTED[-1])
    assert any(finding in found for found in memory.findings)


OUTSIDE = {
    "lanes behind the last position": (
        "results", "tl.load(s.answer_counts + answer, mask=in_frame, other=0)",
        "tl.load(s.answer_counts + answer + 1)",
    ),
    "a place of the ring without its remainder": (
        "pool", "(tail + tl.cumsum(is_freed, 0) - is_freed) & (d.ring - 1)",
        "tail + tl.cumsum(is_freed, 0) - is_freed",
    ),
    "the block of a node that has none": (
        "prefix_cache", "tl.store(s.first_block + node, NONE, mask=is_alone)",
        "tl.store(s.first_block + node, NONE, mask=others == 0)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new"), OUTSIDE.values(), ids=OUTSIDE.keys())
def test_an_access_out_of_bounds_is_found(module: str, old: str, new: str) -> None:
    plant(Memory(), module, old, new)
    first = check(play(seed=2, max_events=300), shrinks=False).first
    assert first is not None
    assert first.sentence == "engine_raises_nothing"
    assert "OUT-OF-BOUNDS" in first.message
