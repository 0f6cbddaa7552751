"""Explain: explanations of all names that a report uses, and of recorded states."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from typing import NamedTuple

import blockstep.spec
from blockstep.conformance.draw.presets import PRESETS
from blockstep.conformance.engine import EQUIVALENCES, Capability
from blockstep.conformance.judge.checks import ASKED_OF_ANSWERS, PROPERTIES
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.judge.properties.property_check import PropertyCheck
from blockstep.conformance.museum import EXHIBITS, SeededBug
from blockstep.conformance.protocol.feature import Feature
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import WIDTH
from blockstep.conformance.protocol.registry import MUSEUM
from blockstep.conformance.protocol.sources import cite
from blockstep.conformance.report.check_texts import SENTENCES
from blockstep.conformance.report.finding_text import HEADLINES
from blockstep.conformance.report.glossary import get_terms, read_page
from blockstep.conformance.report.headlines import CHECK_HEADLINES
from blockstep.conformance.report.vocabulary import (
    Part,
    Word,
    explain_word,
    get_finding_kinds,
    get_words,
    make_page,
)
from blockstep.conformance.search.watchpoints import WATCHPOINTS, Watchpoint
from blockstep.spec.profiles import PROFILES, QUIRKS, Profile, QuirkStory, get_profile
from blockstep.spec.vocabulary import RejectCode

CLOSE_MAX = 5
"""Most similar names that are suggested for an unknown one."""


class NotExplainedError(LookupError):
    """No explanation of this name exists."""


def explain_name(name: str) -> str:
    """Return all meanings of a name, those that are written exactly so first.

    Raises NotExplainedError, with similar names.
    """
    names, wanted, rules = get_names(), _normal(name), _get_rules()
    meanings = sorted(names.get(wanted, ()), key=lambda it: it.name != name)
    found = list(dict.fromkeys(it.explain() for it in meanings))
    found += [
        _explain_rule(rule, rules[rule])
        for rule in rules
        if rule == name or rule.endswith(f".{name}")
    ]
    profile = None if found else get_profile(name)
    if profile is not None:
        found.append(_explain_profile(profile))
    if not found:
        shown = {key: meanings[0].name for key, meanings in names.items()} | {
            rule: rule for rule in rules
        }
        raise NotExplainedError(f"{name!r}: no such name{_suggest(wanted, shown)}")
    return "\n".join(found)


def _suggest(wanted: str, names: Mapping[str, str]) -> str:
    """Return a suggestion: similar names, or else the kinds of names."""
    close = difflib.get_close_matches(wanted, names, CLOSE_MAX, 0.75)
    close += [name for name in names if len(wanted) > 2 and wanted in name and name not in close]
    if close:
        return f"; close: {', '.join(names[name] for name in close[:CLOSE_MAX])}"
    return (
        "; there are no term of the glossary, property (P1, P2, ...), check, coverage goal, "
        "seeded bug, quirk, reject code, capability, feature, word of the vocabulary, rule of the "
        "spec (slots.allocate_slots, ...) and trace file that are called so"
    )


def _normal(name: str) -> str:
    return name.removeprefix(MUSEUM).strip().lower().replace("-", "_").replace(" ", "_")


Explain = Callable[[], str]


class Meaning(NamedTuple):
    """One meaning of a name."""

    kind: str
    name: str
    """Name as it is written."""
    explain: Explain


@cache
def get_names() -> dict[str, list[Meaning]]:
    """Return the meanings of each name, by the name in lower case with underscores."""
    found: dict[str, list[Meaning]] = {}
    for meaning in map(Meaning._make, _list_names()):
        meanings = found.setdefault(_normal(meaning.name), [])
        if all(meaning.kind != other.kind for other in meanings):
            meanings.append(meaning)
    return found


def _list_names() -> Iterator[tuple[str, str, Explain]]:
    """Yield the kind, the name and the text of everything that can be explained."""
    yield from _list_judged()
    yield from _list_configured()
    yield from _list_words()
    yield "list", "glossary", read_page
    yield "list", "vocabulary", make_page
    yield "list", "capabilities", partial(explain_word, get_words()["Capability"])
    yield "list", "features", _explain_features
    yield "list", "codes", partial(explain_word, get_words()["RejectCode"])
    yield "list", "situations", _explain_situations
    yield "list", "sentences", _explain_sentences


def _list_judged() -> Iterator[tuple[str, str, Explain]]:
    """Properties and their checks, coverage goals, seeded bugs and watchpoints."""
    for entry in PROPERTIES:
        for name in (entry.id, entry.name):
            yield "property", name, partial(_explain_property, entry.id)
        for check in entry.checks:
            yield "sentence", check.sentence, partial(_explain_check, check)
    for sentence in SENTENCES:
        yield "sentence", sentence, partial(_explain_sentence, sentence)
    for situation in WITNESSES:
        yield "situation", situation, partial(_explain_situation, situation)
    for exhibit in EXHIBITS.values():
        yield "exhibit", exhibit.name, partial(_explain_exhibit, exhibit)
    for watchpoint in WATCHPOINTS:
        yield "watchpoint", watchpoint.name, partial(_explain_watchpoint, watchpoint)


def _list_configured() -> Iterator[tuple[str, str, Explain]]:
    """Quirks, profiles, capabilities, features, presets, and how a run can end."""
    for story in QUIRKS:
        yield "quirk", story.quirk, partial(_explain_quirk, story)
    for profile in PROFILES:
        yield "profile", profile.name, partial(_explain_profile, profile)
    for code in RejectCode:
        yield "reject code", code, partial(_explain_code, code)
    for capability in Capability:
        yield "capability", capability, partial(_explain_capability, capability)
    for feature in FEATURES:
        yield "feature", feature.name, partial(_explain_feature, feature)
    for kind in FindingKind:
        for name in (kind, HEADLINES[kind]):
            yield "kind of finding", name, partial(_explain_kind, kind)
    yield "equivalence", "exact", _explain_exact
    for weaker in EQUIVALENCES:
        yield "equivalence", weaker.name, partial(explain_word, get_words()[weaker.__name__])
    for preset in PRESETS:
        yield "preset", preset, partial(_explain_preset, preset)


def _list_words() -> Iterator[tuple[str, str, Explain]]:
    """Records of the vocabulary with their fields, and terms of the glossary."""
    for word in get_words().values():
        yield "word", word.name, partial(explain_word, word)
        for part in word.parts:
            if part.type:
                short = part.name.partition("(")[0]
                yield "field", f"{word.name}.{short}", partial(_explain_field, short, word)
                yield "field", short, partial(_explain_field, short)
            elif part.default and word.name not in {"RejectCode", "Capability"}:  # told above
                for name in (part.name, f"{word.name}.{part.default}"):
                    yield word.name, name, partial(_explain_member, word, part)
    for term in get_terms():
        for name in term.names:
            yield "term", name, term.explain


# What is said of each.


def _show(title: str, text: str, *lines: str) -> str:
    """Return a title, a text, and the lines that are not empty."""
    wrapped = [title, "", cite(text).strip(), ""]
    for line in filter(None, lines):
        wrapped += textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(wrapped).rstrip() + "\n"


def _list(label: str, names: Iterable[str]) -> str:
    found = ", ".join(names)
    return f"{label}: {found}" if found else ""


def _shown_by(*property_ids: str) -> str:
    """Return a line with the seeded bugs that break one of these properties."""
    names = [it.name for it in EXHIBITS.values() if {*it.properties} & {*property_ids}]
    return _list("seeded bugs that break it (check --engine museum:NAME)", names)


def _explain_property(number: str) -> str:
    entry = next(entry for entry in PROPERTIES if entry.id == number)
    checks = [f"{check.sentence}: {_first_paragraph(check)}" for check in entry.checks]
    checks += [f"{name}: {text}" for name, (of, text) in SENTENCES.items() if of == number]
    quirks = [story.quirk for story in QUIRKS if number in story.property_ids]
    return _show(
        f"{entry.id} {entry.name}",
        entry.statement,
        *checks,
        "",
        _list("quirks of releases that break it", quirks),
        _shown_by(number),
    )


def _explain_check(check: PropertyCheck) -> str:
    entry = next(entry for entry in PROPERTIES if entry.id == check.property_id)
    kinds = [kind.__name__ for kind in check.kinds]
    return _show(
        f"check {check.sentence} ({entry.id} {entry.name})",
        inspect.cleandoc(check.explanation),
        _list("checked after", kinds),
        _explain_where(check),
        _explain_headline(check.sentence),
        _shown_by(entry.id),
    )


def _explain_where(check: PropertyCheck) -> str:
    if check.sentence in ASKED_OF_ANSWERS:
        return "checked at safety, also for an engine that shows no state"
    if check.is_asked_at_safety:
        return "checked at safety for an engine that shows a state"
    return f"not checked at safety: {check.why_not_at_safety}"


def _explain_sentence(name: str) -> str:
    number, text = SENTENCES[name]
    title = next((f" ({it.id} {it.name})" for it in PROPERTIES if it.id == number), "")
    return _show(f"check {name}{title}", text, _explain_headline(name), _shown_by(number))


def _explain_headline(name: str) -> str:
    """Return the headline of a finding of this check, unless it is the message."""
    text = CHECK_HEADLINES.get(name, "")
    return f"headline: {text.format(request='request REQUEST', block='block BLOCK')}" * bool(text)


def _explain_situation(name: str) -> str:
    needs = [feature.name for feature in FEATURES if name.startswith(feature.situations)]
    return _show(
        f"coverage goal {name}",
        f"Counted when {WITNESSES[name]}.",
        _list("not reached without the feature", needs),
    )


def _explain_exhibit(exhibit: SeededBug) -> str:
    repaired = f"a wrong repair of: {exhibit.wrong_fix_of}" if exhibit.wrong_fix_of else ""
    return _show(
        f"seeded bug {exhibit.name}",
        f"A seeded bug: {exhibit.title}.",
        f"from: {cite(exhibit.upstream)}",
        _list("breaks", exhibit.properties),
        repaired,
        f"shown by: blockstep check --engine {MUSEUM}{exhibit.name}",
    )


def _explain_watchpoint(watchpoint: Watchpoint) -> str:
    return _show(
        f"watchpoint {watchpoint.name}",
        f"Breaks nothing, but may surprise: {watchpoint.title}. `hunt` reports a program with it.",
        f"upstream: {watchpoint.upstream}",
        f"needs the capability: {watchpoint.capability}",
    )


def _explain_quirk(story: QuirkStory) -> str:
    profiles = [profile.name for profile in PROFILES if story.quirk in profile.quirks]
    return _show(
        f"quirk {story.quirk}",
        f"What releases do differently: {story.title}.",
        _list("breaks", story.property_ids) or "breaks no property: it is another behaviour",
        f"upstream: {story.upstream}",
        f"seen in: {story.seen_in}",
        _list("followed by the profiles", profiles),
        _list("only together with", [str(other) for other in story.upon]),
        f"shown by: {story.program}",
    )


def _explain_profile(profile: Profile) -> str:
    quirks = [f"{story.quirk}: {story.title}" for story in QUIRKS if story.quirk in profile.quirks]
    return _show(
        f"profile {profile.name}",
        "The specification, with the known differences of this release:"
        if quirks
        else "The specification as it is: no quirk is followed.",
        *quirks,
    )


def _explain_code(code: RejectCode) -> str:
    part = next(part for part in get_words()["RejectCode"].parts if part.name == code)
    return _show(f"reject code {code}", part.text, f"counted as: rejected_{code}")


def _explain_capability(capability: Capability) -> str:
    part = next(part for part in get_words()["Capability"].parts if part.name == capability)
    features = [feature for feature in FEATURES if feature.capability == capability]
    return _show(
        f"capability {capability} (Capability.{capability.name})",
        part.text or "; ".join(feature.summary for feature in features),
        *(fact for feature in features for fact in _feature_facts(feature)),
    )


def _explain_feature(feature: Feature) -> str:
    needs = str(feature.capability) if feature.capability else "nothing: every engine has it"
    return _show(
        f"feature {feature.name} (--with {feature.name}, --without {feature.name})",
        feature.summary,
        f"needs the capability: {needs}",
        *_feature_facts(feature),
    )


def _feature_facts(feature: Feature) -> list[str]:
    return [
        _list("fields of a config that ask for it", tuple(feature.config)),
        _list("fields of a request that ask for it", feature.request),
        _list("actions and events", [kind.__name__ for kind in feature.actions]),
        _list("coverage goals that need it begin with", feature.situations),
        _list("properties that mention it first", feature.properties),
    ]


def _explain_preset(name: str) -> str:
    preset = PRESETS[name]
    facts = [
        f"{field.name}: {value if isinstance(value, int) else ' to '.join(map(str, value))}"
        for field in fields(preset)
        if field.name != "name" and (value := getattr(preset, field.name)) is not None
    ]
    return _show(
        f"preset {name}",
        "A scope of runs: the bounds within which configs and programs are drawn.",
        *facts,
    )


def _explain_exact() -> str:
    text = (
        "Every answer and every state is the specification's, block ids and the order of the free "
        "queue included. The equivalence of an engine whose factory names no other one."
    )
    return _show("equivalence exact", text)


def _explain_kind(kind: FindingKind) -> str:
    tree = get_finding_kinds()
    return _show(f"kind of finding {kind} (in a report: {HEADLINES[kind]})", tree[kind])


def _explain_field(name: str, owner: Word | None = None) -> str:
    owners = [owner] if owner else get_words().values()
    found = [
        (word, part)
        for word in owners
        for part in word.parts
        if part.type and part.name.partition("(")[0] == name
    ]
    return "\n".join(
        _show(
            f"field {word.name}.{part.name}: {part.type}",
            part.text or "No further description.",
            f"default: {part.default}" if part.default else "",
        )
        for word, part in found
    )


def _explain_member(word: Word, part: Part) -> str:
    others = [other.name for other in word.parts if other.default and not other.type]
    title = f"{word.name} {part.name} ({word.name}.{part.default})"
    return _show(title, part.text or "No further description.", _list("one of", others))


def _explain_features() -> str:
    facts = [f"{it.name}: {it.summary}" for it in FEATURES]
    return _show(
        "features", "Features that an engine may have or lack, and that runs may use.", *facts
    )


def _explain_situations() -> str:
    facts = [f"{name}: {text}" for name, text in WITNESSES.items()]
    return _show(
        "coverage goals", "What runs count: a pass requires that they are reached.", *facts
    )


def _explain_sentences() -> str:
    facts = [
        f"{it.id} {check.sentence}: {_first_paragraph(check)}"
        for it in PROPERTIES
        for check in it.checks
    ]
    facts += [f"{number} {name}: {text}".strip() for name, (number, text) in SENTENCES.items()]
    return _show("checks", "Checks after which findings are named.", *facts)


@cache
def _get_rules() -> dict[str, object]:
    return dict(spec_rules())


def spec_rules() -> Iterator[tuple[str, object]]:
    """Yield (`module.function`, function) for every public rule of the spec."""
    for module in pkgutil.walk_packages(blockstep.spec.__path__, "blockstep.spec."):
        room = importlib.import_module(module.name)
        for name, value in vars(room).items():
            is_own = getattr(value, "__module__", None) == room.__name__
            if is_own and inspect.isfunction(value) and not name.startswith("_"):
                yield f"{room.__name__.removeprefix('blockstep.spec.')}.{name}", value


def _explain_rule(name: str, rule: object) -> str:
    assert callable(rule)
    return _show(f"{name}{inspect.signature(rule)}", inspect.getdoc(rule) or "")


def _first_paragraph(check: PropertyCheck) -> str:
    return " ".join(check.explanation.strip().partition("\n\n")[0].split())
