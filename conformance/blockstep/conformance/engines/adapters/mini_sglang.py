"""The scheduler of a mini-sglang checkout, behind the Engine protocol.

Its code runs as it is (`mini_sglang_cpu`) and its results are translated without repair. One turn
of its loop plans, launches and processes results; the adapter stops it after the launch. So
Schedule is the first half of a turn and Commit the second: for the same batch in its normal loop,
for the previous one in its overlapping loop (`async_scheduling`). A message waits for the next
turn.

It decides differently on purpose (prefill first), so it is checked at the equivalence `safety`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from blockstep.conformance.engine import (
    Capability,
    Deviation,
    EngineFault,
    EngineTraits,
    Safety,
    show_state,
)
from blockstep.conformance.engines.adapters.mini_sglang_cpu import (
    EOS,
    ChunkedReq,
    Loop,
    OnCpu,
    Row,
    SchedulerConfig,
    core,
    distributed,
    messages,
)
from blockstep.conformance.protocol.program import Drain, Program
from blockstep.spec import vocabulary as v

PAGE_SIZE_MAX = 32
"""The width of its page table is the model length, rounded up to a multiple of this."""


def fit_config(config: v.Config) -> v.Config:
    """Return the nearest config that it takes: its options, its page sizes, one token per row."""
    page_size = min(1 << config.block_size.bit_length() - 1, PAGE_SIZE_MAX)
    num_slots = config.num_usable_blocks * page_size
    return v.Config(
        num_blocks=config.num_blocks,
        block_size=page_size,
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(config.max_model_len, num_slots),
        enable_prefix_caching=config.enable_prefix_caching,
        max_frames_in_flight=2 if config.async_scheduling else 1,
        async_scheduling=config.async_scheduling,
    )


def fit_request(request: v.Request, _config: v.Config) -> v.Request:
    """Return a request with a prompt, a length and one end-of-sequence token."""
    eos = None if request.eos_token_id is None else EOS
    return v.Request(
        request.request_id, request.prompt_token_ids, request.max_tokens, eos_token_id=eos
    )


def _answers_all(event: v.Event, answer: v.Observation | None) -> bool:
    """Return whether a commit delivers to all rows that sampled, even to requests that have
    finished."""
    match event, answer:
        case v.Commit(sampled=sampled), v.Outputs(rows=rows):
            delivered = {row.request_id for row in rows}
            return delivered == {row.request_id for row in sampled if row.token_ids}
    return False


_OVERLAP = v.Config(
    num_blocks=7,
    block_size=1,
    max_num_seqs=1,
    max_num_batched_tokens=4,
    max_model_len=6,
    async_scheduling=True,
    max_frames_in_flight=2,
)
DEVIATIONS = (
    Deviation(
        "late_reply",
        "a request that finishes with a step in flight gets one more token, which its server drops",
        Program(
            _OVERLAP,
            (v.Submit(v.Request("A", (5, 6), 4, eos_token_id=EOS)), Drain()),
            vocabulary_size=2,
        ),
        sentences=("delivered_rows_are_those_that_sampled",),
        when=_answers_all,
    ),
    Deviation(
        "last_step_ends",
        "an abort during the last step of a request has no effect; the step finishes the request",
        Program(
            _OVERLAP,
            (v.Submit(v.Request("A", (5,), 1)), v.Schedule(), v.Abort(("A",)), Drain()),
        ),
        sentences=("abort_finishes_exactly_the_named_requests",),
        when=lambda event, _answer: isinstance(event, v.Abort),
    ),
)


@dataclass(slots=True, eq=False)
class Life:
    """One request, from its submission on."""

    request: v.Request
    uid: int
    planned_blocks: tuple[v.BlockId, ...] | None = None
    """The blocks that plans have sent; None before the first plan."""

    @property
    def name(self) -> v.RequestId:
        """Return the id of `request`."""
        return self.request.request_id


class MiniSglang:
    """mini-sglang's scheduler as a system under test."""

    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request, plans_ahead=True),
        out_of_reach=frozenset(
            {"preempted"}
        ),  # an admitted request has all blocks that it will need
        deviations=DEVIATIONS,
    )

    def __init__(self, config: v.Config) -> None:
        self.config = config
        with OnCpu():
            self.loop = Loop(
                SchedulerConfig(
                    model_path="",
                    tp_info=distributed.DistributedInfo(0, 1),
                    dtype=torch.float16,
                    max_running_req=config.max_num_seqs,
                    page_size=config.block_size,
                    max_seq_len_override=config.max_model_len,
                    num_page_override=config.num_usable_blocks,  # it has no null block
                    max_extend_tokens=config.max_num_batched_tokens,
                    cache_type="radix" if config.enable_prefix_caching else "naive",
                    offline_mode=True,
                )
            )
        self.lives: list[Life] = []
        """All requests, by uid."""
        self.live: dict[v.RequestId, Life] = {}
        self.data: Any = None
        """State that its overlapping loop passes from turn to turn: the last launched batch."""
        self.last_rows: frozenset[int] = frozenset()
        self.ended: set[v.RequestId] = set()
        self.given_up: list[Life] = []
        """Requests whose aborts wait for the next turn."""
        self.frames: list[v.FrameId] = []
        """Frames in flight, oldest first."""
        self.num_frames = 0

    def capabilities(self) -> frozenset[str]:
        """Return what it implements: it shows its state, takes aborts, and can plan ahead."""
        return frozenset({Capability.SNAPSHOT, Capability.ASYNC, Capability.ABORT})

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event."""
        with OnCpu():
            match event:
                case v.Submit(request=request):
                    return self._submit(request)
                case v.Abort(request_ids=names):
                    return self._abort(names)
                case v.Schedule() if self.loop.due is None:
                    return self._schedule()
                case v.Commit(frame_id=frame_id, sampled=sampled) if self.loop.due is not None:
                    if frame_id == self.frames[0]:
                        return self._commit({row.request_id: row.token_ids for row in sampled})
        raise EngineFault(f"not for mini-sglang now: {event!r}")

    def _submit(self, request: v.Request) -> v.Ack:
        life = Life(request, uid=len(self.lives))
        self.lives.append(life)
        self.live[life.name] = life
        params = core.SamplingParams(
            ignore_eos=request.eos_token_id is None, max_tokens=request.max_tokens
        )
        text = torch.tensor(request.prompt_token_ids, dtype=torch.int32)
        self.loop.inbox.append(messages.UserMsg(life.uid, text, params))
        return v.Ack()

    def _abort(self, names: tuple[v.RequestId, ...]) -> v.Aborted:
        """Abort waiting and decoding requests; a request in its last step runs to its end."""
        last = {req.uid for req in self._list_in_flight(self.data) if not req.can_decode}
        lives = [self.live[name] for name in dict.fromkeys(names) if name in self.live]
        self.loop.inbox += [messages.AbortBackendMsg(life.uid) for life in lives]
        found = [life for life in lives if life.uid not in last]
        self.given_up += found
        return v.Aborted(ending_req_ids=tuple(life.name for life in found))

    def _end_given_up(self) -> None:
        """Finish the aborted requests, after the turn has read their messages."""
        held = {req.uid for req in self._list_in_flight(self.data, self.loop.due)}
        for life in self.given_up:
            if life.uid in held:
                raise EngineFault(
                    f"{life.name!r} is aborted and keeps its pages: new to the adapter"
                )
            self._end(life)
        self.given_up = []

    # Plans: the first half of a turn.

    def _schedule(self) -> v.Plan:
        runner = self.loop.engine
        runner.rows = []
        if self.config.async_scheduling:
            self.data = self.loop.overlap_loop(self.data)
        else:
            self.loop.normal_loop()
        remapped = [self.lives[row.req.uid].name for row in runner.rows if self._is_remapped(row)]
        rows = [self._row(row) for row in runner.rows]
        self._end_given_up()
        self.last_rows = frozenset(row.req.uid for row in runner.rows)
        ended, self.ended = self.ended, set()
        self.num_frames += 1
        if rows:
            self.frames.append(self.num_frames - 1)
        return v.Plan(
            frame_id=self.num_frames - 1,
            new=tuple(row for row in rows if isinstance(row, v.NewRow)),
            cached=tuple(row for row in rows if isinstance(row, v.CachedRow)),
            finished_req_ids=tuple(sorted(ended)),
            remapped_req_ids=tuple(sorted(remapped)),
        )

    def _is_remapped(self, row: Row) -> bool:
        planned = self.lives[row.req.uid].planned_blocks
        return planned is not None and row.blocks[: len(planned)] != planned

    def _row(self, row: Row) -> v.NewRow | v.CachedRow:
        req, life = row.req, self.lives[row.req.uid]
        planned, life.planned_blocks = life.planned_blocks, row.blocks
        if planned is None:
            return v.NewRow(life.request, (row.blocks,), row.first, row.length)
        prompt, text = life.request.prompt_token_ids, tuple(req.input_ids.tolist())
        tokens = None if req.uid in self.last_rows else prompt + text[len(prompt) :]
        num_outputs = max(row.first + row.length - len(prompt), 0)
        is_longer = row.blocks[: len(planned)] == planned
        table = (row.blocks[len(planned) :] if is_longer else row.blocks,)
        return v.CachedRow(life.name, False, table, tokens, row.first, num_outputs, row.length)

    # Outputs: the second half of a turn.

    def _commit(self, sampled: dict[v.RequestId, v.TokenIds]) -> v.Outputs:
        batch, tokens = self.loop.due[0].batch, self.loop.due[1].next_tokens_cpu
        for index, req in enumerate(batch.reqs):
            # Its sampler returns a token for every row, even in the middle of a prefill.
            tokens[index] = (*sampled[self.lives[req.uid].name], EOS)[0]
        del self.frames[0]
        return v.Outputs(tuple(map(self._output, self.loop.answer())))

    def _output(self, reply: Any) -> v.OutputRow:
        life, reason = self.lives[reply.uid], None
        if reply.finished:
            is_stop = life.request.eos_token_id is not None and reply.next_token == EOS
            reason = v.FinishReason.STOP if is_stop else v.FinishReason.LENGTH
            self._end(life)
        return v.OutputRow(life.name, (reply.next_token,), reason)

    def _end(self, life: Life) -> None:
        if self.live.get(life.name) is life:
            del self.live[life.name]
            self.ended.add(life.name)

    # The state.

    def snapshot(self) -> v.Snapshot:
        """Return its state in canonical form; block ids are one higher, since it has no null
        block.
        """
        waiting, running = self._list_waiting(), self._list_running()
        requests = [
            v.RequestSnapshot(self.lives[uid].name, v.Status.WAITING) for uid in waiting
        ] + [self._show(req) for req in running.values()]
        num_blocks = self.config.num_blocks
        held = [block for request in requests for block in request.block_tables[0]]
        free = [slot // self.config.block_size + 1 for slot in self.loop.free_slots]
        keys: list[v.BlockKey | None] = [None] * num_blocks
        evictable = []
        for node, block, key in self._walk_tree():
            if keys[block] is not None:
                raise EngineFault(f"page {block - 1} is in its radix tree twice")
            keys[block] = key
            if node.ref_count == 0:
                evictable.append((node.timestamp, block))
        return show_state(
            sorted(requests, key=lambda request: request.request_id),
            waiting=[self.lives[uid].name for uid in waiting],
            running=[self.lives[uid].name for uid in running],
            ref_counts=tuple(held.count(block) for block in range(num_blocks)),
            free_queue=(*free, *(block for _, block in sorted(evictable))),
            block_keys=tuple(keys),
            num_frames_in_flight=len(self.frames),
            has_work=self._has_work(),
        )

    def _has_work(self) -> bool:
        """Return whether its loop has work or an unread message."""
        loop = self.loop
        has_any = loop.prefill_manager.runnable or loop.decode_manager.runnable
        return bool(loop.inbox or loop.due is not None or has_any)

    def _list_waiting(self) -> list[int]:
        """Return the uids of requests without blocks: in its queue, or in an unread message."""
        queue = self.loop.prefill_manager.pending_list
        unread = [message for message in self.loop.inbox if isinstance(message, messages.UserMsg)]
        return [request.uid for request in (*queue, *unread) if not _chunk_of(request)]

    def _list_running(self) -> dict[int, Any]:
        """Return the requests with a table: between two chunks, decoding, or in their last
        batch.
        """
        found = {}
        for request in self.loop.prefill_manager.pending_list:
            if _chunk_of(request):
                found[request.uid] = request.chunked_req
        found |= {req.uid: req for req in self.loop.decode_manager.running_reqs}
        return found | {req.uid: req for req in self._list_in_flight(self.data, self.loop.due)}

    def _list_in_flight(self, *launched: Any) -> list[Any]:
        """Return the requests of these batches that hold a table and wait for a token."""
        reqs = [req for data in launched if data is not None for req in data[0].batch.reqs]
        freed = self.loop.freed
        return [req for req in reqs if not isinstance(req, ChunkedReq) and req.uid not in freed]

    def _show(self, req: Any) -> v.RequestSnapshot:
        life = self.lives[req.uid]
        num_prompt, num_known = len(life.request.prompt_token_ids), len(req.input_ids)
        promised = 0 if isinstance(req, ChunkedReq) else req.device_len - num_known
        return v.RequestSnapshot(
            request_id=life.name,
            status=v.Status.RUNNING,
            output_token_ids=tuple(req.input_ids[num_prompt:].tolist()),
            num_computed_tokens=req.cached_len,
            num_output_placeholders=promised if self.config.async_scheduling else 0,
            block_tables=(self.loop.engine.read_table(req),),
        )

    def _walk_tree(self) -> Iterator[tuple[Any, v.BlockId, v.BlockKey]]:
        """Yield every page of its radix tree, with its node and its key."""
        size, cache = self.config.block_size, self.loop.tree
        nodes: list[tuple[Any, v.BlockKey | None]] = []
        if self.config.enable_prefix_caching:
            nodes = [(child, None) for child in cache.root_node.children.values()]
        while nodes:
            node, key = nodes.pop()
            text, slots = tuple(node._key.tolist()), node.value.tolist()
            for first in range(0, len(text), size):
                key = v.BlockKey(key, text[first : first + size])
                yield node, slots[first] // size + 1, key
            nodes += [(child, key) for child in node.children.values()]


def _chunk_of(request: Any) -> Any:
    """Return the chunk that a queued request has computed up to now, if any."""
    return getattr(request, "chunked_req", None)
