"""Writes a finding as a script for nano-vllm alone, to be run in a checkout."""

from __future__ import annotations

from blockstep.conformance.protocol.story import (
    Script,
    Story,
    UnwritableError,
    show_call,
    show_docstring,
    show_raising,
)
from blockstep.spec import vocabulary as v

EOS = 1
SETUP = '''\
import sys
import traceback
from types import ModuleType, SimpleNamespace

# Without the model: only the scheduler, the block manager and the sequence are imported.
package, config_module = ModuleType("nanovllm"), ModuleType("nanovllm.config")
package.__path__, config_module.Config = ["nanovllm"], SimpleNamespace
sys.modules.update({{"nanovllm": package, "nanovllm.config": config_module}})

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

size = Sequence.block_size = {block_size}
scheduler = Scheduler(SimpleNamespace(
    max_num_seqs={max_num_seqs}, max_num_batched_tokens={budget}, max_model_len={length}, eos={eos},
    kvcache_block_size=size, num_kvcache_blocks={num_blocks},
))
slots, wrong, frame = {{}}, [], ([], False)


def submit(name, tokens, max_tokens, ignore_eos=True):
    sequence = Sequence(tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))
    sequence.name = name
    scheduler.add(sequence)


def schedule():
    """Schedule a step, and note what its forward pass writes to and reads from the KV cache.

    KV depends on all tokens up to its own, so a slot holds them.
    """
    global frame
    frame = rows, is_prefill = ([], False) if scheduler.is_finished() else scheduler.schedule()
    reads = []
    for seq in rows:
        first = min(seq.num_cached_tokens, len(seq) - 1) if is_prefill else len(seq) - 1
        last = first + seq.num_scheduled_tokens
        for position in range(last):
            slot = seq.block_table[position // size], position % size
            if position >= first:
                slots[slot] = seq.token_ids[: position + 1]
            reads.append((seq.name, position, slot, seq.token_ids[: position + 1]))
    for name, position, slot, tokens in reads:
        if (found := slots.get(slot)) != tokens:
            wrong.append(f"{{name}} reads {{found}} at position {{position}}, not {{tokens}}")


def answer(tokens):
    rows, is_prefill = frame
    scheduler.postprocess(rows, [tokens.get(seq.name, {eos}) for seq in rows], is_prefill)


'''
ENDING = """\
for block in scheduler.block_manager.hash_to_block_id.values():
    if any((block, offset) not in slots for offset in range(size)):
        wrong.append(f"block {block} can be hit, and no forward pass has filled it")
print("wrong KV:", *wrong, sep="\\n  ")
sys.exit(bool(wrong))"""


def write_script(story: Story) -> Script:
    """Return a script that shows wrong KV or an exception with nano-vllm alone.

    Raises:
        UnwritableError: the finding is of another kind, or has an event without a call.
    """
    config = story.config
    lines = [line for line in map(_write_event, story.events) if line]
    if story.raises:
        ending, evidence = [*lines[:-1], show_raising(lines[-1])], story.raises
    elif story.finding.property_id in {"P2", "P3", "P4"}:
        ending, evidence = [*lines, ENDING], "wrong KV:\n  "
    else:
        raise UnwritableError("neither wrong KV nor an exception")
    setup = SETUP.format(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        budget=config.max_num_batched_tokens,
        length=config.max_model_len,
        num_blocks=config.num_usable_blocks,
        eos=EOS,
    )
    head = show_docstring(story, "nano-vllm")
    return Script("\n".join([head, "", setup + "\n".join(ending), ""]), evidence)


def _write_event(event: v.Event) -> str:
    match event:
        case v.Submit(request=request):
            return show_call(
                "submit",
                repr(request.request_id),
                str([*request.prompt_token_ids]),
                str(request.max_tokens),
                ignore_eos=None if request.eos_token_id is None else False,
            )
        case v.Schedule():
            return "schedule()"
        case v.Commit(sampled=sampled):
            tokens = {row.request_id: row.token_ids[0] for row in sampled if row.token_ids}
            return f"answer({tokens!r})"
        case v.SetPause():
            return ""
    raise UnwritableError(f"no call for {type(event).__name__}")
