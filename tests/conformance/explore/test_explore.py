"""`explore`: visited states, findings and tables, which do not depend on the number of jobs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from blockstep.conformance.command.explore import explore_command
from blockstep.conformance.explore.canonical import LEFT_OUT, Canonicaliser
from blockstep.conformance.explore.cycles import find_cycles, get_no_progress
from blockstep.conformance.explore.packing import Copies
from blockstep.conformance.explore.shard import OUT_OF_NOTHING, Task
from blockstep.conformance.explore.tables import NOWHERE, UNBROKEN, format_program, list_worlds
from blockstep.conformance.explore.transition_checks import (
    get_history,
    get_moment,
)
from blockstep.conformance.explore.walk import LostShardError, _Processes, walk
from blockstep.conformance.explore.world import World, get_events
from blockstep.conformance.explore.worlds import WORLDS
from blockstep.conformance.features.tiers import worlds as tiers
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.museum import EXHIBITS
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.spec import vocabulary as v
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.requests import Frame, FrameRow, Holding, RequestState
from blockstep.spec.core.state import State
from blockstep.spec.features.encoder.cache import Encoder, Entry
from blockstep.spec.features.kv_transfer.transfers import Load, Transfers
from blockstep.spec.features.pins import Pins
from blockstep.spec.features.structured_output.grammar import GrammarState
from blockstep.spec.profiles import (
    QUIRKS,
    Profile,
    Quirk,
    QuirkStory,
    get_smallest_profile,
    initial_state,
)
from blockstep.spec.releases.encoder import STORIES as ENCODER_STORIES
from blockstep.spec.snapshots import get_snapshot
from blockstep.spec.transition import transition

QUICK = (
    *(world.name for world in tiers.WORLDS),
    "loop",
    "equals",
    "endings",
    "pair",
    "tail",
    "whole",
    "seats",
    "shared",
    "rows",
    "embeds",
    "doubt",
    "kinds",
    "together",
    "across",
    "charged",
    "ragged",
    "heads",
    "narrow",
    "uncut",
    "unread",
    "doubts",
    "starved",
    "spare",
    "zeroed",
    "withdrawn",
    "states",
    "copies",
    "rewritten",
    "grammar",
    "masks",
    "chunked",
    "free",
    "further",
    "held",
    "filled",
    "restored",
    "grouped",
    "pictured",
)
"""Worlds that a walk explores within a second."""
FORKING = tuple(name for name, world in WORLDS.items() if world.forks and name not in QUICK)
KINDS = (
    *(State, RequestState, Holding, GrammarState, Frame, FrameRow, Pool, Encoder, Entry),
    *(Transfers, Load, v.KVLoad, v.HeldBlocks, v.DeferredFree, v.KVOffer, Pins, v.Pin),
)
"""The classes that a state consists of."""
HOUSE = Path(__file__).resolve().parents[3]
RESULTS = HOUSE / "benchmarks" / "results"


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a table that `blockstep explore --json` wrote, and the documentation shows."""
    rows: list[dict[str, Any]] = json.loads(max(RESULTS.glob(f"*-{name}.json")).read_text())
    return rows


QUIRK_ROWS = {
    row["quirk"]: [str(cell) for key, cell in row.items() if key != "quirk"]
    for row in read_rows("explore-quirks")
}
UNSEEN = {
    Quirk.ONLY_FULL_ATTENTION_IS_ZEROED,
    Quirk.FORBIDDEN_DRAFT_UNMASKS_LATER_POSITIONS,
    *(story.quirk for story in ENCODER_STORIES),
    Quirk.INVALID_BLOCK_ROLLS_BACK_ONE_REQUEST,
    Quirk.BLOCKS_OF_LOADS_ARE_ZEROED,
    Quirk.SEPARATE_QUEUE_FOR_COMPUTED_REQUESTS,
} - {
    Quirk.ITEMS_HELD_WITHOUT_A_ROW,
    Quirk.DRAFT_HEAD_STOPS_BEFORE_WHOLE_ITEMS,
    Quirk.CROSS_ATTENTION_CACHE_OVERCOUNTS_FREE_SPACE,
}
"""Quirks that violate no property in a walk. The worker checks zeroed blocks, bitmasks, items and
loads, and a walk has no worker; the queue in which an idle session waits violates nothing."""
UNREACHED = {
    Quirk.DRAFT_HEAD_BLOCK_IS_LOOKED_UP_ONCE,
    Quirk.DRAFT_HEAD_CUTS_SHORT_WINDOWS_TWICE,
    Quirk.COMMON_PREFIX_COUNTS_IDLE_SESSIONS,
    Quirk.REFUSED_SESSION_FREES_SKIPPED_BLOCKS,
    Quirk.SESSION_KEEPS_BLOCKS_WITHOUT_CHECK,
    Quirk.IDLE_SESSIONS_KEEP_RUNNING_SLOTS,
    Quirk.CHUNK_IS_CUT_FOR_STATES_BEFORE_ITEMS,
    Quirk.REMAINDER_OF_AN_ITEM_IS_SPLIT,
    Quirk.LOADED_REQUEST_WAITS_BEHIND_THE_HEAD,
    Quirk.RESET_IGNORES_TRANSFERS_WITHOUT_BLOCKS,
    Quirk.RESET_WITHOUT_A_STORE_SUCCEEDS,  # no world without a store resets one
    Quirk.REASONING_END_IS_SEARCHED_IN_THE_NEXT_INPUT,  # no world has reasoning in a session
}
"""Quirks that no small world shows. Some change only a hint, which no walk compares. Others
change a reset under groups that skip blocks, and no world has such groups."""
DEFECT_ROWS = {
    row["defect"]: (str(row["events"]), row["world"], row["first difference"])
    for row in read_rows("explore-seeded-bugs")
}


NO_WORLD = {
    *("loaded-give-way-alone", "late-report-kills", "load-eats-a-hit", "last-group-counts"),
    *("all-pins-give-way", "preempted-turns-stay-warm", "row-of-cold-victim-stays"),
    *("shared-behind-the-difference", "copy-outlives-its-row", "branch-behind-the-window"),
    "digest-in-one-byte",
}
"""Seeded bugs that differ in no small world of stores, pins, forks or tiers. They are found by
`blockstep museum run`."""


def play(world: World, *events: v.Event) -> State:
    state = initial_state(world.config)
    for event in events:
        result = transition(state, event)
        assert not isinstance(result, v.Rejected), result
        state = result.state
    return state


def sampled(frame_id: int, *rows: tuple[str, tuple[int, ...]]) -> v.Commit:
    return v.Commit(frame_id, tuple(v.RowTokens(name, tokens) for name, tokens in rows))


def explore(*args: object) -> Result:
    app = typer.Typer()
    app.command()(explore_command)
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        "pipeline",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("marks", "reasoning", *FORKING)),
    ],
)
def test_a_walk_has_the_committed_counts_and_every_property_holds(name: str) -> None:
    walked = walk(Task(WORLDS[name]))
    assert walked.is_complete
    assert walked.found == ()
    assert walked.counts == WORLDS[name].expected


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "name", ["loop", "equals", "endings", "whole", "seats", "shared", "embeds"]
)
def test_the_host_engine_agrees_on_every_event_in_every_state(name: str) -> None:
    walked = walk(Task(WORLDS[name], properties=False, engine="host"))
    assert walked.is_complete
    assert walked.found == ()
    assert walked.counts == WORLDS[name].expected


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    "name",
    [
        "rewritten",
        "copies",
        "filled",
        "reswapped",
        "several",
        "closed",
        "pipeline",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("states", "marks", *FORKING)),
    ],
)
def test_the_host_engine_agrees_in_every_state_of_larger_worlds(name: str) -> None:
    walked = walk(Task(WORLDS[name], properties=False, engine="host"))
    assert walked.is_complete
    assert walked.found == ()
    assert walked.counts == WORLDS[name].expected


def test_every_world_has_a_valid_config_and_committed_counts() -> None:
    for world in WORLDS.values():
        initial_state(world.config)
        assert world.expected is not None
    assert len({world.summary for world in WORLDS.values()}) == len(WORLDS)


def test_several_processes_visit_and_find_the_same() -> None:
    world = WORLDS["equals"]
    assert walk(Task(world), jobs=2).counts == walk(Task(world)).counts
    task = Task(world, properties=False, engine="museum:forward-frees")
    alone, together = walk(task), walk(task, jobs=2)
    assert alone.found == together.found != ()
    assert alone.path == together.path


def test_a_walk_stops_before_it_has_too_many_states() -> None:
    walked = walk(Task(WORLDS["pair"], max_states=100))
    assert not walked.is_complete
    assert walked.counts.states == 83
    assert walked.found == ()


def test_a_process_that_dies_is_reported_as_dead() -> None:
    shards = _Processes(Task(WORLDS["loop"]), 2)
    for process in shards.processes:
        process.kill()
        process.join()
    with pytest.raises(LostShardError, match="died"):
        shards.call("start")
    shards.close()


def test_the_example_of_the_page_walks_its_world() -> None:
    page = (HOUSE / "docs" / "explanation" / "small-worlds.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    made: dict[str, Any] = {}
    exec(code, made)
    walked = made["walked"]
    assert (walked.is_complete, walked.found, walked.cycle) == (True, (), ())
    assert walked.counts.states > 100


# --- symmetry


def test_a_digest_covers_every_field_of_a_state() -> None:
    known = {
        "pool", "requests", "waiting", "skipped_waiting", "running", "pause_state", "frames",
        "finished_req_ids", "prev_scheduled_req_ids", "parts",
        "status", "output_token_ids", "num_computed_tokens", "num_output_placeholders",
        "spec_token_ids", "is_prefill_chunk", "holdings", "block_table", "num_cached_blocks",
        "num_cached_tokens",
        "rows", "draft_token_ids", "samples", "is_dropped",
        "ref_counts", "free_queue", "cached", "journal", "deferred_frees",
        "state", "reasoning_ended",
        "size", "entries", "freeable", "offered", "freed", "num_embeds",
        "holders",
        "offers", "parked", "held", "has_unconfirmed_kv", "is_received",
        "num_tokens", "is_async", "delays_free", "block_ids", "num_external_tokens", "block_tables",
        "is_recving", "is_sending",
        "pins", "now", "estimates", "job_id", "end",
    }  # fmt: skip
    fields = {field.name for kind in KINDS for field in dataclasses.fields(kind)}
    assert fields == known | LEFT_OUT


def test_request_ids_and_tokens_without_meaning_are_renamed() -> None:
    world = World(
        "twins",
        "",
        v.Config(num_blocks=5, block_size=1, max_model_len=4),
        (v.Request("A", (0, 0), max_tokens=2), v.Request("B", (0, 0), max_tokens=2)),
        vocabulary=(5, 6),
    )
    digest = Canonicaliser(world).digest
    left = play(world, v.Submit(world.requests[0]), v.Schedule(), sampled(0, ("A", (5,))))
    right = play(world, v.Submit(world.requests[1]), v.Schedule(), sampled(0, ("B", (6,))))
    assert left != right
    assert digest(left) == digest(right)
    assert digest(left) != digest(play(world, v.Submit(world.requests[0]), v.Schedule()))


def test_ids_under_priority_and_prompt_tokens_are_not_renamed() -> None:
    world = World(
        "ranks",
        "",
        v.Config(num_blocks=5, block_size=1, max_model_len=4, policy=v.Policy.PRIORITY),
        (v.Request("A", (0,), max_tokens=2), v.Request("B", (0,), max_tokens=2)),
        vocabulary=(0, 1),
    )
    digest = Canonicaliser(world).digest
    starts = [play(world, v.Submit(request), v.Schedule()) for request in world.requests]
    assert digest(starts[0]) != digest(starts[1])
    answers = [transition(starts[0], sampled(0, ("A", (token,)))) for token in (0, 1)]
    assert len({digest(a.state) for a in answers if not isinstance(a, v.Rejected)}) == 2


def test_a_request_with_more_history_is_not_interchangeable_with_an_equal_one() -> None:
    world = WORLDS["lacking"]
    assert world.classes == {"A": 0, "B": 1}
    of_both = tuple(dataclasses.replace(world.kv_offers[-1], request_id=name) for name in "AB")
    assert dataclasses.replace(world, kv_offers=of_both).classes == {"A": 0, "B": 0}
    aborts = (v.Abort(("B",)),)
    assert dataclasses.replace(world, kv_offers=of_both, also=aborts).classes == {"A": 0, "B": 1}


def list_futures(world: World, state: State) -> Counter[object]:
    """Count what each event leads to: observation, canonical state and whether it stalls."""
    digest, futures = Canonicaliser(world).digest, Counter[object]()
    for event in get_events(world, state):
        moment = get_moment(state, event)
        after = digest(moment.after)
        stalls = get_no_progress(moment, after == digest(state))
        futures[type(event), type(moment.observation), after, stalls] += 1
    return futures


@pytest.mark.parametrize("name", ["alone", "edge", "equals", "lacking", "names", "spaced", "whole"])
def test_states_with_equal_digests_have_the_same_future(name: str) -> None:
    """If they had not, a walk would leave out states."""
    world = WORLDS[name]
    digest, start = Canonicaliser(world).digest, initial_state(world.config)
    known, left, equals = {digest(start): start}, [start], list[tuple[State, State]]()
    for state in left:
        for event in get_events(world, state):
            after = get_moment(state, event).after
            other = known.setdefault(digest(after), after)
            if other is after and after is not state:
                left.append(after)
            elif other != after:
                equals.append((other, after))
    assert len(left) == world.expected.states  # type: ignore[union-attr]
    for one, other in equals[:: max(len(equals) // 100, 1)]:
        assert list_futures(world, one) == list_futures(world, other)


def test_frame_ids_do_not_change_a_digest() -> None:
    world = WORLDS["loop"]
    digest = Canonicaliser(world).digest
    once = play(world, v.Schedule())
    assert digest(once) == digest(play(world, v.Schedule(), v.Schedule()))
    assert once != play(world, v.Schedule(), v.Schedule())


def test_a_digest_depends_on_the_contents_of_blocks() -> None:
    world = WORLDS["pair"]
    digest = Canonicaliser(world).digest
    a = world.requests[0]
    one = play(world, v.Submit(a), v.Schedule())
    other = play(world, v.Submit(dataclasses.replace(a, prompt_token_ids=(0, 1, 0))), v.Schedule())
    assert digest(one) != digest(other)


# --- what is judged


@pytest.mark.parametrize("name", ["endings", "gap", "guesses", "pipeline", "left", "overtaken"])
def test_the_history_read_from_a_state_equals_that_of_a_run(name: str) -> None:
    """The test compares the parts of the history that the properties use."""
    world = WORLDS[name]
    history, state = History(world.config), initial_state(world.config)
    index = 0
    for turn in range(300):
        events = [e for e in get_events(world, state) if not isinstance(e, v.Submit) or turn % 3]
        index = (index * 31 + 7 + turn) % len(events)
        result = transition(state, events[index])
        if isinstance(result, v.Rejected):
            continue
        before, after = get_snapshot(state), get_snapshot(result.state)
        history.record(Step(world.config, 1, events[index], result.observation, before, after))
        state = result.state
        read = get_history(state)
        assert {n: (life.tokens, life.drafts) for n, life in read.lives.items()} == {
            n: (life.tokens, life.drafts) for n, life in history.lives.items()
        }
        assert {n: life.num_cached_tokens for n, life in read.lives.items()} == {
            n: life.num_cached_tokens for n, life in history.lives.items()
        }
        assert {
            frame: [(row.request_id, row.drafts, row.samples) for row in rows]
            for frame, rows in read.frames.items()
        } == {
            frame: [(row.request_id, row.drafts, row.samples) for row in rows]
            for frame, rows in history.frames.items()
        }
        assert {n: life.admitted_in >= 0 for n, life in read.lives.items()} == {
            n: life.admitted_in >= 0 for n, life in history.lives.items()
        }
        waiting = [n for n, request in state.requests.items() if request.status is v.Status.WAITING]
        assert {n: read.lives[n].is_branch for n in waiting} == {
            n: history.lives[n].is_branch for n in waiting
        }
        assert read.promised == history.promised
        assert read.ended == history.ended
        assert read.scheduled == history.scheduled


def test_a_quirk_is_found_with_its_property() -> None:
    quirk = Quirk.MIN_TOKENS_MASK_LENGTH
    walked = walk(Task(WORLDS["endings"], Profile(quirk, frozenset({quirk}))))
    assert any(line.startswith("P") for line in walked.found)
    assert len(walked.path) == 5


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("story", QUIRKS, ids=lambda story: story.quirk)
def test_a_quirk_violates_its_property_as_in_the_committed_table(
    story: QuirkStory,
) -> None:
    quirk = story.quirk
    differs_after, there, violates_after, world, sentence = QUIRK_ROWS[quirk]
    if quirk in UNREACHED:
        assert {*QUIRK_ROWS[quirk]} == {NOWHERE}
        return
    without = Profile("without", frozenset(story.upon))
    differs = walk(Task(WORLDS[there], without, properties=False, quirk=quirk))
    assert str(len(differs.path)) == differs_after
    assert "quirk" in differs.found[0]
    if not story.property_ids:
        assert (violates_after, world, sentence) == (NOWHERE, NOWHERE, UNBROKEN)
        walked = walk(Task(WORLDS[there], get_smallest_profile(story), max_states=2_000))
        assert walked.found == ()
        return
    if quirk in UNSEEN:
        assert (violates_after, world, sentence) == (NOWHERE, NOWHERE, NOWHERE)
        return
    walked = walk(Task(WORLDS[world], get_smallest_profile(story)))
    assert str(len(walked.path) + len(walked.cycle)) == violates_after
    assert any(line.startswith(sentence) for line in walked.found)
    assert sentence.split()[0] in story.property_ids


def test_a_quirk_differs_before_it_violates_a_property() -> None:
    quirk = Quirk.MIN_TOKENS_MASK_LENGTH
    walked = walk(Task(WORLDS["endings"], properties=False, quirk=quirk))
    assert "quirk" in walked.found[0]
    assert isinstance(walked.path[-1].event, v.Commit)


def test_two_requests_that_preempt_each_other_are_a_cycle() -> None:
    quirk = Quirk.EQUALS_PREEMPT_THE_FIRST
    task = Task(WORLDS["equals"], Profile(quirk, frozenset({quirk})))
    assert any(line.startswith(("P10", "P16")) for line in walk(task).found)


@pytest.mark.parametrize(
    ("world", "quirks", "kinds", "cycle", "num_held"),
    [
        ("lacking", {Quirk.LOADED_REQUEST_KEEPS_ITS_BLOCKS},
         "schedule, store, store, submit, submit, transfers, transfers", "schedule", [1, 1]),
        ("lacking",
         {Quirk.LOADED_REQUEST_KEEPS_ITS_BLOCKS, Quirk.LOADED_REQUEST_WAITS_BEHIND_THE_HEAD},
         "schedule, store, store, store, submit, submit, transfers", "schedule", [0, 1]),
        ("again", {Quirk.LAST_TOKEN_IS_LOADED}, "schedule, schedule, store, submit, transfers",
         "transfers, schedule", [1]),
    ],
)  # fmt: skip
def test_loads_that_starve_each_other_or_repeat_for_ever_are_cycles(
    world: str, quirks: set[Quirk], kinds: str, cycle: str, num_held: list[int]
) -> None:
    """Each quirk that stalls does so in the fewest events, and nothing does without it.

    The digests of states decide between several shortest ways, and they change with the fields of a
    state. So the test compares the events without their order, and the blocks held at the end.
    """
    profile = Profile("", frozenset(quirks))
    walked = walk(Task(WORLDS[world], profile, properties=False, stalls=True))
    way, circle = (
        [line.split()[0] for line in format_program(steps)] for steps in (walked.path, walked.cycle)
    )
    assert ", ".join(sorted(way)) == kinds
    assert ", ".join(circle) == cycle
    state = initial_state(WORLDS[world].config, profile)
    for step in (*walked.path, *walked.cycle):
        result = transition(state, step.event)
        assert not isinstance(result, v.Rejected)
        state = result.state
    tables = [request.block_tables for request in state.requests.values()]
    assert sorted(sum(map(len, table)) for table in tables) == num_held
    assert not walk(Task(WORLDS[world], properties=False, stalls=True)).found


def test_a_load_that_fails_again_and_again_is_no_stall() -> None:
    """A failed load is repeated until one succeeds, so a walk finds no stall of the scheduler."""
    config = dataclasses.replace(
        WORLDS["again"].config,
        num_blocks=4,
        max_model_len=3,
        kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE,
    )
    world = dataclasses.replace(
        WORLDS["again"], config=config, requests=(v.Request("A", (0, 0), max_tokens=1),)
    )
    walked = walk(Task(world, properties=False, stalls=True))
    assert walked.is_complete
    assert not walked.found


def test_stalls_are_looked_for_past_violated_properties() -> None:
    result = explore("--preset", "lacking", "--profile", "vllm-0.19.1", "--stalls")
    assert result.exit_code == 4
    assert "P10 a cycle of states without progress" in result.output
    assert "and then for ever\n     1  schedule\n" in result.output


def test_a_cycle_is_found_in_a_graph_with_dead_ends() -> None:
    assert find_cycles([[1, 2, 2, 3], [3, 4]]) == []
    assert find_cycles([[1, 2, 2, 3, 3, 2], [4, 5, 5, 6, 6, 4, 7, 4]]) == [[2, 3], [3, 2]]
    assert find_cycles([[9, 9]]) == [[9]]


def test_the_shortest_program_that_reaches_a_goal_is_shown() -> None:
    result = explore("--preset", "pair", "--witness", "prefix_hit")
    assert result.exit_code == 0
    assert "prefix_hit: after 3 events (preset pair)" in result.output
    missing = explore("--preset", "loop", "--witness", "preempted")
    assert missing.exit_code == 5
    assert "not reached" in missing.output


# --- engines


class Grudging(SpecEngine):
    """An engine that plans nothing after it has refused an event."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Schedule) and getattr(self, "grudge", False):
            return v.Plan(0)
        answer = super().apply(event)
        self.grudge = isinstance(answer, v.Rejected)
        return answer


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("name", EXHIBITS)
def test_a_seeded_bug_is_found_by_a_program_of_the_committed_length(name: str) -> None:
    length, world, difference = DEFECT_ROWS[name]
    if name in NO_WORLD:
        assert (length, world, difference) == (NOWHERE,) * 3
        return
    task = Task(WORLDS[world], properties=False, engine=f"museum:{name}")
    walked = walk(task)
    assert str(len(walked.path)) == length
    assert walked.found[0].startswith(difference)
    engine = load_engine(f"museum:{name}")(WORLDS[world].config)
    state = initial_state(WORLDS[world].config)
    *before, last = walked.path
    for step in before:
        engine.apply(step.event)
        result = transition(state, step.event)
        state = state if isinstance(result, v.Rejected) else result.state
    if difference.startswith("the engine raised"):
        message = re.escape(walked.found[0].partition(": ")[2])
        with pytest.raises(Exception, match=message):
            engine.apply(last.event)
        return
    answer, result = engine.apply(last.event), transition(state, last.event)
    state = state if isinstance(result, v.Rejected) else result.state
    assert engine.snapshot() != get_snapshot(state) or answer != last.observation


@pytest.mark.parametrize("engine", ["host", "museum:forward-frees"])
def test_a_revived_engine_has_the_state_of_the_kept_one(engine: str) -> None:
    request = WORLDS["pair"].requests[0]
    copies = Copies(load_engine(engine), WORLDS["pair"])
    first = copies.revive(copies.start())
    first.apply(v.Submit(request))
    kept = copies.keep(first, copies.start(), v.Submit(request))
    assert isinstance(kept, bytes)
    twin = copies.revive(kept)
    first.apply(v.Schedule())
    assert twin.snapshot() != first.snapshot()
    twin.apply(v.Schedule())
    assert twin.snapshot() == first.snapshot()


def test_a_kept_engine_does_not_depend_on_object_identities() -> None:
    # A revived engine has other objects, which may have the addresses of earlier ones.
    copies = Copies(SpecEngine, WORLDS["pair"])
    engine = copies.revive(copies.start())
    event = v.Submit(WORLDS["pair"].requests[0])
    engine.apply(event)
    kept = copies.keep(engine, copies.start(), event)
    engine.snapshot()
    assert isinstance(kept, bytes)
    assert copies.keep(engine, copies.start(), event) == kept


class OneFrame(SpecEngine):
    """It has one frame in flight, whatever the config allows."""

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {"pipeline", "async"}


def test_a_world_that_needs_a_lacking_capability_is_reported_as_skipped() -> None:
    engine = f"{__name__}:OneFrame"
    result = explore("--preset", "pipeline", "--preset", "loop", "--engine", engine)
    assert f"pipeline: not walked: {engine} lacks pipeline\n" in result.output
    assert "loop: 8 states" in result.output
    assert result.exit_code == 0
    assert explore("--preset", "gap", "--engine", engine).exit_code == 5


def test_a_defect_that_needs_a_refused_event_is_marked() -> None:
    walked = walk(Task(WORLDS["loop"], properties=False, engine=f"{__name__}:Grudging"))
    assert walked.found
    assert walked.found[0].startswith(OUT_OF_NOTHING)


def test_an_engine_that_cannot_be_pickled_is_kept_as_its_events() -> None:
    class Stubborn(load_engine("host")):  # type: ignore[misc]
        def __reduce__(self) -> str:
            raise TypeError("not me")

    copies = Copies(Stubborn, WORLDS["pair"])
    request = WORLDS["pair"].requests[0]
    engine = copies.revive(copies.start())
    engine.apply(v.Submit(request))
    kept = copies.keep(engine, copies.start(), v.Submit(request))
    assert kept == (v.Submit(request),)
    assert copies.revive(kept).snapshot() == engine.snapshot()


# --- the command


def test_the_command_prints_what_it_visited(tmp_path: Path) -> None:
    result = explore("--preset", "loop", "--engine", "host", "--json", tmp_path / "out.json")
    assert result.exit_code == 0
    assert "loop: 8 states, 11 transitions" in result.output
    assert "host agrees on every event in every state" in result.output
    [row] = json.loads((tmp_path / "out.json").read_text())
    assert (row["format"], row["counts"]["states"], row["found"]) == ("blockstep-explore", 8, [])


def test_the_command_shows_the_program_of_a_defect() -> None:
    result = explore("--preset", "pair", "--engine", "museum:touch-leaves-block-queued")
    assert result.exit_code == 1
    assert "found after 6 events" in result.output
    assert "schedule" in result.output


def test_a_walk_with_too_many_states_gives_no_verdict() -> None:
    result = explore("--preset", "pair", "--max-states", 100)
    assert result.exit_code == 5
    assert "--max-states 100" in result.output


def test_drawn_graphs_show_every_state(tmp_path: Path) -> None:
    svg, dot = tmp_path / "loop.svg", tmp_path / "loop.dot"
    result = explore("--preset", "loop", "--svg", svg, "--dot", dot, "--json", tmp_path / "g.json")
    assert result.exit_code == 0, result.output
    assert svg.read_text().count("<rect") == 8
    assert dot.read_text().count("->") == 9
    assert len(json.loads((tmp_path / "g.json").read_text())["states"]) == 8


def test_tables_are_made_by_the_command(tmp_path: Path) -> None:
    page = tmp_path / "table.md"
    result = explore(
        "--museum", "--preset", "loop", "--name", "length-off-by-one", "--markdown", page
    )
    assert result.exit_code == 0, result.output
    assert "length-off-by-one" in result.output
    assert page.read_text().endswith("| loop | length-off-by-one 3 (rows A finish_reason) |\n")
    quirk = "min_tokens_mask_length"
    result = explore("--quirks", "--preset", "endings", "--name", quirk)
    assert result.exit_code == 0, result.output
    assert quirk in result.output


# --- the tables of the documentation


def test_every_world_has_a_row_with_its_counts() -> None:
    rows = list_worlds(WORLDS.values())
    assert [row["world"] for row in rows] == list(WORLDS)
    assert all(row["states"] != "not counted" for row in rows)


def test_there_is_a_row_for_every_quirk_and_every_seeded_bug() -> None:
    assert list(QUIRK_ROWS) == [str(quirk) for quirk in Quirk]
    assert sorted(DEFECT_ROWS) == sorted(EXHIBITS)
