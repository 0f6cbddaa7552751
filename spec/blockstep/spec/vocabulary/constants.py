"""Constants: the rules of a valid config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from blockstep.spec.vocabulary.config import (
    Config,
    GroupKind,
    KVGroup,
    KVLoadFailurePolicy,
    MambaCacheMode,
    Policy,
    PoolOrder,
    SpecMethod,
)
from blockstep.spec.vocabulary.items import BrokenRule, find_encoder_rule

MAX_INT = 2**31 - 1
"""Token ids, counts and ticks fit in 31 bits, so that an engine may keep them in int32 arrays."""

_LEAST_COUNTS: Final = (
    ("num_blocks", 2),
    ("block_size", 1),
    ("max_num_seqs", 1),
    ("max_num_batched_tokens", 1),
    ("max_model_len", 2),
    ("long_prefill_token_threshold", 0),
    ("prefill_schedule_interval", 1),
    ("num_speculative_tokens", 0),
    ("max_frames_in_flight", 1),
    ("max_loras", 0),
    ("encoder_compute_budget", 0),
    ("encoder_cache_size", 0),
    ("watermark_blocks", 0),
    ("swap_min_tokens", 0),
    ("admission_low_blocks", 0),
    ("admission_high_blocks", 0),
)
"""The int fields of a config, and their minimum."""
_FLAGS: Final = (
    *("enable_prefix_caching", "enable_chunked_prefill", "scheduler_reserve_full_isl"),
    *("async_scheduling", "enable_in_reasoning"),
    *("disable_chunked_mm_input", "is_encoder_decoder", "enable_kv_cache_events"),
    *("kv_connector", "enable_forks"),
)


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One reason why a config cannot be used."""

    field: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"config: {self.field} = {shown(self.value)}: {self.rule}; {self.fix}"


class ConfigError(ValueError):
    """A config breaks rules of `config_problems`."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


def is_count(value: object, at_least: int = 0) -> bool:
    """Whether `value` is an int (not a bool) between `at_least` and `MAX_INT`."""
    return type(value) is int and at_least <= value <= MAX_INT


def config_problems(config: object) -> tuple[ConfigProblem, ...]:
    """Return every problem of `config`; empty for a valid one.

    Sources: upstream's own start-up checks (`SchedulerConfig`), and seed 001 for the null block.
    """
    if not isinstance(config, Config):
        return (ConfigProblem("config", config, "must be a Config", "build one"),)
    broken = [*_find_broken_types(config)]
    found = [] if broken else _group_problems(config)
    for field, rule, fix in broken or _find_broken_rules(config):
        found.append(ConfigProblem(field, getattr(config, field), rule, fix))
    return tuple(found)


def _find_broken_rules(config: Config) -> Iterator[BrokenRule]:
    """Yield every rule that a config breaks whose fields have their types."""
    encoder_rule = find_encoder_rule(config)
    if encoder_rule:
        yield encoder_rule
    if (config.spec_method is SpecMethod.NONE) != (config.num_speculative_tokens == 0):
        rule = "must be 0 if and only if spec_method is none"
        yield "num_speculative_tokens", rule, "set both, or neither"
    is_whole = not config.enable_chunked_prefill
    if is_whole and config.max_num_batched_tokens < config.max_model_len:
        rule = "without chunked prefill a whole prompt must fit one step's budget"
        fix = "raise it to max_model_len, or enable chunked prefill"
        yield "max_num_batched_tokens", rule, fix
    if config.async_scheduling and config.max_frames_in_flight < 2:
        fix = "set max_frames_in_flight to 2 or more, or leave async_scheduling out"
        yield "async_scheduling", "needs room for a plan ahead of the running one", fix
    if config.kv_connector:
        yield from _find_broken_transfers(config)
    if config.policy is Policy.CONTINUUM:
        yield from _find_broken_pins(config)
    if config.enable_forks:
        yield from _find_broken_forks(config)
    yield from _find_broken_tiers(config)
    if config.enable_in_reasoning and config.reasoning_end_token_id is None:
        fix = "set reasoning_end_token_id, or leave it out"
        yield "enable_in_reasoning", "applies only to a model that reasons", fix


def _find_broken_transfers(config: Config) -> Iterator[BrokenRule]:
    """Yield every rule that a config with a connector breaks.

    Source: vLLM 0.19.1 `Scheduler.__init__` (encoder-decoder models).
    """
    if config.is_encoder_decoder:
        fix = "leave kv_connector out"
        yield "kv_connector", "cannot be used with is_encoder_decoder", fix


def _find_broken_pins(config: Config) -> Iterator[BrokenRule]:
    """Yield every rule that a config with pins breaks. Source: seed 001 "Feature A"."""
    if not config.enable_prefix_caching:
        rule = "continuum needs prefix caching: pinned blocks are found by their keys"
        yield "policy", rule, "enable it, or use Policy.FCFS"


def _find_broken_forks(config: Config) -> Iterator[BrokenRule]:
    """Yield every rule that a config with forks breaks. Source: seed 002 "Fork".

    A branch shares full blocks, and copies the one in which its first tokens are written. Two
    things do not fit that. A state is written in place at each step, so a branch needs a copy of it
    from the start, which no row has. And with a store a copied block may be given to a load before
    the copy is made. vLLM has no branches: its beams are requests that hit the prefix cache, and
    these can be used with both. Encoder-decoder input is attended from a table without keys.
    """
    fix = "leave enable_forks out"
    if config.kv_connector:
        rule = "cannot be used with kv_connector: a load may get a block that is still copied from"
        yield "enable_forks", rule, "submit each branch as a request, or leave enable_forks out"
    if config.is_encoder_decoder:
        rule = "cannot be used with is_encoder_decoder: its input has no key to share it by"
        yield "enable_forks", rule, fix
    if config.policy is Policy.CONTINUUM:
        yield "enable_forks", "cannot be used with continuum: a branch is not a turn of a job", fix
    if any(group.kind is GroupKind.RECURRENT for group in config.groups):
        rule = "cannot be used with recurrent groups: a state is written in place at each step"
        yield "enable_forks", rule, "submit each branch as a request, or leave enable_forks out"


def _find_broken_tiers(config: Config) -> Iterator[BrokenRule]:
    """Yield every rule about swap-out and admission thresholds.

    Source: seed 002 "Preemption Strategies".
    """
    if config.swap_min_tokens and not config.kv_connector:
        fix = "set kv_connector, or leave it out"
        yield "swap_min_tokens", "needs a store that keeps saved KV", fix
    if config.swap_min_tokens and config.has_states:
        rule = "cannot be used with recurrent groups: few victims have a state at a block's end"
        yield "swap_min_tokens", rule, "leave it out"
    if config.admission_low_blocks > config.admission_high_blocks:
        rule = "must be no more than admission_high_blocks: it closes below one, opens at the other"
        yield "admission_low_blocks", rule, "lower it, or raise admission_high_blocks"
    if config.admission_high_blocks > config.num_usable_blocks:
        rule = f"must be at most the {config.num_usable_blocks} blocks that can be free"
        yield "admission_high_blocks", rule, "lower it"


def _find_broken_types(config: Config) -> Iterator[BrokenRule]:
    """Yield every rule about types and minima of fields."""
    for name, least in _LEAST_COUNTS:
        value = getattr(config, name)
        if not is_count(value, least):
            yield name, f"must be an int from {least} to {MAX_INT}", _fix_of_count(value, least)
    for name in _FLAGS:
        if type(getattr(config, name)) is not bool:
            yield name, "must be a bool", "use True or False"
    if not isinstance(config.policy, Policy):
        yield "policy", "must be a Policy", "use Policy.FCFS"
    if not isinstance(config.pool_order, PoolOrder):
        yield "pool_order", "must be a PoolOrder", "use PoolOrder.LRU"
    if not isinstance(config.spec_method, SpecMethod):
        yield "spec_method", "must be a SpecMethod", "use SpecMethod.NONE"
    if not isinstance(config.kv_load_failure_policy, KVLoadFailurePolicy):
        fix = "use KVLoadFailurePolicy.FAIL"
        yield "kv_load_failure_policy", "must be a KVLoadFailurePolicy", fix
    marker, groups = config.reasoning_end_token_id, config.groups
    if marker is not None and not is_count(marker):
        yield "reasoning_end_token_id", "must be None or a token id", "leave it out"
    if not isinstance(groups, tuple) or not all(isinstance(one, KVGroup) for one in groups):
        fix = "build some, or leave it out for one group"
        yield "groups", "must be a tuple of KVGroup", fix


def _group_problems(config: Config) -> list[ConfigProblem]:
    """Return every problem of the KV groups, each of them a `KVGroup`."""
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
        fix = "set it to the smallest"
        found.append(ConfigProblem("block_size", config.block_size, rule, fix))
    return found


def _fix_of_count(value: object, least: int) -> str:
    """Return the fix for a value that is no int from `least` to `MAX_INT`."""
    is_large = isinstance(value, int) and value > MAX_INT
    return f"use at most {MAX_INT}" if is_large else f"use at least {least}"


def _group_rule(group: KVGroup) -> tuple[str, str]:
    """Return the rule that a KV group breaks, and the fix; twice "" for a valid one."""
    if not isinstance(group.kind, GroupKind):
        return "its kind must be a GroupKind", "use GroupKind.FULL"
    if not is_count(group.block_size, 1):
        fix = _fix_of_count(group.block_size, 1)
        return f"its block_size must be an int from 1 to {MAX_INT}", fix
    for name, kind in (
        ("sliding_window", GroupKind.SLIDING_WINDOW),
        ("attention_chunk_size", GroupKind.CHUNKED_LOCAL),
    ):
        size = getattr(group, name)
        if group.kind is kind and not is_count(size, 1):
            return f"its {name} must be an int from 1 to {MAX_INT}", _fix_of_count(size, 1)
        if group.kind is not kind and not (type(size) is int and size == 0):
            return f"only a group of kind {kind} has a {name}", f"leave {name} out"
    if not isinstance(group.mamba_cache_mode, MambaCacheMode):
        return "its mamba_cache_mode must be a MambaCacheMode", "use MambaCacheMode.NONE"
    if not is_count(group.num_speculative_blocks):
        fix = _fix_of_count(group.num_speculative_blocks, 0)
        return f"its num_speculative_blocks must be an int from 0 to {MAX_INT}", fix
    is_plain = group.mamba_cache_mode is MambaCacheMode.NONE and not group.num_speculative_blocks
    if group.kind is not GroupKind.RECURRENT and not is_plain:
        rule = "only a group of kind recurrent has a mamba_cache_mode and num_speculative_blocks"
        return rule, "leave both out"
    return "", ""


def _recurrent_rule(config: Config, group: KVGroup) -> tuple[str, str]:
    """Return the rule of recurrent groups that a group breaks, and the fix; twice "" if none.

    Sources: vLLM 0.19.1 `MambaModelConfig` (modes), `MambaBase.get_kv_cache_spec` (drafts).
    """
    if group.kind is not GroupKind.RECURRENT:
        return "", ""
    mode = group.mamba_cache_mode
    recurrent = [other for other in config.groups if other.kind is GroupKind.RECURRENT]
    if any(other.mamba_cache_mode is not mode for other in recurrent):
        return "all recurrent groups have one mamba_cache_mode", "give them the same"
    if config.enable_prefix_caching == (mode is MambaCacheMode.NONE):
        rule = "its mamba_cache_mode must be none if and only if prefix caching is off"
        return rule, "use all or align with caching, none without"
    if mode is MambaCacheMode.NONE and group.block_size < config.max_model_len:
        rule = "its one state is in its first block, so block_size must be at least max_model_len"
        return rule, "raise its block_size"
    if mode is MambaCacheMode.ALIGN and not config.enable_chunked_prefill:
        return "chunks can end at block boundaries only with chunked prefill", "enable it"
    if mode is MambaCacheMode.ALIGN and group.num_speculative_blocks >= group.block_size:
        rule = "with align, num_speculative_blocks must be below block_size"
        return rule, "use a block_size above num_speculative_blocks"
    if group.num_speculative_blocks < config.num_speculative_tokens:
        rule = "its num_speculative_blocks must be a state for each of num_speculative_tokens"
        return rule, f"use {config.num_speculative_tokens}"
    return "", ""


def shown(value: object) -> str:
    """Return a value as part of a line, whatever it is: Python refuses to print ints of 4301
    digits."""
    try:
        text = repr(value)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."
