"""Sessions: what becomes of a request that goes on with further input, worked out here.

known    |------ prompt ------|---- outputs ----|x|      x: sampled last, it is replaced
then     |--------- the prompt is all but x ----|-- input --|
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from blockstep.spec.vocabulary import SESSION_FIELDS, Config, RejectCode, Request, TokenIds


def continue_request(request: Request, outputs: TokenIds, update: Request) -> Request:
    """The request that a session is once it has gone on with a chunk."""
    kept = (request.prompt_token_ids + outputs)[:-1]
    items = [replace(item, offset=item.offset + len(kept)) for item in update.items]
    return replace(
        request,
        prompt_token_ids=kept + update.prompt_token_ids,
        items=(*request.items, *items),
        max_tokens=update.max_tokens,
        min_tokens=update.min_tokens,
        eos_token_id=update.eos_token_id,
        stop_token_ids=update.stop_token_ids,
        repetition_detection=update.repetition_detection,
        arrival_time=update.arrival_time,
    )


def find_problem_of_chunk(request: Request, update: Request) -> RejectCode | None:
    """Why a chunk is refused: it brings another value for a field that its session has for good."""
    mine = [(getattr(update, name), getattr(request, name)) for name in SESSION_FIELDS]
    unsaid = [getattr(Request("", ()), name) for name in SESSION_FIELDS]
    is_foreign = any(new not in (old, no) for (new, old), no in zip(mine, unsaid, strict=True))
    return RejectCode.BAD_REQUEST if is_foreign else None


@dataclass(slots=True)
class Session:
    """Where a session stands between its chunks."""

    updates: list[Request] = field(default_factory=list)
    """Chunks to come; one that is not resumable says that no more do."""
    is_resting: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether no more input may come."""
        return bool(self.updates) and not self.updates[-1].resumable

    @property
    def ends_at_its_stop(self) -> bool:
        """Whether the next stop ends it."""
        return bool(self.updates) and not self.updates[0].resumable

    def copy(self) -> Session:
        """Another that stands where this one does; chunks are values."""
        return Session([*self.updates], self.is_resting)

    def stop(self, request: Request, outputs: TokenIds) -> Request | None:
        """It came to a stop with these outputs: what it is now; None if it rests as it is."""
        if not self.updates:
            self.is_resting = True
            return None
        return continue_request(request, outputs, self.updates.pop(0))

    def update(self, request: Request, outputs: TokenIds, update: Request) -> Request | None:
        """Its client goes on: what it is now; None if nothing changes yet."""
        if not self.is_resting:
            self.updates.append(update)
            return None
        self.is_resting = False
        return continue_request(request, outputs, update)


def get_longest(
    config: Config, request: Request, outputs: TokenIds, session: Session, update: Request
) -> Request:
    """What a session may become by a chunk, and by those that stand before it, at its longest.

    Its items stand as they would if each stop came at once: what lies between two may be nothing.
    """
    shortest = len(request.prompt_token_ids)
    longest = shortest + request.max_tokens
    if session.is_resting:
        longest = shortest + len(outputs)
        shortest = longest - 1
    for chunk in (*session.updates, update):
        num_prompt = min(longest, config.max_model_len) - 1 + len(chunk.prompt_token_ids)
        longest = num_prompt + chunk.max_tokens
        items = [replace(item, offset=item.offset + shortest) for item in chunk.items]
        shortest += len(chunk.prompt_token_ids)
        request = replace(
            request,
            prompt_token_ids=(0,) * num_prompt,
            max_tokens=chunk.max_tokens,
            items=(*request.items, *items),
        )
    return replace(request, min_tokens=0)
