"""Drafts: quirks of releases with placeholder drafts, and with drafts of preempted requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.requests import RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import Config


def _is_padded(
    num_drafts: int, num_missing: int, has_company: bool, running: Iterable[RequestState]
) -> bool:
    """Return whether a request with one token to compute is padded to the shape of a decode row.

    Source: vLLM 0.27.0, 0.33.0 `schedule`, when run; upstream #45237, #53962, #55126.
    """
    if num_drafts == 0 or num_missing != 1:
        return False
    others = list(running)
    return bool(others or has_company) and not any(other.is_prefill_chunk for other in others)


def placeholders_outlive_a_gap(rules: Rules, _config: Config) -> Rules:
    """Draft placeholders of a request that a plan leaves out stay, and are scheduled later."""

    def keeps_drafts(is_planned: bool, samples: bool) -> bool:
        return not is_planned or rules.keeps_drafts(is_planned, samples)

    return replace(rules, keeps_drafts=keeps_drafts)


def drafts_outlive_preemption(rules: Rules, _config: Config) -> Rules:
    """A preempted request keeps its drafts."""

    def keeps_drafts(is_planned: bool, samples: bool) -> bool:
        return not samples or rules.keeps_drafts(is_planned, samples)

    def get_preempted(request: RequestState) -> RequestState:
        after = rules.get_preempted(request)
        return replace(after, spec_token_ids=request.spec_token_ids)

    return replace(rules, keeps_drafts=keeps_drafts, get_preempted=get_preempted)


def admitted_with_padding(rules: Rules, _config: Config) -> Rules:
    """A request admitted with one token to compute is padded with placeholder drafts, or waits."""

    def get_num_padding(
        config: Config,
        num_known: int,
        num_hit: int,
        budget: int,
        running: Iterable[RequestState],
    ) -> int | None:
        num_drafts = config.num_speculative_tokens
        has_company = Quirk.HIT_IS_COMPANY_ENOUGH in rules.quirks and num_hit > 0
        if not _is_padded(num_drafts, num_known - num_hit, has_company, running):
            return rules.get_num_padding(config, num_known, num_hit, budget, ())
        end, has_budget = num_known + num_drafts, 1 + num_drafts <= budget
        if Quirk.PADDING_WAITS_AT_THE_END in rules.quirks:
            return num_drafts if has_budget and end <= config.max_model_len else None
        if end >= config.max_model_len:
            return 0
        return num_drafts if has_budget else None

    return replace(rules, get_num_padding=get_num_padding)


def padding_waits_at_the_end(rules: Rules, _config: Config) -> Rules:
    """A request whose padding goes beyond the model length is not admitted."""
    return rules  # `admitted_with_padding` checks this quirk


def hit_is_company_enough(rules: Rules, _config: Config) -> Rules:
    """A request with a hit is padded even if no other request runs."""
    return rules  # `admitted_with_padding` checks this quirk


STORIES = (
    QuirkStory(
        Quirk.PLACEHOLDERS_OUTLIVE_A_GAP,
        placeholders_outlive_a_gap,
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
        Quirk.ADMITTED_WITH_PADDING,
        admitted_with_padding,
        "a request admitted with one token to compute is padded with placeholder drafts, or waits",
        ("P15", "P24"),
        "#45237 (merged)",
        "0.27.0 0.33.0",
        "two drafts; one request decodes when a prompt of 1 token is submitted: it is scheduled "
        "with 3 tokens, of which 2 are placeholders; with a budget of 2 left it is not admitted",
    ),
    QuirkStory(
        Quirk.PADDING_WAITS_AT_THE_END,
        padding_waits_at_the_end,
        "a request whose padding goes beyond the model length is not admitted",
        ("P15",),
        "#53962 (fixed in 0.29.0)",
        "0.27.0",
        "max_model_len 4, two drafts; one request decodes, and one with 2 of its 3 tokens cached "
        "is submitted: it is not admitted while the other one runs",
        upon=(Quirk.ADMITTED_WITH_PADDING,),
    ),
    QuirkStory(
        Quirk.HIT_IS_COMPANY_ENOUGH,
        hit_is_company_enough,
        "a request with a hit is padded even if no other request runs",
        ("P10", "P15", "P24"),
        "#55126 (merged)",
        "0.33.0",
        "two drafts, a budget of 2, blocks of 1; a prompt of 2 tokens, the first one cached: it "
        "needs a budget of 3, and is never admitted",
        upon=(Quirk.ADMITTED_WITH_PADDING,),
    ),
)
