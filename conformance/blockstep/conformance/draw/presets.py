"""Presets: the same actions at three sizes, and a swarm of configurations at each.

A run never uses a preset as it is. It draws a configuration from its seed and switches whole
features off: some states are reached only if other features are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from blockstep.conformance.draw.decisions import Draw
from blockstep.conformance.draw.forks import draw_forks, draw_pool
from blockstep.conformance.draw.grammars import draw_reasoning
from blockstep.conformance.draw.groups import draw_groups
from blockstep.conformance.draw.items import draw_beside, draw_encoder
from blockstep.conformance.draw.jobs import draw_pins
from blockstep.conformance.draw.store import draw_store
from blockstep.conformance.draw.tiers import draw_tiers
from blockstep.conformance.protocol.features import (
    ABORTS,
    ADAPTERS,
    ASYNC,
    BY_NAME,
    CACHING,
    DRAFTS,
    ENCODER,
    EVENTS,
    FEATURES,
    FORKS,
    GRAMMAR,
    GROUPS,
    KEYS,
    KINDS,
    LATE,
    MASKS,
    MULTIMODAL,
    PARTS_OF_GROUPS,
    PAUSE,
    PINS,
    PIPELINE,
    PRIORITY,
    RESET,
    SESSIONS,
    SEVERAL_AT_ONCE,
    STATES,
    TIERS,
    TRANSFERS,
    Feature,
    settle_states,
)
from blockstep.conformance.protocol.wishes import NO_WISH, Wish, widen
from blockstep.spec.vocabulary import Config, GroupKind, Policy, SpecMethod


class Habit(StrEnum):
    """Habit of the simulated model runner of a swarm."""

    LATE_COMMIT = "late_commit"
    FULL_PIPELINE = "full_pipeline"
    """Commits wait until no further plan may be in flight."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Bounds within which a swarm is drawn; every pair is (least, most)."""

    name: str
    block_size: tuple[int, int]
    usable_blocks: tuple[int, int]
    max_num_seqs: tuple[int, int]
    max_num_batched_tokens: tuple[int, int]
    max_model_len: tuple[int, int]
    max_output: tuple[int, int]
    num_requests_max: int
    """Most unfinished requests at once."""
    num_actions: int
    """Actions of one episode before it is drained."""
    num_hot_prefixes: int
    """Base sequences from which prompts are cut, so that they share prefixes."""


TINY = Preset("tiny", (1, 2), (2, 5), (1, 3), (1, 6), (3, 10), (1, 4), 3, 40, 2)
SMALL = Preset("small", (1, 4), (4, 20), (1, 6), (2, 24), (8, 48), (1, 12), 8, 120, 3)
REAL = Preset("real", (16, 16), (24, 400), (4, 32), (32, 1024), (128, 1024), (4, 32), 24, 200, 8)
DEPTHS = (1, 1, 1, 2, 2, 3, 4)
"""Values of `max_frames_in_flight`. Some defects need three frames (#47900)."""
MAX_DEPTH = max(DEPTHS)
PROPOSERS = tuple(method for method in SpecMethod if method is not SpecMethod.NONE)
LATE_ONE_IN = 4
"""One run in this number has a given feature of `LATE`, if its engine takes it."""
WAITING = frozenset({SESSIONS.name, TRANSFERS.name, PINS.name, FORKS.name, TIERS.name})
"""Features of `LATE` with which requests wait for an event, or run in another order. A crowd has
them only on request, since few of its requests would run."""
SWITCHED = tuple(
    feature
    for feature in FEATURES
    if (feature.request or feature.actions) and feature.name not in LATE
)
"""Features that a swarm switches on or off, whatever its config."""
PRESETS = {preset.name: preset for preset in (TINY, SMALL, REAL)}


@dataclass(frozen=True, slots=True)
class Swarm:
    """One drawn configuration, and the features that may be used in the run."""

    preset: Preset
    config: Config
    features: frozenset[str]
    """Names of the features that may be used."""
    habits: frozenset[Habit]
    token_seed: int
    hot_prefixes: tuple[tuple[int, ...], ...]
    vocabulary_size: int
    """Token ids are below this; small, so that prefixes collide."""
    is_storm: bool = False
    """Whether requests compete for scarce blocks and tokens (`draw_storm`)."""
    has_long_prompts: bool = False
    """Whether every other request of a storm has a long prompt, so that it is preempted amid its
    chunks."""
    is_crowded: bool = False
    """Whether the storm consists of many short requests, most of them more urgent than the running
    ones (`draw_crowd`): a request that needs a block preempts one with a row in the same plan."""
    has_equals: bool = False
    """Whether all requests have the same priority and arrival time, and long prompts."""
    left_out: tuple[Feature, ...] = ()
    """Features of `LATE` that were drawn but that the engine does not take."""

    def has(self, feature: Feature) -> bool:
        """Return whether a feature may be used."""
        return feature.name in self.features

    def fit(self, config: Config) -> Swarm:
        """Return the swarm with another config, without features that this config cannot use."""
        useless = () if DRAFTS.is_asked_by(config) else (DRAFTS.name,)
        return replace(self, config=config, features=self.features.difference(useless))


def draw_swarm(
    preset: Preset,
    draw: Draw,
    policy: Policy | None = None,
    max_depth: int = MAX_DEPTH,
    wish: Wish = NO_WISH,
    is_judged_alone: bool = False,
    takes: Callable[[Feature], bool] = lambda _: True,
) -> Swarm:
    """Draw a swarm; `policy` fixes the policy, `max_depth` bounds the frames in flight.

    The policy that pins is the feature `pins`: a request for one includes the other.

    Features of `LATE` are drawn last, if they are wished for or the engine takes them.

    More swarms are storms if an engine is judged alone (`is_judged_alone`), since wrong memory then
    shows only when it is read.
    """
    if policy is Policy.CONTINUUM:
        policy, wish = None, replace(wish, always=wish.always | {PINS.name})
    wish = widen(wish)
    if PINS.name in wish.always:
        wish = replace(wish, always=wish.always | {CACHING.name})
    config = draw_config(preset, draw, max_depth, wish)
    is_storm = draw.chance(40 if is_judged_alone else 34)
    if is_storm and is_judged_alone and wish.decide(DRAFTS, draw.chance(50)):
        # Slots for drafts come last in a table, so a request that needs a block evicts no cached
        # one.
        config = replace(
            config, spec_method=SpecMethod.DRAFT_MODEL, num_speculative_tokens=draw.integer(1, 4)
        )
    is_crowded = is_storm and not is_judged_alone and draw.chance(45)
    if is_storm:
        config = draw_storm(preset, config, draw, 9 if is_judged_alone else 3)
    if is_crowded:
        config = draw_crowd(config, draw, wish.decide(DRAFTS, draw.chance(60)))
    is_priority = wish.decide(PRIORITY, config.policy is Policy.PRIORITY)
    drawn = Policy.PRIORITY if is_priority else Policy.FCFS
    config = replace(config, policy=policy or drawn)
    features = {feature.name for feature in SWITCHED if wish.decide(feature, draw.chance(60))}
    if is_storm:
        features -= {PAUSE.name, RESET.name} - wish.always
        features |= {DRAFTS.name, *([ABORTS.name] if is_judged_alone else [])} - wish.never
    if is_crowded:
        features -= {GRAMMAR.name} - wish.always
    habits = frozenset(habit for habit in Habit if draw.chance(60))
    vocabulary_size = draw.choice((2, 3, 5, 50))
    length = config.max_model_len
    token_seed = draw.integer(0, 2**30)
    swarm = Swarm(
        preset=preset,
        config=config,
        features=frozenset(features),
        habits=habits,
        token_seed=token_seed,
        hot_prefixes=tuple(
            draw.tokens(min(length, 256), vocabulary_size) for _ in range(preset.num_hot_prefixes)
        ),
        vocabulary_size=vocabulary_size,
        is_storm=is_storm,
        is_crowded=is_crowded,
        has_long_prompts=is_storm and is_judged_alone,
        has_equals=is_storm and is_judged_alone and draw.chance(25),
    )
    return _draw_late(swarm, draw, wish, takes, has_policy=policy is not None)


def _is_late_drawn(feature: Feature | None, swarm: Swarm, seed: int, wish: Wish) -> bool:
    """Return whether the token seed gives a swarm a feature of `LATE`, unless a wish decides."""
    if feature is MASKS and GRAMMAR.name in wish.never:
        return False
    if feature is MASKS and GRAMMAR.name in wish.always:
        return seed % 2 > 0
    if feature is GROUPS and TRANSFERS.name in wish.always:
        return seed % 2 > 0  # windows give blocks away that a store may load into
    if feature is not None and swarm.is_crowded and feature.name in WAITING:
        return False
    return seed % LATE_ONE_IN == LATE_ONE_IN - 1


def _draw_late(
    swarm: Swarm, draw: Draw, wish: Wish, takes: Callable[[Feature], bool], *, has_policy: bool
) -> Swarm:
    """Return the swarm with features of `LATE`; the token seed decides which.

    `has_policy`: the policy was given by the caller.
    """
    config, seed = swarm.config, swarm.token_seed
    drawn: set[str] = set()
    left_out: list[Feature] = []
    wanted_kinds = list_kinds(wish.always)
    for name in LATE:
        feature = BY_NAME.get(name)
        is_drawn = _is_late_drawn(feature, swarm, seed, wish)
        seed //= LATE_ONE_IN
        if feature is None or not wish.decide(feature, is_drawn):
            continue
        if not _goes_with(feature, config, wish, has_policy=has_policy):
            continue
        if name not in wish.always and not takes(feature):
            left_out.append(feature)
            continue
        drawn.add(name)
        if feature is GROUPS:
            config = _draw_head(config, draw, wish)
            drawn |= {DRAFTS.name} if config.drops_last_hit_block else set()
            config = _draw_wished_groups(config, draw, swarm.is_storm, wish)
        elif feature is ADAPTERS:
            config = replace(config, max_loras=draw.choice((1, 1, 2)))
        elif feature is ENCODER:
            has_groups = takes(GROUPS) and not wish.never & {GROUPS.name, KINDS.name}
            config = _draw_encoder(config, draw, swarm, wish, has_groups)
            drawn |= {GROUPS.name} if config.is_encoder_decoder and has_groups else set()
        elif feature is EVENTS:
            config = replace(config, enable_kv_cache_events=True)
        elif feature is TRANSFERS:
            config = draw_store(config, draw, bool(wanted_kinds))
        elif feature is PINS:
            config = draw_pins(config)
        elif feature is FORKS:
            config = draw_forks(config, draw)
        elif feature is TIERS:
            if _may_have_store(config, wish, takes) and draw.chance(70):
                config = draw_store(config, draw, bool(wanted_kinds))
                drawn |= {TRANSFERS.name}
            config = draw_tiers(config, draw)
        elif feature is MASKS:
            drawn |= {GRAMMAR.name, DRAFTS.name} - wish.never
            config = draw_reasoning(config, draw, swarm.vocabulary_size)
            reasons = config.reasoning_end_token_id is not None
            is_drawn = draw.chance(60) or reasons  # one commit then brings the end, and more
            if wish.decide(DRAFTS, is_drawn) and not config.num_speculative_tokens:
                config = _add_drafts(config, draw, keeps_states=STATES.name in wish.always)
    if not config.enable_forks and FORKS.name not in wish.never and takes(FORKS):
        # A watermark and the LIFO order have the same capability as forks, but work with a store
        # too.
        beside = config.kv_connector or config.encoder_cache_size or config.has_pins
        if beside and draw.chance(30):
            config = draw_pool(config, draw)
    # Victims of a storm should be preempted amid prompts with items.
    is_long = swarm.has_long_prompts or (swarm.is_storm and ENCODER.name in drawn)
    features = swarm.features | drawn
    swarm = replace(swarm, features=features, has_long_prompts=is_long, left_out=tuple(left_out))
    return swarm.fit(config)


def _draw_encoder(config: Config, draw: Draw, swarm: Swarm, wish: Wish, has_groups: bool) -> Config:
    """Return the config with an encoder, sometimes that of an encoder-decoder model.

    `has_groups`: it may have a group of cross attention. In a crowd all requests run small chunks
    of their prompts, so that victims are preempted amid items.
    """
    if swarm.is_crowded:
        crowd = config.max_num_seqs
        config = replace(
            config,
            max_num_batched_tokens=draw.integer(crowd, 2 * crowd),
            long_prefill_token_threshold=draw.integer(1, 3),
        )
    config = draw_encoder(config, draw, swarm.is_storm)
    goes_beside = not (STATES.name in wish.always and config.enable_prefix_caching)
    if goes_beside and CACHING.name not in wish.always and draw.chance(20):
        config = draw_beside(config, draw, has_groups)
    return config


def list_kinds(names: Collection[str]) -> list[GroupKind]:
    """Return the kinds of KV groups of the features with these names."""
    return [feature.kind for feature in PARTS_OF_GROUPS if feature.name in names]


def _draw_head(config: Config, draw: Draw, wish: Wish) -> Config:
    """Return the config, sometimes with a draft head if several groups are wished for."""
    if GROUPS.name not in wish.always or DRAFTS.name in wish.never or not draw.chance(25):
        return config
    count = config.num_speculative_tokens or draw.integer(1, 4)
    return replace(config, spec_method=SpecMethod.EAGLE, num_speculative_tokens=count)


def _draw_wished_groups(config: Config, draw: Draw, is_storm: bool, wish: Wish) -> Config:
    """Return the config with several groups, of the wished kinds."""
    wanted, unwanted = list_kinds(wish.always), list_kinds(wish.never)
    if KINDS.name in wish.never:
        unwanted += [GroupKind.CHUNKED_LOCAL, GroupKind.RECURRENT]
        return KINDS.take_from(draw_groups(config, draw, is_storm, wanted, unwanted))
    drawn = draw_groups(config, draw, is_storm, wanted, unwanted)
    while KINDS.name in wish.always and not KINDS.is_asked_by(drawn):
        drawn = draw_groups(config, draw, is_storm, wanted, unwanted)
    return drawn


def _goes_with(feature: Feature, config: Config, wish: Wish, *, has_policy: bool) -> bool:
    """Return whether a feature of `LATE` may be combined with the wishes and the features drawn."""
    if feature in (TRANSFERS, PINS) and FORKS.name in wish.always:
        return False
    keeps_kinds = feature is MASKS and STATES.name in wish.always
    if feature in (TRANSFERS, FORKS, TIERS, MASKS) and KINDS.name in wish.always:
        # They leave groups of some kinds out.
        return keeps_kinds or feature.name in wish.always
    if feature.name in wish.always:
        return True
    if feature is ADAPTERS:
        return KEYS.name not in wish.never  # adapters are keys
    if feature is ENCODER:
        return MULTIMODAL.name not in wish.never  # items are what it encodes
    if feature is FORKS:
        return not (config.kv_connector or config.has_pins)
    if feature is PINS:
        is_free = not has_policy and PRIORITY.name not in wish.always
        return is_free and config.enable_prefix_caching
    return True


def _may_have_store(config: Config, wish: Wish, takes: Callable[[Feature], bool]) -> bool:
    """Return whether a store may be added to the config."""
    has_other = config.kv_connector or config.enable_forks
    if has_other:
        return False
    return TRANSFERS.name not in wish.never and takes(TRANSFERS)


def _add_drafts(config: Config, draw: Draw, keeps_states: bool) -> Config:
    """Return the config with drafts, or unchanged if drafts would remove all of its groups.

    Recurrent groups without blocks for drafts are removed. If the config `keeps_states`, it is
    returned unchanged instead.
    """
    method, count = draw.choice(PROPOSERS), draw.integer(1, 4)
    added = settle_states(replace(config, spec_method=method, num_speculative_tokens=count))
    if keeps_states and len(added.groups) < len(config.groups):
        return config
    return added if bool(added.groups) is bool(config.groups) else config


def draw_storm(preset: Preset, config: Config, draw: Draw, longest_row: int = 3) -> Config:
    """Return a config under which requests preempt each other: few blocks, few tokens, priorities.

    Steps preempt requests for which they have already planned a row (upstream #23347). A block
    holds several tokens, so that not all requests need a new one in the same step. Tokens that a
    victim returns are needed at once: the budget is two or three rows, or with drafts three to six
    tokens.
    """
    tokens_per_row = draw.integer(1, longest_row)
    budget = draw.integer(2 * tokens_per_row, 3 * tokens_per_row + 1)
    if config.num_speculative_tokens:
        tokens_per_row, budget = 0, draw.integer(3, 6)
    least, most = preset.block_size
    crowd = preset.num_requests_max
    return replace(
        config,
        policy=Policy.PRIORITY,
        num_blocks=1 + draw.integer(crowd * 2 // 3, crowd * 3 // 2),
        block_size=draw.integer(min(least + 1, most), most),
        max_num_seqs=max(config.max_num_seqs, 6),
        enable_chunked_prefill=True,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=tokens_per_row,
        scheduler_reserve_full_isl=False,
    )


def draw_crowd(config: Config, draw: Draw, has_drafts: bool) -> Config:
    """Return the config of a storm, with a pool for many short requests and a budget for few rows.

    With drafts one or two rows use up the budget, otherwise the chunk of the last request does.
    Tokens that a victim returns then go to a later request of the same plan (P15).
    """
    crowd = config.max_num_seqs
    config = replace(
        config,
        num_blocks=1 + draw.integer(crowd, 2 * crowd),
        max_num_batched_tokens=draw.integer(2, crowd - 1),
        long_prefill_token_threshold=draw.choice((0, 0, 2, 3)),
    )
    if not has_drafts:
        return config
    method = config.spec_method if config.num_speculative_tokens else draw.choice(PROPOSERS)
    return replace(
        config,
        max_num_batched_tokens=draw.integer(crowd - 1, crowd + 3),
        long_prefill_token_threshold=0,
        spec_method=method,
        num_speculative_tokens=draw.integer(2, 4),
    )


def draw_depth(draw: Draw, max_depth: int, wish: Wish) -> tuple[int, bool]:
    """Draw the most frames in flight, and whether they are scheduled asynchronously."""
    depth = draw.choice(DEPTHS)
    if TRANSFERS.name in wish.always:  # blocks are to be loaded while frames are in flight
        depth = max(depth, draw.choice(DEPTHS))
    depth = min(depth, max_depth)
    is_async = wish.decide(ASYNC, draw.chance(75))
    if wish.never >= SEVERAL_AT_ONCE:
        return 1, False
    if SEVERAL_AT_ONCE & wish.always:
        depth, is_async = max(depth, 2), ASYNC.name in wish.always
    elif PIPELINE.name in wish.never:
        is_async = True
    return depth, is_async and depth > 1


def draw_config(
    preset: Preset, draw: Draw, max_depth: int = MAX_DEPTH, wish: Wish = NO_WISH
) -> Config:
    """Draw a valid config within the preset's bounds."""
    block_size = draw.integer(*preset.block_size)
    unit = preset.block_size[0]
    usable = draw.integer(*preset.usable_blocks)
    max_model_len = draw.integer(*preset.max_model_len)
    if draw.chance(30):
        # Blocks for exactly one request of the greatest length show off-by-one errors.
        max_model_len = max(usable * block_size + draw.integer(-1, 1), 2)
    has_drafts = wish.decide(DRAFTS, draw.chance(45))
    spec_method = draw.choice(PROPOSERS) if has_drafts else SpecMethod.NONE
    depth, is_async = draw_depth(draw, max_depth, wish)
    least, most = preset.max_num_batched_tokens
    # Half of the budgets are small, so that running requests compete for them.
    budget = draw.integer(least, min(most, least + 6) if draw.chance(50) else most)
    chunked = draw.chance(85)
    return Config(
        num_blocks=usable + 1,
        block_size=block_size,
        max_num_seqs=draw.integer(*preset.max_num_seqs),
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        max_model_len=max_model_len,
        policy=draw.choice((Policy.FCFS, Policy.PRIORITY)),
        enable_prefix_caching=wish.decide(CACHING, draw.chance(80)),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw.choice(
            (0, 0, 0, unit, 2 * unit, 3 * unit, block_size, budget)
        ),
        scheduler_reserve_full_isl=draw.chance(70),
        spec_method=spec_method,
        num_speculative_tokens=0 if spec_method is SpecMethod.NONE else draw.integer(1, 4),
        max_frames_in_flight=depth,
        async_scheduling=is_async,
    )
