"""State: everything that a transition reads and writes, as one value."""

from __future__ import annotations

from typing import Final

from blockstep.spec.copies import wide_dataclass
from blockstep.spec.core.block_pool import Pool, create_pool
from blockstep.spec.core.parts import NO_PARTS, Parts
from blockstep.spec.core.requests import Frame, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import (
    Config,
    ConfigError,
    FrameId,
    PauseState,
    PoolOrder,
    RequestId,
    Stats,
    config_problems,
)

NO_STATS: Final = Stats()


@wide_dataclass(frozen=True, slots=True)
class State:
    """A scheduler and its pool between two events."""

    config: Config
    rules: Rules
    pool: Pool
    requests: FrozenMap[RequestId, RequestState]
    waiting: tuple[RequestId, ...] = ()
    skipped_waiting: tuple[RequestId, ...] = ()
    running: tuple[RequestId, ...] = ()
    pause_state: PauseState = PauseState.UNPAUSED
    frames: tuple[Frame, ...] = ()
    """Frames in flight, oldest first."""
    next_frame_id: FrameId = 0
    finished_req_ids: tuple[RequestId, ...] = ()
    prev_scheduled_req_ids: tuple[RequestId, ...] = ()
    stats: Stats = NO_STATS
    parts: Parts = NO_PARTS
    """Values of features and releases."""


def create_state(config: Config, rules: Rules) -> State:
    """Return the state before the first event. Source: architecture D2.

    Raises:
        ConfigError: `config_problems(config)` finds a problem.
    """
    problems = config_problems(config)
    if problems:
        raise ConfigError(problems)
    state = State(
        config=config,
        rules=rules,
        pool=create_pool(config.num_blocks, is_lifo=config.pool_order is PoolOrder.LIFO),
        requests=FrozenMap(),
    )
    for create in rules.hooks.creates:
        state = rules[create](state)
    return state
