"""Oracle: the specification as an object, for use without handling states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from blockstep.spec import vocabulary as v
from blockstep.spec.core.block_pool import get_num_free_blocks
from blockstep.spec.core.prefix_cache import get_keyed, get_prefix_hit
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.profiles import STRICT, Profile, initial_state
from blockstep.spec.snapshots import get_snapshot
from blockstep.spec.transition import transition

Answer = TypeVar("Answer")


class RejectedEvent(Exception):
    """The specification rejected an event; its state has not changed."""

    def __init__(self, rejected: v.Rejected) -> None:
        self.rejected = rejected
        super().__init__(f"{rejected.code}: {rejected.detail}")


class Oracle:
    """A scheduler that is right by definition; deterministic, without clock or randomness.

    It has one method for each event, and queries that change nothing.

    Raises:
        ConfigError: from the constructor, if the config breaks a rule.
        RejectedEvent: from every method but `apply`, if the event is rejected.
    """

    def __init__(self, config: v.Config, profile: Profile = STRICT) -> None:
        self.state: State = initial_state(config, profile)
        """The present state: an immutable value, to keep, compare or return to."""

    # Events.

    def apply(self, event: v.Event) -> v.Observation:
        """Apply one event; a rejection is returned (`Rejected`) and changes nothing."""
        result = transition(self.state, event)
        if isinstance(result, v.Rejected):
            return result
        self.state = result.state
        return result.observation

    def submit(self, request: v.Request) -> None:
        """Submit a request."""
        self._accepted(v.Submit(request), v.Ack)

    def schedule(self) -> v.Plan:
        """Plan the next step; return the plan."""
        return self._accepted(v.Schedule(), v.Plan)

    def commit(
        self,
        plan: v.Plan,
        sampled: Mapping[v.RequestId, Iterable[int]],
        transfers: v.KVTransfers = v.NO_TRANSFERS,
    ) -> v.Outputs:
        """Commit `plan` with the tokens sampled per request; requests left out sampled none."""
        rows = tuple(
            v.RowTokens(row.request_id, tuple(sampled.get(row.request_id, ()))) for row in plan.rows
        )
        return self._accepted(v.Commit(plan.frame_id, rows, transfers), v.Outputs)

    def propose(self, drafts: Mapping[v.RequestId, Iterable[int]]) -> tuple[v.RequestId, ...]:
        """Send draft tokens per request; return the requests whose drafts were stored."""
        rows = tuple(v.RowTokens(name, tuple(tokens)) for name, tokens in drafts.items())
        return self._accepted(v.Drafts(rows), v.DraftsTaken).request_ids

    def abort(self, *request_ids: v.RequestId) -> tuple[v.RequestId, ...]:
        """Abort requests; return those that were unfinished."""
        return self._accepted(v.Abort(request_ids), v.Aborted).request_ids

    def grammar_ready(self, request_id: v.RequestId) -> None:
        """Report that the grammar of a request is compiled."""
        self._accepted(v.GrammarReady(request_id), v.Ack)

    def update(self, request: v.Request) -> tuple[v.RequestId, ...]:
        """Continue a session, or end it if `request` is not resumable; return the ids that
        finished."""
        answer = self._accepted(v.StreamingUpdate(request), object)
        return answer.request_ids if isinstance(answer, v.Aborted) else ()

    def grammar_failed(self, request_id: v.RequestId) -> v.Outputs:
        """Report that the grammar of a request cannot be compiled; it finishes."""
        return self._accepted(v.GrammarFailed(request_id), v.Outputs)

    def mask(
        self, plan: v.Plan, drafts: Mapping[v.RequestId, Iterable[int]] | None = None
    ) -> tuple[v.GrammarRow, ...]:
        """Return the mask of `plan`; `drafts` are those that only the worker knows."""
        rows = tuple(v.RowTokens(name, tuple(tokens)) for name, tokens in (drafts or {}).items())
        return self._accepted(v.GrammarBitmask(plan.frame_id, rows), v.GrammarOutput).rows

    def pause(self, pause_state: v.PauseState = v.PauseState.PAUSED_ALL) -> None:
        """Set what the next step may schedule."""
        self._accepted(v.SetPause(pause_state), v.Ack)

    def resume(self) -> None:
        """Let the next step schedule all requests again."""
        self.pause(v.PauseState.UNPAUSED)

    def reset(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache; return False, with nothing changed, if blocks were held."""
        event = v.Reset(reset_running_requests, reset_connector)
        return self._accepted(event, v.ResetDone).success

    def reset_encoder(self) -> None:
        """Forget every encoded item."""
        self._accepted(v.EncoderReset(), v.Ack)

    def offer(self, *identifiers: str) -> None:
        """Set the encoded items that a connector has."""
        self._accepted(v.EncoderOffer(identifiers), v.Ack)

    def offer_kv(
        self,
        request_id: v.RequestId,
        num_tokens: int | None,
        is_async: bool = False,
        delays_free: bool = False,
    ) -> None:
        """Set the store's answer about a request: see `KVOffer`."""
        self._accepted(v.KVOffer(request_id, num_tokens, is_async, delays_free), v.Ack)

    def report(
        self,
        finished_recving: Iterable[v.RequestId] = (),
        finished_sending: Iterable[v.RequestId] = (),
        invalid_block_ids: Iterable[v.BlockId] = (),
    ) -> v.Outputs:
        """Report transfers without a model output; return the outputs of requests that finish by
        it."""
        transfers = v.KVTransfers(
            tuple(finished_recving), tuple(finished_sending), tuple(invalid_block_ids)
        )
        return self._accepted(v.TransfersReported(transfers), v.Outputs)

    def set_time(self, now: int) -> None:
        """Set the time to `now`, in ticks."""
        self._accepted(v.Clock(now), v.Ack)

    def estimate(self, job_id: str, ttl: int) -> None:
        """Set for how many ticks blocks of a job are pinned between its turns."""
        self._accepted(v.PinEstimate(job_id, ttl), v.Ack)

    def _accepted(self, event: v.Event, kind: type[Answer]) -> Answer:
        answer = self.apply(event)
        if isinstance(answer, v.Rejected):
            raise RejectedEvent(answer)
        assert isinstance(answer, kind), f"{event} is observed by {kind.__name__}"
        return answer

    # Queries.

    def peek(self, request: v.Request) -> int:
        """Return the tokens that this request would hit in the prefix cache if it were admitted
        now.

        Nothing changes: it need not be submitted, and no block is touched.
        """
        problem = v.event_problem(v.Submit(request)) or v.item_problem(self.state.config, request)
        if problem is not None:
            raise RejectedEvent(problem)
        config, rules = self.state.config, self.state.rules
        entry = get_keyed(config, RequestState(request, v.Status.WAITING), rules)
        return get_prefix_hit(config, self.state.pool, entry, rules).num_tokens

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self.state.running)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, including skipped ones."""
        return len(self.state.waiting) + len(self.state.skipped_waiting)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that could be allocated, evicting their content."""
        return get_num_free_blocks(self.state.pool)

    def snapshot(self) -> v.Snapshot:
        """Return the state in the form in which engines are compared."""
        return get_snapshot(self.state)
