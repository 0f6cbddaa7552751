"""Seeded bugs in draft tokens: how they are published, rolled back and dispatched."""

from __future__ import annotations

from blockstep.conformance.museum.exhibit import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.prefix_cache import get_keyed
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import allocate_slots
from blockstep.spec.core.speculation import get_rolled_back
from blockstep.spec.vocabulary import Config

PAGE = Page()
Granted = tuple[Pool, RequestState] | None


@PAGE.exhibit(
    "blocks with unverified draft tokens are published in the prefix cache",
    "vLLM V1: Draft tokens are never cached",
    "P3",
)
@instead(allocate_slots)
def cached_drafts(
    right: Right[Granted], config: Config, request: RequestState, num_new: int, rules: Rules
) -> Granted:
    """A rejected draft can be hit as if it were part of the request's tokens."""
    num_drafts = request.num_computed_tokens + num_new - request.num_known_tokens
    known = request.output_token_ids
    drafts = request.spec_token_ids[: max(num_drafts, 0)]
    guessed = replace(request, output_token_ids=known + drafts)
    granted = right(request=get_keyed(config, guessed, rules))
    if granted is None:
        return None
    pool, after = granted
    return pool, replace(after, output_token_ids=known, block_keys=request.block_keys)


@PAGE.exhibit("rejected drafts count as computed", "vLLM V1: Rejection Clawback", "P14 P12 P4 P26")
def lost_rollback(rules: Rules, _config: Config) -> Rules:
    """The next step starts after tokens whose KV is not valid."""
    return rules.replacing(get_rolled_back, lambda request, _num_drafts, _num_sampled: request)
