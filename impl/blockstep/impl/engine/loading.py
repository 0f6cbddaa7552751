"""Loading: from a folder and settings to a runner; everything is checked before it is allocated.

config.json -> groups -> bytes per block -> blocks -> Config of the scheduler -> caches -> runner
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Tokenizer

from blockstep.impl.capabilities import list_config_problems
from blockstep.impl.engine.adapters import LayerAdapters, stack_adapters
from blockstep.impl.engine.block_transfers import Mover, ThreadJobs
from blockstep.impl.engine.cache import PagedCache, compute_num_blocks, get_block_bytes
from blockstep.impl.engine.checkpoint import ModelWeights, load_weights
from blockstep.impl.engine.config import DTYPES, ModelConfig, load_config
from blockstep.impl.engine.connector import Connector, KVRole
from blockstep.impl.engine.detokenizer import load_tokenizer
from blockstep.impl.engine.errors import SettingsError
from blockstep.impl.engine.graphs import GraphedModel
from blockstep.impl.engine.groups import LayerGroup, get_kv_groups, group_layers
from blockstep.impl.engine.lora import get_modules, load_lora
from blockstep.impl.engine.model import Model
from blockstep.impl.engine.runner import Runner
from blockstep.impl.engine.schedulers import SCHEDULERS
from blockstep.impl.engine.settings import Settings
from blockstep.impl.engine.speculation import DraftModelProposer, NgramProposer, Proposer
from blockstep.impl.engine.store import KVStore, identify_folder
from blockstep.impl.host.state import count_most_blocks, make_groups
from blockstep.spec.vocabulary import (
    Config,
    SpecMethod,
    config_problems,
)

CPU_CACHE_BYTES = 1 << 30
"""Maximum size of the cache on a CPU by default."""
GPU_FREE_SHARE = 0.85
"""Share of the GPU memory left after loading that the cache takes by default."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run."""

    config: Config
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    runner: Runner


def load_engine(folder: Path, settings: Settings, kv_store: KVStore | None = None) -> Loaded:
    """Load model, draft model, adapters, tokenizer and caches; return them with the config.

    Raises:
        CheckpointError: a folder holds no model that can be run.
        SettingsError: settings contradict each other, the model or the machine.
    """
    device = _get_device(settings.device)
    model_config = load_config(folder)
    draft_folder = _get_draft_folder(settings)
    draft_config = None if draft_folder is None else load_config(draft_folder)
    dtype = _get_dtype(settings, model_config)
    models = [model_config] if draft_config is None else [model_config, draft_config]
    if draft_config is not None and draft_config.vocab_size != model_config.vocab_size:
        raise SettingsError(
            f"draft_model: has {draft_config.vocab_size} tokens and the model "
            f"{model_config.vocab_size}; use one with the same tokenizer"
        )
    tokenizer = load_tokenizer(folder)
    reasoning_end = _get_reasoning_end(settings, tokenizer, model_config.vocab_size)
    groups = get_groups(settings, models)
    has_store = kv_store is not None
    # Report impossible settings before gigabytes are read.
    planned = get_config(settings, models, groups, dtype, device, reasoning_end, has_store)
    _expect_scheduler(settings, planned)
    adapters = _load_adapters(settings, model_config, dtype, device)
    weights = load_weights(folder, model_config, dtype, device)
    draft_weights = None
    if draft_config is not None and draft_folder is not None:
        draft_weights = load_weights(draft_folder, draft_config, dtype, device)
    # Count blocks again, now that the weights have taken their memory.
    config = get_config(settings, models, groups, dtype, device, reasoning_end, has_store)

    def build(
        place: int, its_weights: ModelWeights, its_adapters: tuple[LayerAdapters, ...] = ()
    ) -> Model:
        shape, layers = models[place], [group.layers[place] for group in groups]
        cache = PagedCache(shape, layers, config.num_blocks, config.block_size, dtype, device)
        if device == "cpu":
            return Model(shape, its_weights, cache, config.max_model_len, its_adapters)
        return GraphedModel(
            shape, its_weights, cache, config.max_model_len, config.max_num_seqs, len(groups),
            its_adapters,
        )  # fmt: skip

    proposer: Proposer | None = None
    if settings.spec_method is SpecMethod.NGRAM:
        proposer = NgramProposer(config.num_speculative_tokens)
    elif draft_weights is not None:
        proposer = DraftModelProposer(build(1, draft_weights), config.num_speculative_tokens)
    model = build(0, weights, adapters)
    drafts = proposer.model if isinstance(proposer, DraftModelProposer) else None
    for one in (model, drafts):
        if isinstance(one, GraphedModel):
            one.capture_all()
    connector = None
    if kv_store is not None:
        caches = [one.cache for one in (model, drafts) if one is not None]
        folders = [folder] if draft_folder is None else [folder, draft_folder]
        connector = make_connector(kv_store, settings, config, dtype, folders, caches)
    runner = Runner(config, model, proposer, device, tuple(settings.lora_modules), connector)
    return Loaded(config, model_config, tokenizer, runner)


def _expect_scheduler(settings: Settings, config: Config) -> None:
    """Raise `SettingsError` if the chosen scheduler lacks what the settings need."""
    name, capabilities = settings.scheduler, SCHEDULERS[settings.scheduler]
    if settings.enable_sessions and "sessions" not in capabilities:
        raise SettingsError(f"scheduler = {name!r}: has no sessions; use host")
    problems = list_config_problems(config, capabilities)
    if problems:
        text = "; ".join(f"{one.field}: {one.rule}; {one.fix}" for one in problems)
        raise SettingsError(f"scheduler = {name!r}: {text}, or use host")


def make_connector(
    store: KVStore,
    settings: Settings,
    config: Config,
    dtype: torch.dtype,
    folders: Sequence[Path],
    caches: Sequence[PagedCache],
) -> Connector:
    """Build the connector between an engine of the models in `folders` and its store."""
    parts = [*map(identify_folder, folders), str(dtype), str(config.block_size)]
    modules = settings.lora_modules.items()
    return Connector(
        store,
        Mover(caches),
        ThreadJobs(),
        config.block_size,
        sha256(" ".join(parts).encode()).digest(),
        {name: identify_folder(Path(adapter)) for name, adapter in modules},
        settings.kv_role,
        settings.enable_async_kv_loads,
    )


def _get_reasoning_end(
    settings: Settings, tokenizer: Tokenizer | None, vocab_size: int
) -> int | None:
    """Return the id of the token that ends reasoning; None if the settings name none."""
    token = given = settings.reasoning_end_token
    if isinstance(given, str):
        token = None if tokenizer is None else tokenizer.token_to_id(given)
    elif given is None:
        return None
    if type(token) is not int or not 0 <= token < vocab_size:
        raise SettingsError(
            f"reasoning_end_token = {given!r}: is not a token of the model; give the text of one "
            f"that its tokenizer.json has, or an id below {vocab_size}"
        )
    return token


def _load_adapters(
    settings: Settings, model: ModelConfig, dtype: torch.dtype, device: str
) -> tuple[LayerAdapters, ...]:
    """Return what all adapters add, per layer; empty without adapters."""
    if not settings.lora_modules:
        return ()
    folders, rank = map(Path, settings.lora_modules.values()), settings.max_lora_rank
    loras = [load_lora(folder, model, rank, dtype, device) for folder in folders]
    return stack_adapters(loras, model.num_layers, get_modules(model))


def get_groups(settings: Settings, models: list[ModelConfig]) -> tuple[LayerGroup, ...]:
    """Return the groups of layers that share block tables.

    Raises:
        SettingsError: `max_model_len` exceeds that of a model.
    """
    trained = min(model.max_model_len for model in models)
    if settings.max_model_len is not None and settings.max_model_len > trained:
        raise SettingsError(
            f"max_model_len = {settings.max_model_len}: the model was made for {trained} "
            "positions; give no more"
        )
    one_for_all = settings.disable_hybrid_kv_cache_manager
    return group_layers(models, settings.max_model_len or trained, one_for_all=one_for_all)


def get_config(
    settings: Settings,
    models: list[ModelConfig],
    groups: tuple[LayerGroup, ...],
    dtype: torch.dtype,
    device: str,
    reasoning_end: int | None = None,
    has_store: bool = False,
) -> Config:
    """Return the scheduler's config: blocks from memory, and lengths that models and cache allow.

    Raises:
        SettingsError: memory for fewer than two blocks, or a problem that `config_problems` finds.
    """
    trained = min(model.max_model_len for model in models)
    num_frames = settings.max_frames_in_flight
    if num_frames is None:
        num_frames = _get_num_frames(settings, device, has_store)
    config = Config(
        num_blocks=settings.num_blocks or 2,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len or max(trained, 2),
        policy=settings.policy,
        enable_prefix_caching=settings.enable_prefix_caching,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        scheduler_reserve_full_isl=settings.scheduler_reserve_full_isl,
        spec_method=settings.spec_method,
        num_speculative_tokens=settings.num_speculative_tokens,
        max_frames_in_flight=num_frames,
        async_scheduling=num_frames > 1,
        groups=get_kv_groups(groups, settings.block_size),
        max_loras=settings.max_loras,
        reasoning_end_token_id=reasoning_end,
        enable_in_reasoning=settings.enable_in_reasoning,
        enable_forks=settings.enable_forks,
    )
    if has_store:
        config = _beside_store(config, _get_swap(settings, models, groups, dtype), settings)
    elif settings.swap_min_tokens or settings.swap_speeds:
        raise SettingsError("swap_min_tokens, swap_speeds: need a store; give a kv_store")
    _expect_no_problem(config)
    kinds = make_groups(config)

    def count_held(num_tokens: int) -> int:
        return count_most_blocks(kinds, num_tokens, 0)

    num_blocks = settings.num_blocks
    if num_blocks is None:
        block_bytes = get_block_bytes(models, groups, settings.block_size, dtype)
        num_blocks = compute_num_blocks(_get_cache_bytes(settings, device), block_bytes)
        if settings.kv_cache_bytes is None:
            most = settings.max_num_seqs * count_held(config.max_model_len) + 1
            num_blocks = max(min(num_blocks, most), 2)
    # The longest request whose blocks fit the pool at every step.
    capacity = bisect_right(range(trained + 1), num_blocks - 1, key=count_held) - 1
    config = replace(
        config,
        num_blocks=num_blocks,
        max_model_len=settings.max_model_len or max(capacity, 2),
        enable_chunked_prefill=settings.enable_chunked_prefill,
        admission_low_blocks=settings.admission_low_blocks,
        admission_high_blocks=settings.admission_high_blocks,
    )
    _expect_no_problem(config)
    return config


def _get_num_frames(settings: Settings, device: str, has_store: bool) -> int:
    """Return the default of `max_frames_in_flight`."""
    has_drafts = settings.spec_method is not SpecMethod.NONE
    return 1 if device == "cpu" or has_drafts or settings.enable_forks or has_store else 2


def _beside_store(config: Config, swap_min_tokens: int, settings: Settings) -> Config:
    if config.groups:
        raise SettingsError(
            f"kv_store: a store keeps one KV group, and the layers make {len(config.groups)} or "
            "forget tokens; give disable_hybrid_kv_cache_manager=True"
        )
    return replace(
        config,
        kv_connector=True,
        kv_load_failure_policy=settings.kv_load_failure_policy,
        swap_min_tokens=swap_min_tokens,
    )


def _get_swap(
    settings: Settings,
    models: list[ModelConfig],
    groups: tuple[LayerGroup, ...],
    dtype: torch.dtype,
) -> int:
    """Return `Config.swap_min_tokens`: as given, or the length from which a swap-out pays."""
    least = settings.swap_min_tokens or 0
    if settings.swap_speeds is not None:
        block_bytes = get_block_bytes(models, groups, settings.block_size, dtype)
        least = settings.swap_speeds.get_break_even(block_bytes, settings.block_size) or 0
    if least and settings.kv_role is not KVRole.BOTH:
        raise SettingsError(
            f"swap_min_tokens = {least}: the engine must save to the store and load from it; "
            "give kv_role = 'kv_both', or 0"
        )
    return least


def _expect_no_problem(config: Config) -> None:
    problems = config_problems(config)
    if problems:
        raise SettingsError("\n".join(map(str, problems)))


def _get_cache_bytes(settings: Settings, device: str) -> int:
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0] * GPU_FREE_SHARE)
    return CPU_CACHE_BYTES


def _get_device(name: str) -> str:
    if name not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device = {name!r}: must be auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise SettingsError("device = 'cuda': torch sees no GPU here; use cpu")
    if find_spec("triton") is None:
        raise SettingsError(
            f"device = {name!r}: a GPU needs Triton, which is not installed; install "
            "'blockstep[gpu]', or use cpu"
        )
    return "cuda"


def _get_dtype(settings: Settings, model: ModelConfig) -> torch.dtype:
    name = model.dtype if settings.dtype == "auto" else settings.dtype
    if name not in DTYPES:
        raise SettingsError(f"dtype = {name!r}: must be auto or one of {DTYPES}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _get_draft_folder(settings: Settings) -> Path | None:
    wants = settings.spec_method is SpecMethod.DRAFT_MODEL
    if wants != (settings.draft_model is not None):
        raise SettingsError("draft_model: must be given if and only if spec_method is draft_model")
    if settings.spec_method is SpecMethod.EAGLE:
        raise SettingsError("spec_method = 'eagle': is not supported; use ngram or draft_model")
    return None if settings.draft_model is None else Path(settings.draft_model)
