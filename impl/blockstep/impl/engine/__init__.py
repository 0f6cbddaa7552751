"""The model engine: from a checkpoint and prompts to tokens, with the host engine as scheduler.

In the order of the data: `fields`, `config`, `rope`, `checkpoint` and `lora` (what a folder holds),
`cache`, `adapters` and `model` (memory, and the forward pass over it), `params`, `grammars` and
`sampler` (which token), `batch` (what plans said), `staging` (the batch's side of the device),
`speculation` (drafts), `graphs` and `runner` (running plans), `settings`, `loading`, `prompts`,
`text`, `outputs`, `steps`, `beams`, `branches`, `sessions` and `llm` (what a user sees); `store`,
`remote`, `moves` and `connector` keep KV beside the cache and bring it back; `transfer` is how
numbers go to a GPU and back, `observer` is the protocol of a checker.
"""

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
from blockstep.impl.engine.remote import RemoteStore, StoreServer
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
