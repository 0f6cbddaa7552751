"""Amounts: how much a request may ask for, worked out here and nowhere else in this wing.

0          first              known      due                 end
| computed | known, to be run | promised | drafts, to be run | lookahead | ... max_model_len

Promised are tokens that frames in flight may still bring; without asynchronous scheduling a request
gets no row while it is promised any.
"""

from __future__ import annotations

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.spec.vocabulary import Config, Request, RequestSnapshot


def blocks_for(config: Config, num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // config.block_size)


def longest_extent(config: Config, request: Request) -> int:
    """Slots that a request needs when it is at its longest, tokens.

    Its last output needs no slot, its drafts and the proposer's lookahead do.
    """
    tokens = len(request.prompt_token_ids) + request.max_tokens - 1
    drafts = config.num_speculative_tokens if request.max_tokens > 1 else 0
    scheduled = min(tokens + drafts, config.max_model_len - 1)
    return min(scheduled + config.num_lookahead_tokens, config.max_model_len)


def ends_in_flight(ledger: Ledger, request: RequestSnapshot) -> bool:
    """Whether a frame in flight may already bring the last output that a request can have.

    A further row would run past it for nothing. The rule is upstream's: it takes the computed
    tokens for what they will be once every draft in flight is rejected.
    """
    promised = ledger.placeholders(request.request_id)
    if not promised:
        return False
    life = ledger.lives[request.request_id]
    certain = request.num_computed_tokens + 2 - promised
    return certain >= life.num_prompt + life.request.max_tokens


def share_of(ledger: Ledger, request: RequestSnapshot) -> int:
    """Tokens that a running request would run if the budget had no end; below 1 is no row."""
    if ends_in_flight(ledger, request):
        return 0
    name, config, computed = request.request_id, ledger.config, request.num_computed_tokens
    due = ledger.lives[name].num_known + ledger.placeholders(name) + len(request.spec_token_ids)
    # The position max_model_len - 1 is never run: sampling it would end the request anyway.
    return min(admitted_share(config, due, computed), config.max_model_len - 1 - computed)


def running_blocks(config: Config, end: int, num_held: int) -> int:
    """Blocks that a running request lacks to run up to `end`, lookahead included."""
    slots = min(end + config.num_lookahead_tokens, config.max_model_len)
    return max(blocks_for(config, slots) - num_held, 0)


def admitted_share(config: Config, num_known: int, num_hit_tokens: int) -> int:
    """Tokens that an admitted request would run if the budget had no end."""
    share, threshold = num_known - num_hit_tokens, config.long_prefill_token_threshold
    return min(share, threshold) if threshold else share
