"""Refusals: rejections of events, with messages that name the input, the rule and the fix."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from blockstep.spec.vocabulary import (
    Config,
    Drafts,
    Event,
    Fork,
    FrameId,
    GrammarBitmask,
    GrammarFailed,
    RejectCode,
    Rejected,
    Request,
    RequestId,
    SpecMethod,
    Submit,
    TokenIds,
    item_problem,
)


def most_slots(config: Config, request: Request) -> int:
    """Return the slots that a request needs at its longest, including lookahead (P11)."""
    longest = len(request.prompt_token_ids) + request.max_tokens - 1
    if request.max_tokens > 1:  # drafts follow an output, and the last one ends the request
        longest += config.num_speculative_tokens
    written = min(longest, config.max_model_len - 1)
    return min(written + config.num_lookahead_tokens, config.max_model_len)


def count_beside(request: Request) -> int:
    """Return the number of embeddings of its encoder-decoder inputs."""
    return sum(item.num_embeds for item in request.items)


def most_blocks(config: Config, request: Request) -> int:
    """Return the blocks that it needs at its longest, with one KV group (P11; upstream #52520)."""
    return -(-most_slots(config, request) // config.block_size)


def submit_problem(
    config: Config, request: Request, needed: int, is_unfinished: bool, is_in_flight: bool
) -> Rejected | None:
    """Return why a request must be rejected, or None; `needed`: blocks at its longest."""
    name, prompt = repr(request.request_id), len(request.prompt_token_ids)
    problem = name_problem(request.request_id, is_unfinished, is_in_flight)
    problem = problem or item_problem(config, request)
    if problem is not None:
        return problem
    if prompt >= config.max_model_len:
        return Rejected(
            RejectCode.PROMPT_TOO_LONG,
            f"request {name}: a prompt of {prompt} tokens leaves no room for an output token "
            f"within max_model_len = {config.max_model_len}; shorten it",
        )
    if needed > config.num_usable_blocks:
        return Rejected(
            RejectCode.NEVER_FITS,
            f"request {name}: at its longest it needs {needed} blocks, and the pool has "
            f"{config.num_usable_blocks} without the null block; shorten it or lower max_tokens",
        )
    return None


def name_problem(request_id: RequestId, is_unfinished: bool, is_in_flight: bool) -> Rejected | None:
    """Return why no new request can have this id, or None."""
    if is_unfinished:
        return Rejected(
            RejectCode.DUPLICATE_REQUEST,
            f"request {request_id!r}: the id belongs to an unfinished request; use another id",
        )
    if is_in_flight:
        return Rejected(
            RejectCode.REQUEST_IN_FLIGHT,
            f"request {request_id!r}: a frame in flight names a finished request of this id; "
            "commit the frame first",
        )
    return None


def held_by_transfer(request_id: RequestId) -> Rejected:
    """Reject the id of a finished request whose blocks a transfer holds."""
    return Rejected(
        RejectCode.REQUEST_IN_FLIGHT,
        f"request {request_id!r}: a transfer holds blocks of a finished request of this id; "
        "report the end of the transfer first",
    )


def brought_problem(event: Event, capabilities: Collection[str] = ()) -> Rejected | None:
    """Return why an engine rejects an event that needs masks or sessions, or None.

    `capabilities`: what the engine has.
    """
    if isinstance(event, Submit) and event.request.resumable and "sessions" not in capabilities:
        name = event.request.request_id
        return Rejected(
            RejectCode.BAD_REQUEST,
            f"request {name!r}: resumable: this engine has no sessions; leave it out",
        )
    if "masks" in capabilities:
        return None
    if isinstance(event, Submit) and event.request.grammar is not None:
        name = event.request.request_id
        return Rejected(
            RejectCode.BAD_REQUEST,
            f"request {name!r}: this engine has no masks, so no grammar; leave grammar out",
        )
    if isinstance(event, GrammarFailed | GrammarBitmask):
        kind = type(event).__name__
        return Rejected(
            RejectCode.MALFORMED_EVENT, f"{kind}: this engine has no masks; do not send it"
        )
    return None


def grammar_problem(
    request: Request | None, request_id: RequestId, what: str = "ready"
) -> Rejected | None:
    """Return why a grammar cannot be ready, or have failed, or None; `request`: None if unknown."""
    if request is None:
        return Rejected(
            RejectCode.UNKNOWN_REQUEST,
            f"grammar {what}: no unfinished request has the id {request_id!r}; submit it first",
        )
    if not request.structured_output:
        return Rejected(
            RejectCode.NOT_STRUCTURED,
            f"grammar {what}: request {request_id!r} has no grammar; "
            "submit it with structured_output",
        )
    return None


def mask_problem(
    config: Config, event: GrammarBitmask, in_flight: Collection[FrameId]
) -> Rejected | None:
    """Return why no mask can be made for a frame, whatever its rows are, or None."""
    name = f"mask of frame {event.frame_id}"
    if event.frame_id not in in_flight:
        return Rejected(
            RejectCode.UNKNOWN_FRAME,
            f"{name}: it is not in flight; in flight are {list(in_flight)}",
        )
    if event.drafts and not config.async_scheduling:
        return Rejected(
            RejectCode.BAD_DRAFTS,
            f"{name}: without asynchronous scheduling its drafts are known; send none",
        )
    if len({row.request_id for row in event.drafts}) != len(event.drafts):
        return Rejected(
            RejectCode.BAD_DRAFTS, f"{name}: a request is named twice; send one row for each"
        )
    return None


def grammar_behind(frame_id: FrameId, request_ids: Collection[RequestId]) -> Rejected:
    """Reject a mask for requests for which older frames sample."""
    return Rejected(
        RejectCode.GRAMMAR_BEHIND,
        f"mask of frame {frame_id}: older frames sample for {sorted(request_ids)}, too; "
        "commit those first",
    )


def update_problem(request_id: RequestId, is_unfinished: bool) -> Rejected:
    """Reject an update of a session by an engine without sessions."""
    if not is_unfinished:
        return Rejected(
            RejectCode.UNKNOWN_REQUEST,
            f"update: no unfinished request has the id {request_id!r}; submit it first",
        )
    return Rejected(
        RejectCode.NOT_RESUMABLE,
        f"update: request {request_id!r} is not a session that takes more input; submit one",
    )


def fork_problem(
    config: Config,
    fork: Fork,
    *,
    is_unfinished: bool,
    is_child_unfinished: bool,
    is_child_in_flight: bool,
    may_fork: bool,
    is_in_flight: bool,
) -> Rejected | None:
    """Return why a request cannot fork, whatever the child's outputs are, or None.

    Args:
        config: config of the engine.
        fork: the event.
        is_unfinished: whether the parent is unfinished.
        is_child_unfinished: whether a request with the child's id is unfinished.
        is_child_in_flight: whether a frame in flight names a finished request of that id.
        may_fork: whether the parent has started and is not a session.
        is_in_flight: whether a frame in flight names the parent.
    """
    name, parent = repr(fork.child_id), repr(fork.request_id)
    if not config.enable_forks:
        return bad_fork(fork, "forks are off; switch enable_forks on")
    if not is_unfinished:
        return Rejected(
            RejectCode.UNKNOWN_REQUEST,
            f"fork {name}: no unfinished request has the id {parent}; submit it first",
        )
    problem = name_problem(fork.child_id, is_child_unfinished, is_child_in_flight)
    if problem is not None:
        return problem
    if not may_fork:
        return bad_fork(fork, f"{parent} is a session, or has not started; fork a running request")
    if is_in_flight:
        return Rejected(
            RejectCode.FORK_IN_FLIGHT,
            f"fork {name}: a frame in flight names {parent}; commit it first",
        )
    return None


def bad_fork(fork: Fork, detail: str) -> Rejected:
    """Reject a fork that is not possible."""
    return Rejected(RejectCode.BAD_FORK, f"fork {fork.child_id!r}: {detail}")


def schedule_problem(config: Config, num_in_flight: int) -> Rejected | None:
    """Return why no step can be planned, or None."""
    if num_in_flight < config.max_frames_in_flight:
        return None
    return Rejected(
        RejectCode.PIPELINE_FULL,
        f"schedule: {num_in_flight} plans are not committed, and "
        f"max_frames_in_flight is {config.max_frames_in_flight}; commit one first",
    )


def frame_problem(frame_id: FrameId, in_flight: Collection[FrameId]) -> Rejected | None:
    """Return why a frame is not the next to be committed, or None; `in_flight`: oldest first."""
    if frame_id not in in_flight:
        return unknown_frame(frame_id, in_flight)
    if next(iter(in_flight)) != frame_id:
        return frame_out_of_order(frame_id, in_flight)
    return None


def unknown_frame(frame_id: FrameId, in_flight: Collection[FrameId]) -> Rejected:
    """Reject a commit of a frame that is not in flight (P18)."""
    return Rejected(
        RejectCode.UNKNOWN_FRAME,
        f"commit: frame_id = {frame_id} is not in flight: it was never scheduled, "
        f"had no rows, or is committed already; in flight are {list(in_flight)}",
    )


def frame_out_of_order(frame_id: FrameId, in_flight: Collection[FrameId]) -> Rejected:
    """Reject a commit while older frames are in flight (P13)."""
    return Rejected(
        RejectCode.FRAME_OUT_OF_ORDER,
        f"commit: frame_id = {frame_id} is in flight, but so are older ones: "
        f"{list(in_flight)}; commit those first",
    )


def answer_problem(
    frame_id: FrameId,
    num_answers: int,
    frame: Mapping[RequestId, TokenIds | None],
    answers: Mapping[RequestId, TokenIds],
    are_among: Callable[[TokenIds, TokenIds], bool],
) -> Rejected | None:
    """Return why a model output does not fit the frame, or None; aborted requests count as rows.

    Args:
        frame_id: id of the frame.
        num_answers: rows of the model output; more than `answers` has if a request has two.
        frame: drafts of each row, None if it does not sample.
        answers: tokens of each request.
        are_among: whether a row with these drafts may accept these tokens.
    """
    if not num_answers == len(answers) == len(frame):
        return bad_result(frame_id, f"must have one row for each of {sorted(frame)}")
    for request_id, drafts in frame.items():
        tokens = answers.get(request_id)
        if tokens is None:
            return bad_result(frame_id, f"must have one row for each of {sorted(frame)}")
        if drafts is None:
            if tokens:
                return bad_result(frame_id, f"{request_id!r} is in prefill; send no tokens")
        elif not 1 <= len(tokens) <= 1 + len(drafts):
            rule = f"must have 1 to {1 + len(drafts)} tokens, not {len(tokens)}"
            return bad_result(frame_id, f"{request_id!r} {rule}")
        elif drafts and not are_among(drafts, tokens[:-1]):
            rule = f"accepts {tokens[:-1]}, which is not a prefix of its drafts {drafts}"
            detail = f"{request_id!r} {rule}; send accepted drafts and one"
            return bad_result(frame_id, detail)
    return None


def bad_result(frame_id: FrameId, detail: str) -> Rejected:
    """Reject a model output that does not fit its frame."""
    return Rejected(RejectCode.BAD_RESULT, f"commit of frame {frame_id}: {detail}")


def drafts_problem(config: Config, event: Drafts) -> Rejected | None:
    """Return why these drafts must be rejected, or None."""
    if config.async_scheduling:
        detail = "under asynchronous scheduling the worker keeps its drafts"
        return _bad_drafts(f"{detail}; send none, or switch async_scheduling off")
    if config.spec_method is SpecMethod.NONE:
        return _bad_drafts("spec_method is none, so there are no drafts; configure a spec_method")
    most = config.num_speculative_tokens
    for row in event.drafts:
        if len(row.token_ids) > most:
            rule = f"has {len(row.token_ids)} tokens, more than num_speculative_tokens = {most}"
            return _bad_drafts(f"{row.request_id!r} {rule}; send at most {most}")
    if len({row.request_id for row in event.drafts}) != len(event.drafts):
        return _bad_drafts("a request is named twice; send one row for each")
    return None


def _bad_drafts(detail: str) -> Rejected:
    return Rejected(RejectCode.BAD_DRAFTS, f"drafts: {detail}")
