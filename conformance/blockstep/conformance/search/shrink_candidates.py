"""Smaller grammars, items and session inputs of requests, and renaming of requests and items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from blockstep.conformance.protocol.program import Action, Answer, Program, Report
from blockstep.spec import vocabulary as v

Actions: TypeAlias = tuple[Action, ...]
Names: TypeAlias = Mapping[str, str]


def get_request(action: Action) -> v.Request | None:
    """Return the request of a submission or streaming update."""
    return action.request if isinstance(action, v.Submit | v.StreamingUpdate) else None


def with_request(action: Action, change: Callable[[v.Request], v.Request]) -> Action:
    """Return the action with its request changed, if it has one."""
    match action:
        case v.Submit(request=request):
            return v.Submit(change(request))
        case v.StreamingUpdate(request=request):
            return v.StreamingUpdate(change(request))
        case _:
            return action


def with_requests(
    actions: Sequence[Action], change: Callable[[v.Request], v.Request]
) -> tuple[Action, ...]:
    """Return the actions with each request changed."""
    return tuple([with_request(action, change) for action in actions])


# Grammars.


def simpler_grammars(grammar: v.Grammar) -> Iterator[v.Grammar]:
    """Yield an empty grammar, and the grammar with one state less or with fewer edges."""
    edges = grammar.edges
    nothing = v.Grammar(((),))
    if grammar != nothing:
        yield nothing
    for state in range(len(edges) - 1, -1 if len(edges) > 1 else 0, -1):
        yield _without_state(grammar, state, is_kept=False)
        yield _without_state(grammar, state, is_kept=True)
    for state, leading in enumerate(edges):
        for fewer in (
            *([edge] for edge in leading if len(leading) > 1),
            *(leading[:index] + leading[index + 1 :] for index in range(len(leading))),
        ):
            yield v.Grammar((*edges[:state], tuple(fewer), *edges[state + 1 :]))


def _without_state(grammar: v.Grammar, left_out: int, is_kept: bool) -> v.Grammar:
    """Return the grammar without a state. Edges to it are left out, or `is_kept` and lead to state
    0."""
    place = {old: old - (old > left_out) for old in range(len(grammar.edges))}
    place[left_out] = 0
    return v.Grammar(
        tuple(
            tuple((token, place[to]) for token, to in edges if is_kept or to != left_out)
            for state, edges in enumerate(grammar.edges)
            if state != left_out
        )
    )


# Items.


def simpler_items(
    items: tuple[v.MultiModalItem, ...],
) -> Iterator[tuple[v.MultiModalItem, ...]]:
    """Yield the items without one, or with one moved to the left."""
    for index in range(len(items)):
        yield (*items[:index], *items[index + 1 :])
    end = 0
    for index, item in enumerate(items):
        for offset in sorted({end, item.offset - 1}):
            if end <= offset < item.offset:
                yield (*items[:index], replace(item, offset=offset), *items[index + 1 :])
        end = item.offset + item.length


def simpler_contents(actions: Sequence[Action]) -> Iterator[Actions]:
    """Yield the actions with an item shortened, or without its mask, in all requests that have
    it."""
    found: dict[str, v.MultiModalItem] = {}
    for action in actions:
        request = get_request(action)
        found.update((item.identifier, item) for item in (request.items if request else ()))
    for name, item in found.items():
        if item.is_embed:
            yield _with_content(actions, name, replace(item, is_embed=()))
        for length in sorted({1, item.length // 2, item.length - 1}):
            mask = item.is_embed[:length]
            if 0 < length < item.length and (not mask or any(mask)):
                yield _with_content(actions, name, replace(item, length=length, is_embed=mask))


def _with_content(actions: Sequence[Action], name: str, content: v.MultiModalItem) -> Actions:
    def change(request: v.Request) -> v.Request:
        items = [
            replace(content, offset=item.offset) if item.identifier == name else item
            for item in request.items
        ]
        return replace(request, items=tuple(items))

    return with_requests(actions, change)


# Names.


def rename_requests(actions: Sequence[Action], names: Mapping[v.RequestId, v.RequestId]) -> Actions:
    """Return the actions with requests renamed; requests without an entry keep their names."""
    return tuple([_rename(action, names) for action in actions])


def _rename(action: Action, names: Mapping[v.RequestId, v.RequestId]) -> Action:
    match action:
        case v.Submit() | v.StreamingUpdate():
            return with_request(
                action, lambda it: replace(it, request_id=names.get(it.request_id, it.request_id))
            )
        case v.Abort(request_ids=request_ids):
            return v.Abort(tuple(names.get(name, name) for name in request_ids))
        case v.GrammarReady(request_id=name):
            return v.GrammarReady(names.get(name, name))
        case v.GrammarFailed(request_id=name):
            return v.GrammarFailed(names.get(name, name))
        case v.KVOffer(request_id=name):
            return replace(action, request_id=names.get(name, name))
        case Report():
            return _rename_report(action, names)
        case Answer(report=report):
            return Answer(_rename_report(report, names))
        case _:
            return action


def _rename_report(report: Report, names: Mapping[v.RequestId, v.RequestId]) -> Report:
    return Report(
        tuple([names.get(name, name) for name in report.recving]),
        tuple([names.get(name, name) for name in report.sending]),
        tuple([(names.get(name, name), place) for name, place in report.invalid]),
    )


def rename_brought(program: Program) -> Program:
    """Return the program with its adapters and items named x, y, z in order of appearance."""
    adapters: dict[str, None] = {}
    items: dict[str, None] = {}
    for action in program.actions:
        request = get_request(action)
        if request is not None:
            adapters.update(dict.fromkeys([request.adapter] if request.adapter else []))
            items.update(dict.fromkeys(item.identifier for item in request.items))
    called, kept = _number(adapters), _number(items)

    def change(request: v.Request) -> v.Request:
        return replace(
            request,
            adapter=called.get(request.adapter or "", request.adapter),
            items=tuple(replace(it, identifier=kept[it.identifier]) for it in request.items),
        )

    actions = with_requests(program.actions, change)
    return replace(program, actions=tuple([_rename_offer(action, kept) for action in actions]))


def _rename_offer(action: Action, names: Names) -> Action:
    if not isinstance(action, v.EncoderOffer):
        return action
    return v.EncoderOffer(tuple(names.get(name, name) for name in action.identifiers))


def _number(names: Mapping[str, None]) -> dict[str, str]:
    plain = "xyz"
    return {
        name: plain[index] if index < len(plain) else f"x{index}"
        for index, name in enumerate(names)
    }
