"""The PyTorch engine of lmdeploy, without a model, behind the Engine protocol.

Its code runs as it is (`lmdeploy_cpu`) and its results are translated without repair. The main loop
plans a batch before it reads the outputs of the last one, so two frames are in flight. Requests and
cancels act at once. The client's end of a session, which frees the blocks of a finished request,
arrives after the next plan.

It decides differently on purpose (prefill first), so it is checked at the equivalence `safety`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from blockstep.conformance.engine import (
    Capability,
    EngineFault,
    EngineTraits,
    Safety,
    Setting,
    show_state,
)
from blockstep.conformance.engines.adapters.lmdeploy_cpu import (
    PREFILL_INTERVAL,
    WAITING,
    RequestType,
    ResponseType,
    Row,
    SamplingParam,
    Server,
)
from blockstep.spec import vocabulary as v

WORKAROUNDS = {
    "keep_chunks_apart": "a prompt that is canceled in the middle of its chunks is taken for a "
    "decoding request, which the model agent does not have",
    "forget_preempted": "the last decoding request is preempted and stays in the list of decoding "
    "requests; if it is resumed in chunks, it decodes before they are done",
    "free_preempted": "a preempted request keeps its blocks, and a prefix hit is appended to "
    "them, so that it writes into a cached block",
}
"""Defects that each flag of an engine works around."""

# Fitting.


def fit_config(config: v.Config) -> v.Config:
    """Return the nearest config: two frames in flight, no token budget for decodes, and sequences
    that leave one block of the pool, as its `_get_max_session_len` has it."""
    num_blocks = max(config.num_blocks, 2 + -(-2 // config.block_size))
    return v.Config(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(config.max_model_len, (num_blocks - 2) * config.block_size),
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=True,
        max_frames_in_flight=2,
    )


def fit_request(request: v.Request, config: v.Config) -> v.Request:
    """Return a request with a prompt, a length within the model's, stop tokens and an adapter."""
    room = max(config.max_model_len - len(request.prompt_token_ids), 1)
    return v.Request(
        request.request_id,
        request.prompt_token_ids,
        min(request.max_tokens, room),
        eos_token_id=request.eos_token_id,
        stop_token_ids=request.stop_token_ids,
        adapter=request.adapter,
    )


@dataclass(slots=True, eq=False)
class Life:
    """The adapter's record of one request."""

    request: v.Request
    session_id: int
    sequence: Any = None
    reply: Any = None
    outputs: list[int] = field(default_factory=list)
    planned_blocks: tuple[v.BlockId, ...] | None = None
    """Blocks that plans have named; None before the first plan and after a preemption."""
    has_run: bool = False
    is_preempted: bool = False
    end: int = 0
    """The end of its last row."""

    @property
    def runs(self) -> bool:
        """Whether a plan has given it a row since it was submitted or preempted."""
        return self.has_run and not self.is_preempted

    @property
    def name(self) -> v.RequestId:
        """The id of `request`."""
        return self.request.request_id

    @property
    def stop_words(self) -> list[int]:
        """Tokens that end the request."""
        eos = self.request.eos_token_id
        return [*([] if eos is None else [eos]), *self.request.stop_token_ids]


class Lmdeploy:
    """lmdeploy's engine as a system under test."""

    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request, plans_ahead=True),
        drops_tokens_in_flight=True,
        max_depth=2,
        workarounds=WORKAROUNDS,
        settings=(
            Setting(
                "a short prefill interval",
                "prefill_interval",
                str(PREFILL_INTERVAL),
                "at most the block size",
                "blocks of less than 16 tokens",
                "a request reserves as many tokens ahead, which must fit into the block that its "
                "session length leaves free; the default block has 64 tokens",
            ),
        ),
    )

    keep_chunks_apart = forget_preempted = free_preempted = True

    def __init__(self, config: v.Config) -> None:
        self.config = config
        self.lives: dict[v.RequestId, Life] = {}
        """Unfinished requests."""
        self.life_of: dict[int, Life] = {}
        """Requests by their session."""
        self.last: set[v.RequestId] = set()
        """Requests with a row in the last plan."""
        self.ended: list[v.RequestId] = []
        """Requests that finished since the last plan."""
        self.sessions_to_end: list[int] = []
        """Sessions that a client ends after the next plan."""
        self.frames: deque[v.FrameId] = deque()
        self.num_plans = 0
        self.server = Server(config, flags=self)

    def capabilities(self) -> frozenset[str]:
        """Return what it implements: it shows its state, takes aborts, and plans ahead."""
        return frozenset({Capability.SNAPSHOT, Capability.ASYNC, Capability.ABORT, Capability.WORK})

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event. What lmdeploy raises is a finding."""
        match event:
            case v.Submit(request=request):
                return self._submit(request)
            case v.Schedule() if len(self.frames) < 2:
                return self._schedule()
            case v.Commit(frame_id=frame_id, sampled=sampled) if self.frames:
                if frame_id == self.frames[0]:
                    return self._commit({row.request_id: row.token_ids for row in sampled})
            case v.Abort(request_ids=names):
                return self._abort(names)
        raise EngineFault(f"not for lmdeploy now: {event!r}")

    # Requests, as `EngineInstance` and `RequestSender` send them.

    def _submit(self, request: v.Request) -> v.Ack:
        life = Life(request, session_id=len(self.life_of))
        self.lives[life.name] = self.life_of[life.session_id] = life
        self.server.send(RequestType.ADD_SESSION, session_id=life.session_id, response=False)
        life.reply = self.server.send(
            RequestType.ADD_MESSAGE,
            token_ids=list(request.prompt_token_ids),
            session_id=life.session_id,
            adapter_name=request.adapter,
            sampling_param=SamplingParam(
                max_new_tokens=request.max_tokens, stop_words=life.stop_words
            ),
        )
        session = self.server.scheduler.sessions[life.session_id]
        (life.sequence,) = session.sequences.values()
        return v.Ack()

    def _abort(self, names: Iterable[v.RequestId]) -> v.Aborted:
        known = [self.lives[name] for name in dict.fromkeys(names) if name in self.lives]
        for life in known:
            self.server.send(RequestType.STOP_SESSION, session_id=life.session_id, response=False)
            self._end(life)
        return v.Aborted(tuple(life.name for life in known))

    def _end(self, life: Life) -> None:
        """Forget a request that its client knows to be finished."""
        del self.lives[life.name]
        self.sessions_to_end.append(life.session_id)
        if life.has_run:
            self.ended.append(life.name)

    def _end_sessions(self) -> None:
        ending, self.sessions_to_end = self.sessions_to_end, []
        for session_id in ending:
            self.server.send(RequestType.END_SESSION, session_id=session_id, response=False)
            self.life_of[session_id].sequence = None

    # The main loop.

    def _schedule(self) -> v.Plan:
        """Run the main loop until it has launched a batch, or has none to launch."""
        num_launched, ending = len(self.server.agent.launched), self.ended
        self.ended = []
        if self.server.place == "launched":
            self.server.advance()
        if self.server.place in ("plan", "sleep"):
            self.server.advance()
            if self.server.place == "plan":  # after its wait for memory
                self.server.advance()
        if self.server.place == "idle" and self.server.loop.has_runable_event.event.is_set:
            self.server.advance()
        has_rows = len(self.server.agent.launched) > num_launched
        rows = self.server.agent.launched[-1].rows if has_rows else []
        self._end_sessions()
        return self._make_plan(rows, tuple(sorted(ending)))

    def _make_plan(self, rows: Sequence[Row], ended: tuple[v.RequestId, ...]) -> v.Plan:
        planned_ids = {row.sequence.session_id for row in rows}
        preempted = [name for name, life in sorted(self.lives.items()) if self._is_preempted(life)]
        for name in preempted:
            self.lives[name].planned_blocks, self.lives[name].is_preempted = None, True
        new, cached, remapped = [], [], []
        for row in rows:
            life = self.life_of[row.sequence.session_id]
            if (
                life.planned_blocks is not None
                and row.blocks[: len(life.planned_blocks)] != life.planned_blocks
            ):
                remapped.append(life.name)
            made = self._make_row(life, row)
            if isinstance(made, v.NewRow):
                new.append(made)
            else:
                cached.append(made)
        self.last = {self.life_of[session_id].name for session_id in planned_ids}
        self.num_plans += 1
        if rows:
            self.frames.append(self.num_plans - 1)
        return v.Plan(
            frame_id=self.num_plans - 1,
            new=tuple(new),
            cached=tuple(cached),
            finished_req_ids=ended,
            preempted_req_ids=tuple(preempted),
            remapped_req_ids=tuple(sorted(remapped)),
        )

    def _is_preempted(self, life: Life) -> bool:
        """Whether a request that ran waits again."""
        return life.planned_blocks is not None and life.sequence.status is WAITING

    def _make_row(self, life: Life, row: Row) -> v.NewRow | v.CachedRow:
        planned, life.planned_blocks = life.planned_blocks, row.blocks
        life.end = row.first + row.length
        if not life.has_run:
            life.has_run = True
            return v.NewRow(life.request, (row.blocks,), row.first, row.length)
        resumed, life.is_preempted = life.is_preempted, False
        prompt = life.request.prompt_token_ids
        is_longer = planned is not None and row.blocks[: len(planned)] == planned
        return v.CachedRow(
            life.name,
            resumed,
            (row.blocks[len(planned or ()) :] if is_longer else row.blocks,),
            None if life.name in self.last else (*prompt, *life.outputs),
            row.first,
            max(life.end - len(prompt), len(life.outputs)),  # some may be in flight
            row.length,
        )

    def _commit(self, sampled: Mapping[v.RequestId, v.TokenIds]) -> v.Outputs:
        batch = self.server.agent.launched.popleft()
        self.frames.popleft()
        if self.server.place == "launched":
            self.server.advance()
        if self.server.place != "output":
            raise EngineFault(f"lmdeploy does not wait for an output: {self.server.place}")
        lives = [self.life_of[row.sequence.session_id] for row in batch.rows]
        tokens = [(*sampled.get(life.name, ()), 0)[0] for life in lives]
        stopped, stop_pos, _ = batch.criteria.step(torch.tensor(tokens), None)
        ended = [
            bool(is_last) or token in life.stop_words
            for is_last, token, life in zip(stopped, tokens, lives, strict=True)
        ]
        self.server.advance(
            SimpleNamespace(
                next_token_ids=torch.tensor(tokens), stopped=torch.tensor(ended), stop_pos=stop_pos,
                model_metas=None, all_routed_experts=None, logits=None, ce_loss=None,
                logprobs=None, new_token_timestamp=0,
            )
        )  # fmt: skip
        replies = [*self.server.loop.resp_queue.get_nowait().values()]
        self.server.loop._send_resps(replies)
        rows = [self._deliver(self.life_of[reply.session_id]) for reply in replies]
        return v.Outputs(tuple(rows))

    def _deliver(self, life: Life) -> v.OutputRow:
        """Return what `EngineInstance.async_stream_infer` yields."""
        gained = tuple(life.reply.data["token_ids"][len(life.outputs) :].tolist())
        life.outputs += gained
        reason = stop = None
        if life.reply.type is ResponseType.FINISH:
            reason = v.FinishReason.LENGTH
            if gained[-1:] and gained[-1] in life.stop_words:
                reason = v.FinishReason.STOP
                stop = gained[-1] if gained[-1] != life.request.eos_token_id else None
            self._end(life)
        return v.OutputRow(life.name, gained, reason, stop)

    # The state.

    def snapshot(self) -> v.Snapshot:
        """Return its state in canonical form. Blocks that only the trie or an ended session holds
        are free: they are evicted when another request needs them."""
        shown = [self._show(life) for _, life in sorted(self.lives.items())]
        allocator = self.server.scheduler.block_manager.allocator
        keys: list[v.BlockKey | None] = [None] * self.config.num_blocks
        spare: Counter[v.BlockId] = Counter()
        """Number of holders of each block besides unfinished requests."""
        for block, key in self._walk_trie():
            keys[block] = key
            spare[block] += 1
        for life in self.life_of.values():
            if life.sequence is not None and self.lives.get(life.name) is not life:
                spare.update(self._get_table(life.sequence))
        counts = [0] * self.config.num_blocks
        num_used = allocator._num_blocks - allocator._free_count
        used = np.setdiff1d(np.arange(allocator._num_blocks), allocator._free_blocks[num_used:])
        for block, count in zip(
            allocator.get_physical_blocks(used).tolist(),
            allocator.get_ref_count(used).tolist(),
            strict=True,
        ):
            counts[block] += count - spare[block]
        pool = allocator.get_phy_allocator("gpu")
        free = pool._free_blocks[pool._num_blocks - pool._free_count :].tolist()
        waiting = [one for one in self.server.scheduler.waiting if self._is_live(one)]
        running = [life for life in self.lives.values() if life.runs]
        return show_state(
            shown,
            waiting=[self.life_of[one.session_id].name for one in waiting],
            running=[life.name for life in running],
            ref_counts=tuple(counts),
            free_queue=(*free, *(block for block in sorted(spare) if not counts[block])),
            block_keys=tuple(keys),
            num_frames_in_flight=len(self.frames),
            has_work=self.server.loop.has_runable_event.has_unfinished() or bool(self.frames),
        )

    def _is_live(self, sequence: Any) -> bool:
        life = self.life_of[sequence.session_id]
        return self.lives.get(life.name) is life

    def _get_table(self, sequence: Any) -> tuple[v.BlockId, ...]:
        return tuple(self.server.scheduler.block_manager.get_block_table(sequence).tolist())

    def _show(self, life: Life) -> v.RequestSnapshot:
        waits = v.Status.PREEMPTED if life.has_run else v.Status.WAITING
        return v.RequestSnapshot(
            request_id=life.name,
            status=v.Status.RUNNING if life.runs else waits,
            output_token_ids=tuple(life.outputs),
            num_computed_tokens=life.end if life.runs else life.sequence.num_history_ids,
            block_tables=(self._get_table(life.sequence),),
        )

    def _walk_trie(self) -> Iterator[tuple[v.BlockId, v.BlockKey]]:
        """Yield the block and the key of every node of its trie."""
        trie = self.server.scheduler.block_trie
        nodes: list[tuple[Any, v.BlockKey | None]]
        nodes = [(child, None) for root in trie._roots.values() for child in root.children.values()]
        while nodes:
            node, parent = nodes.pop()
            key = v.BlockKey(parent, tuple(node.token_ids.tolist()), adapter=node.adapter_name)
            (block,) = trie.allocator.get_physical_blocks([node.block_id]).tolist()
            yield block, key
            nodes += [(child, key) for child in node.children.values()]
