"""Digests of the specification: equal for equal rules, different for different ones."""

from __future__ import annotations

import pickle

import pytest
from benchmarks import digest

from blockstep.spec import Config


def test_a_recording_can_be_replayed_with_other_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = digest.record(["strict"], 150, [(), ("sessions",)])
    assert len({str(values) for _, values, _ in runs}) > 1
    first = digest.replay(pickle.loads(pickle.dumps(runs)))
    assert first == digest.replay(runs)
    ((count, _),) = first.values()
    assert count >= 4 * 150
    find = digest.find_profile
    monkeypatch.setattr(digest, "find_profile", lambda _: find("vllm-0.11.0"))
    ((same_count, other),) = digest.replay(runs).values()
    assert (count, other) != first["strict"]
    assert same_count == count


def test_events_with_different_answers_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = digest.record(["strict"], 150, [()])
    before: digest.Answers = []
    again: digest.Answers = []
    digest.replay(runs, before)
    digest.replay(runs, again)
    assert digest.list_differences(before, again) == []
    find, after = digest.find_profile, list[tuple[str, list[tuple[str, bytes, bytes]]]]()
    monkeypatch.setattr(digest, "find_profile", lambda _: find("vllm-0.11.0"))
    digest.replay(runs, after)
    differences = digest.list_differences(before, after)
    assert differences
    for name, number, unequal in differences:
        assert name == "strict"
        for index, event in enumerate(before[number][1]):
            assert (event != after[number][1][index]) == (index in unequal)
    digest.print_differences(before, after)
    *lines, total = capsys.readouterr().out.splitlines()
    assert len(lines) == len(differences)
    assert f"differ in {len(differences)} runs" in total


def test_a_recording_names_the_fields_of_its_configs() -> None:
    """A pickled config is a list of values, which a new field would shift."""
    config = Config(9, max_loras=2, enable_forks=True)
    values = digest.name_fields(config)
    assert Config(**values) == config
    del values["max_loras"]
    assert Config(**values) == Config(9, enable_forks=True)


def test_an_unknown_profile_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"vllm-9\.9"):
        digest.find_profile("vllm-9.9")
