"""KV-cache groups of vLLM: the mixes that a release takes, and its tables beside ours."""

from __future__ import annotations

import importlib
import random
import re
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.draw.presets import SMALL, draw_swarm
from blockstep.conformance.engine import Capability, EngineFault, EngineTraits
from blockstep.conformance.engines.adapters import vllm_groups
from blockstep.conformance.engines.adapters.vllm_groups import (
    find_problem,
    fit_groups,
    require_groups,
)
from blockstep.conformance.engines.adapters.vllm_names import DIGEST_SIZE, Digests, Known
from blockstep.conformance.engines.adapters.vllm_releases import (
    REFERENCE,
    Release,
    get_installed_version,
    get_release,
    get_release_problem,
)
from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.compare import observation_differences
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.protocol.wishes import Wish
from blockstep.conformance.search.episodes import fit_config
from blockstep.conformance.search.options import find_profile
from blockstep.spec.vocabulary import (
    Abort,
    BlockKey,
    BlockStored,
    Commit,
    Config,
    ConfigError,
    Event,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    Observation,
    Outputs,
    Plan,
    Rejected,
    Request,
    RowTokens,
    Schedule,
    Snapshot,
    SpecMethod,
    Submit,
    config_problems,
)

ADAPTER = "blockstep.conformance.engines.adapters.vllm"
PROBLEM = get_release_problem(get_installed_version())
VERSION = (get_installed_version() or REFERENCE).split("+")[0]
# Importing vLLM imports torch, which warns of itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
needs_vllm = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
needs_reference = pytest.mark.skipif(
    PROBLEM is not None or VERSION != REFERENCE, reason=f"tells what vLLM {REFERENCE} does"
)

FULL = KVGroup(GroupKind.FULL, 2)
WINDOW = KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=3)
CHUNKS = KVGroup(GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=4)
STATES = KVGroup(GroupKind.RECURRENT, 2, mamba_cache_mode=MambaCacheMode.ALL)
ALIGNED = replace(STATES, mamba_cache_mode=MambaCacheMode.ALIGN)
NARROW = replace(WINDOW, sliding_window=1)
LARGE = replace(FULL, block_size=4)
LARGE_CHUNKS = replace(CHUNKS, block_size=4)
LARGE_ALIGNED = replace(ALIGNED, block_size=4)
LARGE_WINDOW = replace(WINDOW, block_size=4)
EAGLE = {"spec_method": SpecMethod.EAGLE, "num_speculative_tokens": 1}


def known(version: str) -> Release:
    """What is known of a release."""
    release = get_release(version)
    assert release is not None
    return release


OLDEST, OURS, NEWEST = map(known, ("0.11.0", REFERENCE, "0.33.0"))


def build(*groups: KVGroup, **fields: Any) -> Config:
    return Config(num_blocks=30, block_size=2, groups=groups, **fields)


# Without vLLM.


@pytest.mark.parametrize(
    "config",
    [
        build(),
        build(WINDOW),
        build(CHUNKS),
        build(FULL, WINDOW, **EAGLE),
        build(FULL, CHUNKS),
        build(WINDOW, WINDOW, FULL),
        build(FULL, WINDOW, CHUNKS, LARGE, enable_prefix_caching=False, **EAGLE),
        build(FULL, FULL, enable_prefix_caching=False),
        build(FULL, NARROW, enable_prefix_caching=False),
        build(FULL, NARROW, **EAGLE),
    ],
)
@pytest.mark.parametrize("release", [OLDEST, OURS, NEWEST], ids=lambda one: one.version)
def test_every_release_takes_these(release: Release, config: Config) -> None:
    assert find_problem(release, config) is None
    assert fit_groups(release, config) == (config, None)
    require_groups(release, config)


@pytest.mark.parametrize(
    ("version", "config", "reason", "fitting"),
    [
        (REFERENCE, build(CHUNKS, **EAGLE), "CHUNKS_WITH_A_HEAD", (CHUNKS,)),
        (REFERENCE, build(LARGE, CHUNKS), "CHUNKS_OF_ANOTHER_SIZE", (LARGE, LARGE_CHUNKS)),
        (REFERENCE, build(WINDOW, WINDOW), "ALL_EQUAL", (WINDOW,)),
        ("0.33.0", build(FULL, WINDOW, CHUNKS, **EAGLE), "CHUNKS_WITH_A_HEAD", None),
        ("0.33.0", build(FULL, STATES), "NO_STATES_OF_ALL", (FULL, ALIGNED)),
        ("0.33.0", build(LARGE, ALIGNED), "PARTS_OF_BLOCKS", (LARGE, LARGE_ALIGNED)),
        ("0.33.0", build(FULL, LARGE_WINDOW), "PARTS_OF_BLOCKS", (LARGE, LARGE_WINDOW)),
        (
            "0.33.0",
            build(FULL, NARROW),
            "NARROW_WINDOWS",
            (FULL, replace(NARROW, sliding_window=2)),
        ),
        ("0.11.0", build(LARGE, STATES), "NO_RECURRENT", (FULL,)),
        ("0.11.0", build(ALIGNED), "NO_RECURRENT", ()),
        ("0.11.0", build(FULL, LARGE_WINDOW), "SEVERAL_SIZES", (LARGE, LARGE_WINDOW)),
        ("0.11.0", build(LARGE, FULL), "SEVERAL_SIZES", (LARGE,)),
        ("0.11.0", build(FULL, WINDOW, CHUNKS), "OTHER_MIXES", (FULL, WINDOW)),
        ("0.11.0", build(WINDOW, FULL, WINDOW), "OTHER_MIXES", (WINDOW, WINDOW, FULL)),
        ("0.11.0", build(FULL, WINDOW, FULL), "OTHER_MIXES", (FULL, FULL, WINDOW)),
        ("0.11.0", build(WINDOW, CHUNKS), "OTHER_MIXES", (WINDOW,)),
        ("0.11.0", build(FULL, FULL), "OTHER_MIXES", (FULL,)),
    ],
)
def test_of_other_mixes_a_release_is_given_the_nearest(
    version: str, config: Config, reason: str, fitting: tuple[KVGroup, ...] | None
) -> None:
    release, said = known(version), getattr(vllm_groups, reason)
    assert find_problem(release, config) == said
    found, why = fit_groups(release, config)
    assert why == said
    assert found.groups == (config.groups if fitting is None else fitting)
    assert config_problems(found) == ()
    assert find_problem(release, found) is None
    with pytest.raises(ConfigError, match=f"no mix for vLLM {version}: {said.split(':')[0]}"):
        require_groups(release, config)


def test_states_at_the_ends_of_chunks_are_beside_items_that_are_split() -> None:
    config = replace(
        build(FULL, STATES),
        encoder_compute_budget=4,
        encoder_cache_size=4,
        disable_chunked_mm_input=True,
    )
    assert config_problems(config) == ()
    release = get_release("0.33.0")
    assert release is not None
    found, why = fit_groups(release, config)
    assert why == vllm_groups.NO_STATES_OF_ALL
    assert config_problems(found) == ()
    assert not found.disable_chunked_mm_input


@pytest.mark.parametrize("release", [OLDEST, OURS, NEWEST], ids=lambda one: one.version)
def test_what_a_release_is_given_is_a_config(release: Release) -> None:
    """States at the ends of chunks go with no whole items, which those of other modes go with."""
    wish = Wish(frozenset({"groups", "states", "encoder"}), frozenset())
    for seed in range(400):
        drawn = draw_swarm(SMALL, SeededDraw(str(seed)), wish=wish).config
        fitting, _ = fit_groups(release, drawn)
        assert config_problems(fitting) == ()


def test_states_at_the_ends_of_chunks_are_further_apart_than_drafts() -> None:
    states = replace(STATES, num_speculative_blocks=4)
    config = build(FULL, states, spec_method=SpecMethod.NGRAM, num_speculative_tokens=3)
    assert config_problems(config) == ()
    found, _ = fit_groups(NEWEST, config)
    assert found.block_sizes == (5, 5)
    assert config_problems(found) == ()


def test_states_at_the_ends_of_chunks_go_with_items_that_may_be_split() -> None:
    """Items that are never split are refused beside them, and a hunt ended with exit 2."""
    items = {"encoder_compute_budget": 4, "encoder_cache_size": 4}
    config = build(FULL, STATES, disable_chunked_mm_input=True, **items)
    assert config_problems(config) == ()
    found, _ = fit_groups(NEWEST, config)
    assert not found.disable_chunked_mm_input
    assert config_problems(found) == ()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (build(WINDOW, FULL, replace(WINDOW, sliding_window=5)), [False, True, True]),
        (build(FULL, LARGE_WINDOW), [False, True, False]),
        (build(FULL, FULL), [False, False, True]),
    ],
)
def test_releases_take_mixes_that_others_do_not(config: Config, expected: list[bool]) -> None:
    assert [find_problem(one, config) is None for one in (OLDEST, OURS, NEWEST)] == expected


def test_an_engine_is_given_a_config_that_its_adapter_fits() -> None:
    def make(config: Config) -> SpecEngine:
        return SpecEngine(config)

    make.traits = EngineTraits(fit_config=partial(fit_groups, OURS))  # type: ignore[attr-defined]
    config = build(CHUNKS, FULL, **EAGLE)
    fitting, missing = fit_config(config, make)
    assert fitting == replace(config, spec_method=SpecMethod.NGRAM)
    assert missing == (vllm_groups.CHUNKS_WITH_A_HEAD,)
    assert fit_config(fitting, make) == (fitting, ())


def test_a_block_is_named_by_its_last_digest_or_by_all_of_them() -> None:
    digests = Digests(OURS, 2)
    names = [bytes([n]) * DIGEST_SIZE for n in range(3)]
    digests.learn(Known(Request("A", tuple(range(6)))), 0, names, range(6), ())
    keys = [digests.key_of[name] for name in names]
    assert digests.read(names[1], 0) is keys[1]
    assert digests.read(names[1], 2) == keys[1].in_group(2)
    assert digests.read(names[0] + names[1], 1) == keys[1].in_group(1)
    with pytest.raises(EngineFault, match="one block is named by"):
        digests.read(names[0] + names[2], 1)


# With vLLM.


class Pair:
    """vLLM beside the specification under its profile, compared after every event."""

    def __init__(self, config: Config) -> None:
        self.engine = importlib.import_module(ADAPTER).VllmEngine(config)
        self.spec = SpecEngine(config, find_profile(f"vllm-{VERSION}"))

    def apply(self, event: Event) -> Observation | None:
        """Its answer; None where the specification refuses the event, or the adapter declines."""
        if self.engine.declines(event) is not None:
            return None
        expected = self.spec.apply(event)
        if isinstance(expected, Rejected):
            return None
        seen = self.engine.apply(event)
        hints = Capability.COMMON_PREFIX in self.engine.capabilities()
        assert observation_differences(expected, seen, hints) == ()
        shown, mine = self.engine.snapshot(), self.spec.snapshot()
        if not known(VERSION).tells_work:
            mine = replace(mine, has_work=None)
        assert replace(shown, stats=mine.stats) == mine
        return cast("Observation", seen)

    def step(self, *sampled: int) -> Plan:
        """A plan, and its answer: to each row that samples the next of these tokens."""
        plan = self.apply(Schedule())
        assert isinstance(plan, Plan)
        tokens = iter(sampled)
        frames = self.spec.state.frames
        if frames:
            rows = tuple(
                RowTokens(row.request_id, (next(tokens),) if row.samples else ())
                for row in frames[0].rows
            )
            self.apply(Commit(plan.frame_id, rows))
        return plan

    @property
    def state(self) -> Snapshot:
        """As vLLM shows it."""
        shown: Snapshot = self.engine.snapshot()
        return shown


@needs_vllm
def test_blocks_are_of_equal_bytes_and_equal_groups_have_equal_specs() -> None:
    groups = [FULL, LARGE, LARGE_WINDOW, WINDOW, replace(CHUNKS, block_size=6), LARGE]
    if known(VERSION).has_recurrent_groups:
        groups += [STATES, replace(STATES, block_size=12)]
    built = importlib.import_module(f"{ADAPTER}_build").build_groups(build(*groups))
    specs = [one.kv_cache_spec for one in built]
    assert [spec.block_size for spec in specs] == [group.block_size for group in groups]
    assert len({spec.page_size_bytes for spec in specs}) == 1
    assert specs[1] == specs[5]
    assert [specs.count(spec) for spec in specs] == [groups.count(group) for group in groups]
    assert len({name for one in built for name in one.layer_names}) == len(groups)


@needs_reference
def test_each_group_has_a_table_and_null_blocks_for_what_a_window_has_left() -> None:
    pair = Pair(build(FULL, WINDOW, enable_prefix_caching=False))
    pair.apply(Submit(Request("A", tuple(range(6)), max_tokens=4)))
    (row,) = pair.step(7).new
    assert row.block_ids == ((1, 2, 3), (4, 5, 6))
    assert pair.step(8).cached[0].new_block_ids == ((7,), (8,))
    assert pair.state.requests[0].block_tables == ((1, 2, 3, 7), (0, 0, 6, 8))
    assert pair.step(9).cached[0].new_block_ids == ((), ())


@needs_vllm
def test_chunks_leave_their_blocks_when_a_new_one_begins() -> None:
    pair = Pair(build(FULL, CHUNKS, enable_prefix_caching=False))
    pair.apply(Submit(Request("A", tuple(range(7)), max_tokens=4)))
    for token, skipped in ((7, 0), (8, 2), (9, 4)):
        pair.step(token)
        assert pair.state.requests[0].block_tables[1].count(0) == skipped


@needs_reference
def test_blocks_are_hit_in_every_group_by_keys_of_their_own() -> None:
    pair = Pair(build(FULL, LARGE, WINDOW))
    for name in "AB":
        pair.apply(Submit(Request(name, tuple(range(9)), max_tokens=1)))
        plan = pair.step(9)
        assert plan.new[0].num_computed_tokens == (0 if name == "A" else 8)
    assert plan.new[0].block_ids == ((1, 2, 3, 4, 14), (6, 7, 15), (0, 0, 0, 12, 16))
    keys = {key.group: key for key in pair.state.cached if len(key.chain()) == 4}
    assert keys.keys() == {0, 1, 2}
    assert all(key.in_group(0) == keys[0] for key in keys.values())
    numbers = [pair.state.cached[keys[group]] for group in range(3)]
    assert numbers == [(4,), (7,), (12,)]


@needs_vllm
def test_any_mix_is_followed_without_prefix_caching() -> None:
    num_events = sum(play_at_random(seed, enable_prefix_caching=False) for seed in range(40))
    assert num_events > 1000


def play_at_random(seed: int, **fields: Any) -> int:
    """Events of a run in which groups, requests and their order are drawn; one frame, no drafts."""
    draw = random.Random(seed)
    groups = tuple(draw_group(draw) for _ in range(draw.randint(1, 3)))
    config = Config(
        num_blocks=draw.randint(8, 40),
        block_size=1,
        max_num_batched_tokens=draw.randint(2, 12),
        max_model_len=16,
        scheduler_reserve_full_isl=False,
        groups=(*groups, KVGroup(GroupKind.FULL, 1)),
        **fields,
    )
    pair = Pair(config)
    for number in range(25):
        if draw.random() < 0.4:
            prompt = tuple(range(draw.randint(1, 12)))
            pair.apply(Submit(Request(f"r{number}", prompt, max_tokens=draw.randint(1, 6))))
        if draw.random() < 0.1 and pair.state.running:
            pair.apply(Abort(pair.state.running[-1:]))
        pair.step(*[7] * 9)
    return 3 * 25


def draw_group(draw: random.Random) -> KVGroup:
    size, reach = draw.randint(1, 3), draw.randint(1, 6)
    return draw.choice(
        [
            KVGroup(GroupKind.FULL, size),
            KVGroup(GroupKind.SLIDING_WINDOW, size, sliding_window=reach),
            KVGroup(GroupKind.CHUNKED_LOCAL, size, attention_chunk_size=reach),
        ]
    )


@needs_reference
def test_a_recurrent_group_beside_full_attention_is_followed() -> None:
    state = replace(STATES, block_size=16, mamba_cache_mode=MambaCacheMode.NONE)
    fields = {"max_model_len": 16, "enable_prefix_caching": False}
    pair = Pair(build(state, FULL, **fields))
    pair.apply(Submit(Request("A", tuple(range(6)), max_tokens=4)))
    plan = pair.step(7)
    assert plan.new[0].block_ids == ((1,), (2, 3, 4))
    assert plan.new_block_ids_to_zero == (2, 3, 4)
    plan = pair.step(8)
    assert plan.cached[0].new_block_ids == ((), (5,))
    assert plan.new_block_ids_to_zero == (5,)


@needs_reference
def test_a_state_is_kept_where_a_chunk_ends_and_hit_there() -> None:
    pair, hits = Pair(build(FULL, ALIGNED)), {"A": (0, 6), "B": (6, 1)}
    for name in "AB":
        pair.apply(Submit(Request(name, tuple(range(7)), max_tokens=1)))
        (row,) = pair.step(9).new
        assert (row.num_computed_tokens, row.num_scheduled_tokens) == hits[name]
        while pair.state.requests:
            pair.step(9)
    keys = [key for key in pair.state.block_keys if key is not None and key.group == 1]
    assert [key.index for key in keys] == [2]


@needs_reference
def test_a_plan_behind_rejected_drafts_that_had_states_is_left_out_since_it_raises() -> None:
    states = replace(ALIGNED, block_size=4, num_speculative_blocks=2)
    config = Config(
        num_blocks=6, block_size=4, spec_method=SpecMethod.EAGLE, num_speculative_tokens=2,
        max_frames_in_flight=2, async_scheduling=True, groups=(states,),
    )  # fmt: skip
    steps = (Schedule(), *(Schedule(), Answer()) * 4, Answer(), Schedule())
    program = Program(config, (Submit(Request("A", (0,), max_tokens=6)), *steps))
    make, profile = load_engine("vllm"), find_profile(f"vllm-{VERSION}")
    run, findings = run_program(program, make, profile)
    assert findings == []
    assert {name: n for name, n in run.skipped.items() if "states" in name} == {
        "a plan behind rejected drafts that had states: fewer blocks than there are": 1
    }
    _, findings = run_program(program, make, replace(profile, spares=False))
    assert "num_required_blocks 4 < len(req_blocks) 5" in findings[0].message


@needs_vllm
def test_a_mix_that_the_release_has_not_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=f"no mix for vLLM {VERSION}") as caught:
        importlib.import_module(ADAPTER).VllmEngine(build(CHUNKS, **EAGLE))
    (problem,) = caught.value.problems
    assert "use ngram, or no prefix caching" in str(problem)


# What is told wrongly of a group.


def rekey(snapshot_key: BlockKey) -> BlockKey:
    """The key of the same tokens in the other group."""
    return snapshot_key.in_group(1 - snapshot_key.group)


@needs_reference
@pytest.mark.parametrize("lie", ["group", "size"])
def test_a_key_of_another_group_or_of_another_size_is_found(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = importlib.import_module(f"{ADAPTER}_names")
    read = names.Digests.read

    def read_wrongly(self: Any, name: bytes, group: int) -> BlockKey:
        key: BlockKey = read(self, name, group)
        if lie == "group":
            return rekey(key)
        return key if group == 0 or key.parent is None else key.parent.in_group(group)

    monkeypatch.setattr(names.Digests, "read", read_wrongly)
    engine = importlib.import_module(ADAPTER).VllmEngine(build(FULL, LARGE))
    engine.apply(Submit(Request("A", tuple(range(9)))))
    engine.apply(Schedule())
    with pytest.raises(EngineFault, match="its digest is not of that"):
        engine.snapshot()


@pytest.mark.skipif(PROBLEM is not None or VERSION != "0.33.0", reason="tells what it keeps")
def test_a_part_of_a_block_is_named_by_as_many_tokens_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = importlib.import_module(f"{ADAPTER}_build")
    monkeypatch.setattr(builder, "require_groups", lambda *_: None)
    engine = importlib.import_module(ADAPTER).VllmEngine(build(WINDOW, LARGE, **EAGLE))
    engine.apply(Submit(Request("A", tuple(range(11)))))
    engine.apply(Schedule())
    keys = [key for key in engine.snapshot().block_keys if key is not None and key.group == 1]
    assert [len(key.chain()) for key in keys] == [2, 4, 5]
    longest = next(key for key in keys if len(key.chain()) == 5)
    carried = next(name for name, key in engine.run.key_of.items() if key is longest)
    monkeypatch.setitem(engine.run.key_of, carried, longest.parent.in_group(1))
    with pytest.raises(EngineFault, match="its digest is not of that"):
        engine.snapshot()


@pytest.mark.skipif(PROBLEM is not None or VERSION != "0.33.0", reason="tells why it is declined")
def test_no_block_of_a_narrow_window_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = importlib.import_module(f"{ADAPTER}_build")
    monkeypatch.setattr(builder, "require_groups", lambda *_: None)
    engine = importlib.import_module(ADAPTER).VllmEngine(build(FULL, NARROW))
    for frame_id, name in enumerate("AB"):
        engine.apply(Submit(Request(name, tuple(range(9)), max_tokens=1)))
        (row,) = engine.apply(Schedule()).new
        assert row.num_computed_tokens == 0, "full attention has all of it the second time"
        engine.apply(Commit(frame_id, (RowTokens(name, (7,)),)))
    assert {key.group for key in engine.snapshot().block_keys if key is not None} == {0}


@needs_vllm
@pytest.mark.parametrize("lie", ["swapped", "short", "null"])
def test_a_table_that_is_told_to_another_group_is_found(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = importlib.import_module(ADAPTER)
    read_plan = adapter.read_plan

    def tell_wrongly(*arguments: Any) -> Plan:
        plan: Plan = read_plan(*arguments)
        (row,) = plan.new
        first, second = row.block_ids
        told = {
            "swapped": (second, first),
            "short": (first, second[:-1]),
            "null": (first, (0, *second[1:])),
        }
        return replace(plan, new=(replace(row, block_ids=told[lie]),))

    monkeypatch.setattr(adapter, "read_plan", tell_wrongly)
    engine = adapter.VllmEngine(build(FULL, WINDOW))
    engine.apply(Submit(Request("A", tuple(range(7)))))
    with pytest.raises(EngineFault, match="the block table that plans told 'A' is"):
        engine.apply(Schedule())


@needs_reference
def test_what_all_have_in_common_is_told_of_each_group() -> None:
    pair = Pair(build(FULL, LARGE, WINDOW))
    for name in "AB":
        pair.apply(Submit(Request(name, tuple(range(9)), max_tokens=9)))
        plan = pair.step(9, 9)
    assert plan.num_common_prefix_blocks == (4, 2, 0)


@needs_reference
def test_a_prompt_is_admitted_that_holds_more_states_than_it_is_charged() -> None:
    """Its second chunk reads one state and writes another; the pool has one block.

    It preempts itself, and is not admitted again: beside its own state it wants a second one.
    """
    config = Config(2, 2, max_num_batched_tokens=2, max_model_len=8, groups=(ALIGNED,))
    asked = Submit(Request("A", tuple(range(5)), max_tokens=1))
    assert isinstance(SpecEngine(config).apply(asked), Rejected)
    engine = importlib.import_module(ADAPTER).VllmEngine(config)
    engine.apply(asked)
    plans = [engine.apply(Schedule())]
    engine.apply(Commit(0, (RowTokens("A", ()),)))
    plans += [engine.apply(Schedule()) for _ in range(9)]
    assert [len(plan.rows) for plan in plans] == [1, *[0] * 9]
    assert plans[1].preempted_req_ids == ("A",)


@needs_vllm
@pytest.mark.parametrize("group", [0, 1])
def test_a_table_of_somebody_who_is_gone_is_found_in_any_group(group: int) -> None:
    engine = importlib.import_module(ADAPTER).VllmEngine(build(FULL, WINDOW))
    engine.snapshot()
    manager = engine.run.managers[group]
    manager.num_cached_block["gone"] = 1
    with pytest.raises(EngineFault, match="num_cached_block names 'gone', who is gone"):
        engine.snapshot()


@needs_reference
@pytest.mark.parametrize("field", ["last_state_block_idx", "_allocated_block_reqs"])
def test_states_of_somebody_who_is_gone_are_found(field: str) -> None:
    engine = importlib.import_module(ADAPTER).VllmEngine(build(FULL, ALIGNED))
    engine.snapshot()
    setattr(engine.run.managers[1], field, {"gone": 0})
    with pytest.raises(EngineFault, match=f"{field} names 'gone', who is gone"):
        engine.snapshot()


TELLS_GROUPS = known(VERSION).has_told_groups
needs_events = pytest.mark.skipif(
    PROBLEM is not None or not known(VERSION).has_events, reason="no KV events are read of it"
)
needs_told_groups = pytest.mark.skipif(
    PROBLEM is not None or not TELLS_GROUPS, reason="its KV events do not name a group"
)


@needs_events
def test_kv_events_of_several_groups_are_told_group_by_group() -> None:
    """0.19.1 does not say which group it is; a later release does."""
    pair = Pair(build(FULL, WINDOW, enable_kv_cache_events=True))
    pair.apply(Submit(Request("A", (1, 2, 3, 4, 5), max_tokens=1)))
    plan = pair.apply(Schedule())
    assert isinstance(plan, Plan)
    told = pair.apply(Commit(plan.frame_id, (RowTokens("A", (7,)),)))
    assert isinstance(told, Outputs)
    first = BlockKey(None, (1, 2))
    keys = first, BlockKey(first, (3, 4))
    assert told.kv_events == tuple(
        BlockStored(tuple(key.in_group(group) for key in keys), None, (1, 2, 3, 4), 2)
        for group in (0, 1 if TELLS_GROUPS else 0)
    )


@needs_told_groups
@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("group_idx", None, "group_idx of a KV event is None, of 2 groups"),
        ("group_idx", 2, "group_idx of a KV event is 2, of 2 groups"),
        ("group_idx", 0, "group 0 is ('sliding_window', 3), not ('full_attention', None)"),
        ("kv_cache_spec_kind", "mamba", "group 1 is ('mamba', 3), not ('sliding_window', 3)"),
        ("kv_cache_spec_sliding_window", 4, "group 1 is ('sliding_window', 4), not"),
    ],
)
def test_an_event_that_names_another_group_is_a_fault(
    field: str, value: Any, complaint: str
) -> None:
    events = importlib.import_module(f"{ADAPTER}_events")
    told = events.BlockStored(
        *([], None, [], 2, None, "GPU", None),
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=3,
    )
    digests = Digests(known(VERSION), 2)
    assert isinstance(events._read_event(told, digests, (FULL, WINDOW), {}), BlockStored)
    setattr(told, field, value)
    with pytest.raises(EngineFault, match=re.escape(complaint)):
        events._read_event(told, digests, (FULL, WINDOW), {})


@needs_events
def test_items_that_do_not_name_a_block_are_told_behind_its_adapter() -> None:
    """A block that outputs complete is named by its last item alone in 0.19.1."""
    events = importlib.import_module(f"{ADAPTER}_events")
    cat, dog = ("cat", -2), ("dog", 2)
    told = events.BlockStored([b""], None, [1, 2, 3, 4], 4, 1, "GPU", "z", [("z", cat, dog)])
    key = BlockKey(None, (1, 2, 3, 4), adapter="z", items=(dog,))
    hashed = ("z", cat, dog) if known(VERSION).has_all_items else ("z", dog)
    events._check_extras(told, (key,), lambda _: hashed)
    for other in (("y", dog), ("z", ("cow", 2)), (dog,)):
        with pytest.raises(EngineFault, match="extra_keys of"):
            events._check_extras(told, (key,), lambda _, other=other: other)
