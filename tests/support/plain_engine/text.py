"""Text: an unfinished request with its block keys and stop conditions."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockstep.impl.interning import list_extras
from blockstep.spec.vocabulary import (
    BlockId,
    BlockKey,
    FinishReason,
    KVLoad,
    RepetitionDetection,
    Request,
    RequestId,
    RequestSnapshot,
    Status,
    TokenIds,
)


@dataclass(eq=False)
class Text:
    """A request and its progress."""

    request: Request
    status: Status = Status.WAITING
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose KV exists, or is written by the step in flight."""
    table: list[BlockId] = field(default_factory=list)
    settled: int = 0
    """Leading blocks of its table that were hit or published."""
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    grammar_ready: bool = False
    is_prefill_chunk: bool = False
    load: KVLoad | None = None
    """The load from a store, until the load is confirmed."""
    keys: list[BlockKey] = field(default_factory=list)

    @property
    def name(self) -> RequestId:
        """The request's id."""
        return self.request.request_id

    @property
    def tokens(self) -> TokenIds:
        """Prompt and output tokens."""
        return (*self.request.prompt_token_ids, *self.outputs)

    @property
    def known(self) -> int:
        """Number of its tokens."""
        return len(self.request.prompt_token_ids) + len(self.outputs)

    @property
    def rank(self) -> tuple[int, int, RequestId]:
        """The request's order under PRIORITY: the smallest is first."""
        return (self.request.priority, self.request.arrival_time, self.name)

    def list_keys(self, count: int, block_size: int) -> list[BlockKey]:
        """Return the keys of its first `count` blocks, all of whose tokens are known."""
        if len(self.keys) < count:
            tokens, extras = self.tokens, list_extras(self.request, block_size, count)
            for at in range(len(self.keys), count):
                adapter, salt, items, embeds = extras[at]
                own = tokens[at * block_size : (at + 1) * block_size]
                parent = self.keys[-1] if self.keys else None
                self.keys.append(BlockKey(parent, own, adapter, salt, items, 0, embeds))
        return self.keys[:count]

    def append(self, token: int, max_model_len: int) -> FinishReason | None:
        """Append an output token; return the finish reason, or None."""
        request = self.request
        self.outputs.append(token)
        may_stop = len(self.outputs) >= request.min_tokens
        if may_stop and (token == request.eos_token_id or token in request.stop_token_ids):
            return FinishReason.STOP
        if len(self.outputs) >= request.max_tokens or self.known >= max_model_len:
            return FinishReason.LENGTH
        rule = request.repetition_detection
        if may_stop and rule and repeats(self.outputs, rule):
            return FinishReason.REPETITION
        return None

    def show(self) -> RequestSnapshot:
        """Return the part of the snapshot about this request."""
        return RequestSnapshot(
            request_id=self.name,
            status=self.status,
            output_token_ids=tuple(self.outputs),
            num_computed_tokens=self.computed,
            is_prefill_chunk=self.is_prefill_chunk,
            block_tables=(tuple(self.table),),
            num_cached_blocks=(self.settled,),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            grammar_ready=self.grammar_ready,
        )


def repeats(outputs: list[int], rule: RepetitionDetection) -> bool:
    """Whether outputs end with `rule.min_count` copies of one pattern."""
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        tail = outputs[-size * rule.min_count :]
        if len(tail) == size * rule.min_count and tail == tail[:size] * rule.min_count:
            return True
    return False
