"""Grammars: P23 the grammar state follows from the outputs, and a plan says whether it needs a
bitmask.

The worker judges bitmasks, with automata of its own.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.judge.grammar_automaton import Automaton
from blockstep.conformance.judge.properties.history import WHOLE, History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import (
    Complaints,
    differing,
    differing_requests,
    sentence,
    unequal,
)
from blockstep.spec import vocabulary as v


@sentence("P23", v.Schedule, v.Commit, v.Drafts, v.GrammarBitmask, v.Reset, needs=WHOLE)
def grammar_state_follows_outputs(step: Step, history: History) -> Complaints:
    """The state of a grammar follows from the delivered tokens, whatever else happened: drafts,
    rejections, preemptions, resets.

    So does the flag that reasoning has ended, where the grammar waits for that.
    """
    if not history.has_grammars:
        return
    delivered = step.delivered if isinstance(step.event, v.Commit) else {}
    for name, request in step.new.items():
        life = history.lives.get(name)
        if life is None:
            continue
        place, due, automaton = life.find_place(delivered.get(name, ())), (0, False), life.automaton
        after = history.get_request_after(step, name)
        if automaton is not None and after is not life.request:  # an input restarts it
            automaton = Automaton(history.config, after)
            place = automaton.read(())
        if place is not None and automaton is not None:
            due = (place.state, automaton.is_reasoning_over(place))
        seen = (request.grammar_state, request.reasoning_ended)
        if seen != due:
            what = f"the grammar of {name!r} is not where its outputs led it"
            yield unequal(what, "grammar_state, reasoning_ended", due, seen, subjects=name)


@sentence("P23", v.Schedule)
def plan_flags_structured_output(step: Step, history: History) -> Complaints:
    """A plan says whether a row samples under a grammar, and whether older frames have tokens of
    such a row in flight, for which its bitmask must wait."""
    plan = step.plan
    if not (
        history.has_grammars
        or plan.has_structured_output_requests
        or plan.pending_structured_output_tokens
    ):
        return
    masked = [
        row
        for row in (step.rows if history.has_grammars else ())
        if history.lives[row.request_id].automaton is not None and history.flight_row(row).samples
    ]
    if plan.has_structured_output_requests != bool(masked):
        yield from differing(
            "has_structured_output_requests", bool(masked), plan.has_structured_output_requests
        )
    waits = any(history.placeholders(row.request_id) for row in masked)
    if plan.pending_structured_output_tokens != waits:
        yield from differing(
            "pending_structured_output_tokens", waits, plan.pending_structured_output_tokens
        )


@sentence("P23", v.GrammarFailed)
def failed_grammar_ends_its_request(step: Step, _history: History) -> Complaints:
    """A request whose grammar failed ends with an error and without a token, and no other request
    does."""
    assert isinstance(step.event, v.GrammarFailed)
    name = step.event.request_id
    # Another check compares the cached tokens.
    seen = tuple(replace(row, num_cached_tokens=0) for row in step.output_rows)
    yield from differing_requests("rows", (v.OutputRow(name, (), v.FinishReason.ERROR),), seen)
    yield from differing_requests("unfinished", sorted(step.old.keys() - {name}), sorted(step.new))
