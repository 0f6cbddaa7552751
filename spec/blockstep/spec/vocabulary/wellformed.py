"""Well-formedness: what can be said against a value without knowing any state.

Both sides of a comparison share these checks, because they are about the vocabulary itself:
types and ranges. What depends on a state is each side's own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from blockstep.spec.vocabulary.config import (
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    Policy,
    SpecMethod,
)
from blockstep.spec.vocabulary.events import (
    Abort,
    Commit,
    Drafts,
    EncoderOffer,
    EncoderReset,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    PauseState,
    Reset,
    RowTokens,
    Schedule,
    SetPause,
    StreamingUpdate,
    Submit,
)
from blockstep.spec.vocabulary.items import find_encoder_rule
from blockstep.spec.vocabulary.observations import RejectCode, Rejected
from blockstep.spec.vocabulary.request import (
    Grammar,
    MultiModalItem,
    RepetitionDetection,
    Request,
)

MAX_INT = 2**31 - 1
"""Token ids, counts and ticks fit in 31 bits, so that an engine may keep them in int32 arrays."""


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One reason why a config cannot be used."""

    field: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"config: {self.field} = {_shown(self.value)}: {self.rule}; {self.fix}"


class ConfigError(ValueError):
    """A config breaks the rules of `config_problems`."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


def is_count(value: object, at_least: int = 0) -> bool:
    """Whether `value` is an int (no bool) between `at_least` and `MAX_INT`."""
    return type(value) is int and at_least <= value <= MAX_INT


def config_problems(config: object) -> tuple[ConfigProblem, ...]:
    """Every reason against `config`; empty for a good one.

    Sources: upstream's own start-up checks (`SchedulerConfig`), and seed 001 for the null block.
    """
    if not isinstance(config, Config):
        return (ConfigProblem("config", config, "must be a Config", "build one"),)
    found = _type_problems(config)
    if found:
        return tuple(found)

    def expect(ok: bool, field: str, rule: str, fix: str) -> None:
        if not ok:
            found.append(ConfigProblem(field, getattr(config, field), rule, fix))

    found += _group_problems(config)
    field, rule, fix = find_encoder_rule(config)
    if field:
        expect(False, field, rule, fix)
    expect(
        (config.spec_method is SpecMethod.NONE) == (config.num_speculative_tokens == 0),
        "num_speculative_tokens",
        "must be 0 exactly when spec_method is none",
        "set both, or neither",
    )
    expect(
        config.enable_chunked_prefill or config.max_num_batched_tokens >= config.max_model_len,
        "max_num_batched_tokens",
        "without chunked prefill a whole prompt must fit one step's budget",
        "raise it to max_model_len, or enable chunked prefill",
    )
    expect(
        not config.async_scheduling or config.max_frames_in_flight > 1,
        "async_scheduling",
        "needs room for a plan ahead of the one that runs",
        "set max_frames_in_flight to 2 or more, or leave async_scheduling out",
    )
    expect(
        not config.enable_in_reasoning or config.reasoning_end_token_id is not None,
        "enable_in_reasoning",
        "says something only of a model that reasons",
        "set reasoning_end_token_id, or leave it out",
    )
    return tuple(found)


def _type_problems(config: Config) -> list[ConfigProblem]:
    """Every reason against the types and the least values of fields."""
    found: list[ConfigProblem] = []

    def expect(ok: bool, field: str, rule: str, fix: str) -> None:
        if not ok:
            found.append(ConfigProblem(field, getattr(config, field), rule, fix))

    for name, least in (
        ("num_blocks", 2),
        ("block_size", 1),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("max_model_len", 2),
        ("long_prefill_token_threshold", 0),
        ("num_speculative_tokens", 0),
        ("max_frames_in_flight", 1),
        ("max_loras", 0),
        ("encoder_compute_budget", 0),
        ("encoder_cache_size", 0),
    ):
        ok = is_count(getattr(config, name), least)
        expect(ok, name, f"must be an int from {least} to {MAX_INT}", f"use at least {least}")
    for name in (
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "scheduler_reserve_full_isl",
        "async_scheduling",
        "enable_in_reasoning",
        "disable_chunked_mm_input",
        "is_encoder_decoder",
    ):
        expect(type(getattr(config, name)) is bool, name, "must be a bool", "use True or False")
    expect(isinstance(config.policy, Policy), "policy", "must be a Policy", "use Policy.FCFS")
    expect(
        isinstance(config.spec_method, SpecMethod),
        "spec_method",
        "must be a SpecMethod",
        "use SpecMethod.NONE",
    )
    marker = config.reasoning_end_token_id
    is_token = marker is None or is_count(marker)
    expect(is_token, "reasoning_end_token_id", "must be None or a token id", "leave it out")
    rule = "must be a tuple of KVGroup"
    is_known = isinstance(config.groups, tuple) and all(
        isinstance(group, KVGroup) for group in config.groups
    )
    expect(is_known, "groups", rule, "build some, or leave it out for one group")
    return found


def _group_problems(config: Config) -> list[ConfigProblem]:
    """Every reason against the KV groups, each of them a `KVGroup`."""
    found: list[ConfigProblem] = []
    for index, group in enumerate(config.groups):
        rule, fix = _group_rule(group)
        if rule:
            found.append(ConfigProblem(f"groups[{index}]", group, rule, fix))
    sizes = [group.block_size for group in config.groups]
    if found or not sizes:
        return found
    for index, group in enumerate(config.groups):
        rule, fix = _recurrent_rule(config, group)
        if rule:
            found.append(ConfigProblem(f"groups[{index}]", group, rule, fix))
    if any(size % config.block_size for size in sizes) or config.block_size not in sizes:
        rule = f"must be the smallest block size of a group and divide every one: {sizes}"
        fix = "name blocks by the smallest"
        found.append(ConfigProblem("block_size", config.block_size, rule, fix))
    return found


def _group_rule(group: KVGroup) -> tuple[str, str]:
    """The rule that a KV group breaks, and the fix; twice "" for a good one."""
    if not isinstance(group.kind, GroupKind):
        return "its kind must be a GroupKind", "use GroupKind.FULL"
    if not is_count(group.block_size, 1):
        return f"its block_size must be an int from 1 to {MAX_INT}", "use at least 1"
    for name, kind in (
        ("sliding_window", GroupKind.SLIDING_WINDOW),
        ("attention_chunk_size", GroupKind.CHUNKED_LOCAL),
    ):
        size = getattr(group, name)
        if group.kind is kind and not is_count(size, 1):
            return f"its {name} must be an int from 1 to {MAX_INT}", "use at least 1"
        if group.kind is not kind and not (type(size) is int and size == 0):
            return f"only a group of kind {kind} has a {name}", f"leave {name} out"
    if not isinstance(group.mamba_cache_mode, MambaCacheMode):
        return "its mamba_cache_mode must be a MambaCacheMode", "use MambaCacheMode.NONE"
    if not is_count(group.num_speculative_blocks):
        return f"its num_speculative_blocks must be an int from 0 to {MAX_INT}", "use at least 0"
    is_plain = group.mamba_cache_mode is MambaCacheMode.NONE and not group.num_speculative_blocks
    if group.kind is not GroupKind.RECURRENT and not is_plain:
        rule = "only a group of kind recurrent has a mamba_cache_mode and num_speculative_blocks"
        return rule, "leave both out"
    return "", ""


def _recurrent_rule(config: Config, group: KVGroup) -> tuple[str, str]:
    """The rule of recurrent groups that a config breaks by one, and the fix; twice "" for none.

    Sources: vLLM 0.19.1 `MambaModelConfig` (modes), `MambaBase.get_kv_cache_spec` (drafts).
    """
    if group.kind is not GroupKind.RECURRENT:
        return "", ""
    mode = group.mamba_cache_mode
    recurrent = [other for other in config.groups if other.kind is GroupKind.RECURRENT]
    if any(other.mamba_cache_mode is not mode for other in recurrent):
        return "all recurrent groups have one mamba_cache_mode", "give them the same"
    if config.enable_prefix_caching == (mode is MambaCacheMode.NONE):
        rule = "its mamba_cache_mode must be none exactly when prefix caching is off"
        return rule, "use all or align with caching, none without"
    if mode is MambaCacheMode.NONE and group.block_size < config.max_model_len:
        rule = "its one state lies in its first block, so block_size is no less than max_model_len"
        return rule, "raise its block_size"
    if mode is MambaCacheMode.ALIGN and not config.enable_chunked_prefill:
        return "chunks can end where blocks do with chunked prefill only", "enable it"
    if mode is MambaCacheMode.ALIGN and group.num_speculative_blocks >= group.block_size:
        rule = "with align a step among drafts ends one block at most, so it has fewer of them"
        return rule, "use a block_size above num_speculative_blocks"
    if group.num_speculative_blocks < config.num_speculative_tokens:
        rule = "its num_speculative_blocks must be a state for each of num_speculative_tokens"
        return rule, f"use {config.num_speculative_tokens}"
    return "", ""


def event_problem(event: object) -> Rejected | None:
    """Why `event` cannot be an event for any state, or None."""
    match event:
        case Submit(request=request):
            return _request_problem(request, "Submit")
        case StreamingUpdate(request=request):
            return _request_problem(request, "StreamingUpdate")
        case Schedule():
            return None
        case Commit(frame_id=frame_id, sampled=sampled):
            if not is_count(frame_id):
                return _malformed("Commit.frame_id", frame_id, "an int >= 0")
            return _rows_problem("Commit.sampled", sampled)
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
        case EncoderReset():
            return None
        case EncoderOffer(identifiers=identifiers):
            if not isinstance(identifiers, tuple) or not all(map(_is_name, identifiers)):
                rule = "a tuple of non-empty strings"
                return _malformed("EncoderOffer.identifiers", identifiers, rule)
            return None
        case SetPause(pause_state=pause_state):
            if not isinstance(pause_state, PauseState):
                return _malformed("SetPause.pause_state", pause_state, "a PauseState")
            return None
        case Reset(reset_running_requests=flag):
            if type(flag) is not bool:
                return _malformed("Reset.reset_running_requests", flag, "a bool")
            return None
        case _:
            return _malformed("event", event, "one of blockstep.spec's events")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _malformed(what: str, value: object, rule: str) -> Rejected:
    return Rejected(RejectCode.MALFORMED_EVENT, f"{what} = {_shown(value)}: must be {rule}")


def _shown(value: object) -> str:
    """A value on part of a line, whatever it is: Python refuses to print ints of 4301 digits."""
    try:
        text = repr(value)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def _bad(request: Request, what: str, rule: str) -> Rejected:
    return Rejected(RejectCode.BAD_REQUEST, f"request {request.request_id!r}: {what} {rule}")


def _are_tokens(value: object) -> bool:
    if not isinstance(value, tuple):
        return False
    # The loop is written out because a prompt may have a hundred thousand tokens.
    return all(type(token) is int and 0 <= token <= MAX_INT for token in value)


def _rows_problem(what: str, rows: object) -> Rejected | None:
    if not isinstance(rows, tuple) or not all(isinstance(row, RowTokens) for row in rows):
        return _malformed(what, rows, "a tuple of RowTokens")
    for row in rows:
        if not _is_name(row.request_id):
            return _malformed(f"{what} request_id", row.request_id, "a non-empty string")
        if not _are_tokens(row.token_ids):
            return _malformed(f"{what} token_ids", row.token_ids, f"a tuple of 0..{MAX_INT}")
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
    for name in ("adapter", "cache_salt"):
        value = getattr(request, name)
        if value is not None and not _is_name(value):
            return _malformed(name, value, "None or a non-empty string")
    for name in ("skip_reading_prefix_cache", "resumable", "structured_output"):
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
    """Why its grammar is none, or None. A state is a tuple of (token, next state)."""
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
            return _bad(
                request, f"grammar state {_shown(state)}", "must be sorted, each token once"
            )
        if not all(following < len(states) for _, following in state):
            return _bad(request, f"grammar state {_shown(state)}", f"has {len(states)} to go to")
    return None


def _is_edge(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_count, value))


def _range_problem(request: Request) -> Rejected | None:
    if not request.prompt_token_ids:
        return _bad(request, "prompt_token_ids", "is empty: a prompt has at least one token")
    if request.prompt_embeds and len(request.prompt_embeds) != len(request.prompt_token_ids):
        return _bad(
            request,
            f"prompt_embeds has {len(request.prompt_embeds)} entries",
            f"must have one for each of {len(request.prompt_token_ids)} prompt tokens, or none",
        )
    if not 1 <= request.max_tokens <= MAX_INT:
        return _bad(request, f"max_tokens = {_shown(request.max_tokens)}", f"must be 1..{MAX_INT}")
    if not 0 <= request.min_tokens <= request.max_tokens:
        return _bad(request, f"min_tokens = {_shown(request.min_tokens)}", "must be 0..max_tokens")
    if not 0 <= request.arrival_time <= MAX_INT:
        return _bad(
            request, f"arrival_time = {_shown(request.arrival_time)}", f"must be 0..{MAX_INT}"
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
                _shown(detection),
                "must have 1 <= min_pattern_size <= max_pattern_size and min_count >= 2",
            )
    return None
