"""The request table: one slot per unfinished request, one column per field of its state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.queues import Rank
from blockstep.spec.vocabulary import BlockId, BlockTables, Request, RequestId, Status, TokenIds


@dataclass(slots=True)
class Holding:
    """The blocks that a request holds in one KV group."""

    blocks: list[BlockId] = field(default_factory=list)
    """The block table."""
    num_cached: int = 0
    """The number of leading blocks that are published, or were hit."""
    num_left: int = 0
    """The number of leading null blocks: no later token reads their tokens."""
    num_beside: int = 0
    """The embeddings of its items; only in an encoder-decoder model."""
    has_spare: bool = False
    """Whether it has a state block with spare blocks after it; only where states end with chunks.
    """

    def clear(self) -> None:
        """Empty it, as before the first admission."""
        del self.blocks[:]
        self.num_cached = self.num_left = 0
        self.has_spare = False


@dataclass(slots=True)
class Session:
    """The further inputs of one session."""

    updates: deque[Request] = field(default_factory=deque)
    """The inputs that wait for its next stop. One that is not resumable is the last."""

    @property
    def is_closed(self) -> bool:
        """Return whether its client has ended the session."""
        return bool(self.updates) and not self.updates[-1].resumable


class RequestTable:
    """One list per column, indexed by slot; slots of finished requests are reused."""

    def __init__(self, num_groups: int = 1) -> None:
        self.num_groups = num_groups
        self.slot_of: dict[RequestId, int] = {}
        self._unused: list[int] = []
        self.requests: list[Request] = []
        self.lineages: list[Lineage] = []
        self.holdings: list[tuple[Holding, ...]] = []
        """One holding for each KV group."""
        self.spec_token_ids: list[TokenIds] = []
        self.statuses: list[Status] = []
        self.num_prompt: list[int] = []
        self.num_known: list[int] = []
        """Prompt tokens and verified output tokens."""
        self.num_output_placeholders: list[int] = []
        """Output placeholders of frames in flight; always 0 without asynchronous scheduling."""
        self.num_computed: list[int] = []
        self.num_cached_tokens: list[int] = []
        """-1 before its first admission."""
        self.num_preemptions: list[int] = []
        self.max_known: list[int] = []
        """The number of known tokens at which it finishes with reason LENGTH."""
        self.last_frame: list[int] = []
        """The frame that scheduled it last; -1 before the first."""
        self.is_watched: list[bool] = []
        """Whether its tokens can finish it, and not only their number."""
        self.is_prefill_chunk: list[bool] = []
        self.grammar_ready: list[bool] = []

    def add(self, request: Request, lineage: Lineage, status: Status, max_known: int) -> int:
        """Return the slot of a new request, whose id no unfinished request has."""
        slot = self._unused.pop() if self._unused else self._make_slot(request, lineage)
        self.requests[slot] = request
        self.lineages[slot] = lineage
        num_beside = sum(item.num_embeds for item in request.items)
        self.holdings[slot] = tuple(Holding(num_beside=num_beside) for _ in range(self.num_groups))
        self.spec_token_ids[slot] = ()
        self.statuses[slot] = status
        self.num_prompt[slot] = self.num_known[slot] = len(request.prompt_token_ids)
        self.num_output_placeholders[slot] = self.num_computed[slot] = 0
        self.num_preemptions[slot] = 0
        self.num_cached_tokens[slot] = self.last_frame[slot] = -1
        self.max_known[slot] = max_known
        self.is_watched[slot] = _is_watched(request)
        self.is_prefill_chunk[slot] = self.grammar_ready[slot] = False
        self.slot_of[request.request_id] = slot
        return slot

    def go_on(self, slot: int, request: Request, max_known: int) -> None:
        """Continue a session with its next input: `request` is the whole request now."""
        self.requests[slot] = request
        self.num_prompt[slot] = self.num_known[slot] = len(request.prompt_token_ids)
        self.max_known[slot] = max_known
        self.is_watched[slot] = _is_watched(request)
        self.statuses[slot] = Status.WAITING

    def remove(self, slot: int) -> None:
        """Remove a finished request."""
        del self.slot_of[self.requests[slot].request_id]
        self._unused.append(slot)

    def rank_of(self, slot: int) -> Rank:
        """Return its rank under `Policy.PRIORITY`; the lowest is admitted first."""
        request = self.requests[slot]
        return (request.priority, request.arrival_time, request.request_id)

    def num_outputs(self, slot: int) -> int:
        """Return the number of verified output tokens."""
        return self.num_known[slot] - self.num_prompt[slot]

    def block_tables(self, slot: int) -> BlockTables:
        """Return its block tables, by group."""
        return tuple([tuple(holding.blocks) for holding in self.holdings[slot]])

    def output_token_ids(self, slot: int) -> TokenIds:
        """Return the verified output tokens."""
        if not self.num_outputs(slot):
            return ()  # no slice here: a symbolic test has a number of tokens and no tokens
        return tuple(self.lineages[slot].tokens[self.num_prompt[slot] :])

    def all_token_ids(self, slot: int) -> TokenIds:
        """Return prompt and verified output tokens."""
        return tuple(self.lineages[slot].tokens)

    def _make_slot(self, request: Request, lineage: Lineage) -> int:
        """Append an empty slot; `add` fills it."""
        self.requests.append(request)
        self.lineages.append(lineage)
        self.holdings.append(())
        self.spec_token_ids.append(())
        self.statuses.append(Status.WAITING)
        for numbers in (
            self.num_prompt, self.num_known, self.num_output_placeholders, self.num_computed,
            self.num_cached_tokens, self.num_preemptions, self.max_known, self.last_frame,
        ):  # fmt: skip
            numbers.append(0)
        for flags in (self.is_watched, self.is_prefill_chunk, self.grammar_ready):
            flags.append(False)
        return len(self.requests) - 1


def _is_watched(request: Request) -> bool:
    return bool(
        request.stop_token_ids
        or request.eos_token_id is not None
        or request.repetition_detection is not None
    )
