"""Answers: checks of an engine's answers alone, where no reference decides.

An engine that admits, evicts or preempts by other rules than the specification is not wrong. These
checks hold for every engine; which requests are unfinished and what was delivered follows from its
own answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeAlias

from blockstep.conformance.judge.attention_ranges import is_across
from blockstep.conformance.judge.checks import find_absent, list_sentences
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.output import cut_at_stop
from blockstep.conformance.judge.properties.property_check import judge
from blockstep.conformance.protocol.features import load_parts
from blockstep.conformance.protocol.findings import Difference, Finding, violated
from blockstep.spec import vocabulary as v

Expected = tuple[v.TokenIds, tuple[v.FinishReason, v.TokenId | None] | None]
"""Tokens to deliver, and the reason and stop token with which they end a request, if they do."""


JudgePlan: TypeAlias = Callable[
    [v.Config, Mapping[v.RequestId, v.Request], v.Plan], Iterable[Finding]
]
"""Check of a plan for unfinished requests: `judge_plan` in the module `properties` of a feature."""


def judge_answer(
    config: v.Config,
    live: Mapping[v.RequestId, v.Request],
    delivered: Mapping[v.RequestId, v.TokenIds],
    event: v.Event,
    seen: v.Observation,
    dropped: Container[tuple[v.FrameId, v.RequestId]] = (),
    failing: Collection[v.RequestId] = (),
    doubtful: Container[v.RequestId] = (),
    ending: Collection[v.RequestId] = (),
) -> Iterator[Finding]:
    """Yield the findings about an answer of the right kind.

    `live`: unfinished requests, and `delivered`: the tokens delivered to them, before the event.
    `dropped`: rows of frames in flight that sample for an input of a session that is over.
    `failing`: requests whose load fails by this event; `doubtful`: requests whose load may fail by
    it. `ending`: requests whose abort was answered already; the next plan ends them.
    """
    match event, seen:
        case v.Schedule(), v.Plan() as plan:
            yield from _judge_plan(config, live, delivered, plan)
        case v.Commit(), v.Outputs(rows=rows):
            due = dict(_expected_outputs(config, live, delivered, event))
            over = [name for name in due if (event.frame_id, name) in dropped]
            due = {name: due[name] for name in due if name not in (*over, *failing)}
            due |= _expected_errors(config, failing)
            yield from _judge_outputs(due, [row for row in rows if not _is_error_of(row, doubtful)])
        case v.TransfersReported(), v.Outputs(rows=rows):
            sure = [row for row in rows if not _is_error_of(row, doubtful)]
            yield from _judge_outputs(_expected_errors(config, failing), sure)
        case v.Abort(request_ids=named), v.Aborted(request_ids=now, ending_req_ids=later):
            for problem in _list_wrong_ends(set(named) & live.keys(), now, later, ending):
                yield violated("P18", "abort_finishes_exactly_the_named_requests", problem)


def _list_wrong_ends(
    due: Collection[v.RequestId],
    now: Sequence[v.RequestId],
    later: Sequence[v.RequestId],
    ending: Collection[v.RequestId],
) -> Iterator[str]:
    """Yield what is wrong with an answer to an abort that names `due` of the unfinished
    requests."""
    answered = [*dict.fromkeys(now), *dict.fromkeys(later)]
    for name in sorted(set(due) - set(answered)):
        if name in ending:
            yield (
                f"{name!r} is left out: its abort is pending, so name it in ending_req_ids until a "
                "plan has ended it, or in request_ids if it has ended now"
            )
        else:
            yield f"{name!r} is unfinished and was named, and the answer does not end it"
    for name in sorted(set(answered) - set(due)):
        yield f"{name!r} is ended by the answer, and is finished or was not named"
    for name in sorted({name for name in answered if answered.count(name) > 1}):
        yield f"{name!r} is both in request_ids and in ending_req_ids: it ends now, or later"


def _judge_plan(
    config: v.Config,
    live: Mapping[v.RequestId, v.Request],
    delivered: Mapping[v.RequestId, v.TokenIds],
    plan: v.Plan,
) -> Iterator[Finding]:
    """P9, and that the rows of a plan are of unfinished requests."""
    rows = plan.rows
    total, limit = plan.total_num_scheduled_tokens, config.max_num_batched_tokens
    if total > limit:
        what = f"{total} tokens planned, {limit} allowed"
        yield violated("P9", "plan_stays_within_token_budget", what)
    if len(rows) > config.max_num_seqs:
        what = f"{len(rows)} rows planned, {config.max_num_seqs} allowed"
        yield violated("P9", "plan_stays_within_max_num_seqs", what)
    names = [row.request_id for row in rows]
    for judge_plan in _list_judges_of_plans():
        yield from judge_plan(config, live, plan)
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield violated(
            "P26", "request_has_one_row", f"{name!r} has {names.count(name)} rows", subjects=name
        )
    for row in rows:
        name, end = row.request_id, row.num_computed_tokens + row.num_scheduled_tokens
        if name not in live:
            yield violated(
                "P26", "row_is_of_an_unfinished_request", f"{name!r} has ended", subjects=name
            )
        elif isinstance(row, v.NewRow):
            yield from _judge_new_row(config, row, live[name], delivered.get(name))
        if end > config.max_model_len:
            what = f"{name!r} runs {end} tokens, the model takes {config.max_model_len}"
            yield violated("P9", "row_stays_within_max_model_len", what, subjects=name)


@cache
def _list_judges_of_plans() -> tuple[JudgePlan, ...]:
    """Return the checks of features that need a plan and the unfinished requests."""
    modules = load_parts("properties").values()
    return tuple([it.judge_plan for it in modules if hasattr(it, "judge_plan")])


def _judge_new_row(
    config: v.Config, row: v.NewRow, request: v.Request, outputs: v.TokenIds | None
) -> Iterator[Finding]:
    """P26 the row has the request as submitted, P5 it has no hit that it must not have.

    `outputs` are those of a branch, which shares computed tokens; None for other requests.
    """
    if row.request != request:
        what = f"{row.request_id!r} is not the request that was submitted"
        yield violated(
            "P26", "new_row_carries_the_request_as_submitted", what, subjects=row.request_id
        )
    if row.output_token_ids != (outputs or ()):
        difference = Difference("output_token_ids", str(outputs or ()), str(row.output_token_ids))
        what = f"{row.request_id!r} has other outputs than it began with"
        yield violated(
            "P26",
            "new_row_carries_the_request_as_submitted",
            what,
            difference,
            subjects=row.request_id,
        )
    has_any = config.enable_prefix_caching or config.kv_connector  # a load counts as a hit, too
    may_hit = (has_any and not request.skip_reading_prefix_cache) or outputs is not None
    if row.num_computed_tokens and not may_hit and not request.resumable:
        what = f"{row.request_id!r} has a hit of {row.num_computed_tokens} tokens"
        yield violated("P5", "hit_only_with_prefix_caching", what, subjects=row.request_id)


def _expected_errors(
    config: v.Config, failing: Collection[v.RequestId]
) -> dict[v.RequestId, Expected]:
    """The expected rows of requests whose load failed, if the policy is to end them."""
    ends = config.kv_load_failure_policy is v.KVLoadFailurePolicy.FAIL
    return dict.fromkeys(failing if ends else (), ((), (v.FinishReason.ERROR, None)))


def _is_error_of(row: v.OutputRow, doubtful: Container[v.RequestId]) -> bool:
    return row.finish_reason is v.FinishReason.ERROR and row.request_id in doubtful


def _judge_outputs(
    expected: Mapping[v.RequestId, Expected], rows: Sequence[v.OutputRow]
) -> Iterator[Finding]:
    """P13: each unfinished request of the frame gets the tokens that it sampled, up to its stop."""
    names = [row.request_id for row in rows]
    if sorted(names) != sorted(expected):
        difference = Difference("rows", str(sorted(expected)), str(sorted(names)))
        what = "outputs are not of exactly the requests that sampled"
        yield violated("P13", "delivered_rows_are_those_that_sampled", what, difference)
    for row in rows:
        name = row.request_id
        if name not in expected:
            continue
        tokens, stop = expected[name]
        if row.new_token_ids != tokens:
            difference = Difference("new_token_ids", str(tokens), str(row.new_token_ids))
            what = f"{name!r} was delivered the wrong tokens"
            yield violated(
                "P13",
                "delivered_tokens_are_the_sampled_ones_until_the_stop",
                what,
                difference,
                subjects=name,
            )
        seen = None if row.finish_reason is None else (row.finish_reason, row.stop_token_id)
        if seen != stop:
            difference = Difference("finish_reason", _describe_stop(stop), _describe_stop(seen))
            what = f"{name!r} after {tokens}"
            yield violated(
                "P13", "finish_reason_is_the_one_that_holds", what, difference, subjects=name
            )


def _expected_outputs(
    config: v.Config,
    live: Mapping[v.RequestId, v.Request],
    delivered: Mapping[v.RequestId, v.TokenIds],
    event: v.Commit,
) -> Iterator[tuple[v.RequestId, Expected]]:
    for row in event.sampled:
        request = live.get(row.request_id)
        if request is not None and row.token_ids:
            before = list(delivered.get(row.request_id, ()))
            yield row.request_id, cut_at_stop(config, request, before, row.token_ids)


def judge_state(step: Step, history: History) -> list[Finding]:
    """Return the findings of the property checks `JUDGED` and of `_judge_computed` on a state."""
    kind: type = type(step.event)
    sentences = list_sentences(kind, False, history.lacked, find_absent(step), needs_none=True)
    return [*judge(sentences, step, history), *_judge_computed(step)]


def _judge_computed(step: Step) -> Iterator[Finding]:
    """P12: a request without blocks has no computed tokens, whatever tokens are still delivered."""
    for request in step.after.requests:
        held = zip(request.block_tables, step.groups, strict=False)
        slots = min(
            [len(table) * group.block_size for table, group in held if not is_across(group)],
            default=step.config.max_model_len,
        )
        if not 0 <= request.num_computed_tokens <= slots:
            seen = str(request.num_computed_tokens)
            difference = Difference("num_computed_tokens", f"0 to {slots}", seen)
            what = f"{request.request_id!r} has {seen} tokens computed, and {slots} slots"
            yield violated(
                "P12",
                "computed_tokens_are_in_blocks_that_are_held",
                what,
                difference,
                subjects=request.request_id,
            )


def _describe_stop(stop: tuple[v.FinishReason, v.TokenId | None] | None) -> str:
    reason, token = stop or (None, None)
    return str(reason) if token is None else f"{reason} by token {token}"
