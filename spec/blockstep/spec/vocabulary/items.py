"""Items: rules about a request's multimodal items, and about an encoder, that need only a
config."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

from blockstep.spec.vocabulary.config import Config, GroupKind, MambaCacheMode
from blockstep.spec.vocabulary.observations import RejectCode, Rejected
from blockstep.spec.vocabulary.request import MultiModalItem, Request

BrokenRule: TypeAlias = tuple[str, str, str]
"""The field that breaks a rule, the rule, and the fix."""


def find_encoder_rule(config: Config) -> BrokenRule | None:
    """Return the first rule that the encoder of a config breaks; None if there is none.

    Source: vLLM 0.19.1 `SchedulerConfig.__post_init__`, for encoder-decoder models.
    """
    if (config.encoder_compute_budget > 0) != (config.encoder_cache_size > 0):
        rule = "must be above 0 if and only if encoder_cache_size is"
        return "encoder_compute_budget", rule, "set both, or neither"
    for field in ("disable_chunked_mm_input", "is_encoder_decoder"):
        if getattr(config, field) and not config.encoder_cache_size:
            return field, "needs an encoder", "set encoder_cache_size, or leave it out"
    if config.is_encoder_decoder:
        for field, wanted in (
            ("disable_chunked_mm_input", True),
            ("enable_chunked_prefill", False),
            ("enable_prefix_caching", False),
            ("long_prefill_token_threshold", 0),
        ):
            if getattr(config, field) != wanted:
                return field, "cannot be used with is_encoder_decoder", f"use {wanted}"
        return None
    if config.disable_chunked_mm_input and any(
        group.mamba_cache_mode is MambaCacheMode.ALIGN for group in config.groups
    ):
        rule = "cannot be used with groups of mamba_cache_mode align: their chunks end at blocks"
        return "disable_chunked_mm_input", rule, "use another mode, or leave it out"
    if any(group.kind is GroupKind.CROSS_ATTENTION for group in config.groups):
        return (
            "groups",
            "only an encoder-decoder model has cross attention",
            "set is_encoder_decoder",
        )
    return None


def request_problem(config: Config, request: Request) -> Rejected | None:
    """Return why a request can never be served under a config, whatever its length; or None."""
    return item_problem(config, request)


def item_problem(config: Config, request: Request) -> Rejected | None:
    """Return why the items of a request can never be served under a config, or None.

    An item lies inside the prompt, or outside of it in an encoder-decoder model. An item larger
    than the encoder cache, or than the compute budget of a step, could never be encoded (P11). The
    same holds for two items that a draft head needs at once: for the last token of one it reads the
    first of the next.
    """
    beside = config.is_encoder_decoder
    for item in request.items:
        if beside and (item.offset > 0 or item.is_embed):
            return _refuse(request, item, "is not part of the prompt: use offset 0, and no mask")
        if not beside and item.offset + item.length > len(request.prompt_token_ids):
            return _refuse(request, item, "must lie inside the prompt: lengthen that")
    if not config.encoder_cache_size or not request.items:
        return None
    sizes: dict[str, int] = {}
    for item in request.items:
        if sizes.setdefault(item.identifier, item.num_embeds) != item.num_embeds:
            return refuse_other_size(request, item, sizes[item.identifier])
    most = min(config.encoder_compute_budget, config.encoder_cache_size)
    for item in request.items:
        if item.num_embeds > most:
            return _refuse(request, item, f"must have {most} embeddings at most", is_bad=False)
    if config.num_encoder_lookahead_tokens:
        for item, after in pairwise(request.items):
            if _are_needed_at_once(item, after) and item.num_embeds + after.num_embeds > most:
                rule = f"and the next one have more than {most} embeddings, and are adjacent"
                return _refuse(request, item, rule, is_bad=False)
    threshold, budget = config.long_prefill_token_threshold, config.max_num_batched_tokens
    most = min(budget, threshold) if threshold else budget
    if config.disable_chunked_mm_input and not beside:
        for item in request.items:
            if item.length > most:
                rule = f"must have at most {most} tokens: a chunk has no more, and must have all"
                return _refuse(request, item, rule, is_bad=False)
    return None


def refuse_other_size(request: Request, item: MultiModalItem, num_embeds: int) -> Rejected:
    """Reject an item with another number of embeddings than other items of its identifier have."""
    rule = f"has {item.num_embeds} embeddings, and {num_embeds} elsewhere: an identifier has one"
    return _refuse(request, item, f"{rule} content, so choose another")


def _are_needed_at_once(item: MultiModalItem, after: MultiModalItem) -> bool:
    """Whether two different items are adjacent."""
    return item.offset + item.length == after.offset and item.identifier != after.identifier


def _refuse(request: Request, item: MultiModalItem, rule: str, is_bad: bool = True) -> Rejected:
    code = RejectCode.BAD_REQUEST if is_bad else RejectCode.NEVER_FITS
    text = f"item {item.identifier!r} at {item.offset}"
    return Rejected(code, f"request {request.request_id!r}: {text} {rule}"[:300])
