"""Writes a finding as a script for transformers alone, in its own classes, for an issue."""

from __future__ import annotations

from blockstep.conformance.protocol.story import (
    STALL_STEPS,
    Script,
    Story,
    UnwritableError,
    show_call,
    show_docstring,
    show_raising,
)
from blockstep.spec import vocabulary as v

IOS = """\
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
"""
SETUP = """\
import queue
import sys
{traceback}
import torch
from transformers import GenerationConfig, LlamaConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api as api
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
{ios}from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

model_config = LlamaConfig(  # 128 bytes of KV per token, so that a sector of the pool is one block
    num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=32, hidden_size=32,
    attn_implementation="flash_attention_2",
)
config = ContinuousBatchingConfig(
    page_size={page_size}, num_blocks={num_blocks}, max_batch_tokens={budget},
    max_requests_per_batch={max_rows}, max_memory_percent=0.9, max_blocks_per_request=0,
    allow_block_sharing={sharing}, use_async_batching=False, use_cuda_graph=(False, False), seed=0,
)
device, helper = torch.device("cpu"), DistributedHelper(None, None)
cache = PagedAttentionCache(model_config, config, device, helper)
inputs, cancels, router = queue.Queue(), queue.Queue(), api.OutputRouter()
processor = api.ContinuousBatchProcessor(
    cache=cache, config=model_config, generation_config=GenerationConfig(),
    continuous_batching_config=config,
    logit_processor=ContinuousBatchingLogitsProcessorList(LogitsProcessorList()),
    input_queue=inputs, cancel_queue=cancels, output_router=router,
    background_thread_status=api.BackgroundThreadStatus(), model_device=device,
    model_dtype=torch.float16, scheduler=FIFOScheduler(cache, None, {max_rows}),
    distributed_helper=helper,
)
in_flight = []
"""
TWO_BATCHES = '''

class TwoBatches:
    """The two sets of tensors of the asynchronous mode, used in turns; without its CUDA streams."""

    compute_stream = None

    def __init__(self, *sets):
        self.free = list(sets)

    def prepare_batch_tensors(self, *args, **kwargs):
        self.last = self.free.pop(0)
        self.last.prepare_batch_tensors(*args, **kwargs)

    def prepare_batch_update(self):
        self.free.append(in_flight[0])
        return in_flight[0].prepare_batch_update()


second = ContinuousBatchingIOs(
    cache=cache, config=model_config, device=device, model_dtype=torch.float16,
    continuous_batching_config=config, logit_processor=processor.logit_processor,
)
processor.use_async_batching = True
processor.inputs_and_outputs = TwoBatches(processor.inputs_and_outputs, second)
'''
FUNCTIONS = '''

def submit(name, tokens, max_new_tokens, eos_token_id=None):
    inputs.put(RequestState(
        request_id=name, initial_tokens=tokens, max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id, streaming=True,
    ))


def prepare():
    """Prepare the next batch, as the generation loop does before a forward pass."""
    if processor.prepare_next_batch():
        tensors = processor.inputs_and_outputs
        in_flight.append(getattr(tensors, "last", tensors))


def update(sampled):
    """Update the oldest batch with the tokens that its forward pass sampled."""
    if in_flight:
        rows = [row for row in in_flight[0].requests_in_batch if row.has_new_token]
        for index, row in enumerate(rows):
            in_flight[0].output_ids[0, index] = sampled.get(row.state.request_id, {token})
        processor.update_batch()
        del in_flight[0]


def get_finished():
    """Return the requests that finished for their clients since the last call."""
    outputs = [router.output_queue.get() for _ in range(router.output_queue.qsize())]
    return sorted(output.request_id for output in outputs if output.is_finished())


'''
STALL = """\
get_finished()
for _ in range({steps}):  # nothing else arrives
    prepare()
    update({{}})
seen, expected = get_finished(), {unfinished!r}
print(f"finished in {steps} more steps: {{seen!r}}, expected {{expected!r}}")
sys.exit(seen != expected)"""


def write_script(story: Story) -> Script:
    """Return a script that shows a stall or an exception with transformers alone.

    Raises:
        UnwritableError: the finding is of another kind, or has an event without a call.
    """
    config = story.config
    lines = [_write_event(event) for event in story.events]
    lines = [line for line in lines if line]
    used = {it.request.eos_token_id for it in story.events if isinstance(it, v.Submit)}
    token = next(token for token in range(1, 100) if token not in used)
    if story.raises:
        lines = [*lines[:-1], show_raising(lines[-1])]
        evidence = story.raises
    elif story.is_stall:
        unfinished = [*story.unfinished]
        lines.append(STALL.format(steps=STALL_STEPS, unfinished=unfinished))
        evidence = f"finished in {STALL_STEPS} more steps: [], expected {unfinished}"
    else:
        raise UnwritableError("neither a request that never finishes nor an exception")
    setup = SETUP.format(
        page_size=config.block_size,
        num_blocks=config.num_usable_blocks,
        budget=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs,
        sharing=config.enable_prefix_caching,
        traceback="import traceback\n" * bool(story.raises),
        ios=IOS * config.async_scheduling,
    )
    setup += TWO_BATCHES * config.async_scheduling
    functions = FUNCTIONS.replace("{token}", str(token))
    head = f"{show_docstring(story, 'transformers')}\n\n{setup}{functions}"
    return Script(head + "\n".join(lines) + "\n", evidence)


def _write_event(event: v.Event) -> str:
    match event:
        case v.Submit(request=request):
            more = (str(request.max_tokens),)
            return show_call(
                "submit", repr(request.request_id), str([*request.prompt_token_ids]), *more,
                eos_token_id=request.eos_token_id,
            )  # fmt: skip
        case v.Schedule():
            return "prepare()"
        case v.Commit(sampled=sampled):
            tokens = {row.request_id: row.token_ids[0] for row in sampled if row.token_ids}
            return f"update({tokens!r})"
        case v.Abort(request_ids=names):
            return "\n".join(f"cancels.put({name!r})" for name in names)
        case v.SetPause():
            return ""  # of a drain, and nothing is paused
    raise UnwritableError(f"no call for {type(event).__name__}")
