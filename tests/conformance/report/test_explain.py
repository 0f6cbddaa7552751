"""`explain`: every name that a report uses is explained, and no explanation is stale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import blockstep.conformance
from blockstep.conformance.command.main import app
from blockstep.conformance.draw.presets import PRESETS
from blockstep.conformance.engine import EQUIVALENCES, Capability
from blockstep.conformance.judge.checks import ASKED_OF_ANSWERS, PROPERTIES
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.lockstep.score import Aspect
from blockstep.conformance.museum import EXHIBITS
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import write_program
from blockstep.conformance.protocol.sources import SOURCES, cite
from blockstep.conformance.report.check_texts import SENTENCES
from blockstep.conformance.report.explain import explain_name, get_names, spec_rules
from blockstep.conformance.report.finding_text import HEADLINES
from blockstep.conformance.report.glossary import get_terms, parse_terms, read_page
from blockstep.conformance.report.vocabulary import get_words, make_page
from blockstep.conformance.search.watchpoints import WATCHPOINTS
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import PROFILES, QUIRKS

HOUSE = Path(__file__).parents[3]
WING = HOUSE / "conformance" / "blockstep" / "conformance"
SPEAKERS = (
    *("judge", "lockstep", "protocol", "search", "recorded", "engines", "explore", "bench"),
    "features",
)
"""Packages that report findings."""
ALIASES = {"BlockId", "FrameId", "RequestId", "TokenId"}
SENTENCE = re.compile(r"[a-z]+(_[a-z0-9]+){2,}")
MAKERS_OF_FINDINGS = {"violated", "_complain", "complain", "_broken", "Finding", "Lookout"}
NAMES = (
    *(entry.id for entry in PROPERTIES),
    *(entry.name for entry in PROPERTIES),
    *(check.sentence for entry in PROPERTIES for check in entry.checks),
    *SENTENCES,
    *WITNESSES,
    *EXHIBITS,
    *(story.quirk for story in QUIRKS),
    *(profile.name for profile in PROFILES),
    *v.RejectCode,
    *Capability,
    *(feature.name for feature in FEATURES),
    *FindingKind,
    *HEADLINES.values(),
    *("exact", *(kind.name for kind in EQUIVALENCES)),
    *PRESETS,
    *(watchpoint.name for watchpoint in WATCHPOINTS),
    *(name for term in get_terms() for name in term.names),
    *(name for name in v.__all__ if name != "EVENT_TYPES"),
)


def explain(name: object) -> Result:
    return CliRunner().invoke(app, ["explain", str(name)], env={"COLUMNS": "100"})


def find_check_names(text: str) -> Iterator[str]:
    """Yield the names of checks in a module: constants in the arguments of a finding."""
    for node in ast.walk(ast.parse(text)):
        parts: list[ast.expr] = []
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args):
                parts = args if name in MAKERS_OF_FINDINGS else []
            case ast.Assign(targets=[ast.Name(id="sentence")], value=value):
                parts = [value]
        for part in parts:
            for each in [part.body, part.orelse] if isinstance(part, ast.IfExp) else [part]:
                match each:
                    case ast.Constant(value=str() as said) if SENTENCE.fullmatch(said):
                        yield said


def test_names_of_checks_are_found_in_a_module() -> None:
    text = """
# words: allow
sentence = "one_two_three"
violated("P1", "it_is_so", f"no: {sentence}")
self._complain("P3", "this_is_one" if x else "that_is_one", what)
"""
    assert set(find_check_names(text)) == {
        "one_two_three",
        "it_is_so",
        "this_is_one",
        "that_is_one",
    }


def test_exactly_the_reported_checks_are_explained() -> None:
    files = [file for room in SPEAKERS for file in (WING / room).rglob("*.py")]
    used = {name for file in files for name in find_check_names(file.read_text())}
    assert len(used) > 30
    own = {check.sentence for entry in PROPERTIES for check in entry.checks}
    missing = used - SENTENCES.keys() - own - {watchpoint.name for watchpoint in WATCHPOINTS}
    assert not missing, "say in report/check_texts.py what these mean"
    composed = {name for name in SENTENCES if name.startswith(("attended_slot_", "published_b"))}
    composed |= {f"{aspect}_agree" for aspect in Aspect}
    stale = SENTENCES.keys() - used - composed
    assert not stale, "no module reports these any more"


def test_every_name_is_explained() -> None:
    for name in dict.fromkeys(map(str, NAMES)):
        text = explain_name(name)
        assert len(text.strip().splitlines()) >= 2, name
        assert "seed 0" not in text, name
        assert text.endswith("\n"), name
        assert not text.endswith("\n\n"), name


def test_checks_of_answers_at_safety_are_listed() -> None:
    """The names are read from the modules; seven were once explained as not checked."""
    root = Path(blockstep.conformance.__file__).parent
    files = [root / "judge/answers.py", root / "judge/reported.py"]
    files += sorted((root / "lockstep").glob("*.py"))
    files += sorted((root / "judge/worker").glob("*.py"))
    texts = [file.read_text() for file in files]
    used = set().union(*(find_check_names(text) for text in texts))
    about_steps = {check.sentence for entry in PROPERTIES for check in entry.checks}
    assert used & about_steps == ASKED_OF_ANSWERS


def test_every_rule_is_explained_with_its_source_in_words() -> None:
    texts = [explain_name(name) for name, _ in spec_rules()]
    assert not [text for text in texts if re.search(r"seed\s+0", text)]
    assert any(SOURCES["001"] in text for text in texts)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("museum:leak-on-abort", "shown by: blockstep check --engine museum:leak-on-abort"),
        ("leak_on_abort", "breaks: P1"),
        ("LEAK ON ABORT", "an aborted request keeps its blocks"),
        ("no_full_isl_reserve", "shown by: 3 blocks of 1 are free"),
        (
            "attended_slot_was_written",
            "check attended_slot_was_written (P4 publish after write)",
        ),
        ("queues_keep_their_order", "not checked at safety: it fixes a policy: the order of"),
        ("new_row_is_new", "check new_row_is_new"),
        ("finished_ids_wait_for_the_next_plan", "there plan_names_the_finished sees the same"),
        ("plan_stays_within_token_budget", "checked at safety, also for an engine that shows"),
        ("pool_keeps_its_size", "checked at safety for an engine that shows a state"),
        ("prefix_hit", "not reached without the feature: caching"),
        ("never_fits", "counted as: rejected_never_fits"),
        ("Capability", "drafts"),
        ("async", "feature async (--with async, --without async)"),
        ("async", "capability async (Capability.ASYNC)"),
        ("CachedRow.resumed", "`new_block_ids` replaces its block tables"),
        ("all_token_ids", "field CachedRow.all_token_ids: TokenIds | None"),
        ("P4", "seeded bugs that break it"),
        ("STALL", "Requests are unfinished but make no progress"),
        ("vllm-0.19.1", "unwritten_keys_stay"),
        ("tiny", "block_size: 1 to 2"),
        ("situations", "prefix_hit: an admitted request found"),
        ("sentences", "P2 written_block_is_in_one_place: A block that a row writes"),
        ("features", "caching: prefix caching"),
        ("allocate_slots", "core.slots.allocate_slots("),
        ("remote_kv", "The asynchronous load has not ended."),
        ("grammar", "The grammar is not compiled yet."),
        ("WaitingReason.GATE", "one of: paused, closed, grammar"),
        ("preemption", "term preemption, victim"),
        ("null block", "Block 0 is the null block"),
        ("canary", "must catch before it may pass"),
        ("frame", "in vLLM: entry of batch_queue"),
        ("urgent_waits_for_a_seat", "watchpoint"),
        ("hits_agree", "have the same hits"),
    ],
)
def test_an_explanation_has_the_expected_text(name: str, text: str) -> None:
    result = explain(name)
    assert result.exit_code == 0
    assert text in result.output


def test_a_program_file_is_explained_as_its_actions(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    submit = v.Submit(v.Request("A", (1, 2), max_tokens=1))
    path.write_text(write_program(Program(v.Config(num_blocks=4), (submit, v.Abort(("A",))))))
    assert explain(path).output.splitlines() == [
        "  config    num_blocks=4",
        "     1  submit    A prompt=1,2 max_tokens=1",
        "     2  abort     A",
    ]
    path.write_text("{}")
    assert explain(path).exit_code == 2
    assert "a program is a JSON object" in explain(path).stderr


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("leak-on-abrot", "leak-on-abort"),
        ("attended_slot_is_written", "attended_slot_was_written"),
        ("nver_fits", "never_fits"),
        ("CachedRows", "CachedRow"),
        ("free_queue_", "free_queue"),
    ],
)
def test_a_typo_is_answered_with_close_names(typo: str, meant: str) -> None:
    result = explain(typo)
    assert result.exit_code == 2
    assert f"{typo!r}: no such name; close: " in result.stderr
    assert meant in result.stderr
    assert result.output.count("\n") == 1


def test_the_vocabulary_is_printed_as_a_page() -> None:
    assert explain("vocabulary").output == make_page()


def test_every_word_and_field_of_the_vocabulary_is_on_its_page() -> None:
    words = get_words()
    for name in v.__all__:
        thing = getattr(v, name)
        if not isinstance(thing, type) or name in ALIASES:
            continue
        fields = getattr(thing, "__dataclass_fields__", ())
        assert {part.name for part in words[name].parts} >= set(fields), name
    assert [part.name for part in words["RejectCode"].parts] == list(v.RejectCode)
    assert all(part.text for part in words["RejectCode"].parts)


def test_a_source_is_named_also_across_a_line_break() -> None:
    assert cite('see seed\n    003, "x"') == 'see prefix caching by example, "x"'
    assert cite("seed 41 of a run") == "seed 41 of a run"


def test_a_name_may_mean_several_things_and_each_is_explained_once() -> None:
    kinds = [meaning.kind for meaning in get_names()["drafts"]]
    assert kinds == ["capability", "feature", "word", "field"]


@pytest.mark.parametrize(
    "command", ["schema", "properties --all", "quirks --all", "museum --all", "--help"]
)
def test_no_command_prints_the_number_of_a_source(command: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0
    assert not re.search(r"seed(\s|\\n)+00", result.stdout)


@pytest.mark.parametrize("name", ["Plan", "plan", "Drafts", "drafts"])
def test_what_is_written_exactly_so_is_explained_first(name: str) -> None:
    first = {
        "Plan": "Plan (blockstep.spec.vocabulary.observations)",
        "plan": "SamePlans (blockstep.conformance.engine)",
        "Drafts": "Drafts (blockstep.spec.vocabulary.events)",
        "drafts": "capability drafts (Capability.DRAFTS)",
    }
    assert explain_name(name).splitlines()[0] == first[name]


def test_the_glossary_has_one_row_for_each_term_and_bans_no_term() -> None:
    terms = get_terms()
    names = [name for term in terms for name in term.names]
    assert len(names) == len(set(names))
    assert all(term.meaning.endswith(".") for term in terms)
    phrases = [phrase for term in terms for phrase in term.replaces]
    assert len(phrases) == len(set(phrases))
    assert not set(phrases) & set(names)
    assert explain("glossary").output == read_page()


def test_a_row_of_the_glossary_with_another_number_of_cells_is_refused() -> None:
    (term,) = parse_terms('| term |\n| **a, b** | It is \\| so. | "c*" | - |\n')
    assert (term.names, term.meaning, term.replaces, term.vllm) == (
        ("a", "b"),
        "It is | so.",
        ("c*",),
        "",
    )
    with pytest.raises(ValueError, match="has four cells, this one 2"):
        list(parse_terms("| **a** | It is so. |\n"))


def test_a_property_shows_the_statements_of_its_checks() -> None:
    text = " ".join(explain("P1").output.split())
    assert "a block without holders is in the free queue, once." in text
