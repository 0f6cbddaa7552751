"""The request table: one slot per unfinished request, one column per thing known about it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.queues import Rank
from blockstep.spec.vocabulary import BlockId, BlockTables, Request, RequestId, Status, TokenIds


@dataclass(slots=True)
class Holding:
    """What a request holds of one KV group."""

    blocks: list[BlockId] = field(default_factory=list)
    """Its block table."""
    num_cached: int = 0
    """Its first blocks that are settled: published, or hit."""
    num_left: int = 0
    """Its first places that are null: blocks that no token reads any more."""
    num_beside: int = 0
    """Embeddings that its layers attend across to; only where they stand beside the prompt."""
    has_spare: bool = False
    """Whether it has a state, and spare blocks behind it; only where states end with chunks."""

    def clear(self) -> None:
        """As it was before the first admission."""
        del self.blocks[:]
        self.num_cached = self.num_left = 0
        self.has_spare = False


@dataclass(slots=True)
class Session:
    """What is to come of one."""

    updates: deque[Request] = field(default_factory=deque)
    """Chunks that wait for its next stop. One that is not resumable ends them."""

    @property
    def is_closed(self) -> bool:
        """Whether its client has said that no more input comes."""
        return bool(self.updates) and not self.updates[-1].resumable


class RequestTable:
    """One list per column, indexed by slot; slots of ended requests are used again."""

    def __init__(self, num_groups: int = 1) -> None:
        self.num_groups = num_groups
        self.slot_of: dict[RequestId, int] = {}
        self._unused: list[int] = []
        self.requests: list[Request] = []
        self.lineages: list[Lineage] = []
        self.holdings: list[tuple[Holding, ...]] = []
        """One for each KV group."""
        self.spec_token_ids: list[TokenIds] = []
        self.statuses: list[Status] = []
        self.num_prompt: list[int] = []
        self.num_known: list[int] = []
        """Prompt and verified output tokens."""
        self.num_output_placeholders: list[int] = []
        """Outputs promised by frames in flight; always 0 without asynchronous scheduling."""
        self.num_computed: list[int] = []
        self.num_cached_tokens: list[int] = []
        """-1 before its first admission."""
        self.num_preemptions: list[int] = []
        self.max_known: list[int] = []
        """Known tokens at which it ends for its length."""
        self.last_frame: list[int] = []
        """The last plan that scheduled it; -1 before the first."""
        self.is_watched: list[bool] = []
        """Whether what it outputs can end it, beside how much."""
        self.is_prefill_chunk: list[bool] = []
        self.grammar_ready: list[bool] = []

    def add(self, request: Request, lineage: Lineage, status: Status, max_known: int) -> int:
        """The slot of a new request with an id that no unfinished one has."""
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
        """A session has its next chunk: `request` is what it has become."""
        self.requests[slot] = request
        self.num_prompt[slot] = self.num_known[slot] = len(request.prompt_token_ids)
        self.max_known[slot] = max_known
        self.is_watched[slot] = _is_watched(request)
        self.statuses[slot] = Status.WAITING

    def remove(self, slot: int) -> None:
        """Forget an ended request."""
        del self.slot_of[self.requests[slot].request_id]
        self._unused.append(slot)

    def rank_of(self, slot: int) -> Rank:
        """Where it stands among those who wait, under `Policy.PRIORITY`; the lowest goes first."""
        request = self.requests[slot]
        return (request.priority, request.arrival_time, request.request_id)

    def num_outputs(self, slot: int) -> int:
        """Verified output tokens."""
        return self.num_known[slot] - self.num_prompt[slot]

    def block_tables(self, slot: int) -> BlockTables:
        """All blocks that it holds, by group."""
        return tuple([tuple(holding.blocks) for holding in self.holdings[slot]])

    def output_token_ids(self, slot: int) -> TokenIds:
        """Verified output tokens."""
        if not self.num_outputs(slot):
            return ()  # also where a law counts tokens that are not there to be sliced
        return tuple(self.lineages[slot].tokens[self.num_prompt[slot] :])

    def all_token_ids(self, slot: int) -> TokenIds:
        """Prompt and verified output tokens."""
        return tuple(self.lineages[slot].tokens)

    def _make_slot(self, request: Request, lineage: Lineage) -> int:
        """One more than there are; `add` says what is in it."""
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
