"""Settings: how a model is run, and the valid values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blockstep.impl.engine.connector import KVRole
from blockstep.impl.engine.errors import SettingsError
from blockstep.impl.engine.schedulers import SCHEDULERS
from blockstep.impl.tiers import SwapSpeeds
from blockstep.spec.vocabulary import KVLoadFailurePolicy, Policy, SpecMethod


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an engine, with the names of vLLM and of `Config`."""

    dtype: str = "auto"
    """float32, float16 or bfloat16; auto: the dtype of the saved weights."""
    device: str = "auto"
    """cpu or cuda; auto: a GPU if there is one."""
    kv_cache_bytes: int | None = None
    """Memory for all caches; None: at most 1 GiB on a CPU, most of the free memory on a GPU."""
    num_blocks: int | None = None
    """Blocks instead of bytes, the null block included."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    """Maximum of prompt and output tokens; None: as many as model and cache allow."""
    policy: Policy = Policy.FCFS
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    """True: one block table for all layers; layers with a sliding window keep the KV of all tokens.
    """
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    spec_method: SpecMethod = SpecMethod.NONE
    """ngram or draft_model."""
    num_speculative_tokens: int = 0
    draft_model: str | Path | None = None
    """Folder of the draft model; its vocabulary must be that of the model."""
    max_frames_in_flight: int | None = None
    """2: the next step is planned and launched before the tokens of this one are known
    (asynchronous scheduling). None: 1 on a CPU and with drafts, forks or a KV store, which need the
    tokens first; else 2."""
    lora_modules: Mapping[str, str | Path] = field(default_factory=dict)
    """Folders of LoRA adapters, by the names that requests use. All are kept in memory."""
    max_lora_rank: int = 16
    """Adapters of a higher rank are refused."""
    max_loras: int = 0
    """Maximum number of different adapters among running requests; 0: unlimited."""
    reasoning_end_token: str | int | None = None
    """The token that ends reasoning, as a text or an id: grammars apply only after it."""
    enable_in_reasoning: bool = False
    """True: grammars apply while the model reasons, too."""
    enable_forks: bool = False
    """Whether requests may fork: needed for `SamplingParams.n` and beam search."""
    enable_sessions: bool = False
    """Whether sessions are allowed, which the scheduler on the device lacks."""
    kv_role: KVRole = KVRole.BOTH
    """The engine's role with respect to its KV store, if it has one."""
    kv_load_failure_policy: KVLoadFailurePolicy = KVLoadFailurePolicy.RECOMPUTE
    """Whether a request whose KV cannot be loaded fails or is computed again."""
    enable_async_kv_loads: bool = False
    """Whether other requests are served while KV is loaded; otherwise the step waits for it."""
    swap_min_tokens: int | None = None
    """Computed tokens from which the KV of a preempted request is saved in the store; 0: never.
    None: the length from which loading is faster than computing again, by `swap_speeds`."""
    swap_speeds: SwapSpeeds | None = None
    """Measured speeds of store and model; None: unknown, and nothing is saved."""
    admission_low_blocks: int = 0
    """When fewer blocks are free, admission closes until `admission_high_blocks` are free."""
    admission_high_blocks: int = 0
    """0: admission is always open."""
    scheduler: str = "host"
    """host or device. With device, steps stay on the device while no request asks for log
    probabilities or a grammar."""
    steps_per_fence: int = 16
    """Most steps of the device's scheduler before the host reads their results. New requests wait
    for them; on a GPU they may wait for twice as many."""
    seed: int = 0
    """Seed from which the seeds of requests without one are derived."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("policy", Policy), ("spec_method", SpecMethod), ("kv_role", KVRole),
            ("kv_load_failure_policy", KVLoadFailurePolicy),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in list(kind):
                known = ", ".join(kind)
                raise SettingsError(f"{name} = {value!r}: must be one of {known}")
            object.__setattr__(self, name, kind(value))
        for name in (
            "block_size", "max_num_seqs", "kv_cache_bytes", "num_blocks", "max_model_len",
            "max_lora_rank", "steps_per_fence", "max_frames_in_flight",
        ):  # fmt: skip
            value = getattr(self, name)
            left_out = value is None and name in (
                "kv_cache_bytes", "num_blocks", "max_model_len", "max_frames_in_flight",
            )  # fmt: skip
            if not left_out and (type(value) is not int or value < 1):
                raise SettingsError(f"{name} = {value!r}: must be an int of at least 1")
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise SettingsError("num_blocks and kv_cache_bytes: each sets the other; give one")
        for name in (
            "enable_forks", "enable_sessions", "enable_in_reasoning", "enable_async_kv_loads",
            "disable_hybrid_kv_cache_manager",
        ):  # fmt: skip
            if type(getattr(self, name)) is not bool:
                raise SettingsError(f"{name} = {getattr(self, name)!r}: must be a bool")
        if self.swap_min_tokens is not None and self.swap_speeds is not None:
            raise SettingsError("swap_min_tokens and swap_speeds: one sets the other; give one")
        if self.scheduler not in SCHEDULERS:
            known = ", ".join(SCHEDULERS)
            raise SettingsError(f"scheduler = {self.scheduler!r}: must be one of {known}")
        modules = self.lora_modules
        if not isinstance(modules, Mapping) or not all(
            isinstance(name, str) and name and isinstance(folder, str | Path)
            for name, folder in modules.items()
        ):
            raise SettingsError(
                f"lora_modules = {modules!r}: must be a mapping of names to folders"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise SettingsError(f"seed = {self.seed!r}: must be from 0 to 2**32 - 1")
