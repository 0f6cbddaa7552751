"""Chunks: the inputs of a session, each appended to the tokens that the session keeps."""

from __future__ import annotations

from dataclasses import replace

from blockstep.spec.vocabulary import SESSION_FIELDS, RejectCode, Rejected, Request


def chunk_problem(session: Request, chunk: Request) -> Rejected | None:
    """Return why an input is rejected: it changes a field that is fixed for the whole session."""
    unset = Request(chunk.request_id, chunk.prompt_token_ids)
    for name in SESSION_FIELDS:
        value = getattr(chunk, name)
        if value != getattr(unset, name) and value != getattr(session, name):
            return Rejected(
                RejectCode.BAD_REQUEST,
                f"update of {chunk.request_id!r}: {name} stays as it was submitted; leave it out",
            )
    return None


def append_chunk(
    whole: Request, kept: tuple[int, ...], update: Request, offset: int | None = None
) -> Request:
    """Return the session's request with its next input after the tokens that it keeps.

    `offset`: position of the input's items; None: that of the input.
    """
    offset = len(kept) if offset is None else offset
    shifted = [replace(item, offset=item.offset + offset) for item in update.items]
    return replace(
        whole,
        prompt_token_ids=(*kept, *update.prompt_token_ids),
        max_tokens=update.max_tokens,
        min_tokens=update.min_tokens,
        eos_token_id=update.eos_token_id,
        stop_token_ids=update.stop_token_ids,
        repetition_detection=update.repetition_detection,
        arrival_time=update.arrival_time,
        items=(*whole.items, *shifted),
    )
