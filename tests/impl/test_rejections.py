"""Rejections by engines that lack a feature. Bad input for all engines is tested in tests/spec."""

from __future__ import annotations

from typing import Any

import pytest
from plain_engine import PlainEngine

from blockstep.conformance.engine import ALL_CAPABILITIES
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import (
    Ack,
    Config,
    ConfigError,
    Grammar,
    GrammarBitmask,
    GrammarFailed,
    GroupKind,
    KVGroup,
    RejectCode,
    Rejected,
    Request,
    StreamingUpdate,
    Submit,
)


def test_a_bad_config_is_rejected_with_every_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        HostEngine(Config(num_blocks=1, block_size=0))
    assert [problem.field for problem in caught.value.problems] == ["num_blocks", "block_size"]


def test_the_host_engine_has_all_capabilities() -> None:
    assert HostEngine(Config(num_blocks=2)).capabilities() == ALL_CAPABILITIES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"encoder_compute_budget": 4, "encoder_cache_size": 4},
            "encoder_cache_size = 4: .* has no encoder",
        ),
        ({"enable_kv_cache_events": True}, "enable_kv_cache_events = True: .* has no KV events"),
        ({"max_loras": 1}, "max_loras = 1: .* no cap on adapters; leave it"),
        ({"reasoning_end_token_id": 7}, "reasoning_end_token_id = 7: .* no masks"),
        (
            {"groups": (KVGroup(GroupKind.FULL, 16),)},
            "groups = .* has one KV-cache group; leave it out",
        ),
    ],
)
def test_the_plain_engine_rejects_configs_with_missing_features(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PlainEngine(Config(num_blocks=2, **fields))


def test_the_plain_engine_rejects_sessions_with_a_message() -> None:
    s = PlainEngine(Config(num_blocks=2))
    session = Request("a", (1,), max_tokens=1, resumable=True)
    refused = s.apply(Submit(session))
    assert refused == Rejected(RejectCode.BAD_REQUEST)
    assert isinstance(refused, Rejected)
    assert refused.detail.endswith("this engine has no sessions; leave it out")
    assert s.apply(StreamingUpdate(session)) == Rejected(RejectCode.UNKNOWN_REQUEST)
    assert s.apply(Submit(Request("a", (1,), max_tokens=1))) == Ack()
    assert s.apply(StreamingUpdate(session)) == Rejected(RejectCode.NOT_RESUMABLE)


def test_the_plain_engine_rejects_grammars() -> None:
    s = PlainEngine(Config(num_blocks=2))
    one = Grammar((((1, 0),),))
    constrained = Request("a", (1,), max_tokens=1, structured_output=True, grammar=one)
    assert s.apply(Submit(constrained)) == Rejected(RejectCode.BAD_REQUEST)
    for event in (GrammarFailed("a"), GrammarBitmask(0)):
        assert s.apply(event) == Rejected(RejectCode.MALFORMED_EVENT)
