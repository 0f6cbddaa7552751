"""Seeded bugs in draft tokens: how they are published, rolled back and dispatched."""

from __future__ import annotations

from blockstep.conformance.museum.exhibit import Page
from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.prefix_cache import get_keyed
from blockstep.spec.core.requests import NO_HIT, Hit, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import allocate_slots
from blockstep.spec.core.speculation import get_rolled_back
from blockstep.spec.vocabulary import Config

PAGE = Page()


@PAGE.exhibit(
    "blocks with unverified draft tokens are published in the prefix cache",
    "vLLM V1: Draft tokens are never cached",
    "P3",
)
def cached_drafts(rules: Rules, _config: Config) -> Rules:
    """A rejected draft can be hit as if it were part of the request's tokens."""

    allocate_rightly = rules[allocate_slots]

    def allocate(
        config: Config,
        pool: Pool,
        request: RequestState,
        num_new: int,
        num_lookahead: int = 0,
        hit: Hit = NO_HIT,
        rules: Rules = rules,
    ) -> tuple[Pool, RequestState] | None:
        num_drafts = request.num_computed_tokens + num_new - request.num_known_tokens
        known = request.output_token_ids
        drafts = request.spec_token_ids[: max(num_drafts, 0)]
        guessed = replace(request, output_token_ids=known + drafts)
        guessed = get_keyed(config, guessed, rules)
        granted = allocate_rightly(config, pool, guessed, num_new, num_lookahead, hit, rules)
        if granted is None:
            return None
        pool, after = granted
        return pool, replace(after, output_token_ids=known, block_keys=request.block_keys)

    return rules.replacing(allocate_slots, allocate)


@PAGE.exhibit("rejected drafts count as computed", "vLLM V1: Rejection Clawback", "P14 P12 P4 P26")
def lost_rollback(rules: Rules, _config: Config) -> Rules:
    """The next step starts after tokens whose KV is not valid."""
    return rules.replacing(get_rolled_back, lambda request, _num_drafts, _num_sampled: request)
