"""Bad input: refused with a code, a reason and a fix, and nothing changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from blockstep.conformance.engine import ALL_CAPABILITIES
from blockstep.impl.compiled import CompiledEngine
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import (
    Abort,
    Ack,
    Commit,
    Config,
    ConfigError,
    Drafts,
    Event,
    Grammar,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    GroupKind,
    KVGroup,
    RejectCode,
    Rejected,
    Request,
    Reset,
    RowTokens,
    Schedule,
    SetPause,
    SpecMethod,
    StreamingUpdate,
    Submit,
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession, Session


def busy(session: OpenSession) -> Session:
    """Request a decodes with two drafts in frame 1; b has been aborted out of it."""
    s = session(
        num_blocks=9, block_size=4, max_model_len=24, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=2,
    )  # fmt: skip
    s.submit("a", range(5), max_tokens=8)
    s.submit("b", range(5), max_tokens=8)
    s.step(a=(1,), b=(1,))
    s.apply(Drafts((RowTokens("a", (7, 8)),)))
    s.plan()
    s.apply(Abort(("b",)))
    return s


def rows(a: tuple[int, ...], b: tuple[int, ...] | None = (1,), **more: tuple[int, ...]) -> Commit:
    answers = {"a": a, **({} if b is None else {"b": b}), **more}
    return Commit(1, tuple(RowTokens(name, tokens) for name, tokens in answers.items()))


REJECTIONS: list[tuple[Event, RejectCode]] = [
    (Submit(Request("a", (1,))), RejectCode.DUPLICATE_REQUEST),
    (Submit(Request("b", (1,))), RejectCode.REQUEST_IN_FLIGHT),
    (Submit(Request("c", ())), RejectCode.BAD_REQUEST),
    (Submit(Request("c", (1,) * 24)), RejectCode.PROMPT_TOO_LONG),
    (Schedule(), RejectCode.PIPELINE_FULL),
    (Commit(0, (RowTokens("a", (1,)),)), RejectCode.UNKNOWN_FRAME),
    (Commit(2, ()), RejectCode.UNKNOWN_FRAME),
    (Commit(1, ()), RejectCode.BAD_RESULT),
    (rows((1,), None), RejectCode.BAD_RESULT),
    (rows((1,), None, c=(1,)), RejectCode.BAD_RESULT),
    (rows((1,), c=(1,)), RejectCode.BAD_RESULT),
    (rows(()), RejectCode.BAD_RESULT),
    (rows((1,), ()), RejectCode.BAD_RESULT),
    (rows((1,), (1, 1)), RejectCode.BAD_RESULT),
    (rows((8, 1)), RejectCode.BAD_RESULT),
    (rows((7, 7, 1)), RejectCode.BAD_RESULT),
    (rows((7, 8, 9, 1)), RejectCode.BAD_RESULT),
    (Commit(1, (RowTokens("a", (1,)),) * 2), RejectCode.BAD_RESULT),
    (Drafts((RowTokens("a", (1, 2, 3)),)), RejectCode.BAD_DRAFTS),
    (Drafts((RowTokens("a"), RowTokens("a"))), RejectCode.BAD_DRAFTS),
    (GrammarReady("nobody"), RejectCode.UNKNOWN_REQUEST),
    (GrammarReady("a"), RejectCode.NOT_STRUCTURED),
]


@pytest.mark.parametrize(("event", "code"), REJECTIONS, ids=lambda value: str(value)[:60])
def test_what_is_refused_changes_nothing(
    session: OpenSession, event: Event, code: RejectCode
) -> None:
    s = busy(session)
    before = s.state()
    observation = s.apply(event)
    assert isinstance(observation, Rejected)
    assert observation.code is code
    assert len(observation.detail) > 20
    assert s.state() == before


@pytest.mark.parametrize(
    "event",
    [
        None,
        3,
        Submit(cast("Any", "a")),
        Submit(Request(cast("Any", 3), (1,))),
        Submit(Request("c", cast("Any", [1]))),
        Submit(Request("c", (-1,))),
        Submit(Request("c", (2**31,))),
        Commit(-1, ()),
        Commit(1, cast("Any", None)),
        Commit(1, (RowTokens("a", (cast("Any", True),)),)),
        Drafts(cast("Any", [])),
        Abort(("",)),
        GrammarReady(""),
        SetPause(cast("Any", "paused_all")),
        Reset(cast("Any", 1)),
    ],
    ids=repr,
)
def test_what_is_no_event_is_refused(session: OpenSession, event: Any) -> None:
    s = busy(session)
    before = s.state()
    assert s.apply(event) == Rejected(RejectCode.MALFORMED_EVENT)
    assert s.state() == before


def test_a_frame_is_committed_once(session: OpenSession) -> None:
    s = busy(session)
    commit = rows((7, 8, 9))
    s.apply(commit)
    assert s.apply(commit) == Rejected(RejectCode.UNKNOWN_FRAME)


def test_a_row_in_prefill_has_no_tokens(session: OpenSession) -> None:
    s = session(num_blocks=9, block_size=4, max_model_len=24, max_num_batched_tokens=4)
    s.submit("a", range(5))
    s.plan()
    assert s.apply(Commit(0, (RowTokens("a", (1,)),))) == Rejected(RejectCode.BAD_RESULT)


def test_drafts_need_a_spec_method(session: OpenSession) -> None:
    s = session(num_blocks=9)
    assert s.apply(Drafts(())) == Rejected(RejectCode.BAD_DRAFTS)


def test_the_null_block_is_not_counted_on(session: OpenSession) -> None:
    # 3 usable blocks of 4: positions 0..11 can be written, so 12 known tokens and a sampled one.
    s = session(num_blocks=4, block_size=4, max_model_len=24)
    assert s.submit("a", range(8), max_tokens=6) == Rejected(RejectCode.NEVER_FITS)
    assert not isinstance(s.submit("a", range(8), max_tokens=5), Rejected)


def test_drafts_and_lookahead_count_towards_the_longest_extent(session: OpenSession) -> None:
    for method, most in ((SpecMethod.NGRAM, 3), (SpecMethod.DRAFT_MODEL, 1)):
        s = session(
            num_blocks=4, block_size=4, max_model_len=24, spec_method=method,
            num_speculative_tokens=2,
        )  # fmt: skip
        assert s.submit("a", range(8), max_tokens=most + 1) == Rejected(RejectCode.NEVER_FITS)
        assert not isinstance(s.submit("a", range(8), max_tokens=most), Rejected)


def test_a_bad_config_is_refused_with_every_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        HostEngine(Config(num_blocks=1, block_size=0))
    assert [problem.field for problem in caught.value.problems] == ["num_blocks", "block_size"]


def test_an_unknown_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="digest = 'md5'"):
        HostEngine(Config(num_blocks=2), digest="md5")


def test_the_host_can_do_everything_that_conformance_asks_for() -> None:
    config = Config(num_blocks=2)
    assert HostEngine(config).capabilities() == ALL_CAPABILITIES
    lacking = {"groups", "common prefix", "adapters", "masks", "sessions", "encoder", "events"}
    lacking |= {"kinds", "transfers", "pins", "forks", "tiers"}
    assert CompiledEngine(config).capabilities() == ALL_CAPABILITIES - lacking


def test_an_encoder_is_refused_and_not_passed_over() -> None:
    config = Config(num_blocks=2, encoder_compute_budget=4, encoder_cache_size=4)
    with pytest.raises(ConfigError, match=r"encoder_cache_size = 4: .* has no encoder"):
        CompiledEngine(config)


def test_a_log_of_blocks_is_refused_and_not_left_empty() -> None:
    with pytest.raises(ConfigError, match=r"enable_kv_cache_events = True: .* has no KV events"):
        CompiledEngine(Config(num_blocks=2, enable_kv_cache_events=True))


def test_sessions_are_refused_in_a_sentence() -> None:
    s = CompiledEngine(Config(num_blocks=2))
    session = Request("a", (1,), max_tokens=1, resumable=True)
    refused = s.apply(Submit(session))
    assert refused == Rejected(RejectCode.BAD_REQUEST)
    assert isinstance(refused, Rejected)
    assert refused.detail.endswith("this engine has no sessions; leave it out")
    assert s.apply(StreamingUpdate(session)) == Rejected(RejectCode.UNKNOWN_REQUEST)
    assert s.apply(Submit(Request("a", (1,), max_tokens=1))) == Ack()
    assert s.apply(StreamingUpdate(session)) == Rejected(RejectCode.NOT_RESUMABLE)


def test_a_cap_on_adapters_and_masks_are_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"max_loras = 1: .* no cap on adapters; leave it"):
        CompiledEngine(Config(num_blocks=2, max_loras=1))
    s = CompiledEngine(Config(num_blocks=2))
    one = Grammar((((1, 0),),))
    constrained = Request("a", (1,), max_tokens=1, structured_output=True, grammar=one)
    assert s.apply(Submit(constrained)) == Rejected(RejectCode.BAD_REQUEST)
    for event in (GrammarFailed("a"), GrammarBitmask(0)):
        assert s.apply(event) == Rejected(RejectCode.MALFORMED_EVENT)
    with pytest.raises(ConfigError, match=r"reasoning_end_token_id = 7: .* no masks"):
        CompiledEngine(Config(num_blocks=2, reasoning_end_token_id=7))


def test_several_groups_are_refused_and_not_taken_for_one() -> None:
    with pytest.raises(ConfigError, match=r"groups = .* has one KV-cache group; leave it out"):
        CompiledEngine(Config(num_blocks=2, groups=(KVGroup(GroupKind.FULL, 16),)))
