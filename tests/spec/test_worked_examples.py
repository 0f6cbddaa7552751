"""The worked examples of the sources, state by state."""

from dataclasses import replace

from blockstep.spec import Config, Oracle, Policy, Request, State, Status
from blockstep.spec.vocabulary import BlockId, Plan

A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P = range(16)  # noqa: E741 - the letters of seed 003


def table(oracle: Oracle, name: str) -> tuple[BlockId, ...]:
    (table,) = oracle.state.requests[name].block_tables
    return table


def published(state: State) -> dict[tuple[int, ...], tuple[BlockId, ...]]:
    """The cached map, each key shown as the tokens of its own block."""
    return {key.token_ids: blocks for key, blocks in state.pool.cached.items()}


def sample(plan: Plan, token: int) -> dict[str, list[int]]:
    return {row.request_id: [token] for row in plan.rows}


class TestTenBlocksOfFour:
    """Seed 003 section 3.2: ten blocks of four tokens, steps 0 to 6 (its ids are ours minus one).

    The source has ten usable blocks, 0 to 9; ours are 1 to 10, for block 0 is the null block.
    """

    prompt_0 = (A, B, C, D, E, F, G, H, I, J, K, L, M, N, O)

    def start(self) -> Oracle:
        oracle = Oracle(Config(num_blocks=11, block_size=4))
        oracle.submit(Request("r0", self.prompt_0, max_tokens=3))
        return oracle

    def test_step_0_takes_four_blocks_and_publishes_the_three_full_ones(self) -> None:
        oracle = self.start()
        oracle.schedule()
        assert table(oracle, "r0") == (1, 2, 3, 4)
        assert oracle.state.pool.ref_counts == (0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0)
        assert oracle.state.pool.free_queue == (5, 6, 7, 8, 9, 10)
        assert published(oracle.state) == {
            (A, B, C, D): (1,),
            (E, F, G, H): (2,),
            (I, J, K, L): (3,),
        }

    def test_step_3_fills_the_fourth_block_and_takes_a_fifth(self) -> None:
        oracle = self.start()
        oracle.commit(plan := oracle.schedule(), sample(plan, P))
        oracle.commit(plan := oracle.schedule(), sample(plan, 90))
        oracle.schedule()
        assert table(oracle, "r0") == (1, 2, 3, 4, 5)
        assert published(oracle.state)[M, N, O, P] == (4,)
        assert oracle.state.pool.free_queue == (6, 7, 8, 9, 10)

    def step_4(self) -> Oracle:
        oracle = self.start()
        oracle.commit(plan := oracle.schedule(), sample(plan, P))
        oracle.commit(plan := oracle.schedule(), sample(plan, 90))
        oracle.submit(Request("r1", (*self.prompt_0[:10], 20, 21, 22, 23), max_tokens=1))
        return oracle

    def test_step_4_shares_two_blocks_because_only_full_blocks_are_shared(self) -> None:
        oracle = self.step_4()
        plan = oracle.schedule()
        assert plan.new[0].num_computed_tokens == 8
        assert table(oracle, "r1") == (1, 2, 6, 7)
        assert oracle.state.pool.ref_counts == (0, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0)
        assert oracle.state.pool.free_queue == (8, 9, 10)
        assert published(oracle.state)[I, J, 20, 21] == (6,)

    def test_step_5_frees_in_reverse_what_is_not_shared(self) -> None:
        oracle = self.step_4()
        oracle.abort("r0")
        # Before r1 came, the table of r0 was 1 to 4: its fifth block comes with its next step.
        assert oracle.state.pool.free_queue == (5, 6, 7, 8, 9, 10, 4, 3, 2, 1)

    def test_steps_5_and_6_end_both_and_leave_every_key_in_place(self) -> None:
        oracle = self.step_4()
        plan = oracle.schedule()
        before = published(oracle.state)
        outputs = oracle.commit(plan, sample(plan, 91))
        assert [row.finish_reason for row in outputs.rows] == ["length", "length"]
        # r0 frees 5, 4, 3 (r1 holds 2 and 1); then r1 frees 7, 6, 2, 1.
        assert oracle.state.pool.free_queue == (8, 9, 10, 5, 4, 3, 7, 6, 2, 1)
        assert oracle.state.pool.ref_counts == (0,) * 11
        assert published(oracle.state) == before

    def test_step_7_revives_three_blocks_and_evicts_the_oldest_for_the_rest(self) -> None:
        oracle = self.step_4()
        oracle.commit(plan := oracle.schedule(), sample(plan, 91))
        oracle.submit(Request("r2", (*self.prompt_0[:12], *range(30, 47)), max_tokens=1))
        plan = oracle.schedule()
        assert plan.new[0].num_computed_tokens == 12
        # The hit leaves the queue first, from its middle; then its head is evicted.
        assert table(oracle, "r2") == (1, 2, 3, 8, 9, 10, 5, 4)
        assert oracle.state.pool.free_queue == (7, 6)
        assert (M, N, O, P) not in published(oracle.state), "block 4 was evicted"
        assert published(oracle.state)[I, J, 20, 21] == (6,), "block 6 was not"


def test_mixed_batch_gives_1024_1_500_1() -> None:
    """Seed 000, "Example: Mixed prefill/decode with chunked prefill"."""
    config = Config(
        num_blocks=1001,
        max_num_batched_tokens=4096,
        max_model_len=8192,
        long_prefill_token_threshold=1024,
    )
    oracle = Oracle(config)
    for name, num_prompt in (("R1", 4024), ("R2", 10), ("R3", 1524), ("R4", 10)):
        oracle.submit(Request(name, tuple(range(num_prompt)), max_tokens=8, cache_salt=name))
    plan = oracle.schedule()
    oracle.commit(plan, {"R2": [7], "R4": [7]})
    # R1 has 3000 tokens left, R3 has 500; R2 and R4 decode. Now with the example's budget:
    oracle.state = replace(oracle.state, config=replace(config, max_num_batched_tokens=2048))
    plan = oracle.schedule()
    assert [(row.request_id, row.num_scheduled_tokens) for row in plan.cached] == [
        ("R1", 1024),
        ("R2", 1),
        ("R3", 500),
        ("R4", 1),
    ]
    assert plan.total_num_scheduled_tokens == 1526


def test_lazy_eviction_timeline() -> None:
    """Seed 000, "Lazy Hash Eviction", T1 to T4.

    Its T3 takes the first block of A. Blocks are freed tail first, so it is A's last one that is
    taken, and what A finds at T4 is its first two: a prefix, and so of use.
    """
    oracle = Oracle(Config(num_blocks=5, block_size=4, max_model_len=64))
    oracle.submit(Request("B", (90, 91, 92, 93), max_tokens=2))
    oracle.submit(Request("A", tuple(range(12)), max_tokens=2))
    # T1: A computes its tokens in three blocks.
    oracle.commit(plan := oracle.schedule(), sample(plan, 50))
    assert (table(oracle, "B"), table(oracle, "A")) == ((1,), (2, 3, 4))
    # T2 and T3: B needs a block, A is preempted, and B takes one of its blocks.
    plan = oracle.schedule()
    assert plan.preempted_req_ids == ("A",)
    assert table(oracle, "B") == (1, 4)
    assert oracle.state.pool.free_queue == (3, 2)
    assert published(oracle.state) == {
        (90, 91, 92, 93): (1,),
        (0, 1, 2, 3): (2,),
        (4, 5, 6, 7): (3,),
    }
    oracle.commit(plan, sample(plan, 51))
    # T4: A returns and finds two of its three blocks.
    plan = oracle.schedule()
    (row,) = plan.cached
    assert (row.request_id, row.resumed, row.num_computed_tokens) == ("A", True, 8)
    assert row.new_block_ids == ((2, 3, 4, 1),)
    assert row.all_token_ids == (*range(12), 50)


class TestPriorityRollback:
    """Seed 001, "Preemption in the Running Loop": the victim was scheduled in the same step."""

    def start(self, budget: int) -> Oracle:
        """`low` is scheduled before `high`; all five blocks are full and `high` needs a sixth."""
        config = Config(num_blocks=6, block_size=4, max_model_len=64, policy=Policy.PRIORITY)
        oracle = Oracle(config)
        oracle.submit(Request("low", tuple(range(11)), max_tokens=5, priority=5))
        oracle.submit(Request("high", tuple(range(20, 28)), max_tokens=3, priority=1))
        oracle.commit(plan := oracle.schedule(), sample(plan, 11))
        assert (table(oracle, "high"), table(oracle, "low")) == ((1, 2), (3, 4, 5))
        oracle.state = replace(
            oracle.state,
            running=("low", "high"),
            config=replace(config, max_num_batched_tokens=budget),
        )
        return oracle

    def test_the_row_of_the_victim_is_withdrawn(self) -> None:
        oracle = self.start(budget=16)
        plan = oracle.schedule()
        assert plan.preempted_req_ids == ("low",)
        assert [(row.request_id, row.num_scheduled_tokens) for row in plan.rows] == [("high", 1)]
        assert oracle.state.requests["low"].status is Status.PREEMPTED
        assert (oracle.state.waiting, oracle.state.running) == (("low",), ("high",))

    def test_blocks_that_the_victim_published_in_the_step_are_unpublished(self) -> None:
        """Upstream #43569: no request will write the block, so its key must go."""
        oracle = self.start(budget=16)
        before = published(oracle.state)
        oracle.schedule()
        assert (8, 9, 10, 11) not in before, "its third block fills in this step"
        assert published(oracle.state) == before

    def test_tokens_of_the_victim_return_to_the_budget(self) -> None:
        oracle = self.start(budget=2)
        oracle.submit(Request("third", (60,), max_tokens=1, priority=0))
        oracle.state = replace(oracle.state, running=("low", "high"))
        plan = oracle.schedule()
        assert plan.total_num_scheduled_tokens == 1, (
            "the token of low is free; no request is admitted"
        )
        assert plan.preempted_req_ids == ("low",)
