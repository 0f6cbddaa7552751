"""Writes a finding as a script for vLLM alone, in its own classes, for an issue."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from math import lcm
from typing import Any

from vllm.config import SchedulerConfig
from vllm.v1.core.sched.scheduler import Scheduler

from blockstep.conformance.engines.adapters.vllm_block_keys import get_lora_name
from blockstep.conformance.engines.adapters.vllm_build import RELEASE, fit_keywords
from blockstep.conformance.protocol.story import (
    STALL_STEPS,
    Check,
    Script,
    Story,
    UnwritableError,
    find_check,
    show_call,
    show_docstring,
    show_ending,
    show_raising,
)
from blockstep.spec import vocabulary as v

HEAD = """\
import json
import os
import sys
import tempfile

os.environ.setdefault("PYTHONHASHSEED", "0")  # the root of the hash chain is random otherwise
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

{imports}

# A two-layer Llama without weights: the scheduler takes only the model length from it.
folder = tempfile.mkdtemp()
with open(os.path.join(folder, "config.json"), "w") as file:
    json.dump({{
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": {length},
    }}, file)
model_config = ModelConfig(
    model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len={length}
)
"""
SPECULATION = '''
class Speculation(SpeculativeConfig):
    """All defaults, made without a draft model: its constructor would load one."""

    max_num_new_slots_for_drafting = 0

    def __init__(self, **values):
        for name, field in SpeculativeConfig.__pydantic_fields__.items():
            object.__setattr__(self, name, field.get_default(call_default_factory=True))
        self.__dict__ |= values

'''
REQUEST = '''

def make_request(name, tokens, {keywords}**sampling):
    params = SamplingParams(**sampling)
{eos}    return Request(
        request_id=name, prompt_token_ids=tokens, sampling_params=params, pooling_params=None,
        {passed}block_hasher={hasher},
    )


def answer(output, sampled):
    """Give the scheduler the tokens that a worker samples for the requests of a step."""
    result = ModelRunnerOutput(
        req_ids=list(sampled), req_id_to_index={{name: i for i, name in enumerate(sampled)}},
        sampled_token_ids={samples}, logprobs=None,
        prompt_logprobs_dict={{}}, pooler_output=[],
    )
    return scheduler.update_from_output(output, result)

'''
SAMPLE = """\
def sample(output):
    \"\"\"Return a token for each request of a step that has computed all its tokens.\"\"\"
    requests = {{n: scheduler.requests[n] for n in output.num_scheduled_tokens}}
    return {{
        name: [{token}] if request.num_computed_tokens >= request.num_tokens else []
        for name, request in requests.items()
    }}


"""
LOOP = """\
for _ in range({steps}):  # nothing else arrives: the loop of an engine core
    output = scheduler.schedule()
    answer(output, sample(output))
"""
UNFINISHED = "sorted(name for name, r in scheduler.requests.items() if not r.is_finished())"

CACHED = "output.scheduled_cached_reqs"
ROWS = f"""{{{{r.req_id: r.{{0}} for r in output.scheduled_new_reqs}}}} | {{{{
    name: value for name, value in zip(
        {CACHED}.req_ids, {CACHED}.{{1}}
    ){{2}}
}}}}"""
"""Value of each row of a plan."""
OUTPUT_ROWS = """{{
    it.request_id: {0}
    for core in answered.values() for it in core.outputs
}}"""
FINISH = "None if it.finish_reason is None else str(it.finish_reason)"
POOL = "scheduler.kv_cache_manager.block_pool"
ENCODER = "scheduler.encoder_cache_manager"


def _rows(row: v.NewRow | v.CachedRow) -> v.BlockTables:
    return row.block_ids if isinstance(row, v.NewRow) else row.new_block_ids


def _lists(tables: v.BlockTables) -> tuple[list[int], ...]:
    return tuple([*table] for table in tables)


PLAN: tuple[tuple[str, str, Any], ...] = (
    (
        "tokens that the step computes",
        "output.num_scheduled_tokens",
        lambda plan: {row.request_id: row.num_scheduled_tokens for row in plan.rows},
    ),
    (
        "preempted requests",
        "sorted(output.preempted_req_ids or ())",
        lambda plan: sorted(plan.preempted_req_ids),
    ),
    (
        "tokens computed before the step",
        ROWS.format("num_computed_tokens", "num_computed_tokens", ""),
        lambda plan: {row.request_id: row.num_computed_tokens for row in plan.rows},
    ),
    (
        "drafts in the step",
        "output.scheduled_spec_decode_tokens",
        lambda plan: {r.request_id: [*r.draft_token_ids] for r in plan.rows if r.draft_token_ids},
    ),
    (
        "blocks given to requests in this step",
        ROWS.format("block_ids", "new_block_ids", " if value"),
        lambda plan: {row.request_id: _lists(_rows(row)) for row in plan.rows if any(_rows(row))},
    ),
    (
        "encoder inputs of the step",
        "output.scheduled_encoder_inputs",
        lambda plan: {it.request_id: [*it.item_indices] for it in plan.scheduled_encoder_inputs},
    ),
    (
        "encoder outputs that the worker drops",
        "output.free_encoder_mm_hashes",
        lambda plan: [*plan.free_encoder_mm_hashes],
    ),
    (
        "blocks to be zeroed",
        "output.new_block_ids_to_zero or []",
        lambda plan: [*plan.new_block_ids_to_zero],
    ),
    (
        "finished requests reported to the worker",
        "sorted(output.finished_req_ids)",
        lambda plan: [*plan.finished_req_ids],
    ),
)
OUTPUTS: tuple[tuple[str, str, Any], ...] = (
    (
        "outputs",
        OUTPUT_ROWS.format(f"(it.new_token_ids, {FINISH})"),
        lambda answer: {
            row.request_id: ([*row.new_token_ids], row.finish_reason and str(row.finish_reason))
            for row in answer.rows
        },
    ),
    (
        "stop_reason of the outputs",
        OUTPUT_ROWS.format("it.stop_reason"),
        lambda answer: {row.request_id: row.stop_token_id for row in answer.rows},
    ),
)
RESET: tuple[tuple[str, str, Any], ...] = (
    ("whether the reset succeeded", "is_reset", lambda answer: answer.success),
)


def _of_each(what: str, source: str, read: Any) -> tuple[str, str, Any]:
    """Return a check of one value of each request."""
    code = f"{{name: {source} for name, request in sorted(scheduler.requests.items())}}"
    return what, code, lambda state: {one.request_id: read(one) for one in state.requests}


SKIPPED = "kv_holding_waiting" if RELEASE.has_holding_queue else "skipped_waiting"
STATE: tuple[tuple[str, str, Any], ...] = (
    _of_each("outputs", "list(request.output_token_ids)", lambda one: [*one.output_token_ids]),
    ("running", "[r.request_id for r in scheduler.running]", lambda state: [*state.running]),
    ("waiting", "[r.request_id for r in scheduler.waiting]", lambda state: [*state.waiting]),
    (
        f"requests in {SKIPPED}",
        f"[r.request_id for r in scheduler.{SKIPPED}]",
        lambda state: [*state.skipped_waiting],
    ),
    _of_each("status", "request.status.name.lower()", lambda one: one.status.value),
    _of_each(
        "num_computed_tokens", "request.num_computed_tokens", lambda one: one.num_computed_tokens
    ),
    _of_each(
        "blocks",
        "scheduler.kv_cache_manager.get_block_ids(name)",
        lambda one: _lists(one.block_tables),
    ),
    _of_each("drafts", "list(request.spec_token_ids)", lambda one: [*one.spec_token_ids]),
    _of_each(
        "num_output_placeholders",
        "request.num_output_placeholders",
        lambda one: one.num_output_placeholders,
    ),
    _of_each(
        "chunks that wait",
        "len(request.streaming_queue or ())",
        lambda one: one.num_streaming_updates,
    ),
    (
        "requests that hold each block",
        f"[0 if block.is_null else block.ref_cnt for block in {POOL}.blocks]",
        lambda state: [*state.ref_counts],
    ),
    (
        "blocks in the prefix cache",
        f"[b.block_id for b in {POOL}.blocks if b.block_hash is not None]",
        lambda state: [block for block, key in enumerate(state.block_keys) if key is not None],
    ),
    (
        "free blocks, the next to be taken first",
        f"[b.block_id for b in {POOL}.free_block_queue.get_all_free_blocks()]",
        lambda state: [*state.free_queue],
    ),
    (
        "encoder cache: the requests that hold each entry",
        f"{{name: sorted(held) for name, held in {ENCODER}.cached.items()}}",
        lambda state: (
            {one.identifier: sorted(set(one.holders)) for one in state.encoder.entries}
            if state.encoder
            else None
        ),
    ),
    (
        "encoder cache: free slots",
        f"{ENCODER}.num_free_slots",
        lambda state: state.encoder and state.encoder.num_free,
    ),
    (
        "encoder cache: slots that can be freed",
        f"{ENCODER}.num_freeable_slots",
        lambda state: state.encoder and state.encoder.num_freeable,
    ),
    (
        "encoder cache: entries to be evicted, in order",
        f"list({ENCODER}.freeable)",
        lambda state: state.encoder and [*state.encoder.freeable],
    ),
    (
        "finished requests that the next step tells the worker",
        "sorted(scheduler.finished_req_ids)",
        lambda state: [*state.finished_req_ids],
    ),
)


class _Writer:
    """Source of one story, and the names that it has to import."""

    def __init__(self, story: Story, *, stalls: bool) -> None:
        self.story, self.config = story, story.config
        self.stalls = stalls
        """Whether the script shows that requests never finish."""
        self.in_flight: list[str] = []
        """The steps that were not answered."""
        self.imports = {
            "vllm.config": {"CacheConfig", "DeviceConfig", "ModelConfig", "VllmConfig"},
            "vllm.sampling_params": {"SamplingParams"},
            "vllm.v1.core.kv_cache_utils": set(),
            "vllm.v1.kv_cache_interface": {"KVCacheConfig", "KVCacheGroupSpec"},
            "vllm.v1.outputs": {"ModelRunnerOutput"},
            "vllm.v1.request": {"Request"},
            "vllm.v1.structured_output": {"StructuredOutputManager"},
        }
        self.modules = {"torch"} | ({"numpy as np"} if RELEASE.takes_arrays else set())
        self.loras: dict[str, int] = {}
        self.num_plans = 0
        self.answered = {it.frame_id for it in story.events if isinstance(it, v.Commit)}
        self.is_paused = False
        require_writable(story)

    def write(self) -> Script:
        """Return the script, with the line that it prints if the defect shows."""
        story = self.story
        setup, steps = self._write_setup(), self._write_steps()
        ending, evidence = self._write_ending()
        lines = [f"import {name}" for name in sorted(self.modules)]
        lines += [
            f"from {module} import {', '.join(sorted(names))}"
            for module, names in sorted(self.imports.items())
            if names
        ]
        head = HEAD.format(imports="\n".join(lines), length=self.config.max_model_len)
        note = show_docstring(story, "vLLM")
        source = "\n".join([note, "", head, setup, *steps, ending, ""])
        return Script(source, evidence)

    def _import(self, module: str, name: str) -> str:
        self.imports.setdefault(module, set()).add(name)
        return name

    # Setup.

    def _write_setup(self) -> str:
        config = self.config
        kind = "AsyncScheduler" if config.async_scheduling else "Scheduler"
        module = "async_scheduler" if config.async_scheduling else "scheduler"
        self._import(f"vllm.v1.core.sched.{module}", kind)
        parts = [self._write_config()]
        parts.append(self._write_groups())
        sizes = fit_keywords(
            Scheduler,
            block_size=lcm(*config.block_sizes) if RELEASE.has_mixed_groups else config.block_size,
            hash_block_size=config.block_size,
        )
        parts.append(
            "scheduler = "
            + show_call(
                kind,
                vllm_config="config",
                kv_cache_config="kv_cache_config",
                structured_output_manager="StructuredOutputManager(config)",
                **{name: str(value) for name, value in sizes.items()},
            )
        )
        if config.encoder_cache_size:
            manager = "EncoderCacheManager"
            if config.is_encoder_decoder:
                manager = "EncoderDecoderCacheManager"
                parts.append("scheduler.is_encoder_decoder = True")
            self._import("vllm.v1.core.encoder_cache_manager", manager)
            parts += [
                "# Both budgets are derived from a model, which is not there.",
                f"scheduler.max_num_encoder_input_tokens = {config.encoder_compute_budget}",
                f"{ENCODER} = {manager}(cache_size={config.encoder_cache_size})",
            ]
        hasher = "None"
        if config.enable_prefix_caching:
            for name in ("get_request_block_hasher", "init_none_hash"):
                self._import("vllm.v1.core.kv_cache_utils", name)
            where = "vllm.utils.hashing" if RELEASE.has_hashing_module else "vllm.utils"
            self._import(where, "sha256")
            hasher = "hasher"
            parts += [
                "init_none_hash(sha256)",
                f"hasher = get_request_block_hasher({config.block_size}, sha256)",
            ]
        parts.append(self._write_functions(hasher))
        return "\n".join(parts)

    def _write_config(self) -> str:
        config, budget = self.config, self.config.max_num_batched_tokens
        largest = max(budget, config.max_model_len, config.max_num_seqs)
        threshold = min(config.long_prefill_token_threshold, config.max_model_len)
        options = fit_keywords(
            SchedulerConfig,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=largest,
            max_num_scheduled_tokens=None if largest == budget else budget,
            max_model_len=config.max_model_len,
            is_encoder_decoder=config.is_encoder_decoder,
            policy=None if config.policy is v.Policy.FCFS else config.policy.value,
            async_scheduling=config.async_scheduling,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=threshold or None,
            disable_chunked_mm_input=config.disable_chunked_mm_input or None,
            scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
        )
        arguments = {name: repr(value) for name, value in options.items() if value is not None}
        self._import("vllm.config", "SchedulerConfig")
        caching = (
            f"CacheConfig(block_size={config.block_size}, "
            f"enable_prefix_caching={config.enable_prefix_caching})"
        )
        lines = [
            f"scheduler_config = {show_call('SchedulerConfig', **arguments)}",
            f"cache_config = {caching}",
            f"cache_config.num_gpu_blocks = {config.num_blocks}",
        ]
        for group in config.groups:
            if group.kind is v.GroupKind.RECURRENT:
                lines.append(f"cache_config.mamba_cache_mode = {group.mamba_cache_mode.value!r}")
                break
        lines.append(
            "config = VllmConfig(\n"
            "    model_config=model_config, scheduler_config=scheduler_config,\n"
            '    cache_config=cache_config, device_config=DeviceConfig("cpu"),\n)'
        )
        if threshold and not config.enable_chunked_prefill:
            lines.append(f"scheduler_config.long_prefill_token_threshold = {threshold}")
        if config.max_frames_in_flight > 1 and not config.async_scheduling:
            lines.append(
                f"config.parallel_config.pipeline_parallel_size = {config.max_frames_in_flight}"
            )
        if budget < largest and (not RELEASE.has_step_budget or RELEASE.has_group_gate):
            lines.append(f"scheduler_config.max_num_batched_tokens = {budget}")
        if config.max_loras:
            self._import("vllm.config", "LoRAConfig")
            lines.append(f"config.lora_config = LoRAConfig(max_loras={config.max_loras})")
        if config.spec_method is not v.SpecMethod.NONE:
            self._import("vllm.config", "SpeculativeConfig")
            made = show_call(
                "Speculation",
                method=repr(config.spec_method.value),
                num_speculative_tokens=config.num_speculative_tokens,
                disable_lookahead_block_hashes=True,
            )
            lines = [SPECULATION, *lines, f"config.speculative_config = {made}"]
        return "\n".join(lines)

    def _write_groups(self) -> str:
        config, unit = self.config, lcm(*self.config.block_sizes)
        specs = [
            f'KVCacheGroupSpec(["layer.{index}"], {self._write_group(one, unit // one.block_size)})'
            for index, one in enumerate(config.kv_groups)
        ]
        groups = "".join(f"    {line},\n" for line in specs)
        return f"kv_cache_config = KVCacheConfig({config.num_blocks}, [], [\n{groups}])"

    def _write_group(self, group: v.KVGroup, num_heads: int) -> str:
        module = "vllm.v1.kv_cache_interface"
        if group.kind is v.GroupKind.RECURRENT:
            return show_call(
                self._import(module, "MambaSpec"),
                block_size=group.block_size,
                shapes="((1, 1),)",
                dtypes="(torch.float32,)",
                page_size_padded=4 * group.block_size * num_heads,
                mamba_cache_mode=repr(group.mamba_cache_mode.value),
                num_speculative_blocks=group.num_speculative_blocks,
            )
        sizes = {
            v.GroupKind.FULL: ("FullAttentionSpec", {}),
            v.GroupKind.CROSS_ATTENTION: ("CrossAttentionSpec", {}),
            v.GroupKind.SLIDING_WINDOW: (
                "SlidingWindowSpec",
                {"sliding_window": group.sliding_window},
            ),
            v.GroupKind.CHUNKED_LOCAL: (
                "ChunkedLocalAttentionSpec",
                {"attention_chunk_size": group.attention_chunk_size},
            ),
        }
        name, more = sizes[group.kind]
        return show_call(
            self._import(module, name),
            block_size=group.block_size,
            num_kv_heads=num_heads,
            head_size=1,
            dtype="torch.float16",
            **more,
        )

    def _write_functions(self, hasher: str) -> str:
        """Return the functions that make a request and answer a step, with what is used only."""
        requests = [
            it.request for it in self.story.events if isinstance(it, v.Submit | v.StreamingUpdate)
        ]
        fields = {
            "priority": (any(it.priority for it in requests), 0),
            "arrival_time": (self.config.policy is v.Policy.PRIORITY, 0.0),
            "cache_salt": (any(it.cache_salt for it in requests), None),
            "lora_request": (any(it.adapter for it in requests), None),
            "mm_features": (any(it.items for it in requests), None),
            "prompt_embeds": (any(it.prompt_embeds for it in requests), None),
            "resumable": (any(it.resumable for it in requests), False),
        }
        used = [name for name, (is_used, _) in fields.items() if is_used]
        keywords = "".join(f"{name}={fields[name][1]}, " for name in used)
        has_eos = any(it.eos_token_id is not None for it in requests)
        token = SAMPLE.format(token=find_token(requests)) if self.stalls else ""
        eos = "    params.update_from_generation_config({}, eos)\n" * has_eos
        samples = "list(sampled.values())"
        if RELEASE.takes_arrays:
            samples = "[np.array(ids, dtype=np.int64) for ids in sampled.values()]"
        return (
            REQUEST.format(
                keywords="eos=None, " * has_eos + keywords,
                eos=eos,
                passed="".join(f"{name}={name}, " for name in used),
                hasher=hasher,
                samples=samples,
            )
            + token
        )

    # Steps.

    def _write_steps(self) -> list[str]:
        *before, last = self.story.events
        lines = [self._write_event(event, is_last=False) for event in before]
        lines = [line for line in lines if line]
        last_line = self._write_event(last, is_last=not self.stalls)
        if not self.story.raises:
            return [*lines, last_line]
        self.modules.add("traceback")
        return [*lines, show_raising(last_line)]

    def _write_event(self, event: v.Event, *, is_last: bool) -> str:
        match event:
            case v.Submit(request=request) | v.StreamingUpdate(request=request):
                return f"scheduler.add_request({self._write_request(request)})"
            case v.Schedule():
                number, self.num_plans = self.num_plans, self.num_plans + 1
                is_named = self.stalls or number in self.answered
                name = f"step{number}" if is_named else "output" if is_last else ""
                self.in_flight.append(name)
                return f"{name} = scheduler.schedule()" if name else "scheduler.schedule()"
            case v.Commit(frame_id=frame_id, sampled=sampled):
                tokens = {row.request_id: [*row.token_ids] for row in sampled}
                prefix = "answered = " if is_last else ""
                self.in_flight.remove(f"step{frame_id}")
                return f"{prefix}answer(step{frame_id}, {tokens!r})"
            case v.Abort(request_ids=names):
                status = self._import("vllm.v1.request", "RequestStatus")
                calls = [
                    f"scheduler.finish_requests([{name!r}], {status}.FINISHED_ABORTED)"
                    for name in names
                ]
                return "\n".join(calls)
            case v.Drafts(drafts=drafts):
                kind = self._import("vllm.v1.outputs", "DraftTokenIds")
                arguments = [row.request_id for row in drafts], [[*row.token_ids] for row in drafts]
                return f"scheduler.update_draft_token_ids({kind}{arguments!r})"
            case v.Reset(reset_running_requests=is_forced):
                given = f"reset_running_requests={is_forced}" if is_forced else ""
                return f"{'is_reset = ' * is_last}scheduler.reset_prefix_cache({given})"
            case v.SetPause(pause_state=v.PauseState.UNPAUSED) if not self.is_paused:
                return ""
            case v.SetPause(pause_state=state):
                self.is_paused = state is not v.PauseState.UNPAUSED
                kind = self._import("vllm.v1.core.sched.interface", "PauseState")
                return f"scheduler.set_pause_state({kind}.{state.name})"
            case v.EncoderReset():
                return "scheduler.reset_encoder_cache()"
        raise UnwritableError(f"no script for {type(event).__name__} yet")

    def _write_request(self, request: v.Request) -> str:
        more: dict[str, Any] = {}
        if request.eos_token_id is not None:
            more["eos"] = request.eos_token_id
        if request.priority:
            more["priority"] = request.priority
        if request.arrival_time and self.config.policy is v.Policy.PRIORITY:
            more["arrival_time"] = float(request.arrival_time)
        if request.resumable:
            more["resumable"] = True
        if request.cache_salt is not None:
            more["cache_salt"] = repr(request.cache_salt)
        if request.adapter is not None:
            number = self.loras.setdefault(request.adapter, len(self.loras) + 1)
            kind = self._import("vllm.lora.request", "LoRARequest")
            name = get_lora_name(request.adapter, not RELEASE.has_tagged_names)
            more["lora_request"] = f'{kind}({name!r}, {number}, "-")'
        if request.items:
            more["mm_features"] = f"[{', '.join(map(self._write_item, request.items))}]"
        if request.prompt_embeds:
            numbers = [*request.prompt_embeds]
            more["prompt_embeds"] = f"torch.tensor({numbers!r}, dtype=torch.float64).unsqueeze(1)"
        more["max_tokens"] = request.max_tokens
        more["min_tokens"] = request.min_tokens or None
        more["stop_token_ids"] = [*request.stop_token_ids] or None
        more["skip_reading_prefix_cache"] = request.skip_reading_prefix_cache or None
        if (found := request.repetition_detection) is not None:
            kind = self._import("vllm.sampling_params", "RepetitionDetectionParams")
            sizes = (found.max_pattern_size, found.min_pattern_size, found.min_count)
            more["repetition_detection"] = f"{kind}{sizes!r}"
        prompt = [*request.prompt_token_ids]
        return show_call("make_request", repr(request.request_id), str(prompt), **more)

    def _write_item(self, item: v.MultiModalItem) -> str:
        for name in ("MultiModalFeatureSpec", "PlaceholderRange"):
            self._import("vllm.multimodal.inputs", name)
        mask = f"torch.tensor({[*item.is_embed]!r})" if item.is_embed else None
        place = show_call("PlaceholderRange", offset=item.offset, length=item.length, is_embed=mask)
        return show_call(
            "MultiModalFeatureSpec",
            data="None",
            modality='"image"',
            identifier=repr(item.identifier),
            mm_position=place,
        )

    # Ending.

    def _write_ending(self) -> tuple[str, str]:
        story = self.story
        if story.raises:
            return "", story.raises
        if self.stalls:
            check = Check("requests that never finish", UNFINISHED, [], [*story.unfinished])
            loop = LOOP.format(steps=count_steps(story))
            left = [f"answer({name}, sample({name}))\n" for name in self.in_flight]
            return "".join([*left, loop, show_ending(check)]), f"{check.what}: {check.seen!r}"
        found = find_check(ANSWERS.get(type(story.seen), ()), story.expected, story.seen)
        found = found or find_check(STATE, story.expected_state, story.state)
        if found is not None:
            return show_ending(found), f"{found.what}: {found.seen!r}, expected "
        raise UnwritableError("no answer or field of the scheduler shows it")


ANSWERS: dict[type, tuple[tuple[str, str, Any], ...]] = {
    v.Plan: PLAN,
    v.Outputs: OUTPUTS,
    v.ResetDone: RESET,
}


def require_writable(story: Story) -> None:
    """Raise UnwritableError if the story has what the scripts have no calls for."""
    config = story.config
    if config.kv_connector:
        raise UnwritableError("no script with a KV connector yet")
    for event in story.events:
        if isinstance(event, v.Submit | v.StreamingUpdate):
            if event.request.structured_output:
                raise UnwritableError("no script with a grammar yet")
            if event.request.items and not config.encoder_cache_size:
                raise UnwritableError("no script of items without an encoder")


def find_token(requests: Iterable[v.Request]) -> v.TokenId:
    """Return a token that stops none of these requests."""
    stops = {it.eos_token_id for it in requests}
    stops = stops.union(*(it.stop_token_ids for it in requests))
    return next(token for token in range(1, 1024) if token not in stops)


def count_steps(story: Story) -> int:
    """Return a number of steps in which all requests of a story finish if they ever do."""
    requests = [it.request for it in story.events if isinstance(it, v.Submit)]
    return max(STALL_STEPS, 4 * sum(len(it.prompt_token_ids) + it.max_tokens for it in requests))


def find_stall(story: Story) -> Script | None:
    """Return a script in which requests never finish after the finding of a story, if they do not.

    A wrong decision is easier to judge by what follows from it. The script is tried out.
    """
    pause = [it.pause_state for it in story.events if isinstance(it, v.SetPause)]
    submits = [it for it in story.events if isinstance(it, v.Submit)]
    if any(it.request.resumable for it in submits) or pause[-1:] not in (
        [],
        [v.PauseState.UNPAUSED],
    ):
        return None  # an idle session and a paused request wait for their clients
    script, printed = _Writer(story, stalls=True).write(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            exec(compile(script.source, "script", "exec"), {"__name__": "__main__"})  # noqa: S102
    except SystemExit as end:
        last = printed.getvalue().strip().splitlines()[-1:]
        return Script(script.source, last[0]) if end.code and last else None
    except Exception:
        return None
    return None


def write_script(story: Story) -> Script:
    """Return a script that shows a finding with vLLM alone.

    Raises:
        UnwritableError: it has events that no script can tell yet, or nothing to show for itself.
    """
    stalled = None if story.raises or story.is_stall else find_stall(story)
    return stalled or _Writer(story, stalls=story.is_stall).write()
