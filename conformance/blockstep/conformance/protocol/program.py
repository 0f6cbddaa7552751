"""Programs: what was done to an engine, in a form that can be shrunk, stored and printed.

Most actions are events. Some are not, since they depend on what happened before: a commit has the
tokens that the worker samples for the oldest plan in flight, and drafts are proposed for the
requests that just sampled. In this abstract form a program still makes sense if any of its actions
is removed.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from blockstep.conformance.protocol.codec import get_changed
from blockstep.conformance.protocol.findings import cut_repr, shown
from blockstep.spec import vocabulary as v

WIDTH = 100
"""Columns of printed output."""


@dataclass(frozen=True, slots=True)
class Report:
    """A worker reports transfers that are in flight at that time."""

    recving: tuple[v.RequestId, ...] = ()
    """Requests whose loads are complete; also some without a load in flight."""
    sending: tuple[v.RequestId, ...] = ()
    """Requests whose blocks were read; also some without such a transfer."""
    invalid: tuple[tuple[v.RequestId, int], ...] = ()
    """Blocks that could not be loaded: the request, and the index of the block in its load, modulo
    the length. A request without a load gives no block."""


NO_REPORT = Report()


@dataclass(frozen=True, slots=True)
class Answer:
    """The worker returns the model output of the oldest plan in flight; without one, nothing
    happens.
    """

    report: Report = NO_REPORT
    """The transfers that it reports with it."""


@dataclass(frozen=True, slots=True)
class Propose:
    """The proposer sends drafts for the requests that sampled in the last committed plan.

    The i-th of these requests gets `counts[i % len(counts)]`: the number of drafts, and how many of
    them are right. Under asynchronous scheduling drafts stay with the worker, and this sets how
    many of its later drafts are right.
    """

    counts: tuple[tuple[int, int], ...]
    for_chunks: bool = False
    """Whether requests in the middle of their prompt get drafts as well, as from a proposer that
    runs for every row. Such drafts are dropped."""


class Mistake(StrEnum):
    """A way in which a model output can be wrong."""

    EMPTY_ROW = "empty_row"
    """A row that must sample has no token."""
    LONG_ROW = "long_row"
    """A row has one token more than it can have sampled."""
    PREFILL_TOKEN = "prefill_token"  # noqa: S105 - a token of a language model
    """A row that is still in its prefill has a token."""
    WRONG_DRAFT = "wrong_draft"
    """A row accepts a draft that it was not given."""
    MISSING_ROW = "missing_row"
    EXTRA_ROW = "extra_row"
    """A row is added for a request that is not in the plan."""
    FOREIGN_ROW = "foreign_row"
    """A row has the id of another request."""
    FORBIDDEN_TOKEN = "forbidden_token"  # noqa: S105 - likewise
    """A row has a token that its grammar forbids."""
    DOUBLE_ROW = "double_row"
    TOO_EARLY = "too_early"
    """The newest plan is committed although older ones are in flight."""
    AGAIN = "again"
    """The last model output is sent again."""


@dataclass(frozen=True, slots=True)
class Misanswer:
    """The worker returns a wrong model output, which must be rejected; nothing if none can be
    made.
    """

    mistake: Mistake


@dataclass(frozen=True, slots=True)
class Mask:
    """The runner requests the bitmask of a plan in flight; without one, nothing happens."""

    place: int = 0
    """Index of the plan, counted from the oldest; the newest if there are not enough."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Arrivals and faults stop, and steps follow until every request has finished (P10, P11)."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """An event that is sent as it is, however wrong: stale commits, foreign rows, malformed
    values.
    """

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
    """A reproducible run: it contains every random decision."""

    config: v.Config
    actions: tuple[Action, ...]
    token_seed: int = 0
    """Seed of the token function, which maps a token sequence to its next token."""
    vocabulary_size: int = 50
    """Sampled tokens are smaller than this."""


def describe(action: Action) -> str:
    """Return an action as one line: `submit  A prompt=12 max_tokens=4`."""
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
        case Propose(counts=counts, for_chunks=for_chunks):
            parts = " ".join(f"{count}({right} right)" for count, right in counts)
            return f"drafts    {parts}{', for chunks too' * for_chunks}"
        case Hostile(event=event):
            return f"hostile   {describe_event(event)}"
        case _:
            return _describe_given(action)


def _describe_given(action: Action) -> str:
    """One line for an action that is given to both sides as it is."""
    match action:
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
        case _:
            return type(action).__name__.lower()


def describe_offer(offer: v.KVOffer) -> str:
    """Return in words what the store offers for a request."""
    has = "knows nothing yet" if offer.num_tokens is None else f"has {offer.num_tokens} tokens"
    parts = [f"of {offer.request_id} {has}"]
    parts += ["comes later"] if offer.is_async else []
    parts += ["reads its blocks at its end"] if offer.delays_free else []
    return ", ".join(parts)


def describe_report(report: Report) -> str:
    """Return a report in words, with failed blocks by request and index."""
    failed = [f"{place} of {name}" for name, place in report.invalid]
    text = describe_transfers(v.KVTransfers(report.recving, report.sending))
    if not failed:
        return text
    return "; ".join([text] * (text != "nothing") + [f"cannot load block {', '.join(failed)}"])


def describe_transfers(transfers: v.KVTransfers) -> str:
    """Return in words which requests received or sent KV, and which blocks could not be loaded."""
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
    """Return the fields that are not at their defaults, in the order of their declaration."""
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
    """Return the kind of a KV group, with its other fields that are not at their defaults in
    brackets.
    """
    fields = {name: part for name, part in get_changed(group).items() if name != "kind"}
    return f"{group.kind}({','.join(f'{name}={part}' for name, part in fields.items())})"


def describe_tables(tables: v.BlockTables) -> str:
    """Return the block ids, with a bar between KV groups."""
    return " | ".join(" ".join(map(str, table)) for table in tables)


def describe_request(request: v.Request) -> str:
    """Return the id of a request and its fields that are not at their defaults."""
    prompt = request.prompt_token_ids
    shown = ",".join(map(str, prompt)) if len(prompt) <= 8 else f"{len(prompt)} tokens"
    parts = [f"{request.request_id} prompt={shown} max_tokens={request.max_tokens}"]
    defaults = v.Request("", ())
    for name in v.Request.__dataclass_fields__:
        value = getattr(request, name)
        if name not in {"request_id", "prompt_token_ids", "max_tokens"} and value != getattr(
            defaults, name
        ):
            text = _items(value) if name == "items" else value
            parts.append(f"{name}={text}")
    return " ".join(parts)


def _items(items: tuple[v.MultiModalItem, ...]) -> str:
    """Return the items like `repr`, without fields at their defaults."""
    texts = [
        f"MultiModalItem({', '.join(f'{name}={part!r}' for name, part in get_changed(it).items())})"
        for it in items
    ]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def describe_event(event: object) -> str:
    """Return an event as one line, as it was sent."""
    match event:
        case v.Submit(request=v.Request() as request):
            return f"submit {describe_request(request)}"
        case v.Commit(frame_id=frame_id, sampled=sampled, transfers=transfers):
            suffix = f"; {describe_transfers(transfers)}" if transfers != v.NO_TRANSFERS else ""
            return f"commit frame {frame_id} {_rows(sampled)}{suffix}"
        case v.Drafts(drafts=drafts):
            return f"drafts {_rows(drafts)}"
        case _:
            text = repr(event)
            return text if len(text) <= 100 else text[:97] + "..."


def describe_observation(observation: object) -> str:
    """Return an observation as one line, even if it is ill-typed."""
    try:
        return _describe_observation(observation)
    except Exception:  # the function relies on a well-formed plan
        return cut_repr(observation, 200)


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
            for word, inputs in (
                ("encodes", observation.scheduled_encoder_inputs),
                ("loads", observation.external_encoder_inputs),
            ):
                parts += [f"{word} {_numbers(one)} of {one.request_id}" for one in inputs]
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
