"""Smaller variants of configs, requests and actions, the simplest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain

from blockstep.conformance.protocol.feature import settle_states
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.program import (
    NO_REPORT,
    Action,
    Answer,
    Program,
    Propose,
    Report,
)
from blockstep.conformance.search.shrink_candidates import (
    simpler_grammars,
    simpler_items,
    with_requests,
)
from blockstep.spec import vocabulary as v


def halved(program: Program) -> Program:
    """Return the program with half the tokens: in blocks, windows, chunks, prompts and budgets."""
    config = program.config

    def half(number: int) -> int:
        return (number + 1) // 2

    smaller = replace(
        with_block_size(config, half(config.block_size)),
        max_num_batched_tokens=half(config.max_num_batched_tokens),
        long_prefill_token_threshold=half(config.long_prefill_token_threshold),
    )
    groups = tuple(
        replace(
            group,
            sliding_window=half(group.sliding_window),
            attention_chunk_size=half(group.attention_chunk_size),
        )
        for group in smaller.groups
    )
    actions = with_requests(
        program.actions, lambda it: cut_prompt(it, half(len(it.prompt_token_ids)))
    )
    return replace(program, config=replace(smaller, groups=groups), actions=actions)


def cut_prompt(request: v.Request, length: int) -> v.Request:
    """Return the request with the first `length` tokens of its prompt, and the items within
    them."""
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids[:length],
        prompt_embeds=request.prompt_embeds[:length],
        items=tuple(item for item in request.items if item.offset + item.length <= length),
    )


def simpler_actions(action: Action) -> Iterator[Action]:
    """Yield smaller variants of an action, the simplest first."""
    match action:
        case v.Submit(request=request):
            yield from map(v.Submit, simpler_requests(request))
        case v.StreamingUpdate(request=request):
            yield from map(v.StreamingUpdate, simpler_requests(request))
        case v.EncoderOffer(identifiers=names):
            yield from (v.EncoderOffer(tuple(n for n in names if n != name)) for name in names)
        case v.KVOffer(request_id=name) if action != v.KVOffer(name):
            for field in ("num_tokens", "is_async", "delays_free"):
                if getattr(action, field) != getattr(v.KVOffer(name), field):
                    yield replace(action, **{field: getattr(v.KVOffer(name), field)})
            if action.num_tokens is not None and action.num_tokens > 1:
                yield replace(action, num_tokens=action.num_tokens - 1)
        case Answer(report=report) if report != NO_REPORT:
            yield Answer()
            yield from map(Answer, _simpler_reports(report))
        case Report():
            yield from _simpler_reports(action)
        case v.Reset(reset_connector=True):
            yield replace(action, reset_connector=False)
        case v.Abort(request_ids=request_ids) if len(request_ids) > 1:
            yield from (v.Abort((name,)) for name in request_ids)
        case Propose(counts=counts, for_chunks=for_chunks):
            if for_chunks:
                yield Propose(counts)
            if len(counts) > 1:
                yield from (replace(action, counts=(count,)) for count in counts)
            elif counts and counts[0] > (1, 0):
                number, right = counts[0]
                yield replace(action, counts=((1, min(right, 1)),))
                fewer = (number, 0) if right else (number - 1, right)
                yield replace(action, counts=(fewer,))
        case _:
            return


def _simpler_reports(report: Report) -> Iterator[Report]:
    """Yield the report without one of its entries."""
    for name in ("recving", "sending", "invalid"):
        items = getattr(report, name)
        for index in range(len(items)):
            yield replace(report, **{name: (*items[:index], *items[index + 1 :])})


def simpler_requests(request: v.Request) -> Iterator[v.Request]:
    """Yield the request with a field at its default, fewer tokens, or simpler ones."""
    plain = v.Request(request.request_id, request.prompt_token_ids)
    for field in fields(v.Request):
        value = getattr(request, field.name)
        default = getattr(plain, field.name)
        if field.name != "max_tokens" and value != default:
            yield replace(request, **{field.name: default})
    if request.grammar is not None:
        yield from (replace(request, grammar=it) for it in simpler_grammars(request.grammar))
    yield from (replace(request, items=items) for items in simpler_items(request.items))
    prompt = request.prompt_token_ids
    for length in sorted({1, len(prompt) // 2, len(prompt) - 1}):
        if 0 < length < len(prompt):
            yield cut_prompt(request, length)
    for count in sorted({1, request.max_tokens // 2, request.max_tokens - 1}):
        if 0 < count < request.max_tokens:
            yield replace(request, max_tokens=count)
    if any(prompt):
        yield replace(request, prompt_token_ids=(0,) * len(prompt))
        counted = tuple(range(len(prompt)))
        if prompt > counted:
            yield replace(request, prompt_token_ids=counted)


def simpler_configs(config: v.Config) -> Iterator[v.Config]:
    """Yield the config with one feature switched off, or one limit relaxed."""
    plain = {
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True,
        "scheduler_reserve_full_isl": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
    }
    for feature in FEATURES:
        if feature.is_asked_by(config):
            yield feature.take_from(config)
    yield from simpler_groups(config)
    yield from _simpler_encoders(config)
    yield from _smaller_limits(config)
    if config.enable_in_reasoning:
        yield replace(config, enable_in_reasoning=False)
    for name, value in plain.items():
        if getattr(config, name) != value:
            yield replace(config, **{name: value})  # type: ignore[arg-type]
    for depth in range(1, config.max_frames_in_flight):
        is_async = config.async_scheduling and depth > 1
        yield replace(config, max_frames_in_flight=depth, async_scheduling=is_async)
    if config.spec_method is not v.SpecMethod.NONE:
        yield replace(config, num_speculative_tokens=1)
    for block_size in (1, 2):
        if block_size < config.block_size:
            yield with_block_size(config, block_size)
    for num_blocks in range(2, min(config.num_blocks, 12)):
        yield replace(config, num_blocks=num_blocks)


def _simpler_encoders(config: v.Config) -> Iterator[v.Config]:
    """Yield the config without encoder-decoder inputs, or with items that may be cut."""
    if config.is_encoder_decoder:
        yield settle_states(replace(config, is_encoder_decoder=False))
    if config.disable_chunked_mm_input:
        yield replace(config, disable_chunked_mm_input=False)


def _smaller_limits(config: v.Config) -> Iterator[v.Config]:
    """Yield the config with a smaller limit of a feature."""
    for name in chain.from_iterable(feature.limits for feature in FEATURES):
        number = getattr(config, name)
        for smaller in sorted({1, number // 2, number - 1}):
            if 0 < smaller < number:
                yield replace(config, **{name: smaller})


def with_block_size(config: v.Config, block_size: int) -> v.Config:
    """Return the config with another block size, those of all groups in proportion."""
    groups = tuple(
        replace(group, block_size=group.block_size // config.block_size * block_size)
        for group in config.groups
    )
    return replace(config, block_size=block_size, groups=groups)


def simpler_groups(config: v.Config) -> Iterator[v.Config]:
    """Yield the config with a KV group less, or with one of a simpler kind, size or reach."""
    groups = config.groups
    for index in range(len(groups)) if len(groups) > 1 else ():
        left = (*groups[:index], *groups[index + 1 :])
        size = min(group.block_size for group in left)
        if all(group.block_size % size == 0 for group in left):
            yield replace(config, groups=left, block_size=size)
    for index, group in enumerate(groups):
        for simpler in _simpler_group(group, config.block_size):
            others = (*groups[:index], simpler, *groups[index + 1 :])
            if config.block_size in [other.block_size for other in others]:
                yield replace(config, groups=others)


def _simpler_group(group: v.KVGroup, least_size: int) -> Iterator[v.KVGroup]:
    """Yield the group with full attention, smaller blocks, or a shorter window."""
    if group.kind is not v.GroupKind.FULL:
        yield v.KVGroup(v.GroupKind.FULL, group.block_size)
    if group.kind is v.GroupKind.CHUNKED_LOCAL:
        span = group.attention_chunk_size
        yield v.KVGroup(v.GroupKind.SLIDING_WINDOW, group.block_size, sliding_window=span)
    if group.num_speculative_blocks:
        yield replace(group, num_speculative_blocks=group.num_speculative_blocks - 1)
    if group.block_size > least_size:
        yield replace(group, block_size=least_size)
    for name in ("sliding_window", "attention_chunk_size"):
        span = getattr(group, name)
        for shorter in sorted({1, 2, span // 2, span - 1}):
            if 0 < shorter < span:
                yield replace(group, **{name: shorter})
