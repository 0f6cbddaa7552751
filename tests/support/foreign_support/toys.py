"""Toys: a small scheduler of its own kind, held to `safety`; one takes aborts, one does not.

It is FCFS, without caching and preemption: an admitted request holds all blocks that it
will ever need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from blockstep.conformance.engine import (
    Capability,
    Deviation,
    EngineFault,
    EngineTraits,
    Safety,
    show_state,
)
from blockstep.conformance.protocol.program import Drain, Program
from blockstep.spec import vocabulary as v


def fit_config(config: v.Config) -> v.Config:
    """Return a config with the sizes of this one and no features."""
    return v.Config(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=False,
    )


def fit_request(request: v.Request, _config: v.Config) -> v.Request:
    """Return a request with the prompt and the length of this one only."""
    return v.Request(request.request_id, request.prompt_token_ids, request.max_tokens)


UNSEEN = frozenset({"preempted", "preempted_then_resumed", "resumed_with_outputs"})
"""Coverage goals that the toys cannot reach, since they preempt no request."""


@dataclass(eq=False)
class Life:
    """One unfinished request."""

    request: v.Request
    tokens: list[int]
    blocks: tuple[int, ...] = ()
    num_computed: int = 0


@dataclass
class PlainToy:
    """The toy scheduler; it takes no aborts and shows no state."""

    config: v.Config
    waiting: list[Life] = field(default_factory=list)
    running: list[Life] = field(default_factory=list)
    last: list[Life] = field(default_factory=list)
    """Requests of the last plan."""
    is_in_flight: bool = False
    ended: list[v.RequestId] = field(default_factory=list)
    num_plans: int = 0

    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request), out_of_reach=frozenset({"preempted"})
    )

    def __post_init__(self) -> None:
        self.free = list(range(1, self.config.num_blocks))

    def capabilities(self) -> frozenset[str]:
        return frozenset()

    def snapshot(self) -> v.Snapshot | None:
        return None

    def apply(self, event: v.Event) -> v.Observation:
        match event:
            case v.Submit(request=request):
                self.waiting.append(Life(request, list(request.prompt_token_ids)))
                return v.Ack()
            case v.Schedule():
                return self.plan()
            case v.Commit(sampled=sampled):
                self.is_in_flight, answers = (
                    False,
                    {row.request_id: row.token_ids for row in sampled},
                )
                rows = [self.take(life, answers[life.request.request_id]) for life in self.last]
                return v.Outputs(tuple(row for row in rows if row is not None))
        raise EngineFault(f"not for this toy: {event!r}")

    def plan(self) -> v.Plan:
        size, last, self.last = self.config.block_size, self.last, []
        budget = self.config.max_num_batched_tokens
        new: list[v.NewRow] = []
        cached: list[v.CachedRow] = []
        for life in self.running:
            first = life.num_computed
            count = min(len(life.tokens) - first, budget)
            if count:
                num_outputs = len(life.tokens) - len(life.request.prompt_token_ids)
                sent, name = None if life in last else tuple(life.tokens), life.request.request_id
                cached.append(v.CachedRow(name, False, ((),), sent, first, num_outputs, count))
                self.last.append(life)
            life.num_computed, budget = first + count, budget - count
        while budget and self.waiting and len(self.running) < self.config.max_num_seqs:
            life = self.waiting[0]
            held = -(-(self.get_end(life) - 1) // size)  # the last token needs no slot
            if held > len(self.free):
                break
            life.blocks, self.free = tuple(self.free[:held]), self.free[held:]
            count = min(len(life.tokens), budget)
            new.append(v.NewRow(life.request, (life.blocks,), 0, count))
            life.num_computed, budget = count, budget - count
            self.running.append(self.waiting.pop(0))
            self.last.append(life)
        self.is_in_flight = bool(self.last)
        ended, self.ended, self.num_plans = sorted(self.ended), [], self.num_plans + 1
        return v.Plan(self.num_plans - 1, tuple(new), tuple(cached), tuple(ended))

    def get_end(self, life: Life) -> int:
        most = len(life.request.prompt_token_ids) + life.request.max_tokens
        return min(most, self.config.max_model_len)

    def take(self, life: Life, sampled: v.TokenIds) -> v.OutputRow | None:
        if not sampled or life not in self.running:
            return None
        life.tokens += sampled
        reason = v.FinishReason.LENGTH if len(life.tokens) == self.get_end(life) else None
        if reason is not None:
            self.end(life)
        return v.OutputRow(life.request.request_id, sampled, reason)

    def end(self, life: Life) -> None:
        if life in self.waiting:
            self.waiting.remove(life)
            return
        self.running.remove(life)
        self.free += life.blocks
        self.ended.append(life.request.request_id)


class AbortingToy(PlainToy):
    """The toy with aborts and a state."""

    def capabilities(self) -> frozenset[str]:
        return frozenset({Capability.SNAPSHOT, Capability.ABORT})

    def apply(self, event: v.Event) -> v.Observation:
        if not isinstance(event, v.Abort):
            return super().apply(event)
        named = [
            life
            for name in dict.fromkeys(event.request_ids)
            for life in (*self.waiting, *self.running)
            if life.request.request_id == name
        ]
        for life in named:
            self.end(life)
        return v.Aborted(tuple(life.request.request_id for life in named))

    def snapshot(self) -> v.Snapshot:
        held = {block for life in self.running for block in life.blocks}
        requests = [
            v.RequestSnapshot(
                request_id=life.request.request_id,
                status=v.Status.RUNNING if life in self.running else v.Status.WAITING,
                output_token_ids=tuple(life.tokens[len(life.request.prompt_token_ids) :]),
                num_computed_tokens=life.num_computed,
                block_tables=(life.blocks,),
            )
            for life in sorted(
                (*self.waiting, *self.running), key=lambda life: life.request.request_id
            )
        ]
        return show_state(
            requests,
            waiting=[life.request.request_id for life in self.waiting],
            running=[life.request.request_id for life in self.running],
            ref_counts=tuple(int(block in held) for block in range(self.config.num_blocks)),
            free_queue=tuple(self.free),
            block_keys=(None,) * self.config.num_blocks,
            num_frames_in_flight=int(self.is_in_flight),
        )


class UnannouncedToy(AbortingToy):
    """The same, without the capability that says it shows its state."""

    def capabilities(self) -> frozenset[str]:
        return frozenset({Capability.ABORT})


class AnswersTwice(AbortingToy):
    """It answers a request once more that was aborted in flight, and declares it."""

    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request),
        out_of_reach=UNSEEN,
        deviations=(
            Deviation(
                "late_reply",
                "a request that is aborted in flight is answered once more",
                Program(
                    fit_config(v.Config(9, 4)),
                    (v.Submit(v.Request("A", (0,))), v.Schedule(), v.Abort(("A",)), Drain()),
                ),
                sentences=("delivered_rows_are_those_that_sampled",),
                when=lambda event, _answer: isinstance(event, v.Commit),
            ),
        ),
    )

    def take(self, life: Life, sampled: v.TokenIds) -> v.OutputRow | None:
        row = super().take(life, sampled)
        return v.OutputRow(life.request.request_id, (0,)) if row is None and sampled else row


class SmallToy(PlainToy):
    """It raises for more than a few blocks, and `fit_config` does not limit them."""

    def __post_init__(self) -> None:
        if self.config.num_blocks > 40:
            raise MemoryError("too many blocks")
        super().__post_init__()


class SharingToy(AbortingToy):
    """Prompts that are admitted in one step share the blocks that they fill with the same tokens,
    and each computes all of its prompt: both write equal content there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_holders = [0] * self.config.num_blocks

    def plan(self) -> v.Plan:
        running = list(self.running)
        plan = super().plan()
        begun = [life for life in self.running if life not in running]
        for life in begun:
            for block in life.blocks:
                self.num_holders[block] += 1
        for place, life in enumerate(begun):
            for other in begun[:place]:
                self.share(life, other)
        tables = {life.request.request_id: (life.blocks,) for life in begun}
        new = [replace(row, block_ids=tables[row.request_id]) for row in plan.new]
        return replace(plan, new=tuple(new))

    def share(self, life: Life, other: Life) -> None:
        """Let a request have the blocks of another one that it fills with the same tokens."""
        count = self.count_shared(life, other)
        pairs = zip(life.blocks[:count], other.blocks[:count], strict=True)
        for mine, shared in pairs:
            if mine != shared:
                self.num_holders[shared] += 1
                self.give_back([mine])
        life.blocks = other.blocks[:count] + life.blocks[count:]

    def count_shared(self, life: Life, other: Life) -> int:
        """Return the number of leading blocks that both prompts fill with the same tokens."""
        size, count = self.config.block_size, 0
        mine, others = life.request.prompt_token_ids, other.request.prompt_token_ids
        while count < min(len(mine), len(others)) // size:
            end = (count + 1) * size
            if mine[:end] != others[:end]:
                break
            count += 1
        return count

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.num_holders[block] -= 1
            if not self.num_holders[block]:
                self.free.append(block)

    def end(self, life: Life) -> None:
        blocks, life.blocks = life.blocks, ()
        super().end(life)
        self.give_back(blocks)

    def snapshot(self) -> v.Snapshot:
        return replace(super().snapshot(), ref_counts=tuple(self.num_holders))


class SharesMoreThanIsEqual(SharingToy):
    """A defect: a block counts as equal if all of its tokens but the last one are."""

    def count_shared(self, life: Life, other: Life) -> int:
        size, mine = self.config.block_size, life.request.prompt_token_ids
        others = other.request.prompt_token_ids
        count = min(len(mine), len(others)) // size
        return min(count, 1) if mine[: size - 1] == others[: size - 1] else 0


class SharesThePartialBlock(SharingToy):
    """A defect: the last block, to which both write their sampled tokens, is shared as well."""

    def count_shared(self, life: Life, other: Life) -> int:
        is_same = life.request.prompt_token_ids == other.request.prompt_token_ids
        shortest = min(len(life.blocks), len(other.blocks))
        size = self.config.block_size
        return min(-(-len(life.tokens) // size), shortest) if is_same else 0
