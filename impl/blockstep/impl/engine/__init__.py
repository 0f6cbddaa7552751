"""The model engine turns a checkpoint and prompts into tokens; the host engine is its scheduler.

Modules in the order of the data: `config_json`, `config`, `rope`, `checkpoint` and `lora` (reading
a model folder), `cache`, `adapters` and `model` (memory and forward pass), `params`, `grammars` and
`sampler` (choosing tokens), `input_batch` (the requests' state in the worker), `staging` (that
state on the device), `speculation` (drafts), `graphs` and `runner` (running plans), `settings`,
`loading`, `prompts`, `detokenizer`, `outputs`, `engine_loop`, `beams`, `forks`, `sessions` and
`llm` (the interface for users); `store`, `remote_store`, `block_transfers` and `connector` save KV
to a store outside the cache and load it; `host_to_device` copies numbers to and from a GPU;
`observer` is the protocol of a checker."""

from blockstep.impl.engine.beams import BeamSequence
from blockstep.impl.engine.connector import KVRole
from blockstep.impl.engine.errors import (
    CheckpointError,
    EngineError,
    RequestError,
    SettingsError,
)
from blockstep.impl.engine.llm import LLM
from blockstep.impl.engine.observer import MakeObserver, Observer, Pass, Ran
from blockstep.impl.engine.outputs import Chunk, Completion
from blockstep.impl.engine.params import BeamSearchParams, SamplingParams
from blockstep.impl.engine.remote_store import RemoteStore, StoreServer
from blockstep.impl.engine.sessions import Session
from blockstep.impl.engine.settings import Settings
from blockstep.impl.engine.store import HostStore, KVStore, StoreError
from blockstep.impl.tiers.files import FolderError
from blockstep.impl.tiers.store import TieredStore

__all__ = [
    "LLM",
    "BeamSearchParams",
    "BeamSequence",
    "CheckpointError",
    "Chunk",
    "Completion",
    "EngineError",
    "FolderError",
    "HostStore",
    "KVRole",
    "KVStore",
    "MakeObserver",
    "Observer",
    "Pass",
    "Ran",
    "RemoteStore",
    "RequestError",
    "SamplingParams",
    "Session",
    "Settings",
    "SettingsError",
    "StoreError",
    "StoreServer",
    "TieredStore",
]
