"""The PyTorch engine of an lmdeploy checkout or package, without a model, behind the protocol.

Its `Scheduler` with block manager, block trie and eviction, its `InputsMakerAsync`, its main loop,
the handlers of its requests, its stopping criteria and the step inputs of its model agent are
imported as they are, and their results are translated without repair. Replaced are packages whose
`__init__` would import a model or a server, the executor (`Agent`), and the clock, since its order
of arrival and of eviction must be reproducible.

The main loop is a coroutine, which stops where it launches a batch and where it waits for one. It
plans the next batch before it reads the outputs of the last one, so two frames are in flight.
Requests and cancels act at once. The client's end of a session, which frees its blocks, arrives
after the next plan.

It decides differently on purpose (prefill first), so it is checked at the equivalence `safety`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

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
from blockstep.spec import vocabulary as v

PREFILL_INTERVAL = 16
"""Its default: decode steps between two prefills, and tokens that a request reserves ahead."""

# Stand-ins.


def _make_package(root: Path, name: str, **names: Any) -> None:
    """Put an empty package in place of one of theirs: its `__init__` is not run."""
    package = ModuleType(f"lmdeploy{name}")
    package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    package.__dict__.update(names)
    sys.modules[package.__name__] = package


def _load() -> None:
    found = find_spec("lmdeploy")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("no lmdeploy: --path names a checkout of lmdeploy")
    root = Path(next(iter(found.submodule_search_locations)))
    for name in ("", ".vl", ".pytorch", ".pytorch.engine"):
        _make_package(root, name)
    _make_package(root, ".pytorch.engine.executor", build_executor=None)
    _make_package(root, ".pytorch.engine.model_agent", BatchedOutputs=object)
    _make_package(root, ".pytorch.engine.guided_process", GuidedDecodingManager=object)
    has_psutil = find_spec("psutil") is not None
    if not has_psutil:  # it is asked for the size of the memory, by code that is not run here
        sys.modules["psutil"] = ModuleType("psutil")
    import_module("lmdeploy.pytorch.engine.engine")
    if not has_psutil:
        del sys.modules["psutil"]
    logging.getLogger("lmdeploy").setLevel(logging.CRITICAL)


if "lmdeploy.pytorch.engine.engine" not in sys.modules:
    _load()
engines: Any = import_module("lmdeploy.pytorch.engine.engine")
inputs_makers: Any = import_module("lmdeploy.pytorch.engine.inputs_maker")
loops: Any = import_module("lmdeploy.pytorch.engine.engine_loop")
sampling: Any = import_module("lmdeploy.pytorch.engine.logits_process")
requests: Any = import_module("lmdeploy.pytorch.engine.request")
messages: Any = import_module("lmdeploy.pytorch.messages")
configs: Any = import_module("lmdeploy.pytorch.config")
ar_agents: Any = import_module("lmdeploy.pytorch.strategies.ar.model_agent")
ar_engines: Any = import_module("lmdeploy.pytorch.strategies.ar.engine")
ar_sequences: Any = import_module("lmdeploy.pytorch.strategies.ar.sequence")
ar_steps: Any = import_module("lmdeploy.pytorch.strategies.ar.step_inputs")
RUNNING, STOPPED = messages.MessageStatus.RUNNING, messages.MessageStatus.STOPPED
Type = requests.RequestType

_CLOCK = SimpleNamespace(
    perf_counter=itertools.count(1, 0.001).__next__, time=itertools.count(1, 0.001).__next__
)
for _name in (
    "paging.scheduler",
    "paging.block_manager.base_block_manager",
    "strategies.ar.sequence",
):
    import_module(f"lmdeploy.pytorch.{_name}").__dict__["time"] = _CLOCK
_lifecycle = "lmdeploy.pytorch.paging.block_trie.kv_lifecycle"
if find_spec(_lifecycle) is not None:  # nodes with one access time are ordered by their address
    import_module(_lifecycle).__dict__["id"] = lambda node: node.block_id
loops.asyncio = ModuleType("asyncio")
loops.asyncio.__dict__.update(asyncio.__dict__, sleep=lambda _seconds: Pause("sleep"))


class Pause:
    """A place where the main loop stops; the adapter sends the value with which it continues."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __await__(self) -> Generator[str, Any, Any]:
        return (yield self.place)


class Row(NamedTuple):
    """One request of a launched batch."""

    sequence: Any
    first: int
    length: int
    blocks: tuple[v.BlockId, ...]


class Batch(NamedTuple):
    """A launched batch."""

    rows: list[Row]
    samples: bool
    """Whether its rows sample: not in the middle of a prompt that is run in chunks."""
    criteria: Any
    """Its stopping criteria before the step."""


class Sampling:
    """Their sampling strategy, and the sampling inputs of a batch, without a sampler."""

    def __init__(self, sequences: Sequence[Any] = ()) -> None:
        self.sequences = sequences
        self.delta = sampling.SamplingInputsDelta(
            torch.zeros(len(sequences)), torch.zeros(len(sequences))
        )

    def make_sampling_inputs(self, sequences: Sequence[Any]) -> Sampling:
        """Return inputs that remember the requests of the batch."""
        return Sampling(sequences)

    def on_session_end(self, session_id: int) -> None:
        """Do nothing."""


class Agent:
    """Their executor and model agent without a model: it records the rows of each batch."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.steps = ar_steps.ARStepInputs()
        self.launched: deque[Batch] = deque()

    async def forward_async(self, forward: Mapping[str, Any]) -> None:
        """Launch a batch."""
        self._launch(forward)
        await Pause("launched")

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _launch(self, forward: Mapping[str, Any]) -> None:
        """Update the step inputs as `BaseModelAgent._async_step` does, with placeholders for the
        tokens of the batch: `-1 - seq_id`."""
        inputs, delta, steps = forward["inputs"], forward["delta"], self.steps
        criteria, drawn = forward["stopping_criteria"], forward["sampling_inputs"]
        is_decoding = inputs is None
        if delta is not None:
            delta.fill_tensors()
            steps.reindex(delta)
        if is_decoding:
            inputs, criteria, drawn.delta = (
                steps.model_inputs, steps.stopping_criteria, steps.sampling_delta,
            )  # fmt: skip
        samples = is_decoding or inputs.is_last_chunk or not inputs.is_chunk
        self.launched.append(Batch(_read_rows(inputs, drawn.sequences), samples, criteria))
        tokens = torch.tensor([-1 - sequence.seq_id for sequence in drawn.sequences])
        if samples:
            after = criteria.step(tokens, None)[2]
            update = steps.step_decode if is_decoding else steps.merge_prefill
            extra = steps.extra_inputs if is_decoding else forward["extra_inputs"]
            update(inputs, extra, after, drawn.delta, tokens, inputs.model_metas, None)

    async def get_output_async(self) -> Any:
        """Wait for the tokens of the oldest batch."""
        return await Pause("output")


def _read_rows(inputs: Any, sequences: Sequence[Any]) -> list[Row]:
    """Return the rows of a batch as its tensors have them; its tokens must be those of its rows."""
    tokens, rows = iter(inputs.input_ids.flatten().tolist()), []
    given = (inputs.history_lengths, inputs.seq_length, inputs.block_offsets)
    for sequence, first, length, table in zip(
        sequences, *(tensor.tolist() for tensor in given), strict=True
    ):
        rows.append(Row(sequence, first, length, tuple(table[: sequence.num_blocks])))
        known = [-1 - sequence.seq_id]
        if not inputs.is_decoding:
            known = sequence.history_cache[first : first + length].tolist()
        seen = [*itertools.islice(tokens, length)]
        if seen != known:
            raise EngineFault(f"row of session {sequence.session_id} runs {seen}, not {known}")
    return rows


class Loop(loops.EngineLoop):  # type: ignore[misc]
    """Their main loop, which also stops before it plans a batch."""

    async def _main_loop_try_send_next_inputs(self) -> Any:
        await Pause("plan")
        return await super()._main_loop_try_send_next_inputs()

    async def _prefetch_next_inputs(self) -> Any:
        await Pause("plan")
        return await super()._prefetch_next_inputs()


class Woken:
    """The event for which their idle loop waits."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Wake the loop."""
        self.is_set = True

    def clear(self) -> None:
        """Let the loop wait."""
        self.is_set = False

    async def wait(self) -> None:
        """Wait until it is set."""
        while not self.is_set:
            await Pause("idle")


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
    told: tuple[v.BlockId, ...] | None = None
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
        self.agent = Agent()
        self._build()
        self.place = self.main.send(None)

    def _build(self) -> None:
        config, interval = self.config, min(PREFILL_INTERVAL, self.config.block_size)
        scheduling = configs.SchedulerConfig(
            max_batches=config.max_num_seqs,
            max_session_len=config.max_model_len,
            prefill_interval=interval,
        )
        cache = configs.CacheConfig(
            max_batches=config.max_num_seqs,
            block_size=config.block_size,
            num_cpu_blocks=0,
            num_gpu_blocks=config.num_blocks,
            max_prefill_token_num=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            device_type="cpu",
            num_reserved_gpu_blocks=1,  # its default, and our null block
        )
        strategy, sampler = ar_sequences.ARSequenceStrategy(), Sampling()
        meta = messages.SequenceMeta(cache.block_size, strategy, sampler)
        engine = self.engine = object.__new__(engines.Engine)
        engine.scheduler_config, engine.cache_config = scheduling, cache
        engine.scheduler = self.scheduler = engines.Scheduler(scheduling, cache, meta)
        role = cache.role
        engine.engine_config, engine.input_processor = SimpleNamespace(role=role), None
        engine.req_manager = engine._bind_request_manager()
        engine.max_session_len = engine._get_max_session_len()
        self.maker = inputs_makers.InputsMakerAsync(
            executor=self.agent,
            scheduler=self.scheduler,
            adapter_manager=SimpleNamespace(num_adapters=lambda: 1),
            engine_strategy=ar_engines.AREngineStrategy(scheduling, cache),
            sampling_strategy=sampler,
            model_agent_strategy=ar_agents.ARModelAgentStrategy(),
            config=inputs_makers.InputsMakerConfig(
                max_batches=cache.max_batches,
                max_prefill_token_num=cache.max_prefill_token_num,
                role=role,
                prefill_interval=interval,
            ),
        )
        self.loop = Loop(
            engine.req_manager, self.scheduler, self.agent, strategy, self.maker,
            loops.EngineLoopConfig(role),
        )  # fmt: skip
        self.loop.has_runable_event.event = Woken()
        self.main = self.loop.main_loop()

    def capabilities(self) -> frozenset[str]:
        """Return what it implements: it shows its state, takes aborts, and plans ahead."""
        return frozenset(
            {Capability.SNAPSHOT, Capability.ASYNC, Capability.ABORT, Capability.WORK}
        )

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

    def _send(self, kind: Any, **data: Any) -> Any:
        manager = self.engine.req_manager
        reply = requests.Response(
            engines.ResponseType.INTERNAL_ENGINE_ERROR, 0, asyncio.Event(), None, None
        )
        manager.process_request(kind, [requests.Request(kind, 0, data, reply)])
        self.loop.has_runable_event.set()
        return reply

    def _submit(self, request: v.Request) -> v.Ack:
        life = Life(request, session_id=len(self.life_of))
        self.lives[life.name] = self.life_of[life.session_id] = life
        self._send(Type.ADD_SESSION, session_id=life.session_id, response=False)
        life.reply = self._send(
            Type.ADD_MESSAGE,
            token_ids=list(request.prompt_token_ids),
            session_id=life.session_id,
            adapter_name=request.adapter,
            sampling_param=messages.SamplingParam(
                max_new_tokens=request.max_tokens, stop_words=life.stop_words
            ),
        )
        session = self.scheduler.sessions[life.session_id]
        (life.sequence,) = session.sequences.values()
        return v.Ack()

    def _abort(self, names: Iterable[v.RequestId]) -> v.Aborted:
        known = [self.lives[name] for name in dict.fromkeys(names) if name in self.lives]
        for life in known:
            self._send(Type.STOP_SESSION, session_id=life.session_id, response=False)
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
            self._send(Type.END_SESSION, session_id=session_id, response=False)
            self.life_of[session_id].sequence = None

    # The main loop.

    def _advance(self, value: Any = None) -> str:
        self.place = self.main.send(value)
        return self.place

    def _schedule(self) -> v.Plan:
        """Run the main loop until it has launched a batch, or has none to launch."""
        num_launched, ending = len(self.agent.launched), self.ended
        self.ended, is_woken = [], False
        if self.place == "launched":
            self._advance()
        if self.place in ("plan", "sleep"):
            self._advance()
            if self.place == "plan":  # after its wait for memory
                self._advance()
        if self.place == "idle" and self.loop.has_runable_event.event.is_set:
            self._advance()
        has_rows = len(self.agent.launched) > num_launched
        rows = self.agent.launched[-1].rows if has_rows else []
        self._end_sessions()
        return self._make_plan(rows, tuple(sorted(ending)))

    def _make_plan(self, rows: Sequence[Row], ended: tuple[v.RequestId, ...]) -> v.Plan:
        told = {row.sequence.session_id for row in rows}
        preempted = [name for name, life in sorted(self.lives.items()) if self._is_preempted(life)]
        for name in preempted:
            self.lives[name].told, self.lives[name].is_preempted = None, True
        new, cached, remapped = [], [], []
        for row in rows:
            life = self.life_of[row.sequence.session_id]
            if life.told is not None and row.blocks[: len(life.told)] != life.told:
                remapped.append(life.name)
            made = self._make_row(life, row)
            if isinstance(made, v.NewRow):
                new.append(made)
            else:
                cached.append(made)
        self.last = {self.life_of[session_id].name for session_id in told}
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
        return life.told is not None and life.sequence.status is messages.MessageStatus.WAITING

    def _make_row(self, life: Life, row: Row) -> v.NewRow | v.CachedRow:
        told, life.told = life.told, row.blocks
        life.end = row.first + row.length
        if not life.has_run:
            life.has_run = True
            return v.NewRow(life.request, (row.blocks,), row.first, row.length)
        resumed, life.is_preempted = life.is_preempted, False
        prompt = life.request.prompt_token_ids
        is_longer = told is not None and row.blocks[: len(told)] == told
        return v.CachedRow(
            life.name,
            resumed,
            (row.blocks[len(told or ()) :] if is_longer else row.blocks,),
            None if life.name in self.last else (*prompt, *life.outputs),
            row.first,
            max(life.end - len(prompt), len(life.outputs)),  # some may be in flight
            row.length,
        )

    def _commit(self, sampled: Mapping[v.RequestId, v.TokenIds]) -> v.Outputs:
        batch = self.agent.launched.popleft()
        self.frames.popleft()
        if self.place == "launched":
            self._advance()
            if self.place == "plan" :
                raise EngineFault("lmdeploy plans a batch before it reads this one")
        if self.place != "output":
            raise EngineFault(f"lmdeploy does not wait for an output: {self.place}")
        lives = [self.life_of[row.sequence.session_id] for row in batch.rows]
        tokens = [(*sampled.get(life.name, ()), 0)[0] for life in lives]
        stopped, stop_pos, _ = batch.criteria.step(torch.tensor(tokens), None)
        ended = [
            bool(is_last) or token in life.stop_words
            for is_last, token, life in zip(stopped, tokens, lives, strict=True)
        ]
        self._advance(
            SimpleNamespace(
                next_token_ids=torch.tensor(tokens), stopped=torch.tensor(ended), stop_pos=stop_pos,
                model_metas=None, all_routed_experts=None, logits=None, ce_loss=None,
                logprobs=None, new_token_timestamp=0,
            )
        )  # fmt: skip
        replies = [*self.loop.resp_queue.get_nowait().values()]
        self.loop._send_resps(replies)
        rows = [self._deliver(self.life_of[reply.session_id]) for reply in replies]
        return v.Outputs(tuple(rows))

    def _deliver(self, life: Life) -> v.OutputRow:
        """Return what `EngineInstance.async_stream_infer` yields."""
        gained = tuple(life.reply.data["token_ids"][len(life.outputs) :].tolist())
        life.outputs += gained
        reason = stop = None
        if life.reply.type is engines.ResponseType.FINISH:
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
        allocator = self.scheduler.block_manager.allocator
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
        waiting = [one for one in self.scheduler.waiting if self._is_live(one)]
        running = [life for life in self.lives.values() if life.runs]
        return show_state(
            shown,
            waiting=[self.life_of[one.session_id].name for one in waiting],
            running=[life.name for life in running],
            ref_counts=tuple(counts),
            free_queue=(*free, *(block for block in sorted(spare) if not counts[block])),
            block_keys=tuple(keys),
            num_frames_in_flight=len(self.frames),
            has_work=self.loop.has_runable_event.has_unfinished() or bool(self.frames),
        )

    def _is_live(self, sequence: Any) -> bool:
        life = self.life_of[sequence.session_id]
        return self.lives.get(life.name) is life

    def _get_table(self, sequence: Any) -> tuple[v.BlockId, ...]:
        return tuple(self.scheduler.block_manager.get_block_table(sequence).tolist())

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
        trie = self.scheduler.block_trie
        nodes = [(child, None) for root in trie._roots.values() for child in root.children.values()]
        while nodes:
            node, parent = nodes.pop()
            key = v.BlockKey(parent, tuple(node.token_ids.tolist()), adapter=node.adapter_name)
            (block,) = trie.allocator.get_physical_blocks([node.block_id]).tolist()
            yield block, key
            nodes += [(child, key) for child in node.children.values()]
