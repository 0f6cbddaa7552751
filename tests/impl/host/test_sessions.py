"""Sessions with other features: programs that once diverged, compared with the specification."""

from __future__ import annotations

import pytest

from blockstep.impl.host import HostEngine
from blockstep.spec import Oracle
from blockstep.spec.vocabulary import (
    Ack,
    Commit,
    Config,
    Event,
    GroupKind,
    KVGroup,
    MultiModalItem,
    Request,
    RowTokens,
    Schedule,
    SpecMethod,
    StreamingUpdate,
    Submit,
)


def chunk(name: str, *tokens: int) -> Request:
    return Request(name, tokens, max_tokens=1, resumable=True)


def play(config: Config, *events: Event) -> None:
    engine, oracle = HostEngine(config), Oracle(config)
    for event in events:
        assert engine.apply(event) == oracle.apply(event)
        assert engine.snapshot() == oracle.snapshot()


def test_a_request_reclaims_only_the_blocks_that_its_window_lacks() -> None:
    groups = (KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=3),)
    config = Config(num_blocks=6, block_size=2, max_num_batched_tokens=4, groups=groups)
    play(
        config,
        Submit(chunk("B", 1, 2)),
        *(Schedule(), Commit(0, (RowTokens("B", (9,)),))),
        Submit(chunk("A", *range(11, 19))),
        *(Schedule(), Commit(1, (RowTokens("A"),))),
        *(Schedule(), Commit(2, (RowTokens("A", (9,)),))),
        Submit(chunk("C", 3, 4)),
        *(Schedule(), Commit(3, (RowTokens("C", (9,)),))),
        StreamingUpdate(chunk("A", 5)),
        Schedule(),
    )


def test_blocks_of_idle_sessions_are_not_a_common_prefix() -> None:
    config = Config(num_blocks=20, block_size=2, max_model_len=16)
    play(
        config,
        Submit(chunk("A", 1, 2)),
        Schedule(),
        Commit(0, (RowTokens("A", (9,)),)),
        Submit(Request("B", (1, 2, 3), max_tokens=4)),
        Submit(Request("C", (4, 5, 6), max_tokens=4)),
        Schedule(),
    )


@pytest.mark.parametrize("between", [0, 1])
def test_items_of_two_inputs_may_become_adjacent(between: int) -> None:
    """The first input may stop at its first of two outputs, which is then dropped."""
    config = Config(
        num_blocks=20, block_size=1, max_model_len=64, enable_prefix_caching=False,
        spec_method=SpecMethod.EAGLE, num_speculative_tokens=1, encoder_compute_budget=4,
        encoder_cache_size=4,
    )  # fmt: skip
    first = Request("A", (0,) * 6, max_tokens=2, items=(MultiModalItem("x", 2, 4),), resumable=True)
    update = Request(
        "A", (0,) * (1 + between), max_tokens=1, items=(MultiModalItem("y", between, 1),),
        resumable=True,
    )  # fmt: skip
    answers = [
        [engine.apply(event) for event in (Submit(first), StreamingUpdate(update))]
        for engine in (HostEngine(config), Oracle(config))
    ]
    assert [type(answer) for answer in answers[0]] == [type(answer) for answer in answers[1]]
    assert isinstance(answers[0][1], Ack) == (between == 1)
