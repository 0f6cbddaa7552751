"""Drafts: quirks of releases with placeholder drafts, and with drafts of preempted requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockstep.spec.core import admission, async_, preemption, speculation, token_budget
from blockstep.spec.core.requests import FrameRow, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import Config, RequestId, Status


def _is_padded(
    num_drafts: int, num_missing: int, has_company: bool, running: Sequence[RequestState]
) -> bool:
    """Return whether a request with one token to compute is padded to the shape of a decode row.

    Source: vLLM 0.27.0, 0.33.0 `schedule`, when run; upstream #45237, #53962, #55126.
    """
    if num_drafts == 0 or num_missing != 1:
        return False
    return bool(running or has_company) and not any(other.is_prefill_chunk for other in running)


def stale_draft_placeholders(rules: Rules, _config: Config) -> Rules:
    """Draft placeholders of a request that a plan leaves out stay, and are scheduled later."""

    def get_promising(
        step: Step, request: RequestState, planned: Mapping[RequestId, FrameRow]
    ) -> RequestState:
        if request.request_id not in planned:
            return request
        return rules[async_.get_promising](step, request, planned)

    return rules.replacing(async_.get_promising, get_promising)


def drafts_outlive_preemption(rules: Rules, _config: Config) -> Rules:
    """A preempted request keeps its drafts."""

    def get_promising(
        step: Step, request: RequestState, planned: Mapping[RequestId, FrameRow]
    ) -> RequestState:
        row = planned.get(request.request_id)
        if row is None or not row.samples:
            return request
        return rules[async_.get_promising](step, request, planned)

    def get_preempted(request: RequestState) -> RequestState:
        after = rules[preemption.get_preempted](request)
        return replace(after, spec_token_ids=request.spec_token_ids)

    return rules.replacing(async_.get_promising, get_promising).replacing(
        preemption.get_preempted, get_preempted
    )


def chunks_take_drafts(rules: Rules, _config: Config) -> Rules:
    """A request keeps drafts that are proposed in the middle of its prefill."""

    def can_take_drafts(state: State, request: RequestState) -> bool:
        num_known = request.num_known_tokens
        if request.is_prefill_chunk:
            request = replace(request, is_prefill_chunk=False, num_computed_tokens=num_known - 1)
        return rules[speculation.can_take_drafts](state, request)

    return rules.replacing(speculation.can_take_drafts, can_take_drafts)


def padding_on_admission(rules: Rules, _config: Config) -> Rules:
    """A request admitted with one token to compute is padded with placeholder drafts, or waits."""

    def get_waiting_share(step: Step, request: RequestState, num_start: int) -> int | Verdict:
        config, num_known = step.state.config, request.num_known_tokens
        num_drafts = config.num_speculative_tokens
        has_company = Quirk.PADDING_ON_HIT_WITHOUT_OTHER_REQUESTS in rules.changes and num_start > 0
        rows = [row for row in step.rows if row.status is Status.RUNNING]
        running = [step.requests[row.request_id] for row in rows]
        if not _is_padded(num_drafts, num_known - num_start, has_company, running):
            return rules[admission.get_waiting_share](step, request, num_start)
        end, has_budget = num_known + num_drafts, 1 + num_drafts <= step.budget
        if Quirk.PADDING_WAITS_AT_MAX_MODEL_LEN in rules.changes:
            if not has_budget or end > config.max_model_len:
                return Verdict.NO_ROOM
        elif end >= config.max_model_len:
            return rules[admission.get_waiting_share](step, request, num_start)
        elif not has_budget:
            return Verdict.NO_ROOM
        threshold = step.state.rules[token_budget.get_threshold](step)
        return token_budget.compute_share(end, num_start, threshold, step.budget, end)

    return rules.replacing(admission.get_waiting_share, get_waiting_share)


def padding_waits_at_max_model_len(rules: Rules, _config: Config) -> Rules:
    """A request whose padding goes beyond the model length is not admitted."""
    return rules  # `padding_on_admission` checks this quirk


def padding_on_hit_without_other_requests(rules: Rules, _config: Config) -> Rules:
    """A request with a hit is padded even if no other request runs."""
    return rules  # `padding_on_admission` checks this quirk


STORIES = (
    QuirkStory(
        Quirk.STALE_DRAFT_PLACEHOLDERS,
        stale_draft_placeholders,
        "draft placeholders of a request that a plan leaves out stay, and are scheduled later",
        ("P24",),
        "#46899",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0 0.33.0",
        "asynchronous, a budget of 2, one draft; two requests have sampled: the plan of the first "
        "and its draft leaves the second out, and the next plan has a draft for it",
    ),
    QuirkStory(
        Quirk.DRAFTS_OUTLIVE_PREEMPTION,
        drafts_outlive_preemption,
        "a preempted request keeps its drafts",
        ("P12", "P24"),
        "not found upstream (fixed in 0.14.0)",
        "0.12.0",
        "two requests with a draft each and no free block for the second: it is preempted, and its"
        " draft is scheduled when it runs again",
    ),
    QuirkStory(
        Quirk.CHUNKS_TAKE_DRAFTS,
        chunks_take_drafts,
        "a request keeps drafts that are proposed in the middle of its prefill",
        ("P24",),
        "#30618 (fixed in 0.16.0)",
        "0.12.0",
        "a budget of 1, one draft; a prompt of 2 tokens: a draft that is proposed after the first "
        "is scheduled after the second",
    ),
    QuirkStory(
        Quirk.PADDING_ON_ADMISSION,
        padding_on_admission,
        "a request admitted with one token to compute is padded with placeholder drafts, or waits",
        ("P15", "P24"),
        "#45237 (merged)",
        "0.27.0 0.33.0",
        "two drafts; one request decodes when a prompt of 1 token is submitted: it is scheduled "
        "with 3 tokens, of which 2 are placeholders; with a budget of 2 left it is not admitted",
    ),
    QuirkStory(
        Quirk.PADDING_WAITS_AT_MAX_MODEL_LEN,
        padding_waits_at_max_model_len,
        "a request whose padding goes beyond the model length is not admitted",
        ("P15",),
        "#53962 (fixed in 0.29.0)",
        "0.27.0",
        "max_model_len 4, two drafts; one request decodes, and one with 2 of its 3 tokens cached "
        "is submitted: it is not admitted while the other one runs",
        upon=(Quirk.PADDING_ON_ADMISSION,),
    ),
    QuirkStory(
        Quirk.PADDING_ON_HIT_WITHOUT_OTHER_REQUESTS,
        padding_on_hit_without_other_requests,
        "a request with a hit is padded even if no other request runs",
        ("P10", "P15", "P24"),
        "#55126 (merged)",
        "0.33.0",
        "two drafts, a budget of 2, blocks of 1; a prompt of 2 tokens, the first one cached: it "
        "needs a budget of 3, and is never admitted",
        upon=(Quirk.PADDING_ON_ADMISSION,),
    ),
)
