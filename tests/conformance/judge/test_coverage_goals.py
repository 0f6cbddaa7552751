"""Coverage goals: each is counted where a run reaches it, and missing ones are listed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from groups_support import chunks, full, recurrent, window

from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.draw.presets import SMALL
from blockstep.conformance.draw.swarms import draw_swarm
from blockstep.conformance.judge.coverage_goals import WITNESSES, situations
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.protocol.feature_selection import FeatureSelection
from blockstep.conformance.protocol.token_function import token_function
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.verdict_requirements import (
    EngineFacts,
    missing_goals,
    required_goals,
)
from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v

CONFIG = v.Config(num_blocks=9, block_size=2, max_num_seqs=3, max_model_len=16)
A = v.Request("A", (1, 2, 3, 4, 5), max_tokens=2)


class Watched:
    """A correct engine whose coverage goals are counted."""

    def __init__(self, config: v.Config = CONFIG) -> None:
        self.config = config
        self.engine = HostEngine(config)
        self.worker = Worker(config, token_function(1, 3))
        self.history = History(config)
        self.counts: Counter[str] = Counter()
        self.before = self.engine.snapshot()
        self.client = Client()

    def do(self, *events: v.Event) -> Watched:
        for event in events:
            observation = self.engine.apply(event)
            after = self.engine.snapshot()
            assert self.worker.observe(event, observation) == []
            self.client.follow(event, observation)
            step = Step(self.config, 0, event, observation, self.before, after)
            self.counts.update(situations(step, self.history))
            self.history.record(step)
            self.before = after
        return self

    def commit(self) -> Watched:
        frame_id = self.plans[0].frame_id
        return self.do(v.Commit(frame_id, self.worker.answer(frame_id)))

    def propose(self, name: str, count: int, num_right: int) -> Watched:
        return self.do(v.Drafts((v.RowTokens(name, self.worker.propose(name, count, num_right)),)))

    @property
    def plans(self) -> list[v.Plan]:
        return self.client.plans


def test_each_goal_has_a_description() -> None:
    for name, meaning in WITNESSES.items():
        assert name.replace("_", "").isalnum()
        assert meaning
        assert not meaning.endswith(".")


def test_a_hit_on_freed_blocks_is_counted() -> None:
    watched = Watched().do(v.Submit(A), v.Schedule()).commit().do(v.Schedule()).commit()
    assert watched.counts["stop_length"] == 1
    watched.do(v.Submit(replace(A, request_id="B")), v.Schedule())
    assert watched.counts["prefix_hit"] == 1
    assert watched.counts["hit_on_freed_block"] == 2
    assert watched.counts["admitted"] == 2


def test_salts_and_adapters_keep_equal_tokens_apart() -> None:
    other = replace(A, request_id="B", cache_salt="x")
    watched = Watched().do(v.Submit(A), v.Submit(other), v.Schedule())
    assert watched.counts["same_tokens_other_salt"] == 2, "each was admitted while the other ran"
    assert watched.counts["same_tokens_other_adapter"] == 0
    assert watched.counts["prefix_hit"] == 0


def test_a_full_prompt_hit_leaves_the_last_block() -> None:
    even = v.Request("A", (1, 2, 3, 4), max_tokens=1)
    watched = Watched().do(v.Submit(even), v.Schedule()).commit()
    watched.do(v.Submit(replace(even, request_id="B")), v.Schedule())
    assert watched.counts["full_prompt_hit_recomputes_last_block"] == 1


@pytest.mark.parametrize(
    ("num_right", "name"),
    [(0, "drafts_none_accepted"), (1, "drafts_some_accepted"), (2, "drafts_all_accepted")],
)
def test_accepted_drafts_are_counted_as_none_some_or_all(num_right: int, name: str) -> None:
    config = replace(CONFIG, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2)
    watched = Watched(config).do(v.Submit(replace(A, max_tokens=9)), v.Schedule()).commit()
    watched.propose("A", 2, num_right).do(v.Schedule()).commit()
    kinds = ("drafts_none_accepted", "drafts_some_accepted", "drafts_all_accepted")
    assert [watched.counts[kind] for kind in kinds] == [kind == name for kind in kinds]
    assert watched.counts["drafts_taken"] == watched.counts["drafts_scheduled"] == 1


def test_preemption_and_resumption_are_counted() -> None:
    config = replace(CONFIG, num_blocks=7, max_model_len=10, scheduler_reserve_full_isl=False)
    watched = Watched(config)
    for index in range(2):
        prompt = tuple(range(10 * index, 10 * index + 4))
        watched.do(v.Submit(v.Request("AB"[index], prompt, max_tokens=5)))
    for _ in range(9):
        watched.do(v.Schedule())
        if watched.plans:
            watched.commit()
    counts = watched.counts
    assert counts["preempted"] == counts["preempted_then_resumed"] == 1
    assert counts["pool_exactly_full"] >= 1
    assert counts["self_preempted"] == counts["priority_victim_already_scheduled"] == 0


def test_aborts_are_counted_by_the_status_of_the_request() -> None:
    watched = Watched().do(v.Submit(A), v.Abort(("A", "nobody")))
    watched.do(v.Submit(A), v.Schedule(), v.Abort(("A",))).commit()
    watched.do(v.Submit(replace(A, request_id="B")), v.Schedule()).commit().do(v.Abort(("B",)))
    names = ("abort_waiting", "abort_unknown", "abort_in_flight", "abort_running")
    assert [watched.counts[name] for name in names] == [1, 1, 1, 1]
    assert watched.counts["commit_for_aborted"] == 1
    assert watched.counts["id_used_again"] == 1


def test_resets_are_counted_by_their_outcome() -> None:
    watched = Watched().do(v.Submit(A), v.Schedule(), v.Reset(), v.Reset(True)).commit()
    names = ("reset_refused", "reset_forced", "reset_forced_in_flight", "commit_for_preempted")
    assert [watched.counts[name] for name in names] == [1, 1, 1, 1]
    watched.do(v.Abort(("A",)), v.Submit(replace(A, request_id="B", max_tokens=1)), v.Schedule())
    watched.commit().do(v.Reset())
    assert watched.counts["reset_done"] == 1


AHEAD = replace(CONFIG, max_frames_in_flight=4, async_scheduling=True)
LONG = replace(A, max_tokens=6)


def test_frames_in_flight_are_counted() -> None:
    watched = Watched(AHEAD).do(v.Submit(LONG), *[v.Schedule()] * 5)
    assert watched.counts["several_frames_in_flight"] == 3
    assert watched.counts["four_frames_in_flight"] == 1
    assert watched.counts["planned_before_its_token"] == 3
    assert watched.counts["rejected_pipeline_full_async"] == 1
    newest = watched.plans[-1].frame_id
    watched.do(v.Commit(newest, watched.worker.answer(newest)))
    assert watched.counts["rejected_frame_out_of_order"] == 1


def test_chunks_of_one_prompt_may_be_in_flight_together() -> None:
    watched = Watched(replace(AHEAD, max_num_batched_tokens=2)).do(v.Submit(A), *[v.Schedule()] * 3)
    assert watched.counts["chunks_in_two_frames"] == 2
    assert watched.counts["planned_before_its_token"] == 0


def test_a_request_with_its_last_token_in_flight_is_left_out() -> None:
    watched = Watched(AHEAD).do(v.Submit(A), v.Schedule(), v.Schedule()).commit().do(v.Schedule())
    assert watched.counts["skip_ahead"] == 1
    watched.commit()
    assert watched.counts["published_by_the_last_commit"] == 1
    assert watched.counts["published_by_commit"] == 0


def test_blocks_published_by_a_commit_are_counted() -> None:
    watched = Watched(AHEAD).do(v.Submit(LONG), v.Schedule(), v.Schedule(), v.Schedule())
    watched.commit().commit()
    assert watched.counts["published_by_commit"] == 1


def test_the_row_of_a_stopped_request_is_not_counted_as_aborted() -> None:
    watched = Watched(AHEAD).do(v.Submit(A), v.Schedule(), v.Schedule(), v.Schedule())
    watched.commit().commit().commit()
    assert watched.counts["row_of_an_ended_request_ignored"] == 1
    assert watched.counts["commit_for_aborted"] == 0
    watched.do(v.Submit(LONG), v.Schedule(), v.Schedule(), v.Abort(("A",))).commit().commit()
    assert watched.counts["row_of_an_ended_request_ignored"] == 1
    assert watched.counts["commit_for_aborted"] == 2
    assert watched.counts["abort_with_two_frames_in_flight"] == 1


def test_placeholders_for_drafts_are_counted() -> None:
    config = replace(AHEAD, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2)
    watched = Watched(config).do(v.Submit(replace(LONG, max_tokens=9)), v.Schedule(), v.Schedule())
    assert watched.counts["draft_placeholders_scheduled"] == 1
    watched.do(v.Schedule()).commit().commit()
    assert watched.counts["rollback_with_frames_behind"] == 1
    watched.do(v.SetPause(v.PauseState.PAUSED_ALL), v.Schedule())
    assert watched.counts["draft_placeholders_dropped"] == 1


def test_a_request_preempted_in_flight_is_counted_until_it_is_resumed() -> None:
    config = replace(AHEAD, num_blocks=7, max_model_len=10, scheduler_reserve_full_isl=False)
    watched = Watched(config)
    for name, first in (("A", 0), ("B", 10)):
        prompt = tuple(range(first, first + 4))
        watched.do(v.Submit(v.Request(name, prompt, max_tokens=5)))
    watched.do(v.Schedule(), v.Schedule(), v.Schedule()).commit().do(v.Schedule())
    counts = watched.counts
    assert counts["preempted_in_flight"] == counts["preempted"] == 1
    watched.do(v.Submit(v.Request("C", (7,), max_tokens=1)), v.Schedule())
    assert counts["passed_over_for_its_tokens"] == counts["admitted_past_a_stale_one"] == 1
    for _ in range(20):
        if not counts["resumed_after_stale_tokens"] and watched.history.lives:
            watched.commit().do(v.Schedule())
    assert counts["stale_tokens_delivered"] == 2
    assert counts["resumed_after_stale_tokens"] == 1
    assert counts["commit_for_preempted"] == counts["all_preempted_in_flight"] == 0


def test_a_request_that_preempts_itself_may_finish_by_a_token_in_flight() -> None:
    config = replace(AHEAD, num_blocks=4)
    watched = Watched(config).do(v.Submit(A), v.Schedule(), v.Schedule(), v.Schedule())
    assert watched.counts["all_preempted_in_flight"] == 1
    watched.commit().commit()
    assert watched.counts["ended_while_stale"] == 1
    assert watched.counts["ended_while_preempted"] == 0


def test_resets_in_flight_are_distinguished_from_preemption() -> None:
    watched = Watched(AHEAD).do(v.Submit(LONG), v.Schedule(), v.Schedule(), v.Reset(True)).commit()
    assert watched.counts["reset_forced_with_two_frames_in_flight"] == 1
    assert watched.counts["commit_for_preempted"] == 1
    assert watched.counts["stale_tokens_delivered"] == 0
    watched.do(v.Abort(("A",)))
    assert watched.counts["abort_stale"] == 1


def test_goals_of_drafts_are_not_required_without_drafts() -> None:
    options = CheckOptions(with_features=("forks", "masks", "tiers", "groups"))
    required, full = (set(required_goals(options, lacking)) for lacking in (("drafts",), ()))
    assert not [name for name in required if "draft" in name]
    assert full - required >= {"rejected_bad_drafts", "groups_block_in_doubt", "head_drop"}
    assert "forks_named_what_is_full" in full - required  # a commit has accepted what fills it


def test_goals_of_several_frames_are_required_only_with_several() -> None:
    deep = set(required_goals(CheckOptions()))
    sync, three = (set(required_goals(CheckOptions(max_depth=depth))) for depth in (1, 3))
    assert {"skip_ahead", "rejected_frame_out_of_order"} <= deep - sync
    assert deep - three == {"four_frames_in_flight"}
    assert sync < deep


@pytest.mark.parametrize("feature", ["transfers", "pins"])
def test_goals_of_forks_are_not_required_where_no_request_may_fork(feature: str) -> None:
    required = required_goals(CheckOptions(with_features=(feature,)))
    assert not [name for name in required if "fork" in name]


@pytest.mark.parametrize(
    "options",
    [
        CheckOptions(with_features=("tiers", "forks")),
        CheckOptions(with_features=("tiers",), without_features=("transfers",)),
    ],
    ids=["forks", "no store"],
)
def test_goals_of_swap_out_are_not_required_without_a_store(options: CheckOptions) -> None:
    required = required_goals(options)
    assert not [name for name in required if "saved" in name or "victim_comes" in name]
    assert "tiers_closed_by_low" in required


def test_goals_of_masks_behind_frames_are_not_required_without_async() -> None:
    assert "masks_flag_of_frames_behind" in required_goals(CheckOptions())
    assert "masks_flag_of_frames_behind" not in required_goals(CheckOptions(), ("async",))


def test_goals_of_features_that_exclude_the_wished_one_are_not_required() -> None:
    goals = required_goals(CheckOptions(with_features=("states",)))
    assert not [name for name in goals if name.startswith(("transfers_", "forks_", "tiers_"))]
    both = required_goals(CheckOptions(with_features=("states", "transfers")))
    assert "transfers_state_loaded" in both
    swarms = [
        draw_swarm(
            SMALL, SeededDraw(f"kinds/{index}"), wish=FeatureSelection(frozenset({"states"}))
        )
        for index in range(40)
    ]
    assert not any(swarm.config.kv_connector or swarm.config.enable_forks for swarm in swarms)


def test_goals_of_deferred_transfers_are_not_required_with_one_frame() -> None:
    options = CheckOptions(with_features=("transfers", "tiers"))
    required, full = (
        set(required_goals(options, lacking)) for lacking in (("async", "pipeline", "groups"), ())
    )
    assert full - required >= {
        *("transfers_deferred_by_an_end", "transfers_deferred_until_now"),
        *("transfers_deferred_by_a_reset", "transfers_deferred_by_a_window"),
        "transfers_waits_for_an_answer",
        *("tiers_saved_beside_frames", "tiers_saved_behind_a_window"),
    }


def test_rejections_are_counted_by_code() -> None:
    watched = Watched().do(v.Submit(A), v.Submit(A))
    assert watched.counts == {"rejected_duplicate_request": 1}


def test_a_rejected_commit_frees_no_blocks_that_wait_for_it() -> None:
    config = replace(CONFIG, max_frames_in_flight=2, kv_connector=True)
    watched = Watched(config).do(v.Submit(A), v.Schedule(), v.Abort(("A",)))
    assert watched.counts["transfers_deferred_by_an_end"] == 1
    watched.do(v.Commit(watched.plans[0].frame_id, ()))
    assert watched.counts["rejected_bad_result"] == 1
    assert watched.counts["transfers_deferred_until_now"] == 0
    assert watched.commit().counts["transfers_deferred_until_now"] == 1


FACTS = EngineFacts(4, (), "exact", (), None, frozenset())
"""Facts of an engine that has all capabilities."""


def test_missing_goals_are_listed() -> None:
    options = CheckOptions()
    assert missing_goals({}, options, FACTS) == required_goals(options)
    assert missing_goals(dict.fromkeys(WITNESSES, 1), options, FACTS) == ()
    counts = {name: 1 for name in WITNESSES if name != "preempted"}
    assert missing_goals(counts, options, FACTS) == ("preempted",)
    assert (
        missing_goals(counts, options, replace(FACTS, out_of_reach=frozenset({"preempted"}))) == ()
    )
    weaker = replace(FACTS, equivalence="safety", situations=("admitted", "preempted"))
    assert missing_goals(counts, options, weaker) == ("preempted",)


def required(*lacking: str, **fields: Any) -> set[str]:
    return set(required_goals(CheckOptions(**fields), lacking))


def test_goals_that_the_options_rule_out_are_not_required() -> None:
    both = required()
    urgent = {
        "admission_overtakes",
        "priority_victim_already_scheduled",
        "priority_victim_not_last",
    }
    kept = {name for name in both if name.startswith("pins_")}
    assert both - required(policy=v.Policy.FCFS) == urgent | kept
    assert both - required(without_features=("priority",)) == urgent
    assert both - required(policy=v.Policy.PRIORITY) == kept
    assert required(preset="real") < both


def test_goals_of_missing_or_excluded_features_are_not_required() -> None:
    both = required()
    pause = {"paused_new", "paused_all"}
    assert both - required("pause") == both - required(without_features=("pause",)) == pause
    waits = {name for name in both if name.startswith("pipeline_")}
    assert both - required("pipeline") == waits
    assert "several_frames_in_flight" in required("pipeline")
    assert "skip_ahead" not in required("async")
    assert "several_frames_in_flight" in required("async")
    assert required("async", "pipeline") == required(max_depth=1)


def test_a_goal_of_several_features_is_required_if_the_run_has_one_of_them() -> None:
    """With one frame in flight, no pause and no grammar, each running request gets a row."""
    alone = ("async", "pipeline")
    for name, others in (
        ("empty_plan_with_work", ("pause", "grammar")),
        ("running_left_out_by_budget", ("drafts",)),
    ):
        assert name not in required(*alone, *others)
        assert all(name in required(*alone[:1], *others[:count]) for count in range(3))
        assert name in required(*alone, *others[1:])
        assert name in required(*others)


GROUPED = v.Config(num_blocks=30, block_size=2, max_model_len=16, max_num_batched_tokens=4)
NINE = v.Request("A", tuple(range(9)), max_tokens=2)


def play_groups(config: v.Config, *groups: v.KVGroup) -> Watched:
    """Run a request of nine tokens from its first chunk to its end."""
    watched = Watched(replace(config, groups=groups)).do(v.Submit(NINE))
    while watched.client.live:
        watched.do(v.Schedule()).commit()
    return watched


def count_groups(watched: Watched) -> dict[str, int]:
    """Return the counts of the goals of KV groups."""
    return {name: n for name, n in watched.counts.items() if name.startswith("groups_")}


def test_skipped_blocks_are_counted_by_kind_of_group() -> None:
    # Before positions 4, 8 and 9 the window begins at 2, 6 and 7; the chunks at 4, 8 and 8.
    assert count_groups(play_groups(GROUPED, window(2, 3))) == {
        "groups_window_slid": 2,
        "groups_ended_with_nulls": 1,
    }
    assert count_groups(play_groups(GROUPED, full(2), chunks(2, 4))) == {
        "groups_chunk_left": 2,
        "groups_ended_with_nulls": 1,
    }
    assert count_groups(play_groups(GROUPED, full(2))) == {}
    assert count_groups(play_groups(GROUPED, window(2, 16), full(4))) == {
        "groups_larger_block_filled": 2
    }


def test_a_hit_in_several_groups_is_counted_apart_from_one_that_is_cut() -> None:
    again = v.Submit(replace(NINE, request_id="B"))
    watched = play_groups(GROUPED, full(2), window(2, 3))
    before = Counter(count_groups(watched))
    watched.do(again, v.Schedule())
    assert Counter(count_groups(watched)) - before == {
        "groups_hit_behind_nulls": 1,
        "groups_hit_in_several": 1,
        "groups_free_hit_beside_new_blocks": 2,
    }
    # The window freed its skipped blocks: for a shorter prompt only full attention has a hit.
    watched = play_groups(replace(GROUPED, num_blocks=15), full(2), window(2, 3))
    before = Counter(count_groups(watched))
    other = v.Request("B", tuple(range(20, 29)), max_tokens=1)
    watched.do(v.Submit(other))
    while watched.client.live:
        watched.do(v.Schedule()).commit()
    watched.do(v.Submit(v.Request("C", tuple(range(5)), max_tokens=1)), v.Schedule())
    after = Counter(count_groups(watched)) - before
    assert after["groups_hit_cut_by_a_window"] == 1
    assert after["groups_hit_cut_by_full_attention"] == 0
    assert watched.counts["prefix_hit"] == 0
    assert after["groups_evicted_by_another"] > 0


def test_states_after_a_chunk_and_hits_of_states_are_counted() -> None:
    watched = play_groups(GROUPED, full(2), recurrent(2))
    before = Counter(count_groups(watched))
    assert before["groups_state_left"] > 0
    assert before["groups_window_slid"] == before["groups_hit_of_a_state"] == 0
    watched.do(v.Submit(replace(NINE, request_id="B")), v.Schedule())
    assert (Counter(count_groups(watched)) - before)["groups_hit_of_a_state"] == 1


def test_three_kinds_of_groups_are_counted_apart_from_two() -> None:
    assert "groups_of_three_kinds" not in count_groups(play_groups(GROUPED, full(2), window(2, 3)))
    watched = play_groups(GROUPED, full(2), window(2, 3), chunks(2, 4))
    assert watched.counts["groups_of_three_kinds"] == 4


def test_a_block_kept_only_for_unverified_drafts_is_counted() -> None:
    config = replace(
        GROUPED,
        max_num_batched_tokens=9,
        max_frames_in_flight=2,
        async_scheduling=True,
        spec_method=v.SpecMethod.NGRAM,
        num_speculative_tokens=3,
        groups=(window(2, 2),),
    )
    watched = Watched(config)
    watched.worker.acceptance = (3,)
    watched.do(v.Submit(replace(NINE, prompt_token_ids=(1, 2, 3, 4), max_tokens=9)), v.Schedule())
    assert watched.counts["groups_block_in_doubt"] == 0
    watched.do(v.Schedule()).commit().do(v.Schedule())
    assert watched.counts["groups_block_in_doubt"] == 1


def test_an_admission_that_never_fits_at_once_is_counted() -> None:
    config = replace(GROUPED, num_blocks=9)
    watched = Watched(replace(config, groups=(full(4), window(2, 2)))).do(
        v.Submit(NINE), v.Schedule()
    )
    assert watched.counts["groups_admitted_past_its_room"] == 0
    watched = Watched(replace(config, num_blocks=8, groups=(full(4), window(2, 2))))
    watched.do(v.Submit(NINE), v.Schedule())
    assert watched.counts["groups_admitted_past_its_room"] == 1


def test_preemption_and_resumption_with_skipped_blocks_are_counted() -> None:
    config = replace(
        GROUPED, num_blocks=11, max_num_seqs=2, scheduler_reserve_full_isl=False, max_model_len=14
    )
    watched = Watched(replace(config, groups=(full(2), window(2, 2))))
    for index in range(2):
        prompt = tuple(range(10 * index, 10 * index + 4))
        watched.do(v.Submit(v.Request("AB"[index], prompt, max_tokens=8)))
    for _ in range(40):
        if watched.client.live:
            watched.do(v.Schedule())
        if watched.plans:
            watched.commit()
    counts = count_groups(watched)
    assert watched.counts["preempted"] >= 1
    assert counts["groups_preempted_with_nulls"] >= 1
    assert counts["groups_resumed_behind_nulls"] >= 1


def with_items(name: str, num_tokens: int, *items: tuple[str, int, int]) -> v.Request:
    """Return a request with items: identifier, offset and length."""
    found = tuple([v.MultiModalItem(*item) for item in items])
    return v.Request(name, tuple(range(10, 10 + num_tokens)), 1, items=found)


def test_a_row_that_reads_one_item_at_two_places_is_counted() -> None:
    for num_tokens, expected in ((3, 0), (4, 1), (5, 1)):
        config = replace(
            CONFIG,
            max_num_batched_tokens=num_tokens,
            encoder_compute_budget=8,
            encoder_cache_size=8,
        )
        watched = Watched(config)
        watched.do(v.Submit(with_items("A", 5, ("cat", 0, 2), ("cat", 3, 2))), v.Schedule())
        assert watched.counts["encoder_item_twice_in_one"] == expected, num_tokens


def test_an_item_that_one_step_evicts_and_encodes_is_counted() -> None:
    config = replace(CONFIG, encoder_compute_budget=8, encoder_cache_size=4)
    watched = Watched(config)
    watched.do(v.Submit(with_items("A", 1, ("cat", 0, 1))), v.Schedule()).commit()
    watched.do(v.Submit(with_items("B", 2, ("dog", 0, 2))), v.Schedule()).commit()
    watched.do(
        v.Submit(with_items("D", 3, ("owl", 0, 3))), v.Submit(with_items("E", 2, ("cat", 1, 1)))
    )
    watched.do(v.Schedule())
    assert watched.counts["encoder_item_evicted"] == 1
    assert watched.counts["encoder_item_dropped_and_made"] == 1
    assert watched.counts["encoder_item_made"] == 3
