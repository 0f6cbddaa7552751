"""Witnesses: the coverage goals that a run reached, without which its pass counts for less (D9).

Each goal has a name and one line, next to the code that counts it. Goals are counted from steps and
the ledger only, like the property checks; counts of several runs or processes add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.judge.witnesses import core
from blockstep.conformance.protocol.features import is_off, load_parts
from blockstep.spec import vocabulary as v

REFUSALS = {f"rejected_{code}": f"an event was refused as {code}" for code in v.RejectCode}
OF_FEATURES: Mapping[str, Goals] = {
    name: module.GOALS for name, module in load_parts("goals").items()
}
WITNESSES: Mapping[str, str] = {
    **(core.ADMISSION | core.PLANS | core.PREEMPTION | core.COMMITS | core.SIGNALS | core.FRAMES),
    **{name: text for goals in OF_FEATURES.values() for name, text in goals.texts.items()},
    **REFUSALS,
}
"""All goals by name, with what they mean."""


def situations(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals that a step reaches, each as often as it does.

    `ledger` knows all steps before it.
    """
    event, observation, config = step.event, step.observation, step.config
    if isinstance(observation, v.Rejected):
        yield f"rejected_{observation.code}"
        if observation.code is v.RejectCode.PIPELINE_FULL and config.async_scheduling:
            yield "rejected_pipeline_full_async"
    elif isinstance(event, v.Schedule):
        yield from _of_schedule(step, ledger)
    elif isinstance(observation, v.Outputs) and isinstance(event, v.Commit):
        yield from core.of_commit(step, ledger, observation.rows)
    else:
        yield from _of_signal(step, ledger)
    for goals in _list_goals(ledger.lacked):
        yield from goals.find(step, ledger)


@cache
def _list_goals(lacked: frozenset[str]) -> tuple[Goals, ...]:
    """Return the goals of the features that a config does not switch off."""
    return tuple([goals for name, goals in OF_FEATURES.items() if not is_off(name, lacked)])


def _of_schedule(step: Step, ledger: Ledger) -> Iterator[str]:
    config = step.config
    yield from core.of_plan(step, ledger)
    for row in step.rows:
        yield from core.of_row(step, ledger.lives[row.request_id], row)
    for row in step.admitted_rows:
        yield from core.of_admission(step, ledger, row)
    yield from core.of_waiting(step, ledger)
    if step.plan.preempted_req_ids:
        yield from core.of_preemption(step, ledger)
    if config.max_frames_in_flight > 1:
        yield from core.of_frames(step, ledger)


def _of_signal(step: Step, ledger: Ledger) -> Iterator[str]:
    match step.event, step.observation:
        case v.Submit(request=request), _:
            if request.request_id in ledger.ended:
                yield "id_used_again"
        case v.Drafts(), v.DraftsTaken():
            yield from core.of_drafts(step, ledger)
        case v.GrammarReady(request_id=request_id), _:
            if ledger.lives[request_id].grammar_ready:
                yield "grammar_ready_twice"
        case v.Abort(), v.Aborted():
            yield from core.of_abort(step, ledger)
        case v.Reset(), v.ResetDone(success=success):
            yield from core.of_reset(step, ledger, success)
