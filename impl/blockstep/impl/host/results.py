"""Results: the model output is validated, stored and delivered."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from blockstep.impl.host import state as c
from blockstep.impl.host.blocks import publish
from blockstep.impl.host.jit import compiled, entry, making_arrays
from blockstep.impl.host.lives import append_token, close_running, end_row, get_tokens, rest
from blockstep.impl.host.state import Int32s, Int64s, State

# Why a model output does not fit its frame.
FITS, NEGATIVE_TOKEN, WRONG_NUMBER, WRONG_COUNTS, WRONG_ROW, NO_SUCH_DRAFTS = range(6)

# Finish reasons of tokens and requests.
BY_EOS, BY_STOP_TOKEN, BY_LENGTH, BY_REPETITION = range(1, 5)


CommitResult: TypeAlias = tuple[int, int, Int32s, Int32s, int, int, int, int]
"""Error code; what is wrong, or where; [4, rows]: row, tokens, cached tokens and verdict of each
row that delivers; the tokens; the number of rows that deliver, of tokens, and of rows that finish
(the latter are listed in `scratch`); the request that Python ends before `take_rows` continues, or
NONE."""


@entry(*("state", "int64 2", "int32 2", "int32 1", "int32 1", "int32 1", "bool"), makes_arrays=True)
def commit_step(
    s: State,
    owners: Int64s,
    planned: Int32s,
    ids: Int32s,
    tokens: Int32s,
    counts: Int32s,
    has_counts: bool,
) -> CommitResult:
    """Commit a frame; if the model output does not fit, nothing changes.

    Args:
        owners: [2, rows] slots and births of the frame.
        planned: [PLAN_COLUMNS, rows] data of the plan's rows.
        ids: draft token ids, row after row, at the end of the array.
        tokens: sampled tokens, row after row.
        counts: [rows], if `has_counts`: tokens of each row. Otherwise one for each that samples.
        has_counts: whether `counts` is used.
    """
    code, detail = check_answer(s, planned, ids, tokens, counts, has_counts)
    results = np.empty((4, planned.shape[1] if code == FITS else 0), np.int32)
    kept = np.empty(len(tokens) if code == FITS else 0, np.int32)
    if code != FITS:
        return code, detail, results, kept, 0, 0, 0, c.NONE
    for column in range(c.AT_ROW, c.NUM_ENDED + 1):
        s.scalars[column] = 0
    ending = take_rows(s, owners, planned, tokens, counts, has_counts, results, kept)
    return (
        code, detail, results, kept, int(s.scalars[c.NUM_DELIVERING]),
        int(s.scalars[c.NUM_DELIVERED]), int(s.scalars[c.NUM_ENDED]), ending,
    )  # fmt: skip


@entry("state", "int32 2", "int32 1", "int32 1", "int32 1", "bool")
def check_answer(
    s: State, planned: Int32s, ids: Int32s, tokens: Int32s, counts: Int32s, has_counts: bool
) -> tuple[int, int]:
    """Return the error code of a model output, and the row or number that it is about."""
    due, drafts = 0, 0
    for token in tokens:
        if token < 0:
            return NEGATIVE_TOKEN, 0
    for row in range(planned.shape[1]):
        due += int(planned[c.PLAN_SAMPLES, row])
        drafts += int(planned[c.PLAN_DRAFTS, row])
    if has_counts:
        return _check_counts(s, planned, ids, tokens, counts, len(ids) - drafts)
    return (FITS if len(tokens) == due else WRONG_NUMBER), due


@compiled
def _check_counts(
    s: State, planned: Int32s, ids: Int32s, tokens: Int32s, counts: Int32s, at_draft: int
) -> tuple[int, int]:
    total, at = 0, 0
    for count in counts:
        total += int(count)
    if len(counts) != planned.shape[1] or total != len(tokens):
        return WRONG_COUNTS, 0
    for row in range(len(counts)):
        count, drafts = int(counts[row]), int(planned[c.PLAN_DRAFTS, row])
        least = int(planned[c.PLAN_SAMPLES, row])
        if count < least or count > (1 + drafts) * least:
            return WRONG_ROW, row
        if s.scalars[c.IS_ASYNC] == 0:  # otherwise drafts are placeholders
            for index in range(count - 1):
                if tokens[at + index] != ids[at_draft + index]:
                    return NO_SUCH_DRAFTS, row
        at += count
        at_draft += drafts
    return FITS, 0


@entry(*("state", "int64 2", "int32 2", "int32 1", "int32 1", "bool", "out int32 2", "out int32 1"))
def take_rows(
    s: State,
    owners: Int64s,
    planned: Int32s,
    tokens: Int32s,
    counts: Int32s,
    has_counts: bool,
    results: Int32s,
    kept: Int32s,
) -> int:
    """Store, deliver and finish, row after row from `AT_ROW` on; return the request behind whose
    row this stops, as Python ends it, or NONE."""
    start, ending = int(s.scalars[c.AT_TOKEN]), c.NONE
    num_rows, num_tokens = int(s.scalars[c.NUM_DELIVERING]), int(s.scalars[c.NUM_DELIVERED])
    row = int(s.scalars[c.AT_ROW]) - 1
    while row + 1 < planned.shape[1]:
        row += 1
        if not has_counts:
            plain = _take_plain_rows(
                s, owners, planned, tokens[start:], results[:, num_rows:], kept[num_tokens:], row
            )
            row, start = row + plain, start + plain
            num_rows, num_tokens = num_rows + plain, num_tokens + plain
            if row == planned.shape[1]:
                break
        samples, drafts = int(planned[c.PLAN_SAMPLES, row]), int(planned[c.PLAN_DRAFTS, row])
        count = int(counts[row]) if has_counts else samples
        first = start
        start += count
        slot = owners[0, row]
        if s.requests[slot, c.BIRTH] != owners[1, row] or samples == 0:
            continue  # aborted meanwhile, or still in prefill
        _roll_back(s, slot, drafts, count)
        delivered, verdict = _accept(s, slot, tokens, first, start)
        results[0, num_rows], results[1, num_rows] = row, delivered
        results[2, num_rows] = s.requests[slot, c.NUM_CACHED_TOKENS]
        results[3, num_rows] = verdict
        num_rows += 1
        for index in range(delivered):
            kept[num_tokens] = tokens[first + index]
            num_tokens += 1
        # Asynchronously, the plan of the step could not publish these blocks, since the tokens were
        # unknown. The last token may not be computed yet (P4); a request preempted since has no
        # blocks (P3).
        if s.scalars[c.IS_ASYNC] != 0 and s.requests[slot, c.STATUS] == c.IS_RUNNING:
            known = s.requests[slot, c.NUM_KNOWN]
            if known > s.requests[slot, c.QUIET]:
                publish(s, slot, known - 1, known - 1)
        if verdict != c.GOES_ON:
            s.scratch[s.scalars[c.NUM_ENDED]] = num_rows - 1
            s.scalars[c.NUM_ENDED] += 1
            if s.requests[slot, c.IS_SESSION] != 0:
                rest(s, slot)
            elif s.requests[slot, c.MAY_KEEP] == 0:
                end_row(s, slot)
            else:
                s.scalars[c.AT_ROW], ending = row + 1, slot
                break
    if s.scalars[c.NUM_ENDED] > 0:
        close_running(s)
    s.scalars[c.AT_TOKEN] = start
    s.scalars[c.NUM_DELIVERING], s.scalars[c.NUM_DELIVERED] = num_rows, num_tokens
    return int(ending)


@compiled
def _take_plain_rows(
    s: State, owners: Int64s, planned: Int32s, tokens: Int32s, results: Int32s, kept: Int32s,
    first: int,
) -> int:  # fmt: skip
    """Store and deliver rows whose token fills no block and ends no request, from `first` on, up to
    the first other row; return their number. It does what the loop around it does, with fewer
    variables, so that they fit into registers."""
    row, at, size, is_async = first, 0, s.scalars[c.BLOCK_SIZE], s.scalars[c.IS_ASYNC]
    while row < planned.shape[1]:
        slot = owners[0, row]
        known = s.requests[slot, c.NUM_KNOWN]
        within = known - s.requests[slot, c.NUM_FULL] * size
        if (
            planned[c.PLAN_SAMPLES, row] == 0
            or planned[c.PLAN_DRAFTS, row] != 0
            or s.requests[slot, c.BIRTH] != owners[1, row]
            or within + 1 == size
            or known >= s.requests[slot, c.NUM_CERTAIN]
            or tokens[at] == s.requests[slot, c.EOS]
            or (is_async != 0 and known >= s.requests[slot, c.QUIET])
        ):
            break
        s.tails[slot, within] = kept[at] = tokens[at]
        s.requests[slot, c.NUM_KNOWN] = known + 1
        s.requests[slot, c.NUM_PROMISED] -= is_async
        results[0, at], results[1, at] = row, 1
        results[2, at], results[3, at] = s.requests[slot, c.NUM_CACHED_TOKENS], c.GOES_ON
        row, at = row + 1, at + 1
    return at


@compiled
def _roll_back(s: State, slot: int, drafts: int, count: int) -> None:
    """Remove the placeholders (P12) and uncompute the rejected drafts (P14).

    computed before | known | accepted | rejected |
                                       ^ computed now
    """
    if s.scalars[c.IS_ASYNC]:
        s.requests[slot, c.NUM_PROMISED] -= 1 + drafts
        s.requests[slot, c.NUM_IN_DOUBT] -= drafts
    if drafts > 0:
        # If it was preempted meanwhile, nothing is computed anyway.
        if s.requests[slot, c.STATUS] == c.IS_RUNNING:
            s.requests[slot, c.NUM_COMPUTED] -= drafts - (count - 1)
        s.scalars[c.DRAFTS_SCHEDULED] += drafts
        s.scalars[c.DRAFTS_ACCEPTED] += count - 1


@compiled
def _accept(s: State, slot: int, tokens: Int32s, first: int, end: int) -> tuple[int, int]:
    """Store tokens from `first` to before `end`, up to the one that ends the request; return their
    number, and the verdict."""
    for index in range(first, end):
        append_token(s, slot, tokens[index])
        verdict = _judge(s, slot, tokens[index])
        if verdict != c.GOES_ON:
            return index + 1 - first, verdict
    return end - first, c.GOES_ON


@compiled
def _judge(s: State, slot: int, token: int) -> int:
    """Return the finish reason, if any, after the token just stored.

    Before `min_tokens` only the length limits count (ours; 0.19.1 masks them as well).
    """
    known = s.requests[slot, c.NUM_KNOWN]
    if known <= s.requests[slot, c.NUM_CERTAIN] and token != s.requests[slot, c.EOS]:
        return c.GOES_ON
    has_min = known - s.requests[slot, c.NUM_PROMPT] >= s.requests[slot, c.MIN_TOKENS]
    if has_min and s.requests[slot, c.HAS_STOPS] != 0:
        if token == s.requests[slot, c.EOS]:
            return BY_EOS
        for column in range(c.STOPS, c.STOPS + s.requests[slot, c.NUM_STOPS]):
            if token == s.requests[slot, column]:
                return BY_STOP_TOKEN
    if known >= s.requests[slot, c.MAX_KNOWN]:
        return BY_LENGTH
    if has_min and s.requests[slot, c.REPEATS_COUNT] > 0 and _repeats(s, slot):
        return BY_REPETITION
    return c.GOES_ON


@making_arrays
def _repeats(s: State, slot: int) -> bool:
    """Whether the outputs end with `REPEATS_COUNT` copies of one pattern."""
    known, prompt = s.requests[slot, c.NUM_KNOWN], s.requests[slot, c.NUM_PROMPT]
    count = s.requests[slot, c.REPEATS_COUNT]
    tokens = get_tokens(s, slot)
    longest = min(s.requests[slot, c.REPEATS_MAX], (known - prompt) // count)
    for size in range(s.requests[slot, c.REPEATS_MIN], longest + 1):
        # Copies of a pattern: each token equals the one a pattern's length before it.
        same = 0
        while (
            same < size * (count - 1)
            and tokens[known - 1 - same] == tokens[known - 1 - same - size]
        ):
            same += 1
        if same == size * (count - 1):
            return True
    return False


@entry("state", "int", "int32 1")
def append_outputs(s: State, slot: int, tokens: Int32s) -> bool:
    """Append outputs to a new branch; return False if one of them ends it."""
    return _accept(s, slot, tokens, 0, len(tokens))[1] == c.GOES_ON
