"""Digests of the specification: equal for the same rules, different for others."""

from __future__ import annotations

import pickle

import pytest
from benchmarks import digest


def test_a_recording_is_replayed_by_other_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = digest.record(["strict"], 150, [(), ("sessions",)])
    assert len({config for _, config, _ in runs}) > 1
    first = digest.replay(pickle.loads(pickle.dumps(runs)))
    assert first == digest.replay(runs)
    ((count, _),) = first.values()
    assert count >= 4 * 150
    find = digest.find_profile
    monkeypatch.setattr(digest, "find_profile", lambda _: find("vllm-0.11.0"))
    ((same_count, other),) = digest.replay(runs).values()
    assert (count, other) != first["strict"]
    assert same_count == count


def test_a_profile_has_a_name() -> None:
    with pytest.raises(SystemExit, match=r"vllm-9\.9"):
        digest.find_profile("vllm-9.9")
