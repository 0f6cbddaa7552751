"""Structured output: requests whose grammar is compiled first, and then constrains their tokens.

`grammar` is the automaton. A row that samples for a request with a grammar is constrained at the
position of each draft and after the last one. Tokens that older frames sample come first: the mask
of a frame is for the sequence after which it samples. Drafts that the scheduler knows were cut when
they were stored (`get_accepted_drafts`); those that only the worker knows are cut by the mask, and
the frame in flight remembers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core import speculation
from blockstep.spec.core.endings import get_ended, get_error_row
from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import Frame, FrameRow, RequestState
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Scheduled, Step, Verdict
from blockstep.spec.features.structured_output.grammar import (
    GRAMMAR,
    get_first_state,
    get_mask,
    get_next_state,
    get_state_after,
    get_states,
)
from blockstep.spec.features.structured_output.invariants import INVARIANTS
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Ack,
    Commit,
    Config,
    GrammarBitmask,
    GrammarFailed,
    GrammarOutput,
    GrammarReady,
    GrammarRow,
    Outputs,
    Plan,
    RejectCode,
    Rejected,
    RequestId,
    Status,
    TokenIds,
)

COMPILING: Final = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
GRAMMAR_READY: Final = Part("grammar_ready", False)
"""Whether the grammar of a request is compiled."""
HAS_MASK: Final = Part("has_mask", False)
"""Whether a grammar constrains the tokens of a row in flight."""
IS_CUT: Final = Part("is_masked", False)
"""Whether a mask was made with the drafts of a row: remaining placeholders cannot be accepted."""


# Compilation.


def get_structured_entry(state: State, entry: RequestState) -> RequestState:
    """Return a new request: with structured output it is blocked until its grammar is compiled.

    Source: seed 001 "RequestStatus Lifecycle"; P23.
    """
    asked = entry.request
    if asked.structured_output:
        entry = replace(entry, status=COMPILING)
    if asked.grammar is None:
        return entry
    return GRAMMAR.put(entry, get_first_state(state.config, asked.prompt_token_ids))


def process_grammar_gate(step: Step, request: RequestState) -> Verdict | None:
    """Skip a request whose grammar is not compiled; once it is, the request waits like others.

    Source: seed 001 "Filter on blocking status"; P15.
    """
    if request.status is not COMPILING:
        return None
    if not GRAMMAR_READY.of(request):
        return Verdict.PASSED_OVER
    step.requests[request.request_id] = replace(request, status=Status.WAITING)
    return None


def process_grammar_ready(state: State, event: GrammarReady) -> tuple[State, Ack] | Rejected:
    """Note that the grammar is compiled; the next Schedule that tries the request makes it waiting.

    Source: seed 001 "Filter on blocking status"; P18.
    """
    # refuse
    request = get_structured(state, event.request_id)
    if isinstance(request, Rejected):
        return request
    # requests
    requests = state.requests.having(event.request_id, GRAMMAR_READY.put(request, True))
    return replace(state, requests=requests), Ack()


def get_structured(state: State, request_id: RequestId) -> RequestState | Rejected:
    """Return the request to which an event about a grammar refers, or why there is none.

    Source: P18.
    """
    request = state.requests.get(request_id)
    if request is None:
        detail = f"no unfinished request {request_id!r}"
        return Rejected(RejectCode.UNKNOWN_REQUEST, detail)
    if not request.request.structured_output:
        detail = f"{request_id!r} was submitted without structured_output"
        return Rejected(RejectCode.NOT_STRUCTURED, detail)
    return request


def process_grammar_failed(state: State, event: GrammarFailed) -> tuple[State, Outputs] | Rejected:
    """Finish a request whose grammar cannot be compiled, with an error, whatever its status.

    Frames in flight still return tokens for it, which are ignored, as after an abort. Source: vLLM
    0.19.1 `is_grammar_ready`; P13, P18.
    """
    # refuse
    request = get_structured(state, event.request_id)
    if isinstance(request, Rejected):
        return request
    # observe
    return get_ended(state, [event.request_id]), Outputs((get_error_row(request),))


# Rows in flight.


def fill_mask(step: Step, row: Scheduled, frame_row: FrameRow) -> FrameRow:
    """Return a row of a frame, with whether a grammar constrains its tokens. Source: P23."""
    grammar = step.requests[row.request_id].request.grammar
    return HAS_MASK.put(frame_row, True) if grammar and frame_row.samples else frame_row


def get_verifiable_drafts(row: FrameRow) -> TokenIds:
    """Return the drafts of a row without those that a mask cut off, which come last. Source: P23,
    P24."""
    if not IS_CUT.of(row) or DRAFT_PLACEHOLDER not in row.draft_token_ids:
        return row.draft_token_ids
    return row.draft_token_ids[: row.draft_token_ids.index(DRAFT_PLACEHOLDER)]


def drop_row(frame: Frame, request_id: RequestId) -> Frame:
    """Return a frame in flight in which the row of this request, if any, delivers nothing.

    Source: P13.
    """
    rows = [
        HAS_MASK.put(replace(row, is_dropped=True), False) if row.request_id == request_id else row
        for row in frame.rows
    ]
    return replace(frame, rows=tuple(rows))


# Masks.


def process_bitmask(
    state: State, bitmask: GrammarBitmask
) -> tuple[State, GrammarOutput] | Rejected:
    """Return the mask of a frame; only drafts that only the worker knew change.

    Those are verified as far as the grammar accepts them; the rest are placeholders, which cannot
    be accepted. If no drafts are given for a row, it keeps those that it has. The event may be
    repeated; the last one counts. Source: vLLM 0.19.1 `get_grammar_bitmask`,
    `update_draft_token_ids_in_output`; P23, P24.
    """
    # refuse
    frame = next((f for f in state.frames if f.frame_id == bitmask.frame_id), None)
    if frame is None:
        detail = f"frame {bitmask.frame_id} is not in flight; ask between its plan and its commit"
        return Rejected(RejectCode.UNKNOWN_FRAME, detail)
    sent = {row.request_id: row.token_ids for row in bitmask.drafts}
    problem = get_draft_problem(state.config, bitmask)
    if problem:
        return Rejected(RejectCode.BAD_DRAFTS, problem)
    masked = state.rules[list_masked](state, frame)
    behind = get_behind(state.frames, frame, masked)
    if behind is not None:
        detail = f"{behind!r} samples in a frame before {frame.frame_id}; commit that first"
        return Rejected(RejectCode.GRAMMAR_BEHIND, detail)
    # select
    rows = {row.request_id: get_cut(state, row, sent) for row in masked}
    # observe
    frame_after = replace(frame, rows=tuple([rows.get(row.request_id, row) for row in frame.rows]))
    frames = tuple([frame_after if one is frame else one for one in state.frames])
    answer = GrammarOutput(tuple([get_mask_row(state, row) for row in rows.values()]))
    return replace(state, frames=frames), answer


def get_draft_problem(config: Config, bitmask: GrammarBitmask) -> str:
    """Return why drafts cannot be sent with a mask; "" if they can. Source: S7; P18."""
    names = [row.request_id for row in bitmask.drafts]
    if names and not config.async_scheduling:
        return "the drafts of a frame are known, for scheduling is not asynchronous: send none"
    twice = [name for name in names if names.count(name) > 1]
    return f"{twice[0]!r} is named twice; send one row per request" if twice else ""


def list_masked(state: State, frame: Frame) -> list[FrameRow]:
    """Return the rows of a frame that its mask has rows for: those of unfinished requests.

    Source: vLLM 0.19.1 `get_grammar_bitmask`; P23.
    """
    return [row for row in frame.rows if HAS_MASK.of(row) and row.request_id in state.requests]


def get_behind(
    frames: Sequence[Frame], frame: Frame, masked: Sequence[FrameRow]
) -> RequestId | None:
    """Return a request with rows in the mask that also samples in an older frame; or None.

    Source: vLLM 0.19.1 `pending_structured_output_tokens`; upstream #45014; P23.
    """
    names = {row.request_id for row in masked}
    for older in frames[: frames.index(frame)]:
        for row in older.rows:
            if row.samples and not row.is_dropped and row.request_id in names:
                return row.request_id
    return None


def get_cut(state: State, row: FrameRow, sent: Mapping[RequestId, TokenIds]) -> FrameRow:
    """Return a row of a frame with the drafts that the grammar accepts, then placeholders.

    Source: vLLM 0.19.1 `update_draft_token_ids_in_output`; P23, P24.
    """
    if not state.config.async_scheduling:
        return row
    num_drafts = len(row.draft_token_ids)
    drafts = sent.get(row.request_id, row.draft_token_ids)[:num_drafts]
    accepted = get_accepted_drafts(state, state.requests[row.request_id], drafts)
    padding = (DRAFT_PLACEHOLDER,) * (num_drafts - len(accepted))
    return IS_CUT.put(replace(row, draft_token_ids=accepted + padding), True)


def get_mask_row(state: State, row: FrameRow) -> GrammarRow:
    """Return what one request may sample in a frame.

    Source: vLLM 0.19.1 `grammar_bitmask`; P23, P24.
    """
    request = state.requests[row.request_id]
    grammar = request.request.grammar
    assert grammar is not None, "a mask has rows of requests with a grammar"
    rules, drafts = state.rules, row.draft_token_ids
    follow = rules[get_next_state]
    allowed = rules[get_mask](state.config, grammar, GRAMMAR.of(request), drafts, follow)
    return GrammarRow(row.request_id, allowed, drafts)


def get_accepted_drafts(state: State, request: RequestState, drafts: TokenIds) -> TokenIds:
    """Return the leading drafts that the grammar of a request accepts; all if it has none.

    Source: vLLM 0.19.1 `update_draft_token_ids`; P23.
    """
    grammar = request.request.grammar
    if grammar is None:
        return drafts
    follow = state.rules[get_next_state]
    return drafts[: len(get_states(state.config, grammar, GRAMMAR.of(request), drafts, follow)) - 1]


def get_forbidden(state: State, frame: Frame, commit: Commit) -> str:
    """Return why a model output breaks a grammar; "" if it does not.

    Source: vLLM 0.19.1 `update_from_output`; P23.
    """
    held = {row.request_id for row in frame.rows if HAS_MASK.of(row) and not row.is_dropped}
    for row in commit.sampled if held else ():
        request = state.requests.get(row.request_id) if row.request_id in held else None
        if request is not None and get_advanced(state, request, row.token_ids) is None:
            return (
                f"{row.request_id!r}: its grammar, in state {GRAMMAR.of(request).state}, forbids "
                f"one of {row.token_ids}; sample by the mask (GrammarBitmask)"
            )
    return ""


def get_advanced(state: State, request: RequestState, tokens: TokenIds) -> RequestState | None:
    """Return the request with its grammar advanced by its new outputs; None if one is forbidden.

    Source: vLLM 0.19.1 `update_from_output`; P23.
    """
    grammar = request.request.grammar
    assert grammar is not None, "a mask has rows of requests with a grammar"
    follow = state.rules[get_next_state]
    after = get_state_after(state.config, grammar, GRAMMAR.of(request), tokens, follow)
    return None if after is None else GRAMMAR.put(request, after)


def get_read(state: State, row: FrameRow, request: RequestState, tokens: TokenIds) -> RequestState:
    """Return the request after its grammar read the new outputs of a row, which a commit has
    checked. Source: vLLM 0.19.1 `update_from_output`; P23.
    """
    if not HAS_MASK.of(row):
        return request
    advanced = get_advanced(state, request, tokens)
    assert advanced is not None, "forbidden tokens were rejected (P23)"
    return advanced


def add_masks(step: Step, frame_rows: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with whether a grammar constrains some of its rows, and whether tokens in
    flight come before. Source: vLLM 0.19.1 `pending_structured_output_tokens`; P23, P26.
    """
    masked = [step.requests[row.request_id] for row in frame_rows if HAS_MASK.of(row)]
    if not masked:
        return plan
    return replace(
        plan,
        has_structured_output_requests=True,
        pending_structured_output_tokens=any(one.num_output_placeholders for one in masked),
    )


FEATURE: Final = Feature(
    "structured_output",
    is_always,
    Hooks(
        arrives=(get_structured_entry,),
        gates=(process_grammar_gate,),
        rows=(fill_mask,),
        fields=(add_masks,),
        disputes=(get_forbidden,),
        reads=(get_read,),
        accepts=(get_accepted_drafts,),
    ),
    instead={speculation.get_verifiable_drafts: get_verifiable_drafts},
    events={
        GrammarReady: process_grammar_ready,
        GrammarFailed: process_grammar_failed,
        GrammarBitmask: process_bitmask,
    },
    shows_of_request={
        "grammar_ready": GRAMMAR_READY.of,
        "grammar_state": lambda request: GRAMMAR.of(request).state,
        "reasoning_ended": lambda request: GRAMMAR.of(request).reasoning_ended,
    },
    invariants=INVARIANTS,
)
