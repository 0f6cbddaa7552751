"""The plain engine: it conforms, and rejects what it does not support."""

from __future__ import annotations

import pytest
from plain_engine import PlainEngine

from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import (
    Config,
    ConfigError,
    EncoderReset,
    Grammar,
    RejectCode,
    Rejected,
    Request,
    SpecMethod,
    Submit,
)

ENGINE = "plain_engine:PlainEngine"
FEATURES = ("forks", "pins", "transfers", "tiers")
"""Features that it has besides the core."""


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("feature", [None, *FEATURES])
def test_the_plain_engine_conforms(preset: str, feature: str | None) -> None:
    wanted = () if feature is None else (feature,)
    unwanted = () if feature else FEATURES
    options = CheckOptions(
        ENGINE,
        preset=preset,
        seed=5,
        max_events=3_000,
        with_features=wanted,
        without_features=unwanted,
    )
    result = check(options)
    assert result.num_events >= 3_000
    assert result.first is None


@pytest.mark.parametrize(
    "config",
    [
        Config(8, max_frames_in_flight=2),
        Config(8, max_frames_in_flight=2, async_scheduling=True),
        Config(8, spec_method=SpecMethod.NGRAM, num_speculative_tokens=1),
        Config(8, enable_kv_cache_events=True),
        Config(8, encoder_cache_size=4, encoder_compute_budget=4),
        Config(8, max_loras=1),
    ],
)
def test_a_config_with_an_unsupported_feature_is_rejected(config: Config) -> None:
    with pytest.raises(ConfigError):
        PlainEngine(config)


def test_events_of_unsupported_features_are_rejected() -> None:
    engine = PlainEngine(Config(8))
    grammar = Grammar(((),))
    asked = (
        (Submit(Request("a", (1,), resumable=True)), RejectCode.BAD_REQUEST),
        (
            Submit(Request("a", (1,), structured_output=True, grammar=grammar)),
            RejectCode.BAD_REQUEST,
        ),
        (EncoderReset(), RejectCode.MALFORMED_EVENT),
    )
    before = engine.snapshot()
    for event, code in asked:
        assert engine.apply(event) == Rejected(code)
    assert engine.snapshot() == before
