"""Mistakes: wrong commits, made from the right ones, and malformed events of a client.

Each must be rejected and change nothing (P7, P18). A mistake that needs a row of a kind that the
plan lacks is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockstep.conformance.draw.decisions import Draw
from blockstep.conformance.draw.forks import list_strange_forks
from blockstep.conformance.draw.jobs import list_strange_pins
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.draw.store import list_strange_reports
from blockstep.conformance.protocol.features import (
    ENCODER,
    FORKS,
    GRAMMAR,
    MASKS,
    PINS,
    SESSIONS,
    TRANSFERS,
)
from blockstep.conformance.protocol.program import Mistake
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Commit,
    Drafts,
    EncoderOffer,
    Event,
    FrameId,
    Grammar,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    MultiModalItem,
    Plan,
    Request,
    RequestId,
    RowTokens,
    StreamingUpdate,
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

    `live` are the unfinished requests, `names` their ids and some others. Malformed updates name
    the first and the last of `names`.
    """
    events: list[Event] = []
    length = swarm.config.max_model_len
    for name in {names[0]: None, names[-1]: None} if swarm.has(SESSIONS) else ():
        events += [
            StreamingUpdate(Request(name, ())),
            StreamingUpdate(Request(name, (0,) * length, resumable=True)),
            StreamingUpdate(Request(name, (0, 0), prompt_embeds=(1, 1), resumable=True)),
        ]
    if swarm.has(SESSIONS):
        events.append(StreamingUpdate(Request("nobody", (0,))))
    if swarm.has(MASKS) and swarm.has(GRAMMAR):
        nowhere = Grammar((((0, 7),),))
        twice = (RowTokens(names[0], (0,)),) * 2
        events += [
            Submit(Request("bad", (0,), grammar=nowhere)),
            Submit(Request("bad", (0,), structured_output=True, grammar=nowhere)),
            Submit(Request("bad", (0,), structured_output=True, grammar=Grammar(()))),
            GrammarFailed("nobody"),
            GrammarBitmask(-1),
            *[GrammarBitmask(frame) for frame in frames[-3:]],
            GrammarBitmask(frames[0], twice),
        ]
    if swarm.has(TRANSFERS):
        events += list_strange_reports(swarm.config.num_blocks, names)
    if swarm.has(PINS):
        events += list_strange_pins(names)
    if swarm.has(FORKS):
        events += list_strange_forks(names)
    if swarm.has(ENCODER):
        events += [
            EncoderOffer(("",)),
            *[
                Submit(Request("bad", (0,) * (length - 1), items=items))
                for items in _list_bad_items(swarm, live)
            ],
        ]
    return events


def _list_bad_items(
    swarm: Swarm, live: Mapping[RequestId, Request]
) -> list[tuple[MultiModalItem, ...]]:
    """Return items that no encoder accepts: too large, overlapping, without embeddings, or with
    another size than the same identifier has elsewhere."""
    config = swarm.config
    large = max(config.encoder_compute_budget, config.encoder_cache_size) + 1
    return [
        (MultiModalItem("elk", 0, large),),
        (MultiModalItem("elk", 0, 1), MultiModalItem("elk", 1, 2)),
        (MultiModalItem("elk", 0, 2), MultiModalItem("fox", 1, 1)),
        (MultiModalItem("elk", 0, 2, (False, False)),),
        (MultiModalItem("elk", 0, 1, (True, True)),),
        *[
            (MultiModalItem(item.identifier, 0, item.num_embeds + 1),)
            for request in live.values()
            for item in request.items[:1]
        ],
    ]


OF_A_SESSION: tuple[dict[str, Any], ...] = (
    {"priority": 9},
    {"adapter": "other"},
    {"cache_salt": "other"},
    {"skip_reading_prefix_cache": True},
    {"structured_output": True},
    {"structured_output": True, "grammar": Grammar(((),))},
    {"job_id": "other"},
    {"is_last_step": True},
)
"""Fields that a streaming update may not have, unless its session has them."""


def draw_foreign(update: Request, draw: Draw) -> Request:
    """Return the update, sometimes with a field that only its session may set, and so rejected."""
    return replace(update, **draw.choice(OF_A_SESSION)) if draw.chance(8) else update
