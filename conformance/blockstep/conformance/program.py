"""Program: what was done to an engine, in a form that can be shrunk, stored and read aloud.

Most actions are events. Two are not, because they depend on what happened before: a commit is
whatever the worker has to say to the oldest plan in flight, and drafts are proposed for whoever
just sampled. Keeping them abstract lets a program lose any of its lines and still make sense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    Drafts,
    Event,
    GrammarReady,
    Request,
    Reset,
    Schedule,
    SetPause,
    Submit,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The worker answers the oldest plan in flight; without one, nothing happens."""


@dataclass(frozen=True, slots=True)
class Propose:
    """The proposer hands in drafts for the requests of the last answered plan that sampled.

    The i-th of them gets `counts[i % len(counts)]`: so many drafts, so many of them right.
    """

    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Arrivals stop and all is healed: steps follow until every request has ended (P10, P11)."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """An event as it is, however wrong: stale commits, foreign rows, malformed values."""

    event: Event


Action: TypeAlias = (
    Submit | Schedule | Answer | Propose | Abort | GrammarReady | SetPause | Reset | Drain | Hostile
)


@dataclass(frozen=True, slots=True)
class Program:
    """A run, reproducible to the last token: everything random was decided in here."""

    config: Config
    actions: tuple[Action, ...]
    token_seed: int = 0
    """Seed of the token function: which token follows which text."""
    vocabulary_size: int = 50
    """Sampled tokens are below this."""


def describe(action: Action) -> str:
    """One line for a reader: `submit  A prompt=12 max_tokens=4`."""
    match action:
        case Submit(request=request):
            return f"submit    {describe_request(request)}"
        case Answer():
            return "commit"
        case Propose(counts=counts):
            parts = " ".join(f"{count}({right} right)" for count, right in counts)
            return f"drafts    {parts}"
        case Abort(request_ids=request_ids):
            return f"abort     {' '.join(request_ids)}"
        case GrammarReady(request_id=request_id):
            return f"grammar   {request_id} ready"
        case SetPause(pause_state=pause_state):
            return f"pause     {pause_state}"
        case Reset(reset_running_requests=True):
            return "reset     running requests too"
        case Hostile(event=event):
            return f"hostile   {describe_event(event)}"
        case _:
            return type(action).__name__.lower()


def describe_request(request: Request) -> str:
    """Its id and whatever is not a default."""
    prompt = request.prompt_token_ids
    shown = ",".join(map(str, prompt)) if len(prompt) <= 8 else f"{len(prompt)} tokens"
    parts = [f"{request.request_id} prompt={shown} max_tokens={request.max_tokens}"]
    defaults = Request("", ())
    for name in Request.__dataclass_fields__:
        value = getattr(request, name)
        if name not in {"request_id", "prompt_token_ids", "max_tokens"} and value != getattr(
            defaults, name
        ):
            parts.append(f"{name}={value}")
    return " ".join(parts)


def describe_event(event: object) -> str:
    """One line for an event as it was sent."""
    match event:
        case Submit(request=Request() as request):
            return f"submit {describe_request(request)}"
        case Commit(frame_id=frame_id, sampled=sampled):
            return f"commit frame {frame_id} {_rows(sampled)}"
        case Drafts(drafts=drafts):
            return f"drafts {_rows(drafts)}"
        case _:
            text = repr(event)
            return text if len(text) <= 100 else text[:97] + "..."


def _rows(rows: object) -> str:
    if not isinstance(rows, tuple):
        return repr(rows)
    return " ".join(
        f"{getattr(row, 'request_id', row)}:{list(getattr(row, 'token_ids', ()))}" for row in rows
    )
