"""The request that a session becomes with its next input, computed independently of the spec.

known    |------ prompt ------|---- outputs ----|x|      x: sampled last, it is replaced
then     |--------- the prompt is all but x ----|-- input --|
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from blockstep.spec.vocabulary import SESSION_FIELDS, Config, RejectCode, Request, TokenIds


def continue_request(request: Request, outputs: TokenIds, update: Request) -> Request:
    """Return the request that a session becomes with its next input."""
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
    """Return why an input is rejected: it changes a field that is fixed for a session."""
    mine = [(getattr(update, name), getattr(request, name)) for name in SESSION_FIELDS]
    unsaid = [getattr(Request("", ()), name) for name in SESSION_FIELDS]
    is_foreign = any(new not in (old, no) for (new, old), no in zip(mine, unsaid, strict=True))
    return RejectCode.BAD_REQUEST if is_foreign else None


@dataclass(slots=True)
class Session:
    """State of a session between its inputs."""

    updates: list[Request] = field(default_factory=list)
    """Inputs that wait; one that is not resumable is the last."""
    is_resting: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether no more input may arrive."""
        return bool(self.updates) and not self.updates[-1].resumable

    @property
    def ends_at_its_stop(self) -> bool:
        """Whether the next stop finishes the session."""
        return bool(self.updates) and not self.updates[0].resumable

    def copy(self) -> Session:
        """Return a copy; the inputs are shared, since they are immutable."""
        return Session([*self.updates], self.is_resting)

    def stop(self, request: Request, outputs: TokenIds) -> Request | None:
        """Return the request after a stop with these outputs; None if it becomes idle."""
        if not self.updates:
            self.is_resting = True
            return None
        return continue_request(request, outputs, self.updates.pop(0))

    def update(self, request: Request, outputs: TokenIds, update: Request) -> Request | None:
        """Return the request after an input of its client; None if the input has to wait."""
        if not self.is_resting:
            self.updates.append(update)
            return None
        self.is_resting = False
        return continue_request(request, outputs, update)


def get_longest(
    config: Config, request: Request, outputs: TokenIds, session: Session, update: Request
) -> Request:
    """Return the longest request that a session may become with this input and those before it.

    Its items are placed as if each earlier input stopped at once, since it may have no outputs.
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
