"""Program: what was done to an engine, in a form that can be shrunk, stored and read aloud.

Most actions are events. A few are not, because they depend on what happened before: a commit is
whatever the worker has to say to the oldest plan in flight, and drafts are proposed for whoever
just sampled. Keeping them abstract lets a program lose any of its lines and still make sense.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from blockstep.conformance.protocol.codec import get_changed
from blockstep.conformance.protocol.findings import say, shown
from blockstep.spec import vocabulary as v

WIDTH = 100
"""Columns of what people read."""


@dataclass(frozen=True, slots=True)
class Report:
    """A worker reports transfers, of whatever is under way by then."""

    recving: tuple[v.RequestId, ...] = ()
    """Whose loads have come to their end; also of those who have none under way."""
    sending: tuple[v.RequestId, ...] = ()
    """Whose blocks were read; likewise."""
    invalid: tuple[tuple[v.RequestId, int], ...] = ()
    """Blocks that could not be loaded: of whose load, and which of its blocks, counted around; of
    who has no load, nothing."""


NO_REPORT = Report()


@dataclass(frozen=True, slots=True)
class Answer:
    """The worker answers the oldest plan in flight; without one, nothing happens."""

    report: Report = NO_REPORT
    """What it reports of transfers beside that."""


@dataclass(frozen=True, slots=True)
class Propose:
    """The proposer hands in drafts for the requests of the last answered plan that sampled.

    The i-th of them gets `counts[i % len(counts)]`: so many drafts, so many of them right. Under
    asynchronous scheduling drafts stay with the worker, and this says how many of those that it
    makes from now on are right.
    """

    counts: tuple[tuple[int, int], ...]


class Mistake(StrEnum):
    """How a worker's answer can be wrong."""

    EMPTY_ROW = "empty_row"
    """A row that must sample brings no token."""
    LONG_ROW = "long_row"
    """A row brings a token more than it can have sampled."""
    PREFILL_TOKEN = "prefill_token"  # noqa: S105 - a token of a language model
    """A row that is still in its prefill brings a token."""
    WRONG_DRAFT = "wrong_draft"
    """A row accepts a draft that it was not given."""
    MISSING_ROW = "missing_row"
    EXTRA_ROW = "extra_row"
    """A row of nobody in the plan is added."""
    FOREIGN_ROW = "foreign_row"
    """A row is of somebody else."""
    FORBIDDEN_TOKEN = "forbidden_token"  # noqa: S105 - likewise
    """A row brings a token that its grammar forbids."""
    DOUBLE_ROW = "double_row"
    TOO_EARLY = "too_early"
    """The newest plan is answered although older ones are in flight."""
    AGAIN = "again"
    """The last answer is sent once more."""


@dataclass(frozen=True, slots=True)
class Misanswer:
    """The worker answers with a mistake, which must be refused; nothing, if none can be made."""

    mistake: Mistake


@dataclass(frozen=True, slots=True)
class Mask:
    """The runner asks for the mask of a plan in flight; without one, nothing happens."""

    place: int = 0
    """Which one, counted from the oldest; the newest, if there are not so many."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Arrivals stop and all is healed: steps follow until every request has ended (P10, P11)."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """An event as it is, however wrong: stale commits, foreign rows, malformed values."""

    event: v.Event


Action: TypeAlias = (
    v.Submit
    | v.Schedule
    | Answer
    | Report
    | Misanswer
    | Propose
    | Mask
    | v.Abort
    | v.GrammarReady
    | v.GrammarFailed
    | v.GrammarBitmask
    | v.StreamingUpdate
    | v.SetPause
    | v.Reset
    | v.EncoderReset
    | v.EncoderOffer
    | v.KVOffer
    | v.TransfersReported
    | v.Clock
    | v.PinEstimate
    | v.Fork
    | Drain
    | Hostile
)


@dataclass(frozen=True, slots=True)
class Program:
    """A run, reproducible to the last token: everything random was decided in here."""

    config: v.Config
    actions: tuple[Action, ...]
    token_seed: int = 0
    """Seed of the token function: which token follows which text."""
    vocabulary_size: int = 50
    """Sampled tokens are below this."""


def describe(action: Action) -> str:
    """One line for a reader: `submit  A prompt=12 max_tokens=4`."""
    match action:
        case v.Submit(request=request):
            return f"submit    {describe_request(request)}"
        case Answer(report=report):
            return "commit" if report == NO_REPORT else f"commit    {describe_report(report)}"
        case Report():
            return f"transfers {describe_report(action)}"
        case Misanswer(mistake=mistake):
            return f"commit    {mistake.replace('_', ' ')}"
        case Mask(place=place):
            return f"mask      plan {place + 1} in flight"
        case Propose(counts=counts):
            parts = " ".join(f"{count}({right} right)" for count, right in counts)
            return f"drafts    {parts}"
        case v.Abort(request_ids=request_ids):
            return f"abort     {' '.join(request_ids)}"
        case v.GrammarReady(request_id=request_id):
            return f"grammar   {request_id} ready"
        case v.GrammarFailed(request_id=request_id):
            return f"grammar   {request_id} failed"
        case v.GrammarBitmask(frame_id=frame_id, drafts=drafts):
            return f"mask      frame {frame_id} {_rows(drafts)}".rstrip()
        case v.StreamingUpdate(request=request):
            return f"update    {describe_request(request)}"
        case v.SetPause(pause_state=pause_state):
            return f"pause     {pause_state}"
        case v.Reset(reset_running_requests=forced, reset_connector=True):
            return f"reset     {'running requests and ' * forced}the store too"
        case v.Reset(reset_running_requests=True):
            return "reset     running requests too"
        case v.EncoderReset():
            return "encoder   reset"
        case v.EncoderOffer(identifiers=identifiers):
            return f"encoder   is offered {' '.join(identifiers) or 'nothing'}"
        case v.KVOffer():
            return f"store     {describe_offer(action)}"
        case v.TransfersReported(transfers=transfers):
            return f"transfers {describe_transfers(transfers)}"
        case v.Clock(now=now):
            return f"clock     it is {now}"
        case v.PinEstimate(job_id=job_id, ttl=ttl):
            return f"estimate  blocks of job {job_id} stay for {ttl}"
        case v.Fork(request_id=name, child_id=child_id, output_token_ids=outputs):
            return f"fork      {name} as {child_id} outputs={','.join(map(str, outputs)) or 'none'}"
        case Hostile(event=event):
            return f"hostile   {describe_event(event)}"
        case _:
            return type(action).__name__.lower()


def describe_offer(offer: v.KVOffer) -> str:
    """What the store has of a request, and what it wants of it."""
    has = "knows nothing yet" if offer.num_tokens is None else f"has {offer.num_tokens} tokens"
    parts = [f"of {offer.request_id} {has}"]
    parts += ["comes later"] if offer.is_async else []
    parts += ["reads its blocks at its end"] if offer.delays_free else []
    return ", ".join(parts)


def describe_report(report: Report) -> str:
    """Likewise before it is known which blocks those are."""
    failed = [f"{place} of {name}" for name, place in report.invalid]
    told = describe_transfers(v.KVTransfers(report.recving, report.sending))
    if not failed:
        return told
    return "; ".join([told] * (told != "nothing") + [f"cannot load block {', '.join(failed)}"])


def describe_transfers(transfers: v.KVTransfers) -> str:
    """Who has received, who has been read, and which blocks could not be loaded."""
    parts = [
        f"{what} {' '.join(map(str, found))}"
        for what, found in (
            ("received", transfers.finished_recving),
            ("sent", transfers.finished_sending),
            ("invalid", transfers.invalid_block_ids),
        )
        if found
    ]
    return "; ".join(parts) or "nothing"


def describe_config(config: v.Config) -> str:
    """Whatever is not a default, in the order of the fields."""
    plain = v.Config(config.num_blocks)
    parts = [f"num_blocks={config.num_blocks}"]
    for name in v.Config.__dataclass_fields__:
        value = getattr(config, name)
        if name == "groups" and value:
            parts.append(f"groups={'+'.join(map(describe_group, value))}")
        elif name != "num_blocks" and value != getattr(plain, name):
            parts.append(f"{name}={value}")
    return "\n            ".join(textwrap.wrap(" ".join(parts), WIDTH - 12))


def describe_group(group: v.KVGroup) -> str:
    """Its kind, and in brackets its sizes and whatever else is not a default."""
    fields = {name: part for name, part in get_changed(group).items() if name != "kind"}
    return f"{group.kind}({','.join(f'{name}={part}' for name, part in fields.items())})"


def describe_tables(tables: v.BlockTables) -> str:
    """Block ids; a bar stands between those of two KV groups."""
    return " | ".join(" ".join(map(str, table)) for table in tables)


def describe_request(request: v.Request) -> str:
    """Its id and whatever is not a default."""
    prompt = request.prompt_token_ids
    shown = ",".join(map(str, prompt)) if len(prompt) <= 8 else f"{len(prompt)} tokens"
    parts = [f"{request.request_id} prompt={shown} max_tokens={request.max_tokens}"]
    defaults = v.Request("", ())
    for name in v.Request.__dataclass_fields__:
        value = getattr(request, name)
        if name not in {"request_id", "prompt_token_ids", "max_tokens"} and value != getattr(
            defaults, name
        ):
            told = _items(value) if name == "items" else value
            parts.append(f"{name}={told}")
    return " ".join(parts)


def _items(items: tuple[v.MultiModalItem, ...]) -> str:
    """As `repr` has it, without what is a default."""
    told = [
        f"MultiModalItem({', '.join(f'{name}={part!r}' for name, part in get_changed(it).items())})"
        for it in items
    ]
    return f"({', '.join(told)}{',' if len(told) == 1 else ''})"


def describe_event(event: object) -> str:
    """One line for an event as it was sent."""
    match event:
        case v.Submit(request=v.Request() as request):
            return f"submit {describe_request(request)}"
        case v.Commit(frame_id=frame_id, sampled=sampled, transfers=transfers):
            told = f"; {describe_transfers(transfers)}" if transfers != v.NO_TRANSFERS else ""
            return f"commit frame {frame_id} {_rows(sampled)}{told}"
        case v.Drafts(drafts=drafts):
            return f"drafts {_rows(drafts)}"
        case _:
            text = repr(event)
            return text if len(text) <= 100 else text[:97] + "..."


def describe_observation(observation: object) -> str:
    """One line for an answer, however ill-typed: who runs what where, what came of it."""
    try:
        return _describe_observation(observation)
    except Exception:  # it trusts a plan to be one
        return say(observation, 200)


def _describe_observation(observation: object) -> str:
    match observation:
        case v.Plan():
            parts = [_planned(row) for row in observation.rows]
            for word, names in (
                ("ended", observation.finished_req_ids),
                ("preempted", observation.preempted_req_ids),
                ("remapped", observation.remapped_req_ids),
            ):
                parts += [f"{word} {' '.join(names)}"] if names else []
            copies = [f"{it.source} to {it.destination}" for it in observation.block_copies]
            parts += [f"copies block {', '.join(copies)}"] if copies else []
            for word, told in (
                ("encodes", observation.scheduled_encoder_inputs),
                ("loads", observation.external_encoder_inputs),
            ):
                parts += [f"{word} {_numbers(one)} of {one.request_id}" for one in told]
            parts += map(_saved, observation.kv_saves)
            parts += map(_loaded, observation.kv_loads)
            dropped = observation.free_encoder_mm_hashes
            parts += [f"drops {' '.join(dropped)}"] if dropped else []
            return f"plan {observation.frame_id}: {'; '.join(parts) or 'nothing to run'}"
        case v.Outputs(rows=rows):
            delivered = [
                f"{row.request_id} {list(row.new_token_ids)}"
                + (f" ends: {row.finish_reason}" if row.finish_reason else "")
                for row in rows
            ]
            return f"outputs: {'; '.join(delivered) or 'none'}"
        case v.Rejected(code=code, detail=detail):
            return f"rejected {code}: {detail}"
        case v.Aborted(request_ids=request_ids, ending_req_ids=ending):
            later = f", with the next plan {' '.join(ending)}" if ending else ""
            return f"{shown(f'Aborted(request_ids={request_ids!r})', 200)}{later}"
        case _:
            return shown(repr(observation), 200)


def _numbers(inputs: v.EncoderInputs) -> str:
    return " ".join(f"item {index}" for index in inputs.item_indices)


def _loaded(load: v.KVLoad) -> str:
    first, count = load.num_computed_tokens, load.num_external_tokens
    how = "loads" if load.is_async else "has loaded"
    tables = describe_tables(load.block_ids)
    return f"{load.request_id} {how} positions {first}-{first + count - 1}, blocks {tables}"


def _saved(save: v.KVSave) -> str:
    tables = describe_tables(save.block_ids)
    return f"{save.request_id} has saved positions 0-{save.num_tokens - 1}, blocks {tables}"


def _planned(row: v.NewRow | v.CachedRow) -> str:
    first = row.num_computed_tokens
    last = first + row.num_scheduled_tokens - 1
    if isinstance(row, v.NewRow):
        kind, tables = "new", row.block_ids
    else:
        kind, tables = "resumed" if row.resumed else "runs", row.new_block_ids
    drafts = len(row.draft_token_ids)
    blocks = describe_tables(tables) if any(tables) else ""
    positions = f"position {first}" if first == last else f"positions {first}-{last}"
    return (
        f"{row.request_id} {kind}, {positions}"
        + (f", {drafts} drafts" if drafts else "")
        + (f", blocks {blocks}" if blocks else "")
    )


def _rows(rows: object) -> str:
    if not isinstance(rows, tuple):
        return repr(rows)
    return " ".join(
        f"{getattr(row, 'request_id', row)}:{list(getattr(row, 'token_ids', ()))}" for row in rows
    )
