"""Well-formedness: checks of an event that need no state.

Both sides of a comparison share these checks, because they are about the vocabulary itself: types
and ranges. Checks that depend on a state are written separately for each side.
"""

from __future__ import annotations

from itertools import pairwise

from blockstep.spec.vocabulary.constants import MAX_INT, is_count, shown
from blockstep.spec.vocabulary.events import (
    Abort,
    Commit,
    Drafts,
    EncoderOffer,
    EncoderReset,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    KVOffer,
    PauseState,
    Reset,
    RowTokens,
    Schedule,
    SetPause,
    StreamingUpdate,
    Submit,
    TransfersReported,
)
from blockstep.spec.vocabulary.forks import Fork
from blockstep.spec.vocabulary.observations import RejectCode, Rejected
from blockstep.spec.vocabulary.pins import Clock, PinEstimate
from blockstep.spec.vocabulary.request import Grammar, MultiModalItem, RepetitionDetection, Request
from blockstep.spec.vocabulary.transfers import NO_TRANSFERS, KVTransfers


def event_problem(event: object) -> Rejected | None:
    """Return why `event` is invalid in any state, or None."""
    match event:
        case Schedule():
            return None
        case Commit(frame_id=frame_id, sampled=sampled, transfers=transfers):
            if not is_count(frame_id):
                return _malformed("Commit.frame_id", frame_id, "an int >= 0")
            problem = _rows_problem("Commit.sampled", sampled)
            if problem is None and transfers is not NO_TRANSFERS:
                problem = _transfers_problem("Commit.transfers", transfers)
            return problem
        case Submit(request=request):
            return _request_problem(request, "Submit")
        case Drafts(drafts=drafts):
            return _rows_problem("Drafts.drafts", drafts)
        case Abort(request_ids=ids):
            if not isinstance(ids, tuple) or not all(map(_is_name, ids)):
                return _malformed("Abort.request_ids", ids, "a tuple of non-empty strings")
            return None
        case GrammarReady(request_id=request_id) | GrammarFailed(request_id=request_id):
            if not _is_name(request_id):
                what = f"{type(event).__name__}.request_id"
                return _malformed(what, request_id, "a non-empty string")
            return None
        case GrammarBitmask(frame_id=frame_id, drafts=drafts):
            if not is_count(frame_id):
                return _malformed("GrammarBitmask.frame_id", frame_id, "an int >= 0")
            return _rows_problem("GrammarBitmask.drafts", drafts)
        case StreamingUpdate(request=request):
            return _request_problem(request, "StreamingUpdate")
        case SetPause(pause_state=pause_state):
            if not isinstance(pause_state, PauseState):
                return _malformed("SetPause.pause_state", pause_state, "a PauseState")
            return None
        case Reset():
            return _reset_problem(event)
        case TransfersReported(transfers=transfers):
            return _transfers_problem("TransfersReported.transfers", transfers)
        case Fork():
            return _fork_problem(event)
        case _:
            return _message_problem(event)


def _message_problem(event: object) -> Rejected | None:
    """Return why a message about the encoder cache, a store or pins is malformed, or None."""
    match event:
        case EncoderReset():
            return None
        case EncoderOffer(identifiers=identifiers):
            if not isinstance(identifiers, tuple) or not all(map(_is_name, identifiers)):
                rule = "a tuple of non-empty strings"
                return _malformed("EncoderOffer.identifiers", identifiers, rule)
            return None
        case KVOffer():
            return _offer_problem(event)
        case Clock(now=now):
            return None if is_count(now) else _malformed("Clock.now", now, "an int >= 0")
        case PinEstimate(job_id=job_id, ttl=ttl):
            if not _is_name(job_id):
                return _malformed("PinEstimate.job_id", job_id, "a non-empty string")
            return None if is_count(ttl) else _malformed("PinEstimate.ttl", ttl, "an int >= 0")
        case _:
            return _malformed("event", event, "one of blockstep.spec's events")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _malformed(what: str, value: object, rule: str) -> Rejected:
    return Rejected(RejectCode.MALFORMED_EVENT, f"{what} = {shown(value)}: must be {rule}")


def _bad(request: Request, what: str, rule: str) -> Rejected:
    return Rejected(RejectCode.BAD_REQUEST, f"request {request.request_id!r}: {what} {rule}")


def _are_tokens(value: object) -> bool:
    if not isinstance(value, tuple):
        return False
    # Not a generator, because a prompt may have a hundred thousand tokens.
    for token in value:  # noqa: SIM110
        if type(token) is not int or not 0 <= token <= MAX_INT:
            return False
    return True


def _reset_problem(reset: Reset) -> Rejected | None:
    for name in ("reset_running_requests", "reset_connector"):
        if type(getattr(reset, name)) is not bool:
            return _malformed(f"Reset.{name}", getattr(reset, name), "a bool")
    return None


def _fork_problem(fork: Fork) -> Rejected | None:
    for name in ("request_id", "child_id"):
        if not _is_name(getattr(fork, name)):
            return _malformed(f"Fork.{name}", getattr(fork, name), "a non-empty string")
    if not _are_tokens(fork.output_token_ids):
        return _malformed(
            "Fork.output_token_ids", fork.output_token_ids, f"a tuple of 0..{MAX_INT}"
        )
    return None


def _rows_problem(what: str, rows: object) -> Rejected | None:
    if not isinstance(rows, tuple) or not all(isinstance(row, RowTokens) for row in rows):
        return _malformed(what, rows, "a tuple of RowTokens")
    for row in rows:
        if not _is_name(row.request_id):
            return _malformed(f"{what} request_id", row.request_id, "a non-empty string")
        if not _are_tokens(row.token_ids):
            return _malformed(f"{what} token_ids", row.token_ids, f"a tuple of 0..{MAX_INT}")
    return None


def _offer_problem(offer: KVOffer) -> Rejected | None:
    if not _is_name(offer.request_id):
        return _malformed("KVOffer.request_id", offer.request_id, "a non-empty string")
    if offer.num_tokens is not None and not is_count(offer.num_tokens):
        return _malformed("KVOffer.num_tokens", offer.num_tokens, "None or an int >= 0")
    for name in ("is_async", "delays_free"):
        if type(getattr(offer, name)) is not bool:
            return _malformed(f"KVOffer.{name}", getattr(offer, name), "a bool")
    return None


def _transfers_problem(what: str, transfers: object) -> Rejected | None:
    if not isinstance(transfers, KVTransfers):
        return _malformed(what, transfers, "a KVTransfers")
    for name in ("finished_recving", "finished_sending"):
        ids = getattr(transfers, name)
        if not isinstance(ids, tuple) or not all(map(_is_name, ids)):
            return _malformed(f"{what}.{name}", ids, "a tuple of non-empty strings")
    block_ids = transfers.invalid_block_ids
    if not isinstance(block_ids, tuple) or not all(map(is_count, block_ids)):
        return _malformed(f"{what}.invalid_block_ids", block_ids, "a tuple of ints >= 0")
    return None


def _request_problem(request: object, event: str) -> Rejected | None:
    if not isinstance(request, Request):
        return _malformed(f"{event}.request", request, "a Request")
    if not _is_name(request.request_id):
        return _malformed("request_id", request.request_id, "a non-empty string")
    if not _are_tokens(request.prompt_token_ids):
        return _malformed("prompt_token_ids", request.prompt_token_ids, f"a tuple of 0..{MAX_INT}")
    if not _are_tokens(request.stop_token_ids):
        return _malformed("stop_token_ids", request.stop_token_ids, f"a tuple of 0..{MAX_INT}")
    if request.eos_token_id is not None and not is_count(request.eos_token_id):
        return _malformed("eos_token_id", request.eos_token_id, "None or a token id")
    if not _are_tokens(request.prompt_embeds):
        return _malformed("prompt_embeds", request.prompt_embeds, f"a tuple of 0..{MAX_INT}")
    for name in ("max_tokens", "min_tokens", "arrival_time"):
        if type(getattr(request, name)) is not int:
            return _malformed(name, getattr(request, name), "an int")
    if type(request.priority) is not int or abs(request.priority) > MAX_INT:
        return _malformed("priority", request.priority, f"an int within +-{MAX_INT}")
    for name in ("adapter", "cache_salt", "job_id"):
        value = getattr(request, name)
        if value is not None and not _is_name(value):
            return _malformed(name, value, "None or a non-empty string")
    flags = ("skip_reading_prefix_cache", "resumable", "structured_output", "is_last_step")
    for name in flags:
        if type(getattr(request, name)) is not bool:
            return _malformed(name, getattr(request, name), "a bool")
    items = request.items
    if not isinstance(items, tuple) or not all(isinstance(i, MultiModalItem) for i in items):
        return _malformed("items", items, "a tuple of MultiModalItem")
    for item in items:
        if not _is_name(item.identifier) or not is_count(item.offset) or not is_count(item.length):
            return _malformed("items", item, "identifier: str, offset and length: ints >= 0")
        mask = item.is_embed
        if not isinstance(mask, tuple) or any(type(bit) is not bool for bit in mask):
            return _malformed("items", item, "is_embed: a tuple of bools")
    detection = request.repetition_detection
    if detection is not None and not isinstance(detection, RepetitionDetection):
        return _malformed("repetition_detection", detection, "None or a RepetitionDetection")
    grammar = request.grammar
    if grammar is not None and not isinstance(grammar, Grammar):
        return _malformed("grammar", grammar, "None or a Grammar")
    return _range_problem(request) or _grammar_problem(request)


def _grammar_problem(request: Request) -> Rejected | None:
    """Return why its grammar is invalid, or None. A state is a tuple of (token, next state)."""
    if request.grammar is None:
        return None
    if not request.structured_output:
        return _bad(
            request, "it has a grammar", "but no structured_output: set it, or leave it out"
        )
    states = request.grammar.edges
    if not isinstance(states, tuple) or not states:
        return _malformed("grammar.edges", states, "a tuple of at least one state")
    for state in states:
        if not isinstance(state, tuple) or not all(map(_is_edge, state)):
            return _malformed("grammar.edges", state, "a tuple of (token, next state)")
        tokens = [token for token, _ in state]
        if not all(first < second for first, second in pairwise(tokens)):
            return _bad(request, f"grammar state {shown(state)}", "must be sorted, each token once")
        if not all(following < len(states) for _, following in state):
            return _bad(
                request,
                f"grammar state {shown(state)}",
                f"has edges beyond its {len(states)} states",
            )
    return None


def _is_edge(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_count, value))


def _range_problem(request: Request) -> Rejected | None:
    if not request.prompt_token_ids:
        return _bad(request, "prompt_token_ids", "is empty: a prompt has at least one token")
    if request.prompt_embeds and request.resumable:
        return _bad(request, "prompt_embeds", "must be left out of a session: it grows by tokens")
    if request.prompt_embeds and len(request.prompt_embeds) != len(request.prompt_token_ids):
        return _bad(
            request,
            f"prompt_embeds has {len(request.prompt_embeds)} entries",
            f"must have one for each of {len(request.prompt_token_ids)} prompt tokens, or none",
        )
    if not 1 <= request.max_tokens <= MAX_INT:
        return _bad(request, f"max_tokens = {shown(request.max_tokens)}", f"must be 1..{MAX_INT}")
    if not 0 <= request.min_tokens <= request.max_tokens:
        return _bad(request, f"min_tokens = {shown(request.min_tokens)}", "must be 0..max_tokens")
    if not 0 <= request.arrival_time <= MAX_INT:
        return _bad(
            request, f"arrival_time = {shown(request.arrival_time)}", f"must be 0..{MAX_INT}"
        )
    end = 0
    for item in request.items:
        if item.length < 1 or item.offset < end:
            return _bad(request, f"item {item}", "must have tokens and start after the one before")
        end = item.offset + item.length
        if item.is_embed and (len(item.is_embed) != item.length or not any(item.is_embed)):
            return _bad(request, f"item {item}", "must have a bit per token, and one that is set")
    detection = request.repetition_detection
    if detection is not None:
        sizes = (detection.min_pattern_size, detection.max_pattern_size, detection.min_count)
        if not all(type(size) is int for size in sizes):
            return _malformed("repetition_detection", detection, "three ints")
        if not (1 <= sizes[0] <= sizes[1] <= MAX_INT and 2 <= sizes[2] <= MAX_INT):
            return _bad(
                request,
                shown(detection),
                "must have 1 <= min_pattern_size <= max_pattern_size and min_count >= 2",
            )
    return None
