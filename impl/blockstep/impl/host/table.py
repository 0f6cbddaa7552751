"""The request table: one slot per unfinished request, one column per thing known about it."""

from __future__ import annotations

from array import array

from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.queues import Rank
from blockstep.spec.vocabulary import Request, RequestId, Status, TokenIds


class RequestTable:
    """A struct of arrays, indexed by slot; slots of ended requests are used again.

    Columns grow by appending (amortised O(1)). Numbers lie in array("i") / array("q"): a step
    reads them one at a time, which takes half of numpy's time, and numpy can view them in place.
    """

    def __init__(self) -> None:
        self.slot_of: dict[RequestId, int] = {}
        self._unused: list[int] = []
        self.requests: list[Request] = []
        self.lineages: list[Lineage] = []
        self.block_tables: list[array[int]] = []
        self.spec_token_ids: list[TokenIds] = []
        self.statuses: list[Status] = []
        self.num_prompt: array[int] = array("i")
        self.num_known: array[int] = array("i")
        """Prompt and verified output tokens; always the length of the lineage's tokens."""
        self.num_output_placeholders: array[int] = array("i")
        """Outputs promised by frames in flight; always 0 without asynchronous scheduling."""
        self.num_computed: array[int] = array("i")
        self.num_cached_blocks: array[int] = array("i")
        self.num_cached_tokens: array[int] = array("i")
        self.num_preemptions: array[int] = array("i")
        self.max_known: array[int] = array("i")
        """Known tokens at which it ends for its length."""
        self.last_frame: array[int] = array("q")
        """The last plan that scheduled it; -1 before the first."""
        self.is_watched = bytearray()
        """Whether what it outputs can end it, beside how much."""
        self.is_prefill_chunk = bytearray()
        self.grammar_ready = bytearray()

    def add(self, request: Request, lineage: Lineage, status: Status, max_known: int) -> int:
        """The slot of a new request with an id that no unfinished one has."""
        slot = self._unused.pop() if self._unused else self._grow(request, lineage)
        self.requests[slot] = request
        self.lineages[slot] = lineage
        self.block_tables[slot] = array("i")
        self.spec_token_ids[slot] = ()
        self.statuses[slot] = status
        prompt = len(request.prompt_token_ids)
        self.num_prompt[slot] = self.num_known[slot] = prompt
        self.num_output_placeholders[slot] = self.num_computed[slot] = 0
        self.num_cached_blocks[slot] = self.num_preemptions[slot] = 0
        self.num_cached_tokens[slot] = self.last_frame[slot] = -1
        self.max_known[slot] = max_known
        self.is_watched[slot] = (
            request.eos_token_id is not None
            or bool(request.stop_token_ids)
            or request.repetition_detection is not None
        )
        self.is_prefill_chunk[slot] = self.grammar_ready[slot] = False
        self.slot_of[request.request_id] = slot
        return slot

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

    def output_token_ids(self, slot: int) -> TokenIds:
        """Verified output tokens."""
        return tuple(self.lineages[slot].tokens[self.num_prompt[slot] :])

    def all_token_ids(self, slot: int) -> TokenIds:
        """Prompt and verified output tokens."""
        return tuple(self.lineages[slot].tokens)

    def _grow(self, request: Request, lineage: Lineage) -> int:
        self.requests.append(request)
        self.lineages.append(lineage)
        self.block_tables.append(array("i"))
        self.spec_token_ids.append(())
        self.statuses.append(Status.WAITING)
        for column in (
            self.num_prompt, self.num_known, self.num_output_placeholders, self.num_computed,
            self.num_cached_blocks, self.num_cached_tokens, self.num_preemptions, self.max_known,
            self.last_frame,
        ):  # fmt: skip
            column.append(0)
        for flags in (self.is_watched, self.is_prefill_chunk, self.grammar_ready):
            flags.append(False)
        return len(self.requests) - 1
