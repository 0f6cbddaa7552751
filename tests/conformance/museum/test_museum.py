"""Seeded bugs: each is valid, its listing is right, and one that is not found is reported."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from blockstep.conformance import museum
from blockstep.conformance.command.main import app
from blockstep.conformance.engine import Capability, Safety, get_traits
from blockstep.conformance.judge.checks import PROPERTIES
from blockstep.conformance.judge.properties.output import cut_at_stop
from blockstep.conformance.judge.worker import NextToken
from blockstep.conformance.museum import EXHIBITS, SeededBug, build, pins, pool
from blockstep.conformance.museum.bug import Page, collect
from blockstep.conformance.museum.trial import (
    DIVERGENCE,
    STANDINGS,
    SURVIVED,
    BugRunMode,
    Fall,
    Trial,
    Tried,
    json_of,
    load_as_foreign,
    museum_page,
    name_of,
    row_of,
    run_trial,
)
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.protocol.token_function import token_function
from blockstep.conformance.recorded import step_records
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.metamorphic import draw_workload, run_workload
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.core.rules import Rules
from blockstep.spec.vocabulary import (
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    Policy,
    Request,
    TokenIds,
)

DOCS = Path(__file__).parents[3] / "docs"
NAMED = {entry.id for entry in PROPERTIES} | {"P10"}
"""Properties that a finding may name. P10 is about whole runs: the driver checks it."""
QUICK = ("leak-on-abort", "forward-frees")


def change_nothing(rules: Rules, _config: Config) -> Rules:
    return rules


IDLE = SeededBug("nothing-is-wrong", "nothing", "nowhere", ("P1",), change_nothing)
SHOWN, HIDDEN = STANDINGS[1:]
UNSEEN = [name for name, entry in EXHIBITS.items() if HIDDEN.why_invisible(entry)]


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def list_replaced(entry: SeededBug) -> dict[Any, Any]:
    """Return the functions that a seeded bug replaces in the configs of `list_configs`."""
    replaced: dict[Any, Any] = {}

    class Noting(Rules):
        def replacing(self, function: Any, by: Any) -> Any:
            replaced[function] = by
            return self

    for config in list_configs(entry):
        entry.change(Noting(), config)
    return replaced


def list_configs(entry: SeededBug) -> list[Config]:
    """Return a config with the features that a seeded bug needs, and variants."""
    state = KVGroup(GroupKind.RECURRENT, 16, mamba_cache_mode=MambaCacheMode.ALIGN)
    groups: tuple[KVGroup, ...] = (KVGroup(GroupKind.FULL, 16),) if entry.takes_groups else ()
    groups += (state,) if entry.takes_states else ()
    config = Config(num_blocks=8, groups=groups, **TAKEN.get(entry.takes, {}))
    uncached = replace(config, enable_prefix_caching=False)
    across = [replace(config, is_encoder_decoder=True)] if entry.takes == "encoder" else []
    return [config, uncached, *across, replace(config, watermark_blocks=1)]


@pytest.mark.parametrize("name", EXHIBITS)
def test_a_seeded_bug_replaces_functions_of_the_spec_by_equal_signatures(name: str) -> None:
    # Otherwise it would be found by a TypeError, and no check would be tested.
    replaced = list_replaced(EXHIBITS[name])
    assert replaced
    for function, by in replaced.items():
        assert function.__module__.startswith("blockstep.spec."), function
        wanted = inspect.signature(function).parameters
        inspect.signature(by).bind(*[None] * len(wanted))


FELL_LATE = (
    ("budget-not-restored", STANDINGS[0]),
    ("last-group-counts", STANDINGS[0]),
    ("windows-leave-too-early", SHOWN),
)
"""Bugs that once needed more than 25,000 events with a seed of 1 to 3, or survived 60,000."""


@pytest.mark.soak
@pytest.mark.parametrize(("name", "standing"), FELL_LATE, ids=[name for name, _ in FELL_LATE])
def test_bugs_that_once_were_found_late_are_found_in_20_000_events(
    name: str, standing: BugRunMode
) -> None:
    trial = Trial(seeds=(1, 2, 3), max_events=20_000, standing=standing, shrinks=False)
    (tried,) = run_trial([EXHIBITS[name]], trial)
    assert tried.problem == "", tried.falls


@pytest.fixture
def with_survivor(monkeypatch: pytest.MonkeyPatch) -> str:
    """A seeded bug that changes nothing. Only this process knows it, so a run needs one job."""
    exhibits = {**EXHIBITS, IDLE.name: IDLE}
    monkeypatch.setattr(museum, "EXHIBITS", exhibits)
    monkeypatch.setattr("blockstep.conformance.command.museum.EXHIBITS", exhibits)
    return IDLE.name


def test_every_seeded_bug_names_its_source_and_its_properties() -> None:
    for name, entry in EXHIBITS.items():
        assert entry.name == name
        assert entry.title, name
        assert re.search(r"#\d+|vLLM|rule|by example, section", entry.upstream), name
        assert entry.properties, name
        assert set(entry.properties) <= NAMED, name
        assert len(set(entry.properties)) == len(entry.properties), name
        assert entry.change.__doc__, name
        assert "\n" not in entry.change.__doc__.strip(), name


TAKEN: dict[str, dict[str, Any]] = {
    "encoder": {"encoder_compute_budget": 4, "encoder_cache_size": 4},
    "events": {"enable_kv_cache_events": True},
    "transfers": {"kv_connector": True},
    "pins": {"policy": Policy.CONTINUUM},
    "forks": {"enable_forks": True},
    "tiers": {"kv_connector": True, "swap_min_tokens": 1, "admission_high_blocks": 2},
}
"""Fields of the config that ask for a feature."""


def test_every_seeded_bug_can_be_built() -> None:
    for name, entry in EXHIBITS.items():
        groups = (KVGroup(GroupKind.FULL, 16),) if entry.takes_groups else ()
        engine = build(name)(Config(num_blocks=8, groups=groups, **TAKEN.get(entry.takes, {})))
        assert (Capability.GROUPS in engine.capabilities()) is entry.takes_groups, name
        assert engine.snapshot() is not None, name
        assert engine.change is entry.change, name


def test_titles_differ_and_wrong_fixes_name_another_bug() -> None:
    assert len({entry.title for entry in EXHIBITS.values()}) == len(EXHIBITS)
    fixes = [entry for entry in EXHIBITS.values() if entry.wrong_fix_of]
    assert fixes
    for entry in fixes:
        assert not EXHIBITS[entry.wrong_fix_of].wrong_fix_of
        assert entry.wrong_fix_of != entry.name


def test_the_page_on_discrepancies_names_existing_checks_and_bugs() -> None:
    page = (DOCS / "explanation" / "discrepancies.md").read_text()
    of_listings, changes = (
        page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for title in ("Listings of the block manager", "The twelve changes of the fork")
    )
    rows = re.findall(r"^\| (\d+): .* \| (.*) \|$", changes, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [*range(1, 13)]
    sentences = re.findall(r'"(\w+_\w+)"', inspect.getsource(step_records))
    named = [name for _, cell in rows for name in re.findall(r"`([\w-]+)`", cell)]
    assert set(named) <= EXHIBITS.keys() | set(sentences)
    assert all(re.search("`", cell) for _, cell in rows[1:])  # the first changes imports only
    of_pins = {entry.name for entry in pins.PAGE.exhibits}
    assert of_pins <= {*re.findall(r"`([\w-]+)`", changes)}
    shown = re.findall(r"Seeded bugs?: ((?:`[\w-]+`(?:, )?)+)", of_listings)
    planted = {name for names in shown for name in re.findall(r"`([\w-]+)`", names)}
    assert {entry.name for entry in pool.LISTINGS.exhibits} <= planted <= EXHIBITS.keys()


def test_a_name_that_is_taken_is_refused() -> None:
    page = Page()
    page.exhibits += [IDLE, IDLE]
    with pytest.raises(ValueError, match="the name is taken"):
        collect([page])


def test_a_wrong_fix_of_an_unknown_bug_is_refused() -> None:
    page = Page()
    page.exhibit("a title", "#1", "P1", wrong_fix_of="nothing")(change_nothing)
    with pytest.raises(ValueError, match="no 'nothing' to fix"):
        collect([page])


def test_found_bugs_are_reported_as_table_json_and_page(
    tmp_path: Path,
) -> None:
    out, page = tmp_path / "museum.json", tmp_path / "museum.md"
    options = ("--seed", 0, "--seed", 1, "--budget", 30_000, "--jobs", 1)
    result = blockstep("museum", "run", *QUICK, *options, "--json", out, "--markdown", page)
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in QUICK)
    assert "4 of 4 hunts killed" in result.output
    rows = json.loads(out.read_text())
    assert [row["exhibit"] for row in rows] == list(QUICK)
    assert [fall["seed"] for fall in rows[0]["seeds"]] == [0, 1]
    assert rows[0]["seeds"][0]["killed by"].startswith("P1 ")
    assert not any(row["survived"] for row in rows)
    text = page.read_text()
    assert "| forward-frees | a block table is freed from its head |" in text
    # In two processes, with progress after each hunt.
    progress: list[tuple[float, str]] = []
    trial = Trial((0, 1), max_events=30_000, jobs=2)
    tried = run_trial(
        [EXHIBITS["forward-frees"]], trial, lambda done, text: progress.append((done, text))
    )
    assert progress == [(0.5, "1 of 2 hunts, none survived"), (1.0, "2 of 2 hunts, none survived")]
    side_by_side = [json_of(one) for one in tried]
    for row in (rows[1], *side_by_side):
        for fall in row["seeds"]:
            del fall["seconds"]
    assert side_by_side == rows[1:]


def test_the_listing_describes_each_seeded_bug(tmp_path: Path) -> None:
    out = tmp_path / "museum.json"
    result = blockstep("museum", "--json", out)
    assert result.exit_code == 0
    rows = {row["exhibit"]: row for row in json.loads(out.read_text())}
    assert list(rows) == list(EXHIBITS)
    assert rows["zombie-key"]["speaks"] == list(EXHIBITS["zombie-key"].properties)
    assert rows["all-keys-withdrawn"]["what is wrong"].startswith("wrong fix of zombie-key: ")


def test_a_row_shows_the_results_of_all_seeds() -> None:
    falls = (Fall(0, "P1 a", 1_020, 1.26, 5), Fall(1, SURVIVED, 300, 2.0, None))
    tried = Tried(IDLE, falls)
    row = row_of(tried)
    assert row["killed by"] == f"P1 a; {SURVIVED}"
    assert row["events"] == "1,020 / 300"
    assert row["seconds"] == "1.3 / 2.0"
    assert row["shrunk to"] == "5 / -"
    assert tried.survived
    assert json_of(tried)["survived"]
    page = museum_page([json_of(tried)])
    assert f"| nothing-is-wrong | nothing | nowhere | P1 a; {SURVIVED}: 1,020 / 300 |" in page


@pytest.mark.parametrize(
    ("kind", "property_id", "name"),
    [
        (FindingKind.PROPERTY, "P3", "P3 words"),
        (FindingKind.DIVERGENCE, "", DIVERGENCE),
        (FindingKind.FAULT, "", "fault words"),
        (FindingKind.LIVENESS, "P10", "P10 words"),
    ],
)
def test_a_finding_is_named_by_its_property_or_kind(
    kind: FindingKind, property_id: str, name: str
) -> None:
    assert name_of(Finding(kind, property_id, "words", "")) == name


# At safety: judged by the properties alone.


def test_a_run_at_safety_shows_or_hides_the_state(
    tmp_path: Path,
) -> None:
    names = ("museum", "run", "leak-on-abort", "forward-frees", "--seed", 0)
    common = (*names, "--jobs", 1, "--budget", 2_000, "--no-shrink")
    files = [tmp_path / f"{index}.json" for index in range(3)]
    page = tmp_path / "museum.md"
    safety = ("--equivalence", "safety")
    shown = blockstep(*common, *safety, "--json", files[0])
    assert shown.exit_code == 0, shown.output
    assert "safety: 1 of 1 hunts killed" in shown.output
    assert "1 seeded bugs are invisible" in shown.output
    hidden = blockstep(*common, *safety, "--hidden", "--json", files[1])
    assert hidden.exit_code == 0, hidden.output
    assert "safety, state hidden: 1 of 1 hunts killed" in hidden.output
    rows = [json.loads(file.read_text()) for file in files[:2]]
    assert [(row[0]["equivalence"], row[0]["state"]) for row in rows] == [
        ("safety", "shown"),
        ("safety", "hidden"),
    ]
    assert rows[0][0]["seeds"][0]["killed by"].startswith("P1 ")
    assert not rows[1][0]["seeds"][0]["killed by"].startswith("P1 ")  # no state shows the leak
    assert rows[0][1]["survived"]
    assert rows[0][1]["invisible"] == EXHIBITS["forward-frees"].invisible
    both = [option for file in files[:2] for option in ("--beside", file)]
    exact = blockstep(*common, *both, "--markdown", page, "--json", files[2])
    assert exact.exit_code == 0, exact.output
    text = page.read_text()
    assert "| upstream | exact | safety | safety, state hidden |" in text
    assert text.count("| invisible (policy: which free block is evicted first): not in ") == 2


def test_surviving_bugs_and_wrongly_listed_ones_are_reported(
    with_survivor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = replace(EXHIBITS["leak-on-abort"], invisible="policy: none of it is")
    exhibits = {**museum.EXHIBITS, "leak-on-abort": listed}
    monkeypatch.setattr("blockstep.conformance.command.museum.EXHIBITS", exhibits)
    options = ("--seed", 0, "--budget", 300, "--jobs", 1, "--equivalence", "safety", "--no-shrink")
    result = blockstep("museum", "run", with_survivor, "leak-on-abort", *options)
    assert result.exit_code == 5
    assert SURVIVED in result.output
    assert f"blockstep: survived: {with_survivor}\n" in result.output
    assert (
        "found though listed as invisible (P1 every_block_is_free_or_held): leak" in result.output
    )


def test_a_bug_that_only_the_state_shows_is_found_with_states() -> None:
    entry = EXHIBITS["stale-frame-rolls-back"]
    assert [bool(standing.why_invisible(entry)) for standing in STANDINGS] == [False, False, True]
    result = run_trial([entry], Trial((0,), 30_000, standing=SHOWN, shrinks=False))
    assert not result[0].problem


def test_no_bug_counts_as_invisible_at_exact() -> None:
    tried = Tried(EXHIBITS["forward-frees"], (Fall(0, SURVIVED, 300, 1.0, None),))
    assert not tried.invisible
    assert tried.problem == "survived"
    assert not replace(tried, standing=HIDDEN).problem


def play_unseen(name: str, num_events: int, seed: int, is_hidden: bool) -> None:
    """Play episodes of a seeded bug at safety, which must have no finding."""
    given = (EXHIBITS[name].takes,) if EXHIBITS[name].takes else ()
    options = CheckOptions(f"museum:{name}", seed=seed, hide_state=is_hidden, with_features=given)
    make_engine = load_as_foreign(options)
    assert get_traits(make_engine).equivalence == Safety()
    played, index = 0, 0
    while played < num_events:
        episode = run_episode(options, index, make_engine)
        assert episode.first is None, (name, seed, index, episode.first)
        assert episode.has_snapshot is not is_hidden
        played, index = played + episode.num_events, index + 1


def count_tokens_of_the_model(name: str, seed: int, num_workloads: int) -> int:
    """Check that workloads get the tokens of the model. Return the number of tokens."""
    make_engine, num_tokens = load_engine(f"museum:{name}"), 0
    for index in range(num_workloads):
        given = (EXHIBITS[name].takes,) if EXHIBITS[name].takes else ()
        options = CheckOptions(seed=seed, with_features=given)
        swarm, requests = draw_workload(options, index, make_engine)
        answers = run_workload(make_engine, swarm, swarm.config, requests)
        next_token = token_function(swarm.token_seed, swarm.vocabulary_size)
        for request in requests:
            # A session is answered input by input, so its tokens are not those of one request.
            if request.request_id in answers and not request.resumable:
                due = list_due(swarm.config, request, next_token)
                assert answers[request.request_id].token_ids == due, (name, seed, index)
                num_tokens += len(due)
    return num_tokens


def list_due(config: Config, request: Request, next_token: NextToken) -> TokenIds:
    """Return the tokens that the model gives a request, up to its stop."""
    outputs: list[int] = []
    while True:
        token = next_token([*request.prompt_token_ids, *outputs])
        _, stop = cut_at_stop(config, request, outputs[:], (token,))
        outputs.append(token)
        if stop is not None:
            return tuple(outputs)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("name", UNSEEN)
def test_an_invisible_bug_has_no_finding_at_safety(name: str) -> None:
    if EXHIBITS[name].invisible:
        play_unseen(name, 150, 1, is_hidden=False)
    play_unseen(name, 250, 2, is_hidden=True)
    assert count_tokens_of_the_model(name, 3, 3) > 10


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", UNSEEN)
def test_an_invisible_bug_has_no_finding_in_many_events(name: str, seed: int) -> None:
    if EXHIBITS[name].invisible:
        play_unseen(name, 150_000, seed, is_hidden=False)
    play_unseen(name, 150_000, seed, is_hidden=True)
    assert count_tokens_of_the_model(name, seed, 300) > 1_000


def test_a_bug_that_changes_tokens_is_noticed() -> None:
    with pytest.raises(AssertionError):
        count_tokens_of_the_model("lost-rollback", 0, 40)


def test_an_invisible_bug_names_its_kind_and_reason() -> None:
    assert UNSEEN
    for name in UNSEEN:
        assert re.match(r"(policy|efficiency|books): \w", HIDDEN.why_invisible(EXHIBITS[name]))
        if name != "nulls-freed":  # no request owns the null block, so it cannot leak
            assert "P1" not in EXHIBITS[name].properties  # a leak is never invisible
