"""lmdeploy's PyTorch engine on a CPU: its code unchanged, with replacements for the rest.

Its `Scheduler` with block manager, block trie and eviction, its `InputsMakerAsync`, its main loop,
the handlers of its requests, its stopping criteria and the step inputs of its model agent are
imported as they are. Replaced are packages whose `__init__` would import a model or a server
(`_load`), the executor and its model agent (`Agent`), and the clock, since the order of arrival and
of eviction must be reproducible.

The main loop is a coroutine, which stops where it launches a batch and where it waits for one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from blockstep.conformance.engine import EngineFault
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
WAITING, SamplingParam = messages.MessageStatus.WAITING, messages.SamplingParam
RequestType, ResponseType = requests.RequestType, engines.ResponseType

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
    """The stopping criteria before the step."""


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


class Maker(inputs_makers.InputsMakerAsync):  # type: ignore[misc]
    """Their inputs maker, and the workarounds of its defects."""

    flags: Any
    """The adapter, with a flag for each workaround."""

    def update_running_seqs(self, running: list[Any], inputs: Any) -> None:
        """Leave a prompt in chunks out of the decoding requests, also after its cancel."""
        is_chunk = inputs is not None and inputs.is_chunk and not inputs.is_last_chunk
        if is_chunk and self.flags.keep_chunks_apart and not self.long_context_chunker.enabled():
            return
        super().update_running_seqs(running, inputs)

    def create_model_inputs_delta(self) -> Any:
        """Plan a decode. Preempted requests lose their blocks. If no request is left to decode,
        only their places are kept: the model agent has their rows until the next prefill."""
        made = super().create_model_inputs_delta()
        for sequence in made[2] if self.flags.free_preempted else ():
            if sequence.status is WAITING and self.cache_config.enable_prefix_caching:
                sequence.state.free()
        if self.flags.forget_preempted and made[0] is None:
            self.running_seqs: list[Any] = [_GONE] * len(self.running_seqs)
        return made


_GONE = SimpleNamespace(status=None, state=SimpleNamespace(evict=lambda: None))
"""A request that does not run any more."""


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


class Server:
    """Their engine with its main loop. `flags` has those of `lmdeploy.WORKAROUNDS`."""

    def __init__(self, config: v.Config, flags: Any) -> None:
        self.config, self.flags = config, flags
        self.agent = Agent()
        self._build()
        self.place: str = self.main.send(None)
        """The place where the main loop has stopped."""

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
        self.maker = Maker(
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
        self.maker.flags = self.flags
        self.loop = Loop(
            engine.req_manager, self.scheduler, self.agent, strategy, self.maker,
            loops.EngineLoopConfig(role),
        )  # fmt: skip
        self.loop.has_runable_event.event = Woken()
        self.main = self.loop.main_loop()

    def send(self, kind: Any, **data: Any) -> Any:
        """Send a request, as `RequestSender` does, and return the object for its reply."""
        manager = self.engine.req_manager
        reply = requests.Response(
            ResponseType.INTERNAL_ENGINE_ERROR, 0, asyncio.Event(), None, None
        )
        manager.process_request(kind, [requests.Request(kind, 0, data, reply)])
        self.loop.has_runable_event.set()
        return reply

    def advance(self, value: Any = None) -> str:
        """Run the main loop until it stops again; `value` is what it waits for."""
        self.place = self.main.send(value)
        return self.place
