"""Frames: results of a plan and of a commit on the device, converted to the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blockstep.impl.device import layout
from blockstep.impl.device.inbox import Inbox
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    CachedRow,
    FinishReason,
    FrameId,
    NewRow,
    OutputRow,
    Outputs,
    Plan,
    RequestId,
    TokenIds,
)

_REASONS: Final = {
    layout.GOES_ON: None,
    layout.BY_EOS: FinishReason.STOP,
    layout.BY_STOP_TOKEN: FinishReason.STOP,
    layout.BY_LENGTH: FinishReason.LENGTH,
    layout.BY_REPETITION: FinishReason.REPETITION,
}


@dataclass(slots=True, eq=False)
class Frame:
    """A plan in flight."""

    place: int
    """Index of the frame in `plans` on the device."""
    slots: list[int]
    """[rows]: request indices."""
    rows: dict[RequestId, TokenIds | None]
    """Drafts of each row, None if it does not sample; in the order of rows."""


def read_frame(
    inbox: Inbox, frame_id: FrameId, place: int, finished: tuple[RequestId, ...]
) -> tuple[Frame, Plan]:
    """Return the plan that was just made."""
    s, d = inbox.state, inbox.dims
    count, continued = int(s.num_rows[0]), int(s.num_continued[0])
    columns = s.plans[place, :, :count].tolist()
    frame, new, running = Frame(place, columns[layout.ROW_SLOT], {}), [], []
    blocks = s.plan_blocks[place, :, :, :count].tolist()
    for row, values in enumerate(zip(*columns, strict=True)):
        slot, request = values[layout.ROW_SLOT], inbox.requests[values[layout.ROW_SLOT]]
        inbox.last_frames[slot] = frame_id
        num_drafts = values[layout.ROW_DRAFTS]
        drafts: TokenIds = (DRAFT_PLACEHOLDER,) * num_drafts
        if num_drafts and not d.is_async:
            drafts = tuple(s.drafts[slot, :num_drafts].tolist())
        frame.rows[request.request_id] = drafts if values[layout.ROW_SAMPLES] else None
        tables = tuple(
            tuple(table[slot, before[row] : after[row]].tolist())
            for table, (before, after) in zip(s.tables, blocks, strict=True)
        )
        computed, tokens = values[layout.ROW_COMPUTED], values[layout.ROW_TOKENS]
        is_admitted = row >= continued
        is_resumed = is_admitted and bool(s.preempted[slot])
        if is_admitted and not is_resumed:
            new.append(NewRow(request, tables, computed, tokens))
            continue
        known = None
        if is_resumed or values[layout.ROW_MISSED]:
            known = get_tokens(inbox, slot)
        running.append(
            CachedRow(
                request.request_id,
                is_resumed,
                tables,
                known,
                computed,
                values[layout.ROW_OUTPUTS],
                tokens,
                drafts,
            )
        )
    victims = s.victims[: int(s.num_preempted[0])].tolist()
    preempted = tuple(sorted(inbox.requests[slot].request_id for slot in victims))
    return frame, Plan(frame_id, tuple(new), tuple(running), finished, preempted)


def read_outputs(inbox: Inbox, frame: Frame, answers: list[TokenIds]) -> tuple[Outputs, list[int]]:
    """Return the outputs that the commit just made delivers, and the indices of finished
    requests."""
    s, rows, ended = inbox.state, [], []
    record = s.record[:, : len(frame.slots)].tolist()
    records = zip(frame.slots, frame.rows, answers, *record, strict=True)
    for slot, name, tokens, delivered, verdict, cached in records:
        if delivered == layout.NONE:
            continue
        rows.append(build_output_row(name, tokens, delivered, verdict, cached))
        if verdict != layout.GOES_ON:
            ended.append(slot)
    return Outputs(tuple(rows)), ended


def build_output_row(
    name: RequestId, tokens: TokenIds, delivered: int, verdict: int, cached: int
) -> OutputRow:
    """Return the output row of a record; `tokens` were sampled."""
    kept = tokens[:delivered]
    stop = kept[-1] if verdict == layout.BY_STOP_TOKEN else None
    return OutputRow(name, kept, _REASONS[verdict], stop, cached)


def get_tokens(inbox: Inbox, slot: int) -> TokenIds:
    """Return prompt and verified output tokens of a request."""
    known: int = int(inbox.state.known[slot])
    return tuple(inbox.state.tokens[slot, :known].tolist())
