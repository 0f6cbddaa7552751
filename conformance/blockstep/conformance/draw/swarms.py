"""Swarms: the configuration and the features of a run, drawn from a preset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.feature import LATE_ONE_IN, Draws, Late, get_draws
from blockstep.conformance.draw.presets import (
    DEPTHS,
    MAX_DEPTH,
    PROPOSERS,
    Habit,
    Preset,
    Swarm,
)
from blockstep.conformance.features.transfers import FEATURE as TRANSFERS
from blockstep.conformance.protocol.feature import SEVERAL_AT_ONCE, Feature
from blockstep.conformance.protocol.feature_selection import NO_WISH, FeatureSelection, widen
from blockstep.conformance.protocol.features import (
    ABORTS,
    ASYNC,
    BY_NAME,
    CACHING,
    DRAFTS,
    FEATURES,
    GRAMMAR,
    PAUSE,
    PIPELINE,
    PRIORITY,
    RESET,
    find_policy,
    list_apart,
)
from blockstep.spec.vocabulary import Config, Policy, SpecMethod

SWITCHED = tuple(
    feature for feature in FEATURES if (feature.request or feature.actions) and not feature.is_late
)
"""Features that a swarm switches on or off, whatever its config."""


def draw_swarm(
    preset: Preset,
    draw: Draw,
    policy: Policy | None = None,
    max_depth: int = MAX_DEPTH,
    wish: FeatureSelection = NO_WISH,
    is_judged_alone: bool = False,
    takes: Callable[[Feature], bool] = lambda _: True,
) -> Swarm:
    """Draw a swarm; `policy` fixes the policy, `max_depth` bounds the frames in flight.

    A policy may be a feature that is drawn late: a wish for one includes the other.

    Features of `LATE` are drawn last, if they are wished for or the engine takes them.

    More swarms are storms if an engine is judged alone (`is_judged_alone`), since wrong memory then
    shows only when it is read.
    """
    asked = find_policy(policy)
    if asked is not None:
        policy, wish = None, replace(wish, always=wish.always | {asked.name})
    wish = widen(wish)
    needed = {other for name in wish.always for other in BY_NAME[name].needs}
    wish = replace(wish, always=wish.always | needed)
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
    late = Late(swarm, config, draw, wish, takes, has_policy=policy is not None)
    return _draw_late(late)


def _draw_late(late: Late) -> Swarm:
    """Return the swarm with features of `LATE`; the token seed decides which."""
    swarm, wish, seed = late.swarm, late.wish, late.swarm.token_seed
    left_out: list[Feature] = []
    for name, draws in get_draws().items():
        feature, one_in = BY_NAME[name], draws.one_in(wish)
        is_drawn = seed % one_in == one_in - 1 and not (swarm.is_crowded and draws.waits)
        seed //= LATE_ONE_IN
        if not wish.decide(feature, is_drawn) or not _goes_with(feature, draws, late):
            continue
        if name not in wish.always and not late.takes(feature):
            left_out.append(feature)
            continue
        late.drawn.add(name)
        draws.add_to_config(late)
    for draws in get_draws().values():
        draws.finish_config(late)
    features = swarm.features | late.drawn
    swarm = replace(late.swarm, features=features, left_out=tuple(left_out))
    return swarm.fit(late.config)


def _goes_with(feature: Feature, draws: Draws, late: Late) -> bool:
    """Return whether a feature of `LATE` may be combined with the wishes and the features drawn."""
    always = late.wish.always
    if not always.isdisjoint([other.name for other in list_apart(feature.name)]):
        return False
    if feature.name in always:
        return True
    return always.isdisjoint(feature.yields_to) and draws.goes_with(late)


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


def draw_depth(draw: Draw, max_depth: int, wish: FeatureSelection) -> tuple[int, bool]:
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
    preset: Preset, draw: Draw, max_depth: int = MAX_DEPTH, wish: FeatureSelection = NO_WISH
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
