"""State: everything that a transition reads and writes, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blockstep.spec.maps import FrozenMap
from blockstep.spec.pool import Pool, create_pool
from blockstep.spec.profiles import STRICT, Profile, Quirk
from blockstep.spec.vocabulary import (
    BlockId,
    BlockKey,
    Config,
    ConfigError,
    FrameId,
    PauseState,
    Request,
    RequestId,
    Stats,
    Status,
    TokenIds,
    config_problems,
)


@dataclass(frozen=True, slots=True)
class RequestState:
    """One unfinished request.

    num_known_tokens         |------ prompt ------|-- verified outputs --|
    num_tokens_with_spec     |------ prompt ------|-- verified outputs --|-- drafts --|
    num_computed_tokens      |---- KV exists ---->|

    and with frames in flight, of which each promises a token and its drafts:

    num_known_tokens         |------ prompt ------|-- verified outputs --|
    num_output_placeholders                                              |-- promised --|
    num_computed_tokens      |---- KV exists, or will once they have run ------------->|
    """

    request: Request
    status: Status
    output_token_ids: TokenIds = ()
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    spec_token_ids: TokenIds = ()
    is_prefill_chunk: bool = False
    block_table: tuple[BlockId, ...] = ()
    num_cached_blocks: int = 0
    block_keys: tuple[BlockKey, ...] = ()
    """Keys of its full blocks of known tokens: they follow from the tokens (see `hashing`)."""
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    grammar_ready: bool = False

    @property
    def request_id(self) -> RequestId:
        """The id of `request`."""
        return self.request.request_id

    @property
    def num_known_tokens(self) -> int:
        """Prompt and verified outputs (vLLM's `num_tokens`)."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> TokenIds:
        """Prompt and verified outputs."""
        return self.request.prompt_token_ids + self.output_token_ids


@dataclass(frozen=True, slots=True)
class FrameRow:
    """What a frame in flight asks of one request."""

    request_id: RequestId
    draft_token_ids: TokenIds
    samples: bool
    """Whether the step reaches the last token that will be known, so that the worker samples."""
    is_dropped: bool = False
    """Whether what it sampled is not delivered; only ever by a quirk."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A plan on its way: scheduled, not yet committed."""

    frame_id: FrameId
    rows: tuple[FrameRow, ...]
    """In the order of scheduling, which is the order of commit."""


NO_STATS: Final = Stats()


@dataclass(frozen=True, slots=True)
class State:
    """A scheduler and its pool between two events."""

    config: Config
    pool: Pool
    requests: FrozenMap[RequestId, RequestState]
    waiting: tuple[RequestId, ...] = ()
    skipped_waiting: tuple[RequestId, ...] = ()
    running: tuple[RequestId, ...] = ()
    pause_state: PauseState = PauseState.UNPAUSED
    frames: tuple[Frame, ...] = ()
    """In flight, oldest first."""
    next_frame_id: FrameId = 0
    finished_req_ids: tuple[RequestId, ...] = ()
    prev_scheduled_req_ids: tuple[RequestId, ...] = ()
    reset_req_ids: tuple[RequestId, ...] = ()
    """Preempted by a reset since the last plan, where the next one names them; only by a quirk."""
    stats: Stats = NO_STATS
    quirks: frozenset[Quirk] = frozenset()
    """Known deviations to follow; none in the specification proper (see `profiles`)."""

    @property
    def frees_unnamed_first(self) -> bool:
        """Whether free blocks without a key are taken before all others; only by a quirk."""
        has_names = self.config.enable_prefix_caching
        quirk = Quirk.UNNAMED_BLOCKS_FIRST if has_names else Quirk.UNCACHED_BLOCKS_FIRST
        return quirk in self.quirks


def initial_state(config: Config, profile: Profile = STRICT) -> State:
    """The state before the first event. Source: architecture D2.

    Raises:
        ConfigError: if `config_problems(config)` finds any.
    """
    problems = config_problems(config)
    if problems:
        raise ConfigError(problems)
    return State(
        config=config,
        pool=create_pool(config.num_blocks),
        requests=FrozenMap(),
        quirks=profile.quirks,
    )
