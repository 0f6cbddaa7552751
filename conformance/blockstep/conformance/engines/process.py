"""Process: an engine in any language, driven by lines of JSON (`--engine 'cmd:./my-engine'`).

Blockstep writes one line to the standard input of the process and reads one line from its standard
output; standard error is for people. docs/how-to/hold-any-language.md has the whole protocol:

    -> {"type":"Hello","format":"blockstep-engine","version":1}
    <- {"type":"Hello","format":"blockstep-engine","version":1,"capabilities":["abort"],...}
    -> {"type":"Start","config":{...}}                     a new run: forget the one before
    <- {"type":"Started"}
    -> {"type":"Submit","request":{...}}                   any event of the vocabulary
    <- {"type":"Ack"}                                      its observation
    -> {"type":"Snapshot"}                                 only with the capability `snapshot`
    <- {"type":"Snapshot","state":{...}}

Instead of an observation the process may answer `{"type":"Fault","detail":"..."}`. It ends when
its standard input ends.
"""

from __future__ import annotations

import shlex
import weakref
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, get_args

import msgspec

from blockstep.conformance.engine import (
    EQUIVALENCES,
    EXACT,
    BadEngineError,
    Capability,
    EngineFault,
    EngineTraits,
    Equivalence,
    Safety,
    SamePlans,
)
from blockstep.conformance.protocol.codec import (
    StateForm,
    build,
    build_tagged,
    from_form,
    get_fields,
)
from blockstep.conformance.protocol.link import Link, show_answer
from blockstep.conformance.protocol.trace_lines import shown
from blockstep.spec import vocabulary as v

FORMAT = "blockstep-engine"
VERSION = 1
HELLO_SECONDS = 120.0
"""The process has this long to answer the first line: it may have to load a runtime."""
OBSERVATIONS: Mapping[str, type] = {cls.__name__: cls for cls in get_args(v.Observation)}
CONFIG_FIELDS = tuple(field.name for field in fields(v.Config))
REQUEST_FIELDS = tuple(field.name for field in fields(v.Request))
KINDS = {kind.name: kind for kind in EQUIVALENCES}


class Hello(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="Hello"):
    """The first answer of a process: what `EngineTraits` and capabilities are in Python."""

    format: str
    version: int
    capabilities: tuple[Capability, ...]
    name: str = ""
    engine_version: str = ""
    equivalence: str = EXACT
    max_depth: int | None = None
    plans_ahead: bool = False
    shows_blocks: bool = False
    """Only at `plan`: whether plans name blocks."""
    has_slots: bool = True
    """Only at `safety`: whether at most `max_num_seqs` requests run."""
    drops_tokens_in_flight: bool = False
    """Only at `safety`: whether a preempted request loses the tokens that are being sampled."""
    config: dict[str, Any] = {}
    """Fields of the config that have these values in every run."""
    config_fields: tuple[str, ...] | None = None
    """Fields of the config that the engine understands; others keep their defaults. None: all."""
    request_fields: tuple[str, ...] | None = None
    """The same of a request. Only below `exact`."""
    judges: tuple[v.RejectCode, ...] = ()
    """Reject codes that it is held to without the capability `rejection`."""
    out_of_reach: tuple[str, ...] = ()
    profile: str = ""
    notes: tuple[str, ...] = ()


class _Started(msgspec.Struct, forbid_unknown_fields=True, tag="Started"):
    pass


class _Fault(msgspec.Struct, forbid_unknown_fields=True, tag="Fault"):
    detail: str = ""


class _State(msgspec.Struct, forbid_unknown_fields=True, tag="Snapshot"):
    state: StateForm | None = None


class IdleLinks:
    """Processes that serve no run at the moment, until their factory is gone."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._is_open = True

    def take(self) -> Link | None:
        """Return a process that can serve the next run, if there is one."""
        return self._links.pop() if self._links else None

    def give_back(self, link: Link) -> None:
        """Keep a process for the next run, or end it."""
        if link.is_lost or not self._is_open:
            link.end()
        else:
            self._links.append(link)

    def close(self) -> None:
        """End all processes, and later those that are given back."""
        self._is_open = False
        while self._links:
            self._links.pop().end()


class ProcessFactory:
    """Makes engines that live in processes of one command.

    A process serves one run after another: an engine that is not used any more leaves its process
    to the next one.
    """

    def __init__(self, command: str) -> None:
        """Ask the command what it is.

        Raises:
            BadEngineError: it cannot be started, or its first answer is not a Hello.
        """
        self.command = command
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise BadEngineError(f"{error}; quote it as a shell would") from None
        if not self._words:
            raise BadEngineError("cmd: names no command; write --engine 'cmd:./my-engine --flag'")
        self._idle = IdleLinks()
        link = self._start()
        self.hello = self._read_hello(link)
        try:
            self.traits = _get_traits(self.hello)
        except BadEngineError:
            link.end()
            raise
        self._idle.give_back(link)
        weakref.finalize(self, self._idle.close)

    def __call__(self, config: v.Config) -> ProcessEngine:
        """Start a run. Raises EngineFault if the process does not."""
        link = self._idle.take() or self._connect()
        try:
            engine = ProcessEngine(link, self.hello, config)
        except EngineFault:
            self._idle.give_back(link)
            raise
        weakref.finalize(engine, self._idle.give_back, link)
        return engine

    def _connect(self) -> Link:
        link = self._start()
        hello = self._read_hello(link)
        if hello != self.hello:
            link.end()
            raise BadEngineError("its second process says another Hello")
        return link

    def _start(self) -> Link:
        try:
            return Link(self._words)
        except OSError as error:
            reason = error.strerror or error
            raise BadEngineError(
                f"{self._words[0]} cannot be started ({reason}); "
                "is the path right, and may it be executed?"
            ) from None

    def _read_hello(self, link: Link) -> Hello:
        line = msgspec.json.encode({"type": "Hello", "format": FORMAT, "version": VERSION})
        try:
            answer = link.ask(line, HELLO_SECONDS)
            hello = msgspec.json.decode(answer, type=Hello | _Fault)
        except EngineFault as fault:  # the link has ended the process
            raise BadEngineError(f"no Hello: {fault}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            link.end()
            text = show_answer(answer, error)
            raise BadEngineError(f"{text} is not a Hello: {error}{_list_known(error)}") from None
        if isinstance(hello, _Fault):
            link.end()
            raise BadEngineError(hello.detail or "its Hello is a Fault")
        if (hello.format, hello.version) != (FORMAT, VERSION):
            link.end()
            raise BadEngineError(
                f"says {hello.format!r} version {hello.version}; "
                f"this blockstep speaks {FORMAT!r} version {VERSION}"
            )
        return hello


class ProcessEngine:
    """One run of an engine that lives in another process."""

    def __init__(self, link: Link, hello: Hello, config: v.Config) -> None:
        self.judges = frozenset(hello.judges)
        self._link = link
        self._capabilities = frozenset(hello.capabilities)
        self._shows_state = Capability.SNAPSHOT in self._capabilities
        started = self._link.ask_row({"type": "Start", "config": config}, _Started | _Fault)
        if isinstance(started, _Fault):
            raise EngineFault(started.detail or "the engine answered Start with a Fault")

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse copies: two engines cannot share one process."""
        raise TypeError("an engine in a process of its own cannot be copied")

    def capabilities(self) -> frozenset[str]:
        """Return the capabilities that the process named in its Hello."""
        return self._capabilities

    def apply(self, event: v.Event) -> v.Observation:
        """Hand over an event. Raises EngineFault for a Fault, and for what is no observation."""
        row = {"type": type(event).__name__, **get_fields(event)}
        raw = self._link.ask_row(row, dict[str, Any])
        if raw.get("type") == "Fault":
            raise EngineFault(_convert(raw, _Fault).detail or "the engine answered with a Fault")
        try:
            observation: v.Observation = build_tagged(raw, OBSERVATIONS, "$")
        except (msgspec.MsgspecError, TypeError) as error:
            raise EngineFault(f"no observation: {error}: {shown(raw)}") from None
        return observation

    def snapshot(self) -> v.Snapshot | None:
        """Return the state, if the process shows one. Raises EngineFault as `apply` does."""
        if not self._shows_state:
            return None
        answer = self._link.ask_row({"type": "Snapshot"}, _State | _Fault)
        if isinstance(answer, _Fault):
            raise EngineFault(answer.detail or "the engine answered Snapshot with a Fault")
        try:
            return None if answer.state is None else from_form(answer.state)
        except msgspec.ValidationError as error:
            raise EngineFault(f"its state: {error}") from None


def _convert(raw: dict[str, Any], kind: type[_Fault]) -> _Fault:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.MsgspecError as error:
        raise EngineFault(f"no Fault: {error}: {shown(raw)}") from None


# What a Hello says, as traits.


def _get_traits(hello: Hello) -> EngineTraits:
    _refuse_unknown(hello)
    fixed = _get_fixed(hello)
    fit = partial(_fit_config, hello.config_fields, fixed)
    weaker: Equivalence | None = None
    if hello.equivalence != EXACT:
        kind = KINDS[hello.equivalence]
        more: dict[str, Any] = {"plans_ahead": hello.plans_ahead}
        more |= {"shows_blocks": hello.shows_blocks} if kind is SamePlans else {}
        more |= {"has_slots": hello.has_slots} if kind is Safety else {}
        weaker = kind(fit, partial(_fit_request, hello.request_fields), **more)
    return EngineTraits(
        equivalence=weaker,
        fit_config=partial(_fit_config_with_reason, fit),
        drops_tokens_in_flight=hello.drops_tokens_in_flight,
        max_depth=hello.max_depth,
        out_of_reach=frozenset(hello.out_of_reach),
        version=hello.engine_version,
        profile=hello.profile,
        notes=hello.notes,
    )


def _list_known(error: Exception) -> str:
    """Return the names that a list of a Hello may have, if the error is about one."""
    for field, names in {"capabilities": Capability, "judges": v.RejectCode}.items():
        if f"`$.{field}[" in str(error):
            return f"; it must be one of {', '.join(names)}"
    return ""


def _refuse_unknown(hello: Hello) -> None:
    """Raise BadEngineError for a name in a Hello that means nothing here."""
    known = {
        "equivalence": ((hello.equivalence,), (EXACT, *KINDS)),
        "config": (hello.config, CONFIG_FIELDS),
        "config_fields": (hello.config_fields or (), CONFIG_FIELDS),
        "request_fields": (hello.request_fields or (), REQUEST_FIELDS),
    }
    for field, (given, names) in known.items():
        for name in given:
            if name not in names:
                raise BadEngineError(
                    f"{field} of its Hello names {name!r}, which is none of {', '.join(names)}"
                )
    only_for = {
        "shows_blocks": (hello.shows_blocks, SamePlans.name),
        "has_slots": (not hello.has_slots, Safety.name),
        "drops_tokens_in_flight": (hello.drops_tokens_in_flight, Safety.name),
    }
    for field, (is_set, kind) in only_for.items():
        if is_set and hello.equivalence != kind:
            raise BadEngineError(
                f"{field} of its Hello is for the equivalence {kind!r}, not {hello.equivalence!r}"
            )
    if hello.request_fields is not None and hello.equivalence == EXACT:
        raise BadEngineError(
            "request_fields of its Hello are for the equivalences "
            f"{', '.join(KINDS)}; an exact engine takes every request that its capabilities include"
        )


def _get_fixed(hello: Hello) -> dict[str, Any]:
    """Return the fixed fields of the config as values of the vocabulary."""
    try:
        config = build({"num_blocks": 8, "max_model_len": 64, **hello.config}, v.Config, "$.config")
    except (msgspec.MsgspecError, TypeError) as error:
        raise BadEngineError(f"config of its Hello: {error}") from None
    return {name: getattr(config, name) for name in hello.config}


def _fit_config(
    names: tuple[str, ...] | None, fixed: Mapping[str, Any], config: v.Config
) -> v.Config:
    if names is not None:
        kept = {name: getattr(config, name) for name in {"num_blocks", *names}}
        config = v.Config(**kept)
    return replace(config, **fixed)


def _fit_config_with_reason(
    fit: partial[v.Config], config: v.Config
) -> tuple[v.Config, str | None]:
    fitted = fit(config)
    return fitted, None if fitted == config else "the engine's Hello fixes fields"


def _fit_request(names: tuple[str, ...] | None, request: v.Request, _config: v.Config) -> v.Request:
    if names is None:
        return request
    kept = {"request_id", "prompt_token_ids", "max_tokens", *names}
    return v.Request(**{name: getattr(request, name) for name in kept})
