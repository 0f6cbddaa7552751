"""The releases of vLLM that the adapter supports, and the features of each: one table, oldest
first.

Each entry lists what changed since the entry before it, so the table reads as a history; a release
between two entries is like the older one. The table has what the adapter needs to translate events
and answers; rules that a release *decides* differently are in its profile
(`blockstep.spec.profiles`). This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from types import MappingProxyType

from blockstep.spec.profiles import read_release_number

PACKAGES: tuple[str, ...] = (
    "numpy", "cachetools", "psutil", "requests", "tqdm", "regex", "tokenizers", "safetensors",
    "pydantic", "prometheus_client", "pillow", "cloudpickle", "msgspec", "pyzmq", "cbor2", "pyyaml",
    "einops", "pybase64", "aiohttp", "openai", "openai-harmony", "diskcache", "gguf", "py-cpuinfo",
    "uvloop", "llguidance", "xgrammar", "setuptools",
)  # fmt: skip
"""The packages that importing the scheduler of any release needs. vLLM's own list would install
several GB."""
SINCE_0_18 = (*PACKAGES, "transformers<5")
UP_TO_0_16 = (
    *SINCE_0_18, "setproctitle", "blake3", "mistral_common", "opentelemetry-api", "tiktoken",
    "fastapi",
)  # fmt: skip
SINCE_0_24 = (
    *PACKAGES, "transformers>=5", "setproctitle", "blake3", "mistral_common", "opentelemetry-api",
    "tiktoken", "fastapi", "partial-json-parser",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Release:
    """The features that one release has and lacks. The defaults are those of the oldest release."""

    version: str
    packages: tuple[str, ...]
    """The packages that importing its scheduler needs, in addition to torch."""
    has_async: bool = False
    """Whether its asynchronous scheduling can be compared with the specification."""
    has_pause: bool = False
    """Whether it has `set_pause_state`."""
    has_forced_reset: bool = False
    """Whether it has `reset_prefix_cache(reset_running_requests=True)`."""
    has_sound_async_reset: bool = False
    """Whether a forced reset under asynchronous scheduling leaves no stale frames behind (#42043).
    """
    has_sound_preemption: bool = False
    """Whether a preempted request waits until its tokens in flight have been delivered (#48245)."""
    has_draft_models: bool = False
    """Whether it supports a draft model; the KV of its drafts needs lookahead slots."""
    has_drafts: bool = False
    """Whether its plans with drafts can be translated into the vocabulary."""
    has_floor: bool = False
    """Whether a request that would get a negative number of tokens is left out of a plan."""
    pads_drafts: bool = False
    """Whether a request that is admitted with one token may get placeholders for drafts (#45237).
    """
    masks_stops: bool = False
    """Whether the scheduler, and not only the sampler, holds back stop tokens until `min_tokens`.
    """
    has_skipped_waiting: bool = False
    """Whether it has a queue `skipped_waiting` for skipped requests."""
    has_repetition_detection: bool = False
    """Whether it has `SamplingParams.repetition_detection`."""
    has_plain_grammar: bool = False
    """Whether plans are made without the bitmask of a compiled grammar, which needs a backend."""
    has_cache_opt_out: bool = False
    """Whether it has `SamplingParams.skip_reading_prefix_cache`."""
    has_hashing_module: bool = False
    """Whether it has `vllm.utils.hashing`, which was `vllm.utils` before."""
    has_step_budget: bool = False
    """Whether it has `SchedulerConfig.max_num_scheduled_tokens`: a budget below the model length.
    """
    has_sound_counters: bool = False
    """Whether the prefix cache counts admitted requests only, and not every attempt (#43736,
    #48860)."""
    has_countable_attempts: bool = False
    """Whether attempts that fail can be told apart in what the prefix cache counts."""
    has_preempted_counts: bool = False
    """Whether the prefix cache counts requests that were preempted before separately."""
    has_prefill_stats: bool = False
    """Whether cached tokens are reported once, with the first output, and not kept in the request.
    """
    has_offsets: bool = False
    """Whether the position of an item in its block is part of the block's digest (#36708)."""
    has_exact_ends: bool = False
    """Whether the digest of a block that outputs complete leaves out an item that ends where the
    block begins."""
    has_all_items: bool = False
    """Whether the digest of a block that outputs complete has all items of the block, not only the
    last one."""
    has_named_embeds: bool = False
    """Whether embeddings are part of a digest (#27219); without it, its front end disables caching
    for them."""
    has_tagged_names: bool = False
    """Whether a digest distinguishes an adapter from a cache salt with the same text."""
    has_chunk_flag: bool = False
    """Whether it has `Request.is_prefill_chunk`."""
    has_sound_priority: bool = False
    """Whether PRIORITY can run: the first release compares requests of equal priority, and keeps a
    victim's row in the step (#23347, #28558)."""
    takes_arrays: bool = False
    """Whether answers hold the tokens of a row as an array."""
    has_row_outputs: bool = False
    """Whether rows contain the outputs that the worker may have missed."""
    has_preemption_list: bool = False
    """Whether plans list the preempted requests."""
    has_mixed_groups: bool = False
    """Whether KV-cache groups may be of any kinds and block sizes, in any order.

    The first releases find hits only if groups of full attention and of one other kind, with one
    block size, are next to each other."""
    keeps_doubtful_blocks: bool = False
    """Whether a sliding window keeps the blocks that it reads if drafts in flight are rejected."""
    publishes_no_null_block: bool = False
    """Whether blocks that a window has left before they are published get no key."""
    has_group_gate: bool = False
    """Whether a sliding window reserves only the blocks that it holds at one time, not those of a
    whole prompt (#39734)."""
    has_recurrent_groups: bool = False
    """Whether the adapter supports its recurrent groups."""
    has_partial_hits: bool = False
    """Whether parts of a larger block are published, too.

    A hit may then end inside of a block next to recurrent groups, which keep states at the ends of
    chunks only (there is no mode `all`)."""
    has_common_prefix: bool = True
    """Whether plans contain the number of blocks that all running requests share."""
    has_frame_masks: bool = False
    """Whether a mask is requested per frame, and cuts the drafts that stay with the worker."""
    has_fixed_mask_rows: bool = False
    """Whether each request has as many mask rows as the maximal number of drafts needs, used or
    not."""
    hands_stops_over: bool = False
    """Whether a grammar is compiled with the stop tokens of its request."""
    survives_bad_grammars: bool = False
    """Whether a grammar that fails ends its request in a later step, instead of ending the engine.
    """
    has_encoder: bool = False
    """Whether the adapter supports its encoder cache."""
    has_offers: bool = False
    """Whether it has EC connectors, and an encoder cache that counts embeddings and can be reset.
    """
    has_across: bool = False
    """Whether the adapter supports its encoder-decoder models."""
    has_events: bool = False
    """Whether the adapter reads its KV events."""
    has_event_groups: bool = False
    """Whether a KV event contains the group of its blocks."""
    has_store: bool = False
    """Whether the adapter supports KV connectors: the release takes `Store`, and its loads are
    read."""
    follows_store: bool = False
    """Whether its profile models a KV connector; if not, only hunts use one."""
    frees_behind_frames: bool = False
    """Whether, with a connector, blocks are freed only after all frames in flight have been
    answered."""
    takes_loads_by_turns: bool = False
    """Whether a group takes blocks for what is loaded before the next one holds its hit."""
    loads_no_aligned_states: bool = False
    """Whether it asserts that nothing is loaded where states are kept at the ends of chunks."""
    asserts_on_shared_failures: bool = False
    """Whether a load of all known tokens that fails only by blocks that fail for an earlier request
    as well leaves no token to compute, which it asserts there is."""
    counts_held_as_ended: bool = False
    """Whether a finished request whose blocks are held for a connector counts as work of the
    engine."""
    ignores_offers_without_cache_reads: bool = False
    """Whether the connector is asked about requests that skip reading the prefix cache, and its
    offer is ignored."""
    has_sessions: bool = False
    """Whether it has `Request.resumable`, and chunks that are added under an id in use."""
    has_sound_sessions: bool = False
    """Whether a session that stops leaves nothing behind: no tokens in flight, and no place in a
    queue."""
    has_holding_queue: bool = False
    """Whether it has a queue for waiting requests that hold blocks, as sessions do."""
    has_sound_lora_slots: bool = False
    """Whether a running request keeps the LoRA slot of its adapter even without a row in the step.
    """
    shows_work: bool = False
    """Whether its profile models `has_requests`, which decides whether the engine's loop sleeps."""
    has_equal_groups: bool = False
    """Whether several groups may all be equal."""

    @property
    def profile(self) -> str:
        """Return the name of its profile."""
        return f"vllm-{self.version}"


_OLDEST = Release("0.11.0", UP_TO_0_16, has_encoder=True)
_NOT_TRIED_IN_0_20 = """
    has_countable_attempts has_recurrent_groups has_sessions has_frame_masks has_encoder has_offers
    has_across has_events has_store follows_store shows_work
"""
_HISTORY = (
    (
        "0.11.1",
        """takes_arrays has_hashing_module has_cache_opt_out masks_stops has_plain_grammar
        has_row_outputs has_preempted_counts has_named_embeds""",
        "has_encoder",  # not tried there
    ),
    (
        "0.12.0",
        "has_async has_forced_reset has_sound_priority has_drafts has_preemption_list",
        "takes_arrays",
    ),
    ("0.14.0", "publishes_no_null_block", ""),
    ("0.15.0", "has_draft_models", ""),
    ("0.16.0", "has_chunk_flag", ""),
    ("0.17.0", "has_pause has_repetition_detection has_step_budget", ""),
    ("0.18.0", "has_skipped_waiting", ""),
    (
        "0.19.0",
        """has_offsets has_exact_ends has_mixed_groups has_recurrent_groups has_sessions
        has_frame_masks has_encoder has_offers has_across has_events has_store follows_store
        shows_work takes_loads_by_turns loads_no_aligned_states has_countable_attempts
        asserts_on_shared_failures""",
        "",
    ),
    ("0.20.0", "has_prefill_stats has_group_gate", _NOT_TRIED_IN_0_20),
    ("0.24.0", "has_partial_hits", "takes_loads_by_turns loads_no_aligned_states"),
    ("0.25.0", "pads_drafts", ""),
    ("0.26.0", "keeps_doubtful_blocks", ""),
    ("0.27.0", "has_sound_async_reset has_sound_counters has_sound_preemption", ""),
    ("0.28.0", "has_floor", ""),
    ("0.29.0", "", "masks_stops"),
    ("0.31.0", "has_all_items has_tagged_names", "has_skipped_waiting"),
    (
        "0.33.0",
        """has_recurrent_groups has_across has_equal_groups has_fixed_mask_rows has_frame_masks
        hands_stops_over survives_bad_grammars has_sessions has_sound_sessions has_holding_queue
        has_sound_lora_slots has_encoder has_offers has_events has_event_groups has_store
        frees_behind_frames counts_held_as_ended ignores_offers_without_cache_reads""",
        "has_common_prefix asserts_on_shared_failures",
    ),
)
"""The fields of `Release` that each release has, and those that it has no more."""
_PACKAGES_SINCE = {"0.18.0": SINCE_0_18, "0.24.0": SINCE_0_24}


def _build_table() -> Mapping[str, Release]:
    table = [_OLDEST]
    for version, gained, lost in _HISTORY:
        changes = dict.fromkeys(gained.split(), True) | dict.fromkeys(lost.split(), False)
        packages = _PACKAGES_SINCE.get(version, table[-1].packages)
        table.append(replace(table[-1], version=version, packages=packages, **changes))
    return MappingProxyType({release.version: release for release in table})


RELEASES: Mapping[str, Release] = _build_table()
"""The releases with an entry of their own, by version."""
TRIED: tuple[str, ...] = (
    *("0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1"),
    *("0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1"),
    *("0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0"),
    *("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
"""Releases that were checked against the specification under their profile, oldest first."""
REFERENCE = "0.19.1"
"""The release that the specification follows unless a property decides otherwise."""


def get_installed_version() -> str | None:
    """Return the version of vLLM in this environment, or None.

    Does not import vLLM, which takes seconds.
    """
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def get_release(version: str) -> Release | None:
    """Return the features of a release, from the entry that it belongs to; None if it is too old.

    A local part (`0.19.1+cpu`) says how it was built, and is ignored.
    """
    public = version.partition("+")[0]
    entry = _find_newest(public, tuple(RELEASES))
    return None if entry is None else replace(RELEASES[entry], version=public)


def get_release_note(version: str) -> str | None:
    """Return the note of a run on a release that was not tried; None if it was."""
    public = version.partition("+")[0]
    known = None if public in TRIED else _find_newest(public, TRIED)
    if known is None:
        return None
    return f"vLLM {public} was not tried; it is held to what is known of {known}"


def _find_newest(version: str, versions: tuple[str, ...]) -> str | None:
    """Return the newest of `versions`, which are in order, that is not newer than `version`."""
    number = read_release_number(version)
    if number is None:
        return None
    older = [one for one in versions if (read_release_number(one) or number) <= number]
    return older[-1] if older else None


def get_release_problem(version: str | None) -> str | None:
    """Return why this version of vLLM cannot be checked; None if it can.

    The version None means that vLLM is not installed.
    """
    if version is not None and get_release(version) is not None:
        return None
    found = "vLLM is not installed" if version is None else f"vLLM {version} is not supported"
    if version is not None and read_release_number(version) is None:
        return (
            f"{found}: this version, as a build from a clone without tags has one, names no "
            "release; name the release that your code follows when you install it, as in "
            f"`SETUPTOOLS_SCM_PRETEND_VERSION={REFERENCE}+fork pip install .`"
        )
    return (
        f"{found}; the adapter follows {TRIED[0]} and what came after it: "
        f"`make vllm VLLM={REFERENCE}` installs one in addition to .venv and runs the check there"
    )


def require_release(error: ImportError | None = None) -> Release:
    """Return the installed release.

    Args:
        error: What importing it raised, if anything.

    Raises:
        ImportError: a message of one line; `load_engine` passes it on.
    """
    version = get_installed_version()
    problem = get_release_problem(version)
    if problem is None and error is not None:
        problem = (
            f"vLLM {version} is installed but cannot be imported ({error}): "
            f"`make vllm VLLM={version}` makes an environment with what its scheduler needs"
        )
    release = None if version is None else get_release(version)
    if release is None or problem is not None:
        raise ImportError(problem) from error
    return release
