"""Mistakes: wrong answers of a worker, made from the right ones.

Each must be refused, and change nothing (P7, P18). A mistake that cannot be made now, for want of
a row of the right kind, is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.protocol.program import Mistake
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Commit,
    Plan,
    RowTokens,
    TokenIds,
)


def make_mistake(
    mistake: Mistake,
    plans: Sequence[Plan],
    answers: Sequence[Commit],
    last: Commit | None,
) -> Commit | None:
    """The wrong commit, or None if there is nothing to be wrong about.

    `plans` are those in flight, oldest first, `answers` the right answers to them; `last` is the
    last commit that was taken.
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
    """What the row brings instead; None if this mistake needs another row."""
    tokens = row.token_ids
    if mistake is Mistake.PREFILL_TOKEN:
        return None if tokens else (0,)
    if not tokens:
        return None
    if mistake is Mistake.EMPTY_ROW:
        return ()
    if mistake is Mistake.LONG_ROW:
        return (*tokens, *(0,) * (2 + len(drafts) - len(tokens)))
    if drafts and DRAFT_PLACEHOLDER not in drafts:  # which might stand for any token
        return (drafts[0] ^ 1, *tokens[1:], 0)[: 1 + len(drafts)]
    return None
