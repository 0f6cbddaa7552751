"""Several KV groups, worked examples: windows, admission gate, common prefix, invariants."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import cast

import pytest
from groups_support import (
    ALIGN,
    ALL,
    FULL,
    NONE,
    RECURRENT,
    WINDOW,
    attends,
    chunks,
    full,
    recurrent,
    window,
)

from blockstep.spec import Config, Oracle, Policy, Rejected, Request, SpecMethod, Submit
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.groups.kinds import compute_max_held_blocks, compute_max_reach
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.releases.sessions import count_held_by_all
from blockstep.spec.vocabulary import (
    MAX_INT,
    BlockTables,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    Plan,
    RejectCode,
    config_problems,
)


def tables(oracle: Oracle, name: str) -> BlockTables:
    return oracle.state.requests[name].block_tables


def step(oracle: Oracle, token: int = 7) -> Plan:
    """Plan a step and commit it: every row that samples samples `token`."""
    plan = oracle.schedule()
    if plan.rows:
        (frame,) = oracle.state.frames
        oracle.commit(plan, {row.request_id: [token] * row.samples for row in frame.rows})
    assert get_broken_invariants(oracle.state) == ()
    return plan


def changed(state: State, name: str, **changes: object) -> State:
    """Return the state with other values in some fields of request `name`."""
    request = replace(state.requests[name], **changes)  # type: ignore[arg-type]
    requests = state.requests.to_dict() | {name: request}
    return replace(state, requests=type(state.requests)(requests))


class TestFullAndWindow:
    """Blocks of 2 tokens, a window of 3, steps of 4 tokens, 11 usable blocks."""

    config = Config(12, 2, max_num_batched_tokens=4, groups=(full(2), window(2, 3)))

    def start(self, num_prompt: int = 9) -> Oracle:
        oracle = Oracle(self.config)
        oracle.submit(Request("A", tuple(range(num_prompt)), max_tokens=2))
        return oracle

    def test_each_group_publishes_its_blocks_under_its_own_keys(self) -> None:
        oracle = self.start()
        step(oracle)
        cached = oracle.state.pool.cached
        assert [(key.index, key.group, cached[key]) for key in cached] == [
            (0, 0, (1,)), (1, 0, (2,)), (0, 1, (3,)), (1, 1, (4,)),
        ]  # fmt: skip

    def test_a_preempted_request_holds_nothing_and_resumes_from_its_hit(self) -> None:
        oracle = self.start()
        step(oracle)
        step(oracle)
        assert oracle.reset(reset_running_requests=True)
        assert oracle.num_free_blocks == 11
        assert tables(oracle, "A") == ((), ())
        assert step(oracle).cached[0].resumed

    def test_hits_of_all_groups_are_pinned_before_any_group_takes_a_block(self) -> None:
        """The full group must not take the block that the window hits, first in the free queue."""
        oracle = Oracle(replace(self.config, groups=(full(2), window(2, 3)), num_blocks=9))
        oracle.submit(Request("A", (0, 1, 2), max_tokens=1))
        step(oracle)
        queue = oracle.state.pool.free_queue
        shared = oracle.state.pool.cached
        (in_full,), (in_window,) = shared.values()
        assert {in_full, in_window} < set(queue)
        state = replace(
            oracle.state,
            pool=replace(
                oracle.state.pool,
                free_queue=tuple(
                    sorted(queue, key=lambda block_id: (block_id != in_window, block_id))
                ),
            ),
        )
        oracle.state = state
        oracle.submit(Request("B", (0, 1, 5), max_tokens=2))
        step(oracle)
        taken = [block_id for table in tables(oracle, "B") for block_id in table]
        assert taken[0] == in_full
        assert taken[2] == in_window
        assert len(set(taken)) == 4


def test_a_victim_frees_blocks_outside_its_window_before_the_others() -> None:
    """A request frees skipped blocks before a preemption, so they are first in the free queue."""
    config = Config(10, 2, max_num_batched_tokens=4, enable_prefix_caching=False,
                    scheduler_reserve_full_isl=False, groups=(full(2), window(2, 3)))  # fmt: skip
    oracle = Oracle(config)
    oracle.submit(Request("A", (0,) * 9, max_tokens=1))
    step(oracle)
    assert tables(oracle, "A") == ((1, 2), (3, 4))
    pool = oracle.state.pool
    taken = tuple(n + (block_id in range(5, 9)) for block_id, n in enumerate(pool.ref_counts))
    pool = replace(pool, free_queue=(9,), ref_counts=taken)  # another request holds 5 to 8
    oracle.state = replace(oracle.state, pool=pool)
    plan = oracle.schedule()
    assert plan.preempted_req_ids == ("A",)
    assert oracle.state.pool.free_queue == (9, 3, 2, 1, 4)


class TestBlocksReservedForAWindow:
    """#39734: admission and submission count what a window holds, not the prompt."""

    config = Config(13, 1, max_num_batched_tokens=2, groups=(window(1, 3), chunks(2, 4)))

    def test_a_request_is_rejected_if_the_pool_is_one_block_too_small(self) -> None:
        oracle = Oracle(replace(self.config, num_blocks=7))
        refused = oracle.apply(Submit(Request("A", (0,) * 20)))
        assert isinstance(refused, Rejected)
        assert refused.code is RejectCode.NEVER_FITS
        assert refused.detail == (
            "'A' may need 7 blocks, the pool has 6; lower max_tokens or add blocks"
        )

    @pytest.mark.parametrize(("num_usable", "status"), [(10, "waiting"), (11, "running")])
    def test_the_gate_admits_a_request_that_can_finish_next_to_running_ones(
        self, num_usable: int, status: str
    ) -> None:
        """A holds 3 blocks of its window and 1 of its chunk after its prompt."""
        oracle = Oracle(replace(self.config, num_blocks=num_usable + 1))
        oracle.submit(Request("A", (0,) * 4, max_tokens=20))
        oracle.submit(Request("B", (1,) * 20, max_tokens=4))
        for _ in range(3):
            step(oracle)
        assert tables(oracle, "A")[0].count(0) == 2
        assert tables(oracle, "A")[1] == (0, 0, 8)
        assert oracle.state.requests["B"].status == status


@pytest.mark.parametrize(
    "group",
    [window(s, w) for s in (1, 2, 3, 4) for w in range(1, 8)]
    + [chunks(s, k) for s in (1, 2, 3, 4) for k in range(1, 8)],
)
def test_the_computed_maximum_of_held_blocks_is_reached_and_not_exceeded(group: KVGroup) -> None:
    """All numbers of computed tokens up to 40 and of new slots up to 5 are tried."""
    size = group.block_size
    for reach in range(1, 6):
        held = [
            len(
                {
                    p // size
                    for p in range(c + reach)
                    if p >= c or any(attends(group, r, p) for r in range(c, c + 9))
                }
            )
            for c in range(40)
        ]
        assert max(held) == compute_max_held_blocks(group, 99, reach)
        assert compute_max_held_blocks(group, size, reach) == 1


def test_max_reach_is_a_row_plus_lookahead_plus_drafts_in_flight() -> None:
    config = Config(9, max_num_batched_tokens=10, groups=(full(16),))
    assert compute_max_reach(config) == 10
    assert compute_max_reach(replace(config, long_prefill_token_threshold=4)) == 4
    assert compute_max_reach(replace(config, long_prefill_token_threshold=40)) == 10
    drafts = replace(config, spec_method=SpecMethod.EAGLE, num_speculative_tokens=3)
    assert compute_max_reach(drafts) == 13
    assert compute_max_reach(replace(drafts, max_frames_in_flight=3)) == 13
    ahead = replace(drafts, max_frames_in_flight=3, async_scheduling=True)
    assert compute_max_reach(ahead) == 19
    assert compute_max_reach(replace(ahead, max_num_batched_tokens=2)) == 2 + 3 + 2


@pytest.mark.parametrize("method", [SpecMethod.NONE, SpecMethod.EAGLE])
@pytest.mark.parametrize("policy", list(Policy))
def test_one_full_group_behaves_like_no_groups(policy: Policy, method: SpecMethod) -> None:
    num_drafts = 0 if method is SpecMethod.NONE else 2
    config = Config(8, 2, max_num_batched_tokens=5, policy=policy, max_model_len=12,
                    spec_method=method, num_speculative_tokens=num_drafts,
                    scheduler_reserve_full_isl=False)  # fmt: skip
    sides = [Oracle(config), Oracle(replace(config, groups=(full(2),)))]
    for number, length in product(range(4), (3, 5, 4)):
        name = f"r{number}{length}"
        request = Request(name, (number % 2,) * length, max_tokens=6, priority=length)
        answers = [side.apply(Submit(request)) for side in sides]
        assert answers[0] == answers[1]
        for _ in range(1 + number % 2):
            plans = [side.schedule() for side in sides]
            assert plans[0] == plans[1]
            if not plans[0].rows:
                continue
            for side in sides:
                (frame,) = side.state.frames
                side.commit(plans[0], {row.request_id: [1] * row.samples for row in frame.rows})
                if num_drafts:
                    side.propose({name: [1] * num_drafts for name in side.state.running})
            assert sides[0].snapshot() == sides[1].snapshot()
    assert sides[0].state.stats.preemptions
    assert sides[0].state.stats.prefix_cache_hits or num_drafts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": [full(2)]}, "must be a tuple of KVGroup"),
        ({"groups": (2,)}, "must be a tuple of KVGroup"),
        ({"groups": (KVGroup(cast("GroupKind", "full"), 2),)}, "its kind must be a GroupKind"),
        ({"groups": (full(0),)}, "its block_size must be an int from 1"),
        ({"groups": (full(MAX_INT + 1),)}, f"use at most {MAX_INT}"),
        ({"groups": (full(True),)}, "its block_size must be an int from 1"),
        ({"groups": (KVGroup(WINDOW, 2),)}, "its sliding_window must be an int from 1"),
        ({"groups": (KVGroup(FULL, 2, 3),)}, "only a group of kind sliding_window has a sliding"),
        ({"groups": (KVGroup(WINDOW, 2, 3, 4),)}, "only a group of kind chunked_local has a"),
        ({"groups": (full(2), full(3))}, "divide every one: [2, 3]; set it to the smallest"),
        ({"groups": (full(4),)}, "must be the smallest block size of a group"),
        ({"groups": (full(2), full(4)), "block_size": 1}, "must be the smallest block size"),
        ({"groups": (KVGroup(FULL, 2, mamba_cache_mode=ALL),)}, "only a group of kind recurrent"),
        ({"groups": (KVGroup(FULL, 2, num_speculative_blocks=1),)}, "only a group of kind recurre"),
        (
            {"groups": (KVGroup(RECURRENT, 2, mamba_cache_mode=cast("MambaCacheMode", "all")),)},
            "its mamba_cache_mode must be a MambaCacheMode",
        ),
        ({"groups": (recurrent(2, ALL, -1),)}, "its num_speculative_blocks must be an int from 0"),
        ({"groups": (recurrent(2, NONE),)}, "none if and only if prefix caching is off"),
        (
            {"groups": (recurrent(2, ALIGN),), "enable_prefix_caching": False},
            "none if and only if prefix caching is off",
        ),
        (
            {"groups": (recurrent(2, NONE),), "enable_prefix_caching": False},
            "its one state is in its first block",
        ),
        (
            {
                "groups": (recurrent(2, ALIGN),),
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 8192,
            },
            "chunks can end at block boundaries only with chunked prefill",
        ),
        (
            {"groups": (recurrent(2, ALIGN, 2),)},
            "with align, num_speculative_blocks must be below block_size",
        ),
        (
            {
                "groups": (recurrent(2, ALIGN, 1),),
                "spec_method": SpecMethod.NGRAM,
                "num_speculative_tokens": 2,
            },
            "its num_speculative_blocks must be a state for each of num_speculative_tokens; use 2",
        ),
    ],
)
def test_a_config_with_bad_groups_is_rejected_with_a_message(
    changes: dict[str, object], message: str
) -> None:
    config = replace(Config(9, 2), **changes)  # type: ignore[arg-type]
    (problem,) = config_problems(config)
    assert message in str(problem)


def test_recurrent_groups_of_two_modes_are_rejected_by_name() -> None:
    groups = (full(2), recurrent(2, ALL), recurrent(2, ALIGN))
    problems = config_problems(Config(9, 2, groups=groups))
    assert [problem.field for problem in problems] == ["groups[1]", "groups[2]"]
    assert {problem.rule for problem in problems} == {
        "all recurrent groups have one mamba_cache_mode"
    }


def test_a_recurrent_group_is_accepted_in_each_mode() -> None:
    for mode in (ALL, ALIGN):
        assert config_problems(Config(9, 2, groups=(full(2), recurrent(4, mode, 3)))) == ()
    groups = (full(2), recurrent(8192, NONE))
    assert config_problems(Config(9, 2, enable_prefix_caching=False, groups=groups)) == ()


class TestCommonPrefix:
    """The plan counts the leading blocks that the tables of all running requests share."""

    config = Config(32, 2, max_model_len=32, groups=(full(2), window(2, 3), full(4)))

    def start(self, config: Config) -> Oracle:
        """Return an oracle where A has run its prompt of 9 tokens; B shares 8 tokens, C 6."""
        oracle = Oracle(config)
        oracle.submit(Request("A", (1, 2, 3, 4, 5, 6, 7, 8, 9), max_tokens=9))
        plan = oracle.schedule()
        assert plan.num_common_prefix_blocks[0] == 5 * config.enable_prefix_caching
        oracle.commit(plan, {"A": [0]})
        oracle.submit(Request("B", (1, 2, 3, 4, 5, 6, 7, 8, 8), max_tokens=9))
        oracle.submit(Request("C", (1, 2, 3, 4, 5, 6, 6), max_tokens=9))
        return oracle

    def test_the_common_prefix_is_0_without_caching_or_running_requests(self) -> None:
        assert Oracle(self.config).schedule().num_common_prefix_blocks == (0, 0, 0)
        oracle = self.start(replace(self.config, enable_prefix_caching=False))
        assert oracle.schedule().num_common_prefix_blocks == (0, 0, 0)

    def test_a_common_prefix_is_counted_for_one_group(self) -> None:
        oracle = self.start(replace(self.config, groups=()))
        assert oracle.schedule().num_common_prefix_blocks == (3,)

    def test_a_release_counts_the_references_of_a_block(self) -> None:
        """References of waiting requests and of holds are subtracted."""
        fields = SimpleNamespace(
            running=("A", "B"),
            waiting=("C", "D"),
            skipped=(),
            requests={name: SimpleNamespace(block_tables=((), ())) for name in "CD"},
            parts={"kv_transfer": SimpleNamespace(held={})},
            pool=SimpleNamespace(ref_counts=(0, 2, 2, 3, 2)),
        )
        step = cast("Step", fields)
        assert count_held_by_all(step, (1, 2, 3, 4)) == 2
        fields.requests["D"].block_tables = ((3,), ())
        assert count_held_by_all(step, (3, 2)) == 1
        fields.parts["kv_transfer"].held["E"] = SimpleNamespace(block_tables=((), (2,)))
        assert count_held_by_all(step, (3, 2)) == 0

    def test_equality_of_plans_ignores_the_common_prefix(self) -> None:
        assert Plan(0, num_common_prefix_blocks=(3,)) == Plan(0)


def test_groups_of_one_kind_may_differ_in_size() -> None:
    assert config_problems(Config(9, 2, groups=(window(2, 3), window(4, 9), full(6)))) == ()


class TestInvariants:
    """Each invariant about groups can fail."""

    def start(self) -> State:
        oracle = Oracle(TestFullAndWindow.config)
        oracle.submit(Request("A", tuple(range(9)), max_tokens=2))
        step(oracle)
        step(oracle)
        return oracle.state

    @pytest.mark.parametrize(
        ("table", "is_broken"),
        [((0, 4, 7, 8), False), ((0, 0, 7, 8), False), ((0, 0, 0, 8), False), ((0, 0, 0, 0), True),
         ((0, 4, 0, 8), True), ((0, 4, 7), True)],
    )  # fmt: skip
    def test_a_null_block_that_is_attended_to_is_found(
        self, table: tuple[int, ...], is_broken: bool
    ) -> None:
        state = self.start()
        held = state.requests["A"].holdings
        after = changed(state, "A", holdings=(held[0], replace(held[1], block_table=table)))
        assert ("is_every_attended_block_held" in get_broken_invariants(after)) == is_broken

    def test_a_null_block_in_a_full_group_is_found(self) -> None:
        state = self.start()
        held = state.requests["A"].holdings
        after = changed(state, "A", holdings=(replace(held[0], block_table=(0, 2, 5, 6)), held[1]))
        assert "is_every_attended_block_held" in get_broken_invariants(after)

    def test_a_null_block_that_a_draft_in_flight_attends_to_is_found(self) -> None:
        config = Config(
            20, 1, max_num_batched_tokens=8, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2,
            max_frames_in_flight=2, async_scheduling=True, groups=(window(1, 2),),
        )  # fmt: skip
        oracle = Oracle(config)
        oracle.submit(Request("A", (0, 1, 2, 3), max_tokens=9))
        oracle.schedule()
        oracle.schedule()
        (held,) = oracle.state.requests["A"].holdings
        assert oracle.state.requests["A"].num_computed_tokens == 7
        for num_null, is_broken in ((4, False), (5, True)):
            table = (0,) * num_null + held.block_table[num_null:]
            after = changed(oracle.state, "A", holdings=(replace(held, block_table=table),))
            assert ("is_every_attended_block_held" in get_broken_invariants(after)) == is_broken

    def test_a_window_that_holds_too_many_blocks_is_found(self) -> None:
        """A window of 3 tokens and a step of 4 need 4 blocks at most."""
        state = self.start()
        held = state.requests["A"].holdings
        grown = replace(held[1], block_table=(3, 4, 7, 8))
        after = changed(state, "A", holdings=(held[0], grown))
        assert "is_every_window_as_small_as_charged" not in get_broken_invariants(after)
        grown = replace(held[1], block_table=(3, 4, 7, 8, 9))
        after = changed(state, "A", holdings=(held[0], grown))
        assert "is_every_window_as_small_as_charged" in get_broken_invariants(after)

    def test_a_null_block_with_a_holder_is_found(self) -> None:
        state = self.start()
        pool = replace(state.pool, ref_counts=(1, *state.pool.ref_counts[1:]))
        assert "is_every_block_free_or_held" in get_broken_invariants(replace(state, pool=pool))

    def test_a_block_under_the_key_of_another_group_is_found(self) -> None:
        state = self.start()
        keys = list(state.pool.block_keys)
        keys[7] = keys[5]
        pool = replace(state.pool, block_keys=tuple(keys))
        assert "is_every_settled_block_keyed" in get_broken_invariants(replace(state, pool=pool))
