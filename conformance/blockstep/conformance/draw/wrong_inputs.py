"""Mistakes: wrong commits, made from the right ones, and malformed events of a client.

Each must be rejected and change nothing (P7, P18). A mistake that needs a row of a kind that the
plan lacks is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.feature import Situation, list_draws
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.protocol.program import Mistake
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Commit,
    Drafts,
    Event,
    FrameId,
    GrammarReady,
    MultiModalItem,
    Plan,
    Request,
    RequestId,
    RowTokens,
    Submit,
    TokenIds,
)


def make_mistake(
    mistake: Mistake,
    plans: Sequence[Plan],
    answers: Sequence[Commit],
    last: Commit | None,
) -> Commit | None:
    """Return the wrong commit, or None if the plans in flight give no opportunity for this mistake.

    `plans` are those in flight, oldest first, `answers` the right commits for them; `last` is the
    last accepted commit.
    """
    if mistake is Mistake.AGAIN:
        return last
    if not plans:
        return None
    if mistake is Mistake.TOO_EARLY:
        return answers[-1] if len(answers) > 1 else None
    right = answers[0]
    rows = _wrong_rows(mistake, plans[0], right)
    return None if rows is None else replace(right, sampled=tuple(rows))


def _wrong_rows(mistake: Mistake, plan: Plan, right: Commit) -> list[RowTokens] | None:
    rows = list(right.sampled)
    if mistake is Mistake.MISSING_ROW:
        return rows[1:]
    if mistake is Mistake.DOUBLE_ROW:
        return [*rows, rows[0]]
    if mistake is Mistake.EXTRA_ROW:
        return [*rows, RowTokens("nobody", rows[0].token_ids)]
    if mistake is Mistake.FOREIGN_ROW:
        return [*rows[1:], RowTokens("nobody", rows[0].token_ids)]
    drafts = {row.request_id: row.draft_token_ids for row in plan.rows}
    for index, row in enumerate(rows):
        tokens = _wrong_tokens(mistake, row, drafts[row.request_id])
        if tokens is not None:
            return [*rows[:index], RowTokens(row.request_id, tokens), *rows[index + 1 :]]
    return None


def _wrong_tokens(mistake: Mistake, row: RowTokens, drafts: TokenIds) -> TokenIds | None:
    """Return the wrong tokens of a row, or None if this mistake needs another row."""
    tokens = row.token_ids
    if mistake is Mistake.PREFILL_TOKEN:
        return None if tokens else (0,)
    if not tokens:
        return None
    if mistake is Mistake.EMPTY_ROW:
        return ()
    if mistake is Mistake.LONG_ROW:
        return (*tokens, *(0,) * (2 + len(drafts) - len(tokens)))
    if drafts and DRAFT_PLACEHOLDER not in drafts:  # a placeholder may be any token
        return (drafts[0] ^ 1, *tokens[1:], 0)[: 1 + len(drafts)]
    return None


def draw_bad_event(
    swarm: Swarm,
    live: Mapping[RequestId, Request],
    names: Sequence[RequestId],
    frames: Sequence[FrameId],
    draw: Draw,
) -> Event:
    """Draw an event that a broken client or a late worker might send."""
    token = draw.integer(0, swarm.vocabulary_size - 1)
    row = RowTokens(draw.choice(names), (token,) * draw.integer(0, 3))
    brought = list_bad_events(swarm, live, names, frames)
    if brought and draw.chance(40):
        return draw.choice(brought)
    events: tuple[Event, ...] = (
        Commit(-1, ()),
        Commit(draw.choice(frames), ()),
        Commit(draw.choice(frames), (row,)),
        Commit(draw.choice(frames), (row, row)),
        Drafts((row,)),
        Drafts((row, row)),
        Drafts(tuple(RowTokens(name, (token,)) for name in live)),
        Drafts((RowTokens(row.request_id, (token,) * 9),)),
        GrammarReady("nobody"),
        Submit(Request("bad", ())),
        Submit(Request("bad", (1,), max_tokens=0)),
        Submit(Request("bad", (1,), max_tokens=10**6)),
        Submit(Request("bad", (token,) * 4, items=(MultiModalItem("cat", 3, 9),))),
    )
    return draw.choice(events)


def list_bad_events(
    swarm: Swarm,
    live: Mapping[RequestId, Request],
    names: Sequence[RequestId],
    frames: Sequence[FrameId],
) -> list[Event]:
    """Return malformed or unacceptable events, of the features that a run has.

    `live` are the unfinished requests, `names` their ids and some others.
    """
    situation = Situation(swarm, live, names, frames)
    return [
        event for draws in list_draws(swarm.features) for event in draws.list_mistakes(situation)
    ]
