"""The scheduler and block manager of a nano-vllm checkout, behind the Engine protocol.

Its modules are imported as they are, and its results are translated without repair. That needs
`xxhash` and `numpy`, but no torch, model or GPU: replacements are given for an `__init__` that
would import the model, and `nanovllm.config`, which would import transformers.

It decides differently on purpose (prefill first), so it is checked at the equivalence `safety`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

from blockstep.conformance.engine import Capability, EngineFault, EngineTraits, Safety, show_state
from blockstep.conformance.engines.adapters.nano_vllm_script import write_script
from blockstep.spec import vocabulary as v

EOS = 1  # one for the whole engine: a request can only ignore it

_FOUND = find_spec("nanovllm") if "nanovllm" not in sys.modules else None
if _FOUND is not None and _FOUND.submodule_search_locations is not None:
    package, config_module = ModuleType("nanovllm"), ModuleType("nanovllm.config")
    package.__path__ = list(_FOUND.submodule_search_locations)
    config_module.__dict__["Config"] = SimpleNamespace
    sys.modules.update({"nanovllm": package, "nanovllm.config": config_module})

Scheduler: Any = import_module("nanovllm.engine.scheduler").Scheduler
Sequence: Any = import_module("nanovllm.engine.sequence").Sequence
SamplingParams: Any = import_module("nanovllm.sampling_params").SamplingParams


def fit_config(config: v.Config) -> v.Config:
    """Return the nearest config: no options, blocks of two tokens or more, a token per decoding
    row.
    """
    return v.Config(
        num_blocks=config.num_blocks,
        block_size=max(config.block_size, 2),
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
    )


def fit_request(request: v.Request, config: v.Config) -> v.Request:
    """Return a request with a prompt, a length within the model's, and one end-of-sequence
    token.
    """
    room = max(config.max_model_len - len(request.prompt_token_ids), 1)
    eos, length = None if request.eos_token_id is None else EOS, min(request.max_tokens, room)
    return v.Request(request.request_id, request.prompt_token_ids, length, eos_token_id=eos)


class NanoVllm:
    """nano-vllm's scheduler as a system under test."""

    # Its `max_num_seqs` limits a step: it prefills while other running requests get no row.
    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request, has_slots=False), write_script=write_script
    )

    def __init__(self, config: v.Config) -> None:
        sizes = {"kvcache_block_size": config.block_size}
        sizes["num_kvcache_blocks"] = config.num_usable_blocks  # it has no null block
        self.scheduler = Scheduler(SimpleNamespace(**asdict(config), **sizes, eos=EOS))
        # The block size belongs to the class, so each run has its own class. `planned_blocks` has
        # the blocks that plans have sent: None before the first plan, [] after a preemption.
        extra = {"block_size": config.block_size, "planned_blocks": None}
        self.new_sequence = type("Run", (Sequence,), extra)
        self.sequences: dict[v.RequestId, Any] = {}
        self.last_rows: list[Any] = []
        self.ended: list[v.RequestId] = []
        self.frame: tuple[list[Any], bool] | None = None
        self.num_frames = 0
        self.key_of: dict[int, v.BlockKey] = {}
        """The block key of each digest."""

    def capabilities(self) -> frozenset[str]:
        """Return what it implements: it shows its state, and takes three events only."""
        return frozenset({Capability.SNAPSHOT})

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event."""
        match event:
            case v.Submit(request=request):
                ignore_eos = request.eos_token_id is None
                params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=ignore_eos)
                sequence = self.new_sequence(list(request.prompt_token_ids), params)
                sequence.request = request
                self.sequences[request.request_id] = sequence
                self.scheduler.add(sequence)
                return v.Ack()
            case v.Schedule():
                return self._schedule()
            case v.Commit(sampled=sampled) if self.frame is not None:
                return self._commit({row.request_id: row.token_ids for row in sampled}, *self.frame)
        raise EngineFault(f"not for nano-vllm: {event!r}")

    def _schedule(self) -> v.Plan:
        sequences, is_prefill = [], False
        if not self.scheduler.is_finished():  # its own loop checks this before each step
            self.frame = sequences, is_prefill = self.scheduler.schedule()
        preempted = [
            name
            for name, sequence in sorted(self.sequences.items())
            if sequence.planned_blocks
            and sequence.block_table[: len(sequence.planned_blocks)] != sequence.planned_blocks
        ]
        for name in preempted:
            self.sequences[name].planned_blocks = []
        rows = [self._row(sequence, is_prefill) for sequence in sequences]
        for sequence in sequences:
            sequence.planned_blocks = list(sequence.block_table)
        ended, self.ended, self.last_rows = self.ended, [], sequences
        self.num_frames += 1
        return v.Plan(
            frame_id=self.num_frames - 1,
            new=tuple(row for row in rows if isinstance(row, v.NewRow)),
            cached=tuple(row for row in rows if isinstance(row, v.CachedRow)),
            finished_req_ids=tuple(sorted(ended)),
            preempted_req_ids=tuple(preempted),
        )

    def _row(self, sequence: Any, is_prefill: bool) -> v.NewRow | v.CachedRow:
        planned, count = sequence.planned_blocks, sequence.num_scheduled_tokens
        # where its runner starts: at the last token for a decode, or if all was hit before f64d821
        last = len(sequence) - 1
        first = min(sequence.num_cached_tokens, last) if is_prefill else last
        if planned is None:
            return v.NewRow(sequence.request, (_ours(sequence.block_table),), first, count)
        is_known = planned and sequence in self.last_rows
        name, tables = sequence.request.request_id, (_ours(sequence.block_table[len(planned) :]),)
        tokens = None if is_known else tuple(sequence.token_ids)
        num_outputs = sequence.num_completion_tokens
        return v.CachedRow(name, not planned, tables, tokens, first, num_outputs, count)

    def _commit(
        self, sampled: dict[str, v.TokenIds], rows: list[Any], is_prefill: bool
    ) -> v.Outputs:
        self.frame, counts = None, [sequence.num_completion_tokens for sequence in rows]
        # Its sampler returns a token for every row, even in the middle of a prefill.
        tokens = [(*sampled[sequence.request.request_id], EOS)[0] for sequence in rows]
        self.scheduler.postprocess(rows, tokens, is_prefill)
        outputs = []
        for sequence, count in zip(rows, counts, strict=True):
            name, gained = sequence.request.request_id, tuple(sequence.completion_token_ids[count:])
            reason = None
            if sequence.is_finished:
                is_stop = not sequence.ignore_eos and gained[-1:] == (EOS,)
                reason = v.FinishReason.STOP if is_stop else v.FinishReason.LENGTH
                self.ended.append(name)
                del self.sequences[name]
            if gained or reason:
                outputs.append(v.OutputRow(name, gained, reason))
        return v.Outputs(tuple(outputs))

    def _learn_keys(self, tokens: v.TokenIds, size: int) -> None:
        """Record the keys of the digests of full blocks of these tokens."""
        digest, key = -1, None
        for end in range(size, len(tokens) + 1, size):
            block = tokens[end - size : end]
            digest = self.scheduler.block_manager.compute_hash(list(block), digest)
            key = self.key_of.setdefault(digest, v.BlockKey(key, block))

    def snapshot(self) -> v.Snapshot:
        """Return its state in canonical form; block ids are one higher, since it has no null
        block.
        """
        manager, requests = self.scheduler.block_manager, []
        for name, sequence in sorted(self.sequences.items()):
            self._learn_keys(tuple(sequence.token_ids), sequence.block_size)
            waits = v.Status.WAITING if sequence.planned_blocks is None else v.Status.PREEMPTED
            # before f64d821 a token counts as cached as soon as it is sampled
            count, length = sequence.num_scheduled_tokens, len(sequence)
            num_computed = min(sequence.num_cached_tokens + count, length if count else length - 1)
            requests.append(
                v.RequestSnapshot(
                    request_id=name,
                    # a request with blocks that was left out of the plan waits, with its blocks
                    status=v.Status.RUNNING
                    if sequence.block_table and sequence.planned_blocks
                    else waits,
                    output_token_ids=tuple(sequence.completion_token_ids),
                    num_computed_tokens=num_computed,
                    block_tables=(_ours(sequence.block_table),),
                )
            )
        found, unknown = (
            manager.hash_to_block_id,
            v.BlockKey(None, ()),
        )  # the key of unknown content
        keys = [
            self.key_of.get(block.hash, unknown) if found.get(block.hash) == index else None
            for index, block in enumerate(manager.blocks)
        ]
        return show_state(
            requests,
            waiting=[sequence.request.request_id for sequence in self.scheduler.waiting],
            running=[sequence.request.request_id for sequence in self.scheduler.running],
            ref_counts=(0, *(block.ref_count for block in manager.blocks)),
            free_queue=_ours(manager.free_block_ids),
            block_keys=(None, *keys),
            num_frames_in_flight=int(self.frame is not None),
            has_work=not self.scheduler.is_finished(),
        )


def _ours(blocks: Iterable[int]) -> tuple[v.BlockId, ...]:
    return tuple(block + 1 for block in blocks)
