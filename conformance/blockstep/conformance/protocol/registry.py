"""Registry of the engines, by name.

The name of an engine is a known name, an entry point `blockstep.engines` of an installed package,
`module:attribute`, or `cmd:` and a command that speaks lines of JSON (`engines.process`). `@` and
an equivalence may follow, for an engine whose traits set none: `mypkg.adapter:make@plan`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import PurePath
from traceback import extract_tb
from typing import cast

from blockstep.conformance.engine import (
    ALL_CAPABILITIES,
    EQUIVALENCES,
    EXACT,
    BadEngineError,
    Capability,
    Engine,
    EngineFactory,
    SamePlans,
    get_capabilities,
    get_traits,
)
from blockstep.conformance.protocol.findings import describe_error
from blockstep.spec import Oracle
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.profiles import STRICT, Profile
from blockstep.spec.snapshots import get_request_snapshot, get_snapshot
from blockstep.spec.vocabulary import Config, RequestId, RequestSnapshot, Snapshot


class SpecEngine(Oracle):
    """The specification as an engine. Its state is read after every event."""

    def __init__(self, config: Config, profile: Profile = STRICT) -> None:
        super().__init__(config, profile)
        self._shown: dict[RequestId, tuple[RequestState, RequestSnapshot]] = {}
        """The requests of the last state that was read, each with its snapshot."""
        self._last: tuple[State, Snapshot] | None = None
        """The last state that was read, with its snapshot."""

    def __getstate__(self) -> dict[str, object]:
        """Return the state without what is compared by identity: a copy has other objects."""
        return {**self.__dict__, "_shown": {}, "_last": None}

    def capabilities(self) -> frozenset[str]:
        """Return all capabilities."""
        return ALL_CAPABILITIES

    def snapshot(self) -> Snapshot:
        """Return the state as a snapshot: the same object as long as the state does not change."""
        state, last = self.state, self._last
        if last is None or last[0].requests is not state.requests:
            shown = self._show_requests(state)
            if last is not None and last[1].requests == shown:
                shown = last[1].requests
        elif last[0] is state:
            return last[1]
        else:
            shown = last[1].requests
        snapshot = get_snapshot(state, shown)
        self._last = state, snapshot
        return snapshot

    def _show_requests(self, state: State) -> tuple[RequestSnapshot, ...]:
        """Return the unfinished requests, by id. A request that has not changed is not shown
        again."""
        known, shown, found = self._shown, {}, []
        for name, request in sorted(state.requests.items()):
            entry = known.get(name)
            if entry is None or entry[0] is not request:
                entry = request, get_request_snapshot(request)
            shown[name] = entry
            found.append(entry[1])
        self._shown = shown
        return tuple(found)


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """An engine with a name of its own."""

    name: str
    target: str
    """`module:attribute` of its factory."""
    summary: str


KNOWN_ENGINES: Mapping[str, KnownEngine] = {
    engine.name: engine
    for engine in (
        KnownEngine(
            "host",
            "blockstep.impl.host:HostEngine",
            "our engine: every feature; arrays and machine code, made by numba at its first use",
        ),
        KnownEngine(
            "device",
            "blockstep.impl.device.engine:DeviceEngine",
            "the scheduler as GPU kernels; here numpy runs their source",
        ),
        KnownEngine(
            "device-interpreted",
            "blockstep.impl.device.interpreted:make_interpreted",
            "the same, run by Triton's interpreter (TRITON_INTERPRET=1), 30 times slower",
        ),
        KnownEngine(
            "host-kernels",
            "blockstep.conformance.judge.dataplane:HOST",
            "our engine, its plans carried out by our kernels on real paged memory",
        ),
        KnownEngine(
            "vllm",
            "blockstep.conformance.engines.adapters.vllm:VllmEngine",
            "the unmodified scheduler of an installed vLLM (make vllm)",
        ),
        KnownEngine(
            "nano_vllm",
            "blockstep.conformance.engines.adapters.nano_vllm:NanoVllm",
            "the scheduler of a checkout of nano-vllm (--path CHECKOUT), by properties only",
        ),
        KnownEngine(
            "mini_sglang",
            "blockstep.conformance.engines.adapters.mini_sglang:MiniSglang",
            "the scheduler of a checkout of mini-sglang (--path CHECKOUT), by properties only",
        ),
        KnownEngine(
            "lmdeploy",
            "blockstep.conformance.engines.adapters.lmdeploy:Lmdeploy",
            "the PyTorch engine of an lmdeploy (--path CHECKOUT), no model, by properties only",
        ),
        KnownEngine(
            "sglang",
            "blockstep.conformance.engines.adapters.sglang:Sglang",
            "the scheduler of an installed SGLang, no model, by properties only",
        ),
        KnownEngine(
            "llmservingsim",
            "blockstep.conformance.engines.adapters.llmservingsim:LLMServingSim",
            "the scheduler of a checkout of LLMServingSim (--path CHECKOUT), a port of vLLM's",
        ),
        KnownEngine(
            "vidur",
            "blockstep.conformance.engines.adapters.vidur:Vidur",
            "the vllm scheduler of a checkout of Vidur (--path CHECKOUT), of before V1",
        ),
        KnownEngine(
            "transformers",
            "blockstep.conformance.engines.adapters.transformers_cb:Synchronous",
            "the continuous batching of an installed transformers, by properties only",
        ),
        KnownEngine(
            "transformers_async",
            "blockstep.conformance.engines.adapters.transformers_cb:Asynchronous",
            "the same as it runs on a GPU: a batch is prepared while one is in flight",
        ),
        KnownEngine(
            "spec",
            "blockstep.conformance.protocol.registry:SpecEngine",
            "the specification held to itself, under the same profile; for trying out the tools",
        ),
    )
}


RENAMED: Mapping[str, str] = {"compiled": "host"}
"""Names that engines had before, and those that they have now."""
MUSEUM = "museum:"
"""Prefix of the names of seeded bugs: `museum:forward-frees`."""
COMMAND = "cmd:"
"""Prefix of the names of engines in any language: `cmd:./my-engine --flag`."""
GROUP = "blockstep.engines"
"""Group of the entry points by which installed packages announce engines: name and
`module:attribute`."""
EQUIVALENCE_NAMES = (EXACT, *(kind.name for kind in EQUIVALENCES))


class EngineNotFoundError(LookupError):
    """No engine has the name, or the engine cannot be loaded."""


class HeldEngine:
    """A factory with an equivalence that its own traits do not set."""

    def __init__(self, make_engine: EngineFactory, equivalence: str) -> None:
        kind = next(kind for kind in EQUIVALENCES if kind.name == equivalence)
        self._make_engine = make_engine
        held = SamePlans(shows_blocks=_names_blocks(make_engine)) if kind is SamePlans else kind()
        self.traits = replace(get_traits(make_engine), equivalence=held)

    def __call__(self, config: Config) -> Engine:
        """Build an engine."""
        return self._make_engine(config)


def _names_blocks(make_engine: EngineFactory) -> bool:
    """Whether an engine shows its state, and so names blocks in its plans as well."""
    try:
        return Capability.SNAPSHOT in get_capabilities(make_engine)
    except Exception:  # reported where an engine is built for a run
        return False


def load_engine(name: str, profile: Profile = STRICT) -> EngineFactory:
    """Return the factory of the engine called `name`; the specification itself follows `profile`.

    Raises:
        EngineNotFoundError: naming what was tried, and how to name an engine.
    """
    target = get_target(name)
    plain, equivalence = split_name(name)
    if plain.startswith(COMMAND):
        make_engine = _load_command(plain)
    else:
        is_planted = plain.startswith(MUSEUM)
        make_engine = _load_exhibit(plain) if is_planted else _load_target(plain, target)
    if make_engine is SpecEngine and profile is not STRICT:  # that it is compared with
        make_engine = partial(SpecEngine, profile=profile)
    return hold(make_engine, name, equivalence) if equivalence else make_engine


def split_name(name: str) -> tuple[str, str]:
    """Return an engine's name without its equivalence, and the equivalence; "" if it has none."""
    if name.startswith(COMMAND):  # a command line may hold any `@`
        plain, _, equivalence = name.rpartition("@")
        return (plain, equivalence) if equivalence in EQUIVALENCE_NAMES and plain else (name, "")
    plain, _, equivalence = name.partition("@")
    return plain, equivalence


def hold(make_engine: EngineFactory, name: str, equivalence: str) -> EngineFactory:
    """Return the factory with this equivalence.

    Raises:
        EngineNotFoundError: its own traits set another one.
    """
    declared = get_traits(make_engine).equivalence
    own = EXACT if declared is None else declared.name
    if own == equivalence:
        return make_engine
    if declared is not None:
        raise EngineNotFoundError(
            f"engine {name!r}: its traits say equivalence {own}, not {equivalence}; say it once"
        )
    return HeldEngine(make_engine, equivalence)


def _load_target(name: str, target: str) -> EngineFactory:
    module_name, _, attribute = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # an import runs arbitrary code
        raise EngineNotFoundError(
            f"engine {name!r}: cannot load {target}: {describe_error(error)}; "
            + _describe_import_error(module_name, attribute, error)
        ) from error
    if not callable(factory):
        raise EngineNotFoundError(f"engine {name!r}: {target} is not callable: name a factory")
    return cast("Callable[[Config], Engine]", factory)


def _describe_import_error(module_name: str, attribute: str, error: BaseException) -> str:
    """Return where an import raised, or what to check if the module itself was not found."""
    path = PurePath(module_name)
    if path.suffix == ".py" or "/" in module_name:
        folder = "" if path.parent == PurePath() else f", and its folder with --path {path.parent}"
        return f"name the module, not a file: {path.stem}:{attribute}{folder}"
    imported = [
        one
        for one in extract_tb(error.__traceback__)
        if one.filename not in (__file__, importlib.__file__) and "<frozen" not in one.filename
    ]
    if imported and not isinstance(error, SyntaxError):  # its message names file and line
        return f"raised in {imported[-1].filename}, line {imported[-1].lineno}"
    is_there = isinstance(error, AttributeError) and module_name in sys.modules
    return "name a factory in it" if is_there else "is it installed and importable?"


def list_announced() -> dict[str, list[str]]:
    """Return the targets of engines that installed packages announce, by name; several if
    ambiguous.
    """
    found: dict[str, list[str]] = {}
    for entry in metadata.entry_points(group=GROUP):
        targets = found.setdefault(entry.name, [])
        target = f"{entry.module}:{entry.attr}"
        targets += [target] if target not in targets else []
    return {name: found[name] for name in sorted(found)}


def get_target(name: str) -> str:
    """Return `module:attribute` of an engine, which need not exist; nothing is imported.

    Raises:
        EngineNotFoundError: it is not the name of an engine.
    """
    plain, equivalence = split_name(name)
    if plain.startswith(COMMAND):
        return plain
    if "@" in name and equivalence not in EQUIVALENCE_NAMES:
        known = ", ".join(EQUIVALENCE_NAMES)
        raise EngineNotFoundError(f"engine {name!r}: equivalence {equivalence!r}: one of {known}")
    if plain.startswith(MUSEUM):
        return plain
    if plain in RENAMED:
        warnings.warn(
            f"the engine {plain} is called {RENAMED[plain]} now", FutureWarning, stacklevel=2
        )
        plain = RENAMED[plain]
    if plain in KNOWN_ENGINES:
        return KNOWN_ENGINES[plain].target
    module_name, _, attribute = plain.partition(":")
    if module_name and attribute:
        return plain
    announced = list_announced()
    targets = announced.get(plain, [])
    if len(targets) > 1:
        raise EngineNotFoundError(
            f"engine {name!r}: announced as {' and as '.join(targets)}; choose one"
        )
    if not targets:
        known = ", ".join([*KNOWN_ENGINES, *announced])
        raise EngineNotFoundError(
            f"engine {name!r}: neither one of [{known}] nor of the form module:attribute "
            "or cmd:COMMAND"
        )
    return targets[0]


def _load_exhibit(name: str) -> EngineFactory:
    """Return a seeded bug's factory.

    Imported late, since seeded bugs are made from the specification's engine.
    """
    museum = importlib.import_module("blockstep.conformance.museum")
    try:
        return cast("EngineFactory", museum.build(name.removeprefix(MUSEUM)))
    except KeyError:
        raise EngineNotFoundError(
            f"engine {name!r}: no such seeded bug; `blockstep museum --all` lists them"
        ) from None


def _load_command(name: str) -> EngineFactory:
    """Return a process as an engine; imported late, since few runs need it."""
    process = importlib.import_module("blockstep.conformance.engines.process")
    try:
        return cast("EngineFactory", process.ProcessFactory(name.removeprefix(COMMAND)))
    except BadEngineError as error:
        raise EngineNotFoundError(f"engine {name!r}: {error}") from None
