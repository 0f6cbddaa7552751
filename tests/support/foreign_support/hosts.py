"""Our engine, held to weaker equivalences than it could be, and engines that drop tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockstep.conformance.engine import EngineTraits, Renamed, Safety, SamePlans
from blockstep.conformance.protocol.changed_spec import ChangedSpec
from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.core.async_ import is_held_by_frames
from blockstep.spec.core.commit import get_rows_committed
from blockstep.spec.core.endings import get_extended
from blockstep.spec.core.preemption import process_making_room, process_preemption
from blockstep.spec.core.prefix_cache import get_keyed
from blockstep.spec.core.requests import Frame, RequestState, list_rows_in_flight
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.structured_output import drop_row
from blockstep.spec.releases.quirk import Change


class AtSafety(HostEngine):
    """The host engine, held to properties alone."""

    traits = EngineTraits(equivalence=Safety())


class AtRenamed(HostEngine):
    """The host engine, compared up to the ids of blocks."""

    traits = EngineTraits(equivalence=Renamed())


class AtPlan(HostEngine):
    """The host engine, compared by its plans."""

    traits = EngineTraits(equivalence=SamePlans(shows_blocks=True))


def drop_in_flight(rules: Rules, _config: v.Config) -> Rules:
    """Drop the tokens in flight of a preempted request; their positions run again.

    A request that runs alone is not preempted before its tokens are known: it would drop them each
    time that the pool is exhausted, and never finish.
    """

    def preempt(step: Step, victim_index: int) -> v.RequestId:
        name = rules[process_preemption](step, victim_index)
        frames = tuple([drop_row(frame, name) for frame in step.state.frames])
        step.state = replace(step.state, frames=frames)
        step.requests[name] = replace(step.requests[name], num_output_placeholders=0)
        return name

    def make_room(step: Step, index: int, victim_index: int) -> int:
        rows = list_rows_in_flight(step.state.frames, step.running[victim_index])
        if len(step.running) == 1 and any(row.samples for row in rows):
            step.awaits_answer = True
            return index
        return rules[process_making_room](step, index, victim_index)

    changed = rules.replacing(process_preemption, preempt)
    return changed.replacing(process_making_room, make_room)


class DropsInFlight(ChangedSpec):
    """An engine that drops the tokens in flight of a preempted request and runs it again."""

    traits = EngineTraits(equivalence=Safety(), drops_tokens_in_flight=True)
    change: Change = staticmethod(drop_in_flight)


class DropsAndDoesNotDeclare(DropsInFlight):
    """The same, with traits that do not declare it."""

    traits = EngineTraits(equivalence=Safety())


class DeclaresAndDoesNotDrop(HostEngine):
    """It delivers the tokens of preempted requests, and its traits declare that it drops them."""

    traits = DropsInFlight.traits


def drop_for_good(rules: Rules, config: v.Config) -> Rules:
    """Keep a dropped token with the commit of its frame, and do not deliver it."""

    def commit(
        state: State, frame: Frame, sampled: Mapping[v.RequestId, v.TokenIds]
    ) -> tuple[State, list[v.OutputRow]]:
        requests = state.requests
        for row in frame.rows:
            request, tokens = requests.get(row.request_id), sampled[row.request_id][:1]
            if request is not None and row.is_dropped and tokens:
                request, _ = rules[get_extended](request, tokens, config.max_model_len, state.rules)
                request = get_keyed(config, request, state.rules)
                requests = requests.having(row.request_id, request)
        return rules[get_rows_committed](replace(state, requests=requests), frame, sampled)

    def is_held(frames: Sequence[Frame], request: RequestState) -> bool:
        return any(row.request_id == request.request_id for one in frames for row in one.rows)

    changed = drop_in_flight(rules, config).replacing(get_rows_committed, commit)
    return changed.replacing(is_held_by_frames, is_held)


class DropsForGood(DropsInFlight):
    """A defect: a dropped token is never delivered, and its position does not run again."""

    change: Change = staticmethod(drop_for_good)
