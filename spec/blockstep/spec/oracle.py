"""Oracle: the specification as an object, for those who want answers rather than states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blockstep.spec.profiles import STRICT, Profile
from blockstep.spec.snapshots import get_snapshot
from blockstep.spec.state import State, initial_state
from blockstep.spec.transition import transition
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    Event,
    Observation,
    Outputs,
    Plan,
    Rejected,
    Request,
    RequestId,
    RowTokens,
    Schedule,
    Snapshot,
    Submit,
)


class RejectedEvent(Exception):
    """The specification refused an event; its state has not changed."""

    def __init__(self, rejected: Rejected) -> None:
        self.rejected = rejected
        super().__init__(f"{rejected.code}: {rejected.detail}")


class Oracle:
    """A scheduler that is right by definition; deterministic, without clock or randomness.

    Raises:
        ConfigError: from the constructor, if the config breaks a rule.
        RejectedEvent: from every method but `apply`, if the event is refused.
    """

    def __init__(self, config: Config, profile: Profile = STRICT) -> None:
        self.state: State = initial_state(config, profile)
        """The state now: an immutable value, to keep, compare or go back to."""

    def apply(self, event: Event) -> Observation:
        """Take one event; a refusal is an answer (`Rejected`) and changes nothing."""
        result = transition(self.state, event)
        if isinstance(result, Rejected):
            return result
        self.state = result.state
        return result.observation

    def submit(self, request: Request) -> None:
        """Take a request in."""
        self._accepted(Submit(request))

    def schedule(self) -> Plan:
        """Plan the next step."""
        plan = self._accepted(Schedule())
        assert isinstance(plan, Plan), "Schedule is answered with a Plan"
        return plan

    def commit(self, plan: Plan, sampled: Mapping[RequestId, Iterable[int]]) -> Outputs:
        """Answer `plan`: the tokens sampled per request; requests left out sampled none."""
        rows = tuple(
            RowTokens(row.request_id, tuple(sampled.get(row.request_id, ()))) for row in plan.rows
        )
        outputs = self._accepted(Commit(plan.frame_id, rows))
        assert isinstance(outputs, Outputs), "Commit is answered with Outputs"
        return outputs

    def abort(self, *request_ids: RequestId) -> None:
        """End requests."""
        self._accepted(Abort(request_ids))

    def snapshot(self) -> Snapshot:
        """The state in the form that engines are compared in."""
        return get_snapshot(self.state)

    def _accepted(self, event: Event) -> Observation:
        observation = self.apply(event)
        if isinstance(observation, Rejected):
            raise RejectedEvent(observation)
        return observation
